// Something for a test of cuda_library to call.
#pragma once

#include <cuda_runtime_api.h>

namespace doubling {

// The lowest compute capability (80 for 8.0) that the kernel was compiled for,
// or the error of the runtime that has no device to tell it.
cudaError_t KernelBinaryVersion(int* version);

// DOUBLING_FACTOR and DOUBLING_LOCAL as the .cu file has seen them.
int Factor();
int Local();

}  // namespace doubling
