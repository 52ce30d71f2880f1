// Products of a few rows with matrices of outputs by inputs, [N, K], as they are stored (`pallas_kernels/weights.py`).
//
// Memory is the bound, so it is read as it likes to be: one row of the matrix after another. One row of x multiplies one
// row of the matrix at a time; several multiply tiles of a few, whose successor is fetched meanwhile, in its order in
// memory (docs/cpu-speed.md).
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "cpu/simd.h"

namespace jaxinfer {

constexpr int kGroup = 128;  // inputs of int4 weights that share a scale
constexpr int kPadding = 128;  // rows of x are padded with zeros to a multiple of so many inputs

// int8 values of a row of x as the product takes them: with VNNI bytes, otherwise words, whose sums cannot saturate.
#if defined(__AVX512VNNI__)
using Quantized = int8_t;
#else
using Quantized = int16_t;
#endif

#if defined(__AVX512BW__)
// The sums over each of four vectors.
inline void ints4(const __m512i* sums, int32_t* y) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(sums[0], sums[1]), _mm512_unpackhi_epi32(sums[0], sums[1]));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(sums[2], sums[3]), _mm512_unpackhi_epi32(sums[2], sums[3]));
  const __m512i abcd = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(abcd), _mm512_extracti64x4_epi64(abcd, 1));
  const __m128i total = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), total);
}
#endif

// How one format is multiplied: blocks of kBlock inputs. `totals` adds up each of four sums.
//
// Factors, values of x and sums are kept in registers: GCC 12 would else load x again for each row of the matrix, or
// copy sums from one register to another.
template <typename W>
struct FloatProduct {
  using Weight = W;
  using X = float;
  using Sums = Floats;
  using Factor = Floats;
  static constexpr int kBlock = kFloats;
  static Sums none() { return zeros(); }
  static Factor factor(const Weight* w) { return in_register(load(w)); }
  static Floats values(const X* x) { return in_register(load(x)); }
  static Sums multiply(Factor w, Floats x, Sums sums) { return multiply_add(w, x, sums); }
  using Total = float;
  static Sums join(Sums a, Sums b) { return add(a, b); }
  static float total(Sums sums) { return sum(sums); }
  static void totals(const Sums* sums, Total* y) { sums_of(sums, y); }
};

#if defined(__AVX512BF16__)
// Rows of x in bfloat16, too: an instruction multiplies 32 pairs.
struct Bfloat16Product {
  using Weight = bfloat16;
  using X = bfloat16;
  using Sums = Floats;
  using Factor = __m512i;
  using Total = float;
  static constexpr int kBlock = 32;
  static Sums none() { return zeros(); }
  static Factor factor(const Weight* w) { return in_register(_mm512_loadu_si512(w)); }
  static __m512i values(const X* x) { return in_register(_mm512_loadu_si512(x)); }
  static Sums multiply(Factor w, __m512i x, Sums sums) {
    return in_register(_mm512_dpbf16_ps(sums, (__m512bh)w, (__m512bh)x));
  }
  static Sums join(Sums a, Sums b) { return add(a, b); }
  static float total(Sums sums) { return sum(sums); }
  static void totals(const Sums* sums, Total* y) { sums_of(sums, y); }
};
#endif

struct Int8Product {
  using Weight = int8_t;
  using X = Quantized;
  using Total = int32_t;
#if defined(__AVX512VNNI__)
  // The instruction multiplies unsigned by signed bytes, so that 128 is added to the weights. Whoever adds up subtracts
  // 128 times the sum of x.
  static constexpr int32_t kOffset = 128;
  static constexpr int kBlock = 64;
  using Sums = __m512i;
  using Factor = __m512i;
  static Sums none() { return _mm512_setzero_si512(); }
  static Factor factor(const Weight* w) { return _mm512_xor_si512(_mm512_loadu_si512(w), _mm512_set1_epi8(-128)); }
  static __m512i values(const X* x) { return in_register(_mm512_loadu_si512(x)); }
  static Sums multiply(Factor w, __m512i x, Sums sums) { return in_register(_mm512_dpbusd_epi32(sums, w, x)); }
  static Sums join(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
  static int32_t total(Sums sums) { return _mm512_reduce_add_epi32(sums); }
  static void totals(const Sums* sums, Total* y) { ints4(sums, y); }
#elif defined(__AVX512BW__)
  static constexpr int32_t kOffset = 0;
  static constexpr int kBlock = 32;
  using Sums = __m512i;
  using Factor = __m512i;
  static Sums none() { return _mm512_setzero_si512(); }
  static Factor factor(const Weight* w) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
  }
  static __m512i values(const X* x) { return in_register(_mm512_loadu_si512(x)); }
  static Sums multiply(Factor w, __m512i x, Sums sums) { return _mm512_add_epi32(sums, _mm512_madd_epi16(w, x)); }
  static Sums join(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
  static int32_t total(Sums sums) { return _mm512_reduce_add_epi32(sums); }
  static void totals(const Sums* sums, Total* y) { ints4(sums, y); }
#elif defined(__AVX2__)
  static constexpr int32_t kOffset = 0;
  static constexpr int kBlock = 16;
  using Sums = __m256i;
  using Factor = __m256i;
  static Sums none() { return _mm256_setzero_si256(); }
  static Factor factor(const Weight* w) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
  }
  static __m256i values(const X* x) { return in_register(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }
  static Sums multiply(Factor w, __m256i x, Sums sums) { return _mm256_add_epi32(sums, _mm256_madd_epi16(w, x)); }
  static Sums join(Sums a, Sums b) { return _mm256_add_epi32(a, b); }
  static int32_t total(Sums sums) {
    const __m128i x = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    const __m128i y = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
  }
  static void totals(const Sums* sums, Total* y) {
    const __m256i x = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
    const __m128i total = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y), total);
  }
#else
  static constexpr int32_t kOffset = 0;
  static constexpr int kBlock = 16;
  using Sums = int32_t;
  using Factor = const Weight*;
  static Sums none() { return 0; }
  static Factor factor(const Weight* w) { return w; }
  static const X* values(const X* x) { return x; }
  static Sums multiply(Factor w, const X* x, Sums sums) {
    for (int i = 0; i < kBlock; ++i) sums += static_cast<int32_t>(w[i]) * x[i];
    return sums;
  }
  static Sums join(Sums a, Sums b) { return a + b; }
  static int32_t total(Sums sums) { return sums; }
  static void totals(const Sums* sums, Total* y) { std::copy(sums, sums + 4, y); }
#endif
};

// How far ahead a row of the matrix that multiplies one row of x is fetched, in bytes.
constexpr int64_t kRowAhead = 2048;

// One row of the matrix times one row of x. Several sums, since an addition waits for the one before.
template <typename P>
typename P::Sums row_product(const typename P::Weight* w, const typename P::X* x, int64_t inputs) {
  constexpr int kSums = 4, kStep = kSums * P::kBlock;
  typename P::Sums sums[kSums];
  for (auto& each : sums) each = P::none();
  int64_t k = 0;
  for (; k + kStep <= inputs; k += kStep) {
    for (int i = 0; i < kSums; ++i) {
      const int64_t at = k + i * P::kBlock;
      prefetch(reinterpret_cast<const char*>(w + at) + kRowAhead);
      sums[i] = P::multiply(P::factor(w + at), P::values(x + at), sums[i]);
    }
  }
  for (; k + P::kBlock <= inputs; k += P::kBlock) {
    sums[0] = P::multiply(P::factor(w + k), P::values(x + k), sums[0]);
  }
  if (k < inputs) {
    typename P::Weight last[P::kBlock] = {};
    std::memcpy(last, w + k, (inputs - k) * sizeof(last[0]));
    sums[0] = P::multiply(P::factor(last), P::values(x + k), sums[0]);
  }
  return P::join(P::join(sums[0], sums[1]), P::join(sums[2], sums[3]));
}

// How often a line of the matrix is fetched for tiles, and how far apart, in bytes: most likely a processor that has many
// lines under way leaves some out, for each of which a tile waits later (docs/cpu-speed.md).
constexpr int kTries = 3;
constexpr int64_t kAgain = 16384;

// Four rows of the matrix times M rows of x, whose rows are `stride` apart. y: the total of r and m at r + m * width.
//
// Fetches `lines` lines of 64 bytes for each block of inputs, from `ahead` on, after tries further ahead.
template <typename P, int M>
void tile_product(const typename P::Weight* w, const typename P::X* x, int64_t stride, int64_t inputs,
                  typename P::Total* y, int64_t width, const char* ahead, int lines) {
  typename P::Sums sums[M][4];
  for (auto& row : sums)
    for (auto& each : row) each = P::none();
  int64_t k = 0;
  auto block = [&](const typename P::Weight* rows, int64_t row_stride) {
    typename P::Factor factors[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) factors[r] = P::factor(rows + r * row_stride);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const auto values = P::values(x + m * stride + k);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) sums[m][r] = P::multiply(factors[r], values, sums[m][r]);
    }
  };
  for (; k + P::kBlock <= inputs; k += P::kBlock) {
    for (int line = 0; line < lines; ++line, ahead += 64) {
#pragma GCC unroll 4
      for (int again = kTries - 1; again >= 0; --again) prefetch(ahead + again * kAgain);
    }
    block(w + k, inputs);
  }
  if (k < inputs) {
    typename P::Weight last[4 * P::kBlock] = {};
    for (int r = 0; r < 4; ++r) std::memcpy(last + r * P::kBlock, w + r * inputs + k, (inputs - k) * sizeof(last[0]));
    block(last, P::kBlock);
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) P::totals(sums[m], y + m * width);
}

// Rows of x at a time: as many as the registers hold sums of, with four rows of the matrix.
#if defined(__AVX512F__)
constexpr int kTileRows = 4;
#else
constexpr int kTileRows = 2;
#endif

// How far ahead tiles are fetched at least, in bytes.
constexpr int64_t kLeastAhead = 8192;

// Four rows of the matrix times all rows of x.
//
// The four behind them are fetched meanwhile, each part of them along with some rows of x: memory must not wait for the
// last of these.
template <typename P>
void tile_products(const typename P::Weight* w, const typename P::X* x, int64_t stride, int64_t inputs, int rows,
                   typename P::Total* y, int64_t width) {
  constexpr int kLines = (4 * P::kBlock * sizeof(*w) + 63) / 64;  // of a block of four rows; one for what is shorter
  const int parts = std::min((rows + kTileRows - 1) / kTileRows, kLines), lines = (kLines + parts - 1) / parts;
  const auto* ahead = reinterpret_cast<const char*>(w) + std::max<int64_t>(4 * inputs * sizeof(*w), kLeastAhead);
  for (int m = 0; m < rows; m += kTileRows) {
    const int part = m / kTileRows;
    auto some = [=](auto count) {
      tile_product<P, decltype(count)::value>(w, x + m * stride, stride, inputs, y + m * width, width,
                                              ahead + part * lines * (inputs / P::kBlock) * 64,
                                              part < parts ? lines : 0);
    };
    switch (std::min(rows - m, kTileRows)) {
#if defined(__AVX512F__)
      case 4: some(std::integral_constant<int, 4>()); break;
      case 3: some(std::integral_constant<int, 3>()); break;
#endif
      case 2: some(std::integral_constant<int, 2>()); break;
      default: some(std::integral_constant<int, 1>()); break;
    }
  }
}

// Some rows of a matrix times all rows of x. y: [rows, outputs].
template <typename P>
void products(const typename P::Weight* w, int64_t outputs, const typename P::X* x, int64_t stride, int64_t inputs,
              int rows, typename P::Total* y) {
  int64_t n = 0;
  for (; n + 4 <= outputs; n += 4) {
    if (rows == 1) {
      typename P::Sums sums[4];
      for (int i = 0; i < 4; ++i) sums[i] = row_product<P>(w + (n + i) * inputs, x, inputs);
      P::totals(sums, y + n);
    } else {
      tile_products<P>(w + n * inputs, x, stride, inputs, rows, y + n, outputs);
    }
  }
  for (; n < outputs; ++n) {
    for (int m = 0; m < rows; ++m) {
      y[m * outputs + n] = P::total(row_product<P>(w + n * inputs, x + m * stride, inputs));
    }
  }
}

// A value of x that multiplies int4 weights is 256 times a high byte plus a low one, both signed: as exact as a word,
// while weights need less unpacking.
constexpr int kInt4Levels = 127 * 256 + 127;

constexpr int64_t kInt4Bytes = kGroup / 2;  // of a group's weights

// Splits the values of a group into as many high bytes for the low nibbles of its weights and for the high ones, then
// low bytes likewise. pairs: [kGroup] of two bytes, the lower one first.
inline void split_values(const int16_t* values, uint16_t* pairs) {
  constexpr int kPairs = kGroup / 2;
  for (int i = 0; i < kPairs; ++i) {
    const uint16_t first = values[i], second = values[i + kPairs];
    const uint16_t first_high = (values[i] + 128) >> 8, second_high = (values[i + kPairs] + 128) >> 8;
    pairs[i] = (first_high & 255) | second_high << 8;
    pairs[i + kPairs] = (first & 255) | second << 8;
  }
}

// Rows of x that multiply int4 weights at a time.
constexpr int kInt4Rows = 4;

// Outputs of int4 weights at a time: their scales of a group lie beside each other.
constexpr int kInt4Outputs = 16;

// The most groups of int4 weights at a time: of more inputs, a row of x would not stay in the first-level cache.
constexpr int64_t kInt4Groups = 48;

// How far ahead int4 weights are fetched at least, in bytes that are read before.
constexpr int64_t kInt4Ahead = 8192;

#if defined(__AVX512BW__) || defined(__AVX2__)

#if defined(__AVX512BW__)
using Bytes = __m512i;
inline Bytes load_bytes(const void* p) { return in_register(_mm512_loadu_si512(p)); }
inline Bytes low_nibbles(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
inline Floats floats_of(Bytes x) { return _mm512_cvtepi32_ps(x); }
#else
using Bytes = __m256i;
inline Bytes load_bytes(const void* p) { return in_register(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Bytes low_nibbles(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
inline Floats floats_of(Bytes x) { return _mm256_cvtepi32_ps(x); }
#endif

// The weights of an output's group: in the low nibbles, then in the high ones.
struct Int4Weights {
  static constexpr int kVectors = kInt4Bytes / sizeof(Bytes);
  Bytes nibbles[2][kVectors];

  void load(const uint8_t* w) {
#pragma GCC unroll 2
    for (int i = 0; i < kVectors; ++i) {
      const Bytes packed = load_bytes(w + i * sizeof(Bytes));
      nibbles[0][i] = low_nibbles(packed);
      nibbles[1][i] = high_nibbles(packed);
    }
  }
};

// R outputs' weights of a group times its values of x: int32 numbers whose sums are the results.
//
// kInt4Tile: outputs that share what is loaded of x, as many as the registers hold sums of.
#if defined(__AVX512VNNI__)
constexpr int kInt4Tile = 4;

template <int R>
inline void int4_products_of_group(const Int4Weights* w, const int8_t* x, Bytes* y) {
  const Bytes high[2] = {load_bytes(x), load_bytes(x + kInt4Bytes)};
  const Bytes low[2] = {load_bytes(x + kGroup), load_bytes(x + kGroup + kInt4Bytes)};
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    Bytes sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w[r].nibbles[0][0], high[0]);
    sums = _mm512_slli_epi32(_mm512_dpbusd_epi32(sums, w[r].nibbles[1][0], high[1]), 8);
    sums = _mm512_dpbusd_epi32(sums, w[r].nibbles[0][0], low[0]);
    y[r] = _mm512_dpbusd_epi32(sums, w[r].nibbles[1][0], low[1]);
  }
}
#else
constexpr int kInt4Tile = 2;

#if defined(__AVX512BW__)
inline Bytes multiply_nibbles(Bytes nibbles, Bytes x, Bytes sums) {
  return _mm512_add_epi16(sums, _mm512_maddubs_epi16(nibbles, x));
}
inline Bytes joined(Bytes high, Bytes low) {
  return _mm512_add_epi32(_mm512_madd_epi16(high, _mm512_set1_epi16(256)), _mm512_madd_epi16(low, _mm512_set1_epi16(1)));
}
#else
inline Bytes multiply_nibbles(Bytes nibbles, Bytes x, Bytes sums) {
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16(nibbles, x));
}
inline Bytes joined(Bytes high, Bytes low) {
  return _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(256)), _mm256_madd_epi16(low, _mm256_set1_epi16(1)));
}
#endif

template <int R>
inline void int4_products_of_group(const Int4Weights* w, const int8_t* x, Bytes* y) {
  Bytes high[R] = {}, low[R] = {};  // sums of words, which those of 4 products of a nibble and a byte, or of 8, fit
#pragma GCC unroll 2
  for (int nibble = 0; nibble < 2; ++nibble) {
#pragma GCC unroll 2
    for (int i = 0; i < Int4Weights::kVectors; ++i, x += sizeof(Bytes)) {
      const Bytes high_bytes = load_bytes(x), low_bytes = load_bytes(x + kGroup);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        high[r] = multiply_nibbles(w[r].nibbles[nibble][i], high_bytes, high[r]);
        low[r] = multiply_nibbles(w[r].nibbles[nibble][i], low_bytes, low[r]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) y[r] = joined(high[r], low[r]);
}
#endif

// R outputs of int4 weights, which are `row_bytes` apart, times M rows of x, which are `stride` apart: y[4 * m + r] is a
// vector whose sum is the result.
//
// scales: [M, groups, kInt4Outputs], of these outputs first. ahead: how far ahead it fetches, in bytes.
template <int M, int R>
inline void int4_sums(const uint8_t* w, int64_t row_bytes, const float* scales, const int8_t* x, int64_t stride,
                      int64_t groups, int64_t ahead, Floats* y) {
  Floats sums[M][R];
  for (auto& row : sums)
    for (auto& each : row) each = zeros();
  for (int64_t g = 0; g < groups; ++g, w += kInt4Bytes, x += 2 * kGroup, scales += kInt4Outputs) {
    Int4Weights weights[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const uint8_t* row = w + r * row_bytes;
      prefetch(row + 2 * ahead);
      prefetch(row + ahead);
      weights[r].load(row);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      Bytes products[R];
      int4_products_of_group<R>(weights, x + m * stride, products);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Floats scale = broadcast(scales[m * groups * kInt4Outputs + r]);
        sums[m][r] = multiply_add(floats_of(products[r]), scale, sums[m][r]);
      }
    }
  }
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) y[4 * m + r] = sums[m][r];
}

#else

constexpr int kInt4Tile = 1;

template <int M, int R>
inline void int4_sums(const uint8_t* w, int64_t, const float* scales, const int8_t* x, int64_t stride, int64_t groups,
                      int64_t, Floats* y) {
  for (int m = 0; m < M; ++m) {
    y[4 * m] = zeros();
    for (int64_t g = 0; g < groups; ++g) {
      const uint8_t* weights = w + g * kInt4Bytes;
      const int8_t* values = x + m * stride + g * 2 * kGroup;
      int32_t high = 0, low = 0;
      for (int i = 0; i < kInt4Bytes; ++i) {
        const int first = weights[i] & 15, second = weights[i] >> 4;
        high += first * values[i] + second * values[i + kInt4Bytes];
        low += first * values[i + kGroup] + second * values[i + kGroup + kInt4Bytes];
      }
      y[4 * m][0] += scales[(m * groups + g) * kInt4Outputs] * static_cast<float>(256 * high + low);
    }
  }
}

#endif

// Adds to y [M, width] up to kInt4Outputs outputs of int4 weights times M rows of x, as `int4_sums`. For one row of x
// they are read one after another, as memory likes it.
template <int M>
void int4_products(const uint8_t* w, int64_t row_bytes, int64_t outputs, const float* scales, const int8_t* x,
                   int64_t stride, int64_t groups, float* y, int64_t width) {
  constexpr int kTile = M == 1 ? 1 : kInt4Tile;
  const int64_t rows_ahead = std::max<int64_t>((kInt4Ahead - 1) / (groups * kInt4Bytes) + 1, kInt4Tile);
  const int64_t ahead = rows_ahead * row_bytes;
  Floats sums[4 * M];
  int64_t n = 0;
  for (; n + 4 <= outputs; n += 4) {
    for (int64_t r = n; r < n + 4; r += kTile) {
      int4_sums<M, kTile>(w + r * row_bytes, row_bytes, scales + r, x, stride, groups, ahead, sums + r - n);
    }
    for (int m = 0; m < M; ++m) {
      float totals[4];
      sums_of(sums + 4 * m, totals);
      for (int r = 0; r < 4; ++r) y[m * width + n + r] += totals[r];
    }
  }
  for (; n < outputs; ++n) {
    int4_sums<M, 1>(w + n * row_bytes, row_bytes, scales + n, x, stride, groups, ahead, sums);
    for (int m = 0; m < M; ++m) y[m * width + n] += sum(sums[4 * m]);
  }
}

}  // namespace jaxinfer
