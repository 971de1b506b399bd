#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_host.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_host_common.hpp"

namespace xrex::async_emb::host_kernels {
namespace {

// Rows between the one that is copied and the one that is asked for.
constexpr std::int64_t kGatherAhead = 24;

// Calls `copy` with the bytes of a row, as a constant for the common sizes, so
// that the copy of a row becomes a few moves.
template <typename Copy>
void WithRowBytes(std::int64_t width, const Copy& copy) {
  const std::size_t bytes = static_cast<std::size_t>(width) * sizeof(Bf16Bits);
  switch (bytes) {
    case 8:
      return copy(std::integral_constant<std::size_t, 8>());
    case 16:
      return copy(std::integral_constant<std::size_t, 16>());
    case 32:
      return copy(std::integral_constant<std::size_t, 32>());
    case 64:
      return copy(std::integral_constant<std::size_t, 64>());
    case 128:
      return copy(std::integral_constant<std::size_t, 128>());
    case 256:
      return copy(std::integral_constant<std::size_t, 256>());
    default:
      return copy(bytes);
  }
}

std::int64_t CountOutOfRange(const GatherArgs& args) {
  std::int64_t count = 0;
  for (std::int64_t i = args.count_begin; i < args.count_end; ++i) {
    const std::int64_t row = WrapId(args.ids[i], args.vocab_rows);
    count += IsRow(row, args.vocab_rows) ? 0 : 1;
  }
  return count;
}

std::int64_t ClampedRow(const GatherArgs& args, std::int64_t i) {
  const std::int64_t row = WrapId(args.ids[i], args.vocab_rows);
  return std::clamp(row, std::int64_t{0}, args.vocab_rows - 1);
}

// `row_bytes` is a std::size_t or a constant of that type.
template <typename RowBytes>
void GatherClampedRows(const GatherArgs& args, RowBytes row_bytes) {
  for (std::int64_t i = 0; i < args.num_ids; ++i) {
    if (i + kGatherAhead < args.num_ids) {
      const std::int64_t ahead = ClampedRow(args, i + kGatherAhead);
      Prefetch(args.table + ahead * args.width,
               static_cast<std::int64_t>(row_bytes));
    }
    std::memcpy(args.rows + i * args.width,
                args.table + ClampedRow(args, i) * args.width, row_bytes);
  }
}

void ZeroRowsOutOfRange(const GatherArgs& args) {
  for (std::int64_t i = 0; i < args.num_ids; ++i) {
    if (IsRow(WrapId(args.ids[i], args.vocab_rows), args.vocab_rows)) continue;
    std::fill_n(args.rows + i * args.width, args.width, Bf16Bits{0});
  }
}

constexpr std::size_t kReduceBlock = 512;
using ReduceBlock = std::array<float, kReduceBlock>;

// Sums values [begin, begin + count) of ranks [first, first + num_ranks). The
// largest power of two of ranks forms the left half of the tree: so an odd last
// rank is carried up.
void ReduceTree(const float* const* parts, int first, int num_ranks,
                std::size_t begin, std::size_t count, float* out) {
  if (num_ranks == 1) {
    std::memcpy(out, parts[first] + begin, count * sizeof(float));
    return;
  }
  int left = 1;
  while (left < num_ranks - left) left *= 2;
  ReduceBlock right_sum;
  ReduceTree(parts, first, left, begin, count, out);
  ReduceTree(parts, first + left, num_ranks - left, begin, count,
             right_sum.data());
  for (std::size_t i = 0; i < count; ++i) out[i] += right_sum[i];
}

}  // namespace

std::size_t ScratchBytes(const PipelineSpec& spec) {
  return std::max(
      CheckScratchBytes(spec.num_unique),
      SumScratchBytes(spec.num_tokens(), spec.num_unique, spec.shard_width));
}

void GatherRows(const GatherArgs& args, StepCounters& counters) {
  counters.ids_out_of_range.fetch_add(CountOutOfRange(args),
                                      std::memory_order_relaxed);
  if (args.vocab_rows == 0) {
    std::fill_n(args.rows, args.num_ids * args.width, Bf16Bits{0});
    return;
  }
  WithRowBytes(args.width,
               [&args](auto row_bytes) { GatherClampedRows(args, row_bytes); });
  if (args.out_of_range == OutOfRange::kZero) ZeroRowsOutOfRange(args);
}

void CombineSlices(const SliceShape& shape, const Bf16Bits* slices,
                   Bf16Bits* out) {
  const std::int64_t rank_stride = shape.tokens_per_rank * shape.shard_width;
  WithRowBytes(shape.shard_width, [&](auto slice_bytes) {
    Bf16Bits* to = out;
    for (std::int64_t t = 0; t < shape.tokens_per_rank; ++t) {
      const Bf16Bits* from = slices + t * shape.shard_width;
      for (std::int32_t rank = 0; rank < shape.world_size; ++rank) {
        std::memcpy(to, from + rank * rank_stride, slice_bytes);
        to += shape.shard_width;
      }
    }
  });
}

void RouteGradients(const SliceShape& shape, const Bf16Bits* grads,
                    Bf16Bits* slices) {
  const std::int64_t rank_stride = shape.tokens_per_rank * shape.shard_width;
  WithRowBytes(shape.shard_width, [&](auto slice_bytes) {
    const Bf16Bits* from = grads;
    for (std::int64_t t = 0; t < shape.tokens_per_rank; ++t) {
      Bf16Bits* to = slices + t * shape.shard_width;
      for (std::int32_t rank = 0; rank < shape.world_size; ++rank) {
        std::memcpy(to + rank * rank_stride, from, slice_bytes);
        from += shape.shard_width;
      }
    }
  });
}

void FillNan(Bf16Bits* values, std::size_t count) {
  std::fill_n(values, count, kBf16QuietNan);
}

void ReduceRanks(const float* const* parts, int world_size, std::size_t count,
                 float* out) {
  for (std::size_t begin = 0; begin < count; begin += kReduceBlock) {
    ReduceTree(parts, 0, world_size, begin,
               std::min(kReduceBlock, count - begin), out + begin);
  }
}

}  // namespace xrex::async_emb::host_kernels
