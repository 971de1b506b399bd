// L2, CUDA backend: streams without blocking and of the highest priority,
// events without timing, guards in mapped host memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel.hpp"
#include "phoenix/xrex/cuda/async_emb/src/cuda_device_scope.hpp"
#include "phoenix/xrex/cuda/async_emb/src/cuda_mapped_pool.hpp"
#include "phoenix/xrex/cuda/async_emb/src/device.hpp"

namespace xrex::async_emb {

inline cudaStream_t CudaStreamOf(StreamRef ref) {
  return static_cast<cudaStream_t>(ref.handle);
}

class CudaStream final : public Stream {
 public:
  explicit CudaStream(CUcontext context);
  ~CudaStream() override;

  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  StreamRef ref() override { return {stream_}; }
  // The owner enqueues no more: a CUDA stream cannot refuse work.
  bool Stop(std::chrono::nanoseconds timeout) override;

 private:
  const CUcontext context_;
  cudaStream_t stream_ = nullptr;
};

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(CUcontext context);
  ~CudaEvent() override;

  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  // A device that is lost counts as complete: nothing on it runs any more.
  bool IsComplete() const override;
  bool WaitFor(std::chrono::nanoseconds timeout) const override;

  cudaEvent_t get() const { return event_; }

 private:
  const CUcontext context_;
  cudaEvent_t event_ = nullptr;
};

class CudaDevice final : public Device {
 public:
  // `ordinal` as CUDA counts the devices that this process sees. Throws
  // kInvalidArgument if there is none such. `pool` outlives the device.
  CudaDevice(std::int64_t ordinal, CudaMappedPool& pool);

  CUcontext context() const { return context_; }

  // [R, U + 1] floats of scratch for a sum over ranks in a fixed order, one at
  // a time; no kernel uses them.
  float* rank_parts() const { return rank_parts_; }

  std::unique_ptr<Stream> NewSideStream() override;
  std::unique_ptr<Event> NewEvent() override;
  std::unique_ptr<StepGuard> NewGuard(Pipeline pipeline) override;
  std::shared_ptr<std::byte> AllocateArena(std::size_t bytes) override;
  std::size_t ScratchBytes(const PipelineSpec& spec) const override;
  void BindScratch(std::byte* scratch, const PipelineSpec& spec) override;
  std::optional<std::string> PollError() const override;
  void FailGuards() override;
  void Record(Event& event, StreamRef stream) override;
  void Wait(StreamRef stream, const Event& event) override;
  void WaitForStep(StreamRef stream, StepGuard& guard, const Event& completed,
                   const Clock& clock) override;
  void Copy(StreamRef stream, std::span<const CopyItem> items) override;
  void Zero(StreamRef stream, void* dst, std::size_t bytes) override;
  void EndStep(StreamRef stream, StepGuard& guard, std::int64_t step) override;
  void ReadBack(void* dst, const void* src, std::size_t bytes) override;
  void CheckRank(StreamRef stream, StepGuard& guard, const std::int32_t* came,
                 std::int32_t expected) override;
  void GatherRows(StreamRef stream, const StepGuard& guard,
                  const GatherArgs& args) override;
  void CombineSlices(StreamRef stream, const StepGuard& guard,
                     const SliceShape& shape, const Bf16Bits* slices,
                     Bf16Bits* out) override;
  void RouteGradients(StreamRef stream, const StepGuard& guard,
                      const SliceShape& shape, const Bf16Bits* grads,
                      Bf16Bits* slices) override;
  void CheckUpdate(StreamRef stream, const StepGuard& guard,
                   const UpdateCheckArgs& args) override;
  void SumSegments(StreamRef stream, const StepGuard& guard,
                   const SegmentSumArgs& args) override;
  void ApplyAdagrad(StreamRef stream, const StepGuard& guard,
                    const ApplyArgs& args) override;
  void WriteResult(StreamRef stream, const StepGuard& guard,
                   const UpdateResult* result, float* norm,
                   std::int32_t* valid) override;
  const StepCounters& counters() const override;

 private:
  class Guard;
  struct MappedWords;

  // What lies at the beginning of the scratch, zeroed with the arena.
  struct DeviceWords;
  MappedWords& mapped() const;

  const int ordinal_;
  const CUcontext context_;
  const MappedBlock mapped_;
  // For the host's own copies. Mutable: to ask how far it is changes nothing.
  mutable CudaStream read_back_;
  // Set before the first step, then only read.
  std::size_t num_guards_ = 0;
  DeviceWords* words_ = nullptr;
  float* rank_parts_ = nullptr;
  std::byte* kernel_scratch_ = nullptr;
};

}  // namespace xrex::async_emb
