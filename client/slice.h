// Views of arrays, in C++:
//
//   const tessera::ArrayView x(*client.Upload("x", values, {100, 8}));
//   client.Matmul(x.Slice(0, 0, 50), x.Slice(1, -4).Transpose());  // x[:50] and x[:, -4:].T
//   client.Reduce(tessera::ReduceOp::kSum, x.Select("::-1, 3"));   // x[::-1, 3]
//
// and in the command line's syntax for operands:
//
//   NAME                        a resident buffer
//   NAME[10:20, ::-1, 3]        a window of a buffer by NumPy's basic slicing; ... stands for all
//                               axes in between
//   NAME@OFFSET:SHAPE:STRIDES   a raw view in elements, such as x@0:540x1257:0x1; row-major without
//                               gaps if STRIDES is omitted, and a scalar if SHAPE is omitted, too
//   step:N                      the result of an earlier step of a program; for topk, the values
//   step:N.indices              the positions of those values; a raw view may follow either form
//   file:PATH.npy               a small array that travels with the request
//
// Nothing here does I/O.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/operations.h"
#include "tessera/v1/buffer.pb.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// A window into an array, in elements. Empty strides mean row-major order without gaps.
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
  std::string name;  // the buffer's name, or the file's path
  std::uint32_t step = 0;
  bool indices = false;               // whether the step's indices are meant, not its values
  std::vector<Subscript> subscripts;  // empty if the text has no brackets
  std::optional<ViewSpec> view;       // set if the text has an '@'
};

// Returns INVALID_ARGUMENT / BAD_OPERAND {operand} if the text is not an operand.
absl::StatusOr<ParsedOperand> ParseOperand(std::string_view text);

// Returns the window that the subscripts select in a row-major array of this shape. Slice bounds
// are clipped as in Python. Returns INVALID_ARGUMENT / BAD_VIEW for an index out of range, more
// subscripts than axes, a step of 0 or two ellipses.
absl::StatusOr<ViewSpec> ResolveSubscripts(absl::Span<const Subscript> subscripts,
                                           absl::Span<const std::int64_t> shape);

// A view of an array, which is sent as an operand. Views of views are possible. If an argument is
// wrong, the calls that use the view fail with INVALID_ARGUMENT / BAD_VIEW, before anything is
// sent. Negative axes count from the last one.
class ArrayView {
 public:
  // A view of all of this version of a buffer, or of an inline array.
  explicit ArrayView(const v1::Buffer& buffer);
  explicit ArrayView(v1::Tensor tensor);

  // Keeps the elements that Python's slice(begin, end, step) selects along an axis.
  ArrayView Slice(int axis, std::optional<std::int64_t> begin,
                  std::optional<std::int64_t> end = std::nullopt,
                  std::optional<std::int64_t> step = std::nullopt) const;
  // Keeps the elements with this index along an axis, and drops the axis.
  ArrayView At(int axis, std::int64_t index) const;
  // Puts the axes into this order; without axes, reverses them.
  ArrayView Transpose(std::vector<int> axes = {}) const;
  // Selects elements by subscripts, as in Select("1:3, ..., ::-1").
  ArrayView Select(std::string_view subscripts) const;

  absl::Span<const std::int64_t> shape() const { return spec_.shape; }
  operator Operand() const;  // NOLINT(google-explicit-constructor)

 private:
  // Returns a copy that `edit` has changed. edit(ViewSpec&) returns why it cannot, or OK.
  template <class F>
  ArrayView Edited(const F& edit) const;

  Operand operand_;
  ViewSpec spec_;  // with strides
};

// Parses "540x1257" as {540, 1257} and "" as {}. Returns nullopt for anything else. Extents may be
// negative, because strides are parsed as well.
std::optional<std::vector<std::int64_t>> ParseExtents(std::string_view text);

}  // namespace tessera
