#include <gtest/gtest.h>

#include "tools/build_defs/testdata/doubling.hpp"

namespace doubling {
namespace {

TEST(CudaLibrary, DefinesReachItsOwnFiles) {
  EXPECT_EQ(Factor(), 2);
  EXPECT_EQ(Local(), 3);
}

TEST(CudaLibrary, DefinesReachThoseWhoDependOnIt) {
  EXPECT_EQ(DOUBLING_FACTOR, 2);
}

TEST(CudaLibrary, LocalDefinesReachNobodyElse) {
#ifdef DOUBLING_LOCAL
  FAIL() << DOUBLING_LOCAL;
#endif
}

TEST(CudaLibrary, TheRuntimeIsLinkedInWithTheKernel) {
  int num_devices = 0;
  int version = 0;
  if (cudaGetDeviceCount(&num_devices) == cudaSuccess) {
    EXPECT_EQ(KernelBinaryVersion(&version), cudaSuccess);
    EXPECT_GE(version, 80);
  } else {
    EXPECT_NE(KernelBinaryVersion(&version), cudaSuccess);
  }
}

}  // namespace
}  // namespace doubling
