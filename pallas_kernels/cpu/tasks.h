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

// Runs fn(0), ..., fn(count - 1), in any order, and returns when all have ended. fn must not throw.
//
// The calling thread takes tasks like the others, and waits only for those that have begun. A pool's threads may all be
// calls that wait like this one; then each call does its own tasks. A call that waited for tasks that are only scheduled
// would never end.
//
// Pool: has `num_threads()` and `Schedule(callable)`.
template <typename Pool, typename F>
void parallel_for(Pool& pool, int64_t count, const F& fn) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) fn(i);
    return;
  }
  auto shared = std::make_shared<Shared>();  // a thread may begin when the call has returned
  const F* call = &fn;                       // which is read only by who took a task, while the call waits
  auto work = [count, call](Shared& shared) {
    for (int64_t i; (i = shared.next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      (*call)(i);
      shared.done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([shared, work] { work(*shared); });
  work(*shared);
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins < 4096) {
      relax();
    } else {
      std::this_thread::yield();  // the thread of a task may need this processor
    }
  }
}

// Runs fn(begin, end) for ranges that together are [0, count), in any order, as `parallel_for`.
//
// Each is a share of what is left, `least` at the smallest: large ones first, which read memory in long runs, small ones
// at last, so that all threads end together. So fn must compute the same however it is divided.
template <typename Pool, typename F>
void parallel_ranges(Pool& pool, int64_t count, int64_t least, const F& fn) {
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  std::vector<int64_t> ends;
  for (int64_t begin = 0; begin < count; begin = ends.back()) {
    const int64_t share = threads == 1 ? count : std::max((count - begin) / (2 * threads), least);
    ends.push_back(std::min(begin + share, count));
  }
  parallel_for(pool, static_cast<int64_t>(ends.size()), [&](int64_t i) { fn(i ? ends[i - 1] : 0, ends[i]); });
}

}  // namespace jaxinfer
