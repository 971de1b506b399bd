// L4: the FFI handlers. They unwrap, check and call the context; they know no
// Python.
#pragma once

#include <vector>

namespace xrex::async_emb {

// A handler to be registered with XLA under `name`; `handler` is an
// XLA_FFI_Handler*.
struct FfiTarget {
  const char* name;
  void* handler;
};

// The targets for the platform "cpu", whose caller stream is the calling
// thread.
std::vector<FfiTarget> CpuFfiTargets();

}  // namespace xrex::async_emb
