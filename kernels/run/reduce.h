// What reductions of a whole array and along axes share.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/compute.h"

namespace tessera {

absl::Status EmptyInput(ReduceOp op);
// Whether the operation has a value for so many elements of the type.
absl::Status CheckFolds(ReduceOp op, DType dtype, std::int64_t n);
// Of a whole operand's value: ARG operations give the extreme one, which is of the operand's type.
inline DType ScalarDType(ReduceOp op, DType dtype) {
  return IsArg(op) ? dtype : ResultDType(op, dtype);
}
// Whether n elements of `size` bytes are a part that begins and ends at multiples of so many elements or
// at the array's end, as metadata calls them. INVALID_ARGUMENT / BAD_PART {first, elements, UNIT_NAME}.
absl::Status CheckPart(const ArrayPart& part, std::int64_t n, std::int64_t size, std::int64_t unit,
                       std::string_view unit_name);
// Of the array that is folded.
absl::StatusOr<ArrayType> FoldedType(const View& x, const MapStage* in);

}  // namespace tessera
