// AMX's instructions in plain C++. Included before all else, it has kernels compiled as for a CPU that has them.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {

struct Tile {
  char bytes[16][64];
};

inline thread_local Tile tiles[8];
inline thread_local unsigned char configuration[64] = {};  // its first byte: whether tiles are set up

inline void require(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "AMX: %s\n", what);
  std::abort();
}

inline Tile& tile(int number) {
  require(configuration[0] == 1, "tiles are used before they are set up");
  return tiles[number];
}

inline long permission(long, long, long) { return 0; }

inline void store_configuration(void* config) { std::memcpy(config, configuration, sizeof(configuration)); }

// Knows tiles of 16 rows of 64 bytes alone, or none.
inline void configure(const void* config) {
  std::memcpy(configuration, config, sizeof(configuration));
  const unsigned char* bytes = configuration;
  if (bytes[0] == 0) return;
  require(bytes[0] == 1 && bytes[1] == 0, "another palette, or rows from another on");
  for (int i = 0; i < 8; ++i) {
    require(bytes[16 + 2 * i] == 64 && bytes[17 + 2 * i] == 0 && bytes[48 + i] == 16, "another shape of a tile");
  }
  for (int i = 0; i < 8; ++i) tile(i) = {};
}

inline void load(int number, const void* base, int64_t stride) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(tile(number).bytes[row], static_cast<const char*>(base) + row * stride, 64);
  }
}

inline void store(int number, void* base, int64_t stride) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(static_cast<char*>(base) + row * stride, tile(number).bytes[row], 64);
  }
}

template <typename T>
T at(const Tile& tile, int row, int column) {
  T value;
  std::memcpy(&value, tile.bytes[row] + column * sizeof(T), sizeof(T));
  return value;
}

inline float of_bfloat16(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

// Adds products of four bytes, or of two bfloat16 values, of a row of a and a column of b.
template <typename Sum, typename Factor>
void multiply(int sums, int a, int b) {
  constexpr int kEach = 4 / sizeof(Factor);
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      Sum sum = at<Sum>(tile(sums), m, n);
      for (int k = 0; k < 16 * kEach; ++k) {
        const auto x = at<Factor>(tile(a), m, k);
        const auto y = at<Factor>(tile(b), k / kEach, n * kEach + k % kEach);
        if constexpr (sizeof(Factor) == 1) {
          sum += static_cast<Sum>(x) * y;
        } else {
          sum += of_bfloat16(x) * of_bfloat16(y);
        }
      }
      std::memcpy(tile(sums).bytes[m] + n * sizeof(Sum), &sum, sizeof(sum));
    }
  }
}

}  // namespace emulated

#define __AMX_TILE__ 1
#define __AMX_INT8__ 1
#define __AMX_BF16__ 1

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::configure
#define _tile_storeconfig emulated::store_configuration
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_zero(number) (emulated::tile(number) = {})
#define _tile_dpbssd emulated::multiply<int32_t, int8_t>
#define _tile_dpbf16ps emulated::multiply<float, uint16_t>
#define syscall emulated::permission
