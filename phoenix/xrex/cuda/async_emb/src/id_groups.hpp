// L1: which rows of a table a batch names, and which of them each token names.
// Pure.
#pragma once

#include <cstdint>
#include <span>

namespace xrex::async_emb {

struct IdGroupCounts {
  std::int64_t num_rows = 0;          // distinct rows
  std::int64_t num_out_of_range = 0;  // ids of tokens that count, outside
  std::int64_t first_out_of_range =
      -1;  // position of the first of these, or -1
};

// The row that `table[id]` means: a negative id counts from the end, once. May
// lie outside [0, vocab_rows).
template <typename Id>
constexpr std::int64_t WrapOnce(Id id, std::int32_t vocab_rows) {
  return id < 0 ? std::int64_t{id} + vocab_rows : std::int64_t{id};
}

// Lists the distinct rows of a batch in ascending order in `unique_tokens` and
// fills the slots that are left with `vocab_rows`. segment_ids[i] becomes the
// slot of ids[i], or -1 if token i does not count or its id is outside the
// table.
//
// `mask` has an element a token, true for those that count; empty, all do. Time
// and scratch are linear in the tokens, whatever the ids and however large the
// table. Throws AsyncEmbError(kInvalidArgument) if there are more rows than
// slots.
template <typename Id>
IdGroupCounts GroupIds(std::span<const Id> ids, std::span<const bool> mask,
                       std::int32_t vocab_rows,
                       std::span<std::int32_t> unique_tokens,
                       std::span<std::int32_t> segment_ids);

extern template IdGroupCounts GroupIds(std::span<const std::int32_t>,
                                       std::span<const bool>, std::int32_t,
                                       std::span<std::int32_t>,
                                       std::span<std::int32_t>);
extern template IdGroupCounts GroupIds(std::span<const std::int64_t>,
                                       std::span<const bool>, std::int32_t,
                                       std::span<std::int32_t>,
                                       std::span<std::int32_t>);

// Replaces each of `rows` in [0, vocab_rows) by its index in the ascending list
// of the distinct ones; -1 stays. Writes as much of that list as `distinct` has
// room for and returns its whole length.
std::int64_t GroupRows(std::int32_t vocab_rows, std::span<std::int32_t> rows,
                       std::span<std::int32_t> distinct);

}  // namespace xrex::async_emb
