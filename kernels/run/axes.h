#pragma once

#include <array>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/shape.h"

namespace tessera {

// Returns, for each axis of the shape, whether `axes` names it, or INVALID_ARGUMENT / BAD_AXES.
absl::StatusOr<std::array<bool, kMaxRank>> FoldedAxes(const Shape& shape,
                                                      absl::Span<const int> axes);

}  // namespace tessera
