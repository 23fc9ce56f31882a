// Expressions as people write them: "where(a > 0, a, b / 2)".
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "client/expression.h"

namespace tessera {

// The operators, from the weakest to the strongest, as in Python:
//
//   or   xor   and   not   == != < <= > >=   + -   * / // %   unary -   **
//
// Comparisons do not chain. The operands are a, b, ..., h, in order. Numbers, true, false, inf and
// nan are constants. Operations of MapOp are called by name, as in sqrt(a) or where(a < b, a, b),
// and an element type casts, as in f32(a). Returns INVALID_ARGUMENT / BAD_EXPRESSION {position}
// with the number of characters before the first one that cannot be read.
absl::StatusOr<Expr> ParseExpression(std::string_view text);

}  // namespace tessera
