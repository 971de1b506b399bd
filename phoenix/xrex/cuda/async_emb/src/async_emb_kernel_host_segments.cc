// The segment sums of an update on the host.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_host.hpp"
#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_host_common.hpp"

namespace xrex::async_emb::host_kernels {
namespace {

// Tokens between the one that is added and the one that is asked for.
constexpr std::int64_t kTokensAhead = 24;

// The kernel's scratch: floats first, both are 4 bytes.
struct SumScratch {
  float* levels;        // [kMaxLevels, width]
  float* run;           // [width]
  float* squares;       // [width]
  std::int32_t* order;  // [num_tokens] tokens by segment, stable
  std::int32_t* ends;   // [num_unique + 1] end of each segment in `order`
};
constexpr std::int64_t kScratchRows = RunLevels::kMaxLevels + 2;

SumScratch CutScratch(const SegmentSumArgs& args, std::byte* scratch) {
  SumScratch parts;
  parts.levels = reinterpret_cast<float*>(scratch);
  parts.run = parts.levels + RunLevels::kMaxLevels * args.width;
  parts.squares = parts.run + args.width;
  parts.order = reinterpret_cast<std::int32_t*>(parts.squares + args.width);
  parts.ends = parts.order + args.num_tokens;
  return parts;
}

// A stable counting sort. Tokens of no segment go to one more bucket at the
// end, which nothing reads.
void SortTokens(const SegmentSumArgs& args, const SumScratch& scratch) {
  const auto num_unique = static_cast<std::uint32_t>(args.num_unique);
  const auto bucket = [&](std::int64_t t) {
    return std::min(static_cast<std::uint32_t>(args.segments[t]), num_unique);
  };
  std::int32_t* cursors = scratch.ends;
  std::fill_n(cursors, args.num_unique + 1, 0);
  for (std::int64_t t = 0; t < args.num_tokens; ++t) ++cursors[bucket(t)];
  std::int32_t begin = 0;
  for (std::int64_t u = 0; u <= args.num_unique; ++u) {
    const std::int32_t count = cursors[u];
    cursors[u] = begin;
    begin += count;
  }
  for (std::int64_t t = 0; t < args.num_tokens; ++t) {
    scratch.order[cursors[bucket(t)]++] = static_cast<std::int32_t>(t);
  }
}

// Adds 2 * kVectors * kLanes columns of the rows of `count` tokens, left to
// right.
template <int kLanes, int kVectors>
ASYNC_EMB_INLINE void SumColumns(const Bf16Bits* columns, std::int64_t width,
                                 const std::int32_t* tokens, std::int64_t count,
                                 float* out) {
  using F32 = typename Lanes<kLanes>::F32;
  std::array<F32, kVectors> even_sums;
  std::array<F32, kVectors> odd_sums;
  const Bf16Bits* row = columns + tokens[0] * width;
  for (int v = 0; v < kVectors; ++v) {
    LoadBf16Pairs<kLanes>(row + 2 * v * kLanes, even_sums[v], odd_sums[v]);
  }
  for (std::int64_t i = 1; i < count; ++i) {
    row = columns + tokens[i] * width;
    for (int v = 0; v < kVectors; ++v) {
      F32 even;
      F32 odd;
      LoadBf16Pairs<kLanes>(row + 2 * v * kLanes, even, odd);
      even_sums[v] += even;
      odd_sums[v] += odd;
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    F32 left;
    F32 right;
    Lanes<kLanes>::Join(even_sums[v], odd_sums[v], left, right);
    StoreLanes(left, out + 2 * v * kLanes);
    StoreLanes(right, out + (2 * v + 1) * kLanes);
  }
}

ASYNC_EMB_INLINE void SumColumn(const Bf16Bits* column, std::int64_t width,
                                const std::int32_t* tokens, std::int64_t count,
                                float* out) {
  float sum = Bf16ToFloat(column[tokens[0] * width]);
  for (std::int64_t i = 1; i < count; ++i) {
    sum += Bf16ToFloat(column[tokens[i] * width]);
  }
  *out = sum;
}

// out [width] = sum of the rows of a run of tokens. The last piece overlaps the
// one before it where the width is no multiple: the same columns, the same
// sums.
template <int kLanes>
ASYNC_EMB_INLINE void SumRun(const Bf16Bits* grads, std::int64_t width,
                             const std::int32_t* tokens, std::int64_t count,
                             float* out) {
  constexpr std::int64_t kColumns = 2 * kLanes;
  std::int64_t c = 0;
  for (; c + 4 * kColumns <= width; c += 4 * kColumns) {
    SumColumns<kLanes, 4>(grads + c, width, tokens, count, out + c);
  }
  for (; c + 2 * kColumns <= width; c += 2 * kColumns) {
    SumColumns<kLanes, 2>(grads + c, width, tokens, count, out + c);
  }
  for (; c < width && width >= kColumns; c += kColumns) {
    c = std::min(c, width - kColumns);
    SumColumns<kLanes, 1>(grads + c, width, tokens, count, out + c);
  }
  for (; c < width && width >= 8; c += 8) {
    c = std::min(c, width - 8);
    SumColumns<4, 1>(grads + c, width, tokens, count, out + c);
  }
  for (; c < width; ++c) SumColumn(grads + c, width, tokens, count, out + c);
}

// squares [width] = f32(bf16(sums))^2.
template <int kLanes>
ASYNC_EMB_INLINE void SquareRounded(const float* sums, std::int64_t width,
                                    float* squares) {
  std::int64_t c = 0;
  for (; c < width && width >= kLanes; c += kLanes) {
    c = std::min(c, width - kLanes);
    typename Lanes<kLanes>::F32 value;
    LoadLanes(sums + c, value);
    RoundToBf16Lanes<kLanes>(value);
    value *= value;
    StoreLanes(value, squares + c);
  }
  for (; c < width; ++c) {
    const float value = RoundToBf16(sums[c]);
    squares[c] = value * value;
  }
}

// The pairwise tree over kVectors * kLanes values, both powers of two.
template <int kLanes, int kVectors>
ASYNC_EMB_INLINE float SumBlock(const float* values) {
  using F32 = typename Lanes<kLanes>::F32;
  std::array<F32, kVectors> sums;
  for (int v = 0; v < kVectors; ++v) LoadLanes(values + v * kLanes, sums[v]);
  for (int size = kVectors / 2; size >= 1; size /= 2) {
    for (int v = 0; v < size; ++v) {
      F32 even;
      F32 odd;
      Lanes<kLanes>::Split(sums[2 * v], sums[2 * v + 1], even, odd);
      sums[v] = even + odd;
    }
  }
  for (int size = kLanes; size > 1; size /= 2) {
    F32 even;
    F32 odd;
    Lanes<kLanes>::Split(sums[0], sums[0], even, odd);
    sums[0] = even + odd;
  }
  return sums[0][0];
}

// values[j] = sum of leaf j, `leaf_width` values left to right. kChains leaves
// are summed side by side, because one sum alone waits for its own additions.
template <int kChains>
ASYNC_EMB_INLINE void SumLeaves(std::int64_t num_leaves,
                                std::int64_t leaf_width, float* values) {
  for (std::int64_t j = 0; j < num_leaves; j += kChains) {
    const float* leaves = values + j * leaf_width;
    std::array<float, kChains> sums;
    for (int k = 0; k < kChains; ++k) sums[k] = leaves[k * leaf_width];
    for (std::int64_t i = 1; i < leaf_width; ++i) {
      for (int k = 0; k < kChains; ++k) sums[k] += leaves[k * leaf_width + i];
    }
    std::copy(sums.begin(), sums.end(), values + j);
  }
}

// The sum of `width` = q * 2^m values, q odd: 2^m leaves of q values each,
// which are added left to right, then the leaves pairwise, neighbours first.
// Each level overwrites the one below.
template <int kLanes>
ASYNC_EMB_INLINE float SumTree(std::int64_t width, float* values) {
  const std::int64_t num_leaves = width & -width;
  const std::int64_t leaf_width = width / num_leaves;
  if (num_leaves >= 8) {
    SumLeaves<8>(num_leaves, leaf_width, values);
  } else if (num_leaves >= 2) {
    SumLeaves<2>(num_leaves, leaf_width, values);
  } else {
    SumLeaves<1>(num_leaves, leaf_width, values);
  }
  std::int64_t size = num_leaves / 2;
  for (; size >= kLanes; size /= 2) {
    for (std::int64_t i = 0; i < size; i += kLanes) {
      typename Lanes<kLanes>::F32 even;
      typename Lanes<kLanes>::F32 odd;
      LoadLanes(values + 2 * i, even);
      LoadLanes(values + 2 * i + kLanes, odd);
      Lanes<kLanes>::Split(even, odd, even, odd);
      even += odd;
      StoreLanes(even, values + i);
    }
  }
  for (; size >= 1; size /= 2) {
    for (std::int64_t i = 0; i < size; ++i) {
      values[i] = values[2 * i] + values[2 * i + 1];
    }
  }
  return values[0];
}

// The sum over columns of f32(bf16(sums))^2. `width` is a std::int64_t or a
// constant of that type, then a power of two.
template <int kLanes, typename Width>
ASYNC_EMB_INLINE float SumSquares(const float* sums, Width width,
                                  float* squares) {
  SquareRounded<kLanes>(sums, width, squares);
  if constexpr (std::is_same_v<Width, std::int64_t>) {
    return SumTree<kLanes>(width, squares);
  } else if constexpr (Width::value >= kLanes) {
    return SumBlock<kLanes, static_cast<int>(Width::value) / kLanes>(squares);
  } else {
    return SumBlock<4, static_cast<int>(Width::value) / 4>(squares);
  }
}

template <int kLanes>
ASYNC_EMB_INLINE void SumLongSegment(const SegmentSumArgs& args,
                                     const SumScratch& scratch,
                                     const std::int32_t* tokens,
                                     std::int64_t count, float* out) {
  RunLevels levels(scratch.levels, args.width);
  for (std::int64_t i = 0; i < count; i += kRunLength) {
    SumRun<kLanes>(args.grads, args.width, tokens + i,
                   std::min(kRunLength, count - i), scratch.run);
    levels.Push(scratch.run);
  }
  std::memcpy(out, levels.Finish(),
              static_cast<std::size_t>(args.width) * sizeof(float));
}

// Zeros the results of the empty segments from `first` on, up to the next one
// that has tokens. Returns that one.
std::int64_t ZeroEmptySegments(const SegmentSumArgs& args,
                               const SumScratch& scratch, std::int64_t first) {
  std::int64_t last = first + 1;
  while (last < args.num_unique && scratch.ends[last] == scratch.ends[first]) {
    ++last;
  }
  std::fill(args.accum + first * args.width, args.accum + last * args.width,
            0.0F);
  std::fill(args.partial_stats + first, args.partial_stats + last, 0.0F);
  return last;
}

template <int kLanes, typename Width>
ASYNC_EMB_INLINE void SumSortedSegments(const SegmentSumArgs& args,
                                        const SumScratch& scratch,
                                        Width width) {
  const std::int64_t num_used = scratch.ends[args.num_unique - 1];
  std::int64_t begin = 0;
  std::int64_t asked = 0;
  for (std::int64_t u = 0; u < args.num_unique; ++u) {
    const std::int64_t end = scratch.ends[u];
    if (begin == end) {
      u = ZeroEmptySegments(args, scratch, u) - 1;
      continue;
    }
    for (; asked < std::min(end + kTokensAhead, num_used); ++asked) {
      Prefetch(args.grads + scratch.order[asked] * width,
               width * std::int64_t{sizeof(Bf16Bits)});
    }
    const std::int32_t* tokens = scratch.order + begin;
    const std::int64_t count = end - begin;
    float* out = args.accum + u * width;
    if (count <= kRunLength) {
      SumRun<kLanes>(args.grads, width, tokens, count, out);
    } else {
      SumLongSegment<kLanes>(args, scratch, tokens, count, out);
    }
    args.partial_stats[u] = SumSquares<kLanes>(out, width, scratch.squares);
    begin = end;
  }
}

template <int kLanes>
ASYNC_EMB_INLINE void SumSortedSegments(const SegmentSumArgs& args,
                                        const SumScratch& scratch) {
  WithWidth(args.width, [&](auto width) __attribute__((always_inline)) {
    SumSortedSegments<kLanes>(args, scratch, width);
  });
}

ASYNC_EMB_AVX2 void SumSortedSegmentsAvx2(const SegmentSumArgs& args,
                                          const SumScratch& scratch) {
  SumSortedSegments<8>(args, scratch);
}

void SumSortedSegmentsBaseline(const SegmentSumArgs& args,
                               const SumScratch& scratch) {
  SumSortedSegments<4>(args, scratch);
}

}  // namespace

std::size_t SumScratchBytes(std::int64_t num_tokens, std::int64_t num_unique,
                            std::int64_t width) {
  static_assert(sizeof(float) == sizeof(std::int32_t));
  return sizeof(float) * static_cast<std::size_t>(kScratchRows * width +
                                                  num_tokens + num_unique + 1);
}

void SumSegments(const SegmentSumArgs& args, std::byte* scratch) {
  const SumScratch parts = CutScratch(args, scratch);
  SortTokens(args, parts);
  if (HasAvx2()) {
    SumSortedSegmentsAvx2(args, parts);
  } else {
    SumSortedSegmentsBaseline(args, parts);
  }
}

}  // namespace xrex::async_emb::host_kernels
