#include "phoenix/xrex/cuda/async_emb/src/cuda_backend.hpp"
#include "phoenix/xrex/cuda/async_emb/src/host_backend.hpp"
#include "phoenix/xrex/cuda/async_emb/src/nccl_library.hpp"
#include "phoenix/xrex/cuda/async_emb/src/platform_backends.hpp"

namespace xrex::async_emb {

std::vector<std::unique_ptr<Backend>> PlatformBackends() {
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(std::make_unique<HostBackend>());
  backends.push_back(std::make_unique<CudaBackend>());
  return backends;
}

std::int32_t NcclVersion() { return LoadedNcclVersion(); }

std::string NcclLibraryPath() { return LoadedNcclPath(); }

}  // namespace xrex::async_emb
