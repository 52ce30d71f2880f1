// The handlers of attention. Arguments are checked by `attention/cpu/__init__.py`.

#include "attention/cpu/attention.h"

#include <cstdint>

#include "cpu/handlers.h"

namespace jaxinfer::attention {
namespace {

// The arguments that the operations have in common.
struct Attention {
  ThreadPool& pool;
  Array heads;  // [B, T, heads * K]
  Array k;      // whose shape is that of v
  Array page_table;
  Array positions;
  HeadOptions head_options;
  ScoreOptions score_options;
  void* pages[4];  // k, v and their scales
  void* result;

  template <typename C>
  void run(bool stores) {
    const Pages<C> cache{{k.size(0), k.size(1), k.size(2), k.size(3), static_cast<float*>(pages[2]),
                          static_cast<float*>(pages[3])},
                         static_cast<C*>(pages[0]),
                         static_cast<C*>(pages[1])};
    const Positions rows{positions.given<int32_t>(), page_table.given<int32_t>(), positions.size(0), positions.size(1),
                         page_table.size(1)};
    const int64_t heads_of_each = heads.size(2) / (k.size(2) * k.size(3));
    const Heads all{heads.data(), heads.type() == XLA_FFI_DataType_BF16, k.size(2), heads_of_each, k.size(3),
                    head_options};
    if (stores) store_all(pool, all, cache, rows);
    PagedAttention<C>(all, stores ? heads_of_each - 2 : heads_of_each, cache, rows, score_options, result).run(pool);
  }

  const char* dispatch(bool stores) {
    const auto type = heads.type(), stored = k.type();
    const bool is_float = type == XLA_FFI_DataType_F32 || type == XLA_FFI_DataType_BF16;
    if (type == XLA_FFI_DataType_F32 && stored == XLA_FFI_DataType_F32) {
      run<float>(stores);
    } else if (is_float && stored == XLA_FFI_DataType_BF16) {
      run<bfloat16>(stores);
    } else if (is_float && stored == XLA_FFI_DataType_S8) {
      run<int8_t>(stores);
    } else {
      return "attention takes float32 and bfloat16, and pages in the same type, bfloat16 or int8";
    }
    return nullptr;
  }
};

ScoreOptions score_options(Call& call, const Array& alibi) {
  return {call.attribute<float>("scale"), call.attribute<int64_t>("window"), call.attribute<float>("softcap"),
          alibi.given<float>()};
}

const char* cached_attention(Call& call) {
  const Array qkv = call.argument(0), k = call.argument(1), v = call.argument(2);
  const Array k_scale = call.argument(3), v_scale = call.argument(4);
  const Array page_table = call.argument(5), positions = call.argument(6);
  const Array cos = call.argument(7), sin = call.argument(8);
  const Array q_norm = call.argument(9), k_norm = call.argument(10), alibi = call.argument(11);
  const HeadOptions head_options{q_norm.given<float>(), k_norm.given<float>(), call.attribute<float>("norm_eps"),
                                 cos.given<float>(),    sin.given<float>(),    cos.count() > 0 ? cos.size(-1) : 0};
  const ScoreOptions scores = score_options(call, alibi);
  if (!call.is_complete()) return "cached_attention takes norm_eps, scale, window and softcap";
  const int64_t bytes = k.type() == XLA_FFI_DataType_F32 ? 4 : k.type() == XLA_FFI_DataType_BF16 ? 2 : 1;
  return Attention{call.pool,
                   qkv,
                   k,
                   page_table,
                   positions,
                   head_options,
                   scores,
                   {in_place(k, call.result(1), bytes), in_place(v, call.result(2), bytes),
                    in_place(k_scale, call.result(3), 4), in_place(v_scale, call.result(4), 4)},
                   call.result(0).data()}
      .dispatch(true);
}

const char* paged_attention(Call& call) {
  const Array q = call.argument(0), k = call.argument(1), v = call.argument(2);
  const Array k_scale = call.argument(3), v_scale = call.argument(4);
  const Array page_table = call.argument(5), positions = call.argument(6), alibi = call.argument(7);
  const ScoreOptions scores = score_options(call, alibi);
  if (!call.is_complete()) return "paged_attention takes scale, window and softcap";
  auto data = [](const Array& x) { return x.count() > 0 ? x.data() : nullptr; };
  return Attention{call.pool,
                   q,
                   k,
                   page_table,
                   positions,
                   {},
                   scores,
                   {data(k), data(v), data(k_scale), data(v_scale)},
                   call.result(0).data()}
      .dispatch(false);
}

}  // namespace
}  // namespace jaxinfer::attention

JAXINFER_HANDLER(jaxinfer_cached_attention, 12, 5, jaxinfer::attention::cached_attention)
JAXINFER_HANDLER(jaxinfer_paged_attention, 8, 1, jaxinfer::attention::paged_attention)
