// The norm and the verdict of an update.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/xrex/cuda/async_emb/src/kernel_test_apply.hpp"
#include "tests/xrex/cuda/async_emb/src/kernel_test_utils.hpp"

namespace xrex::async_emb::host_kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class NormTest : public ::testing::TestWithParam<std::int32_t> {};

TEST_P(NormTest, IsTheRootOfTheRunsOfAllSlots) {
  Apply apply(1, 1, std::vector<std::int32_t>(GetParam(), 1), kEager);
  std::vector<float> stats;
  for (std::int32_t u = 0; u < GetParam(); ++u) stats.push_back(apply.stat(u));
  apply.Run();
  EXPECT_EQ(Bits({apply.result.norm}), Bits({std::sqrt(NaiveRuns(stats))}));
  EXPECT_EQ(apply.counters.last_norm, apply.result.norm);
}

INSTANTIATE_TEST_SUITE_P(Slots, NormTest,
                         ::testing::Values(1, 2, 63, 64, 65, 511, 512, 513, 577,
                                           4095, 4096, 4097, 50000, 262145),
                         [](const auto& info) {
                           return "Slots" + std::to_string(info.param);
                         });

struct Skip {
  std::string name;
  float flag;
  float stat;
  std::int64_t pending_count;
  std::int64_t invalid_count;
  std::int64_t non_finite_count;
};

class SkippedStepTest : public ::testing::TestWithParam<Skip> {
 protected:
  SkippedStepTest() : apply_(5, 3, {0, 1, 4}, kLazy) {
    apply_.flag() = GetParam().flag;
    apply_.stat(1) = GetParam().stat;
    apply_.stat(2) = GetParam().stat;
  }

  Apply apply_;
};

TEST_P(SkippedStepTest, ChangesNothing) {
  const State before = apply_.state();
  apply_.Run();
  ExpectSame(apply_.state(), before);
  EXPECT_EQ(apply_.result.valid, 0);
}

TEST_P(SkippedStepTest, StillReportsTheNorm) {
  const std::vector<float> stats = {apply_.stat(0), apply_.stat(1),
                                    apply_.stat(2)};
  const float norm = std::sqrt(NaiveRuns(stats));
  apply_.Run();
  EXPECT_EQ(Bits({apply_.result.norm}), Bits({norm}));
  EXPECT_EQ(Bits({apply_.counters.last_norm}), Bits({norm}));
}

TEST_P(SkippedStepTest, IsCountedUnderTheFirstReason) {
  apply_.Run();
  EXPECT_EQ(apply_.counters.skipped_pending, GetParam().pending_count);
  EXPECT_EQ(apply_.counters.skipped_invalid, GetParam().invalid_count);
  EXPECT_EQ(apply_.counters.skipped_non_finite, GetParam().non_finite_count);
}

INSTANTIATE_TEST_SUITE_P(
    Reasons, SkippedStepTest,
    ::testing::Values(
        Skip{"NotPending", kVerdictPending, 1.0F, 1, 0, 0},
        Skip{"NotPendingAndNan", 4 * kVerdictPending, kNan, 1, 0, 0},
        Skip{"NotPendingOnOneRank", kVerdictPending + 3 * kVerdictInvalid, 1.0F,
             1, 0, 0},
        Skip{"InvalidOnOneRank", kVerdictInvalid, 1.0F, 0, 1, 0},
        Skip{"InvalidAndInfiniteNorm", 4 * kVerdictInvalid, kInf, 0, 1, 0},
        Skip{"InvalidAndBadRates", kVerdictInvalid + 3 * kVerdictNonFinite,
             1.0F, 0, 1, 0},
        Skip{"BadRate", 4 * kVerdictNonFinite, 1.0F, 0, 0, 1},
        Skip{"BadRateOnManyRanks", 4095 * kVerdictNonFinite, 1.0F, 0, 0, 1},
        Skip{"InfiniteNorm", kVerdictApply, kInf, 0, 0, 1},
        Skip{"OverflowOfTheNorm", kVerdictApply, 3.4e38F, 0, 0, 1},
        Skip{"NanNorm", kVerdictApply, kNan, 0, 0, 1}),
    [](const auto& info) { return info.param.name; });

TEST(ApplyAdagradTest, AStepThatRunsIsNotCountedAsSkipped) {
  Apply apply(5, 3, {0, 1, 4}, kEager);
  apply.Run();
  EXPECT_EQ(apply.result.valid, 1);
  EXPECT_EQ(apply.counters.skipped_pending, 0);
  EXPECT_EQ(apply.counters.skipped_invalid, 0);
  EXPECT_EQ(apply.counters.skipped_non_finite, 0);
}

}  // namespace
}  // namespace xrex::async_emb::host_kernels
