#include "client/slice.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

using absl::string_view;
using Parts = std::vector<string_view>;

std::optional<std::int64_t> ParseInteger(string_view text) {
  std::int64_t value = 0;
  return absl::SimpleAtoi(text, &value) ? std::optional(value) : std::nullopt;
}

absl::Status BadOperand(string_view operand, string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPERAND",
                   absl::StrCat("operand '", operand, "': ", what),
                   {{"operand", std::string(operand)}});
}

absl::Status BadView(std::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_VIEW", what);
}

std::optional<Subscript> ParseSubscript(string_view text) {
  text = absl::StripAsciiWhitespace(text);
  if (text == "...") return Ellipsis{};
  const Parts parts = absl::StrSplit(text, ':');
  if (parts.size() == 1) {
    const std::optional<std::int64_t> at = ParseInteger(text);
    if (!at) return std::nullopt;
    return Index{*at};
  }
  if (parts.size() > 3) return std::nullopt;
  Slice slice;
  std::optional<std::int64_t>* const bounds[] = {&slice.start, &slice.stop, &slice.step};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (absl::StripAsciiWhitespace(parts[i]).empty()) continue;
    *bounds[i] = ParseInteger(parts[i]);
    if (!*bounds[i]) return std::nullopt;
  }
  return slice;
}

// The elements of an axis that a slice selects, by the rules of Python's slice.indices().
struct Range {
  std::int64_t start;
  std::int64_t count;
  std::int64_t step;
};

Range Indices(const Slice& slice, std::int64_t extent) {
  // Every step longer than the axis selects one element. The clamp keeps the sums below from
  // overflowing.
  const std::int64_t step =
      std::clamp<std::int64_t>(slice.step.value_or(1), -extent - 1, extent + 1);
  // With a negative step, the lower end is one before index 0.
  const std::int64_t low = step > 0 ? 0 : -1;
  const std::int64_t high = step > 0 ? extent : extent - 1;
  const auto clip = [&](std::int64_t bound) {
    return std::clamp(bound < 0 ? bound + extent : bound, low, high);
  };
  const std::int64_t start = slice.start ? clip(*slice.start) : (step > 0 ? low : high);
  const std::int64_t stop = slice.stop ? clip(*slice.stop) : (step > 0 ? high : low);
  const std::int64_t distance = step > 0 ? stop - start : start - stop;
  const std::int64_t stride = step > 0 ? step : -step;
  return {start, distance > 0 ? (distance + stride - 1) / stride : 0, step};
}

}  // namespace

std::optional<std::vector<std::int64_t>> ParseExtents(std::string_view text) {
  std::vector<std::int64_t> extents;
  if (absl::StripAsciiWhitespace(Absl(text)).empty()) return extents;
  for (const string_view part : absl::StrSplit(Absl(text), 'x')) {
    const std::optional<std::int64_t> extent = ParseInteger(part);
    if (!extent) return std::nullopt;
    extents.push_back(*extent);
  }
  return extents;
}

absl::StatusOr<ParsedOperand> ParseOperand(std::string_view operand_text) {
  const string_view text = Absl(operand_text);
  ParsedOperand operand;
  if (string_view path = text; absl::ConsumePrefix(&path, "file:")) {
    operand.kind = ParsedOperand::Kind::kFile;
    operand.name = std::string(path);
    if (path.empty()) return BadOperand(text, "the path after 'file:' is missing");
    return operand;
  }
  const std::size_t end = std::min(text.find_first_of("[@"), text.size());
  string_view name = absl::StripAsciiWhitespace(text.substr(0, end));
  operand.name = std::string(name);
  if (name.empty()) return BadOperand(text, "the buffer name is missing");
  if (absl::ConsumePrefix(&name, "step:")) {
    operand.kind = ParsedOperand::Kind::kStep;
    operand.indices = absl::ConsumeSuffix(&name, ".indices");
    if (!absl::SimpleAtoi(name, &operand.step))
      return BadOperand(text, "the step's number is not valid");
    if (end < text.size() && text[end] == '[') {
      return BadOperand(text, "the shape of a step's result is not known here; use a raw view");
    }
  }
  if (end == text.size()) return operand;

  if (text[end] == '[') {
    string_view inside = absl::StripAsciiWhitespace(text.substr(end + 1));
    if (!absl::ConsumeSuffix(&inside, "]"))
      return BadOperand(text, "the ']' at the end is missing");
    inside = absl::StripAsciiWhitespace(inside);
    absl::ConsumeSuffix(&inside, ",");
    for (const string_view part : absl::StrSplit(inside, ',')) {
      const std::optional<Subscript> subscript = ParseSubscript(part);
      if (!subscript) {
        return BadOperand(text, absl::StrCat("'", absl::StripAsciiWhitespace(part),
                                             "' is not an index, start:stop:step or ..."));
      }
      operand.subscripts.push_back(*subscript);
    }
    return operand;
  }

  const Parts parts = absl::StrSplit(text.substr(end + 1), ':');
  const std::optional<std::int64_t> offset = ParseInteger(parts[0]);
  const auto extents = [&](std::size_t i) {
    return ParseExtents(i < parts.size() ? std::string(parts[i]) : std::string());
  };
  const auto shape = extents(1);
  const auto strides = extents(2);
  if (parts.size() > 3 || !offset || !shape || !strides) {
    return BadOperand(text, "a raw view is NAME@OFFSET:SHAPE:STRIDES, as in x@0:540x1257:0x1");
  }
  operand.view = ViewSpec{*offset, *shape, *strides};
  return operand;
}

absl::StatusOr<ViewSpec> ResolveSubscripts(absl::Span<const Subscript> subscripts,
                                           absl::Span<const std::int64_t> shape) {
  std::size_t named = 0;
  std::size_t ellipses = 0;
  for (const Subscript& subscript : subscripts) {
    ++(std::holds_alternative<Ellipsis>(subscript) ? ellipses : named);
  }
  if (ellipses > 1) return BadView("'...' occurs more than once");
  if (named > shape.size()) {
    return BadView(
        absl::StrCat(named, " subscripts are too many for an array of ", shape.size(), " axes"));
  }

  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];

  ViewSpec view;
  std::size_t axis = 0;
  const auto keep = [&](const Range& range) {
    // An empty slice reads nothing and may start one past the end, so the offset stays unchanged.
    if (range.count > 0) view.offset += range.start * strides[axis];
    view.shape.push_back(range.count);
    view.strides.push_back(range.step * strides[axis]);
    ++axis;
  };
  const auto keep_all = [&](std::size_t end) {
    while (axis < end) keep({0, shape[axis], 1});
  };
  for (const Subscript& subscript : subscripts) {
    if (std::holds_alternative<Ellipsis>(subscript)) {
      keep_all(axis + shape.size() - named);
    } else if (const Index* index = std::get_if<Index>(&subscript)) {
      const std::int64_t at = index->at < 0 ? index->at + shape[axis] : index->at;
      if (at < 0 || at >= shape[axis]) {
        return BadView(absl::StrCat("index ", index->at, " is out of range for axis ", axis,
                                    " of extent ", shape[axis]));
      }
      view.offset += at * strides[axis++];
    } else {
      const Slice& slice = std::get<Slice>(subscript);
      if (slice.step == 0) return BadView("a slice has step 0");
      keep(Indices(slice, shape[axis]));
    }
  }
  keep_all(shape.size());
  if (std::count(view.shape.begin(), view.shape.end(), 0) > 0) view.offset = 0;
  return view;
}

}  // namespace tessera
