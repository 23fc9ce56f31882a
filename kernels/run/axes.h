#pragma once

#include <array>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/shape.h"

namespace tessera {

// Returns which axes of the shape are named. INVALID_ARGUMENT / BAD_AXES.
absl::StatusOr<std::array<bool, kMaxRank>> FoldedAxes(const Shape& shape,
                                                      absl::Span<const int> axes);

}  // namespace tessera
