#include "phoenix/xrex/cuda/async_emb/src/pipeline_spec.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>

#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"

namespace xrex::async_emb {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMaxInt64 = std::numeric_limits<std::int64_t>::max();

PipelineSpec GoodSpec() {
  return {.world_size = 4,
          .tokens_per_rank = 8,
          .shard_width = 16,
          .emb_width = 64,
          .num_unique = 32};
}

// The text of the error, or nothing.
std::string Complaint(const PipelineSpec& spec) {
  try {
    ValidateSpec(spec);
  } catch (const AsyncEmbError& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

TEST(PipelineSpecTest, CountsTheTokensOfAllRanks) {
  EXPECT_EQ(GoodSpec().num_tokens(), 32);
}

TEST(ValidateSpecTest, AcceptsAGoodSpec) {
  EXPECT_EQ(Complaint(GoodSpec()), "");
}

TEST(ValidateSpecTest, AcceptsTheSmallestSpec) {
  EXPECT_EQ(Complaint({.world_size = 1,
                       .tokens_per_rank = 1,
                       .shard_width = 1,
                       .emb_width = 1,
                       .num_unique = 1,
                       .max_ctas = 1}),
            "");
}

TEST(ValidateSpecTest, AcceptsTheLargestCounts) {
  EXPECT_EQ(Complaint({.world_size = 1,
                       .tokens_per_rank = kMaxInt32,
                       .shard_width = kMaxInt32,
                       .emb_width = kMaxInt32,
                       .num_unique = kMaxInt32 - 1}),
            "");
}

TEST(ValidateSpecTest, AcceptsAnyWorldSize) {
  PipelineSpec spec = GoodSpec();
  spec.world_size = 3;
  spec.emb_width = 48;
  EXPECT_EQ(Complaint(spec), "");
}

struct BadSpec {
  std::string name;
  std::function<void(PipelineSpec&)> spoil;
  std::string value;    // what is wrong
  std::string rule;     // what is asked for
  std::string way_out;  // what to do
};

class ValidateSpecRejectsTest : public ::testing::TestWithParam<BadSpec> {};

TEST_P(ValidateSpecRejectsTest, AndNamesValueRuleAndWayOut) {
  PipelineSpec spec = GoodSpec();
  GetParam().spoil(spec);
  EXPECT_THAT(Complaint(spec),
              AllOf(HasSubstr(GetParam().value), HasSubstr(GetParam().rule),
                    HasSubstr(GetParam().way_out)));
}

INSTANTIATE_TEST_SUITE_P(
    Each, ValidateSpecRejectsTest,
    ::testing::Values(
        BadSpec{"WorldSizeOfZero", [](PipelineSpec& s) { s.world_size = 0; },
                "world_size is 0", "at least 1", "pass the number of ranks"},
        BadSpec{"NegativeWorldSize", [](PipelineSpec& s) { s.world_size = -2; },
                "world_size is -2", "at least 1", "pass the number of ranks"},
        BadSpec{"NoTokens", [](PipelineSpec& s) { s.tokens_per_rank = 0; },
                "tokens_per_rank is 0", "at least 1", "pass the tokens"},
        BadSpec{"NoColumns", [](PipelineSpec& s) { s.shard_width = 0; },
                "shard_width is 0", "at least 1", "pass the table columns"},
        BadSpec{"NoWidth", [](PipelineSpec& s) { s.emb_width = -1; },
                "emb_width is -1", "at least 1", "pass the columns"},
        BadSpec{"NoSlots", [](PipelineSpec& s) { s.num_unique = 0; },
                "num_unique is 0", "at least 1", "pass the capacity"},
        BadSpec{"WidthThatRanksDoNotDivide",
                [](PipelineSpec& s) { s.emb_width = 65; }, "emb_width is 65",
                "4 * 16 must equal it", "choose an emb_width"},
        BadSpec{"WidthOverflow",
                [](PipelineSpec& s) { s.shard_width = kMaxInt64 / 2; },
                "emb_width is 64", "must equal it", "choose an emb_width"},
        BadSpec{"WidthAbove31Bits",
                [](PipelineSpec& s) {
                  s.shard_width = std::int64_t{1} << 29;
                  s.emb_width = std::int64_t{1} << 31;
                },
                "emb_width is 2147483648", "below 2^31", "split the table"},
        BadSpec{
            "TokensAbove31Bits",
            [](PipelineSpec& s) { s.tokens_per_rank = std::int64_t{1} << 29; },
            "tokens_per_rank is 536870912", "fewer than 2^31",
            "split the batch"},
        BadSpec{"TokenOverflow",
                [](PipelineSpec& s) { s.tokens_per_rank = kMaxInt64; },
                "tokens_per_rank is 9223372036854775807", "fewer than 2^31",
                "split the batch"},
        BadSpec{"SlotsAbove31Bits",
                [](PipelineSpec& s) { s.num_unique = kMaxInt32; },
                "num_unique is 2147483647", "below 2^31 - 1",
                "no batch has more"},
        BadSpec{"MinCtasOfZero", [](PipelineSpec& s) { s.min_ctas = 0; },
                "min_ctas is 0", "at least 1", "pass the blocks"},
        BadSpec{"MaxCtasBelowMin",
                [](PipelineSpec& s) {
                  s.min_ctas = 3;
                  s.max_ctas = 2;
                },
                "max_ctas is 2", "at least min_ctas = 3", "raise max_ctas"}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace xrex::async_emb
