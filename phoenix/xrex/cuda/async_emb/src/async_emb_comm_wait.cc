// The waits and the watchdog of a context.
#include <algorithm>
#include <chrono>
#include <exception>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/log.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

constexpr std::chrono::milliseconds kWatchdogPoll{100};

double Seconds(Clock::Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

Pipeline PipelineOf(Region region) {
  return region <= Region::kLookupEmbeddings ? Pipeline::kLookup
                                             : Pipeline::kUpdate;
}

}  // namespace

std::int64_t AsyncEmbContext::LatestStep(Pipeline pipeline) {
  std::lock_guard arm(arm_mutex_);  // a start that is being enqueued ends first
  std::lock_guard state(state_mutex_);
  return state_.armed(pipeline);
}

void AsyncEmbContext::BlockUntilComplete(Pipeline pipeline, std::int64_t step,
                                         const char* label) {
  std::optional<Clock::TimePoint> deadline;
  {
    std::lock_guard state(state_mutex_);
    deadline = watchdog_.deadline(pipeline, step);
  }
  const auto past_deadline = [&] {
    return deadline && clock_.Now() >= *deadline;
  };
  const auto throw_timeout = [&] {
    throw AsyncEmbError(
        ErrorCode::kTimeout,
        StrCat("async_emb: ", label, " timed out waiting for step ", step));
  };
  const Lane& of_pipeline = lane(pipeline);
  const auto reached = [&] { return of_pipeline.guard->reached() >= step; };
  while (!reached()) {
    // Read before the step is looked at: one that completes in time never
    // counts as late, however long this thread was kept from running.
    const bool late = past_deadline();
    of_pipeline.completed->WaitFor(kClockPoll);
    if (reached()) break;
    if (late) {
      Abort(DescribeTimeout(pipeline, step));
      throw_timeout();
    }
    if (error()) break;  // the step may never leave a stream that is stuck
  }
  if (of_pipeline.guard->good() >= step) return;
  if (past_deadline()) throw_timeout();
  Check();
}

std::int64_t AsyncEmbContext::WaitStepReady() {
  Check();
  const std::int64_t step = LatestStep(Pipeline::kLookup);
  if (step > 0) BlockUntilComplete(Pipeline::kLookup, step, "readiness");
  return step;
}

std::int64_t AsyncEmbContext::Drain() {
  Check();
  std::int64_t latest = 0;
  for (const Pipeline pipeline : {Pipeline::kLookup, Pipeline::kUpdate}) {
    const std::int64_t step = LatestStep(pipeline);
    if (step > 0) BlockUntilComplete(pipeline, step, "drain");
    latest = std::max(latest, step);
  }
  return latest;
}

std::string AsyncEmbContext::Snapshot(std::string_view region_name) {
  if (!ready()) {
    throw AsyncEmbError(ErrorCode::kInvalidArgument,
                        "async_emb context not initialized");
  }
  const std::optional<Region> which = FindSnapshotRegion(region_name);
  if (!which) {
    throw AsyncEmbError(
        ErrorCode::kInvalidArgument,
        StrCat("async_emb: unknown snapshot region '", region_name,
               "': it must be one of ", SnapshotRegionNames()));
  }
  Check();
  const Pipeline pipeline = PipelineOf(*which);
  while (true) {
    const std::int64_t step = LatestStep(pipeline);
    if (step > 0) BlockUntilComplete(pipeline, step, "test snapshot");
    std::lock_guard arm(arm_mutex_);  // no start while the region is read
    {
      std::lock_guard state(state_mutex_);
      if (state_.armed(pipeline) != step) continue;
    }
    std::string bytes(layout_.snapshot_bytes(*which), '\0');
    resources_->device->ReadBack(bytes.data(), region<std::byte>(*which),
                                 bytes.size());
    return bytes;
  }
}

std::string AsyncEmbContext::DescribeTimeout(Pipeline pipeline,
                                             std::int64_t step) {
  return StrCat(PipelineName(pipeline), " step ", step, " of rank ", rank(),
                " timed out after ", Seconds(config_.timeout), " s",
                DescribeStall());
}

std::string AsyncEmbContext::DescribeStall() const {
  const std::shared_ptr<Communicator> comm = communicator();
  const std::string stall = comm == nullptr ? "" : comm->DescribeStall();
  return stall.empty() ? stall : ": " + stall;
}

void AsyncEmbContext::PollWatchdog() {
  AdoptErrors();
  // Before the events are looked at (Watchdog::Poll).
  const Clock::TimePoint now = clock_.Now();
  std::vector<Watchdog::Finding> findings;
  {
    std::lock_guard state(state_mutex_);
    for (const Pipeline pipeline : {Pipeline::kLookup, Pipeline::kUpdate}) {
      NoteEndLocked(pipeline);
    }
    findings = watchdog_.Poll(now);
  }
  for (const Watchdog::Finding& finding : findings) {
    const auto say = [&](const char* what, const std::string& why) {
      LogWarning(StrCat(Describe(), ": ", PipelineName(finding.pipeline),
                        " step ", finding.step, what,
                        Seconds(finding.in_flight), " s", why));
    };
    switch (finding.kind) {
      case Watchdog::Kind::kWarning:
        say(" is in flight for ", DescribeStall());
        break;
      case Watchdog::Kind::kResolved:
        say(" has completed after all, after ", "");
        break;
      case Watchdog::Kind::kExpired:
        Abort(DescribeTimeout(finding.pipeline, finding.step));
        break;
    }
  }
}

void AsyncEmbContext::NoteEndLocked(Pipeline pipeline) {
  // In this order: a step is counted as good before it is counted as ended.
  const std::int64_t reached = lane(pipeline).guard->reached();
  watchdog_.OnEnded(pipeline, reached, lane(pipeline).guard->good());
}

void AsyncEmbContext::RunWatchdog() {
  std::unique_lock lock(watchdog_mutex_);
  while (!watchdog_wake_.wait_for(lock, kWatchdogPoll,
                                  [this] { return watchdog_stop_; })) {
    lock.unlock();
    try {
      PollWatchdog();
    } catch (const std::exception& error) {  // no memory, say
      LogWarning(error.what());
    }
    lock.lock();
  }
}

void AsyncEmbContext::StopWatchdog() {
  {
    std::lock_guard lock(watchdog_mutex_);
    watchdog_stop_ = true;
  }
  watchdog_wake_.notify_all();
  if (watchdog_thread_.joinable()) watchdog_thread_.join();
}

}  // namespace xrex::async_emb
