// The checks of an update and rowwise Adagrad on the host.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_host.hpp"
#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_host_common.hpp"

namespace xrex::async_emb::host_kernels {
namespace {

// Slots whose rows are found and asked for before the first of them is changed.
constexpr std::int64_t kSlotBlock = 32;

// Runs of the norm that are summed side by side.
constexpr std::int64_t kRunsAtOnce = 8;

std::int64_t CountInvalidSegments(const UpdateCheckArgs& args,
                                  std::int64_t begin, std::int64_t end) {
  // -1 becomes 0 and num_unique - 1 becomes num_unique.
  const auto last = static_cast<std::uint32_t>(args.num_unique);
  std::int32_t count = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    const auto shifted = static_cast<std::uint32_t>(args.segments[i]) + 1U;
    count += shifted > last ? 1 : 0;
  }
  return count;
}

// Places of the set of rows: at most half of them are taken.
std::uint64_t SetCapacity(std::int64_t num_unique) {
  return std::bit_ceil(2 * static_cast<std::uint64_t>(num_unique));
}

// Number of slots whose row an earlier slot has, by a set with open addressing.
// A place holds a slot that stands for its row.
std::int64_t CountDuplicatesBySet(const UpdateCheckArgs& args,
                                  std::byte* scratch) {
  constexpr std::int32_t kFree = -1;
  const std::uint64_t capacity = SetCapacity(args.num_unique);
  const int shift =
      std::numeric_limits<std::uint64_t>::digits - std::countr_zero(capacity);
  const auto row_of = [&args](std::int64_t slot) {
    return WrapId(args.unique_tokens[slot], args.vocab_rows);
  };
  auto* set = reinterpret_cast<std::int32_t*>(scratch);
  std::fill_n(set, capacity, kFree);
  std::int64_t duplicates = 0;
  for (std::int64_t u = 0; u < args.num_unique; ++u) {
    const std::int64_t row = row_of(u);
    if (!IsRow(row, args.vocab_rows)) continue;
    std::uint64_t place =
        (static_cast<std::uint64_t>(row) * 0x9E3779B97F4A7C15U) >> shift;
    while (set[place] != kFree && row_of(set[place]) != row) {
      place = (place + 1) & (capacity - 1);
    }
    if (set[place] == kFree) {
      set[place] = static_cast<std::int32_t>(u);
    } else {
      ++duplicates;
    }
  }
  return duplicates;
}

// Whether the rows in use rise from slot to slot, as those of a sorted list do.
bool RowsAscend(const UpdateCheckArgs& args) {
  std::int64_t previous = -1;
  for (std::int64_t u = 0; u < args.num_unique; ++u) {
    const std::int64_t row = WrapId(args.unique_tokens[u], args.vocab_rows);
    if (!IsRow(row, args.vocab_rows)) continue;
    if (row <= previous) return false;
    previous = row;
  }
  return true;
}

bool InputsAreValid(const UpdateCheckArgs& args, std::byte* scratch,
                    StepCounters& counters) {
  const std::int64_t own =
      CountInvalidSegments(args, args.count_begin, args.count_end);
  const std::int64_t others =
      CountInvalidSegments(args, 0, args.count_begin) +
      CountInvalidSegments(args, args.count_end, args.num_tokens);
  counters.segments_invalid.fetch_add(own, std::memory_order_relaxed);
  std::int64_t duplicates = 0;
  if (args.check_duplicates && !RowsAscend(args)) {
    duplicates = CountDuplicatesBySet(args, scratch);
    counters.duplicate_slots.fetch_add(duplicates, std::memory_order_relaxed);
  }
  return own + others + duplicates == 0;
}

// Sums kRunsAtOnce complete runs, each left to right; side by side, because one
// sum alone waits for its own additions.
void SumRuns(const float* values, RunLevels& levels) {
  std::array<float, kRunsAtOnce> sums;
  for (std::int64_t r = 0; r < kRunsAtOnce; ++r) {
    sums[r] = values[r * kRunLength];
  }
  for (std::int64_t i = 1; i < kRunLength; ++i) {
    for (std::int64_t r = 0; r < kRunsAtOnce; ++r) {
      sums[r] += values[r * kRunLength + i];
    }
  }
  for (const float& sum : sums) levels.Push(&sum);
}

// The sum of at least one value by the runs-of-64 rule.
float SumByRuns(const float* values, std::int64_t count) {
  std::array<float, RunLevels::kMaxLevels> rows;
  RunLevels levels(rows.data(), 1);
  std::int64_t i = 0;
  for (; i + kRunsAtOnce * kRunLength <= count; i += kRunsAtOnce * kRunLength) {
    SumRuns(values + i, levels);
  }
  for (; i < count; i += kRunLength) {
    const std::int64_t end = std::min(i + kRunLength, count);
    float sum = values[i];
    for (std::int64_t j = i + 1; j < end; ++j) sum += values[j];
    levels.Push(&sum);
  }
  return *levels.Finish();
}

// exp(-rate * steps): the product in f32, its exponential in f64.
class Decay {
 public:
  explicit Decay(float rate) : rate_(rate) { known_.fill(kUnknown); }

  float After(std::int64_t steps) {
    if (steps >= kKnown) return Compute(steps);
    float& value = known_[static_cast<std::size_t>(steps)];
    if (value == kUnknown) value = Compute(steps);
    return value;
  }

 private:
  static constexpr std::int64_t kKnown = 512;
  static constexpr float kUnknown = -1.0F;

  float Compute(std::int64_t steps) const {
    const float exponent = -rate_ * static_cast<float>(steps);
    return static_cast<float>(std::exp(static_cast<double>(exponent)));
  }

  float rate_;
  std::array<float, kKnown> known_;
};

// What one slot does to its row.
struct SlotUpdate {
  std::int64_t slot;
  std::int64_t row;
  float scale;         // of the gradient
  float weight_decay;  // of the row
};
using SlotBlock = std::array<SlotUpdate, kSlotBlock>;

// Finds the rows of the slots in [begin, begin + kSlotBlock) that are in range,
// and asks for them. Returns how many there are.
std::int64_t FindRows(const ApplyArgs& args, std::int64_t begin,
                      SlotBlock& block) {
  const std::int64_t end = std::min(begin + kSlotBlock, args.num_unique);
  std::int64_t count = 0;
  for (std::int64_t u = begin; u < end; ++u) {
    const std::int64_t row = WrapId(args.unique_tokens[u], args.vocab_rows);
    if (!IsRow(row, args.vocab_rows)) continue;
    block[count].slot = u;
    block[count].row = row;
    ++count;
    Prefetch(args.row_state + row, sizeof(float));
    if (args.params.lazy) Prefetch(args.last_step + row, sizeof(std::int32_t));
    Prefetch(args.table + row * args.width,
             args.width * std::int64_t{sizeof(Bf16Bits)});
  }
  return count;
}

// Updates a slot's state and finds what its row is changed by.
class StateUpdater {
 public:
  explicit StateUpdater(const ApplyArgs& args)
      : args_(args),
        inverse_width_(1.0F / static_cast<float>(args.emb_width)),
        accum_decay_(args.params.accum_decay_rate),
        weight_decay_(args.params.weight_decay_rate) {}

  void Update(SlotUpdate& slot) {
    float decay = args_.params.decay_factor;
    float weight_decay = args_.params.weight_decay_factor;
    if (args_.params.lazy) {
      const std::int64_t steps = StepsSince(slot.row);
      decay = accum_decay_.After(steps);
      weight_decay = weight_decay_.After(steps);
    }
    const float squares = args_.stats[slot.slot];
    float& state = args_.row_state[slot.row];
    state = state * decay + squares * inverse_width_;
    slot.weight_decay = squares > 0.0F ? weight_decay : 1.0F;
    const float scale = -args_.scalars->learning_rate *
                        (1.0F / (std::sqrt(state) + args_.params.eps));
    // RoundToBf16Lanes asks for a NaN without lower bits.
    slot.scale = std::isnan(scale) ? RoundToBf16(scale) : scale;
  }

 private:
  // Steps since the row was last updated; the row is up to date from now on.
  std::int64_t StepsSince(std::int64_t row) {
    const std::int64_t step = args_.scalars->step;
    const std::int64_t steps = step - args_.last_step[row];
    args_.last_step[row] = args_.scalars->step;
    return std::max(steps, std::int64_t{0});
  }

  const ApplyArgs& args_;
  float inverse_width_;
  Decay accum_decay_;
  Decay weight_decay_;
};

// value = f32(bf16(value * weight_decay)) + f32(bf16(scale * f32(bf16(sum)))).
// A valid step has finite sums.
template <int kLanes>
ASYNC_EMB_INLINE void UpdateLanes(const SlotUpdate& slot,
                                  typename Lanes<kLanes>::F32& sum,
                                  typename Lanes<kLanes>::F32& value) {
  RoundToBf16Lanes<kLanes>(sum);
  sum = slot.scale * sum;
  RoundToBf16Lanes<kLanes>(sum);
  value = value * slot.weight_decay;
  RoundToBf16Lanes<kLanes>(value);
  value = value + sum;
}

// Updates 2 * kLanes columns.
template <int kLanes>
ASYNC_EMB_INLINE void UpdateColumns(const SlotUpdate& slot, const float* sums,
                                    Bf16Bits* columns) {
  using F32 = typename Lanes<kLanes>::F32;
  F32 even_sums;
  F32 odd_sums;
  LoadLanes(sums, even_sums);
  LoadLanes(sums + kLanes, odd_sums);
  Lanes<kLanes>::Split(even_sums, odd_sums, even_sums, odd_sums);
  F32 even;
  F32 odd;
  LoadBf16Pairs<kLanes>(columns, even, odd);
  UpdateLanes<kLanes>(slot, even_sums, even);
  UpdateLanes<kLanes>(slot, odd_sums, odd);
  StoreBf16Pairs<kLanes>(even, odd, columns);
}

ASYNC_EMB_INLINE void UpdateColumn(const SlotUpdate& slot, float sum,
                                   Bf16Bits& column) {
  const float change = RoundToBf16(slot.scale * RoundToBf16(sum));
  const float value = RoundToBf16(Bf16ToFloat(column) * slot.weight_decay);
  column = FloatToBf16(value + change);
}

template <int kLanes>
ASYNC_EMB_INLINE void UpdateRow(const SlotUpdate& slot, std::int64_t width,
                                const float* sums, Bf16Bits* row) {
  std::int64_t c = 0;
  for (; c + 2 * kLanes <= width; c += 2 * kLanes) {
    UpdateColumns<kLanes>(slot, sums + c, row + c);
  }
  for (; c + 8 <= width; c += 8) UpdateColumns<4>(slot, sums + c, row + c);
  for (; c < width; ++c) UpdateColumn(slot, sums[c], row[c]);
}

// `width` is a std::int64_t or a constant of that type.
template <int kLanes, typename Width>
ASYNC_EMB_INLINE void UpdateRows(const ApplyArgs& args, const SlotBlock& block,
                                 std::int64_t count, Width width) {
  for (std::int64_t i = 0; i < count; ++i) {
    const SlotUpdate& slot = block[i];
    UpdateRow<kLanes>(slot, width, args.accum + slot.slot * width,
                      args.table + slot.row * width);
  }
}

template <int kLanes>
ASYNC_EMB_INLINE void UpdateBlock(const ApplyArgs& args, const SlotBlock& block,
                                  std::int64_t count) {
  WithWidth(args.width, [&](auto width) __attribute__((always_inline)) {
    UpdateRows<kLanes>(args, block, count, width);
  });
}

ASYNC_EMB_AVX2 void UpdateBlockAvx2(const ApplyArgs& args,
                                    const SlotBlock& block,
                                    std::int64_t count) {
  UpdateBlock<8>(args, block, count);
}

void UpdateBlockBaseline(const ApplyArgs& args, const SlotBlock& block,
                         std::int64_t count) {
  UpdateBlock<4>(args, block, count);
}

// One block of slots is found and asked for while the one before is updated.
void UpdateAllRows(const ApplyArgs& args) {
  const auto update_block = HasAvx2() ? UpdateBlockAvx2 : UpdateBlockBaseline;
  StateUpdater updater(args);
  std::array<SlotBlock, 2> blocks;
  SlotBlock* current = &blocks[0];
  SlotBlock* next = &blocks[1];
  std::int64_t count = FindRows(args, 0, *current);
  for (std::int64_t u = 0; u < args.num_unique; u += kSlotBlock) {
    const std::int64_t next_count = FindRows(args, u + kSlotBlock, *next);
    for (std::int64_t i = 0; i < count; ++i) updater.Update((*current)[i]);
    update_block(args, *current, count);
    std::swap(current, next);
    count = next_count;
  }
}

// The counter of the reason for which the step is skipped, or null.
std::atomic<std::int64_t>* SkipCounter(const ApplyArgs& args, float norm,
                                       StepCounters& counters) {
  const float verdict = args.stats[args.num_unique];
  if (verdict >= kVerdictPending) return &counters.skipped_pending;
  if (verdict >= kVerdictInvalid) return &counters.skipped_invalid;
  if (verdict != kVerdictApply || !std::isfinite(norm)) {
    return &counters.skipped_non_finite;
  }
  return nullptr;
}

}  // namespace

std::size_t CheckScratchBytes(std::int64_t num_unique) {
  return sizeof(std::int32_t) * SetCapacity(num_unique);
}

void CheckUpdate(const UpdateCheckArgs& args, std::byte* scratch,
                 StepCounters& counters) {
  if (args.scalars->pending == 0) {
    *args.flag = kVerdictPending;
  } else if (!InputsAreValid(args, scratch, counters)) {
    *args.flag = kVerdictInvalid;
  } else if (!std::isfinite(args.scalars->learning_rate)) {
    *args.flag = kVerdictNonFinite;
  } else {
    *args.flag = kVerdictApply;
  }
}

void ApplyAdagrad(const ApplyArgs& args, StepCounters& counters) {
  const float norm = std::sqrt(SumByRuns(args.stats, args.num_unique));
  std::atomic<std::int64_t>* skipped = SkipCounter(args, norm, counters);
  if (skipped == nullptr) {
    UpdateAllRows(args);
  } else {
    skipped->fetch_add(1, std::memory_order_relaxed);
  }
  counters.last_norm.store(norm, std::memory_order_relaxed);
  args.result->norm = norm;
  args.result->valid = skipped == nullptr ? 1 : 0;
}

}  // namespace xrex::async_emb::host_kernels
