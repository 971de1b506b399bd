#include "phoenix/xrex/cuda/async_emb/src/host_backend.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <string>

#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

using std::chrono::seconds;

class HostBackendTest : public testing::Test {
 protected:
  struct Rank {
    std::unique_ptr<Device> device;
    std::shared_ptr<std::byte> arena;
    std::unique_ptr<Communicator> comm;
  };

  Rank MakeRank(std::int32_t rank, std::int32_t world_size) {
    Rank made{.device = backend_.NewDevice(rank), .arena = {}, .comm = {}};
    made.arena = made.device->AllocateArena(256);
    made.comm = backend_.NewCommunicator(
        {.rank = rank, .world_size = world_size}, *made.device);
    return made;
  }

  std::future<Outcome> ConnectAsync(Rank& rank, const std::string& payload) {
    return AttemptAsync([this, &rank, payload] {
      rank.comm->Connect({payload}, rank.arena, clock_,
                         clock_.Now() + seconds(10));
    });
  }

  void ExpectUnknown(Rank& rank, const std::string& payload) {
    EXPECT_THAT(
        ConnectAsync(rank, payload).get(),
        Failed(ErrorCode::kInvalidArgument,
               "async_emb: payload 0 ('" + payload +
                   "') is not one that rank 0 has just made in this process: "
                   "on the host backend all ranks live in one process; give "
                   "handshake what the last reset of rank 0 returned"));
  }

  FakeClock clock_;
  HostBackend backend_;
};

TEST_F(HostBackendTest, IsTheCpuWithATimeOutBelowXlasOwn) {
  EXPECT_EQ(backend_.platform(), "cpu");
  EXPECT_EQ(backend_.default_timeout(), seconds(30));
}

TEST_F(HostBackendTest, HasOneTransport) {
  EXPECT_EQ(backend_.ResolveTransport(Transport::kAuto), "shared memory");
  const auto refused = [](const std::string& name) {
    return Failed(ErrorCode::kInvalidArgument,
                  "async_emb: transport is '" + name +
                      "', which needs GPUs: on CPU devices it must be 'auto'");
  };
  EXPECT_THAT(Attempt([&] { backend_.ResolveTransport(Transport::kNccl); }),
              refused("nccl"));
  EXPECT_THAT(Attempt([&] { backend_.ResolveTransport(Transport::kLsa); }),
              refused("lsa"));
}

TEST_F(HostBackendTest, MakesOnePayloadForEachRank) {
  const auto payloads = backend_.MakePayloads(3);
  ASSERT_EQ(payloads.size(), 3U);
  EXPECT_THAT(payloads, testing::Each(payloads[0]));
  EXPECT_FALSE(payloads[0].empty());
}

TEST_F(HostBackendTest, NeverMakesAPayloadTwice) {
  EXPECT_NE(backend_.MakePayloads(1), backend_.MakePayloads(1));
}

TEST_F(HostBackendTest, ConnectsTheRanksThatShareAPayload) {
  const std::string payload = backend_.MakePayloads(2)[0];
  Rank first = MakeRank(0, 2);
  Rank second = MakeRank(1, 2);
  auto connect = ConnectAsync(first, payload);
  EXPECT_THAT(ConnectAsync(second, payload).get(), Succeeded());
  EXPECT_THAT(connect.get(), Succeeded());
}

TEST_F(HostBackendTest, KeepsGroupsOfDifferentPayloadsApart) {
  const std::string one = backend_.MakePayloads(1)[0];
  const std::string other = backend_.MakePayloads(1)[0];
  Rank first = MakeRank(0, 1);
  Rank second = MakeRank(0, 1);
  ASSERT_THAT(ConnectAsync(first, one).get(), Succeeded());
  ASSERT_THAT(ConnectAsync(second, other).get(), Succeeded());
  first.comm->Abort("enough");
  EXPECT_EQ(second.comm->PollError(), std::nullopt);
}

TEST_F(HostBackendTest, RefusesAPayloadOfSomewhereElse) {
  Rank rank = MakeRank(0, 1);
  ExpectUnknown(rank, "async_emb host rendezvous 1.1");
}

// An old payload must not disturb the group that was made with it.
TEST_F(HostBackendTest, RefusesThePayloadOfAGroupThatIsComplete) {
  const std::string payload = backend_.MakePayloads(1)[0];
  Rank rank = MakeRank(0, 1);
  ASSERT_THAT(ConnectAsync(rank, payload).get(), Succeeded());
  Rank late = MakeRank(0, 1);
  ExpectUnknown(late, payload);
  late.comm.reset();
  EXPECT_EQ(rank.comm->PollError(), std::nullopt);
}

TEST_F(HostBackendTest, ForgetsAGroupThatTimedOutAtTheNextReset) {
  const std::string payload = backend_.MakePayloads(2)[0];
  Rank rank = MakeRank(0, 2);
  auto connect = ConnectAsync(rank, payload);
  clock_.AwaitReads(2);
  clock_.Advance(seconds(10));
  ASSERT_THAT(connect.get(),
              FailedWith(ErrorCode::kTimeout, testing::HasSubstr("timed out")));
  backend_.MakePayloads(2);
  Rank late = MakeRank(1, 2);
  ExpectUnknown(late, payload);
}

// Meetings remember the arenas of their ranks, but not longer than the ranks.
TEST_F(HostBackendTest, LetsGoOfTheArenasWithTheLastRank) {
  const std::string payload = backend_.MakePayloads(1)[0];
  Rank rank = MakeRank(0, 1);
  const std::weak_ptr<std::byte> arena = rank.arena;
  ASSERT_THAT(ConnectAsync(rank, payload).get(), Succeeded());
  StepGuard guard;
  rank.comm->AllGather(StreamRef{}, guard, rank.arena.get(),
                       rank.arena.get() + 8, 8);
  ASSERT_FALSE(guard.failed());
  rank = Rank{};
  EXPECT_TRUE(arena.expired());
}

}  // namespace
}  // namespace xrex::async_emb
