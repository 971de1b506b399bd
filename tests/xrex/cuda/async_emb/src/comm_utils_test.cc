#include "phoenix/xrex/cuda/async_emb/src/comm_utils.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/xrex/cuda/async_emb/src/context_group.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
constexpr ErrorCode kAborted = ErrorCode::kAborted;
constexpr const char* kVariable = "XAI_ASYNC_EMB_TIMEOUT_SECONDS";

// --- time-out ---

class ResolveTimeoutTest : public testing::Test {
 protected:
  ~ResolveTimeoutTest() override { unsetenv(kVariable); }

  static Outcome Resolve(std::optional<std::int64_t> option_secs) {
    HostBackend backend;
    return Attempt(
        [&] { return ResolveTimeout(option_secs, backend).count(); });
  }
  static Outcome ResolveVariable(const char* value) {
    setenv(kVariable, value, 1);
    return Resolve(std::nullopt);
  }
};

TEST_F(ResolveTimeoutTest, IsTheBackendsOwnWhereNothingIsSaid) {
  unsetenv(kVariable);
  EXPECT_THAT(Resolve(std::nullopt), Gave(30));
}

TEST_F(ResolveTimeoutTest, TakesTheVariable) {
  EXPECT_THAT(ResolveVariable("1"), Gave(1));
  EXPECT_THAT(ResolveVariable("1800"), Gave(1800));
  EXPECT_THAT(ResolveVariable("31622400"), Gave(31622400));
}

TEST_F(ResolveTimeoutTest, PrefersTheOptionToTheVariable) {
  setenv(kVariable, "nonsense", 1);
  EXPECT_THAT(Resolve(5), Gave(5));
}

TEST_F(ResolveTimeoutTest, RefusesAVariableThatIsNoPositiveInteger) {
  for (const std::string value :
       {"", "0", "-1", "1.5", "30s", " 30", "30 ", "+30", "1e3", "0x10", "abc",
        "31622401", "99999999999999999999"}) {
    EXPECT_THAT(ResolveVariable(value.c_str()),
                Failed(kInvalid,
                       "async_emb: XAI_ASYNC_EMB_TIMEOUT_SECONDS is '" + value +
                           "': it must be a whole number of seconds from 1 to "
                           "31622400"));
  }
}

TEST_F(ResolveTimeoutTest, RefusesAnOptionThatIsNotPositiveOrTooLarge) {
  for (const std::int64_t value :
       {std::int64_t{0}, std::int64_t{-3}, std::int64_t{31622401}, INT64_MAX}) {
    EXPECT_THAT(Resolve(value),
                Failed(kInvalid,
                       "async_emb: timeout_secs is '" + std::to_string(value) +
                           "': it must be a whole number of seconds from 1 "
                           "to 31622400"));
  }
}

TEST_F(ResolveTimeoutTest, ChecksATimeOutThatACallerGave) {
  EXPECT_EQ(CheckTimeout(31622400), seconds(31622400));
  EXPECT_THAT(Attempt([] { CheckTimeout(0); }),
              Failed(kInvalid,
                     "async_emb: timeout_secs is '0': it must be a whole "
                     "number of seconds from 1 to 31622400"));
}

// --- registry ---

class RegistryTest : public testing::Test {
 protected:
  // Brought up and registered. Replica groups of one context share its id.
  ContextGroup MakeGroup(std::int32_t world_size, std::int64_t context_id,
                         std::int64_t first_device_key = 0) {
    ContextGroup group(
        backend_, clock_, SmallSpec(world_size),
        {.context_id = context_id, .first_device_key = first_device_key});
    group.BringUp();
    for (std::int32_t rank = 0; rank < world_size; ++rank)
      registry_.Add(group.context(rank));
    return group;
  }

  std::vector<std::int32_t> Ranks(std::int64_t context_id) {
    std::vector<std::int32_t> ranks;
    for (const auto& context : registry_.All(context_id))
      ranks.push_back(context->rank());
    return ranks;
  }

  FakeClock clock_;
  HookedBackend backend_;
  Registry registry_;
};

TEST_F(RegistryTest, KnowsItsBackendsByPlatform) {
  auto backend = std::make_unique<HostBackend>();
  Backend* const added = backend.get();
  registry_.AddBackend(std::move(backend));
  EXPECT_EQ(&registry_.backend("cpu"), added);
}

TEST_F(RegistryTest, KeepsTheFirstBackendOfAPlatform) {
  auto backend = std::make_unique<HostBackend>();
  Backend* const added = backend.get();
  registry_.AddBackend(std::move(backend));
  registry_.AddBackend(std::make_unique<HostBackend>());
  EXPECT_EQ(&registry_.backend("cpu"), added);
}

TEST_F(RegistryTest, RefusesAPlatformThatIsNotInTheBuild) {
  registry_.AddBackend(std::make_unique<HostBackend>());
  EXPECT_THAT(Attempt([&] { registry_.backend("CUDA"); }),
              Failed(kInvalid,
                     "async_emb: platform 'CUDA' is not in this build: it has "
                     "cpu; for GPUs build with --config=cuda"));
}

TEST_F(RegistryTest, FindsAContextByPlatformIdAndDeviceKey) {
  ContextGroup group = MakeGroup(2, 7, /*first_device_key=*/5);
  EXPECT_EQ(registry_.Find("cpu", 7, 5), group.context(0));
  EXPECT_EQ(registry_.Find("cpu", 7, 6), group.context(1));
  EXPECT_EQ(registry_.Find("cpu", 7, 0), nullptr) << "a rank is no key";
  EXPECT_EQ(registry_.Find("cpu", 8, 5), nullptr);
  EXPECT_EQ(registry_.Find("CUDA", 7, 5), nullptr);
}

TEST_F(RegistryTest, RefusesASecondContextOnADevice) {
  ContextGroup group = MakeGroup(1, 7);
  ContextGroup other(backend_, clock_, SmallSpec(1), {.context_id = 7});
  EXPECT_THAT(Attempt([&] { registry_.Add(other.context(0)); }),
              Failed(ErrorCode::kFailedPrecondition,
                     "async_emb: context 7 exists on device 0 already: destroy "
                     "it first"));
  EXPECT_EQ(registry_.Find("cpu", 7, 0), group.context(0));
}

TEST_F(RegistryTest, ListsTheContextsOfAnIdByRank) {
  ContextGroup group(backend_, clock_, SmallSpec(4));
  for (const std::int32_t rank : {2, 0, 3, 1})
    registry_.Add(group.context(rank));
  for (std::int32_t rank = 0; rank < 4; ++rank) group[rank].Reset(3 - rank, 4);
  EXPECT_THAT(Ranks(7), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(Ranks(8), IsEmpty());
}

TEST_F(RegistryTest, RemovesTheContextsOfOneId) {
  ContextGroup first = MakeGroup(2, 7);
  ContextGroup second = MakeGroup(1, 8);
  EXPECT_EQ(registry_.Remove(7).size(), 2U);
  EXPECT_THAT(Ranks(7), IsEmpty());
  EXPECT_EQ(registry_.Find("cpu", 7, 0), nullptr);
  EXPECT_THAT(Ranks(8), ElementsAre(0));
  EXPECT_THAT(registry_.Remove(7), IsEmpty());
}

TEST_F(RegistryTest, HandsTheLastReferencesOutWhenRemoving) {
  ContextGroup group = MakeGroup(1, 7);
  const std::weak_ptr<AsyncEmbContext> watch = group.context(0);
  group.Destroy(0);
  EXPECT_FALSE(watch.expired());
  registry_.Remove(7);
  EXPECT_TRUE(watch.expired());
}

TEST_F(RegistryTest, TheSameKeyCanBeTakenAgainAfterRemoval) {
  ContextGroup first = MakeGroup(1, 7);
  registry_.Remove(7);
  ContextGroup second = MakeGroup(1, 7);
  EXPECT_EQ(registry_.Find("cpu", 7, 0), second.context(0));
}

TEST_F(RegistryTest, DestroysTheContextsOfOneId) {
  ContextGroup first = MakeGroup(2, 7);
  ContextGroup second = MakeGroup(1, 8, /*first_device_key=*/2);
  first.StartLookup(1);  // its peer never comes
  EXPECT_EQ(registry_.Destroy(7), 2);
  EXPECT_THAT(Ranks(7), IsEmpty());
  EXPECT_EQ(registry_.Destroy(7), 0);
  first.FinishLookup(1);
  EXPECT_TRUE(first.LookupIsNan(1));
  EXPECT_EQ(second[0].error(), std::nullopt);
}

// --- waits over all devices ---

TEST_F(RegistryTest, WaitsReturnZeroForAnUnknownId) {
  EXPECT_EQ(registry_.WaitStepReady(9), 0);
  EXPECT_EQ(registry_.Drain(9), 0);
}

TEST_F(RegistryTest, WaitsReturnZeroWhenNothingWasEverArmed) {
  ContextGroup group = MakeGroup(2, 7);
  EXPECT_EQ(registry_.WaitStepReady(7), 0);
  EXPECT_EQ(registry_.Drain(7), 0);
}

TEST_F(RegistryTest, WaitsReturnTheLeastStepOfAllDevices) {
  ContextGroup first = MakeGroup(2, 7);
  ContextGroup second = MakeGroup(2, 7, /*first_device_key=*/2);
  for (int i = 0; i < 3; ++i) {
    first.StartLookups();
    first.FinishLookups();
  }
  second.StartUpdates();
  second.FinishUpdates();
  EXPECT_EQ(registry_.WaitStepReady(7), 0);
  EXPECT_EQ(registry_.Drain(7), 1);
  second.StartLookups();
  EXPECT_EQ(registry_.WaitStepReady(7), 1);
  second.FinishLookups();
}

// The device that fails is waited for first; the other one is waited for all
// the same.
TEST_F(RegistryTest, AWaitCoversEveryDeviceBeforeItRaises) {
  ContextGroup failing = MakeGroup(1, 7);
  Gate& first = backend_.HoldAt({.rank = 0, .exchange = 0});
  failing.StartLookups();
  first.AwaitArrival();
  ContextGroup held = MakeGroup(1, 7, /*first_device_key=*/1);
  Gate& second = backend_.HoldAt({.rank = 0, .exchange = 0});
  held.StartLookups();
  second.AwaitArrival();
  auto ready = AttemptAsync([&] { return registry_.WaitStepReady(7); });
  clock_.AwaitReads(1);
  failing[0].Abort("enough");
  first.Open();
  failing.FinishLookups();
  clock_.AwaitReads(1);  // the second device is being waited for
  EXPECT_EQ(ready.wait_for(seconds(0)), std::future_status::timeout);
  second.Open();
  EXPECT_THAT(ready.get(), Aborted("enough"));
  held.FinishLookups();
  EXPECT_TRUE(held.LookupIsRight(0));
}

TEST_F(RegistryTest, AWaitRaisesAnOldErrorBeforeItWaits) {
  ContextGroup held = MakeGroup(1, 7);
  ContextGroup failed = MakeGroup(1, 7, /*first_device_key=*/1);
  Gate& gate = backend_.HoldAt({.rank = 0, .exchange = 0});
  held.StartLookups();
  failed[0].Abort("enough");
  EXPECT_THAT(Attempt([&] { return registry_.WaitStepReady(7); }),
              Aborted("enough"));
  gate.Open();
  held.FinishLookups();
}

TEST_F(RegistryTest, AWaitRaisesTheErrorOfTheFirstRank) {
  ContextGroup first = MakeGroup(1, 7);
  ContextGroup second = MakeGroup(1, 7, /*first_device_key=*/1);
  second[0].Abort("second");
  EXPECT_THAT(Attempt([&] { return registry_.Drain(7); }),
              FailedWith(kAborted, HasSubstr("second")));
  first[0].Abort("first");
  EXPECT_THAT(Attempt([&] { return registry_.Drain(7); }),
              FailedWith(kAborted, HasSubstr("first")));
}

TEST_F(RegistryTest, AbortEndsAllGroupsOfAnIdAndWaitsUntilTheyAreQuiet) {
  ContextGroup first = MakeGroup(2, 7);
  ContextGroup second = MakeGroup(2, 7, /*first_device_key=*/2);
  ContextGroup other = MakeGroup(1, 8, /*first_device_key=*/4);
  first.StartLookup(0);
  second.StartUpdate(1);
  registry_.Abort(7, "enough");
  const std::string reason = "enough";
  for (ContextGroup* group : {&first, &second}) {
    for (const std::int32_t rank : {0, 1}) {
      EXPECT_THAT((*group)[rank].error(), testing::Optional(reason));
      EXPECT_TRUE((*group)[rank].AwaitQuiet(Forever()));
    }
  }
  EXPECT_EQ(other[0].error(), std::nullopt);
}

TEST_F(RegistryTest, AbortOfAnUnknownIdDoesNothing) {
  ContextGroup group = MakeGroup(1, 7);
  registry_.Abort(8, "enough");
  EXPECT_EQ(group[0].error(), std::nullopt);
}

}  // namespace
}  // namespace xrex::async_emb
