// Contexts of several ranks in one process, a GPU each, against the host
// backend.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "phoenix/xrex/cuda/async_emb/src/cuda_backend.hpp"
#include "phoenix/xrex/cuda/async_emb/src/host_backend.hpp"
#include "tests/xrex/cuda/async_emb/src/cuda_context_test_utils.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

const bool kEnvironmentIsSet = SetNcclEnvironment();
constexpr std::int64_t kVocabRows = 100;
constexpr std::int64_t kTokens = 70;
constexpr std::int64_t kShardWidth = 24;
constexpr std::int64_t kSlots = 60;
constexpr std::chrono::seconds kTimeout{60};

PipelineSpec SpecOf(std::int32_t world_size, std::int64_t tokens = kTokens) {
  PipelineSpec spec = CudaSpec(tokens, kShardWidth, kSlots);
  spec.world_size = world_size;
  spec.emb_width = world_size * kShardWidth;
  return spec;
}

// Reset and handshake of all contexts, each on a thread of its own.
void BringUp(const std::vector<AsyncEmbContext*>& contexts) {
  const auto world_size = static_cast<std::int32_t>(contexts.size());
  std::vector<std::vector<std::string>> payloads;
  for (std::int32_t rank = 0; rank < world_size; ++rank) {
    payloads.push_back(contexts[rank]->Reset(rank, world_size));
  }
  std::vector<std::future<void>> handshakes;
  for (std::int32_t rank = 0; rank < world_size; ++rank) {
    std::vector<std::string> received;
    for (const auto& of_rank : payloads) received.push_back(of_rank[rank]);
    handshakes.push_back(
        std::async(std::launch::async, [context = contexts[rank], received] {
          context->Handshake(received);
        }));
  }
  for (auto& handshake : handshakes) handshake.get();
}

// What a rank's program has on the host.
struct HostArrays {
  explicit HostArrays(const CudaRank& rank)
      : ids(rank.ids.Get()),
        table(rank.table.Get()),
        row_state(rank.row_state.Get()),
        grads(rank.grads.Get()),
        segment_ids(rank.segment_ids.Get()),
        unique_tokens(rank.unique_tokens.Get()),
        embeddings(rank.embeddings.Get()) {}

  std::vector<std::int32_t> ids;
  std::vector<Bf16Bits> table;
  std::vector<float> row_state;
  std::vector<Bf16Bits> grads;
  std::vector<std::int32_t> segment_ids;
  std::vector<std::int32_t> unique_tokens;
  std::vector<Bf16Bits> embeddings;
  float learning_rate = 0.5F;
  std::int32_t pending = 1;
  float norm = -1.0F;
  std::int32_t valid = -1;
};

class CudaRanksTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(kEnvironmentIsSet);
    int num_devices = 0;
    CheckCuda(cudaGetDeviceCount(&num_devices), "to count the devices");
    while (2 * world_size_ <= num_devices && world_size_ < 8) world_size_ *= 2;
    if (world_size_ < 2) GTEST_SKIP() << "needs two GPUs";
  }

  void MakeRanks(const PipelineSpec& spec) {
    for (std::int32_t rank = 0; rank < world_size_; ++rank) {
      ranks_.push_back(std::make_unique<CudaRank>(spec, kVocabRows, kTimeout,
                                                  clock_, backend_, rank));
    }
    std::vector<AsyncEmbContext*> contexts;
    for (const auto& rank : ranks_) contexts.push_back(&rank->context());
    BringUp(contexts);
  }

  void Synchronize() {
    for (const auto& rank : ranks_) rank->caller().Synchronize();
  }

  // A step of all ranks on the GPUs.
  void Run() {
    for (const auto& rank : ranks_) rank->StartUpdate();
    for (const auto& rank : ranks_) rank->FinishUpdate();
    for (const auto& rank : ranks_) rank->StartLookup();
    for (const auto& rank : ranks_) rank->FinishLookup();
    Synchronize();
  }

  // The same on the host, from the arrays as they are now.
  std::vector<HostArrays> RunOnHost() {
    HostBackend backend;
    std::vector<HostArrays> arrays;
    std::vector<std::unique_ptr<AsyncEmbContext>> contexts;
    std::vector<AsyncEmbContext*> pointers;
    for (const auto& rank : ranks_) {
      arrays.emplace_back(*rank);
      contexts.push_back(std::make_unique<AsyncEmbContext>(
          ContextConfig{.context_id = 6,
                        .device_key = static_cast<std::int64_t>(arrays.size()),
                        .name = "host",
                        .timeout = kTimeout,
                        .run_watchdog_thread = false},
          SpecOf(world_size_), backend, clock_));
      pointers.push_back(contexts.back().get());
    }
    BringUp(pointers);
    for (std::size_t r = 0; r < arrays.size(); ++r) {
      HostArrays& own = arrays[r];
      contexts[r]->StartUpdate({}, {.grads = own.grads.data(),
                                    .segment_ids = own.segment_ids.data(),
                                    .unique_tokens = own.unique_tokens.data(),
                                    .table = own.table.data(),
                                    .row_state = own.row_state.data(),
                                    .vocab_rows = kVocabRows,
                                    .learning_rate = &own.learning_rate,
                                    .pending = &own.pending,
                                    .params = {.eps = 1.0F}});
    }
    for (std::size_t r = 0; r < arrays.size(); ++r) {
      contexts[r]->FinishUpdate({}, &arrays[r].norm, &arrays[r].valid);
    }
    for (std::size_t r = 0; r < arrays.size(); ++r) {
      contexts[r]->StartLookup({}, {.ids = arrays[r].ids.data(),
                                    .table = arrays[r].table.data(),
                                    .vocab_rows = kVocabRows});
    }
    for (std::size_t r = 0; r < arrays.size(); ++r) {
      contexts[r]->FinishLookup({}, arrays[r].embeddings.data());
    }
    return arrays;
  }

  const SteadyClock clock_;
  CudaBackend backend_;
  std::int32_t world_size_ = 1;  // a power of two
  std::vector<std::unique_ptr<CudaRank>> ranks_;
};

TEST_F(CudaRanksTest, StepsGiveWhatTheHostGives) {
  MakeRanks(SpecOf(world_size_));
  for (int step = 0; step < 3; ++step) {
    const std::vector<HostArrays> expected = RunOnHost();
    Run();
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      EXPECT_EQ(ranks_[r]->table.Get(), expected[r].table) << "rank " << r;
      EXPECT_EQ(ranks_[r]->row_state.Get(), expected[r].row_state);
      EXPECT_EQ(ranks_[r]->norm.Get()[0], expected[r].norm);
      EXPECT_EQ(ranks_[r]->valid.Get()[0], 1);
      EXPECT_EQ(ranks_[r]->embeddings.Get(), expected[r].embeddings);
    }
  }
}

// NCCL takes other ways with megabytes than with a few bytes.
TEST_F(CudaRanksTest, LargeExchangesGiveTheRows) {
  constexpr std::int64_t kManyTokens = 100'000;
  MakeRanks(SpecOf(world_size_, kManyTokens));
  Run();
  std::vector<std::vector<Bf16Bits>> tables;
  for (const auto& rank : ranks_) tables.push_back(rank->table.Get());
  for (const auto& rank : ranks_) {
    const std::vector<std::int32_t> ids = rank->ids.Get();
    std::vector<Bf16Bits> expected;
    for (const std::int32_t id : ids) {
      for (const std::vector<Bf16Bits>& table : tables) {
        const auto row = table.begin() + id * kShardWidth;
        expected.insert(expected.end(), row, row + kShardWidth);
      }
    }
    EXPECT_TRUE(rank->embeddings.Get() == expected);
    EXPECT_EQ(rank->valid.Get()[0], 1);
    EXPECT_THAT(Attempt([&] { rank->context().Check(); }), Succeeded());
  }
}

TEST_F(CudaRanksTest, AProgramOfAnotherRankStopsTheUpdateOfAll) {
  MakeRanks(SpecOf(world_size_));
  std::vector<std::vector<Bf16Bits>> tables;
  for (const auto& rank : ranks_) tables.push_back(rank->table.Get());
  ranks_[0]->program_rank.Set({1});
  for (const auto& rank : ranks_) rank->StartUpdate();
  for (const auto& rank : ranks_) rank->FinishUpdate();
  Synchronize();
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    EXPECT_TRUE(ranks_[r]->UpdateFailed()) << "rank " << r;
    EXPECT_EQ(ranks_[r]->table.Get(), tables[r]) << "rank " << r;
    // Rank 0 knows what it is; whether the others hear of it or find out
    // by themselves that a rank has failed is a matter of time.
    const auto wrong_rank = testing::HasSubstr(
        "the program on rank 0's device takes itself for "
        "another rank");
    const auto peer_failed =
        testing::HasSubstr("another rank has failed in update step 1");
    const Outcome found = Attempt([&] { ranks_[r]->context().Check(); });
    if (r == 0) {
      EXPECT_THAT(found, FailedWith(ErrorCode::kAborted, wrong_rank));
    } else {
      EXPECT_THAT(found, FailedWith(ErrorCode::kAborted,
                                    testing::AnyOf(wrong_rank, peer_failed)));
    }
  }
}

TEST_F(CudaRanksTest, AnAbortEndsAnExchangeWhosePeersDoNotCome) {
  MakeRanks(SpecOf(world_size_));
  ranks_[0]->StartLookup();
  ranks_[0]->FinishLookup();
  ranks_[0]->context().Abort("enough");
  ranks_[0]->caller().Synchronize();
  EXPECT_TRUE(ranks_[0]->LookupIsNan());
}

TEST_F(CudaRanksTest, AnAbortOfOneRankEndsThePeersInItsProcess) {
  MakeRanks(SpecOf(world_size_));
  for (std::size_t r = 1; r < ranks_.size(); ++r) {
    ranks_[r]->StartLookup();
    ranks_[r]->FinishLookup();
  }
  ranks_[0]->context().Abort("enough");
  for (std::size_t r = 1; r < ranks_.size(); ++r) {
    ranks_[r]->caller().Synchronize();
    EXPECT_TRUE(ranks_[r]->LookupIsNan()) << "rank " << r;
    EXPECT_THAT(Attempt([&] { ranks_[r]->context().Check(); }),
                Aborted("enough"));
  }
}

}  // namespace
}  // namespace xrex::async_emb
