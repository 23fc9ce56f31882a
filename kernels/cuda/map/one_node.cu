// Map with a kernel for each node of the expression. Libraries of elementwise functions work like
// this. Chains of such calls are slow, because every intermediate value is an array in device
// memory, which one kernel writes and another one reads.
//
// Cost of a * b + c at n = 2^20, f32: 16 MiB for the operands and the result, and 80 MiB for the
// values, which are written and read with 8 bytes per element; 5 launches of 4096 blocks of 256.
// Scratch memory: one array for each of the program's registers.
//
// The kernels are correct for any n and block size: threads do not communicate, and threads beyond
// the end do nothing. Kernels of a stream run in order.
#include "kernels/cuda/map/interpreter.cuh"
#include "kernels/expression/map_cost.h"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;
// The number of bytes that a value takes in its array, whatever its type.
constexpr std::int64_t kCellBytes = 8;

std::uint64_t ScratchOf(const MapProblem& p) {
  const std::uint64_t cells = static_cast<std::uint64_t>(p.program->registers) * kCellBytes;
  const auto n = static_cast<std::uint64_t>(p.n);
  return n > UINT64_MAX / cells ? UINT64_MAX : n * cells;
}

// The registers of a thread: its element in each array.
struct ArrayRegisters {
  char* arrays;
  std::int64_t n;
  std::int64_t i;

  template <class T>
  __device__ T* At(int reg) const {
    return reinterpret_cast<T*>(arrays + reg * n * kCellBytes) + i;
  }
  template <class T>
  __device__ T Get(int reg, int) const {
    return *At<T>(reg);
  }
  template <class T>
  __device__ void Set(int reg, int, T value) {
    *At<T>(reg) = value;
  }
};

__global__ void __launch_bounds__(kAnyBlockSize.max)
    MapOneNode(Instruction in, const __grid_constant__ MapLayout layout, MapConstant constant,
               std::int64_t n, char* arrays) {
  const std::int64_t i = GridThread();
  if (i >= n) return;
  ArrayRegisters r = {arrays, n, i};
  in.a = in.kind == Instruction::Kind::kConstant ? 0 : in.a;
  RunInstruction<1, kCellBytes>(
      in, layout, &constant, r, [&](int) { return i; }, [](int) { return true; });
}

// Converts the result's values to elements and stores them.
__global__ void __launch_bounds__(kAnyBlockSize.max)
    MapStore(int reg, DType dtype, std::int64_t n, char* arrays, void* out) {
  const std::int64_t i = GridThread();
  if (i >= n) return;
  const ArrayRegisters r = {arrays, n, i};
  DispatchElement(dtype, [&](auto t) {
    using T = decltype(t);
    static_cast<T*>(out)[i] = static_cast<T>(r.template Get<ValueOf<T>>(reg, 0));
  });
}

void Enqueue(const MapProblem& p, Stream& stream) {
  if (p.n == 0) return;
  CudaStream& cuda = Cuda(stream);
  const Grid grid = MakeGrid(p.n, p.launch, kBlock, 1);
  const MapLayout layout = LayoutOf(p);
  auto* arrays = static_cast<char*>(stream.Scratch(static_cast<std::size_t>(ScratchOf(p))));
  for (const Instruction& in : *p.program) {
    MapConstant constant;
    if (in.kind == Instruction::Kind::kConstant) constant = p.program->constants[in.a];
    MapOneNode<<<grid.blocks, grid.block_size, 0, cuda.handle()>>>(in, layout, constant, p.n,
                                                                   arrays);
    CUDA_CHECK_LAUNCH(MapOneNode);
  }
  MapStore<<<grid.blocks, grid.block_size, 0, cuda.handle()>>>((p.program->end() - 1)->out, p.dtype,
                                                               p.n, arrays, p.out);
  CUDA_CHECK_LAUNCH(MapStore);
}

}  // namespace

extern constexpr Strategy<MapProblem> kMapOneNode = {
    .name = "one_node",
    .summary = "one kernel for each node, with arrays of intermediate values",
    .source = "how libraries evaluate chains of array functions",
    .backend = Backend::kCuda,
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = MapRoundoff,
    .cost = PassEachCost,
    .launch = Enqueue,
    .scratch = ScratchOf,
};

}  // namespace tessera
