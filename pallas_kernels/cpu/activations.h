// The nonlinearities of an MLP, as activations.py names them.
#pragma once

#include <cstdint>

#include "cpu/simd.h"

namespace jaxinfer {

enum class Activation : int32_t { kNone = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kSilu = 4 };

inline void activate(float* y, int64_t size, Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      for (int64_t i = 0; i < size; ++i) y[i] = 0.5f * y[i] * (1.0f + erf_of(y[i] * 0.70710678f));
      break;
    case Activation::kGeluTanh:
      for (int64_t i = 0; i < size; ++i) {
        const float inner = 0.79788456f * (y[i] + 0.044715f * y[i] * y[i] * y[i]);
        y[i] = 0.5f * y[i] * (1.0f + tanh_of(inner));
      }
      break;
    case Activation::kRelu:
      for (int64_t i = 0; i < size; ++i) y[i] = y[i] < 0.0f ? 0.0f : y[i];
      break;
    case Activation::kSilu:
      for (int64_t i = 0; i < size; ++i) y[i] = y[i] * sigmoid_of(y[i]);
      break;
    case Activation::kNone: break;
  }
}

// Activates outputs in place; gated ones alternate (gate, up), and become half as many. scratch: [size / 2].
inline void activate_outputs(float* y, int64_t size, Activation activation, bool gated, float* scratch) {
  if (!gated) return activate(y, size, activation);
  for (int64_t i = 0; i < size / 2; ++i) scratch[i] = y[2 * i];
  activate(scratch, size / 2, activation);
  for (int64_t i = 0; i < size / 2; ++i) y[i] = scratch[i] * y[2 * i + 1];
}

}  // namespace jaxinfer
