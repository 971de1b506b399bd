// The CUDA kernels that move rows, and the sum over ranks, against the host
// kernels. Needs a GPU.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel.hpp"
#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_host.hpp"
#include "phoenix/xrex/cuda/async_emb/src/bfloat16.hpp"
#include "phoenix/xrex/cuda/async_emb/src/device.hpp"
#include "tests/xrex/cuda/async_emb/src/kernel_cuda_test_utils.hpp"

namespace xrex::async_emb::cuda_kernels {
namespace {

constexpr Bf16Bits kUnwritten = 0x5A5A;

std::string WidthName(const ::testing::TestParamInfo<std::int64_t>& info) {
  return "Width" + std::to_string(info.param);
}

std::vector<Bf16Bits> AnyBf16(std::int64_t count) {
  Values values(7);
  std::vector<Bf16Bits> bits;
  for (std::int64_t i = 0; i < count; ++i) bits.push_back(values.AnyBf16());
  return bits;
}

// One gather by device and host over the same random bits.
struct Gather {
  std::vector<std::int32_t> ids;
  std::int64_t vocab_rows = 97;
  std::int64_t width = 8;
  OutOfRange out_of_range = OutOfRange::kClip;
  std::int64_t count_begin = 0;
  std::int64_t count_end = 0;
  std::int64_t shift = 0;

  void ExpectAsHost() const {
    const std::vector<Bf16Bits> table = AnyBf16(vocab_rows * width);
    std::vector<Bf16Bits> expected(ids.size() *
                                   static_cast<std::size_t>(width));
    GatherArgs args = {.ids = ids.data(),
                       .num_ids = static_cast<std::int64_t>(ids.size()),
                       .table = table.data(),
                       .vocab_rows = vocab_rows,
                       .width = width,
                       .out_of_range = out_of_range,
                       .count_begin = count_begin,
                       .count_end = count_end,
                       .rows = expected.data()};
    StepCounters host_counters;
    host_kernels::GatherRows(args, host_counters);

    const DeviceArray<std::int32_t> device_ids(ids, shift);
    const DeviceArray<Bf16Bits> device_table(table, shift);
    const DeviceArray<Bf16Bits> rows(args.num_ids * width, kUnwritten, shift);
    const DeviceArray<Counters> counters(1, Counters{});
    args.ids = device_ids.data();
    args.table = device_table.data();
    args.rows = rows.data();
    const TestStream stream;
    GatherRows(stream.get(), args, counters.data());
    stream.Sync();
    EXPECT_EQ(rows.Download(), expected);
    EXPECT_EQ(counters.Download()[0].ids_out_of_range,
              host_counters.ids_out_of_range);
  }
};

// Ids at both ends and outside, and some within.
std::vector<std::int32_t> IdsOf(std::int64_t vocab_rows, std::int64_t count) {
  const auto rows = static_cast<std::int32_t>(vocab_rows);
  std::vector<std::int32_t> ids = {0,    rows - 1,  -1,        -rows,     rows,
                                   5000, -rows - 1, kMinInt32, kMaxInt32, -9};
  Values values(11);
  while (static_cast<std::int64_t>(ids.size()) < count) {
    ids.push_back(static_cast<std::int32_t>(values.Below(vocab_rows)));
  }
  return ids;
}

class GatherWidthTest : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(GatherWidthTest, ReadsTheRowsThatTheHostReads) {
  for (const std::int64_t shift : kTestShifts) {
    Gather gather = {.ids = IdsOf(97, 133), .width = GetParam()};
    gather.shift = shift;
    gather.count_begin = 3;
    gather.count_end = 100;
    gather.ExpectAsHost();
    gather.out_of_range = OutOfRange::kZero;
    gather.ExpectAsHost();
  }
}

INSTANTIATE_TEST_SUITE_P(Widths, GatherWidthTest,
                         ::testing::ValuesIn(CudaTestWidths()), WidthName);

TEST(GatherRowsTest, OneId) {
  Gather gather = {.ids = {-3}, .count_end = 1};
  gather.ExpectAsHost();
}

TEST(GatherRowsTest, OneRow) {
  Gather gather = {.ids = {0, 0, -1, 1, -2}, .vocab_rows = 1, .count_end = 5};
  gather.ExpectAsHost();
}

TEST(GatherRowsTest, AnEmptyTableGivesZerosAndCountsAll) {
  Gather gather = {.ids = {0, 1, -1, 7}, .vocab_rows = 0, .count_end = 4};
  gather.ExpectAsHost();
}

TEST(GatherRowsTest, MoreIdsThanTheDeviceHasThreads) {
  const std::int64_t count = 300'001;
  Gather gather = {.ids = IdsOf(97, count), .width = 16};
  gather.count_end = count;
  gather.ExpectAsHost();
}

TEST(GatherRowsTest, AllIdsOutOfRangeAreCounted) {
  Gather gather = {.ids = std::vector<std::int32_t>(70'000, 97)};
  gather.count_begin = 1;
  gather.count_end = 69'999;
  gather.ExpectAsHost();
}

TEST(GatherRowsTest, HugeTablesAreReadToTheirEnd) {
  HugeTable table;
  if (!table.fits()) GTEST_SKIP() << "the device's memory is too small";
  const std::vector<Bf16Bits> row = AnyBf16(kHugeWidth);
  table.SetRow(kHugeRows - 1, row);
  const DeviceArray<std::int32_t> ids(
      std::vector<std::int32_t>{-1, 0, kHugeRows - 1});
  const DeviceArray<Bf16Bits> rows(3 * kHugeWidth, kUnwritten);
  const DeviceArray<Counters> counters(1, Counters{});
  const GatherArgs args = {.ids = ids.data(),
                           .num_ids = 3,
                           .table = table.data(),
                           .vocab_rows = kHugeRows,
                           .width = kHugeWidth,
                           .rows = rows.data()};
  const TestStream stream;
  GatherRows(stream.get(), args, counters.data());
  stream.Sync();
  std::vector<Bf16Bits> expected = row;
  expected.resize(2 * kHugeWidth, 0);
  expected.insert(expected.end(), row.begin(), row.end());
  EXPECT_EQ(rows.Download(), expected);
}

class SliceWidthTest : public ::testing::TestWithParam<std::int64_t> {
 protected:
  void ExpectAsHost(const SliceShape& shape, std::int64_t shift) {
    const std::int64_t size =
        shape.world_size * shape.tokens_per_rank * shape.shard_width;
    const std::vector<Bf16Bits> from = AnyBf16(size);
    const DeviceArray<Bf16Bits> device_from(from, shift);
    const DeviceArray<Bf16Bits> combined(size, kUnwritten, shift);
    const DeviceArray<Bf16Bits> routed(size, kUnwritten, shift);
    TestGuard guard(Pipeline::kLookup, {.ok = 1});
    const TestStream stream;
    CombineSlices(stream.get(), guard.view(), shape, device_from.data(),
                  combined.data());
    RouteGradients(stream.get(), shape, device_from.data(), routed.data());
    stream.Sync();
    std::vector<Bf16Bits> expected(from.size());
    host_kernels::CombineSlices(shape, from.data(), expected.data());
    EXPECT_EQ(combined.Download(), expected);
    host_kernels::RouteGradients(shape, from.data(), expected.data());
    EXPECT_EQ(routed.Download(), expected);
  }
};

TEST_P(SliceWidthTest, GoWhereTheHostPutsThem) {
  for (const std::int64_t shift : kTestShifts) {
    ExpectAsHost({1, 5, GetParam()}, shift);
    ExpectAsHost({3, 77, GetParam()}, shift);
  }
}

INSTANTIATE_TEST_SUITE_P(Widths, SliceWidthTest,
                         ::testing::ValuesIn(CudaTestWidths()), WidthName);

using SliceTest = SliceWidthTest;

TEST_P(SliceTest, OfManyTokens) { ExpectAsHost({8, GetParam(), 8}, 0); }

INSTANTIATE_TEST_SUITE_P(Tokens, SliceTest, ::testing::Values(1, 64, 40'000));

TEST(CombineSlicesTest, GivesNanForAStepThatDidNotEndWell) {
  const SliceShape shape = {2, 100, 24};
  const DeviceArray<Bf16Bits> slices(AnyBf16(4800));
  const DeviceArray<Bf16Bits> out(4800, kUnwritten);
  TestGuard guard(Pipeline::kLookup);
  const TestStream stream;
  CombineSlices(stream.get(), guard.view(), shape, slices.data(), out.data());
  stream.Sync();
  EXPECT_EQ(out.Download(), std::vector<Bf16Bits>(4800, kBf16QuietNan));
}

TEST(CombineSlicesTest, GoesByTheDecisionAndNotByAFailureSinceThen) {
  const SliceShape shape = {1, 3, 4};
  const std::vector<Bf16Bits> slices = AnyBf16(12);
  const DeviceArray<Bf16Bits> device_slices(slices);
  const DeviceArray<Bf16Bits> out(12, kUnwritten);
  TestGuard guard(Pipeline::kLookup, {.ok = 1});
  guard.Fail(StepFailure::kExchange);
  const TestStream stream;
  CombineSlices(stream.get(), guard.view(), shape, device_slices.data(),
                out.data());
  stream.Sync();
  EXPECT_EQ(out.Download(), slices);
}

class ReduceRanksTest : public ::testing::TestWithParam<std::int32_t> {};

TEST_P(ReduceRanksTest, AddsAsTheHostDoes) {
  for (const std::int64_t count : {1, 1000}) {
    Values values(3);
    std::vector<float> parts;
    for (std::int64_t i = 0; i < GetParam() * count; ++i) {
      parts.push_back(values.Float());
    }
    parts[0] = -0.0F;
    std::vector<const float*> ranks;
    for (std::int32_t r = 0; r < GetParam(); ++r) {
      ranks.push_back(parts.data() + r * count);
    }
    std::vector<float> expected(static_cast<std::size_t>(count));
    host_kernels::ReduceRanks(ranks.data(), GetParam(), expected.size(),
                              expected.data());
    const DeviceArray<float> device_parts(parts, 1);
    const DeviceArray<float> out(count, 1.0F, 1);
    const TestStream stream;
    ReduceRanks(stream.get(), device_parts.data(), GetParam(), expected.size(),
                out.data());
    stream.Sync();
    EXPECT_EQ(Bits(out.Download()), Bits(expected));
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, ReduceRanksTest,
                         ::testing::Values(1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 100,
                                           kMaxRanks));

}  // namespace
}  // namespace xrex::async_emb::cuda_kernels
