#include "kernels/run/execute.h"

#include "absl/strings/str_format.h"
#include "kernels/base/error.h"

namespace tessera {

absl::Status Invalid(std::string_view reason, const std::string& message,
                     std::initializer_list<std::pair<std::string_view, std::string>> metadata) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, message, metadata);
}

absl::Status DtypesDiffer(const View& a, const View& b) {
  return Invalid("BAD_DTYPE",
                 absl::StrCat("operands have dtypes ", Absl(Name(a.dtype)), " and ",
                              Absl(Name(b.dtype)), ", which must agree"),
                 {{"a", std::string(Name(a.dtype))}, {"b", std::string(Name(b.dtype))}});
}

absl::Status ShapesDiffer(std::string_view rule, const View& a, const View& b) {
  return Invalid("BAD_SHAPE",
                 absl::StrCat("operands have shapes ", ToString(a.shape), " and ",
                              ToString(b.shape), ": ", Absl(rule)),
                 {{"a", ToString(a.shape)}, {"b", ToString(b.shape)}});
}

absl::Status CheckSame(const View& a, const View& b) {
  if (a.dtype != b.dtype) return DtypesDiffer(a, b);
  if (!(a.shape == b.shape)) return ShapesDiffer("they must agree", a, b);
  return absl::OkStatus();
}

absl::Status CheckComputed(std::string_view operation, DType dtype) {
  if (IsComputed(dtype)) return absl::OkStatus();
  return Invalid(
      "BAD_DTYPE",
      absl::StrCat(Absl(operation), " does not support elements of type ", Absl(Name(dtype)),
                   "; cast them first, with CopyBuffer or in an expression of Map"),
      {{"operation", std::string(operation)}, {"dtype", std::string(Name(dtype))}});
}

std::string Names(DTypes dtypes) {
  std::vector<std::string> names;
  for (DType d : kArrayDTypes)
    if (dtypes.Contains(d)) names.emplace_back(Name(d));
  return absl::StrJoin(names, ", ");
}

absl::Status TooLong(std::string_view what, std::string_view strategy, double estimate,
                     double limit, std::string_view advice) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "OPERATION_TOO_LONG",
                   absl::StrFormat("%s is expected to take %.3g s; at most %.3g s are allowed%s",
                                   Absl(what), estimate, limit, Absl(advice)),
                   {{"strategy", std::string(strategy)},
                    {"estimate_seconds", absl::StrFormat("%.3g", estimate)},
                    {"limit_seconds", absl::StrFormat("%.3g", limit)}});
}

absl::Status CallerHasLeft() {
  return MakeError(absl::StatusCode::kCancelled, "CANCELLED",
                   "the call was cancelled while the operation ran");
}

}  // namespace tessera
