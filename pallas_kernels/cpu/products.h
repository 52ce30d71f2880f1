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

// Rows of x that multiply int4 weights at a time.
constexpr int kInt4Rows = 4;

// Outputs of int4 weights at a time: their scales of a group lie beside each other.
constexpr int kInt4Outputs = 16;

// How far ahead int4 weights are fetched, in words: unpacking them leaves no room for many loads that are under way.
constexpr int kInt4Ahead = 4096;

#if defined(__AVX512BW__) || defined(__AVX2__)

// Words of int4 weights and of x, and what is done with them.
#if defined(__AVX512BW__)
using Int4Words = __m512i;
inline Int4Words load_words(const void* p) { return _mm512_loadu_si512(p); }
inline Int4Words shifted(Int4Words x, int bits) { return _mm512_srli_epi16(x, bits); }
inline Int4Words lowest_nibble(Int4Words x) { return _mm512_and_si512(x, _mm512_set1_epi16(15)); }
inline Int4Words no_words() { return _mm512_setzero_si512(); }
inline Int4Words multiply_words(Int4Words x, Int4Words y, Int4Words sums) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sums, x, y);
#else
  return _mm512_add_epi32(sums, _mm512_madd_epi16(x, y));
#endif
}
inline Floats floats_of(Int4Words x) { return _mm512_cvtepi32_ps(x); }
#else
using Int4Words = __m256i;
inline Int4Words load_words(const void* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Int4Words shifted(Int4Words x, int bits) { return _mm256_srli_epi16(x, bits); }
inline Int4Words lowest_nibble(Int4Words x) { return _mm256_and_si256(x, _mm256_set1_epi16(15)); }
inline Int4Words no_words() { return _mm256_setzero_si256(); }
inline Int4Words multiply_words(Int4Words x, Int4Words y, Int4Words sums) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(x, y));
}
inline Floats floats_of(Int4Words x) { return _mm256_cvtepi32_ps(x); }
#endif

// One output of int4 weights times M rows of x, which are `stride` apart, as vectors whose sums are the results.
//
// scales: [M, groups, kInt4Outputs], of this output first.
template <int M>
inline void int4_sums(const uint16_t* w, const float* scales, const int16_t* x, int64_t stride, int64_t groups,
                      Floats* sums) {
  constexpr int kRun = kGroup / 4;  // words of a group, inputs of each of its four runs
  constexpr int kWords = sizeof(Int4Words) / 2;
  for (int m = 0; m < M; ++m) sums[m] = zeros();
  for (int64_t g = 0; g < groups; ++g) {
    prefetch(w + g * kRun + kInt4Ahead);
    Int4Words parts[M];
    for (auto& part : parts) part = no_words();
#pragma GCC unroll 2
    for (int word = 0; word < kRun; word += kWords) {
      const Int4Words packed = in_register(load_words(w + g * kRun + word));
      const Int4Words runs[4] = {lowest_nibble(packed), lowest_nibble(shifted(packed, 4)),
                                 lowest_nibble(shifted(packed, 8)), shifted(packed, 12)};
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const int16_t* values = x + m * stride + g * kGroup + word;
#pragma GCC unroll 4
        for (int run = 0; run < 4; ++run) {
          parts[m] = multiply_words(runs[run], load_words(values + run * kRun), parts[m]);
        }
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const Floats scale = broadcast(scales[(m * groups + g) * kInt4Outputs]);
      sums[m] = multiply_add(floats_of(parts[m]), scale, sums[m]);
    }
  }
}

#else

template <int M>
inline void int4_sums(const uint16_t* w, const float* scales, const int16_t* x, int64_t stride, int64_t groups,
                      Floats* sums) {
  constexpr int kRun = kGroup / 4;
  for (int m = 0; m < M; ++m) {
    sums[m] = zeros();
    for (int64_t g = 0; g < groups; ++g) {
      int32_t part = 0;
      for (int i = 0; i < kGroup; ++i) {
        const int nibble = w[g * kRun + i % kRun] >> (4 * (i / kRun)) & 15;
        part += nibble * x[m * stride + g * kGroup + i];
      }
      sums[m][0] += scales[(m * groups + g) * kInt4Outputs] * static_cast<float>(part);
    }
  }
}

#endif

// Adds to y [M, width] up to kInt4Outputs outputs of int4 weights times M rows of x. scales: [M, groups, kInt4Outputs].
template <int M>
void int4_products(const uint16_t* w, int64_t outputs, const float* scales, const int16_t* x, int64_t stride,
                   int64_t groups, float* y, int64_t width) {
  const int64_t words = groups * kGroup / 4;  // of an output
  for (int64_t n = 0; n < outputs; ++n) {
    Floats sums[M];
    int4_sums<M>(w + n * words, scales + n, x, stride, groups, sums);
    for (int m = 0; m < M; ++m) y[m * width + n] += sum(sums[m]);
  }
}

}  // namespace jaxinfer
