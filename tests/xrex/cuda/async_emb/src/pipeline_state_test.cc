#include "phoenix/xrex/cuda/async_emb/src/pipeline_state.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
constexpr ErrorCode kPrecondition = ErrorCode::kFailedPrecondition;
constexpr int kTableA = 0;
constexpr int kTableB = 0;

PipelineState MakeReset() {
  PipelineState state(4, false);
  state.Reset(1, 4);
  return state;
}

PipelineState MakeReady() {
  PipelineState state = MakeReset();
  state.BeginHandshake();
  state.EndHandshake();
  return state;
}

std::int64_t Start(PipelineState& state, Pipeline pipeline) {
  state.RequireStart(pipeline);
  const std::int64_t step = state.Arm(pipeline);
  state.SetEnqueued(pipeline);
  return step;
}

void Finish(PipelineState& state, Pipeline pipeline) {
  state.BeginFinish(pipeline);
  state.EndFinish(pipeline);
}

// All that can be seen of a state.
struct View {
  bool ready;
  std::int32_t rank;
  std::vector<Phase> phases;
  std::vector<std::int64_t> counts;
  const void* table;

  bool operator==(const View&) const = default;
};

View Look(const PipelineState& state) {
  View view{.ready = state.ready(),
            .rank = state.rank(),
            .phases = {},
            .counts = {state.table_moved()},
            .table = state.table()};
  for (const Pipeline pipeline : {Pipeline::kLookup, Pipeline::kUpdate}) {
    view.phases.push_back(state.phase(pipeline));
    view.counts.push_back(state.armed(pipeline));
    view.counts.push_back(state.finished(pipeline));
  }
  return view;
}

// What `call` says when it is refused. That it changed nothing is checked here.
template <typename Call>
Outcome Refused(PipelineState& state, const Call& call) {
  const View before = Look(state);
  const Outcome outcome = Attempt([&] { call(state); });
  EXPECT_TRUE(outcome.error_code.has_value());
  EXPECT_EQ(Look(state), before);
  return outcome;
}

Outcome RefusedReset(PipelineState& state, std::int32_t rank,
                     std::int32_t world_size) {
  return Refused(state, [&](PipelineState& s) { s.Reset(rank, world_size); });
}

// --- reset ---

TEST(PipelineStateReset, GivesTheRank) {
  PipelineState state(4, false);
  state.Reset(2, 4);
  EXPECT_EQ(state.rank(), 2);
  EXPECT_FALSE(state.ready());
}

TEST(PipelineStateReset, RefusesRanksAndWorldSizesOutOfRange) {
  PipelineState state(4, false);
  const auto expected =
      Failed(kInvalid, "async_emb received an invalid rank or world size");
  EXPECT_THAT(RefusedReset(state, -1, 4), expected);
  EXPECT_THAT(RefusedReset(state, 4, 4), expected);
  EXPECT_THAT(RefusedReset(state, 0, 0), expected);
  EXPECT_THAT(RefusedReset(state, 0, -4), expected);
}

TEST(PipelineStateReset, RefusesAnotherWorldSize) {
  PipelineState state(4, false);
  EXPECT_THAT(RefusedReset(state, 0, 8),
              Failed(kInvalid, "async_emb world size changed from 4 to 8"));
}

TEST(PipelineStateReset, RefusesAWorldSizeThatIsNoPowerOfTwo) {
  PipelineState state(6, false);
  EXPECT_THAT(RefusedReset(state, 0, 6),
              Failed(kInvalid, "async_emb currently requires power-of-two EP"));
}

TEST(PipelineStateReset, TakesAnyWorldSizeWhenTheOptionLiftsTheRule) {
  PipelineState state(6, true);
  state.Reset(5, 6);
  EXPECT_EQ(state.rank(), 5);
}

TEST(PipelineStateReset, ChecksTheRankBeforeTheChangeOfWorldSize) {
  PipelineState state(4, false);
  EXPECT_THAT(
      RefusedReset(state, 8, 8),
      Failed(kInvalid, "async_emb received an invalid rank or world size"));
}

TEST(PipelineStateReset, ChecksTheChangeOfWorldSizeBeforeThePowerOfTwo) {
  PipelineState state(4, false);
  EXPECT_THAT(RefusedReset(state, 0, 3),
              Failed(kInvalid, "async_emb world size changed from 4 to 3"));
}

TEST(PipelineStateReset, ChecksTheArgumentsBeforeTheStepsInFlight) {
  PipelineState state = MakeReady();
  Start(state, Pipeline::kLookup);
  EXPECT_THAT(
      RefusedReset(state, 9, 4),
      Failed(kInvalid, "async_emb received an invalid rank or world size"));
}

TEST(PipelineStateReset, RefusesWhileALookupIsInFlight) {
  PipelineState state = MakeReady();
  Start(state, Pipeline::kLookup);
  EXPECT_THAT(RefusedReset(state, 1, 4),
              Failed(kPrecondition,
                     "async_emb: reset came while lookup step 1 is in flight: "
                     "call its done first, or abort"));
}

TEST(PipelineStateReset, RefusesWhileAnUpdateIsInFlight) {
  PipelineState state = MakeReady();
  Start(state, Pipeline::kUpdate);
  Finish(state, Pipeline::kUpdate);
  Start(state, Pipeline::kUpdate);
  EXPECT_THAT(RefusedReset(state, 1, 4),
              Failed(kPrecondition,
                     "async_emb: reset came while update step 2 is in flight: "
                     "call its done first, or abort"));
}

TEST(PipelineStateReset, RefusesWhileAHandshakeWaits) {
  PipelineState state = MakeReset();
  state.BeginHandshake();
  EXPECT_THAT(RefusedReset(state, 1, 4),
              Failed(kPrecondition,
                     "async_emb: reset came while a handshake waits for its "
                     "peers: let it end first, or abort"));
}

TEST(PipelineStateReset, TakesAnIdleReadyContextBackAndForgetsTheTable) {
  PipelineState state = MakeReady();
  state.BindTable(&kTableA);
  Start(state, Pipeline::kLookup);
  Finish(state, Pipeline::kLookup);
  state.Reset(3, 4);
  EXPECT_FALSE(state.ready());
  EXPECT_EQ(state.rank(), 3);
  EXPECT_EQ(state.table(), nullptr);
  EXPECT_EQ(state.armed(Pipeline::kLookup), 1) << "counters go on";
}

// --- handshake ---

TEST(PipelineStateHandshake, MakesAResetContextReady) {
  PipelineState state = MakeReset();
  state.BeginHandshake();
  EXPECT_FALSE(state.ready());
  state.EndHandshake();
  EXPECT_TRUE(state.ready());
}

TEST(PipelineStateHandshake, RefusesBeforeReset) {
  PipelineState state(4, false);
  EXPECT_THAT(Refused(state, [](PipelineState& s) { s.BeginHandshake(); }),
              Failed(kPrecondition,
                     "async_emb: handshake came before reset: call reset(rank, "
                     "world_size) first"));
}

TEST(PipelineStateHandshake, RefusesASecondOneWhileTheFirstWaitsAndAfterIt) {
  const auto expected =
      Failed(kPrecondition,
             "async_emb: handshake came twice: call reset(rank, world_size) "
             "before another handshake");
  PipelineState state = MakeReset();
  state.BeginHandshake();
  EXPECT_THAT(Refused(state, [](PipelineState& s) { s.BeginHandshake(); }),
              expected);
  state.EndHandshake();
  EXPECT_THAT(Refused(state, [](PipelineState& s) { s.BeginHandshake(); }),
              expected);
}

// --- start and done, each rule for both pipelines ---

class PipelineStateStep : public testing::TestWithParam<Pipeline> {
 protected:
  // "lookup_start" or "update_start".
  static std::string StartName() {
    return PipelineName(GetParam()) + std::string("_start");
  }
  static std::string DoneName() {
    return PipelineName(GetParam()) + std::string("_done");
  }
  static Outcome RefusedStart(PipelineState& state) {
    return Refused(state, [](PipelineState& s) { s.RequireStart(GetParam()); });
  }
  static Outcome RefusedDone(PipelineState& state) {
    return Refused(state, [](PipelineState& s) { s.BeginFinish(GetParam()); });
  }
};

INSTANTIATE_TEST_SUITE_P(Both, PipelineStateStep,
                         testing::Values(Pipeline::kLookup, Pipeline::kUpdate),
                         [](const auto& test) {
                           return std::string(PipelineName(test.param));
                         });

TEST_P(PipelineStateStep, GoesThroughItsPhasesAndCounts) {
  PipelineState state = MakeReady();
  state.RequireStart(GetParam());
  EXPECT_EQ(state.Arm(GetParam()), 1);
  EXPECT_EQ(state.phase(GetParam()), Phase::kArming);
  state.SetEnqueued(GetParam());
  EXPECT_EQ(state.phase(GetParam()), Phase::kInFlight);
  state.BeginFinish(GetParam());
  EXPECT_EQ(state.phase(GetParam()), Phase::kFinishing);
  EXPECT_EQ(state.finished(GetParam()), 0);
  state.EndFinish(GetParam());
  EXPECT_EQ(state.phase(GetParam()), Phase::kIdle);
  EXPECT_EQ(state.finished(GetParam()), 1);
  EXPECT_EQ(Start(state, GetParam()), 2);
}

TEST_P(PipelineStateStep, LeavesTheOtherPipelineAlone) {
  PipelineState state = MakeReady();
  const Pipeline other =
      GetParam() == Pipeline::kLookup ? Pipeline::kUpdate : Pipeline::kLookup;
  Start(state, GetParam());
  EXPECT_EQ(state.phase(other), Phase::kIdle);
  EXPECT_EQ(Start(state, other), 1);
  Finish(state, other);
  Finish(state, GetParam());
  EXPECT_TRUE(state.idle());
}

TEST_P(PipelineStateStep, RefusesAStartBeforeTheContextIsReady) {
  PipelineState state = MakeReset();
  EXPECT_THAT(
      RefusedStart(state),
      Failed(kPrecondition, "async_emb: " + StartName() +
                                " came before the context was ready: call "
                                "initialize(ctx) first"));
}

TEST_P(PipelineStateStep, RefusesADoneBeforeTheContextIsReady) {
  PipelineState state = MakeReset();
  EXPECT_THAT(
      RefusedDone(state),
      Failed(kPrecondition, "async_emb: " + DoneName() +
                                " came before the context was ready: call "
                                "initialize(ctx) first"));
}

TEST_P(PipelineStateStep, RefusesASecondStartBeforeTheDoneHasEnded) {
  const auto expected =
      Failed(kPrecondition, "async_emb: " + StartName() + " came before the " +
                                DoneName() + " of step 1: call " + DoneName() +
                                " first");
  PipelineState state = MakeReady();
  Start(state, GetParam());
  EXPECT_THAT(RefusedStart(state), expected);
  state.BeginFinish(GetParam());
  EXPECT_THAT(RefusedStart(state), expected);
}

TEST_P(PipelineStateStep, RefusesADoneWithNothingArmed) {
  PipelineState state = MakeReady();
  EXPECT_THAT(RefusedDone(state),
              Failed(kPrecondition, "async_emb: " + DoneName() +
                                        " came with no step armed (0 were "
                                        "armed and finished): call " +
                                        StartName() + " first"));
}

TEST_P(PipelineStateStep, RefusesASecondDoneOfAStep) {
  PipelineState state = MakeReady();
  Start(state, GetParam());
  Finish(state, GetParam());
  EXPECT_THAT(RefusedDone(state),
              Failed(kPrecondition, "async_emb: " + DoneName() +
                                        " came with no step armed (1 were "
                                        "armed and finished): call " +
                                        StartName() + " first"));
}

TEST_P(PipelineStateStep, RefusesADoneDuringTheStart) {
  PipelineState state = MakeReady();
  state.Arm(GetParam());
  EXPECT_THAT(RefusedDone(state),
              Failed(kPrecondition, "async_emb: " + DoneName() +
                                        " came before the " + StartName() +
                                        " of step 1 had returned: chain the "
                                        "calls by data"));
}

TEST_P(PipelineStateStep, RefusesADoneDuringAnotherDone) {
  PipelineState state = MakeReady();
  Start(state, GetParam());
  state.BeginFinish(GetParam());
  EXPECT_THAT(RefusedDone(state),
              Failed(kPrecondition, "async_emb: " + DoneName() +
                                        " came twice for step 1: call " +
                                        StartName() + " in between"));
}

// --- table binding ---

TEST(PipelineStateTable, TakesTheFirstTableWithoutCounting) {
  PipelineState state = MakeReady();
  EXPECT_EQ(state.BindTable(&kTableA), TableBinding::kKept);
  EXPECT_EQ(state.table(), &kTableA);
  EXPECT_EQ(state.table_moved(), 0);
}

TEST(PipelineStateTable, RebindsAndCountsWhileIdle) {
  PipelineState state = MakeReady();
  state.BindTable(&kTableA);
  EXPECT_EQ(state.BindTable(&kTableB), TableBinding::kRebound);
  EXPECT_EQ(state.table(), &kTableB);
  EXPECT_EQ(state.table_moved(), 1);
}

TEST(PipelineStateTable, KeepsTheSameTableWhileSomethingIsInFlight) {
  PipelineState state = MakeReady();
  state.BindTable(&kTableA);
  Start(state, Pipeline::kLookup);
  EXPECT_EQ(state.BindTable(&kTableA), TableBinding::kKept);
}

TEST(PipelineStateTable, ReportsAMoveWhileALookupIsInFlight) {
  PipelineState state = MakeReady();
  state.BindTable(&kTableA);
  Start(state, Pipeline::kLookup);
  EXPECT_EQ(state.BindTable(&kTableB), TableBinding::kMoved);
  EXPECT_EQ(state.table(), &kTableA);
  EXPECT_EQ(state.table_moved(), 0);
}

TEST(PipelineStateTable, ReportsAMoveWhileAnUpdateIsInFlight) {
  PipelineState state = MakeReady();
  state.BindTable(&kTableA);
  Start(state, Pipeline::kUpdate);
  EXPECT_EQ(state.BindTable(&kTableB), TableBinding::kMoved);
  EXPECT_EQ(state.table(), &kTableA);
}

TEST(PipelineStateTable, ForgetsTheTableWhileIdle) {
  PipelineState state = MakeReady();
  state.BindTable(&kTableA);
  state.ResetTableBinding();
  EXPECT_EQ(state.BindTable(&kTableB), TableBinding::kKept);
  EXPECT_EQ(state.table_moved(), 0);
}

TEST(PipelineStateTable, RefusesToForgetWhileAStepIsInFlight) {
  PipelineState state = MakeReady();
  state.BindTable(&kTableA);
  Start(state, Pipeline::kUpdate);
  EXPECT_THAT(Refused(state, [](PipelineState& s) { s.ResetTableBinding(); }),
              Failed(kPrecondition,
                     "async_emb: reset_table_binding came while update step 1 "
                     "is in flight: call its done first"));
}

}  // namespace
}  // namespace xrex::async_emb
