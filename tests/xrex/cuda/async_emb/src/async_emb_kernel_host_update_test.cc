// The rows and the state that rowwise Adagrad writes.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/device.hpp"
#include "tests/xrex/cuda/async_emb/src/kernel_test_apply.hpp"
#include "tests/xrex/cuda/async_emb/src/kernel_test_utils.hpp"

namespace xrex::async_emb::host_kernels {
namespace {

// Distinct ids in no order, some of them negative, with unused slots between.
std::vector<std::int32_t> MixedIds(std::int32_t vocab_rows,
                                   std::int32_t count) {
  std::vector<std::int32_t> ids;
  for (std::int32_t i = 0; i < count; ++i) {
    const std::int32_t row = (i * 37) % vocab_rows;
    ids.push_back(i % 3 == 0 ? row - vocab_rows : row);
    if (i % 5 == 0) ids.push_back(vocab_rows + i);
  }
  return ids;
}

class ApplyAdagradTest : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(ApplyAdagradTest, EagerFollowsTheFormulas) {
  Apply apply(101, GetParam(), MixedIds(101, 90), kEager);
  const State expected = apply.Expected();
  apply.Run();
  ExpectSame(apply.state(), expected);
}

TEST_P(ApplyAdagradTest, LazyFollowsTheFormulas) {
  Apply apply(101, GetParam(), MixedIds(101, 90), kLazy);
  const State expected = apply.Expected();
  apply.Run();
  ExpectSame(apply.state(), expected);
}

TEST_P(ApplyAdagradTest, ExtremeRowsFollowTheFormulas) {
  Apply apply(101, GetParam(), MixedIds(101, 90), kEager);
  Values values(37);
  for (std::int64_t i = 0; i < 101 * GetParam(); ++i) {
    apply.args().table[i] = values.AnyBf16();
  }
  const State expected = apply.Expected();
  apply.Run();
  ExpectSame(apply.state(), expected);
}

INSTANTIATE_TEST_SUITE_P(Widths, ApplyAdagradTest,
                         ::testing::ValuesIn(kTestWidths),
                         [](const auto& info) {
                           return "Width" + std::to_string(info.param);
                         });

TEST(ApplyAdagradTest, SlotsOutOfRangeTouchNothing) {
  Apply apply(5, 3, {5, -6, kMinInt32, kMaxInt32}, kLazy);
  const State before = apply.state();
  apply.Run();
  ExpectSame(apply.state(), before);
  EXPECT_EQ(apply.result.valid, 1);
}

TEST(ApplyAdagradTest, FirstAndLastRowAreReachedFromBothEnds) {
  Apply apply(5, 3, {-5, 4}, kEager);
  const State expected = apply.Expected();
  apply.Run();
  ExpectSame(apply.state(), expected);
}

TEST(ApplyAdagradTest, ARowWithoutGradientKeepsItsWeights) {
  Apply apply(1, 2, {0}, kEager);
  apply.stat(0) = 0.0F;
  apply.sum(0, 0) = 0.0F;
  apply.sum(0, 1) = 0.0F;
  apply.row_state(0) = 0.0F;
  const State before = apply.state();
  apply.Run();
  ExpectSame(apply.state(), before);
}

TEST(ApplyAdagradTest, ARowWithoutGradientStillDecaysItsState) {
  Apply apply(1, 2, {0}, kLazy);
  apply.stat(0) = 0.0F;
  const State expected = apply.Expected();
  apply.Run();
  ExpectSame(apply.state(), expected);
  EXPECT_EQ(apply.last_step(0), 2100);
}

TEST(ApplyAdagradTest, LearningRateAndEpsMayBeExtreme) {
  AdagradParams params = kEager;
  params.eps = 1e-37F;
  Apply apply(3, 4, {0, 1, 2}, params);
  apply.scalars.learning_rate = 1e30F;
  apply.stat(1) = 0.0F;
  apply.row_state(1) = 0.0F;  // the scale overflows
  apply.sum(1, 2) = 0.0F;     // and gives NaN here
  const State expected = apply.Expected();
  apply.Run();
  ExpectSame(apply.state(), expected);
}

TEST(ApplyAdagradTest, AStateThatIsNanGivesNanOfItsSign) {
  Apply apply(2, 33, {0, 1}, kEager);
  apply.row_state(0) = std::bit_cast<float>(0x7FFFFFFFU);
  apply.row_state(1) = std::bit_cast<float>(0xFFFFFFFFU);
  const State expected = apply.Expected();
  apply.Run();
  EXPECT_EQ(apply.state().table, expected.table);
}

TEST(ApplyAdagradTest, LazyDecayIsTheExponentialInDoublePrecision) {
  constexpr std::int32_t kRows = 6000;
  std::vector<std::int32_t> ids;
  for (std::int32_t k = 0; k < kRows; ++k) ids.push_back(k);
  Apply apply(kRows, 1, ids, kLazy);
  for (std::int32_t k = 0; k < kRows; ++k) {
    apply.last_step(k) = k;
    apply.stat(k) = 0.0F;
    apply.row_state(k) = 1.0F;
  }
  apply.scalars.step = kRows;
  const State expected = apply.Expected();
  apply.Run();
  EXPECT_EQ(Bits(apply.state().row_state), Bits(expected.row_state));
}

// From last_step to step.
struct Steps {
  std::int32_t last_step;
  std::int32_t step;
};

class LazyStepsTest : public ::testing::TestWithParam<Steps> {};

TEST_P(LazyStepsTest, DecaysByTheStepsSinceTheLastUpdate) {
  AdagradParams params = kLazy;
  params.accum_decay_rate = 1e-9F;
  params.weight_decay_rate = 1e-10F;
  Apply apply(1, 3, {0}, params);
  apply.last_step(0) = GetParam().last_step;
  apply.scalars.step = GetParam().step;
  const State expected = apply.Expected();
  apply.Run();
  ExpectSame(apply.state(), expected);
}

INSTANTIATE_TEST_SUITE_P(
    Some, LazyStepsTest,
    ::testing::Values(Steps{0, 0}, Steps{0, 1}, Steps{100, 611},
                      Steps{100, 612}, Steps{7, 3}, Steps{0, 16777217},
                      Steps{kMinInt32, kMaxInt32}, Steps{kMaxInt32, kMinInt32}),
    [](const auto& info) { return "Case" + std::to_string(info.index); });

TEST(ApplyAdagradTest, WritesRowsBehind31BitsOfElements) {
  SparseArray table(kLargeRows * kLargeWidth);
  if (!table.mapped())
    GTEST_SKIP() << "9 GB of address space are not to be had";
  Apply apply(1, kLargeWidth, {-1}, kEager);
  std::vector<float> row_state(kLargeRows, 1.0F);
  const State expected = [&] {
    apply.args().vocab_rows = 1;
    std::fill_n(apply.args().table, kLargeWidth, Bf16Bits{0});
    apply.row_state(0) = 1.0F;
    return apply.Expected();
  }();
  apply.args().table = table.data();
  apply.args().row_state = row_state.data();
  apply.args().vocab_rows = kLargeRows;
  apply.Run();
  const Bf16Bits* row = table.data() + (kLargeRows - 1) * kLargeWidth;
  EXPECT_EQ(std::vector<Bf16Bits>(row, row + kLargeWidth), expected.table);
  EXPECT_EQ(row_state.back(), expected.row_state.front());
}

}  // namespace
}  // namespace xrex::async_emb::host_kernels
