// L2: columns of a row as a lane of a CUDA kernel holds them: accesses as wide
// as the alignment allows, conversions, and their pairwise sum.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "phoenix/xrex/cuda/async_emb/src/bfloat16.hpp"
#include "phoenix/xrex/cuda/async_emb/src/types.hpp"

namespace xrex::async_emb::cuda_kernels {

// The most columns that one access may take where it must be aligned to its
// size: a divisor of the width, at most `most`.
class VectorChoice {
 public:
  explicit VectorChoice(std::int64_t width) {
    while (width % columns_ != 0) columns_ /= 2;
  }

  template <typename T>
  VectorChoice& With(const T* pointer) {
    constexpr std::size_t kMaxAccess = 16;
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    while (address % std::min(columns_ * sizeof(T), kMaxAccess) != 0) {
      columns_ /= 2;
    }
    return *this;
  }

  unsigned columns() const { return columns_; }

  // Calls `body` with the number of columns as a constant.
  template <typename Body>
  void Dispatch(const Body& body) const {
    switch (columns_) {
      case 8:
        return body(std::integral_constant<int, 8>());
      case 4:
        return body(std::integral_constant<int, 4>());
      case 2:
        return body(std::integral_constant<int, 2>());
      default:
        return body(std::integral_constant<int, 1>());
    }
  }

 private:
  unsigned columns_ = 8;
};

template <int kBytes>
struct AccessOf;
template <>
struct AccessOf<16> {
  using Type = uint4;
};
template <>
struct AccessOf<8> {
  using Type = uint2;
};
template <>
struct AccessOf<4> {
  using Type = std::uint32_t;
};
template <>
struct AccessOf<2> {
  using Type = std::uint16_t;
};

// kColumns float32 values.
template <int kColumns>
struct Columns {
  float at[kColumns];
};

// kColumns bfloat16 values, as they come from memory.
template <int kColumns>
struct Bf16Columns {
  using Access = typename AccessOf<2 * kColumns>::Type;
  Access bits;
};

template <int kColumns>
__device__ inline Bf16Columns<kColumns> LoadColumns(const Bf16Bits* from) {
  using Access = typename Bf16Columns<kColumns>::Access;
  return {*reinterpret_cast<const Access*>(from)};
}

// Stores are spelled out: an assignment may be taken apart into narrow ones.
template <int kColumns>
__device__ inline void StoreColumns(const Bf16Columns<kColumns>& columns,
                                    Bf16Bits* to) {
  using Access = typename Bf16Columns<kColumns>::Access;
  __stwb(reinterpret_cast<Access*>(to), columns.bits);
}

template <int kColumns>
__device__ inline Columns<kColumns> LoadColumns(const float* from) {
  constexpr int kPerAccess = kColumns < 4 ? kColumns : 4;
  using Access = typename AccessOf<4 * kPerAccess>::Type;
  Columns<kColumns> columns;
#pragma unroll
  for (int c = 0; c < kColumns; c += kPerAccess) {
    const Access access = *reinterpret_cast<const Access*>(from + c);
    std::memcpy(columns.at + c, &access, sizeof(access));
  }
  return columns;
}

template <int kColumns>
__device__ inline void StoreColumns(const Columns<kColumns>& columns,
                                    float* to) {
  constexpr int kPerAccess = kColumns < 4 ? kColumns : 4;
  using Access = typename AccessOf<4 * kPerAccess>::Type;
#pragma unroll
  for (int c = 0; c < kColumns; c += kPerAccess) {
    Access access;
    std::memcpy(&access, columns.at + c, sizeof(access));
    __stwb(reinterpret_cast<Access*>(to + c), access);
  }
}

template <int kColumns>
__device__ inline Columns<kColumns> Widen(
    const Bf16Columns<kColumns>& columns) {
  Columns<kColumns> wide;
  if constexpr (kColumns == 1) {
    wide.at[0] = Bf16ToFloat(columns.bits);
  } else {
    std::uint32_t pairs[kColumns / 2];
    std::memcpy(pairs, &columns.bits, sizeof(pairs));
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      wide.at[2 * i] = __uint_as_float(pairs[i] << 16);
      wide.at[2 * i + 1] = __uint_as_float(pairs[i] & 0xFFFF0000U);
    }
  }
  return wide;
}

template <int kColumns>
__device__ inline const Columns<kColumns>& Widen(
    const Columns<kColumns>& columns) {
  return columns;
}

// Two values rounded to bfloat16 by the conversion of the hardware, which is
// FloatToBf16 but for the payload and the sign of a NaN. The first is in the
// lower half.
__device__ inline std::uint32_t RoundPair(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  std::uint32_t bits;
  std::memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

// Each value after one trip through bfloat16. A NaN may become another.
template <int kColumns>
__device__ inline Columns<kColumns> RoundToBf16(
    const Columns<kColumns>& columns) {
  Columns<kColumns> rounded;
  if constexpr (kColumns == 1) {
    rounded.at[0] = async_emb::RoundToBf16(columns.at[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; i += 2) {
      const std::uint32_t pair = RoundPair(columns.at[i], columns.at[i + 1]);
      rounded.at[i] = __uint_as_float(pair << 16);
      rounded.at[i + 1] = __uint_as_float(pair & 0xFFFF0000U);
    }
  }
  return rounded;
}

// FloatToBf16 of each value.
template <int kColumns>
__device__ inline Bf16Columns<kColumns> Narrow(
    const Columns<kColumns>& columns) {
  Bf16Columns<kColumns> narrow;
  if constexpr (kColumns == 1) {
    narrow.bits = FloatToBf16(columns.at[0]);
  } else {
    std::uint32_t pairs[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const float first = columns.at[2 * i];
      const float second = columns.at[2 * i + 1];
      pairs[i] = RoundPair(first, second);
      if (isnan(first) || isnan(second)) {
        pairs[i] = FloatToBf16(first) |
                   (static_cast<std::uint32_t>(FloatToBf16(second)) << 16);
      }
    }
    std::memcpy(&narrow.bits, pairs, sizeof(pairs));
  }
  return narrow;
}

// The same bits in every column.
template <int kColumns>
__device__ inline Bf16Columns<kColumns> Repeat(Bf16Bits bits) {
  Bf16Columns<kColumns> columns;
  if constexpr (kColumns == 1) {
    columns.bits = bits;
  } else {
    std::uint32_t pairs[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) pairs[i] = bits * 0x10001U;
    std::memcpy(&columns.bits, pairs, sizeof(pairs));
  }
  return columns;
}

// The pairwise tree over columns, neighbours first.
template <int kColumns>
__device__ inline float PairwiseSum(Columns<kColumns> columns) {
#pragma unroll
  for (int size = kColumns / 2; size >= 1; size /= 2) {
#pragma unroll
    for (int i = 0; i < size; ++i) {
      columns.at[i] = columns.at[2 * i] + columns.at[2 * i + 1];
    }
  }
  return columns.at[0];
}

}  // namespace xrex::async_emb::cuda_kernels
