#include "phoenix/xrex/cuda/async_emb/src/shared_rows.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <string>

#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/id_groups.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

constexpr std::int32_t kNone = -1;

[[noreturn]] void Refuse(const std::string& message) {
  throw AsyncEmbError(ErrorCode::kInvalidArgument,
                      StrCat("async_emb: ", message));
}

void RequireSize(const char* name, std::size_t found, std::size_t expected) {
  if (found == expected) return;
  Refuse(StrCat(name, " has ", found, " elements: it must have ", expected));
}

void ValidatePlan(const UpdatedRows& updated, std::size_t num_next,
                  const SharedRowsSpec& spec, const SharedRowsArrays& plan) {
  const std::size_t num_tokens = updated.segment_ids.size();
  if (spec.vocab_rows < 1)
    Refuse(
        StrCat("vocab_rows is ", spec.vocab_rows, ": it must be at least 1"));
  if (num_tokens > std::numeric_limits<std::int32_t>::max()) {
    Refuse(StrCat("the batch has ", num_tokens,
                  " tokens: positions are int32, make it smaller"));
  }
  if (spec.num_ranks < 1 ||
      num_tokens % static_cast<std::size_t>(spec.num_ranks) != 0) {
    Refuse(StrCat("num_ranks is ", spec.num_ranks,
                  ": it must be at least 1 and divide the ", num_tokens,
                  " tokens of the batch"));
  }
  if (updated.num_rows < 0 || static_cast<std::size_t>(updated.num_rows) >
                                  updated.unique_tokens.size()) {
    Refuse(StrCat("num_rows is ", updated.num_rows,
                  ": it must be at least 0 and at most the ",
                  updated.unique_tokens.size(), " slots of unique_tokens"));
  }
  RequireSize("next_ids", num_next, num_tokens);
  RequireSize("next_index", plan.next_index.size(), num_tokens);
  RequireSize("rest_segments", plan.rest_segments.size(), num_tokens);
  RequireSize("rest_unique", plan.rest_unique.size(),
              updated.unique_tokens.size());
  RequireSize("segments", plan.segments.size(), plan.tokens.size());
  if (plan.tokens.size() % static_cast<std::size_t>(spec.num_ranks) != 0) {
    Refuse(StrCat("tokens has ", plan.tokens.size(), " elements: num_ranks=",
                  spec.num_ranks, " must divide them"));
  }
}

// The row that a lookup of each id reads; -1 for none.
template <typename Id>
void ReadRows(std::span<const Id> ids, const SharedRowsSpec& spec,
              std::span<std::int32_t> rows) {
  const std::int64_t last = spec.vocab_rows - 1;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int64_t row = WrapOnce(ids[i], spec.vocab_rows);
    const std::int64_t nearest = std::clamp<std::int64_t>(row, 0, last);
    const bool read = row == nearest || spec.out_of_range == OutOfRange::kClip;
    rows[i] = read ? static_cast<std::int32_t>(nearest) : kNone;
  }
}

// The index of shared rows, seen from the slots of either step; -1 for rows
// that only one of them has.
struct SharedIndex {
  std::int32_t num_rows = 0;
  std::unique_ptr<std::int32_t[]> of_updated;
  std::unique_ptr<std::int32_t[]> of_next;
};

void RequireAscending(std::span<const std::int32_t> rows) {
  std::int32_t last = -1;
  for (std::size_t slot = 0; slot < rows.size(); ++slot) {
    if (rows[slot] <= last) {
      Refuse(StrCat("unique_tokens[", slot, "] is ", rows[slot], " after ",
                    last, ": rows in use must be at least 0 and ascend: give ",
                    "the groups as group_ids made them"));
    }
    last = rows[slot];
  }
}

// Walks through both ascending lists of rows. Which of them goes on is as good
// as random, so nothing branches on it.
SharedIndex Intersect(std::span<const std::int32_t> updated,
                      std::span<const std::int32_t> next) {
  SharedIndex shared{
      .of_updated =
          std::make_unique_for_overwrite<std::int32_t[]>(updated.size()),
      .of_next = std::make_unique_for_overwrite<std::int32_t[]>(next.size())};
  std::size_t slot = 0;
  std::size_t next_slot = 0;
  std::int32_t num_rows = 0;
  while (slot < updated.size() && next_slot < next.size()) {
    const std::int32_t row = updated[slot];
    const std::int32_t next_row = next[next_slot];
    const std::int32_t index = row == next_row ? num_rows : kNone;
    shared.of_updated[slot] = index;
    shared.of_next[next_slot] = index;
    num_rows += static_cast<std::int32_t>(row == next_row);
    slot += static_cast<std::size_t>(row <= next_row);
    next_slot += static_cast<std::size_t>(next_row <= row);
  }
  shared.num_rows = num_rows;
  std::fill_n(shared.of_updated.get() + slot, updated.size() - slot, kNone);
  std::fill_n(shared.of_next.get() + next_slot, next.size() - next_slot, kNone);
  return shared;
}

// Parts the rows, where there is room.
void PartRows(std::span<const std::int32_t> updated, const SharedIndex& shared,
              std::int32_t vocab_rows, const SharedRowsArrays& plan) {
  std::ranges::fill(
      plan.rows.subspan(static_cast<std::size_t>(shared.num_rows)), vocab_rows);
  std::ranges::fill(plan.rest_unique.subspan(updated.size()), vocab_rows);
  for (std::size_t slot = 0; slot < updated.size(); ++slot) {
    const std::int32_t index = shared.of_updated[slot];
    plan.rest_unique[slot] = index == kNone ? updated[slot] : vocab_rows;
    if (index != kNone) plan.rows[index] = updated[slot];
  }
}

// Parts the tokens of every rank. Writes as many of a rank's tokens in shared
// rows as there is room for.
SharedRowsCounts PartTokens(const UpdatedRows& updated,
                            const std::int32_t* shared_index,
                            const SharedRowsSpec& spec,
                            const SharedRowsArrays& plan) {
  SharedRowsCounts counts;
  const auto num_ranks = static_cast<std::size_t>(spec.num_ranks);
  const std::size_t rank_tokens = updated.segment_ids.size() / num_ranks;
  const std::size_t room = plan.tokens.size() / num_ranks;
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    std::size_t num_shared = 0;
    for (std::size_t token = 0; token < rank_tokens; ++token) {
      const std::size_t i = rank * rank_tokens + token;
      const std::int32_t segment = updated.segment_ids[i];
      if (segment < kNone || segment >= updated.num_rows) {
        Refuse(StrCat("segment_ids[", i, "] is ", segment,
                      ": it must be -1 or below num_rows=", updated.num_rows,
                      ": give the groups as group_ids made them"));
      }
      const std::int32_t index =
          segment == kNone ? kNone : shared_index[segment];
      plan.rest_segments[i] = index == kNone ? segment : kNone;
      if (index == kNone) continue;
      if (num_shared < room) {
        plan.tokens[rank * room + num_shared] =
            static_cast<std::int32_t>(token);
        plan.segments[rank * room + num_shared] = index;
      }
      ++num_shared;
    }
    if (num_shared < room) {
      const std::size_t left = room - num_shared;
      std::ranges::fill(plan.tokens.subspan(rank * room + num_shared, left), 0);
      std::ranges::fill(plan.segments.subspan(rank * room + num_shared, left),
                        kNone);
    }
    const auto num_of_rank = static_cast<std::int64_t>(num_shared);
    counts.num_tokens += num_of_rank;
    counts.max_rank_tokens = std::max(counts.max_rank_tokens, num_of_rank);
  }
  return counts;
}

}  // namespace

template <typename Id>
SharedRowsCounts PlanSharedRows(const UpdatedRows& updated,
                                std::span<const Id> next_ids,
                                const SharedRowsSpec& spec,
                                const SharedRowsArrays& plan) {
  ValidatePlan(updated, next_ids.size(), spec, plan);
  ReadRows(next_ids, spec, plan.next_index);
  const auto next_rows =
      std::make_unique_for_overwrite<std::int32_t[]>(next_ids.size());
  const std::int64_t num_next = GroupRows(spec.vocab_rows, plan.next_index,
                                          {next_rows.get(), next_ids.size()});
  const auto updated_rows =
      updated.unique_tokens.first(static_cast<std::size_t>(updated.num_rows));
  RequireAscending(updated_rows);
  const SharedIndex shared = Intersect(
      updated_rows, {next_rows.get(), static_cast<std::size_t>(num_next)});
  SharedRowsCounts counts =
      PartTokens(updated, shared.of_updated.get(), spec, plan);
  counts.num_rows = shared.num_rows;
  counts.fits = counts.max_rank_tokens * spec.num_ranks <=
                    static_cast<std::int64_t>(plan.tokens.size()) &&
                counts.num_rows <= static_cast<std::int64_t>(plan.rows.size());
  if (!counts.fits) return counts;
  PartRows(updated_rows, shared, spec.vocab_rows, plan);
  for (std::int32_t& index : plan.next_index)
    index = index == kNone ? kNone : shared.of_next[index];
  return counts;
}

template SharedRowsCounts PlanSharedRows(const UpdatedRows&,
                                         std::span<const std::int32_t>,
                                         const SharedRowsSpec&,
                                         const SharedRowsArrays&);
template SharedRowsCounts PlanSharedRows(const UpdatedRows&,
                                         std::span<const std::int64_t>,
                                         const SharedRowsSpec&,
                                         const SharedRowsArrays&);

}  // namespace xrex::async_emb
