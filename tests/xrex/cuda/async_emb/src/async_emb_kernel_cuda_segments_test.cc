// The segment sums of an update on CUDA, against the host kernel. Needs a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel.hpp"
#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_host.hpp"
#include "phoenix/xrex/cuda/async_emb/src/device.hpp"
#include "tests/xrex/cuda/async_emb/src/kernel_cuda_test_utils.hpp"

namespace xrex::async_emb::cuda_kernels {
namespace {

constexpr std::int32_t kNoSegment = -1;  // left out on purpose
constexpr float kUnwritten = 12345.0F;
constexpr Bf16Bits kMinusZero = 0x8000;
constexpr Bf16Bits kInfinity = 0x7F80;
constexpr Bf16Bits kNan = 0xFFC1;

std::string WidthName(const ::testing::TestParamInfo<std::int64_t>& info) {
  return "Width" + std::to_string(info.param);
}

// What a call of SumSegments gives.
struct Sums {
  std::vector<float> accum;
  std::vector<float> stats;
};

// One batch, summed by device and host.
class SegmentSum {
 public:
  SegmentSum(std::int64_t num_unique, std::int64_t width,
             std::vector<std::int32_t> segments)
      : num_unique_(num_unique), width_(width), segments_(std::move(segments)) {
    Values values(17);
    grads_.resize(segments_.size() * static_cast<std::size_t>(width));
    for (Bf16Bits& grad : grads_) grad = values.Bf16();
  }

  Bf16Bits& grad(std::int64_t token, std::int64_t column) {
    return grads_[static_cast<std::size_t>(token * width_ + column)];
  }
  std::vector<Bf16Bits>& grads() { return grads_; }

  Sums OnHost() const {
    Sums sums = {std::vector<float>(Count(num_unique_ * width_)),
                 std::vector<float>(Count(num_unique_))};
    std::vector<std::byte> scratch(host_kernels::ScratchBytes(Spec()));
    SegmentSumArgs args = Sizes();
    args.segments = segments_.data();
    args.grads = grads_.data();
    args.accum = sums.accum.data();
    args.partial_stats = sums.stats.data();
    host_kernels::SumSegments(args, scratch.data());
    return sums;
  }

  Sums OnDevice(std::int64_t shift = 0) const {
    const DeviceArray<std::int32_t> segments(segments_, shift);
    const DeviceArray<Bf16Bits> grads(grads_, shift);
    const DeviceArray<float> accum(num_unique_ * width_, kUnwritten, shift);
    const DeviceArray<float> stats(num_unique_, kUnwritten, shift);
    const DeviceArray<std::uint32_t> scratch = MakeScratch(Spec());
    SegmentSumArgs args = Sizes();
    args.segments = segments.data();
    args.grads = grads.data();
    args.accum = accum.data();
    args.partial_stats = stats.data();
    const TestStream stream;
    SumSegments(stream.get(), args, BytesOf(scratch));
    stream.Sync();
    scratch.Download();  // checks its guards
    return {accum.Download(), stats.Download()};
  }

  void ExpectAsHost(std::int64_t shift = 0) const {
    const Sums expected = OnHost();
    const Sums actual = OnDevice(shift);
    // One comparison each: a failure of all columns would be a long read.
    EXPECT_TRUE(BitsButNan(actual.accum) == BitsButNan(expected.accum))
        << "width " << width_ << ", shift " << shift
        << ": sums differ first at "
        << FirstDifference(actual.accum, expected.accum);
    EXPECT_TRUE(BitsButNan(actual.stats) == BitsButNan(expected.stats))
        << "width " << width_ << ", shift " << shift
        << ": squares differ first at "
        << FirstDifference(actual.stats, expected.stats);
  }

 private:
  static std::size_t Count(std::int64_t n) {
    return static_cast<std::size_t>(n);
  }

  static std::int64_t FirstDifference(const std::vector<float>& a,
                                      const std::vector<float>& b) {
    const auto left = BitsButNan(a);
    const auto right = BitsButNan(b);
    return std::mismatch(left.begin(), left.end(), right.begin()).first -
           left.begin();
  }

  PipelineSpec Spec() const {
    return {.tokens_per_rank = static_cast<std::int64_t>(segments_.size()),
            .shard_width = width_,
            .emb_width = width_,
            .num_unique = num_unique_};
  }

  SegmentSumArgs Sizes() const {
    return {.num_tokens = static_cast<std::int64_t>(segments_.size()),
            .num_unique = num_unique_,
            .width = width_,
            .deterministic = true};
  }

  std::int64_t num_unique_;
  std::int64_t width_;
  std::vector<std::int32_t> segments_;
  std::vector<Bf16Bits> grads_;
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

// Segment k has about 1 / k of the tokens of segment 1.
std::vector<std::int32_t> ZipfSegments(std::int64_t num_tokens,
                                       std::int64_t num_unique) {
  Values values(29);
  std::vector<std::int32_t> segments;
  while (static_cast<std::int64_t>(segments.size()) < num_tokens) {
    const double uniform =
        static_cast<double>(values.Below(1 << 30)) / (1 << 30);
    const auto rank = std::pow(static_cast<double>(num_unique), uniform);
    segments.push_back(static_cast<std::int32_t>(rank) - 1);
  }
  return segments;
}

class SumWidthTest : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(SumWidthTest, ShortSegments) {
  for (const std::int64_t shift : kTestShifts) {
    SegmentSum(19, GetParam(), RandomSegments(150, 19)).ExpectAsHost(shift);
  }
}

TEST_P(SumWidthTest, SegmentsOfSeveralRuns) {
  for (const std::int64_t shift : kTestShifts) {
    SegmentSum(3, GetParam(), RandomSegments(700, 3)).ExpectAsHost(shift);
  }
}

INSTANTIATE_TEST_SUITE_P(Widths, SumWidthTest,
                         ::testing::ValuesIn(CudaTestWidths()), WidthName);

// Wide rows: several tiles of columns, many leaves for each lane.
INSTANTIATE_TEST_SUITE_P(Wide, SumWidthTest,
                         ::testing::Values(384, 512, 640, 1000, 2048, 3072),
                         WidthName);

// Tokens of one segment among others, around the lengths of runs and of runs of
// runs.
class SumLengthTest : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(SumLengthTest, OneSegmentAmongOthers) {
  std::vector<std::int32_t> segments = RandomSegments(40, 11);
  segments.insert(segments.end(), static_cast<std::size_t>(GetParam()), 11);
  const std::vector<std::int32_t> behind = RandomSegments(40, 5);
  for (const std::int32_t segment : behind) segments.push_back(segment + 12);
  std::shuffle(segments.begin(), segments.end(), std::mt19937_64(5));
  for (const std::int64_t width : {1, 3, 8, 24, 128}) {
    SegmentSum(17, width, segments).ExpectAsHost();
  }
}

TEST_P(SumLengthTest, AllTokensInOneSegment) {
  const std::vector<std::int32_t> segments(static_cast<std::size_t>(GetParam()),
                                           2);
  for (const std::int64_t width : {1, 3, 8, 24, 128}) {
    SegmentSum(4, width, segments).ExpectAsHost();
  }
}

INSTANTIATE_TEST_SUITE_P(Lengths, SumLengthTest,
                         ::testing::Values(1, 2, 31, 32, 33, 63, 64, 65, 127,
                                           128, 129, 4095, 4096, 4097, 8200));

TEST(SumSegmentsTest, SegmentsOfManyLengthsSideBySide) {
  // Neighbours of every length about a run and two: none takes another's place.
  std::vector<std::int32_t> segments;
  std::int32_t segment = 0;
  for (std::size_t length = 60; length < 200; ++length, ++segment) {
    segments.insert(segments.end(), length, segment);
  }
  std::shuffle(segments.begin(), segments.end(), std::mt19937_64(6));
  SegmentSum(segment, 8, segments).ExpectAsHost();
}

TEST(SumSegmentsTest, AllEqualOverFourLevels) {
  SegmentSum(1, 8, std::vector<std::int32_t>(300'000, 0)).ExpectAsHost();
}

TEST(SumSegmentsTest, ZipfTokens) {
  SegmentSum(20'000, 64, ZipfSegments(50'000, 20'000)).ExpectAsHost();
}

TEST(SumSegmentsTest, EveryTokenItsOwnSegment) {
  std::vector<std::int32_t> segments(20'000);
  std::iota(segments.begin(), segments.end(), 0);
  std::shuffle(segments.begin(), segments.end(), std::mt19937_64(7));
  SegmentSum(20'000, 128, segments).ExpectAsHost();
}

TEST(SumSegmentsTest, FarMoreSlotsThanTokens) {
  SegmentSum(100'000, 12, {99'999, 0, 31, 32, 99'999}).ExpectAsHost();
}

TEST(SumSegmentsTest, OneTokenOneSlot) { SegmentSum(1, 1, {0}).ExpectAsHost(); }

TEST(SumSegmentsTest, AllTokensLeftOutGiveZeros) {
  const Sums sums =
      SegmentSum(100, 24, std::vector<std::int32_t>(3000, kNoSegment))
          .OnDevice();
  EXPECT_EQ(Bits(sums.accum), std::vector<std::uint32_t>(2400, 0));
  EXPECT_EQ(Bits(sums.stats), std::vector<std::uint32_t>(100, 0));
}

TEST(SumSegmentsTest, SegmentsThatAreNoIndicesAreLeftOut) {
  SegmentSum(5, 16, {5, 0, kMinInt32, 4, kMaxInt32, -2, 6, 4, 0, kNoSegment})
      .ExpectAsHost();
}

TEST(SumSegmentsTest, AMinusZeroStaysOne) {
  SegmentSum sum(2, 8, {1, 0, 1});
  sum.grads().assign(sum.grads().size(), kMinusZero);
  const Sums sums = sum.OnDevice();
  EXPECT_EQ(Bits(sums.accum), std::vector<std::uint32_t>(16, 0x80000000));
  EXPECT_EQ(Bits(sums.stats), std::vector<std::uint32_t>(2, 0));
}

TEST(SumSegmentsTest, SubnormalsAreKept) {
  SegmentSum sum(7, 32, RandomSegments(600, 7));
  Values values(5);
  for (Bf16Bits& grad : sum.grads()) {
    grad = static_cast<Bf16Bits>(values.Below(0x80) + 0x8000 * values.Below(2));
  }
  sum.ExpectAsHost();
}

TEST(SumSegmentsTest, ANanStaysInItsSegmentAndColumn) {
  for (const std::int64_t width : {24, 64}) {
    SegmentSum sum(3, width, RandomSegments(900, 3));
    sum.grad(450, 5) = kNan;
    sum.grad(451, 7) = kInfinity;
    sum.ExpectAsHost();
  }
}

TEST(SumSegmentsTest, TheSameBitsFromRunToRun) {
  const SegmentSum sum(500, 64, ZipfSegments(20'000, 500));
  const Sums once = sum.OnDevice();
  const Sums again = sum.OnDevice();
  EXPECT_EQ(Bits(once.accum), Bits(again.accum));
  EXPECT_EQ(Bits(once.stats), Bits(again.stats));
}

TEST(SumSegmentsTest, HugeGradientsAreReadToTheirEnd) {
  // The gradients are those of a table's rows, token by token.
  HugeTable grads;
  if (!grads.fits()) GTEST_SKIP() << "the device's memory is too small";
  const std::vector<Bf16Bits> row(kHugeWidth, 0x3FC0);  // 1.5
  grads.SetRow(kHugeRows - 1, row);
  const DeviceArray<std::int32_t> segments(kHugeRows, 0);
  const DeviceArray<float> accum(kHugeWidth, kUnwritten);
  const DeviceArray<float> stats(1, kUnwritten);
  const PipelineSpec spec = {.tokens_per_rank = kHugeRows,
                             .shard_width = kHugeWidth,
                             .emb_width = kHugeWidth,
                             .num_unique = 1};
  const DeviceArray<std::uint32_t> scratch = MakeScratch(spec);
  const SegmentSumArgs args = {.segments = segments.data(),
                               .grads = grads.data(),
                               .num_tokens = kHugeRows,
                               .num_unique = 1,
                               .width = kHugeWidth,
                               .deterministic = true,
                               .accum = accum.data(),
                               .partial_stats = stats.data()};
  const TestStream stream;
  SumSegments(stream.get(), args, BytesOf(scratch));
  stream.Sync();
  EXPECT_EQ(accum.Download(), std::vector<float>(kHugeWidth, 1.5F));
  EXPECT_EQ(stats.Download()[0], 144.0F);
}

}  // namespace
}  // namespace xrex::async_emb::cuda_kernels
