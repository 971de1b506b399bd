// Contexts that are aborted: at every point of a step, from any thread, by
// whom or by what it may be. All ranks of a step complete it or none does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "tests/xrex/cuda/async_emb/src/context_group.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Optional;

constexpr ErrorCode kAborted = ErrorCode::kAborted;

class AbortTest : public testing::Test {
 protected:
  void MakeGroup(std::int32_t world_size) {
    group_ =
        std::make_unique<ContextGroup>(backend_, clock_, SmallSpec(world_size));
    group_->BringUp();
  }

  ContextGroup& group() { return *group_; }
  AsyncEmbContext& context(std::int32_t rank) { return (*group_)[rank]; }
  RankArrays& arrays(std::int32_t rank) { return group_->arrays(rank); }

  // Every host call of every rank says why.
  void ExpectAllFailed(const std::string& reason) {
    const auto failed = Aborted(reason);
    for (std::int32_t rank = 0; rank < group().size(); ++rank) {
      AsyncEmbContext& own = context(rank);
      EXPECT_THAT(own.error(), Optional(reason));
      EXPECT_THAT(Attempt([&] { own.Check(); }), failed);
      EXPECT_THAT(Attempt([&] { return own.WaitStepReady(); }), failed);
      EXPECT_THAT(Attempt([&] { return own.Drain(); }), failed);
      EXPECT_THAT(Attempt([&] { own.ResetTableBinding(); }), failed);
      EXPECT_THAT(Attempt([&] { own.Snapshot("lookup_ids"); }), failed);
      EXPECT_THAT(Attempt([&] { own.Reset(rank, group().size()); }), failed);
      EXPECT_THAT(Attempt([&] { own.Handshake({"payload"}); }), failed);
    }
  }

  FakeClock clock_;
  HookedBackend backend_;
  std::unique_ptr<ContextGroup> group_;
};

// --- what an aborted context does ---

TEST_F(AbortTest, EveryHostCallOfEveryRankRaisesTheReason) {
  MakeGroup(2);
  context(1).Abort("enough");
  ExpectAllFailed("enough");
}

TEST_F(AbortTest, TheFirstReasonStands) {
  MakeGroup(2);
  context(0).Abort("first");
  context(0).Abort("second");
  context(1).Abort("third");
  ExpectAllFailed("first");
}

TEST_F(AbortTest, StartsPassTheirBuffersThroughAndDonesGiveNan) {
  MakeGroup(2);
  context(0).Abort("enough");
  for (int i = 0; i < 2; ++i) {  // again and again
    group().StartLookups();
    group().StartUpdates();
    group().FinishLookups();
    group().FinishUpdates();
    for (const std::int32_t rank : {0, 1}) {
      EXPECT_TRUE(group().LookupIsNan(rank));
      EXPECT_TRUE(group().UpdateFailed(rank));
      EXPECT_TRUE(group().Untouched(rank));
      EXPECT_THAT(context(rank).stats().steps_armed, ElementsAre(0, 0));
    }
  }
}

TEST_F(AbortTest, AStepThatFailedIsArmedButNeverDone) {
  MakeGroup(2);
  LookupStart lookup = arrays(0).lookup();
  EXPECT_EQ(context(0).StartLookup(StreamRef{}, lookup), 1);
  context(1).Abort("enough");
  group().FinishLookup(0);
  EXPECT_EQ(context(0).StartLookup(StreamRef{}, lookup), 0);
  const ContextStats stats = context(0).stats();
  EXPECT_THAT(stats.steps_armed, ElementsAre(1, 0));
  EXPECT_THAT(stats.steps_done, ElementsAre(0, 0));
  EXPECT_EQ(stats.bytes_sent, 0);
}

TEST_F(AbortTest, NoPipelineRuleIsRaisedOnAFailedContext) {
  MakeGroup(1);
  context(0).Abort("enough");
  group().FinishLookup(0);
  group().FinishUpdate(0);
  group().StartLookup(0);
  group().StartLookup(0);
  EXPECT_TRUE(group().LookupIsNan(0));
}

TEST_F(AbortTest, AContextThatIsNotReadyCanBeAborted) {
  ContextGroup group(backend_, clock_, SmallSpec(1));
  group[0].Abort("enough");
  const auto failed = Aborted("enough");
  EXPECT_THAT(Attempt([&] { group[0].Reset(0, 1); }), failed);
  EXPECT_THAT(Attempt([&] { group[0].Handshake({"payload"}); }), failed);
  group.FinishLookup(0);
  EXPECT_TRUE(group.LookupIsNan(0));
}

// --- waits that an abort ends ---

TEST_F(AbortTest, EndsAHandshakeThatWaits) {
  ContextGroup group(backend_, clock_, SmallSpec(2));
  const std::string payload = group[0].Reset(0, 2)[0];
  auto handshake = AttemptAsync([&] { group[0].Handshake({payload, ""}); });
  clock_.AwaitReads(2);
  group[0].Abort("enough");
  EXPECT_THAT(handshake.get(), Aborted("enough"));
  EXPECT_FALSE(group[0].ready());
}

TEST_F(AbortTest, EndsTheHandshakeOfThePeers) {
  ContextGroup group(backend_, clock_, SmallSpec(4));
  const std::string payload = group[0].Reset(0, 4)[0];
  const std::vector<std::string> payloads{payload, "", "", ""};
  group[1].Reset(1, 4);
  auto first = AttemptAsync([&] { group[0].Handshake(payloads); });
  clock_.AwaitReads(2);
  auto second = AttemptAsync([&] { group[1].Handshake(payloads); });
  group[0].Abort("enough");
  const auto failed = Aborted("enough");
  EXPECT_THAT(first.get(), failed);
  EXPECT_THAT(second.get(), failed);
  EXPECT_THAT(Attempt([&] { group[1].Check(); }), failed);
}

TEST_F(AbortTest, EndsADoneThatWaits) {
  MakeGroup(2);
  group().StartUpdate(0);  // its peer never comes
  const std::int64_t num_reads = clock_.num_reads();
  auto done = AttemptAsync([&] { group().FinishUpdate(0); });
  clock_.AwaitRead(num_reads + 1);
  context(0).Abort("enough");
  EXPECT_THAT(done.get(), Succeeded());
  EXPECT_TRUE(group().UpdateFailed(0));
  EXPECT_TRUE(group().Untouched(0));
}

TEST_F(AbortTest, EndsHostWaitsWithTheAbortedText) {
  MakeGroup(2);
  group().StartLookup(0);
  auto ready = AttemptAsync([&] { return context(0).WaitStepReady(); });
  auto drain = AttemptAsync([&] { return context(0).Drain(); });
  auto snapshot = AttemptAsync([&] { context(0).Snapshot("lookup_send"); });
  clock_.AwaitReads(6);
  context(1).Abort("enough");
  const auto failed = Aborted("enough");
  EXPECT_THAT(ready.get(), failed);
  EXPECT_THAT(drain.get(), failed);
  EXPECT_THAT(snapshot.get(), failed);
}

TEST_F(AbortTest, AwaitQuietReturnsWhenNothingIsTouchedAnyMore) {
  MakeGroup(1);
  Gate& gate =
      backend_.HoldAt({.rank = 0, .where = Place::kAfter, .exchange = 0});
  group().StartLookups();
  gate.AwaitArrival();
  context(0).Abort("enough");
  auto quiet = AttemptAsync([&] { return context(0).AwaitQuiet(Forever()); });
  gate.Open();
  EXPECT_THAT(quiet.get(), Gave(1));
  group().FinishLookups();
}

// The step's first exchange is complete and its rows may be read any time, but
// the start has not recorded its end yet.
TEST_F(AbortTest, AwaitQuietWaitsForAStartThatIsBeingEnqueued) {
  MakeGroup(1);
  Gate& gate =
      backend_.HoldAt({.rank = 0, .where = Place::kEnqueue, .exchange = 1});
  auto start = AttemptAsync([&] { group().StartLookup(0); });
  gate.AwaitArrival();
  context(0).Abort("enough");
  auto quiet = AttemptAsync([&] { return context(0).AwaitQuiet(Forever()); });
  EXPECT_FALSE(HappensAnyway([&] {
    return quiet.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }));
  gate.Open();
  EXPECT_THAT(quiet.get(), Gave(1));
  EXPECT_THAT(start.get(), Succeeded());
}

// --- all or none ---

TEST_F(AbortTest, ALookupWhoseLastExchangeIsOverStaysGood) {
  MakeGroup(2);
  group().StartLookups();
  EXPECT_EQ(context(0).WaitStepReady(), 1);
  context(0).Abort("enough");
  group().FinishLookups();
  EXPECT_TRUE(group().LookupIsRight(0));
  EXPECT_TRUE(group().LookupIsRight(1));
  ExpectAllFailed("enough");
}

TEST_F(AbortTest, AnUpdateWhoseLastExchangeIsOverIsAppliedOnAllRanks) {
  MakeGroup(2);
  Gate& gate =
      backend_.HoldAt({.rank = 1, .where = Place::kAfter, .exchange = 2});
  group().StartUpdates();
  gate.AwaitArrival();
  context(0).Abort("enough");
  gate.Open();
  group().FinishUpdates();
  for (const std::int32_t rank : {0, 1}) {
    EXPECT_EQ(arrays(rank).valid, 1);
    EXPECT_FALSE(group().Untouched(rank));
  }
}

// Rank `aborting` aborts at one place of its work while the others run free.
class AbortAtPlace : public AbortTest,
                     public testing::WithParamInterface<
                         std::tuple<std::int32_t, Place::Where, std::int64_t>> {
};

INSTANTIATE_TEST_SUITE_P(Everywhere, AbortAtPlace,
                         testing::Combine(testing::Values(0, 2),
                                          testing::Values(Place::kEnqueue,
                                                          Place::kBefore,
                                                          Place::kAfter),
                                          testing::Range<std::int64_t>(0, 10)));

TEST_P(AbortAtPlace, AllRanksAgreeOnEveryStep) {
  const auto [aborting, where, exchange] = GetParam();
  MakeGroup(3);
  backend_.At({.rank = aborting, .where = where, .exchange = exchange},
              [this, rank = aborting] { context(rank).Abort("enough"); });
  int num_good_lookups = 0;
  int num_good_updates = 0;
  for (int step = 0; step < 2; ++step) {
    std::vector<float> norms;
    group().StartLookups();
    group().StartUpdates();
    group().FinishLookups();
    group().FinishUpdates();
    // A lookup runs before the update that was started behind it, so that the
    // second one sees what the first update has left: only agreement is
    // checked.
    std::vector<bool> nan;
    std::vector<std::int32_t> valid;
    for (const std::int32_t rank : {0, 1, 2}) {
      nan.push_back(group().LookupIsNan(rank));
      valid.push_back(arrays(rank).valid);
      EXPECT_EQ(group().UpdateFailed(rank), valid.back() == 0);
      EXPECT_EQ(arrays(rank).row_state, arrays(0).row_state);
    }
    EXPECT_THAT(nan, testing::Each(nan[0]));
    EXPECT_THAT(valid, testing::Each(valid[0]));
    num_good_lookups += nan[0] ? 0 : 1;
    num_good_updates += valid[0];
  }
  // Steps run in the order lookup, update, lookup, update: what completed is
  // the beginning of it.
  EXPECT_THAT(num_good_lookups - num_good_updates, testing::AnyOf(0, 1));
  // The aborting rank had not arrived at its exchange, or had just left it.
  const std::int64_t num_exchanges =
      exchange + (where == Place::kAfter ? 1 : 0);
  const std::int64_t num_steps =
      num_exchanges / 5 * 2 + (num_exchanges % 5 >= 2 ? 1 : 0);
  if (where != Place::kEnqueue) {
    EXPECT_EQ(num_good_lookups + num_good_updates, num_steps);
  }
  ExpectAllFailed("enough");
}

// --- what else aborts ---

TEST_F(AbortTest, AMovedTableFailsAllRanksAndNothingIsWritten) {
  MakeGroup(2);
  Gate& gate = backend_.HoldAt({.rank = 0, .exchange = 2});
  group().StartUpdates();
  gate.AwaitArrival();
  const std::vector<Bf16Bits> copy = arrays(1).table;
  context(1).StartLookup(StreamRef{}, {.ids = arrays(1).ids.data(),
                                       .table = copy.data(),
                                       .vocab_rows = kVocabRows});
  gate.Open();
  group().StartLookup(0);
  group().FinishUpdates();
  group().FinishLookups();
  for (const std::int32_t rank : {0, 1}) {
    EXPECT_TRUE(group().UpdateFailed(rank));
    EXPECT_TRUE(group().LookupIsNan(rank));
    EXPECT_TRUE(group().Untouched(rank));
    EXPECT_EQ(context(rank).stats().table_moved, 0);
  }
  std::ostringstream reason;
  reason << "the table moved from "
         << static_cast<const void*>(arrays(1).table.data()) << " to "
         << static_cast<const void*>(copy.data())
         << " before lookup step 1 on rank 1 while another step was in flight: "
            "XLA put a copy in between, and updates would be lost; donate the "
            "table, use the table that each call returns, and let nothing else "
            "read it between a start and its done";
  ExpectAllFailed(reason.str());
}

TEST_F(AbortTest, AProgramThatTakesItselfForAnotherRankFailsAllRanks) {
  MakeGroup(2);
  const std::int32_t program_rank = 1;
  for (const std::int32_t rank : {0, 1}) {
    UpdateStart update = arrays(rank).update();
    update.program_rank = &program_rank;  // right on rank 1 only
    context(rank).StartUpdate(StreamRef{}, update);
  }
  group().FinishUpdates();
  for (const std::int32_t rank : {0, 1}) {
    EXPECT_TRUE(group().UpdateFailed(rank));
    EXPECT_TRUE(group().Untouched(rank));
  }
  ExpectAllFailed(
      "the program on rank 0's device takes itself for another rank: it runs "
      "in a shard_map over another mesh than ctx.mesh; use ctx.mesh");
}

TEST_F(AbortTest, RanksThatRunDifferentStepsFailTogether) {
  MakeGroup(2);
  group().StartLookup(0);
  group().StartUpdate(1);
  group().FinishLookup(0);
  group().FinishUpdate(1);
  EXPECT_TRUE(group().LookupIsNan(0));
  EXPECT_TRUE(group().UpdateFailed(1));
  EXPECT_TRUE(group().Untouched(1));
  EXPECT_THAT(context(0).error(), context(1).error());
  EXPECT_THAT(Attempt([&] { context(0).Check(); }),
              FailedWith(kAborted,
                         HasSubstr("every rank must run the same steps in the "
                                   "same order")));
}

TEST_F(AbortTest, AnErrorThatTheCommunicatorFoundAbortsIt) {
  MakeGroup(2);
  group().StartLookup(0);  // waits for its peer
  backend_.SetPoll(0, [] { return std::optional<std::string>("link down"); });
  context(0).PollWatchdog();
  EXPECT_THAT(backend_.aborts(0), ElementsAre("link down"));
  context(0).PollWatchdog();
  EXPECT_THAT(backend_.aborts(0), ElementsAre("link down")) << "once";
  group().FinishLookup(0);
  EXPECT_TRUE(group().LookupIsNan(0));
  ExpectAllFailed("link down");
}

TEST_F(AbortTest, SeveralThreadsMayAbortAtOnce) {
  MakeGroup(4);
  group().StartLookup(0);
  std::vector<std::future<Outcome>> aborts;
  for (std::int32_t rank = 0; rank < 4; ++rank) {
    aborts.push_back(
        AttemptAsync([&, rank] { context(rank).Abort("enough"); }));
  }
  group().FinishLookup(0);
  for (auto& abort : aborts) EXPECT_THAT(abort.get(), Succeeded());
  EXPECT_TRUE(group().LookupIsNan(0));
  ExpectAllFailed("enough");
}

}  // namespace
}  // namespace xrex::async_emb
