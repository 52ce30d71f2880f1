// Matrices as `Weights` of weights.py, and the rows of x that multiply them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/amx.h"
#include "cpu/buffer.h"
#include "cpu/products.h"
#include "cpu/simd.h"

namespace jaxinfer {

enum class Format { kFloat32, kBfloat16, kInt8, kInt4 };

// A matrix of outputs by inputs, as `Weights` of weights.py: [N, K], or words of four int4 values.
struct Matrix {
  Format format;
  const void* weight;
  const void* scale;  // int8: float [N]; int4: bfloat16 [K / kGroup, N]; else none
  int64_t outputs, inputs;

  // Bytes of one output.
  int64_t row_bytes() const {
    switch (format) {
      case Format::kFloat32: return 4 * inputs;
      case Format::kBfloat16: return 2 * inputs;
      case Format::kInt8: return inputs;
      default: return inputs / 2;
    }
  }
};

// Quantises so that the largest magnitude is `levels`, and returns the scale. What is not finite makes it NaN, and so
// all that is computed with it.
template <typename Q>
float quantize(const float* x, int64_t size, int levels, Q* q) {
  uint32_t largest = 0;  // magnitudes are in the order of their bits
  for (int64_t i = 0; i < size; ++i) largest = std::max(largest, bit_cast<uint32_t>(x[i]) & 0x7fffffff);
  if (largest >= 0x7f800000) {
    std::fill(q, q + size, Q(0));
    return NAN;
  }
  const float scale = std::max(bit_cast<float>(largest), 1e-30f) / levels;
  for (int64_t i = 0; i < size; ++i) q[i] = static_cast<Q>(nearest(x[i] / scale));
  return scale;
}

template <typename Q>
int32_t sum_of_quantized(const Q* q, int64_t size) {
  int32_t total = 0;
  for (int64_t i = 0; i < size; ++i) total += q[i];
  return total;
}

// Rows of x in the form that a format's products take, padded with zeros.
class Rows {
 public:
  // bfloat16_x: x is in bfloat16, and may be rounded to it once more.
  Rows(Format format, int rows, int64_t inputs, bool bfloat16_x)
      : format_(format),
        pairs_(kMultipliesPairs && format == Format::kBfloat16 && bfloat16_x),
        inputs_(inputs),
        stride_((inputs + kPadding - 1) / kPadding * kPadding),
        groups_(stride_ / kGroup),
        values_(rows * stride_ * 4),
        scales_(rows * (1 + groups_)),
        offsets_(rows * groups_),
        amx_(format == Format::kInt8 || pairs_, rows, stride_ * (pairs_ ? 2 : 1)) {}

  // Sets row m from floats, which it changes. x: [stride], of which only the inputs are given.
  void set(int m, float* x) {
    std::fill(x + inputs_, x + stride_, 0.0f);
    switch (format_) {
      case Format::kInt8: {
        auto* q = values<Quantized>() + m * stride_;
        scales_.get()[m] = quantize(x, stride_, 127, q);
        offsets_.get()[m] = static_cast<float>(sum_of_quantized(q, stride_));
        amx_.set(m, q);
        break;
      }
      case Format::kInt4:
        for (int64_t g = 0; g < groups_; ++g) {
          int16_t q[kGroup];
          const float scale = quantize(x + g * kGroup, kGroup, kInt4Levels, q);
          split_values(q, values<uint16_t>() + m * stride_ + g * kGroup);
          scales_.get()[m * groups_ + g] = scale;
          offsets_.get()[m * groups_ + g] = -8.0f * static_cast<float>(sum_of_quantized(q, kGroup)) * scale;
        }
        break;
      default:
        if (pairs_) {
          bfloat16* row = values<bfloat16>() + m * stride_;
          for (int64_t i = 0; i < stride_; ++i) row[i] = from_float<bfloat16>(x[i]);
          amx_.set(m, row);
        } else {
          std::copy(x, x + stride_, values<float>() + m * stride_);
        }
    }
  }

  // Multiplies rows [first, first + rows) by outputs [begin, end). y: [rows, end - begin].
  void multiply(const Matrix& matrix, int64_t begin, int64_t end, int first, int rows, float* y) const {
    switch (matrix.format) {
      case Format::kFloat32: return floats<FloatProduct<float>>(matrix, begin, end, first, rows, y);
      case Format::kBfloat16: return bfloat16s(matrix, begin, end, first, rows, y);
      case Format::kInt8: return int8(matrix, begin, end, first, rows, y);
      case Format::kInt4: return int4(matrix, begin, end, first, rows, y);
    }
  }

  int64_t stride() const { return stride_; }

 private:
  template <typename T>
  T* values() const {
    return reinterpret_cast<T*>(values_.get());
  }

  template <typename P>
  void floats(const Matrix& matrix, int64_t begin, int64_t end, int first, int rows, float* y) const {
    const auto* w = static_cast<const typename P::Weight*>(matrix.weight) + begin * inputs_;
    products<P>(w, end - begin, values<typename P::X>() + first * stride_, stride_, inputs_, rows, y);
  }

  void bfloat16s(const Matrix& matrix, int64_t begin, int64_t end, int first, int rows, float* y) const {
#if defined(JAXINFER_AMX)
    const auto* w = static_cast<const bfloat16*>(matrix.weight) + begin * inputs_;
    if (amx_.multiplies(rows)) return amx_.multiply<AmxBfloat16>(w, end - begin, inputs_, first, rows, y);
#endif
#if defined(__AVX512BF16__)
    if (pairs_) return floats<Bfloat16Product>(matrix, begin, end, first, rows, y);
#endif
    floats<FloatProduct<bfloat16>>(matrix, begin, end, first, rows, y);
  }

  void int8(const Matrix& matrix, int64_t begin, int64_t end, int first, int rows, float* y) const {
    const int64_t width = end - begin;
    const auto* w = static_cast<const int8_t*>(matrix.weight) + begin * inputs_;
    Buffer<int32_t> totals(rows * width);
    const int32_t added = int8_totals(w, width, first, rows, totals.get());
    const float* w_scale = static_cast<const float*>(matrix.scale) + begin;
    for (int m = 0; m < rows; ++m) {
      const int32_t offset = added * static_cast<int32_t>(offsets_.get()[first + m]);
      const float scale = scales_.get()[first + m];
      for (int64_t n = 0; n < width; ++n) {
        y[m * width + n] = static_cast<float>(totals.get()[m * width + n] - offset) * scale * w_scale[n];
      }
    }
  }

  // Multiplies by int8 weights, and returns what was added to each of them.
  int32_t int8_totals(const int8_t* w, int64_t outputs, int first, int rows, int32_t* totals) const {
#if defined(JAXINFER_AMX)
    if (amx_.multiplies(rows)) {
      amx_.multiply<AmxInt8>(w, outputs, inputs_, first, rows, totals);
      return 0;
    }
#endif
    products<Int8Product>(w, outputs, values<Quantized>() + first * stride_, stride_, inputs_, rows, totals);
    return Int8Product::kOffset;
  }

  void int4(const Matrix& matrix, int64_t begin, int64_t end, int first, int rows, float* y) const {
    const int64_t width = end - begin, row_bytes = matrix.row_bytes();
    const int64_t parts = (groups_ + kInt4Groups - 1) / kInt4Groups;
    Buffer<float> scales(std::min(rows, kInt4Rows) * kInt4Groups * kInt4Outputs);
    std::fill(y, y + rows * width, 0.0f);
    for (int64_t n = begin; n < end; n += kInt4Outputs) {
      const int64_t outputs = std::min<int64_t>(kInt4Outputs, end - n);
      const auto* w = static_cast<const uint8_t*>(matrix.weight) + n * row_bytes;
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t g = groups_ * part / parts, next = groups_ * (part + 1) / parts, groups = next - g;
        for (int m = 0; m < rows; m += kInt4Rows) {
          const int some = std::min(rows - m, kInt4Rows);
          float* totals = y + m * width + n - begin;
          for (int i = 0; i < some; ++i) {
            int4_scales(matrix, n, outputs, g, groups, first + m + i, scales.get() + i * groups * kInt4Outputs,
                        totals + i * width);
          }
          const auto product = some == 4   ? int4_products<4>
                               : some == 3 ? int4_products<3>
                               : some == 2 ? int4_products<2>
                                           : int4_products<1>;
          const int8_t* x = values<int8_t>() + 2 * ((first + m) * stride_ + g * kGroup);
          product(w + g * kInt4Bytes, row_bytes, outputs, scales.get(), x, 2 * stride_, groups, totals, width);
        }
      }
    }
  }

  // The scales of outputs from n on and of groups from `first` on for one row of x: scales [groups, kInt4Outputs] are
  // those of the weights times that of the row's group. Adds to `totals` what corrects that 8 is added to the
  // weights.
  void int4_scales(const Matrix& matrix, int64_t n, int64_t outputs, int64_t first, int64_t groups, int row,
                   float* scales, float* totals) const {
    constexpr int kVectors = kInt4Outputs / kFloats;
    Floats offsets[kVectors];
    for (auto& each : offsets) each = zeros();
    for (int64_t g = first; g < first + groups; ++g) {
      const bfloat16* from = static_cast<const bfloat16*>(matrix.scale) + g * matrix.outputs + n;
      prefetch(from + 2 * kInt4Outputs);
      for (int i = 0; i < kVectors; ++i, from += kFloats, scales += kFloats) {
        const int64_t left = outputs - i * kFloats;
        const Floats scale = left >= kFloats ? load(from) : load_first(from, std::max<int64_t>(left, 0));
        store(scales, scale * broadcast(scales_.get()[row * groups_ + g]));
        offsets[i] = multiply_add(scale, broadcast(offsets_.get()[row * groups_ + g]), offsets[i]);
      }
    }
    float all[kInt4Outputs];
    for (int i = 0; i < kVectors; ++i) store(all + i * kFloats, offsets[i]);
    for (int64_t i = 0; i < outputs; ++i) totals[i] += all[i];
  }

#if defined(__AVX512BF16__)
  static constexpr bool kMultipliesPairs = true;
#else
  static constexpr bool kMultipliesPairs = false;
#endif

  Format format_;
  bool pairs_;  // rows are in bfloat16
  int64_t inputs_, stride_, groups_;
  Buffer<std::byte> values_;
  Buffer<float> scales_;   // int8: of each row; int4: of each group
  Buffer<float> offsets_;  // int8: each row's sum, which is exact up to 2^24; int4: -8 times each group's sum of x
  AmxRows amx_;
};

// Ranges of outputs are in units of so many: even, for pairs, and whole tiles of the products.
constexpr int64_t kUnit = 16;

// The fewest units of a range: as many bytes of weights as take longer than to start it.
inline int64_t least_units(const Matrix& matrix) {
  return std::max<int64_t>((32 << 10) / (kUnit * matrix.row_bytes()), 1);
}

// Outputs whose results are kept at a time, while what comes after the product is computed.
constexpr int64_t kBlock = 256;

}  // namespace jaxinfer
