#include "phoenix/xrex/cuda/async_emb/src/watchdog.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <ostream>
#include <vector>

#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {

bool operator==(const Watchdog::Finding& a, const Watchdog::Finding& b) {
  return a.kind == b.kind && a.pipeline == b.pipeline && a.step == b.step &&
         a.in_flight == b.in_flight;
}

void PrintTo(const Watchdog::Finding& finding, std::ostream* out) {
  *out << "kind " << static_cast<int>(finding.kind) << " of "
       << PipelineName(finding.pipeline) << " step " << finding.step
       << " after " << finding.in_flight.count() << " ns";
}

namespace {

using std::chrono::seconds;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr seconds kTimeout{10};
constexpr Clock::Duration kTick{1};
constexpr Pipeline kLookup = Pipeline::kLookup;
constexpr Pipeline kUpdate = Pipeline::kUpdate;
using Kind = Watchdog::Kind;

class WatchdogTest : public testing::Test {
 protected:
  std::vector<Watchdog::Finding> Poll() { return watchdog_.Poll(clock_.Now()); }

  FakeClock clock_;
  Watchdog watchdog_{clock_, kTimeout};
};

TEST_F(WatchdogTest, FindsNothingWithNothingArmed) {
  clock_.Advance(2 * kTimeout);
  EXPECT_THAT(Poll(), IsEmpty());
  EXPECT_EQ(watchdog_.deadline(kLookup, 1), std::nullopt);
}

TEST_F(WatchdogTest, IsQuietOneTickBeforeHalfTime) {
  watchdog_.OnArmed(kLookup, 3);
  clock_.Advance(kTimeout / 2 - kTick);
  EXPECT_THAT(Poll(), IsEmpty());
}

TEST_F(WatchdogTest, WarnsAtHalfTime) {
  watchdog_.OnArmed(kLookup, 3);
  clock_.Advance(kTimeout / 2);
  EXPECT_THAT(Poll(), ElementsAre(Watchdog::Finding{Kind::kWarning, kLookup, 3,
                                                    kTimeout / 2}));
}

TEST_F(WatchdogTest, WarnsOnceForAStep) {
  watchdog_.OnArmed(kLookup, 3);
  clock_.Advance(kTimeout / 2);
  Poll();
  clock_.Advance(kTick);
  EXPECT_THAT(Poll(), IsEmpty());
}

TEST_F(WatchdogTest, WarnsAgainForTheNextStep) {
  watchdog_.OnArmed(kLookup, 3);
  clock_.Advance(kTimeout / 2);
  Poll();
  watchdog_.OnEnded(kLookup, 3, 3);
  Poll();
  watchdog_.OnArmed(kLookup, 4);
  clock_.Advance(kTimeout / 2);
  EXPECT_THAT(Poll(), ElementsAre(Watchdog::Finding{Kind::kWarning, kLookup, 4,
                                                    kTimeout / 2}));
}

TEST_F(WatchdogTest, DoesNotExpireOneTickBeforeTheDeadline) {
  watchdog_.OnArmed(kUpdate, 1);
  clock_.Advance(kTimeout - kTick);
  EXPECT_THAT(Poll(), ElementsAre(Watchdog::Finding{Kind::kWarning, kUpdate, 1,
                                                    kTimeout - kTick}));
}

TEST_F(WatchdogTest, ExpiresAtTheDeadline) {
  watchdog_.OnArmed(kUpdate, 1);
  clock_.Advance(kTimeout);
  EXPECT_THAT(Poll(), ElementsAre(Watchdog::Finding{Kind::kExpired, kUpdate, 1,
                                                    kTimeout}));
}

TEST_F(WatchdogTest, ExpiresOnceForAStep) {
  watchdog_.OnArmed(kUpdate, 1);
  clock_.Advance(kTimeout);
  Poll();
  clock_.Advance(kTimeout);
  EXPECT_THAT(Poll(), IsEmpty());
}

TEST_F(WatchdogTest, ExpiresAfterItHasWarned) {
  watchdog_.OnArmed(kUpdate, 1);
  clock_.Advance(kTimeout / 2);
  Poll();
  clock_.Advance(kTimeout / 2);
  EXPECT_THAT(Poll(), ElementsAre(Watchdog::Finding{Kind::kExpired, kUpdate, 1,
                                                    kTimeout}));
}

TEST_F(WatchdogTest, NeverExpiresAStepThatCompletedInTime) {
  watchdog_.OnArmed(kLookup, 1);
  clock_.Advance(kTimeout - kTick);
  watchdog_.OnEnded(kLookup, 1, 1);
  clock_.Advance(kTimeout);
  EXPECT_THAT(Poll(), IsEmpty());
}

TEST_F(WatchdogTest, JudgesByTheTimeItIsGiven) {
  watchdog_.OnArmed(kLookup, 1);
  clock_.Advance(kTimeout - kTick);
  const Clock::TimePoint looked_at = clock_.Now();
  clock_.Advance(kTick);
  EXPECT_THAT(watchdog_.Poll(looked_at),
              ElementsAre(Watchdog::Finding{Kind::kWarning, kLookup, 1,
                                            kTimeout - kTick}));
}

TEST_F(WatchdogTest, TakesAWarningBackWhenTheStepCompletes) {
  watchdog_.OnArmed(kLookup, 8);
  clock_.Advance(kTimeout / 2);
  Poll();
  clock_.Advance(kTick);
  watchdog_.OnEnded(kLookup, 8, 8);
  clock_.Advance(kTick);
  EXPECT_THAT(Poll(), ElementsAre(Watchdog::Finding{Kind::kResolved, kLookup, 8,
                                                    kTimeout / 2 + kTick}));
}

TEST_F(WatchdogTest, TakesAWarningBackOnce) {
  watchdog_.OnArmed(kLookup, 8);
  clock_.Advance(kTimeout / 2);
  Poll();
  watchdog_.OnEnded(kLookup, 8, 8);
  Poll();
  watchdog_.OnEnded(kLookup, 8, 8);
  EXPECT_THAT(Poll(), IsEmpty());
}

TEST_F(WatchdogTest, SaysNothingOfAStepThatCompletedBeforeTheWarning) {
  watchdog_.OnArmed(kLookup, 8);
  clock_.Advance(kTimeout / 2);
  watchdog_.OnEnded(kLookup, 8, 8);
  EXPECT_THAT(Poll(), IsEmpty());
}

TEST_F(WatchdogTest, DoesNotTakeAnExpiryBack) {
  watchdog_.OnArmed(kLookup, 8);
  clock_.Advance(kTimeout / 2);
  Poll();
  clock_.Advance(kTimeout / 2);
  Poll();
  watchdog_.OnEnded(kLookup, 8, 8);
  EXPECT_THAT(Poll(), IsEmpty());
}

TEST_F(WatchdogTest, TakesNoWarningBackForAStepThatFailed) {
  watchdog_.OnArmed(kLookup, 8);
  clock_.Advance(kTimeout / 2);
  Poll();
  watchdog_.OnEnded(kLookup, 8, 7);
  clock_.Advance(kTimeout);
  EXPECT_THAT(Poll(), IsEmpty());
  EXPECT_EQ(watchdog_.deadline(kLookup, 8), std::nullopt);
}

TEST_F(WatchdogTest, CountsEachPipelineFromItsOwnArming) {
  watchdog_.OnArmed(kLookup, 5);
  clock_.Advance(kTimeout / 2);
  watchdog_.OnArmed(kUpdate, 2);
  clock_.Advance(kTimeout / 2);
  EXPECT_THAT(
      Poll(),
      ElementsAre(Watchdog::Finding{Kind::kExpired, kLookup, 5, kTimeout},
                  Watchdog::Finding{Kind::kWarning, kUpdate, 2, kTimeout / 2}));
}

TEST_F(WatchdogTest, KnowsTheDeadlineOfAStepInFlight) {
  const Clock::TimePoint armed_at = clock_.Now();
  watchdog_.OnArmed(kLookup, 1);
  clock_.Advance(seconds(1));
  EXPECT_EQ(watchdog_.deadline(kLookup, 1), armed_at + kTimeout);
  EXPECT_EQ(watchdog_.deadline(kUpdate, 2), std::nullopt);
}

TEST_F(WatchdogTest, HasNoDeadlineForACompletedStep) {
  watchdog_.OnArmed(kLookup, 1);
  watchdog_.OnEnded(kLookup, 1, 1);
  EXPECT_EQ(watchdog_.deadline(kLookup, 1), std::nullopt);
}

TEST_F(WatchdogTest, CountsTheOldestOfSeveralStepsInFlight) {
  watchdog_.OnArmed(kLookup, 1);
  clock_.Advance(kTimeout / 2);
  watchdog_.OnArmed(kLookup, 2);
  EXPECT_THAT(Poll(), ElementsAre(Watchdog::Finding{Kind::kWarning, kLookup, 1,
                                                    kTimeout / 2}));
  watchdog_.OnEnded(kLookup, 1, 1);
  Poll();
  clock_.Advance(kTimeout / 2);
  EXPECT_THAT(Poll(), ElementsAre(Watchdog::Finding{Kind::kWarning, kLookup, 2,
                                                    kTimeout / 2}));
}

TEST_F(WatchdogTest, KnowsTheDeadlineOfEachStepInFlight) {
  const Clock::TimePoint first_armed_at = clock_.Now();
  watchdog_.OnArmed(kLookup, 1);
  clock_.Advance(seconds(1));
  watchdog_.OnArmed(kLookup, 2);
  EXPECT_EQ(watchdog_.deadline(kLookup, 1), first_armed_at + kTimeout);
  EXPECT_EQ(watchdog_.deadline(kLookup, 2),
            first_armed_at + seconds(1) + kTimeout);
}

TEST_F(WatchdogTest, OneReportMayEndSeveralSteps) {
  watchdog_.OnArmed(kLookup, 1);
  watchdog_.OnArmed(kLookup, 2);
  watchdog_.OnArmed(kLookup, 3);
  watchdog_.OnEnded(kLookup, 2, 2);
  EXPECT_EQ(watchdog_.deadline(kLookup, 1), std::nullopt);
  EXPECT_EQ(watchdog_.deadline(kLookup, 2), std::nullopt);
  EXPECT_NE(watchdog_.deadline(kLookup, 3), std::nullopt);
}

TEST_F(WatchdogTest, RearmingStartsTheTimeAnew) {
  watchdog_.OnArmed(kLookup, 1);
  clock_.Advance(kTimeout - kTick);
  watchdog_.OnEnded(kLookup, 1, 1);
  watchdog_.OnArmed(kLookup, 2);
  clock_.Advance(kTimeout / 2 - kTick);
  EXPECT_THAT(Poll(), IsEmpty());
}

}  // namespace
}  // namespace xrex::async_emb
