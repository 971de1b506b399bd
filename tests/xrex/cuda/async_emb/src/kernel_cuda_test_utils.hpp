// What the tests of the CUDA kernels share: device arrays between guards, the
// guard of a step, and comparisons with the host kernels.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/arena_layout.hpp"
#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel.hpp"
#include "phoenix/xrex/cuda/async_emb/src/bfloat16.hpp"
#include "phoenix/xrex/cuda/async_emb/src/cuda_error_utils.hpp"
#include "phoenix/xrex/cuda/async_emb/src/device.hpp"
#include "tests/xrex/cuda/async_emb/src/kernel_test_utils.hpp"

namespace xrex::async_emb::cuda_kernels {

// A side stream, which waits for no other.
class TestStream {
 public:
  TestStream() {
    CheckCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
              "cudaStreamCreateWithFlags");
  }
  ~TestStream() { EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;

  cudaStream_t get() const { return stream_; }
  void Sync() const {
    CheckCuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

 private:
  cudaStream_t stream_ = nullptr;
};

// Device memory between guards that nobody may write to. It begins `shift`
// elements behind an aligned address.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values, std::int64_t shift = 0)
      : size_(static_cast<std::int64_t>(values.size())),
        before_(kGuardBytes + static_cast<std::size_t>(shift) * sizeof(T)) {
    CheckCuda(cudaMalloc(reinterpret_cast<void**>(&base_), AllBytes()),
              "cudaMalloc");
    std::vector<std::byte> image(AllBytes(), kGuard);
    if (!values.empty()) {
      std::memcpy(image.data() + before_, values.data(), Bytes());
    }
    CheckCuda(
        cudaMemcpy(base_, image.data(), image.size(), cudaMemcpyHostToDevice),
        "cudaMemcpy");
    // The kernels' stream does not wait for that of the copy.
    CheckCuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  DeviceArray(std::int64_t size, T fill, std::int64_t shift = 0)
      : DeviceArray(std::vector<T>(static_cast<std::size_t>(size), fill),
                    shift) {}
  ~DeviceArray() { EXPECT_EQ(cudaFree(base_), cudaSuccess); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return reinterpret_cast<T*>(base_ + before_); }
  std::int64_t size() const { return size_; }

  // The contents, after everything that runs. Fails if a guard was written to.
  std::vector<T> Download() const {
    CheckCuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::vector<std::byte> image(AllBytes());
    CheckCuda(
        cudaMemcpy(image.data(), base_, image.size(), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
    for (std::size_t i = 0; i < image.size(); ++i) {
      if (i >= before_ && i < before_ + Bytes()) continue;
      EXPECT_EQ(image[i], kGuard) << "a guard was written to at byte " << i;
      if (image[i] != kGuard) break;
    }
    std::vector<T> values(static_cast<std::size_t>(size_));
    if (size_ > 0) {
      std::memcpy(values.data(), image.data() + before_, Bytes());
    }
    return values;
  }

 private:
  static constexpr std::byte kGuard{0xA5};
  static constexpr std::size_t kGuardBytes = 2 * kArenaAlignment;

  std::size_t Bytes() const {
    return static_cast<std::size_t>(size_) * sizeof(T);
  }
  std::size_t AllBytes() const { return before_ + Bytes() + kGuardBytes; }

  std::int64_t size_;
  std::size_t before_;
  std::byte* base_ = nullptr;
};

// One object in host memory that the device sees.
template <typename T>
class Mapped {
 public:
  Mapped() {
    CheckCuda(cudaHostAlloc(reinterpret_cast<void**>(&host_), sizeof(T),
                            cudaHostAllocMapped),
              "cudaHostAlloc");
    *host_ = T{};
    CheckCuda(
        cudaHostGetDevicePointer(reinterpret_cast<void**>(&device_), host_, 0),
        "cudaHostGetDevicePointer");
  }
  ~Mapped() { EXPECT_EQ(cudaFreeHost(host_), cudaSuccess); }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

  T* operator->() { return host_; }
  T* device() { return device_; }

 private:
  T* host_ = nullptr;
  T* device_ = nullptr;
};

// A step's guard; good and not yet decided on at first.
class TestGuard {
 public:
  explicit TestGuard(Pipeline pipeline, StepDecision decision = {})
      : pipeline_(pipeline), decision_({decision}) {}

  GuardView view() {
    return {.pipeline = pipeline_,
            .words = words_.device(),
            .decision = decision_.data()};
  }
  Mapped<StepWords>& words() { return words_; }
  StepDecision decision() const { return decision_.Download()[0]; }
  StepFailure failure() {
    return StepGuard(pipeline_, words_.operator->()).failure();
  }
  void Fail(StepFailure why) {
    words_->failure = static_cast<std::int32_t>(why);
  }

 private:
  Pipeline pipeline_;
  Mapped<StepWords> words_;
  DeviceArray<StepDecision> decision_;
};

// The scratch of a spec, no byte more.
inline DeviceArray<std::uint32_t> MakeScratch(const PipelineSpec& spec) {
  constexpr std::uint32_t kGarbage = 0xDEADBEEF;
  return DeviceArray<std::uint32_t>(
      static_cast<std::int64_t>(ScratchBytes(spec) / sizeof(kGarbage)),
      kGarbage);
}

template <typename T>
std::byte* BytesOf(const DeviceArray<T>& array) {
  return reinterpret_cast<std::byte*>(array.data());
}

// The bits of float32 values, all NaN alike: arithmetic on a device gives one
// NaN, that on a host hands payloads on.
inline std::vector<std::uint32_t> BitsButNan(const std::vector<float>& values) {
  constexpr std::uint32_t kNan = 0x7FC00000;
  std::vector<std::uint32_t> bits = Bits(values);
  for (std::size_t i = 0; i < bits.size(); ++i) {
    if (std::isnan(values[i])) bits[i] = kNan;
  }
  return bits;
}

// The same for bfloat16.
inline std::vector<Bf16Bits> BitsButNan(std::vector<Bf16Bits> values) {
  for (Bf16Bits& value : values) {
    if (std::isnan(Bf16ToFloat(value))) value = kBf16QuietNan;
  }
  return values;
}

// All short widths, and those around the sizes that kernels treat in one piece.
inline std::vector<std::int64_t> CudaTestWidths() {
  std::vector<std::int64_t> widths;
  for (std::int64_t width = 1; width <= 70; ++width) widths.push_back(width);
  for (const std::int64_t width : {96, 127, 128, 129, 255, 256, 257, 1024}) {
    widths.push_back(width);
  }
  return widths;
}

// Elements behind an aligned address: accesses of 16, 2, 4 and 8 bytes of
// bfloat16.
inline constexpr std::int64_t kTestShifts[] = {0, 1, 2, 4};

// Rows and columns of a table of more than 2^32 bytes and 2^31 elements.
inline constexpr std::int64_t kHugeRows = 34'000'000;
inline constexpr std::int64_t kHugeWidth = 64;

// A table of zeros that is too large for 32-bit offsets, if the device has room
// for it.
class HugeTable {
 public:
  HugeTable() {
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    CheckCuda(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    if (free_bytes < kBytes + kBytes / 4) return;
    CheckCuda(cudaMalloc(reinterpret_cast<void**>(&data_), kBytes),
              "cudaMalloc");
    CheckCuda(cudaMemset(data_, 0, kBytes), "cudaMemset");
    CheckCuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  ~HugeTable() { EXPECT_EQ(cudaFree(data_), cudaSuccess); }
  HugeTable(const HugeTable&) = delete;
  HugeTable& operator=(const HugeTable&) = delete;

  bool fits() const { return data_ != nullptr; }
  Bf16Bits* data() { return data_; }

  void SetRow(std::int64_t row, const std::vector<Bf16Bits>& values) {
    CheckCuda(cudaMemcpy(data_ + row * kHugeWidth, values.data(), kRowBytes,
                         cudaMemcpyHostToDevice),
              "cudaMemcpy");
    CheckCuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  std::vector<Bf16Bits> Row(std::int64_t row) const {
    std::vector<Bf16Bits> values(kHugeWidth);
    CheckCuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    CheckCuda(cudaMemcpy(values.data(), data_ + row * kHugeWidth, kRowBytes,
                         cudaMemcpyDeviceToHost),
              "cudaMemcpy");
    return values;
  }

 private:
  static constexpr std::size_t kRowBytes = kHugeWidth * sizeof(Bf16Bits);
  static constexpr std::size_t kBytes = kHugeRows * kRowBytes;
  Bf16Bits* data_ = nullptr;
};

}  // namespace xrex::async_emb::cuda_kernels
