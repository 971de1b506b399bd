// The steps of contexts that nothing disturbs: values, rules, counters, waits.
#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/bfloat16.hpp"
#include "tests/xrex/cuda/async_emb/src/context_group.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

using testing::Each;
using testing::ElementsAre;

constexpr ErrorCode kPrecondition = ErrorCode::kFailedPrecondition;

std::size_t Count(std::int64_t n) { return static_cast<std::size_t>(n); }

class ContextTest : public testing::Test {
 protected:
  void MakeGroup(std::int32_t world_size) {
    group_ =
        std::make_unique<ContextGroup>(backend_, clock_, SmallSpec(world_size));
    group_->BringUp();
  }

  ContextGroup& group() { return *group_; }
  AsyncEmbContext& context(std::int32_t rank) { return (*group_)[rank]; }
  RankArrays& arrays(std::int32_t rank) { return group_->arrays(rank); }

  FakeClock clock_;
  HookedBackend backend_;
  std::unique_ptr<ContextGroup> group_;
};

// --- values ---

// One update by the formulas, with sums that are exact in any order.
struct Expected {
  Expected(const PipelineSpec& spec, ContextGroup& group);

  std::vector<float> table;  // [V, W]
  std::vector<float> row_state;
  float norm;
};

Expected::Expected(const PipelineSpec& spec, ContextGroup& group)
    : row_state(group.arrays(0).row_state) {
  const RankArrays& common = group.arrays(0);
  const AdagradParams& params = common.params;
  for (std::int64_t k = 0; k < kVocabRows; ++k) {
    for (std::int64_t c = 0; c < spec.emb_width; ++c)
      table.push_back(TableValue(k, c));
  }
  float norm_squared = 0.0F;
  for (std::int64_t u = 0; u < spec.num_unique; ++u) {
    std::vector<float> sums(Count(spec.emb_width), 0.0F);
    for (std::int64_t token = 0; token < spec.num_tokens(); ++token) {
      const std::int64_t rank = token / spec.tokens_per_rank;
      const RankArrays& own = group.arrays(static_cast<std::int32_t>(rank));
      if (own.segment_ids[Count(token % spec.tokens_per_rank)] != u) continue;
      for (std::int64_t c = 0; c < spec.emb_width; ++c)
        sums[Count(c)] += GradValue(token, c);
    }
    float squares = 0.0F;
    for (const float sum : sums) squares += sum * sum;
    norm_squared += squares;
    const std::int64_t k = common.unique_tokens[Count(u)];
    if (k >= kVocabRows) continue;
    float& state = row_state[Count(k)];
    state = state * params.decay_factor +
            squares * (1.0F / static_cast<float>(spec.emb_width));
    const float decay = squares > 0.0F ? params.weight_decay_factor : 1.0F;
    const float scale =
        -common.learning_rate * (1.0F / (std::sqrt(state) + params.eps));
    for (std::int64_t c = 0; c < spec.emb_width; ++c) {
      float& value = table[Count(k * spec.emb_width + c)];
      value = RoundToBf16(RoundToBf16(value * decay) +
                          RoundToBf16(scale * sums[Count(c)]));
    }
  }
  norm = std::sqrt(norm_squared);
}

class ContextValues : public ContextTest,
                      public testing::WithParamInterface<std::int32_t> {};

INSTANTIATE_TEST_SUITE_P(Ranks, ContextValues, testing::Values(1, 2, 3, 4));

TEST_P(ContextValues, ALookupGivesTheRowsOfTheIds) {
  MakeGroup(GetParam());
  group().StartLookups();
  group().FinishLookups();
  for (std::int32_t rank = 0; rank < GetParam(); ++rank)
    EXPECT_TRUE(group().LookupIsRight(rank)) << "rank " << rank;
}

TEST_P(ContextValues, AnUpdateFollowsTheFormulas) {
  const PipelineSpec spec = SmallSpec(GetParam());
  MakeGroup(GetParam());
  for (std::int32_t rank = 0; rank < GetParam(); ++rank) {
    arrays(rank).params = {
        .eps = 0.5F, .decay_factor = 0.75F, .weight_decay_factor = 0.875F};
  }
  const Expected expected(spec, group());
  group().StartUpdates();
  group().FinishUpdates();
  for (std::int32_t rank = 0; rank < GetParam(); ++rank) {
    const RankArrays& own = arrays(rank);
    EXPECT_EQ(own.valid, 1);
    EXPECT_EQ(own.norm, expected.norm);
    EXPECT_EQ(own.row_state, expected.row_state);
    for (std::int64_t k = 0; k < kVocabRows; ++k) {
      for (std::int64_t c = 0; c < spec.shard_width; ++c) {
        const std::int64_t column = rank * spec.shard_width + c;
        EXPECT_EQ(Bf16ToFloat(own.table[Count(k * spec.shard_width + c)]),
                  expected.table[Count(k * spec.emb_width + column)])
            << "rank " << rank << " row " << k << " column " << column;
      }
    }
  }
}

TEST_P(ContextValues, ALookupBehindAnUpdateSeesItsRows) {
  MakeGroup(GetParam());
  group().StartUpdates();
  group().FinishUpdates();
  group().StartLookups();
  group().FinishLookups();
  for (std::int32_t rank = 0; rank < GetParam(); ++rank) {
    const RankArrays& own = arrays(rank);
    for (std::int64_t t = 0; t < 3; ++t) {
      const std::int64_t width = 2 * std::int64_t{GetParam()};
      for (std::int64_t c = 0; c < width; ++c) {
        const RankArrays& owner = arrays(static_cast<std::int32_t>(c / 2));
        EXPECT_EQ(own.embeddings[Count(t * width + c)],
                  owner.table[Count(own.ids[Count(t)] * 2 + c % 2)]);
      }
    }
  }
}

// Every rank on a thread of its own, both pipelines in flight at a time.
TEST_F(ContextTest, ManyStepsOfBothPipelinesOverlap) {
  MakeGroup(4);
  constexpr int kSteps = 100;
  std::vector<std::future<Outcome>> ranks;
  for (std::int32_t rank = 0; rank < 4; ++rank) {
    ranks.push_back(AttemptAsync([this, rank] {
      int num_valid = 0;
      for (int i = 0; i < kSteps; ++i) {
        group().StartLookup(rank);
        group().StartUpdate(rank);
        group().FinishLookup(rank);
        group().FinishUpdate(rank);
        num_valid += arrays(rank).valid;
      }
      return num_valid;
    }));
  }
  for (auto& rank : ranks) EXPECT_THAT(rank.get(), Gave(kSteps));
  for (std::int32_t rank = 1; rank < 4; ++rank) {
    EXPECT_EQ(arrays(rank).row_state, arrays(0).row_state);
    EXPECT_EQ(arrays(rank).norm, arrays(0).norm);
  }
}

TEST_F(ContextTest, APinIsZero) {
  MakeGroup(1);
  float pin = 3.0F;
  context(0).WritePin(StreamRef{}, &pin);
  EXPECT_EQ(pin, 0.0F);
}

TEST_F(ContextTest, IdsAndScalarsAreCopiedWhenAStepIsArmed) {
  MakeGroup(1);
  Gate& gate = backend_.HoldAt({.rank = 0, .exchange = 0});
  group().StartLookups();
  group().StartUpdates();
  const std::vector<std::int32_t> ids = arrays(0).ids;
  arrays(0).ids.assign(3, -1000);
  arrays(0).segment_ids.assign(3, -1000);
  arrays(0).learning_rate = NAN;
  arrays(0).pending = 0;
  gate.Open();
  group().FinishLookups();
  group().FinishUpdates();
  EXPECT_EQ(arrays(0).valid, 1);
  arrays(0).ids = ids;
  EXPECT_TRUE(group().LookupIsRight(0));
}

// --- rules, as a caller of the context meets them ---

TEST_F(ContextTest, RefusesStepsBeforeTheContextIsReady) {
  ContextGroup group(backend_, clock_, SmallSpec(1));
  const auto refused = [](const std::string& call) {
    return Failed(kPrecondition, "async_emb: " + call +
                                     " came before the context was ready: call "
                                     "initialize(ctx) first");
  };
  EXPECT_THAT(Attempt([&] { group.StartLookup(0); }), refused("lookup_start"));
  EXPECT_THAT(Attempt([&] { group.FinishLookup(0); }), refused("lookup_done"));
  EXPECT_THAT(Attempt([&] { group.StartUpdate(0); }), refused("update_start"));
  EXPECT_THAT(Attempt([&] { group.FinishUpdate(0); }), refused("update_done"));
}

TEST_F(ContextTest, ASecondStartIsRefusedAndTheFirstStepIsUnharmed) {
  MakeGroup(2);
  group().StartLookups();
  EXPECT_THAT(Attempt([&] { group().StartLookup(0); }),
              Failed(kPrecondition,
                     "async_emb: lookup_start came before the lookup_done of "
                     "step 1: call lookup_done first"));
  group().StartUpdates();
  EXPECT_THAT(Attempt([&] { group().StartUpdate(1); }),
              Failed(kPrecondition,
                     "async_emb: update_start came before the update_done of "
                     "step 1: call update_done first"));
  group().FinishLookups();
  group().FinishUpdates();
  for (const std::int32_t rank : {0, 1}) {
    EXPECT_TRUE(group().LookupIsRight(rank));
    EXPECT_EQ(arrays(rank).valid, 1);
    EXPECT_THAT(context(rank).stats().steps_armed, ElementsAre(1, 1));
  }
}

TEST_F(ContextTest, ADoneWithNothingArmedIsRefusedAndWritesNothing) {
  MakeGroup(1);
  arrays(0).embeddings.assign(arrays(0).embeddings.size(), 77);
  EXPECT_THAT(Attempt([&] { group().FinishLookup(0); }),
              Failed(kPrecondition,
                     "async_emb: lookup_done came with no step armed (0 were "
                     "armed and finished): call lookup_start first"));
  EXPECT_THAT(arrays(0).embeddings, Each(77));
  EXPECT_THAT(Attempt([&] { group().FinishUpdate(0); }),
              Failed(kPrecondition,
                     "async_emb: update_done came with no step armed (0 were "
                     "armed and finished): call update_start first"));
  EXPECT_EQ(arrays(0).valid, -1);
  EXPECT_EQ(context(0).error(), std::nullopt);
}

TEST_F(ContextTest, ADoneDuringItsStartIsRefused) {
  MakeGroup(1);
  Gate& gate =
      backend_.HoldAt({.rank = 0, .where = Place::kEnqueue, .exchange = 0});
  auto start = AttemptAsync([&] { group().StartLookup(0); });
  gate.AwaitArrival();
  EXPECT_THAT(Attempt([&] { group().FinishLookup(0); }),
              Failed(kPrecondition,
                     "async_emb: lookup_done came before the lookup_start of "
                     "step 1 had returned: chain the calls by data"));
  gate.Open();
  EXPECT_THAT(start.get(), Succeeded());
  group().FinishLookup(0);
  EXPECT_TRUE(group().LookupIsRight(0));
}

// --- table binding ---

TEST_F(ContextTest, AMoveOfTheTableWhileIdleIsCountedAndLosesNothing) {
  MakeGroup(2);
  for (int i = 0; i < 2; ++i) {
    group().StartLookups();
    group().FinishLookups();
    arrays(0).table = std::vector<Bf16Bits>(arrays(0).table);
  }
  EXPECT_TRUE(group().LookupIsRight(0));
  EXPECT_EQ(context(0).stats().table_moved, 1);
  EXPECT_EQ(context(1).stats().table_moved, 0);
  EXPECT_EQ(context(0).error(), std::nullopt);
}

TEST_F(ContextTest, AForgottenTableDoesNotCountAsMoved) {
  MakeGroup(1);
  group().StartLookups();
  group().FinishLookups();
  context(0).ResetTableBinding();
  arrays(0).table = std::vector<Bf16Bits>(arrays(0).table);
  group().StartLookups();
  EXPECT_THAT(Attempt([&] { context(0).ResetTableBinding(); }),
              Failed(kPrecondition,
                     "async_emb: reset_table_binding came while lookup step 2 "
                     "is in flight: call its done first"));
  group().FinishLookups();
  EXPECT_EQ(context(0).stats().table_moved, 0);
}

}  // namespace
}  // namespace xrex::async_emb
