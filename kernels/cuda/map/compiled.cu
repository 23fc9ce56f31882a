// Map with a kernel that is compiled for a single expression while the server runs. It is the
// kernel that one would write by hand for that expression. Its text is assembled from the code of
// the expression's operations (compile/kernel_text.h), and the driver compiles it to machine code.
// That takes 30 to 240 ms on one core for most expressions, so a separate thread does it, and only
// for expressions that are used twice. Until the kernel is ready, or if there can be none, `fused`
// does the work, with the same bits except for the payload of a NaN.
//
// A kernel serves all expressions with the same operations, types and layout of operands. The
// values of their constants are passed as arguments.
//
// Cost of a * b + c at n = 2^20, f32: 12 MiB read, 4 MiB written, 1024 blocks of 256; per thread
// three 16-byte loads, one 16-byte store, four products and four sums.
//
// The kernel is correct for any n and block size. There is no such kernel if an operand's axes have
// to be walked one by one, as in a transposed matrix.
#include <algorithm>
#include <optional>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/compile/compiler.h"
#include "kernels/cuda/map/chain.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/expression/map_cost.h"

namespace tessera {

extern const Strategy<MapProblem> kMapFused;

namespace {

using compiled::Arguments;
using compiled::KernelPlan;
using compiled::Lies;
using compiled::Quotient;

constexpr std::uint32_t kBlock = 256;
// The size in bytes of a thread's group in the array with the largest elements.
constexpr std::int64_t kGroupBytes = 16;
// If values take 64 bits, an element counts as at least this many bytes, because registers are then
// the limit.
constexpr std::int64_t kLeastBytes = 4;

std::int64_t Bytes(DType dtype) { return static_cast<std::int64_t>(SizeOf(dtype)); }

Quotient MakeQuotient(std::int64_t by) {
  const chained::Divisor divisor(static_cast<std::uint32_t>(by));
  return {divisor.by, divisor.multiplier, static_cast<std::uint32_t>(divisor.shift)};
}

// Returns how the operand is laid out, and stores the numbers that locate its elements in *operand.
// Returns nullopt if the operand's axes would have to be walked one by one.
std::optional<Lies> Find(const View& view, std::int64_t n, int width, Arguments::Operand* operand) {
  std::int64_t inner, period;
  if (!chained::FindPeriod(view, &inner, &period)) return std::nullopt;
  operand->data = view.data;
  if (period == 1) return Lies::kOne;
  const bool aligned = chained::IsAligned(view.data, width * Bytes(view.dtype));
  if (inner == 1 && period == n) return aligned ? Lies::kWhole : Lies::kUnaligned;
  if (n > INT32_MAX) return std::nullopt;
  operand->inner = MakeQuotient(inner);
  operand->period = MakeQuotient(period);
  if (inner % width == 0) return Lies::kRepeated;
  return inner == 1 && period % width == 0 && aligned ? Lies::kVectors : Lies::kStretched;
}

// Returns false if there can be no compiled kernel for the problem.
bool MakePlan(const MapProblem& p, KernelPlan* plan, Arguments* arguments) {
  const MapProgram& program = *p.program;
  plan->program = &program;
  std::int64_t size = std::max<std::int64_t>(Bytes(p.dtype), program.wide ? kLeastBytes : 1);
  for (const Instruction& in : program)
    if (in.kind == Instruction::Kind::kLoad) size = std::max(size, Bytes(in.dtype));
  plan->width = static_cast<int>(kGroupBytes / size);
  plan->aligned = chained::IsAligned(p.out, plan->width * Bytes(p.dtype));
  arguments->n = p.n;
  arguments->out = p.out;
  for (const Instruction& in : program) {
    if (in.kind == Instruction::Kind::kConstant)
      arguments->constants[in.a] = program.constants[in.a].bits;
    if (in.kind != Instruction::Kind::kLoad || plan->lies[in.a] != Lies::kUnused) continue;
    const std::optional<Lies> lies =
        Find(p.operands[in.a], p.n, plan->width, &arguments->operands[in.a]);
    if (!lies) return false;
    plan->lies[in.a] = *lies;
  }
  return true;
}

bool LaunchCompiled(const MapProblem& p, CudaStream& stream) {
  KernelPlan plan;
  Arguments arguments;
  if (!MakePlan(p, &plan, &arguments)) return false;
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
