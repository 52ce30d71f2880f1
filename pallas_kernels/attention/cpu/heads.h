// From a fused QKV projection to queries, and to keys and values in their pages (`attention/heads.py`, `kv_pages.py`).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/buffer.h"
#include "cpu/simd.h"
#include "cpu/tasks.h"

namespace jaxinfer::attention {

// What happens to the heads of queries and keys before they are used. Null: nothing.
struct HeadOptions {
  const float* q_norm = nullptr;  // [K]
  const float* k_norm = nullptr;  // [K]
  float eps = 0.0f;
  const float* cos = nullptr;  // [B * T, half]
  const float* sin = nullptr;  // [B * T, half]
  int64_t half = 0;
};

// Rounds to T and back.
template <typename T>
inline float rounded(float x) {
  return to_float(from_float<T>(x));
}

template <typename T>
void normalize(float* x, const float* scale, float eps, int64_t size) {
  const float factor = 1.0f / std::sqrt(sum_of_squares(x, size) / size + eps);
  for (int64_t i = 0; i < size; ++i) x[i] = rounded<T>(x[i] * factor * scale[i]);
}

template <typename T>
void rotate(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    x[i] = rounded<T>(first * cos[i] - second * sin[i]);
    x[i + half] = rounded<T>(second * cos[i] + first * sin[i]);
  }
}

// Heads in float32 or bfloat16, of which those of one KV head are adjacent: [B * T, Hkv, count, K].
//
// Their dtype is known at run time only: what depends on it is short, and what does not is compiled once.
struct Heads {
  const void* data;
  bool is_bfloat16;
  int64_t kv_heads, count, head_dim;
  HeadOptions options;

  // Reads a query (as of q_norm) or a key (k_norm), normalised and rotated, as floats.
  void read(int64_t token, int64_t kv_head, int64_t index, const float* norm, float* y) const {
    copy(token, kv_head, index, y);
    is_bfloat16 ? prepare<bfloat16>(token, norm, y) : prepare<float>(token, norm, y);
  }

  // Reads a head as it is.
  void copy(int64_t token, int64_t kv_head, int64_t index, float* y) const {
    const int64_t at = ((token * kv_heads + kv_head) * count + index) * head_dim;
    is_bfloat16 ? copy_floats<bfloat16>(at, y) : copy_floats<float>(at, y);
  }

 private:
  template <typename T>
  void copy_floats(int64_t at, float* y) const {
    const T* x = static_cast<const T*>(data) + at;
    for (int64_t i = 0; i < head_dim; ++i) y[i] = to_float(x[i]);
  }

  template <typename T>
  void prepare(int64_t token, const float* norm, float* y) const {
    if (norm != nullptr) normalize<T>(y, norm, options.eps, head_dim);
    if (options.half > 0) {
      rotate<T>(y, options.cos + token * options.half, options.sin + token * options.half, options.half);
    }
  }
};

// A layer's cache but for its keys and values.
struct PageSizes {
  int64_t num_pages, page_size, kv_heads, head_dim;
  float* k_scale;  // [num_pages, Hkv] of int8, else null
  float* v_scale;

  int64_t stride() const { return kv_heads * head_dim; }  // from a token to the next
};

// A layer's cache, C: float, bfloat16 or int8.
template <typename C>
struct Pages : PageSizes {
  C* k;  // [num_pages, page_size, Hkv, K]
  C* v;
};

// Which positions the tokens of a call have, and where their rows' pages are.
struct Positions {
  const int32_t* positions;   // [B, T]; negative: padding
  const int32_t* page_table;  // [B, width]
  int64_t batch, tokens, width;

  // Returns the page of a token's position, or -1 where there is none.
  int64_t page(int64_t token, const PageSizes& pages) const {
    const int64_t position = positions[token], index = position / pages.page_size;
    if (position < 0 || index >= width) return -1;
    const int64_t page = page_table[token / tokens * width + index];
    return page < pages.num_pages ? page : -1;
  }
};

// Writes the key and the value of a head into a float page, by the rule of `write_pages` for what is not finite.
template <typename C>
void store_head(const float* key, const float* value, int64_t size, C* k, C* v) {
  bool finite = true;
  for (int64_t i = 0; i < size; ++i) {
    k[i] = from_float<C>(key[i]), v[i] = from_float<C>(value[i]);
    finite &= std::isfinite(to_float(k[i])) && std::isfinite(to_float(v[i]));
  }
  if (finite) return;
  std::fill(k, k + size, from_float<C>(NAN));
  std::fill(v, v + size, from_float<C>(0.0f));
}

// Writes the keys and values of some KV heads into float pages.
template <typename C>
void store_heads(const Heads& heads, const Pages<C>& pages, const Positions& rows, int64_t begin, int64_t end) {
  Buffer<float> buffer(2 * heads.head_dim);
  float *key = buffer.get(), *value = key + heads.head_dim;
  for (int64_t token = 0; token < rows.batch * rows.tokens; ++token) {
    const int64_t page = rows.page(token, pages);
    if (page < 0) continue;
    const int64_t slot = page * pages.page_size + rows.positions[token] % pages.page_size;
    for (int64_t head = begin; head < end; ++head) {
      const int64_t at = slot * pages.stride() + head * heads.head_dim;
      heads.read(token, head, heads.count - 2, heads.options.k_norm, key);
      heads.copy(token, head, heads.count - 1, value);
      store_head(key, value, heads.head_dim, pages.k + at, pages.v + at);
    }
  }
}

// Keys or values of one KV head on their way into int8 pages, by the rules of `write_pages`.
struct Int8Writer {
  int8_t* values;  // of the head, in the first slot of the first page
  float* scales;   // of the head, of the first page
  const Pages<int8_t>& pages;
  const Positions& rows;

  // x: [B * T, K], which is changed.
  void write(float* x) const {
    const int64_t count = rows.batch * rows.tokens, size = pages.head_dim;
    std::vector<int64_t> page(count);
    std::vector<float> old(count);
    for (int64_t n = 0; n < count; ++n) {
      page[n] = rows.page(n, pages);
      if (page[n] >= 0 && offset(n) == 0) scale(page[n]) = 0.0f;
    }
    for (int64_t n = 0; n < count; ++n) old[n] = page[n] < 0 ? 0.0f : scale(page[n]);
    for (int64_t n = 0; n < count; ++n) {
      if (page[n] >= 0) scale(page[n]) = std::max(scale(page[n]), scale_of(x + n * size));
    }
    for (int64_t n = 0; n < count; ++n) {
      if (page[n] < 0 || offset(n) == 0 || (n > 0 && page[n] == page[n - 1])) continue;
      rescale(page[n], old[n]);
      for (int64_t m = n; m < count; ++m) old[m] = page[m] == page[n] ? scale(page[n]) : old[m];  // once
    }
    for (int64_t n = 0; n < count; ++n) {
      if (page[n] < 0) continue;
      int8_t* y = values + (page[n] * pages.page_size + offset(n)) * pages.stride();
      for (int64_t i = 0; i < size; ++i) y[i] = static_cast<int8_t>(nearest(x[n * size + i] / scale(page[n])));
    }
  }

 private:
  int64_t offset(int64_t token) const { return rows.positions[token] % pages.page_size; }

  float& scale(int64_t page) const { return scales[page * pages.kv_heads]; }

  // Sets to 0 what is not finite, and returns the scale that the largest magnitude needs.
  float scale_of(float* x) const {
    float largest = 1e-30f;
    for (int64_t i = 0; i < pages.head_dim; ++i) {
      const float magnitude = std::fabs(x[i]);
      x[i] = magnitude < INFINITY ? x[i] : 0.0f;
      largest = magnitude < INFINITY && magnitude > largest ? magnitude : largest;
    }
    return largest * (1.0f / 127.0f);  // as XLA divides by a constant
  }

  // Expresses what a page holds by its new scale.
  void rescale(int64_t page, float old) const {
    const float ratio = old / scale(page);
    if (ratio == 1.0f) return;
    for (int64_t slot = 0; slot < pages.page_size; ++slot) {
      int8_t* y = values + (page * pages.page_size + slot) * pages.stride();
      for (int64_t i = 0; i < pages.head_dim; ++i) y[i] = static_cast<int8_t>(nearest(y[i] * ratio));
    }
  }
};

// Writes the keys and values of some KV heads into int8 pages.
inline void store_heads(const Heads& heads, const Pages<int8_t>& pages, const Positions& rows, int64_t begin,
                        int64_t end) {
  const int64_t count = rows.batch * rows.tokens, size = heads.head_dim;
  std::vector<float> x(count * size);
  for (int64_t head = begin; head < end; ++head) {
    for (int64_t n = 0; n < count; ++n) {
      heads.read(n, head, heads.count - 2, heads.options.k_norm, x.data() + n * size);
    }
    Int8Writer{pages.k + head * size, pages.k_scale + head, pages, rows}.write(x.data());
    for (int64_t n = 0; n < count; ++n) heads.copy(n, head, heads.count - 1, x.data() + n * size);
    Int8Writer{pages.v + head * size, pages.v_scale + head, pages, rows}.write(x.data());
  }
}

// Writes the keys and values of all tokens, as `store_kv`. Tasks are KV heads, as those of int8 pages share scales.
template <typename Pool, typename C>
void store_all(Pool& pool, const Heads& heads, const Pages<C>& pages, const Positions& rows) {
  constexpr int64_t kSmall = 1 << 15;  // numbers that are written before other threads would have begun
  if (rows.batch * rows.tokens * pages.stride() <= kSmall) return store_heads(heads, pages, rows, 0, pages.kv_heads);
  parallel_for(pool, pages.kv_heads, [&](int64_t head) { store_heads(heads, pages, rows, head, head + 1); });
}

}  // namespace jaxinfer::attention
