#include "phoenix/xrex/cuda/async_emb/src/host_device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/arena_layout.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

// An arena that is too large is refused by us, not by the sanitizer, which
// finds these only where they are visible.
extern "C" [[gnu::visibility("default")]] const char* __asan_default_options() {
  return "allocator_may_return_null=1";
}
extern "C" [[gnu::visibility("default")]] const char* __tsan_default_options() {
  return "allocator_may_return_null=1";
}

namespace xrex::async_emb {
namespace {

using std::chrono::seconds;

// Longer than any test runs: a wait of this length that ends was ended.
constexpr seconds kForever{1000};

class HostStreamTest : public testing::Test {
 protected:
  HostDevice device_;
  std::unique_ptr<Stream> stream_ = device_.NewSideStream();
  std::unique_ptr<Event> event_ = device_.NewEvent();
};

TEST_F(HostStreamTest, RunsWorkInOrderOnAnotherThread) {
  std::vector<int> order;
  std::thread::id worker;
  for (int i = 0; i < 100; ++i) {
    HostStream::RunOn(stream_->ref(), [&order, i] { order.push_back(i); });
  }
  HostStream::RunOn(stream_->ref(),
                    [&worker] { worker = std::this_thread::get_id(); });
  ASSERT_TRUE(stream_->Stop(kForever));
  std::vector<int> expected(100);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
  EXPECT_NE(worker, std::this_thread::get_id());
}

TEST_F(HostStreamTest, RunsWorkOfTheCallersStreamInsideTheCall) {
  std::thread::id runner;
  HostStream::RunOn(StreamRef{}, [&] { runner = std::this_thread::get_id(); });
  EXPECT_EQ(runner, std::this_thread::get_id());
}

TEST_F(HostStreamTest, FinishesWhatIsQueuedWhenStopped) {
  Gate gate;
  int done = 0;
  HostStream::RunOn(stream_->ref(), [&] { gate.Pass(); });
  HostStream::RunOn(stream_->ref(), [&] { ++done; });
  EXPECT_FALSE(stream_->Stop(seconds(0))) << "the first work still runs";
  gate.Open();
  ASSERT_TRUE(stream_->Stop(kForever));
  EXPECT_EQ(done, 1);
}

TEST_F(HostStreamTest, RefusesWorkOnceStopped) {
  ASSERT_TRUE(stream_->Stop(kForever));
  EXPECT_THAT(Attempt([&] { HostStream::RunOn(stream_->ref(), [] {}); }),
              Failed(ErrorCode::kFailedPrecondition,
                     "async_emb: the context is closed"));
}

TEST_F(HostStreamTest, LetsGoOfWorkAsSoonAsItHasRun) {
  auto held = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = held;
  HostStream::RunOn(stream_->ref(), [held = std::move(held)] { ++*held; });
  device_.Record(*event_, stream_->ref());
  ASSERT_TRUE(event_->WaitFor(kForever));
  EXPECT_TRUE(watch.expired());
}

TEST_F(HostStreamTest, KeepsSubnormalsOnItsWorker) {
  volatile float smallest = std::numeric_limits<float>::min();
  float half = 0.0F;
  HostStream::RunOn(stream_->ref(), [&] { half = smallest / 2.0F; });
  ASSERT_TRUE(stream_->Stop(kForever));
  EXPECT_EQ(std::bit_cast<std::uint32_t>(half), 0x00400000U);
}

TEST_F(HostStreamTest, AnEventThatWasNeverRecordedIsComplete) {
  EXPECT_TRUE(event_->IsComplete());
  EXPECT_TRUE(event_->WaitFor(seconds(0)));
}

TEST_F(HostStreamTest, AnEventCompletesAfterTheWorkBeforeIt) {
  Gate gate;
  HostStream::RunOn(stream_->ref(), [&] { gate.Pass(); });
  device_.Record(*event_, stream_->ref());
  gate.AwaitArrival();
  EXPECT_FALSE(event_->IsComplete());
  EXPECT_FALSE(event_->WaitFor(seconds(0)));
  gate.Open();
  EXPECT_TRUE(event_->WaitFor(kForever));
  EXPECT_TRUE(event_->IsComplete());
}

TEST_F(HostStreamTest, AnEventCanBeRecordedAgain) {
  device_.Record(*event_, stream_->ref());
  ASSERT_TRUE(event_->WaitFor(kForever));
  Gate gate;
  HostStream::RunOn(stream_->ref(), [&] { gate.Pass(); });
  device_.Record(*event_, stream_->ref());
  EXPECT_FALSE(event_->IsComplete());
  gate.Open();
  EXPECT_TRUE(event_->WaitFor(kForever));
}

TEST_F(HostStreamTest, AnEventOfTheCallersStreamIsCompleteAtOnce) {
  device_.Record(*event_, StreamRef{});
  EXPECT_TRUE(event_->IsComplete());
}

TEST_F(HostStreamTest, AnEventWakesAWaitThatHasBegun) {
  Gate gate;
  HostStream::RunOn(stream_->ref(), [&] { gate.Pass(); });
  device_.Record(*event_, stream_->ref());
  auto waiting = AttemptAsync([&] { return event_->WaitFor(kForever); });
  gate.Open();
  EXPECT_THAT(waiting.get(), Gave(1));
}

TEST_F(HostStreamTest, AStreamWaitsForTheEventOfAnother) {
  const std::unique_ptr<Stream> other = device_.NewSideStream();
  Gate gate;
  int value = 0;
  HostStream::RunOn(other->ref(), [&] { gate.Pass(); });
  HostStream::RunOn(other->ref(), [&] { value = 5; });
  device_.Record(*event_, other->ref());
  int seen = 0;
  device_.Wait(stream_->ref(), *event_);
  HostStream::RunOn(stream_->ref(), [&] { seen = value; });
  gate.Open();
  ASSERT_TRUE(stream_->Stop(kForever));
  EXPECT_EQ(seen, 5);
}

TEST_F(HostStreamTest, TheCallersStreamBlocksTheCallerForAnEvent) {
  int value = 0;
  Gate gate;
  HostStream::RunOn(stream_->ref(), [&] { gate.Pass(); });
  HostStream::RunOn(stream_->ref(), [&] { value = 5; });
  device_.Record(*event_, stream_->ref());
  gate.Open();
  device_.Wait(StreamRef{}, *event_);
  EXPECT_EQ(value, 5);
}

TEST(HostDeviceTest, CountsTheTimeThatADoneCallWaits) {
  HostDevice device;
  const auto guard = device.NewGuard(Pipeline::kLookup);
  const auto event = device.NewEvent();
  const auto stream = device.NewSideStream();
  FakeClock clock;
  Gate gate;
  HostStream::RunOn(stream->ref(), [&] { gate.Pass(); });
  device.Record(*event, stream->ref());
  std::thread caller(
      [&] { device.WaitForStep(StreamRef{}, *guard, *event, clock); });
  clock.AwaitRead(1);
  EXPECT_EQ(guard->waited(), seconds(0));
  clock.Advance(seconds(2));
  gate.Open();
  caller.join();
  EXPECT_EQ(guard->waited(), seconds(2));
}

TEST(HostDeviceTest, AlignsTheArena) {
  HostDevice device;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{100000}}) {
    const auto arena = device.AllocateArena(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(arena.get()) % kArenaAlignment,
              0U);
    arena.get()[bytes - 1] = std::byte{1};
  }
}

TEST(HostDeviceTest, SaysHowMuchMemoryCouldNotBeHad) {
  HostDevice device;
  constexpr std::size_t kTooMuch = std::size_t{1} << 60;
  EXPECT_THAT(
      Attempt([&] { device.AllocateArena(kTooMuch); }),
      Failed(ErrorCode::kResourceExhausted,
             "async_emb: the arena of 1152921504606846976 bytes could not be "
             "allocated: free memory, or make tokens_per_batch, emb_width or "
             "num_unique smaller"));
}

TEST(HostDeviceTest, TellsHowFarTheStepsHaveCome) {
  HostDevice device;
  const auto guard = device.NewGuard(Pipeline::kUpdate);
  EXPECT_EQ(guard->pipeline(), Pipeline::kUpdate);
  EXPECT_EQ(guard->reached(), 0);
  device.EndStep(StreamRef{}, *guard, 1);
  EXPECT_EQ(guard->reached(), 1);
  EXPECT_EQ(guard->good(), 1);
}

TEST(HostDeviceTest, AStepThatFailedIsReachedButNotGood) {
  HostDevice device;
  const auto guard = device.NewGuard(Pipeline::kLookup);
  device.EndStep(StreamRef{}, *guard, 1);
  guard->Fail();
  device.EndStep(StreamRef{}, *guard, 2);
  EXPECT_EQ(guard->reached(), 2);
  EXPECT_EQ(guard->good(), 1);
}

TEST(HostDeviceTest, CopiesEveryItem) {
  HostDevice device;
  const std::vector<std::int32_t> from{1, 2, 3};
  std::vector<std::int32_t> to(3, 0);
  const std::vector<CopyItem> items{{to.data(), from.data(), 4},
                                    {to.data() + 1, from.data() + 1, 8}};
  device.Copy(StreamRef{}, items);
  EXPECT_EQ(to, from);
}

TEST(StepGuardTest, TheFirstReasonStands) {
  StepGuard guard;
  guard.Fail(StepFailure::kWrongRank);
  guard.Fail(StepFailure::kExchange);
  EXPECT_EQ(guard.failure(), StepFailure::kWrongRank);
}

TEST(StepGuardTest, WhatADeviceHasFoundSaysMoreThanThatTheHostGaveUp) {
  StepWords words;
  StepGuard guard(Pipeline::kLookup, &words);
  guard.Fail();
  words.found = static_cast<std::int32_t>(StepFailure::kPeerFailed);
  EXPECT_EQ(guard.failure(), StepFailure::kPeerFailed);
}

TEST(HostDeviceTest, FailsTheStepOfAProgramThatTakesItselfForAnotherRank) {
  HostDevice device;
  StepGuard guard;
  std::int32_t came = 3;
  device.CheckRank(StreamRef{}, guard, &came, 3);
  EXPECT_FALSE(guard.failed());
  came = 0;
  device.CheckRank(StreamRef{}, guard, &came, 3);
  EXPECT_TRUE(guard.failed());
}

// One operation of a failed step: writes nothing, or NaN into the caller's own.
class HostDeviceFailedStepTest : public testing::Test {
 protected:
  HostDeviceFailedStepTest() { guard_.Fail(); }

  HostDevice device_;
  StepGuard guard_;
};

TEST_F(HostDeviceFailedStepTest, ReadsNoRows) {
  const std::vector<std::int32_t> ids{0, 9};
  const std::vector<Bf16Bits> table{1, 2};
  std::vector<Bf16Bits> rows{7, 7};
  device_.GatherRows(StreamRef{}, guard_,
                     {.ids = ids.data(),
                      .num_ids = 2,
                      .table = table.data(),
                      .vocab_rows = 2,
                      .width = 1,
                      .count_end = 2,
                      .rows = rows.data()});
  EXPECT_THAT(rows, testing::Each(7));
  EXPECT_EQ(device_.counters().ids_out_of_range, 0);
}

TEST_F(HostDeviceFailedStepTest, GivesNanEmbeddings) {
  const SliceShape shape{
      .world_size = 2, .tokens_per_rank = 1, .shard_width = 2};
  const std::vector<Bf16Bits> slices(4, 1);
  std::vector<Bf16Bits> out(5, 1);
  device_.CombineSlices(StreamRef{}, guard_, shape, slices.data(), out.data());
  EXPECT_THAT(out, testing::ElementsAre(0x7FC0, 0x7FC0, 0x7FC0, 0x7FC0, 1));
}

TEST_F(HostDeviceFailedStepTest, GivesNanNormAndNoValidity) {
  const UpdateResult result{.norm = 3.0F, .valid = 1};
  float norm = 0.0F;
  std::int32_t valid = 1;
  device_.WriteResult(StreamRef{}, guard_, &result, &norm, &valid);
  EXPECT_TRUE(std::isnan(norm));
  EXPECT_EQ(valid, 0);
}

TEST_F(HostDeviceFailedStepTest, AppliesNothing) {
  const std::vector<float> accum{1.0F};
  const std::vector<float> stats{1.0F, 0.0F};
  const std::int32_t unique = 0;
  const UpdateScalars scalars{.learning_rate = 1.0F, .pending = 1, .step = 1};
  Bf16Bits table = 0x3F80;
  float row_state = 2.0F;
  UpdateResult result{.norm = -1.0F, .valid = -1};
  const ApplyArgs args{.accum = accum.data(),
                       .stats = stats.data(),
                       .unique_tokens = &unique,
                       .num_unique = 1,
                       .width = 1,
                       .emb_width = 1,
                       .vocab_rows = 1,
                       .params = {.eps = 1.0F},
                       .scalars = &scalars,
                       .table = &table,
                       .row_state = &row_state,
                       .last_step = nullptr,
                       .result = &result};
  device_.ApplyAdagrad(StreamRef{}, guard_, args);
  EXPECT_EQ(table, 0x3F80);
  EXPECT_EQ(row_state, 2.0F);
  EXPECT_EQ(result.valid, -1);
  const StepGuard good;
  device_.ApplyAdagrad(StreamRef{}, good, args);
  EXPECT_NE(table, 0x3F80);
  EXPECT_EQ(result.valid, 1);
}

}  // namespace
}  // namespace xrex::async_emb
