// L3: the native context of one rank: its life cycle, its two pipelines, and
// what is enqueued in which order. Knows devices and communicators only by
// their interfaces.
//
// Locks, always taken in this order: arm_mutex_, comm_mutex_, state_mutex_. No
// wait for a step or a peer happens under any of them. Any thread may call any
// method.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/arena_layout.hpp"
#include "phoenix/xrex/cuda/async_emb/src/backend.hpp"
#include "phoenix/xrex/cuda/async_emb/src/clock.hpp"
#include "phoenix/xrex/cuda/async_emb/src/pipeline_spec.hpp"
#include "phoenix/xrex/cuda/async_emb/src/pipeline_state.hpp"
#include "phoenix/xrex/cuda/async_emb/src/watchdog.hpp"

namespace xrex::async_emb {

// What a lookup is armed with. The table stays alive and unwritten until the
// step is finished.
struct LookupStart {
  const std::int32_t* ids = nullptr;  // [T], copied
  const Bf16Bits* table = nullptr;    // [V, w]
  std::int64_t vocab_rows = 0;        // V
  // Which rank the program takes itself for; null if there is no program.
  const std::int32_t* program_rank = nullptr;
};

// What an update is armed with. All arrays but the scalars stay alive until the
// step is finished.
struct UpdateStart {
  const Bf16Bits* grads = nullptr;              // [T, W]
  const std::int32_t* segment_ids = nullptr;    // [T], copied
  const std::int32_t* unique_tokens = nullptr;  // [U]
  Bf16Bits* table = nullptr;                    // [V, w]
  float* row_state = nullptr;                   // [V]
  std::int32_t* last_step = nullptr;            // [V], lazy only
  std::int64_t vocab_rows = 0;                  // V
  const float* learning_rate = nullptr;         // one value, copied
  const std::int32_t* pending = nullptr;        // one value, copied
  const std::int32_t* step = nullptr;           // one value, copied; lazy only
  AdagradParams params;
  const std::int32_t* program_rank = nullptr;  // as for a lookup
};

struct ContextStats {
  std::array<std::int64_t, kNumPipelines> steps_armed{};
  std::array<std::int64_t, kNumPipelines> steps_done{};
  std::int64_t ids_out_of_range = 0;
  std::int64_t segments_invalid = 0;
  std::int64_t duplicate_slots = 0;
  std::int64_t skipped_pending = 0;
  std::int64_t skipped_non_finite = 0;
  std::int64_t skipped_invalid = 0;
  float last_norm = 0.0F;
  std::int64_t table_moved = 0;
  std::int64_t bytes_sent = 0;
  // For how long done calls held the caller back.
  std::array<double, kNumPipelines> wait_secs{};
};

struct ContextConfig {
  std::int64_t context_id = 0;
  std::int64_t device_key =
      0;                      // what ffi::DeviceOrdinal reports for the device
  std::string name;           // for messages
  Clock::Duration timeout{};  // of one armed step
  // Off in tests that drive PollWatchdog themselves: without one nothing ends
  // an exchange whose peer does not come.
  bool run_watchdog_thread = true;
};

class AsyncEmbContext {
 public:
  // `backend` and `clock` outlive the context. Throws kInvalidArgument for a
  // bad spec and kResourceExhausted when the arena cannot be had.
  AsyncEmbContext(const ContextConfig& config, const PipelineSpec& spec,
                  Backend& backend, const Clock& clock);
  // Closes the context, blocking for at most 30 s.
  ~AsyncEmbContext();

  AsyncEmbContext(const AsyncEmbContext&) = delete;
  AsyncEmbContext& operator=(const AsyncEmbContext&) = delete;

  // The payloads for all ranks on rank 0, empty ones elsewhere.
  std::vector<std::string> Reset(std::int32_t rank, std::int32_t world_size);
  // Blocks until all ranks are there, at most for `timeout` (none: that of a
  // step), and runs every collective once; `payloads[i]` was made by rank i for
  // this rank.
  void Handshake(const std::vector<std::string>& payloads,
                 std::optional<Clock::Duration> timeout = std::nullopt);

  // A broken rule throws kFailedPrecondition and changes nothing. On a failed
  // context a start does nothing and a done gives NaN (and valid = 0). Starts
  // return the step's number, 0 if none was armed.
  std::int64_t StartLookup(StreamRef caller, const LookupStart& args);
  void FinishLookup(StreamRef caller, Bf16Bits* embeddings);  // [T, W]
  std::int64_t StartUpdate(StreamRef caller, const UpdateStart& args);
  void FinishUpdate(StreamRef caller, float* norm, std::int32_t* valid);
  // A scalar that carries only a data dependency.
  void WritePin(StreamRef caller, float* pin);

  // Host waits. They throw the sticky error if there is one, kTimeout when the
  // step's deadline passes, and kAborted when something else ended the step.
  std::int64_t WaitStepReady();  // the latest lookup step; 0 if none was armed
  std::int64_t
  Drain();  // the latest step of either pipeline; 0 if none was armed
  std::string Snapshot(std::string_view region_name);

  void ResetTableBinding();
  // Ends every exchange that is not complete, on all ranks of this process.
  // Does not wait; the first reason stands.
  void Abort(std::string_view reason);
  // Waits until the side stream touches nothing of the caller's any more, at
  // most until `limit`. For use after Abort; says whether it got there.
  bool AwaitQuiet(std::chrono::steady_clock::time_point limit);
  // Aborts what is in flight and ends the side stream, waiting until `limit` at
  // most for it and for what the caller's stream does with the context: what
  // they use is leaked if they still run when the context is destroyed. Later
  // calls fail. One thread at a time.
  void Close(std::chrono::steady_clock::time_point limit);
  // Throws the sticky error, if there is one.
  void Check();
  std::optional<std::string> error();

  // One round of the watchdog: asynchronous errors, deadlines, warnings.
  void PollWatchdog();

  ContextStats stats() const;
  bool ready() const;
  std::int32_t rank() const;
  const PipelineSpec& spec() const { return spec_; }
  std::int64_t context_id() const { return config_.context_id; }
  std::int64_t device_key() const { return config_.device_key; }
  std::string_view platform() const { return backend_.platform(); }
  std::size_t arena_bytes() const { return layout_.total_bytes(); }

 private:
  // One pipeline's share of what the side stream uses. On a device the host may
  // run ahead: several steps of a pipeline can be under way, in order, and the
  // events tell of the latest.
  struct Lane {
    std::unique_ptr<StepGuard> guard;
    std::unique_ptr<Event> armed;      // the caller's inputs are there
    std::unique_ptr<Event> completed;  // the step has left the side stream
    std::unique_ptr<Event> taken;      // its done has left the caller's stream
    // An event could not be recorded: nobody knows when the work behind it
    // ends.
    std::atomic<bool> is_lost{false};
  };
  // All that running work may still touch. Leaked as a whole if the side stream
  // does not end.
  struct Resources {
    explicit Resources(std::unique_ptr<Device> of) : device(std::move(of)) {}

    std::unique_ptr<Device> device;
    std::shared_ptr<std::byte> arena;
    std::array<Lane, kNumPipelines> lanes;
    // Always failed: stands in for a step that was not armed.
    std::unique_ptr<StepGuard> never_armed;
    std::unique_ptr<Stream> stream;
  };
  template <typename T>
  T* region(Region which) const {
    return reinterpret_cast<T*>(resources_->arena.get() +
                                layout_.offset(which));
  }
  Lane& lane(Pipeline pipeline) const {
    return resources_->lanes[static_cast<std::size_t>(pipeline)];
  }
  std::shared_ptr<Communicator> communicator() const;
  SliceShape slice_shape() const;
  std::size_t slice_bytes() const;  // of one [T, w] block
  std::string Describe() const;

  // The number of the step that is now being armed; 0 on a failed context, or
  // one that has just failed: the start passes its buffers through.
  std::int64_t BeginStart(Pipeline pipeline, const void* table);
  void EndStart(Pipeline pipeline);
  // False if there is no step to take over, on a failed context.
  bool BeginFinish(Pipeline pipeline);
  void EndFinish(Pipeline pipeline);
  template <typename Enqueue>
  std::int64_t ArmStep(StreamRef caller, Pipeline pipeline, const void* table,
                       const Enqueue& enqueue);
  // `enqueue` lets the caller's stream write the outputs of the step that the
  // guard tells of.
  template <typename Enqueue>
  void FinishStep(StreamRef caller, Pipeline pipeline, const Enqueue& enqueue);
  // Records where `stream` is, after a failure: what it was given until then
  // runs. A lane without the event is lost.
  void RecordAfterFailure(Lane& of_pipeline, Event& event, StreamRef stream);
  void EnqueueRankCheck(StreamRef caller, Pipeline pipeline,
                        const std::int32_t* program_rank);
  // Marks the end of what was enqueued of a step.
  void EnqueueEnd(Pipeline pipeline, std::int64_t step);
  void EnqueueLookup(StreamRef caller, const LookupStart& args,
                     Communicator& comm);
  void EnqueueUpdate(StreamRef caller, const UpdateStart& args,
                     Communicator& comm);
  void EnqueueApply(const UpdateStart& args);

  // Blocks until `step`, which is armed, has left the side stream.
  void BlockUntilComplete(Pipeline pipeline, std::int64_t step,
                          const char* label);
  std::int64_t LatestStep(Pipeline pipeline);

  // Takes over an error that the communicator or a step on the device found, or
  // a peer reported.
  void AdoptErrors();
  std::optional<std::string> FindWrongRank() const;
  std::optional<std::string> FindPeerFailure() const;
  [[noreturn]] static void ThrowAborted(const std::string& reason);
  // Runs every collective and every kernel once, so that the first step finds
  // nothing cold.
  void WarmUp(Communicator& comm, Clock::TimePoint deadline);
  void WarmUpKernels();
  // Tells the watchdog which steps are off the side stream, however they ended.
  // To be called with state_mutex_.
  void NoteEndLocked(Pipeline pipeline);
  std::int64_t StepsDoneLocked(Pipeline pipeline) const;
  void RunWatchdog();
  void StopWatchdog();
  std::string DescribeTimeout(Pipeline pipeline, std::int64_t step);
  // ": rank 1 has not arrived" of an exchange that waits, or nothing.
  std::string DescribeStall() const;
  // Throws kFailedPrecondition if a device still works on a step that the host
  // has done with. To be called with arm_mutex_ and state_mutex_.
  void RequireDeviceIdleLocked() const;
  // Close but for the communicator: says whether nothing runs any more.
  bool EndWork(std::chrono::steady_clock::time_point limit);

  const ContextConfig config_;
  const PipelineSpec spec_;
  Backend& backend_;
  const Clock& clock_;
  std::unique_ptr<Resources>
      resources_;  // set by the constructor; its parts are thread-safe or
                   // used by one start or done at a time
  const ArenaLayout layout_;

  bool closed_ = false;     // by Close
  bool abandoned_ = false;  // by Close: work did not end

  std::mutex arm_mutex_;  // one reset or start at a time

  mutable std::mutex comm_mutex_;
  std::shared_ptr<Communicator> communicator_;  // guarded by comm_mutex_

  mutable std::mutex state_mutex_;
  PipelineState state_;  // guarded by state_mutex_
  Watchdog watchdog_;    // guarded by state_mutex_
  std::optional<std::string>
      failure_;  // guarded by state_mutex_; the reason, set once

  std::mutex watchdog_mutex_;  // taken alone
  std::condition_variable watchdog_wake_;
  bool watchdog_stop_ = false;  // guarded by watchdog_mutex_
  std::thread watchdog_thread_;
};

}  // namespace xrex::async_emb
