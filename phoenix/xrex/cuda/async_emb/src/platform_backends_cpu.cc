#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/host_backend.hpp"
#include "phoenix/xrex/cuda/async_emb/src/platform_backends.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

[[noreturn]] void RefuseNccl(const char* call) {
  throw AsyncEmbError(
      ErrorCode::kFailedPrecondition,
      StrCat(
          "async_emb: ", call,
          "() needs the CUDA backend, which is not in this build: build with "
          "--config=cuda"));
}

}  // namespace

std::vector<std::unique_ptr<Backend>> PlatformBackends() {
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(std::make_unique<HostBackend>());
  return backends;
}

std::int32_t NcclVersion() { RefuseNccl("nccl_version"); }

std::string NcclLibraryPath() { RefuseNccl("nccl_library_path"); }

}  // namespace xrex::async_emb
