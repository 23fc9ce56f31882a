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

ViewSpec RowMajor(absl::Span<const std::int64_t> shape) {
  ViewSpec view = {0, {shape.begin(), shape.end()}, std::vector<std::int64_t>(shape.size(), 1)};
  for (std::size_t i = shape.size(); i-- > 1;) view.strides[i - 1] = view.strides[i] * shape[i];
  return view;
}

// Changes a negative axis to the axis that it means.
absl::Status FindAxis(const ViewSpec& view, int& axis) {
  const int rank = static_cast<int>(view.shape.size());
  if (axis >= -rank && axis < rank) {
    axis += axis < 0 ? rank : 0;
    return absl::OkStatus();
  }
  return BadView(absl::StrCat("there is no axis ", axis, " in an array of ", rank, " axes"));
}

// Keeps the elements with this index along an axis, and drops the axis.
absl::Status Keep(ViewSpec& view, int axis, Index index) {
  if (absl::Status status = FindAxis(view, axis); !status.ok()) return status;
  const std::int64_t extent = view.shape[static_cast<std::size_t>(axis)];
  const std::int64_t at = index.at < 0 ? index.at + extent : index.at;
  if (at < 0 || at >= extent) {
    return BadView(absl::StrCat("index ", index.at, " is out of range for axis ", axis,
                                " of extent ", extent));
  }
  view.offset += at * view.strides[static_cast<std::size_t>(axis)];
  view.shape.erase(view.shape.begin() + axis);
  view.strides.erase(view.strides.begin() + axis);
  return absl::OkStatus();
}

// Keeps the elements of a slice along an axis, by the rules of Python's slice.indices().
absl::Status Keep(ViewSpec& view, int axis, const Slice& slice) {
  if (absl::Status status = FindAxis(view, axis); !status.ok()) return status;
  if (slice.step == 0) return BadView("a slice has step 0");
  std::int64_t& extent = view.shape[static_cast<std::size_t>(axis)];
  std::int64_t& stride = view.strides[static_cast<std::size_t>(axis)];
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
  const std::int64_t length = step > 0 ? step : -step;
  extent = distance > 0 ? (distance + length - 1) / length : 0;
  // An empty slice reads nothing and may start one past the end.
  if (extent > 0) view.offset += start * stride;
  stride *= step;
  return absl::OkStatus();
}

// Applies subscripts to a view with strides.
absl::Status Apply(absl::Span<const Subscript> subscripts, ViewSpec& view) {
  std::size_t named = 0;
  std::size_t ellipses = 0;
  for (const Subscript& subscript : subscripts) {
    ++(std::holds_alternative<Ellipsis>(subscript) ? ellipses : named);
  }
  if (ellipses > 1) return BadView("'...' occurs more than once");
  const std::size_t rank = view.shape.size();
  if (named > rank)
    return BadView(absl::StrCat(named, " subscripts are too many for an array of ", rank, " axes"));
  int axis = 0;
  for (const Subscript& subscript : subscripts) {
    absl::Status status;
    if (const Index* index = std::get_if<Index>(&subscript)) {
      status = Keep(view, axis, *index);
    } else if (const Slice* slice = std::get_if<Slice>(&subscript)) {
      status = Keep(view, axis++, *slice);
    } else {
      axis += static_cast<int>(rank - named);
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
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
  ViewSpec view = RowMajor(shape);
  if (absl::Status status = Apply(subscripts, view); !status.ok()) return status;
  if (std::count(view.shape.begin(), view.shape.end(), 0) > 0) view.offset = 0;
  return view;
}

// --- ArrayView -----------------------------------------------------------------------------------

ArrayView::ArrayView(const v1::Buffer& buffer)
    : operand_(buffer.name()), spec_(RowMajor(buffer.shape())) {
  operand_.version = buffer.version();
}

ArrayView::ArrayView(v1::Tensor tensor)
    : operand_(std::move(tensor)), spec_(RowMajor(std::get<v1::Tensor>(operand_.source).shape())) {}

template <class F>
ArrayView ArrayView::Edited(const F& edit) const {
  ArrayView view = *this;
  view.operand_.refused.Update(edit(view.spec_));
  return view;
}

ArrayView ArrayView::Slice(int axis, std::optional<std::int64_t> begin,
                           std::optional<std::int64_t> end,
                           std::optional<std::int64_t> step) const {
  return Edited([&](ViewSpec& spec) { return Keep(spec, axis, tessera::Slice{begin, end, step}); });
}

ArrayView ArrayView::At(int axis, std::int64_t index) const {
  return Edited([&](ViewSpec& spec) { return Keep(spec, axis, Index{index}); });
}

ArrayView ArrayView::Transpose(std::vector<int> axes) const {
  return Edited([&](ViewSpec& spec) {
    if (axes.empty())
      for (std::size_t i = shape().size(); i-- > 0;) axes.push_back(static_cast<int>(i));
    if (axes.size() != shape().size()) return BadView("a transpose does not name every axis once");
    for (std::size_t i = 0; i < axes.size(); ++i) {
      if (absl::Status status = FindAxis(spec_, axes[i]); !status.ok()) return status;
      if (std::count(axes.begin(), axes.begin() + static_cast<std::ptrdiff_t>(i), axes[i]) > 0)
        return BadView("a transpose names an axis twice");
      spec.shape[i] = spec_.shape[static_cast<std::size_t>(axes[i])];
      spec.strides[i] = spec_.strides[static_cast<std::size_t>(axes[i])];
    }
    return absl::OkStatus();
  });
}

ArrayView ArrayView::Select(std::string_view subscripts) const {
  return Edited([&](ViewSpec& spec) {
    const auto operand = ParseOperand(absl::StrCat("x[", Absl(subscripts), "]"));
    return operand.ok() ? Apply(operand->subscripts, spec) : operand.status();
  });
}

ArrayView::operator Operand() const {
  Operand operand = operand_;
  operand.view.emplace();
  // A view without elements may begin anywhere within the array.
  const bool empty = std::count(spec_.shape.begin(), spec_.shape.end(), 0) > 0;
  operand.view->set_offset(empty ? 0 : spec_.offset);
  operand.view->mutable_shape()->Add(spec_.shape.begin(), spec_.shape.end());
  operand.view->mutable_strides()->Add(spec_.strides.begin(), spec_.strides.end());
  return operand;
}

}  // namespace tessera
