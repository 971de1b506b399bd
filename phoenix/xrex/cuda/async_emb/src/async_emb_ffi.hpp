// L4: the FFI handlers. They unwrap, check and call the context; they know no
// Python.
#pragma once

#include <string_view>
#include <vector>

namespace xrex::async_emb {

// A handler to be registered with XLA under `name`; `handler` is an
// XLA_FFI_Handler*.
struct FfiTarget {
  const char* name;
  void* handler;
};

// The targets for "cpu", whose caller stream is the calling thread, or for
// "CUDA"; the same names, the same checks. None for another platform.
std::vector<FfiTarget> FfiTargets(std::string_view platform);

}  // namespace xrex::async_emb
