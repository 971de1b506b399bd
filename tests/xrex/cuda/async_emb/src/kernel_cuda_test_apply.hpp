// One update by the CUDA kernel and by the host kernel.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel.hpp"
#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_host.hpp"
#include "phoenix/xrex/cuda/async_emb/src/device.hpp"
#include "tests/xrex/cuda/async_emb/src/kernel_cuda_test_utils.hpp"
#include "tests/xrex/cuda/async_emb/src/kernel_test_apply.hpp"

namespace xrex::async_emb::cuda_kernels {

// What an update reads, changes and reports.
struct Update {
  Update(std::int64_t vocab_rows_in, std::int64_t width_in,
         std::vector<std::int32_t> ids_in)
      : vocab_rows(vocab_rows_in), width(width_in), ids(std::move(ids_in)) {
    Values values(31);
    accum.resize(ids.size() * Count(width));
    for (float& sum : accum) sum = values.Float();
    for (std::size_t u = 0; u < ids.size(); ++u) {
      stats.push_back(std::fabs(values.Float()));
    }
    stats.push_back(kVerdictApply);
    table.resize(Count(vocab_rows * width));
    for (Bf16Bits& value : table) value = values.Bf16();
    for (std::int64_t k = 0; k < vocab_rows; ++k) {
      row_state.push_back(std::fabs(values.Float()));
      last_step.push_back(static_cast<std::int32_t>(values.Below(2200)));
    }
  }

  static std::size_t Count(std::int64_t n) {
    return static_cast<std::size_t>(n);
  }

  // All but the arrays.
  ApplyArgs Sizes() const {
    return {.num_unique = static_cast<std::int64_t>(ids.size()),
            .width = width,
            .emb_width = 3 * width,
            .vocab_rows = vocab_rows,
            .params = params};
  }

  float& flag() { return stats.back(); }

  std::int64_t vocab_rows;
  std::int64_t width;
  AdagradParams params = host_kernels::kEager;
  std::vector<std::int32_t> ids;
  std::vector<float> accum;
  std::vector<float> stats;  // and the flag
  UpdateScalars scalars = {.learning_rate = 0.37F, .pending = 1, .step = 2100};
  std::vector<Bf16Bits> table;
  std::vector<float> row_state;
  std::vector<std::int32_t> last_step;
  UpdateResult result = {.norm = -1.0F, .valid = -1};
  Counters counters = {};
};

inline Update OnHost(Update update) {
  StepCounters counters;
  ApplyArgs args = update.Sizes();
  args.accum = update.accum.data();
  args.stats = update.stats.data();
  args.unique_tokens = update.ids.data();
  args.scalars = &update.scalars;
  args.table = update.table.data();
  args.row_state = update.row_state.data();
  args.last_step = update.params.lazy ? update.last_step.data() : nullptr;
  args.result = &update.result;
  host_kernels::ApplyAdagrad(args, counters);
  update.counters.skipped_pending = counters.skipped_pending;
  update.counters.skipped_invalid = counters.skipped_invalid;
  update.counters.skipped_non_finite = counters.skipped_non_finite;
  update.counters.last_norm = counters.last_norm;
  return update;
}

inline Update OnDevice(Update update, TestGuard& guard,
                       std::int64_t shift = 0) {
  const DeviceArray<float> accum(update.accum, shift);
  const DeviceArray<float> stats(update.stats, shift);
  const DeviceArray<std::int32_t> ids(update.ids, shift);
  const DeviceArray<UpdateScalars> scalars(1, update.scalars);
  const DeviceArray<Bf16Bits> table(update.table, shift);
  const DeviceArray<float> row_state(update.row_state, shift);
  const DeviceArray<std::int32_t> last_step(update.last_step, shift);
  const DeviceArray<UpdateResult> result(1, update.result);
  const DeviceArray<Counters> counters(1, update.counters);
  ApplyArgs args = update.Sizes();
  const DeviceArray<std::uint32_t> scratch =
      MakeScratch({.tokens_per_rank = 1,
                   .shard_width = update.width,
                   .emb_width = update.width,
                   .num_unique = args.num_unique});
  args.accum = accum.data();
  args.stats = stats.data();
  args.unique_tokens = ids.data();
  args.scalars = scalars.data();
  args.table = table.data();
  args.row_state = row_state.data();
  args.last_step = update.params.lazy ? last_step.data() : nullptr;
  args.result = result.data();
  const TestStream stream;
  ApplyAdagrad(stream.get(), guard.view(), args, BytesOf(scratch),
               counters.data());
  stream.Sync();
  scratch.Download();  // checks its guards
  update.table = table.Download();
  update.row_state = row_state.Download();
  update.last_step = last_step.Download();
  update.result = result.Download()[0];
  update.counters = counters.Download()[0];
  return update;
}

inline void ExpectSame(const Update& actual, const Update& expected) {
  EXPECT_TRUE(BitsButNan(actual.table) == BitsButNan(expected.table))
      << "tables of width " << actual.width << " differ";
  EXPECT_EQ(BitsButNan(actual.row_state), BitsButNan(expected.row_state));
  EXPECT_EQ(actual.last_step, expected.last_step);
  EXPECT_EQ(BitsButNan(std::vector<float>{actual.result.norm}),
            BitsButNan(std::vector<float>{expected.result.norm}));
  EXPECT_EQ(actual.result.valid, expected.result.valid);
  EXPECT_EQ(BitsButNan(std::vector<float>{actual.counters.last_norm}),
            BitsButNan(std::vector<float>{expected.counters.last_norm}));
  EXPECT_EQ(actual.counters.skipped_pending, expected.counters.skipped_pending);
  EXPECT_EQ(actual.counters.skipped_invalid, expected.counters.skipped_invalid);
  EXPECT_EQ(actual.counters.skipped_non_finite,
            expected.counters.skipped_non_finite);
}

// By a guard that is good; the decision of the step before must not matter.
inline void ExpectAsHost(const Update& update, std::int64_t shift = 0) {
  TestGuard guard(Pipeline::kUpdate);
  ExpectSame(OnDevice(update, guard, shift), OnHost(update));
  EXPECT_EQ(guard.decision().applied, 1);
  EXPECT_EQ(guard.failure(), StepFailure::kNone);
}

}  // namespace xrex::async_emb::cuda_kernels
