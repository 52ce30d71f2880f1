// The gated delta rule with the convolution before it (`delta_rule/api.py`), one token after the other.
//
// The columns of a state do not depend on one another. So a block of columns takes many tokens while it is in the
// first-level cache, and memory is read and written once for all of them. Each sum has the same order whatever the
// blocks are: results depend neither on the number of threads nor on how a sequence is divided into rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/activations.h"
#include "cpu/buffer.h"
#include "cpu/simd.h"
#include "cpu/tasks.h"

namespace jaxinfer::delta_rule {

constexpr int kBlockVectors = 4;      // columns of a block, whose sums fit into AVX2's registers
constexpr int64_t kPieceTokens = 64;  // tokens of a row that are prepared together

struct Sizes {
  int64_t rows, tokens;        // B, T
  int64_t key_heads, group;    // Hk, Hv / Hk
  int64_t key_dim, value_dim;  // K, V
  int64_t conv;                // L

  int64_t features() const { return 2 * key_dim + group * value_dim; }  // F
  int64_t value_heads() const { return key_heads * group; }
};

inline float dot(const float* x, const float* y, int64_t size) {
  Floats sums = zeros();
  int64_t i = 0;
  for (; i + kFloats <= size; i += kFloats) sums = multiply_add(load(x + i), load(y + i), sums);
  float total = sum(sums);
  for (; i < size; ++i) total += x[i] * y[i];
  return total;
}

// The tokens that a value head takes.
struct Tokens {
  int64_t count, key_dim;
  const float* mixed;     // of each token, `stride` apart: the query, the key, and the values of the key head
  int64_t stride, value;  // value: where this head's begin
  const float* overlap;   // [count], the product of query and key
  const float* decay;     // of each token, `steps` apart; so is beta
  const float* beta;
  int64_t steps;
  bool move;  // whether the state is theirs afterwards; else they only read what it would be
};

// Moves some vectors of columns of a state on: S = e^decay S; S += k (beta (v - S^T k))^T; y = S^T q.
//
// S^T k and S^T q are of the state before, so that it is read once: S^T q afterwards is e^decay S^T q + (q . k) change.
//
// state, y: the first column; `state_stride` and `y_stride` apart for each key and each token.
template <int kVectors>
void move_columns(const Tokens& tokens, int64_t column, float* state, int64_t state_stride, float* y,
                  int64_t y_stride) {
  for (int64_t t = 0; t < tokens.count; ++t, y += y_stride) {
    const float *q = tokens.mixed + t * tokens.stride, *k = q + tokens.key_dim, *v = q + tokens.value + column;
    Floats by_key[kVectors], by_query[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) by_key[n] = by_query[n] = zeros();
    for (int64_t i = 0; i < tokens.key_dim; ++i) {
      const Floats key = broadcast(k[i]), query = broadcast(q[i]);
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) {
        const Floats x = in_register(load(state + i * state_stride + n * kFloats));
        by_key[n] = multiply_add(key, x, by_key[n]);
        by_query[n] = multiply_add(query, x, by_query[n]);
      }
    }
    const Floats left = broadcast(std::exp(tokens.decay[t * tokens.steps]));
    const Floats beta = broadcast(tokens.beta[t * tokens.steps]), overlap = broadcast(tokens.overlap[t]);
    Floats change[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) {
      change[n] = beta * (load(v + n * kFloats) - left * by_key[n]);
      store(y + n * kFloats, multiply_add(overlap, change[n], left * by_query[n]));
    }
    for (int64_t i = 0; i < tokens.key_dim; ++i) {
      const Floats key = broadcast(k[i]);
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) {
        float* x = state + i * state_stride + n * kFloats;
        store(x, multiply_add(key, change[n], left * load(x)));
      }
    }
  }
}

// Memory of a task.
struct Scratch {
  explicit Scratch(const Sizes& sizes)
      : stride((sizes.features() + kFloats - 1) / kFloats * kFloats),
        weights(sizes.conv * stride),
        inputs((sizes.conv - 1 + pieces(sizes)) * stride),
        mixed(pieces(sizes) * stride + kFloats),  // the last value may be read as part of a whole vector
        overlap(pieces(sizes)),
        block(sizes.key_dim * kBlockVectors * kFloats),
        results(pieces(sizes) * kBlockVectors * kFloats) {}

  static int64_t pieces(const Sizes& sizes) { return std::min(sizes.tokens, kPieceTokens); }

  int64_t stride;         // of a token
  Buffer<float> weights;  // [L, stride]
  Buffer<float> inputs;   // [L - 1 + tokens, stride], of the convolution
  Buffer<float> mixed;    // [tokens, stride], see `Tokens`
  Buffer<float> overlap;  // [tokens]
  Buffer<float> block;    // columns of a state
  Buffer<float> results;  // what the tokens read from them
};

// All rows of a call.
template <typename T>
struct DeltaRule {
  Sizes sizes;
  const T* qkv;              // [B, T, Hk, F]
  const float* decay;        // [B, T, Hv]
  const float* beta;         // [B, T, Hv]
  const float* weight;       // [Hk, F, L]
  const int32_t* slot;       // [B]
  const int32_t* positions;  // [B, T]
  const int32_t* kept;       // [B], how many tokens of each row move its state; null: all
  T* conv;                   // [S, L - 1, Hk, F]
  float* state;              // [S, Hv, K, V]
  float* y;                  // [B, T, Hv, V]; zeros for padding

  // A task is a key head of all rows of one slot, in order.
  template <typename Pool>
  void run(Pool& pool) const {
    const Order order = order_of_rows();
    parallel_ranges(pool, sizes.rows * sizes.key_heads, 1, [&](int64_t begin, int64_t end) {
      Scratch scratch(sizes);
      for (int64_t task = begin; task < end; ++task) {
        int64_t row = task / sizes.key_heads;
        const int64_t head = task % sizes.key_heads;
        if (!order.is_first[row]) continue;
        transpose_weights(head, scratch);
        for (; row >= 0; row = order.next[row]) move_row(row, head, scratch);
      }
    });
  }

 private:
  struct Order {
    std::vector<char> is_first;  // of its slot
    std::vector<int64_t> next;   // of the same slot, or -1
  };

  // Rows of a single token are of different slots. So are rows of padding here: they touch none.
  Order order_of_rows() const {
    Order order{std::vector<char>(sizes.rows, 1), std::vector<int64_t>(sizes.rows, -1)};
    for (int64_t row = 0; sizes.tokens > 1 && row < sizes.rows; ++row) {
      for (int64_t later = row + 1; later < sizes.rows && order.next[row] < 0; ++later) {
        if (slot[later] != slot[row] || length_of(row) == 0 || length_of(later) == 0) continue;
        order.next[row] = later, order.is_first[later] = 0;
      }
    }
    return order;
  }

  // The tokens of a row that are no padding, which comes last.
  int64_t length_of(int64_t row) const {
    const int32_t* first = positions + row * sizes.tokens;
    return std::find_if(first, first + sizes.tokens, [](int32_t position) { return position < 0; }) - first;
  }

  void transpose_weights(int64_t head, const Scratch& scratch) const {
    const float* from = weight + head * sizes.features() * sizes.conv;
    for (int64_t j = 0; j < sizes.conv; ++j) {
      float* to = scratch.weights.get() + j * scratch.stride;
      for (int64_t f = 0; f < sizes.features(); ++f) to[f] = from[f * sizes.conv + j];
    }
  }

  void move_row(int64_t row, int64_t head, const Scratch& scratch) const {
    const int64_t features = sizes.features(), before = sizes.conv - 1, length = length_of(row);
    const int64_t values = sizes.group * sizes.value_dim, first = row * sizes.tokens;
    const int64_t moving = kept != nullptr ? std::min<int64_t>(kept[row], length) : length;
    for (int64_t t = length; t < sizes.tokens; ++t) {
      std::fill_n(y + ((first + t) * sizes.key_heads + head) * values, values, 0.0f);
    }
    if (length == 0) return;
    float* states = state + (slot[row] * sizes.key_heads + head) * values * sizes.key_dim;  // of the group
    auto input = [&](int64_t j) { return conv + ((slot[row] * before + j) * sizes.key_heads + head) * features; };
    const bool begins = positions[first] == 0;
    if (begins) std::fill_n(states, values * sizes.key_dim, 0.0f);
    for (int64_t j = 0; j < before; ++j) {
      float* to = scratch.inputs.get() + j * scratch.stride;
      for (int64_t f = 0; f < features; ++f) to[f] = begins ? 0.0f : to_float(input(j)[f]);
    }
    for (int64_t t = 0; t < moving; t += kPieceTokens) {
      run_piece(first + t, std::min(kPieceTokens, moving - t), true, head, states, scratch);
    }
    for (int64_t j = 0; j < before; ++j) {
      const float* from = scratch.inputs.get() + j * scratch.stride;
      for (int64_t f = 0; f < features; ++f) input(j)[f] = from_float<T>(from[f]);
    }
    if (moving < length) run_piece(first + moving, length - moving, false, head, states, scratch);
  }

  // Runs some tokens of a row, at most kPieceTokens, over the states of a group. at: the first of them.
  void run_piece(int64_t at, int64_t count, bool move, int64_t head, float* states, const Scratch& scratch) const {
    const int64_t features = sizes.features(), before = sizes.conv - 1, stride = scratch.stride;
    float* inputs = scratch.inputs.get();
    for (int64_t t = 0; t < count; ++t) {
      const T* from = qkv + ((at + t) * sizes.key_heads + head) * features;
      for (int64_t f = 0; f < features; ++f) inputs[(before + t) * stride + f] = to_float(from[f]);
      scratch.overlap.get()[t] = mix(inputs + t * stride, scratch.mixed.get() + t * stride, scratch);
    }
    for (int64_t i = 0; i < sizes.group; ++i) {
      const int64_t heads = sizes.key_heads * sizes.group, value_head = head * sizes.group + i;
      const int64_t step = at * heads + value_head;
      const Tokens tokens{count, sizes.key_dim, scratch.mixed.get(), stride,
                          2 * sizes.key_dim + i * sizes.value_dim, scratch.overlap.get(), decay + step, beta + step,
                          heads, move};
      run_head(tokens, states + i * sizes.key_dim * sizes.value_dim, y + step * sizes.value_dim, scratch);
    }
    std::copy_n(inputs + count * stride, before * stride, inputs);
  }

  // Computes what the states take of a token: silu of the convolution, with queries and keys of length 1 and queries
  // scaled by K^-0.5. inputs: [L, stride], the token's the last. Returns the product of query and key.
  float mix(const float* inputs, float* mixed, const Scratch& scratch) const {
    for (int64_t f = 0; f < scratch.stride; f += kFloats) {
      Floats total = zeros();
      for (int64_t j = 0; j < sizes.conv; ++j) {
        const int64_t from = j * scratch.stride + f;
        total = multiply_add(load(scratch.weights.get() + from), load(inputs + from), total);
      }
      store(mixed + f, total);
    }
    activate_outputs(mixed, sizes.features(), nullptr, Activation::kSilu, false, nullptr);
    const int64_t size = sizes.key_dim;
    float *query = mixed, *key = mixed + size;
    const float by_query = 1.0f / std::sqrt((sum_of_squares(query, size) + 1e-6f) * size);
    const float by_key = 1.0f / std::sqrt(sum_of_squares(key, size) + 1e-6f);
    for (int64_t i = 0; i < size; ++i) query[i] *= by_query, key[i] *= by_key;
    return dot(query, key, size);
  }

  void run_head(const Tokens& tokens, float* state, float* y, const Scratch& scratch) const {
    constexpr int64_t kBlock = kBlockVectors * kFloats;
    for (int64_t column = 0; column < sizes.value_dim;) {
      if (column + kBlock <= sizes.value_dim) {
        run_block<kBlockVectors>(tokens, column, state, y, scratch);
        column += kBlock;
      } else {
        run_block<1>(tokens, column, state, y, scratch);
        column += kFloats;
      }
    }
  }

  // Runs tokens over a block of columns, in a copy unless the block is whole and one token moves it.
  template <int kVectors>
  void run_block(const Tokens& tokens, int64_t column, float* state, float* y, const Scratch& scratch) const {
    constexpr int64_t kBlock = kVectors * kFloats;
    const int64_t width = sizes.value_dim, y_stride = tokens.steps * width;
    const int64_t columns = std::min(kBlock, width - column);
    state += column, y += column;
    if (tokens.move && tokens.count == 1 && columns == kBlock) {
      return move_columns<kVectors>(tokens, column, state, width, y, y_stride);
    }
    float *block = scratch.block.get(), *results = scratch.results.get();
    for (int64_t i = 0; i < sizes.key_dim; ++i) {
      std::fill_n(std::copy_n(state + i * width, columns, block + i * kBlock), kBlock - columns, 0.0f);
    }
    move_columns<kVectors>(tokens, column, block, kBlock, results, kBlock);
    for (int64_t i = 0; tokens.move && i < sizes.key_dim; ++i) {
      std::copy_n(block + i * kBlock, columns, state + i * width);
    }
    for (int64_t t = 0; t < tokens.count; ++t) std::copy_n(results + t * kBlock, columns, y + t * y_stride);
  }
};

}  // namespace jaxinfer::delta_rule
