// What a device refuses, and what it still works on when the host has done with
// it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "phoenix/xrex/cuda/async_emb/src/host_backend.hpp"
#include "phoenix/xrex/cuda/async_emb/src/host_device.hpp"
#include "tests/xrex/cuda/async_emb/src/context_group.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

using testing::HasSubstr;

// Operations that fail, the next so many times.
struct Faults {
  int outputs = 0;       // those of dones
  int pins = 0;          // and all else that is zeroed
  int side_records = 0;  // events of the side stream

  static void Count(int& left) {
    if (left == 0) return;
    --left;
    throw AsyncEmbError(ErrorCode::kInternal, "the device said no");
  }
};

// A host device with faults, whose caller's stream can be held up: what is
// recorded there is then reached when it is let go.
class FaultyDevice final : public HostDevice {
 public:
  explicit FaultyDevice(Faults& faults) : faults_(faults) {}

  void Record(Event& event, StreamRef stream) override {
    if (stream.handle != nullptr) Faults::Count(faults_.side_records);
    std::lock_guard lock(mutex_);
    if (!holds_ || stream.handle != nullptr) {
      return HostDevice::Record(event, stream);
    }
    static_cast<HostEvent&>(event).Reset();
    held_.push_back(&static_cast<HostEvent&>(event));
  }
  void Zero(StreamRef stream, void* dst, std::size_t bytes) override {
    Faults::Count(faults_.pins);
    HostDevice::Zero(stream, dst, bytes);
  }
  void CombineSlices(StreamRef stream, const StepGuard& guard,
                     const SliceShape& shape, const Bf16Bits* slices,
                     Bf16Bits* out) override {
    Faults::Count(faults_.outputs);
    HostDevice::CombineSlices(stream, guard, shape, slices, out);
  }
  void WriteResult(StreamRef stream, const StepGuard& guard,
                   const UpdateResult* result, float* norm,
                   std::int32_t* valid) override {
    Faults::Count(faults_.outputs);
    HostDevice::WriteResult(stream, guard, result, norm, valid);
  }

  void HoldCaller() {
    std::lock_guard lock(mutex_);
    holds_ = true;
  }
  void LetCallerGo() {
    std::lock_guard lock(mutex_);
    holds_ = false;
    for (HostEvent* event : held_) event->Complete();
    held_.clear();
  }

 private:
  Faults& faults_;
  std::mutex mutex_;
  bool holds_ = false;            // guarded by mutex_
  std::vector<HostEvent*> held_;  // guarded by mutex_
};

class FaultyBackend final : public Backend {
 public:
  std::string_view platform() const override { return "cpu"; }
  std::chrono::seconds default_timeout() const override {
    return std::chrono::seconds(30);
  }
  std::string_view ResolveTransport(Transport wanted) const override {
    return inner_.ResolveTransport(wanted);
  }
  std::unique_ptr<Device> NewDevice(std::int64_t /*device_key*/) override {
    auto device = std::make_unique<FaultyDevice>(faults);
    device_ = device.get();
    return device;
  }
  std::vector<std::string> MakePayloads(std::int32_t world_size) override {
    return inner_.MakePayloads(world_size);
  }
  std::unique_ptr<Communicator> NewCommunicator(
      const CommunicatorConfig& config, Device& device) override {
    return inner_.NewCommunicator(config, device);
  }

  // Of the context that was made last.
  FaultyDevice& device() { return *device_; }

  Faults faults;

 private:
  HostBackend inner_;
  FaultyDevice* device_ = nullptr;
};

bool IsReady(const std::future<Outcome>& future) {
  return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

class DeviceTest : public testing::Test {
 protected:
  void SetUp() override { group_.BringUp(); }

  AsyncEmbContext& context() { return group_[0]; }
  Outcome Check() {
    return Attempt([this] { context().Check(); });
  }

  FakeClock clock_;
  FaultyBackend backend_;
  ContextGroup group_{backend_, clock_, SmallSpec(1)};
};

// --- what it refuses ---

TEST_F(DeviceTest, ALookupThatCannotBeTakenOverGivesNan) {
  group_.StartLookups();
  backend_.faults.outputs = 1;
  EXPECT_THAT(Attempt([&] { group_.FinishLookups(); }), Succeeded());
  EXPECT_TRUE(group_.LookupIsNan(0));
  EXPECT_THAT(Check(),
              Aborted("lookup could not be taken over: the device said no"));
}

TEST_F(DeviceTest, AnUpdateThatCannotBeTakenOverGivesNan) {
  group_.StartUpdates();
  backend_.faults.outputs = 1;
  EXPECT_THAT(Attempt([&] { group_.FinishUpdates(); }), Succeeded());
  EXPECT_TRUE(group_.UpdateFailed(0));
  EXPECT_THAT(Check(),
              Aborted("update could not be taken over: the device said no"));
}

TEST_F(DeviceTest, ADoneThatCanWriteNothingFailsNoHandler) {
  group_.StartLookups();
  backend_.faults.outputs = 2;
  testing::internal::CaptureStderr();
  EXPECT_THAT(Attempt([&] { group_.FinishLookups(); }), Succeeded());
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("the outputs of lookup are not written"));
  EXPECT_THAT(Check(),
              Aborted("lookup could not be taken over: the device said no"));
}

TEST_F(DeviceTest, APinThatCannotBeWrittenFailsNoHandler) {
  float pin = 0.0F;
  backend_.faults.pins = 1;
  EXPECT_THAT(Attempt([&] { context().WritePin({}, &pin); }), Succeeded());
  EXPECT_THAT(Check(),
              Aborted("a pin could not be written: the device said no"));
}

TEST_F(DeviceTest, AStepWhoseEndIsMarkedAtTheSecondAttemptIsQuietInTime) {
  backend_.faults.side_records = 1;
  group_.StartUpdates();
  EXPECT_THAT(Check(),
              Aborted("update could not be enqueued: the device said no"));
  EXPECT_TRUE(context().AwaitQuiet(Forever()));
  group_.FinishUpdates();
  EXPECT_TRUE(group_.UpdateFailed(0));
}

// --- what it still works on ---

TEST_F(DeviceTest, CloseWaitsUntilTheCallersStreamHasTakenTheStep) {
  group_.StartLookups();
  EXPECT_EQ(context().WaitStepReady(), 1);
  backend_.device().HoldCaller();
  group_.FinishLookups();
  auto close = AttemptAsync([&] { context().Close(Forever()); });
  EXPECT_FALSE(HappensAnyway([&] { return IsReady(close); }));
  backend_.device().LetCallerGo();
  EXPECT_THAT(close.get(), Succeeded());
}

TEST_F(DeviceTest, CloseWaitsForADoneOfNoStep) {
  context().Abort("enough");
  backend_.device().HoldCaller();
  group_.FinishUpdates();
  auto close = AttemptAsync([&] { context().Close(Forever()); });
  EXPECT_FALSE(HappensAnyway([&] { return IsReady(close); }));
  backend_.device().LetCallerGo();
  EXPECT_THAT(close.get(), Succeeded());
}

TEST_F(DeviceTest, AResetIsRefusedUntilTheCallersStreamHasTakenTheStep) {
  group_.StartLookups();
  EXPECT_EQ(context().WaitStepReady(), 1);
  backend_.device().HoldCaller();
  group_.FinishLookups();
  EXPECT_THAT(
      Attempt([&] { context().Reset(0, 1); }),
      Failed(ErrorCode::kFailedPrecondition,
             "async_emb: reset came while lookup step 1 is on the device: wait "
             "for the results of its done first (jax.block_until_ready), or "
             "abort"));
  EXPECT_TRUE(context().ready());
  backend_.device().LetCallerGo();
  EXPECT_THAT(Attempt([&] { context().Reset(0, 1); }), Succeeded());
}

// --- starts that do not come to an end ---

class HeldStartTest : public testing::Test {
 protected:
  void SetUp() override {
    group_.BringUp();
    start_ = AttemptAsync([this] { group_.StartLookup(0); });
    gate_.AwaitArrival();
  }

  void LetGo() {
    gate_.Open();
    EXPECT_THAT(start_.get(), Succeeded());
  }

  static std::chrono::steady_clock::time_point Soon() {
    return std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
  }

  FakeClock clock_;
  HookedBackend backend_;
  ContextGroup group_{backend_, clock_, SmallSpec(1)};
  Gate& gate_ =
      backend_.HoldAt({.rank = 0, .where = Place::kEnqueue, .exchange = 1});
  std::future<Outcome> start_;
};

TEST_F(HeldStartTest, CloseAbortsItAndGivesUpAtItsLimit) {
  group_[0].Close(Soon());
  EXPECT_THAT(Attempt([&] { group_[0].Check(); }),
              Aborted("context 7 rank 0 was destroyed while a step was being "
                      "enqueued"));
  LetGo();
  group_[0].Close(Forever());
}

TEST_F(HeldStartTest, AwaitQuietGivesUpAtItsLimit) {
  group_[0].Abort("enough");
  EXPECT_FALSE(group_[0].AwaitQuiet(Soon()));
  LetGo();
  EXPECT_TRUE(group_[0].AwaitQuiet(Forever()));
}

}  // namespace
}  // namespace xrex::async_emb
