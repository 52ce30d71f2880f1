// An MLP of experts that reads the matrices of those that have rows, once each, where they are (`moe/api.py`).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpu/activations.h"
#include "cpu/rows.h"
#include "cpu/simd.h"
#include "cpu/tasks.h"

namespace jaxinfer {

// `Routing` of routing.py.
struct Routing {
  int64_t tokens, choices, rows, experts;  // N, k, R, E
  const float* weights;                    // [N, k]
  const int32_t* rows_of;                  // [N, k]
  const int32_t* token_of;                 // [R]
  const int32_t* offsets;                  // [E]
  const int32_t* sizes;                    // [E]
};

// A stack of matrices with a bias each, or none.
struct Experts {
  Matrix first;       // the matrix of expert 0; the others follow it
  const float* bias;  // [E, N]

  Matrix matrix(int64_t expert) const {
    Matrix matrix = first;
    matrix.weight = static_cast<const char*>(first.weight) + expert * first.outputs * first.row_bytes();
    const int64_t scales = first.format == Format::kInt8 ? 4 * first.outputs
                           : first.format == Format::kInt4 ? 2 * first.outputs * (first.inputs / kGroup)
                                                           : 0;
    matrix.scale = static_cast<const char*>(first.scale) + expert * scales;
    return matrix;
  }
};

// y[t] = sum over the experts of t of weight * (act(x W^T + b) V^T + c).
template <typename T>
struct ExpertMlp {
  const T* x;  // [N, D]
  Routing routing;
  Experts gate_up, down;
  Activation activation;
  bool gated;
  T* y;  // [N, D]

  template <typename Pool>
  void run(Pool& pool) const {
    const std::vector<Part> parts = parts_of();
    const int64_t slots = parts.empty() ? 0 : parts.back().begin + parts.back().size;
    std::vector<int32_t> slot_of(routing.rows, -1), row_of(slots);
    for (const Part& part : parts) {
      for (int64_t i = 0; i < part.size; ++i) {
        row_of[part.begin + i] = routing.offsets[part.expert] + i;
        slot_of[row_of[part.begin + i]] = part.begin + i;
      }
    }
    const int64_t inputs = gate_up.first.inputs, hidden = down.first.inputs, outputs = down.first.outputs;
    Buffer<float> hiddens(slots * hidden), results(slots * outputs);
    const Rows rows = prepared(pool, gate_up.first, slots, [&](int64_t slot, float* row) {
      const T* from = x + routing.token_of[row_of[slot]] * inputs;
      for (int64_t i = 0; i < inputs; ++i) row[i] = to_float(from[i]);
    });
    multiply(pool, parts, gate_up, rows, activation, gated, hiddens.get());
    const Rows hidden_rows = prepared(pool, down.first, slots, [&](int64_t slot, float* row) {
      std::copy_n(hiddens.get() + slot * hidden, hidden, row);
    });
    multiply(pool, parts, down, hidden_rows, Activation::kNone, false, results.get());
    combine(pool, slot_of, results.get());
  }

 private:
  // The rows of an expert: slots [begin, begin + size).
  struct Part {
    int64_t expert, begin, size;
  };

  std::vector<Part> parts_of() const {
    std::vector<Part> parts;
    int64_t begin = 0;
    for (int64_t expert = 0; expert < routing.experts; ++expert) {
      if (const int64_t size = routing.sizes[expert]) {
        parts.push_back({expert, begin, size});
        begin += size;
      }
    }
    return parts;
  }

  template <typename Pool, typename Read>
  static Rows prepared(Pool& pool, const Matrix& matrix, int64_t slots, Read read) {
    constexpr int64_t kAtOnce = 8;
    Rows rows(matrix.format, slots, matrix.inputs, std::is_same_v<T, bfloat16>);
    parallel_for(pool, (slots + kAtOnce - 1) / kAtOnce, [&](int64_t task) {
      Buffer<float> row(rows.stride());
      for (int64_t slot = task * kAtOnce; slot < std::min(slots, (task + 1) * kAtOnce); ++slot) {
        read(slot, row.get());
        rows.set(slot, row.get());
      }
    });
    return rows;
  }

  // One list of ranges over experts and outputs, so that all threads have work also if all rows are of one expert.
  // y: [slots, results of an expert].
  template <typename Pool>
  void multiply(Pool& pool, const std::vector<Part>& parts, const Experts& experts, const Rows& rows,
                Activation activation, bool gated, float* y) const {
    const int64_t outputs = experts.first.outputs, units = (outputs + kUnit - 1) / kUnit;
    const int64_t all = units * static_cast<int64_t>(parts.size());
    parallel_ranges(pool, all, least_units(experts.first), [&](int64_t begin, int64_t end) {
      while (begin < end) {  // a block of one expert
        const int64_t first = begin % units, last = std::min({first + kBlock / kUnit, units, first + end - begin});
        multiply_block(parts[begin / units], experts, rows, first * kUnit, std::min(last * kUnit, outputs), activation,
                       gated, y);
        begin += last - first;
      }
    });
  }

  void multiply_block(const Part& part, const Experts& experts, const Rows& rows, int64_t begin, int64_t end,
                      Activation activation, bool gated, float* y) const {
    const int64_t outputs = experts.first.outputs, count = end - begin;
    Buffer<float> buffer((part.size + 1) * count);
    float *totals = buffer.get(), *scratch = totals + part.size * count;
    rows.multiply(experts.matrix(part.expert), begin, end, part.begin, part.size, totals);
    const float* bias = experts.bias ? experts.bias + part.expert * outputs + begin : nullptr;
    const int64_t results = gated ? outputs / 2 : outputs, first = gated ? begin / 2 : begin;
    for (int64_t m = 0; m < part.size; ++m) {
      float* row = totals + m * count;
      activate_outputs(row, count, bias, activation, gated, scratch);
      std::copy_n(row, gated ? count / 2 : count, y + (part.begin + m) * results + first);
    }
  }

  template <typename Pool>
  void combine(Pool& pool, const std::vector<int32_t>& slot_of, const float* results) const {
    constexpr int64_t kAtOnce = 16;
    const int64_t outputs = down.first.outputs;
    parallel_for(pool, (routing.tokens + kAtOnce - 1) / kAtOnce, [&](int64_t task) {
      Buffer<float> total(outputs);
      for (int64_t token = task * kAtOnce; token < std::min(routing.tokens, (task + 1) * kAtOnce); ++token) {
        std::fill_n(total.get(), outputs, 0.0f);
        for (int64_t choice = token * routing.choices; choice < (token + 1) * routing.choices; ++choice) {
          const int32_t row = routing.rows_of[choice];
          if (row < 0 || row >= routing.rows || slot_of[row] < 0) continue;  // dropped
          const float weight = routing.weights[choice];
          const float* result = results + slot_of[row] * outputs;
          for (int64_t i = 0; i < outputs; ++i) total.get()[i] += weight * result[i];
        }
        for (int64_t i = 0; i < outputs; ++i) y[token * outputs + i] = from_float<T>(total.get()[i]);
      }
    });
  }
};

}  // namespace jaxinfer
