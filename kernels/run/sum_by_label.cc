// SumByLabel: the sums of rows that have the same label.

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/compute.h"
#include "kernels/run/execute.h"
#include "kernels/run/indices.h"
#include "kernels/run/operation.h"

namespace tessera {

absl::StatusOr<ResultType> TypeOf(const SumByLabelSpec& spec, absl::Span<const View> operands) {
  const View &x = operands[0], &labels = operands[1];
  RETURN_IF_ERROR(CheckIndexType("labels", labels));
  if (x.shape.rank == 0 || labels.shape.rank != 1 || labels.shape[0] != x.shape[0]) {
    return Invalid(
        "BAD_SHAPE",
        absl::StrCat("x has shape ", ToString(x.shape), " and labels ", ToString(labels.shape),
                     ": labels need rank 1, with a label for each row of x"),
        {{"x", ToString(x.shape)}, {"labels", ToString(labels.shape)}});
  }
  if (spec.length < 0) {
    return Invalid("BAD_SHAPE", absl::StrCat("length is ", spec.length, ", which is negative"),
                   {{"field", "length"}, {"value", absl::StrCat(spec.length)}, {"limit", "0"}});
  }
  std::vector<std::int64_t> shape(x.shape.dims.begin(), x.shape.dims.begin() + x.shape.rank);
  shape[0] = spec.length;
  ASSIGN_OR_RETURN(const ArrayType type,
                   MakeArrayType(ResultDType(ReduceOp::kSum, x.dtype), shape));
  if (spec.length == 0 && x.elements() > 0) return EmptyAxis("labels");
  return ResultType{.arrays = {type}};
}

absl::StatusOr<ScalarResult> Run(const SumByLabelSpec& spec, const Arguments& with) {
  const View &x = with.x[0], &labels = with.x[1];
  Stream& stream = with.stream;
  SumByLabelProblem problem{.dtype = x.dtype,
                            .label_dtype = labels.dtype,
                            .mode = spec.mode,
                            .n = labels.elements(),
                            .length = spec.length};
  for (int i = 1; i < x.shape.rank; ++i) problem.inner *= x.shape[i];
  const OperandSlot operands[] = {{x, HasGaps(x), &problem.x},
                                  {labels, HasGaps(labels), &problem.labels}};
  RunOptions options = with.options;
  const bool checks = spec.mode == TakeMode::kError && problem.elements() > 0;
  options.enqueue_only &= !checks;  // the position of a bad label is read immediately
  const auto place = [&](SumByLabelProblem& p) -> absl::Status {
    ASSIGN_OR_RETURN(p.out, with.out[0].Get());
    p.result = stream.result();
    return absl::OkStatus();
  };
  ASSIGN_OR_RETURN(const Stats stats,
                   Execute<SumByLabelProblem>(stream, problem, options, place,
                                              WholeLaunch<SumByLabelProblem>(operands)));
  if (checks && !options.check_only && problem.result->index >= 0)
    return BadIndex("labels", stream, labels, problem.result->index, problem.length);
  return ScalarResult{.stats = stats};
}

}  // namespace tessera
