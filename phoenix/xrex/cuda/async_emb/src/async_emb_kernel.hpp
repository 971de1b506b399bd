// L2: the kernels of a step on CUDA, as functions that enqueue them.
//
// Every function enqueues on `stream` of the current device and returns at
// once; it throws kInternal if a launch is refused. Pointers are device memory,
// aligned to their element and no further, unless a comment says otherwise.
// Widths and counts from 1 are served; offsets are 64-bit. Nothing is allocated
// and nothing is read back. A kernel is safe on any contents of the arrays: ids
// and segments that no rank sent, as an aborted exchange leaves them, are
// treated as out of range.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "phoenix/xrex/cuda/async_emb/src/device.hpp"
#include "phoenix/xrex/cuda/async_emb/src/pipeline_spec.hpp"
#include "phoenix/xrex/cuda/async_emb/src/types.hpp"

namespace xrex::async_emb::cuda_kernels {

// What is decided of a pipeline's step on the device, in device memory that
// starts as zeros. Kernels of one step go by this word and not by the mapped
// one, which may change while they run. Times are of the device's clock.
struct StepDecision {
  std::int32_t applied = 0;  // update: ApplyAdagrad found the exchange complete
  std::int32_t ok = 0;  // what the done call of the latest ended step goes by
  std::int64_t ended_nanos = 0;       // when the latest step ended
  std::int64_t wait_began_nanos = 0;  // of a done call; 0: none waits
  std::int64_t waited_nanos = 0;      // by done calls, in all
};

// The device's view of a step guard.
struct GuardView {
  Pipeline pipeline = Pipeline::kLookup;
  // In mapped host memory: `failure` is written by the host, the rest by the
  // device.
  StepWords* words = nullptr;
  StepDecision* decision = nullptr;
};

// StepCounters on the device: kernels add to the one in device memory, EndStep
// copies it to the one in mapped host memory.
struct Counters {
  std::int64_t ids_out_of_range;
  std::int64_t segments_invalid;
  std::int64_t duplicate_slots;
  std::int64_t skipped_pending;
  std::int64_t skipped_non_finite;
  std::int64_t skipped_invalid;
  float last_norm;
  std::int32_t unused;
};

// Bytes of scratch that CheckUpdate, SumSegments and ApplyAdagrad want for a
// valid spec. They use it one after the other, aligned to kArenaAlignment, and
// leave nothing in it.
std::size_t ScratchBytes(const PipelineSpec& spec);

// Loads the kernels of this file on the current device, so that no launch does.
// Those of the sort that SumSegments and CheckUpdate do come with the library
// and are loaded when it first runs: call both once at the sizes that are used.
void LoadKernels();

// Sets the guard's failure to kWrongRank unless *came == expected.
void CheckRank(cudaStream_t stream, const GuardView& guard,
               const std::int32_t* came, std::int32_t expected);

// Ends a step: decides whether it ended well (a lookup: no failure by now; an
// update: ApplyAdagrad found none), notes the time, then publishes `counters`,
// `good` and `reached`, in this order. `published` is mapped host memory.
void EndStep(cudaStream_t stream, const GuardView& guard, std::int64_t step,
             const Counters* counters, Counters* published);

// Notes the time at which a done call is ready for its step, before `stream`
// waits for it. CombineSlices and WriteResult add the time from then to the end
// of the step, if that came later, to waited_nanos of guard.words.
void BeginWait(cudaStream_t stream, const GuardView& guard);

// Copies at most kMaxCopies items.
void CopyItems(cudaStream_t stream, std::span<const CopyItem> items);

// As host_kernels::GatherRows.
void GatherRows(cudaStream_t stream, const GatherArgs& args,
                Counters* counters);

// slices [R, T, w] -> out [T, R * w]; all NaN unless guard.decision->ok.
void CombineSlices(cudaStream_t stream, const GuardView& guard,
                   const SliceShape& shape, const Bf16Bits* slices,
                   Bf16Bits* out);

// grads [T, R * w] -> slices [R, T, w].
void RouteGradients(cudaStream_t stream, const SliceShape& shape,
                    const Bf16Bits* grads, Bf16Bits* slices);

// As host_kernels::CheckUpdate, duplicates only if asked for. The flag of a
// guard that has failed is NaN, which the sum over the ranks carries to all.
void CheckUpdate(cudaStream_t stream, const GuardView& guard,
                 const UpdateCheckArgs& args, std::byte* scratch,
                 Counters* counters);

// As host_kernels::SumSegments, in the fixed order in any case.
void SumSegments(cudaStream_t stream, const SegmentSumArgs& args,
                 std::byte* scratch);

// Reads the guard once. If it has failed, or the summed flag is NaN since a
// peer's has (then the guard's failure becomes kPeerFailed), nothing is
// written but guard.decision. Else as host_kernels::ApplyAdagrad.
void ApplyAdagrad(cudaStream_t stream, const GuardView& guard,
                  const ApplyArgs& args, std::byte* scratch,
                  Counters* counters);

// *norm and *valid from `result`; NaN and 0 unless guard.decision->ok.
void WriteResult(cudaStream_t stream, const GuardView& guard,
                 const UpdateResult* result, float* norm, std::int32_t* valid);

// parts [R, count] -> out [count] by the pairwise tree over ranks, neighbours
// first; an odd last rank is carried up unchanged. `out` overlaps no part.
void ReduceRanks(cudaStream_t stream, const float* parts,
                 std::int32_t world_size, std::size_t count, float* out);

}  // namespace xrex::async_emb::cuda_kernels
