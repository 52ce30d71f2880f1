// Memory that a call or a task needs for a while.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace jaxinfer {

// Blocks that this thread has given back, for its next calls, which need the same ones: malloc would take some percent
// of a decode step.
class Blocks {
 public:
  static Blocks& of_thread() {
    static thread_local Blocks blocks;
    return blocks;
  }
  ~Blocks() {
    for (auto& same : kept_) {
      while (same.count > 0) free(same.blocks[--same.count]);
    }
  }

  // Returns a block of so many bytes, which begins with a cache line; its contents are arbitrary.
  void* take(size_t bytes) {
    const int size = log2_of(bytes);
    if (size >= kSizes) return ::operator new(bytes, kLine);
    auto& same = kept_[size];
    return same.count > 0 ? same.blocks[--same.count] : ::operator new(size_t{1} << size, kLine);
  }
  void give_back(void* block, size_t bytes) {
    const int size = log2_of(bytes);
    if (size >= kSizes || kept_[size].count == kEach) return free(block);
    kept_[size].blocks[kept_[size].count++] = block;
  }

 private:
#if defined(JAXINFER_EXACT_BUFFERS)  // for a sanitizer, which sees what is read behind the end
  static constexpr int kSizes = 1;
#else
  static constexpr int kSizes = 21;  // up to 1 MiB
#endif
  static constexpr int kEach = 4;
  static constexpr std::align_val_t kLine{64};
  struct {
    int count;
    void* blocks[kEach];
  } kept_[kSizes] = {};

  // The least power of two that has so many bytes, and a cache line at least.
  static int log2_of(size_t bytes) { return bytes <= 64 ? 6 : 64 - __builtin_clzll(bytes - 1); }
  static void free(void* block) { ::operator delete(block, kLine); }
};

// An array that begins with a cache line; its contents are arbitrary at first.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size)
      : data_(static_cast<T*>(Blocks::of_thread().take(size * sizeof(T))), GiveBack{size * sizeof(T)}) {}
  T* get() const { return data_.get(); }

 private:
  struct GiveBack {
    size_t bytes = 0;
    void operator()(T* data) const { Blocks::of_thread().give_back(data, bytes); }
  };
  std::unique_ptr<T, GiveBack> data_;
};

}  // namespace jaxinfer
