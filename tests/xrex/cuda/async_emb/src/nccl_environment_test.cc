#include "phoenix/xrex/cuda/async_emb/src/nccl_environment.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

using testing::AllOf;
using testing::HasSubstr;

using Variables = std::map<std::string, std::string>;

Outcome Require(const Variables& variables) {
  return Attempt([&] {
    RequireNcclEnvironment([&](const char* name) {
      const auto found = variables.find(name);
      return found == variables.end() ? nullptr : found->second.c_str();
    });
  });
}

const Variables kGood = {{"NCCL_RUNTIME_CONNECT", "0"},
                         {"NCCL_LAUNCH_ORDER_IMPLICIT", "1"}};

Variables GoodBut(const std::string& name, const std::string& value) {
  Variables variables = kGood;
  variables[name] = value;
  return variables;
}

TEST(NcclEnvironmentTest, AcceptsWhatItAsksFor) {
  EXPECT_THAT(Require(kGood), Succeeded());
}

TEST(NcclEnvironmentTest, NamesAVariableThatIsNotSet) {
  Variables variables = kGood;
  variables.erase("NCCL_LAUNCH_ORDER_IMPLICIT");
  EXPECT_THAT(
      Require(variables),
      FailedWith(ErrorCode::kFailedPrecondition,
                 AllOf(HasSubstr("NCCL_LAUNCH_ORDER_IMPLICIT is not set"),
                       HasSubstr("set NCCL_LAUNCH_ORDER_IMPLICIT=1 before "
                                 "Python starts"))));
}

TEST(NcclEnvironmentTest, NamesAVariableThatHasAnotherValue) {
  EXPECT_THAT(
      Require(GoodBut("NCCL_RUNTIME_CONNECT", "1")),
      FailedWith(
          ErrorCode::kFailedPrecondition,
          AllOf(HasSubstr("NCCL_RUNTIME_CONNECT is '1': it must be '0'"),
                HasSubstr("set NCCL_RUNTIME_CONNECT=0 before Python starts"))));
}

TEST(NcclEnvironmentTest, AnEmptyValueIsAnotherValue) {
  EXPECT_THAT(Require(GoodBut("NCCL_RUNTIME_CONNECT", "")),
              FailedWith(ErrorCode::kFailedPrecondition,
                         HasSubstr("NCCL_RUNTIME_CONNECT is ''")));
}

TEST(NcclEnvironmentTest, RefusesASingleHardwareQueue) {
  EXPECT_THAT(Require(GoodBut("CUDA_DEVICE_MAX_CONNECTIONS", "1")),
              FailedWith(ErrorCode::kFailedPrecondition,
                         AllOf(HasSubstr("CUDA_DEVICE_MAX_CONNECTIONS is '1'"),
                               HasSubstr("unset it"))));
}

TEST(NcclEnvironmentTest, AcceptsSeveralHardwareQueues) {
  EXPECT_THAT(Require(GoodBut("CUDA_DEVICE_MAX_CONNECTIONS", "8")),
              Succeeded());
}

}  // namespace
}  // namespace xrex::async_emb
