// L0: the floating-point mode of a worker thread.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace xrex::async_emb {

// Makes the calling thread keep subnormal inputs and results, whatever it
// inherited.
inline void KeepSubnormals() {
#if defined(__SSE2__)
  constexpr unsigned int kFlushToZero = 0x8000;
  constexpr unsigned int kDenormalsAreZero = 0x0040;
  _mm_setcsr(_mm_getcsr() & ~(kFlushToZero | kDenormalsAreZero));
#elif defined(__aarch64__)
  constexpr unsigned long kFlushToZero = 1UL << 24;
  unsigned long mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  asm volatile("msr fpcr, %0" ::"r"(mode & ~kFlushToZero));
#endif
}

}  // namespace xrex::async_emb
