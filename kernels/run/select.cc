// Select: the elements of an array where a mask is true, and their positions.

#include <string>
#include <variant>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/compute.h"
#include "kernels/run/execute.h"
#include "kernels/run/operation.h"

namespace tessera {

absl::StatusOr<ResultType> TypeOf(const SelectSpec& spec, absl::Span<const View> operands) {
  const View &x = operands[0], &mask = operands[1];
  if (mask.dtype != DType::kBool) {
    return OfOperand(
        "mask", Invalid("BAD_DTYPE",
                        absl::StrCat("a mask must be of type bool, not ", Absl(Name(mask.dtype))),
                        {{"dtype", std::string(Name(mask.dtype))}}));
  }
  if (!(x.shape == mask.shape)) {
    return Invalid("BAD_SHAPE",
                   absl::StrCat("x has shape ", ToString(x.shape), " and the mask ",
                                ToString(mask.shape), "; they must agree"),
                   {{"x", ToString(x.shape)}, {"mask", ToString(mask.shape)}});
  }
  const std::int64_t count = spec.count.value_or(mask.elements());
  ASSIGN_OR_RETURN(const ArrayType values, MakeArrayType(x.dtype, {count}));
  ASSIGN_OR_RETURN(const ArrayType indices, MakeArrayType(DType::kI64, {count}));
  return ResultType{.uncounted = !spec.count.has_value(), .arrays = {values, indices}};
}

namespace {

// Returns the expected time of a count. The estimate is the time of a copy, which reads the mask in
// the same way and also writes it.
double CountSeconds(const View& mask, const RunOptions& options) {
  return options.pace == nullptr ? 0 : options.pace->EstimateCopy(mask, mask.dtype);
}

}  // namespace

// Any byte but 0 selects an element, as in the strategies, which write as many elements as are
// counted here.
absl::Status CountResults(OperationSpec& spec, Stream& stream, absl::Span<const View> x,
                          const RunOptions& options) {
  auto* const select = std::get_if<SelectSpec>(&spec);
  if (select == nullptr) return absl::OkStatus();
  const View& mask = x[1];
  const double estimate = CountSeconds(mask, options);
  if (estimate > options.max_seconds) {
    options.pace->ForgetCopy(mask, mask.dtype);
    return TooLong("the count of the mask", "", estimate, options.max_seconds, "");
  }
  stream.Expect(estimate);
  RETURN_IF_ERROR(Finished(stream, [&] {
    const ProfilerRange range("count");
    stream.Count(mask);
  }));
  select->count = stream.result()->integer;
  return absl::OkStatus();
}

absl::StatusOr<ScalarResult> Run(const SelectSpec& spec, const Arguments& with) {
  const View &x = with.x[0], &mask = with.x[1];
  SelectProblem problem{.dtype = x.dtype,
                        .wants_values = spec.values,
                        .wants_indices = spec.indices,
                        .n = mask.elements(),
                        .count = spec.count.value_or(mask.elements())};
  const OperandSlot operands[] = {{x, spec.values && HasGaps(x), &problem.x},
                                  {mask, HasGaps(mask), &problem.mask}};
  const auto place = [&](SelectProblem& p) -> absl::Status {
    if (spec.values) {
      ASSIGN_OR_RETURN(p.values, with.out[0].Get());
    }
    if (spec.indices) {
      ASSIGN_OR_RETURN(void* const indices, with.out[1].Get());
      p.indices = static_cast<std::int64_t*>(indices);
    }
    return absl::OkStatus();
  };
  ASSIGN_OR_RETURN(Stats stats, Execute<SelectProblem>(with.stream, problem, with.options, place,
                                                       WholeLaunch<SelectProblem>(operands)));
  if (!spec.count.has_value()) stats.estimate_seconds += CountSeconds(mask, with.options);
  return ArrayRun(stats);
}

}  // namespace tessera
