// How a context on a GPU ends, and what is left of a step that is aborted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "phoenix/xrex/cuda/async_emb/src/cuda_backend.hpp"
#include "phoenix/xrex/cuda/async_emb/src/cuda_device_scope.hpp"
#include "phoenix/xrex/cuda/async_emb/src/cuda_mapped_pool.hpp"
#include "tests/xrex/cuda/async_emb/src/cuda_context_test_fixture.hpp"
#include "tests/xrex/cuda/async_emb/src/cuda_context_test_utils.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

using testing::HasSubstr;

class CudaContextEndTest : public CudaContextTest {};

TEST_F(CudaContextEndTest, ComesUpAgainAfterAReset) {
  rank_.StartLookup();
  rank_.FinishLookup();
  rank_.caller().Synchronize();
  rank_.BringUp();
  EXPECT_EQ(rank_.StartLookup(), 2);
  rank_.FinishLookup();
  rank_.caller().Synchronize();
  EXPECT_TRUE(rank_.LookupIsRight());
}

TEST_F(CudaContextEndTest, AResetIsRefusedWhileAStepIsOnTheDevice) {
  rank_.caller().HoldAt(gate_);
  rank_.StartUpdate();
  rank_.FinishUpdate();
  EXPECT_THAT(Attempt([&] { context().Reset(0, 1); }),
              FailedWith(ErrorCode::kFailedPrecondition,
                         HasSubstr("reset came while update step 1 is on the "
                                   "device")));
  gate_.Open();
  rank_.caller().Synchronize();
  EXPECT_EQ(rank_.valid.Get()[0], 1);
  EXPECT_THAT(Attempt([&] { context().Reset(0, 1); }), Succeeded());
}

TEST_F(CudaContextEndTest, CloseWaitsUntilTheCallersStreamHasTakenTheStep) {
  rank_.StartLookup();
  EXPECT_EQ(context().WaitStepReady(), 1);
  rank_.caller().HoldAt(gate_);
  rank_.FinishLookup();
  auto close = AttemptAsync([&] { context().Close(Forever()); });
  EXPECT_FALSE(HappensAnyway([&] { return IsReady(close); }));
  gate_.Open();
  EXPECT_THAT(close.get(), Succeeded());
  rank_.Destroy();
  rank_.caller().Synchronize();
  EXPECT_TRUE(rank_.LookupIsRight());
}

TEST_F(CudaContextEndTest, AContextWhoseCallersStreamIsStuckIsLeftAlone) {
  rank_.StartLookup();
  EXPECT_EQ(context().WaitStepReady(), 1);
  rank_.caller().HoldAt(gate_);
  rank_.FinishLookup();
  context().Close(std::chrono::steady_clock::now() +
                  std::chrono::milliseconds(50));
  testing::internal::CaptureStderr();
  rank_.Destroy();
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("its work did not end in time"));
  gate_.Open();
  rank_.caller().Synchronize();
  EXPECT_TRUE(rank_.LookupIsRight());
}

TEST_F(CudaContextEndTest, AContextWhoseStreamIsStuckIsLeftAlone) {
  rank_.caller().HoldAt(gate_);
  rank_.StartLookup();
  context().Close(std::chrono::steady_clock::now() +
                  std::chrono::milliseconds(50));
  rank_.Destroy();  // returns, and leaves alone what still runs
  gate_.Open();
  rank_.caller().Synchronize();
  CheckCuda(cudaDeviceSynchronize(), "to wait for a device");
}

TEST(CudaLifecycleTest, MakingAndDestroyingLeavesNoMemoryBehind) {
  const SteadyClock clock;
  CudaBackend backend;
  const auto live_once = [&] {
    CudaRank rank(CudaSpec(4096, 64, 1024), kVocabRows * 100, kTimeout, clock,
                  backend);
    rank.BringUp();
    rank.StartLookup();
    rank.FinishLookup();
    rank.caller().Synchronize();
    EXPECT_TRUE(rank.LookupIsRight());
  };
  live_once();  // what CUDA and NCCL keep for good
  const std::size_t before = FreeDeviceMemory();
  for (int i = 0; i < 20; ++i) live_once();
  EXPECT_EQ(FreeDeviceMemory(), before);
}

// What an update may leave behind.
struct Outputs {
  explicit Outputs(const CudaRank& rank)
      : table(rank.table.Get()), row_state(rank.row_state.Get()) {}

  bool operator==(const Outputs&) const = default;

  std::vector<Bf16Bits> table;
  std::vector<float> row_state;
};

// Until then without letting the processor go, which may take longer than a
// step does.
void SpinUntil(std::chrono::steady_clock::time_point end) {
  while (std::chrono::steady_clock::now() < end) {
  }
}

// Aborts before a step has begun, at many moments of it, which takes a
// millisecond or two, and when it is over.
TEST(CudaTornStepTest, AnUpdateTakesPlaceAsAWholeOrNotAtAll) {
  constexpr int kNumMoments = 30;
  const SteadyClock clock;
  CudaBackend backend;
  const auto make_rank = [&] {
    auto rank = std::make_unique<CudaRank>(CudaSpec(200'000, 128, 100'000),
                                           150'000, kTimeout, clock, backend);
    rank->BringUp();
    return rank;
  };
  const auto whole = make_rank();
  const Outputs before(*whole);
  whole->StartUpdate();
  whole->FinishUpdate();
  whole->caller().Synchronize();
  const Outputs after(*whole);
  ASSERT_FALSE(before == after);

  int num_applied = 0;
  for (int i = 0; i < kNumMoments; ++i) {
    Gate gate;
    const auto rank = make_rank();
    rank->caller().HoldAt(gate);
    rank->StartUpdate();
    rank->FinishUpdate();
    if (i == 0) rank->context().Abort("enough");
    gate.Open();
    if (i == kNumMoments - 1) {
      rank->caller().Synchronize();
    } else {
      SpinUntil(std::chrono::steady_clock::now() +
                i * std::chrono::microseconds(40));
    }
    rank->context().Abort("enough");
    rank->caller().Synchronize();
    const bool applied = rank->valid.Get()[0] == 1;
    num_applied += applied ? 1 : 0;
    EXPECT_TRUE(Outputs(*rank) == (applied ? after : before)) << "moment " << i;
    EXPECT_EQ(applied, !rank->UpdateFailed()) << "moment " << i;
  }
  RecordProperty("num_applied", num_applied);
  EXPECT_GT(num_applied, 0);
  EXPECT_LT(num_applied, kNumMoments);
}

TEST(CudaMappedPoolTest, ABlockThatWasGivenBackIsUsedAgainAndZeroed) {
  const CUcontext context = CudaDeviceScope::ContextOf(0);
  CudaMappedPool pool;
  std::byte* first = nullptr;
  {
    const MappedBlock block(pool, context, 64);
    first = block.get();
    first[63] = std::byte{7};
  }
  const MappedBlock again(pool, context, 64);
  EXPECT_EQ(again.get(), first);
  EXPECT_EQ(again.get()[63], std::byte{0});
}

TEST(CudaMappedPoolTest, BlocksThatAreInUseAndOtherSizesAreNotGivenOut) {
  const CUcontext context = CudaDeviceScope::ContextOf(0);
  CudaMappedPool pool;
  const MappedBlock taken(pool, context, 64);
  const MappedBlock other(pool, context, 64);
  EXPECT_NE(other.get(), taken.get());
  std::byte* small = nullptr;
  {
    const MappedBlock block(pool, context, 32);
    small = block.get();
  }
  const MappedBlock large(pool, context, 128);
  EXPECT_NE(large.get(), small);
}

}  // namespace
}  // namespace xrex::async_emb
