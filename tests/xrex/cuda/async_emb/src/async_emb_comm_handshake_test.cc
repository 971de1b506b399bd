// Reset and handshake: how a group of contexts comes up.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "tests/xrex/cuda/async_emb/src/context_group.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

using std::chrono::seconds;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
constexpr ErrorCode kPrecondition = ErrorCode::kFailedPrecondition;

class HandshakeTest : public testing::Test {
 protected:
  ContextGroup MakeGroup(std::int32_t world_size,
                         const GroupOptions& options = {}) {
    return ContextGroup(backend_, clock_, SmallSpec(world_size), options);
  }

  FakeClock clock_;
  HookedBackend backend_;
};

TEST_F(HandshakeTest, RejectsABadSpecWhenMade) {
  PipelineSpec spec = SmallSpec(2);
  spec.emb_width = 5;
  EXPECT_THAT(Attempt([&] { ContextGroup group(backend_, clock_, spec); }),
              FailedWith(kInvalid, HasSubstr("emb_width is 5")));
}

TEST_F(HandshakeTest, ResetGivesPayloadsOnRankZeroOnly) {
  ContextGroup group = MakeGroup(4);
  EXPECT_THAT(group[0].Reset(0, 4),
              testing::AllOf(testing::SizeIs(4), Each(Not(IsEmpty()))));
  EXPECT_THAT(group[1].Reset(1, 4),
              testing::AllOf(testing::SizeIs(4), Each(IsEmpty())));
  EXPECT_EQ(group[1].rank(), 1);
  EXPECT_FALSE(group[1].ready());
}

TEST_F(HandshakeTest, ARejectedResetChangesNothing) {
  ContextGroup group = MakeGroup(2);
  group.BringUp();
  EXPECT_THAT(
      Attempt([&] { group[0].Reset(2, 2); }),
      Failed(kInvalid, "async_emb received an invalid rank or world size"));
  EXPECT_THAT(Attempt([&] { group[0].Reset(0, 4); }),
              Failed(kInvalid, "async_emb world size changed from 2 to 4"));
  EXPECT_TRUE(group[0].ready());
  group.StartLookups();
  group.FinishLookups();
  EXPECT_TRUE(group.LookupIsRight(0));
}

TEST_F(HandshakeTest, ResetRefusesAWorldSizeThatIsNoPowerOfTwo) {
  PipelineSpec spec = SmallSpec(3);
  spec.any_world_size = false;
  ContextGroup group(backend_, clock_, spec);
  EXPECT_THAT(Attempt([&] { group[0].Reset(0, 3); }),
              Failed(kInvalid, "async_emb currently requires power-of-two EP"));
}

TEST_F(HandshakeTest, ResetRefusesWhileAStepIsInFlight) {
  ContextGroup group = MakeGroup(1);
  group.BringUp();
  group.StartLookups();
  EXPECT_THAT(Attempt([&] { group[0].Reset(0, 1); }),
              Failed(kPrecondition,
                     "async_emb: reset came while lookup step 1 is in flight: "
                     "call its done first, or abort"));
  group.FinishLookups();
  EXPECT_THAT(Attempt([&] { group[0].Reset(0, 1); }), Succeeded());
}

TEST_F(HandshakeTest, HandshakeRefusesPayloadsThatAreMissing) {
  ContextGroup group = MakeGroup(2);
  const std::string payload = group[0].Reset(0, 2)[0];
  const auto refused = [](int count) {
    return Failed(kInvalid,
                  "async_emb: handshake needs one payload from each of 2 "
                  "ranks, rank 0's not empty; got " +
                      std::to_string(count) +
                      ": pass, for each rank, what its reset returned for this "
                      "rank");
  };
  EXPECT_THAT(Attempt([&] { group[0].Handshake({payload}); }), refused(1));
  EXPECT_THAT(Attempt([&] { group[0].Handshake({}); }), refused(0));
  EXPECT_THAT(Attempt([&] { group[0].Handshake({"", ""}); }), refused(2));
  EXPECT_EQ(group[0].error(), std::nullopt);
}

TEST_F(HandshakeTest, HandshakeRefusesBeforeReset) {
  ContextGroup group = MakeGroup(1);
  EXPECT_THAT(Attempt([&] { group[0].Handshake({"payload"}); }),
              Failed(kPrecondition,
                     "async_emb: handshake came before reset: call reset(rank, "
                     "world_size) first"));
}

TEST_F(HandshakeTest, HandshakeRefusesWhenReady) {
  ContextGroup group = MakeGroup(1);
  group.BringUp();
  EXPECT_THAT(Attempt([&] { group[0].Handshake({"payload"}); }),
              Failed(kPrecondition,
                     "async_emb: handshake came twice: call reset(rank, "
                     "world_size) before another handshake"));
  EXPECT_TRUE(group[0].ready());
}

TEST_F(HandshakeTest, AnUnknownPayloadFailsTheContextForGood) {
  ContextGroup group = MakeGroup(1);
  group[0].Reset(0, 1);
  const Outcome refused = Attempt([&] { group[0].Handshake({"stale"}); });
  EXPECT_THAT(refused, FailedWith(kInvalid, HasSubstr("payload 0 ('stale')")));
  EXPECT_THAT(Attempt([&] { group[0].Reset(0, 1); }),
              Aborted("the handshake failed: " + refused.message));
}

TEST_F(HandshakeTest, HandshakeTimesOutAndNamesWhoIsMissing) {
  ContextGroup group = MakeGroup(2);
  const std::string payload = group[0].Reset(0, 2)[0];
  auto handshake = AttemptAsync([&] { group[0].Handshake({payload, ""}); });
  clock_.AwaitReads(2);
  clock_.Advance(seconds(10));
  EXPECT_THAT(handshake.get(),
              Failed(ErrorCode::kTimeout,
                     "async_emb: handshake timed out: rank 1 has not arrived"));
  EXPECT_THAT(Attempt([&] { group[0].Check(); }),
              Aborted("handshake timed out: rank 1 has not arrived"));
}

TEST_F(HandshakeTest, HandshakeTakesATimeOutOfItsOwn) {
  ContextGroup group = MakeGroup(2);
  const std::string payload = group[0].Reset(0, 2)[0];
  auto handshake =
      AttemptAsync([&] { group[0].Handshake({payload, ""}, seconds(60)); });
  clock_.AwaitReads(2);
  clock_.Advance(seconds(59));
  clock_.AwaitReads(2);
  EXPECT_EQ(group[0].error(), std::nullopt);
  clock_.Advance(seconds(1));
  EXPECT_THAT(handshake.get(),
              Failed(ErrorCode::kTimeout,
                     "async_emb: handshake timed out: rank 1 has not arrived"));
}

TEST_F(HandshakeTest, HandshakeRunsEveryCollectiveOnce) {
  int num_visits = 0;
  for (std::int64_t exchange = -3; exchange < 3; ++exchange) {
    backend_.At({.rank = 0, .where = Place::kAfter, .exchange = exchange},
                [&] { ++num_visits; });
  }
  ContextGroup group = MakeGroup(1);
  group.BringUp();
  EXPECT_EQ(num_visits, 3);
  EXPECT_EQ(group[0].stats().bytes_sent, 0);
}

TEST_F(HandshakeTest, HandshakeTimesOutInAnExchangeThatDoesNotEnd) {
  ContextGroup group = MakeGroup(2);
  const std::string payload = group[0].Reset(0, 2)[0];
  group[1].Reset(1, 2);
  Gate& gate = backend_.HoldAt({.rank = 1, .exchange = -2});
  auto first = AttemptAsync([&] { group[0].Handshake({payload, ""}); });
  auto second = AttemptAsync(
      [&] { group[1].Handshake({payload, ""}, std::chrono::hours(1)); });
  gate.AwaitArrival();
  backend_.AwaitStall(0, "rank 1 has not arrived");
  clock_.Advance(seconds(10));
  EXPECT_THAT(first.get(),
              Failed(ErrorCode::kTimeout,
                     "async_emb: handshake timed out in its first exchange: "
                     "rank 1 has not arrived"));
  gate.Open();
  EXPECT_THAT(second.get(),
              Aborted("the handshake failed: async_emb: handshake timed "
                      "out in its first exchange: rank 1 has not "
                      "arrived"));
  EXPECT_FALSE(group[0].ready());
  EXPECT_FALSE(group[1].ready());
}

TEST_F(HandshakeTest, TwoContextsOfOneRankFailTheHandshakeOfTheGroup) {
  ContextGroup group = MakeGroup(2);
  const std::string payload = group[0].Reset(0, 2)[0];
  group[1].Reset(0, 2);
  auto handshake = AttemptAsync([&] { group[0].Handshake({payload, ""}); });
  clock_.AwaitReads(2);
  const std::string text =
      "async_emb: rank 0 is already connected: give each context a rank of its "
      "own";
  EXPECT_THAT(Attempt([&] { group[1].Handshake({payload, ""}); }),
              Failed(kInvalid, text));
  EXPECT_THAT(handshake.get(), Aborted("the handshake failed: " + text));
}

TEST_F(HandshakeTest, ResetRefusesWhileTheHandshakeWaits) {
  ContextGroup group = MakeGroup(2);
  const std::string payload = group[0].Reset(0, 2)[0];
  auto handshake = AttemptAsync([&] { group[0].Handshake({payload, ""}); });
  clock_.AwaitReads(2);
  EXPECT_THAT(Attempt([&] { group[0].Reset(0, 2); }),
              Failed(kPrecondition,
                     "async_emb: reset came while a handshake waits for its "
                     "peers: let it end first, or abort"));
  group[1].Reset(1, 2);
  group[1].Handshake({payload, ""});
  EXPECT_THAT(handshake.get(), Succeeded());
}

TEST_F(HandshakeTest, AWholeGroupCanBeResetAndBroughtUpAgain) {
  ContextGroup group = MakeGroup(4);
  for (int round = 1; round <= 3; ++round) {
    group.BringUp();
    group.StartLookups();
    group.FinishLookups();
    group.StartUpdates();
    group.FinishUpdates();
    for (std::int32_t rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(group.arrays(rank).valid, 1);
      EXPECT_EQ(group[rank].error(), std::nullopt);
      EXPECT_EQ(group[rank].stats().steps_done[0], round) << "counters go on";
    }
  }
}

TEST_F(HandshakeTest, ResetForgetsTheTable) {
  ContextGroup group = MakeGroup(1);
  group.BringUp();
  group.StartLookups();
  group.FinishLookups();
  group.BringUp();
  group.arrays(0).table = std::vector<Bf16Bits>(group.arrays(0).table);
  group.StartLookups();
  group.FinishLookups();
  EXPECT_EQ(group[0].stats().table_moved, 0);
}

}  // namespace
}  // namespace xrex::async_emb
