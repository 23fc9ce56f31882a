#include "kernels/run/indices.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/run/execute.h"
#include "kernels/run/operation.h"

namespace tessera {
namespace {

// Returns the address of an element. REQUIRES: the view has more than `position` elements.
const void* AddressOf(const View& view, std::int64_t position) {
  std::int64_t offset = 0;
  for (int i = view.shape.rank - 1; i >= 0; --i) {
    offset += position % view.shape[i] * view.strides[static_cast<std::size_t>(i)];
    position /= view.shape[i];
  }
  return static_cast<const char*>(view.data) +
         offset * static_cast<std::int64_t>(SizeOf(view.dtype));
}

}  // namespace

absl::Status CheckIndexType(std::string_view name, const View& indices) {
  if (indices.dtype == DType::kI32 || indices.dtype == DType::kI64) return absl::OkStatus();
  return OfOperand(name, Invalid("BAD_DTYPE",
                                 absl::StrCat(Absl(name), " must be of type i32 or i64, not ",
                                              Absl(Name(indices.dtype))),
                                 {{"dtype", std::string(Name(indices.dtype))}}));
}

absl::Status EmptyAxis(std::string_view name) {
  return Invalid("BAD_INDEX",
                 absl::StrCat(Absl(name), "[0] is out of range: the axis has no elements"),
                 {{"position", "0"}, {"length", "0"}});
}

absl::Status BadIndex(std::string_view name, Stream& stream, const View& indices,
                      std::int64_t position, std::int64_t length) {
  std::int64_t value = 0;
  std::int32_t narrow = 0;
  const bool wide = indices.dtype == DType::kI64;
  RETURN_IF_ERROR(CopyToHost(stream, wide ? static_cast<void*>(&value) : &narrow,
                             AddressOf(indices, position), SizeOf(indices.dtype)));
  if (!wide) value = narrow;
  return Invalid("BAD_INDEX",
                 absl::StrCat(Absl(name), "[", position, "] is ", value, "; the axis has ", length,
                              " elements, so ", -length, " to ", length - 1, " are allowed"),
                 {{"position", absl::StrCat(position)},
                  {"value", absl::StrCat(value)},
                  {"length", absl::StrCat(length)}});
}

}  // namespace tessera
