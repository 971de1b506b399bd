// L1: the static parameters of rowwise Adagrad and their rules. Pure.
#pragma once

namespace xrex::async_emb {

struct AdagradParams {
  bool lazy = false;
  float eps = 0.0F;
  float decay_factor = 1.0F;         // eager: of the accumulator, per step
  float weight_decay_factor = 1.0F;  // eager: of a touched row, per step
  float accum_decay_rate = 0.0F;     // lazy: exponent per step
  float weight_decay_rate = 0.0F;    // lazy: exponent per step
};

// Throws AsyncEmbError(kInvalidArgument) that names the first value that breaks
// its rule.
void ValidateAdagradParams(const AdagradParams& params);

}  // namespace xrex::async_emb
