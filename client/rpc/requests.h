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
#include "kernels/base/error.h"

namespace tessera {

inline v1::Dtype ToMessage(DType dtype) { return static_cast<v1::Dtype>(dtype); }
// An infinite duration becomes 100 years.
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

// Returns the error that a message describes. `details` has a reason and metadata.
template <class Details>
absl::Status ErrorOf(absl::StatusCode code, std::string_view message, const Details& details) {
  absl::Status status = MakeError(code, details.reason(), message);
  for (const auto& [key, value] : details.metadata()) SetErrorMetadata(status, key, value);
  return status;
}

// The largest number of bytes of data in a message of an upload.
inline constexpr std::uint64_t kMaxChunk = std::uint64_t{4} << 20;
// The size of the largest message that servers accept (Options::max_message in server/options.h):
// the data, and 64 KiB for all other fields.
inline constexpr std::uint64_t kMaxMessage = kMaxChunk + (std::uint64_t{64} << 10);
// Returns INVALID_ARGUMENT / BAD_MESSAGE {field, value, limit} if no server accepts a message of
// this size. If it were more than twice too large, gRPC would refuse it without a reason.
absl::Status CheckMessage(std::uint64_t bytes);

// Returns INTERNAL / BAD_RESPONSE.
inline absl::Status BadResponse(std::string_view what) {
  return MakeError(absl::StatusCode::kInternal, "BAD_RESPONSE", what);
}

// Returns an error if the response does not match the request.
template <class Request, class Response>
absl::Status CheckResponse(const Request& request, const Response& response) {
  if constexpr (requires { request.steps(); }) {
    if (response.results_size() != request.steps_size())
      return BadResponse("the server's response does not have a result for every step");
  }
  return absl::OkStatus();
}

// Returns the first buffer name in a request's operands or, if there is none, in its results.
// Returns "" if there is no name at all.
template <class Request>
std::string_view BufferOf(const Request& request) {
  std::string_view name;
  const auto look = [&name](const std::string& found) {
    if (name.empty()) name = found;
  };
  if constexpr (requires {
                  request.source();
                  request.link();
                }) {
    look(request.source());
  } else if constexpr (requires { request.name().size(); }) {
    look(request.name());
  }
  if constexpr (requires { request.a().buffer(); }) {
    look(request.a().buffer());
    look(request.b().buffer());
  }
  if constexpr (requires { request.x().buffer(); }) look(request.x().buffer());
  if constexpr (requires { request.with(); })
    for (const v1::Operand& operand : request.with()) look(operand.buffer());
  if constexpr (requires { request.operands(); })
    for (const v1::Operand& operand : request.operands()) look(operand.buffer());
  if constexpr (requires { request.result().buffer().name(); })
    look(request.result().buffer().name());
  return name;
}
// Returns the first buffer name in the first step that has one.
std::string_view BufferOf(const v1::ExecuteRequest& request);

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
