#pragma once

namespace doubling {

__global__ inline void Double(float* values, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) values[i] *= DOUBLING_FACTOR;
}

}  // namespace doubling
