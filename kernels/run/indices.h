// The errors for arrays of indices: the indices of Take and the labels of SumByLabel.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/compute.h"

namespace tessera {

// `name` is the operand's name.
absl::Status CheckIndexType(std::string_view name, const View& indices);

// Returns the error of an index into an axis without elements.
absl::Status EmptyAxis(std::string_view name);

// Reads the index at this position, and returns its error.
absl::Status BadIndex(std::string_view name, Stream& stream, const View& indices,
                      std::int64_t position, std::int64_t length);

}  // namespace tessera
