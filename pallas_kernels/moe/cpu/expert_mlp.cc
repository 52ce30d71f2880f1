#include "moe/cpu/expert_mlp.h"

#include <cstdint>

#include "cpu/handlers.h"

namespace jaxinfer {
namespace {

template <typename T>
void run(ThreadPool& pool, const Array& x, const Routing& routing, const Experts& gate_up, const Experts& down,
         Activation activation, bool gated, const Array& y) {
  ExpertMlp<T>{x.given<T>(), routing, gate_up, down, activation, gated, static_cast<T*>(y.data())}.run(pool);
}

const char* expert_mlp(Call& call) {
  const Array x = call.argument(0);
  const Array weights = call.argument(1), rows_of = call.argument(2);     // of choices
  const Array token_of = call.argument(3);                                // of rows
  const Array offsets = call.argument(4), sizes = call.argument(5);       // of experts
  const Array gate_up = call.argument(6), gate_up_scale = call.argument(7);
  const Array down = call.argument(8), down_scale = call.argument(9);
  const Array gate_up_bias = call.argument(10), down_bias = call.argument(11);
  const auto activation = static_cast<Activation>(call.attribute<int32_t>("activation"));
  const bool gated = call.attribute<int32_t>("gated");
  if (!call.is_complete()) return "expert_mlp takes activation and gated";
  const Routing routing{weights.size(0),
                        weights.size(1),
                        token_of.count(),
                        sizes.count(),
                        static_cast<const float*>(weights.data()),
                        static_cast<const int32_t*>(rows_of.data()),
                        static_cast<const int32_t*>(token_of.data()),
                        static_cast<const int32_t*>(offsets.data()),
                        static_cast<const int32_t*>(sizes.data())};
  const Matrix first = matrix_of(gate_up, gate_up_scale, x.size(1));
  const Matrix second = matrix_of(down, down_scale, gated ? first.outputs / 2 : first.outputs);
  const Experts in{first, gate_up_bias.given<float>()}, out{second, down_bias.given<float>()};
  const auto typed = x.type() == XLA_FFI_DataType_F32 ? run<float> : run<bfloat16>;
  typed(call.pool, x, routing, in, out, activation, gated, call.result(0));
  return nullptr;
}

}  // namespace
}  // namespace jaxinfer

JAXINFER_HANDLER(jaxinfer_expert_mlp, 12, 1, jaxinfer::expert_mlp)
