// The backends that this build has. One of two files implements it: the build
// chooses.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/backend.hpp"

namespace xrex::async_emb {

std::vector<std::unique_ptr<Backend>> PlatformBackends();

// Of the NCCL library in use: its version as NCCL encodes it, and its file.
// Without the CUDA backend both throw kFailedPrecondition.
std::int32_t NcclVersion();
std::string NcclLibraryPath();

}  // namespace xrex::async_emb
