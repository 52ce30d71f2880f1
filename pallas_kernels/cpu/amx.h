// Products of rows with matrices by the tiles of AMX, Intel's Advanced Matrix Extensions.
//
// A tile has 16 rows of 64 bytes. A matrix is read as it is stored, 16 outputs of 64 bytes of inputs in a tile. Rows of x
// are the other factor, which takes words of 4 bytes the other way around, [words, rows]; so are the results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/buffer.h"
#include "cpu/products.h"
#include "cpu/simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define JAXINFER_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxinfer {

#if defined(JAXINFER_AMX)

constexpr int kAmxSide = 16;          // rows of a tile, and words of a row
constexpr int64_t kAmxRowBytes = 64;  // of a tile
constexpr int kAmxBlocks = 4;         // blocks of 16 rows of x at a time: as many sums as there are tiles for
constexpr int kLeastAmxRows = 4;      // of x; fewer are multiplied by vectors

// Returns whether this process may use tiles: Linux wants to be asked.
inline bool amx_allowed() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return allowed;
}

// Sets up the tiles of this thread while it exists: all are of 16 rows of 64 bytes. Then they are as before, as whoever
// set them up may rely on it.
class ConfiguredTiles {
 public:
  ConfiguredTiles() {
    _tile_storeconfig(&before_);
    Config config = {};
    config.palette = 1;
    std::fill(config.row_bytes, config.row_bytes + 8, kAmxRowBytes);
    std::fill(config.rows, config.rows + 8, kAmxSide);
    _tile_loadconfig(&config);
  }
  ~ConfiguredTiles() { _tile_loadconfig(&before_); }
  ConfiguredTiles(const ConfiguredTiles&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];  // palette 0: none are set up
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  Config before_;
};

// How one format is multiplied: tiles 0 to 3 have sums, 4 has weights, 5 and 6 have rows of x. Numbers of tiles are in
// the instructions.
struct AmxInt8 {
  using Weight = int8_t;
  using Total = int32_t;
  template <int block>
  static void multiply() {
    if constexpr (block == 0) _tile_dpbssd(0, 4, 5);
    if constexpr (block == 1) _tile_dpbssd(1, 4, 6);
    if constexpr (block == 2) _tile_dpbssd(2, 4, 5);
    if constexpr (block == 3) _tile_dpbssd(3, 4, 6);
  }
};

struct AmxBfloat16 {
  using Weight = bfloat16;
  using Total = float;
  template <int block>
  static void multiply() {
    if constexpr (block == 0) _tile_dpbf16ps(0, 4, 5);
    if constexpr (block == 1) _tile_dpbf16ps(1, 4, 6);
    if constexpr (block == 2) _tile_dpbf16ps(2, 4, 5);
    if constexpr (block == 3) _tile_dpbf16ps(3, 4, 6);
  }
};

// Up to 16 outputs times up to 4 blocks of 16 rows of x. The total of output n and row m: y[m * width + n].
//
// x: [words, rows], whose words are `stride` bytes apart. ahead: what is fetched meanwhile, as much as is multiplied.
template <typename P>
void amx_product(const typename P::Weight* w, int outputs, const char* x, int64_t stride, int64_t inputs, int rows,
                 typename P::Total* y, int64_t width, const char* ahead) {
  const auto* matrix = reinterpret_cast<const char*>(w);
  const int64_t size = inputs * sizeof(*w);  // of an output
  const int blocks = (rows + kAmxSide - 1) / kAmxSide;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < size; k += kAmxRowBytes, x += kAmxSide * stride) {
    const int64_t bytes = std::min(kAmxRowBytes, size - k);
    if (outputs == kAmxSide && bytes == kAmxRowBytes) {
      _tile_loadd(4, matrix + k, size);
    } else {
      char padded[kAmxSide * kAmxRowBytes] = {};
      for (int n = 0; n < outputs; ++n) std::memcpy(padded + n * kAmxRowBytes, matrix + n * size + k, bytes);
      asm volatile("" ::: "memory");  // compilers do not know that a tile's load reads
      _tile_loadd(4, padded, kAmxRowBytes);
    }
    if (ahead != nullptr) {
      for (int line = 0; line < kAmxSide; ++line, ahead += 64) prefetch(ahead);
    }
    _tile_loadd(5, x, stride);
    P::template multiply<0>();
    if (blocks > 1) {
      _tile_loadd(6, x + kAmxRowBytes, stride);
      P::template multiply<1>();
    }
    if (blocks > 2) {
      _tile_loadd(5, x + 2 * kAmxRowBytes, stride);
      P::template multiply<2>();
    }
    if (blocks > 3) {
      _tile_loadd(6, x + 3 * kAmxRowBytes, stride);
      P::template multiply<3>();
    }
  }
  typename P::Total totals[kAmxBlocks][kAmxSide][kAmxSide];
  _tile_stored(0, totals[0], kAmxRowBytes);
  _tile_stored(1, totals[1], kAmxRowBytes);
  _tile_stored(2, totals[2], kAmxRowBytes);
  _tile_stored(3, totals[3], kAmxRowBytes);
  for (int m = 0; m < rows; ++m) {
    for (int n = 0; n < outputs; ++n) y[m * width + n] = totals[m / kAmxSide][n][m % kAmxSide];
  }
}

// Rows of x as tiles take them: [words, rows], where a word has 4 bytes of a row.
class AmxRows {
 public:
  // used: whether any are multiplied by tiles.
  AmxRows(bool used, int rows, int64_t row_bytes)
      : words_of_row_(row_bytes / 4),
        stride_(used && rows >= kLeastAmxRows && amx_allowed() ? (rows + kAmxSide - 1) / kAmxSide * kAmxSide : 0),
        words_(words_of_row_ * stride_ + kAmxSide) {}  // blocks that begin within a row of words end behind it

  // Sets row m. x: all of its bytes.
  void set(int m, const void* x) {
    if (stride_ == 0) return;
    for (int64_t i = 0; i < words_of_row_; ++i) {
      std::memcpy(words_.get() + i * stride_ + m, static_cast<const char*>(x) + 4 * i, 4);
    }
  }

  // Returns whether so many rows are multiplied by tiles.
  bool multiplies(int rows) const { return stride_ != 0 && rows >= kLeastAmxRows; }

  // Multiplies rows [first, first + rows) by outputs of a matrix. y: [rows, outputs].
  template <typename P>
  void multiply(const typename P::Weight* w, int64_t outputs, int64_t inputs, int first, int rows,
                typename P::Total* y) const {
    const ConfiguredTiles tiles;
    asm volatile("" ::: "memory");
    const auto* x = reinterpret_cast<const char*>(words_.get() + first);
    for (int64_t n = 0; n < outputs; n += kAmxSide) {
      const auto* some = w + n * inputs;
      const auto* next = reinterpret_cast<const char*>(some + kAmxSide * inputs);
      const int count = static_cast<int>(std::min<int64_t>(outputs - n, kAmxSide));
      for (int m = 0; m < rows; m += kAmxBlocks * kAmxSide) {
        amx_product<P>(some, count, x + 4 * m, 4 * stride_, inputs, std::min(rows - m, kAmxBlocks * kAmxSide),
                       y + m * outputs + n, outputs, m == 0 ? next : nullptr);
      }
    }
  }

 private:
  int64_t words_of_row_, stride_;  // stride: rows, padded; 0: there are none
  Buffer<uint32_t> words_;
};

#else

// No rows are multiplied by tiles.
class AmxRows {
 public:
  AmxRows(bool, int, int64_t) {}
  void set(int, const void*) {}
  bool multiplies(int) const { return false; }
};

#endif

}  // namespace jaxinfer
