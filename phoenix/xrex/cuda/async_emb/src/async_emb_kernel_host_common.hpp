// L2: what the files of the host kernels share: ids, prefetch, the runs-of-64
// rule, and short vectors with their bfloat16 conversions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

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

// kLanes values side by side. Written out, since GCC ignores a vector size that
// depends on a template's parameter.
template <int kLanes>
struct Lanes;

template <>
struct Lanes<4> {
  using F32 = float __attribute__((vector_size(16)));
  using U32 = std::uint32_t __attribute__((vector_size(16)));
  using U16 = std::uint16_t __attribute__((vector_size(8)));
};

template <>
struct Lanes<8> {
  using F32 = float __attribute__((vector_size(32)));
  using U32 = std::uint32_t __attribute__((vector_size(32)));
  using U16 = std::uint16_t __attribute__((vector_size(16)));
};

template <typename Vector, typename Element>
ASYNC_EMB_INLINE void LoadLanes(const Element* from, Vector& to) {
  std::memcpy(&to, from, sizeof(Vector));
}

template <typename Vector, typename Element>
ASYNC_EMB_INLINE void StoreLanes(const Vector& from, Element* to) {
  std::memcpy(to, &from, sizeof(Vector));
}

// Lane by lane Bf16ToFloat.
template <int kLanes>
ASYNC_EMB_INLINE void LoadBf16(const Bf16Bits* from,
                               typename Lanes<kLanes>::F32& to) {
  using U32 = typename Lanes<kLanes>::U32;
  typename Lanes<kLanes>::U16 halves;
  LoadLanes(from, halves);
  const U32 bits = __builtin_convertvector(halves, U32) << 16;
  std::memcpy(&to, &bits, sizeof(to));
}

// Lane by lane FloatToBf16, in the upper half of each lane; the lower is 0.
template <int kLanes>
ASYNC_EMB_INLINE void RoundLanes(const typename Lanes<kLanes>::F32& from,
                                 typename Lanes<kLanes>::U32& to) {
  using U32 = typename Lanes<kLanes>::U32;
  U32 bits;
  std::memcpy(&bits, &from, sizeof(bits));
  const U32 rounded = bits + 0x7FFFU + ((bits >> 16) & 1U);
  const U32 nan = bits | (U32{} + (std::uint32_t{kBf16QuietNan} << 16));
  const U32 sign_and_nan = nan & 0xFFC00000U;
  to = (bits & 0x7FFFFFFFU) > 0x7F800000U ? sign_and_nan : rounded;
  to &= 0xFFFF0000U;
}

// Lane by lane RoundToBf16.
template <int kLanes>
ASYNC_EMB_INLINE void RoundToBf16Lanes(typename Lanes<kLanes>::F32& value) {
  typename Lanes<kLanes>::U32 bits;
  RoundLanes<kLanes>(value, bits);
  std::memcpy(&value, &bits, sizeof(value));
}

template <int kLanes>
ASYNC_EMB_INLINE void StoreBf16(const typename Lanes<kLanes>::F32& from,
                                Bf16Bits* to) {
  using U16 = typename Lanes<kLanes>::U16;
  typename Lanes<kLanes>::U32 bits;
  RoundLanes<kLanes>(from, bits);
  const U16 halves = __builtin_convertvector(bits >> 16, U16);
  StoreLanes(halves, to);
}

}  // namespace xrex::async_emb::host_kernels
