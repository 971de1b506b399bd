// L0: the vocabulary that every layer shares.
#pragma once

#include <cstdint>

namespace xrex::async_emb {

// What becomes of an id outside [0, vocab_rows) after negative ids were wrapped
// once.
enum class OutOfRange : std::uint8_t {
  kClip,  // forward reads the clamped row
  kZero,  // forward gives a zero row
};

// How ranks reach each other.
enum class Transport : std::uint8_t {
  kAuto,  // the best that the backend has
  kNccl,  // NCCL's collectives
  kLsa,   // direct stores between the GPUs of one host
};

// The two independent start/done pairs. Both run in order on one side stream.
enum class Pipeline : std::uint8_t { kLookup = 0, kUpdate = 1 };
inline constexpr int kNumPipelines = 2;

constexpr const char* PipelineName(Pipeline pipeline) {
  return pipeline == Pipeline::kLookup ? "lookup" : "update";
}

// A bfloat16 value as its bits. Arithmetic on it goes through float32
// (bfloat16.hpp).
using Bf16Bits = std::uint16_t;

// More ranks than any communicator here has; sums of per-rank flags count on
// it.
inline constexpr std::int32_t kMaxRanks = 4095;

}  // namespace xrex::async_emb
