// The checks of an update on CUDA, against the host kernel. Needs a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel.hpp"
#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_host.hpp"
#include "phoenix/xrex/cuda/async_emb/src/device.hpp"
#include "tests/xrex/cuda/async_emb/src/kernel_cuda_test_utils.hpp"

namespace xrex::async_emb::cuda_kernels {
namespace {

// A verdict, and what was counted.
struct Verdict {
  float flag;
  std::int64_t segments_invalid;
  std::int64_t duplicate_slots;
};

// One call of CheckUpdate. Good as it is made: own tokens are all but the first
// and the last two.
struct Check {
  Verdict OnHost() const {
    std::vector<std::byte> scratch(host_kernels::ScratchBytes(Spec()));
    StepCounters counters;
    float flag = -1.0F;
    UpdateCheckArgs args = Sizes();
    args.segments = segments.data();
    args.unique_tokens = unique_tokens.data();
    args.scalars = &scalars;
    args.flag = &flag;
    host_kernels::CheckUpdate(args, scratch.data(), counters);
    return {flag, counters.segments_invalid, counters.duplicate_slots};
  }

  Verdict OnDevice(TestGuard& guard) const {
    const DeviceArray<std::int32_t> device_segments(segments);
    const DeviceArray<std::int32_t> device_tokens(unique_tokens);
    const DeviceArray<UpdateScalars> device_scalars(1, scalars);
    const DeviceArray<float> flag(1, -1.0F);
    const DeviceArray<Counters> counters(1, Counters{});
    const DeviceArray<std::uint32_t> scratch = MakeScratch(Spec());
    UpdateCheckArgs args = Sizes();
    args.segments = device_segments.data();
    args.unique_tokens = device_tokens.data();
    args.scalars = device_scalars.data();
    args.flag = flag.data();
    const TestStream stream;
    CheckUpdate(stream.get(), guard.view(), args, BytesOf(scratch),
                counters.data());
    stream.Sync();
    scratch.Download();  // checks its guards
    const Counters counted = counters.Download()[0];
    return {flag.Download()[0], counted.segments_invalid,
            counted.duplicate_slots};
  }

  void ExpectAsHost() const {
    TestGuard guard(Pipeline::kUpdate);
    const Verdict actual = OnDevice(guard);
    const Verdict expected = OnHost();
    EXPECT_EQ(actual.flag, expected.flag);
    EXPECT_EQ(actual.segments_invalid, expected.segments_invalid);
    EXPECT_EQ(actual.duplicate_slots, expected.duplicate_slots);
  }

  PipelineSpec Spec() const {
    return {.tokens_per_rank = static_cast<std::int64_t>(segments.size()),
            .shard_width = 1,
            .emb_width = 1,
            .num_unique = static_cast<std::int64_t>(unique_tokens.size())};
  }
  UpdateCheckArgs Sizes() const {
    const auto num_tokens = static_cast<std::int64_t>(segments.size());
    return {.num_tokens = num_tokens,
            .count_begin = 1,
            .count_end = num_tokens - 2,
            .num_unique = static_cast<std::int64_t>(unique_tokens.size()),
            .vocab_rows = vocab_rows,
            .check_duplicates = check_duplicates};
  }

  std::vector<std::int32_t> unique_tokens = {3, 7, 50, 100, 100};
  std::vector<std::int32_t> segments = {0, 1, 2, 3, 4, -1, -1, 4};
  UpdateScalars scalars = {.learning_rate = 0.1F, .pending = 1, .step = 1};
  std::int64_t vocab_rows = 100;
  bool check_duplicates = true;
};

float FlagOf(const Check& check) {
  TestGuard guard(Pipeline::kUpdate);
  return check.OnDevice(guard).flag;
}

TEST(CheckUpdateTest, GoodInputs) {
  const Check check;
  check.ExpectAsHost();
  EXPECT_EQ(FlagOf(check), kVerdictApply);
}

TEST(CheckUpdateTest, AStepThatIsNotPendingIsNotJudged) {
  Check check;
  check.segments[2] = 5;
  check.unique_tokens = {0, 0, 0, 0, 0};
  check.scalars.pending = 0;
  check.ExpectAsHost();
  EXPECT_EQ(FlagOf(check), kVerdictPending);
}

TEST(CheckUpdateTest, ALearningRateThatIsNotFinite) {
  for (const float rate : {std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::quiet_NaN()}) {
    Check check;
    check.scalars.learning_rate = rate;
    check.ExpectAsHost();
    EXPECT_EQ(FlagOf(check), kVerdictNonFinite);
    check.segments[1] = 5;
    check.ExpectAsHost();
  }
}

class InvalidSegmentTest : public ::testing::TestWithParam<std::int32_t> {};

TEST_P(InvalidSegmentTest, OfAnyToken) {
  for (std::size_t token = 0; token < 8; ++token) {
    Check check;
    check.segments[token] = GetParam();
    check.ExpectAsHost();
    EXPECT_EQ(FlagOf(check), kVerdictInvalid) << token;
  }
}

INSTANTIATE_TEST_SUITE_P(Indices, InvalidSegmentTest,
                         ::testing::Values(5, kMaxInt32, -2, kMinInt32));

TEST(CheckUpdateTest, ManyInvalidSegments) {
  Check check;
  check.segments.assign(100'003, 17);
  check.ExpectAsHost();
}

TEST(CheckUpdateTest, DuplicatesAreCountedEachLaterSlot) {
  Check check;
  check.unique_tokens = {50, 3, -50, 3, 50, -97};
  check.ExpectAsHost();
  EXPECT_EQ(FlagOf(check), kVerdictInvalid);
}

TEST(CheckUpdateTest, SlotsInNoUseAreNoDuplicates) {
  Check check;
  check.unique_tokens = {100, 3, kMaxInt32, 100, kMinInt32, kMinInt32, -101};
  check.ExpectAsHost();
  EXPECT_EQ(FlagOf(check), kVerdictApply);
}

TEST(CheckUpdateTest, DuplicatesAreFoundOnlyIfAskedFor) {
  Check check;
  check.unique_tokens = {3, 3, 3, 3, 3};
  check.check_duplicates = false;
  check.ExpectAsHost();
  EXPECT_EQ(FlagOf(check), kVerdictApply);
}

TEST(CheckUpdateTest, ManySlots) {
  Check check;
  Values values(3);
  check.unique_tokens.clear();
  for (int u = 0; u < 30'000; ++u) {
    check.unique_tokens.push_back(
        static_cast<std::int32_t>(values.Below(130'000) - 20'000));
  }
  check.vocab_rows = 100'000;
  check.ExpectAsHost();
}

TEST(CheckUpdateTest, OneSlotOneToken) {
  Check check;
  check.unique_tokens = {0};
  check.segments = {0, 0, 0};
  check.ExpectAsHost();
}

// Where rows do not fit 31 or 32 bits, the ids of a last row and of a first one
// stay apart.
class LargeVocabularyTest : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(LargeVocabularyTest, HasNoDuplicatesBetweenItsEnds) {
  Check check;
  check.vocab_rows = GetParam();
  check.unique_tokens = {-1, kMinInt32, kMaxInt32, 0, -2};
  check.ExpectAsHost();
}

TEST_P(LargeVocabularyTest, HasDuplicatesAtItsEnds) {
  Check check;
  check.vocab_rows = GetParam();
  check.unique_tokens = {-1, kMinInt32, kMaxInt32, -1, kMinInt32, kMaxInt32};
  check.ExpectAsHost();
  EXPECT_EQ(FlagOf(check), kVerdictInvalid);
}

INSTANTIATE_TEST_SUITE_P(
    Rows, LargeVocabularyTest,
    ::testing::Values((std::int64_t{1} << 31) - 1, std::int64_t{1} << 31,
                      (std::int64_t{1} << 31) + 1, (std::int64_t{1} << 32) - 1,
                      std::int64_t{1} << 32, (std::int64_t{1} << 32) + 1,
                      std::int64_t{1} << 40));

TEST(CheckUpdateTest, AGuardThatHasFailedGivesNanAndCountsNothing) {
  Check check;
  check.segments[2] = 5;
  check.unique_tokens = {0, 0, 0, 0, 0};
  for (const std::int32_t pending : {0, 1}) {
    check.scalars.pending = pending;
    TestGuard guard(Pipeline::kUpdate);
    guard.Fail(StepFailure::kExchange);
    const Verdict verdict = check.OnDevice(guard);
    EXPECT_TRUE(std::isnan(verdict.flag));
    EXPECT_EQ(verdict.segments_invalid, 0);
    EXPECT_EQ(verdict.duplicate_slots, 0);
  }
}

}  // namespace
}  // namespace xrex::async_emb::cuda_kernels
