// Contexts of one process, brought up together on the host backend, with hooks
// where a test may hold a rank or act in the middle of its work.
#pragma once

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "phoenix/xrex/cuda/async_emb/src/host_backend.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {

// A place in the work of one rank. Exchanges are counted in the order in which
// the rank's communicator runs them, from -3 for the three of the handshake; so
// the first step begins with 0. A lookup has two (all-gather, all-to-all), an
// update has three (all-gather, all-to-all, all-reduce).
struct Place {
  enum Where : std::uint8_t {
    kEnqueue,  // on the thread that arms the step
    kBefore,   // on the side stream
    kAfter,    // on the side stream, whether or not the exchange succeeded
  };
  std::int32_t rank = 0;
  Where where = kBefore;
  std::int64_t exchange = 0;

  auto operator<=>(const Place&) const = default;
};

// The host backend, observed.
class HookedBackend final : public Backend {
 public:
  std::string_view platform() const override { return inner_.platform(); }
  std::chrono::seconds default_timeout() const override {
    return inner_.default_timeout();
  }
  std::unique_ptr<Device> NewDevice(std::int64_t device_key) override {
    return inner_.NewDevice(device_key);
  }
  std::string_view ResolveTransport(Transport wanted) const override {
    return inner_.ResolveTransport(wanted);
  }
  std::vector<std::string> MakePayloads(std::int32_t world_size) override {
    return inner_.MakePayloads(world_size);
  }
  std::unique_ptr<Communicator> NewCommunicator(
      const CommunicatorConfig& config, Device& device) override;

  // Whoever comes to `place` runs `action` there.
  void At(const Place& place, std::function<void()> action);
  // Whoever comes to `place` waits there for the gate.
  Gate& HoldAt(const Place& place);

  // What PollError of `rank` finds instead of the communicator's own state, if
  // it gives something. Runs on every poll, outside all locks.
  using Poll = std::function<std::optional<std::string>()>;
  void SetPoll(std::int32_t rank, Poll poll);

  // The reasons of all aborts that reached the communicators of `rank`.
  std::vector<std::string> aborts(std::int32_t rank) const;

  // Returns when the exchange that the communicator of `rank` is in waits for
  // exactly these ranks: "rank 1 has not arrived".
  void AwaitStall(std::int32_t rank, std::string_view text) const;

  // Arenas given to communicators that are still allocated.
  std::int64_t num_live_arenas() const;

  // For the communicators that this backend makes.
  void Visit(const Place& place);
  Poll poll(std::int32_t rank) const;
  void OnAbort(std::int32_t rank, std::string_view reason);
  void OnConnect(const std::shared_ptr<std::byte>& arena);
  void SetCommunicator(std::int32_t rank, const Communicator* communicator);

 private:
  HostBackend inner_;
  mutable std::mutex mutex_;  // guards everything below
  std::map<Place, std::function<void()>> actions_;
  std::deque<Gate> gates_;  // gates stay where they are
  std::map<std::int32_t, Poll> polls_;
  std::map<std::int32_t, std::vector<std::string>> aborts_;
  std::vector<std::weak_ptr<std::byte>> arenas_;
  std::map<std::int32_t, const Communicator*> communicators_;  // the latest
};

inline constexpr std::int64_t kVocabRows = 7;

// Longer than any test runs: a wait of this length that ends was ended.
inline std::chrono::steady_clock::time_point Forever() {
  return std::chrono::steady_clock::now() + std::chrono::hours(1);
}

// T = 3, w = 2, U = 5; any number of ranks.
PipelineSpec SmallSpec(std::int32_t world_size);

// The whole table and the gradients of the global batch, as small integers,
// which bfloat16 holds exactly.
float TableValue(std::int64_t row, std::int64_t column);
float GradValue(std::int64_t global_token, std::int64_t column);

// The arrays of one rank, as XLA would hold them.
struct RankArrays {
  RankArrays(const PipelineSpec& spec, std::int32_t rank);

  LookupStart lookup() const;
  UpdateStart update();

  std::vector<std::int32_t> ids;            // [T]
  std::vector<Bf16Bits> table;              // [V, w]
  std::vector<float> row_state;             // [V]
  std::vector<std::int32_t> last_step;      // [V]
  std::vector<Bf16Bits> grads;              // [T, W]
  std::vector<std::int32_t> segment_ids;    // [T]
  std::vector<std::int32_t> unique_tokens;  // [U]
  float learning_rate = 0.25F;
  std::int32_t pending = 1;
  std::int32_t step = 1;
  AdagradParams params{.eps = 1.0F};

  std::vector<Bf16Bits> embeddings;  // [T, W]
  float norm = -1.0F;
  std::int32_t valid = -1;
};

struct GroupOptions {
  Clock::Duration timeout = std::chrono::seconds(10);
  bool run_watchdog_thread = false;
  std::int64_t context_id = 7;
  std::int64_t first_device_key = 0;
  std::string name{};
};

// One context for each rank. `backend` and `clock` outlive the group.
class ContextGroup {
 public:
  ContextGroup(Backend& backend, const Clock& clock, const PipelineSpec& spec,
               const GroupOptions& options = {});

  // Reset and handshake of all ranks, each on a thread of its own.
  void BringUp();

  std::int32_t size() const {
    return static_cast<std::int32_t>(contexts_.size());
  }
  AsyncEmbContext& operator[](std::int32_t rank) { return *contexts_.at(rank); }
  const std::shared_ptr<AsyncEmbContext>& context(std::int32_t rank) const {
    return contexts_.at(rank);
  }
  RankArrays& arrays(std::int32_t rank) { return *arrays_.at(rank); }
  void Destroy(std::int32_t rank) { contexts_.at(rank).reset(); }

  void StartLookup(std::int32_t rank);
  void FinishLookup(std::int32_t rank);
  void StartUpdate(std::int32_t rank);
  void FinishUpdate(std::int32_t rank);
  // One rank after the other.
  void StartLookups();
  void FinishLookups();
  void StartUpdates();
  void FinishUpdates();

  // Of the latest lookup that was finished.
  bool LookupIsRight(std::int32_t rank);  // for a table that nothing updated
  bool LookupIsNan(std::int32_t rank);
  // Of the latest update that was finished.
  bool UpdateFailed(std::int32_t rank);  // norm = NaN, valid = 0
  // Whether table, row_state and last_step have the bits they began with.
  bool Untouched(std::int32_t rank);

 private:
  const PipelineSpec spec_;
  std::vector<std::unique_ptr<RankArrays>> arrays_;  // outlive the contexts
  std::vector<std::shared_ptr<AsyncEmbContext>> contexts_;
};

}  // namespace xrex::async_emb
