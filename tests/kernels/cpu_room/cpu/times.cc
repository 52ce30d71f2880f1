// x times a factor, each element as a task: what the tests of the library build.

#include <chrono>
#include <cstdint>
#include <thread>

#include "cpu/tasks.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error times(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y, float factor) {
  const float* in = x.typed_data();
  float* out = y->typed_data();
  jaxinfer::parallel_for(pool, x.element_count(), [&](int64_t i) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));  // so that calls overlap
    out[i] = in[i] * factor;
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_times, times,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("factor"));
