// L2, host backend: a side stream is a worker thread with a FIFO of closures,
// an event is a latch, the caller's stream is the calling thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "phoenix/xrex/cuda/async_emb/src/device.hpp"

namespace xrex::async_emb {

class HostStream final : public Stream {
 public:
  HostStream();
  // Gives the worker as long as it needs: owners that must not block call Stop
  // first.
  ~HostStream() override;

  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  StreamRef ref() override { return {this}; }
  bool Stop(std::chrono::nanoseconds timeout) override;

  void Enqueue(std::function<void()> work);

  // Runs `work` on the stream behind `ref`, or at once on the calling thread if
  // it is null.
  static void RunOn(StreamRef ref, std::function<void()> work);

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable wake_;             // work came, or stopping
  std::condition_variable ended_changed_;    // ended_ was set
  std::deque<std::function<void()>> queue_;  // guarded by mutex_
  bool stopping_ = false;                    // guarded by mutex_
  bool ended_ = false;                       // guarded by mutex_
  std::thread worker_;
};

class HostEvent final : public Event {
 public:
  bool IsComplete() const override;
  bool WaitFor(std::chrono::nanoseconds timeout) const override;

  void Reset();
  void Complete();

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable completed_;
  bool complete_ = true;  // guarded by mutex_
};

class HostDevice : public Device {
 public:
  std::unique_ptr<Stream> NewSideStream() override;
  std::unique_ptr<Event> NewEvent() override;
  std::unique_ptr<StepGuard> NewGuard(Pipeline pipeline) override;
  std::shared_ptr<std::byte> AllocateArena(std::size_t bytes) override;
  std::size_t ScratchBytes(const PipelineSpec& spec) const override;
  void BindScratch(std::byte* scratch, const PipelineSpec& spec) override;
  std::optional<std::string> PollError() const override { return std::nullopt; }
  // Nothing to do: here an exchange that is aborted fails its own guard, and
  // all ranks complete one together or none does.
  void FailGuards() override {}
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
  const StepCounters& counters() const override { return counters_; }

 private:
  StepCounters counters_;
  std::byte* scratch_ = nullptr;  // set before the first kernel, then only read
};

}  // namespace xrex::async_emb
