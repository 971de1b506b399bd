// One call of the update kernel, and the formulas in their plainest form.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_host.hpp"
#include "phoenix/xrex/cuda/async_emb/src/device.hpp"
#include "tests/xrex/cuda/async_emb/src/kernel_test_utils.hpp"

namespace xrex::async_emb::host_kernels {

inline constexpr AdagradParams kEager = {
    .eps = 1e-8F, .decay_factor = 0.97F, .weight_decay_factor = 0.99F};
inline constexpr AdagradParams kLazy = {.lazy = true,
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

inline void ExpectSame(const State& actual, const State& expected) {
  EXPECT_EQ(actual.table, expected.table);
  EXPECT_EQ(Bits(actual.row_state), Bits(expected.row_state));
  EXPECT_EQ(actual.last_step, expected.last_step);
}

}  // namespace xrex::async_emb::host_kernels
