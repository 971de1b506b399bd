// What a context tells about its steps: counters and snapshots.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/arena_layout.hpp"
#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "tests/xrex/cuda/async_emb/src/context_group.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

using std::chrono::seconds;
using testing::ElementsAre;

constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;

template <typename T>
std::vector<T> As(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

class StatsTest : public testing::Test {
 protected:
  void MakeGroup(std::int32_t world_size) {
    group_ =
        std::make_unique<ContextGroup>(backend_, clock_, SmallSpec(world_size));
    group_->BringUp();
  }

  ContextGroup& group() { return *group_; }
  AsyncEmbContext& context(std::int32_t rank) { return (*group_)[rank]; }
  RankArrays& arrays(std::int32_t rank) { return group_->arrays(rank); }

  void Lookup() {
    group().StartLookups();
    group().FinishLookups();
  }
  void Update() {
    group().StartUpdates();
    group().FinishUpdates();
  }

  FakeClock clock_;
  HookedBackend backend_;
  std::unique_ptr<ContextGroup> group_;
};

// --- counters ---

TEST_F(StatsTest, StepsAreCountedWhenArmedAndWhenDone) {
  MakeGroup(2);
  Lookup();
  group().StartLookups();
  group().StartUpdates();
  EXPECT_THAT(context(0).stats().steps_armed, ElementsAre(2, 1));
  EXPECT_THAT(context(0).stats().steps_done, ElementsAre(1, 0));
  group().FinishUpdates();
  group().FinishLookups();
  EXPECT_THAT(context(0).stats().steps_done, ElementsAre(2, 1));
}

TEST_F(StatsTest, EachRankCountsItsOwnTokens) {
  MakeGroup(2);
  arrays(1).ids = {kVocabRows, 0, -kVocabRows - 1};
  arrays(0).segment_ids = {5, -1, 0};
  Lookup();
  Update();
  EXPECT_EQ(context(0).stats().ids_out_of_range, 0);
  EXPECT_EQ(context(1).stats().ids_out_of_range, 2);
  EXPECT_EQ(context(0).stats().segments_invalid, 1);
  EXPECT_EQ(context(1).stats().segments_invalid, 0);
  for (const std::int32_t rank : {0, 1}) {
    EXPECT_EQ(context(rank).stats().skipped_invalid, 1);
    EXPECT_EQ(arrays(rank).valid, 0);
    EXPECT_TRUE(std::isfinite(arrays(rank).norm));
    EXPECT_TRUE(group().Untouched(rank));
  }
}

TEST_F(StatsTest, SkippedUpdatesAreCountedByReason) {
  MakeGroup(2);
  for (const std::int32_t rank : {0, 1}) arrays(rank).pending = 0;
  Update();
  for (const std::int32_t rank : {0, 1}) {
    arrays(rank).pending = 1;
    arrays(rank).learning_rate = NAN;
  }
  Update();
  for (const std::int32_t rank : {0, 1}) {
    EXPECT_EQ(context(rank).stats().skipped_pending, 1);
    EXPECT_EQ(context(rank).stats().skipped_non_finite, 1);
    EXPECT_EQ(context(rank).stats().skipped_invalid, 0);
    EXPECT_TRUE(group().Untouched(rank));
  }
}

TEST_F(StatsTest, TheLastNormIsThatOfTheLastUpdate) {
  MakeGroup(2);
  Update();
  EXPECT_EQ(context(0).stats().last_norm, arrays(0).norm);
  EXPECT_GT(arrays(0).norm, 0.0F);
}

// A rank's own block goes to each of its peers.
TEST_F(StatsTest, BytesThatLeaveTheRankAreCounted) {
  MakeGroup(4);
  Lookup();
  constexpr std::int64_t kLookupBytes = 3 * (3 * 4 + 3 * 2 * 2);
  EXPECT_EQ(context(0).stats().bytes_sent, kLookupBytes);
  Update();
  EXPECT_EQ(context(0).stats().bytes_sent, 2 * kLookupBytes + 3 * 6 * 4);
}

TEST_F(StatsTest, OneRankSendsNothing) {
  MakeGroup(1);
  Lookup();
  Update();
  EXPECT_EQ(context(0).stats().bytes_sent, 0);
}

TEST_F(StatsTest, TheTimeThatTheDoneOfALookupWaitsIsCounted) {
  MakeGroup(1);
  Gate& gate = backend_.HoldAt({.rank = 0, .exchange = 0});
  group().StartLookups();
  gate.AwaitArrival();
  const std::int64_t num_reads = clock_.num_reads();
  auto done = AttemptAsync([&] { group().FinishLookup(0); });
  clock_.AwaitRead(num_reads + 1);  // the wait has begun
  clock_.Advance(seconds(3));
  gate.Open();
  ASSERT_THAT(done.get(), Succeeded());
  EXPECT_THAT(context(0).stats().wait_secs, ElementsAre(3.0, 0.0));
}

TEST_F(StatsTest, TheTimeThatTheDoneOfAnUpdateWaitsIsCounted) {
  MakeGroup(1);
  Gate& gate = backend_.HoldAt({.rank = 0, .exchange = 2});
  group().StartUpdates();
  gate.AwaitArrival();
  const std::int64_t num_reads = clock_.num_reads();
  auto done = AttemptAsync([&] { group().FinishUpdate(0); });
  clock_.AwaitRead(num_reads + 1);
  clock_.Advance(seconds(3));
  gate.Open();
  ASSERT_THAT(done.get(), Succeeded());
  EXPECT_THAT(context(0).stats().wait_secs, ElementsAre(0.0, 3.0));
}

TEST_F(StatsTest, WaitsOfSeveralStepsAddUp) {
  MakeGroup(1);
  for (int i = 0; i < 3; ++i) {
    group().StartLookups();
    // The second look at the clock ends the wait.
    clock_.OnNextRead([&] {
      clock_.OnNextRead(
          [&] { clock_.Advance(std::chrono::milliseconds(250)); });
    });
    group().FinishLookups();
  }
  EXPECT_THAT(context(0).stats().wait_secs, ElementsAre(0.75, 0.0));
}

TEST_F(StatsTest, TheTimeInWhichADoneCopiesIsNotCounted) {
  MakeGroup(1);
  const std::vector<Bf16Bits> unwritten(arrays(0).embeddings.size(), 0x5A5A);
  arrays(0).embeddings = unwritten;
  group().StartLookups();
  std::vector<Bf16Bits> when_the_wait_ended;
  clock_.OnNextRead([&] {
    clock_.OnNextRead([&] { when_the_wait_ended = arrays(0).embeddings; });
  });
  group().FinishLookups();
  EXPECT_EQ(when_the_wait_ended, unwritten);
  EXPECT_NE(arrays(0).embeddings, unwritten);
}

TEST_F(StatsTest, TheDoneOfAStepThatWasNotArmedWaitsForNothing) {
  MakeGroup(1);
  context(0).Abort("enough");
  const std::int64_t num_reads = clock_.num_reads();
  group().StartLookups();
  group().FinishLookups();
  EXPECT_EQ(clock_.num_reads(), num_reads);
  EXPECT_THAT(context(0).stats().wait_secs, ElementsAre(0.0, 0.0));
}

TEST_F(StatsTest, CountersCanBeReadWhileAStepIsHeldUp) {
  MakeGroup(1);
  Gate& gate = backend_.HoldAt({.rank = 0, .exchange = 0});
  group().StartLookups();
  gate.AwaitArrival();
  EXPECT_THAT(context(0).stats().steps_armed, ElementsAre(1, 0));
  EXPECT_THAT(context(0).stats().steps_done, ElementsAre(0, 0));
  gate.Open();
  group().FinishLookups();
}

TEST_F(StatsTest, CountersCanBeReadAfterAnAbort) {
  MakeGroup(2);
  Lookup();
  context(0).Abort("enough");
  EXPECT_THAT(context(0).stats().steps_armed, ElementsAre(1, 0));
  EXPECT_THAT(context(1).stats().steps_done, ElementsAre(1, 0));
}

TEST_F(StatsTest, CountersNeverFallWhileStepsRun) {
  MakeGroup(2);
  arrays(0).ids = {kVocabRows, kVocabRows, kVocabRows};
  auto steps = AttemptAsync([&] {
    for (int i = 0; i < 200; ++i) {
      Lookup();
      Update();
    }
  });
  const auto numbers = [](const ContextStats& stats) {
    return std::vector<std::int64_t>{
        stats.steps_armed[0],     stats.steps_armed[1],  stats.steps_done[0],
        stats.steps_done[1],      stats.bytes_sent,      stats.ids_out_of_range,
        stats.skipped_non_finite, stats.skipped_invalid, stats.table_moved};
  };
  std::vector<std::int64_t> last(9, 0);
  while (last[3] < 200) {
    const std::vector<std::int64_t> now = numbers(context(0).stats());
    for (std::size_t i = 0; i < last.size(); ++i) ASSERT_GE(now[i], last[i]);
    ASSERT_GE(now[0], now[2]) << "armed before done";
    last = now;
  }
  EXPECT_THAT(steps.get(), Succeeded());
  EXPECT_EQ(last[5], 600);
}

// --- snapshots ---

TEST_F(StatsTest, SnapshotRefusesAContextThatIsNotReady) {
  ContextGroup group(backend_, clock_, SmallSpec(1));
  EXPECT_THAT(Attempt([&] { group[0].Snapshot("lookup_ids"); }),
              Failed(kInvalid, "async_emb context not initialized"));
  EXPECT_THAT(Attempt([&] { group[0].Snapshot("nonsense"); }),
              Failed(kInvalid, "async_emb context not initialized"));
}

TEST_F(StatsTest, SnapshotRefusesAnUnknownRegionAndListsTheKnownOnes) {
  MakeGroup(1);
  EXPECT_THAT(
      Attempt([&] { context(0).Snapshot("scratch"); }),
      Failed(kInvalid,
             "async_emb: unknown snapshot region 'scratch': it must be one of "
             "lookup_ids, lookup_send, lookup_embeddings, update_indices, "
             "update_send, update_gradients, update_stats, "
             "update_grad_accum"));
}

TEST_F(StatsTest, SnapshotShowsWhatTheLatestStepLeft) {
  MakeGroup(2);
  Lookup();
  Update();
  std::vector<std::int32_t> ids = arrays(0).ids;
  ids.insert(ids.end(), arrays(1).ids.begin(), arrays(1).ids.end());
  std::vector<std::int32_t> segments = arrays(0).segment_ids;
  segments.insert(segments.end(), arrays(1).segment_ids.begin(),
                  arrays(1).segment_ids.end());
  for (const std::int32_t rank : {0, 1}) {
    EXPECT_EQ(As<std::int32_t>(context(rank).Snapshot("lookup_ids")), ids);
    EXPECT_EQ(As<std::int32_t>(context(rank).Snapshot("update_indices")),
              segments);
    const auto stats = As<float>(context(rank).Snapshot("update_stats"));
    ASSERT_EQ(stats.size(), 5U);
    EXPECT_EQ(std::sqrt(stats[0] + stats[1] + stats[2] + stats[3] + stats[4]),
              arrays(rank).norm);
  }
}

TEST_F(StatsTest, SnapshotWaitsForTheStepOfItsPipelineOnly) {
  MakeGroup(1);
  Gate& gate = backend_.HoldAt({.rank = 0, .exchange = 2});
  group().StartLookups();
  group().StartUpdates();
  gate.AwaitArrival();
  EXPECT_EQ(As<std::int32_t>(context(0).Snapshot("lookup_ids")), arrays(0).ids);
  auto snapshot = AttemptAsync([&] {
    return As<std::int32_t>(context(0).Snapshot("update_indices")) ==
           arrays(0).segment_ids;
  });
  gate.Open();
  EXPECT_THAT(snapshot.get(), Gave(1));
  group().FinishLookups();
  group().FinishUpdates();
}

}  // namespace
}  // namespace xrex::async_emb
