// Attention over the pages of a KV cache (`attention/api.py`), which are read in place.
//
// All queries of a KV head are multiplied by a tile of its keys together, so that memory is read once, with an online
// softmax (Dao et al. 2022, arXiv:2205.14135, algorithm 1). The keys of few queries are split among tasks, whose
// partial results the last one to end combines (Flash-Decoding). How a row is split depends on its positions
// alone: results change neither with the number of threads nor with the other rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention/cpu/heads.h"
#include "attention/cpu/vectors.h"
#include "cpu/buffer.h"
#include "cpu/simd.h"
#include "cpu/tasks.h"

namespace jaxinfer::attention {

constexpr int kTileKeys = 64;
constexpr int kAheadKeys = 16;      // how far the keys of a first tile are prefetched
constexpr int kMaxSplits = 32;      // of a row's keys
constexpr int kTaskQueries = 64;    // of all KV heads of a task, unless one token has more
constexpr int kTaskBytes = 1 << 10;  // of a token's keys, which lie beside each other, at least
constexpr int kWideVectors = 4;     // of the results that a product keeps in registers for each query

inline int64_t rounded_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Floats that a task needs for a while, of arbitrary contents at first.
class Scratch {
 public:
  explicit Scratch(int64_t size) : memory_(size), next_(memory_.get()) {}

  float* take(int64_t size) {
    float* taken = next_;
    next_ += aligned(size);
    return taken;
  }

  // The size of an array that begins with a cache line.
  static int64_t aligned(int64_t floats) { return rounded_up(floats, kLine); }

 private:
  static constexpr int64_t kLine = 16;
  Buffer<float> memory_;
  float* next_;
};

// scores[r][c] = q[r] . keys[offsets[c]] for kQueries queries and kFloats / kQueries keys.
//
// q: padded with zeros; the first vector of each query, then the second of each, and so on. kWhole: a key is whole
// vectors. This and the other product are functions of their own, where all registers are theirs.
template <int kQueries, bool kWhole, typename C>
__attribute__((noinline)) void multiply_keys(const float* q, const C* keys, const int64_t* offsets, int64_t size,
                                             float* scores, int64_t stride) {
  constexpr int kKeys = kFloats / kQueries;
  const C* key[kKeys];
  Floats totals[kFloats];
#pragma GCC unroll 16
  for (int c = 0; c < kKeys; ++c) key[c] = keys + offsets[c];
#pragma GCC unroll 16
  for (int i = 0; i < kFloats; ++i) totals[i] = zeros();
  for (int64_t d = 0; d < size; d += kFloats, q += kQueries * kFloats) {
    Floats queries[kQueries];
#pragma GCC unroll 4
    for (int r = 0; r < kQueries; ++r) queries[r] = in_register(load(q + r * kFloats));
#pragma GCC unroll 16
    for (int c = 0; c < kKeys; ++c) {
      const Floats x = in_register(kWhole || d + kFloats <= size ? load(key[c] + d) : load_first(key[c] + d, size - d));
#pragma GCC unroll 4
      for (int r = 0; r < kQueries; ++r) {
        Floats& total = totals[place_of_sum(r * kKeys + c)];
        total = multiply_add(queries[r], x, total);
      }
    }
  }
  store_parts<kQueries>(sums(totals), scores, stride);
}

// What is fetched into the cache while something else is computed, in parts.
struct Ahead {
  const char* const* parts = nullptr;  // null: nothing
  int64_t bytes = 0;                   // of each

  void fetch(int64_t part) const {
    for (int64_t i = 0; i < bytes; i += 64) prefetch(parts[part] + i);
  }
};

// sums[r] = factor[r] * sums[r] + the sum over keys c of weights[r][c] * values[offsets[c]], for kQueries queries and
// kVectors vectors of a value. With each key, `ahead` is fetched.
template <int kQueries, int kVectors, typename C, typename Load>
__attribute__((noinline)) void add_values(const float* weights, int64_t stride, const C* values,
                                          const int64_t* offsets, int64_t keys, const float* factors, float* sums,
                                          int64_t sums_stride, const Ahead& ahead, Load load_value) {
  Floats totals[kQueries][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kQueries; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      totals[r][i] = load(sums + r * sums_stride + i * kFloats) * broadcast(factors[r]);
    }
  }
  for (int64_t c = 0; c < keys; ++c) {
    ahead.fetch(c);
    Floats value[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) value[i] = load_value(values + offsets[c] + i * kFloats);
#pragma GCC unroll 4
    for (int r = 0; r < kQueries; ++r) {
      const Floats weight = broadcast(weights[r * stride + c]);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) totals[r][i] = multiply_add(weight, value[i], totals[r][i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kQueries; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) store(sums + r * sums_stride + i * kFloats, totals[r][i]);
  }
}

// The same for whole values of `size` numbers.
template <int kQueries, typename C>
inline void add_whole_values(const float* weights, int64_t stride, const C* values, const int64_t* offsets,
                             int64_t keys, const float* factors, float* sums, int64_t sums_stride, int64_t size,
                             Ahead ahead) {
  auto whole = [](const C* p) { return load(p); };
  int64_t d = 0;
  for (constexpr int kWide = kWideVectors * kFloats; d + kWide <= size; d += kWide, ahead = {}) {
    add_values<kQueries, kWideVectors>(weights, stride, values + d, offsets, keys, factors, sums + d, sums_stride,
                                       ahead, whole);
  }
  for (; d + kFloats <= size; d += kFloats, ahead = {}) {
    add_values<kQueries, 1>(weights, stride, values + d, offsets, keys, factors, sums + d, sums_stride, ahead, whole);
  }
  if (d < size) {
    add_values<kQueries, 1>(weights, stride, values + d, offsets, keys, factors, sums + d, sums_stride, ahead,
                            [&](const C* p) { return load_first(p, size - d); });
  }
}

// Calls f(first, constant) for 4, 2 or 1 queries at a time.
template <typename F>
inline void in_blocks(int64_t queries, const F& f) {
  int64_t r = 0;
  for (; r + 4 <= queries; r += 4) f(r, std::integral_constant<int, 4>());
  if (r + 2 <= queries) {
    f(r, std::integral_constant<int, 2>());
    r += 2;
  }
  if (r < queries) f(r, std::integral_constant<int, 1>());
}

struct ScoreOptions {
  float scale;
  int64_t window;                // 0: none
  float softcap;                 // 0: none
  const float* alibi = nullptr;  // [Hkv * G]
};

// The first and the last position that a query sees; none if first > last.
struct Visible {
  int64_t first = 0, last = -1;
};

// One online softmax per query: over the keys so far, the largest score, the sum of exp(score - largest), and the sum
// of exp(score - largest) * value.
struct Softmax {
  float* largest;  // [queries]
  float* total;    // [queries]
  float* sums;     // [queries, stride]
  int64_t stride;

  static int64_t size(int64_t queries, int64_t stride) { return queries * (2 + stride); }

  // Where the arrays lie one after the other.
  static Softmax at(float* memory, int64_t queries, int64_t stride) {
    return {memory, memory + queries, memory + 2 * queries, stride};
  }

  void clear(int64_t queries) const {
    std::fill(largest, largest + queries, -INFINITY);
    std::fill(total, total + queries, 0.0f);
    std::fill(sums, sums + queries * stride, 0.0f);
  }
};

// Attention to pages of any type, but for the products, so that it is compiled once.
class AnyPagedAttention {
 public:
  template <typename Pool>
  void run(Pool& pool) {
    const int64_t size = rows_.batch * rows_.tokens * pages_.kv_heads * group_ * pages_.head_dim;
    std::memset(result_, 0, size * (heads_.is_bfloat16 ? sizeof(bfloat16) : sizeof(float)));
    plan();
    // Of tasks that follow one another, each has the next one's first keys fetched.
    parallel_ranges(pool, static_cast<int64_t>(tasks_.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) compute(tasks_[i]);
    });
  }

 protected:
  AnyPagedAttention(const Heads& heads, int64_t group, const PageSizes& pages, int64_t head_bytes,
                    const Positions& rows, const ScoreOptions& options, void* result)
      : heads_(heads),
        group_(group),
        pages_(pages),
        head_bytes_(head_bytes),
        rows_(rows),
        options_(options),
        result_(result),
        stride_(rounded_up(pages.head_dim, kFloats)),
        block_tokens_(std::min(rows.tokens, std::max<int64_t>(kTaskQueries / group, 1))),
        task_heads_(heads_of_task()) {}
  ~AnyPagedAttention() = default;

  // Consecutive tokens of a row with the same keys, and how these are split.
  struct Block {
    int64_t first_token, tokens;  // of the batch's B * T
    int64_t row;
    Visible keys;
    int64_t split_keys, splits;
    int64_t partials;  // where its partial results begin, if there are several splits
    int64_t left;      // its first counter of tasks that have not ended
  };

  struct Task {
    int32_t block, first_head, split;
  };

  // A token's keys are read together as far as they are short, and as their queries are few.
  int64_t heads_of_task() const {
    int64_t heads = 1;
    while (heads < pages_.kv_heads && heads * head_bytes_ < kTaskBytes &&
           2 * heads * group_ * block_tokens_ <= kTaskQueries && pages_.kv_heads % (2 * heads) == 0) {
      heads *= 2;
    }
    return heads;
  }

  Visible visible(int64_t token) const {
    const int64_t last = std::min<int64_t>(rows_.positions[token], rows_.width * pages_.page_size - 1);
    return {options_.window > 0 ? std::max<int64_t>(last - options_.window + 1, 0) : 0, last};
  }

  void plan() {
    int64_t partials = 0, counters = 0;
    for (int64_t row = 0; row < rows_.batch; ++row) {
      for (int64_t t = 0; t < rows_.tokens; t += block_tokens_) {
        Block block = block_of(row, row * rows_.tokens + t, std::min(block_tokens_, rows_.tokens - t));
        if (block.tokens == 0) continue;
        block.partials = partials;
        block.left = counters;
        counters += pages_.kv_heads / task_heads_;
        if (block.splits > 1) {
          partials += block.splits * pages_.kv_heads * Softmax::size(block.tokens * group_, stride_);
        }
        blocks_.push_back(block);
      }
    }
    partials_ = Buffer<float>(partials);
    left_ = std::vector<std::atomic<int32_t>>(counters);
    for (size_t i = 0; i < blocks_.size(); ++i) add_tasks(static_cast<int32_t>(i));
    // The long ones first, so that the threads end at about the same time.
    std::stable_sort(tasks_.begin(), tasks_.end(),
                     [&](const Task& a, const Task& b) { return keys_of(a) > keys_of(b); });
  }

  Block block_of(int64_t row, int64_t first_token, int64_t tokens) const {
    Block block{first_token, 0, row, {INT64_MAX, -1}, 0, 0, 0, 0};
    for (int64_t t = 0; t < tokens; ++t) {
      const Visible keys = visible(first_token + t);
      if (keys.last < 0) continue;
      block.tokens = t + 1;  // padding at the end is left out
      block.keys = {std::min(block.keys.first, keys.first), std::max(block.keys.last, keys.last)};
    }
    if (block.tokens == 0) return block;
    const int64_t first = block.keys.first / kTileKeys, tiles = block.keys.last / kTileKeys - first + 1;
    block.split_keys = rows_.tokens > block_tokens_ ? tiles : (tiles + kMaxSplits - 1) / kMaxSplits;
    block.splits = (tiles + block.split_keys - 1) / block.split_keys;
    block.split_keys *= kTileKeys;
    return block;
  }

  void add_tasks(int32_t index) {
    const Block& block = blocks_[index];
    for (int64_t head = 0; head < pages_.kv_heads; head += task_heads_) {
      left_[block.left + head / task_heads_] = static_cast<int32_t>(block.splits);
      for (int64_t split = 0; split < block.splits; ++split) {
        tasks_.push_back({index, static_cast<int32_t>(head), static_cast<int32_t>(split)});
      }
    }
  }

  // The keys of a task, of which the first may be inside of a tile.
  Visible keys(const Task& task) const {
    const Block& block = blocks_[task.block];
    const int64_t begin = block.keys.first / kTileKeys * kTileKeys + task.split * block.split_keys;
    return {std::max(begin, block.keys.first), std::min(begin + block.split_keys - 1, block.keys.last)};
  }

  int64_t keys_of(const Task& task) const { return keys(task).last - keys(task).first + 1; }

  // Everything that a task has in memory while it runs. Queries are ordered by KV head, token and query head.
  struct State {
    const Block& block;
    int64_t first_head, heads;
    int64_t queries;  // of a KV head
    float* q;         // [heads, queries, stride], scaled, and padded with zeros
    float* scores;    // [heads, queries, kTileKeys]
    float* factors;   // [heads, queries], of the sums so far
    Softmax softmax;  // [heads, queries]
    float* k_scales;  // [heads, kTileKeys] of int8
    float* v_scales;
  };

  int64_t scratch_size(int64_t heads, int64_t queries) const {
    const int64_t all = heads * queries;
    return Scratch::aligned(all * stride_) + Scratch::aligned(all * kTileKeys) + Scratch::aligned(all) +
           Scratch::aligned(Softmax::size(all, stride_)) + 2 * Scratch::aligned(heads * kTileKeys);
  }

  // Computes the softmax over keys.
  virtual void attend(const State& state, Visible keys) const = 0;

  void compute(const Task& task) {
    const Block& block = blocks_[task.block];
    const int64_t queries = block.tokens * group_, all = task_heads_ * queries;
    Scratch scratch(scratch_size(task_heads_, queries));
    State state{block,   task.first_head, task_heads_, queries, scratch.take(all * stride_),
                scratch.take(all * kTileKeys), scratch.take(all),
                Softmax::at(scratch.take(Softmax::size(all, stride_)), all, stride_),
                scratch.take(task_heads_ * kTileKeys), scratch.take(task_heads_ * kTileKeys)};
    read_queries(state);
    state.softmax.clear(all);
    attend(state, keys(task));
    finish(state, task);
  }

  // Reads queries in the order in which they are multiplied.
  void read_queries(const State& state) const {
    Buffer<float> x(stride_);
    std::fill(x.get() + pages_.head_dim, x.get() + stride_, 0.0f);
    for (int64_t head = 0; head < state.heads; ++head) {
      in_blocks(state.queries, [&](int64_t first, auto count) {
        constexpr int kQueries = decltype(count)::value;
        float* q = state.q + (head * state.queries + first) * stride_;
        for (int64_t r = 0; r < kQueries; ++r) {
          const int64_t token = state.block.first_token + (first + r) / group_;
          heads_.read(token, state.first_head + head, (first + r) % group_, heads_.options.q_norm, x.get());
          for (int64_t d = 0; d < stride_; d += kFloats) {
            store(q + d * kQueries + r * kFloats, load(x.get() + d) * broadcast(options_.scale));
          }
        }
      });
    }
  }

  // Finds keys in the pages: offsets of their first head.
  void locate(const State& state, int64_t begin, int64_t count, int64_t* offsets) const {
    const int32_t* table = rows_.page_table + state.block.row * rows_.width;
    for (int64_t i = 0; i < count;) {
      const int64_t index = (begin + i) / pages_.page_size, first = (begin + i) % pages_.page_size;
      const int64_t slots = std::min(pages_.page_size - first, count - i);
      const int64_t slot = page(table[index]) * pages_.page_size + first;
      for (int64_t j = 0; j < slots; ++j) offsets[i + j] = (slot + j) * pages_.stride();
      i += slots;
    }
  }

  int64_t page(int32_t entry) const { return std::clamp<int64_t>(entry, 0, pages_.num_pages - 1); }

  void read_scales(const State& state, int64_t begin, int64_t count) const {
    const int32_t* table = rows_.page_table + state.block.row * rows_.width;
    for (int64_t c = 0; c < count; ++c) {
      const int64_t first = page(table[(begin + c) / pages_.page_size]) * pages_.kv_heads + state.first_head;
      for (int64_t head = 0; head < state.heads; ++head) {
        state.k_scales[head * kTileKeys + c] = pages_.k_scale[first + head];
        state.v_scales[head * kTileKeys + c] = pages_.v_scale[first + head];
      }
    }
  }

  // Turns the scores of keys [begin, end) into weights, and sets the factors of the sums so far.
  void weigh(const State& state, int64_t head, int64_t begin, int64_t end) const {
    for (int64_t r = 0; r < state.queries; ++r) {
      const int64_t i = head * state.queries + r;
      float* scores = state.scores + i * kTileKeys;
      const int64_t token = state.block.first_token + r / group_;
      const Visible seen = visible(token);
      const int64_t first = std::max(seen.first, begin) - begin, last = std::min(seen.last + 1, end) - begin;
      if (first >= last) {
        std::fill(scores, scores + kTileKeys, 0.0f);
        state.factors[i] = 1.0f;
        continue;
      }
      const int64_t padded = rounded_up(end - begin, kFloats);
      bias(state, head, r % group_, begin - rows_.positions[token], padded, scores);
      std::fill(scores, scores + first, -INFINITY);
      std::fill(scores + last, scores + padded, -INFINITY);
      exponentiate(state, i, padded, scores);
      if (pages_.v_scale != nullptr) {
        const float* scales = state.v_scales + head * kTileKeys;
        for (int64_t c = first; c < last; ++c) scores[c] *= scales[c];
      }
    }
  }

  // Scales, caps and biases the scores of a query. distance: from it to the first key.
  void bias(const State& state, int64_t head, int64_t g, int64_t distance, int64_t count, float* scores) const {
    if (pages_.k_scale != nullptr) {
      const float* scales = state.k_scales + head * kTileKeys;
      for (int64_t c = 0; c < count; ++c) scores[c] *= scales[c];
    }
    if (options_.softcap > 0) {
      const Floats cap = broadcast(options_.softcap), inverse = broadcast(1.0f / options_.softcap);
      for (int64_t c = 0; c < count; c += kFloats) {
        store(scores + c, cap * tanh_of(load(scores + c) * inverse));
      }
    }
    if (options_.alibi != nullptr) {
      const float slope = options_.alibi[(state.first_head + head) * group_ + g];
      for (int64_t c = 0; c < count; ++c) scores[c] += slope * static_cast<float>(distance + c);
    }
  }

  void exponentiate(const State& state, int64_t i, int64_t count, float* scores) const {
    Floats most = broadcast(-INFINITY);
    for (int64_t c = 0; c < count; c += kFloats) most = larger(load(scores + c), most);
    const float before = state.softmax.largest[i], after = std::max(before, largest(most));
    Floats total = zeros();
    for (int64_t c = 0; c < count; c += kFloats) {
      const Floats weights = exp_of(load(scores + c) - broadcast(after));
      store(scores + c, weights);
      total = add(total, weights);
    }
    state.factors[i] = std::exp(before - after);
    state.softmax.largest[i] = after;
    state.softmax.total[i] = state.softmax.total[i] * state.factors[i] + sum(total);
  }

  // Writes the results of a task; of several splits, the last one to end does.
  void finish(const State& state, const Task& task) {
    const int64_t all = state.heads * state.queries, size = Softmax::size(all, stride_);
    const Block& block = state.block;
    if (block.splits == 1) return write(state, &state.softmax, 1);
    float* partials = partials_.get() + block.partials + task.first_head / state.heads * block.splits * size;
    std::copy(state.softmax.largest, state.softmax.largest + size, partials + task.split * size);
    if (left_[block.left + task.first_head / state.heads].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    Softmax parts[kMaxSplits];
    for (int64_t split = 0; split < block.splits; ++split) {
      parts[split] = Softmax::at(partials + split * size, all, stride_);
    }
    write(state, parts, block.splits);
  }

  // Combines the parts of a task's queries.
  void write(const State& state, const Softmax* parts, int64_t count) {
    float* sums = state.q;  // which is read no more
    for (int64_t i = 0; i < state.heads * state.queries; ++i) {
      const int64_t head = state.first_head + i / state.queries, r = i % state.queries;
      const int64_t token = state.block.first_token + r / group_;
      if (rows_.positions[token] < 0) continue;
      float most = -INFINITY, total = 0.0f;
      for (int64_t p = 0; p < count; ++p) most = std::max(most, parts[p].largest[i]);
      std::fill(sums, sums + stride_, 0.0f);
      for (int64_t p = 0; p < count; ++p) {
        const float factor = std::exp(parts[p].largest[i] - most);
        total += factor * parts[p].total[i];
        for (int64_t d = 0; d < stride_; d += kFloats) {
          const Floats part = load(parts[p].sums + i * stride_ + d);
          store(sums + d, multiply_add(broadcast(factor), part, load(sums + d)));
        }
      }
      const int64_t at = ((token * pages_.kv_heads + head) * group_ + r % group_) * pages_.head_dim;
      heads_.is_bfloat16 ? write_result<bfloat16>(at, sums, total) : write_result<float>(at, sums, total);
    }
  }

  template <typename T>
  void write_result(int64_t at, const float* sums, float total) const {
    T* y = static_cast<T*>(result_) + at;
    for (int64_t d = 0; d < pages_.head_dim; ++d) y[d] = from_float<T>(sums[d] / total);
  }

  Heads heads_;
  int64_t group_;
  PageSizes pages_;
  int64_t head_bytes_;  // of one key
  Positions rows_;
  ScoreOptions options_;
  void* result_;
  int64_t stride_, block_tokens_, task_heads_;
  std::vector<Block> blocks_;
  std::vector<Task> tasks_;
  Buffer<float> partials_;
  std::vector<std::atomic<int32_t>> left_;
};

// Attention to pages of C.
template <typename C>
class PagedAttention final : public AnyPagedAttention {
 public:
  // heads: of which the first `group` of each KV head are queries. result: [B, T, Hkv * G, K] in their dtype.
  PagedAttention(const Heads& heads, int64_t group, const Pages<C>& pages, const Positions& rows,
                 const ScoreOptions& options, void* result)
      : AnyPagedAttention(heads, group, pages, pages.head_dim * sizeof(C), rows, options, result),
        k_(pages.k),
        v_(pages.v) {}

 private:
  // One tile after another.
  void attend(const State& state, Visible keys) const override {
    int64_t offsets[2 * kTileKeys];  // of the tile, and of the one that follows, perhaps in the next split
    for (int64_t begin = keys.first; begin <= keys.last;) {
      const int64_t end = std::min((begin / kTileKeys + 1) * kTileKeys, keys.last + 1);
      const int64_t known = std::min(end - begin + kTileKeys, state.block.keys.last + 1 - begin);
      locate(state, begin, known, offsets);
      std::fill(offsets + known, offsets + 2 * kTileKeys, offsets[known - 1]);
      const bool is_first = begin == keys.first;
      if (stride_ == pages_.head_dim) {
        score<true>(state, offsets, end - begin, is_first);
      } else {
        score<false>(state, offsets, end - begin, is_first);
      }
      if (pages_.k_scale != nullptr) read_scales(state, begin, end - begin);
      for (int64_t head = 0; head < state.heads; ++head) {
        weigh(state, head, begin, end);
        add_values_of(state, head, offsets, end - begin);
      }
      begin = end;
    }
  }

  // Adds a tile's values of a head, while keys of the next tile, of all heads in memory's order, are on their way.
  void add_values_of(const State& state, int64_t head, const int64_t* offsets, int64_t count) const {
    const char* ahead[kTileKeys];
    int64_t key = count + head * count / state.heads, part = head * count % state.heads;
    for (int64_t c = 0; c < count; ++c, ++part) {
      if (part == state.heads) ++key, part = 0;
      ahead[c] = reinterpret_cast<const char*>(k_ + offsets[key] + (state.first_head + part) * pages_.head_dim);
    }
    in_blocks(state.queries, [&](int64_t r, auto queries) {
      const int64_t i = head * state.queries + r;
      add_whole_values<decltype(queries)::value>(
          state.scores + i * kTileKeys, kTileKeys, v_ + (state.first_head + head) * pages_.head_dim, offsets,
          count, state.factors + i, state.softmax.sums + i * stride_, stride_, pages_.head_dim,
          r == 0 ? Ahead{ahead, head_bytes_} : Ahead{});
    });
  }

  // Multiplies queries by a tile's keys, while its values are on their way into the cache, and keys if it is the first.
  template <bool kWhole>
  void score(const State& state, const int64_t* offsets, int64_t count, bool is_first) const {
    static_assert(kTileKeys % kFloats == 0 && kAheadKeys <= kTileKeys);
    const int step = state.queries % 4 == 0 ? kFloats / 4 : kFloats;  // of all heads at a time, in memory's order
    for (int64_t c = 0; c < count; c += step) {
      for (int64_t head = 0; head < state.heads; ++head) {
        const int64_t first = (state.first_head + head) * pages_.head_dim;
        in_blocks(state.queries, [&](int64_t r, auto queries) {
          constexpr int kQueries = decltype(queries)::value, kKeys = kFloats / kQueries;
          const int64_t i = head * state.queries + r;
          for (int j = 0; j < step; j += kKeys) {
            for (int64_t k = c + j; r == 0 && k < c + j + kKeys; ++k) {  // a few at a time: loads wait for many
              prefetch_head(v_ + offsets[k] + first);
              if (is_first && k + kAheadKeys < count) prefetch_head(k_ + offsets[kAheadKeys + k] + first);
            }
            multiply_keys<kQueries, kWhole>(state.q + i * stride_, k_ + first, offsets + c + j, pages_.head_dim,
                                            state.scores + i * kTileKeys + c + j, kTileKeys);
          }
        });
      }
    }
  }

  void prefetch_head(const C* p) const {
    const char* begin = reinterpret_cast<const char*>(p);
    for (int64_t i = 0; i < head_bytes_; i += 64) prefetch(begin + i);
  }

  const C* k_;
  const C* v_;
};

}  // namespace jaxinfer::attention
