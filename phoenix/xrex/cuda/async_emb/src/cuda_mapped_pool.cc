#include "phoenix/xrex/cuda/async_emb/src/cuda_mapped_pool.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "phoenix/xrex/cuda/async_emb/src/cuda_device_scope.hpp"
#include "phoenix/xrex/cuda/async_emb/src/cuda_error_utils.hpp"

namespace xrex::async_emb {

CudaMappedPool::Block& CudaMappedPool::Take(CUcontext context,
                                            std::size_t size) {
  if (Block* const idle = TakeIdle(context, size)) return *idle;
  const CudaDeviceScope scope(context);
  void* bytes = nullptr;
  CheckCuda(
      cudaHostAlloc(&bytes, size, cudaHostAllocMapped | cudaHostAllocPortable),
      "mapped host memory");
  std::lock_guard lock(mutex_);
  return blocks_.emplace_back(Block{.context = context,
                                    .size = size,
                                    .bytes = static_cast<std::byte*>(bytes),
                                    .is_taken = true});
}

CudaMappedPool::Block* CudaMappedPool::TakeIdle(CUcontext context,
                                                std::size_t size) {
  std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(blocks_, [&](const Block& block) {
    return !block.is_taken && block.context == context && block.size == size;
  });
  if (found == blocks_.end()) return nullptr;
  found->is_taken = true;
  return &*found;
}

void CudaMappedPool::GiveBack(Block& block) {
  std::lock_guard lock(mutex_);
  block.is_taken = false;
}

MappedBlock::MappedBlock(CudaMappedPool& pool, CUcontext context,
                         std::size_t size)
    : pool_(pool), block_(pool.Take(context, size)), bytes_(block_.bytes) {
  std::fill_n(bytes_, size, std::byte{0});
}

MappedBlock::~MappedBlock() { pool_.GiveBack(block_); }

}  // namespace xrex::async_emb
