// What ends one communicator of a process ends those that it was made to meet.
#include "phoenix/xrex/cuda/async_emb/src/nccl_local_group.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

class NcclLocalGroupTest : public testing::Test {
 protected:
  // Members are told apart by their place in `ended_`.
  void Join(const int& member) {
    group_.Join(&member,
                {.fail = [this, &member] { failed_.push_back(member); },
                 .end =
                     [this, &member] {
                       failed_when_ended_.push_back(failed_.size());
                       ended_.push_back(member);
                     }});
  }

  const int first_ = 1;
  const int second_ = 2;
  std::vector<int> failed_;
  std::vector<int> ended_;
  std::vector<std::size_t> failed_when_ended_;
  NcclLocalGroup group_;
};

TEST_F(NcclLocalGroupTest, AnAbortEndsEveryMember) {
  Join(first_);
  Join(second_);
  group_.Abort("enough");
  EXPECT_THAT(ended_, testing::UnorderedElementsAre(1, 2));
  EXPECT_EQ(group_.abort_reason(), "enough");
}

TEST_F(NcclLocalGroupTest, AllHaveFailedBeforeTheFirstEnds) {
  Join(first_);
  Join(second_);
  group_.Abort("enough");
  EXPECT_THAT(failed_when_ended_, ElementsAre(2, 2));
}

TEST_F(NcclLocalGroupTest, NobodyEndsWithoutAnAbort) {
  Join(first_);
  EXPECT_THAT(ended_, IsEmpty());
  EXPECT_EQ(group_.abort_reason(), std::nullopt);
}

TEST_F(NcclLocalGroupTest, TheFirstReasonStandsAndMembersEndOnce) {
  Join(first_);
  group_.Abort("enough");
  group_.Abort("more than enough");
  EXPECT_THAT(ended_, ElementsAre(1));
  EXPECT_EQ(group_.abort_reason(), "enough");
}

TEST_F(NcclLocalGroupTest, WhoJoinsAnAbortedGroupEndsAtOnce) {
  group_.Abort("enough");
  Join(first_);
  EXPECT_THAT(ended_, ElementsAre(1));
}

TEST_F(NcclLocalGroupTest, WhoHasLeftIsLeftAlone) {
  Join(first_);
  Join(second_);
  group_.Leave(&first_);
  group_.Abort("enough");
  EXPECT_THAT(ended_, ElementsAre(2));
}

TEST_F(NcclLocalGroupTest, AMemberLeavesOnlyWhenItsEndHasReturned) {
  Gate gate;
  bool has_ended = false;
  group_.Join(&first_, {.fail = [] {},
                        .end =
                            [&] {
                              gate.Pass();
                              has_ended = true;
                            }});
  auto aborting = AttemptAsync([&] { group_.Abort("enough"); });
  gate.AwaitArrival();
  auto leaving = AttemptAsync([&] {
    group_.Leave(&first_);
    return has_ended;
  });
  gate.Open();
  EXPECT_THAT(leaving.get(), Gave(1));
  EXPECT_THAT(aborting.get(), Succeeded());
}

TEST(NcclLocalGroupsTest, OneKeyIsOneGroup) {
  NcclLocalGroups groups;
  const std::shared_ptr<NcclLocalGroup> group = groups.Find("key");
  EXPECT_EQ(groups.Find("key"), group);
  EXPECT_NE(groups.Find("another key"), group);
}

TEST(NcclLocalGroupsTest, AGroupThatNobodyHoldsIsForgotten) {
  NcclLocalGroups groups;
  groups.Find("key")->Abort("enough");
  EXPECT_EQ(groups.Find("key")->abort_reason(), std::nullopt);
}

}  // namespace
}  // namespace xrex::async_emb
