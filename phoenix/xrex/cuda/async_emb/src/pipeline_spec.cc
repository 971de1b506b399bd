#include "phoenix/xrex/cuda/async_emb/src/pipeline_spec.hpp"

#include <cstdint>
#include <limits>
#include <string>

#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"

namespace xrex::async_emb {
namespace {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

[[noreturn]] void Reject(const std::string& message) {
  throw AsyncEmbError(ErrorCode::kInvalidArgument, "async_emb: " + message);
}

std::string Is(const char* name, std::int64_t value) {
  return std::string(name) + " is " + std::to_string(value);
}

void RequirePositive(const char* name, std::int64_t value,
                     const char* meaning) {
  if (value < 1)
    Reject(Is(name, value) + " but must be at least 1: pass " + meaning);
}

void ValidateCounts(const PipelineSpec& spec) {
  RequirePositive("world_size", spec.world_size,
                  "the number of ranks of the communicator");
  if (spec.world_size > kMaxRanks) {
    Reject(Is("world_size", spec.world_size) + " but must be at most " +
           std::to_string(kMaxRanks) + ": use replica groups");
  }
  RequirePositive("tokens_per_rank", spec.tokens_per_rank,
                  "the tokens of one rank's batch");
  RequirePositive("shard_width", spec.shard_width,
                  "the table columns that one rank owns");
  RequirePositive("emb_width", spec.emb_width,
                  "the columns of the whole table");
  RequirePositive("num_unique", spec.num_unique,
                  "the capacity of the list of distinct ids");
}

void ValidateWidths(const PipelineSpec& spec) {
  if (spec.emb_width > kMaxInt32) {
    Reject(Is("emb_width", spec.emb_width) +
           " but must be below 2^31: split the table");
  }
  std::int64_t covered = 0;
  const bool overflow = __builtin_mul_overflow(
      static_cast<std::int64_t>(spec.world_size), spec.shard_width, &covered);
  if (overflow || covered != spec.emb_width) {
    Reject(
        Is("emb_width", spec.emb_width) +
        " but world_size * shard_width = " + std::to_string(spec.world_size) +
        " * " + std::to_string(spec.shard_width) +
        " must equal it: choose an emb_width that the world size divides");
  }
}

// Ids, segment indices and the sorted order of tokens are i32.
void ValidateIndexRange(const PipelineSpec& spec) {
  std::int64_t tokens = 0;
  const bool overflow =
      __builtin_mul_overflow(static_cast<std::int64_t>(spec.world_size),
                             spec.tokens_per_rank, &tokens);
  if (overflow || tokens > kMaxInt32) {
    Reject(Is("tokens_per_rank", spec.tokens_per_rank) +
           " but the global batch of world_size = " +
           std::to_string(spec.world_size) +
           " such ranks must have fewer than 2^31 tokens: split the batch");
  }
  if (spec.num_unique >= kMaxInt32) {
    Reject(Is("num_unique", spec.num_unique) +
           " but must be below 2^31 - 1: no batch has more distinct ids than "
           "tokens");
  }
}

void ValidateCtas(const PipelineSpec& spec) {
  RequirePositive("min_ctas", spec.min_ctas,
                  "the blocks that a communicator always takes");
  if (spec.max_ctas < spec.min_ctas) {
    Reject(Is("max_ctas", spec.max_ctas) +
           " but must be at least min_ctas = " + std::to_string(spec.min_ctas) +
           ": raise max_ctas or lower min_ctas");
  }
}

}  // namespace

void ValidateSpec(const PipelineSpec& spec) {
  ValidateCounts(spec);
  ValidateWidths(spec);
  ValidateIndexRange(spec);
  ValidateCtas(spec);
}

}  // namespace xrex::async_emb
