// Map with a kernel that is compiled for a single expression while the server runs. The kernel is
// like one written by hand for that expression. Its text is assembled from the code of the
// expression's operations (compile/kernel_text.h), and the driver compiles it to machine code.
// Compilation takes 30 to 240 ms on one core for most expressions, so it runs on a separate thread,
// and only for expressions that are used twice. Until the kernel is ready, or if it cannot be
// compiled, `fused` runs and returns the same bits except for the payload of a NaN.
//
// A kernel serves all expressions with the same operations, types and layout of operands. The
// values of their constants are passed as arguments.
//
// Cost of a * b + c at n = 2^20, f32: 12 MiB read, 4 MiB written, 1024 blocks of 256; per thread
// three 16-byte loads, one 16-byte store, four products and four sums.
//
// The kernel is correct for any n, block size, alignment and strides.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/compile/compiler.h"
#include "kernels/cuda/map/chain.cuh"
#include "kernels/cuda/map/interpreter.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/expression/map_cost.h"

namespace tessera {

extern const Strategy<MapProblem> kMapFused;

namespace {

using compiled::Arguments;
using compiled::KernelPlan;
using compiled::Lies;

constexpr std::uint32_t kBlock = 256;
// The size in bytes of a thread's group in the array with the largest elements.
constexpr std::int64_t kGroupBytes = 16;
// If an expression has 64-bit values, an element counts as at least this many bytes, because
// registers then limit the size of a group.
constexpr std::int64_t kLeastBytes = 4;

std::int64_t Bytes(DType dtype) { return static_cast<std::int64_t>(SizeOf(dtype)); }

bool IsAligned(const void* data, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(bytes) == 0;
}

Lies Find(const MapLayout& layout, const MapLayout::Operand& operand, DType dtype, int width) {
  const int last = layout.rank - 1;
  const std::int64_t* const strides = operand.strides;
  const auto outer_are_multiples = [&] {
    return std::all_of(strides, strides + last, [&](std::int64_t s) { return s % width == 0; });
  };
  if (std::all_of(strides, strides + layout.rank, [](std::int64_t s) { return s == 0; }))
    return Lies::kOne;
  const bool aligned = IsAligned(operand.data, width * Bytes(dtype));
  if (operand.whole) return aligned ? Lies::kWhole : Lies::kUnaligned;
  if (layout.extents[last] % width != 0) return Lies::kEach;
  if (strides[last] == 0) return Lies::kRepeated;
  return strides[last] == 1 && aligned && outer_are_multiples() ? Lies::kGroups : Lies::kEach;
}

void MakePlan(const MapProblem& p, KernelPlan* plan, Arguments* arguments) {
  const MapProgram& program = *p.program;
  const MapLayout layout = LayoutOf(p);
  plan->program = &program;
  plan->rank = layout.rank;
  plan->wide = p.n > INT32_MAX;
  std::int64_t size = std::max<std::int64_t>(Bytes(p.dtype), program.wide ? kLeastBytes : 1);
  for (const Instruction& in : program)
    if (in.kind == Instruction::Kind::kLoad) size = std::max(size, Bytes(in.dtype));
  plan->width = static_cast<int>(kGroupBytes / size);
  plan->aligned = IsAligned(p.out, plan->width * Bytes(p.dtype));
  arguments->n = p.n;
  arguments->out = p.out;
  for (int axis = 0; axis < layout.rank; ++axis) {
    const auto extent = static_cast<std::uint64_t>(layout.extents[axis]);
    arguments->axes[axis].extent = extent;
    if (plan->wide) continue;
    const chained::Divisor divisor(static_cast<std::uint32_t>(extent));
    arguments->axes[axis].multiplier = divisor.multiplier;
    arguments->axes[axis].shift = static_cast<std::uint32_t>(divisor.shift);
  }
  for (const Instruction& in : program) {
    if (in.kind == Instruction::Kind::kConstant)
      arguments->constants[in.a] = program.constants[in.a].bits;
    const bool is_coordinate = in.kind == Instruction::Kind::kCoordinate;
    if (in.kind != Instruction::Kind::kLoad && !is_coordinate) continue;
    const MapLayout::Operand& operand = layout.operands[in.a];
    plan->lies[in.a] = is_coordinate ? Lies::kEach : Find(layout, operand, in.dtype, plan->width);
    arguments->operands[in.a].data = operand.data;
    for (int axis = 0; axis < layout.rank; ++axis) {
      arguments->operands[in.a].strides[axis] =
          operand.strides[axis] * Bytes(program.operand_dtypes[in.a]);
      if (operand.strides[axis] != 0) plan->moves[in.a] |= static_cast<std::uint8_t>(1u << axis);
    }
  }
}

bool LaunchCompiled(const MapProblem& p, CudaStream& stream) {
  KernelPlan plan;
  Arguments arguments;
  MakePlan(p, &plan, &arguments);
  const Grid grid = MakeGrid(p.n, p.launch, kBlock, static_cast<std::uint32_t>(plan.width));
  return compiled::Launch(plan, arguments, grid.blocks, grid.block_size, stream);
}

void Enqueue(const MapProblem& p, Stream& stream) {
  if (p.n > 0 && !LaunchCompiled(p, Cuda(stream))) kMapFused.launch(p, stream);
}

}  // namespace

extern constexpr Strategy<MapProblem> kMapCompiled = {
    .name = "compiled",
    .summary = "a kernel compiled in the background; until it is ready, `fused` runs",
    .source = "loop fusion; compilation at run time",
    .backend = Backend::kCuda,
    .dtypes = ArrayDTypes(),
    .min_compute_capability = 80,
    .deterministic = true,
    .limits = {.block_size = {kWarpSize, kBlock}},
    .roundoff = MapRoundoff,
    .cost = OnePassCost,
    .launch = Enqueue,
};

}  // namespace tessera
