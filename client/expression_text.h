// Parses expressions that are written as text: "where(a > 0, a, b / 2)".
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "client/expression.h"

namespace tessera {

// The operators have the same precedence as in Python. From lowest to highest, they are:
//
//   or   xor   and   not   == != < <= > >=   + -   * / // %   unary -   **
//
// Comparisons do not chain. The operands are a, b, ..., h, in order. Numbers, true, false, inf and
// nan are constants. An integer beyond 64 bits is a floating-point constant. Operations of MapOp
// are called by name, as in sqrt(a) or where(a < b, a, b), and the name of an element type is a
// cast, as in f32(a). Returns INVALID_ARGUMENT / BAD_EXPRESSION {position}, where position is the
// number of characters before the first one that cannot be parsed.
absl::StatusOr<Expr> ParseExpression(std::string_view text);

}  // namespace tessera
