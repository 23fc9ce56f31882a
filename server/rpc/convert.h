// Conversions between the wire and the kernels: types, times and errors. Nothing here keeps state.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/repeated_field.h"
#include "google/protobuf/timestamp.pb.h"
#include "grpcpp/support/status.h"
#include "kernels/compute.h"
#include "tessera/v1/buffer.pb.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// Converts an error for a client. All errors leave the server through this function. The status has
// the code and the message. Its details contain an ErrorInfo of domain "tessera", and a RetryInfo
// if the call may succeed a little later. Long texts are cut, so that the trailers stay below the 8
// KiB that HTTP/2 peers accept. For `sees_all`, see FiguresFor.
grpc::Status ToGrpc(const absl::Status& status, bool sees_all = true);
// Converts the error of a program's step in the same way.
v1::StepError ToStepError(const absl::Status& status, bool sees_all);
// Returns the figures of an error that a caller may see. `sees_all` is the result of
// Caller::sees_all. If it is false, the total and the free amount of shared resources are left out,
// because they reveal what other tenants use.
std::map<std::string, std::string> FiguresFor(const absl::Status& status, bool sees_all);

// Returns the error of a call whose message cannot be parsed: INVALID_ARGUMENT / BAD_MESSAGE
// {field, method}.
absl::Status NoMessage(std::string_view method);

// Returns INVALID_ARGUMENT / BAD_DTYPE {field, value, valid} for a missing or unknown type.
absl::StatusOr<DType> FromProto(v1::Dtype dtype, std::string_view field);
v1::Dtype ToProto(DType dtype);

// Returns INVALID_ARGUMENT / BAD_BOOL {offset, value} if a byte of BOOL elements is neither 0 nor
// 1. `offset` is the position of these bytes in the array.
absl::Status CheckElements(DType dtype, HostBytes bytes, std::uint64_t offset);

absl::StatusOr<ArrayType> MakeArrayType(v1::Dtype dtype,
                                        const google::protobuf::RepeatedField<std::int64_t>& shape,
                                        std::string_view field);
void SetShape(const Shape& shape, google::protobuf::RepeatedField<std::int64_t>* out);

// Returns the operand's view of an array at data, or the whole array if the operand has no view.
absl::StatusOr<View> MakeView(const v1::Operand& operand, const ArrayType& type, const void* data);

// Returns INVALID_ARGUMENT / BAD_TTL unless the duration is valid and greater than 0.
absl::StatusOr<absl::Duration> FromProto(const google::protobuf::Duration& duration);
// Sets `ttl` to the ttl of a message, if the message has one.
template <class Message, class Ttl>
absl::Status SetTtl(const Message& message, Ttl& ttl) {
  if (!message.has_ttl()) return absl::OkStatus();
  absl::StatusOr<absl::Duration> asked = FromProto(message.ttl());
  if (asked.ok()) ttl = *asked;
  return asked.status();
}
google::protobuf::Duration ToProto(absl::Duration duration);
google::protobuf::Timestamp ToProto(absl::Time time);

// Returns INVALID_ARGUMENT / BAD_OPERATION for a value that this server does not know.
absl::StatusOr<ReduceOp> FromProto(v1::ReduceOp op);

Launch FromProto(const v1::Launch& launch);

template <class T>
absl::Span<const T> ToSpan(const google::protobuf::RepeatedField<T>& field) {
  return {field.data(), static_cast<std::size_t>(field.size())};
}

}  // namespace tessera
