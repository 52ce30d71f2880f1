// Vectors of the instruction set that this is compiled for: AVX-512, AVX2 with FMA, or four floats of the compiler's own
// (NEON and others). Loads need no alignment.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace jaxinfer {

struct bfloat16 {
  uint16_t bits;
};

template <typename To, typename From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

template <typename T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bfloat16 from_float<bfloat16>(float x) {  // to the nearest, ties to even
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return {static_cast<uint16_t>(x == x ? rounded : (bits >> 16 | 0x40))};
}

// Has what will be read soon fetched into the second-level cache.
inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

#if defined(__AVX512F__) && defined(__AVX512BW__)

using Floats = __m512;
constexpr int kFloats = 16;  // in a vector
inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load(const bfloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }

// The sums over each of four vectors.
inline void sums_of(const Floats* x, float* y) {
  const Floats ab = add(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const Floats cd = add(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d abcd = _mm512_castps_pd(add(_mm512_castpd_ps(low), _mm512_castpd_ps(high)));
  const __m256 half =
      _mm256_add_ps(_mm256_castpd_ps(_mm512_castpd512_pd256(abcd)), _mm256_castpd_ps(_mm512_extractf64x4_pd(abcd, 1)));
  _mm_storeu_ps(y, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

#elif defined(__AVX2__) && defined(__FMA__)

using Floats = __m256;
constexpr int kFloats = 8;
inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline Floats load(const bfloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline float sum(Floats x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

// The sums over each of four vectors.
inline void sums_of(const Floats* x, float* y) {
  const Floats abcd = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  _mm_storeu_ps(y, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}

#else

typedef float Floats __attribute__((vector_size(16)));
constexpr int kFloats = 4;
inline Floats zeros() { return Floats{}; }
inline Floats load(const float* p) {
  Floats x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
inline Floats load(const bfloat16* p) { return Floats{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}; }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
inline Floats add(Floats a, Floats b) { return a + b; }
inline float sum(Floats x) { return (x[0] + x[1]) + (x[2] + x[3]); }

// The sums over each of four vectors.
inline void sums_of(const Floats* x, float* y) {
  for (int i = 0; i < 4; ++i) y[i] = sum(x[i]);
}

#endif

// The functions below have no branches, so that loops over them become vectors. Their errors are relative to the result
// but for the last two, whose are absolute.

// e^x to 2e-7. Cephes' polynomial. NaN stays NaN; below -87.3 the result is 0 or the smallest normal number.
inline float exp_of(float x) {
  const float clamped = x < -87.3f ? -87.3f : (x > 88.7f ? 88.7f : x);
  const float n = static_cast<float>(static_cast<int32_t>(clamped * 1.44269504f + (clamped < 0 ? -0.5f : 0.5f)));
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  // 2^n in two steps, as n may be 128.
  const int32_t half = static_cast<int32_t>(n) / 2;
  const float first = bit_cast<float>((half + 127) << 23);
  const float second = bit_cast<float>((static_cast<int32_t>(n) - half + 127) << 23);
  const float result = y * first * second;
  return x < -103.0f ? 0.0f : (x > 88.8f ? INFINITY : (x == x ? result : x));
}

inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

// tanh to 1e-7, absolute.
inline float tanh_of(float x) { return 1.0f - 2.0f / (exp_of(2.0f * x) + 1.0f); }

// The error function to 1.5e-7, absolute: Abramowitz and Stegun, formula 7.1.26.
inline float erf_of(float x) {
  const float magnitude = x < 0 ? -x : x;
  const float t = 1.0f / (1.0f + 0.3275911f * magnitude);
  const float polynomial =
      t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  const float y = 1.0f - polynomial * exp_of(-x * x);
  return x < 0 ? -y : y;
}

}  // namespace jaxinfer
