// L2, CUDA backend: host memory that a device reads and writes as well.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <list>
#include <mutex>

namespace xrex::async_emb {

// Blocks that are used again and never freed, not even with the pool:
// cudaFreeHost may wait for all that a device does, also for a collective of
// somebody else whose peer has died. So there are never more blocks than were
// in use at the same time. Any thread may call any method.
class CudaMappedPool {
 public:
  struct Block {
    CUcontext context = nullptr;
    std::size_t size = 0;
    std::byte* bytes = nullptr;
    bool is_taken = false;
  };

  CudaMappedPool() = default;
  CudaMappedPool(const CudaMappedPool&) = delete;
  CudaMappedPool& operator=(const CudaMappedPool&) = delete;

  // A block of exactly `size` bytes, of `context`, whose bytes are the caller's
  // until it gives the block back. What is in them is left from before. Throws
  // kResourceExhausted.
  Block& Take(CUcontext context, std::size_t size);
  // Neither the host nor the device touches the block any more.
  void GiveBack(Block& block);

 private:
  Block* TakeIdle(CUcontext context, std::size_t size);

  std::mutex mutex_;         // not held while CUDA is called
  std::list<Block> blocks_;  // guarded by mutex_
};

// A block of a pool while this lives, at first zeroed. The pool outlives it.
class MappedBlock {
 public:
  MappedBlock(CudaMappedPool& pool, CUcontext context, std::size_t size);
  ~MappedBlock();

  MappedBlock(const MappedBlock&) = delete;
  MappedBlock& operator=(const MappedBlock&) = delete;

  std::byte* get() const { return bytes_; }

 private:
  CudaMappedPool& pool_;
  CudaMappedPool::Block& block_;
  std::byte* const bytes_;
};

}  // namespace xrex::async_emb
