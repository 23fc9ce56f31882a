#include "server/compute/execute_call.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "kernels/base/error.h"
#include "kernels/problem/map.h"
#include "server/compute/map_message.h"
#include "server/rpc/convert.h"

namespace tessera {
namespace {

// A program of more steps is not tiny, or not small, however little each step does, because steps
// are launched one after another.
constexpr std::size_t kMostTinySteps = 16;
constexpr std::size_t kMostSmallSteps = 64;

// The repeated parts of an ExecuteRequest, counted without parsing it. For a malformed message the
// counts are unspecified: parsing will reject it.
struct Parts {
  std::uint32_t steps = 0;
  MapParts maps;  // of all steps together
};

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// Reads a field that is a message, with read(in) for its contents.
template <class Read>
bool Within(CodedInputStream& in, const Read& read) {
  std::uint32_t length = 0;
  if (!in.ReadVarint32(&length)) return false;
  const CodedInputStream::Limit outer = in.PushLimit(static_cast<int>(length));
  if (!read(in) || in.BytesUntilLimit() > 0) return false;
  in.PopLimit(outer);
  return true;
}

// Calls read(in, number) for each message in a field with one of these numbers, until the stream or
// its limit ends.
template <class Read>
bool ForMessages(CodedInputStream& in, std::initializer_list<int> numbers, const Read& read) {
  while (const std::uint32_t tag = in.ReadTag()) {
    const int number = WireFormatLite::GetTagFieldNumber(tag);
    const bool wanted =
        std::find(numbers.begin(), numbers.end(), number) != numbers.end() &&
        WireFormatLite::GetTagWireType(tag) == WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
    const auto one = [&](CodedInputStream& message) { return read(message, number); };
    if (!(wanted ? Within(in, one) : WireFormatLite::SkipField(&in, tag))) return false;
  }
  return true;
}

Parts CountParts(grpc::ByteBuffer bytes) {
  grpc::ProtoBufferReader reader(&bytes);
  CodedInputStream all(&reader);
  Parts parts;
  ForMessages(all, {v1::ExecuteRequest::kStepsFieldNumber}, [&](CodedInputStream& step, int) {
    ++parts.steps;
    return ForMessages(
        step,
        {v1::Step::kReduceFieldNumber, v1::Step::kMatmulFieldNumber, v1::Step::kMapFieldNumber},
        [&](CodedInputStream& request, int number) {
          if (number == v1::Step::kMapFieldNumber)
            return CountMapParts<v1::MapRequest>(request, parts.maps);
          return number == v1::Step::kReduceFieldNumber
                     ? CountMapParts<v1::ReduceRequest>(request, parts.maps)
                     : CountMapParts<v1::MatmulRequest>(request, parts.maps);
        });
  });
  return parts;
}

absl::Status CheckParts(const Parts& parts) {
  if (parts.steps > kMaxSteps) {
    return MakeError(absl::StatusCode::kInvalidArgument, "TOO_MANY_STEPS",
                     "the program has more steps than the server accepts",
                     {{"field", "steps"},
                      {"value", absl::StrCat(parts.steps)},
                      {"limit", absl::StrCat(kMaxSteps)}});
  }
  const auto count = [](absl::string_view field, std::uint32_t value, std::size_t limit) {
    if (value <= limit) return absl::OkStatus();
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_EXPRESSION",
                     absl::StrCat("the program's expressions together have too many ", field),
                     {{"field", std::string(field)},
                      {"value", absl::StrCat(value)},
                      {"limit", absl::StrCat(limit)}});
  };
  absl::Status status = count("operands", parts.maps.operands, kMaxSteps * kMostOperands);
  return status.ok() ? count("expression.nodes", parts.maps.nodes, kMaxSteps * kMostNodes) : status;
}

}  // namespace

absl::StatusOr<Device*> ExecuteCall::Prepare() {
  grpc::ByteBuffer& message = exchange_.request();
  if (absl::Status status = CheckParts(CountParts(message)); !status.ok()) return status;
  const std::optional<std::size_t> bytes = MessageLayout::Of<v1::ExecuteRequest>().Bound(message);
  if (bytes.has_value()) {
    if (absl::Status status = ChargeRequest(core(), exchange_, *bytes); !status.ok()) return status;
  }
  arena_.emplace();
  auto* request = google::protobuf::Arena::CreateMessage<v1::ExecuteRequest>(&*arena_);
  grpc::ProtoBufferReader reader(&message);
  const bool parsed = bytes.has_value() && request->ParseFromZeroCopyStream(&reader);
  message.Clear();
  if (!parsed) return NoMessage("Execute");
  program_.emplace(core(), caller(), *request);
  if (program_->Stores()) {
    if (absl::Status status = RequireWrite(); !status.ok()) return status;
  }
  if (absl::Status charged = ChargeAnswer(program_->memory()); !charged.ok()) return charged;
  return program_->Prepare();
}

TaskSize ExecuteCall::SizeOn(const Device& device) {
  if (program_->steps() > kMostSmallSteps) return TaskSize::kLarge;
  return SizeOf(program_->LeastMicroseconds(device),
                program_->steps() <= kMostTinySteps && !program_->timed());
}

absl::Status ExecuteCall::RunOn(Stream& stream) {
  absl::Status status = program_->Plan(stream);
  if (status.ok()) status = ChargeAnswer(program_->answer_memory());
  if (status.ok()) status = program_->Run(stream);
  if (!status.ok()) return status;
  auto* answer = google::protobuf::Arena::CreateMessage<v1::ExecuteResponse>(&*arena_);
  answer->set_queue_us(queue_us());
  status = program_->Answer(stream, *answer);
  if (!status.ok()) return status;
  answer->set_total_us(total_us());
  bool owned = false;
  const grpc::Status written =
      grpc::SerializationTraits<v1::ExecuteResponse>::Serialize(*answer, &response_, &owned);
  return written.ok() ? absl::OkStatus() : HostMemoryError();
}

void ExecuteCall::Release(Chores* chores) {
  if (chores != nullptr && program_.has_value()) program_->Release(*chores);
  program_.reset();
  arena_.reset();
}

}  // namespace tessera
