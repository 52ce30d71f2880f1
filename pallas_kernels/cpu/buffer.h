// Memory that a call or a task needs for a while.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace jaxinfer {

// An array that begins with a cache line; its contents are arbitrary at first.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(static_cast<T*>(::operator new(size * sizeof(T), std::align_val_t(64)))) {}
  T* get() const { return data_.get(); }

 private:
  struct Delete {
    void operator()(T* data) const { ::operator delete(data, std::align_val_t(64)); }
  };
  std::unique_ptr<T, Delete> data_;
};

}  // namespace jaxinfer
