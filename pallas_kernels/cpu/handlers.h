// What handlers of XLA's foreign functions share. Python checks the arguments; empty ones are not given.
#pragma once

#include "cpu/rows.h"
#include "xla/ffi/api/ffi.h"

namespace jaxinfer {

template <typename T>
const T* given(xla::ffi::AnyBuffer buffer) {
  return buffer.element_count() ? static_cast<const T*>(buffer.untyped_data()) : nullptr;
}

// The matrix, or the first of a stack, of [..., outputs, inputs].
inline Matrix matrix_of(xla::ffi::AnyBuffer weight, xla::ffi::AnyBuffer scale, int64_t inputs) {
  const auto type = weight.element_type();
  const Format format = type == xla::ffi::F32    ? Format::kFloat32
                        : type == xla::ffi::BF16 ? Format::kBfloat16
                        : type == xla::ffi::S8   ? Format::kInt8
                                                 : Format::kInt4;  // words
  const auto dimensions = weight.dimensions();
  return {format, weight.untyped_data(), scale.untyped_data(), dimensions[dimensions.size() - 2], inputs};
}

}  // namespace jaxinfer
