// Reduce in one launch, at the speed of memory: `single_pass` of Dot with any operation.
//
// A thread loads four vectors of 16 bytes before it uses the first, so it folds four or more short
// chains at the same time. The time to start a kernel, about 3 us, is paid only once, and no
// operation has to be atomic.
//
// Cost at n = 2^20, f32: 256 blocks read 4 MiB and send 16 bytes each, in one launch. Reading takes
// 1 us at 4.3 TB/s, and starting the kernel takes four times as long.
//
// Kernel: kernels/cuda/tree/kernel.cuh.
// Lessons: kernels/lessons/sum_6_vectors.cu, kernels/lessons/sum_7_one_launch.cu
#include "kernels/cuda/tree/strategies.cuh"

namespace tessera {

extern constexpr Strategy<ReduceProblem> kReduceSinglePass =
    SinglePassStrategy<ReduceProblem>({.name = "single_pass"});

}  // namespace tessera
