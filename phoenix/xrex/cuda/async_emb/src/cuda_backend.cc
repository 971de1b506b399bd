#include "phoenix/xrex/cuda/async_emb/src/cuda_backend.hpp"

#include <nccl.h>

#include "phoenix/xrex/cuda/async_emb/src/cuda_device.hpp"
#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/nccl_communicator.hpp"

namespace xrex::async_emb {

std::string_view CudaBackend::ResolveTransport(Transport wanted) const {
  if (wanted != Transport::kLsa) return "NCCL";
  throw AsyncEmbError(ErrorCode::kInvalidArgument,
                      "async_emb: transport is 'lsa', which this build does "
                      "not have: it must be 'auto' or 'nccl'");
}

std::unique_ptr<Device> CudaBackend::NewDevice(std::int64_t device_key) {
  return std::make_unique<CudaDevice>(device_key, mapped_pool_);
}

std::vector<std::string> CudaBackend::MakePayloads(std::int32_t world_size) {
  ncclUniqueId id;
  CheckNccl(ncclGetUniqueId(&id), "make a unique id");
  return std::vector<std::string>(
      static_cast<std::size_t>(world_size),
      std::string(id.internal, sizeof(id.internal)));
}

std::unique_ptr<Communicator> CudaBackend::NewCommunicator(
    const CommunicatorConfig& config, Device& device) {
  return std::make_unique<NcclCommunicator>(
      config, static_cast<CudaDevice&>(device),
      [this](const std::string& payload) { return groups_.Find(payload); });
}

}  // namespace xrex::async_emb
