// Rowwise Adagrad on CUDA, against the host kernel. Needs a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel.hpp"
#include "phoenix/xrex/cuda/async_emb/src/bfloat16.hpp"
#include "phoenix/xrex/cuda/async_emb/src/device.hpp"
#include "tests/xrex/cuda/async_emb/src/kernel_cuda_test_apply.hpp"
#include "tests/xrex/cuda/async_emb/src/kernel_cuda_test_utils.hpp"
#include "tests/xrex/cuda/async_emb/src/kernel_test_apply.hpp"

namespace xrex::async_emb::cuda_kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

using host_kernels::kLazy;

std::string WidthName(const ::testing::TestParamInfo<std::int64_t>& info) {
  return "Width" + std::to_string(info.param);
}

// Rows at both ends, negative ids, slots in no use; 67 of the 90 rows, so that
// warps have some of both.
std::vector<std::int32_t> SomeIds() {
  std::vector<std::int32_t> ids = {0, 89, -2, 90, kMaxInt32, kMinInt32, -91};
  for (std::int32_t id = 1; id <= 64; ++id) ids.push_back(id);
  for (int i = 0; i < 33; ++i) ids.push_back(90 + i);
  return ids;
}

class ApplyWidthTest : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(ApplyWidthTest, Eager) {
  for (const std::int64_t shift : kTestShifts) {
    ExpectAsHost(Update(90, GetParam(), SomeIds()), shift);
  }
}

TEST_P(ApplyWidthTest, Lazy) {
  Update update(90, GetParam(), SomeIds());
  update.params = kLazy;
  for (const std::int64_t shift : kTestShifts) ExpectAsHost(update, shift);
}

INSTANTIATE_TEST_SUITE_P(Widths, ApplyWidthTest,
                         ::testing::ValuesIn(CudaTestWidths()), WidthName);

TEST(ApplyTest, OneSlot) { ExpectAsHost(Update(1, 1, {0})); }

TEST(ApplyTest, NoSlotInUse) {
  ExpectAsHost(Update(5, 8, std::vector<std::int32_t>(70, 5)));
}

TEST(ApplyTest, ManySlots) {
  std::vector<std::int32_t> ids;
  for (std::int32_t u = 0; u < 30'000; ++u) ids.push_back(29'999 - u);
  Update update(30'000, 32, ids);
  update.params = kLazy;
  ExpectAsHost(update);
}

TEST(ApplyTest, SlotsWithoutSquaresKeepTheirWeights) {
  Update update(90, 16, SomeIds());
  for (std::size_t u = 0; u < update.ids.size(); u += 2) {
    update.stats[u] = 0.0F;
    for (std::size_t c = 0; c < 16; ++c) update.accum[u * 16 + c] = 0.0F;
  }
  ExpectAsHost(update);
  update.params = kLazy;
  ExpectAsHost(update);
}

TEST(ApplyTest, AnyBitsInTheTable) {
  for (const std::int64_t width : {7, 64}) {
    Update update(90, width, SomeIds());
    Values values(41);
    for (Bf16Bits& value : update.table) value = values.AnyBf16();
    ExpectAsHost(update);
  }
}

TEST(ApplyTest, NanWeightsBecomeQuietNan) {
  for (const std::int64_t width : {1, 64}) {
    Update update(1, width, {0});
    update.table.assign(update.table.size(), 0xFF85);
    TestGuard guard(Pipeline::kUpdate);
    for (const Bf16Bits value : OnDevice(update, guard).table) {
      EXPECT_EQ(value & 0x7FFF, kBf16QuietNan);
    }
  }
}

TEST(ApplyTest, SubnormalSumsWeightsAndStates) {
  Update update(90, 24, SomeIds());
  Values values(43);
  for (Bf16Bits& value : update.table) {
    value = static_cast<Bf16Bits>(values.Below(0x100));
  }
  for (float& sum : update.accum) sum = std::ldexp(values.Float(), -125);
  for (float& state : update.row_state) {
    state = std::ldexp(std::fabs(values.Float()), -128);
  }
  for (std::size_t u = 0; u < update.ids.size(); ++u) {
    update.stats[u] = std::ldexp(update.stats[u], -128);
  }
  ExpectAsHost(update);
}

TEST(ApplyTest, StatesThatHaveNoRoot) {
  Update update(90, 24, SomeIds());
  for (std::size_t k = 0; k < 90; k += 3) update.row_state[k] = -1e6F;
  for (std::size_t k = 1; k < 90; k += 3) update.row_state[k] = kInf;
  ExpectAsHost(update);
}

TEST(ApplyTest, FarApartSteps) {
  Update update(90, 8, SomeIds());
  update.params = kLazy;
  update.scalars.step = kMaxInt32;
  for (std::size_t k = 0; k < 90; k += 2) update.last_step[k] = kMinInt32;
  ExpectAsHost(update);
  update.scalars.step = kMinInt32;
  ExpectAsHost(update);
}

class NormTest : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(NormTest, IsSummedByRuns) {
  ExpectAsHost(Update(
      3, 1,
      std::vector<std::int32_t>(static_cast<std::size_t>(GetParam()), 3)));
}

INSTANTIATE_TEST_SUITE_P(NumUnique, NormTest,
                         ::testing::Values(1, 2, 63, 64, 65, 4095, 4096, 4097,
                                           65'535, 65'536, 65'537, 300'001,
                                           4'300'000));

class SkipTest : public ::testing::TestWithParam<float> {};

TEST_P(SkipTest, NothingChangesAndTheReasonIsCounted) {
  Update update(90, 16, SomeIds());
  update.params = kLazy;
  update.flag() = GetParam();
  ExpectAsHost(update);
  TestGuard guard(Pipeline::kUpdate);
  const Update after = OnDevice(update, guard);
  EXPECT_EQ(after.table, update.table);
  EXPECT_EQ(after.row_state, update.row_state);
  EXPECT_EQ(after.last_step, update.last_step);
  EXPECT_EQ(after.result.valid, 0);
}

// The sums of what 1, 3 and all ranks find.
INSTANTIATE_TEST_SUITE_P(
    Verdicts, SkipTest,
    ::testing::Values(kVerdictNonFinite, 3 * kVerdictNonFinite,
                      kMaxRanks* kVerdictNonFinite, kVerdictInvalid,
                      kVerdictInvalid + 2 * kVerdictNonFinite,
                      kMaxRanks* kVerdictInvalid, kVerdictPending,
                      kMaxRanks* kVerdictPending));

class BadNormTest : public ::testing::TestWithParam<float> {};

TEST_P(BadNormTest, SkipsTheStep) {
  Update update(90, 16, SomeIds());
  update.stats[70] = GetParam();
  ExpectAsHost(update);
  TestGuard guard(Pipeline::kUpdate);
  const Update after = OnDevice(update, guard);
  EXPECT_EQ(after.table, update.table);
  EXPECT_EQ(after.counters.skipped_non_finite, 1);
}

INSTANTIATE_TEST_SUITE_P(Values, BadNormTest,
                         ::testing::Values(kInf, kNan, -1e9F));

void ExpectNothingWritten(const Update& update, TestGuard& guard) {
  const Update after = OnDevice(update, guard);
  EXPECT_EQ(after.table, update.table);
  EXPECT_EQ(after.row_state, update.row_state);
  EXPECT_EQ(after.last_step, update.last_step);
  EXPECT_EQ(after.result.norm, update.result.norm);
  EXPECT_EQ(after.result.valid, update.result.valid);
  EXPECT_EQ(after.counters.last_norm, update.counters.last_norm);
  EXPECT_EQ(after.counters.skipped_pending, 0);
  EXPECT_EQ(after.counters.skipped_invalid, 0);
  EXPECT_EQ(after.counters.skipped_non_finite, 0);
  EXPECT_EQ(guard.decision().applied, 0);
}

TEST(ApplyGuardTest, AFailedStepWritesNothing) {
  for (const float flag : {kVerdictApply, kVerdictPending, kNan}) {
    Update update(90, 16, SomeIds());
    update.params = kLazy;
    update.flag() = flag;
    // As a step before has left them.
    update.result = {.norm = 3.0F, .valid = 1};
    TestGuard guard(Pipeline::kUpdate, {.applied = 1});
    guard.Fail(StepFailure::kExchange);
    ExpectNothingWritten(update, guard);
    EXPECT_EQ(guard.failure(), StepFailure::kExchange);
  }
}

TEST(ApplyGuardTest, ANanFlagSaysThatAPeerHasFailed) {
  Update update(90, 16, SomeIds());
  update.flag() = kNan;
  update.result = {.norm = 3.0F, .valid = 1};
  TestGuard guard(Pipeline::kUpdate);
  ExpectNothingWritten(update, guard);
  EXPECT_EQ(guard.failure(), StepFailure::kPeerFailed);
}

TEST(ApplyHugeTest, HugeTablesAreUpdatedToTheirEnd) {
  HugeTable table;
  if (!table.fits()) GTEST_SKIP() << "the device's memory is too small";
  // The host's table has the three rows that the device's list names.
  const Update expected =
      OnHost(Update(3, kHugeWidth, std::vector<std::int32_t>{0, 1, 2}));
  const Update update(3, kHugeWidth, {0, 1, 2});
  const std::vector<std::int32_t> rows = {kHugeRows - 1, 5, kHugeRows - 2};
  const DeviceArray<float> row_state(kHugeRows, 0.0F);
  for (std::size_t u = 0; u < rows.size(); ++u) {
    const auto from = update.table.begin() + static_cast<long>(u) * kHugeWidth;
    table.SetRow(rows[u], {from, from + kHugeWidth});
    CheckCuda(cudaMemcpy(row_state.data() + rows[u], &update.row_state[u],
                         sizeof(float), cudaMemcpyHostToDevice),
              "cudaMemcpy");
  }
  const DeviceArray<float> accum(update.accum);
  const DeviceArray<float> stats(update.stats);
  const DeviceArray<std::int32_t> ids(std::vector<std::int32_t>{-1, 5, -2});
  const DeviceArray<UpdateScalars> scalars(1, update.scalars);
  const DeviceArray<UpdateResult> result(1, update.result);
  const DeviceArray<Counters> counters(1, Counters{});
  const DeviceArray<std::uint32_t> scratch =
      MakeScratch({.tokens_per_rank = 1,
                   .shard_width = kHugeWidth,
                   .emb_width = kHugeWidth,
                   .num_unique = 3});
  ApplyArgs args = update.Sizes();
  args.vocab_rows = kHugeRows;
  args.accum = accum.data();
  args.stats = stats.data();
  args.unique_tokens = ids.data();
  args.scalars = scalars.data();
  args.table = table.data();
  args.row_state = row_state.data();
  args.result = result.data();
  CheckCuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  TestGuard guard(Pipeline::kUpdate);
  const TestStream stream;
  ApplyAdagrad(stream.get(), guard.view(), args, BytesOf(scratch),
               counters.data());
  stream.Sync();
  for (std::size_t u = 0; u < rows.size(); ++u) {
    const auto from =
        expected.table.begin() + static_cast<long>(u) * kHugeWidth;
    EXPECT_EQ(table.Row(rows[u]),
              std::vector<Bf16Bits>(from, from + kHugeWidth));
  }
}

}  // namespace
}  // namespace xrex::async_emb::cuda_kernels
