// The command line's syntax for operands:
//
//   NAME                        a resident buffer
//   NAME[10:20, ::-1, 3]        a window of it by NumPy's basic slicing; ... stands for all axes
//                               between
//   NAME@OFFSET:SHAPE:STRIDES   a raw view in elements, x@0:540x1257:0x1; no STRIDES: without gaps;
//                               no SHAPE: a scalar
//  step:N                      the result of an earlier step of a program; of topk, the values
//  step:N.indices              the positions of those values; both with or without a raw view
//   file:PATH.npy               a small array that travels with the request
//
// This module has pure functions only: no I/O.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace tessera {

// A window into an array, in elements. No strides: row-major without gaps.
struct ViewSpec {
  std::int64_t offset = 0;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
};

// One item between the brackets.
struct Index {
  std::int64_t at;
};
struct Slice {
  std::optional<std::int64_t> start, stop, step;
};
struct Ellipsis {};
using Subscript = std::variant<Index, Slice, Ellipsis>;

struct ParsedOperand {
  enum class Kind { kBuffer, kStep, kFile };
  Kind kind = Kind::kBuffer;
  std::string name;  // of the buffer, or the file's path
  std::uint32_t step = 0;
  bool indices = false;               // means the step's indices, not its values
  std::vector<Subscript> subscripts;  // empty: the text has no brackets
  std::optional<ViewSpec> view;       // set if the text has an '@'
};

// Returns INVALID_ARGUMENT / BAD_OPERAND {operand} if the text is not an operand.
absl::StatusOr<ParsedOperand> ParseOperand(std::string_view text);

// Returns the window that the subscripts select in a row-major array of this shape. Bounds of
// slices are clipped as in Python. Returns INVALID_ARGUMENT / BAD_VIEW for an index out of range,
// more subscripts than axes, a step of 0 or two ellipses.
absl::StatusOr<ViewSpec> ResolveSubscripts(absl::Span<const Subscript> subscripts,
                                           absl::Span<const std::int64_t> shape);

// "540x1257" -> {540, 1257}; "" -> {}. Returns nullopt for anything else. Extents may be negative,
// for strides.
std::optional<std::vector<std::int64_t>> ParseExtents(std::string_view text);

}  // namespace tessera
