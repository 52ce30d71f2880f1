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

// Returns a vector from a register: not one of several loads from the same address, of which compilers make one for each
// use.
template <typename Vector>
inline Vector in_register(Vector x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__x86_64__)
  asm("" : "+x"(x));
#endif
  return x;
}

#if defined(__AVX512F__) && defined(__AVX512BW__)

using Floats = __m512;
constexpr int kFloats = 16;  // in a vector
inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load(const bfloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Floats load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
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
inline Floats load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline Floats broadcast(float x) { return _mm256_set1_ps(x); }
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
inline Floats load(const int8_t* p) {
  return Floats{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]),
                static_cast<float>(p[3])};
}
inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof(x)); }
inline Floats broadcast(float x) { return Floats{x, x, x, x}; }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
inline Floats add(Floats a, Floats b) { return a + b; }
inline float sum(Floats x) { return (x[0] + x[1]) + (x[2] + x[3]); }

// The sums over each of four vectors.
inline void sums_of(const Floats* x, float* y) {
  for (int i = 0; i < 4; ++i) y[i] = sum(x[i]);
}

#endif

typedef uint32_t Words __attribute__((vector_size(sizeof(Floats))));  // as many as Floats

// Loads the first `count` of a vector's numbers; the others are zero.
template <typename T>
inline Floats load_first(const T* p, int64_t count) {
  T padded[kFloats] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load(padded);
}

inline float sum_of(const float* x, int64_t size) {
  Floats sums = zeros();
  int64_t i = 0;
  for (; i + kFloats <= size; i += kFloats) sums = add(sums, load(x + i));
  float total = sum(sums);
  for (; i < size; ++i) total += x[i];
  return total;
}

inline float sum_of_squares(const float* x, int64_t size) {
  Floats sums = zeros();
  int64_t i = 0;
  for (; i + kFloats <= size; i += kFloats) sums = multiply_add(load(x + i), load(x + i), sums);
  float total = sum(sums);
  for (; i < size; ++i) total += x[i] * x[i];
  return total;
}

// 1.5 * 2^23: what is added to it is rounded to a whole number, ties to even, and in the low bits of the sum.
constexpr float kRound = 12582912.0f;

// The nearest whole number of a magnitude below 2^22.
inline int32_t nearest(float x) { return bit_cast<int32_t>(x + kRound) - bit_cast<int32_t>(kRound); }

// e^x of each number to 2e-7, by Cephes' polynomial; 0 below -87, infinity above 88; NaN stays NaN.
inline Floats exp_of(Floats x) {
  const Floats least = broadcast(-87.0f), most = broadcast(88.0f);
  const Floats clamped = x < least ? least : (x > most ? most : x);
  const Floats round = broadcast(kRound);
  const Floats shifted = multiply_add(clamped, broadcast(1.44269504f), round);
  const Floats n = shifted - round;
  Floats r = multiply_add(n, broadcast(-0.693359375f), clamped);
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  Floats y = broadcast(1.9875691500e-4f);
  y = multiply_add(y, r, broadcast(1.3981999507e-3f));
  y = multiply_add(y, r, broadcast(8.3334519073e-3f));
  y = multiply_add(y, r, broadcast(4.1665795894e-2f));
  y = multiply_add(y, r, broadcast(1.6666665459e-1f));
  y = multiply_add(y, r, broadcast(5.0000001201e-1f));
  y = multiply_add(y * r, r, r + broadcast(1.0f));
  const Floats scaled = (Floats)((Words)y + ((Words)shifted << 23));
  const Floats finite = x < least ? zeros() : (x > most ? broadcast(INFINITY) : scaled);
  return x == x ? finite : x;
}

// tanh of each number to 1e-7, absolute.
inline Floats tanh_of(Floats x) {
  return broadcast(1.0f) - broadcast(2.0f) / (exp_of(x + x) + broadcast(1.0f));
}

// The error function of each number to 1.5e-7, absolute: Abramowitz and Stegun, formula 7.1.26.
inline Floats erf_of(Floats x) {
  const Floats one = broadcast(1.0f), magnitude = x < zeros() ? -x : x;
  const Floats t = one / multiply_add(broadcast(0.3275911f), magnitude, one);
  Floats y = broadcast(1.061405429f);
  y = multiply_add(y, t, broadcast(-1.453152027f));
  y = multiply_add(y, t, broadcast(1.421413741f));
  y = multiply_add(y, t, broadcast(-0.284496736f));
  y = multiply_add(y, t, broadcast(0.254829592f));
  y = one - y * t * exp_of(-x * x);
  return x < zeros() ? -y : y;
}

}  // namespace jaxinfer
