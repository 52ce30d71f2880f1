#include "linear/cpu/linear.h"

#include <cstdint>

#include "cpu/handlers.h"

namespace jaxinfer {
namespace {

template <typename T>
void run(ThreadPool& pool, const Array& x, const Norm& norm, const Matrix& matrix, const Array& bias,
         const Array& residual, Activation activation, bool gated, const Array& y) {
  const int rows = static_cast<int>(x.count() / matrix.inputs);
  Linear<T>{rows,
            x.given<T>(),
            norm,
            matrix,
            bias.given<float>(),
            residual.given<T>(),
            activation,
            gated,
            static_cast<T*>(y.data())}
      .run(pool);
}

const char* linear(Call& call) {
  const Array x = call.argument(0), norm_scale = call.argument(1), norm_shift = call.argument(2);
  const Array weight = call.argument(3), weight_scale = call.argument(4);
  const Array bias = call.argument(5), residual = call.argument(6);
  const Norm norm{norm_scale.given<float>(), norm_shift.given<float>(), call.attribute<float>("eps")};
  const auto activation = static_cast<Activation>(call.attribute<int32_t>("activation"));
  const bool gated = call.attribute<int32_t>("gated");
  if (!call.is_complete()) return "linear takes eps, activation and gated";
  const auto typed = x.type() == XLA_FFI_DataType_F32 ? run<float> : run<bfloat16>;
  typed(call.pool, x, norm, matrix_of(weight, weight_scale, x.size(-1)), bias, residual, activation, gated,
        call.result(0));
  return nullptr;
}

}  // namespace
}  // namespace jaxinfer

JAXINFER_HANDLER(jaxinfer_linear, 7, 1, jaxinfer::linear)
