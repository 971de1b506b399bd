// The CUDA kernels that keep the words of a step: ranks, ends, waits, results.
// Needs a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel.hpp"
#include "phoenix/xrex/cuda/async_emb/src/device.hpp"
#include "tests/xrex/cuda/async_emb/src/kernel_cuda_test_utils.hpp"

namespace xrex::async_emb::cuda_kernels {
namespace {

constexpr Bf16Bits kUnwritten = 0x5A5A;

TEST(LoadKernelsTest, FindsAllOfThem) { EXPECT_NO_THROW(LoadKernels()); }

TEST(CheckRankTest, TheExpectedRankFailsNothing) {
  TestGuard guard(Pipeline::kLookup);
  const DeviceArray<std::int32_t> came(1, 3);
  const TestStream stream;
  CheckRank(stream.get(), guard.view(), came.data(), 3);
  stream.Sync();
  EXPECT_EQ(guard.failure(), StepFailure::kNone);
}

TEST(CheckRankTest, AnotherRankFailsTheStep) {
  TestGuard guard(Pipeline::kLookup);
  const DeviceArray<std::int32_t> came(1, 2);
  const TestStream stream;
  CheckRank(stream.get(), guard.view(), came.data(), 3);
  stream.Sync();
  EXPECT_EQ(guard.failure(), StepFailure::kWrongRank);
}

TEST(CheckRankTest, LeavesTheWordOfTheHostAlone) {
  TestGuard guard(Pipeline::kLookup);
  guard.Fail(StepFailure::kExchange);
  const DeviceArray<std::int32_t> came(1, 2);
  const TestStream stream;
  CheckRank(stream.get(), guard.view(), came.data(), 3);
  stream.Sync();
  EXPECT_EQ(guard.words()->failure,
            static_cast<std::int32_t>(StepFailure::kExchange));
  EXPECT_EQ(guard.failure(), StepFailure::kWrongRank);
}

TEST(CheckRankTest, WhatWasFoundFirstStands) {
  TestGuard guard(Pipeline::kLookup);
  guard.words()->found = static_cast<std::int32_t>(StepFailure::kPeerFailed);
  const DeviceArray<std::int32_t> came(1, 2);
  const TestStream stream;
  CheckRank(stream.get(), guard.view(), came.data(), 3);
  stream.Sync();
  EXPECT_EQ(guard.failure(), StepFailure::kPeerFailed);
}

// Ends step 7 of a pipeline.
class EndStepTest : public ::testing::Test {
 protected:
  static constexpr Counters kCounted = {.ids_out_of_range = 1,
                                        .segments_invalid = 2,
                                        .duplicate_slots = 3,
                                        .skipped_pending = 4,
                                        .skipped_non_finite = 5,
                                        .skipped_invalid = 6,
                                        .last_norm = 7.5F,
                                        .unused = 0};

  void End(TestGuard& guard) {
    guard.words()->reached = 6;
    guard.words()->good = 6;
    const DeviceArray<Counters> counters(1, kCounted);
    const TestStream stream;
    EndStep(stream.get(), guard.view(), 7, counters.data(),
            published_.device());
    stream.Sync();
  }

  Mapped<Counters> published_;
};

TEST_F(EndStepTest, ALookupWithoutFailureEndsWell) {
  TestGuard guard(Pipeline::kLookup);
  End(guard);
  EXPECT_EQ(guard.words()->reached, 7);
  EXPECT_EQ(guard.words()->good, 7);
  EXPECT_EQ(guard.decision().ok, 1);
}

TEST_F(EndStepTest, ALookupThatHasFailedIsReachedButNotGood) {
  TestGuard guard(Pipeline::kLookup, {.ok = 1});
  guard.Fail(StepFailure::kExchange);
  End(guard);
  EXPECT_EQ(guard.words()->reached, 7);
  EXPECT_EQ(guard.words()->good, 6);
  EXPECT_EQ(guard.decision().ok, 0);
}

TEST_F(EndStepTest, AnUpdateThatWasAppliedEndsWellWhateverFailedSince) {
  TestGuard guard(Pipeline::kUpdate, {.applied = 1});
  guard.Fail(StepFailure::kExchange);
  End(guard);
  EXPECT_EQ(guard.words()->reached, 7);
  EXPECT_EQ(guard.words()->good, 7);
  EXPECT_EQ(guard.decision().ok, 1);
  EXPECT_EQ(guard.decision().applied, 0);
}

TEST_F(EndStepTest, AnUpdateThatWasNotAppliedIsNotGood) {
  TestGuard guard(Pipeline::kUpdate, {.ok = 1});
  End(guard);
  EXPECT_EQ(guard.words()->reached, 7);
  EXPECT_EQ(guard.words()->good, 6);
  EXPECT_EQ(guard.decision().ok, 0);
}

TEST_F(EndStepTest, PublishesTheCounters) {
  TestGuard guard(Pipeline::kLookup);
  End(guard);
  EXPECT_EQ(published_->ids_out_of_range, kCounted.ids_out_of_range);
  EXPECT_EQ(published_->segments_invalid, kCounted.segments_invalid);
  EXPECT_EQ(published_->duplicate_slots, kCounted.duplicate_slots);
  EXPECT_EQ(published_->skipped_pending, kCounted.skipped_pending);
  EXPECT_EQ(published_->skipped_non_finite, kCounted.skipped_non_finite);
  EXPECT_EQ(published_->skipped_invalid, kCounted.skipped_invalid);
  EXPECT_EQ(published_->last_norm, kCounted.last_norm);
}

TEST_F(EndStepTest, NotesTheTime) {
  TestGuard guard(Pipeline::kLookup);
  End(guard);
  const std::int64_t first = guard.decision().ended_nanos;
  EXPECT_GT(first, 0);
  End(guard);
  EXPECT_GE(guard.decision().ended_nanos, first);
}

TEST(BeginWaitTest, NotesTheTimeByTheClockOfEndStep) {
  TestGuard guard(Pipeline::kLookup);
  const DeviceArray<Counters> counters(1, Counters{});
  Mapped<Counters> published;
  const TestStream stream;
  EndStep(stream.get(), guard.view(), 1, counters.data(), published.device());
  BeginWait(stream.get(), guard.view());
  stream.Sync();
  const std::int64_t ended = guard.decision().ended_nanos;
  const std::int64_t began = guard.decision().wait_began_nanos;
  EXPECT_GE(began, ended);
  EndStep(stream.get(), guard.view(), 2, counters.data(), published.device());
  stream.Sync();
  EXPECT_GE(guard.decision().ended_nanos, began);
  EXPECT_EQ(guard.words()->waited_nanos, 0);  // before the done call goes on
}

// How a done call ends the wait of a decision.
class EndWaitTest : public ::testing::TestWithParam<Pipeline> {
 protected:
  static void Finish(TestGuard& guard) {
    // Many blocks.
    const SliceShape shape = {4, 10'000, 8};
    const DeviceArray<Bf16Bits> slices(4 * 10'000 * 8, 1);
    const DeviceArray<Bf16Bits> out(4 * 10'000 * 8, kUnwritten);
    const DeviceArray<UpdateResult> result(1, UpdateResult{});
    const DeviceArray<float> norm(1, -1.0F);
    const DeviceArray<std::int32_t> valid(1, -1);
    const TestStream stream;
    if (GetParam() == Pipeline::kLookup) {
      CombineSlices(stream.get(), guard.view(), shape, slices.data(),
                    out.data());
    } else {
      WriteResult(stream.get(), guard.view(), result.data(), norm.data(),
                  valid.data());
    }
    stream.Sync();
  }
};

TEST_P(EndWaitTest, AddsTheTimeUntilTheStepEnded) {
  TestGuard guard(GetParam(), {.ok = 1,
                               .ended_nanos = 500,
                               .wait_began_nanos = 200,
                               .waited_nanos = 1000});
  Finish(guard);
  EXPECT_EQ(guard.words()->waited_nanos, 1300);
}

TEST_P(EndWaitTest, AddsItForAStepThatFailedToo) {
  TestGuard guard(GetParam(),
                  {.ok = 0, .ended_nanos = 500, .wait_began_nanos = 200});
  Finish(guard);
  EXPECT_EQ(guard.words()->waited_nanos, 300);
}

TEST_P(EndWaitTest, AddsItOnce) {
  TestGuard guard(GetParam(),
                  {.ok = 1, .ended_nanos = 500, .wait_began_nanos = 200});
  Finish(guard);
  Finish(guard);
  EXPECT_EQ(guard.words()->waited_nanos, 300);
}

TEST_P(EndWaitTest, AddsNothingForAStepThatHadEnded) {
  TestGuard guard(GetParam(),
                  {.ok = 1, .ended_nanos = 200, .wait_began_nanos = 500});
  Finish(guard);
  EXPECT_EQ(guard.words()->waited_nanos, 0);
}

TEST_P(EndWaitTest, AddsNothingWhereNoneBegan) {
  TestGuard guard(GetParam(), {.ok = 1, .ended_nanos = 500});
  Finish(guard);
  EXPECT_EQ(guard.words()->waited_nanos, 0);
}

INSTANTIATE_TEST_SUITE_P(Pipelines, EndWaitTest,
                         ::testing::Values(Pipeline::kLookup,
                                           Pipeline::kUpdate));

// What WriteResult makes of norm 2.5 and valid 1.
struct Written {
  explicit Written(StepDecision decision) {
    TestGuard guard(Pipeline::kUpdate, decision);
    const DeviceArray<UpdateResult> result(
        1, UpdateResult{.norm = 2.5F, .valid = 1});
    const DeviceArray<float> device_norm(1, -1.0F);
    const DeviceArray<std::int32_t> device_valid(1, -1);
    const TestStream stream;
    WriteResult(stream.get(), guard.view(), result.data(), device_norm.data(),
                device_valid.data());
    stream.Sync();
    norm = device_norm.Download()[0];
    valid = device_valid.Download()[0];
  }
  float norm;
  std::int32_t valid;
};

TEST(WriteResultTest, HandsOnTheResultOfAStepThatEndedWell) {
  const Written written({.ok = 1});
  EXPECT_EQ(written.norm, 2.5F);
  EXPECT_EQ(written.valid, 1);
}

TEST(WriteResultTest, GivesNanAndInvalidForOneThatDidNot) {
  const Written written({.applied = 1});
  EXPECT_TRUE(std::isnan(written.norm));
  EXPECT_EQ(written.valid, 0);
}

}  // namespace
}  // namespace xrex::async_emb::cuda_kernels
