// A context of one rank on a GPU, with the arrays that XLA would hold, and a
// caller's stream that can be held up.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "phoenix/xrex/cuda/async_emb/src/bfloat16.hpp"
#include "phoenix/xrex/cuda/async_emb/src/cuda_backend.hpp"
#include "phoenix/xrex/cuda/async_emb/src/cuda_error_utils.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {

// What Python sets before NCCL is first used. Call it first of all.
inline bool SetNcclEnvironment() {
  return setenv("NCCL_RUNTIME_CONNECT", "0", 1) == 0 &&
         setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1) == 0;
}

// An array on the device.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : size_(values.size()) {
    void* block = nullptr;
    CheckCuda(cudaMalloc(&block, size_ * sizeof(T)), "memory of a test");
    data_ = static_cast<T*>(block);
    Set(values);
  }
  ~DeviceArray() { static_cast<void>(cudaFree(data_)); }

  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  void Set(const std::vector<T>& values) {
    CheckCuda(cudaMemcpy(data_, values.data(), size_ * sizeof(T),
                         cudaMemcpyHostToDevice),
              "to copy to the device");
  }
  std::vector<T> Get() const {
    std::vector<T> values(size_);
    CheckCuda(cudaMemcpy(values.data(), data_, size_ * sizeof(T),
                         cudaMemcpyDeviceToHost),
              "to copy from the device");
    return values;
  }

 private:
  std::size_t size_;
  T* data_ = nullptr;
};

// The caller's stream.
class CallerStream {
 public:
  CallerStream() {
    CheckCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
              "a stream of a test");
  }
  ~CallerStream() { static_cast<void>(cudaStreamDestroy(stream_)); }

  CallerStream(const CallerStream&) = delete;
  CallerStream& operator=(const CallerStream&) = delete;

  StreamRef ref() const { return {stream_}; }
  // What comes later on the stream waits until the gate is open.
  void HoldAt(Gate& gate) {
    CheckCuda(cudaLaunchHostFunc(
                  stream_, [](void* held) { static_cast<Gate*>(held)->Pass(); },
                  &gate),
              "to hold a stream");
  }
  void Synchronize() {
    CheckCuda(cudaStreamSynchronize(stream_), "to wait for a stream");
  }

 private:
  cudaStream_t stream_ = nullptr;
};

// Small integers, which bfloat16 holds exactly.
inline std::vector<Bf16Bits> RandomBf16(std::size_t size, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int> values(-99, 99);
  std::vector<Bf16Bits> bits(size);
  for (Bf16Bits& value : bits) {
    value = FloatToBf16(static_cast<float>(values(random)));
  }
  return bits;
}

inline std::vector<std::int32_t> RandomIndices(std::size_t size, int end,
                                               std::uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<std::int32_t> values(0, end - 1);
  std::vector<std::int32_t> indices(size);
  for (std::int32_t& index : indices) index = values(random);
  return indices;
}

// One rank, and the arrays of its program, on the device of its number. Slot u
// stands for row u.
class CudaRank {
 public:
  CudaRank(const PipelineSpec& spec, std::int64_t vocab_rows,
           Clock::Duration timeout, const Clock& clock, Backend& backend,
           std::int32_t rank = 0)
      : device_(MakeCurrent(rank)),
        spec_(spec),
        vocab_rows_(vocab_rows),
        ids(RandomIndices(Tokens(), static_cast<int>(vocab_rows),
                          1 + 10 * rank)),
        table(RandomBf16(TableSize(), 2 + 10 * rank)),
        row_state(std::vector<float>(static_cast<std::size_t>(vocab_rows), 1)),
        grads(RandomBf16(Tokens() * Width(), 3 + 10 * rank)),
        segment_ids(RandomIndices(Tokens(), static_cast<int>(spec.num_unique),
                                  4 + 10 * rank)),
        unique_tokens(Counting(spec.num_unique)),
        learning_rate({0.5F}),
        pending({1}),
        program_rank({rank}),
        embeddings(std::vector<Bf16Bits>(Tokens() * Width(), 0)),
        norm({-1.0F}),
        valid({-1}),
        context_(std::make_unique<AsyncEmbContext>(
            ContextConfig{.context_id = 5,
                          .device_key = device_,
                          .name = "test",
                          .timeout = timeout,
                          .run_watchdog_thread = false},
            spec, backend, clock)) {}

  void BringUp() { context_->Handshake(context_->Reset(0, 1)); }

  AsyncEmbContext& context() { return *context_; }
  void Destroy() { context_.reset(); }
  CallerStream& caller() { return caller_; }

  std::int64_t StartLookup() {
    return context_->StartLookup(caller_.ref(),
                                 {.ids = ids.data(),
                                  .table = table.data(),
                                  .vocab_rows = vocab_rows_,
                                  .program_rank = program_rank.data()});
  }
  void FinishLookup() {
    context_->FinishLookup(caller_.ref(), embeddings.data());
  }
  std::int64_t StartUpdate() {
    return context_->StartUpdate(caller_.ref(),
                                 {.grads = grads.data(),
                                  .segment_ids = segment_ids.data(),
                                  .unique_tokens = unique_tokens.data(),
                                  .table = table.data(),
                                  .row_state = row_state.data(),
                                  .vocab_rows = vocab_rows_,
                                  .learning_rate = learning_rate.data(),
                                  .pending = pending.data(),
                                  .params = {.eps = 1.0F},
                                  .program_rank = program_rank.data()});
  }
  void FinishUpdate() {
    context_->FinishUpdate(caller_.ref(), norm.data(), valid.data());
  }

  // Of the latest lookup, which the device must have finished.
  bool LookupIsRight() const {
    const std::vector<std::int32_t> rows = ids.Get();
    const std::vector<Bf16Bits> values = table.Get();
    const std::vector<Bf16Bits> got = embeddings.Get();
    for (std::size_t t = 0; t < rows.size(); ++t) {
      const auto row = static_cast<std::size_t>(rows[t]);
      for (std::size_t c = 0; c < Width(); ++c) {
        if (got[t * Width() + c] != values[row * Width() + c]) return false;
      }
    }
    return true;
  }
  bool LookupIsNan() const {
    for (const Bf16Bits value : embeddings.Get()) {
      if (value != kBf16QuietNan) return false;
    }
    return true;
  }
  // Of the latest update.
  bool UpdateFailed() const {
    return norm.Get()[0] != norm.Get()[0] && valid.Get()[0] == 0;
  }

 private:
  std::size_t Tokens() const {
    return static_cast<std::size_t>(spec_.tokens_per_rank);
  }
  std::size_t Width() const {
    return static_cast<std::size_t>(spec_.emb_width);
  }
  std::size_t TableSize() const {
    return static_cast<std::size_t>(vocab_rows_ * spec_.shard_width);
  }
  static int MakeCurrent(int device) {
    CheckCuda(cudaSetDevice(device), "to make a device current");
    return device;
  }
  static std::vector<std::int32_t> Counting(std::int64_t size) {
    std::vector<std::int32_t> values(static_cast<std::size_t>(size));
    for (std::int64_t i = 0; i < size; ++i) {
      values[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i);
    }
    return values;
  }

  const int device_;
  const PipelineSpec spec_;
  const std::int64_t vocab_rows_;
  CallerStream caller_;

 public:
  // Outlive the context.
  DeviceArray<std::int32_t> ids;
  DeviceArray<Bf16Bits> table;
  DeviceArray<float> row_state;
  DeviceArray<Bf16Bits> grads;
  DeviceArray<std::int32_t> segment_ids;
  DeviceArray<std::int32_t> unique_tokens;
  DeviceArray<float> learning_rate;
  DeviceArray<std::int32_t> pending;
  DeviceArray<std::int32_t> program_rank;
  DeviceArray<Bf16Bits> embeddings;
  DeviceArray<float> norm;
  DeviceArray<std::int32_t> valid;

 private:
  std::unique_ptr<AsyncEmbContext> context_;
};

inline PipelineSpec CudaSpec(std::int64_t tokens, std::int64_t width,
                             std::int64_t num_unique) {
  return {.world_size = 1,
          .tokens_per_rank = tokens,
          .shard_width = width,
          .emb_width = width,
          .num_unique = num_unique,
          .deterministic = true};
}

// Bytes of device memory that nobody has.
inline std::size_t FreeDeviceMemory() {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  CheckCuda(cudaDeviceSynchronize(), "to wait for a device");
  CheckCuda(cudaMemGetInfo(&free_bytes, &total_bytes), "to count its memory");
  return free_bytes;
}

}  // namespace xrex::async_emb
