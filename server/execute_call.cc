#include "server/execute_call.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

// Steps of an ExecuteRequest, counted without making them. Of bytes that are no valid message some
// number: parsing them fails.
std::uint32_t CountSteps(grpc::ByteBuffer bytes) {
  using google::protobuf::internal::WireFormatLite;
  grpc::ProtoBufferReader reader(&bytes);
  google::protobuf::io::CodedInputStream in(&reader);
  std::uint32_t steps = 0;
  while (const std::uint32_t tag = in.ReadTag()) {
    if (WireFormatLite::GetTagFieldNumber(tag) == v1::ExecuteRequest::kStepsFieldNumber) ++steps;
    if (!WireFormatLite::SkipField(&in, tag)) break;
  }
  return steps;
}

}  // namespace

void ExecuteCall::Start(const grpc::ByteBuffer& request) {
  request_ = request;
  DeviceCall::Start(request.Length());
}

absl::StatusOr<Device*> ExecuteCall::Prepare() {
  const std::uint32_t count = CountSteps(request_);
  if (count > kMaxSteps) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "TOO_MANY_STEPS",
        "the program has more steps than the server accepts",
        {{"field", "steps"}, {"value", absl::StrCat(count)}, {"limit", absl::StrCat(kMaxSteps)}});
  }
  arena_.emplace();
  auto* request = google::protobuf::Arena::CreateMessage<v1::ExecuteRequest>(&*arena_);
  grpc::ProtoBufferReader reader(&request_);
  const bool parsed = request->ParseFromZeroCopyStream(&reader);
  request_.Clear();
  if (!parsed) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_MESSAGE",
                     "the message is no valid ExecuteRequest", {{"field", "message"}});
  }
  program_.emplace(core(), *request);
  absl::StatusOr<Device*> device = program_->Prepare();
  absl::Status charged = ChargeAnswer(arena_->SpaceAllocated() + program_->memory());
  return charged.ok() ? device : charged;
}

absl::Status ExecuteCall::RunOn(Stream& stream) {
  absl::Status status = program_->Run(stream);
  if (status.ok()) status = ChargeAnswer(arena_->SpaceAllocated() + program_->answer_memory());
  if (!status.ok()) return status;
  auto* answer = google::protobuf::Arena::CreateMessage<v1::ExecuteResponse>(&*arena_);
  answer->set_queue_us(queue_us());
  status = program_->Answer(stream, *answer);
  if (!status.ok()) return status;
  bool owned = false;
  const grpc::Status written =
      grpc::SerializationTraits<v1::ExecuteResponse>::Serialize(*answer, &response_, &owned);
  return written.ok() ? absl::OkStatus() : HostMemoryError();
}

void ExecuteCall::Release() {
  program_.reset();
  arena_.reset();
}

}  // namespace tessera
