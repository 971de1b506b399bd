// L2: the environment that NCCL needs. Pure: the variables are handed in.
#pragma once

#include <functional>

namespace xrex::async_emb {

// Like std::getenv: null if there is no such variable.
using GetEnv = std::function<const char*(const char* name)>;

// Throws kFailedPrecondition that names the first variable which is not as it
// must be. NCCL reads them when it is first used in a process and never again,
// so that a wrong one cannot be mended from inside.
void RequireNcclEnvironment(const GetEnv& get_env);

}  // namespace xrex::async_emb
