// The handler of the gated delta rule. Arguments are checked by `delta_rule/cpu/__init__.py`.

#include "delta_rule/cpu/delta_rule.h"

#include <cstdint>

#include "cpu/handlers.h"

namespace jaxinfer::delta_rule {
namespace {

template <typename T>
void run(Call& call) {
  const Array qkv = call.argument(0), weight = call.argument(3), conv = call.argument(4), state = call.argument(5);
  const Sizes sizes{qkv.size(0),
                    qkv.size(1),
                    qkv.size(2),
                    state.size(1) / qkv.size(2),
                    state.size(2),
                    state.size(3),
                    weight.size(2)};
  DeltaRule<T>{sizes,
               static_cast<const T*>(qkv.data()),
               static_cast<const float*>(call.argument(1).data()),
               static_cast<const float*>(call.argument(2).data()),
               static_cast<const float*>(weight.data()),
               static_cast<const int32_t*>(call.argument(6).data()),
               static_cast<const int32_t*>(call.argument(7).data()),
               call.argument(8).given<int32_t>(),
               static_cast<T*>(in_place(conv, call.result(1), sizeof(T))),
               static_cast<float*>(in_place(state, call.result(2), sizeof(float))),
               static_cast<float*>(call.result(0).data())}
      .run(call.pool);
}

const char* gated_delta_rule(Call& call) {
  call.argument(0).type() == XLA_FFI_DataType_F32 ? run<float>(call) : run<bfloat16>(call);
  return nullptr;
}

}  // namespace
}  // namespace jaxinfer::delta_rule

JAXINFER_HANDLER(jaxinfer_gated_delta_rule, 9, 3, jaxinfer::delta_rule::gated_delta_rule)
