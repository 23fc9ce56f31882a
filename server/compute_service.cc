#include "server/compute_service.h"

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "server/buffer_messages.h"
#include "server/convert.h"
#include "server/device_call.h"
#include "server/unary_call.h"

namespace tessera {
namespace {

using absl::StatusCode;

void SetScalar(const ScalarResult& result, v1::Scalar* out) {
  if (result.integer) {
    out->set_integer(result.value.integer);
  } else {
    out->set_real(result.value.real);
  }
}

absl::Status BadOperation(std::string_view field, const std::string& value,
                          std::string_view valid) {
  return MakeError(
      StatusCode::kInvalidArgument, "BAD_OPERATION", "there is no such operation or backend",
      {{"field", std::string(field)}, {"value", value}, {"valid", std::string(valid)}});
}

template <class MakeRange>
void SetRange(const LaunchLimits::Range& range, MakeRange make) {
  if (range.max == 0) return;
  v1::LaunchRange* out = make();
  out->set_min(range.min);
  out->set_max(range.max);
}

// An operand of a request, under the name that errors call it by.
struct Named {
  std::string_view name;
  const v1::Operand* operand;
};

// An operand as a call holds it between its acceptance and its end.
struct Source {
  Named named;
  std::shared_ptr<const Buffer> buffer;  // null: inline
  ArrayType type;
};

// The error as one of this operand.
absl::Status OfOperand(const Named& named, const absl::Status& status) {
  const std::string name(named.name);
  absl::Status about(status.code(),
                     absl::StrCat("operand ", name, ": ", std::string(status.message())));
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { about.SetPayload(url, payload); });
  SetErrorMetadata(about, "operand", name);
  return about;
}

absl::StatusOr<ArrayType> TensorType(const v1::Tensor& tensor) {
  absl::StatusOr<ArrayType> type = MakeArrayType(tensor.dtype(), tensor.shape(), "tensor");
  if (!type.ok() || tensor.data().size() == type->bytes()) return type;
  return MakeError(StatusCode::kInvalidArgument, "BAD_OPERAND",
                   "the data of an inline operand does not fit its dtype and shape",
                   {{"field", "tensor.data"},
                    {"value", absl::StrCat(tensor.data().size())},
                    {"expected", absl::StrCat(type->bytes())}});
}

// All operands of a call, as they are at one moment, and checked with their views.
absl::StatusOr<std::vector<Source>> FindSources(absl::Span<const Named> operands,
                                                BufferStore& store) {
  std::vector<BufferStore::Wanted> wanted;
  wanted.reserve(operands.size());
  for (const Named& named : operands) {
    const v1::Operand& operand = *named.operand;
    wanted.push_back({operand.buffer(), operand.version(), named.name, nullptr});
    if (operand.source_case() == v1::Operand::SOURCE_NOT_SET ||
        (operand.has_buffer() && operand.buffer().empty())) {
      return OfOperand(named,
                       MakeError(StatusCode::kInvalidArgument, "BAD_OPERAND",
                                 "it must name a buffer or carry a tensor", {{"field", "source"}}));
    }
  }
  if (absl::Status status = store.FindAll(absl::MakeSpan(wanted)); !status.ok()) return status;
  std::vector<Source> sources;
  sources.reserve(operands.size());
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const Named& named = operands[i];
    absl::StatusOr<ArrayType> type = wanted[i].buffer != nullptr
                                         ? wanted[i].buffer->type()
                                         : TensorType(named.operand->tensor());
    if (!type.ok()) return OfOperand(named, type.status());
    const absl::Status view = MakeView(*named.operand, *type, nullptr).status();
    if (!view.ok()) return OfOperand(named, view);
    sources.push_back({named, std::move(wanted[i].buffer), *type});
  }
  return sources;
}

// The operand on the stream's device. Inline data moves to scratch: in a message it has no
// alignment to rely on.
absl::StatusOr<View> PlaceOnStream(const Source& source, Stream& stream) {
  const v1::Operand& operand = *source.named.operand;
  if (source.buffer != nullptr) return MakeView(operand, source.type, source.buffer->data());
  const std::string& data = operand.tensor().data();
  absl::StatusOr<void*> memory = Scratch(stream, data.size());
  if (!memory.ok()) return memory.status();
  absl::Status status = CopyToDevice(stream, *memory, data.data(), data.size());
  if (!status.ok()) return status;
  return MakeView(operand, source.type, *memory);
}

// One operation: its operands from acceptance to its end, and how its answer is filled in. Op(call,
// stream, views) does what is particular to it.
template <class Request, class Response, class Op>
class OperationCall final : public DeviceCall {
 public:
  OperationCall(Core& core, std::string_view method, grpc::CallbackServerContext& context,
                const Request& request, Response& response, std::vector<Named> operands, Op op)
      : DeviceCall(core, method, context),
        request_(request),
        response_(response),
        operands_(std::move(operands)),
        op_(std::move(op)) {}

  RunOptions Options(const Stream& stream) {
    const tessera::Options& options = core().options();
    return {.strategy = request_.strategy(),
            .launch = FromProto(request_.launch()),
            .timing = request_.timing(),
            .pace = &core().pace(stream.device()),
            .max_seconds = options.max_operation_seconds,
            .max_slow_seconds = options.max_slow_operation_seconds};
  }

  void SetStats(const Stats& stats, const Stream& stream) {
    v1::ExecutionStats* out = response_.mutable_stats();
    out->set_strategy(std::string(stats.strategy));
    out->set_device(stream.device().info().name);
    out->set_kernel_us(stats.kernel_us);
    out->set_bytes(stats.bytes);
    out->set_flops(stats.flops);
    out->set_roundoff(stats.roundoff);
    out->set_queue_us(queue_us());
    for (const Source& source : sources_) {
      out->add_operand_versions(source.buffer != nullptr ? source.buffer->version() : 0);
    }
  }

  // Runs an operation whose result is an array, and leaves it where the request wants it. run gets
  // the way to the memory for it.
  template <class RunIt>
  absl::Status ReturnArray(Stream& stream, const absl::StatusOr<ArrayType>& type, RunIt run) {
    if (!type.ok()) return type.status();
    return request_.result().has_buffer() ? ReturnBuffer(stream, *type, run)
                                          : ReturnInline(stream, *type, run);
  }

 private:
  template <class RunIt>
  absl::Status ReturnInline(Stream& stream, const ArrayType& type, RunIt run) {
    const std::uint64_t bytes = type.bytes();
    if (bytes > kMaxInlineResult) {
      return MakeError(StatusCode::kInvalidArgument, "RESULT_TOO_LARGE",
                       "the result is too large for a response; ask for it in result.buffer",
                       {{"size", absl::StrCat(bytes)}, {"limit", absl::StrCat(kMaxInlineResult)}});
    }
    if (absl::Status status = ChargeAnswer(bytes); !status.ok()) return status;
    void* memory = nullptr;
    const auto ask = [&]() -> absl::StatusOr<void*> {
      absl::StatusOr<void*> scratch = Scratch(stream, bytes);
      if (scratch.ok()) memory = *scratch;
      return scratch;
    };
    absl::StatusOr<Stats> stats = run(ask);
    if (!stats.ok()) return stats.status();
    v1::Tensor* tensor = response_.mutable_tensor();
    tensor->set_dtype(ToProto(type.dtype));
    SetShape(type.shape, tensor->mutable_shape());
    tensor->mutable_data()->resize(bytes);
    absl::Status status = CopyToHost(stream, tensor->mutable_data()->data(), memory, bytes);
    if (!status.ok()) return status;
    SetStats(*stats, stream);
    return absl::OkStatus();
  }

  template <class RunIt>
  absl::Status ReturnBuffer(Stream& stream, const ArrayType& type, RunIt run) {
    const v1::BufferTarget& target = request_.result().buffer();
    BufferSpec spec{.name = target.name(),
                    .type = type,
                    .device = &stream.device(),
                    .replace = target.replace()};
    if (absl::Status status = SetTtl(target, spec.ttl); !status.ok()) return status;
    ResultDraft result(core().store(), std::move(spec));
    const auto ask = [&] { return result.Open(); };
    absl::StatusOr<Stats> stats = run(ask);
    if (!stats.ok()) return stats.status();
    if (stream.stopped()) return CallerLeft();
    absl::StatusOr<BufferInfo> buffer = result.Seal();
    if (!buffer.ok()) return buffer.status();
    SetBuffer(*buffer, response_.mutable_buffer());
    SetStats(*stats, stream);
    return absl::OkStatus();
  }

  absl::StatusOr<Device*> Prepare() override {
    absl::StatusOr<std::vector<Source>> sources = FindSources(operands_, core().store());
    if (!sources.ok()) return sources.status();
    sources_ = *std::move(sources);
    const Buffer* first = nullptr;
    for (const Source& source : sources_) {
      const Buffer* buffer = source.buffer.get();
      if (first == nullptr) first = buffer;
      if (buffer != nullptr && &buffer->device() != &first->device()) {
        return MakeError(StatusCode::kFailedPrecondition, "DEVICE_MISMATCH",
                         "the operands live on different devices; copy one to the other's",
                         {{first->name(), first->device().info().name},
                          {buffer->name(), buffer->device().info().name}});
      }
    }
    return first != nullptr ? &first->device() : core().devices().front().get();
  }

  absl::Status RunOn(Stream& stream) override {
    std::vector<View> views;
    views.reserve(sources_.size());
    for (const Source& source : sources_) {
      absl::StatusOr<View> view = PlaceOnStream(source, stream);
      if (!view.ok()) return view.status();
      views.push_back(*view);
    }
    return op_(*this, stream, views);
  }

  void Release() override { sources_.clear(); }

  const Request& request_;
  Response& response_;
  const std::vector<Named> operands_;
  std::vector<Source> sources_;
  Op op_;
};

template <class Request, class Response, class Op>
grpc::ServerUnaryReactor* Start(Core& core, std::string_view method,
                                grpc::CallbackServerContext& context, const Request& request,
                                Response& response, std::vector<Named> operands, Op op) {
  auto* call = new OperationCall<Request, Response, Op>(core, method, context, request, response,
                                                        std::move(operands), std::move(op));
  call->Start(request);
  return call;
}

}  // namespace

grpc::ServerUnaryReactor* ComputeService::Dot(grpc::CallbackServerContext* context,
                                              const v1::DotRequest* request,
                                              v1::DotResponse* response) {
  return Start(core_, "Dot", *context, *request, *response,
               {{"a", &request->a()}, {"b", &request->b()}},
               [response](auto& call, Stream& stream, absl::Span<const View> x) -> absl::Status {
                 auto result = RunDot(stream, x[0], x[1], call.Options(stream));
                 if (!result.ok()) return result.status();
                 SetScalar(*result, response->mutable_value());
                 call.SetStats(result->stats, stream);
                 return absl::OkStatus();
               });
}

grpc::ServerUnaryReactor* ComputeService::Reduce(grpc::CallbackServerContext* context,
                                                 const v1::ReduceRequest* request,
                                                 v1::ReduceResponse* response) {
  return Start(
      core_, "Reduce", *context, *request, *response, {{"x", &request->x()}},
      [request, response](auto& call, Stream& stream, absl::Span<const View> x) -> absl::Status {
        absl::StatusOr<ReduceOp> op = FromProto(request->op());
        if (!op.ok()) return op.status();
        if (request->axes_size() > 0) {
          const absl::Span<const int> axes = ToSpan(request->axes());
          return call.ReturnArray(
              stream, ReduceAxesType(x[0], *op, axes, request->keep_dims()), [&](Output output) {
                return RunReduceAxes(stream, x[0], *op, axes, output, call.Options(stream));
              });
        }
        if (request->result().has_buffer()) {
          return MakeError(StatusCode::kInvalidArgument, "BAD_AXES",
                           "a result buffer needs axes; name all of them to fold all",
                           {{"field", "axes"}});
        }
        auto result = RunReduce(stream, x[0], *op, call.Options(stream));
        if (!result.ok()) return result.status();
        SetScalar(*result, response->mutable_value());
        if (IsArg(*op)) response->set_index(result->value.index);
        call.SetStats(result->stats, stream);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* ComputeService::Matmul(grpc::CallbackServerContext* context,
                                                 const v1::MatmulRequest* request,
                                                 v1::MatmulResponse* response) {
  return Start(
      core_, "Matmul", *context, *request, *response, {{"a", &request->a()}, {"b", &request->b()}},
      [request](auto& call, Stream& stream, absl::Span<const View> x) -> absl::Status {
        DType out_dtype = x[0].dtype;
        if (request->out_dtype() != v1::DTYPE_UNSPECIFIED) {
          absl::StatusOr<DType> asked = FromProto(request->out_dtype(), "out_dtype");
          if (!asked.ok()) return asked.status();
          out_dtype = *asked;
        }
        const bool transpose_a = request->transpose_a();
        const bool transpose_b = request->transpose_b();
        return call.ReturnArray(stream, MatmulType(x[0], x[1], transpose_a, transpose_b, out_dtype),
                                [&](Output output) {
                                  return RunMatmul(stream, x[0], x[1], transpose_a, transpose_b,
                                                   out_dtype, output, call.Options(stream));
                                });
      });
}

grpc::ServerUnaryReactor* ComputeService::Add(grpc::CallbackServerContext* context,
                                              const v1::AddRequest* request,
                                              v1::AddResponse* response) {
  return Start(core_, "Add", *context, *request, *response,
               {{"a", &request->a()}, {"b", &request->b()}},
               [](auto& call, Stream& stream, absl::Span<const View> x) -> absl::Status {
                 return call.ReturnArray(stream, AddType(x[0], x[1]), [&](Output output) {
                   return RunAdd(stream, x[0], x[1], output, call.Options(stream));
                 });
               });
}

grpc::ServerUnaryReactor* ComputeService::WindowSum(grpc::CallbackServerContext* context,
                                                    const v1::WindowSumRequest* request,
                                                    v1::WindowSumResponse* response) {
  return Start(
      core_, "WindowSum", *context, *request, *response, {{"x", &request->x()}},
      [request](auto& call, Stream& stream, absl::Span<const View> x) -> absl::Status {
        return call.ReturnArray(stream, WindowSumType(x[0], request->radius()), [&](Output output) {
          return RunWindowSum(stream, x[0], request->radius(), output, call.Options(stream));
        });
      });
}

grpc::ServerUnaryReactor* ComputeService::ListStrategies(grpc::CallbackServerContext* context,
                                                         const v1::ListStrategiesRequest* request,
                                                         v1::ListStrategiesResponse* response) {
  return AnswerLater(
      core_, "ListStrategies", *context, *request, *response,
      [this, request, response]() -> absl::Status {
        std::vector<Device*> devices;
        for (const std::unique_ptr<Device>& device : core_.devices())
          devices.push_back(device.get());
        const std::string& operation = request->operation();
        const std::string& backend = request->backend();
        if (!backend.empty() && backend != Name(Backend::kCpu) && backend != Name(Backend::kCuda)) {
          return BadOperation("backend", backend, "cpu, cuda");
        }
        std::string operations;  // those there are, for the message
        bool known = operation.empty();
        std::string_view last;
        for (const StrategyInfo& strategy : tessera::ListStrategies(devices)) {
          if (strategy.operation != last) {
            last = strategy.operation;
            absl::StrAppend(&operations, operations.empty() ? "" : ", ", std::string(last));
          }
          known = known || strategy.operation == operation;
          if (!operation.empty() && strategy.operation != operation) continue;
          if (!backend.empty() && Name(strategy.backend) != backend) continue;
          v1::Strategy* out = response->add_strategies();
          out->set_operation(std::string(strategy.operation));
          out->set_name(std::string(strategy.name));
          out->set_summary(std::string(strategy.summary));
          out->set_backend(std::string(Name(strategy.backend)));
          for (int dtype = v1::Dtype_MIN + 1; dtype <= v1::Dtype_MAX; ++dtype) {
            if (strategy.dtypes.Contains(static_cast<DType>(dtype))) {
              out->add_dtypes(static_cast<v1::Dtype>(dtype));
            }
          }
          out->set_deterministic(strategy.deterministic);
          out->set_vendor(strategy.vendor);
          out->set_available(strategy.available);
          out->set_needs(strategy.needs);
          out->set_bytes(strategy.cost.bytes);
          out->set_flops(strategy.cost.flops);
          out->set_roundoff(strategy.roundoff);
          out->set_min_compute_capability(strategy.min_compute_capability);
          out->set_source(std::string(strategy.source));
          out->set_default_(strategy.chosen);
          SetRange(strategy.limits.block_size, [&] { return out->mutable_block_size(); });
          SetRange(strategy.limits.grid_size, [&] { return out->mutable_grid_size(); });
          SetRange(strategy.limits.items_per_thread,
                   [&] { return out->mutable_items_per_thread(); });
        }
        return known ? absl::OkStatus() : BadOperation("operation", operation, operations);
      });
}

grpc::ServerUnaryReactor* ComputeService::GetServerInfo(grpc::CallbackServerContext* context,
                                                        const v1::GetServerInfoRequest* request,
                                                        v1::GetServerInfoResponse* response) {
  return AnswerLater(core_, "GetServerInfo", *context, *request, *response, [this, response] {
    const Options& options = core_.options();
    response->set_version(TESSERA_VERSION);
    for (const std::unique_ptr<Device>& device : core_.devices()) {
      const DeviceInfo& info = device->info();
      const Budget& budget = core_.store().budget(*device);
      v1::Device* out = response->add_devices();
      out->set_name(info.name);
      out->set_model(info.model);
      out->set_backend(std::string(Name(info.backend)));
      out->set_compute_capability(info.compute_capability);
      out->set_multiprocessors(info.multiprocessors);
      out->set_memory_total_bytes(info.memory_bytes);
      out->set_memory_free_bytes(device->lost() ? 0 : device->FreeBytes());
      out->set_buffer_limit_bytes(budget.limit());
      out->set_buffer_used_bytes(budget.used());
      out->set_workers(core_.compute(*device).workers());
      out->set_waiting(static_cast<std::uint32_t>(core_.compute(*device).waiting()));
      out->set_scratch_limit_bytes(core_.scratch(*device).limit());
      out->set_scratch_used_bytes(core_.scratch(*device).used());
    }
    for (const auto& [name, budget] : core_.Budgets()) {
      v1::Budget* out = response->add_budgets();
      out->set_name(std::string(name));
      out->set_limit(budget.limit);
      out->set_used(budget.used);
    }
    v1::Limits* limits = response->mutable_limits();
    limits->set_max_message_bytes(options.max_message);
    limits->set_max_inline_result_bytes(kMaxInlineResult);
    limits->set_queue_length(options.queue);
    if (options.default_ttl != absl::InfiniteDuration()) {
      *limits->mutable_default_ttl() = ToProto(options.default_ttl);
    }
    if (options.max_ttl != absl::InfiniteDuration()) {
      *limits->mutable_max_ttl() = ToProto(options.max_ttl);
    }
    *limits->mutable_max_operation() = ToProto(absl::Seconds(options.max_operation_seconds));
    *limits->mutable_max_slow_operation() =
        ToProto(absl::Seconds(options.max_slow_operation_seconds));
    limits->set_max_ranges(static_cast<std::uint32_t>(options.max_ranges));
    *response->mutable_start_time() = ToProto(core_.start_time());
    return absl::OkStatus();
  });
}

}  // namespace tessera
