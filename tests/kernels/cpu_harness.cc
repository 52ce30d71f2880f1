// Runs the CPU kernels without XLA, on pools of 1, 2 and many threads, for sanitizers to watch: buffers are as long as
// what is in them. Results must be right, and the same on every pool.

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "cpu/tasks.h"
#include "delta_rule/cpu/delta_rule.h"
#include "linear/cpu/linear.h"
#include "moe/cpu/expert_mlp.h"

using namespace jaxinfer;

// Threads that take callables from a queue, as XLA's pool does.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  int64_t num_threads() const { return threads_.size(); }
  template <typename F>
  void Schedule(F&& task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.emplace_back(std::forward<F>(task));
    }
    changed_.notify_one();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ended_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::vector<std::thread> threads_;
  std::deque<std::function<void()>> tasks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
};

void check(bool right, const char* what) {
  if (right) return;
  std::printf("wrong: %s\n", what);
  std::exit(1);
}

std::mt19937 generator(0);

template <typename T>
std::vector<T> integers(int64_t size, int low, int high) {
  std::uniform_int_distribution<int> each(low, high);
  std::vector<T> values(size);
  for (auto& value : values) value = static_cast<T>(each(generator));
  return values;
}

template <typename T = float>
std::vector<T> normals(int64_t size, float scale = 1.0f) {
  std::normal_distribution<float> each(0.0f, scale);
  std::vector<T> values(size);
  for (auto& value : values) value = from_float<T>(each(generator));
  return values;
}

template <typename T>
std::vector<char> bytes_of(const std::vector<T>& values) {
  std::vector<char> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// A stack of random matrices: what `Matrix` points to.
struct Stack {
  Format format;
  int64_t outputs, inputs;
  std::vector<char> weight, scale;

  Stack(Format format, int64_t count, int64_t outputs, int64_t inputs)
      : format(format), outputs(outputs), inputs(inputs) {
    const int64_t size = count * outputs * inputs;
    const float typical = 1.0f / std::sqrt(static_cast<float>(inputs));
    switch (format) {
      case Format::kFloat32: weight = bytes_of(normals(size, typical)); break;
      case Format::kBfloat16: weight = bytes_of(normals<bfloat16>(size, typical)); break;
      case Format::kInt8:
        weight = bytes_of(integers<int8_t>(size, -127, 127));
        scale = bytes_of(normals(count * outputs, typical / 64));
        break;
      case Format::kInt4:
        weight = bytes_of(integers<uint16_t>(size / 4, 0, 65535));
        scale = bytes_of(normals<bfloat16>(count * outputs * (inputs / kGroup), typical / 4));
        break;
    }
  }

  Matrix first() const { return {format, weight.data(), scale.data(), outputs, inputs}; }
};

// Runs on pools of 1, 2 and many threads and returns the result, which must be the same bytes.
template <typename T, typename F>
std::vector<T> on_pools(int64_t size, const char* what, F run) {
  std::vector<T> first;
  for (const int threads : {1, 2, 3 * static_cast<int>(std::thread::hardware_concurrency())}) {
    Pool pool(threads);
    std::vector<T> y(size);
    run(pool, y.data());
    if (first.empty()) first = y;
    check(std::memcmp(first.data(), y.data(), size * sizeof(T)) == 0, what);
  }
  return first;
}

void tasks_run_once() {
  for (const int threads : {1, 2, 3 * static_cast<int>(std::thread::hardware_concurrency())}) {
    Pool pool(threads);
    for (const int64_t count : {0, 1, 2, 7, 1000}) {
      std::vector<int> runs(count);
      parallel_for(pool, count, [&](int64_t i) { ++runs[i]; });
      check(std::count(runs.begin(), runs.end(), 1) == count, "a task ran twice, or never");
    }
    for (const int64_t least : {1, 3, 100}) {
      std::vector<int> runs(1000);
      parallel_ranges(pool, 1000, least, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++runs[i];
      });
      check(std::count(runs.begin(), runs.end(), 1) == 1000, "ranges overlap, or leave something out");
    }
  }
}

// A pool of which no thread is free while a call runs.
struct BusyPool {
  std::vector<std::function<void()>> scheduled;
  int64_t num_threads() const { return 4; }
  void Schedule(std::function<void()> call) { scheduled.push_back(std::move(call)); }
};

void a_call_does_what_nobody_else_does() {
  BusyPool pool;
  {
    std::vector<int> runs(1000);
    parallel_for(pool, 1000, [&](int64_t i) { ++runs[i]; });
    check(std::count(runs.begin(), runs.end(), 1) == 1000, "a call waits for threads that do not come");
  }
  for (auto& late : pool.scheduled) late();  // when the call has returned
}

// Calls that run on the pool's own threads, more than there are, from several threads that wait for them.
void calls_at_once_end() {
  Pool pool(2);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&pool] {
      std::atomic<int> left{6};
      std::vector<int64_t> sums(6);
      for (int call = 0; call < 6; ++call) {
        pool.Schedule([&pool, &left, &sums, call] {
          std::vector<int64_t> each(100);
          parallel_for(pool, 100, [&](int64_t i) { each[i] = i; });
          sums[call] = std::accumulate(each.begin(), each.end(), int64_t{0});
          left.fetch_sub(1, std::memory_order_release);
        });
      }
      while (left.load(std::memory_order_acquire)) std::this_thread::yield();
      for (const int64_t sum : sums) check(sum == 4950, "calls at once");
    });
  }
  for (auto& caller : callers) caller.join();
}

template <typename T>
void linear_layers(Format format) {
  for (const int64_t inputs : {128, 384, 1000, 17, kGroup * static_cast<int>(kInt4Groups + 1)}) {
    if (format == Format::kInt4 && inputs % kGroup) continue;
    const int64_t outputs = 102;
    const Stack stack(format, 1, outputs, inputs);
    const auto scale = normals(inputs), shift = normals(inputs), bias = normals(outputs);
    for (const int rows : {1, 2, 3, 5, 8, 33}) {
      const auto x = normals<T>(rows * inputs), residual = normals<T>(rows * outputs);
      for (const bool gated : {false, true}) {
        const int64_t results = gated ? outputs / 2 : outputs;
        on_pools<T>(rows * results, "linear", [&](Pool& pool, T* y) {
          const Norm norm{scale.data(), gated ? nullptr : shift.data(), 1e-5f};
          const auto activation = gated ? Activation::kSilu : Activation::kGelu;
          Linear<T>{rows, x.data(), norm, stack.first(), bias.data(), nullptr, activation, gated, y}.run(pool);
        });
      }
      const auto y = on_pools<T>(rows * outputs, "linear", [&](Pool& pool, T* y) {
        Linear<T>{rows, x.data(), {}, stack.first(), nullptr, residual.data(), Activation::kNone, false, y}.run(pool);
      });
      if (format != Format::kFloat32 || sizeof(T) != sizeof(float)) continue;
      const float* w = static_cast<const float*>(stack.first().weight);
      for (int64_t at = 0; at < rows * outputs; ++at) {
        double sum = to_float(residual[at]);
        for (int64_t k = 0; k < inputs; ++k) {
          sum += static_cast<double>(to_float(x[at / outputs * inputs + k])) * w[at % outputs * inputs + k];
        }
        check(std::abs(sum - to_float(y[at])) < 1e-4, "linear differs from the sum");
      }
    }
  }
}

void experts(Format format) {
  const int64_t tokens = 5, choices = 2, count = 4, inputs = 256, hidden = 128, rows = tokens * choices;
  const auto x = normals(tokens * inputs), weights = normals(rows);
  const Stack gate_up(format, count, 2 * hidden, inputs), down(format, count, inputs, hidden);
  const auto gate_up_bias = normals(count * 2 * hidden), down_bias = normals(count * inputs);
  std::vector<int32_t> rows_of(rows), token_of(rows);
  const std::vector<int32_t> sizes{3, 0, 6, 1}, offsets{0, 3, 3, 9};  // an expert has no rows
  std::iota(rows_of.begin(), rows_of.end(), 0);
  for (int64_t row = 0; row < rows; ++row) token_of[row] = row / choices;
  const Routing routing{tokens,         choices,         rows,          count,       weights.data(),
                        rows_of.data(), token_of.data(), offsets.data(), sizes.data()};
  on_pools<float>(tokens * inputs, "experts", [&](Pool& pool, float* y) {
    const Experts in{gate_up.first(), gate_up_bias.data()}, out{down.first(), down_bias.data()};
    ExpertMlp<float>{x.data(), routing, in, out, Activation::kSilu, true, y}.run(pool);
  });
}

// Rows that begin, are parts of one sequence, end in guesses, and are padding, whose slot is not there.
template <typename T>
void delta_rules(int64_t tokens) {
  const delta_rule::Sizes sizes{4, tokens, 2, 3, 20, 70, 4};
  const int64_t slots = 3, steps = sizes.rows * tokens, heads = sizes.value_heads();
  const std::vector<int32_t> slot{2, 0, tokens > 5 ? 2 : 1, 1 << 20}, kept{2, 1, 3, 0};
  std::vector<int32_t> positions(steps, -1);
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t t = 0; t < (row == 0 ? tokens : (tokens + 1) / 2); ++t) positions[row * tokens + t] = 5 * row + t;
  }
  const auto qkv = normals<T>(steps * sizes.key_heads * sizes.features());
  auto decay = normals(steps * heads);
  for (float& x : decay) x = -x * x;
  const auto beta = normals(steps * heads, 0.3f), weight = normals(sizes.key_heads * sizes.features() * sizes.conv);
  const auto conv = normals<T>(slots * (sizes.conv - 1) * sizes.key_heads * sizes.features());
  const auto state = normals(slots * heads * sizes.key_dim * sizes.value_dim);
  const int64_t outputs = steps * heads * sizes.value_dim;
  on_pools<float>(outputs + static_cast<int64_t>(state.size()), "the delta rule", [&](Pool& pool, float* y) {
    auto new_conv = conv;
    float* new_state = std::copy(state.begin(), state.end(), y + outputs) - state.size();
    delta_rule::DeltaRule<T>{sizes,
                             qkv.data(),
                             decay.data(),
                             beta.data(),
                             weight.data(),
                             slot.data(),
                             positions.data(),
                             tokens == 5 ? kept.data() : nullptr,
                             new_conv.data(),
                             new_state,
                             y}
        .run(pool);
  });
}

int main() {
  tasks_run_once();
  a_call_does_what_nobody_else_does();
  calls_at_once_end();
  for (const Format format : {Format::kFloat32, Format::kBfloat16, Format::kInt8, Format::kInt4}) {
    linear_layers<float>(format);
    linear_layers<bfloat16>(format);
    experts(format);
  }
  for (const int64_t tokens : {1, 5, 70}) {
    delta_rules<float>(tokens);
    delta_rules<bfloat16>(tokens);
  }
  std::puts("right");
}
