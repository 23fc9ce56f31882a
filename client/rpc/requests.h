// Builds requests from C++ arguments, and reads them.
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

namespace tessera {

inline v1::Dtype ToMessage(DType dtype) { return static_cast<v1::Dtype>(dtype); }
google::protobuf::Duration ToMessage(absl::Duration duration);
v1::Operand ToMessage(const Operand& operand);

// Returns BAD_OPERAND if the source is not a resident buffer.
absl::StatusOr<v1::CopyBufferRequest> CopyRequest(const Operand& source, const ResultBuffer& target,
                                                  std::optional<DType> dtype,
                                                  const std::string& device);

// Returns the error of a failed call, or INTERNAL if a response lacks a result for some step.
absl::Status CheckAnswer(int steps, const absl::StatusOr<v1::ExecuteResponse>& response);

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
