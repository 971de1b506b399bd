// A side stream that does not end in time: the context must leave behind what
// the work may still touch, and say so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "phoenix/xrex/cuda/async_emb/src/host_device.hpp"
#include "tests/xrex/cuda/async_emb/src/context_group.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

// A host stream whose work is said to run on when it is stopped. The backend
// owns what is inside, since this one is never destroyed.
class StuckStream final : public Stream {
 public:
  explicit StuckStream(HostStream& inner) : inner_(inner) {}
  StreamRef ref() override { return inner_.ref(); }
  bool Stop(std::chrono::nanoseconds timeout) override {
    stop_timeout_ = timeout;
    return false;
  }
  std::chrono::nanoseconds stop_timeout() const { return stop_timeout_; }

 private:
  HostStream& inner_;
  std::chrono::nanoseconds stop_timeout_{0};
};

class StuckDevice final : public HostDevice {
 public:
  StuckDevice(HostStream& stream, StuckStream** made)
      : stream_(stream), made_(made) {}
  std::unique_ptr<Stream> NewSideStream() override {
    auto stream = std::make_unique<StuckStream>(stream_);
    *made_ = stream.get();
    return stream;
  }

 private:
  HostStream& stream_;
  StuckStream** const made_;
};

class StuckBackend final : public Backend {
 public:
  std::string_view platform() const override { return "cpu"; }
  std::chrono::seconds default_timeout() const override {
    return std::chrono::seconds(30);
  }
  std::unique_ptr<Device> NewDevice(std::int64_t /*device_key*/) override {
    return std::make_unique<StuckDevice>(stream_, &made_);
  }
  std::string_view ResolveTransport(Transport wanted) const override {
    return inner_.ResolveTransport(wanted);
  }
  std::vector<std::string> MakePayloads(std::int32_t world_size) override {
    return inner_.MakePayloads(world_size);
  }
  std::unique_ptr<Communicator> NewCommunicator(
      const CommunicatorConfig& config, Device& device) override {
    return inner_.NewCommunicator(config, device);
  }

  HostStream& stream() { return stream_; }
  StuckStream& made() { return *made_; }

 private:
  HostBackend inner_;
  HostStream stream_;
  StuckStream* made_ = nullptr;
};

TEST(TeardownTest, WorkThatDoesNotEndKeepsWhatItTouches) {
  FakeClock clock;
  StuckBackend backend;
  Gate gate;
  auto group = std::make_unique<ContextGroup>(backend, clock, SmallSpec(1));
  group->BringUp();
  const std::size_t arena_bytes = (*group)[0].arena_bytes();
  backend.stream().Enqueue([&gate] { gate.Pass(); });
  group->StartUpdates();
  gate.AwaitArrival();
  testing::internal::CaptureStderr();
  group->Destroy(0);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "[async_emb] warning: context 7 rank 0: its work did not end in "
            "time; leaking its side stream and " +
                std::to_string(arena_bytes) + " bytes of arena\n");
  EXPECT_GT(backend.made().stop_timeout(), std::chrono::seconds(20));
  EXPECT_LE(backend.made().stop_timeout(), std::chrono::seconds(30));
  // The step goes on over memory that is still there, and writes nothing.
  gate.Open();
  ASSERT_TRUE(backend.stream().Stop(std::chrono::seconds(1000)));
  EXPECT_TRUE(group->Untouched(0));
}

TEST(TeardownTest, AContextThatWasClosedInVainIsNotWaitedForAgain) {
  FakeClock clock;
  StuckBackend backend;
  auto group = std::make_unique<ContextGroup>(backend, clock, SmallSpec(1));
  group->BringUp();
  (*group)[0].Close(std::chrono::steady_clock::now() + std::chrono::hours(1));
  EXPECT_GT(backend.made().stop_timeout(), std::chrono::minutes(30));
  group->Destroy(0);
  EXPECT_LE(backend.made().stop_timeout(), std::chrono::seconds(0));
  ASSERT_TRUE(backend.stream().Stop(std::chrono::seconds(1000)));
}

}  // namespace
}  // namespace xrex::async_emb
