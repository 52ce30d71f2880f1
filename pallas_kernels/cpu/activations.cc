#include "cpu/activations.h"

#include <algorithm>

#include "cpu/simd.h"

namespace jaxinfer {

namespace {

// y = f(y) for vectors of numbers.
template <typename F>
void apply(float* y, int64_t size, F f) {
  int64_t i = 0;
  for (; i + kFloats <= size; i += kFloats) store(y + i, f(load(y + i)));
  if (i == size) return;
  float last[kFloats];
  store(last, f(load_first(y + i, size - i)));
  std::copy_n(last, size - i, y + i);
}

void activate(float* y, int64_t size, Activation activation) {
  const Floats half = broadcast(0.5f), one = broadcast(1.0f);
  switch (activation) {
    case Activation::kGelu:
      return apply(y, size, [=](Floats x) { return half * x * (one + erf_of(x * broadcast(0.70710678f))); });
    case Activation::kGeluTanh:
      return apply(y, size, [=](Floats x) {
        const Floats inner = broadcast(0.79788456f) * multiply_add(broadcast(0.044715f) * x * x, x, x);
        return half * x * (one + tanh_of(inner));
      });
    case Activation::kRelu: return apply(y, size, [](Floats x) { return x < zeros() ? zeros() : x; });
    case Activation::kSilu: return apply(y, size, [=](Floats x) { return x / (one + exp_of(-x)); });
    case Activation::kRelu2: return apply(y, size, [](Floats x) { return x < zeros() ? zeros() : x * x; });
    case Activation::kNone: return;
  }
}

}  // namespace

void activate_outputs(float* y, int64_t size, const float* bias, Activation activation, bool gated, float* scratch) {
  for (int64_t i = 0; bias != nullptr && i < size; ++i) y[i] += bias[i];
  if (!gated) return activate(y, size, activation);
  for (int64_t i = 0; i < size / 2; ++i) scratch[i] = y[2 * i];
  activate(scratch, size / 2, activation);
  for (int64_t i = 0; i < size / 2; ++i) y[i] = scratch[i] * y[2 * i + 1];
}

}  // namespace jaxinfer
