// The segment sums of an update on CUDA.
//
// Tokens are sorted by segment, stable. A run of the runs-of-64 rule begins at
// each place whose distance from its segment's first is a multiple of 64: so
// runs are found place by place, whatever the lengths of the segments, and a
// warp has no more rows to add than the 32 runs that begin at its places. The
// sum of a segment's only run is its result. Sums of several runs become rows
// of the next level, where the same is done again.
#include <bit>
#include <type_traits>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_common.cuh"

namespace xrex::async_emb::cuda_kernels {
namespace {

// Levels above the tokens: enough for fewer than 2^31 of them.
constexpr int kMaxLevels = 5;

// A segment of at least 65 rows has no more runs than places of 32 rows begin
// in it. So its runs may lie at its first such place and behind it, and no two
// segments meet.
constexpr std::uint32_t kRowsPerPlace = kRunLength / 2;

constexpr std::uint32_t kNoPlace = 0xFFFFFFFFU;

// The sums of runs that are rows of a level above the tokens.
struct Level {
  std::int64_t num_places = 0;
  std::uint32_t* segments = nullptr;  // [num_places] kNoSegment: no row there
  float* rows = nullptr;              // [num_places, width]
};

struct SumScratch {
  OrderScratch order;
  std::uint32_t* all_segments = nullptr;  // those of the levels
  std::int64_t num_all_segments = 0;
  Level levels[kMaxLevels];
  int num_levels = 0;
};

SumScratch CutSumScratch(ScratchCutter& cutter, std::int64_t num_tokens,
                         std::int64_t num_unique, std::int64_t width) {
  SumScratch scratch;
  scratch.order = CutOrderScratch(cutter, num_tokens, num_unique);
  std::int64_t places = num_tokens;
  std::int64_t most_rows = num_tokens;  // of one segment
  while (most_rows > kRunLength) {
    places = CeilDiv(places, std::int64_t{kRowsPerPlace});
    most_rows = CeilDiv(most_rows, std::int64_t{kRunLength});
    Level& level = scratch.levels[scratch.num_levels++];
    level.num_places = places;
    level.rows = cutter.Take<float>(places * width);
    scratch.num_all_segments += places;
  }
  scratch.all_segments = cutter.Take<std::uint32_t>(scratch.num_all_segments);
  std::uint32_t* segments = scratch.all_segments;
  for (Level& level : scratch.levels) {
    level.segments = segments;
    if (segments != nullptr) segments += level.num_places;
  }
  return scratch;
}

// --- Sums of runs ----------------------------------------------------------

// Consecutive rows to be added, and where their sum goes.
struct Run {
  std::uint32_t first;  // its place, counted from the warp's first
  std::uint32_t num_rows;
  std::uint32_t segment;
  std::uint32_t place;  // in the next level; kNoPlace: the segment's result
};

// What one level of sums reads and writes. Element is Bf16Bits for the rows of
// tokens, which the sorted order names, and float for those of later levels,
// which lie at their places.
template <typename Element>
struct LevelArgs {
  int depth = 0;  // 0: tokens
  std::int64_t num_places = 0;
  const std::uint32_t* segments = nullptr;  // [num_places]
  const std::uint32_t* tokens = nullptr;    // [num_places], depth 0 only
  const Element* rows = nullptr;
  const Range* ranges = nullptr;
  std::uint32_t num_unique = 0;
  std::int64_t width = 0;
  unsigned group_lanes = 1;
  float* accum = nullptr;
  float* stats = nullptr;  // null: another kernel finds them
  Level next;
};

// The run that begins at a place; none: no rows.
template <typename Element>
__device__ Run FindRun(const LevelArgs<Element>& args, std::int64_t place) {
  Run run = {};
  if (place >= args.num_places) return run;
  const std::uint32_t segment = args.segments[place];
  if (segment >= args.num_unique) return run;
  const Range range = args.ranges[segment];
  std::uint32_t begin = range.begin;
  std::uint32_t num_rows = range.end - range.begin;
  for (int depth = 0; depth < args.depth; ++depth) {
    begin = CeilDiv(begin, kRowsPerPlace);
    num_rows = CeilDiv(num_rows, std::uint32_t{kRunLength});
  }
  const std::uint32_t offset = static_cast<std::uint32_t>(place) - begin;
  if (offset % kRunLength != 0) return run;
  run.first = LaneIndex();
  run.num_rows = min(num_rows - offset, std::uint32_t{kRunLength});
  run.segment = segment;
  run.place = num_rows <= kRunLength
                  ? kNoPlace
                  : CeilDiv(begin, kRowsPerPlace) + offset / kRunLength;
  return run;
}

// Lists the runs that begin at the warp's places. All lanes of the warp call
// it. Returns how many there are.
template <typename Element>
__device__ unsigned ListRuns(const LevelArgs<Element>& args, std::int64_t first,
                             Run* runs) {
  const Run run = FindRun(args, first + LaneIndex());
  const unsigned begins = __ballot_sync(kAllLanes, run.num_rows > 0);
  if (run.num_rows > 0) {
    runs[__popc(begins & ((1U << LaneIndex()) - 1))] = run;
  }
  return static_cast<unsigned>(__popc(begins));
}

// Places that the runs of a warp may reach: the last begins at its last place.
constexpr unsigned kReach = kWarpSize + kRunLength - 1;

// The tokens at the warp's places, so that the loads of rows wait for nothing.
__device__ inline void StageTokens(const LevelArgs<Bf16Bits>& args,
                                   std::int64_t first, std::uint32_t* tokens) {
  for (unsigned i = LaneIndex(); i < kReach; i += kWarpSize) {
    if (first + i < args.num_places) tokens[i] = args.tokens[first + i];
  }
}

// Where the rows of a warp lie. `tokens` are those that were staged.
__device__ inline const Bf16Bits* RowAt(const LevelArgs<Bf16Bits>& args,
                                        std::int64_t /*first*/,
                                        const std::uint32_t* tokens,
                                        std::uint32_t place) {
  return args.rows + tokens[place] * args.width;
}
__device__ inline const float* RowAt(const LevelArgs<float>& args,
                                     std::int64_t first,
                                     const std::uint32_t* /*tokens*/,
                                     std::uint32_t place) {
  return args.rows + (first + place) * args.width;
}

// The sums of kColumns columns over the rows of a run, left to right. The first
// row starts them; it is not added to zero.
template <int kColumns, typename Element>
__device__ Columns<kColumns> SumRun(const LevelArgs<Element>& args,
                                    std::int64_t first,
                                    const std::uint32_t* tokens, Run run,
                                    std::int64_t column) {
  constexpr unsigned kAhead = sizeof(Element) == sizeof(float) ? 4 : 8;
  using Loaded = decltype(LoadColumns<kColumns>(args.rows));
  Columns<kColumns> sums = {};
  for (unsigned i = 0; i < run.num_rows; i += kAhead) {
    Loaded ahead[kAhead] = {};
#pragma unroll
    for (unsigned k = 0; k < kAhead; ++k) {
      if (i + k < run.num_rows) {
        ahead[k] = LoadColumns<kColumns>(
            RowAt(args, first, tokens, run.first + i + k) + column);
      }
    }
#pragma unroll
    for (unsigned k = 0; k < kAhead; ++k) {
      if (i + k >= run.num_rows) break;
      const Columns<kColumns> row = Widen(ahead[k]);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        sums.at[c] = i + k == 0 ? row.at[c] : sums.at[c] + row.at[c];
      }
    }
  }
  return sums;
}

template <int kColumns>
__device__ float SumSquares(const Columns<kColumns>& sums) {
  Columns<kColumns> squares = RoundToBf16(sums);
#pragma unroll
  for (float& value : squares.at) value = value * value;
  return PairwiseSum(squares);
}

// Writes the sums of a run. Returns the calling lane's share of the squares,
// which means something where the width is one vector for each lane.
template <int kColumns, typename Element>
__device__ float WriteRunSums(const LevelArgs<Element>& args,
                              const LaneGroup& group, std::int64_t first,
                              const std::uint32_t* tokens, Run run) {
  const bool is_result = run.place == kNoPlace;
  float* to = is_result ? args.accum + run.segment * args.width
                        : args.next.rows + run.place * args.width;
  float squares = 0.0F;
  for (std::int64_t column = group.lane * kColumns; column < args.width;
       column += group.lanes * kColumns) {
    const Columns<kColumns> sums =
        SumRun<kColumns>(args, first, tokens, run, column);
    StoreColumns(sums, to + column);
    squares = SumSquares(sums);
  }
  if (!is_result && group.lane == 0) {
    args.next.segments[run.place] = run.segment;
  }
  return squares;
}

// A warp adds the runs that begin at kWarpSize places, a group of lanes each.
template <int kColumns, typename Element>
__global__ void __launch_bounds__(kBlockSize, 3)
    SumRunsKernel(LevelArgs<Element> args) {
  constexpr bool kIsTokens = std::is_same_v<Element, Bf16Bits>;
  __shared__ Run all_runs[kWarpsPerBlock][kWarpSize];
  __shared__ std::uint32_t all_tokens[kIsTokens ? kWarpsPerBlock : 1]
                                     [kIsTokens ? kReach : 1];
  const unsigned warp = threadIdx.x / kWarpSize;
  Run* runs = all_runs[warp];
  std::uint32_t* tokens = all_tokens[kIsTokens ? warp : 0];
  const std::int64_t first = WarpIndex() * kWarpSize;
  if (first >= args.num_places) return;

  const unsigned num_runs = ListRuns(args, first, runs);
  if constexpr (kIsTokens) StageTokens(args, first, tokens);
  __syncwarp();
  const LaneGroup group(args.group_lanes);
  for (unsigned base = 0; base < num_runs; base += group.groups) {
    const unsigned r = base + group.index;
    const bool active = r < num_runs;
    const Run run = runs[active ? r : 0];
    float squares = 0.0F;
    if (active) {
      squares = WriteRunSums<kColumns>(args, group, first, tokens, run);
    }
    if (args.stats == nullptr) continue;
    squares = GroupSum(group, squares);
    if (active && run.place == kNoPlace && group.lane == 0) {
      args.stats[run.segment] = squares;
    }
  }
}

// --- Empty segments, squares of any width ----------------------------------

// Zeros the results of the segments without tokens: a warp for each kWarpSize
// segments.
template <int kColumns>
__global__ void __launch_bounds__(kBlockSize)
    ZeroEmptyKernel(SegmentSumArgs args, const Range* ranges) {
  const std::int64_t first = WarpIndex() * kWarpSize;
  const std::int64_t segment = first + LaneIndex();
  bool empty = false;
  if (segment < args.num_unique) {
    const Range range = ranges[segment];
    empty = range.begin == range.end;
  }
  if (empty) args.partial_stats[segment] = 0.0F;
  unsigned left = __ballot_sync(kAllLanes, empty);
  while (left != 0) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    left &= left - 1;
    float* row = args.accum + (first + lane) * args.width;
    for (std::int64_t column = LaneIndex() * kColumns; column < args.width;
         column += kWarpSize * kColumns) {
      StoreColumns(Columns<kColumns>{}, row + column);
    }
  }
}

// The squares of rounded sums, left to right.
__device__ float SumLeaf(const float* sums, std::int64_t leaf_width) {
  const float first = async_emb::RoundToBf16(sums[0]);
  float squares = first * first;
#pragma unroll 8
  for (std::int64_t c = 1; c < leaf_width; ++c) {
    const float value = async_emb::RoundToBf16(sums[c]);
    squares = squares + value * value;
  }
  return squares;
}

// The squares of each segment's row: `group_lanes` lanes for each, of which
// each has the same number of leaves, a whole subtree.
__global__ void __launch_bounds__(kBlockSize)
    SumSquaresKernel(SegmentSumArgs args, const Range* ranges,
                     std::int64_t leaf_width, std::uint32_t leaves_per_lane,
                     unsigned group_lanes) {
  constexpr int kDepth = 27;  // fewer than 2^31 columns, 32 lanes
  const LaneGroup group(group_lanes);
  const std::int64_t lane_begin = group.lane * (leaves_per_lane * leaf_width);
  for (std::int64_t base = WarpIndex() * group.groups; base < args.num_unique;
       base += NumWarps() * group.groups) {
    const std::int64_t segment = base + group.index;
    bool used = false;
    if (segment < args.num_unique) {
      const Range range = ranges[segment];
      used = range.begin != range.end;
    }
    float squares = 0.0F;
    if (used) {
      const float* leaf = args.accum + segment * args.width + lane_begin;
      PairwiseTree<kDepth> tree;
      for (std::uint32_t i = 0; i < leaves_per_lane; ++i) {
        tree.Push(i, SumLeaf(leaf + i * leaf_width, leaf_width));
      }
      squares = tree.Finish(leaves_per_lane);
    }
    squares = GroupSum(group, squares);
    if (used && group.lane == 0) args.partial_stats[segment] = squares;
  }
}

// --- Launches --------------------------------------------------------------

// The vector that suits gradients and sums. The rows of levels are aligned as
// the arena is.
VectorChoice ChooseVector(const SegmentSumArgs& args) {
  return VectorChoice(args.width).With(args.grads).With(args.accum);
}

// Whether the lanes that add a row find its squares on their way: then the
// lanes' shares are whole subtrees of single columns.
bool FindsSquares(const SegmentSumArgs& args) {
  return std::has_single_bit(static_cast<std::uint64_t>(args.width)) &&
         args.width <= std::int64_t{kWarpSize} * ChooseVector(args).columns();
}

template <typename Element>
LevelArgs<Element> MakeLevel(const SegmentSumArgs& args,
                             const SumScratch& scratch, int depth) {
  LevelArgs<Element> level;
  level.depth = depth;
  level.ranges = scratch.order.ranges;
  level.num_unique = static_cast<std::uint32_t>(args.num_unique);
  level.width = args.width;
  level.group_lanes = GroupLanes(args.width, ChooseVector(args).columns());
  level.accum = args.accum;
  level.stats = FindsSquares(args) ? args.partial_stats : nullptr;
  if (depth < scratch.num_levels) level.next = scratch.levels[depth];
  return level;
}

template <typename Element>
void LaunchLevel(cudaStream_t stream, const SegmentSumArgs& args,
                 const LevelArgs<Element>& level) {
  ChooseVector(args).Dispatch([&](auto columns) {
    Launch(stream, "SumRunsKernel", dim3(WarpBlocks(level.num_places)),
           kBlockSize, SumRunsKernel<columns(), Element>, level);
  });
}

void SumAllRuns(cudaStream_t stream, const SegmentSumArgs& args,
                const SumScratch& scratch, const SortedTokens& sorted) {
  auto tokens = MakeLevel<Bf16Bits>(args, scratch, 0);
  tokens.num_places = args.num_tokens;
  tokens.segments = sorted.segments;
  tokens.tokens = sorted.tokens;
  tokens.rows = args.grads;
  LaunchLevel(stream, args, tokens);
  for (int depth = 1; depth <= scratch.num_levels; ++depth) {
    const Level& from = scratch.levels[depth - 1];
    auto sums = MakeLevel<float>(args, scratch, depth);
    sums.num_places = from.num_places;
    sums.segments = from.segments;
    sums.rows = from.rows;
    LaunchLevel(stream, args, sums);
  }
}

void ZeroEmptySegments(cudaStream_t stream, const SegmentSumArgs& args,
                       const SumScratch& scratch) {
  const VectorChoice vector = VectorChoice(args.width).With(args.accum);
  vector.Dispatch([&](auto columns) {
    // A vector of float32 has at most 4 columns.
    constexpr int kColumns = columns() < 4 ? columns() : 4;
    Launch(stream, "ZeroEmptyKernel", dim3(WarpBlocks(args.num_unique)),
           kBlockSize, ZeroEmptyKernel<kColumns>, args, scratch.order.ranges);
  });
}

void SumAllSquares(cudaStream_t stream, const SegmentSumArgs& args,
                   const SumScratch& scratch) {
  const std::int64_t num_leaves = args.width & -args.width;
  const auto lanes =
      static_cast<unsigned>(std::min(num_leaves, std::int64_t{kWarpSize}));
  const std::int64_t segments_per_block = kBlockSize / lanes;
  Launch(stream, "SumSquaresKernel",
         dim3(FillingBlocks(args.num_unique, segments_per_block)), kBlockSize,
         SumSquaresKernel, args, scratch.order.ranges, args.width / num_leaves,
         static_cast<std::uint32_t>(num_leaves / lanes), lanes);
}

template <int kColumns>
void LoadSumKernels() {
  LoadEach({reinterpret_cast<const void*>(&SumRunsKernel<kColumns, Bf16Bits>),
            reinterpret_cast<const void*>(&SumRunsKernel<kColumns, float>)});
}

}  // namespace

std::size_t SumScratchBytes(const PipelineSpec& spec) {
  ScratchCutter cutter(nullptr);
  CutSumScratch(cutter, spec.num_tokens(), spec.num_unique, spec.shard_width);
  return cutter.bytes();
}

void LoadSegmentKernels() {
  LoadSumKernels<8>();
  LoadSumKernels<4>();
  LoadSumKernels<2>();
  LoadSumKernels<1>();
  LoadEach({reinterpret_cast<const void*>(&ZeroEmptyKernel<4>),
            reinterpret_cast<const void*>(&ZeroEmptyKernel<2>),
            reinterpret_cast<const void*>(&ZeroEmptyKernel<1>),
            reinterpret_cast<const void*>(&SumSquaresKernel)});
}

void SumSegments(cudaStream_t stream, const SegmentSumArgs& args,
                 std::byte* scratch) {
  ScratchCutter cutter(scratch);
  const SumScratch parts =
      CutSumScratch(cutter, args.num_tokens, args.num_unique, args.width);
  const SortedTokens sorted = SortTokens(stream, args, parts.order);
  if (parts.num_all_segments > 0) {
    // All bits set is kNoSegment.
    CheckCuda(cudaMemsetAsync(parts.all_segments, 0xFF,
                              static_cast<std::size_t>(parts.num_all_segments) *
                                  sizeof(std::uint32_t),
                              stream),
              "cudaMemsetAsync");
  }
  SumAllRuns(stream, args, parts, sorted);
  ZeroEmptySegments(stream, args, parts);
  if (!FindsSquares(args)) SumAllSquares(stream, args, parts);
}

}  // namespace xrex::async_emb::cuda_kernels
