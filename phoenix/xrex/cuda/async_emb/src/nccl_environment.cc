#include "phoenix/xrex/cuda/async_emb/src/nccl_environment.hpp"

#include <array>
#include <string_view>

#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

struct Rule {
  const char* name;
  std::string_view value;
  const char* why;
};

constexpr std::array kRules = {
    Rule{"NCCL_RUNTIME_CONNECT", "0",
         "else ranks connect inside a step, and may wait for each other for "
         "ever"},
    Rule{"NCCL_LAUNCH_ORDER_IMPLICIT", "1",
         "else our collectives and those of XLA can start in another order on "
         "each GPU, and wait for each other for ever"},
};

}  // namespace

void RequireNcclEnvironment(const GetEnv& get_env) {
  for (const Rule& rule : kRules) {
    const char* came = get_env(rule.name);
    if (came != nullptr && came == rule.value) continue;
    throw AsyncEmbError(
        ErrorCode::kFailedPrecondition,
        StrCat("async_emb: ", rule.name, " is ",
               came == nullptr ? "not set" : StrCat("'", came, "'"),
               ": it must be '", rule.value, "', ", rule.why, "; set ",
               rule.name, "=", rule.value, " before Python starts"));
  }
  const char* connections = get_env("CUDA_DEVICE_MAX_CONNECTIONS");
  if (connections != nullptr && std::string_view(connections) == "1") {
    throw AsyncEmbError(
        ErrorCode::kFailedPrecondition,
        "async_emb: CUDA_DEVICE_MAX_CONNECTIONS is '1': with one hardware "
        "queue the side stream waits behind the dense computation; unset it, "
        "or set it to 2 or more, before Python starts");
  }
}

}  // namespace xrex::async_emb
