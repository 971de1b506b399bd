#include "phoenix/xrex/cuda/async_emb/src/host_backend.hpp"

#include <unistd.h>

#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/host_communicator.hpp"
#include "phoenix/xrex/cuda/async_emb/src/host_device.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {

std::string_view HostBackend::ResolveTransport(Transport wanted) const {
  if (wanted == Transport::kAuto) return "shared memory";
  throw AsyncEmbError(
      ErrorCode::kInvalidArgument,
      StrCat("async_emb: transport is '",
             wanted == Transport::kNccl ? "nccl" : "lsa",
             "', which needs GPUs: on CPU devices it must be 'auto'"));
}

std::unique_ptr<Device> HostBackend::NewDevice(std::int64_t /*device_key*/) {
  return std::make_unique<HostDevice>();
}

std::vector<std::string> HostBackend::MakePayloads(std::int32_t world_size) {
  std::lock_guard lock(mutex_);
  std::erase_if(expected_, [](const auto& entry) {
    return entry.second.rendezvous->abort_reason().has_value();
  });
  const std::string payload =
      StrCat("async_emb host rendezvous ", getpid(), ".", ++num_payloads_made_);
  expected_.emplace(
      payload,
      Expected{std::make_shared<HostRendezvous>(world_size), world_size});
  return std::vector<std::string>(static_cast<std::size_t>(world_size),
                                  payload);
}

std::unique_ptr<Communicator> HostBackend::NewCommunicator(
    const CommunicatorConfig& config, Device& /*device*/) {
  return std::make_unique<HostCommunicator>(
      config.rank, config.world_size,
      [this](const std::string& payload) { return Find(payload); });
}

std::shared_ptr<HostRendezvous> HostBackend::Find(const std::string& payload) {
  std::lock_guard lock(mutex_);
  const auto found = expected_.find(payload);
  if (found == expected_.end()) {
    throw AsyncEmbError(
        ErrorCode::kInvalidArgument,
        StrCat(
            "async_emb: payload 0 ('", payload,
            "') is not one that rank 0 has just made in this process: on the "
            "host backend all ranks live in one process; give handshake what "
            "the last reset of rank 0 returned"));
  }
  std::shared_ptr<HostRendezvous> rendezvous = found->second.rendezvous;
  if (--found->second.num_missing == 0) expected_.erase(found);
  return rendezvous;
}

}  // namespace xrex::async_emb
