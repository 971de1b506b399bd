// L2, host backend: the platform "cpu". All ranks of a communicator live in one
// process.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/backend.hpp"
#include "phoenix/xrex/cuda/async_emb/src/host_rendezvous.hpp"

namespace xrex::async_emb {

class HostBackend final : public Backend {
 public:
  std::string_view platform() const override { return "cpu"; }
  // XLA itself ends a process whose CPU collectives wait for a minute.
  std::chrono::seconds default_timeout() const override {
    return std::chrono::seconds(30);
  }
  std::string_view ResolveTransport(Transport wanted) const override;
  std::unique_ptr<Device> NewDevice(std::int64_t device_key) override;
  std::vector<std::string> MakePayloads(std::int32_t world_size) override;
  std::unique_ptr<Communicator> NewCommunicator(
      const CommunicatorConfig& config, Device& device) override;

 private:
  std::shared_ptr<HostRendezvous> Find(const std::string& payload);

  std::mutex mutex_;
  std::int64_t num_payloads_made_ = 0;  // guarded by mutex_
  // A rendezvous that not all of its ranks have come for. From then on their
  // communicators alone keep it: the arenas that it knows go with them, and an
  // old payload cannot disturb a group that is at work.
  struct Expected {
    std::shared_ptr<HostRendezvous> rendezvous;
    std::int32_t num_missing;
  };
  std::map<std::string, Expected> expected_;  // by payload; guarded by mutex_
};

}  // namespace xrex::async_emb
