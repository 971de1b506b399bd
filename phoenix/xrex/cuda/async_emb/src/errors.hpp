// L0: the one error currency inside the core. It is converted at exactly two
// edges: the FFI handlers (XLA FFI error) and the Python module (Python
// exception).
#pragma once

#include <stdexcept>
#include <string>

namespace xrex::async_emb {

enum class ErrorCode {
  kInvalidArgument,     // the caller's values are off: ValueError
  kFailedPrecondition,  // a pipeline or life-cycle rule was broken:
                        // RuntimeError
  kAborted,             // the communicator was aborted: RuntimeError
  kTimeout,             // a bounded wait ended: RuntimeError
  kResourceExhausted,   // memory could not be had: RuntimeError
  kInternal,            // a defect of ours or of a library below: RuntimeError
};

class AsyncEmbError : public std::runtime_error {
 public:
  AsyncEmbError(ErrorCode code, const std::string& message)
      : std::runtime_error(message), code_(code) {}

  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace xrex::async_emb
