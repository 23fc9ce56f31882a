// Map in one pass: every thread computes the whole expression for four elements, instruction by
// instruction, in its registers. Operands are read once and the result is written once.
// Intermediate values never leave the SM.
//
// The expression is an argument of the kernel, and every thread decodes it. Four elements share the
// cost of decoding. The registers of an expression are numbered at run time, so they are in local
// memory, which the L1 cache holds. To read a register, the threads of a warp read one line.
// Programs with few instructions and programs without 64-bit values have separate kernels with
// smaller arguments and registers.
//
// Cost of a * b + c at n = 2^20, f32: 12 MiB read, 4 MiB written, 1024 blocks of 256; 5
// instructions of about 20 cycles per thread.
//
// The kernel is correct for any n and block size: threads do not communicate, and threads beyond
// the end do nothing. It is correct for any alignment and any strides, because loads and stores are
// scalar.
#include "kernels/cuda/map/interpreter.cuh"
#include "kernels/expression/map_cost.h"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;
constexpr int kEach = 4;

// A program as a kernel argument, with up to kCode instructions and kRegisters registers.
template <int kCode, int kMost>
struct KernelProgram {
  static constexpr int kRegisters = kMost;
  MapLayout layout;
  DType dtype;
  int instructions;
  Instruction code[kCode];
  MapConstant constants[kCode];

  static bool Fits(const MapProgram& p) { return p.instructions <= kCode && p.registers <= kMost; }
  explicit KernelProgram(const MapProblem& p) : layout(LayoutOf(p)), dtype(p.dtype) {
    instructions = p.program->instructions;
    for (int i = 0; i < instructions; ++i) {
      code[i] = p.program->code[static_cast<std::size_t>(i)];
      constants[i] = p.program->constants[static_cast<std::size_t>(i)];
    }
  }
};
using ShortProgram = KernelProgram<24, 12>;
using LongProgram = KernelProgram<kMostInstructions, kMostRegisters>;

template <class Cell, int kRegisters>
struct LocalRegisters {
  Cell cells[kRegisters][kEach];

  template <class T>
  __device__ T Get(int reg, int j) const {
    T value;
    std::memcpy(&value, &cells[reg][j], sizeof value);
    return value;
  }
  template <class T>
  __device__ void Set(int reg, int j, T value) {
    std::memcpy(&cells[reg][j], &value, sizeof value);
  }
};

template <class Cell, class Program>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    MapFused(const __grid_constant__ Program program, std::int64_t n, void* out) {
  LocalRegisters<Cell, Program::kRegisters> r;
  const std::int64_t first =
      std::int64_t{blockIdx.x} * (std::int64_t{blockDim.x} * kEach) + threadIdx.x;
  const auto at = [&](int j) { return first + j * std::int64_t{blockDim.x}; };
  const auto inside = [&](int j) { return at(j) < n; };
  for (int i = 0; i < program.instructions; ++i) {
    const Instruction in = program.code[i];
    RunInstruction<kEach, sizeof(Cell)>(in, program.layout, program.constants, r, at, inside);
  }
  const int result = program.code[program.instructions - 1].out;
  DispatchFittingElement<sizeof(Cell)>(program.dtype, [&](auto t) {
    using T = decltype(t);
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (inside(j))
        static_cast<T*>(out)[at(j)] = static_cast<T>(r.template Get<ValueOf<T>>(result, j));
  });
}

template <class Cell, class Program>
void Launch(const MapProblem& p, CudaStream& stream) {
  const Grid grid = MakeGrid(p.n, p.launch, kBlock, kEach);
  const Program program(p);
  MapFused<Cell><<<grid.blocks, grid.block_size, 0, stream.handle()>>>(program, p.n, p.out);
  CUDA_CHECK_LAUNCH(MapFused);
}

template <class Cell>
void LaunchWith(const MapProblem& p, CudaStream& stream) {
  if (ShortProgram::Fits(*p.program)) {
    Launch<Cell, ShortProgram>(p, stream);
  } else {
    Launch<Cell, LongProgram>(p, stream);
  }
}

void Enqueue(const MapProblem& p, Stream& stream) {
  if (p.n == 0) return;
  if (p.program->wide) {
    LaunchWith<std::uint64_t>(p, Cuda(stream));
  } else {
    LaunchWith<std::uint32_t>(p, Cuda(stream));
  }
}

}  // namespace

extern constexpr Strategy<MapProblem> kMapFused = {
    .name = "fused",
    .summary = "one pass: a thread interprets the whole expression for four elements",
    .source = "loop fusion, with an interpreter in place of a compiler",
    .backend = Backend::kCuda,
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = MapRoundoff,
    .cost = OnePassCost,
    .launch = Enqueue,
};

}  // namespace tessera
