// Linalg: decompositions of matrices, inverses and solutions of linear equations.

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/compute.h"
#include "kernels/problem/linalg.h"
#include "kernels/run/execute.h"
#include "kernels/run/operation.h"
#include "kernels/run/stage.h"

namespace tessera {
namespace {

absl::Status BadShape(std::string_view what, absl::Span<const View> operands) {
  const View& x = operands[0];
  std::string shapes = absl::StrCat("x has shape ", ToString(x.shape));
  std::string b;
  if (operands.size() > 1) {
    b = ToString(operands[1].shape);
    absl::StrAppend(&shapes, " and b ", b);
  }
  return Invalid("BAD_SHAPE", absl::StrCat(shapes, ": ", Absl(what)),
                 {{"x", ToString(x.shape)}, {"b", b}});
}

// Returns the axes before the rows and columns. REQUIRES: the view has at least two axes.
View Leading(View view) {
  view.shape.rank -= 2;
  return view;
}

// Returns the extents of the stack.
absl::StatusOr<Shape> StackOf(absl::Span<const View> operands) {
  const std::array<View, 2> leading = {Leading(operands[0]),
                                       Leading(operands[operands.size() - 1])};
  return BroadcastShape(leading, [](std::size_t i) { return std::string(i == 0 ? "x" : "b"); });
}

// Returns the problem without the addresses of the operands. REQUIRES: the operands have at least
// two axes, and as many as the function needs.
LinalgProblem ProblemOf(const LinalgSpec& spec, absl::Span<const View> operands,
                        const Shape& stack) {
  const View &x = operands[0], &last = operands[operands.size() - 1];
  LinalgProblem problem{.dtype = x.dtype,
                        .function = spec.function,
                        .stack = stack.elements(),
                        .m = x.shape[x.shape.rank - 2],
                        .n = x.shape[x.shape.rank - 1]};
  if (operands.size() > 1) problem.columns = last.shape[last.shape.rank - 1];
  return problem;
}

// Returns all matrices of a stack to which the operand is broadcast.
View InStack(const View& operand, Shape stack) {
  for (int i = 2; i > 0; --i) stack[stack.rank++] = operand.shape[operand.shape.rank - i];
  return Broadcast(operand, stack);
}

}  // namespace

absl::StatusOr<ResultType> TypeOf(const LinalgSpec& spec, absl::Span<const View> operands) {
  const View& x = operands[0];
  const bool solves = spec.function == LinalgFunction::kSolve;
  if (solves != (operands.size() > 1)) {
    return Invalid("BAD_OPERAND",
                   solves ? "solve needs right sides, b" : "only solve has right sides, b",
                   {{"operand", "b"}});
  }
  const View& b = operands[operands.size() - 1];
  if (b.dtype != x.dtype) return DtypesDiffer(x, b);
  if (x.dtype != DType::kF32 && x.dtype != DType::kF64) {
    return Invalid("BAD_DTYPE", absl::StrCat("linalg needs f32 or f64, not ", Absl(Name(x.dtype))),
                   {{"dtype", std::string(Name(x.dtype))}});
  }
  if (x.shape.rank < 2 || b.shape.rank < 2) return BadShape("a matrix has two axes", operands);
  const std::int64_t m = x.shape[x.shape.rank - 2], n = x.shape[x.shape.rank - 1];
  const bool square = spec.function != LinalgFunction::kQr && spec.function != LinalgFunction::kSvd;
  if (square && m != n) return BadShape("the matrix must be square", operands);
  if (b.shape[b.shape.rank - 2] != m) return BadShape("b must have as many rows as x", operands);
  const std::int64_t columns = b.shape[b.shape.rank - 1];
  if (std::max(m, n) > kMostLinalgExtent || (solves && columns > kMostRightSides)) {
    return BadShape(absl::StrCat("at most ", kMostLinalgExtent, " rows and columns and ",
                                 kMostRightSides, " right sides are allowed"),
                    operands);
  }
  const absl::StatusOr<Shape> stack = StackOf(operands);
  if (!stack.ok())
    return BadShape("the leading extents must agree, or one of them must be 1", operands);
  Shape shape = *stack;
  const LinalgProblem problem = ProblemOf(spec, operands, shape);
  if (shape.rank + 2 > kMaxRank) return BadShape("there are too many axes", operands);
  if (spec.function != LinalgFunction::kDeterminant) shape[shape.rank++] = problem.out_rows();
  shape[shape.rank++] = problem.out_columns();
  ASSIGN_OR_RETURN(
      const ArrayType type,
      MakeArrayType(x.dtype, {shape.dims.data(), static_cast<std::size_t>(shape.rank)}));
  return ResultType{.arrays = {type}};
}

absl::StatusOr<ScalarResult> Run(const LinalgSpec& spec, const Arguments& with) {
  ASSIGN_OR_RETURN(const Shape stack, StackOf(with.x));
  LinalgProblem problem = ProblemOf(spec, with.x, stack);
  const View x = InStack(with.x[0], stack), b = InStack(with.x[with.x.size() - 1], stack);
  const std::array<OperandSlot, 2> operands = {OperandSlot{x, HasGaps(x), &problem.x},
                                               OperandSlot{b, HasGaps(b), &problem.b}};
  RunOptions options = with.options;
  const bool checks = problem.elements() > 0;
  options.enqueue_only &= !checks;  // the position of a bad matrix is read immediately
  const auto place = [&](LinalgProblem& p) -> absl::Status {
    ASSIGN_OR_RETURN(p.out, with.out[0].Get());
    p.result = with.stream.result();
    return absl::OkStatus();
  };
  ASSIGN_OR_RETURN(const Stats stats,
                   Execute<LinalgProblem>(with.stream, problem, options, place,
                                          WholeLaunch<LinalgProblem>(
                                              absl::MakeConstSpan(operands).first(with.x.size()))));
  if (checks && !options.check_only && problem.result->index >= 0) {
    const std::int64_t position = problem.result->index;
    return Invalid(
        "BAD_MATRIX",
        absl::StrCat(
            "x has no ", Absl(Name(spec.function)), ": matrix ", position,
            spec.function == LinalgFunction::kCholesky ? " is not positive definite"
            : spec.function == LinalgFunction::kEigh || spec.function == LinalgFunction::kSvd
                ? " has values that are not finite, or did not converge"
                : " is singular"),
        {{"position", absl::StrCat(position)}});
  }
  return ScalarResult{.stats = stats};
}

}  // namespace tessera
