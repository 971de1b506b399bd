// What the tests of the host kernels share: arrays between guards, values that
// provoke rounding, and the arithmetic of an update in its plainest form.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/types.hpp"

namespace xrex::async_emb {

// An array that is aligned to its element only, between guards that nobody may
// write to.
template <typename T>
class GuardedArray {
 public:
  explicit GuardedArray(std::int64_t size, T fill = T{})
      : size_(size), storage_(Count(size + 2 * kGuard), fill) {
    std::memset(storage_.data(), kGuardByte, kGuard * sizeof(T));
    std::memset(storage_.data() + kGuard + size_, kGuardByte,
                kGuard * sizeof(T));
  }
  explicit GuardedArray(const std::vector<T>& values)
      : GuardedArray(static_cast<std::int64_t>(values.size())) {
    for (std::int64_t i = 0; i < size_; ++i) (*this)[i] = values[Count(i)];
  }

  T* data() { return storage_.data() + kGuard; }
  const T* data() const { return storage_.data() + kGuard; }
  std::int64_t size() const { return size_; }
  T& operator[](std::int64_t i) { return data()[i]; }
  const T& operator[](std::int64_t i) const { return data()[i]; }

  std::vector<T> values() const {
    return std::vector<T>(data(), data() + size_);
  }

  bool GuardsIntact() const {
    return IsGuard(storage_.data()) && IsGuard(data() + size_);
  }

 private:
  static constexpr std::int64_t kGuard = 67;
  static constexpr unsigned char kGuardByte = 0xA5;

  static std::size_t Count(std::int64_t n) {
    return static_cast<std::size_t>(n);
  }

  static bool IsGuard(const T* from) {
    std::vector<unsigned char> bytes(kGuard * sizeof(T));
    std::memcpy(bytes.data(), from, bytes.size());
    for (const unsigned char byte : bytes) {
      if (byte != kGuardByte) return false;
    }
    return true;
  }

  std::int64_t size_;
  std::vector<T> storage_;
};

// The bits of floats, so that NaN and the sign of zero are compared as well.
inline std::vector<std::uint32_t> Bits(const std::vector<float>& values) {
  std::vector<std::uint32_t> bits;
  for (const float value : values) {
    bits.push_back(std::bit_cast<std::uint32_t>(value));
  }
  return bits;
}

// The value of a finite or infinite bfloat16 as a double; infinity counts as
// the power of two that follows the largest finite value.
inline double NaiveBf16Value(std::uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 7);
  const int fraction = static_cast<int>(bits & 0x7FU);
  if (exponent == 0) return std::ldexp(fraction, -133);
  return std::ldexp(0x80 + fraction, exponent - 134);
}

// The nearest bfloat16 by distance, ties to even.
inline Bf16Bits NaiveBf16(float value) {
  const std::uint32_t sign = std::signbit(value) ? 0x8000U : 0U;
  if (std::isnan(value)) return static_cast<Bf16Bits>(sign | 0x7FC0U);
  if (std::isinf(value)) return static_cast<Bf16Bits>(sign | 0x7F80U);
  const double magnitude = std::fabs(static_cast<double>(value));
  const std::uint32_t below =
      (std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFU) >> 16;
  const double to_below = magnitude - NaiveBf16Value(below);
  const double to_above = NaiveBf16Value(below + 1) - magnitude;
  const bool up = to_above < to_below || (to_above == to_below && below % 2);
  return static_cast<Bf16Bits>(sign | (up ? below + 1 : below));
}

inline float NaiveFloat(Bf16Bits bits) {
  float value = 0.0F;
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// Left to right, starting with the first.
inline float NaiveChain(const std::vector<float>& values) {
  float sum = values.front();
  for (std::size_t i = 1; i < values.size(); ++i) sum += values[i];
  return sum;
}

// Runs of 64, then runs of their sums, until one is left. Nothing sums to +0.
inline float NaiveRuns(std::vector<float> values) {
  if (values.empty()) return 0.0F;
  while (values.size() > 1) {
    std::vector<float> sums;
    for (std::size_t i = 0; i < values.size(); i += 64) {
      const std::size_t end = std::min(i + 64, values.size());
      sums.push_back(NaiveChain({values.begin() + static_cast<long>(i),
                                 values.begin() + static_cast<long>(end)}));
    }
    values = std::move(sums);
  }
  return values.front();
}

// Pairs of neighbours, level by level; an odd last one goes up unchanged.
inline float NaivePairs(std::vector<float> values) {
  while (values.size() > 1) {
    std::vector<float> sums;
    for (std::size_t i = 0; i < values.size(); i += 2) {
      const bool pair = i + 1 < values.size();
      sums.push_back(pair ? values[i] + values[i + 1] : values[i]);
    }
    values = std::move(sums);
  }
  return values.front();
}

// The row of a table, as a caller of JAX would index it; -1 for none.
inline std::int64_t NaiveRow(std::int64_t id, std::int64_t vocab_rows) {
  if (id >= 0 && id < vocab_rows) return id;
  if (id < 0 && id + vocab_rows >= 0) return id + vocab_rows;
  return -1;
}

// An array of zeros of which no page exists before it is written: an array of
// more than 2^31 elements that costs next to nothing.
class SparseArray {
 public:
  explicit SparseArray(std::int64_t size)
      : bytes_(static_cast<std::size_t>(size) * sizeof(Bf16Bits)),
        base_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~SparseArray() {
    if (mapped()) munmap(base_, bytes_);
  }
  SparseArray(const SparseArray&) = delete;
  SparseArray& operator=(const SparseArray&) = delete;

  // Whether the address space was to be had.
  bool mapped() const { return base_ != MAP_FAILED; }
  Bf16Bits* data() { return static_cast<Bf16Bits*>(base_); }

 private:
  std::size_t bytes_;
  void* base_;
};

// 2^32 elements and a little more.
inline constexpr std::int64_t kLargeRows = (std::int64_t{1} << 20) + 5;
inline constexpr std::int64_t kLargeWidth = 4096;

// Deterministic values, the same with every standard library.
class Values {
 public:
  explicit Values(std::uint32_t seed) : engine_(seed) {}

  // In [0, end).
  std::int64_t Below(std::int64_t end) {
    return static_cast<std::int64_t>(engine_() %
                                     static_cast<std::uint64_t>(end));
  }

  // Any bits at all: NaN with payloads, infinities, zeros of both signs.
  Bf16Bits AnyBf16() { return static_cast<Bf16Bits>(engine_()); }

  // Finite, of mixed sign, over 2^-12 to 2^4: sums of these depend on their
  // order.
  float Float() {
    const auto fraction = static_cast<float>(engine_() >> 40);
    const int exponent = static_cast<int>(engine_() % 16) - 12;
    const float magnitude =
        std::ldexp(1.0F + std::ldexp(fraction, -24), exponent);
    return engine_() % 2 == 0 ? magnitude : -magnitude;
  }

  Bf16Bits Bf16() { return NaiveBf16(Float()); }

 private:
  std::mt19937_64 engine_;
};

inline constexpr std::int32_t kMinInt32 =
    std::numeric_limits<std::int32_t>::min();
inline constexpr std::int32_t kMaxInt32 =
    std::numeric_limits<std::int32_t>::max();

// Below, at and above the sizes that kernels treat in one piece.
inline constexpr std::int64_t kTestWidths[] = {
    1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 33, 48, 64, 96, 100, 128, 257};

}  // namespace xrex::async_emb
