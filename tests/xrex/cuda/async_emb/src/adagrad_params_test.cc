#include "phoenix/xrex/cuda/async_emb/src/adagrad_params.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

AdagradParams Eager() { return {.eps = 1e-8F}; }
AdagradParams Lazy() { return {.lazy = true, .eps = 1e-8F}; }

Outcome Validate(const AdagradParams& params) {
  return Attempt([&] { ValidateAdagradParams(params); });
}

auto Rejected(const std::string& text) {
  return Failed(ErrorCode::kInvalidArgument, text);
}

struct Case {
  float value;
  std::string shown;  // the value as the message shows it
};

TEST(AdagradParamsTest, AcceptsTheEdgesOfEveryRange) {
  AdagradParams params = Eager();
  params.decay_factor = 0.0F;
  params.weight_decay_factor = std::numeric_limits<float>::denorm_min();
  EXPECT_THAT(Validate(params), Succeeded());
  params.decay_factor = 1.0F;
  params.weight_decay_factor = 1.0F;
  EXPECT_THAT(Validate(params), Succeeded());
  params = Lazy();
  EXPECT_THAT(Validate(params), Succeeded());
  params.accum_decay_rate = std::numeric_limits<float>::max();
  params.weight_decay_rate = std::numeric_limits<float>::max();
  EXPECT_THAT(Validate(params), Succeeded());
}

TEST(AdagradParamsTest, RejectsEpsThatIsNotFiniteAndPositive) {
  for (const auto& [value, shown] :
       {Case{0.0F, "0"}, Case{-1.0F, "-1"}, Case{kInfinity, "inf"},
        Case{kNan, "nan"}}) {
    for (AdagradParams params : {Eager(), Lazy()}) {
      params.eps = value;
      EXPECT_THAT(Validate(params),
                  Rejected("async_emb: eps is " + shown +
                           ": it must be finite and > 0, and so must be 1 / "
                           "eps in float32"));
    }
  }
}

TEST(AdagradParamsTest, RejectsEpsWhoseReciprocalOverflows) {
  AdagradParams params = Eager();
  params.eps = 1e-39F;
  EXPECT_THAT(Validate(params),
              Rejected("async_emb: eps is 1e-39: it must be finite and > 0, "
                       "and so must be 1 / eps in float32"));
}

TEST(AdagradParamsTest, RejectsADecayFactorOutsideZeroToOne) {
  for (const auto& [value, shown] :
       {Case{-0.5F, "-0.5"}, Case{1.5F, "1.5"}, Case{kInfinity, "inf"},
        Case{kNan, "nan"}}) {
    AdagradParams params = Eager();
    params.decay_factor = value;
    EXPECT_THAT(Validate(params), Rejected("async_emb: decay_factor is " +
                                           shown + ": it must be in [0, 1]"));
  }
}

TEST(AdagradParamsTest, RejectsAWeightDecayFactorOutsideZeroToOne) {
  for (const auto& [value, shown] : {Case{0.0F, "0"}, Case{-0.5F, "-0.5"},
                                     Case{1.5F, "1.5"}, Case{kNan, "nan"}}) {
    AdagradParams params = Eager();
    params.weight_decay_factor = value;
    EXPECT_THAT(Validate(params),
                Rejected("async_emb: weight_decay_factor is " + shown +
                         ": it must be in (0, 1]"));
  }
}

TEST(AdagradParamsTest, RejectsLazyRatesThatAreNotFiniteOrNegative) {
  for (const auto& [value, shown] :
       {Case{-0.5F, "-0.5"}, Case{kInfinity, "inf"}, Case{kNan, "nan"}}) {
    AdagradParams params = Lazy();
    params.accum_decay_rate = value;
    EXPECT_THAT(Validate(params),
                Rejected("async_emb: accum_decay_rate is " + shown +
                         ": it must be finite and >= 0"));
    params = Lazy();
    params.weight_decay_rate = value;
    EXPECT_THAT(Validate(params),
                Rejected("async_emb: weight_decay_rate is " + shown +
                         ": it must be finite and >= 0"));
  }
}

TEST(AdagradParamsTest, IgnoresTheParametersOfTheOtherForm) {
  AdagradParams params = Eager();
  params.accum_decay_rate = -1.0F;
  params.weight_decay_rate = kNan;
  EXPECT_THAT(Validate(params), Succeeded());
  params = Lazy();
  params.decay_factor = 2.0F;
  params.weight_decay_factor = 0.0F;
  EXPECT_THAT(Validate(params), Succeeded());
}

TEST(AdagradParamsTest, NamesTheFirstValueThatIsOff) {
  AdagradParams params = Eager();
  params.eps = -2.0F;
  params.decay_factor = 7.0F;
  EXPECT_THAT(Validate(params),
              FailedWith(ErrorCode::kInvalidArgument,
                         testing::StartsWith("async_emb: eps is -2")));
}

}  // namespace
}  // namespace xrex::async_emb
