// L2: makes the devices and communicators of one platform.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/communicator.hpp"
#include "phoenix/xrex/cuda/async_emb/src/device.hpp"

namespace xrex::async_emb {

struct CommunicatorConfig {
  std::int32_t rank = 0;
  std::int32_t world_size = 1;
  std::int32_t min_ctas = 1;
  std::int32_t max_ctas = 4;
  // Of one armed step: nothing that it takes lasts longer.
  std::chrono::nanoseconds step_timeout = std::chrono::minutes(30);
};

class Backend {
 public:
  virtual ~Backend() = default;

  // The name that XLA gives the platform in FFI registrations: "cpu" or "CUDA".
  virtual std::string_view platform() const = 0;

  // Of one armed step, where neither the options nor the environment say
  // otherwise.
  virtual std::chrono::seconds default_timeout() const = 0;

  // The name of the transport that contexts of this backend get, for the log.
  // Throws kInvalidArgument for one that it does not have.
  virtual std::string_view ResolveTransport(Transport wanted) const = 0;

  // `device_key` is what ffi::DeviceOrdinal reports for the device.
  virtual std::unique_ptr<Device> NewDevice(std::int64_t device_key) = 0;

  // Rank 0's part of the bootstrap: one payload for each of `world_size` ranks.
  virtual std::vector<std::string> MakePayloads(std::int32_t world_size) = 0;

  // Not connected yet.
  virtual std::unique_ptr<Communicator> NewCommunicator(
      const CommunicatorConfig& config, Device& device) = 0;
};

}  // namespace xrex::async_emb
