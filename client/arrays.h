// Protocol messages for arrays of C++ types:
//
//   const std::vector<float> values = {1, 2, 3, 4, 5, 6};
//   auto sum = client.Add("x", tessera::Inline(values, {6}));
//   absl::StatusOr<std::vector<float>> elements = tessera::Elements<float>(sum->tensor());
//
// Elements are in row-major order. The element types are float, double, Half, BFloat16,
// std::int32_t, std::int64_t, std::uint8_t and std::int8_t. In spans, elements of the service's
// bool type are of type bool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <ranges>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/dtype.h"
#include "kernels/base/element.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// Elements that follow each other in memory: a std::vector, std::array, std::span or absl::Span.
template <class T>
concept ElementRange = std::ranges::contiguous_range<T> && std::ranges::sized_range<T>;
template <ElementRange T>
using ElementOf = std::remove_cv_t<std::ranges::range_value_t<T>>;

// Returns a view of the values' bytes. Nothing is copied.
template <ElementRange T>
std::string_view BytesOf(const T& values) {
  return {reinterpret_cast<const char*>(std::ranges::data(values)),
          std::ranges::size(values) * sizeof(ElementOf<T>)};
}

template <ElementRange T>
absl::Span<char> MutableBytesOf(T&& values) {
  return {reinterpret_cast<char*>(std::ranges::data(values)),
          std::ranges::size(values) * sizeof(ElementOf<T>)};
}
// Returns the dtype of elements of type T. A char is a byte of an element of any type.
template <class T>
constexpr std::optional<DType> DTypeUnlessBytes() {
  if constexpr (std::is_same_v<T, char>) {
    return std::nullopt;
  } else {
    return DTypeOf<T>();
  }
}

// Creates a small array that is sent within a request.
template <ElementRange T>
v1::Tensor Inline(const T& values, absl::Span<const std::int64_t> shape) {
  v1::Tensor tensor;
  tensor.set_dtype(static_cast<v1::Dtype>(DTypeOf<ElementOf<T>>()));
  tensor.mutable_shape()->Add(shape.begin(), shape.end());
  tensor.set_data(std::string(BytesOf(values)));
  return tensor;
}

// Returns INVALID_ARGUMENT / BAD_DTYPE {expected, actual} if the two types differ.
absl::Status CheckDType(DType expected, v1::Dtype actual);

// Returns the elements of an array in a response, or the error of CheckDType.
template <class T>
absl::StatusOr<std::vector<T>> Elements(const v1::Tensor& tensor) {
  static_assert(!std::is_same_v<T, bool>, "a vector of bool has no bytes; read tensor.data()");
  if (absl::Status status = CheckDType(DTypeOf<T>(), tensor.dtype()); !status.ok()) return status;
  std::vector<T> values(tensor.data().size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), tensor.data().data(), values.size() * sizeof(T));
  return values;
}

}  // namespace tessera
