#include "kernels/expression/map_cost.h"

#include <algorithm>
#include <array>
#include <cstdlib>

#include "absl/status/statusor.h"
#include "kernels/expression/expression.h"
#include "kernels/expression/map_math.h"
#include "kernels/problem/roundoff.h"

namespace tessera {
namespace {

// Returns the number of distinct elements of the view, at most n.
std::int64_t Distinct(const View& view, std::int64_t n) {
  std::int64_t distinct = 1;
  for (int i = 0; i < view.shape.rank; ++i)
    if (view.strides[static_cast<std::size_t>(i)] != 0) distinct *= view.shape[i];
  return view.shape.rank == 0 ? n : std::min(n, distinct);
}

// Whether the view's elements are not adjacent, so that each must be located separately.
bool IsScattered(const View& view) { return view.shape.rank > 0 && !view.contiguous(); }

// The cost of locating an element, in additions.
constexpr std::uint64_t kFindFlops = 8;

std::uint64_t Flops(const MapProblem& p) {
  std::uint64_t flops = 1 + static_cast<std::uint64_t>(p.program->flops);
  for (int i = 0; i < p.program->operands; ++i)
    if (IsScattered(p.operands[static_cast<std::size_t>(i)])) flops += kFindFlops;
  return flops * static_cast<std::uint64_t>(p.n);
}

// Returns the largest error of a floating-point operation, in unit roundoffs. A unit in the last
// place, in which the errors of functions are stated, is at most two unit roundoffs.
int Roundings(MapOp op) {
  if (IsLibraryFunction(op)) return 8;
  switch (op) {
    case MapOp::kAdd:
    case MapOp::kSubtract:
    case MapOp::kMultiply:
    case MapOp::kDivide:
    case MapOp::kFloorDivide:
    case MapOp::kRemainder:
    case MapOp::kFma:
    case MapOp::kSqrt:
      return 1;
    case MapOp::kPower:
    case MapOp::kExp:
    case MapOp::kLog:
    case MapOp::kTanh:
      return 4;
    case MapOp::kNdtri:
      return 20;
    default:
      return 0;
  }
}

// Returns the program of a * b + c with operands of dtype.
const MapProgram& MultiplyAdd(DType dtype) {
  static const auto& programs = *[] {
    auto* all = new std::array<MapProgram, kAllDTypes.size()>;
    std::vector<ExpressionNode> nodes(5);
    for (std::uint32_t i = 0; i < 3; ++i) {
      nodes[i].kind = ExpressionNode::Kind::kOperand;
      nodes[i].operand = i;
    }
    nodes[3].kind = nodes[4].kind = ExpressionNode::Kind::kOperation;
    nodes[3].op = MapOp::kMultiply;
    nodes[3].args = {0, 1};
    nodes[4].op = MapOp::kAdd;
    nodes[4].args = {3, 2};
    for (std::size_t i = 0; i < all->size(); ++i) {
      const DType d = kAllDTypes[i];
      absl::StatusOr<MapProgram> program = CompileExpression(nodes, {d, d, d});
      if (!program.ok()) std::abort();
      (*all)[i] = *program;
    }
    return all;
  }();
  return programs[static_cast<std::size_t>(dtype) - 1];
}

}  // namespace

std::uint64_t OperandBytes(const MapProblem& p) {
  std::uint64_t bytes = 0;
  for (int i = 0; i < p.program->inputs; ++i) {
    const View& view = p.operands[static_cast<std::size_t>(i)];
    bytes += static_cast<std::uint64_t>(Distinct(view, p.n)) * SizeOf(view.dtype);
  }
  return bytes;
}

Cost OnePassCost(const MapProblem& p) {
  return {.bytes = OperandBytes(p) + static_cast<std::uint64_t>(p.n) * SizeOf(p.dtype),
          .flops = Flops(p),
          .atomics = 0,
          .depth = 1};
}

Cost PassEachCost(const MapProblem& p) {
  constexpr std::uint64_t kRegisterBytes = 8;
  std::uint64_t values = 0;  // read and written, for one element
  for (const Instruction& i : *p.program) {
    values += 1;
    if (i.kind == Instruction::Kind::kConvert) values += 1;
    if (i.kind == Instruction::Kind::kApply)
      values += static_cast<std::uint64_t>(InfoOf(i.op)->arguments);
  }
  Cost cost = OnePassCost(p);
  cost.bytes += (values + 1) * kRegisterBytes * static_cast<std::uint64_t>(p.n);
  return cost;
}

double MapRoundoff(const MapProblem& p) {
  double applied = 0, rounded = 0;
  for (const Instruction& i : *p.program) {
    if (i.kind == Instruction::Kind::kConvert) rounded = std::max(rounded, UnitRoundoff(i.dtype));
    if (i.kind != Instruction::Kind::kApply) continue;
    if (i.type == ValueType::kF32) applied = std::max(applied, Roundings(i.op) * kRoundoffF32);
    if (i.type == ValueType::kF64) applied = std::max(applied, Roundings(i.op) * kRoundoffF64);
  }
  return Then(applied, rounded);
}

MapProblem ReferenceMap(std::int64_t n) { return WarmUpMap(n, DType::kF32, nullptr, nullptr); }

MapProblem WarmUpMap(std::int64_t n, DType dtype, const void* x, void* out) {
  MapProblem p;
  p.dtype = dtype;
  p.n = n;
  p.program = &MultiplyAdd(dtype);
  for (std::size_t i = 0; i < 3; ++i) {
    View& view = p.operands[i];
    view.data = x;
    view.dtype = dtype;
    view.shape.rank = 1;
    view.shape[0] = n;
    view.strides[0] = 1;
  }
  p.out = out;
  return p;
}

}  // namespace tessera
