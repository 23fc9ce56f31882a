// Converts the operands of a matrix product to the form that strategies need.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/problem/strategy.h"

namespace tessera {

// A matrix as strategies need it: with rows or columns that have no gaps inside, and any pitch.
struct MatrixOperand {
  std::int64_t pitch = 0;
  bool transpose = false;
  bool gather = false;
};

// Returns the matrix that the last two axes form.
inline MatrixOperand MakeMatrixOperand(const View& view, bool transpose) {
  const int last = view.shape.rank - 1;
  const std::int64_t rows = view.shape[last - 1], columns = view.shape[last];
  const std::int64_t row_stride = view.strides[static_cast<std::size_t>(last) - 1],
                     column_stride = view.strides[static_cast<std::size_t>(last)];
  const std::int64_t least_pitch = std::max<std::int64_t>(1, columns);
  MatrixOperand operand{least_pitch, transpose, false};
  if ((columns <= 1 || column_stride == 1) && (rows <= 1 || row_stride >= least_pitch)) {
    if (rows > 1) operand.pitch = row_stride;
  } else if ((rows <= 1 || row_stride == 1) &&
             (columns <= 1 || column_stride >= std::max<std::int64_t>(1, rows))) {
    // Each column is contiguous, so the stored matrix is the transpose of this one.
    operand.pitch = columns > 1 ? column_stride : std::max<std::int64_t>(1, rows);
    operand.transpose = !transpose;
  } else {
    operand.gather = true;
  }
  return operand;
}

}  // namespace tessera
