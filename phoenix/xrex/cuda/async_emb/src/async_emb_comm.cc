#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/log.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

constexpr std::chrono::seconds kTeardownLimit{30};

// The clock may be injected, so a wait looks at it again after this much real
// time.
constexpr std::chrono::milliseconds kClockPoll{20};

const PipelineSpec& Validated(const PipelineSpec& spec,
                              const Backend& backend) {
  ValidateSpec(spec);
  static_cast<void>(backend.ResolveTransport(spec.transport));
  return spec;
}

}  // namespace

AsyncEmbContext::AsyncEmbContext(const ContextConfig& config,
                                 const PipelineSpec& spec, Backend& backend,
                                 const Clock& clock)
    : config_(config),
      spec_(Validated(spec, backend)),
      backend_(backend),
      clock_(clock),
      resources_(
          std::make_unique<Resources>(backend.NewDevice(config.device_key))),
      layout_(spec_, resources_->device->ScratchBytes(spec_)),
      state_(spec.world_size, spec.any_world_size),
      watchdog_(clock, config.timeout) {
  Device& device = *resources_->device;
  resources_->arena = device.AllocateArena(layout_.total_bytes());
  device.BindScratch(region<std::byte>(Region::kScratch),
                     layout_.bytes(Region::kScratch));
  for (Lane& lane : resources_->lanes) {
    lane.armed = device.NewEvent();
    lane.completed = device.NewEvent();
  }
  resources_->never_armed.Fail();
  resources_->stream = device.NewSideStream();
  if (config_.run_watchdog_thread)
    watchdog_thread_ = std::thread([this] { RunWatchdog(); });
}

AsyncEmbContext::~AsyncEmbContext() {
  const auto now = std::chrono::steady_clock::now();
  Close(closed_ ? now : now + kTeardownLimit);  // it has had its time
  if (!abandoned_) return;
  LogWarning(StrCat(Describe(),
                    ": its side stream did not end in time; leaking it and ",
                    layout_.total_bytes(), " bytes of arena"));
  static_cast<void>(resources_.release());
}

void AsyncEmbContext::Close(std::chrono::steady_clock::time_point limit) {
  StopWatchdog();
  const std::string self = Describe();
  {
    // A start that is being enqueued ends first, and none comes after it.
    std::lock_guard arm(arm_mutex_);
    const bool running = std::any_of(
        resources_->lanes.begin(), resources_->lanes.end(),
        [](const Lane& lane) { return !lane.completed->IsComplete(); });
    if (running) Abort(self + " was destroyed with a step in flight");
    std::lock_guard state(state_mutex_);
    if (!failure_) failure_ = self + " is closed";
  }
  closed_ = true;
  abandoned_ =
      !resources_->stream->Stop(limit - std::chrono::steady_clock::now());
  if (abandoned_) return;
  std::shared_ptr<Communicator> left;
  {
    std::lock_guard comm(comm_mutex_);
    left = std::move(communicator_);
  }
  left.reset();  // tells the peers, however long somebody holds this context
}

std::vector<std::string> AsyncEmbContext::Reset(std::int32_t rank,
                                                std::int32_t world_size) {
  Check();
  std::shared_ptr<Communicator> closed;
  {
    std::lock_guard arm(arm_mutex_);
    std::lock_guard comm(comm_mutex_);
    std::lock_guard state(state_mutex_);
    state_.Reset(rank, world_size);
    closed = std::move(communicator_);
  }
  closed.reset();  // talks to its peers, so without the locks
  if (rank == 0) return backend_.MakePayloads(world_size);
  return std::vector<std::string>(static_cast<std::size_t>(world_size));
}

void AsyncEmbContext::Handshake(const std::vector<std::string>& payloads,
                                std::optional<Clock::Duration> timeout) {
  Check();
  if (payloads.size() != static_cast<std::size_t>(spec_.world_size) ||
      payloads[0].empty()) {
    throw AsyncEmbError(
        ErrorCode::kInvalidArgument,
        StrCat("async_emb: handshake needs one payload from each of ",
               spec_.world_size, " ranks, rank 0's not empty; got ",
               payloads.size(),
               ": pass, for each rank, what its reset returned for this rank"));
  }
  std::shared_ptr<Communicator> connecting;
  {
    std::lock_guard comm(comm_mutex_);
    std::lock_guard state(state_mutex_);
    if (failure_) ThrowAborted(*failure_);
    state_.BeginHandshake();
    connecting = backend_.NewCommunicator({.rank = state_.rank(),
                                           .world_size = spec_.world_size,
                                           .min_ctas = spec_.min_ctas,
                                           .max_ctas = spec_.max_ctas},
                                          *resources_->device);
    communicator_ = connecting;
  }
  const Clock::TimePoint deadline =
      clock_.Now() + timeout.value_or(config_.timeout);
  try {
    connecting->Connect(payloads, resources_->arena, layout_.total_bytes(),
                        clock_, deadline);
    WarmUp(*connecting, deadline);
  } catch (const std::exception& error) {
    AdoptCommunicatorError();  // if there is one, it says it better
    Abort(StrCat("the handshake failed: ", error.what()));
    throw;
  }
  {
    std::lock_guard state(state_mutex_);
    if (failure_) ThrowAborted(*failure_);
    state_.EndHandshake();
  }
  if (rank() == 0) {
    LogInfo(StrCat(Describe(), ": ", spec_.world_size, " ranks over ",
                   backend_.ResolveTransport(spec_.transport), ", arena ",
                   layout_.total_bytes(), " bytes a rank"));
  }
}

void AsyncEmbContext::WarmUp(Communicator& comm, Clock::TimePoint deadline) {
  const StreamRef side = resources_->stream->ref();
  Lane& lookup = lane(Pipeline::kLookup);
  Lane& update = lane(Pipeline::kUpdate);
  comm.AllGather(side, lookup.guard, region<std::byte>(Region::kLocalIds),
                 region<std::byte>(Region::kLookupIds),
                 layout_.bytes(Region::kLocalIds));
  comm.AllToAll(side, lookup.guard, region<std::byte>(Region::kLookupSend),
                region<std::byte>(Region::kLookupEmbeddings), slice_bytes());
  comm.AllReduceSum(side, update.guard, region<float>(Region::kPartialStats),
                    region<float>(Region::kUpdateStats),
                    static_cast<std::size_t>(spec_.num_unique) + 1,
                    spec_.deterministic);
  resources_->device->Record(*lookup.completed, side);
  while (!lookup.completed->WaitFor(kClockPoll)) {
    if (clock_.Now() < deadline) continue;
    throw AsyncEmbError(ErrorCode::kTimeout,
                        "async_emb: handshake timed out in its first exchange" +
                            DescribeStall());
  }
  if (lookup.guard.failed() || update.guard.failed()) Check();
}

void AsyncEmbContext::ResetTableBinding() {
  Check();
  std::lock_guard state(state_mutex_);
  state_.ResetTableBinding();
}

void AsyncEmbContext::Abort(std::string_view reason) {
  AdoptCommunicatorError();  // what went wrong on a peer before is the reason
  {
    std::lock_guard state(state_mutex_);
    if (!failure_) failure_ = reason;
  }
  // Read after the failure is set: a handshake publishes its communicator only
  // if there is none.
  const std::shared_ptr<Communicator> comm = communicator();
  if (comm != nullptr) comm->Abort(reason);
}

bool AsyncEmbContext::AwaitQuiet(std::chrono::steady_clock::time_point limit) {
  // Until a start has enqueued its step, the event tells of the step before.
  {
    std::lock_guard arm(arm_mutex_);
  }
  return std::all_of(resources_->lanes.begin(), resources_->lanes.end(),
                     [limit](const Lane& lane) {
                       return lane.completed->WaitFor(
                           limit - std::chrono::steady_clock::now());
                     });
}

void AsyncEmbContext::Check() {
  AdoptCommunicatorError();
  std::lock_guard state(state_mutex_);
  if (failure_) ThrowAborted(*failure_);
}

std::optional<std::string> AsyncEmbContext::error() {
  AdoptCommunicatorError();
  std::lock_guard state(state_mutex_);
  return failure_;
}

void AsyncEmbContext::AdoptCommunicatorError() {
  const std::shared_ptr<Communicator> comm = communicator();
  const auto found = comm == nullptr ? std::nullopt : comm->PollError();
  if (!found) return;
  {
    std::lock_guard comm_lock(comm_mutex_);
    std::lock_guard state(state_mutex_);
    // Nothing is taken over from a communicator that a reset has closed since.
    if (failure_ || communicator_ != comm) return;
    failure_ = found;
  }
  comm->Abort(*found);  // one that failed by itself may still hold up its work
}

void AsyncEmbContext::ThrowAborted(const std::string& reason) {
  throw AsyncEmbError(ErrorCode::kAborted,
                      "async_emb communicator aborted: " + reason);
}

ContextStats AsyncEmbContext::stats() const {
  ContextStats stats;
  {
    std::lock_guard state(state_mutex_);
    for (const Pipeline pipeline : {Pipeline::kLookup, Pipeline::kUpdate}) {
      stats.steps_armed[static_cast<std::size_t>(pipeline)] =
          state_.armed(pipeline);
    }
    stats.steps_done = steps_done_;
    stats.table_moved = state_.table_moved();
    stats.bytes_sent = bytes_sent_;
    stats.wait_secs = wait_secs_;
  }
  // After the steps: they hold what every step that counts as done has counted.
  const StepCounters& counters = resources_->device->counters();
  stats.ids_out_of_range = counters.ids_out_of_range;
  stats.segments_invalid = counters.segments_invalid;
  stats.duplicate_slots = counters.duplicate_slots;
  stats.skipped_pending = counters.skipped_pending;
  stats.skipped_non_finite = counters.skipped_non_finite;
  stats.skipped_invalid = counters.skipped_invalid;
  stats.last_norm = counters.last_norm;
  return stats;
}

bool AsyncEmbContext::ready() const {
  std::lock_guard state(state_mutex_);
  return state_.ready();
}

std::int32_t AsyncEmbContext::rank() const {
  std::lock_guard state(state_mutex_);
  return state_.rank();
}

std::shared_ptr<Communicator> AsyncEmbContext::communicator() const {
  std::lock_guard comm(comm_mutex_);
  return communicator_;
}

std::string AsyncEmbContext::Describe() const {
  const std::string name =
      config_.name.empty() ? "" : "'" + config_.name + "' ";
  return StrCat("context ", name, config_.context_id, " rank ", rank());
}

}  // namespace xrex::async_emb
