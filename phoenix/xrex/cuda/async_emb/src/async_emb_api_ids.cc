#include "phoenix/xrex/cuda/async_emb/src/async_emb_api_ids.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <optional>
#include <span>
#include <tuple>

#include "phoenix/xrex/cuda/async_emb/src/id_groups.hpp"
#include "phoenix/xrex/cuda/async_emb/src/shared_rows.hpp"

namespace xrex::async_emb {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int32s = Array<const std::int32_t>;
using MutableInt32s = Array<std::int32_t>;

template <typename T>
std::span<T> Span(const Array<T>& array) {
  return {array.data(), array.size()};
}

template <typename Id>
std::tuple<std::int64_t, std::int64_t, std::int64_t> PyGroupIds(
    const Array<const Id>& ids, const std::optional<Array<const bool>>& mask,
    std::int32_t vocab_rows, const MutableInt32s& unique_tokens,
    const MutableInt32s& segment_ids) {
  const nb::gil_scoped_release release;
  const auto counts =
      GroupIds(Span(ids), mask ? Span(*mask) : std::span<const bool>(),
               vocab_rows, Span(unique_tokens), Span(segment_ids));
  return {counts.num_rows, counts.num_out_of_range, counts.first_out_of_range};
}

template <typename Id>
std::tuple<std::int64_t, std::int64_t, std::int64_t, bool> PyPlanSharedRows(
    const Int32s& unique_tokens, const Int32s& segment_ids,
    std::int64_t num_rows, const Array<const Id>& next_ids,
    std::int32_t vocab_rows, std::int32_t num_ranks, bool clip,
    const MutableInt32s& rows, const MutableInt32s& tokens,
    const MutableInt32s& segments, const MutableInt32s& rest_unique,
    const MutableInt32s& rest_segments, const MutableInt32s& next_index) {
  const nb::gil_scoped_release release;
  const auto counts = PlanSharedRows(
      {.unique_tokens = Span(unique_tokens),
       .segment_ids = Span(segment_ids),
       .num_rows = num_rows},
      Span(next_ids),
      {.vocab_rows = vocab_rows,
       .num_ranks = num_ranks,
       .out_of_range = clip ? OutOfRange::kClip : OutOfRange::kZero},
      {.rows = Span(rows),
       .tokens = Span(tokens),
       .segments = Span(segments),
       .rest_unique = Span(rest_unique),
       .rest_segments = Span(rest_segments),
       .next_index = Span(next_index)});
  return {counts.num_rows, counts.num_tokens, counts.max_rank_tokens,
          counts.fits};
}

template <typename Id>
void BindIdsOf(nb::module_& module) {
  module.def("group_ids", &PyGroupIds<Id>, "ids"_a.noconvert(),
             "mask"_a.noconvert().none(), "vocab_rows"_a,
             "unique_tokens"_a.noconvert(), "segment_ids"_a.noconvert(),
             "Groups tokens by row into the last two arrays; returns the "
             "distinct rows, the ids out of range, and the first of them.");
  module.def(
      "plan_shared_rows", &PyPlanSharedRows<Id>, "unique_tokens"_a.noconvert(),
      "segment_ids"_a.noconvert(), "num_rows"_a, "next_ids"_a.noconvert(),
      "vocab_rows"_a, "num_ranks"_a, "clip"_a, "rows"_a.noconvert(),
      "tokens"_a.noconvert(), "segments"_a.noconvert(),
      "rest_unique"_a.noconvert(), "rest_segments"_a.noconvert(),
      "next_index"_a.noconvert(),
      "Plans into the last six arrays; returns the shared rows, the tokens in "
      "them, the most on one rank, and whether there was room.");
}

}  // namespace

void BindIds(nb::module_& module) {
  BindIdsOf<std::int32_t>(module);
  BindIdsOf<std::int64_t>(module);
}

}  // namespace xrex::async_emb
