#include "phoenix/xrex/cuda/async_emb/src/host_device.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "phoenix/xrex/cuda/async_emb/src/arena_layout.hpp"
#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_host.hpp"
#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/float_mode.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

void BlockOn(const Event& event) {
  while (!event.WaitFor(std::chrono::seconds(1))) {
  }
}

}  // namespace

HostStream::HostStream() : worker_([this] { Run(); }) {}

HostStream::~HostStream() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  worker_.join();
}

bool HostStream::Stop(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  wake_.notify_one();
  return ended_changed_.wait_for(lock, timeout, [this] { return ended_; });
}

void HostStream::Enqueue(std::function<void()> work) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_) {
      throw AsyncEmbError(ErrorCode::kFailedPrecondition,
                          "async_emb: the context is closed");
    }
    queue_.push_back(std::move(work));
  }
  wake_.notify_one();
}

void HostStream::RunOn(StreamRef ref, std::function<void()> work) {
  if (ref.handle == nullptr) {
    work();
  } else {
    static_cast<HostStream*>(ref.handle)->Enqueue(std::move(work));
  }
}

void HostStream::Run() {
  SetIeeeArithmetic();
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) break;
    std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work();
    work = nullptr;  // what it held is let go without the lock
    lock.lock();
  }
  ended_ = true;
  ended_changed_.notify_all();
}

bool HostEvent::IsComplete() const {
  std::lock_guard lock(mutex_);
  return complete_;
}

bool HostEvent::WaitFor(std::chrono::nanoseconds timeout) const {
  std::unique_lock lock(mutex_);
  return completed_.wait_for(lock, timeout, [this] { return complete_; });
}

void HostEvent::Reset() {
  std::lock_guard lock(mutex_);
  complete_ = false;
}

void HostEvent::Complete() {
  std::lock_guard lock(mutex_);
  complete_ = true;
  completed_.notify_all();
}

std::unique_ptr<Stream> HostDevice::NewSideStream() {
  return std::make_unique<HostStream>();
}

std::unique_ptr<Event> HostDevice::NewEvent() {
  return std::make_unique<HostEvent>();
}

std::unique_ptr<StepGuard> HostDevice::NewGuard(Pipeline pipeline) {
  return std::make_unique<StepGuard>(pipeline);
}

std::shared_ptr<std::byte> HostDevice::AllocateArena(std::size_t bytes) {
  const auto alignment = std::align_val_t{
      bytes >= kHugePageBytes ? kHugePageBytes : kArenaAlignment};
  void* block = ::operator new(bytes, alignment, std::nothrow);
  if (block == nullptr) {
    throw AsyncEmbError(ErrorCode::kResourceExhausted,
                        StrCat("async_emb: the arena of ", bytes,
                               " bytes could not be allocated: free memory, or "
                               "make tokens_per_batch, emb_width or "
                               "num_unique smaller"));
  }
#if defined(__linux__)
  // Rows are read in no order: fewer, larger pages spare address look-ups. A
  // kernel without them refuses, and nothing is lost.
  if (bytes >= kHugePageBytes) {
    static_cast<void>(madvise(block, bytes, MADV_HUGEPAGE));
  }
#endif
  // Every page is touched now and not in the first step.
  std::memset(block, 0, bytes);
  return {static_cast<std::byte*>(block), [alignment](std::byte* bytes_ptr) {
            ::operator delete(bytes_ptr, alignment);
          }};
}

std::size_t HostDevice::ScratchBytes(const PipelineSpec& spec) const {
  return host_kernels::ScratchBytes(spec);
}

void HostDevice::BindScratch(std::byte* scratch, const PipelineSpec& /*spec*/) {
  scratch_ = scratch;
}

void HostDevice::Record(Event& event, StreamRef stream) {
  auto& latch = static_cast<HostEvent&>(event);
  latch.Reset();
  try {
    HostStream::RunOn(stream, [&latch] { latch.Complete(); });
  } catch (...) {
    latch.Complete();  // nothing will come that could complete it
    throw;
  }
}

void HostDevice::Wait(StreamRef stream, const Event& event) {
  HostStream::RunOn(stream, [&event] { BlockOn(event); });
}

void HostDevice::WaitForStep(StreamRef stream, StepGuard& guard,
                             const Event& completed, const Clock& clock) {
  HostStream::RunOn(stream, [&guard, &completed, &clock] {
    const Clock::TimePoint began = clock.Now();
    BlockOn(completed);
    guard.AddWait(clock.Now() - began);
  });
}

void HostDevice::Copy(StreamRef stream, std::span<const CopyItem> items) {
  for (const CopyItem& item : items) {
    HostStream::RunOn(stream,
                      [item] { std::memcpy(item.dst, item.src, item.bytes); });
  }
}

void HostDevice::Zero(StreamRef stream, void* dst, std::size_t bytes) {
  HostStream::RunOn(stream, [=] { std::memset(dst, 0, bytes); });
}

void HostDevice::EndStep(StreamRef stream, StepGuard& guard,
                         std::int64_t step) {
  HostStream::RunOn(stream, [&guard, step] { guard.End(step); });
}

void HostDevice::ReadBack(void* dst, const void* src, std::size_t bytes) {
  std::memcpy(dst, src, bytes);
}

void HostDevice::CheckRank(StreamRef stream, StepGuard& guard,
                           const std::int32_t* came, std::int32_t expected) {
  HostStream::RunOn(stream, [&guard, came, expected] {
    if (*came != expected) guard.Fail(StepFailure::kWrongRank);
  });
}

void HostDevice::GatherRows(StreamRef stream, const StepGuard& guard,
                            const GatherArgs& args) {
  HostStream::RunOn(stream, [this, &guard, args] {
    if (!guard.failed()) host_kernels::GatherRows(args, counters_);
  });
}

void HostDevice::CombineSlices(StreamRef stream, const StepGuard& guard,
                               const SliceShape& shape, const Bf16Bits* slices,
                               Bf16Bits* out) {
  HostStream::RunOn(stream, [&guard, shape, slices, out] {
    if (guard.failed()) {
      host_kernels::FillNan(
          out, shape.world_size * shape.tokens_per_rank * shape.shard_width);
    } else {
      host_kernels::CombineSlices(shape, slices, out);
    }
  });
}

void HostDevice::RouteGradients(StreamRef stream, const StepGuard& guard,
                                const SliceShape& shape, const Bf16Bits* grads,
                                Bf16Bits* slices) {
  HostStream::RunOn(stream, [&guard, shape, grads, slices] {
    if (!guard.failed()) host_kernels::RouteGradients(shape, grads, slices);
  });
}

void HostDevice::CheckUpdate(StreamRef stream, const StepGuard& guard,
                             const UpdateCheckArgs& args) {
  UpdateCheckArgs all_checks = args;
  all_checks.check_duplicates = true;  // cheap beside the rest
  HostStream::RunOn(stream, [this, &guard, all_checks] {
    if (!guard.failed()) {
      host_kernels::CheckUpdate(all_checks, scratch_, counters_);
    }
  });
}

void HostDevice::SumSegments(StreamRef stream, const StepGuard& guard,
                             const SegmentSumArgs& args) {
  HostStream::RunOn(stream, [this, &guard, args] {
    if (!guard.failed()) host_kernels::SumSegments(args, scratch_);
  });
}

void HostDevice::ApplyAdagrad(StreamRef stream, const StepGuard& guard,
                              const ApplyArgs& args) {
  HostStream::RunOn(stream, [this, &guard, args] {
    if (!guard.failed()) host_kernels::ApplyAdagrad(args, counters_);
  });
}

void HostDevice::WriteResult(StreamRef stream, const StepGuard& guard,
                             const UpdateResult* result, float* norm,
                             std::int32_t* valid) {
  HostStream::RunOn(stream, [&guard, result, norm, valid] {
    const bool failed = guard.failed();
    *norm = failed ? std::numeric_limits<float>::quiet_NaN() : result->norm;
    *valid = failed ? 0 : result->valid;
  });
}

}  // namespace xrex::async_emb
