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

  // Returns a block of 2^size_log2 bytes, which begins with a cache line; its contents are arbitrary.
  void* take(int size_log2) {
    if (size_log2 < kSizes && kept_[size_log2].count > 0) return kept_[size_log2].blocks[--kept_[size_log2].count];
    return ::operator new(size_t{1} << size_log2, kLine);
  }
  void give_back(void* block, int size_log2) {
    if (size_log2 >= kSizes || kept_[size_log2].count == kEach) return free(block);
    kept_[size_log2].blocks[kept_[size_log2].count++] = block;
  }

 private:
  static constexpr int kSizes = 21;  // up to 1 MiB
  static constexpr int kEach = 4;
  static constexpr std::align_val_t kLine{64};
  struct {
    int count;
    void* blocks[kEach];
  } kept_[kSizes] = {};

  static void free(void* block) { ::operator delete(block, kLine); }
};

// An array that begins with a cache line; its contents are arbitrary at first.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
#if defined(JAXINFER_EXACT_BUFFERS)  // for a sanitizer, which sees what is read behind the end
  explicit Buffer(int64_t size) : data_(static_cast<T*>(::operator new(size * sizeof(T), std::align_val_t{64}))) {}
#else
  explicit Buffer(int64_t size) : Buffer(size, log2_of(size * sizeof(T))) {}
#endif
  T* get() const { return data_.get(); }

 private:
  struct GiveBack {
    int size_log2 = 0;
    void operator()(T* data) const {
#if defined(JAXINFER_EXACT_BUFFERS)
      ::operator delete(data, std::align_val_t{64});
#else
      Blocks::of_thread().give_back(data, size_log2);
#endif
    }
  };

  Buffer(int64_t, int size_log2)
      : data_(static_cast<T*>(Blocks::of_thread().take(size_log2)), GiveBack{size_log2}) {}

  // The least power of two that has so many bytes.
  static int log2_of(size_t bytes) { return bytes <= 64 ? 6 : 64 - __builtin_clzll(bytes - 1); }

  std::unique_ptr<T, GiveBack> data_;
};

}  // namespace jaxinfer
