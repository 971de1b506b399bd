// The CUDA kernels that move rows, the words of a step, and the sum over ranks.
#include <array>
#include <atomic>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_common.cuh"

namespace xrex::async_emb::cuda_kernels {
namespace {

// Rows of a group of lanes that are loaded before the first of them is stored.
constexpr unsigned kRowsAhead = 8;

// Blocks of a multiprocessor at least: registers for as many loads in flight.
constexpr unsigned kResidentBlocks = 3;

// A row of zeros.
constexpr std::int64_t kNoRow = -1;

// --- Rows of the table -----------------------------------------------------

// The row that token `i` reads. Counts it in `missing` if it is out of range
// and among those that are counted.
__device__ std::int64_t FindRow(const GatherArgs& args, std::int64_t i,
                                std::uint32_t& missing) {
  const std::int64_t row = WrapId(args.ids[i], args.vocab_rows);
  if (IsRow(row, args.vocab_rows)) return row;
  if (i >= args.count_begin && i < args.count_end) ++missing;
  if (args.out_of_range == OutOfRange::kZero || args.vocab_rows == 0) {
    return kNoRow;
  }
  return row < 0 ? 0 : args.vocab_rows - 1;
}

// Copies the rows of tokens [first, first + kWarpSize), as far as there are
// any. Each lane brings the first element of one token's row, or kNoRow. All
// lanes of the warp call it.
template <int kColumns>
__device__ void GatherWarpRows(const GatherArgs& args, const LaneGroup& group,
                               std::int64_t first, std::int64_t lane_begin) {
  const std::int64_t left = args.num_ids - first;
  const unsigned num_rows =
      left < kWarpSize ? static_cast<unsigned>(left) : kWarpSize;
  for (std::int64_t tile = 0; tile < args.width;
       tile += group.lanes * kColumns) {
    const std::int64_t column = tile + group.lane * kColumns;
    const bool mine = column < args.width;
    Bf16Bits* to = args.rows + first * args.width + column;
    for (unsigned base = 0; base < num_rows;
         base += group.groups * kRowsAhead) {
      Bf16Columns<kColumns> ahead[kRowsAhead];
#pragma unroll
      for (unsigned k = 0; k < kRowsAhead; ++k) {
        const unsigned r = base + k * group.groups + group.index;
        const std::int64_t begin =
            __shfl_sync(kAllLanes, lane_begin, static_cast<int>(r % kWarpSize));
        ahead[k] = Repeat<kColumns>(0);
        if (mine && r < num_rows && begin != kNoRow) {
          ahead[k] = LoadColumns<kColumns>(args.table + begin + column);
        }
      }
#pragma unroll
      for (unsigned k = 0; k < kRowsAhead; ++k) {
        const unsigned r = base + k * group.groups + group.index;
        if (mine && r < num_rows) StoreColumns(ahead[k], to + r * args.width);
      }
    }
  }
}

template <int kColumns>
__global__ void __launch_bounds__(kBlockSize, kResidentBlocks)
    GatherKernel(GatherArgs args, unsigned group_lanes, Counters* counters) {
  const LaneGroup group(group_lanes);
  std::uint32_t missing = 0;
  for (std::int64_t first = WarpIndex() * kWarpSize; first < args.num_ids;
       first += NumWarps() * kWarpSize) {
    const std::int64_t i = first + LaneIndex();
    const std::int64_t row =
        i < args.num_ids ? FindRow(args, i, missing) : kNoRow;
    GatherWarpRows<kColumns>(args, group, first,
                             row == kNoRow ? kNoRow : row * args.width);
  }
  AddWarpCounts(&counters->ids_out_of_range, missing);
}

// --- Waits of done calls ---------------------------------------------------

// One clock for the whole device.
__device__ std::int64_t NowNanos() {
  std::int64_t nanos = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanos));
  return nanos;
}

__global__ void BeginWaitKernel(GuardView guard) {
  guard.decision->wait_began_nanos = NowNanos();
}

// Called by one thread of a done call, behind the end of its step.
__device__ void EndWait(const GuardView& guard) {
  StepDecision& decision = *guard.decision;
  const std::int64_t began = decision.wait_began_nanos;
  if (began == 0) return;
  decision.wait_began_nanos = 0;
  if (decision.ended_nanos <= began) return;
  decision.waited_nanos += decision.ended_nanos - began;
  static_cast<volatile StepWords*>(guard.words)->waited_nanos =
      decision.waited_nanos;
}

// --- Slices ----------------------------------------------------------------

// Copies of a slice of `width` columns for every token and rank; the distances
// between tokens and ranks are in elements.
struct SliceCopy {
  std::int64_t num_tokens;
  std::int64_t width;
  const Bf16Bits* from;
  std::int64_t from_token;
  std::int64_t from_rank;
  Bf16Bits* to;
  std::int64_t to_token;
  std::int64_t to_rank;
};

// Row y of the grid copies the slices of rank y: no index is divided. A
// decision that is not ok gives NaN; without one all is copied, and no wait
// ends.
template <int kColumns>
__global__ void __launch_bounds__(kBlockSize, kResidentBlocks)
    CopySlicesKernel(SliceCopy copy, unsigned group_lanes, GuardView guard) {
  const bool ok = guard.decision == nullptr || guard.decision->ok != 0;
  if (guard.decision != nullptr && blockIdx.y == 0 && ThreadIndex() == 0) {
    EndWait(guard);
  }
  const LaneGroup group(group_lanes);
  const Bf16Bits* from = copy.from + blockIdx.y * copy.from_rank;
  Bf16Bits* to = copy.to + blockIdx.y * copy.to_rank;
  const std::int64_t stride = NumWarps() * group.groups;
  for (std::int64_t first = WarpIndex() * group.groups + group.index;
       first < copy.num_tokens; first += stride * kRowsAhead) {
    for (std::int64_t column = group.lane * kColumns; column < copy.width;
         column += group.lanes * kColumns) {
      Bf16Columns<kColumns> ahead[kRowsAhead];
#pragma unroll
      for (unsigned k = 0; k < kRowsAhead; ++k) {
        const std::int64_t token = first + k * stride;
        ahead[k] = Repeat<kColumns>(kBf16QuietNan);
        if (ok && token < copy.num_tokens) {
          ahead[k] =
              LoadColumns<kColumns>(from + token * copy.from_token + column);
        }
      }
#pragma unroll
      for (unsigned k = 0; k < kRowsAhead; ++k) {
        const std::int64_t token = first + k * stride;
        if (token < copy.num_tokens) {
          StoreColumns(ahead[k], to + token * copy.to_token + column);
        }
      }
    }
  }
}

void CopySlices(cudaStream_t stream, const char* what, const SliceCopy& copy,
                std::int32_t world_size, const GuardView& guard) {
  const VectorChoice vector =
      VectorChoice(copy.width).With(copy.from).With(copy.to);
  vector.Dispatch([&](auto columns) {
    const unsigned lanes = GroupLanes(copy.width, columns());
    const std::int64_t tokens_per_block = kBlockSize / lanes * kRowsAhead;
    const dim3 grid(FillingBlocks(copy.num_tokens, tokens_per_block),
                    static_cast<unsigned>(world_size));
    Launch(stream, what, grid, kBlockSize, CopySlicesKernel<columns()>, copy,
           lanes, guard);
  });
}

// --- What a step takes in --------------------------------------------------

struct CopyList {
  struct Item {
    std::uint32_t* to;
    const std::uint32_t* from;
    std::int64_t words;
  };
  Item items[kMaxCopies];
  int size;
};

__global__ void __launch_bounds__(kBlockSize) CopyItemsKernel(CopyList list) {
  for (int k = 0; k < list.size; ++k) {
    const CopyList::Item item = list.items[k];
    for (std::int64_t i = ThreadIndex(); i < item.words; i += NumThreads()) {
      item.to[i] = item.from[i];
    }
  }
}

// --- Words of a step -------------------------------------------------------

__global__ void CheckRankKernel(GuardView guard, const std::int32_t* came,
                                std::int32_t expected) {
  if (*came != expected) Fail(guard, StepFailure::kWrongRank);
}

// The host may read at any time: each counter goes over in one store.
__device__ void PublishCounters(const Counters& counters,
                                volatile Counters* published) {
  published->ids_out_of_range = counters.ids_out_of_range;
  published->segments_invalid = counters.segments_invalid;
  published->duplicate_slots = counters.duplicate_slots;
  published->skipped_pending = counters.skipped_pending;
  published->skipped_non_finite = counters.skipped_non_finite;
  published->skipped_invalid = counters.skipped_invalid;
  published->last_norm = counters.last_norm;
}

// Who sees the step as reached sees whether it was good, and who sees that sees
// its counters.
__global__ void EndStepKernel(GuardView guard, std::int64_t step,
                              const Counters* counters, Counters* published) {
  bool ok = false;
  if (guard.pipeline == Pipeline::kUpdate) {
    ok = guard.decision->applied != 0;
    guard.decision->applied = 0;
  } else {
    ok = !HasFailed(guard);
  }
  guard.decision->ok = ok ? 1 : 0;
  guard.decision->ended_nanos = NowNanos();
  PublishCounters(*counters, published);
  volatile StepWords* words = guard.words;
  __threadfence_system();
  if (ok) words->good = step;
  __threadfence_system();
  words->reached = step;
}

__global__ void WriteResultKernel(GuardView guard, const UpdateResult* result,
                                  float* norm, std::int32_t* valid) {
  EndWait(guard);
  const bool ok = guard.decision->ok != 0;
  *norm = ok ? result->norm : __uint_as_float(0x7FC00000U);
  *valid = ok ? result->valid : 0;
}

// --- Ranks -----------------------------------------------------------------

__global__ void __launch_bounds__(kBlockSize)
    ReduceRanksKernel(const float* parts, std::uint32_t world_size,
                      std::int64_t count, float* out) {
  constexpr int kDepth = std::bit_width(static_cast<unsigned>(kMaxRanks));
  constexpr std::uint32_t kRanksAhead = 8;
  for (std::int64_t i = ThreadIndex(); i < count; i += NumThreads()) {
    PairwiseTree<kDepth> tree;
    for (std::uint32_t first = 0; first < world_size; first += kRanksAhead) {
      float ahead[kRanksAhead] = {};
#pragma unroll
      for (std::uint32_t k = 0; k < kRanksAhead; ++k) {
        if (first + k < world_size) ahead[k] = parts[(first + k) * count + i];
      }
#pragma unroll
      for (std::uint32_t k = 0; k < kRanksAhead; ++k) {
        if (first + k < world_size) tree.Push(first + k, ahead[k]);
      }
    }
    out[i] = tree.Finish(world_size);
  }
}

template <int kColumns>
void LoadRowKernels() {
  LoadEach({reinterpret_cast<const void*>(&GatherKernel<kColumns>),
            reinterpret_cast<const void*>(&CopySlicesKernel<kColumns>)});
}

}  // namespace

int NumMultiprocessors() {
  // 0: not asked for yet. Threads that ask at once find the same.
  constexpr int kMaxDevices = 64;
  static std::array<std::atomic<int>, kMaxDevices> known;
  int device = 0;
  CheckCuda(cudaGetDevice(&device), "cudaGetDevice");
  int count =
      device < kMaxDevices ? known[static_cast<std::size_t>(device)].load() : 0;
  if (count != 0) return count;
  CheckCuda(
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
      "cudaDeviceGetAttribute");
  if (device < kMaxDevices) {
    known[static_cast<std::size_t>(device)].store(count);
  }
  return count;
}

void LoadEach(std::initializer_list<const void*> kernels) {
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    CheckCuda(cudaFuncGetAttributes(&attributes, kernel),
              "cudaFuncGetAttributes");
  }
}

void LoadKernels() {
  LoadRowKernels<8>();
  LoadRowKernels<4>();
  LoadRowKernels<2>();
  LoadRowKernels<1>();
  LoadEach({reinterpret_cast<const void*>(&CheckRankKernel),
            reinterpret_cast<const void*>(&BeginWaitKernel),
            reinterpret_cast<const void*>(&CopyItemsKernel),
            reinterpret_cast<const void*>(&EndStepKernel),
            reinterpret_cast<const void*>(&WriteResultKernel),
            reinterpret_cast<const void*>(&ReduceRanksKernel)});
  LoadSortKernels();
  LoadSegmentKernels();
  LoadUpdateKernels();
}

std::size_t ScratchBytes(const PipelineSpec& spec) {
  return std::max({SumScratchBytes(spec), CheckScratchBytes(spec.num_unique),
                   ApplyScratchBytes(spec.num_unique)});
}

void CheckRank(cudaStream_t stream, const GuardView& guard,
               const std::int32_t* came, std::int32_t expected) {
  Launch(stream, "CheckRankKernel", dim3(1), 1, CheckRankKernel, guard, came,
         expected);
}

void EndStep(cudaStream_t stream, const GuardView& guard, std::int64_t step,
             const Counters* counters, Counters* published) {
  Launch(stream, "EndStepKernel", dim3(1), 1, EndStepKernel, guard, step,
         counters, published);
}

void BeginWait(cudaStream_t stream, const GuardView& guard) {
  Launch(stream, "BeginWaitKernel", dim3(1), 1, BeginWaitKernel, guard);
}

void CopyItems(cudaStream_t stream, std::span<const CopyItem> items) {
  CopyList list = {};
  std::int64_t most_words = 0;
  for (const CopyItem& item : items.first(std::min(items.size(), kMaxCopies))) {
    const auto words =
        static_cast<std::int64_t>(item.bytes / sizeof(std::uint32_t));
    list.items[list.size++] = {static_cast<std::uint32_t*>(item.dst),
                               static_cast<const std::uint32_t*>(item.src),
                               words};
    most_words = std::max(most_words, words);
  }
  Launch(stream, "CopyItemsKernel", dim3(FillingBlocks(most_words, kBlockSize)),
         kBlockSize, CopyItemsKernel, list);
}

void GatherRows(cudaStream_t stream, const GatherArgs& args,
                Counters* counters) {
  const VectorChoice vector =
      VectorChoice(args.width).With(args.table).With(args.rows);
  vector.Dispatch([&](auto columns) {
    Launch(stream, "GatherKernel", FillingBlocks(args.num_ids, kBlockSize),
           kBlockSize, GatherKernel<columns()>, args,
           GroupLanes(args.width, columns()), counters);
  });
}

void CombineSlices(cudaStream_t stream, const GuardView& guard,
                   const SliceShape& shape, const Bf16Bits* slices,
                   Bf16Bits* out) {
  const SliceCopy copy = {
      .num_tokens = shape.tokens_per_rank,
      .width = shape.shard_width,
      .from = slices,
      .from_token = shape.shard_width,
      .from_rank = shape.tokens_per_rank * shape.shard_width,
      .to = out,
      .to_token = shape.world_size * shape.shard_width,
      .to_rank = shape.shard_width};
  CopySlices(stream, "CopySlicesKernel (combine)", copy, shape.world_size,
             guard);
}

void RouteGradients(cudaStream_t stream, const SliceShape& shape,
                    const Bf16Bits* grads, Bf16Bits* slices) {
  const SliceCopy copy = {.num_tokens = shape.tokens_per_rank,
                          .width = shape.shard_width,
                          .from = grads,
                          .from_token = shape.world_size * shape.shard_width,
                          .from_rank = shape.shard_width,
                          .to = slices,
                          .to_token = shape.shard_width,
                          .to_rank = shape.tokens_per_rank * shape.shard_width};
  CopySlices(stream, "CopySlicesKernel (route)", copy, shape.world_size,
             GuardView{});
}

void WriteResult(cudaStream_t stream, const GuardView& guard,
                 const UpdateResult* result, float* norm, std::int32_t* valid) {
  Launch(stream, "WriteResultKernel", dim3(1), 1, WriteResultKernel, guard,
         result, norm, valid);
}

void ReduceRanks(cudaStream_t stream, const float* parts,
                 std::int32_t world_size, std::size_t count, float* out) {
  const auto num_values = static_cast<std::int64_t>(count);
  Launch(stream, "ReduceRanksKernel", FillingBlocks(num_values, kBlockSize),
         kBlockSize, ReduceRanksKernel, parts,
         static_cast<std::uint32_t>(world_size), num_values, out);
}

}  // namespace xrex::async_emb::cuda_kernels
