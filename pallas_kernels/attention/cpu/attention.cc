// The handlers of attention. Arguments are checked by `attention/cpu/__init__.py`; empty ones are not given.

#include "attention/cpu/attention.h"

#include <cstdint>
#include <cstring>

#include "cpu/handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jaxinfer::attention {
namespace {

namespace ffi = xla::ffi;

// The arguments that the operations have in common.
struct Call {
  ffi::ThreadPool pool;
  ffi::AnyBuffer heads;  // [B, T, heads * K]
  ffi::AnyBuffer k;      // whose shape is that of v
  ffi::AnyBuffer page_table;
  ffi::AnyBuffer positions;
  HeadOptions head_options;
  ScoreOptions score_options;
  void* pages[4];  // k, v and their scales
  void* result;

  template <typename C>
  void run(bool stores) {
    const auto shape = k.dimensions();
    const auto batch = positions.dimensions();
    const Pages<C> cache{static_cast<C*>(pages[0]),     static_cast<C*>(pages[1]),
                         static_cast<float*>(pages[2]), static_cast<float*>(pages[3]),
                         shape[0],                      shape[1],
                         shape[2],                      shape[3]};
    const Positions rows{given<int32_t>(positions), given<int32_t>(page_table), batch[0], batch[1],
                         page_table.dimensions()[1]};
    const int64_t heads_of_each = heads.dimensions()[2] / (shape[2] * shape[3]);
    const Heads all{heads.untyped_data(), heads.element_type() == ffi::BF16, shape[2], heads_of_each, shape[3],
                    head_options};
    if (stores) store_all(pool, all, cache, rows);
    PagedAttention<C>(all, stores ? heads_of_each - 2 : heads_of_each, cache, rows, score_options, result).run(pool);
  }

  ffi::Error dispatch(bool stores) {
    const auto type = heads.element_type(), stored = k.element_type();
    if (type == ffi::F32 && stored == ffi::F32) {
      run<float>(stores);
    } else if ((type == ffi::F32 || type == ffi::BF16) && stored == ffi::BF16) {
      run<bfloat16>(stores);
    } else if ((type == ffi::F32 || type == ffi::BF16) && stored == ffi::S8) {
      run<int8_t>(stores);
    } else {
      return ffi::Error::InvalidArgument(
          "attention takes float32 and bfloat16, and pages in the same type, bfloat16 or int8");
    }
    return ffi::Error::Success();
  }
};

// Results that XLA has put in place of their arguments hold them already.
void* in_place(const ffi::AnyBuffer& argument, ffi::Result<ffi::AnyBuffer>& result) {
  if (argument.element_count() == 0) return nullptr;
  if (result->untyped_data() != argument.untyped_data()) {
    std::memcpy(result->untyped_data(), argument.untyped_data(), argument.size_bytes());
  }
  return result->untyped_data();
}

ffi::Error cached_attention(ffi::ThreadPool pool, ffi::AnyBuffer qkv, ffi::AnyBuffer k, ffi::AnyBuffer v,
                            ffi::AnyBuffer k_scale, ffi::AnyBuffer v_scale, ffi::AnyBuffer page_table,
                            ffi::AnyBuffer positions, ffi::AnyBuffer cos, ffi::AnyBuffer sin, ffi::AnyBuffer q_norm,
                            ffi::AnyBuffer k_norm, ffi::AnyBuffer alibi, ffi::Result<ffi::AnyBuffer> heads,
                            ffi::Result<ffi::AnyBuffer> new_k, ffi::Result<ffi::AnyBuffer> new_v,
                            ffi::Result<ffi::AnyBuffer> new_k_scale, ffi::Result<ffi::AnyBuffer> new_v_scale,
                            float norm_eps, float scale, int64_t window, float softcap) {
  const int64_t half = cos.element_count() > 0 ? cos.dimensions().back() : 0;
  return Call{pool,
              qkv,
              k,
              page_table,
              positions,
              {given<float>(q_norm), given<float>(k_norm), norm_eps, given<float>(cos), given<float>(sin), half},
              {scale, window, softcap, given<float>(alibi)},
              {in_place(k, new_k), in_place(v, new_v), in_place(k_scale, new_k_scale), in_place(v_scale, new_v_scale)},
              heads->untyped_data()}
      .dispatch(true);
}

ffi::Error paged_attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                           ffi::AnyBuffer k_scale, ffi::AnyBuffer v_scale, ffi::AnyBuffer page_table,
                           ffi::AnyBuffer positions, ffi::AnyBuffer alibi, ffi::Result<ffi::AnyBuffer> heads,
                           float scale, int64_t window, float softcap) {
  auto data = [](const ffi::AnyBuffer& x) { return x.element_count() > 0 ? x.untyped_data() : nullptr; };
  return Call{pool,
              q,
              k,
              page_table,
              positions,
              {},
              {scale, window, softcap, given<float>(alibi)},
              {data(k), data(v), data(k_scale), data(v_scale)},
              heads->untyped_data()}
      .dispatch(false);
}

}  // namespace
}  // namespace jaxinfer::attention

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_cached_attention, jaxinfer::attention::cached_attention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // qkv
                                  .Arg<xla::ffi::AnyBuffer>()  // k
                                  .Arg<xla::ffi::AnyBuffer>()  // v
                                  .Arg<xla::ffi::AnyBuffer>()  // k's scale
                                  .Arg<xla::ffi::AnyBuffer>()  // v's scale
                                  .Arg<xla::ffi::AnyBuffer>()  // page table
                                  .Arg<xla::ffi::AnyBuffer>()  // positions
                                  .Arg<xla::ffi::AnyBuffer>()  // cos
                                  .Arg<xla::ffi::AnyBuffer>()  // sin
                                  .Arg<xla::ffi::AnyBuffer>()  // norm of queries
                                  .Arg<xla::ffi::AnyBuffer>()  // norm of keys
                                  .Arg<xla::ffi::AnyBuffer>()  // ALiBi slopes
                                  .Ret<xla::ffi::AnyBuffer>()  // heads
                                  .Ret<xla::ffi::AnyBuffer>()  // k
                                  .Ret<xla::ffi::AnyBuffer>()  // v
                                  .Ret<xla::ffi::AnyBuffer>()  // k's scale
                                  .Ret<xla::ffi::AnyBuffer>()  // v's scale
                                  .Attr<float>("norm_eps")
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("softcap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_paged_attention, jaxinfer::attention::paged_attention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // q
                                  .Arg<xla::ffi::AnyBuffer>()  // k
                                  .Arg<xla::ffi::AnyBuffer>()  // v
                                  .Arg<xla::ffi::AnyBuffer>()  // k's scale
                                  .Arg<xla::ffi::AnyBuffer>()  // v's scale
                                  .Arg<xla::ffi::AnyBuffer>()  // page table
                                  .Arg<xla::ffi::AnyBuffer>()  // positions
                                  .Arg<xla::ffi::AnyBuffer>()  // ALiBi slopes
                                  .Ret<xla::ffi::AnyBuffer>()  // heads
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("softcap"));
