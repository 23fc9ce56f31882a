// Keeps the blocks of a launch abreast along k.
//
// Blocks that compute tiles of neighbouring rows and columns read the same k-tiles, and all but the
// first to come find them in the L2, as long as the others come soon enough. No block waits for
// another, though, so that over many long tiles they drift apart, until each reads its operands
// from device memory itself: bf16, 32768 x 32768 x 32768, takes an H200 147 ms then, and 106 where
// blocks stay together (2026-11-26; docs/notebook.md, "Blocks that drift apart").
//
// So whoever fetches counts its steps, of some k-tiles each, in one counter for all blocks. What
// that was before, which the addition returns, tells how far all have come on average; a block that
// is more than kMostLead steps ahead of it waits. The answer is looked at a step later, when it has
// long been there: a block that is not ahead waits for nothing. Since the leads of all blocks add
// up to 0, few can be far behind when none is far ahead; one that is reads again from device memory
// what others have read before it.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"

namespace tessera {

// The steps of one block, of its fetching thread's.
class Abreast {
 public:
  Abreast() = default;
  // counter: of the launch, 0 before it and once all blocks have left. steps: of each block; 0: it
  // goes its own way.
  __device__ Abreast(std::uint32_t* counter, int steps)
      : counter_(counter), steps_(static_cast<unsigned>(steps)) {}

  // Before every step; what comes after the last goes uncounted.
  __device__ void Step() {
    if (done_ == steps_) return;
    if (done_ > kMostLead && waits_) WaitForOthers((done_ - kMostLead) * gridDim.x);
    before_ = atomicAdd(counter_, 1u);
    ++done_;
  }
  // Once, behind all steps.
  __device__ void Leave() const {
    if (steps_ != 0 && atomicAdd(counter_, 1u) == (steps_ + 1) * gridDim.x - 1) *counter_ = 0;
  }

 private:
  static constexpr unsigned kMostLead = 1;
  // About half a millisecond. Blocks wait for speed alone, and one may be missing, whose SM another
  // kernel has: a block that has waited in vain does not wait again.
  static constexpr long long kMostCycles = 1 << 20;

  __device__ void WaitForOthers(std::uint32_t steps_of_all) {
    const long long begin = clock64();
    while (before_ < steps_of_all && waits_) {
      asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
                   : "=r"(before_)
                   : "l"(counter_)
                   : "memory");
      waits_ = clock64() - begin < kMostCycles;
    }
  }

  std::uint32_t* counter_ = nullptr;
  unsigned steps_ = 0, done_ = 0;
  std::uint32_t before_ = 0;  // the counter, when this block began its last step or later
  bool waits_ = true;
};

}  // namespace tessera
