// Add and Map.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/compute.h"
#include "kernels/run/execute.h"
#include "kernels/run/pieces.h"
#include "kernels/run/stage.h"

namespace tessera {

namespace {

std::string NameOfMapOperand(std::size_t i) { return absl::StrCat("operands[", i, "]"); }

// Add in pieces, for strided operands.
class AddInPieces final : public Work<AddProblem> {
 public:
  AddInPieces(const View& a, const View& b) : a_(a), b_(b) {}

  int copies() const { return HasGaps(a_) + HasGaps(b_); }
  std::int64_t most(const Stream& stream) const {
    return std::min(a_.elements(), PieceElements(stream, SizeOf(a_.dtype), copies()));
  }
  std::uint64_t CopyBytes(const Stream& stream, const Chosen&) const override {
    if (copies() == 0) return 0;
    return static_cast<std::uint64_t>(most(stream) * copies()) * SizeOf(a_.dtype);
  }
  double GatherSeconds(const Pace& pace) const override {
    return (HasGaps(a_) ? pace.EstimateCopy(a_, a_.dtype) : 0) +
           (HasGaps(b_) ? pace.EstimateCopy(b_, b_.dtype) : 0);
  }
  Division Divide(const AddProblem& problem, const Chosen& strategy,
                  const Team& team) const override {
    return copies() == 0 ? DivisionOf(problem, strategy, team) : Division();
  }
  void Launch(Stream& stream, AddProblem& problem, const Chosen& strategy) const override {
    if (copies() == 0) return LaunchOn(stream, problem, strategy);
    const std::size_t size = static_cast<std::size_t>(most(stream)) * SizeOf(a_.dtype);
    void* const a_copy = HasGaps(a_) ? stream.Scratch(size) : nullptr;
    void* const b_copy = HasGaps(b_) ? stream.Scratch(size) : nullptr;
    const auto part = [&](const View& view, void* copy, const Piece& piece) {
      const View v = piece.Of(view);
      if (copy == nullptr) return v.data;
      GatherOn(stream, v, copy);
      return static_cast<const void*>(copy);
    };
    AddProblem p = problem;
    ForPieces(a_.shape, most(stream), [&](const Piece& piece) {
      p.n = piece.shape.elements();
      p.a = part(a_, a_copy, piece);
      p.b = part(b_, b_copy, piece);
      p.out = At(problem.out, piece.first, a_.dtype);
      if (!stream.stopped()) LaunchOn(stream, p, strategy);
      return !stream.stopped();
    });
  }

 private:
  const View& a_;
  const View& b_;
};

}  // namespace

absl::StatusOr<ArrayType> AddType(const View& a, const View& b) {
  RETURN_IF_ERROR(CheckSame(a, b));
  return ArrayType{a.dtype, a.shape};
}

absl::StatusOr<Stats> RunAdd(Stream& stream, const View& a, const View& b, const Output& out,
                             const RunOptions& options) {
  absl::StatusOr<ArrayType> type = AddType(a, b);
  if (!type.ok()) return type.status();
  AddProblem problem{.dtype = a.dtype, .n = a.elements(), .a = a.data, .b = b.data};
  return ExecuteTo(out, &problem.out, stream, problem, options, AddInPieces(a, b));
}

absl::StatusOr<ArrayType> MapType(absl::Span<const View> operands, const Expression& expression) {
  ASSIGN_OR_RETURN(const MapProgram* const program, CompileFor(operands, expression));
  ASSIGN_OR_RETURN(const Shape shape, BroadcastShape(operands, NameOfMapOperand));
  MapProblem problem{.dtype = program->dtype, .program = program};
  RETURN_IF_ERROR(SetOperands(operands, shape, problem));
  return MakeArrayType(program->dtype, {shape.dims.data(), static_cast<std::size_t>(shape.rank)});
}

absl::StatusOr<Stats> RunMap(Stream& stream, absl::Span<const View> operands,
                             const Expression& expression, const Output& out,
                             const RunOptions& options) {
  ASSIGN_OR_RETURN(const ArrayType type, MapType(operands, expression));
  MapProblem problem{.dtype = type.dtype,
                     .n = type.shape.elements(),
                     .program = *CompileFor(operands, expression)};
  RETURN_IF_ERROR(SetOperands(operands, type.shape, problem));
  return ExecuteTo(out, &problem.out, stream, problem, options, WholeLaunch<MapProblem>({}));
}

}  // namespace tessera
