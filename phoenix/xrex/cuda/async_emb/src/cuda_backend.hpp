// L2: the backend of NVIDIA GPUs.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/backend.hpp"
#include "phoenix/xrex/cuda/async_emb/src/cuda_mapped_pool.hpp"
#include "phoenix/xrex/cuda/async_emb/src/nccl_local_group.hpp"

namespace xrex::async_emb {

// Ranks live in any number of processes; each owns one device. Those of one
// process end together.
class CudaBackend final : public Backend {
 public:
  std::string_view platform() const override { return "CUDA"; }
  std::chrono::seconds default_timeout() const override {
    return std::chrono::seconds(1800);
  }
  std::string_view ResolveTransport(Transport wanted) const override;
  // `device_key` is the local_hardware_id of a jax.Device.
  std::unique_ptr<Device> NewDevice(std::int64_t device_key) override;
  std::vector<std::string> MakePayloads(std::int32_t world_size) override;
  std::unique_ptr<Communicator> NewCommunicator(
      const CommunicatorConfig& config, Device& device) override;

 private:
  CudaMappedPool mapped_pool_;
  NcclLocalGroups groups_;
};

}  // namespace xrex::async_emb
