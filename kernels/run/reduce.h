// Checks and types that reductions of a whole array and reductions along axes share.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/compute.h"

namespace tessera {

absl::Status EmptyInput(ReduceOp op);
// Checks that the operation has a value for n elements of the type.
absl::Status CheckFolds(ReduceOp op, DType dtype, std::int64_t n);
// Returns the type of the number to which a whole array is reduced. ARG operations return the
// extreme value, in the operand's type.
inline DType ScalarDType(ReduceOp op, DType dtype) {
  return IsArg(op) ? dtype : ResultDType(op, dtype);
}
// Returns the type of the array that is folded.
absl::StatusOr<ArrayType> FoldedType(const View& x, const MapStage* in);

}  // namespace tessera
