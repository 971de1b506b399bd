// The context on a GPU: steps that the host runs ahead of, and failures in the
// middle of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "phoenix/xrex/cuda/async_emb/src/cuda_backend.hpp"
#include "tests/xrex/cuda/async_emb/src/cuda_context_test_fixture.hpp"
#include "tests/xrex/cuda/async_emb/src/cuda_context_test_utils.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

using std::chrono::seconds;
using testing::AllOf;
using testing::ElementsAre;
using testing::Gt;
using testing::HasSubstr;

TEST_F(CudaContextTest, ALookupGivesTheRows) {
  EXPECT_EQ(rank_.StartLookup(), 1);
  rank_.FinishLookup();
  rank_.caller().Synchronize();
  EXPECT_TRUE(rank_.LookupIsRight());
  EXPECT_THAT(Attempt([&] { context().Check(); }), Succeeded());
}

TEST_F(CudaContextTest, AnUpdateChangesTheTable) {
  const std::vector<Bf16Bits> before = rank_.table.Get();
  rank_.StartUpdate();
  rank_.FinishUpdate();
  rank_.caller().Synchronize();
  EXPECT_EQ(rank_.valid.Get()[0], 1);
  EXPECT_GT(rank_.norm.Get()[0], 0.0F);
  EXPECT_NE(rank_.table.Get(), before);
}

TEST_F(CudaContextTest, TheHostRunsAheadOfTheDevice) {
  rank_.caller().HoldAt(gate_);
  for (std::int64_t step = 1; step <= 5; ++step) {
    EXPECT_EQ(rank_.StartLookup(), step);
    rank_.FinishLookup();
    EXPECT_EQ(rank_.StartUpdate(), step);
    rank_.FinishUpdate();
  }
  EXPECT_EQ(context().stats().steps_armed[0], 5);
  EXPECT_EQ(context().stats().steps_done[0], 0);
  gate_.Open();
  rank_.caller().Synchronize();
  EXPECT_EQ(context().Drain(), 5);
  EXPECT_EQ(context().stats().steps_done[0], 5);
  EXPECT_EQ(context().stats().steps_done[1], 5);
}

TEST_F(CudaContextTest, AWaitReturnsWhenItsStepIsThere) {
  rank_.caller().HoldAt(gate_);
  rank_.StartLookup();
  auto waiting = AttemptAsync([&] { return context().WaitStepReady(); });
  EXPECT_FALSE(HappensAnyway([&] { return IsReady(waiting); }));
  gate_.Open();
  EXPECT_THAT(waiting.get(), Gave(1));
  rank_.FinishLookup();
  rank_.caller().Synchronize();
}

TEST_F(CudaContextTest, ALookupThatIsConsumedLateHoldsNothingUp) {
  rank_.StartLookup();
  EXPECT_EQ(context().WaitStepReady(), 1);
  rank_.FinishLookup();
  rank_.caller().Synchronize();
  EXPECT_THAT(context().stats().wait_secs, ElementsAre(0.0, 0.0));
}

TEST_F(CudaContextTest, TheDoneOfAStepThatWasNotArmedHoldsNothingUp) {
  context().Abort("enough");
  for (int i = 0; i < 3; ++i) {
    rank_.StartLookup();
    rank_.FinishLookup();
    rank_.StartUpdate();
    rank_.FinishUpdate();
  }
  rank_.caller().Synchronize();
  EXPECT_THAT(context().stats().wait_secs, ElementsAre(0.0, 0.0));
}

TEST_F(CudaContextTest, AnAbortedLookupGivesNan) {
  rank_.caller().HoldAt(gate_);
  rank_.StartLookup();
  rank_.FinishLookup();
  context().Abort("enough");
  gate_.Open();
  rank_.caller().Synchronize();
  EXPECT_TRUE(rank_.LookupIsNan());
  EXPECT_THAT(Attempt([&] { context().Check(); }), Aborted("enough"));
  EXPECT_EQ(context().stats().steps_done[0], 0);
}

TEST_F(CudaContextTest, AnAbortedUpdateChangesNothing) {
  const std::vector<Bf16Bits> table = rank_.table.Get();
  const std::vector<float> row_state = rank_.row_state.Get();
  rank_.caller().HoldAt(gate_);
  rank_.StartUpdate();
  rank_.FinishUpdate();
  context().Abort("enough");
  gate_.Open();
  rank_.caller().Synchronize();
  EXPECT_TRUE(rank_.UpdateFailed());
  EXPECT_EQ(rank_.table.Get(), table);
  EXPECT_EQ(rank_.row_state.Get(), row_state);
}

TEST_F(CudaContextTest, AStepAfterAnAbortGivesNanAndDoesNotWait) {
  context().Abort("enough");
  EXPECT_EQ(rank_.StartLookup(), 0);
  rank_.FinishLookup();
  EXPECT_EQ(rank_.StartUpdate(), 0);
  rank_.FinishUpdate();
  rank_.caller().Synchronize();
  EXPECT_TRUE(rank_.LookupIsNan());
  EXPECT_TRUE(rank_.UpdateFailed());
}

TEST_F(CudaContextTest, AGoodStepStaysGoodWhenItIsTakenOverAfterAnAbort) {
  rank_.StartLookup();
  EXPECT_EQ(context().WaitStepReady(), 1);
  context().Abort("enough");
  rank_.FinishLookup();
  rank_.caller().Synchronize();
  EXPECT_TRUE(rank_.LookupIsRight());
}

TEST_F(CudaContextTest, AnAbortWakesAWaitWhoseStreamIsStuck) {
  rank_.caller().HoldAt(gate_);
  rank_.StartLookup();
  auto waiting = AttemptAsync([&] { return context().WaitStepReady(); });
  context().Abort("enough");
  EXPECT_THAT(waiting.get(), Aborted("enough"));  // before the gate is open
  gate_.Open();
  rank_.FinishLookup();
  rank_.caller().Synchronize();
}

TEST_F(CudaContextTest, AStepThatIsHeldUpTimesOut) {
  rank_.caller().HoldAt(gate_);
  rank_.StartUpdate();
  rank_.FinishUpdate();
  clock_.Advance(kTimeout);
  context().PollWatchdog();
  EXPECT_THAT(Attempt([&] { context().Check(); }),
              Aborted("update step 1 of rank 0 timed out after 10 s"));
  EXPECT_THAT(Attempt([&] { return context().Drain(); }),
              FailedWith(ErrorCode::kAborted, HasSubstr("timed out")));
  gate_.Open();
  rank_.caller().Synchronize();
  EXPECT_TRUE(rank_.UpdateFailed());
}

TEST_F(CudaContextTest, AWaitEndsAtTheDeadlineOfItsStep) {
  rank_.caller().HoldAt(gate_);
  rank_.StartLookup();
  auto waiting = AttemptAsync([&] { return context().WaitStepReady(); });
  clock_.AwaitReads(3);
  clock_.Advance(kTimeout);
  EXPECT_THAT(waiting.get(),
              Failed(ErrorCode::kTimeout,
                     "async_emb: readiness timed out waiting for step 1"));
  gate_.Open();
  rank_.FinishLookup();
  rank_.caller().Synchronize();
}

TEST_F(CudaContextTest, APausedLoopIsNotAborted) {
  rank_.StartLookup();
  EXPECT_EQ(context().WaitStepReady(), 1);
  clock_.Advance(2 * kTimeout);
  context().PollWatchdog();
  rank_.FinishLookup();
  rank_.caller().Synchronize();
  EXPECT_TRUE(rank_.LookupIsRight());
}

TEST_F(CudaContextTest, AProgramOfAnotherRankIsFoundOut) {
  const std::vector<Bf16Bits> table = rank_.table.Get();
  rank_.program_rank.Set({1});
  rank_.StartUpdate();
  rank_.FinishUpdate();
  rank_.caller().Synchronize();
  EXPECT_TRUE(rank_.UpdateFailed());
  EXPECT_EQ(rank_.table.Get(), table);
  EXPECT_THAT(Attempt([&] { context().Check(); }),
              FailedWith(ErrorCode::kAborted,
                         HasSubstr("takes itself for another rank")));
}

TEST_F(CudaContextTest, ASnapshotShowsTheSegments) {
  rank_.StartUpdate();
  rank_.FinishUpdate();
  const std::string bytes = context().Snapshot("update_indices");
  const std::vector<std::int32_t> segments = rank_.segment_ids.Get();
  EXPECT_EQ(bytes, std::string(reinterpret_cast<const char*>(segments.data()),
                               segments.size() * sizeof(std::int32_t)));
  rank_.caller().Synchronize();
}

TEST_F(CudaContextTest, TheFirstStepAllocatesNothing) {
  const std::size_t before = FreeDeviceMemory();
  rank_.StartLookup();
  rank_.FinishLookup();
  rank_.StartUpdate();
  rank_.FinishUpdate();
  EXPECT_EQ(FreeDeviceMemory(), before);
}

TEST_F(CudaContextTest, RefusesAPayloadThatIsNoUniqueId) {
  context().Reset(0, 1);
  EXPECT_THAT(Attempt([&] { context().Handshake({"short"}); }),
              FailedWith(ErrorCode::kInvalidArgument,
                         AllOf(HasSubstr("payload 0 has 5 bytes"),
                               HasSubstr("reset of rank 0"))));
}

// Steps of a millisecond or two, whose done calls are on the stream before they
// begin.
class CudaWaitTest : public testing::Test {
 protected:
  CudaWaitTest()
      : rank_(CudaSpec(200'000, 128, 100'000), 150'000, kTimeout, clock_,
              backend_) {}

  void SetUp() override { rank_.BringUp(); }

  AsyncEmbContext& context() { return rank_.context(); }

  SteadyClock clock_;
  CudaBackend backend_;
  Gate gate_;  // outlives what passes it
  CudaRank rank_;
};

TEST_F(CudaWaitTest, ALookupThatIsConsumedAtOnceHoldsItsCallerUp) {
  rank_.caller().HoldAt(gate_);
  rank_.StartLookup();
  rank_.FinishLookup();
  gate_.Open();
  rank_.caller().Synchronize();
  EXPECT_THAT(context().stats().wait_secs, ElementsAre(Gt(0.0), 0.0));
}

TEST_F(CudaWaitTest, AnUpdateThatIsConsumedAtOnceHoldsItsCallerUp) {
  rank_.caller().HoldAt(gate_);
  rank_.StartUpdate();
  rank_.FinishUpdate();
  gate_.Open();
  rank_.caller().Synchronize();
  EXPECT_THAT(context().stats().wait_secs, ElementsAre(0.0, Gt(0.0)));
}

TEST_F(CudaWaitTest, EveryWaitAddsLessThanTheHostSees) {
  double last = 0.0;
  for (int i = 0; i < 5; ++i) {
    const Clock::TimePoint began = clock_.Now();
    rank_.StartUpdate();
    rank_.FinishUpdate();
    rank_.caller().Synchronize();
    const std::chrono::duration<double> seen = clock_.Now() - began;
    const double waited = context().stats().wait_secs[1];
    EXPECT_GE(waited, last);
    EXPECT_LE(waited - last, seen.count());
    last = waited;
  }
  EXPECT_GT(last, 0.0);
}

TEST(CudaBackendTest, RefusesADeviceThatIsNotThere) {
  CudaBackend backend;
  EXPECT_THAT(
      Attempt([&] { backend.NewDevice(99); }),
      FailedWith(ErrorCode::kInvalidArgument, HasSubstr("device_key is 99")));
}

TEST(CudaBackendTest, RefusesATransportThatItDoesNotHave) {
  const CudaBackend backend;
  EXPECT_THAT(Attempt([&] {
                static_cast<void>(backend.ResolveTransport(Transport::kLsa));
              }),
              FailedWith(ErrorCode::kInvalidArgument, HasSubstr("'lsa'")));
  EXPECT_EQ(backend.ResolveTransport(Transport::kNccl), "NCCL");
  EXPECT_EQ(backend.ResolveTransport(Transport::kAuto), "NCCL");
}

}  // namespace
}  // namespace xrex::async_emb
