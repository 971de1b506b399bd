#include "phoenix/xrex/cuda/async_emb/src/adagrad_params.hpp"

#include <cmath>

#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

void Require(bool holds, const char* name, float value, const char* rule) {
  if (holds) return;
  throw AsyncEmbError(
      ErrorCode::kInvalidArgument,
      StrCat("async_emb: ", name, " is ", value, ": it must be ", rule));
}

bool IsFiniteAndPositive(float value) {
  return std::isfinite(value) && value > 0.0F;
}

}  // namespace

void ValidateAdagradParams(const AdagradParams& params) {
  Require(
      IsFiniteAndPositive(params.eps) && IsFiniteAndPositive(1.0F / params.eps),
      "eps", params.eps, "finite and > 0, and so must be 1 / eps in float32");
  if (params.lazy) {
    const auto is_rate = [](float value) {
      return std::isfinite(value) && value >= 0.0F;
    };
    Require(is_rate(params.accum_decay_rate), "accum_decay_rate",
            params.accum_decay_rate, "finite and >= 0");
    Require(is_rate(params.weight_decay_rate), "weight_decay_rate",
            params.weight_decay_rate, "finite and >= 0");
    return;
  }
  Require(params.decay_factor >= 0.0F && params.decay_factor <= 1.0F,
          "decay_factor", params.decay_factor, "in [0, 1]");
  Require(
      params.weight_decay_factor > 0.0F && params.weight_decay_factor <= 1.0F,
      "weight_decay_factor", params.weight_decay_factor, "in (0, 1]");
}

}  // namespace xrex::async_emb
