// SearchSorted: the positions of keys in a sorted vector.

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/compute.h"
#include "kernels/run/execute.h"
#include "kernels/run/operation.h"

namespace tessera {

absl::StatusOr<ResultType> TypeOf(const SearchSortedSpec&, absl::Span<const View> operands) {
  const View &x = operands[0], &keys = operands[1];
  if (x.dtype != keys.dtype) return DtypesDiffer(x, keys);
  if (x.shape.rank != 1) {
    return Invalid("BAD_SHAPE",
                   absl::StrCat("x has shape ", ToString(x.shape), "; a sorted vector has rank 1"),
                   {{"x", ToString(x.shape)}, {"keys", ToString(keys.shape)}});
  }
  ASSIGN_OR_RETURN(const ArrayType type,
                   MakeArrayType(DType::kI64, {keys.shape.dims.data(),
                                               static_cast<std::size_t>(keys.shape.rank)}));
  return ResultType{.arrays = {type}};
}

absl::StatusOr<ScalarResult> Run(const SearchSortedSpec& spec, const Arguments& with) {
  const View &x = with.x[0], &keys = with.x[1];
  SearchSortedProblem problem{
      .dtype = x.dtype, .right = spec.right, .length = x.elements(), .n = keys.elements()};
  const OperandSlot operands[] = {{x, HasGaps(x), &problem.x},
                                  {keys, HasGaps(keys), &problem.keys}};
  const auto place = [&](SearchSortedProblem& p) -> absl::Status {
    ASSIGN_OR_RETURN(void* const out, with.out[0].Get());
    p.out = static_cast<std::int64_t*>(out);
    return absl::OkStatus();
  };
  return ArrayRun(Execute<SearchSortedProblem>(with.stream, problem, with.options, place,
                                               WholeLaunch<SearchSortedProblem>(operands)));
}

}  // namespace tessera
