// Expressions as people write them: "where(a > 0, a, b / 2)".
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "client/expression.h"

namespace tessera {

// From the weakest operator to the strongest, as in Python:
//
//   or   xor   and   not   == != < <= > >=   + -   * / // %   unary -   **
//
// Comparisons do not chain. a, b, ..., h are the operands in their order; numbers, true, false, inf
// and nan are constants; operations of MapOp are called by name, as in sqrt(a) or where(a < b, a,
// b), and an element type casts, as in f32(a). INVALID_ARGUMENT / BAD_EXPRESSION {position}: the
// number of characters before what cannot be read.
absl::StatusOr<Expr> ParseExpression(std::string_view text);

}  // namespace tessera
