#include "phoenix/xrex/cuda/async_emb/src/id_groups.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <span>
#include <vector>

#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

using ::testing::ElementsAre;

constexpr std::int32_t kInt32Max = std::numeric_limits<std::int32_t>::max();

struct Grouped {
  IdGroupCounts counts;
  std::vector<std::int32_t> unique_tokens;
  std::vector<std::int32_t> segment_ids;
};

template <typename Id = std::int32_t>
Grouped Group(const std::vector<Id>& ids, std::int32_t vocab_rows,
              std::size_t capacity, std::span<const bool> mask = {}) {
  Grouped grouped{.counts = {},
                  .unique_tokens = std::vector<std::int32_t>(capacity, -7),
                  .segment_ids = std::vector<std::int32_t>(ids.size(), -7)};
  grouped.counts = GroupIds<Id>(ids, mask, vocab_rows, grouped.unique_tokens,
                                grouped.segment_ids);
  return grouped;
}

// What the rule says, by an ordered map.
void ExpectGroupsOfRows(const std::vector<std::int32_t>& rows,
                        std::int32_t vocab_rows) {
  std::map<std::int32_t, std::int32_t> slot_of_row;
  for (const std::int32_t row : rows) slot_of_row[row] = 0;
  std::vector<std::int32_t> unique_tokens;
  for (auto& [row, slot] : slot_of_row) {
    slot = static_cast<std::int32_t>(unique_tokens.size());
    unique_tokens.push_back(row);
  }
  unique_tokens.resize(rows.size(), vocab_rows);
  std::vector<std::int32_t> segment_ids;
  for (const std::int32_t row : rows)
    segment_ids.push_back(slot_of_row.at(row));
  const Grouped grouped = Group(rows, vocab_rows, rows.size());
  EXPECT_EQ(grouped.counts.num_rows,
            static_cast<std::int64_t>(slot_of_row.size()));
  EXPECT_EQ(grouped.unique_tokens, unique_tokens);
  EXPECT_EQ(grouped.segment_ids, segment_ids);
}

TEST(GroupIdsTest, ListsDistinctRowsInAscendingOrderAndThenUnusedSlots) {
  const Grouped grouped = Group({7, 2, 7, 0}, 10, 5);
  EXPECT_EQ(grouped.counts.num_rows, 3);
  EXPECT_THAT(grouped.unique_tokens, ElementsAre(0, 2, 7, 10, 10));
  EXPECT_THAT(grouped.segment_ids, ElementsAre(2, 1, 2, 0));
}

TEST(GroupIdsTest, WrapsNegativeIdsOnce) {
  const Grouped grouped = Group({-1, 9, -10, -11}, 10, 2);
  EXPECT_THAT(grouped.unique_tokens, ElementsAre(0, 9));
  EXPECT_THAT(grouped.segment_ids, ElementsAre(1, 1, 0, -1));
}

TEST(GroupIdsTest, CountsIdsOutsideTheTableAndTellsTheFirst) {
  const Grouped grouped = Group({3, 10, -11, 4}, 10, 2);
  EXPECT_THAT(grouped.segment_ids, ElementsAre(0, -1, -1, 1));
  EXPECT_EQ(grouped.counts.num_out_of_range, 2);
  EXPECT_EQ(grouped.counts.first_out_of_range, 1);
}

TEST(GroupIdsTest, TellsNoFirstIdOutsideTheTableIfThereIsNone) {
  const Grouped grouped = Group({0, 9, -10}, 10, 2);
  EXPECT_EQ(grouped.counts.num_out_of_range, 0);
  EXPECT_EQ(grouped.counts.first_out_of_range, -1);
}

TEST(GroupIdsTest, LeavesMaskedTokensOutAndUncounted) {
  const bool mask[] = {true, false, false, true};
  const Grouped grouped =
      Group<std::int32_t>({5, 6, 99, 5}, 10, 2, std::span<const bool>(mask));
  EXPECT_THAT(grouped.unique_tokens, ElementsAre(5, 10));
  EXPECT_THAT(grouped.segment_ids, ElementsAre(0, -1, -1, 0));
  EXPECT_EQ(grouped.counts.num_rows, 1);
  EXPECT_EQ(grouped.counts.num_out_of_range, 0);
}

TEST(GroupIdsTest, TakesTheEndsOfInt64AsOutsideTheTable) {
  const Grouped grouped = Group<std::int64_t>(
      {std::numeric_limits<std::int64_t>::min(),
       std::numeric_limits<std::int64_t>::max(), 3, std::int64_t{1} << 32},
      10, 1);
  EXPECT_THAT(grouped.unique_tokens, ElementsAre(3));
  EXPECT_THAT(grouped.segment_ids, ElementsAre(-1, -1, 0, -1));
}

TEST(GroupIdsTest, GroupsTheEndsOfTheGreatestTable) {
  const Grouped grouped =
      Group({-1, 0, kInt32Max - 1, kInt32Max}, kInt32Max, 3);
  EXPECT_THAT(grouped.unique_tokens, ElementsAre(0, kInt32Max - 1, kInt32Max));
  EXPECT_THAT(grouped.segment_ids, ElementsAre(1, 0, 1, -1));
}

TEST(GroupIdsTest, GroupsATableOfOneRow) {
  const Grouped grouped = Group({0, -1, 1}, 1, 1);
  EXPECT_THAT(grouped.unique_tokens, ElementsAre(0));
  EXPECT_THAT(grouped.segment_ids, ElementsAre(0, 0, -1));
}

TEST(GroupIdsTest, GroupsNoTokens) {
  const Grouped grouped = Group<std::int32_t>({}, 10, 2);
  EXPECT_EQ(grouped.counts.num_rows, 0);
  EXPECT_THAT(grouped.unique_tokens, ElementsAre(10, 10));
}

TEST(GroupIdsTest, RefusesMoreRowsThanSlotsAndTellsTheirNumber) {
  EXPECT_THAT(
      Attempt([] { Group({5, 1, 5, 2, 3}, 10, 2); }),
      Failed(ErrorCode::kInvalidArgument,
             "async_emb: the batch has 4 distinct ids, but the list of "
             "distinct ids has a capacity of 2; raise num_unique or make the "
             "batch smaller"));
}

TEST(GroupIdsTest, RefusesATableWithoutRows) {
  EXPECT_THAT(Attempt([] { Group({0}, 0, 1); }),
              Failed(ErrorCode::kInvalidArgument,
                     "async_emb: vocab_rows is 0: it must be at least 1"));
}

TEST(GroupIdsTest, RefusesAMaskOfAnotherLength) {
  const bool mask[] = {true};
  EXPECT_THAT(Attempt([&] {
                Group<std::int32_t>({1, 2}, 10, 2, std::span<const bool>(mask));
              }),
              Failed(ErrorCode::kInvalidArgument,
                     "async_emb: the mask has 1 elements and the batch 2 "
                     "tokens: give one element a token"));
}

TEST(GroupIdsTest, RefusesSegmentsOfAnotherLength) {
  const std::vector<std::int32_t> ids = {1, 2};
  std::vector<std::int32_t> slots(2);
  std::vector<std::int32_t> segment_ids(3);
  EXPECT_THAT(
      Attempt([&] { GroupIds<std::int32_t>(ids, {}, 10, slots, segment_ids); }),
      Failed(ErrorCode::kInvalidArgument,
             "async_emb: segment_ids has 3 elements and the batch 2 "
             "tokens: give one element a token"));
}

// Shapes of batches that tables and sorts may treat each in its own way.
struct Pattern {
  const char* name;
  std::int32_t num_tokens;
  std::int32_t vocab_rows;
  std::function<std::int64_t(std::int64_t)>
      row;  // of a token, modulo the table
};

class GroupIdsPatternTest : public testing::TestWithParam<Pattern> {};

TEST_P(GroupIdsPatternTest, GroupsAsTheRuleSays) {
  const Pattern& pattern = GetParam();
  std::vector<std::int32_t> rows;
  for (std::int32_t i = 0; i < pattern.num_tokens; ++i) {
    rows.push_back(
        static_cast<std::int32_t>(pattern.row(i) % pattern.vocab_rows));
  }
  ExpectGroupsOfRows(rows, pattern.vocab_rows);
}

std::int64_t Scatter(std::int64_t i) { return i * 2654435761 % 4294967291; }

INSTANTIATE_TEST_SUITE_P(
    Batches, GroupIdsPatternTest,
    testing::Values(
        Pattern{"AllEqual", 5000, 1 << 22, [](auto) { return 77; }},
        Pattern{"Ascending", 5000, 1 << 22, [](auto i) { return i; }},
        Pattern{"Descending", 5000, 1 << 22, [](auto i) { return 9999 - i; }},
        Pattern{"StrideOfABucket", 5000, 1 << 22,
                [](auto i) { return i << 13; }},
        Pattern{"StrideOfADigit", 5000, kInt32Max,
                [](auto i) { return i << 25; }},
        Pattern{"OneBucketOfTwo", 5000, 1 << 10, [](auto i) { return i % 64; }},
        Pattern{"ScatteredInASmallTable", 5000, 100, &Scatter},
        Pattern{"ScatteredInAnOddTable", 5000, 1'000'003, &Scatter},
        Pattern{"ScatteredInTheGreatestTable", 5000, kInt32Max, &Scatter},
        Pattern{"DenseInTheGreatestTable", 5000, kInt32Max,
                [](auto i) { return kInt32Max - 1 - i % 3000; }},
        Pattern{"FewInOneBucketOfTheGreatestTable", 60, kInt32Max,
                [](auto i) { return (59 - i) / 2 * 1000; }},
        Pattern{"OneToken", 1, 1 << 22, [](auto) { return (1 << 22) - 1; }}),
    [](const auto& info) { return info.param.name; });

TEST(GroupRowsTest, CountsRowsThatItHasNoRoomFor) {
  std::vector<std::int32_t> rows = {9, -1, 4, 9, 6};
  std::vector<std::int32_t> distinct(2);
  EXPECT_EQ(GroupRows(10, rows, distinct), 3);
  EXPECT_THAT(distinct, ElementsAre(4, 6));
  EXPECT_THAT(rows, ElementsAre(2, -1, 0, 2, 1));
}

}  // namespace
}  // namespace xrex::async_emb
