// L2: what the core needs of a device: streams, events, one arena, and the
// kernels of a step.
//
// Every operation is enqueued on a stream and returns at once, except on the
// host backend's caller stream (a null StreamRef), where it runs inside the
// call.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "phoenix/xrex/cuda/async_emb/src/adagrad_params.hpp"
#include "phoenix/xrex/cuda/async_emb/src/clock.hpp"
#include "phoenix/xrex/cuda/async_emb/src/pipeline_spec.hpp"
#include "phoenix/xrex/cuda/async_emb/src/types.hpp"

namespace xrex::async_emb {

// A stream that somebody else owns. Null is the caller's own thread on the host
// backend.
struct StreamRef {
  void* handle = nullptr;
};

// An owned side stream.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual StreamRef ref() = 0;

  // Takes no more work and waits for what was enqueued, at most for `timeout`.
  // When it says false the work still runs, and what it uses must be left
  // alive.
  virtual bool Stop(std::chrono::nanoseconds timeout) = 0;
};

// A point in a stream, recorded once per step. Complete before it was ever
// recorded.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool IsComplete() const = 0;
  // Blocks until the recorded point was reached, at most for `timeout`. Says
  // whether it was.
  virtual bool WaitFor(std::chrono::nanoseconds timeout) const = 0;
};

// Why the steps of a pipeline have failed. The values are shared with devices.
enum class StepFailure : std::int32_t {
  kNone = 0,
  kExchange = 1,    // an exchange was not completed, or the context was aborted
  kWrongRank = 2,   // the program takes itself for another rank
  kPeerFailed = 3,  // another rank says that its step has failed
};

// What a pipeline's steps have come to. Host and device may both see it, and
// each word has one writer: not every machine has atomic operations between the
// two.
struct StepWords {
  std::int32_t failure = 0;  // a StepFailure that the host sets, once
  std::int32_t found = 0;    // a StepFailure that a device has found, set once
  std::int64_t reached = 0;  // the latest step that has ended
  std::int64_t good = 0;     // the latest step that has ended well
  std::int64_t waited_nanos = 0;  // by done calls, in all
};

// Whether the exchange that a step hangs on has failed, and how far the steps
// have come. One per pipeline and context, made by the context's device.
// Operations of a failed step write nothing, or NaN where they own the caller's
// output.
class StepGuard {
 public:
  // `words` outlives the guard; null: the guard's own.
  explicit StepGuard(Pipeline pipeline = Pipeline::kLookup,
                     StepWords* words = nullptr)
      : pipeline_(pipeline), words_(words == nullptr ? own_words_ : *words) {}
  virtual ~StepGuard() = default;

  StepGuard(const StepGuard&) = delete;
  StepGuard& operator=(const StepGuard&) = delete;

  // Whose steps these are: exchanges of different pipelines never match.
  Pipeline pipeline() const { return pipeline_; }

  // For good: a context whose exchange has failed arms no other step. The first
  // reason stands.
  void Fail(StepFailure why = StepFailure::kExchange) {
    auto none = static_cast<std::int32_t>(StepFailure::kNone);
    std::atomic_ref(words_.failure)
        .compare_exchange_strong(none, static_cast<std::int32_t>(why));
  }
  // What a device has found says more than that the host gave up since.
  StepFailure failure() const {
    const std::int32_t found =
        std::atomic_ref(words_.found).load(std::memory_order_acquire);
    return static_cast<StepFailure>(
        found != 0
            ? found
            : std::atomic_ref(words_.failure).load(std::memory_order_acquire));
  }
  bool failed() const { return failure() != StepFailure::kNone; }

  // The latest step that has ended on the side stream, and the latest that has
  // ended well; 0 at first. No step ends well after one that did not.
  std::int64_t reached() const {
    return std::atomic_ref(words_.reached).load(std::memory_order_acquire);
  }
  std::int64_t good() const {
    return std::atomic_ref(words_.good).load(std::memory_order_acquire);
  }

  // Called on the side stream of a host; a device writes the words itself.
  void End(std::int64_t step) {
    if (!failed()) {
      std::atomic_ref(words_.good).store(step, std::memory_order_release);
    }
    std::atomic_ref(words_.reached).store(step, std::memory_order_release);
  }

  // For how long done calls have held their callers back. Never falls.
  std::chrono::nanoseconds waited() const {
    return std::chrono::nanoseconds(
        std::atomic_ref(words_.waited_nanos).load(std::memory_order_relaxed));
  }
  // Called on a host; a device writes the word itself.
  void AddWait(std::chrono::nanoseconds waited) {
    std::atomic_ref(words_.waited_nanos)
        .fetch_add(waited.count(), std::memory_order_relaxed);
  }

 private:
  const Pipeline pipeline_;
  StepWords own_words_;
  StepWords& words_;
};

// What the kernels count. Written by a device's stream, read by anyone at any
// time.
struct StepCounters {
  std::atomic<std::int64_t> ids_out_of_range{0};
  std::atomic<std::int64_t> segments_invalid{0};
  std::atomic<std::int64_t> duplicate_slots{0};
  std::atomic<std::int64_t> skipped_pending{0};
  std::atomic<std::int64_t> skipped_non_finite{0};
  std::atomic<std::int64_t> skipped_invalid{0};
  std::atomic<float> last_norm{0.0F};
};

// The run-time scalars of an update, in the arena.
struct UpdateScalars {
  float learning_rate;
  std::int32_t pending;  // 0: no update this time, but the protocol runs
  std::int32_t step;     // lazy form only
};

// What an update reports, in the arena.
struct UpdateResult {
  float norm;
  std::int32_t valid;
};

// ArenaLayout, which knows no device, counts both in elements of 4 bytes.
static_assert(sizeof(UpdateScalars) == 3 * sizeof(float));
static_assert(sizeof(UpdateResult) == 2 * sizeof(float));

struct GatherArgs {
  const std::int32_t* ids = nullptr;  // [num_ids]
  std::int64_t num_ids = 0;
  const Bf16Bits* table = nullptr;  // [vocab_rows, width]
  std::int64_t vocab_rows = 0;
  std::int64_t width = 0;
  OutOfRange out_of_range = OutOfRange::kClip;
  // Ids in [count_begin, count_end) that are out of range are counted.
  std::int64_t count_begin = 0;
  std::int64_t count_end = 0;
  Bf16Bits* rows = nullptr;  // [num_ids, width]
};

// [T, R * w] against [R, T, w].
struct SliceShape {
  std::int32_t world_size = 1;
  std::int64_t tokens_per_rank = 0;
  std::int64_t shard_width = 0;
};

struct SegmentSumArgs {
  const std::int32_t* segments =
      nullptr;  // [num_tokens], each -1 or an index below num_unique
  const Bf16Bits* grads = nullptr;  // [num_tokens, width]
  std::int64_t num_tokens = 0;
  std::int64_t num_unique = 0;
  std::int64_t width = 0;
  bool deterministic = false;
  float* accum = nullptr;  // out [num_unique, width]
  float* partial_stats =
      nullptr;  // out [num_unique], row squared sums of bf16(accum)
};

// What a rank finds against a step, in the flag that is summed over the ranks.
// The sum of up to kMaxRanks ranks tells the reason that goes first: pending,
// then invalid inputs, then a learning rate that is not finite.
inline constexpr float kVerdictApply = 0.0F;
inline constexpr float kVerdictNonFinite = 1.0F;
inline constexpr float kVerdictInvalid = kMaxRanks + 1;
inline constexpr float kVerdictPending = kVerdictInvalid * kVerdictInvalid;

struct UpdateCheckArgs {
  const std::int32_t* segments = nullptr;  // [num_tokens], of all ranks
  std::int64_t num_tokens = 0;
  std::int64_t count_begin =
      0;  // own tokens: invalid ones among them are counted
  std::int64_t count_end = 0;
  const std::int32_t* unique_tokens = nullptr;  // [num_unique]
  std::int64_t num_unique = 0;
  std::int64_t vocab_rows = 0;
  bool check_duplicates = false;  // asked for; the host checks in any case
  const UpdateScalars* scalars = nullptr;
  float* flag = nullptr;  // out: one of kVerdict*
};

struct ApplyArgs {
  const float* accum = nullptr;  // [num_unique, width]
  const float* stats =
      nullptr;  // [num_unique + 1], S over all columns, then the summed flag
  const std::int32_t* unique_tokens = nullptr;  // [num_unique]
  std::int64_t num_unique = 0;
  std::int64_t width = 0;
  std::int64_t emb_width = 0;
  std::int64_t vocab_rows = 0;
  AdagradParams params;
  const UpdateScalars* scalars = nullptr;
  Bf16Bits* table = nullptr;          // in and out [vocab_rows, width]
  float* row_state = nullptr;         // in and out [vocab_rows]
  std::int32_t* last_step = nullptr;  // in and out [vocab_rows], lazy only
  UpdateResult* result = nullptr;     // out
};

// Bytes that are a multiple of 4, as all that a step takes in.
struct CopyItem {
  void* dst = nullptr;
  const void* src = nullptr;
  std::size_t bytes = 0;
};
inline constexpr std::size_t kMaxCopies = 4;

class Device {
 public:
  virtual ~Device() = default;

  virtual std::unique_ptr<Stream> NewSideStream() = 0;
  virtual std::unique_ptr<Event> NewEvent() = 0;
  // The device outlives its guards.
  virtual std::unique_ptr<StepGuard> NewGuard(Pipeline pipeline) = 0;

  // One block of at least `bytes`, aligned to kArenaAlignment. Throws
  // kResourceExhausted with the bytes asked for. Shared, because a peer may
  // still read from it.
  virtual std::shared_ptr<std::byte> AllocateArena(std::size_t bytes) = 0;

  // Bytes of Region::kScratch that the kernels below want.
  virtual std::size_t ScratchBytes(const PipelineSpec& spec) const = 0;

  // Gives the kernels their scratch, ScratchBytes(spec) zeros. Called once,
  // before the first guard and the first kernel.
  virtual void BindScratch(std::byte* scratch, const PipelineSpec& spec) = 0;

  // An error that the device has found by itself; what is enqueued after it
  // does not run. Never waits.
  virtual std::optional<std::string> PollError() const = 0;

  // Called before the communicator is aborted, at any time and by any thread:
  // on a device that runs on over the torn data of an aborted exchange, every
  // guard fails now.
  virtual void FailGuards() = 0;

  virtual void Record(Event& event, StreamRef stream) = 0;

  // Later work of `stream` waits for the recorded point. On the host's caller
  // stream the calling thread blocks; work behind the event always ends, since
  // every exchange is bounded.
  virtual void Wait(StreamRef stream, const Event& event) = 0;

  // The wait of a done call: as Wait, where `completed` is the end of the
  // guard's step. Adds to guard.waited() the time from when `stream` was ready
  // for the step to the step's end: on a host by `clock`, on a device by the
  // device's own, and not before CombineSlices or WriteResult with this guard
  // has come next on the stream.
  virtual void WaitForStep(StreamRef stream, StepGuard& guard,
                           const Event& completed, const Clock& clock) = 0;

  // At most kMaxCopies that do not overlap.
  virtual void Copy(StreamRef stream, std::span<const CopyItem> items) = 0;
  virtual void Zero(StreamRef stream, void* dst, std::size_t bytes) = 0;

  // Ends `step` on its stream: if nothing has failed by now, it has ended well,
  // and its done call may take its results.
  virtual void EndStep(StreamRef stream, StepGuard& guard,
                       std::int64_t step) = 0;

  // Copies idle arena memory to host memory, and waits for it.
  virtual void ReadBack(void* dst, const void* src, std::size_t bytes) = 0;

  // Fails the guard with kWrongRank unless *came == expected. `came` is the
  // caller's, where the program says which rank it is. A device does so in
  // stream order.
  virtual void CheckRank(StreamRef stream, StepGuard& guard,
                         const std::int32_t* came, std::int32_t expected) = 0;

  virtual void GatherRows(StreamRef stream, const StepGuard& guard,
                          const GatherArgs& args) = 0;

  // slices [R, T, w] -> out [T, R * w]; all NaN for a failed step.
  virtual void CombineSlices(StreamRef stream, const StepGuard& guard,
                             const SliceShape& shape, const Bf16Bits* slices,
                             Bf16Bits* out) = 0;

  // grads [T, R * w] -> slices [R, T, w].
  virtual void RouteGradients(StreamRef stream, const StepGuard& guard,
                              const SliceShape& shape, const Bf16Bits* grads,
                              Bf16Bits* slices) = 0;

  virtual void CheckUpdate(StreamRef stream, const StepGuard& guard,
                           const UpdateCheckArgs& args) = 0;

  virtual void SumSegments(StreamRef stream, const StepGuard& guard,
                           const SegmentSumArgs& args) = 0;

  virtual void ApplyAdagrad(StreamRef stream, const StepGuard& guard,
                            const ApplyArgs& args) = 0;

  // Writes *norm and *valid from `result`; NaN and 0 for a failed step.
  virtual void WriteResult(StreamRef stream, const StepGuard& guard,
                           const UpdateResult* result, float* norm,
                           std::int32_t* valid) = 0;

  virtual const StepCounters& counters() const = 0;
};

}  // namespace xrex::async_emb
