#include "phoenix/xrex/cuda/async_emb/src/cuda_device_scope.hpp"

#include <cuda_runtime_api.h>

#include "phoenix/xrex/cuda/async_emb/src/cuda_error_utils.hpp"
#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

// A call of the driver, which the runtime knows how to find: we do not link it,
// so that machines without one can load this library.
template <typename Function>
Function FindDriverCall(const char* name) {
  constexpr unsigned int kSinceVersion = 4000;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  CheckCuda(cudaGetDriverEntryPointByVersion(name, &found, kSinceVersion,
                                             cudaEnableDefault, &result),
            "to find a call of the driver");
  if (result == cudaDriverEntryPointSuccess && found != nullptr) {
    return reinterpret_cast<Function>(found);
  }
  throw AsyncEmbError(ErrorCode::kInternal,
                      StrCat("async_emb: the CUDA driver has no ", name));
}

CUcontext CurrentContext() {
  static const auto get =
      FindDriverCall<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent");
  CUcontext context = nullptr;
  get(&context);
  return context;
}

void SetCurrentContext(CUcontext context) {
  static const auto set =
      FindDriverCall<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent");
  set(context);
}

}  // namespace

CudaDeviceScope::CudaDeviceScope(CUcontext context) : context_(context) {
  previous_ = CurrentContext();
  if (previous_ != context_) SetCurrentContext(context_);
}

CudaDeviceScope::~CudaDeviceScope() {
  if (previous_ != context_) SetCurrentContext(previous_);
}

CUcontext CudaDeviceScope::ContextOf(int ordinal) {
  const CUcontext previous = CurrentContext();
  CheckCuda(cudaSetDevice(ordinal), "to make a device current");
  const CUcontext context = CurrentContext();
  SetCurrentContext(previous);
  return context;
}

}  // namespace xrex::async_emb
