#include "cpu/rows.h"

#include <algorithm>
#include <cmath>

namespace jaxinfer {

namespace {

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

}  // namespace

void Rows::set(int m, float* x) {
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

void Rows::multiply(const Matrix& matrix, int64_t begin, int64_t end, int first, int rows, float* y) const {
  switch (matrix.format) {
    case Format::kFloat32: return floats<FloatProduct<float>>(matrix, begin, end, first, rows, y);
    case Format::kBfloat16: return bfloat16s(matrix, begin, end, first, rows, y);
    case Format::kInt8: return int8(matrix, begin, end, first, rows, y);
    case Format::kInt4: return int4(matrix, begin, end, first, rows, y);
  }
}

template <typename P>
void Rows::floats(const Matrix& matrix, int64_t begin, int64_t end, int first, int rows, float* y) const {
  const auto* w = static_cast<const typename P::Weight*>(matrix.weight) + begin * inputs_;
  products<P>(w, end - begin, values<typename P::X>() + first * stride_, stride_, inputs_, rows, y);
}

void Rows::bfloat16s(const Matrix& matrix, int64_t begin, int64_t end, int first, int rows, float* y) const {
#if defined(JAXINFER_AMX)
  const auto* w = static_cast<const bfloat16*>(matrix.weight) + begin * inputs_;
  if (amx_.multiplies(rows)) return amx_.multiply<AmxBfloat16>(w, end - begin, inputs_, first, rows, y);
#endif
#if defined(__AVX512BF16__)
  if (pairs_) return floats<Bfloat16Product>(matrix, begin, end, first, rows, y);
#endif
  floats<FloatProduct<bfloat16>>(matrix, begin, end, first, rows, y);
}

void Rows::int8(const Matrix& matrix, int64_t begin, int64_t end, int first, int rows, float* y) const {
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
int32_t Rows::int8_totals(const int8_t* w, int64_t outputs, int first, int rows, int32_t* totals) const {
#if defined(JAXINFER_AMX)
  if (amx_.multiplies(rows)) {
    amx_.multiply<AmxInt8>(w, outputs, inputs_, first, rows, totals);
    return 0;
  }
#endif
  products<Int8Product>(w, outputs, values<Quantized>() + first * stride_, stride_, inputs_, rows, totals);
  return Int8Product::kOffset;
}

void Rows::int4(const Matrix& matrix, int64_t begin, int64_t end, int first, int rows, float* y) const {
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
void Rows::int4_scales(const Matrix& matrix, int64_t n, int64_t outputs, int64_t first, int64_t groups, int row,
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

}  // namespace jaxinfer
