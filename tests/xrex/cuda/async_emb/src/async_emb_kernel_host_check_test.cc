// The checks of an update.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_host.hpp"
#include "phoenix/xrex/cuda/async_emb/src/device.hpp"
#include "tests/xrex/cuda/async_emb/src/kernel_test_utils.hpp"

namespace xrex::async_emb::host_kernels {
namespace {

// One call of CheckUpdate with exactly the scratch that it asks for. Good as
// it is made: own tokens are all but the first and the last two.
struct Check {
  explicit Check(std::vector<std::int32_t> slots = {3, 7, 50, 100, 100})
      : unique_tokens(std::move(slots)) {}

  // The flag.
  float Run() {
    const GuardedArray<std::int32_t> guarded_slots(unique_tokens);
    const GuardedArray<std::int32_t> guarded_segments(segments);
    const PipelineSpec spec = {.tokens_per_rank = guarded_segments.size(),
                               .shard_width = 1,
                               .emb_width = 1,
                               .num_unique = guarded_slots.size()};
    GuardedArray<std::int32_t> scratch(
        static_cast<std::int64_t>(ScratchBytes(spec) / sizeof(std::int32_t)));
    GuardedArray<float> flag(1, 12345.0F);
    const UpdateCheckArgs args = {.segments = guarded_segments.data(),
                                  .num_tokens = guarded_segments.size(),
                                  .count_begin = 1,
                                  .count_end = guarded_segments.size() - 2,
                                  .unique_tokens = guarded_slots.data(),
                                  .num_unique = guarded_slots.size(),
                                  .vocab_rows = vocab_rows,
                                  .check_duplicates = check_duplicates,
                                  .scalars = &scalars,
                                  .flag = flag.data()};
    CheckUpdate(args, reinterpret_cast<std::byte*>(scratch.data()), counters);
    EXPECT_TRUE(scratch.GuardsIntact());
    EXPECT_TRUE(flag.GuardsIntact());
    return flag[0];
  }

  std::vector<std::int32_t> unique_tokens;
  std::vector<std::int32_t> segments = {0, 1, 2, 3, 4, -1, -1, 4};
  UpdateScalars scalars = {.learning_rate = 0.1F, .pending = 1, .step = 1};
  std::int64_t vocab_rows = 100;
  bool check_duplicates = true;
  StepCounters counters;
};

TEST(CheckUpdateTest, GoodInputsLeaveTheFlagDown) {
  Check check;
  EXPECT_EQ(check.Run(), kVerdictApply);
  EXPECT_EQ(check.counters.segments_invalid, 0);
  EXPECT_EQ(check.counters.duplicate_slots, 0);
}

TEST(CheckUpdateTest, AnyNonZeroPendingIsPending) {
  Check check;
  check.scalars.pending = -7;
  EXPECT_EQ(check.Run(), kVerdictApply);
}

TEST(CheckUpdateTest, AStepThatIsNotPendingRaisesTheFlag) {
  Check check;
  check.scalars.pending = 0;
  EXPECT_EQ(check.Run(), kVerdictPending);
}

TEST(CheckUpdateTest, InputsOfAStepThatIsNotPendingAreNotCounted) {
  Check check({0, 0, 0, 0, 0});
  check.segments[2] = 5;
  check.scalars.pending = 0;
  check.Run();
  EXPECT_EQ(check.counters.segments_invalid, 0);
  EXPECT_EQ(check.counters.duplicate_slots, 0);
}

class LearningRateTest : public ::testing::TestWithParam<float> {};

TEST_P(LearningRateTest, ThatIsNotFiniteRaisesTheFlag) {
  Check check;
  check.scalars.learning_rate = GetParam();
  EXPECT_EQ(check.Run(), kVerdictNonFinite);
}

INSTANTIATE_TEST_SUITE_P(
    All, LearningRateTest,
    ::testing::Values(std::numeric_limits<float>::infinity(),
                      -std::numeric_limits<float>::infinity(),
                      std::numeric_limits<float>::quiet_NaN()));

TEST(CheckUpdateTest, InvalidInputsGoBeforeABadLearningRate) {
  Check check;
  check.segments[1] = 5;
  check.scalars.learning_rate = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(check.Run(), kVerdictInvalid);
}

class InvalidSegmentTest : public ::testing::TestWithParam<std::int32_t> {};

TEST_P(InvalidSegmentTest, OfAnOwnTokenRaisesTheFlagAndIsCounted) {
  Check check;
  check.segments[1] = GetParam();
  EXPECT_EQ(check.Run(), kVerdictInvalid);
  EXPECT_EQ(check.counters.segments_invalid, 1);
}

TEST_P(InvalidSegmentTest, OfAnotherRankRaisesTheFlagAndIsNotCounted) {
  Check before;
  before.segments[0] = GetParam();
  EXPECT_EQ(before.Run(), kVerdictInvalid);
  EXPECT_EQ(before.counters.segments_invalid, 0);
  Check behind;
  behind.segments[7] = GetParam();
  EXPECT_EQ(behind.Run(), kVerdictInvalid);
  EXPECT_EQ(behind.counters.segments_invalid, 0);
}

INSTANTIATE_TEST_SUITE_P(Indices, InvalidSegmentTest,
                         ::testing::Values(5, kMaxInt32, -2, kMinInt32));

TEST(CheckUpdateTest, CountsOwnInvalidSegmentsOverSteps) {
  Check check;
  check.segments = {9, 9, 9, 0, -9, 9, 9, 9};
  check.Run();
  check.Run();
  EXPECT_EQ(check.counters.segments_invalid, 8);
}

TEST(CheckUpdateTest, DuplicatesRaiseTheFlagAndEachLaterSlotIsCounted) {
  Check check({50, 3, 50, 3, 50});
  EXPECT_EQ(check.Run(), kVerdictInvalid);
  EXPECT_EQ(check.counters.duplicate_slots, 3);
}

TEST(CheckUpdateTest, NeighboursThatAreEqualAreDuplicates) {
  Check check({3, 7, 7, 50, 100});
  EXPECT_EQ(check.Run(), kVerdictInvalid);
  EXPECT_EQ(check.counters.duplicate_slots, 1);
}

TEST(CheckUpdateTest, ANegativeIdIsADuplicateOfTheRowItMeans) {
  Check check({99, 7, -1, 1, 2});
  EXPECT_EQ(check.Run(), kVerdictInvalid);
  EXPECT_EQ(check.counters.duplicate_slots, 1);
}

TEST(CheckUpdateTest, DistinctSlotsNeedNoOrder) {
  Check check({-1, 50, 3, 0, 98});
  EXPECT_EQ(check.Run(), kVerdictApply);
}

TEST(CheckUpdateTest, UnusedSlotsAreNoDuplicates) {
  Check check({100, -101, kMaxInt32, kMinInt32, 100, -101, kMaxInt32});
  EXPECT_EQ(check.Run(), kVerdictApply);
}

TEST(CheckUpdateTest, UnusedSlotsBetweenOthersHideNoDuplicate) {
  Check check({7, 100, 7, -101, 8});
  EXPECT_EQ(check.Run(), kVerdictInvalid);
  EXPECT_EQ(check.counters.duplicate_slots, 1);
}

TEST(CheckUpdateTest, DuplicatesPassUnlessTheyAreAskedFor) {
  Check check({3, 3, 3, 3, 3});
  check.check_duplicates = false;
  EXPECT_EQ(check.Run(), kVerdictApply);
  EXPECT_EQ(check.counters.duplicate_slots, 0);
}

TEST(CheckUpdateTest, OneSlotIsNoDuplicate) {
  Check check({0});
  check.segments = {0, 0, 0, 0};
  EXPECT_EQ(check.Run(), kVerdictApply);
}

TEST(CheckUpdateTest, CountsTheDuplicatesOfManySlots) {
  constexpr std::int64_t kVocabRows = 1'500'000'000;
  Values values(29);
  std::vector<std::int32_t> pool;
  for (int i = 0; i < 2000; ++i) {
    // Many rows, far apart; some ids are negative, some out of range.
    pool.push_back(static_cast<std::int32_t>(
        values.Below(std::int64_t{1} << 32) - (std::int64_t{1} << 31)));
  }
  std::vector<std::int32_t> slots;
  std::set<std::int64_t> rows;
  std::int64_t duplicates = 0;
  for (int u = 0; u < 3000; ++u) {
    slots.push_back(pool[static_cast<std::size_t>(values.Below(2000))]);
    const std::int64_t row = NaiveRow(slots.back(), kVocabRows);
    if (row >= 0 && !rows.insert(row).second) ++duplicates;
  }
  Check check(slots);
  check.vocab_rows = kVocabRows;
  check.Run();
  EXPECT_EQ(check.counters.duplicate_slots, duplicates);
}

TEST(CheckUpdateTest, RowsThatDifferBy32BitsAreDistinct) {
  Check check({0, -1});
  check.vocab_rows = (std::int64_t{1} << 32) + 1;
  check.segments = {0, 1, 1, 1};
  EXPECT_EQ(check.Run(), kVerdictApply);
}

TEST(CheckUpdateTest, AFullListOfDistinctSlotsIsGood) {
  std::vector<std::int32_t> slots;
  for (std::int32_t i = 0; i < 100; ++i) slots.push_back((i * 37) % 100);
  Check check(slots);
  EXPECT_EQ(check.Run(), kVerdictApply);
}

}  // namespace
}  // namespace xrex::async_emb::host_kernels
