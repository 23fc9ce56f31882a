// Transfers and protocol messages for arrays of C++ types, on top of Client:
//
//   const std::vector<float> values = {1, 2, 3, 4, 5, 6};
//   tessera::Upload<float>(client, "x", values, {2, 3});
//   absl::StatusOr<std::vector<float>> back = tessera::Download<float>(client, "x");
//   client.Dot("x", tessera::Inline<float>(values, {6}));
//
// Elements are in row-major order. The element types are float, double, Half, BFloat16,
// std::int32_t, std::int64_t, std::uint8_t and std::int8_t. In spans, elements of the service's
// bool type are of type bool.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/resident_buffer.h"
#include "kernels/base/dtype.h"
#include "kernels/base/element.h"
#include "kernels/base/error.h"

namespace tessera {

// Returns a view of the values' bytes. Nothing is copied.
template <class T>
std::string_view BytesOf(absl::Span<const T> values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// Uploads the values as Client::Upload does. Returns INVALID_ARGUMENT / BAD_RANGE unless there are
// exactly as many values as the shape has elements.
template <class T>
absl::StatusOr<v1::Buffer> Upload(Client& client, const std::string& name,
                                  absl::Span<const T> values, absl::Span<const std::int64_t> shape,
                                  const UploadOptions& options = {}) {
  return client.Upload(name, DTypeOf<T>(), shape, FromMemory(BytesOf(values)), options);
}

// Creates a small array that is sent within a request.
template <class T>
v1::Tensor Inline(absl::Span<const T> values, absl::Span<const std::int64_t> shape) {
  v1::Tensor tensor;
  tensor.set_dtype(static_cast<v1::Dtype>(DTypeOf<T>()));
  tensor.mutable_shape()->Add(shape.begin(), shape.end());
  tensor.set_data(std::string(BytesOf(values)));
  return tensor;
}

// Returns INVALID_ARGUMENT / BAD_DTYPE {expected, actual} if the elements are not of type T.
template <class T>
absl::Status CheckElements(v1::Dtype dtype) {
  const auto actual = static_cast<DType>(dtype);
  if (actual == DTypeOf<T>()) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInvalidArgument, "BAD_DTYPE",
      absl::StrCat("the elements are ", Absl(Name(actual)), " and not ", Absl(Name(DTypeOf<T>()))),
      {{"expected", std::string(Name(DTypeOf<T>()))}, {"actual", std::string(Name(actual))}});
}

// Returns the elements of an array in a response, or the error of CheckElements.
template <class T>
absl::StatusOr<std::vector<T>> Elements(const v1::Tensor& tensor) {
  static_assert(!std::is_same_v<T, bool>, "a vector of bool has no bytes; read tensor.data()");
  if (absl::Status status = CheckElements<T>(tensor.dtype()); !status.ok()) return status;
  std::vector<T> values(tensor.data().size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), tensor.data().data(), values.size() * sizeof(T));
  return values;
}

// Downloads the whole buffer, or the byte range in the options. Returns the errors of
// Client::Download and CheckElements, and INVALID_ARGUMENT / BAD_RANGE {offset, limit, element} if
// the range does not consist of whole elements. The element type and the range are checked before
// any data is fetched.
template <class T>
absl::StatusOr<std::vector<T>> Download(Client& client, const std::string& name,
                                        const DownloadOptions& options = {}) {
  static_assert(!std::is_same_v<T, bool>, "a vector of bool has no bytes; use Client::Download");
  if (options.offset % sizeof(T) != 0 || options.limit % sizeof(T) != 0) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "BAD_RANGE",
        absl::StrCat("the range does not consist of whole elements of ", sizeof(T), " bytes"),
        {{"offset", absl::StrCat(options.offset)},
         {"limit", absl::StrCat(options.limit)},
         {"element", absl::StrCat(sizeof(T))}});
  }
  std::vector<T> values;
  std::size_t filled = 0;  // in bytes
  const auto buffer = client.Download(
      name,
      [&](const v1::Buffer& from, std::string_view bytes) -> absl::Status {
        if (absl::Status status = CheckElements<T>(from.dtype()); !status.ok()) return status;
        if (bytes.empty()) {
          const std::uint64_t rest =
              from.size_bytes() - std::min(options.offset, from.size_bytes());
          values.reserve((options.limit > 0 ? std::min(options.limit, rest) : rest) / sizeof(T));
          return absl::OkStatus();
        }
        values.resize((filled + bytes.size() + sizeof(T) - 1) / sizeof(T));
        std::memcpy(reinterpret_cast<char*>(values.data()) + filled, bytes.data(), bytes.size());
        filled += bytes.size();
        return absl::OkStatus();
      },
      options);
  if (!buffer.ok()) return buffer.status();
  return values;
}

// Downloads the version that the handle holds. Fails with VERSION_MISMATCH once that version has
// been replaced.
template <class T>
absl::StatusOr<std::vector<T>> Download(Client& client, const ResidentBuffer& buffer,
                                        DownloadOptions options = {}) {
  options.version = buffer.version();
  return Download<T>(client, buffer.name(), options);
}

}  // namespace tessera
