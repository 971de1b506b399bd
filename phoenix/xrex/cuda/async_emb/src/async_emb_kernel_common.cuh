// L2: what the files of the CUDA kernels share: launches, scratch, lanes that
// own a row, and the words of a step.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>

#include "phoenix/xrex/cuda/async_emb/src/arena_layout.hpp"
#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel.hpp"
#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_columns.cuh"
#include "phoenix/xrex/cuda/async_emb/src/cuda_error_utils.hpp"
#include "phoenix/xrex/cuda/async_emb/src/device.hpp"
#include "phoenix/xrex/cuda/async_emb/src/types.hpp"

namespace xrex::async_emb::cuda_kernels {

inline constexpr unsigned kWarpSize = 32;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;
inline constexpr unsigned kBlockSize = 256;
inline constexpr unsigned kWarpsPerBlock = kBlockSize / kWarpSize;

// A run of the fixed order of sums.
inline constexpr unsigned kRunLength = 64;

template <typename T>
__host__ __device__ constexpr T CeilDiv(T value, T divisor) {
  return (value + divisor - 1) / divisor;
}

// --- Host side: launches, scratch ------------------------------------------

// Multiprocessors of the current device.
int NumMultiprocessors();

// Loads each kernel on the current device.
void LoadEach(std::initializer_list<const void*> kernels);
void LoadSegmentKernels();
void LoadSortKernels();
void LoadUpdateKernels();

// As many blocks as `units` of work want, `units_per_block` each, but no more
// than fill the device: for kernels that loop over their work.
inline unsigned FillingBlocks(std::int64_t units,
                              std::int64_t units_per_block) {
  constexpr std::int64_t kBlocksPerMultiprocessor = 2048 / kBlockSize;
  const std::int64_t most = kBlocksPerMultiprocessor * NumMultiprocessors();
  return static_cast<unsigned>(
      std::clamp(CeilDiv(units, units_per_block), std::int64_t{1}, most));
}

// One warp for every kWarpSize of `units`: for kernels whose work is uneven, so
// that the hardware deals it out. Fits any count below 2^31.
inline unsigned WarpBlocks(std::int64_t units) {
  return static_cast<unsigned>(
      std::max(CeilDiv(units, std::int64_t{kBlockSize}), std::int64_t{1}));
}

// The code that a launch returns is its own. The last error of the thread may
// be what another call has left.
template <typename... Params, typename... Args>
void Launch(cudaStream_t stream, const char* what, dim3 grid,
            unsigned block_size, void (*kernel)(Params...), Args&&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(block_size);
  config.stream = stream;
  CheckCuda(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...),
            what);
}

// Deals out aligned parts of a scratch. A null base only adds up the bytes: no
// sum overflows, since a valid spec has fewer than 2^31 tokens, slots and
// columns, and no part has more than 4 * tokens * columns bytes.
class ScratchCutter {
 public:
  explicit ScratchCutter(std::byte* base) : base_(base) {}

  template <typename T>
  T* Take(std::int64_t count) {
    const std::size_t offset = bytes_;
    const std::size_t end =
        offset + static_cast<std::size_t>(count) * sizeof(T);
    bytes_ = CeilDiv(end, kArenaAlignment) * kArenaAlignment;
    if (base_ == nullptr) return nullptr;
    return reinterpret_cast<T*>(base_ + offset);
  }

  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::size_t bytes_ = 0;
};

// What a stable sort of u32 keys with u32 values works in.
struct SortBuffers {
  std::uint32_t* keys[2] = {};
  std::uint32_t* values[2] = {};
  std::byte* temporary = nullptr;
  std::size_t temporary_bytes = 0;
};
SortBuffers CutSortBuffers(ScratchCutter& cutter, std::int64_t count,
                           int key_bits);

// Sorts by the lower `key_bits` bits. From index 0 of both pairs to the index
// that is returned, which depends on count and bits alone.
int SortByKey(cudaStream_t stream, const SortBuffers& buffers,
              std::int64_t count, int key_bits);

// The places of a segment's tokens in the sorted order. Both 0: it has none.
struct alignas(8) Range {
  std::uint32_t begin;
  std::uint32_t end;
};
inline constexpr std::uint32_t kNoSegment = 0xFFFFFFFFU;

struct OrderScratch {
  SortBuffers sort;
  Range* ranges = nullptr;  // [num_unique]
};
OrderScratch CutOrderScratch(ScratchCutter& cutter, std::int64_t num_tokens,
                             std::int64_t num_unique);

// Tokens by segment, ascending within one; and the segments of these tokens,
// num_unique for those that are left out, which come last.
struct SortedTokens {
  const std::uint32_t* segments;
  const std::uint32_t* tokens;
};

// Sorts the tokens and fills the ranges.
SortedTokens SortTokens(cudaStream_t stream, const SegmentSumArgs& args,
                        const OrderScratch& scratch);

std::size_t SumScratchBytes(const PipelineSpec& spec);
std::size_t CheckScratchBytes(std::int64_t num_unique);
std::size_t ApplyScratchBytes(std::int64_t num_unique);

// --- Lanes -----------------------------------------------------------------

__device__ inline unsigned LaneIndex() { return threadIdx.x % kWarpSize; }

__device__ inline std::int64_t WarpIndex() {
  return std::int64_t{blockIdx.x} * (blockDim.x / kWarpSize) +
         threadIdx.x / kWarpSize;
}

__device__ inline std::int64_t NumWarps() {
  return std::int64_t{gridDim.x} * (blockDim.x / kWarpSize);
}

__device__ inline std::int64_t ThreadIndex() {
  return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}

__device__ inline std::int64_t NumThreads() {
  return std::int64_t{gridDim.x} * blockDim.x;
}

// Lanes that own a row of `width` columns together, `columns` at a time each: a
// power of two, so that a warp holds whole groups.
inline unsigned GroupLanes(std::int64_t width, std::int64_t columns) {
  const auto pieces = static_cast<std::uint64_t>(CeilDiv(width, columns));
  return static_cast<unsigned>(
      std::bit_ceil(std::min(pieces, std::uint64_t{kWarpSize})));
}

// The calling lane's place in its group.
struct LaneGroup {
  __device__ explicit LaneGroup(unsigned group_lanes)
      : lanes(group_lanes),
        groups(kWarpSize / group_lanes),
        index(LaneIndex() / group_lanes),
        lane(LaneIndex() % group_lanes) {}

  unsigned lanes;   // of a group
  unsigned groups;  // of the warp
  unsigned index;   // of the group in the warp
  unsigned lane;    // in the group
};

// The pairwise tree over the lanes of each group, neighbours first. All lanes
// of the warp call it.
__device__ inline float GroupSum(const LaneGroup& group, float value) {
  for (unsigned offset = 1; offset < group.lanes; offset *= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

// Adds the sum of the lanes' counts, at most 2^32 - 1. All lanes of the warp
// call it.
__device__ inline void AddWarpCounts(std::int64_t* counter,
                                     std::uint32_t count) {
  for (unsigned offset = kWarpSize / 2; offset > 0; offset /= 2) {
    count += __shfl_xor_sync(kAllLanes, count, offset);
  }
  if (LaneIndex() == 0 && count != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter),
              static_cast<unsigned long long>(count));
  }
}

// --- Sums ------------------------------------------------------------------

// The pairwise tree, neighbours first, over fewer than 2^kDepth values that
// come one after the other. Holds the sum of each whole subtree that waits for
// its neighbour; indices are constants, so that they stay in registers.
template <int kDepth>
class PairwiseTree {
 public:
  // Takes value number `index`.
  __device__ void Push(std::uint32_t index, float value) {
    bool carry = true;
#pragma unroll
    for (int depth = 0; depth < kDepth; ++depth) {
      const bool has_neighbour = ((index >> depth) & 1U) != 0;
      if (carry && !has_neighbour) waiting_[depth] = value;
      if (carry && has_neighbour) value = waiting_[depth] + value;
      carry = carry && has_neighbour;
    }
  }

  // The sum of `count` >= 1 values; an odd last one is carried up unchanged.
  __device__ float Finish(std::uint32_t count) const {
    float sum = 0.0F;
    bool any = false;
#pragma unroll
    for (int depth = 0; depth < kDepth; ++depth) {
      if (((count >> depth) & 1U) == 0) continue;
      sum = any ? waiting_[depth] + sum : waiting_[depth];
      any = true;
    }
    return sum;
  }

 private:
  float waiting_[kDepth] = {};
};

// --- Ids and words ---------------------------------------------------------

// The row that an id means after a negative one was wrapped once; may still lie
// outside the table.
__device__ inline std::int64_t WrapId(std::int32_t id,
                                      std::int64_t vocab_rows) {
  return id < 0 ? id + vocab_rows : std::int64_t{id};
}

__device__ inline bool IsRow(std::int64_t row, std::int64_t vocab_rows) {
  return static_cast<std::uint64_t>(row) <
         static_cast<std::uint64_t>(vocab_rows);
}

// Whether the guard has failed, as host and device have it now.
__device__ inline bool HasFailed(const GuardView& guard) {
  const volatile StepWords* words = guard.words;
  return (words->failure | words->found) != 0;
}

// For good; the first reason stands. No two kernels that call it for one guard
// run at the same time.
__device__ inline void Fail(const GuardView& guard, StepFailure why) {
  volatile StepWords* words = guard.words;
  if (words->found == 0) words->found = static_cast<std::int32_t>(why);
}

}  // namespace xrex::async_emb::cuda_kernels
