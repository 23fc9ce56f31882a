// Checks of shapes and views. Every number may come from a client, so all arithmetic is checked for
// overflow.
#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "kernels/compute.h"

namespace tessera {
namespace {

constexpr std::int64_t kMaxBytes = std::numeric_limits<std::int64_t>::max();

// Returns text such as "[3, 4]", with at most kShown values.
std::string Join(absl::Span<const std::int64_t> values) {
  constexpr std::size_t kShown = 2 * kMaxRank;
  return absl::StrCat("[", absl::StrJoin(values.subspan(0, kShown), ", "),
                      values.size() > kShown ? ", ..." : "", "]");
}

absl::Status BadView(std::string_view field, std::string value, std::string limit) {
  return MakeError(
      absl::StatusCode::kInvalidArgument, "BAD_VIEW",
      absl::StrCat("view.", std::string(field), " is ", value, "; allowed: ", limit),
      {{"field", absl::StrCat("view.", std::string(field))}, {"value", value}, {"limit", limit}});
}

// Returns the extents as a Shape, or an error; size_limit bounds the number of elements.
absl::StatusOr<Shape> CheckedShape(absl::Span<const std::int64_t> dims, std::int64_t size_limit) {
  if (dims.size() > static_cast<std::size_t>(kMaxRank)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_SHAPE",
                     absl::StrCat("the shape has rank ", dims.size(), "; allowed: 0 to ", kMaxRank),
                     {{"field", "shape"},
                      {"value", absl::StrCat(dims.size())},
                      {"limit", absl::StrCat(kMaxRank)}});
  }
  Shape shape;
  shape.rank = static_cast<int>(dims.size());
  // Even if one extent is zero, the product of the other extents must fit, so that strides can be
  // computed.
  std::int64_t elements = 1;
  for (int i = 0; i < shape.rank; ++i) {
    shape[i] = dims[static_cast<std::size_t>(i)];
    if (shape[i] < 0) {
      return MakeError(absl::StatusCode::kInvalidArgument, "BAD_SHAPE",
                       absl::StrCat("shape ", Join(dims), " has a negative extent"),
                       {{"field", "shape"}, {"value", Join(dims)}, {"limit", ">= 0"}});
    }
    if (__builtin_mul_overflow(elements, std::max<std::int64_t>(1, shape[i]), &elements) ||
        elements > size_limit) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, "BAD_SHAPE",
          absl::StrCat("shape ", Join(dims), " has more elements than can be addressed"),
          {{"field", "shape"}, {"value", Join(dims)}, {"limit", absl::StrCat(size_limit)}});
    }
  }
  return shape;
}

void SetContiguousStrides(View& view) {
  std::int64_t stride = 1;
  for (int i = view.shape.rank - 1; i >= 0; --i) {
    view.strides[static_cast<std::size_t>(i)] = stride;
    stride *= std::max<std::int64_t>(1, view.shape[i]);
  }
}

}  // namespace

absl::StatusOr<ArrayType> MakeArrayType(DType dtype, absl::Span<const std::int64_t> shape) {
  if (SizeOf(dtype) == 0) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_DTYPE", "the dtype is unknown",
                     {{"field", "dtype"}, {"value", absl::StrCat(static_cast<int>(dtype))}});
  }
  ASSIGN_OR_RETURN(Shape checked,
                   CheckedShape(shape, kMaxBytes / static_cast<std::int64_t>(SizeOf(dtype))));
  return ArrayType{dtype, checked};
}

View WholeView(const ArrayType& type, const void* data) {
  View view{.data = data, .dtype = type.dtype, .shape = type.shape, .strides = {}};
  SetContiguousStrides(view);
  return view;
}

absl::StatusOr<View> MakeView(const ArrayType& type, const void* data, std::int64_t offset,
                              absl::Span<const std::int64_t> shape,
                              absl::Span<const std::int64_t> strides) {
  const std::int64_t size = type.shape.elements();
  // A broadcast view may have more elements than the array; a gathered copy must still be
  // addressable.
  absl::StatusOr<Shape> checked =
      CheckedShape(shape, kMaxBytes / static_cast<std::int64_t>(SizeOf(type.dtype)));
  if (!checked.ok()) return BadView("shape", Join(shape), "extents >= 0, rank <= 8, 63-bit size");
  View view{.data = data, .dtype = type.dtype, .shape = *checked, .strides = {}};
  if (strides.empty()) {
    SetContiguousStrides(view);
  } else if (strides.size() != shape.size()) {
    return BadView("strides", Join(strides), absl::StrCat(shape.size(), " values, one per extent"));
  } else {
    for (std::size_t i = 0; i < strides.size(); ++i) view.strides[i] = strides[i];
  }

  if (offset < 0 || offset > size)
    return BadView("offset", absl::StrCat(offset), absl::StrCat("0 to ", size));
  if (view.elements() == 0) {
    SetContiguousStrides(view);  // strides that are never followed may have any size
  } else {
    std::int64_t low = offset;
    std::int64_t high = offset;
    for (int i = 0; i < view.shape.rank; ++i) {
      std::int64_t reach = 0;
      std::int64_t& end = view.strides[static_cast<std::size_t>(i)] < 0 ? low : high;
      if (__builtin_mul_overflow(view.shape[i] - 1, view.strides[static_cast<std::size_t>(i)],
                                 &reach) ||
          __builtin_add_overflow(end, reach, &end)) {
        return BadView("strides", Join(strides), "elements inside the array");
      }
    }
    if (low < 0 || high >= size) {
      return BadView(
          "shape",
          absl::StrCat(Join(shape), " at offset ", offset, ", elements ", low, " to ", high),
          absl::StrCat("elements 0 to ", size - 1));
    }
    // If data is null, the address is only an offset, which pointer arithmetic cannot express.
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(data) +
                                   static_cast<std::uint64_t>(offset) * SizeOf(type.dtype);
    view.data = reinterpret_cast<const void*>(address);  // NOLINT(performance-no-int-to-ptr)
  }
  return view;
}

std::string ToString(const Shape& shape) {
  return Join({shape.dims.data(), static_cast<std::size_t>(shape.rank)});
}

}  // namespace tessera
