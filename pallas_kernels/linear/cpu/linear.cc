#include "linear/cpu/linear.h"

#include <cstdint>

#include "cpu/handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jaxinfer {
namespace {

namespace ffi = xla::ffi;

template <typename T>
void run(ffi::ThreadPool& pool, ffi::AnyBuffer x, const Norm& norm, const Matrix& matrix, ffi::AnyBuffer bias,
         ffi::AnyBuffer residual, int32_t activation, bool gated, ffi::Result<ffi::AnyBuffer>& y) {
  const int rows = static_cast<int>(x.element_count() / matrix.inputs);
  Linear<T>{rows,
            given<T>(x),
            norm,
            matrix,
            given<float>(bias),
            given<T>(residual),
            static_cast<Activation>(activation),
            gated,
            static_cast<T*>(y->untyped_data())}
      .run(pool);
}

ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer norm_scale, ffi::AnyBuffer norm_shift,
                  ffi::AnyBuffer weight, ffi::AnyBuffer weight_scale, ffi::AnyBuffer bias, ffi::AnyBuffer residual,
                  ffi::Result<ffi::AnyBuffer> y, float eps, int32_t activation, int32_t gated) {
  const Matrix matrix = matrix_of(weight, weight_scale, x.dimensions().back());
  const Norm norm{given<float>(norm_scale), given<float>(norm_shift), eps};
  const auto call = x.element_type() == ffi::F32 ? run<float> : run<bfloat16>;
  call(pool, x, norm, matrix, bias, residual, activation, gated, y);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxinfer

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_linear, jaxinfer::linear,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()  // norm's scale
                                  .Arg<xla::ffi::AnyBuffer>()  // norm's shift
                                  .Arg<xla::ffi::AnyBuffer>()  // weight
                                  .Arg<xla::ffi::AnyBuffer>()  // its scale
                                  .Arg<xla::ffi::AnyBuffer>()  // bias
                                  .Arg<xla::ffi::AnyBuffer>()  // residual
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<int32_t>("activation")
                                  .Attr<int32_t>("gated"));
