// x times a factor, each element as a task: what the tests of the library build.

#include <chrono>
#include <cstdint>
#include <thread>

#include "cpu/handlers.h"
#include "cpu/tasks.h"

static const char* times(jaxinfer::Call& call) {
  const jaxinfer::Array x = call.argument(0);
  const auto* in = static_cast<const float*>(x.data());
  auto* out = static_cast<float*>(call.result(0).data());
  const float factor = call.attribute<float>("factor");
  if (!call.is_complete()) return "times takes a factor";
  jaxinfer::parallel_for(call.pool, x.count(), [&](int64_t i) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));  // so that calls overlap
    out[i] = in[i] * factor;
  });
  return nullptr;
}

JAXINFER_HANDLER(jaxinfer_times, 1, 1, times)
