// Linear layers of a few rows with what comes directly before and after the product (`linear/api.py`).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/activations.h"
#include "cpu/rows.h"
#include "cpu/simd.h"
#include "cpu/tasks.h"

namespace jaxinfer {

// LayerNorm, or RMSNorm without a shift. Without a scale: nothing.
struct Norm {
  const float* scale = nullptr;  // [K]
  const float* shift = nullptr;  // [K]
  float eps = 0.0f;
};

// Reads a row and normalises it, in float.
template <typename T>
void read_row(const T* x, int64_t size, const Norm& norm, float* y) {
  for (int64_t i = 0; i < size; ++i) y[i] = to_float(x[i]);
  if (norm.scale == nullptr) return;
  if (norm.shift != nullptr) {
    const float mean = sum_of(y, size) / size;
    for (int64_t i = 0; i < size; ++i) y[i] -= mean;
  }
  const float factor = 1.0f / std::sqrt(sum_of_squares(y, size) / size + norm.eps);
  for (int64_t i = 0; i < size; ++i) y[i] = y[i] * factor * norm.scale[i];
  if (norm.shift != nullptr) {
    for (int64_t i = 0; i < size; ++i) y[i] += norm.shift[i];
  }
}

// y = residual + act(norm(x) W^T + b), with what is not given left out.
template <typename T>
struct Linear {
  int rows;
  const T* x;  // [rows, K]
  Norm norm;
  Matrix matrix;
  const float* bias;  // [N]
  const T* residual;  // [rows, N]
  Activation activation;
  bool gated;
  T* y;  // [rows, N], or [rows, N / 2] if gated

  template <typename Pool>
  void run(Pool& pool) const {
    Rows prepared(matrix.format, rows, matrix.inputs, std::is_same_v<T, bfloat16>);
    Buffer<float> row(prepared.stride());
    for (int m = 0; m < rows; ++m) {
      read_row(x + m * matrix.inputs, matrix.inputs, norm, row.get());
      prepared.set(m, row.get());
    }
    const int64_t units = (matrix.outputs + kUnit - 1) / kUnit;
    parallel_ranges(pool, units, least_units(matrix), [&](int64_t begin, int64_t end) {
      const int64_t last = std::min(end * kUnit, matrix.outputs);
      for (int64_t n = begin * kUnit; n < last; n += kBlock) compute(prepared, n, std::min(n + kBlock, last));
    });
  }

 private:
  void compute(const Rows& prepared, int64_t begin, int64_t end) const {
    const int64_t width = end - begin;
    Buffer<float> buffer((rows + 1) * width);
    float *totals = buffer.get(), *scratch = totals + rows * width;
    prepared.multiply(matrix, begin, end, 0, rows, totals);
    for (int m = 0; m < rows; ++m) finish(totals + m * width, m, begin, width, scratch);
  }

  void finish(float* totals, int m, int64_t begin, int64_t width, float* scratch) const {
    activate_outputs(totals, width, bias ? bias + begin : nullptr, activation, gated, scratch);
    const int64_t results = gated ? matrix.outputs / 2 : matrix.outputs;
    if (gated) width /= 2, begin /= 2;
    const int64_t at = m * results + begin;
    if (residual != nullptr) {
      for (int64_t i = 0; i < width; ++i) totals[i] += to_float(residual[at + i]);
    }
    for (int64_t i = 0; i < width; ++i) y[at + i] = from_float<T>(totals[i]);
  }
};

}  // namespace jaxinfer
