// L1: the rows that one step updates and the next one reads, and the tokens of
// both steps in them. Pure.
#pragma once

#include <cstdint>
#include <span>

#include "phoenix/xrex/cuda/async_emb/src/types.hpp"

namespace xrex::async_emb {

// What a step updates, as GroupIds gives it.
struct UpdatedRows {
  std::span<const std::int32_t> unique_tokens;  // [U]
  std::span<const std::int32_t> segment_ids;    // [N], rank after rank
  std::int64_t num_rows = 0;                    // slots in use
};

struct SharedRowsSpec {
  std::int32_t vocab_rows = 0;
  std::int32_t num_ranks = 1;  // R
  OutOfRange out_of_range = OutOfRange::kClip;
};

// What a plan is written to. C is the room for shared rows, S the room for each
// rank's tokens in them.
struct SharedRowsArrays {
  std::span<std::int32_t> rows;           // [C] ascending, then vocab_rows
  std::span<std::int32_t> tokens;         // [R * S] a rank's positions, then 0
  std::span<std::int32_t> segments;       // [R * S] into rows, then -1
  std::span<std::int32_t> rest_unique;    // [U] vocab_rows for shared rows
  std::span<std::int32_t> rest_segments;  // [N] -1 for tokens of shared rows
  std::span<std::int32_t> next_index;  // [N] into rows, -1 for the other tokens
};

struct SharedRowsCounts {
  std::int64_t num_rows = 0;
  std::int64_t num_tokens = 0;       // of the step that updates, all ranks
  std::int64_t max_rank_tokens = 0;  // the most of these on one rank
  bool fits = false;  // whether there is room; if not, the arrays mean nothing
};

// Splits the rows and tokens of a step into those whose rows the next step
// reads, masked tokens included, and the rest. Every token that has a segment
// is in exactly one part, and both keep the order.
//
// Time and scratch are linear in the tokens. Throws
// AsyncEmbError(kInvalidArgument) if sizes do not fit together or `updated` is
// no grouping.
template <typename Id>
SharedRowsCounts PlanSharedRows(const UpdatedRows& updated,
                                std::span<const Id> next_ids,
                                const SharedRowsSpec& spec,
                                const SharedRowsArrays& plan);

extern template SharedRowsCounts PlanSharedRows(const UpdatedRows&,
                                                std::span<const std::int32_t>,
                                                const SharedRowsSpec&,
                                                const SharedRowsArrays&);
extern template SharedRowsCounts PlanSharedRows(const UpdatedRows&,
                                                std::span<const std::int64_t>,
                                                const SharedRowsSpec&,
                                                const SharedRowsArrays&);

}  // namespace xrex::async_emb
