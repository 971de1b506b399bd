#include "phoenix/xrex/cuda/async_emb/src/bfloat16.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace xrex::async_emb {
namespace {

constexpr std::uint32_t kFiniteBf16End = 0x7F80;  // bits of infinity

float FloatOfBits(std::uint32_t bits) { return std::bit_cast<float>(bits); }

TEST(Bf16ToFloatTest, PutsTheBitsIntoTheUpperHalf) {
  for (std::uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const float value = Bf16ToFloat(static_cast<Bf16Bits>(bits));
    ASSERT_EQ(std::bit_cast<std::uint32_t>(value), bits << 16);
  }
}

TEST(FloatToBf16Test, EveryValueThatIsNotNanSurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const auto half = static_cast<Bf16Bits>(bits);
    if (std::isnan(Bf16ToFloat(half))) continue;
    ASSERT_EQ(FloatToBf16(Bf16ToFloat(half)), half);
  }
}

TEST(FloatToBf16Test, TiesGoToTheEvenNeighbour) {
  for (std::uint32_t bits = 0; bits < kFiniteBf16End; ++bits) {
    const std::uint32_t even = bits + (bits & 1U);
    const std::uint32_t tie = (bits << 16) | 0x8000U;
    ASSERT_EQ(FloatToBf16(FloatOfBits(tie)), even) << bits;
    ASSERT_EQ(FloatToBf16(-FloatOfBits(tie)), even | 0x8000U) << bits;
  }
}

TEST(FloatToBf16Test, ValuesBesideATieGoToTheNearerNeighbour) {
  for (std::uint32_t bits = 0; bits < kFiniteBf16End; ++bits) {
    const std::uint32_t tie = (bits << 16) | 0x8000U;
    ASSERT_EQ(FloatToBf16(FloatOfBits(tie - 1)), bits);
    ASSERT_EQ(FloatToBf16(FloatOfBits(tie + 1)), bits + 1);
  }
}

TEST(FloatToBf16Test, TheLargestFloatBecomesInfinity) {
  constexpr float kMax = std::numeric_limits<float>::max();
  EXPECT_EQ(FloatToBf16(kMax), 0x7F80);
  EXPECT_EQ(FloatToBf16(-kMax), 0xFF80);
}

TEST(FloatToBf16Test, SubnormalsAreKept) {
  EXPECT_EQ(FloatToBf16(FloatOfBits(0x00010000U)), 0x0001);
  EXPECT_EQ(FloatToBf16(FloatOfBits(0x80018000U)), 0x8002);
}

TEST(FloatToBf16Test, EveryNanBecomesTheQuietNanOfItsSign) {
  for (const std::uint32_t payload :
       {0x00000001U, 0x0000FFFFU, 0x00010000U, 0x00400000U, 0x007FFFFFU}) {
    EXPECT_EQ(FloatToBf16(FloatOfBits(0x7F800000U | payload)), kBf16QuietNan);
    EXPECT_EQ(FloatToBf16(FloatOfBits(0xFF800000U | payload)),
              kBf16QuietNan | 0x8000U);
  }
}

TEST(RoundToBf16Test, IsTheValueOfTheRoundedBits) {
  EXPECT_EQ(RoundToBf16(1.0F + 0x1p-8F), 1.0F);
  EXPECT_EQ(RoundToBf16(1.0F + 0x1.8p-8F), 1.0F + 0x1p-7F);
  EXPECT_TRUE(std::signbit(RoundToBf16(-0.0F)));
}

}  // namespace
}  // namespace xrex::async_emb
