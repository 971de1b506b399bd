// Deadlines of steps, on a clock that the test moves: host waits and the
// watchdog.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "tests/xrex/cuda/async_emb/src/context_group.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

using std::chrono::hours;
using std::chrono::seconds;
using testing::HasSubstr;
using testing::Optional;

constexpr Clock::Duration kTimeout = seconds(10);
constexpr Clock::Duration kTick{1};

class TimeoutTest : public testing::Test {
 protected:
  void MakeGroup(std::int32_t world_size, bool run_watchdog_thread = false) {
    group_ = std::make_unique<ContextGroup>(
        backend_, clock_, SmallSpec(world_size),
        GroupOptions{.timeout = kTimeout,
                     .run_watchdog_thread = run_watchdog_thread,
                     .name = "table"});
    group_->BringUp();
  }

  ContextGroup& group() { return *group_; }
  AsyncEmbContext& context(std::int32_t rank) { return (*group_)[rank]; }

  std::future<Outcome> WaitStepReadyAsync(std::int32_t rank) {
    return AttemptAsync([this, rank] { return context(rank).WaitStepReady(); });
  }

  FakeClock clock_;
  HookedBackend backend_;
  std::unique_ptr<ContextGroup> group_;
};

auto TimedOut(const std::string& label, int step) {
  return Failed(ErrorCode::kTimeout, "async_emb: " + label +
                                         " timed out waiting for step " +
                                         std::to_string(step));
}

// --- host waits ---

TEST_F(TimeoutTest, WaitsReturnZeroWhenNothingWasEverArmed) {
  MakeGroup(1);
  EXPECT_EQ(context(0).WaitStepReady(), 0);
  EXPECT_EQ(context(0).Drain(), 0);
}

TEST_F(TimeoutTest, WaitsReturnTheLatestStep) {
  MakeGroup(1);
  group().StartUpdates();
  EXPECT_EQ(context(0).WaitStepReady(), 0) << "counts lookups";
  EXPECT_EQ(context(0).Drain(), 1);
  for (int step = 1; step <= 3; ++step) {
    group().StartLookups();
    EXPECT_EQ(context(0).WaitStepReady(), step);
    EXPECT_EQ(context(0).Drain(), step);
    group().FinishLookups();
  }
  EXPECT_EQ(context(0).WaitStepReady(), 3) << "of a step that is finished";
  group().FinishUpdates();
}

TEST_F(TimeoutTest, WaitsCoverAStartThatIsBeingEnqueued) {
  MakeGroup(1);
  Gate& gate =
      backend_.HoldAt({.rank = 0, .where = Place::kEnqueue, .exchange = 1});
  auto start = AttemptAsync([&] { group().StartLookup(0); });
  gate.AwaitArrival();
  auto ready = WaitStepReadyAsync(0);
  EXPECT_FALSE(HappensAnyway(
      [&] { return ready.wait_for(seconds(0)) == std::future_status::ready; }));
  gate.Open();
  EXPECT_THAT(ready.get(), Gave(1));
  EXPECT_THAT(start.get(), Succeeded());
  EXPECT_EQ(context(0).Drain(), 1);
}

TEST_F(TimeoutTest, AReadinessWaitTimesOutAtTheDeadline) {
  MakeGroup(2);
  group().StartLookup(0);
  backend_.AwaitStall(0, "rank 1 has not arrived");
  auto ready = WaitStepReadyAsync(0);
  clock_.AwaitReads(1);
  clock_.Advance(kTimeout);
  EXPECT_THAT(ready.get(), TimedOut("readiness", 1));
  const auto aborted = Aborted(
      "lookup step 1 of rank 0 timed out after 10 s: rank 1 has not arrived");
  EXPECT_THAT(Attempt([&] { context(0).Check(); }), aborted);
  EXPECT_THAT(Attempt([&] { context(1).Check(); }), aborted);
}

TEST_F(TimeoutTest, ADrainTimesOutAtTheDeadline) {
  MakeGroup(2);
  group().StartLookups();
  group().StartUpdate(0);
  backend_.AwaitStall(0, "rank 1 has not arrived");
  auto drain = AttemptAsync([&] { return context(0).Drain(); });
  clock_.AwaitReads(1);
  clock_.Advance(kTimeout);
  EXPECT_THAT(drain.get(), TimedOut("drain", 1));
  EXPECT_THAT(Attempt([&] { context(1).Check(); }),
              Aborted("update step 1 of rank 0 timed out after 10 s: rank 1 "
                      "has not arrived"));
}

TEST_F(TimeoutTest, ASnapshotTimesOutAtTheDeadline) {
  MakeGroup(2);
  group().StartLookups();
  group().FinishLookups();
  group().StartLookup(0);
  auto snapshot = AttemptAsync([&] { context(0).Snapshot("lookup_ids"); });
  clock_.AwaitReads(1);
  clock_.Advance(kTimeout);
  EXPECT_THAT(snapshot.get(), TimedOut("test snapshot", 2));
}

TEST_F(TimeoutTest, AWaitGoesOnOneTickBeforeTheDeadline) {
  MakeGroup(2);
  group().StartLookup(0);
  auto ready = WaitStepReadyAsync(0);
  clock_.Advance(kTimeout - kTick);
  clock_.AwaitReads(2);
  EXPECT_EQ(context(0).error(), std::nullopt);
  group().StartLookup(1);
  EXPECT_THAT(ready.get(), Gave(1));
}

TEST_F(TimeoutTest, AWaitThatTheWatchdogsTimeOutWokeSaysThatItTimedOut) {
  MakeGroup(2);
  group().StartLookup(0);
  clock_.OnNextRead([&] {
    clock_.Advance(kTimeout);
    context(0).PollWatchdog();
    context(0).AwaitQuiet(Forever());
  });
  EXPECT_THAT(WaitStepReadyAsync(0).get(), TimedOut("readiness", 1));
}

TEST_F(TimeoutTest, AWaitThatAPeersTimeOutWokeSaysWhoTimedOut) {
  MakeGroup(4);
  group().StartLookup(0);
  clock_.Advance(seconds(5));
  group().StartLookup(1);
  backend_.AwaitStall(0, "ranks 2, 3 have not arrived");
  auto first = WaitStepReadyAsync(0);
  auto second = WaitStepReadyAsync(1);
  clock_.AwaitReads(4);
  clock_.Advance(seconds(5));
  EXPECT_THAT(first.get(), TimedOut("readiness", 1));
  EXPECT_THAT(second.get(),
              Aborted("lookup step 1 of rank 0 timed out after 10 s: ranks 2, "
                      "3 have not arrived"));
}

// The thread that waits is kept from running between its last look at the step
// and its look at the clock; meanwhile the step completes, in time.
TEST_F(TimeoutTest, AStepThatCompletesInTimeIsNotLateForAWait) {
  MakeGroup(1);
  Gate& gate = backend_.HoldAt({.rank = 0, .exchange = 1});
  group().StartLookups();
  clock_.OnNextRead([&] {
    gate.Open();
    context(0).AwaitQuiet(Forever());
    clock_.Advance(2 * kTimeout);
  });
  EXPECT_THAT(WaitStepReadyAsync(0).get(), Gave(1));
  EXPECT_EQ(context(0).error(), std::nullopt);
}

TEST_F(TimeoutTest, AWaitKeepsToItsStepWhenANewerOneIsInFlight) {
  MakeGroup(1);
  Gate& first = backend_.HoldAt({.rank = 0, .exchange = 0});
  Gate& second = backend_.HoldAt({.rank = 0, .exchange = 2});
  group().StartLookups();
  clock_.OnNextRead([&] {
    clock_.Advance(kTimeout - kTick);
    first.Open();
    group().FinishLookup(0);
    group().StartLookup(0);
    clock_.Advance(kTick);
  });
  EXPECT_THAT(WaitStepReadyAsync(0).get(), Gave(1));
  EXPECT_EQ(context(0).error(), std::nullopt);
  second.Open();
  group().FinishLookups();
  EXPECT_TRUE(group().LookupIsRight(0));
}

TEST_F(TimeoutTest, AWaitForAStepThatFailedAndIsFinishedSaysSo) {
  MakeGroup(2);
  group().StartLookup(0);
  clock_.OnNextRead([&] {
    context(0).Abort("enough");
    group().FinishLookup(0);
  });
  EXPECT_THAT(WaitStepReadyAsync(0).get(), Aborted("enough"));
}

// --- watchdog ---

TEST_F(TimeoutTest, TheWatchdogIsQuietOneTickBeforeTheDeadline) {
  MakeGroup(2);
  group().StartUpdate(0);
  clock_.Advance(kTimeout - kTick);
  context(0).PollWatchdog();
  EXPECT_EQ(context(0).error(), std::nullopt);
  group().StartUpdate(1);
  group().FinishUpdates();
  EXPECT_EQ(group().arrays(0).valid, 1);
}

TEST_F(TimeoutTest, TheWatchdogAbortsAtTheDeadline) {
  MakeGroup(2);
  group().StartUpdate(0);
  backend_.AwaitStall(0, "rank 1 has not arrived");
  clock_.Advance(kTimeout);
  context(0).PollWatchdog();
  const std::string reason =
      "update step 1 of rank 0 timed out after 10 s: rank 1 has not arrived";
  EXPECT_THAT(context(0).error(), Optional(reason));
  EXPECT_THAT(context(1).error(), Optional(reason));
  group().StartUpdate(1);
  group().FinishUpdates();
  EXPECT_TRUE(group().UpdateFailed(0));
  EXPECT_TRUE(group().UpdateFailed(1));
  EXPECT_TRUE(group().Untouched(0));
}

TEST_F(TimeoutTest, TheWatchdogCountsFromTheArmingOfEachStep) {
  MakeGroup(1);
  for (int step = 0; step < 3; ++step) {
    Gate& gate = backend_.HoldAt({.rank = 0, .exchange = 2 * step});
    group().StartLookups();
    clock_.Advance(kTimeout - kTick);
    context(0).PollWatchdog();
    gate.Open();
    group().FinishLookups();
    EXPECT_TRUE(group().LookupIsRight(0));
  }
  EXPECT_EQ(context(0).error(), std::nullopt);
}

TEST_F(TimeoutTest, APausedLoopIsNeverAborted) {
  MakeGroup(2);
  group().StartLookups();
  group().StartUpdates();
  context(0).Drain();
  context(1).Drain();
  for (int i = 0; i < 3; ++i) {
    clock_.Advance(hours(24));
    context(0).PollWatchdog();
    context(1).PollWatchdog();
  }
  EXPECT_EQ(context(0).Drain(), 1);
  group().FinishLookups();
  group().FinishUpdates();
  EXPECT_TRUE(group().LookupIsRight(0));
  EXPECT_EQ(group().arrays(1).valid, 1);
}

TEST_F(TimeoutTest, AStepThatCompletesInTimeIsNotLateForTheWatchdog) {
  MakeGroup(1);
  Gate& gate = backend_.HoldAt({.rank = 0, .exchange = 1});
  group().StartLookups();
  clock_.OnNextRead([&] {
    gate.Open();
    context(0).AwaitQuiet(Forever());
    clock_.Advance(kTimeout);
  });
  context(0).PollWatchdog();
  EXPECT_EQ(context(0).error(), std::nullopt);
  group().FinishLookups();
}

// The event of the step before is complete; it must not stand for this one.
TEST_F(TimeoutTest, TheWatchdogWatchesAStartThatIsBeingEnqueued) {
  MakeGroup(1);
  group().StartLookups();
  group().FinishLookups();
  Gate& gate =
      backend_.HoldAt({.rank = 0, .where = Place::kEnqueue, .exchange = 3});
  auto start = AttemptAsync([&] { group().StartLookup(0); });
  gate.AwaitArrival();
  context(0).PollWatchdog();
  clock_.Advance(kTimeout);
  context(0).PollWatchdog();
  EXPECT_THAT(
      context(0).error(),
      Optional(std::string("lookup step 2 of rank 0 timed out after 10 s")));
  gate.Open();
  EXPECT_THAT(start.get(), Succeeded());
  group().FinishLookup(0);
  EXPECT_TRUE(group().LookupIsNan(0));
}

TEST_F(TimeoutTest, TheWatchdogWarnsOnceAndTakesItBack) {
  MakeGroup(2);
  group().StartLookup(0);
  backend_.AwaitStall(0, "rank 1 has not arrived");
  testing::internal::CaptureStderr();
  clock_.Advance(kTimeout / 2);
  context(0).PollWatchdog();
  context(0).PollWatchdog();
  EXPECT_EQ(
      testing::internal::GetCapturedStderr(),
      "[async_emb] warning: context 'table' 7 rank 0: lookup step 1 is in "
      "flight for 5 s: rank 1 has not arrived\n");
  group().StartLookup(1);
  context(0).WaitStepReady();
  clock_.Advance(seconds(1));
  testing::internal::CaptureStderr();
  context(0).PollWatchdog();
  context(0).PollWatchdog();
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "[async_emb] warning: context 'table' 7 rank 0: lookup step 1 has "
            "completed after all, after 6 s\n");
  group().FinishLookups();
}

TEST_F(TimeoutTest, TheWatchdogThreadEndsADoneThatWaits) {
  MakeGroup(2, /*run_watchdog_thread=*/true);
  group().StartLookup(0);
  clock_.Advance(kTimeout);
  group().FinishLookup(0);
  EXPECT_TRUE(group().LookupIsNan(0));
  EXPECT_THAT(context(1).error(), Optional(HasSubstr("timed out after 10 s")));
}

}  // namespace
}  // namespace xrex::async_emb
