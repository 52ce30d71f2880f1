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

// Rows of x in the form that a format's products take, padded with zeros. Its functions are compiled once, in rows.cc.
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
  void set(int m, float* x);

  // Multiplies rows [first, first + rows) by outputs [begin, end). y: [rows, end - begin].
  void multiply(const Matrix& matrix, int64_t begin, int64_t end, int first, int rows, float* y) const;

  int64_t stride() const { return stride_; }

 private:
  template <typename T>
  T* values() const {
    return reinterpret_cast<T*>(values_.get());
  }

  template <typename P>
  void floats(const Matrix& matrix, int64_t begin, int64_t end, int first, int rows, float* y) const;
  void bfloat16s(const Matrix& matrix, int64_t begin, int64_t end, int first, int rows, float* y) const;
  void int8(const Matrix& matrix, int64_t begin, int64_t end, int first, int rows, float* y) const;
  int32_t int8_totals(const int8_t* w, int64_t outputs, int first, int rows, int32_t* totals) const;
  void int4(const Matrix& matrix, int64_t begin, int64_t end, int first, int rows, float* y) const;
  void int4_scales(const Matrix& matrix, int64_t n, int64_t outputs, int64_t first, int64_t groups, int row,
                   float* scales, float* totals) const;

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
