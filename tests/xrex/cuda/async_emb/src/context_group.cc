#include "tests/xrex/cuda/async_emb/src/context_group.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/bfloat16.hpp"
#include "phoenix/xrex/cuda/async_emb/src/host_device.hpp"

namespace xrex::async_emb {
namespace {

std::size_t Count(std::int64_t n) { return static_cast<std::size_t>(n); }

// Shows the backend what its rank does.
class HookedCommunicator final : public Communicator {
 public:
  HookedCommunicator(HookedBackend& backend, std::int32_t rank,
                     std::unique_ptr<Communicator> inner)
      : backend_(backend), rank_(rank), inner_(std::move(inner)) {
    backend_.SetCommunicator(rank_, inner_.get());
  }
  ~HookedCommunicator() override { backend_.SetCommunicator(rank_, nullptr); }

  void Connect(const std::vector<std::string>& payloads,
               std::shared_ptr<std::byte> arena, const Clock& clock,
               Clock::TimePoint deadline) override {
    backend_.OnConnect(arena);
    inner_->Connect(payloads, std::move(arena), clock, deadline);
  }
  void AllGather(StreamRef stream, StepGuard& guard, const void* send,
                 void* recv, std::size_t bytes) override {
    Surround(stream,
             [&] { inner_->AllGather(stream, guard, send, recv, bytes); });
  }
  void AllToAll(StreamRef stream, StepGuard& guard, const void* send,
                void* recv, std::size_t bytes) override {
    Surround(stream,
             [&] { inner_->AllToAll(stream, guard, send, recv, bytes); });
  }
  void AllReduceSum(StreamRef stream, StepGuard& guard, const float* send,
                    float* recv, std::size_t count, bool fixed_order) override {
    Surround(stream, [&] {
      inner_->AllReduceSum(stream, guard, send, recv, count, fixed_order);
    });
  }
  std::optional<std::string> PollError() const override {
    if (const HookedBackend::Poll poll = backend_.poll(rank_)) {
      if (auto found = poll()) return found;
    }
    return inner_->PollError();
  }
  std::string DescribeStall() const override { return inner_->DescribeStall(); }
  void Abort(std::string_view reason) override {
    backend_.OnAbort(rank_, reason);
    inner_->Abort(reason);
  }

 private:
  template <typename Enqueue>
  void Surround(StreamRef stream, const Enqueue& enqueue) {
    const std::int64_t number = num_exchanges_++;
    const auto visit = [&backend = backend_, rank = rank_,
                        number](Place::Where where) {
      backend.Visit({.rank = rank, .where = where, .exchange = number});
    };
    visit(Place::kEnqueue);
    HostStream::RunOn(stream, [visit] { visit(Place::kBefore); });
    enqueue();
    HostStream::RunOn(stream, [visit] { visit(Place::kAfter); });
  }

  HookedBackend& backend_;
  const std::int32_t rank_;
  const std::unique_ptr<Communicator> inner_;
  std::int64_t num_exchanges_ = -3;  // used by one start at a time
};

}  // namespace

std::unique_ptr<Communicator> HookedBackend::NewCommunicator(
    const CommunicatorConfig& config, Device& device) {
  return std::make_unique<HookedCommunicator>(
      *this, config.rank, inner_.NewCommunicator(config, device));
}

void HookedBackend::At(const Place& place, std::function<void()> action) {
  std::lock_guard lock(mutex_);
  actions_[place] = std::move(action);
}

Gate& HookedBackend::HoldAt(const Place& place) {
  std::lock_guard lock(mutex_);
  Gate& gate = gates_.emplace_back();
  actions_[place] = [&gate] { gate.Pass(); };
  return gate;
}

void HookedBackend::SetPoll(std::int32_t rank, Poll poll) {
  std::lock_guard lock(mutex_);
  polls_[rank] = std::move(poll);
}

std::vector<std::string> HookedBackend::aborts(std::int32_t rank) const {
  std::lock_guard lock(mutex_);
  const auto found = aborts_.find(rank);
  return found == aborts_.end() ? std::vector<std::string>() : found->second;
}

std::int64_t HookedBackend::num_live_arenas() const {
  std::lock_guard lock(mutex_);
  return std::count_if(arenas_.begin(), arenas_.end(),
                       [](const auto& arena) { return !arena.expired(); });
}

void HookedBackend::Visit(const Place& place) {
  std::function<void()> action;
  {
    std::lock_guard lock(mutex_);
    const auto found = actions_.find(place);
    if (found != actions_.end()) action = found->second;
  }
  if (action) action();
}

HookedBackend::Poll HookedBackend::poll(std::int32_t rank) const {
  std::lock_guard lock(mutex_);
  const auto found = polls_.find(rank);
  return found == polls_.end() ? Poll() : found->second;
}

void HookedBackend::OnAbort(std::int32_t rank, std::string_view reason) {
  std::lock_guard lock(mutex_);
  aborts_[rank].emplace_back(reason);
}

void HookedBackend::AwaitStall(std::int32_t rank, std::string_view text) const {
  WaitUntil([&] {
    std::lock_guard lock(mutex_);
    const auto found = communicators_.find(rank);
    return found != communicators_.end() && found->second != nullptr &&
           found->second->DescribeStall() == text;
  });
}

void HookedBackend::SetCommunicator(std::int32_t rank,
                                    const Communicator* communicator) {
  std::lock_guard lock(mutex_);
  communicators_[rank] = communicator;
}

void HookedBackend::OnConnect(const std::shared_ptr<std::byte>& arena) {
  std::lock_guard lock(mutex_);
  arenas_.push_back(arena);
}

PipelineSpec SmallSpec(std::int32_t world_size) {
  const bool power_of_two =
      std::has_single_bit(static_cast<std::uint32_t>(world_size));
  return {.world_size = world_size,
          .tokens_per_rank = 3,
          .shard_width = 2,
          .emb_width = 2 * std::int64_t{world_size},
          .num_unique = 5,
          .any_world_size = !power_of_two};
}

float TableValue(std::int64_t row, std::int64_t column) {
  return static_cast<float>(row * 16 + column);
}

float GradValue(std::int64_t global_token, std::int64_t column) {
  return static_cast<float>((global_token * 5 + column * 3) % 7 - 3);
}

RankArrays::RankArrays(const PipelineSpec& spec, std::int32_t rank)
    : row_state(Count(kVocabRows), 0.5F),
      last_step(Count(kVocabRows), 0),
      unique_tokens{1, 4, 2, 6, kVocabRows},
      embeddings(Count(spec.tokens_per_rank * spec.emb_width), 0) {
  for (std::int64_t row = 0; row < kVocabRows; ++row) {
    for (std::int64_t c = 0; c < spec.shard_width; ++c) {
      table.push_back(
          FloatToBf16(TableValue(row, rank * spec.shard_width + c)));
    }
  }
  for (std::int64_t t = 0; t < spec.tokens_per_rank; ++t) {
    const std::int64_t token = rank * spec.tokens_per_rank + t;
    ids.push_back(static_cast<std::int32_t>(token * 3 % kVocabRows));
    // Slots 0 to 3, and now and then none.
    segment_ids.push_back(static_cast<std::int32_t>(token * 2 % 5) - 1);
    for (std::int64_t c = 0; c < spec.emb_width; ++c) {
      grads.push_back(FloatToBf16(GradValue(token, c)));
    }
  }
}

LookupStart RankArrays::lookup() const {
  return {.ids = ids.data(), .table = table.data(), .vocab_rows = kVocabRows};
}

UpdateStart RankArrays::update() {
  return {.grads = grads.data(),
          .segment_ids = segment_ids.data(),
          .unique_tokens = unique_tokens.data(),
          .table = table.data(),
          .row_state = row_state.data(),
          .last_step = last_step.data(),
          .vocab_rows = kVocabRows,
          .learning_rate = &learning_rate,
          .pending = &pending,
          .step = &step,
          .params = params};
}

ContextGroup::ContextGroup(Backend& backend, const Clock& clock,
                           const PipelineSpec& spec,
                           const GroupOptions& options)
    : spec_(spec) {
  for (std::int32_t rank = 0; rank < spec.world_size; ++rank) {
    arrays_.push_back(std::make_unique<RankArrays>(spec, rank));
    const ContextConfig config{
        .context_id = options.context_id,
        .device_key = options.first_device_key + rank,
        .name = options.name,
        .timeout = options.timeout,
        .run_watchdog_thread = options.run_watchdog_thread};
    contexts_.push_back(
        std::make_shared<AsyncEmbContext>(config, spec, backend, clock));
  }
}

void ContextGroup::BringUp() {
  std::vector<std::string> payloads;
  for (std::int32_t rank = 0; rank < size(); ++rank) {
    auto made = contexts_[Count(rank)]->Reset(rank, size());
    if (rank == 0) payloads = std::move(made);
  }
  std::vector<std::future<Outcome>> handshakes;
  for (std::int32_t rank = 0; rank < size(); ++rank) {
    std::vector<std::string> received(Count(size()));
    received[0] = payloads[Count(rank)];
    handshakes.push_back(
        AttemptAsync([context = contexts_[Count(rank)], received] {
          context->Handshake(received);
        }));
  }
  for (auto& handshake : handshakes) EXPECT_THAT(handshake.get(), Succeeded());
}

void ContextGroup::StartLookup(std::int32_t rank) {
  (*this)[rank].StartLookup(StreamRef{}, arrays(rank).lookup());
}

void ContextGroup::FinishLookup(std::int32_t rank) {
  (*this)[rank].FinishLookup(StreamRef{}, arrays(rank).embeddings.data());
}

void ContextGroup::StartUpdate(std::int32_t rank) {
  (*this)[rank].StartUpdate(StreamRef{}, arrays(rank).update());
}

void ContextGroup::FinishUpdate(std::int32_t rank) {
  RankArrays& own = arrays(rank);
  (*this)[rank].FinishUpdate(StreamRef{}, &own.norm, &own.valid);
}

void ContextGroup::StartLookups() {
  for (std::int32_t rank = 0; rank < size(); ++rank) StartLookup(rank);
}

void ContextGroup::FinishLookups() {
  for (std::int32_t rank = 0; rank < size(); ++rank) FinishLookup(rank);
}

void ContextGroup::StartUpdates() {
  for (std::int32_t rank = 0; rank < size(); ++rank) StartUpdate(rank);
}

void ContextGroup::FinishUpdates() {
  for (std::int32_t rank = 0; rank < size(); ++rank) FinishUpdate(rank);
}

bool ContextGroup::LookupIsRight(std::int32_t rank) {
  const RankArrays& own = arrays(rank);
  for (std::int64_t t = 0; t < spec_.tokens_per_rank; ++t) {
    for (std::int64_t c = 0; c < spec_.emb_width; ++c) {
      const Bf16Bits got = own.embeddings[Count(t * spec_.emb_width + c)];
      if (got != FloatToBf16(TableValue(own.ids[Count(t)], c))) return false;
    }
  }
  return true;
}

bool ContextGroup::LookupIsNan(std::int32_t rank) {
  return std::ranges::all_of(arrays(rank).embeddings, [](Bf16Bits bits) {
    return std::isnan(Bf16ToFloat(bits));
  });
}

bool ContextGroup::UpdateFailed(std::int32_t rank) {
  return std::isnan(arrays(rank).norm) && arrays(rank).valid == 0;
}

bool ContextGroup::Untouched(std::int32_t rank) {
  const RankArrays before(spec_, rank);
  const RankArrays& own = arrays(rank);
  return own.table == before.table && own.row_state == before.row_state &&
         own.last_step == before.last_step;
}

}  // namespace xrex::async_emb
