#include "phoenix/xrex/cuda/async_emb/src/arena_layout.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/device.hpp"
#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"

namespace xrex::async_emb {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::size_t kScratchBytes = 1001;

// R = 3, T = 5, w = 7, U = 11: no two sizes agree by chance.
PipelineSpec OddSpec() {
  return {.world_size = 3,
          .tokens_per_rank = 5,
          .shard_width = 7,
          .emb_width = 21,
          .num_unique = 11};
}

std::vector<Region> AllRegions() {
  std::vector<Region> regions;
  for (int i = 0; i < kNumRegions; ++i) {
    regions.push_back(static_cast<Region>(i));
  }
  return regions;
}

TEST(ArenaLayoutTest, GivesEachRegionTheBytesOfItsArray) {
  const ArenaLayout layout(OddSpec(), kScratchBytes);
  EXPECT_EQ(layout.bytes(Region::kLookupIds), 15 * 4);
  EXPECT_EQ(layout.bytes(Region::kLookupSend), 15 * 7 * 2);
  EXPECT_EQ(layout.bytes(Region::kLookupEmbeddings), 15 * 7 * 2);
  EXPECT_EQ(layout.bytes(Region::kUpdateIndices), 15 * 4);
  EXPECT_EQ(layout.bytes(Region::kUpdateSend), 15 * 7 * 2);
  EXPECT_EQ(layout.bytes(Region::kUpdateGradients), 15 * 7 * 2);
  EXPECT_EQ(layout.bytes(Region::kUpdateStats), 12 * 4);
  EXPECT_EQ(layout.bytes(Region::kUpdateGradAccum), 11 * 7 * 4);
  EXPECT_EQ(layout.bytes(Region::kLocalIds), 5 * 4);
  EXPECT_EQ(layout.bytes(Region::kLocalSegments), 5 * 4);
  EXPECT_EQ(layout.bytes(Region::kPartialStats), 12 * 4);
  EXPECT_EQ(layout.bytes(Region::kUpdateScalars), sizeof(UpdateScalars));
  EXPECT_EQ(layout.bytes(Region::kUpdateResult), sizeof(UpdateResult));
  EXPECT_EQ(layout.bytes(Region::kScratch), kScratchBytes);
}

TEST(ArenaLayoutTest, AlignsEveryRegionAndTheEnd) {
  const ArenaLayout layout(OddSpec(), kScratchBytes);
  for (const Region region : AllRegions()) {
    EXPECT_EQ(layout.offset(region) % kArenaAlignment, 0) << RegionName(region);
  }
  EXPECT_EQ(layout.total_bytes() % kArenaAlignment, 0);
}

TEST(ArenaLayoutTest, NoTwoRegionsShareSpace) {
  const ArenaLayout layout(OddSpec(), kScratchBytes);
  std::size_t end = 0;
  for (const Region region : AllRegions()) {
    EXPECT_GE(layout.offset(region), end) << RegionName(region);
    end = layout.offset(region) + layout.bytes(region);
  }
  EXPECT_GE(layout.total_bytes(), end);
}

TEST(ArenaLayoutTest, ASingleRankReceivesWhereItSends) {
  PipelineSpec spec = OddSpec();
  spec.world_size = 1;
  const ArenaLayout layout(spec, kScratchBytes);
  EXPECT_EQ(layout.offset(Region::kLookupEmbeddings),
            layout.offset(Region::kLookupSend));
  EXPECT_EQ(layout.offset(Region::kUpdateGradients),
            layout.offset(Region::kUpdateSend));
}

TEST(ArenaLayoutTest, NoOtherRegionsOfASingleRankShareSpace) {
  PipelineSpec spec = OddSpec();
  spec.world_size = 1;
  const ArenaLayout layout(spec, kScratchBytes);
  std::size_t end = 0;
  for (const Region region : AllRegions()) {
    if (region == Region::kLookupEmbeddings ||
        region == Region::kUpdateGradients) {
      continue;
    }
    EXPECT_GE(layout.offset(region), end) << RegionName(region);
    end = layout.offset(region) + layout.bytes(region);
  }
  EXPECT_GE(layout.total_bytes(), end);
}

TEST(ArenaLayoutTest, WastesLessThanOneAlignmentPerRegion) {
  const ArenaLayout layout(OddSpec(), kScratchBytes);
  std::size_t used = 0;
  for (const Region region : AllRegions()) used += layout.bytes(region);
  EXPECT_LT(layout.total_bytes(), used + kNumRegions * kArenaAlignment);
}

TEST(ArenaLayoutTest, ASnapshotOfTheStatsLeavesTheFlagOut) {
  const ArenaLayout layout(OddSpec(), kScratchBytes);
  EXPECT_EQ(layout.snapshot_bytes(Region::kUpdateStats), 11 * 4);
}

TEST(ArenaLayoutTest, ASnapshotOfAnotherRegionIsWhole) {
  const ArenaLayout layout(OddSpec(), kScratchBytes);
  for (int i = 0; i < kNumSnapshotRegions; ++i) {
    const auto region = static_cast<Region>(i);
    if (region == Region::kUpdateStats) continue;
    EXPECT_EQ(layout.snapshot_bytes(region), layout.bytes(region));
  }
}

TEST(ArenaLayoutTest, OffsetsGoBeyond32Bits) {
  PipelineSpec spec = OddSpec();
  spec.tokens_per_rank = std::int64_t{1} << 28;
  const ArenaLayout layout(spec, 0);
  EXPECT_EQ(layout.bytes(Region::kLookupSend), (std::size_t{3 * 7 * 2} << 28));
  EXPECT_GT(layout.offset(Region::kUpdateStats), std::size_t{40} << 30);
}

std::string Complaint(const PipelineSpec& spec, std::size_t scratch_bytes) {
  try {
    const ArenaLayout layout(spec, scratch_bytes);
  } catch (const AsyncEmbError& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

TEST(ArenaLayoutTest, RejectsARegionWhoseSizeOverflows) {
  PipelineSpec spec = OddSpec();
  spec.shard_width = kMaxInt32;
  spec.num_unique = kMaxInt32 - 1;
  EXPECT_THAT(Complaint(spec, 0),
              AllOf(HasSubstr("update_grad_accum"), HasSubstr("2^63"),
                    HasSubstr("lower tokens_per_rank")));
}

TEST(ArenaLayoutTest, RejectsASumOfRegionsThatOverflows) {
  PipelineSpec spec = OddSpec();
  spec.world_size = 1;
  spec.tokens_per_rank = kMaxInt32;
  spec.shard_width = std::int64_t{1} << 30;  // one region fits, two do not
  EXPECT_THAT(Complaint(spec, 0), HasSubstr("update_send"));
}

TEST(ArenaLayoutTest, RejectsScratchThatOverflows) {
  EXPECT_THAT(Complaint(OddSpec(), std::numeric_limits<std::size_t>::max()),
              HasSubstr("scratch"));
}

TEST(RegionNameTest, NamesAreDistinct) {
  std::set<std::string_view> names;
  for (const Region region : AllRegions()) names.insert(RegionName(region));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kNumRegions));
  EXPECT_EQ(names.count(""), 0);
}

TEST(FindSnapshotRegionTest, FindsEveryPublicName) {
  EXPECT_EQ(FindSnapshotRegion("lookup_ids"), Region::kLookupIds);
  EXPECT_EQ(FindSnapshotRegion("lookup_send"), Region::kLookupSend);
  EXPECT_EQ(FindSnapshotRegion("lookup_embeddings"), Region::kLookupEmbeddings);
  EXPECT_EQ(FindSnapshotRegion("update_indices"), Region::kUpdateIndices);
  EXPECT_EQ(FindSnapshotRegion("update_send"), Region::kUpdateSend);
  EXPECT_EQ(FindSnapshotRegion("update_gradients"), Region::kUpdateGradients);
  EXPECT_EQ(FindSnapshotRegion("update_stats"), Region::kUpdateStats);
  EXPECT_EQ(FindSnapshotRegion("update_grad_accum"), Region::kUpdateGradAccum);
}

TEST(FindSnapshotRegionTest, KnowsNoInnerRegionAndNoOtherName) {
  for (const Region region : AllRegions()) {
    if (static_cast<int>(region) < kNumSnapshotRegions) continue;
    EXPECT_EQ(FindSnapshotRegion(RegionName(region)), std::nullopt);
  }
  EXPECT_EQ(FindSnapshotRegion(""), std::nullopt);
  EXPECT_EQ(FindSnapshotRegion("lookup"), std::nullopt);
}

TEST(SnapshotRegionNamesTest, ListsTheSnapshotRegions) {
  EXPECT_EQ(SnapshotRegionNames(),
            "lookup_ids, lookup_send, lookup_embeddings, update_indices, "
            "update_send, update_gradients, update_stats, update_grad_accum");
}

}  // namespace
}  // namespace xrex::async_emb
