#include "phoenix/xrex/cuda/async_emb/src/host_communicator.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/host_device.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

using std::chrono::seconds;
using testing::ElementsAre;
using testing::Optional;

// One rank with a side stream and an arena of its own.
struct Rank {
  Rank(std::int32_t rank, std::int32_t world_size,
       const HostCommunicator::FindRendezvous& find)
      : comm(std::make_unique<HostCommunicator>(rank, world_size, find)),
        arena(device.AllocateArena(1024)) {}

  StreamRef side() const { return stream->ref(); }

  // Waits for all that was enqueued.
  void Synchronize() {
    device.Record(*event, side());
    ASSERT_TRUE(event->WaitFor(seconds(1000)));
  }

  HostDevice device;
  std::unique_ptr<HostCommunicator> comm;
  std::shared_ptr<std::byte> arena;
  std::unique_ptr<Event> event = device.NewEvent();
  StepGuard guard{Pipeline::kLookup};
  StepGuard other_guard{Pipeline::kUpdate};
  std::unique_ptr<Stream> stream = device.NewSideStream();
};

class HostCommunicatorTest : public testing::Test {
 protected:
  void MakeRanks(std::int32_t world_size) {
    place_ = std::make_shared<HostRendezvous>(world_size);
    for (std::int32_t rank = 0; rank < world_size; ++rank)
      ranks_.emplace_back(rank, world_size, find_);
  }

  std::future<Outcome> ConnectAsync(std::int32_t rank) {
    return AttemptAsync([this, &own = at(rank)] {
      own.comm->Connect({"payload"}, own.arena, clock_,
                        clock_.Now() + seconds(10));
    });
  }

  void MakeConnectedRanks(std::int32_t world_size) {
    MakeRanks(world_size);
    std::vector<std::future<Outcome>> connects;
    for (std::int32_t rank = 0; rank < world_size; ++rank)
      connects.push_back(ConnectAsync(rank));
    for (auto& connect : connects) ASSERT_THAT(connect.get(), Succeeded());
  }

  Rank& at(std::int32_t rank) {
    return ranks_.at(static_cast<std::size_t>(rank));
  }

  void AwaitStall(std::string_view text) {
    WaitUntil([&] { return place_->DescribeStall() == text; });
  }

  FakeClock clock_;
  std::shared_ptr<HostRendezvous> place_;
  HostCommunicator::FindRendezvous find_ = [this](const std::string&) {
    return place_;
  };
  std::deque<Rank> ranks_;
};

// --- collectives ---

TEST_F(HostCommunicatorTest, AllGatherPutsBlocksInRankOrder) {
  MakeConnectedRanks(3);
  const std::array<int, 3> sent{7, 8, 9};
  std::array<std::array<int, 3>, 3> received{};
  for (std::int32_t r = 0; r < 3; ++r)
    at(r).comm->AllGather(at(r).side(), at(r).guard, &sent[r],
                          received[r].data(), sizeof(int));
  for (std::int32_t r = 0; r < 3; ++r) {
    at(r).Synchronize();
    EXPECT_THAT(received[r], ElementsAre(7, 8, 9));
    EXPECT_FALSE(at(r).guard.failed());
  }
}

TEST_F(HostCommunicatorTest, AllToAllTransposesBlocks) {
  MakeConnectedRanks(3);
  const std::array<std::array<int, 3>, 3> sent{
      {{0, 1, 2}, {10, 11, 12}, {20, 21, 22}}};
  std::array<std::array<int, 3>, 3> received{};
  for (std::int32_t r = 0; r < 3; ++r)
    at(r).comm->AllToAll(at(r).side(), at(r).guard, sent[r].data(),
                         received[r].data(), sizeof(int));
  for (std::int32_t r = 0; r < 3; ++r) {
    at(r).Synchronize();
    EXPECT_THAT(received[r], ElementsAre(r, 10 + r, 20 + r));
  }
}

// The sum by neighbours differs from the sum from left to right.
TEST_F(HostCommunicatorTest, AllReduceAddsNeighboursFirst) {
  MakeConnectedRanks(4);
  const std::array<float, 4> sent{1.0F, 1e8F, -1e8F, 1.0F};
  const float expected = (sent[0] + sent[1]) + (sent[2] + sent[3]);
  ASSERT_NE(expected, ((sent[0] + sent[1]) + sent[2]) + sent[3]);
  std::array<float, 4> received{};
  for (std::int32_t r = 0; r < 4; ++r)
    at(r).comm->AllReduceSum(at(r).side(), at(r).guard, &sent[r], &received[r],
                             1, r % 2 == 0);
  for (std::int32_t r = 0; r < 4; ++r) {
    at(r).Synchronize();
    EXPECT_EQ(received[r], expected);
  }
}

TEST_F(HostCommunicatorTest, OneRankExchangesWithItself) {
  MakeConnectedRanks(1);
  const float sent = 3.0F;
  float received = 0.0F;
  at(0).comm->AllReduceSum(at(0).side(), at(0).guard, &sent, &received, 1,
                           true);
  at(0).Synchronize();
  EXPECT_EQ(received, 3.0F);
}

TEST_F(HostCommunicatorTest, AFailedStepTakesNoPartInLaterExchanges) {
  MakeConnectedRanks(2);
  at(0).guard.Fail();
  int sent = 1;
  std::array<int, 2> received{-1, -1};
  at(0).comm->AllGather(at(0).side(), at(0).guard, &sent, received.data(),
                        sizeof(int));
  at(0).Synchronize();
  EXPECT_THAT(received, ElementsAre(-1, -1));
  EXPECT_EQ(place_->DescribeStall(), "") << "it did not arrive";
}

TEST_F(HostCommunicatorTest, ExchangesOfDifferentPipelinesDoNotMatch) {
  MakeConnectedRanks(2);
  int sent = 1;
  std::array<int, 2> received{-1, -1};
  at(0).comm->AllGather(at(0).side(), at(0).guard, &sent, received.data(),
                        sizeof(int));
  AwaitStall("rank 1 has not arrived");
  at(1).comm->AllGather(at(1).side(), at(1).other_guard, &sent, received.data(),
                        sizeof(int));
  at(0).Synchronize();
  at(1).Synchronize();
  EXPECT_TRUE(at(0).guard.failed());
  EXPECT_TRUE(at(1).other_guard.failed());
  EXPECT_THAT(received, ElementsAre(-1, -1));
  EXPECT_THAT(at(0).comm->PollError(),
              Optional(std::string(
                  "rank 1 came with update all-gather of 4 bytes where rank 0 "
                  "came with lookup all-gather of 4 bytes: every rank must run "
                  "the same steps in the same order")));
}

// --- abort ---

TEST_F(HostCommunicatorTest, AbortFailsTheGuardOfAnExchangeThatWaits) {
  MakeConnectedRanks(2);
  int sent = 1;
  std::array<int, 2> received{-1, -1};
  at(0).comm->AllGather(at(0).side(), at(0).guard, &sent, received.data(),
                        sizeof(int));
  AwaitStall("rank 1 has not arrived");
  at(1).comm->Abort("enough");
  at(0).Synchronize();
  EXPECT_TRUE(at(0).guard.failed());
  EXPECT_THAT(received, ElementsAre(-1, -1));
  EXPECT_THAT(at(0).comm->PollError(), Optional(std::string("enough")));
}

TEST_F(HostCommunicatorTest, AbortTwiceKeepsTheFirstReason) {
  MakeConnectedRanks(2);
  at(0).comm->Abort("first");
  at(1).comm->Abort("second");
  EXPECT_THAT(at(0).comm->PollError(), Optional(std::string("first")));
  EXPECT_THAT(at(1).comm->PollError(), Optional(std::string("first")));
}

TEST_F(HostCommunicatorTest, AbortBeforeConnectIsRememberedAndRefusesIt) {
  MakeRanks(2);
  EXPECT_EQ(at(0).comm->PollError(), std::nullopt);
  EXPECT_EQ(at(0).comm->DescribeStall(), "");
  at(0).comm->Abort("first");
  at(0).comm->Abort("second");
  EXPECT_THAT(at(0).comm->PollError(), Optional(std::string("first")));
  EXPECT_THAT(ConnectAsync(0).get(), Aborted("first"));
}

// Its peers must not wait for it until their deadline.
TEST_F(HostCommunicatorTest, AbortBeforeConnectEndsTheConnectOfThePeers) {
  MakeRanks(2);
  at(0).comm->Abort("enough");
  auto peer = ConnectAsync(1);
  EXPECT_THAT(ConnectAsync(0).get(), Aborted("enough"));
  EXPECT_THAT(peer.get(), Aborted("enough"));
}

TEST_F(HostCommunicatorTest, AbortWakesAConnect) {
  MakeRanks(2);
  auto connect = ConnectAsync(0);
  clock_.AwaitReads(2);
  at(0).comm->Abort("enough");
  EXPECT_THAT(connect.get(), Aborted("enough"));
}

// --- end of life ---

TEST_F(HostCommunicatorTest, DestructionLeavesTheGroup) {
  MakeConnectedRanks(2);
  at(1).comm.reset();
  EXPECT_EQ(at(0).comm->PollError(), std::nullopt) << "nobody needs it yet";
  int sent = 1;
  std::array<int, 2> received{};
  at(0).comm->AllGather(at(0).side(), at(0).guard, &sent, received.data(),
                        sizeof(int));
  at(0).Synchronize();
  EXPECT_TRUE(at(0).guard.failed());
  EXPECT_THAT(at(0).comm->PollError(),
              Optional(std::string("rank 1 has closed its context")));
}

TEST_F(HostCommunicatorTest, DestructionBeforeConnectDisturbsNobody) {
  MakeRanks(2);
  at(1).comm.reset();
  EXPECT_EQ(place_->abort_reason(), std::nullopt);
}

// What was enqueued before holds all that it needs.
TEST_F(HostCommunicatorTest, AnExchangeOutlivesItsCommunicator) {
  MakeConnectedRanks(2);
  Gate gate;
  HostStream::RunOn(at(0).side(), [&] { gate.Pass(); });
  int sent = 1;
  std::array<int, 2> received{-1, -1};
  at(0).comm->AllGather(at(0).side(), at(0).guard, &sent, received.data(),
                        sizeof(int));
  at(0).comm.reset();
  gate.Open();
  at(0).Synchronize();
  EXPECT_TRUE(at(0).guard.failed());
}

}  // namespace
}  // namespace xrex::async_emb
