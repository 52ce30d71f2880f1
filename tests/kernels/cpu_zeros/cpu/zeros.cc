// A linear layer whose results are all zero: what a comparison must notice.

#include <cstring>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error zeros(ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> y, ffi::Dictionary) {
  std::memset(y->untyped_data(), 0, y->size_bytes());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_linear, zeros,
                              ffi::Ffi::Bind().RemainingArgs().Ret<ffi::AnyBuffer>().Attrs());
