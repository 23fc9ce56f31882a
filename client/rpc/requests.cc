#include "client/rpc/requests.h"

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/base/error.h"

namespace tessera {
namespace {

// result(): returns the field to set. It is called only if there is something to set.
template <class Field>
void SetResult(const std::optional<ResultBuffer>& buffer, bool scratch, const Field& result) {
  if (buffer) {
    SetTarget(*buffer, *result()->mutable_buffer());
  } else if (scratch) {
    result()->set_scratch(true);
  }
}

// refused: receives the operand's error.
void Set(const Operand& operand, v1::Operand* field, absl::Status& refused) {
  *field = ToMessage(operand);
  refused.Update(operand.refused);
}

// Sets the fields that every operation's request has.
template <class Request>
void SetOptions(const OperationOptions& options, Prepared<Request>& prepared) {
  Request& request = prepared.message;
  request.set_strategy(options.strategy);
  const Launch& launch = options.launch;
  if (launch.block_size != 0 || launch.grid_size != 0 || launch.items_per_thread != 0) {
    request.mutable_launch()->set_block_size(launch.block_size);
    request.mutable_launch()->set_grid_size(launch.grid_size);
    request.mutable_launch()->set_items_per_thread(launch.items_per_thread);
  }
  request.set_timing(options.timing);
  if constexpr (requires { request.mutable_result(); })
    SetResult(options.target, options.scratch, [&] { return request.mutable_result(); });
  if constexpr (requires { request.mutable_indices(); }) {
    SetResult(options.target, options.scratch, [&] { return request.mutable_values(); });
    SetResult(options.indices_target, options.indices_scratch,
              [&] { return request.mutable_indices(); });
  }
  if constexpr (requires { request.add_with(); }) {
    if (options.expression) *request.mutable_expression() = *options.expression;
    for (const Operand& operand : options.with) Set(operand, request.add_with(), prepared.refused);
  }
}

// Finds the first name of a buffer in an operand, and the first that stands elsewhere.
void FindNames(const google::protobuf::Message& message, std::string& operand, std::string& other) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  const bool copies = message.GetDescriptor() == v1::CopyBufferRequest::descriptor();
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const google::protobuf::FieldDescriptor* const field : fields) {
    using Field = google::protobuf::FieldDescriptor;
    if (field->cpp_type() == Field::CPPTYPE_MESSAGE) {
      if (!field->is_repeated()) {
        FindNames(reflection.GetMessage(message, field), operand, other);
        continue;
      }
      for (int i = 0; i < reflection.FieldSize(message, field) && operand.empty(); ++i)
        FindNames(reflection.GetRepeatedMessage(message, field, i), operand, other);
    } else if (field->name() == "buffer" && operand.empty()) {
      operand = reflection.GetString(message, field);
    } else if ((field->name() == "name" || (copies && field->name() == "source")) &&
               other.empty()) {
      other = reflection.GetString(message, field);
    }
  }
}

}  // namespace

google::protobuf::Duration ToMessage(absl::Duration duration) {
  google::protobuf::Duration proto;
  proto.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &duration));
  proto.set_nanos(static_cast<std::int32_t>(absl::ToInt64Nanoseconds(duration)));
  return proto;
}

v1::Operand ToMessage(const Operand& operand) {
  v1::Operand proto;
  if (const auto* name = std::get_if<std::string>(&operand.source)) {
    proto.set_buffer(*name);
    proto.set_version(operand.version);
  } else if (const auto* step = std::get_if<ProgramStep>(&operand.source)) {
    proto.set_step(step->number);
    proto.set_output(step->output);
  } else {
    *proto.mutable_tensor() = std::get<v1::Tensor>(operand.source);
  }
  if (operand.view) *proto.mutable_view() = *operand.view;
  return proto;
}

template <class Request>
Prepared<Request> NewRequest(const OperationOptions& options, const Operand& first,
                             const Operand* second) {
  Prepared<Request> request;
  if constexpr (requires { request.message.mutable_x(); }) {
    Set(first, request.message.mutable_x(), request.refused);
  }
  if constexpr (requires { request.message.mutable_a(); }) {
    Set(first, request.message.mutable_a(), request.refused);
    Set(*second, request.message.mutable_b(), request.refused);
  }
  SetOptions(options, request);
  return request;
}

Prepared<v1::MapRequest> NewMapRequest(const OperationOptions& options,
                                       absl::Span<const Operand> operands,
                                       const v1::Expression& expression) {
  Prepared<v1::MapRequest> request;
  for (const Operand& operand : operands)
    Set(operand, request.message.add_operands(), request.refused);
  *request.message.mutable_expression() = expression;
  SetOptions(options, request);
  return request;
}

v1::BufferSpec SpecOf(DType dtype, absl::Span<const std::int64_t> shape,
                      const UploadOptions& options) {
  v1::BufferSpec spec;
  spec.set_dtype(ToMessage(dtype));
  spec.mutable_shape()->Add(shape.begin(), shape.end());
  spec.set_device(options.device);
  SetTarget(options, spec);
  return spec;
}

v1::CreateBufferRequest CreateRequest(const std::string& name, const v1::BufferSpec& spec) {
  v1::CreateBufferRequest request;
  request.set_name(name);
  *request.mutable_spec() = spec;
  return request;
}

v1::UpdateBufferRequest UpdateRequest(const std::string& name, std::optional<absl::Duration> ttl) {
  v1::UpdateBufferRequest request;
  request.set_name(name);
  if (ttl) *request.mutable_ttl() = ToMessage(*ttl);
  return request;
}

v1::ImportBufferRequest ImportRequest(const std::string& server, const std::string& source,
                                      const ResultBuffer& target, std::uint64_t version,
                                      const std::string& device) {
  v1::ImportBufferRequest request;
  request.set_source(server);
  request.set_source_name(source);
  request.set_source_version(version);
  SetTarget(target, request);
  request.set_device(device);
  return request;
}

Prepared<v1::CopyBufferRequest> CopyRequest(const Operand& source, const ResultBuffer& target,
                                            std::optional<DType> dtype, const std::string& device,
                                            bool link) {
  const std::string* name = std::get_if<std::string>(&source.source);
  if (name == nullptr) {
    return {.refused = MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPERAND",
                                 "only a resident buffer can be copied")};
  }
  v1::CopyBufferRequest request;
  request.set_source(*name);
  request.set_source_version(source.version);
  if (source.view) *request.mutable_view() = *source.view;
  SetTarget(target, request);
  if (dtype) request.set_dtype(ToMessage(*dtype));
  request.set_device(device);
  request.set_link(link);
  return {std::move(request), source.refused};
}

bool Stores(const v1::ExecuteRequest& request) {
  return std::any_of(request.steps().begin(), request.steps().end(), [](const v1::Step& step) {
    return VisitOperation(
        step, [](const auto& operation) { return Stores(operation); }, [] { return false; });
  });
}

std::string BufferOf(const google::protobuf::Message& request) {
  std::string operand, other;
  FindNames(request, operand, other);
  return operand.empty() ? other : operand;
}

absl::Status CheckDType(DType expected, v1::Dtype dtype) {
  const auto actual = static_cast<DType>(dtype);
  if (actual == expected) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInvalidArgument, "BAD_DTYPE",
      absl::StrCat("the elements are ", Absl(Name(actual)), " and not ", Absl(Name(expected))),
      {{"expected", std::string(Name(expected))}, {"actual", std::string(Name(actual))}});
}

// --- Programs ---

template <class Request>
ProgramStep Program::Send(Prepared<Request> request, const OperationOptions&) {
  refused_.Update(request.refused);
  v1::Step& step = *request_.add_steps();
#define TESSERA_SET(Name, field)                            \
  if constexpr (std::is_same_v<Request, v1::Name##Request>) \
    *step.mutable_##field() = std::move(request.message);
  TESSERA_OPERATION_METHODS(TESSERA_SET)
#undef TESSERA_SET
  return {static_cast<std::uint32_t>(request_.steps_size() - 1)};
}
#define TESSERA_SEND(Name, field)                                                          \
  template Prepared<v1::Name##Request> NewRequest(const OperationOptions&, const Operand&, \
                                                  const Operand*);                         \
  template ProgramStep Program::Send(Prepared<v1::Name##Request>, const OperationOptions&);
TESSERA_OPERATION_METHODS(TESSERA_SEND)
#undef TESSERA_SEND

bool Program::has_target() const { return Stores(request_); }

}  // namespace tessera
