// Keeps the blocks of a launch abreast, that is, at about the same step along k.
//
// Blocks that compute adjacent tiles read the same k-tiles. The first block to read a k-tile brings
// it into the L2, where the other blocks find it if they follow soon enough. No block waits for
// another, though, so over many long tiles the blocks drift apart, until each block reads its
// operands from device memory itself. For a bf16 product of 32768 x 32768 x 32768, an H200 then
// takes 147 ms, compared with 106 ms if the blocks stay together (2026-11-26; docs/notebook.md,
// "Blocks that drift apart").
//
// To prevent this, each fetching thread counts its steps (of several k-tiles each) in one counter
// that all blocks share. The addition returns the counter's previous value, which shows how far the
// blocks have advanced on average. A block that is more than kMostLead steps ahead of that average
// waits. Each block examines the value only one step later, long after the value has arrived, so a
// block that is not ahead never waits. Since the leads of all blocks add up to 0, few blocks can be
// far behind if none is far ahead. A block that is far behind has to read again from device memory
// what the other blocks have already read.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"

namespace tessera {

// Counts the steps of one block. Used by the block's fetching thread.
class Abreast {
 public:
  Abreast() = default;
  // `counter` is the launch's counter, which is 0 before the launch and after all blocks have
  // called Leave. `steps` is the number of steps per block, or 0 if the blocks are not kept
  // abreast.
  __device__ Abreast(std::uint32_t* counter, int steps)
      : counter_(counter), steps_(static_cast<unsigned>(steps)) {}

  // Called before every step. Only the first `steps` calls count.
  __device__ void Step() {
    if (done_ == steps_) return;
    if (done_ > kMostLead && waits_) WaitForOthers((done_ - kMostLead) * gridDim.x);
    before_ = atomicAdd(counter_, 1u);
    ++done_;
  }
  // Called once, after all steps.
  __device__ void Leave() const {
    if (steps_ != 0 && atomicAdd(counter_, 1u) == (steps_ + 1) * gridDim.x - 1) *counter_ = 0;
  }

 private:
  static constexpr unsigned kMostLead = 1;
  // The longest wait, about half a millisecond. Waiting is only an optimization, and the other
  // blocks may not be running because another kernel occupies their SMs. So a block does not wait
  // again after a wait has timed out.
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
  std::uint32_t before_ = 0;  // the counter when this block began its last step, or later
  bool waits_ = true;
};

}  // namespace tessera
