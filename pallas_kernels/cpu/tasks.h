// Tasks of one call on the threads of a pool, for XLA's (`xla::ffi::ThreadPool`) and for those of tests.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace jaxinfer {

// Gives the processor to whoever shares it, while a loop waits for nanoseconds.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Ranges that together are [0, count), for a few threads.
//
// Each thread has a share, of which it takes one piece after another from the front: it reads memory in one run. When
// its own is used up, it takes from the back of another's, so that a thread that is late, or never comes, holds up
// nothing but the piece that it has begun.
class Shares {
 public:
  // least: the fewest of a range, except at the end of a share. count: below 2^32.
  Shares(int64_t count, int64_t threads, int64_t least) : least_(least), left_(threads) {
    for (int64_t i = 0; i < threads; ++i) left_[i].range = pack(count * i / threads, count * (i + 1) / threads);
  }

  // Takes a range for a thread, unless nothing is left.
  bool take(int64_t thread, int64_t& begin, int64_t& end) {
    const int64_t threads = static_cast<int64_t>(left_.size());
    for (int64_t i = 0; i < threads; ++i) {
      auto& left = left_[(thread + i) % threads].range;
      for (uint64_t range = left.load(std::memory_order_relaxed); size(range) > 0;) {
        begin = range & kLow, end = range >> 32;
        if (i == 0) {
          end = std::min(begin + std::max(size(range) / kPieces, least_), end);
        } else {
          begin = std::max(end - std::max(size(range) / 2, least_), begin);
        }
        const uint64_t rest = i == 0 ? pack(end, range >> 32) : pack(range & kLow, begin);
        if (left.compare_exchange_weak(range, rest, std::memory_order_relaxed)) return true;
      }
    }
    return false;
  }

 private:
  static constexpr int64_t kPieces = 8;  // of what is left of a share
  static constexpr uint64_t kLow = 0xffffffff;
  struct alignas(64) Left {
    std::atomic<uint64_t> range{0};
  };

  static uint64_t pack(uint64_t begin, uint64_t end) { return begin | end << 32; }
  static int64_t size(uint64_t range) { return static_cast<int64_t>(range >> 32) - static_cast<int64_t>(range & kLow); }

  int64_t least_;
  std::vector<Left> left_;
};

// A function of a range, of any type, by where it is: what runs ranges is compiled once.
struct RangeFunction {
  const void* fn;
  void (*call)(const void* fn, int64_t begin, int64_t end);

  void operator()(int64_t begin, int64_t end) const { call(fn, begin, end); }
};

// What `parallel_ranges` does.
template <typename Pool>
void run_ranges(Pool& pool, int64_t count, int64_t least, RangeFunction fn) {
  struct Shared {
    Shared(int64_t count, int64_t threads, int64_t least) : shares(count, threads, least) {}
    Shares shares;
    std::atomic<int64_t> joined{0}, done{0};
  };
  const int64_t threads = std::min<int64_t>(pool.num_threads(), (count + least - 1) / least);
  if (threads <= 1) {
    if (count > 0) fn(0, count);
    return;
  }
  auto shared = std::make_shared<Shared>(count, threads, least);  // a thread may begin when the call has returned
  auto work = [fn](Shared& shared) {
    const int64_t thread = shared.joined.fetch_add(1, std::memory_order_relaxed);
    for (int64_t begin, end; shared.shares.take(thread, begin, end);) {
      fn(begin, end);  // which is there for as long as there are ranges: the call waits
      shared.done.fetch_add(end - begin, std::memory_order_release);
    }
  };
  for (int64_t i = 1; i < threads; ++i) pool.Schedule([shared, work] { work(*shared); });
  work(*shared);
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins < 4096) {
      relax();
    } else {
      std::this_thread::yield();  // the thread of a range may need this processor
    }
  }
}

// Runs fn(begin, end) for ranges that together are [0, count), in any order, and returns when all have ended. fn must
// not throw, and must compute the same however it is divided; least: the fewest of a range.
//
// The calling thread takes ranges like the others, and waits only for those that have begun. A pool's threads may all be
// calls that wait like this one; then each call does its own work. A call that waited for what is only scheduled would
// never end.
//
// Pool: has `num_threads()` and `Schedule(callable)`.
template <typename Pool, typename F>
void parallel_ranges(Pool& pool, int64_t count, int64_t least, const F& fn) {
  run_ranges(pool, count, least, {&fn, +[](const void* fn, int64_t begin, int64_t end) {
                                    (*static_cast<const F*>(fn))(begin, end);
                                  }});
}

// Runs fn(0), ..., fn(count - 1), as `parallel_ranges`.
template <typename Pool, typename F>
void parallel_for(Pool& pool, int64_t count, const F& fn) {
  parallel_ranges(pool, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) fn(i);
  });
}

}  // namespace jaxinfer
