// L2, CUDA backend: which device a thread's calls go to.
#pragma once

#include <cuda.h>

namespace xrex::async_emb {

// Makes a device current for the calling thread while it lives. A thread that
// had none has none again: naming a device by its number would wake it up.
class CudaDeviceScope {
 public:
  explicit CudaDeviceScope(CUcontext context);
  ~CudaDeviceScope();

  // What stands for a device: the context that all of a process share.
  static CUcontext ContextOf(int ordinal);

  CudaDeviceScope(const CudaDeviceScope&) = delete;
  CudaDeviceScope& operator=(const CudaDeviceScope&) = delete;

 private:
  const CUcontext context_;
  CUcontext previous_ = nullptr;
};

}  // namespace xrex::async_emb
