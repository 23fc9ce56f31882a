#include "server/compute_service.h"

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/error.h"
#include "server/buffer_service.h"
#include "server/convert.h"

namespace tessera {
namespace {

using absl::StatusCode;

// An operand as a call holds it between its acceptance and its end.
struct Source {
  const v1::Operand* operand = nullptr;
  std::shared_ptr<const Buffer> buffer;  // null: inline
  ArrayType type;
};

absl::StatusOr<Source> FindSource(const v1::Operand& operand, BufferStore& store) {
  switch (operand.source_case()) {
    case v1::Operand::kBuffer: {
      absl::StatusOr<std::shared_ptr<const Buffer>> buffer = store.Find(operand.buffer());
      if (!buffer.ok()) return buffer.status();
      const ArrayType type = (*buffer)->type();
      return Source{&operand, *std::move(buffer), type};
    }
    case v1::Operand::kTensor: {
      const v1::Tensor& tensor = operand.tensor();
      absl::StatusOr<ArrayType> type = MakeArrayType(tensor.dtype(), tensor.shape(), "tensor");
      if (!type.ok()) return type.status();
      if (tensor.data().size() != type->bytes()) {
        return MakeError(StatusCode::kInvalidArgument, "BAD_OPERAND",
                         "the data of an inline operand does not fit its dtype and shape",
                         {{"field", "tensor.data"},
                          {"value", absl::StrCat(tensor.data().size())},
                          {"expected", absl::StrCat(type->bytes())}});
      }
      return Source{&operand, nullptr, *type};
    }
    case v1::Operand::SOURCE_NOT_SET:
      break;
  }
  return MakeError(StatusCode::kInvalidArgument, "BAD_OPERAND",
                   "an operand names a buffer or carries a tensor", {{"field", "source"}});
}

// The operand on the lane's device. Inline data moves to scratch: in a message it has no alignment
// to rely on.
absl::StatusOr<View> PlaceOnLane(const Source& source, Lane& lane) {
  if (source.buffer != nullptr)
    return MakeView(*source.operand, source.type, source.buffer->data());
  const std::string& data = source.operand->tensor().data();
  absl::StatusOr<void*> memory = Scratch(lane, data.size());
  if (!memory.ok()) return memory.status();
  absl::Status status = CopyToDevice(lane, *memory, data.data(), data.size());
  if (!status.ok()) return status;
  return MakeView(*source.operand, source.type, *memory);
}

template <class Request>
RunOptions ToRunOptions(const Request& request) {
  return {request.strategy(), FromProto(request.launch()), request.timing()};
}

void SetStats(const Stats& stats, const Lane& lane, v1::ExecutionStats* out) {
  out->set_strategy(std::string(stats.strategy));
  out->set_device(lane.device().info().name);
  out->set_kernel_us(stats.kernel_us);
  out->set_bytes(stats.bytes);
  out->set_flops(stats.flops);
  out->set_roundoff(stats.roundoff);
}

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

}  // namespace

// From acceptance to Finish.
struct ComputeService::Call {
  std::string_view method;
  grpc::CallbackServerContext* context;
  grpc::ServerUnaryReactor* reactor;
  Body body;
  Admission::Ticket ticket;
  std::vector<Source> sources;

  void Run(absl::StatusOr<Lane*> lane) {
    absl::Status status = lane.status();
    if (lane.ok()) status = RunOn(**lane);
    sources.clear();  // a client that has its answer may count on the memory of what it has deleted
    Finish(method, *context, *reactor, status);
  }

  absl::Status RunOn(Lane& lane) try {
    if (absl::Status status = BeginRequest(lane); !status.ok()) return status;
    std::vector<View> views;
    for (const Source& source : sources) {
      absl::StatusOr<View> view = PlaceOnLane(source, lane);
      if (!view.ok()) return view.status();
      views.push_back(*view);
    }
    return body(lane, views);
  } catch (const std::bad_alloc&) {
    return HostMemoryError();
  }
};

grpc::ServerUnaryReactor* ComputeService::Start(std::string_view method,
                                                grpc::CallbackServerContext* context,
                                                const google::protobuf::Message& request,
                                                std::initializer_list<const v1::Operand*> operands,
                                                Body body) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  absl::Status status;
  try {
    auto call = std::make_unique<Call>(Call{method, context, reactor, std::move(body), {}, {}});
    status = Enqueue(call, request, operands);
  } catch (const std::bad_alloc&) {
    status = HostMemoryError();
  }
  if (!status.ok()) Finish(method, *context, *reactor, status);
  return reactor;
}

absl::Status ComputeService::Enqueue(std::unique_ptr<Call>& call,
                                     const google::protobuf::Message& request,
                                     std::initializer_list<const v1::Operand*> operands) {
  absl::StatusOr<Admission::Ticket> ticket = core_.admission().Enter();
  if (!ticket.ok()) return ticket.status();
  call->ticket = *std::move(ticket);
  if (absl::Status status = core_.CheckSize(request); !status.ok()) return status;

  const Buffer* first = nullptr;
  for (const v1::Operand* operand : operands) {
    absl::StatusOr<Source> source = FindSource(*operand, core_.store());
    if (!source.ok()) return source.status();
    const Buffer* buffer = source->buffer.get();
    if (first == nullptr) first = buffer;
    if (buffer != nullptr && &buffer->device() != &first->device()) {
      return MakeError(StatusCode::kFailedPrecondition, "DEVICE_MISMATCH",
                       "the operands live on different devices; upload one of them to the other's",
                       {{first->name(), first->device().info().name},
                        {buffer->name(), buffer->device().info().name}});
    }
    call->sources.push_back(*std::move(source));
  }

  Device& device = first != nullptr ? first->device() : *core_.devices().front();
  Task task;
  task.deadline = call->context->deadline();
  task.cancelled = [context = call->context] { return context->IsCancelled(); };
  task.run = [held = std::move(call)](absl::StatusOr<Lane*> lane) { held->Run(std::move(lane)); };
  return core_.compute(device).Submit(std::move(task));
}

template <class Response, class Run>
absl::Status ComputeService::ReturnArray(Lane& lane, const absl::StatusOr<ArrayType>& type,
                                         const v1::Result& result, Response* response, Run run) {
  if (!type.ok()) return type.status();
  const std::uint64_t bytes = type->bytes();
  if (!result.has_buffer()) {
    if (bytes > kMaxInlineResult) {
      return MakeError(StatusCode::kInvalidArgument, "RESULT_TOO_LARGE",
                       "the result is too large for a response; ask for it in result.buffer",
                       {{"size", absl::StrCat(bytes)}, {"limit", absl::StrCat(kMaxInlineResult)}});
    }
    absl::StatusOr<void*> memory = Scratch(lane, bytes);
    if (!memory.ok()) return memory.status();
    absl::StatusOr<Stats> stats = run(*memory);
    if (!stats.ok()) return stats.status();
    v1::Tensor* tensor = response->mutable_tensor();
    tensor->set_dtype(ToProto(type->dtype));
    SetShape(type->shape, tensor->mutable_shape());
    tensor->mutable_data()->resize(bytes);
    absl::Status status = CopyToHost(lane, tensor->mutable_data()->data(), *memory, bytes);
    if (!status.ok()) return status;
    SetStats(*stats, lane, response->mutable_stats());
    return absl::OkStatus();
  }

  const v1::BufferTarget& target = result.buffer();
  BufferSpec spec{.name = target.name(),
                  .type = *type,
                  .device = &lane.device(),
                  .replace = target.replace(),
                  .exclusive = true};
  if (target.has_ttl()) {
    absl::StatusOr<absl::Duration> ttl = FromProto(target.ttl());
    if (!ttl.ok()) return ttl.status();
    spec.ttl = *ttl;
  }
  absl::StatusOr<Stats> stats;
  absl::StatusOr<BufferInfo> buffer = core_.store().CreateFrom(spec, [&](void* memory) {
    stats = run(memory);
    return stats.status();
  });
  if (!buffer.ok()) return buffer.status();
  SetBuffer(*buffer, response->mutable_buffer());
  SetStats(*stats, lane, response->mutable_stats());
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* ComputeService::Dot(grpc::CallbackServerContext* context,
                                              const v1::DotRequest* request,
                                              v1::DotResponse* response) {
  return Start("Dot", context, *request, {&request->a(), &request->b()},
               [request, response](Lane& lane, absl::Span<const View> x) -> absl::Status {
                 auto result = RunDot(lane, x[0], x[1], ToRunOptions(*request));
                 if (!result.ok()) return result.status();
                 SetScalar(*result, response->mutable_value());
                 SetStats(result->stats, lane, response->mutable_stats());
                 return absl::OkStatus();
               });
}

grpc::ServerUnaryReactor* ComputeService::Reduce(grpc::CallbackServerContext* context,
                                                 const v1::ReduceRequest* request,
                                                 v1::ReduceResponse* response) {
  return Start("Reduce", context, *request, {&request->x()},
               [this, request, response](Lane& lane, absl::Span<const View> x) -> absl::Status {
                 absl::StatusOr<ReduceOp> op = FromProto(request->op());
                 if (!op.ok()) return op.status();
                 if (request->axes_size() > 0) {
                   const absl::Span<const int> axes = ToSpan(request->axes());
                   return ReturnArray(lane, ReduceAxesType(x[0], *op, axes, request->keep_dims()),
                                      request->result(), response, [&](void* out) {
                                        return RunReduceAxes(lane, x[0], *op, axes, out,
                                                             ToRunOptions(*request));
                                      });
                 }
                 if (request->result().has_buffer()) {
                   return MakeError(StatusCode::kInvalidArgument, "BAD_AXES",
                                    "a result buffer needs axes; name all of them to fold all",
                                    {{"field", "axes"}});
                 }
                 auto result = RunReduce(lane, x[0], *op, ToRunOptions(*request));
                 if (!result.ok()) return result.status();
                 SetScalar(*result, response->mutable_value());
                 if (IsArg(*op)) response->set_index(result->value.index);
                 SetStats(result->stats, lane, response->mutable_stats());
                 return absl::OkStatus();
               });
}

grpc::ServerUnaryReactor* ComputeService::Matmul(grpc::CallbackServerContext* context,
                                                 const v1::MatmulRequest* request,
                                                 v1::MatmulResponse* response) {
  return Start("Matmul", context, *request, {&request->a(), &request->b()},
               [this, request, response](Lane& lane, absl::Span<const View> x) -> absl::Status {
                 DType out_dtype = x[0].dtype;
                 if (request->out_dtype() != v1::DTYPE_UNSPECIFIED) {
                   absl::StatusOr<DType> asked = FromProto(request->out_dtype(), "out_dtype");
                   if (!asked.ok()) return asked.status();
                   out_dtype = *asked;
                 }
                 const bool ta = request->transpose_a();
                 const bool tb = request->transpose_b();
                 return ReturnArray(lane, MatmulType(x[0], x[1], ta, tb, out_dtype),
                                    request->result(), response, [&](void* out) {
                                      return RunMatmul(lane, x[0], x[1], ta, tb, out_dtype, out,
                                                       ToRunOptions(*request));
                                    });
               });
}

grpc::ServerUnaryReactor* ComputeService::Add(grpc::CallbackServerContext* context,
                                              const v1::AddRequest* request,
                                              v1::AddResponse* response) {
  return Start("Add", context, *request, {&request->a(), &request->b()},
               [this, request, response](Lane& lane, absl::Span<const View> x) -> absl::Status {
                 return ReturnArray(lane, AddType(x[0], x[1]), request->result(), response,
                                    [&](void* out) {
                                      return RunAdd(lane, x[0], x[1], out, ToRunOptions(*request));
                                    });
               });
}

grpc::ServerUnaryReactor* ComputeService::WindowSum(grpc::CallbackServerContext* context,
                                                    const v1::WindowSumRequest* request,
                                                    v1::WindowSumResponse* response) {
  return Start("WindowSum", context, *request, {&request->x()},
               [this, request, response](Lane& lane, absl::Span<const View> x) -> absl::Status {
                 return ReturnArray(lane, WindowSumType(x[0], request->radius()), request->result(),
                                    response, [&](void* out) {
                                      return RunWindowSum(lane, x[0], request->radius(), out,
                                                          ToRunOptions(*request));
                                    });
               });
}

grpc::ServerUnaryReactor* ComputeService::ListStrategies(grpc::CallbackServerContext* context,
                                                         const v1::ListStrategiesRequest* request,
                                                         v1::ListStrategiesResponse* response) {
  return Answer(core_, "ListStrategies", *context, *request, [&]() -> absl::Status {
    std::vector<Device*> devices;
    for (const std::unique_ptr<Device>& device : core_.devices()) devices.push_back(device.get());
    const std::string& operation = request->operation();
    const std::string& backend = request->backend();
    if (!backend.empty() && backend != Name(Backend::kCpu) && backend != Name(Backend::kCuda)) {
      return BadOperation("backend", backend, "cpu, cuda");
    }
    std::string operations;  // those there are, for the message
    bool known = operation.empty();
    std::string_view last;
    for (const StrategyInfo& row : tessera::ListStrategies(devices)) {
      if (row.operation != last) {
        last = row.operation;
        absl::StrAppend(&operations, operations.empty() ? "" : ", ", std::string(last));
      }
      known = known || row.operation == operation;
      if (!operation.empty() && row.operation != operation) continue;
      if (!backend.empty() && Name(row.backend) != backend) continue;
      v1::Strategy* out = response->add_strategies();
      out->set_operation(std::string(row.operation));
      out->set_name(std::string(row.name));
      out->set_summary(std::string(row.summary));
      out->set_backend(std::string(Name(row.backend)));
      for (int dtype = v1::Dtype_MIN + 1; dtype <= v1::Dtype_MAX; ++dtype) {
        if (row.dtypes.Contains(static_cast<DType>(dtype))) {
          out->add_dtypes(static_cast<v1::Dtype>(dtype));
        }
      }
      out->set_deterministic(row.deterministic);
      out->set_available(row.available);
      out->set_needs(row.needs);
      out->set_bytes(row.cost.bytes);
      out->set_flops(row.cost.flops);
      out->set_roundoff(row.roundoff);
      out->set_min_compute_capability(row.min_compute_capability);
      out->set_source(std::string(row.source));
      out->set_default_(row.chosen);
    }
    return known ? absl::OkStatus() : BadOperation("operation", operation, operations);
  });
}

grpc::ServerUnaryReactor* ComputeService::GetServerInfo(grpc::CallbackServerContext* context,
                                                        const v1::GetServerInfoRequest* request,
                                                        v1::GetServerInfoResponse* response) {
  return Answer(core_, "GetServerInfo", *context, *request, [&] {
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
    *response->mutable_start_time() = ToProto(core_.start_time());
    return absl::OkStatus();
  });
}

}  // namespace tessera
