#include "phoenix/xrex/cuda/async_emb/src/host_rendezvous.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

using std::chrono::seconds;
using testing::ElementsAre;
using testing::Optional;

class HostRendezvousTest : public testing::Test {
 protected:
  HostRendezvousTest() { Recreate(2); }

  void Recreate(std::int32_t world_size) {
    world_size_ = world_size;
    place_ = std::make_unique<HostRendezvous>(world_size);
  }

  std::future<Outcome> JoinAsync(std::int32_t rank) {
    const Clock::TimePoint deadline = clock(rank).Now() + seconds(10);
    return AttemptAsync([this, rank, deadline] {
      place_->Join(rank, world_size_, clock(rank), deadline);
    });
  }

  // Each rank has one of its own, so that a read shows that the rank waits.
  FakeClock& clock(std::int32_t rank) {
    return clocks_.at(static_cast<std::size_t>(rank));
  }

  void JoinAll() {
    std::vector<std::future<Outcome>> joins;
    for (std::int32_t rank = 0; rank < world_size_; ++rank)
      joins.push_back(JoinAsync(rank));
    for (auto& join : joins) ASSERT_THAT(join.get(), Succeeded());
  }

  // The data of all offers, each a number that a rank brought; empty for a
  // meeting that did not take place.
  std::vector<int> Meet(std::int32_t rank, std::string_view operation,
                        std::size_t bytes, int value) {
    const auto own = std::make_shared<int>(value);
    const auto offers = place_->Meet(rank, operation, bytes, {own.get(), own});
    std::vector<int> values;
    if (!offers) return values;
    for (const auto& offer : *offers)
      values.push_back(*static_cast<const int*>(offer.data));
    return values;
  }

  std::future<std::vector<int>> MeetAsync(std::int32_t rank, int value) {
    return std::async(std::launch::async, [this, rank, value] {
      return Meet(rank, "all-gather", 4, value);
    });
  }

  void AwaitStall(std::string_view text) {
    WaitUntil([&] { return place_->DescribeStall() == text; });
  }

  std::array<FakeClock, 4> clocks_;
  std::int32_t world_size_ = 0;
  std::unique_ptr<HostRendezvous> place_;
};

// --- join ---

TEST_F(HostRendezvousTest, JoinReturnsWhenAllRanksAreThere) {
  Recreate(3);
  auto first = JoinAsync(0);
  clock(0).AwaitReads(1);
  auto third = JoinAsync(2);
  clock(2).AwaitReads(1);
  EXPECT_THAT(JoinAsync(1).get(), Succeeded());
  EXPECT_THAT(first.get(), Succeeded());
  EXPECT_THAT(third.get(), Succeeded());
}

TEST_F(HostRendezvousTest, JoinOfOneRankReturnsAtOnce) {
  Recreate(1);
  EXPECT_THAT(Attempt([&] { place_->Join(0, 1, clock(0), clock(0).Now()); }),
              Succeeded());
}

TEST_F(HostRendezvousTest, JoinTimesOutAtTheDeadlineAndNamesWhoIsMissing) {
  Recreate(4);
  auto first = JoinAsync(0);
  clock(0).AwaitReads(1);
  auto third = JoinAsync(2);
  clock(2).AwaitReads(1);
  clock(0).Advance(seconds(10));
  EXPECT_THAT(
      first.get(),
      Failed(ErrorCode::kTimeout,
             "async_emb: handshake timed out: ranks 1, 3 have not arrived"));
  EXPECT_THAT(third.get(), Aborted("handshake timed out: "
                                   "ranks 1, 3 have not arrived"));
}

TEST_F(HostRendezvousTest, JoinStillWaitsOneTickBeforeTheDeadline) {
  auto first = JoinAsync(0);
  clock(0).Advance(seconds(10) - Clock::Duration(1));
  clock(0).AwaitReads(2);
  EXPECT_EQ(place_->abort_reason(), std::nullopt);
  EXPECT_THAT(JoinAsync(1).get(), Succeeded());
  EXPECT_THAT(first.get(), Succeeded());
}

TEST_F(HostRendezvousTest, JoinAfterATimeOutSaysWhatHappened) {
  auto first = JoinAsync(0);
  clock(0).Advance(seconds(10));
  EXPECT_THAT(first.get(),
              Failed(ErrorCode::kTimeout,
                     "async_emb: handshake timed out: rank 1 has not arrived"));
  EXPECT_THAT(JoinAsync(1).get(), Aborted("handshake timed out: "
                                          "rank 1 has not arrived"));
}

TEST_F(HostRendezvousTest, JoinRefusesARankThatIsThere) {
  JoinAll();
  EXPECT_THAT(JoinAsync(1).get(),
              Failed(ErrorCode::kInvalidArgument,
                     "async_emb: rank 1 is already connected: give each "
                     "context a rank of its own"));
}

TEST_F(HostRendezvousTest, JoinRefusesAnotherWorldSize) {
  EXPECT_THAT(
      Attempt([&] { place_->Join(0, 4, clock(0), clock(0).Now()); }),
      Failed(ErrorCode::kInvalidArgument,
             "async_emb: handshake for 4 ranks with a payload that was made "
             "for 2"));
}

TEST_F(HostRendezvousTest, AbortWakesAJoin) {
  auto join = JoinAsync(0);
  clock(0).AwaitReads(1);
  place_->Abort("enough");
  EXPECT_THAT(join.get(), Aborted("enough"));
}

TEST_F(HostRendezvousTest, ARankThatLeavesEndsTheJoinOfTheOthers) {
  Recreate(3);
  auto first = JoinAsync(0);
  clock(0).AwaitReads(1);
  place_->Leave(1);
  EXPECT_THAT(first.get(), Aborted("rank 1 has closed its "
                                   "context"));
}

// --- meet ---

TEST_F(HostRendezvousTest, GivesEveryRankAllOffersInRankOrder) {
  Recreate(3);
  JoinAll();
  auto third = MeetAsync(2, 30);
  AwaitStall("ranks 0, 1 have not arrived");
  auto first = MeetAsync(0, 10);
  AwaitStall("rank 1 has not arrived");
  EXPECT_THAT(Meet(1, "all-gather", 4, 20), ElementsAre(10, 20, 30));
  EXPECT_THAT(first.get(), ElementsAre(10, 20, 30));
  EXPECT_THAT(third.get(), ElementsAre(10, 20, 30));
  EXPECT_EQ(place_->DescribeStall(), "");
}

TEST_F(HostRendezvousTest, KeepsManyMeetingsApart) {
  Recreate(4);
  JoinAll();
  constexpr int kMeetings = 500;
  std::vector<std::future<int>> wrong;
  for (std::int32_t rank = 0; rank < 4; ++rank) {
    wrong.push_back(std::async(std::launch::async, [this, rank] {
      int num_wrong = 0;
      for (int i = 0; i < kMeetings; ++i) {
        const int v = 4 * i;
        const std::vector<int> expected{v, v + 1, v + 2, v + 3};
        num_wrong += Meet(rank, "all-gather", 4, v + rank) == expected ? 0 : 1;
      }
      return num_wrong;
    }));
  }
  for (auto& count : wrong) EXPECT_EQ(count.get(), 0);
}

TEST_F(HostRendezvousTest, KeepsAnOfferAliveForItsPeers) {
  JoinAll();
  auto first = std::async(std::launch::async, [this] {
    return place_->Meet(0, "all-gather", 4, {nullptr, nullptr});
  });
  auto own = std::make_shared<int>(6);
  const std::weak_ptr<int> watch = own;
  const void* const data = own.get();
  place_->Meet(1, "all-gather", 4, {data, std::move(own)});
  place_->Leave(1);
  const auto offers = first.get();
  ASSERT_TRUE(offers.has_value());
  EXPECT_FALSE(watch.expired());
  EXPECT_EQ(*static_cast<const int*>((*offers)[1].data), 6);
}

TEST_F(HostRendezvousTest, AbortWakesAMeeting) {
  JoinAll();
  auto first = MeetAsync(0, 1);
  AwaitStall("rank 1 has not arrived");
  place_->Abort("enough");
  EXPECT_THAT(first.get(), testing::IsEmpty());
  EXPECT_THAT(Meet(1, "all-gather", 4, 2), testing::IsEmpty());
}

TEST_F(HostRendezvousTest, TheFirstReasonOfAnAbortStands) {
  place_->Abort("first");
  place_->Abort("second");
  EXPECT_THAT(place_->abort_reason(), Optional(std::string("first")));
}

TEST_F(HostRendezvousTest, RefusesADifferentOperation) {
  JoinAll();
  auto first = MeetAsync(0, 1);
  AwaitStall("rank 1 has not arrived");
  EXPECT_THAT(Meet(1, "all-reduce", 4, 2), testing::IsEmpty());
  EXPECT_THAT(first.get(), testing::IsEmpty());
  EXPECT_THAT(place_->abort_reason(),
              Optional(std::string(
                  "rank 1 came with all-reduce of 4 bytes where rank 0 came "
                  "with all-gather of 4 bytes: every rank must run the same "
                  "steps in the same order")));
}

TEST_F(HostRendezvousTest, RefusesADifferentSize) {
  JoinAll();
  auto second = std::async(std::launch::async,
                           [this] { return Meet(1, "all-gather", 8, 2); });
  AwaitStall("rank 0 has not arrived");
  EXPECT_THAT(Meet(0, "all-gather", 4, 1), testing::IsEmpty());
  EXPECT_THAT(second.get(), testing::IsEmpty());
  EXPECT_THAT(place_->abort_reason(),
              Optional(std::string(
                  "rank 0 came with all-gather of 4 bytes where rank 1 came "
                  "with all-gather of 8 bytes: every rank must run the same "
                  "steps in the same order")));
}

// --- leave ---

TEST_F(HostRendezvousTest, ARankThatLeavesIsMissedOnlyWhenItIsNeeded) {
  JoinAll();
  place_->Leave(1);
  EXPECT_EQ(place_->abort_reason(), std::nullopt);
  EXPECT_THAT(Meet(0, "all-gather", 4, 1), testing::IsEmpty());
  EXPECT_THAT(place_->abort_reason(),
              Optional(std::string("rank 1 has closed its context")));
}

TEST_F(HostRendezvousTest, ARankThatLeavesEndsAMeetingThatWaitsForIt) {
  JoinAll();
  auto first = MeetAsync(0, 1);
  AwaitStall("rank 1 has not arrived");
  place_->Leave(1);
  EXPECT_THAT(first.get(), testing::IsEmpty());
  EXPECT_THAT(place_->abort_reason(),
              Optional(std::string("rank 1 has closed its context")));
}

// The last rank to come completes the meeting and aborts before the others have
// woken up: they get their offers all the same.
TEST_F(HostRendezvousTest, AMeetingThatTookPlaceCountsWhateverFollows) {
  for (int round = 0; round < 50; ++round) {
    Recreate(3);
    JoinAll();
    auto first = MeetAsync(0, 10);
    auto second = MeetAsync(1, 20);
    AwaitStall("rank 2 has not arrived");
    EXPECT_THAT(Meet(2, "all-gather", 4, 30), ElementsAre(10, 20, 30));
    place_->Abort("afterwards");
    EXPECT_THAT(first.get(), ElementsAre(10, 20, 30));
    EXPECT_THAT(second.get(), ElementsAre(10, 20, 30));
  }
}

// All or none, however an abort falls among the arrivals.
TEST_F(HostRendezvousTest, AllRanksAgreeWhetherAMeetingTookPlace) {
  for (int round = 0; round < 200; ++round) {
    Recreate(3);
    JoinAll();
    std::vector<std::future<std::vector<int>>> meetings;
    for (std::int32_t rank = 0; rank < 3; ++rank)
      meetings.push_back(MeetAsync(rank, rank));
    for (int i = 0; i < round % 16; ++i) std::this_thread::yield();
    place_->Abort("now");
    std::vector<std::size_t> sizes;
    for (auto& meeting : meetings) sizes.push_back(meeting.get().size());
    EXPECT_THAT(sizes,
                testing::AnyOf(ElementsAre(0, 0, 0), ElementsAre(3, 3, 3)));
  }
}

}  // namespace
}  // namespace xrex::async_emb
