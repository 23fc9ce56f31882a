// Linalg by the textbook's methods: one block per matrix, in shared memory if the matrix fits.
//
// A decomposition of n columns is a chain of n steps, and each step needs the results of the
// previous one. A matrix of 32 x 32 has at most 1024 independent operations in a step, which is too
// little for a GPU, so the parallelism has to come from the stack: thousands of blocks run at the
// same time, and each waits only for its own barriers. Within a block, a step divides rows among
// warps and columns among lanes, so the lanes read adjacent elements. The warps all search for the
// pivot, because a barrier would take longer than the search.
//
// Cost for a system of n equations: 2 n^3 / 3 operations and 3 n barriers.
#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/problem/linalg.h"
#include "kernels/problem/linalg_direct.h"

namespace tessera {
namespace {

// The shared memory of a block that leaves room for a second one on a multiprocessor of any GPU
// since Ampere.
constexpr std::size_t kMostShared = std::size_t{48} << 10;
// The maximum number of blocks per multiprocessor.
constexpr std::int64_t kBlocks = 16;

// The threads of a block as a team (kernels/problem/linalg_direct.h). Its groups are warps.
struct BlockTeam {
  static constexpr int kTile = 1;

  template <class F>
  __device__ void Each(std::int64_t first, std::int64_t end, const F& f) const {
    for (std::int64_t i = first + threadIdx.x; i < end; i += blockDim.x) f(i);
  }
  template <class F>
  __device__ void Rows(std::int64_t first, std::int64_t end, const F& f) const {
    for (std::int64_t i = first + threadIdx.x / kWarpSize; i < end; i += blockDim.x / kWarpSize)
      f(i);
  }
  template <class F>
  __device__ void Lanes(std::int64_t first, std::int64_t end, const F& f) const {
    for (std::int64_t i = first + threadIdx.x % kWarpSize; i < end; i += kWarpSize) f(i);
  }
  template <class T>
  __device__ T Sum(T value) const {
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
      value += __shfl_xor_sync(kFullMask, value, distance);
    return value;
  }
  template <class T>
  __device__ std::int64_t Most(T value, std::int64_t index) const {
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      const T other = __shfl_xor_sync(kFullMask, value, distance);
      const std::int64_t at = __shfl_xor_sync(kFullMask, index, distance);
      if (other > value || (other == value && at < index)) value = other, index = at;
    }
    return index;
  }
  __device__ void Sync() const { __syncthreads(); }
};

// `mark` holds the complement of the position of the first bad matrix; 0: there is none.
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    LinalgBlocks(LinalgProblem p, std::int64_t work, T* scratch, unsigned long long* mark) {
  extern __shared__ __align__(16) unsigned char shared[];
  T* const own = scratch == nullptr ? reinterpret_cast<T*>(shared) : scratch + blockIdx.x * work;
  for (std::int64_t i = blockIdx.x; i < p.stack; i += gridDim.x) {
    const bool found = Direct(BlockTeam(), p, static_cast<const T*>(p.x) + i * p.m * p.n,
                              static_cast<const T*>(p.b) + i * p.n * p.columns,
                              static_cast<T*>(p.out) + i * p.out_rows() * p.out_columns(), own);
    if (!found && threadIdx.x == 0) atomicMax(mark, ~static_cast<unsigned long long>(i));
    __syncthreads();  // the scratch memory is free for the next matrix
  }
}

__global__ void StoreFirstBad(const unsigned long long* mark, Scalar* result) {
  result->index = static_cast<std::int64_t>(~*mark);
}

bool FitsShared(const LinalgProblem& p) {
  return static_cast<std::size_t>(DirectWork(p)) * SizeOf(p.dtype) <= kMostShared;
}

// Returns the number of blocks that have scratch memory in device memory.
std::int64_t Blocks(const LinalgProblem& p, int multiprocessors) {
  return std::min(p.stack, kBlocks * multiprocessors);
}

// Returns the threads of a block: a warp for tiny matrices, and more for larger ones.
unsigned ThreadsOf(const LinalgProblem& p) {
  const std::int64_t side = std::max(p.m, p.n);
  return side <= 8 ? 32 : side <= 32 ? 128 : side <= 128 ? 256 : 512;
}

template <class T>
void Enqueue(const LinalgProblem& p, CudaStream& stream) {
  const std::int64_t work = DirectWork(p);
  const bool fits = FitsShared(p);
  const std::int64_t blocks = Blocks(p, stream.device().info().multiprocessors);
  const auto bytes = static_cast<std::size_t>(work) * sizeof(T);
  T* const scratch =
      fits ? nullptr : static_cast<T*>(stream.Scratch(static_cast<std::size_t>(blocks) * bytes));
  auto* const mark = static_cast<unsigned long long*>(stream.Scratch(sizeof(unsigned long long)));
  stream.Zero(mark, sizeof *mark);
  LinalgBlocks<T>
      <<<static_cast<unsigned>(blocks), ThreadsOf(p), fits ? bytes : 0, stream.handle()>>>(
          p, work, scratch, mark);
  CUDA_CHECK_LAUNCH(LinalgBlocks);
  StoreFirstBad<<<1, 1, 0, stream.handle()>>>(mark, p.result);
  CUDA_CHECK_LAUNCH(StoreFirstBad);
}

}  // namespace

extern constexpr Strategy<LinalgProblem> kLinalgBlock = {
    .name = "block",
    .summary = "one block per matrix, in shared memory if it fits",
    .source = "Golub and Van Loan, Matrix Computations, 2013",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32, DType::kF64),
    .deterministic = true,
    .roundoff = LinalgRoundoff,
    .cost =
        [](const LinalgProblem& p) {
          // A step takes 2 us, most of which are barriers. Operations in device memory take ten
          // times as long as in shared memory (64 x 64 and 512 x 512, NVIDIA H200, 2026-12-01). A
          // sweep of rotations has n rounds.
          const bool rotates = p.function == LinalgFunction::kEigh;
          const auto n = static_cast<double>(std::max(p.m, p.n));
          const double rounds = rotates ? 9 * n : n, flops = LinalgFlops(p) * (rotates ? 6 : 1);
          const auto waves = static_cast<double>((p.stack + 999) / 1000);
          return Cost{.bytes = Whole(2 * LinalgBytes(p)),
                      .flops = Whole(static_cast<double>(p.stack) * flops),
                      .atomics = 0,
                      .depth = Whole(waves * (2000 * rounds + flops / (FitsShared(p) ? 64 : 6)))};
        },
    .launch =
        [](const LinalgProblem& p, Stream& stream) {
          CudaStream& cuda = Cuda(stream);
          p.dtype == DType::kF32 ? Enqueue<float>(p, cuda) : Enqueue<double>(p, cuda);
        },
    .refuses = RefusesSvd,
    .scratch =
        [](const LinalgProblem& p) {
          constexpr int kMostMultiprocessors = 192;
          return FitsShared(p) ? 0
                               : static_cast<std::uint64_t>(Blocks(p, kMostMultiprocessors)) *
                                     static_cast<std::uint64_t>(DirectWork(p)) * SizeOf(p.dtype);
        },
};

}  // namespace tessera
