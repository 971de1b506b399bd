// L2: what the files of the host kernels share: ids, prefetch, the runs-of-64
// rule, and short vectors with their bfloat16 conversions.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "phoenix/xrex/cuda/async_emb/src/bfloat16.hpp"
#include "phoenix/xrex/cuda/async_emb/src/types.hpp"

// A kernel's body is a template over the lanes of its vectors, all of whose
// parts are ASYNC_EMB_INLINE. On x86-64 it is made once for the baseline and
// once for AVX2 in a function marked ASYNC_EMB_AVX2, chosen at run time by
// HasAvx2(). FMA is never switched on: results are specified bit for bit.
#define ASYNC_EMB_INLINE inline __attribute__((always_inline))
#if defined(__x86_64__)
#define ASYNC_EMB_AVX2 __attribute__((target("avx2")))
#else
#define ASYNC_EMB_AVX2
#endif

namespace xrex::async_emb::host_kernels {

inline bool HasAvx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") != 0;
#else
  return false;
#endif
}

// Bytes of scratch of the kernels that want some.
std::size_t CheckScratchBytes(std::int64_t num_unique);
std::size_t SumScratchBytes(std::int64_t num_tokens, std::int64_t num_unique,
                            std::int64_t width);

// The row that an id means after a negative one was wrapped once; may still lie
// outside the table.
constexpr std::int64_t WrapId(std::int32_t id, std::int64_t vocab_rows) {
  return id < 0 ? id + vocab_rows : std::int64_t{id};
}

constexpr bool IsRow(std::int64_t row, std::int64_t vocab_rows) {
  return static_cast<std::uint64_t>(row) <
         static_cast<std::uint64_t>(vocab_rows);
}

// Asks for the cache lines of [address, address + bytes), at most the first
// few: the hardware follows from there.
ASYNC_EMB_INLINE void Prefetch(const void* address, std::int64_t bytes) {
  constexpr std::int64_t kLineBytes = 64;
  constexpr std::int64_t kMaxBytes = 4 * kLineBytes;
  const auto* from = static_cast<const std::byte*>(address);
  const std::int64_t end = bytes < kMaxBytes ? bytes : kMaxBytes;
  for (std::int64_t i = 0; i < end; i += kLineBytes) {
    __builtin_prefetch(from + i);
  }
  // A row that is not aligned reaches into one more line.
  __builtin_prefetch(from + end - 1);
}

template <std::int64_t kValue>
using Constant = std::integral_constant<std::int64_t, kValue>;

// Calls `body` with the width, as a constant where it is a common short one, so
// that its loops over columns are unrolled. `body` must be always_inline.
template <typename Body>
ASYNC_EMB_INLINE void WithWidth(std::int64_t width, const Body& body) {
  switch (width) {
    case 8:
      return body(Constant<8>());
    case 16:
      return body(Constant<16>());
    case 32:
      return body(Constant<32>());
    case 64:
      return body(Constant<64>());
    default:
      return body(width);
  }
}

// A run of the fixed order of sums.
inline constexpr std::int64_t kRunLength = 64;

// Adds up the sums of runs by the rule that made them, until one is left.
// Holds the unfinished sum of each level; a sum is a row of `width` values.
class RunLevels {
 public:
  // Enough for the runs of fewer than 2^31 values.
  static constexpr int kMaxLevels = 5;

  // `rows` [kMaxLevels, width] is used while the object lives.
  RunLevels(float* rows, std::int64_t width) : rows_(rows), width_(width) {}

  // Takes the sum of the next run.
  void Push(const float* sum) {
    for (int level = 0; level < kMaxLevels; ++level) {
      float* total = Merge(level, sum);
      if (++counts_[level] < kRunLength) return;
      counts_[level] = 0;
      sum = total;
    }
  }

  // The sum of everything pushed, at least one run. Ends the use of the object.
  const float* Finish() {
    const float* sum = nullptr;
    for (int level = 0; level < kMaxLevels; ++level) {
      if (sum != nullptr) {
        sum = Merge(level, sum);
      } else if (counts_[level] > 0) {
        sum = Row(level);
      }
    }
    return sum;
  }

 private:
  float* Row(int level) { return rows_ + level * width_; }

  // The first sum of a run starts it; it is not added to zero.
  float* Merge(int level, const float* sum) {
    float* total = Row(level);
    if (counts_[level] == 0) {
      std::memcpy(total, sum, static_cast<std::size_t>(width_) * sizeof(float));
    } else {
      for (std::int64_t c = 0; c < width_; ++c) total[c] += sum[c];
    }
    return total;
  }

  float* rows_;
  std::int64_t width_;
  std::array<std::int64_t, kMaxLevels> counts_{};
};

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define ASYNC_EMB_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#if !defined(ASYNC_EMB_SHUFFLE)  // GCC before 12
#define ASYNC_EMB_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, U32{__VA_ARGS__})
#endif

// kLanes values side by side. Written out, since GCC ignores a vector size that
// depends on a template's parameter. Vectors are passed by reference, as there
// is no convention to pass long ones by value without AVX.
template <int kLanes>
struct Lanes;

template <>
struct Lanes<4> {
  using F32 = float __attribute__((vector_size(16)));
  using U32 = std::uint32_t __attribute__((vector_size(16)));

  // Of the 2 * kLanes values a, b: those at even and those at odd places. The
  // results may overwrite a and b.
  static ASYNC_EMB_INLINE void Split(const F32& a, const F32& b, F32& even,
                                     F32& odd) {
    const F32 left = a;
    const F32 right = b;
    even = ASYNC_EMB_SHUFFLE(left, right, 0, 2, 4, 6);
    odd = ASYNC_EMB_SHUFFLE(left, right, 1, 3, 5, 7);
  }

  // The reverse of Split.
  static ASYNC_EMB_INLINE void Join(const F32& even, const F32& odd, F32& a,
                                    F32& b) {
    a = ASYNC_EMB_SHUFFLE(even, odd, 0, 4, 1, 5);
    b = ASYNC_EMB_SHUFFLE(even, odd, 2, 6, 3, 7);
  }
};

template <>
struct Lanes<8> {
  using F32 = float __attribute__((vector_size(32)));
  using U32 = std::uint32_t __attribute__((vector_size(32)));

  static ASYNC_EMB_INLINE void Split(const F32& a, const F32& b, F32& even,
                                     F32& odd) {
    const F32 left = a;
    const F32 right = b;
    even = ASYNC_EMB_SHUFFLE(left, right, 0, 2, 4, 6, 8, 10, 12, 14);
    odd = ASYNC_EMB_SHUFFLE(left, right, 1, 3, 5, 7, 9, 11, 13, 15);
  }

  static ASYNC_EMB_INLINE void Join(const F32& even, const F32& odd, F32& a,
                                    F32& b) {
    a = ASYNC_EMB_SHUFFLE(even, odd, 0, 8, 1, 9, 2, 10, 3, 11);
    b = ASYNC_EMB_SHUFFLE(even, odd, 4, 12, 5, 13, 6, 14, 7, 15);
  }
};

template <typename Vector, typename Element>
ASYNC_EMB_INLINE void LoadLanes(const Element* from, Vector& to) {
  std::memcpy(&to, from, sizeof(Vector));
}

template <typename Vector, typename Element>
ASYNC_EMB_INLINE void StoreLanes(const Vector& from, Element* to) {
  std::memcpy(to, &from, sizeof(Vector));
}

// Bf16ToFloat of 2 * kLanes values, those at even and those at odd places
// apart: that needs no shuffle.
template <int kLanes>
ASYNC_EMB_INLINE void LoadBf16Pairs(const Bf16Bits* from,
                                    typename Lanes<kLanes>::F32& even,
                                    typename Lanes<kLanes>::F32& odd) {
  static_assert(std::endian::native == std::endian::little);
  using U32 = typename Lanes<kLanes>::U32;
  U32 pairs;
  LoadLanes(from, pairs);
  const U32 even_bits = pairs << 16;
  const U32 odd_bits = pairs & 0xFFFF0000U;
  std::memcpy(&even, &even_bits, sizeof(even));
  std::memcpy(&odd, &odd_bits, sizeof(odd));
}

// Lane by lane FloatToBf16, in the upper half of each lane; the lower is 0.
template <int kLanes>
ASYNC_EMB_INLINE void RoundLanes(const typename Lanes<kLanes>::F32& from,
                                 typename Lanes<kLanes>::U32& to) {
  using U32 = typename Lanes<kLanes>::U32;
  U32 bits;
  std::memcpy(&bits, &from, sizeof(bits));
  const U32 rounded = bits + 0x7FFFU + ((bits >> 16) & 1U);
  const U32 nan = (bits & 0x80000000U) | (std::uint32_t{kBf16QuietNan} << 16);
  to = (bits & 0x7FFFFFFFU) > 0x7F800000U ? nan : rounded;
  to &= 0xFFFF0000U;
}

// FloatToBf16 of 2 * kLanes values, even and odd places apart.
template <int kLanes>
ASYNC_EMB_INLINE void StoreBf16Pairs(const typename Lanes<kLanes>::F32& even,
                                     const typename Lanes<kLanes>::F32& odd,
                                     Bf16Bits* to) {
  typename Lanes<kLanes>::U32 even_bits;
  typename Lanes<kLanes>::U32 odd_bits;
  RoundLanes<kLanes>(even, even_bits);
  RoundLanes<kLanes>(odd, odd_bits);
  StoreLanes(odd_bits | (even_bits >> 16), to);
}

// Lane by lane RoundToBf16, but a NaN stays the NaN that it is. The lower half
// of its bits must be 0, as it is in one that comes from bfloat16 values.
template <int kLanes>
ASYNC_EMB_INLINE void RoundToBf16Lanes(typename Lanes<kLanes>::F32& value) {
  typename Lanes<kLanes>::U32 bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits += 0x7FFFU + ((bits >> 16) & 1U);
  bits &= 0xFFFF0000U;
  std::memcpy(&value, &bits, sizeof(value));
}

}  // namespace xrex::async_emb::host_kernels
