#include "server/rpc/convert.h"

#include <algorithm>
#include <map>
#include <new>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "google/protobuf/util/time_util.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "kernels/client_and_server/printable.h"

namespace tessera {
namespace {

constexpr std::size_t kLongestText = 512;
constexpr absl::Duration kRetryDelay = absl::Milliseconds(20);

std::string Shorten(absl::string_view text) {
  if (text.size() <= kLongestText) return std::string(text);
  return absl::StrCat(Absl(Beginning({text.data(), text.size()}, kLongestText - 3)), "...");
}

// Whether text contains `word`, which may be several words, other than as part of longer words.
bool HasWord(std::string_view text, std::string_view word) {
  const auto inside = [&](std::size_t i) {  // a word, a number or a name
    return i < text.size() && (absl::ascii_isalnum(static_cast<unsigned char>(text[i])) ||
                               std::string_view("._/-").find(text[i]) != text.npos);
  };
  for (std::size_t at = text.find(word); at != text.npos; at = text.find(word, at + 1))
    if (!inside(at - 1) && !inside(at + word.size())) return true;
  return false;
}

using Figures = std::map<std::string, std::string>;

// Returns the message, followed by the figures that it does not mention.
std::string Message(const absl::Status& status, const Figures& told) {
  std::string message = Shorten(status.message());
  std::string figures;
  for (const auto& [key, value] : told) {
    if (value.empty() || HasWord(message, value)) continue;
    absl::StrAppend(&figures, figures.empty() ? "" : ", ", key, ": ", value);
  }
  if (!figures.empty()) absl::StrAppend(&message, " (", Shorten(figures), ")");
  return message;
}

// Whether the call is worth retrying, because it has had no effect, and has failed only because
// other calls hold what it needs.
bool WorthRetrying(const std::string& reason, const Figures& metadata) {
  if (reason == "QUEUE_FULL" || reason == "TOO_MANY_IMPORTS") return true;
  if (reason == "TOO_MANY_CALLS") return metadata.at("limit") != "0";
  if (reason != "HOST_MEMORY_EXHAUSTED" && reason != "SCRATCH_EXHAUSTED") return false;
  const auto figure = [&](const char* key) {
    const auto it = metadata.find(key);
    std::uint64_t value = 0;
    return it != metadata.end() && absl::SimpleAtoi(it->second, &value) ? value : 0;
  };
  // If there are no figures, memory ran out during the call, which may have had an effect.
  return metadata.contains("total") && figure("requested") <= figure("total");
}

grpc::Status WithDetails(const absl::Status& status, bool sees_all) {
  const Figures told = FiguresFor(status, sees_all);
  const std::string message = Message(status, told);
  google::rpc::Status details;
  details.set_code(static_cast<int>(status.code()));
  details.set_message(message);
  google::rpc::ErrorInfo info;
  info.set_reason(ErrorReason(status));
  info.set_domain("tessera");
  for (const auto& [key, value] : told) (*info.mutable_metadata())[key] = Shorten(value);
  details.add_details()->PackFrom(info);
  if (WorthRetrying(info.reason(), ErrorMetadata(status))) {
    google::rpc::RetryInfo retry;
    *retry.mutable_retry_delay() = ToProto(kRetryDelay);
    details.add_details()->PackFrom(retry);
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message,
                      details.SerializeAsString());
}

}  // namespace

std::map<std::string, std::string> FiguresFor(const absl::Status& status, bool sees_all) {
  Figures figures = ErrorMetadata(status);
  if (!sees_all)
    for (const char* shared : {"free", "total"}) figures.erase(shared);
  return figures;
}

grpc::Status ToGrpc(const absl::Status& status, bool sees_all) {
  if (status.ok()) return grpc::Status::OK;
  try {
    return WithDetails(status, sees_all);
  } catch (const std::bad_alloc&) {
    return {static_cast<grpc::StatusCode>(status.code()), ""};
  }
}

v1::StepError ToStepError(const absl::Status& status, bool sees_all) {
  const Figures told = FiguresFor(status, sees_all);
  v1::StepError error;
  error.set_code(static_cast<int>(status.code()));
  error.set_message(Message(status, told));
  error.set_reason(ErrorReason(status));
  for (const auto& [key, value] : told) (*error.mutable_metadata())[key] = Shorten(value);
  return error;
}

absl::Status NoMessage(std::string_view method) {
  return MakeError(
      absl::StatusCode::kInvalidArgument, "BAD_MESSAGE",
      absl::StrCat("the message is not a valid ", Absl(method),
                   "Request: it is damaged or cut short, or contains text that is not UTF-8"),
      {{"field", "message"}, {"method", std::string(method)}});
}

absl::StatusOr<DType> FromProto(v1::Dtype dtype, std::string_view field) {
  if (dtype != v1::DTYPE_UNSPECIFIED && v1::Dtype_IsValid(dtype)) return static_cast<DType>(dtype);
  return MakeError(
      absl::StatusCode::kInvalidArgument, "BAD_DTYPE", "the element type is missing or unknown",
      {{"field", std::string(field)},
       {"value", absl::StrCat(static_cast<int>(dtype))},
       {"valid", absl::StrJoin(kDTypeInfos, ", ", [](std::string* out, const DTypeInfo& info) {
          absl::StrAppend(out, Absl(info.name));
        })}});
}

absl::Status CheckElements(DType dtype, HostBytes bytes, std::uint64_t offset) {
  if (dtype != DType::kBool) return absl::OkStatus();
  const absl::Span<const std::uint8_t> values(static_cast<const std::uint8_t*>(bytes.data),
                                              bytes.size);
  std::uint8_t all = 0;
  for (const std::uint8_t value : values) all |= value;
  if (all <= 1) return absl::OkStatus();
  const auto bad =
      std::find_if(values.begin(), values.end(), [](std::uint8_t value) { return value > 1; });
  const std::string at = absl::StrCat(offset + static_cast<std::uint64_t>(bad - values.begin()));
  // A client that shares the memory may have changed it in the meantime.
  const std::string value = absl::StrCat(bad == values.end() ? all : *bad);
  return MakeError(
      absl::StatusCode::kInvalidArgument, "BAD_BOOL",
      absl::StrCat("byte ", at, " of the elements is ", value, ", but a bool must be 0 or 1"),
      {{"offset", at}, {"value", value}});
}

v1::Dtype ToProto(DType dtype) { return static_cast<v1::Dtype>(dtype); }

absl::StatusOr<ArrayType> MakeArrayType(v1::Dtype dtype,
                                        const google::protobuf::RepeatedField<std::int64_t>& shape,
                                        std::string_view field) {
  ASSIGN_OR_RETURN(DType element, FromProto(dtype, field));
  absl::StatusOr<ArrayType> type = MakeArrayType(element, ToSpan(shape));
  if (!type.ok()) {
    absl::Status status = type.status();
    SetErrorMetadata(status, "field", field);
    return status;
  }
  return type;
}

void SetShape(const Shape& shape, google::protobuf::RepeatedField<std::int64_t>* out) {
  out->Clear();
  for (int i = 0; i < shape.rank; ++i) out->Add(shape[i]);
}

absl::StatusOr<View> MakeView(const v1::Operand& operand, const ArrayType& type, const void* data) {
  if (!operand.has_view()) return WholeView(type, data);
  const v1::View& view = operand.view();
  return MakeView(type, data, view.offset(), ToSpan(view.shape()), ToSpan(view.strides()));
}

absl::StatusOr<absl::Duration> FromProto(const google::protobuf::Duration& duration) {
  const bool valid = duration.seconds() >= 0 &&
                     duration.seconds() <= google::protobuf::util::TimeUtil::kDurationMaxSeconds &&
                     duration.nanos() >= 0 && duration.nanos() < 1'000'000'000 &&
                     (duration.seconds() > 0 || duration.nanos() > 0);
  if (!valid) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_TTL",
                     "a ttl must be a valid duration above 0",
                     {{"field", "ttl"},
                      {"value", absl::StrCat(duration.seconds(), "s ", duration.nanos(), "ns")}});
  }
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

google::protobuf::Duration ToProto(absl::Duration duration) {
  google::protobuf::Duration proto;
  proto.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &duration));
  proto.set_nanos(static_cast<int>(absl::ToInt64Nanoseconds(duration)));
  return proto;
}

google::protobuf::Timestamp ToProto(absl::Time time) {
  google::protobuf::Timestamp proto;
  proto.set_seconds(absl::ToUnixSeconds(time));
  proto.set_nanos(
      static_cast<int>(absl::ToInt64Nanoseconds(time - absl::FromUnixSeconds(proto.seconds()))));
  return proto;
}

absl::StatusOr<ReduceOp> FromProto(v1::ReduceOp op) {
  if (op != v1::REDUCE_OP_UNSPECIFIED && v1::ReduceOp_IsValid(op)) return static_cast<ReduceOp>(op);
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPERATION",
                   "the reduction is missing or unknown",
                   {{"field", "op"}, {"value", absl::StrCat(static_cast<int>(op))}});
}

Launch FromProto(const v1::Launch& launch) {
  return {launch.block_size(), launch.grid_size(), launch.items_per_thread()};
}

}  // namespace tessera
