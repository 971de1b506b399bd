// How a context ends: aborts, errors that are taken over, closing.
#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/log.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

// Leaves the communicator some of the 30 s that a destruction may take.
constexpr std::chrono::seconds kTeardownLimit{25};

// For a start that is being enqueued, before it is aborted.
constexpr std::chrono::seconds kStartPatience{2};

// In place of std::timed_mutex, whose wait by a steady clock thread sanitizers
// do not know.
bool LockUntil(std::unique_lock<std::mutex>& lock,
               std::chrono::steady_clock::time_point limit) {
  while (!lock.try_lock()) {
    if (std::chrono::steady_clock::now() >= limit) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace

void AsyncEmbContext::Abort(std::string_view reason) {
  AdoptErrors();  // what went wrong on a peer before is the reason
  {
    std::lock_guard state(state_mutex_);
    if (!failure_) failure_ = reason;
  }
  // Before the communicator: what it leaves behind must not be taken for good.
  resources_->device->FailGuards();
  // Read after the failure is set: a handshake publishes its communicator only
  // if there is none.
  const std::shared_ptr<Communicator> comm = communicator();
  if (comm != nullptr) comm->Abort(reason);
}

bool AsyncEmbContext::AwaitQuiet(std::chrono::steady_clock::time_point limit) {
  // Until a start has enqueued its step, the event tells of the step before.
  {
    std::unique_lock arm(arm_mutex_, std::defer_lock);
    if (!LockUntil(arm, limit)) return false;
  }
  return std::ranges::all_of(resources_->lanes, [limit](const Lane& lane) {
    return !lane.is_lost &&
           lane.completed->WaitFor(limit - std::chrono::steady_clock::now());
  });
}

void AsyncEmbContext::Check() {
  AdoptErrors();
  std::lock_guard state(state_mutex_);
  if (failure_) ThrowAborted(*failure_);
}

std::optional<std::string> AsyncEmbContext::error() {
  AdoptErrors();
  std::lock_guard state(state_mutex_);
  return failure_;
}

std::optional<std::string> AsyncEmbContext::FindWrongRank() const {
  for (const Lane& of_pipeline : resources_->lanes) {
    if (of_pipeline.guard->failure() != StepFailure::kWrongRank) continue;
    return StrCat("the program on rank ", rank(),
                  "'s device takes itself for another rank: it runs in a "
                  "shard_map over another mesh than ctx.mesh; use ctx.mesh");
  }
  return std::nullopt;
}

std::optional<std::string> AsyncEmbContext::FindPeerFailure() const {
  for (const Lane& of_pipeline : resources_->lanes) {
    if (of_pipeline.guard->failure() != StepFailure::kPeerFailed) continue;
    return StrCat("another rank has failed in ",
                  PipelineName(of_pipeline.guard->pipeline()), " step ",
                  of_pipeline.guard->good() + 1, ": its own error says why");
  }
  return std::nullopt;
}

void AsyncEmbContext::AdoptErrors() {
  const std::shared_ptr<Communicator> comm = communicator();
  if (comm == nullptr) return;
  // What this rank knows of itself says more than what its peers have found.
  std::optional<std::string> found = FindWrongRank();
  if (!found) found = comm->PollError();
  if (!found) found = resources_->device->PollError();
  if (!found) found = FindPeerFailure();
  if (!found) return;
  {
    std::lock_guard comm_lock(comm_mutex_);
    std::lock_guard state(state_mutex_);
    // Nothing is taken over from a communicator that a reset has closed since.
    if (failure_ || communicator_ != comm) return;
    failure_ = found;
  }
  resources_->device->FailGuards();
  comm->Abort(*found);  // one that failed by itself may still hold up its work
}

void AsyncEmbContext::ThrowAborted(const std::string& reason) {
  throw AsyncEmbError(ErrorCode::kAborted,
                      "async_emb communicator aborted: " + reason);
}

AsyncEmbContext::~AsyncEmbContext() {
  const auto now = std::chrono::steady_clock::now();
  Close(closed_ ? now : now + kTeardownLimit);  // it has had its time
  if (!abandoned_) return;
  LogWarning(StrCat(Describe(),
                    ": its work did not end in time; leaking its side stream "
                    "and ",
                    layout_.total_bytes(), " bytes of arena"));
  // Nor can the communicator go whose kernels still run.
  struct Leaked {
    std::unique_ptr<Resources> resources;
    std::shared_ptr<Communicator> communicator;
  };
  static std::mutex mutex;
  static auto* const leaked = new std::vector<Leaked>;  // guarded by mutex
  std::lock_guard lock(mutex);
  leaked->push_back({std::move(resources_), communicator()});
}

void AsyncEmbContext::Close(std::chrono::steady_clock::time_point limit) {
  StopWatchdog();
  closed_ = true;
  abandoned_ = !EndWork(limit);
  if (abandoned_) return;
  std::shared_ptr<Communicator> left;
  {
    std::lock_guard comm(comm_mutex_);
    left = std::move(communicator_);
  }
  left.reset();  // tells the peers, however long somebody holds this context
}

bool AsyncEmbContext::EndWork(std::chrono::steady_clock::time_point limit) {
  using std::chrono::steady_clock;
  const std::string self = Describe();
  auto& lanes = resources_->lanes;
  {
    // A start that is being enqueued ends first, and none comes after it.
    std::unique_lock arm(arm_mutex_, std::defer_lock);
    if (!LockUntil(arm,
                   std::min(limit, steady_clock::now() + kStartPatience))) {
      Abort(self + " was destroyed while a step was being enqueued");
      if (!LockUntil(arm, limit)) return false;
    }
    const bool running = std::ranges::any_of(
        lanes, [](const Lane& lane) { return !lane.completed->IsComplete(); });
    if (running) Abort(self + " was destroyed with a step in flight");
    std::lock_guard state(state_mutex_);
    if (!failure_) failure_ = self + " is closed";
  }
  if (!resources_->stream->Stop(limit - steady_clock::now())) return false;
  return std::ranges::all_of(lanes, [limit](const Lane& lane) {
    return !lane.is_lost && lane.armed->WaitFor(limit - steady_clock::now()) &&
           lane.taken->WaitFor(limit - steady_clock::now());
  });
}

}  // namespace xrex::async_emb
