// Independent groups, closing and destruction, and ranks that leave.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "tests/xrex/cuda/async_emb/src/context_group.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

class LifecycleTest : public testing::Test {
 protected:
  ContextGroup MakeGroup(std::int32_t world_size,
                         const GroupOptions& options = {}) {
    return ContextGroup(backend_, clock_, SmallSpec(world_size), options);
  }

  FakeClock clock_;
  HookedBackend backend_;
};

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
  const auto expected =
      Aborted("context 'table' 7 rank 0 was destroyed with a step in flight");
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

TEST_F(LifecycleTest, AClosedContextRefusesHostCallsAndPassesStepsThrough) {
  ContextGroup group = MakeGroup(1);
  group.BringUp();
  group[0].Close(Forever());
  group[0].Close(Forever());
  const auto closed = Aborted("context 7 rank 0 is closed");
  EXPECT_THAT(Attempt([&] { group[0].Drain(); }), closed);
  EXPECT_THAT(Attempt([&] { group[0].Reset(0, 1); }), closed);
  group.StartUpdates();
  group.FinishUpdates();
  EXPECT_TRUE(group.UpdateFailed(0));
  EXPECT_TRUE(group.Untouched(0));
}

// Somebody may hold it for long: peers must not wait for that.
TEST_F(LifecycleTest, AClosedContextCountsAsOneThatLeft) {
  ContextGroup group = MakeGroup(2);
  group.BringUp();
  group[1].Close(Forever());
  EXPECT_EQ(group[0].error(), std::nullopt);
  group.StartLookup(0);
  group.FinishLookup(0);
  EXPECT_TRUE(group.LookupIsNan(0));
  EXPECT_THAT(Attempt([&] { group[0].Check(); }),
              Aborted("rank 1 has closed its context"));
}

// The start has enqueued an exchange that waits for a peer, but no event of it
// yet.
TEST_F(LifecycleTest, CloseEndsAStartThatIsBeingEnqueued) {
  ContextGroup group = MakeGroup(2);
  group.BringUp();
  Gate& gate =
      backend_.HoldAt({.rank = 0, .where = Place::kEnqueue, .exchange = 1});
  auto start = AttemptAsync([&] { group.StartLookup(0); });
  gate.AwaitArrival();
  auto close = AttemptAsync([&] { group[0].Close(Forever()); });
  EXPECT_FALSE(HappensAnyway([&] { return group[0].error().has_value(); }));
  gate.Open();
  EXPECT_THAT(start.get(), Succeeded());
  EXPECT_THAT(close.get(), Succeeded());
  group.FinishLookup(0);
  EXPECT_TRUE(group.LookupIsNan(0));
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
              Aborted("rank 1 has closed its context"));
}

TEST_F(LifecycleTest, AResetRankCountsAsOneThatLeft) {
  ContextGroup group = MakeGroup(2);
  group.BringUp();
  group.StartLookup(0);
  group[1].Reset(1, 2);
  group.FinishLookup(0);
  EXPECT_TRUE(group.LookupIsNan(0));
  EXPECT_THAT(Attempt([&] { group[0].Check(); }),
              Aborted("rank 1 has closed its context"));
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
