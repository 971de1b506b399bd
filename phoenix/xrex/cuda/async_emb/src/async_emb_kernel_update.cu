// The checks of an update and rowwise Adagrad on CUDA.
#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_common.cuh"

namespace xrex::async_emb::cuda_kernels {
namespace {

// --- Checks ----------------------------------------------------------------

// What is found against the inputs of one step.
struct Findings {
  std::int64_t own_segments;    // invalid ones
  std::int64_t other_segments;  // of the other ranks' tokens
  std::int64_t duplicate_slots;
};

struct CheckScratch {
  Findings* findings = nullptr;
  SortBuffers sort;
};

// Rows are sorted whole: how many there are is not known when the scratch is
// cut.
constexpr int kRowBits = 32;

CheckScratch CutCheckScratch(ScratchCutter& cutter, std::int64_t num_unique) {
  CheckScratch scratch;
  scratch.findings = cutter.Take<Findings>(1);
  scratch.sort = CutSortBuffers(cutter, num_unique, kRowBits);
  return scratch;
}

__global__ void __launch_bounds__(kBlockSize)
    CountInvalidSegmentsKernel(UpdateCheckArgs args, Findings* findings) {
  // -1 becomes 0 and num_unique - 1 becomes num_unique.
  const auto last = static_cast<std::uint32_t>(args.num_unique);
  std::uint32_t own = 0;
  std::uint32_t others = 0;
  for (std::int64_t i = ThreadIndex(); i < args.num_tokens; i += NumThreads()) {
    const auto shifted = static_cast<std::uint32_t>(args.segments[i]) + 1U;
    if (shifted <= last) continue;
    if (i >= args.count_begin && i < args.count_end) {
      ++own;
    } else {
      ++others;
    }
  }
  AddWarpCounts(&findings->own_segments, own);
  AddWarpCounts(&findings->other_segments, others);
}

// A table of 2^32 rows or more is taken for one of 2^32: an id means one of the
// first or the last 2^31 rows, so that no two ids that mean different rows
// meet.
__device__ std::int64_t CountedRows(const UpdateCheckArgs& args) {
  return min(args.vocab_rows, std::int64_t{1} << kRowBits);
}

// Slots without a row come last. Nothing reads the slots that are sorted along.
__global__ void __launch_bounds__(kBlockSize)
    ListRowsKernel(UpdateCheckArgs args, std::uint32_t* rows,
                   std::uint32_t* slots) {
  constexpr std::uint32_t kNoRow = 0xFFFFFFFFU;
  const std::int64_t vocab_rows = CountedRows(args);
  for (std::int64_t u = ThreadIndex(); u < args.num_unique; u += NumThreads()) {
    const std::int64_t row = WrapId(args.unique_tokens[u], vocab_rows);
    rows[u] = IsRow(row, vocab_rows) ? static_cast<std::uint32_t>(row) : kNoRow;
    slots[u] = static_cast<std::uint32_t>(u);
  }
}

__global__ void __launch_bounds__(kBlockSize)
    CountDuplicatesKernel(UpdateCheckArgs args, const std::uint32_t* rows,
                          Findings* findings) {
  const std::int64_t vocab_rows = CountedRows(args);
  std::uint32_t duplicates = 0;
  for (std::int64_t u = ThreadIndex() + 1; u < args.num_unique;
       u += NumThreads()) {
    if (rows[u] == rows[u - 1] && IsRow(rows[u], vocab_rows)) ++duplicates;
  }
  AddWarpCounts(&findings->duplicate_slots, duplicates);
}

__device__ void AddToCounter(std::int64_t* counter, std::int64_t count) {
  atomicAdd(reinterpret_cast<unsigned long long*>(counter),
            static_cast<unsigned long long>(count));
}

// Counts the findings of a step that is pending and gives the verdict on it.
__device__ float Judge(const UpdateCheckArgs& args, const Findings& findings,
                       Counters* counters) {
  if (args.scalars->pending == 0) return kVerdictPending;
  AddToCounter(&counters->segments_invalid, findings.own_segments);
  AddToCounter(&counters->duplicate_slots, findings.duplicate_slots);
  if (findings.own_segments + findings.other_segments +
          findings.duplicate_slots !=
      0) {
    return kVerdictInvalid;
  }
  return isfinite(args.scalars->learning_rate) ? kVerdictApply
                                               : kVerdictNonFinite;
}

__global__ void JudgeKernel(GuardView guard, UpdateCheckArgs args,
                            const Findings* findings, Counters* counters) {
  *args.flag = HasFailed(guard) ? __uint_as_float(0x7FC00000U)
                                : Judge(args, *findings, counters);
}

void CountDuplicates(cudaStream_t stream, const UpdateCheckArgs& args,
                     const CheckScratch& scratch) {
  const dim3 blocks(FillingBlocks(args.num_unique, kBlockSize));
  Launch(stream, "ListRowsKernel", blocks, kBlockSize, ListRowsKernel, args,
         scratch.sort.keys[0], scratch.sort.values[0]);
  const int at = SortByKey(stream, scratch.sort, args.num_unique, kRowBits);
  Launch(stream, "CountDuplicatesKernel", blocks, kBlockSize,
         CountDuplicatesKernel, args, scratch.sort.keys[at], scratch.findings);
}

// --- Norm and decision -----------------------------------------------------

// Values that the deciding block sums in one go: a run for each of its threads.
// A block of many takes longer for them than a whole grid and one more launch.
constexpr unsigned kDecideThreads = 64;
constexpr std::int64_t kDecideValues =
    std::int64_t{kDecideThreads} * kRunLength;

// Run sums of two levels, in turn.
struct ApplyScratch {
  float* sums[2] = {};
};

ApplyScratch CutApplyScratch(ScratchCutter& cutter, std::int64_t num_unique) {
  ApplyScratch scratch;
  std::int64_t count = num_unique;
  for (float*& sums : scratch.sums) {
    count = CeilDiv(count, std::int64_t{kRunLength});
    sums = cutter.Take<float>(count);
  }
  return scratch;
}

// The sum of a run of values, left to right.
__device__ float SumRunOfValues(const float* values, std::int64_t count,
                                std::int64_t run) {
  constexpr unsigned kAhead = 16;
  const std::int64_t left = count - run * kRunLength;
  const auto length =
      static_cast<unsigned>(min(left, std::int64_t{kRunLength}));
  values += run * kRunLength;
  float sum = 0.0F;
  for (unsigned i = 0; i < length; i += kAhead) {
    float ahead[kAhead];
#pragma unroll
    for (unsigned k = 0; k < kAhead; ++k) {
      ahead[k] = i + k < length ? values[i + k] : 0.0F;
    }
#pragma unroll
    for (unsigned k = 0; k < kAhead; ++k) {
      if (i + k < length) sum = i + k == 0 ? ahead[k] : sum + ahead[k];
    }
  }
  return sum;
}

__global__ void __launch_bounds__(kBlockSize)
    SumValuesKernel(const float* values, std::int64_t count, float* sums) {
  const std::int64_t num_runs = CeilDiv(count, std::int64_t{kRunLength});
  for (std::int64_t run = ThreadIndex(); run < num_runs; run += NumThreads()) {
    sums[run] = SumRunOfValues(values, count, run);
  }
}

// The counter of the reason for which the step is skipped, or null.
__device__ std::int64_t* SkipCounter(float verdict, float norm,
                                     Counters* counters) {
  if (verdict >= kVerdictPending) return &counters->skipped_pending;
  if (verdict >= kVerdictInvalid) return &counters->skipped_invalid;
  if (verdict != kVerdictApply || !isfinite(norm)) {
    return &counters->skipped_non_finite;
  }
  return nullptr;
}

// The one place that decides on a step. The guard is read once: the host may
// write to it at any time.
__device__ void Decide(const GuardView& guard, const ApplyArgs& args,
                       float norm, Counters* counters) {
  guard.decision->applied = 0;
  if (HasFailed(guard)) return;
  const float verdict = args.stats[args.num_unique];
  if (isnan(verdict)) {
    Fail(guard, StepFailure::kPeerFailed);
    return;
  }
  std::int64_t* skipped = SkipCounter(verdict, norm, counters);
  if (skipped != nullptr) AddToCounter(skipped, std::int64_t{1});
  counters->last_norm = norm;
  args.result->norm = norm;
  args.result->valid = skipped == nullptr ? 1 : 0;
  guard.decision->applied = 1;
}

// Sums `count` <= kDecideValues values by the runs-of-64 rule, and decides.
__global__ void __launch_bounds__(kDecideThreads)
    DecideKernel(GuardView guard, ApplyArgs args, const float* values,
                 std::int64_t count, float* sums, float* other_sums,
                 Counters* counters) {
  while (count > 1) {
    const std::int64_t num_runs = CeilDiv(count, std::int64_t{kRunLength});
    for (std::int64_t run = threadIdx.x; run < num_runs; run += blockDim.x) {
      sums[run] = SumRunOfValues(values, count, run);
    }
    __syncthreads();
    values = sums;
    count = num_runs;
    float* const done = sums;
    sums = other_sums;
    other_sums = done;
  }
  if (threadIdx.x == 0) Decide(guard, args, sqrtf(values[0]), counters);
}

void SumAndDecide(cudaStream_t stream, const GuardView& guard,
                  const ApplyArgs& args, ApplyScratch scratch,
                  Counters* counters) {
  const float* values = args.stats;
  std::int64_t count = args.num_unique;
  while (count > kDecideValues) {
    const std::int64_t num_runs = CeilDiv(count, std::int64_t{kRunLength});
    Launch(stream, "SumValuesKernel", dim3(FillingBlocks(num_runs, kBlockSize)),
           kBlockSize, SumValuesKernel, values, count, scratch.sums[0]);
    values = scratch.sums[0];
    count = num_runs;
    std::swap(scratch.sums[0], scratch.sums[1]);
  }
  Launch(stream, "DecideKernel", dim3(1), kDecideThreads, DecideKernel, guard,
         args, values, count, scratch.sums[0], scratch.sums[1], counters);
}

// --- Rows ------------------------------------------------------------------

// What a slot does to its row.
struct RowUpdate {
  std::int64_t row;
  unsigned slot;       // counted from the warp's first
  float scale;         // of the gradient
  float weight_decay;  // of the row
};

// exp(-rate * steps): the product in f32, its exponential in f64.
__device__ float DecayAfter(float rate, std::int64_t steps) {
  const float exponent = -rate * static_cast<float>(steps);
  return static_cast<float>(exp(static_cast<double>(exponent)));
}

// Updates the state of the slot's row and finds what the row is changed by.
__device__ RowUpdate UpdateState(const ApplyArgs& args, std::int64_t slot,
                                 std::int64_t row) {
  float decay = args.params.decay_factor;
  float weight_decay = args.params.weight_decay_factor;
  if (args.params.lazy) {
    const std::int32_t step = args.scalars->step;
    const std::int64_t steps = std::int64_t{step} - args.last_step[row];
    args.last_step[row] = step;
    decay =
        DecayAfter(args.params.accum_decay_rate, max(steps, std::int64_t{0}));
    weight_decay =
        DecayAfter(args.params.weight_decay_rate, max(steps, std::int64_t{0}));
  }
  const float squares = args.stats[slot];
  const float inverse_width = 1.0F / static_cast<float>(args.emb_width);
  const float state = args.row_state[row] * decay + squares * inverse_width;
  args.row_state[row] = state;
  RowUpdate update;
  update.row = row;
  update.slot = LaneIndex();
  update.scale =
      -args.scalars->learning_rate * (1.0F / (sqrtf(state) + args.params.eps));
  update.weight_decay = squares > 0.0F ? weight_decay : 1.0F;
  return update;
}

// Updates the states of the warp's slots, a lane each, and lists what their
// rows are changed by. All lanes of the warp call it. Returns how many there
// are.
__device__ unsigned ListUpdates(const ApplyArgs& args, std::int64_t first,
                                RowUpdate* updates) {
  const std::int64_t slot = first + LaneIndex();
  std::int64_t row = -1;
  if (slot < args.num_unique) {
    row = WrapId(args.unique_tokens[slot], args.vocab_rows);
  }
  const bool used = IsRow(row, args.vocab_rows);
  const unsigned used_lanes = __ballot_sync(kAllLanes, used);
  if (used) {
    updates[__popc(used_lanes & ((1U << LaneIndex()) - 1))] =
        UpdateState(args, slot, row);
  }
  return static_cast<unsigned>(__popc(used_lanes));
}

// f32(bf16(value * weight_decay)) + f32(bf16(scale * f32(bf16(sum)))).
template <int kColumns>
__device__ Bf16Columns<kColumns> UpdateColumns(
    const RowUpdate& update, const Columns<kColumns>& sums,
    const Bf16Columns<kColumns>& columns) {
  Columns<kColumns> change = RoundToBf16(sums);
  Columns<kColumns> value = Widen(columns);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    change.at[c] = update.scale * change.at[c];
    value.at[c] = value.at[c] * update.weight_decay;
  }
  change = RoundToBf16(change);
  value = RoundToBf16(value);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    value.at[c] = value.at[c] + change.at[c];
  }
  return Narrow(value);
}

// Updates the rows of up to kAhead slots of a group, loaded before the first of
// them is stored: that of `base` and of every next one of its group.
template <int kColumns, unsigned kAhead>
__device__ void UpdateGroupRows(const ApplyArgs& args, const LaneGroup& group,
                                std::int64_t first, const RowUpdate* updates,
                                unsigned base, unsigned num_updates) {
  for (std::int64_t column = group.lane * kColumns; column < args.width;
       column += group.lanes * kColumns) {
    Columns<kColumns> sums[kAhead];
    Bf16Columns<kColumns> old[kAhead];
#pragma unroll
    for (unsigned k = 0; k < kAhead; ++k) {
      const unsigned r = base + k * group.groups;
      if (r >= num_updates) continue;
      const RowUpdate& update = updates[r];
      sums[k] = LoadColumns<kColumns>(
          args.accum + (first + update.slot) * args.width + column);
      old[k] =
          LoadColumns<kColumns>(args.table + update.row * args.width + column);
    }
#pragma unroll
    for (unsigned k = 0; k < kAhead; ++k) {
      const unsigned r = base + k * group.groups;
      if (r >= num_updates) continue;
      const RowUpdate& update = updates[r];
      StoreColumns(UpdateColumns(update, sums[k], old[k]),
                   args.table + update.row * args.width + column);
    }
  }
}

// A warp updates the rows of kWarpSize slots, a group of lanes each.
template <int kColumns>
__global__ void __launch_bounds__(kBlockSize, 2)
    UpdateRowsKernel(ApplyArgs args, const StepDecision* decision,
                     unsigned group_lanes) {
  if (decision->applied == 0 || args.result->valid == 0) return;
  __shared__ RowUpdate all_updates[kWarpsPerBlock][kWarpSize];
  RowUpdate* updates = all_updates[threadIdx.x / kWarpSize];
  const std::int64_t first = WarpIndex() * kWarpSize;
  const unsigned num_updates = ListUpdates(args, first, updates);
  __syncwarp();
  const LaneGroup group(group_lanes);
  constexpr unsigned kAhead = 4;
  for (unsigned base = group.index; base < num_updates;
       base += group.groups * kAhead) {
    UpdateGroupRows<kColumns, kAhead>(args, group, first, updates, base,
                                      num_updates);
  }
}

template <int kColumns>
void LoadRowKernels() {
  LoadEach({reinterpret_cast<const void*>(&UpdateRowsKernel<kColumns>)});
}

}  // namespace

std::size_t CheckScratchBytes(std::int64_t num_unique) {
  ScratchCutter cutter(nullptr);
  CutCheckScratch(cutter, num_unique);
  return cutter.bytes();
}

std::size_t ApplyScratchBytes(std::int64_t num_unique) {
  ScratchCutter cutter(nullptr);
  CutApplyScratch(cutter, num_unique);
  return cutter.bytes();
}

void LoadUpdateKernels() {
  LoadRowKernels<8>();
  LoadRowKernels<4>();
  LoadRowKernels<2>();
  LoadRowKernels<1>();
  LoadEach({reinterpret_cast<const void*>(&CountInvalidSegmentsKernel),
            reinterpret_cast<const void*>(&ListRowsKernel),
            reinterpret_cast<const void*>(&CountDuplicatesKernel),
            reinterpret_cast<const void*>(&JudgeKernel),
            reinterpret_cast<const void*>(&SumValuesKernel),
            reinterpret_cast<const void*>(&DecideKernel)});
}

void CheckUpdate(cudaStream_t stream, const GuardView& guard,
                 const UpdateCheckArgs& args, std::byte* scratch,
                 Counters* counters) {
  ScratchCutter cutter(scratch);
  const CheckScratch parts = CutCheckScratch(cutter, args.num_unique);
  CheckCuda(cudaMemsetAsync(parts.findings, 0, sizeof(Findings), stream),
            "cudaMemsetAsync");
  Launch(stream, "CountInvalidSegmentsKernel",
         dim3(FillingBlocks(args.num_tokens, kBlockSize)), kBlockSize,
         CountInvalidSegmentsKernel, args, parts.findings);
  if (args.check_duplicates) CountDuplicates(stream, args, parts);
  Launch(stream, "JudgeKernel", dim3(1), 1, JudgeKernel, guard, args,
         parts.findings, counters);
}

void ApplyAdagrad(cudaStream_t stream, const GuardView& guard,
                  const ApplyArgs& args, std::byte* scratch,
                  Counters* counters) {
  ScratchCutter cutter(scratch);
  SumAndDecide(stream, guard, args, CutApplyScratch(cutter, args.num_unique),
               counters);
  const VectorChoice vector =
      VectorChoice(args.width).With(args.accum).With(args.table);
  vector.Dispatch([&](auto columns) {
    Launch(stream, "UpdateRowsKernel", dim3(WarpBlocks(args.num_unique)),
           kBlockSize, UpdateRowsKernel<columns()>, args, guard.decision,
           GroupLanes(args.width, columns()));
  });
}

}  // namespace xrex::async_emb::cuda_kernels
