// L1: the sizes and options that one context is made for. Pure values.
#pragma once

#include <cstdint>

#include "phoenix/xrex/cuda/async_emb/src/types.hpp"

namespace xrex::async_emb {

// All counts are elements, not bytes. See docs/contract.md for the meaning of
// the letters.
struct PipelineSpec {
  std::int32_t world_size = 1;       // R, ranks of the communicator
  std::int64_t tokens_per_rank = 0;  // T
  std::int64_t shard_width = 0;      // w, columns of the table that a rank owns
  std::int64_t emb_width = 0;        // W = R * w
  std::int64_t num_unique = 0;       // U, capacity of the list of distinct ids
  OutOfRange out_of_range = OutOfRange::kClip;
  bool deterministic = false;   // the fixed order of sums
  bool check_inputs = false;    // device checks that cost time
  bool any_world_size = false;  // lifts the power-of-two rule
  Transport transport = Transport::kAuto;
  std::int32_t min_ctas = 1;  // blocks that a GPU communicator may take
  std::int32_t max_ctas = 4;

  // N, tokens of the global batch.
  std::int64_t num_tokens() const { return world_size * tokens_per_rank; }

  bool operator==(const PipelineSpec&) const = default;
};

// Throws AsyncEmbError(kInvalidArgument) that names the first value that breaks
// its rule.
void ValidateSpec(const PipelineSpec& spec);

}  // namespace xrex::async_emb
