// Rowwise Adagrad.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_host.hpp"
#include "phoenix/xrex/cuda/async_emb/src/device.hpp"
#include "tests/xrex/cuda/async_emb/src/kernel_test_utils.hpp"

namespace xrex::async_emb::host_kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

constexpr AdagradParams kEager = {
    .eps = 1e-8F, .decay_factor = 0.97F, .weight_decay_factor = 0.99F};
constexpr AdagradParams kLazy = {.lazy = true,
                                 .eps = 1e-6F,
                                 .accum_decay_rate = 0.013F,
                                 .weight_decay_rate = 0.0021F};

// The table and the state of its rows.
struct State {
  std::vector<Bf16Bits> table;
  std::vector<float> row_state;
  std::vector<std::int32_t> last_step;
};

// One call of ApplyAdagrad. Slots are `ids`; the stats are given, as they come
// from all ranks.
class Apply {
 public:
  Apply(std::int64_t vocab_rows, std::int64_t width,
        const std::vector<std::int32_t>& ids, const AdagradParams& params)
      : ids_(ids),
        accum_(ids_.size() * width),
        stats_(ids_.size() + 1),
        table_(vocab_rows * width),
        row_state_(vocab_rows),
        last_step_(vocab_rows) {
    Values values(31);
    for (std::int64_t i = 0; i < accum_.size(); ++i) accum_[i] = values.Float();
    for (std::int64_t u = 0; u < ids_.size(); ++u) {
      stats_[u] = std::fabs(values.Float());
    }
    for (std::int64_t i = 0; i < table_.size(); ++i) table_[i] = values.Bf16();
    for (std::int64_t k = 0; k < vocab_rows; ++k) {
      row_state_[k] = std::fabs(values.Float());
      last_step_[k] = static_cast<std::int32_t>(values.Below(2000));
    }
    args_ = {.accum = accum_.data(),
             .stats = stats_.data(),
             .unique_tokens = ids_.data(),
             .num_unique = ids_.size(),
             .width = width,
             .emb_width = 3 * width,
             .vocab_rows = vocab_rows,
             .params = params,
             .scalars = &scalars,
             .table = table_.data(),
             .row_state = row_state_.data(),
             .last_step = params.lazy ? last_step_.data() : nullptr,
             .result = &result};
  }

  void Run() {
    ApplyAdagrad(args_, counters);
    EXPECT_TRUE(table_.GuardsIntact());
    EXPECT_TRUE(row_state_.GuardsIntact());
    EXPECT_TRUE(last_step_.GuardsIntact());
  }

  State state() const {
    return {table_.values(), row_state_.values(), last_step_.values()};
  }

  // The formulas, one slot and one column at a time.
  State Expected() const {
    State state = this->state();
    for (std::int64_t u = 0; u < ids_.size(); ++u) {
      const std::int64_t row = NaiveRow(ids_[u], args_.vocab_rows);
      if (row >= 0) UpdateNaively(u, row, state);
    }
    return state;
  }

  float& stat(std::int64_t u) { return stats_[u]; }
  float& flag() { return stats_[ids_.size()]; }
  float& sum(std::int64_t u, std::int64_t c) {
    return accum_[u * args_.width + c];
  }
  float& row_state(std::int64_t row) { return row_state_[row]; }
  std::int32_t& last_step(std::int64_t row) { return last_step_[row]; }
  ApplyArgs& args() { return args_; }

  UpdateScalars scalars = {.learning_rate = 0.37F, .pending = 1, .step = 2100};
  UpdateResult result = {.norm = -1.0F, .valid = -1};
  StepCounters counters;

 private:
  static float NaiveDecay(float rate, std::int64_t steps) {
    const float exponent = -rate * static_cast<float>(steps);
    return static_cast<float>(std::exp(static_cast<double>(exponent)));
  }

  void UpdateNaively(std::int64_t u, std::int64_t row, State& state) const {
    const AdagradParams& params = args_.params;
    const auto k = static_cast<std::size_t>(row);
    float decay = params.decay_factor;
    float weight_decay = params.weight_decay_factor;
    if (params.lazy) {
      const std::int64_t steps =
          std::int64_t{scalars.step} - std::int64_t{state.last_step[k]};
      decay = NaiveDecay(params.accum_decay_rate, steps > 0 ? steps : 0);
      weight_decay =
          NaiveDecay(params.weight_decay_rate, steps > 0 ? steps : 0);
      state.last_step[k] = scalars.step;
    }
    const float inverse_width = 1.0F / static_cast<float>(args_.emb_width);
    const float decayed = state.row_state[k] * decay;
    const float added = stats_[u] * inverse_width;
    state.row_state[k] = decayed + added;
    const float factor = stats_[u] > 0.0F ? weight_decay : 1.0F;
    const float root = std::sqrt(state.row_state[k]);
    const float scale = -scalars.learning_rate * (1.0F / (root + params.eps));
    for (std::int64_t c = 0; c < args_.width; ++c) {
      const auto at = static_cast<std::size_t>(row * args_.width + c);
      const float grad = NaiveFloat(NaiveBf16(accum_[u * args_.width + c]));
      const float change = NaiveFloat(NaiveBf16(scale * grad));
      const float old =
          NaiveFloat(NaiveBf16(NaiveFloat(state.table[at]) * factor));
      state.table[at] = NaiveBf16(old + change);
    }
  }

  GuardedArray<std::int32_t> ids_;
  GuardedArray<float> accum_;
  GuardedArray<float> stats_;
  GuardedArray<Bf16Bits> table_;
  GuardedArray<float> row_state_;
  GuardedArray<std::int32_t> last_step_;
  ApplyArgs args_;
};

void ExpectSame(const State& actual, const State& expected) {
  EXPECT_EQ(actual.table, expected.table);
  EXPECT_EQ(Bits(actual.row_state), Bits(expected.row_state));
  EXPECT_EQ(actual.last_step, expected.last_step);
}

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

struct Skip {
  std::string name;
  std::int32_t pending;
  float learning_rate;
  float flag;
  float stat;
  std::int64_t pending_count;
  std::int64_t invalid_count;
  std::int64_t non_finite_count;
};

class SkippedStepTest : public ::testing::TestWithParam<Skip> {
 protected:
  SkippedStepTest() : apply_(5, 3, {0, 1, 4}, kLazy) {
    apply_.scalars.pending = GetParam().pending;
    apply_.scalars.learning_rate = GetParam().learning_rate;
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
        Skip{"NotPending", 0, 0.1F, 1.0F, 1.0F, 1, 0, 0},
        Skip{"NotPendingAndNan", 0, kNan, 4.0F, kNan, 1, 0, 0},
        Skip{"InvalidOnOneRank", 1, 0.1F, 1.0F, 1.0F, 0, 1, 0},
        Skip{"InvalidAndInfiniteNorm", 1, 0.1F, 4.0F, kInf, 0, 1, 0},
        Skip{"NanLearningRate", 1, kNan, 4.0F, 1.0F, 0, 0, 1},
        Skip{"InfiniteLearningRate", 1, -kInf, 4.0F, 1.0F, 0, 0, 1},
        Skip{"InfiniteNorm", 1, 0.1F, 0.0F, kInf, 0, 0, 1},
        Skip{"OverflowOfTheNorm", 1, 0.1F, 0.0F, 3.4e38F, 0, 0, 1},
        Skip{"NanNorm", 1, 0.1F, 0.0F, kNan, 0, 0, 1}),
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
