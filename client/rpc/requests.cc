#include "client/rpc/requests.h"

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
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

// Sets the fields that every operation's request has.
template <class Request>
void SetOptions(const OperationOptions& options, Request& request) {
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
  if constexpr (requires { request.mutable_values(); }) {
    SetResult(options.target, options.scratch, [&] { return request.mutable_values(); });
    SetResult(options.indices_target, options.indices_scratch,
              [&] { return request.mutable_indices(); });
  }
  if constexpr (requires { request.add_with(); }) {
    if (options.expression) *request.mutable_expression() = *options.expression;
    for (const Operand& operand : options.with) *request.add_with() = ToMessage(operand);
  }
}

}  // namespace

google::protobuf::Duration ToMessage(absl::Duration duration) {
  google::protobuf::Duration proto;
  if (duration == absl::InfiniteDuration()) duration = absl::Hours(24 * 36500);
  proto.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &duration));
  proto.set_nanos(static_cast<std::int32_t>(absl::ToInt64Nanoseconds(duration)));
  return proto;
}

absl::Status CheckMessage(std::uint64_t bytes) {
  if (bytes <= kMaxMessage) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInvalidArgument, "BAD_MESSAGE",
      absl::StrCat("the message has ", bytes, " bytes, but servers accept at most ", kMaxMessage),
      {{"field", "message"}, {"value", absl::StrCat(bytes)}, {"limit", absl::StrCat(kMaxMessage)}});
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
Request NewRequest(const OperationOptions& options, const Operand& first, const Operand* second) {
  Request request;
  if constexpr (requires { request.mutable_x(); }) *request.mutable_x() = ToMessage(first);
  if constexpr (requires { request.mutable_a(); }) {
    *request.mutable_a() = ToMessage(first);
    *request.mutable_b() = ToMessage(*second);
  }
  if constexpr (requires { request.function(); })
    if (second != nullptr) *request.mutable_b() = ToMessage(*second);
  if constexpr (requires { request.along(); }) *request.mutable_indices() = ToMessage(*second);
  if constexpr (requires { request.keys(); }) *request.mutable_keys() = ToMessage(*second);
  if constexpr (requires { request.labels(); }) *request.mutable_labels() = ToMessage(*second);
  if constexpr (requires { request.mask(); }) *request.mutable_mask() = ToMessage(*second);
  SetOptions(options, request);
  return request;
}

v1::HistogramRequest NewHistogramRequest(const OperationOptions& options, const Operand& x,
                                         const Bins& bins) {
  auto request = NewRequest<v1::HistogramRequest>(options, x);
  if (const auto* even = std::get_if<EvenBins>(&bins)) {
    request.mutable_even()->set_count(even->count);
    request.mutable_even()->set_low(even->low);
    request.mutable_even()->set_high(even->high);
  } else if (const auto* integers = std::get_if<IntegerBins>(&bins)) {
    request.set_integers(integers->count);
  } else {
    *request.mutable_edges() = ToMessage(std::get<Operand>(bins));
  }
  return request;
}

v1::MapRequest NewMapRequest(const OperationOptions& options, absl::Span<const Operand> operands,
                             const v1::Expression& expression) {
  v1::MapRequest request;
  for (const Operand& operand : operands) *request.add_operands() = ToMessage(operand);
  *request.mutable_expression() = expression;
  SetOptions(options, request);
  return request;
}

absl::StatusOr<v1::CopyBufferRequest> CopyRequest(const Operand& source, const ResultBuffer& target,
                                                  std::optional<DType> dtype,
                                                  const std::string& device) {
  const std::string* name = std::get_if<std::string>(&source.source);
  if (name == nullptr) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPERAND",
                     "only a resident buffer can be copied");
  }
  v1::CopyBufferRequest request;
  request.set_source(*name);
  request.set_source_version(source.version);
  if (source.view) *request.mutable_view() = *source.view;
  SetTarget(target, request);
  if (dtype) request.set_dtype(ToMessage(*dtype));
  request.set_device(device);
  return request;
}

bool Stores(const v1::ExecuteRequest& request) {
  return std::any_of(request.steps().begin(), request.steps().end(), [](const v1::Step& step) {
    return VisitOperation(
        step, [](const auto& operation) { return Stores(operation); }, [] { return false; });
  });
}

std::string_view BufferOf(const v1::ExecuteRequest& request) {
  for (const v1::Step& step : request.steps()) {
    const std::string_view name = VisitOperation(
        step, [](const auto& operation) { return BufferOf(operation); },
        [] { return std::string_view(); });
    if (!name.empty()) return name;
  }
  return {};
}

// --- Programs ---

template <class Request>
ProgramStep Program::Send(Request request, const OperationOptions&) {
  v1::Step& step = *request_.add_steps();
#define TESSERA_SET(Name, field)                            \
  if constexpr (std::is_same_v<Request, v1::Name##Request>) \
    *step.mutable_##field() = std::move(request);
  TESSERA_OPERATION_METHODS(TESSERA_SET)
#undef TESSERA_SET
  return {static_cast<std::uint32_t>(request_.steps_size() - 1)};
}
#define TESSERA_SEND(Name, field)                                                                 \
  template v1::Name##Request NewRequest(const OperationOptions&, const Operand&, const Operand*); \
  template ProgramStep Program::Send(v1::Name##Request request, const OperationOptions& options);
TESSERA_OPERATION_METHODS(TESSERA_SEND)
#undef TESSERA_SEND

bool Program::has_target() const { return Stores(request_); }

}  // namespace tessera
