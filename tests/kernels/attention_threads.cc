// Runs attention on 1, 2 and 7 threads, over random calls, and compares all bits. For sanitizers: no array is larger
// than it must be, and what no query sees is NaN.

#include "attention/cpu/attention.h"

#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace {

using jaxinfer::bfloat16;
using namespace jaxinfer::attention;

class Threads {
 public:
  explicit Threads(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { work(); });
  }

  ~Threads() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }

  template <typename F>
  void Schedule(F f) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(f));
    }
    changed_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return ended_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool ended_ = false;
  std::vector<std::thread> threads_;
};

struct Shape {
  int64_t batch, tokens, kv_heads, group, head_dim, page_size, width, longest, window;
};

template <typename T>
std::vector<T> numbers(std::mt19937& random, int64_t count) {
  std::vector<T> x(count);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  for (auto& y : x) {
    if constexpr (sizeof(T) == 1) {
      y = static_cast<T>(127 * uniform(random));
    } else {
      y = jaxinfer::from_float<T>(uniform(random));
    }
  }
  return x;
}

// A call, whose arguments depend on the shape alone.
template <typename T, typename C>
class Case {
 public:
  explicit Case(const Shape& shape) : shape_(shape), random_(42) {
    const int64_t pages = shape.batch * shape.width;
    k_ = numbers<C>(random_, pages * shape.page_size * shape.kv_heads * shape.head_dim);
    v_ = numbers<C>(random_, k_.size());
    scales_ = std::vector<float>(sizeof(C) == 1 ? 2 * pages * shape.kv_heads : 0, 0.01f);
    qkv_ = numbers<T>(random_, shape.batch * shape.tokens * shape.kv_heads * (shape.group + 2) * shape.head_dim);
    table_.resize(pages);
    for (int64_t i = 0; i < pages; ++i) table_[i] = static_cast<int32_t>(i);
    std::shuffle(table_.begin(), table_.end(), random_);
    for (int64_t row = 0; row < shape.batch; ++row) {
      const int64_t first = random_() % shape.longest;
      for (int64_t t = 0; t < shape.tokens; ++t) {
        const bool padding = row % 3 == 1 && t >= shape.tokens / 2;
        positions_.push_back(padding ? -1 : static_cast<int32_t>(first + t));
      }
    }
    half_ = shape.head_dim / 4;
    angles_ = numbers<float>(random_, shape.batch * shape.tokens * half_);
    norm_ = numbers<float>(random_, shape.head_dim);
    slopes_ = numbers<float>(random_, shape.kv_heads * shape.group);
    if constexpr (sizeof(C) > 1) clear_unseen();
  }

  // Returns the results and the cache after them.
  std::vector<T> run(int threads) {
    Threads pool(threads);
    std::vector<T> result(shape_.batch * shape_.tokens * shape_.kv_heads * shape_.group * shape_.head_dim);
    const bool scaled = !scales_.empty();
    float* k_scale = scaled ? scales_.data() : nullptr;
    float* v_scale = scaled ? scales_.data() + scales_.size() / 2 : nullptr;
    const int64_t pages = shape_.batch * shape_.width;
    const Pages<C> cache{{pages, shape_.page_size, shape_.kv_heads, shape_.head_dim, k_scale, v_scale},
                         k_.data(),
                         v_.data()};
    const Positions rows{positions_.data(), table_.data(), shape_.batch, shape_.tokens, shape_.width};
    const HeadOptions head{norm_.data(), norm_.data(), 1e-6f, angles_.data(), angles_.data(), half_};
    const Heads heads{qkv_.data(), sizeof(T) == 2, shape_.kv_heads, shape_.group + 2, shape_.head_dim, head};
    store_all(pool, heads, cache, rows);
    PagedAttention<C>(heads, shape_.group, cache, rows, {0.1f, shape_.window, 20.0f, slopes_.data()}, result.data())
        .run(pool);
    return result;
  }

  const std::vector<C>& keys() const { return k_; }

 private:
  // Slots after each row's last token become NaN.
  void clear_unseen() {
    const int64_t stride = shape_.kv_heads * shape_.head_dim;
    for (int64_t row = 0; row < shape_.batch; ++row) {
      const auto* first = &positions_[row * shape_.tokens];
      const int64_t last = *std::max_element(first, first + shape_.tokens);
      for (int64_t position = last + 1; position < shape_.width * shape_.page_size; ++position) {
        const int64_t page = table_[row * shape_.width + position / shape_.page_size];
        const int64_t slot = page * shape_.page_size + position % shape_.page_size;
        for (auto* x : {&k_, &v_}) {
          std::fill(x->begin() + slot * stride, x->begin() + (slot + 1) * stride, jaxinfer::from_float<C>(NAN));
        }
      }
    }
  }

  Shape shape_;
  std::mt19937 random_;
  std::vector<C> k_, v_;
  std::vector<T> qkv_;
  std::vector<float> scales_, angles_, norm_, slopes_;
  std::vector<int32_t> table_, positions_;
  int64_t half_;
};

template <typename T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <typename T, typename C>
bool check(const Shape& shape) {
  Case<T, C> first(shape);
  const std::vector<T> expected = first.run(1);
  for (const T& x : expected) {
    if (!std::isfinite(jaxinfer::to_float(x))) return false;
  }
  for (int threads : {2, 7}) {
    Case<T, C> again(shape);
    if (!same(again.run(threads), expected) || !same(again.keys(), first.keys())) return false;
  }
  return true;
}

}  // namespace

int main() {
  const Shape shapes[] = {
      {1, 1, 1, 1, 8, 16, 3, 40, 0},       // few of everything
      {1, 1, 4, 4, 64, 16, 300, 4700, 0},  // many splits
      {5, 3, 3, 7, 20, 7, 31, 200, 50},    // odd sizes and a window
      {3, 1, 2, 1, 48, 16, 140, 2200, 5},  // a window inside of a page
      {2, 70, 2, 3, 32, 16, 20, 200, 0},   // a chunk
      {4, 8, 2, 9, 36, 1, 150, 120, 100},  // pages of one token
  };
  for (const Shape& shape : shapes) {
    const bool right = check<float, float>(shape) && check<bfloat16, bfloat16>(shape) &&
                       check<float, bfloat16>(shape) && check<float, int8_t>(shape) && check<bfloat16, int8_t>(shape);
    if (!right) {
      std::printf("results differ: head_dim %d\n", static_cast<int>(shape.head_dim));
      return 1;
    }
  }
  std::printf("right\n");
}
