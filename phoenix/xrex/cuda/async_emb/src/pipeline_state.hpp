// L3: the legal transitions of a context, in one place. Pure: no device, no
// thread, no clock.
//
// Not thread-safe: the owner guards it (AsyncEmbContext: its state mutex). A
// method that throws has changed nothing.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "phoenix/xrex/cuda/async_emb/src/types.hpp"

namespace xrex::async_emb {

// Where a context stands in its life.
enum class Lifecycle : std::uint8_t {
  kConstructed,  // no rank yet
  kReset,        // has a rank
  kConnecting,   // a handshake waits for the peers
  kReady,        // may run steps
};

// Where one pipeline stands.
enum class Phase : std::uint8_t {
  kIdle,       // nothing pending
  kArming,     // a start is enqueuing its step
  kInFlight,   // the step runs or has completed, and waits for its done
  kFinishing,  // a done is taking the step over
};

// What a start learned about the table that it was given.
enum class TableBinding : std::uint8_t {
  kKept,     // the bound pointer, or the first one
  kRebound,  // another pointer while nothing was pending: taken over and
             // counted
  kMoved,    // another pointer while a step was pending: a copy came in between
};

class PipelineState {
 public:
  explicit PipelineState(std::int32_t world_size, bool any_world_size)
      : world_size_(world_size), any_world_size_(any_world_size) {}

  // --- life cycle ---
  // kInvalidArgument with the fixed texts for a bad rank or world size;
  // kFailedPrecondition when a step or a handshake is pending.
  void RequireReset(std::int32_t rank, std::int32_t world_size) const;
  // The same, and forgets the table.
  void Reset(std::int32_t rank, std::int32_t world_size);
  // kReset -> kConnecting, or kFailedPrecondition.
  void BeginHandshake();
  // kConnecting -> kReady.
  void EndHandshake() { lifecycle_ = Lifecycle::kReady; }
  bool ready() const { return lifecycle_ == Lifecycle::kReady; }
  std::int32_t rank() const { return rank_; }

  // --- one step ---
  // kFailedPrecondition when the context is not ready or a step of the pipeline
  // is pending.
  void RequireStart(Pipeline pipeline) const;
  // Legal after RequireStart. kMoved leaves the binding as it was.
  TableBinding BindTable(const void* table);
  // kIdle -> kArming; the new step's number, counted from 1.
  std::int64_t Arm(Pipeline pipeline);
  // kArming -> kInFlight.
  void SetEnqueued(Pipeline pipeline);
  // kInFlight -> kFinishing, or kFailedPrecondition.
  void BeginFinish(Pipeline pipeline);
  // kFinishing -> kIdle.
  void EndFinish(Pipeline pipeline);

  // kFailedPrecondition while a step is pending.
  void ResetTableBinding();

  Phase phase(Pipeline pipeline) const { return at(pipeline).phase; }
  bool idle() const;
  std::int64_t armed(Pipeline pipeline) const { return at(pipeline).armed; }
  std::int64_t finished(Pipeline pipeline) const {
    return at(pipeline).finished;
  }
  // The bound table, null if none is.
  const void* table() const { return table_; }
  std::int64_t table_moved() const { return table_moved_; }

 private:
  struct Progress {
    Phase phase = Phase::kIdle;
    std::int64_t armed = 0;     // steps armed since construction
    std::int64_t finished = 0;  // steps taken over by a done
  };
  Progress& at(Pipeline pipeline) {
    return progress_[static_cast<std::size_t>(pipeline)];
  }
  const Progress& at(Pipeline pipeline) const {
    return progress_[static_cast<std::size_t>(pipeline)];
  }
  void RequireReady(const char* call) const;
  std::string DescribePending() const;

  const std::int32_t world_size_;
  const bool any_world_size_;
  Lifecycle lifecycle_ = Lifecycle::kConstructed;
  std::int32_t rank_ = -1;
  std::array<Progress, kNumPipelines> progress_{};
  const void* table_ = nullptr;
  std::int64_t table_moved_ = 0;
};

}  // namespace xrex::async_emb
