// What attention does with vectors besides `cpu/simd.h`.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/simd.h"

namespace jaxinfer {

#if defined(__AVX512F__) && defined(__AVX512BW__)

inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b if one of them is NaN

// Stores a vector in kRows parts of equal size.
template <int kRows>
inline void store_parts(Floats x, float* p, int64_t stride) {
  static_assert(kRows == 1 || kRows == 2 || kRows == 4);
  if constexpr (kRows == 1) {
    _mm512_storeu_ps(p, x);
  } else if constexpr (kRows == 2) {
    _mm256_storeu_ps(p, _mm512_castps512_ps256(x));
    _mm256_storeu_ps(p + stride, _mm512_extractf32x8_ps(x, 1));
  } else {
    _mm_storeu_ps(p, _mm512_castps512_ps128(x));
    _mm_storeu_ps(p + stride, _mm512_extractf32x4_ps(x, 1));
    _mm_storeu_ps(p + 2 * stride, _mm512_extractf32x4_ps(x, 2));
    _mm_storeu_ps(p + 3 * stride, _mm512_extractf32x4_ps(x, 3));
  }
}

// Where sums() expects the vector whose sum becomes lane i.
constexpr int place_of_sum(int i) {
  return (i & 4) << 1 | (i & 8) >> 1 | (i & 1) << 1 | (i & 2) >> 1;
}

// Returns a vector whose lane i is the sum of x[place_of_sum(i)]. Each is added up in the same order. Inlined, so that
// x is in registers.
__attribute__((always_inline)) inline Floats sums(const Floats* x) {
  Floats half[8], quarter[4], pair[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    half[i] = _mm512_shuffle_f32x4(x[i], x[i + 8], 0x44) + _mm512_shuffle_f32x4(x[i], x[i + 8], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    quarter[i] =
        _mm512_shuffle_f32x4(half[i], half[i + 4], 0x88) + _mm512_shuffle_f32x4(half[i], half[i + 4], 0xdd);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    pair[i] = _mm512_shuffle_ps(quarter[i], quarter[i + 2], 0x44) +
              _mm512_shuffle_ps(quarter[i], quarter[i + 2], 0xee);
  }
  return _mm512_shuffle_ps(pair[0], pair[1], 0x88) + _mm512_shuffle_ps(pair[0], pair[1], 0xdd);
}

#elif defined(__AVX2__) && defined(__FMA__)

inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
constexpr int place_of_sum(int i) { return i; }
inline Floats sums(const Floats* x) {
  const Floats a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const Floats b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
}

#else

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
constexpr int place_of_sum(int i) { return i; }
inline Floats sums(const Floats* x) { return Floats{sum(x[0]), sum(x[1]), sum(x[2]), sum(x[3])}; }

#endif

#if !(defined(__AVX512F__) && defined(__AVX512BW__))
template <int kRows>
inline void store_parts(Floats x, float* p, int64_t stride) {
  float parts[kFloats];
  store(parts, x);
  for (int r = 0; r < kRows; ++r) std::memcpy(p + r * stride, parts + r * (kFloats / kRows), sizeof(x) / kRows);
}
#endif

inline float largest(Floats x) {
  float lanes[kFloats];
  store(lanes, x);
  float result = lanes[0];
  for (int i = 1; i < kFloats; ++i) result = lanes[i] > result ? lanes[i] : result;
  return result;
}

}  // namespace jaxinfer
