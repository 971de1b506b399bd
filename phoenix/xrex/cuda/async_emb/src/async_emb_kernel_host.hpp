// L2: the kernels of a step on the host, as plain functions. They know no
// stream and no guard: the host device calls them on its worker threads.
//
// Pointers are aligned to their element and no further. Every function may run
// on several threads at once as long as outputs and scratch are not shared.
// Offsets are 64-bit. The functions expect the floating-point mode of the
// calling thread to round to nearest and to keep subnormals.
#pragma once

#include <cstddef>
#include <cstdint>

#include "phoenix/xrex/cuda/async_emb/src/device.hpp"
#include "phoenix/xrex/cuda/async_emb/src/pipeline_spec.hpp"
#include "phoenix/xrex/cuda/async_emb/src/types.hpp"

namespace xrex::async_emb::host_kernels {

// Bytes of scratch that CheckUpdate and SumSegments want for a valid spec. They
// use it one after the other, aligned to kArenaAlignment, and leave nothing in
// it.
std::size_t ScratchBytes(const PipelineSpec& spec);

// rows[i] = the bits of table row ids[i]. A negative id counts from the end
// once; what is still out of range reads the clamped row or gives zeros. An
// empty table gives zeros.
void GatherRows(const GatherArgs& args, StepCounters& counters);

// slices [R, T, w] -> out [T, R * w].
void CombineSlices(const SliceShape& shape, const Bf16Bits* slices,
                   Bf16Bits* out);

// grads [T, R * w] -> slices [R, T, w].
void RouteGradients(const SliceShape& shape, const Bf16Bits* grads,
                    Bf16Bits* slices);

// Writes the verdict on a step: is it pending, is every segment -1 or an index
// below num_unique and, if asked, no row in two slots, is the learning rate
// finite? A step that is not pending has no inputs to be judged: nothing is
// counted for it.
void CheckUpdate(const UpdateCheckArgs& args, std::byte* scratch,
                 StepCounters& counters);

// Sums the gradient rows of each segment, tokens in ascending order, by the
// runs-of-64 rule, and the squares of each rounded sum by the pairwise tree
// over columns. Always in this fixed order. Tokens whose segment is not an
// index below num_unique are left out.
void SumSegments(const SegmentSumArgs& args, std::byte* scratch);

// Computes the norm and, if the step is valid, updates the rows of all slots
// that are in range.
void ApplyAdagrad(const ApplyArgs& args, StepCounters& counters);

// Fills `values` with quiet NaN.
void FillNan(Bf16Bits* values, std::size_t count);

// out[i] = sum over ranks of parts[rank][i] by the pairwise tree, neighbours
// first; an odd last rank is carried up unchanged. `out` overlaps no part.
void ReduceRanks(const float* const* parts, int world_size, std::size_t count,
                 float* out);

}  // namespace xrex::async_emb::host_kernels
