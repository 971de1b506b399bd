// The segment sums of an update.
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

constexpr std::int32_t kNoSegment = -1;  // left out on purpose

constexpr float kInf = std::numeric_limits<float>::infinity();

// One call of SumSegments with exactly the scratch that it asks for.
class SegmentSum {
 public:
  SegmentSum(std::int64_t num_unique, std::int64_t width,
             const std::vector<std::int32_t>& segments)
      : segments_(segments),
        // A test of large arrays brings its own gradients.
        grads_(std::min(segments_.size() * width, kMaxGradients)),
        accum_(num_unique * width, kUnwritten),
        stats_(num_unique, kUnwritten) {
    Values values(17);
    for (std::int64_t i = 0; i < grads_.size(); ++i) grads_[i] = values.Bf16();
    args_ = {.segments = segments_.data(),
             .grads = grads_.data(),
             .num_tokens = segments_.size(),
             .num_unique = num_unique,
             .width = width,
             .deterministic = true,
             .accum = accum_.data(),
             .partial_stats = stats_.data()};
  }

  void Run() {
    const PipelineSpec spec = {.world_size = 1,
                               .tokens_per_rank = args_.num_tokens,
                               .shard_width = args_.width,
                               .emb_width = args_.width,
                               .num_unique = args_.num_unique};
    // In floats, so that it is aligned as the kernel expects.
    GuardedArray<float> scratch(
        static_cast<std::int64_t>(ScratchBytes(spec) / sizeof(float)));
    SumSegments(args_, reinterpret_cast<std::byte*>(scratch.data()));
    EXPECT_TRUE(scratch.GuardsIntact());
    EXPECT_TRUE(accum_.GuardsIntact());
    EXPECT_TRUE(stats_.GuardsIntact());
  }

  void SetGradient(std::int64_t token, std::int64_t column, float value) {
    grads_[token * args_.width + column] = NaiveBf16(value);
  }

  SegmentSumArgs& args() { return args_; }
  std::vector<float> accum() const { return accum_.values(); }
  std::vector<float> stats() const { return stats_.values(); }

  // A, from the tokens of each segment in ascending order.
  std::vector<float> ExpectedAccum() const {
    std::vector<float> sums;
    for (std::int64_t u = 0; u < args_.num_unique; ++u) {
      for (std::int64_t c = 0; c < args_.width; ++c) {
        std::vector<float> terms;
        for (std::int64_t t = 0; t < args_.num_tokens; ++t) {
          if (segments_[t] != u) continue;
          terms.push_back(NaiveFloat(grads_[t * args_.width + c]));
        }
        sums.push_back(NaiveRuns(terms));
      }
    }
    return sums;
  }

  // The squares of bf16(A): leaves of q columns for a width of q * 2^m.
  std::vector<float> ExpectedStats() const {
    std::int64_t leaf_width = args_.width;
    while (leaf_width % 2 == 0) leaf_width /= 2;
    const std::vector<float> sums = ExpectedAccum();
    std::vector<float> stats;
    for (std::int64_t u = 0; u < args_.num_unique; ++u) {
      std::vector<float> leaves;
      for (std::int64_t c = 0; c < args_.width; c += leaf_width) {
        std::vector<float> squares;
        for (std::int64_t i = c; i < c + leaf_width; ++i) {
          const auto at = static_cast<std::size_t>(u * args_.width + i);
          const float rounded = NaiveFloat(NaiveBf16(sums[at]));
          squares.push_back(rounded * rounded);
        }
        leaves.push_back(NaiveChain(squares));
      }
      stats.push_back(NaivePairs(leaves));
    }
    return stats;
  }

 private:
  static constexpr float kUnwritten = 12345.0F;
  static constexpr std::int64_t kMaxGradients = std::int64_t{1} << 20;

  GuardedArray<std::int32_t> segments_;
  GuardedArray<Bf16Bits> grads_;
  GuardedArray<float> accum_;
  GuardedArray<float> stats_;
  SegmentSumArgs args_;
};

std::vector<std::int32_t> RandomSegments(std::int64_t num_tokens,
                                         std::int64_t num_unique) {
  Values values(23);
  std::vector<std::int32_t> segments;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    // One in num_unique + 1 tokens is left out.
    segments.push_back(
        static_cast<std::int32_t>(values.Below(num_unique + 1) - 1));
  }
  return segments;
}

class SumSegmentsTest : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(SumSegmentsTest, AddsShortSegmentsLeftToRight) {
  SegmentSum sum(19, GetParam(), RandomSegments(150, 19));
  sum.Run();
  EXPECT_EQ(Bits(sum.accum()), Bits(sum.ExpectedAccum()));
}

TEST_P(SumSegmentsTest, CopiesSegmentsOfOneToken) {
  std::vector<std::int32_t> segments;
  for (std::int32_t t = 0; t < 40; ++t) segments.push_back(39 - t);
  SegmentSum sum(40, GetParam(), segments);
  sum.Run();
  EXPECT_EQ(Bits(sum.accum()), Bits(sum.ExpectedAccum()));
}

TEST_P(SumSegmentsTest, AddsLongSegmentsInRuns) {
  SegmentSum sum(3, GetParam(), RandomSegments(900, 3));
  sum.Run();
  EXPECT_EQ(Bits(sum.accum()), Bits(sum.ExpectedAccum()));
}

TEST_P(SumSegmentsTest, AddsSquaresByThePairwiseTree) {
  SegmentSum sum(19, GetParam(), RandomSegments(150, 19));
  sum.Run();
  EXPECT_EQ(Bits(sum.stats()), Bits(sum.ExpectedStats()));
}

INSTANTIATE_TEST_SUITE_P(Widths, SumSegmentsTest,
                         ::testing::ValuesIn(kTestWidths),
                         [](const auto& info) {
                           return "Width" + std::to_string(info.param);
                         });

class RunLengthTest : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(RunLengthTest, OneSegmentOfManyTokensFollowsTheRunsRule) {
  const auto num_tokens = static_cast<std::size_t>(GetParam());
  SegmentSum sum(1, 3, std::vector<std::int32_t>(num_tokens, 0));
  sum.Run();
  EXPECT_EQ(Bits(sum.accum()), Bits(sum.ExpectedAccum()));
}

INSTANTIATE_TEST_SUITE_P(Lengths, RunLengthTest,
                         ::testing::Values(1, 2, 63, 64, 65, 127, 128, 129,
                                           4095, 4096, 4097, 4160, 4161, 8191,
                                           8192, 262144, 262145, 266305),
                         [](const auto& info) {
                           return "Tokens" + std::to_string(info.param);
                         });

TEST(SumSegmentsTest, SegmentsThatAlternateKeepTheirTokensInOrder) {
  std::vector<std::int32_t> segments;
  for (int t = 0; t < 1000; ++t) segments.push_back(4 - t % 5);
  SegmentSum sum(5, 2, segments);
  sum.Run();
  EXPECT_EQ(Bits(sum.accum()), Bits(sum.ExpectedAccum()));
}

TEST(SumSegmentsTest, SegmentsWithoutTokensAreZero) {
  SegmentSum sum(4, 3, {1, 1, 3});
  sum.Run();
  EXPECT_EQ(Bits(sum.accum()), Bits(sum.ExpectedAccum()));
  EXPECT_EQ(Bits({sum.stats()[0], sum.stats()[2]}), Bits({0.0F, 0.0F}));
}

TEST(SumSegmentsTest, ABatchThatIsLeftOutIsZero) {
  SegmentSum sum(4, 3, std::vector<std::int32_t>(100, kNoSegment));
  sum.Run();
  EXPECT_EQ(Bits(sum.accum()), Bits(std::vector<float>(12, 0.0F)));
  EXPECT_EQ(Bits(sum.stats()), Bits(std::vector<float>(4, 0.0F)));
}

TEST(SumSegmentsTest, AnEmptyBatchIsZero) {
  SegmentSum sum(2, 3, {});
  sum.Run();
  EXPECT_EQ(Bits(sum.accum()), Bits(std::vector<float>(6, 0.0F)));
}

TEST(SumSegmentsTest, IndicesThatAreNoSlotAreLeftOut) {
  SegmentSum sum(3, 2, {0, 3, kMinInt32, 2, kMaxInt32, -2, 4, 2, -1});
  sum.Run();
  EXPECT_EQ(Bits(sum.accum()), Bits(sum.ExpectedAccum()));
}

TEST(SumSegmentsTest, OneTokenKeepsTheSignOfZero) {
  SegmentSum sum(1, 1, {0});
  sum.SetGradient(0, 0, -0.0F);
  sum.Run();
  EXPECT_EQ(Bits(sum.accum()), Bits({-0.0F}));
}

TEST(SumSegmentsTest, KeepsSubnormals) {
  constexpr float kTiny = 0x1p-133F;  // the smallest bfloat16
  SegmentSum sum(1, 9, {0, 0});
  for (int c = 0; c < 9; ++c) {
    sum.SetGradient(0, c, kTiny);
    sum.SetGradient(1, c, kTiny);
  }
  sum.Run();
  EXPECT_EQ(sum.accum(), std::vector<float>(9, 2 * kTiny));
}

TEST(SumSegmentsTest, InfinityReachesSumAndStats) {
  SegmentSum sum(2, 9, {0, 1, 1});
  sum.SetGradient(1, 8, -kInf);
  sum.Run();
  EXPECT_EQ(sum.accum()[17], -kInf);
  EXPECT_EQ(sum.stats()[1], kInf);
}

TEST(SumSegmentsTest, NanReachesTheStatsOfItsSegmentOnly) {
  SegmentSum sum(2, 9, {0, 1, 1});
  sum.SetGradient(2, 3, std::numeric_limits<float>::quiet_NaN());
  sum.Run();
  EXPECT_FALSE(std::isnan(sum.stats()[0]));
  EXPECT_TRUE(std::isnan(sum.stats()[1]));
}

TEST(SumSegmentsTest, TheFreeOrderIsTheFixedOrder) {
  SegmentSum sum(3, 5, RandomSegments(900, 3));
  sum.args().deterministic = false;
  sum.Run();
  EXPECT_EQ(Bits(sum.accum()), Bits(sum.ExpectedAccum()));
}

TEST(SumSegmentsTest, ReadsGradientsBehind31BitsOfElements) {
  SparseArray grads(kLargeRows * kLargeWidth);
  if (!grads.mapped())
    GTEST_SKIP() << "9 GB of address space are not to be had";
  std::vector<std::int32_t> segments(kLargeRows, kNoSegment);
  segments.back() = 0;
  grads.data()[kLargeRows * kLargeWidth - 1] = NaiveBf16(3.0F);
  SegmentSum sum(1, kLargeWidth, segments);
  sum.args().grads = grads.data();
  sum.Run();
  EXPECT_EQ(sum.accum().front(), 0.0F);
  EXPECT_EQ(sum.accum().back(), 3.0F);
  EXPECT_EQ(sum.stats().front(), 9.0F);
}

}  // namespace
}  // namespace xrex::async_emb::host_kernels
