// L2, CUDA backend: which NCCL this process has.
#pragma once

#include <cstdint>
#include <string>

namespace xrex::async_emb {

// As NCCL encodes it: 10000 * major + 100 * minor + patch.
std::int32_t LoadedNcclVersion();

// The file that our calls go to.
std::string LoadedNcclPath();

// Throws kFailedPrecondition unless it is new enough and the only one in the
// process: the order of launches is kept inside one library only, so that
// collectives of XLA and ours through two of them can wait for each other for
// ever.
void RequireUsableNccl();

}  // namespace xrex::async_emb
