// L4: one FFI call, read with checks. A wrong operand, result or attribute
// throws AsyncEmbError(kInvalidArgument) that names it, what was expected and
// what came.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/device.hpp"
#include "xla/ffi/api/ffi.h"

namespace xrex::async_emb {

// A dimension that may have any size from 1.
inline constexpr std::int64_t kAnySize = -1;

class FfiCall {
 public:
  FfiCall(const char* name, const char* platform, StreamRef stream,
          std::int32_t device_ordinal, xla::ffi::RemainingArgs args,
          xla::ffi::RemainingRets rets, xla::ffi::Dictionary attrs)
      : name_(name),
        platform_(platform),
        stream_(stream),
        device_ordinal_(device_ordinal),
        args_(args),
        rets_(rets),
        attrs_(attrs) {}

  const char* name() const { return name_; }
  const char* platform() const { return platform_; }
  StreamRef stream() const { return stream_; }
  std::int32_t device_ordinal() const { return device_ordinal_; }
  std::size_t num_operands() const { return args_.size(); }
  std::size_t num_results() const { return rets_.size(); }

  // Operand or result `index`, of that type and these dimensions.
  xla::ffi::AnyBuffer Operand(std::size_t index, const char* what,
                              xla::ffi::DataType dtype,
                              const std::vector<std::int64_t>& dims) const;
  xla::ffi::AnyBuffer Result(std::size_t index, const char* what,
                             xla::ffi::DataType dtype,
                             const std::vector<std::int64_t>& dims) const;

  // Result `result` must lie in the memory of operand `operand`.
  void RequireAlias(std::size_t operand, std::size_t result) const;

  void RequireCounts(std::size_t min_operands, std::size_t num_results) const;

  template <typename T>
  T Attr(const char* what) const {
    const xla::ffi::ErrorOr<T> value = attrs_.get<T>(what);
    if (!value.has_value()) ThrowAttr(what, value.error().message());
    return value.value();
  }

  // Attribute `what` must be `expected`, which the context was made with.
  void RequireAttr(const char* what, std::int64_t came,
                   std::int64_t expected) const;

 private:
  [[noreturn]] void Throw(const std::string& message) const;
  [[noreturn]] void ThrowAttr(const char* what, const std::string& why) const;
  void CheckBuffer(const xla::ffi::AnyBuffer& buffer, const char* kind,
                   const char* what, xla::ffi::DataType dtype,
                   const std::vector<std::int64_t>& dims) const;

  const char* const name_;
  const char* const platform_;
  const StreamRef stream_;
  const std::int32_t device_ordinal_;
  const xla::ffi::RemainingArgs args_;
  const xla::ffi::RemainingRets rets_;
  const xla::ffi::Dictionary attrs_;
};

}  // namespace xrex::async_emb
