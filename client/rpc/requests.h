// Builds requests from C++ arguments, and finds the buffers that a request uses or creates.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/message.h"
#include "kernels/base/error.h"

namespace tessera {

inline v1::Dtype ToMessage(DType dtype) { return static_cast<v1::Dtype>(dtype); }
google::protobuf::Duration ToMessage(absl::Duration duration);
v1::Operand ToMessage(const Operand& operand);

// Sets the fields of a new buffer that ResultBuffer and UploadOptions share.
template <class Options, class Message>
void SetTarget(const Options& options, Message& message) {
  if (options.ttl) *message.mutable_ttl() = ToMessage(*options.ttl);
  message.set_replace(options.replace);
  if constexpr (requires { options.name; }) message.set_name(options.name);
  if constexpr (requires { message.placement(); })
    message.mutable_placement()->Add(options.placement.begin(), options.placement.end());
}

// Returns the buffer in a response, or the error of the call.
template <class Response>
absl::StatusOr<v1::Buffer> TakeBuffer(absl::StatusOr<Response> response) {
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_buffer());
}

// Returns the specification of a new array.
v1::BufferSpec SpecOf(DType dtype, absl::Span<const std::int64_t> shape,
                      const UploadOptions& options);

// Returns the error that a message describes. details: has a reason and metadata.
template <class Details>
absl::Status ErrorOf(absl::StatusCode code, std::string_view message, const Details& details) {
  absl::Status status = MakeError(code, details.reason(), message);
  for (const auto& [key, value] : details.metadata()) SetErrorMetadata(status, key, value);
  return status;
}

// Returns an error if the response does not match the request.
template <class Request, class Response>
absl::Status CheckResponse(const Request& request, const Response& response) {
  if constexpr (requires { request.steps(); }) {
    if (response.results_size() != request.steps_size())
      return absl::InternalError("the server's response does not have a result for every step");
  }
  return absl::OkStatus();
}

// Returns the first buffer name in a request's operands or, if there is none, in the rest of the
// request. Returns "" if there is no name at all.
std::string BufferOf(const google::protobuf::Message& request);

// Whether the call creates a buffer.
bool Stores(const v1::ExecuteRequest& request);
template <class Request>
bool Stores(const Request& request) {
  if constexpr (requires { request.result(); }) {
    return request.result().has_buffer();
  } else if constexpr (requires { request.indices(); }) {
    return request.values().has_buffer() || request.indices().has_buffer();
  } else {
    return false;
  }
}

}  // namespace tessera
