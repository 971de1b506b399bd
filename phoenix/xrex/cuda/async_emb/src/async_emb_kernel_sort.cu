// The order of an update's tokens on CUDA: sorted by segment, and where each
// segment lies. The only file that knows CUB.
#include <bit>
#include <cub/device/device_radix_sort.cuh>
#include <map>
#include <mutex>
#include <tuple>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_common.cuh"

namespace xrex::async_emb::cuda_kernels {
namespace {

// Prepares the sort and empties the ranges. A segment that is no index becomes
// num_unique, behind all others. Segments are read once, here: what follows
// stays in bounds even if another writes to them.
__global__ void __launch_bounds__(kBlockSize)
    PrepareSortKernel(SegmentSumArgs args, std::uint32_t* keys,
                      std::uint32_t* tokens, Range* ranges) {
  const auto num_unique = static_cast<std::uint32_t>(args.num_unique);
  for (std::int64_t t = ThreadIndex(); t < args.num_tokens; t += NumThreads()) {
    keys[t] = min(static_cast<std::uint32_t>(args.segments[t]), num_unique);
    tokens[t] = static_cast<std::uint32_t>(t);
  }
  for (std::int64_t u = ThreadIndex(); u < args.num_unique; u += NumThreads()) {
    ranges[u] = Range{0, 0};
  }
}

// Writes where each segment begins and ends in the sorted keys.
__global__ void __launch_bounds__(kBlockSize)
    FindRangesKernel(const std::uint32_t* keys, std::int64_t num_tokens,
                     std::uint32_t num_unique, Range* ranges) {
  for (std::int64_t p = ThreadIndex(); p < num_tokens; p += NumThreads()) {
    const std::uint32_t key = keys[p];
    const std::uint32_t previous = p > 0 ? keys[p - 1] : kNoSegment;
    if (key != previous) {
      if (key < num_unique) ranges[key].begin = static_cast<std::uint32_t>(p);
      if (previous < num_unique) {
        ranges[previous].end = static_cast<std::uint32_t>(p);
      }
    }
    if (p == num_tokens - 1 && key < num_unique) {
      ranges[key].end = static_cast<std::uint32_t>(num_tokens);
    }
  }
}

int KeyBits(std::int64_t num_unique) {
  return std::bit_width(static_cast<std::uint64_t>(num_unique));
}

// With no temporary memory it only tells its bytes.
void Sort(cudaStream_t stream, std::byte* temporary, std::size_t& bytes,
          cub::DoubleBuffer<std::uint32_t>& keys,
          cub::DoubleBuffer<std::uint32_t>& values, std::int64_t count,
          int key_bits) {
  // CUB takes the thread's last error for its own: what another call has left
  // there must not fail the sort.
  static_cast<void>(cudaGetLastError());
  CheckCuda(cub::DeviceRadixSort::SortPairs(temporary, bytes, keys, values,
                                            static_cast<std::int32_t>(count), 0,
                                            key_bits, stream),
            "a radix sort");
}

// CUB asks the device for what it has, which takes longer than to look here.
std::size_t TemporaryBytes(std::int64_t count, int key_bits) {
  using Key = std::tuple<int, std::int64_t, int>;
  static std::mutex mutex;
  static auto* const known =
      new std::map<Key, std::size_t>;  // guarded by mutex
  int device = 0;
  CheckCuda(cudaGetDevice(&device), "to name the current device");
  std::lock_guard lock(mutex);
  const Key key{device, count, key_bits};
  if (const auto found = known->find(key); found != known->end()) {
    return found->second;
  }
  // Kept only once CUB has said it: it may refuse, and be asked again.
  std::size_t bytes = 0;
  cub::DoubleBuffer<std::uint32_t> keys;
  cub::DoubleBuffer<std::uint32_t> values;
  Sort(nullptr, nullptr, bytes, keys, values, count, key_bits);
  known->emplace(key, bytes);
  return bytes;
}

}  // namespace

SortBuffers CutSortBuffers(ScratchCutter& cutter, std::int64_t count,
                           int key_bits) {
  SortBuffers buffers;
  for (int i = 0; i < 2; ++i) {
    buffers.keys[i] = cutter.Take<std::uint32_t>(count);
    buffers.values[i] = cutter.Take<std::uint32_t>(count);
  }
  buffers.temporary_bytes = TemporaryBytes(count, key_bits);
  buffers.temporary = cutter.Take<std::byte>(
      static_cast<std::int64_t>(buffers.temporary_bytes));
  return buffers;
}

int SortByKey(cudaStream_t stream, const SortBuffers& buffers,
              std::int64_t count, int key_bits) {
  cub::DoubleBuffer<std::uint32_t> keys(buffers.keys[0], buffers.keys[1]);
  cub::DoubleBuffer<std::uint32_t> values(buffers.values[0], buffers.values[1]);
  std::size_t bytes = buffers.temporary_bytes;
  Sort(stream, buffers.temporary, bytes, keys, values, count, key_bits);
  return keys.selector;
}

OrderScratch CutOrderScratch(ScratchCutter& cutter, std::int64_t num_tokens,
                             std::int64_t num_unique) {
  OrderScratch scratch;
  scratch.sort = CutSortBuffers(cutter, num_tokens, KeyBits(num_unique));
  scratch.ranges = cutter.Take<Range>(num_unique);
  return scratch;
}

SortedTokens SortTokens(cudaStream_t stream, const SegmentSumArgs& args,
                        const OrderScratch& scratch) {
  const std::int64_t most = std::max(args.num_tokens, args.num_unique);
  Launch(stream, "PrepareSortKernel", dim3(FillingBlocks(most, kBlockSize)),
         kBlockSize, PrepareSortKernel, args, scratch.sort.keys[0],
         scratch.sort.values[0], scratch.ranges);
  const int at = SortByKey(stream, scratch.sort, args.num_tokens,
                           KeyBits(args.num_unique));
  const SortedTokens sorted = {scratch.sort.keys[at], scratch.sort.values[at]};
  Launch(stream, "FindRangesKernel",
         dim3(FillingBlocks(args.num_tokens, kBlockSize)), kBlockSize,
         FindRangesKernel, sorted.segments, args.num_tokens,
         static_cast<std::uint32_t>(args.num_unique), scratch.ranges);
  return sorted;
}

void LoadSortKernels() {
  LoadEach({reinterpret_cast<const void*>(&PrepareSortKernel),
            reinterpret_cast<const void*>(&FindRangesKernel)});
}

}  // namespace xrex::async_emb::cuda_kernels
