// L2: CUDA's return codes as our errors.
#pragma once

#include <cuda_runtime_api.h>

#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {

// Throws unless `code` is success: kResourceExhausted for want of memory, else
// kInternal. `what` is the call, for the message.
inline void CheckCuda(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  const ErrorCode kind = code == cudaErrorMemoryAllocation
                             ? ErrorCode::kResourceExhausted
                             : ErrorCode::kInternal;
  throw AsyncEmbError(kind, StrCat("async_emb: CUDA refused ", what, ": ",
                                   cudaGetErrorName(code), " (",
                                   cudaGetErrorString(code), ")"));
}

// Whether a device has come to an end by this error: nothing on it runs any
// more, and every later call gives the same.
inline bool IsDeviceLost(cudaError_t code) {
  switch (code) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorContextIsDestroyed:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
      return true;
    default:
      return false;
  }
}

}  // namespace xrex::async_emb
