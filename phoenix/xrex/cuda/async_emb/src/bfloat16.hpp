// L0: bfloat16 as bits, and its two conversions. Branch-free, so that loops
// over them vectorise.
#pragma once

#include <bit>
#include <cstdint>

#include "phoenix/xrex/cuda/async_emb/src/types.hpp"

namespace xrex::async_emb {

inline constexpr Bf16Bits kBf16QuietNan = 0x7FC0;

constexpr float Bf16ToFloat(Bf16Bits bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// Rounds to nearest even; every NaN becomes the quiet NaN of its sign, as in
// ml_dtypes.
constexpr Bf16Bits FloatToBf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const std::uint32_t nan = ((bits >> 16) & 0x8000U) | kBf16QuietNan;
  const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
  return static_cast<Bf16Bits>(is_nan ? nan : rounded);
}

// The value after one trip through bfloat16.
constexpr float RoundToBf16(float value) {
  return Bf16ToFloat(FloatToBf16(value));
}

}  // namespace xrex::async_emb
