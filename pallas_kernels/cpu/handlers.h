// Handlers of XLA's foreign functions, by its C interface: compiling its C++ one takes as long as compiling the kernels.
//
// Python checks the arguments; empty ones are not given.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu/rows.h"
#include "xla/ffi/api/c_api.h"

namespace jaxinfer {

// An argument or a result.
class Array {
 public:
  explicit Array(const void* buffer) : buffer_(static_cast<const XLA_FFI_Buffer*>(buffer)) {}

  XLA_FFI_DataType type() const { return buffer_->dtype; }
  void* data() const { return buffer_->data; }

  // The size of a dimension; -1 is the last.
  int64_t size(int64_t dimension) const { return buffer_->dims[dimension < 0 ? buffer_->rank + dimension : dimension]; }

  int64_t count() const {
    int64_t count = 1;
    for (int64_t i = 0; i < buffer_->rank; ++i) count *= buffer_->dims[i];
    return count;
  }

  template <typename T>
  const T* given() const {
    return count() > 0 ? static_cast<const T*>(data()) : nullptr;
  }

 private:
  const XLA_FFI_Buffer* buffer_;
};

// XLA's threads.
class ThreadPool {
 public:
  explicit ThreadPool(const XLA_FFI_CallFrame& frame) : api_(frame.api), context_(frame.ctx) {}

  int64_t num_threads() const {
    int64_t threads = 1;
    XLA_FFI_ThreadPool_NumThreads_Args args{XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr, context_,
                                            &threads};
    return dropped(api_->XLA_FFI_ThreadPool_NumThreads(&args)) ? 1 : threads;
  }

  // Calls `task` on some thread; on this one if there is no other.
  template <typename F>
  void Schedule(F&& task) {
    using Task = std::decay_t<F>;
    XLA_FFI_Task* call = +[](void* data) {
      auto* task = static_cast<Task*>(data);
      (*task)();
      delete task;
    };
    auto* data = new Task(std::forward<F>(task));
    XLA_FFI_ThreadPool_Schedule_Args args{XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr, context_, call, data};
    if (dropped(api_->XLA_FFI_ThreadPool_Schedule(&args))) call(data);
  }

 private:
  // Whether there is an error, which is dropped.
  bool dropped(XLA_FFI_Error* error) const {
    if (error == nullptr) return false;
    XLA_FFI_Error_Destroy_Args args{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
    api_->XLA_FFI_Error_Destroy(&args);
    return true;
  }

  const XLA_FFI_Api* api_;
  XLA_FFI_InvokeContext* context_;
};

// A call of a handler.
class Call {
 public:
  explicit Call(XLA_FFI_CallFrame& frame) : pool(frame), frame_(frame) {}

  ThreadPool pool;

  Array argument(int64_t i) const { return Array(frame_.args.args[i]); }
  Array result(int64_t i) const { return Array(frame_.rets.rets[i]); }

  // The attribute of a name, a float or int; 0 if there is none of its type, which `is_complete` tells.
  template <typename T>
  T attribute(const char* name) {
    constexpr auto kType = std::is_same_v<T, float>     ? XLA_FFI_DataType_F32
                           : std::is_same_v<T, int32_t> ? XLA_FFI_DataType_S32
                                                        : XLA_FFI_DataType_S64;
    for (int64_t i = 0; i < frame_.attrs.size; ++i) {
      const XLA_FFI_ByteSpan& span = *frame_.attrs.names[i];
      if (span.len != std::strlen(name) || std::memcmp(span.ptr, name, span.len) != 0) continue;
      const auto* scalar = static_cast<const XLA_FFI_Scalar*>(frame_.attrs.attrs[i]);
      if (frame_.attrs.types[i] != XLA_FFI_AttrType_SCALAR || scalar->dtype != kType) break;
      return *static_cast<const T*>(scalar->value);
    }
    is_complete_ = false;
    return 0;
  }

  // Whether all attributes that were read are there.
  bool is_complete() const { return is_complete_; }

 private:
  XLA_FFI_CallFrame& frame_;
  bool is_complete_ = true;
};

// The data of a result that an argument becomes: a copy of it, unless XLA has put the result in its place. Null for an
// empty argument.
inline void* in_place(const Array& argument, const Array& result, int64_t item_bytes) {
  if (argument.count() == 0) return nullptr;
  if (result.data() != argument.data()) std::memcpy(result.data(), argument.data(), argument.count() * item_bytes);
  return result.data();
}

// The matrix, or the first of a stack, of [..., outputs, inputs].
inline Matrix matrix_of(const Array& weight, const Array& scale, int64_t inputs) {
  const auto type = weight.type();
  const Format format = type == XLA_FFI_DataType_F32    ? Format::kFloat32
                        : type == XLA_FFI_DataType_BF16 ? Format::kBfloat16
                        : type == XLA_FFI_DataType_S8   ? Format::kInt8
                                                        : Format::kInt4;  // words
  return {format, weight.data(), scale.data(), weight.size(-2), inputs};
}

// Answers XLA's question for the version of this interface.
inline void describe(XLA_FFI_Metadata& metadata) {
  metadata.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  metadata.traits = 0;
  metadata.state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
}

// Runs a function that returns null, or what is wrong.
inline XLA_FFI_Error* handle(XLA_FFI_CallFrame* frame, int64_t arguments, int64_t results,
                             const char* (*function)(Call&)) {
  if (auto* extension = frame->extension_start; extension && extension->type == XLA_FFI_Extension_Metadata) {
    describe(*reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata);
    return nullptr;
  }
  Call call(*frame);
  const bool is_right = frame->stage == XLA_FFI_ExecutionStage_EXECUTE && frame->args.size == arguments &&
                        frame->rets.size == results;
  const char* wrong = is_right ? function(call) : "another number of arguments or results, or another stage";
  if (wrong == nullptr) return nullptr;
  XLA_FFI_Error_Create_Args error{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, wrong,
                                  XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return frame->api->XLA_FFI_Error_Create(&error);
}

}  // namespace jaxinfer

// Defines the handler `name`, which XLA calls with so many arguments and results.
#define JAXINFER_HANDLER(name, arguments, results, function)       \
  extern "C" XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) {        \
    return jaxinfer::handle(frame, arguments, results, (function)); \
  }
