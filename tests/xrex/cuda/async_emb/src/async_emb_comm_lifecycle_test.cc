// Reset, handshake, destruction, and ranks that leave.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "tests/xrex/cuda/async_emb/src/context_group.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

using std::chrono::seconds;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
constexpr ErrorCode kPrecondition = ErrorCode::kFailedPrecondition;
constexpr ErrorCode kAborted = ErrorCode::kAborted;

class LifecycleTest : public testing::Test {
 protected:
  ContextGroup MakeGroup(std::int32_t world_size,
                         const GroupOptions& options = {}) {
    return ContextGroup(backend_, clock_, SmallSpec(world_size), options);
  }

  FakeClock clock_;
  HookedBackend backend_;
};

Outcome Aborted(const std::string& reason) {
  return {.value = 0,
          .error_code = kAborted,
          .message = "async_emb communicator aborted: " + reason};
}

MATCHER_P(SameAs, expected, "is the same outcome") {
  return arg.error_code == expected.error_code &&
         arg.message == expected.message;
}

// --- reset and handshake ---

TEST_F(LifecycleTest, RejectsABadSpecWhenMade) {
  PipelineSpec spec = SmallSpec(2);
  spec.emb_width = 5;
  EXPECT_THAT(Attempt([&] { ContextGroup group(backend_, clock_, spec); }),
              FailedWith(kInvalid, HasSubstr("emb_width is 5")));
}

TEST_F(LifecycleTest, ResetGivesPayloadsOnRankZeroOnly) {
  ContextGroup group = MakeGroup(4);
  EXPECT_THAT(group[0].Reset(0, 4),
              testing::AllOf(testing::SizeIs(4), Each(Not(IsEmpty()))));
  EXPECT_THAT(group[1].Reset(1, 4),
              testing::AllOf(testing::SizeIs(4), Each(IsEmpty())));
  EXPECT_EQ(group[1].rank(), 1);
  EXPECT_FALSE(group[1].ready());
}

TEST_F(LifecycleTest, ARejectedResetChangesNothing) {
  ContextGroup group = MakeGroup(2);
  group.BringUp();
  EXPECT_THAT(
      Attempt([&] { group[0].Reset(2, 2); }),
      Failed(kInvalid, "async_emb received an invalid rank or world size"));
  EXPECT_THAT(Attempt([&] { group[0].Reset(0, 4); }),
              Failed(kInvalid, "async_emb world size changed from 2 to 4"));
  EXPECT_TRUE(group[0].ready());
  group.StartLookups();
  group.FinishLookups();
  EXPECT_TRUE(group.LookupIsRight(0));
}

TEST_F(LifecycleTest, ResetRefusesAWorldSizeThatIsNoPowerOfTwo) {
  PipelineSpec spec = SmallSpec(3);
  spec.any_world_size = false;
  ContextGroup group(backend_, clock_, spec);
  EXPECT_THAT(Attempt([&] { group[0].Reset(0, 3); }),
              Failed(kInvalid, "async_emb currently requires power-of-two EP"));
}

TEST_F(LifecycleTest, ResetRefusesWhileAStepIsInFlight) {
  ContextGroup group = MakeGroup(1);
  group.BringUp();
  group.StartLookups();
  EXPECT_THAT(Attempt([&] { group[0].Reset(0, 1); }),
              Failed(kPrecondition,
                     "async_emb: reset came while lookup step 1 is in flight: "
                     "call its done first, or abort"));
  group.FinishLookups();
  EXPECT_THAT(Attempt([&] { group[0].Reset(0, 1); }), Succeeded());
}

TEST_F(LifecycleTest, HandshakeRefusesPayloadsThatAreMissing) {
  ContextGroup group = MakeGroup(2);
  const std::string payload = group[0].Reset(0, 2)[0];
  const auto refused = [](int count) {
    return Failed(kInvalid,
                  "async_emb: handshake needs one payload from each of 2 "
                  "ranks, rank 0's not empty; got " +
                      std::to_string(count) +
                      ": pass, for each rank, what its reset returned for this "
                      "rank");
  };
  EXPECT_THAT(Attempt([&] { group[0].Handshake({payload}); }), refused(1));
  EXPECT_THAT(Attempt([&] { group[0].Handshake({}); }), refused(0));
  EXPECT_THAT(Attempt([&] { group[0].Handshake({"", ""}); }), refused(2));
  EXPECT_EQ(group[0].error(), std::nullopt);
}

TEST_F(LifecycleTest, HandshakeRefusesBeforeReset) {
  ContextGroup group = MakeGroup(1);
  EXPECT_THAT(Attempt([&] { group[0].Handshake({"payload"}); }),
              Failed(kPrecondition,
                     "async_emb: handshake came before reset: call reset(rank, "
                     "world_size) first"));
}

TEST_F(LifecycleTest, HandshakeRefusesWhenReady) {
  ContextGroup group = MakeGroup(1);
  group.BringUp();
  EXPECT_THAT(Attempt([&] { group[0].Handshake({"payload"}); }),
              Failed(kPrecondition,
                     "async_emb: handshake came twice: call reset(rank, "
                     "world_size) before another handshake"));
  EXPECT_TRUE(group[0].ready());
}

TEST_F(LifecycleTest, AnUnknownPayloadFailsTheContextForGood) {
  ContextGroup group = MakeGroup(1);
  group[0].Reset(0, 1);
  const Outcome refused = Attempt([&] { group[0].Handshake({"stale"}); });
  EXPECT_THAT(refused, FailedWith(kInvalid, HasSubstr("payload 0 ('stale')")));
  EXPECT_THAT(Attempt([&] { group[0].Reset(0, 1); }),
              SameAs(Aborted("the handshake failed: " + refused.message)));
}

TEST_F(LifecycleTest, HandshakeTimesOutAndNamesWhoIsMissing) {
  ContextGroup group = MakeGroup(2);
  const std::string payload = group[0].Reset(0, 2)[0];
  auto handshake = AttemptAsync([&] { group[0].Handshake({payload, ""}); });
  clock_.AwaitReads(2);
  clock_.Advance(seconds(10));
  EXPECT_THAT(handshake.get(),
              Failed(ErrorCode::kTimeout,
                     "async_emb: handshake timed out: rank 1 has not arrived"));
  EXPECT_THAT(Attempt([&] { group[0].Check(); }),
              SameAs(Aborted("handshake timed out: rank 1 has not arrived")));
}

TEST_F(LifecycleTest, TwoContextsOfOneRankFailTheHandshakeOfTheGroup) {
  ContextGroup group = MakeGroup(2);
  const std::string payload = group[0].Reset(0, 2)[0];
  group[1].Reset(0, 2);
  auto handshake = AttemptAsync([&] { group[0].Handshake({payload, ""}); });
  clock_.AwaitReads(2);
  const std::string text =
      "async_emb: rank 0 is already connected: give each context a rank of its "
      "own";
  EXPECT_THAT(Attempt([&] { group[1].Handshake({payload, ""}); }),
              Failed(kInvalid, text));
  EXPECT_THAT(handshake.get(),
              SameAs(Aborted("the handshake failed: " + text)));
}

TEST_F(LifecycleTest, ResetRefusesWhileTheHandshakeWaits) {
  ContextGroup group = MakeGroup(2);
  const std::string payload = group[0].Reset(0, 2)[0];
  auto handshake = AttemptAsync([&] { group[0].Handshake({payload, ""}); });
  clock_.AwaitReads(2);
  EXPECT_THAT(Attempt([&] { group[0].Reset(0, 2); }),
              Failed(kPrecondition,
                     "async_emb: reset came while a handshake waits for its "
                     "peers: let it end first, or abort"));
  group[1].Reset(1, 2);
  group[1].Handshake({payload, ""});
  EXPECT_THAT(handshake.get(), Succeeded());
}

TEST_F(LifecycleTest, AWholeGroupCanBeResetAndBroughtUpAgain) {
  ContextGroup group = MakeGroup(4);
  for (int round = 1; round <= 3; ++round) {
    group.BringUp();
    group.StartLookups();
    group.FinishLookups();
    group.StartUpdates();
    group.FinishUpdates();
    for (std::int32_t rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(group.arrays(rank).valid, 1);
      EXPECT_EQ(group[rank].error(), std::nullopt);
      EXPECT_EQ(group[rank].stats().steps_done[0], round) << "counters go on";
    }
  }
}

TEST_F(LifecycleTest, ResetForgetsTheTable) {
  ContextGroup group = MakeGroup(1);
  group.BringUp();
  group.StartLookups();
  group.FinishLookups();
  group.BringUp();
  group.arrays(0).table = std::vector<Bf16Bits>(group.arrays(0).table);
  group.StartLookups();
  group.FinishLookups();
  EXPECT_EQ(group[0].stats().table_moved, 0);
}

// --- several groups ---

TEST_F(LifecycleTest, EightRanksComeUpAtOnce) {
  ContextGroup group = MakeGroup(8);
  group.BringUp();
  group.StartLookups();
  group.FinishLookups();
  for (std::int32_t rank = 0; rank < 8; ++rank) {
    EXPECT_TRUE(group[rank].ready());
    EXPECT_EQ(group[rank].rank(), rank);
    EXPECT_TRUE(group.LookupIsRight(rank));
  }
}

TEST_F(LifecycleTest, ReplicaGroupsWorkIndependently) {
  ContextGroup first = MakeGroup(2);
  ContextGroup second = MakeGroup(2, {.first_device_key = 2});
  auto other = AttemptAsync([&] { second.BringUp(); });
  first.BringUp();
  ASSERT_THAT(other.get(), Succeeded());
  first.StartLookups();
  second.StartLookups();
  first.FinishLookups();
  second.FinishLookups();
  first[0].Abort("enough");
  second.StartLookups();
  second.FinishLookups();
  EXPECT_TRUE(second.LookupIsRight(0));
  EXPECT_TRUE(second.LookupIsRight(1));
  EXPECT_EQ(second[0].error(), std::nullopt);
}

// --- destruction ---

TEST_F(LifecycleTest, ADestroyedStepInFlightWakesThePeersAndReturns) {
  ContextGroup group = MakeGroup(2, {.name = "table"});
  group.BringUp();
  group.StartUpdate(0);  // its peer never comes
  group.Destroy(0);
  const auto expected = SameAs(
      Aborted("context 'table' 7 rank 0 was destroyed with a step in flight"));
  EXPECT_THAT(Attempt([&] { group[1].Check(); }), expected);
  group.StartUpdate(1);
  group.FinishUpdate(1);
  EXPECT_TRUE(group.UpdateFailed(1));
  EXPECT_TRUE(group.Untouched(0));
  EXPECT_TRUE(group.Untouched(1));
}

TEST_F(LifecycleTest, DestructionEndsAPeersDoneThatWaits) {
  ContextGroup group = MakeGroup(2);
  group.BringUp();
  Gate& gate = backend_.HoldAt({.rank = 0, .exchange = 1});
  group.StartLookups();
  gate.AwaitArrival();
  auto done = AttemptAsync([&] { group.FinishLookup(1); });
  auto destroyed = AttemptAsync([&] { group.Destroy(0); });
  EXPECT_THAT(done.get(), Succeeded());
  EXPECT_TRUE(group.LookupIsNan(1));
  gate.Open();
  EXPECT_THAT(destroyed.get(), Succeeded());
}

TEST_F(LifecycleTest, ARankThatLeavesIdleDisturbsNobody) {
  ContextGroup group = MakeGroup(4);
  group.BringUp();
  group.StartLookups();
  group.FinishLookups();
  group.Destroy(2);
  for (const std::int32_t rank : {0, 1, 3}) {
    EXPECT_EQ(group[rank].error(), std::nullopt);
    EXPECT_EQ(group[rank].Drain(), 1);
  }
}

TEST_F(LifecycleTest, ARankThatLeavesWithItsStepCompleteSpoilsItForNobody) {
  ContextGroup group = MakeGroup(2);
  group.BringUp();
  group.StartLookups();
  group[0].WaitStepReady();
  group.Destroy(0);
  group.FinishLookup(1);
  EXPECT_TRUE(group.LookupIsRight(1));
}

TEST_F(LifecycleTest, APeerThatNeedsARankThatLeftFailsAndSaysWhy) {
  ContextGroup group = MakeGroup(2);
  group.BringUp();
  group.Destroy(1);
  group.StartLookup(0);
  group.FinishLookup(0);
  EXPECT_TRUE(group.LookupIsNan(0));
  EXPECT_THAT(Attempt([&] { group[0].Check(); }),
              SameAs(Aborted("rank 1 has closed its context")));
}

TEST_F(LifecycleTest, AResetRankCountsAsOneThatLeft) {
  ContextGroup group = MakeGroup(2);
  group.BringUp();
  group.StartLookup(0);
  group[1].Reset(1, 2);
  group.FinishLookup(0);
  EXPECT_TRUE(group.LookupIsNan(0));
  EXPECT_THAT(Attempt([&] { group[0].Check(); }),
              SameAs(Aborted("rank 1 has closed its context")));
  EXPECT_EQ(group[1].error(), std::nullopt);
}

TEST_F(LifecycleTest, DestructionFreesTheArenasOfTheGroup) {
  {
    ContextGroup group = MakeGroup(2);
    group.BringUp();
    group.StartLookups();
    group.FinishLookups();
    EXPECT_EQ(backend_.num_live_arenas(), 2);
  }
  EXPECT_EQ(backend_.num_live_arenas(), 0);
}

TEST_F(LifecycleTest, AFailedGroupIsReplacedInTheSameProcess) {
  {
    ContextGroup group = MakeGroup(2);
    group.BringUp();
    group.StartLookup(0);
    group[1].Abort("enough");
    group.FinishLookup(0);
    EXPECT_TRUE(group.LookupIsNan(0));
  }
  ContextGroup other_size = MakeGroup(4);
  other_size.BringUp();
  other_size.StartLookups();
  other_size.FinishLookups();
  for (std::int32_t rank = 0; rank < 4; ++rank)
    EXPECT_TRUE(other_size.LookupIsRight(rank));
}

// What a poll found out about a communicator that was closed meanwhile.
TEST_F(LifecycleTest, AResetContextTakesNoErrorOverFromItsOldCommunicator) {
  ContextGroup group = MakeGroup(1);
  group.BringUp();
  bool once = false;
  backend_.SetPoll(0, [&]() -> std::optional<std::string> {
    if (std::exchange(once, true)) return std::nullopt;
    group[0].Reset(0, 1);
    return "too late";
  });
  group[0].PollWatchdog();
  EXPECT_EQ(group[0].error(), std::nullopt);
  group.BringUp();
  EXPECT_TRUE(group[0].ready());
}

}  // namespace
}  // namespace xrex::async_emb
