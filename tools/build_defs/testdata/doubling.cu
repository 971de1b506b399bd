#include "tools/build_defs/testdata/doubling.hpp"
#include "tools/build_defs/testdata/doubling_kernel.cuh"

namespace doubling {

cudaError_t KernelBinaryVersion(int* version) {
  cudaFuncAttributes attributes = {};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, Double);
  *version = attributes.binaryVersion;
  return error;
}

int Factor() { return DOUBLING_FACTOR; }
int Local() { return DOUBLING_LOCAL; }

}  // namespace doubling
