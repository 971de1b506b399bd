#include "phoenix/xrex/cuda/async_emb/src/nccl_library.hpp"

#include <dlfcn.h>
#include <link.h>
#include <nccl.h>

#include <filesystem>
#include <set>
#include <string_view>
#include <system_error>

#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

constexpr std::int32_t kLeastVersion = NCCL_VERSION(2, 28, 0);

std::string RealPath(const std::string& path) {
  std::error_code error;
  const auto real = std::filesystem::canonical(path, error);
  return error ? path : real.string();
}

// The files of all NCCL libraries that are loaded.
std::set<std::string> LoadedFiles() {
  std::set<std::string> files;
  const auto visit = [](dl_phdr_info* info, std::size_t /*size*/, void* found) {
    const std::string_view path(info->dlpi_name);
    const std::string_view name = path.substr(path.rfind('/') + 1);
    if (name.starts_with("libnccl.so")) {
      static_cast<std::set<std::string>*>(found)->insert(
          RealPath(std::string(path)));
    }
    return 0;
  };
  dl_iterate_phdr(visit, &files);
  return files;
}

}  // namespace

std::int32_t LoadedNcclVersion() {
  int version = 0;
  const ncclResult_t result = ncclGetVersion(&version);
  if (result == ncclSuccess) return version;
  throw AsyncEmbError(ErrorCode::kInternal,
                      StrCat("async_emb: NCCL does not tell its version: ",
                             ncclGetErrorString(result)));
}

std::string LoadedNcclPath() {
  Dl_info info{};
  const auto address = reinterpret_cast<const void*>(&ncclGetVersion);
  if (dladdr(address, &info) != 0 && info.dli_fname != nullptr) {
    return RealPath(info.dli_fname);
  }
  throw AsyncEmbError(ErrorCode::kInternal,
                      "async_emb: the file of the NCCL library is not known");
}

void RequireUsableNccl() {
  const std::int32_t version = LoadedNcclVersion();
  if (version < kLeastVersion) {
    throw AsyncEmbError(
        ErrorCode::kFailedPrecondition,
        StrCat("async_emb: NCCL ", version, " (", LoadedNcclPath(),
               ") is too old: it must be ", kLeastVersion,
               " (2.28) or later; install a newer nvidia-nccl-cu13"));
  }
  const std::set<std::string> files = LoadedFiles();
  if (files.size() <= 1) return;
  std::string names;
  for (const std::string& file : files) names += "\n  " + file;
  throw AsyncEmbError(
      ErrorCode::kFailedPrecondition,
      StrCat("async_emb: this process has loaded ", files.size(),
             " NCCL libraries:", names,
             "\nXLA and async_emb must use one: leave one of them installed, "
             "or import xrex before whatever loads the other"));
}

}  // namespace xrex::async_emb
