// The kernels that move rows, and the sum over ranks.
#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_host.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/device.hpp"
#include "phoenix/xrex/cuda/async_emb/src/types.hpp"
#include "tests/xrex/cuda/async_emb/src/kernel_test_utils.hpp"

namespace xrex::async_emb::host_kernels {
namespace {

std::string WidthName(const ::testing::TestParamInfo<std::int64_t>& info) {
  return "Width" + std::to_string(info.param);
}

// A table of random bits and the arguments to read it.
struct Gather {
  Gather(std::int64_t vocab_rows, std::int64_t width,
         const std::vector<std::int32_t>& wanted)
      : ids(wanted),
        table(vocab_rows * width),
        rows(ids.size() * width, Bf16Bits{0x5A5A}) {
    Values values(7);
    for (std::int64_t i = 0; i < table.size(); ++i) {
      table[i] = values.AnyBf16();
    }
    args = {.ids = ids.data(),
            .num_ids = ids.size(),
            .table = table.data(),
            .vocab_rows = vocab_rows,
            .width = width,
            .count_end = ids.size(),
            .rows = rows.data()};
  }

  void Run() { GatherRows(args, counters); }

  std::vector<Bf16Bits> TableRow(std::int64_t row) const {
    const Bf16Bits* from = table.data() + row * args.width;
    return std::vector<Bf16Bits>(from, from + args.width);
  }

  std::vector<Bf16Bits> ResultRow(std::int64_t i) const {
    const Bf16Bits* from = rows.data() + i * args.width;
    return std::vector<Bf16Bits>(from, from + args.width);
  }

  GuardedArray<std::int32_t> ids;
  GuardedArray<Bf16Bits> table;
  GuardedArray<Bf16Bits> rows;
  GatherArgs args;
  StepCounters counters;
};

class GatherRowsTest : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(GatherRowsTest, CopiesTheBitsOfEachRow) {
  constexpr std::int64_t kVocabRows = 37;
  std::vector<std::int32_t> ids;
  Values values(11);
  for (int i = 0; i < 101; ++i) {
    ids.push_back(static_cast<std::int32_t>(values.Below(kVocabRows)));
  }
  Gather gather(kVocabRows, GetParam(), ids);
  gather.Run();
  for (std::int64_t i = 0; i < gather.ids.size(); ++i) {
    ASSERT_EQ(gather.ResultRow(i), gather.TableRow(gather.ids[i])) << i;
  }
}

TEST_P(GatherRowsTest, WritesNothingBesideTheRows) {
  Gather gather(5, GetParam(), {4, 0, -5, 5, kMinInt32});
  gather.Run();
  EXPECT_TRUE(gather.rows.GuardsIntact());
}

TEST_P(GatherRowsTest, GivesZerosForIdsOutOfRangeIfAsked) {
  Gather gather(5, GetParam(), {5, 2, -6, kMinInt32, kMaxInt32, -1});
  gather.args.out_of_range = OutOfRange::kZero;
  gather.Run();
  const std::vector<Bf16Bits> zeros(static_cast<std::size_t>(GetParam()), 0);
  EXPECT_EQ(gather.ResultRow(0), zeros);
  EXPECT_EQ(gather.ResultRow(1), gather.TableRow(2));
  EXPECT_EQ(gather.ResultRow(2), zeros);
  EXPECT_EQ(gather.ResultRow(3), zeros);
  EXPECT_EQ(gather.ResultRow(4), zeros);
  EXPECT_EQ(gather.ResultRow(5), gather.TableRow(4));
}

INSTANTIATE_TEST_SUITE_P(Widths, GatherRowsTest,
                         ::testing::ValuesIn(kTestWidths), WidthName);

TEST(GatherRowsTest, NegativeIdsCountFromTheEndOnce) {
  Gather gather(5, 3, {-1, -5, 0, 4});
  gather.Run();
  EXPECT_EQ(gather.ResultRow(0), gather.TableRow(4));
  EXPECT_EQ(gather.ResultRow(1), gather.TableRow(0));
  EXPECT_EQ(gather.ResultRow(2), gather.TableRow(0));
  EXPECT_EQ(gather.ResultRow(3), gather.TableRow(4));
}

TEST(GatherRowsTest, IdsOutOfRangeReadTheClampedRow) {
  Gather gather(5, 3, {5, kMaxInt32, -6, kMinInt32});
  gather.Run();
  EXPECT_EQ(gather.ResultRow(0), gather.TableRow(4));
  EXPECT_EQ(gather.ResultRow(1), gather.TableRow(4));
  EXPECT_EQ(gather.ResultRow(2), gather.TableRow(0));
  EXPECT_EQ(gather.ResultRow(3), gather.TableRow(0));
}

TEST(GatherRowsTest, CountsIdsOutOfRangeWithinTheOwnTokens) {
  Gather gather(5, 3, {5, -6, 0, -5, 5, -1, kMinInt32, 7});
  gather.args.count_begin = 1;
  gather.args.count_end = 7;
  gather.Run();
  EXPECT_EQ(gather.counters.ids_out_of_range, 3);
}

TEST(GatherRowsTest, AddsToTheCount) {
  Gather gather(5, 3, {5, -6, 0});
  gather.Run();
  gather.Run();
  EXPECT_EQ(gather.counters.ids_out_of_range, 4);
}

TEST(GatherRowsTest, OneIdInEveryPositionReadsOneRow) {
  Gather gather(5, 3, std::vector<std::int32_t>(1000, 3));
  gather.Run();
  for (std::int64_t i = 0; i < 1000; ++i) {
    ASSERT_EQ(gather.ResultRow(i), gather.TableRow(3));
  }
}

TEST(GatherRowsTest, AnEmptyBatchWritesNothing) {
  Gather gather(5, 3, {});
  gather.Run();
  EXPECT_TRUE(gather.rows.GuardsIntact());
}

TEST(GatherRowsTest, AnEmptyTableGivesZerosAndCountsEveryId) {
  Gather gather(0, 3, {0, -1});
  gather.Run();
  EXPECT_EQ(gather.rows.values(), std::vector<Bf16Bits>(6, 0));
  EXPECT_EQ(gather.counters.ids_out_of_range, 2);
}

TEST(GatherRowsTest, ReadsRowsBehind31BitsOfElements) {
  SparseArray table(kLargeRows * kLargeWidth);
  if (!table.mapped())
    GTEST_SKIP() << "9 GB of address space are not to be had";
  constexpr std::int32_t kRow = kLargeRows - 3;
  table.data()[kRow * kLargeWidth] = 0x1234;
  table.data()[kRow * kLargeWidth + kLargeWidth - 1] = 0x5678;
  Gather gather(1, kLargeWidth, {kRow, -3});
  gather.args.table = table.data();
  gather.args.vocab_rows = kLargeRows;
  gather.Run();
  std::vector<Bf16Bits> expected(kLargeWidth, 0);
  expected.front() = 0x1234;
  expected.back() = 0x5678;
  EXPECT_EQ(gather.ResultRow(0), expected);
  EXPECT_EQ(gather.ResultRow(1), expected);
}

TEST(GatherRowsTest, ReadsRowsBehind31BitsOfRows) {
  constexpr std::int64_t kRows = (std::int64_t{1} << 32) + 10;
  SparseArray table(kRows);
  if (!table.mapped()) {
    GTEST_SKIP() << "9 GB of address space are not to be had";
  }
  table.data()[kRows - 1] = 0x1234;
  table.data()[kRows + kMinInt32] = 0x5678;
  Gather gather(1, 1, {-1, kMinInt32});
  gather.args.table = table.data();
  gather.args.vocab_rows = kRows;
  gather.Run();
  EXPECT_EQ(gather.rows.values(), (std::vector<Bf16Bits>{0x1234, 0x5678}));
}

// World size and shard width.
class SlicesTest
    : public ::testing::TestWithParam<std::tuple<std::int32_t, std::int64_t>> {
 protected:
  static constexpr std::int64_t kTokens = 9;

  SlicesTest()
      : shape_{.world_size = std::get<0>(GetParam()),
               .tokens_per_rank = kTokens,
               .shard_width = std::get<1>(GetParam())},
        rows_(kTokens * shape_.world_size * shape_.shard_width),
        slices_(rows_.size()) {}

  static void FillAny(GuardedArray<Bf16Bits>& array) {
    Values values(3);
    for (std::int64_t i = 0; i < array.size(); ++i) array[i] = values.AnyBf16();
  }

  // rows [T, R * w] against slices [R, T, w].
  void ExpectSameValues() const {
    const std::int64_t width = shape_.shard_width;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t r = 0; r < shape_.world_size; ++r) {
        for (std::int64_t c = 0; c < width; ++c) {
          ASSERT_EQ(rows_[(t * shape_.world_size + r) * width + c],
                    slices_[(r * kTokens + t) * width + c]);
        }
      }
    }
  }

  SliceShape shape_;
  GuardedArray<Bf16Bits> rows_;
  GuardedArray<Bf16Bits> slices_;
};

TEST_P(SlicesTest, CombineSlicesPutsTheRanksColumnsSideBySide) {
  FillAny(slices_);
  CombineSlices(shape_, slices_.data(), rows_.data());
  ExpectSameValues();
  EXPECT_TRUE(rows_.GuardsIntact());
}

TEST_P(SlicesTest, RouteGradientsCutsRowsIntoTheRanksColumns) {
  FillAny(rows_);
  RouteGradients(shape_, rows_.data(), slices_.data());
  ExpectSameValues();
  EXPECT_TRUE(slices_.GuardsIntact());
}

INSTANTIATE_TEST_SUITE_P(Shapes, SlicesTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 8),
                                            ::testing::ValuesIn(kTestWidths)),
                         [](const auto& info) {
                           return "Ranks" +
                                  std::to_string(std::get<0>(info.param)) +
                                  "Width" +
                                  std::to_string(std::get<1>(info.param));
                         });

TEST(FillNanTest, FillsWithQuietNanAndNothingBeside) {
  GuardedArray<Bf16Bits> array(33);
  FillNan(array.data(), 33);
  EXPECT_EQ(array.values(), std::vector<Bf16Bits>(33, 0x7FC0));
  EXPECT_TRUE(array.GuardsIntact());
}

class ReduceRanksTest : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(ReduceRanksTest, AddsByThePairwiseTreeOverRanks) {
  constexpr std::int64_t kCount = 1100;
  const std::int64_t num_ranks = GetParam();
  Values values(5);
  std::vector<GuardedArray<float>> parts;
  std::vector<const float*> pointers;
  for (std::int64_t r = 0; r < num_ranks; ++r) {
    parts.emplace_back(kCount);
    for (std::int64_t i = 0; i < kCount; ++i) parts.back()[i] = values.Float();
  }
  for (const auto& part : parts) pointers.push_back(part.data());
  GuardedArray<float> out(kCount);
  ReduceRanks(pointers.data(), static_cast<int>(num_ranks), kCount, out.data());
  std::vector<float> expected;
  for (std::int64_t i = 0; i < kCount; ++i) {
    std::vector<float> leaves;
    for (const auto& part : parts) leaves.push_back(part[i]);
    expected.push_back(NaivePairs(leaves));
  }
  EXPECT_EQ(Bits(out.values()), Bits(expected));
  EXPECT_TRUE(out.GuardsIntact());
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, ReduceRanksTest,
                         ::testing::Values(1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16),
                         [](const auto& info) {
                           return "Ranks" + std::to_string(info.param);
                         });

TEST(ReduceRanksTest, NothingToAddWritesNothing) {
  const float value = 1.0F;
  const std::array<const float*, 2> parts = {&value, &value};
  GuardedArray<float> out(0);
  ReduceRanks(parts.data(), 2, 0, out.data());
  EXPECT_TRUE(out.GuardsIntact());
}

}  // namespace
}  // namespace xrex::async_emb::host_kernels
