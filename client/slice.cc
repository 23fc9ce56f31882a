#include "client/slice.h"

#include <algorithm>
#include <charconv>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

std::string_view Trim(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

std::optional<std::int64_t> ParseInteger(std::string_view text) {
  text = Trim(text);
  if (!text.empty() && text.front() == '+') text.remove_prefix(1);
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end) return std::nullopt;
  return value;
}

// Splits the text at every separator. "" yields one empty part.
std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t end; (end = text.find(separator)) != std::string_view::npos;) {
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  parts.push_back(text);
  return parts;
}

absl::Status BadOperand(std::string_view operand, std::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPERAND",
                   absl::StrCat("operand '", Absl(operand), "': ", Absl(what)),
                   {{"operand", std::string(operand)}});
}

absl::Status BadView(std::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_VIEW", what);
}

std::optional<Subscript> ParseSubscript(std::string_view text) {
  text = Trim(text);
  if (text == "...") return Ellipsis{};
  const std::vector<std::string_view> parts = Split(text, ':');
  if (parts.size() == 1) {
    const std::optional<std::int64_t> at = ParseInteger(text);
    if (!at) return std::nullopt;
    return Index{*at};
  }
  if (parts.size() > 3) return std::nullopt;
  Slice slice;
  std::optional<std::int64_t>* const bounds[] = {&slice.start, &slice.stop, &slice.step};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (Trim(parts[i]).empty()) continue;
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
  if (Trim(text).empty()) return extents;
  for (std::string_view part : Split(text, 'x')) {
    const std::optional<std::int64_t> extent = ParseInteger(part);
    if (!extent) return std::nullopt;
    extents.push_back(*extent);
  }
  return extents;
}

absl::StatusOr<ParsedOperand> ParseOperand(std::string_view text) {
  constexpr std::string_view kFile = "file:", kStep = "step:", kIndices = ".indices";
  ParsedOperand operand;
  if (text.substr(0, kFile.size()) == kFile) {
    operand.kind = ParsedOperand::Kind::kFile;
    operand.name = std::string(text.substr(kFile.size()));
    if (operand.name.empty()) return BadOperand(text, "no path after 'file:'");
    return operand;
  }
  const std::size_t end = std::min(text.find_first_of("[@"), text.size());
  operand.name = std::string(Trim(text.substr(0, end)));
  if (operand.name.empty()) return BadOperand(text, "no buffer name");
  if (std::string_view(operand.name).substr(0, kStep.size()) == kStep) {
    std::string_view number = std::string_view(operand.name).substr(kStep.size());
    operand.indices = number.size() > kIndices.size() &&
                      number.substr(number.size() - kIndices.size()) == kIndices;
    if (operand.indices) number.remove_suffix(kIndices.size());
    const auto step = ParseInteger(number);
    if (!step || *step < 0 || *step > UINT32_MAX)
      return BadOperand(text, "the step has no valid number");
    operand.kind = ParsedOperand::Kind::kStep;
    operand.step = static_cast<std::uint32_t>(*step);
    if (end < text.size() && text[end] == '[') {
      return BadOperand(text, "the shape of a step's result is not known here: use a raw view");
    }
  }
  if (end == text.size()) return operand;

  if (text[end] == '[') {
    std::string_view inside = Trim(text.substr(end + 1));
    if (inside.empty() || inside.back() != ']') return BadOperand(text, "no ']' at the end");
    inside = Trim(inside.substr(0, inside.size() - 1));
    if (!inside.empty() && inside.back() == ',') inside.remove_suffix(1);
    for (std::string_view part : Split(inside, ',')) {
      const std::optional<Subscript> subscript = ParseSubscript(part);
      if (!subscript) {
        return BadOperand(
            text, absl::StrCat("'", Absl(Trim(part)), "' is not an index, start:stop:step or ..."));
      }
      operand.subscripts.push_back(*subscript);
    }
    return operand;
  }

  const std::vector<std::string_view> parts = Split(text.substr(end + 1), ':');
  const std::optional<std::int64_t> offset = ParseInteger(parts[0]);
  const auto extents = [&](std::size_t i) {
    return ParseExtents(i < parts.size() ? parts[i] : std::string_view());
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
  if (ellipses > 1) return BadView("more than one '...'");
  if (named > shape.size()) {
    return BadView(absl::StrCat(named, " subscripts for an array of ", shape.size(), " axes"));
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
