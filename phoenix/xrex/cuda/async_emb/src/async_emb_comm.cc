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

// What a completed step sends from one rank to all others.
std::int64_t BytesSent(const PipelineSpec& spec, Pipeline pipeline) {
  const std::int64_t ids = spec.tokens_per_rank;
  const std::int64_t values = spec.tokens_per_rank * spec.shard_width;
  const std::int64_t stats =
      pipeline == Pipeline::kUpdate ? spec.num_unique + 1 : 0;
  return (spec.world_size - 1) * (ids * std::int64_t{sizeof(std::int32_t)} +
                                  values * std::int64_t{sizeof(Bf16Bits)} +
                                  stats * std::int64_t{sizeof(float)});
}

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
  device.BindScratch(region<std::byte>(Region::kScratch), spec_);
  for (const Pipeline pipeline : {Pipeline::kLookup, Pipeline::kUpdate}) {
    Lane& of_pipeline = lane(pipeline);
    of_pipeline.guard = device.NewGuard(pipeline);
    of_pipeline.armed = device.NewEvent();
    of_pipeline.completed = device.NewEvent();
    of_pipeline.taken = device.NewEvent();
  }
  resources_->never_armed = device.NewGuard(Pipeline::kLookup);
  resources_->never_armed->Fail();
  resources_->stream = device.NewSideStream();
  if (config_.run_watchdog_thread)
    watchdog_thread_ = std::thread([this] { RunWatchdog(); });
}

std::vector<std::string> AsyncEmbContext::Reset(std::int32_t rank,
                                                std::int32_t world_size) {
  Check();
  std::shared_ptr<Communicator> closed;
  {
    std::lock_guard arm(arm_mutex_);
    std::lock_guard comm(comm_mutex_);
    std::lock_guard state(state_mutex_);
    state_.RequireReset(rank, world_size);
    RequireDeviceIdleLocked();
    state_.Reset(rank, world_size);
    closed = std::move(communicator_);
  }
  closed.reset();  // talks to its peers, so without the locks
  // Whatever fails while nothing is in flight is the end of the communicator.
  const bool came_to_rest = std::ranges::none_of(
      resources_->lanes, [](const Lane& lane) { return lane.guard->failed(); });
  if (!came_to_rest) {
    Abort(Describe() + " was reset, and its communicator did not come to rest");
    Check();
  }
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
                                           .max_ctas = spec_.max_ctas,
                                           .step_timeout = config_.timeout},
                                          *resources_->device);
    communicator_ = connecting;
  }
  const Clock::TimePoint deadline =
      clock_.Now() + timeout.value_or(config_.timeout);
  try {
    connecting->Connect(payloads, resources_->arena, clock_, deadline);
    WarmUp(*connecting, deadline);
  } catch (const std::exception& error) {
    AdoptErrors();  // if there is one, it says it better
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
  comm.AllGather(side, *lookup.guard, region<std::byte>(Region::kLocalIds),
                 region<std::byte>(Region::kLookupIds),
                 layout_.bytes(Region::kLocalIds));
  comm.AllToAll(side, *lookup.guard, region<std::byte>(Region::kLookupSend),
                region<std::byte>(Region::kLookupEmbeddings), slice_bytes());
  comm.AllReduceSum(side, *update.guard, region<float>(Region::kPartialStats),
                    region<float>(Region::kUpdateStats),
                    static_cast<std::size_t>(spec_.num_unique) + 1,
                    spec_.deterministic);
  WarmUpKernels();
  resources_->device->Record(*lookup.completed, side);
  while (!lookup.completed->WaitFor(kClockPoll)) {
    if (clock_.Now() < deadline) continue;
    throw AsyncEmbError(ErrorCode::kTimeout,
                        "async_emb: handshake timed out in its first exchange" +
                            DescribeStall());
  }
  if (lookup.guard->failed() || update.guard->failed()) Check();
}

// The arena holds zeros and what the collectives made of them; one region
// stands in for the caller's arrays. Nothing is counted, and nothing is applied
// for a step that was never armed.
void AsyncEmbContext::WarmUpKernels() {
  Device& device = *resources_->device;
  const StreamRef side = resources_->stream->ref();
  StepGuard& guard = *resources_->never_armed;
  auto* const slices = region<Bf16Bits>(Region::kLookupSend);
  auto* const other_slices = region<Bf16Bits>(Region::kUpdateSend);
  auto* const tokens = region<std::int32_t>(Region::kUpdateGradAccum);
  auto* const stats = region<float>(Region::kPartialStats);
  auto* const result = region<UpdateResult>(Region::kUpdateResult);
  const auto* const scalars = region<UpdateScalars>(Region::kUpdateScalars);
  device.GatherRows(side, guard,
                    {.ids = region<std::int32_t>(Region::kLookupIds),
                     .num_ids = spec_.num_tokens(),
                     .table = other_slices,
                     .vocab_rows = 1,
                     .width = spec_.shard_width,
                     .out_of_range = spec_.out_of_range,
                     .rows = slices});
  device.RouteGradients(side, guard, slice_shape(), slices, other_slices);
  device.CheckUpdate(side, guard,
                     {.segments = region<std::int32_t>(Region::kUpdateIndices),
                      .num_tokens = spec_.num_tokens(),
                      .unique_tokens = tokens,
                      .num_unique = spec_.num_unique,
                      .vocab_rows = 1,
                      .check_duplicates = spec_.check_inputs,
                      .scalars = scalars,
                      .flag = stats + spec_.num_unique});
  device.SumSegments(side, guard,
                     {.segments = region<std::int32_t>(Region::kUpdateIndices),
                      .grads = region<Bf16Bits>(Region::kUpdateGradients),
                      .num_tokens = spec_.num_tokens(),
                      .num_unique = spec_.num_unique,
                      .width = spec_.shard_width,
                      .deterministic = spec_.deterministic,
                      .accum = region<float>(Region::kUpdateGradAccum),
                      .partial_stats = stats});
  for (const bool lazy : {false, true}) {
    device.ApplyAdagrad(side, guard,
                        {.accum = region<float>(Region::kUpdateGradAccum),
                         .stats = region<float>(Region::kUpdateStats),
                         .unique_tokens = tokens,
                         .num_unique = spec_.num_unique,
                         .width = spec_.shard_width,
                         .emb_width = spec_.emb_width,
                         .vocab_rows = 1,
                         .params = {.lazy = lazy, .eps = 1.0F},
                         .scalars = scalars,
                         .table = other_slices,
                         .row_state = stats,
                         .last_step = tokens,
                         .result = result});
  }
  device.CombineSlices(side, guard, slice_shape(), slices, other_slices);
  device.WriteResult(side, guard, result, &result->norm, &result->valid);
  device.EndStep(side, guard, 0);
}

void AsyncEmbContext::RequireDeviceIdleLocked() const {
  for (const Pipeline pipeline : {Pipeline::kLookup, Pipeline::kUpdate}) {
    const Lane& of_pipeline = lane(pipeline);
    const std::int64_t armed = state_.armed(pipeline);
    if (of_pipeline.guard->reached() >= armed &&
        of_pipeline.taken->IsComplete()) {
      continue;
    }
    throw AsyncEmbError(
        ErrorCode::kFailedPrecondition,
        StrCat("async_emb: reset came while ", PipelineName(pipeline), " step ",
               armed,
               " is on the device: wait for the results of its done first "
               "(jax.block_until_ready), or abort"));
  }
}

void AsyncEmbContext::ResetTableBinding() {
  Check();
  std::lock_guard state(state_mutex_);
  state_.ResetTableBinding();
}

ContextStats AsyncEmbContext::stats() const {
  ContextStats stats;
  {
    std::lock_guard state(state_mutex_);
    for (const Pipeline pipeline : {Pipeline::kLookup, Pipeline::kUpdate}) {
      const auto index = static_cast<std::size_t>(pipeline);
      stats.steps_armed[index] = state_.armed(pipeline);
      stats.steps_done[index] = StepsDoneLocked(pipeline);
      stats.bytes_sent += stats.steps_done[index] * BytesSent(spec_, pipeline);
      stats.wait_secs[index] =
          std::chrono::duration<double>(lane(pipeline).guard->waited()).count();
    }
    stats.table_moved = state_.table_moved();
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

std::int64_t AsyncEmbContext::StepsDoneLocked(Pipeline pipeline) const {
  return std::min(state_.finished(pipeline), lane(pipeline).guard->good());
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
