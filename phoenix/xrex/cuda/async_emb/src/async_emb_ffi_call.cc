#include "phoenix/xrex/cuda/async_emb/src/async_emb_ffi_call.hpp"

#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

namespace ffi = xla::ffi;

std::string DtypeName(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::BF16:
      return "bf16";
    case ffi::DataType::F32:
      return "f32";
    case ffi::DataType::S32:
      return "i32";
    case ffi::DataType::S64:
      return "i64";
    case ffi::DataType::F64:
      return "f64";
    case ffi::DataType::F16:
      return "f16";
    case ffi::DataType::PRED:
      return "bool";
    default:
      return StrCat("type ", static_cast<int>(dtype), " ");
  }
}

template <typename Dims>
std::string ShapeName(ffi::DataType dtype, const Dims& dims) {
  std::string text;
  for (const std::int64_t dim : dims) {
    text += (text.empty() ? "" : ", ") +
            (dim == kAnySize ? "any" : std::to_string(dim));
  }
  return DtypeName(dtype) + "[" + text + "]";
}

}  // namespace

ffi::AnyBuffer FfiCall::Operand(std::size_t index, const char* what,
                                ffi::DataType dtype,
                                const std::vector<std::int64_t>& dims) const {
  const auto buffer = args_.get<ffi::AnyBuffer>(index);
  if (!buffer.has_value())
    Throw(StrCat("operand ", index, " (", what, ") is missing"));
  CheckBuffer(buffer.value(), "operand", what, dtype, dims);
  return buffer.value();
}

ffi::AnyBuffer FfiCall::Result(std::size_t index, const char* what,
                               ffi::DataType dtype,
                               const std::vector<std::int64_t>& dims) const {
  const auto buffer = rets_.get<ffi::AnyBuffer>(index);
  if (!buffer.has_value())
    Throw(StrCat("result ", index, " (", what, ") is missing"));
  CheckBuffer(*buffer.value(), "result", what, dtype, dims);
  return *buffer.value();
}

void FfiCall::CheckBuffer(const ffi::AnyBuffer& buffer, const char* kind,
                          const char* what, ffi::DataType dtype,
                          const std::vector<std::int64_t>& dims) const {
  const auto came = buffer.dimensions();
  bool fits = buffer.element_type() == dtype && came.size() == dims.size();
  for (std::size_t i = 0; fits && i < dims.size(); ++i) {
    fits = dims[i] == kAnySize ? came[i] > 0 : came[i] == dims[i];
  }
  if (fits) return;
  Throw(StrCat(kind, " ", what, " must be ", ShapeName(dtype, dims), ", got ",
               ShapeName(buffer.element_type(), came)));
}

void FfiCall::RequireAlias(std::size_t operand, std::size_t result) const {
  const auto from = args_.get<ffi::AnyBuffer>(operand);
  const auto to = rets_.get<ffi::AnyBuffer>(result);
  if (!from.has_value() || !to.has_value()) {
    Throw(StrCat("operand ", operand, " or result ", result, " is missing"));
  }
  if (from.value().size_bytes() == 0 ||
      from.value().untyped_data() == (*to.value()).untyped_data()) {
    return;
  }
  Throw(StrCat("result ", result, " must alias operand ", operand,
               ", but lies in other memory: pass input_output_aliases={",
               operand, ": ", result, "} to the FFI call"));
}

void FfiCall::RequireCounts(std::size_t min_operands,
                            std::size_t num_results) const {
  if (args_.size() < min_operands || rets_.size() != num_results) {
    Throw(StrCat("takes at least ", min_operands, " operands and gives ",
                 num_results, " results, got ", args_.size(), " and ",
                 rets_.size()));
  }
}

void FfiCall::RequireAttr(const char* what, std::int64_t came,
                          std::int64_t expected) const {
  if (came == expected) return;
  Throw(StrCat("attribute ", what, " is ", came,
               ", but the context was made with ", expected,
               ": trace the call with the handle that was initialized"));
}

void FfiCall::Throw(const std::string& message) const {
  throw AsyncEmbError(ErrorCode::kInvalidArgument,
                      StrCat("async_emb: ", name_, ": ", message));
}

void FfiCall::ThrowAttr(const char* what, const std::string& why) const {
  Throw(StrCat("attribute ", what, " cannot be read: ", why));
}

}  // namespace xrex::async_emb
