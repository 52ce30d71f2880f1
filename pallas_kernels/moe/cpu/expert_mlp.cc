#include "moe/cpu/expert_mlp.h"

#include <cstdint>

#include "cpu/handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jaxinfer {
namespace {

namespace ffi = xla::ffi;

template <typename T>
void run(ffi::ThreadPool& pool, ffi::AnyBuffer x, const Routing& routing, const Experts& gate_up, const Experts& down,
         int32_t activation, bool gated, ffi::Result<ffi::AnyBuffer>& y) {
  const auto kind = static_cast<Activation>(activation);
  ExpertMlp<T>{given<T>(x), routing, gate_up, down, kind, gated, static_cast<T*>(y->untyped_data())}.run(pool);
}

ffi::Error expert_mlp(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> weights,
                      ffi::Buffer<ffi::S32> rows_of, ffi::Buffer<ffi::S32> token_of, ffi::Buffer<ffi::S32> offsets,
                      ffi::Buffer<ffi::S32> sizes, ffi::AnyBuffer gate_up, ffi::AnyBuffer gate_up_scale,
                      ffi::AnyBuffer down, ffi::AnyBuffer down_scale, ffi::AnyBuffer gate_up_bias,
                      ffi::AnyBuffer down_bias, ffi::Result<ffi::AnyBuffer> y, int32_t activation, int32_t gated) {
  const int64_t inputs = x.dimensions()[1];
  const auto choices = weights.dimensions();
  const Routing routing{choices[0],
                        choices[1],
                        static_cast<int64_t>(token_of.element_count()),
                        static_cast<int64_t>(sizes.element_count()),
                        weights.typed_data(),
                        rows_of.typed_data(),
                        token_of.typed_data(),
                        offsets.typed_data(),
                        sizes.typed_data()};
  const Matrix first = matrix_of(gate_up, gate_up_scale, inputs);
  const Matrix second = matrix_of(down, down_scale, gated ? first.outputs / 2 : first.outputs);
  const Experts in{first, given<float>(gate_up_bias)}, out{second, given<float>(down_bias)};
  const auto call = x.element_type() == ffi::F32 ? run<float> : run<bfloat16>;
  call(pool, x, routing, in, out, activation, gated, y);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxinfer

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_expert_mlp, jaxinfer::expert_mlp,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()               // x
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // weights of choices
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // their rows
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // the rows' tokens
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // offsets
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // sizes
                                  .Arg<xla::ffi::AnyBuffer>()               // gate_up
                                  .Arg<xla::ffi::AnyBuffer>()               // its scale
                                  .Arg<xla::ffi::AnyBuffer>()               // down
                                  .Arg<xla::ffi::AnyBuffer>()               // its scale
                                  .Arg<xla::ffi::AnyBuffer>()               // gate_up's bias
                                  .Arg<xla::ffi::AnyBuffer>()               // down's bias
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int32_t>("activation")
                                  .Attr<int32_t>("gated"));
