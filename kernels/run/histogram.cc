// Histogram: the number of elements in each bin.

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/compute.h"
#include "kernels/run/execute.h"
#include "kernels/run/operation.h"

namespace tessera {
namespace {

bool HasIntegers(const View& x) { return IsInteger(x.dtype) || x.dtype == DType::kBool; }

absl::Status BadType(const char* operand, const char* allowed, DType dtype) {
  return OfOperand(operand, Invalid("BAD_DTYPE",
                                    absl::StrCat("these bins need ", operand, " of type ", allowed,
                                                 ", not ", Absl(Name(dtype))),
                                    {{"dtype", std::string(Name(dtype))}}));
}

absl::Status CheckCount(const char* field, std::int64_t bins, std::int64_t least) {
  if (bins >= least && bins <= kMostBins) return absl::OkStatus();
  return Invalid("BAD_BINS",
                 absl::StrCat(field, " is ", bins, "; allowed: ", least, " to ", kMostBins),
                 {{"field", field},
                  {"value", absl::StrCat(bins)},
                  {"limit", absl::StrCat(bins < least ? least : kMostBins)}});
}

// Returns the number of bins.
absl::StatusOr<std::int64_t> CountBins(const HistogramSpec& spec, absl::Span<const View> operands) {
  const View& x = operands[0];
  switch (spec.kind) {
    case BinKind::kEven: {
      RETURN_IF_ERROR(CheckCount("even.count", spec.bins, 1));
      const double width = (spec.high - spec.low) / static_cast<double>(spec.bins);
      // A subnormal width would be rounded so much that the last edges could be out of order.
      if (std::isfinite(spec.low) && std::isnormal(width) && width > 0) return spec.bins;
      return Invalid("BAD_BINS",
                     absl::StrCat("from ", spec.low, " to ", spec.high, ", ", spec.bins,
                                  " bins would not have a finite width of at least 2^-1022"),
                     {{"field", std::isfinite(spec.low) ? "even.high" : "even.low"},
                      {"value", absl::StrCat(std::isfinite(spec.low) ? spec.high : spec.low)}});
    }
    case BinKind::kIntegers:
      if (!HasIntegers(x)) return BadType("x", "bool or an integer type", x.dtype);
      RETURN_IF_ERROR(CheckCount("integers", spec.bins, 1));
      return spec.bins;
    default:
      break;
  }
  const View& edges = operands[1];
  if (edges.dtype != DType::kF64 && !(edges.dtype == DType::kI64 && HasIntegers(x)))
    return BadType("edges", HasIntegers(x) ? "f64 or i64" : "f64", edges.dtype);
  if (edges.shape.rank != 1) {
    return Invalid(
        "BAD_SHAPE",
        absl::StrCat("the edges have shape ", ToString(edges.shape), "; they need rank 1"),
        {{"x", ToString(x.shape)}, {"edges", ToString(edges.shape)}});
  }
  if (edges.elements() == 0)
    return Invalid("BAD_BINS", "there is no edge",
                   {{"field", "edges"}, {"value", "0"}, {"limit", "1"}});
  RETURN_IF_ERROR(CheckCount("edges", edges.elements() - 1, 0));
  return edges.elements() - 1;
}

}  // namespace

absl::StatusOr<ResultType> TypeOf(const HistogramSpec& spec, absl::Span<const View> operands) {
  ASSIGN_OR_RETURN(const std::int64_t bins, CountBins(spec, operands));
  ASSIGN_OR_RETURN(const ArrayType type, MakeArrayType(DType::kI64, {bins}));
  return ResultType{.arrays = {type}};
}

absl::StatusOr<ScalarResult> Run(const HistogramSpec& spec, const Arguments& with) {
  const View &x = with.x[0], &edges = with.x[spec.kind == BinKind::kEdges ? 1 : 0];
  HistogramProblem problem{.dtype = x.dtype, .kind = spec.kind, .n = x.elements()};
  ASSIGN_OR_RETURN(problem.bins, CountBins(spec, with.x));
  problem.low = spec.low;
  problem.high = spec.high;
  absl::InlinedVector<OperandSlot, 2> operands = {{x, HasGaps(x), &problem.x}};
  if (spec.kind == BinKind::kEdges) {
    problem.edge_dtype = edges.dtype;
    operands.push_back({edges, HasGaps(edges), &problem.edges});
  }
  const auto place = [&](HistogramProblem& p) -> absl::Status {
    ASSIGN_OR_RETURN(void* const counts, with.out[0].Get());
    p.counts = static_cast<std::int64_t*>(counts);
    return absl::OkStatus();
  };
  return ArrayRun(Execute<HistogramProblem>(with.stream, problem, with.options, place,
                                            WholeLaunch<HistogramProblem>(operands)));
}

}  // namespace tessera
