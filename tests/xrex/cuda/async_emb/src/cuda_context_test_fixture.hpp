// The fixture of the tests of one context on a GPU.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <future>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "phoenix/xrex/cuda/async_emb/src/cuda_backend.hpp"
#include "tests/xrex/cuda/async_emb/src/cuda_context_test_utils.hpp"
#include "tests/xrex/cuda/async_emb/src/testing_util.hpp"

namespace xrex::async_emb {

// Longer than any test runs: a wait of this length that ends was ended.
inline std::chrono::steady_clock::time_point Forever() {
  return std::chrono::steady_clock::now() + std::chrono::hours(1);
}

inline bool IsReady(const std::future<Outcome>& future) {
  return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

inline const bool kEnvironmentIsSet = SetNcclEnvironment();
inline constexpr std::int64_t kVocabRows = 100;
inline constexpr std::chrono::seconds kTimeout{10};

// One rank that is up, whose clock stands still.
class CudaContextTest : public testing::Test {
 protected:
  CudaContextTest()
      : rank_(CudaSpec(64, 24, 32), kVocabRows, kTimeout, clock_, backend_) {
    EXPECT_TRUE(kEnvironmentIsSet);
  }

  void SetUp() override { rank_.BringUp(); }

  AsyncEmbContext& context() { return rank_.context(); }

  FakeClock clock_;
  CudaBackend backend_;
  Gate gate_;  // outlives what passes it
  CudaRank rank_;
};

}  // namespace xrex::async_emb
