// The nonlinearities of an MLP, as activations.py names them.
#pragma once

#include <cstdint>

namespace jaxinfer {

enum class Activation : int32_t { kNone = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kSilu = 4, kRelu2 = 5 };

// Adds a bias, unless it is null, and activates outputs in place; gated ones alternate (gate, up), and become half as
// many. scratch: [size / 2].
void activate_outputs(float* y, int64_t size, const float* bias, Activation activation, bool gated, float* scratch);

}  // namespace jaxinfer
