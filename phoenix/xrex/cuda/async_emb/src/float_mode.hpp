// L0: the floating-point mode of a worker thread.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace xrex::async_emb {

// Gives the calling thread the arithmetic that the kernels count on, whatever
// it inherited: subnormals are kept, rounding is to nearest even.
inline void SetIeeeArithmetic() {
#if defined(__SSE2__)
  constexpr unsigned int kPowerOnMode =
      0x1F80;  // exceptions masked, all else 0
  _mm_setcsr(kPowerOnMode);
#elif defined(__aarch64__)
  constexpr unsigned long kFlushAndRounding = (1UL << 24) | (3UL << 22);
  unsigned long mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  asm volatile("msr fpcr, %0" ::"r"(mode & ~kFlushAndRounding));
#endif
}

}  // namespace xrex::async_emb
