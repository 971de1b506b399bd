#include "phoenix/xrex/cuda/async_emb/src/pipeline_state.hpp"

#include <bit>
#include <string>

#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

constexpr const char* StartName(Pipeline pipeline) {
  return pipeline == Pipeline::kLookup ? "lookup_start" : "update_start";
}

constexpr const char* DoneName(Pipeline pipeline) {
  return pipeline == Pipeline::kLookup ? "lookup_done" : "update_done";
}

[[noreturn]] void Refuse(const std::string& message) {
  throw AsyncEmbError(ErrorCode::kFailedPrecondition, "async_emb: " + message);
}

}  // namespace

void PipelineState::RequireReset(std::int32_t rank,
                                 std::int32_t world_size) const {
  const auto invalid = [](const std::string& message) {
    throw AsyncEmbError(ErrorCode::kInvalidArgument, message);
  };
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    invalid("async_emb received an invalid rank or world size");
  }
  if (world_size != world_size_) {
    invalid(StrCat("async_emb world size changed from ", world_size_, " to ",
                   world_size));
  }
  if (!any_world_size_ &&
      !std::has_single_bit(static_cast<std::uint32_t>(world_size))) {
    invalid("async_emb currently requires power-of-two EP");
  }
  if (!idle())
    Refuse("reset came while " + DescribePending() +
           ": call its done first, or abort");
  if (lifecycle_ == Lifecycle::kConnecting) {
    Refuse(
        "reset came while a handshake waits for its peers: let it end first, "
        "or abort");
  }
}

void PipelineState::Reset(std::int32_t rank, std::int32_t world_size) {
  RequireReset(rank, world_size);
  lifecycle_ = Lifecycle::kReset;
  rank_ = rank;
  table_ = nullptr;
}

void PipelineState::BeginHandshake() {
  switch (lifecycle_) {
    case Lifecycle::kReset:
      lifecycle_ = Lifecycle::kConnecting;
      return;
    case Lifecycle::kConstructed:
      Refuse("handshake came before reset: call reset(rank, world_size) first");
    case Lifecycle::kConnecting:
    case Lifecycle::kReady:
      Refuse(
          "handshake came twice: call reset(rank, world_size) before another "
          "handshake");
  }
}

void PipelineState::RequireReady(const char* call) const {
  if (ready()) return;
  Refuse(StrCat(
      call, " came before the context was ready: call initialize(ctx) first"));
}

void PipelineState::RequireStart(Pipeline pipeline) const {
  RequireReady(StartName(pipeline));
  const Progress& progress = at(pipeline);
  if (progress.phase != Phase::kIdle) {
    Refuse(StrCat(StartName(pipeline), " came before the ", DoneName(pipeline),
                  " of step ", progress.armed, ": call ", DoneName(pipeline),
                  " first"));
  }
}

TableBinding PipelineState::BindTable(const void* table) {
  if (table == table_) return TableBinding::kKept;
  if (!idle()) return TableBinding::kMoved;
  const bool first = table_ == nullptr;
  table_ = table;
  if (first) return TableBinding::kKept;
  ++table_moved_;
  return TableBinding::kRebound;
}

std::int64_t PipelineState::Arm(Pipeline pipeline) {
  Progress& progress = at(pipeline);
  progress.phase = Phase::kArming;
  return ++progress.armed;
}

void PipelineState::SetEnqueued(Pipeline pipeline) {
  at(pipeline).phase = Phase::kInFlight;
}

void PipelineState::BeginFinish(Pipeline pipeline) {
  RequireReady(DoneName(pipeline));
  Progress& progress = at(pipeline);
  switch (progress.phase) {
    case Phase::kInFlight:
      progress.phase = Phase::kFinishing;
      return;
    case Phase::kIdle:
      Refuse(StrCat(DoneName(pipeline), " came with no step armed (",
                    progress.finished, " were armed and finished): call ",
                    StartName(pipeline), " first"));
    case Phase::kArming:
      Refuse(StrCat(DoneName(pipeline), " came before the ",
                    StartName(pipeline), " of step ", progress.armed,
                    " had returned: chain the calls by data"));
    case Phase::kFinishing:
      Refuse(StrCat(DoneName(pipeline), " came twice for step ", progress.armed,
                    ": call ", StartName(pipeline), " in between"));
  }
}

void PipelineState::EndFinish(Pipeline pipeline) {
  Progress& progress = at(pipeline);
  progress.phase = Phase::kIdle;
  ++progress.finished;
}

void PipelineState::ResetTableBinding() {
  if (!idle()) {
    Refuse("reset_table_binding came while " + DescribePending() +
           ": call its done first");
  }
  table_ = nullptr;
}

bool PipelineState::idle() const {
  return phase(Pipeline::kLookup) == Phase::kIdle &&
         phase(Pipeline::kUpdate) == Phase::kIdle;
}

std::string PipelineState::DescribePending() const {
  const Pipeline pipeline = phase(Pipeline::kLookup) != Phase::kIdle
                                ? Pipeline::kLookup
                                : Pipeline::kUpdate;
  return StrCat(PipelineName(pipeline), " step ", armed(pipeline),
                " is in flight");
}

}  // namespace xrex::async_emb
