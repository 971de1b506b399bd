#include "phoenix/xrex/cuda/async_emb/src/shared_rows.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

using ::testing::ElementsAre;

using Ints = std::vector<std::int32_t>;

// A table of 10 rows, two ranks of four tokens. The step updates rows 1, 4, 6
// and 8; its third token is masked.
struct Case {
  Ints unique_tokens = {1, 4, 6, 8, 10};
  Ints segment_ids = {1, 0, -1, 3, 2, 1, 1, 0};
  std::int64_t num_rows = 4;
  std::vector<std::int64_t> next_ids = {4, 4, 9, 1, 0, 1, 2, 3};
  SharedRowsSpec spec{.vocab_rows = 10, .num_ranks = 2};
  std::size_t row_capacity = 3;
  std::size_t token_capacity = 4;
};

struct Plan {
  SharedRowsCounts counts;
  Ints rows;
  Ints tokens;
  Ints segments;
  Ints rest_unique;
  Ints rest_segments;
  Ints next_index;
};

Plan MakePlan(const Case& given) {
  const auto num_places =
      static_cast<std::size_t>(given.spec.num_ranks) * given.token_capacity;
  Plan plan{.counts = {},
            .rows = Ints(given.row_capacity, -7),
            .tokens = Ints(num_places, -7),
            .segments = Ints(num_places, -7),
            .rest_unique = Ints(given.unique_tokens.size(), -7),
            .rest_segments = Ints(given.segment_ids.size(), -7),
            .next_index = Ints(given.segment_ids.size(), -7)};
  plan.counts =
      PlanSharedRows<std::int64_t>({.unique_tokens = given.unique_tokens,
                                    .segment_ids = given.segment_ids,
                                    .num_rows = given.num_rows},
                                   given.next_ids, given.spec,
                                   {.rows = plan.rows,
                                    .tokens = plan.tokens,
                                    .segments = plan.segments,
                                    .rest_unique = plan.rest_unique,
                                    .rest_segments = plan.rest_segments,
                                    .next_index = plan.next_index});
  return plan;
}

auto Rejected(const std::string& text) {
  return Failed(ErrorCode::kInvalidArgument, "async_emb: " + text);
}

Outcome Try(const Case& given) {
  return Attempt([&] { MakePlan(given); });
}

TEST(PlanSharedRowsTest, ListsUpdatedRowsThatTheNextStepReads) {
  const Plan plan = MakePlan({});
  EXPECT_TRUE(plan.counts.fits);
  EXPECT_EQ(plan.counts.num_rows, 2);
  EXPECT_THAT(plan.rows, ElementsAre(1, 4, 10));
}

TEST(PlanSharedRowsTest, ListsTheTokensOfSharedRowsOfEveryRank) {
  const Plan plan = MakePlan({});
  EXPECT_EQ(plan.counts.num_tokens, 5);
  EXPECT_EQ(plan.counts.max_rank_tokens, 3);
  EXPECT_THAT(plan.tokens, ElementsAre(0, 1, 0, 0, 1, 2, 3, 0));
  EXPECT_THAT(plan.segments, ElementsAre(1, 0, -1, -1, 1, 1, 0, -1));
}

TEST(PlanSharedRowsTest, CountsTheMostTokensOfARankThatIsNotTheLast) {
  Case given;
  given.segment_ids = {2, 1, 1, 0, 1, 0, -1, 3};
  EXPECT_EQ(MakePlan(given).counts.max_rank_tokens, 3);
}

TEST(PlanSharedRowsTest, LeavesTheOtherRowsAndTokensToTheRest) {
  const Plan plan = MakePlan({});
  EXPECT_THAT(plan.rest_unique, ElementsAre(10, 10, 6, 8, 10));
  EXPECT_THAT(plan.rest_segments, ElementsAre(-1, -1, -1, 3, 2, -1, -1, -1));
}

TEST(PlanSharedRowsTest, TellsTheNextStepWhichSharedRowATokenReads) {
  EXPECT_THAT(MakePlan({}).next_index, ElementsAre(1, 1, -1, 0, -1, 0, -1, -1));
}

TEST(PlanSharedRowsTest, WrapsNegativeNextIdsOnce) {
  Case given;
  given.next_ids = {-2, -6, 0, 0, 0, 0, 0, 0};
  const Plan plan = MakePlan(given);
  EXPECT_THAT(plan.rows, ElementsAre(4, 8, 10));
  EXPECT_THAT(plan.next_index, ElementsAre(1, 0, -1, -1, -1, -1, -1, -1));
}

// The first and the last row are updated; only ids outside the table read them.
Case NextIdsOutsideTheTable(OutOfRange out_of_range) {
  Case given;
  given.unique_tokens = {0, 9};
  given.segment_ids = {0, 1, -1, -1, -1, -1, -1, -1};
  given.num_rows = 2;
  given.next_ids = {-11,
                    10,
                    std::numeric_limits<std::int64_t>::min(),
                    std::numeric_limits<std::int64_t>::max(),
                    5,
                    5,
                    5,
                    5};
  given.spec.out_of_range = out_of_range;
  return given;
}

TEST(PlanSharedRowsTest,
     ReadsTheNearestRowForIdsOutsideTheTableThatAreClipped) {
  const Plan plan = MakePlan(NextIdsOutsideTheTable(OutOfRange::kClip));
  EXPECT_THAT(plan.rows, ElementsAre(0, 9, 10));
  EXPECT_THAT(plan.next_index, ElementsAre(0, 1, 0, 1, -1, -1, -1, -1));
}

TEST(PlanSharedRowsTest, ReadsNoRowForIdsOutsideTheTableThatGiveZeros) {
  const Plan plan = MakePlan(NextIdsOutsideTheTable(OutOfRange::kZero));
  EXPECT_EQ(plan.counts.num_rows, 0);
  EXPECT_THAT(plan.next_index, ElementsAre(-1, -1, -1, -1, -1, -1, -1, -1));
}

TEST(PlanSharedRowsTest, SharesNothingIfNothingIsUpdated) {
  Case given;
  given.num_rows = 0;
  given.segment_ids = Ints(8, -1);
  const Plan plan = MakePlan(given);
  EXPECT_TRUE(plan.counts.fits);
  EXPECT_THAT(plan.rows, ElementsAre(10, 10, 10));
  EXPECT_THAT(plan.rest_unique, ElementsAre(10, 10, 10, 10, 10));
}

TEST(PlanSharedRowsTest, FitsWhereRowsAndTokensFillTheirRoom) {
  Case given;
  given.row_capacity = 2;
  given.token_capacity = 3;
  const Plan plan = MakePlan(given);
  EXPECT_TRUE(plan.counts.fits);
  EXPECT_THAT(plan.rows, ElementsAre(1, 4));
  EXPECT_THAT(plan.tokens, ElementsAre(0, 1, 0, 1, 2, 3));
}

void ExpectCountsWithoutRoom(const Case& given) {
  const Plan plan = MakePlan(given);
  EXPECT_FALSE(plan.counts.fits);
  EXPECT_EQ(plan.counts.num_rows, 2);
  EXPECT_EQ(plan.counts.num_tokens, 5);
  EXPECT_EQ(plan.counts.max_rank_tokens, 3);
}

TEST(PlanSharedRowsTest, CountsAllWhereOneRowHasNoRoom) {
  Case given;
  given.row_capacity = 1;
  ExpectCountsWithoutRoom(given);
}

TEST(PlanSharedRowsTest, CountsAllWhereOneTokenOfOneRankHasNoRoom) {
  Case given;
  given.token_capacity = 2;
  ExpectCountsWithoutRoom(given);
}

TEST(PlanSharedRowsTest, RefusesRanksThatDoNotDivideTheTokens) {
  Case given;
  given.spec.num_ranks = 3;
  EXPECT_THAT(Try(given), Rejected("num_ranks is 3: it must be at least 1 and "
                                   "divide the 8 tokens of the batch"));
}

TEST(PlanSharedRowsTest, RefusesATableWithoutRows) {
  Case given;
  given.spec.vocab_rows = 0;
  EXPECT_THAT(Try(given), Rejected("vocab_rows is 0: it must be at least 1"));
}

TEST(PlanSharedRowsTest, RefusesANextBatchOfAnotherSize) {
  Case given;
  given.next_ids.pop_back();
  EXPECT_THAT(Try(given), Rejected("next_ids has 7 elements: it must have 8"));
}

TEST(PlanSharedRowsTest, RefusesMoreRowsInUseThanSlots) {
  Case given;
  given.num_rows = 6;
  EXPECT_THAT(Try(given), Rejected("num_rows is 6: it must be at least 0 and "
                                   "at most the 5 slots of unique_tokens"));
}

TEST(PlanSharedRowsTest, RefusesSegmentsBeyondTheRowsInUse) {
  Case given;
  given.segment_ids[5] = 4;
  EXPECT_THAT(Try(given),
              Rejected("segment_ids[5] is 4: it must be -1 or below "
                       "num_rows=4: give the groups as group_ids made them"));
}

TEST(PlanSharedRowsTest, RefusesRowsThatDoNotAscend) {
  Case given;
  given.unique_tokens = {1, 4, 4, 8, 10};
  EXPECT_THAT(Try(given),
              Rejected("unique_tokens[2] is 4 after 4: rows in use must be at "
                       "least 0 and ascend: give the groups as group_ids made "
                       "them"));
}

}  // namespace
}  // namespace xrex::async_emb
