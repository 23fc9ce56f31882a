#include "server/compute/compute_service.h"

#include <algorithm>
#include <array>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "server/calls/buffer_messages.h"
#include "server/calls/device_call.h"
#include "server/calls/unary_call.h"
#include "server/compute/execute_call.h"
#include "server/compute/map_message.h"
#include "server/compute/operations.h"
#include "server/compute/shard_team.h"
#include "server/rpc/convert.h"

namespace tessera {
namespace {

using absl::StatusCode;

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

void AddTenants(Core& core, v1::GetServerInfoResponse& response) {
  const auto limit = [](const Quota& quota) {
    return quota.limit() == kUnlimited ? 0 : quota.limit();
  };
  for (Tenant* tenant : core.tenants().All()) {
    if (tenant->name().empty()) continue;
    const BufferStore& store = tenant->store();
    v1::TenantUsage& out = *response.add_tenants();
    out.set_name(tenant->name());
    out.set_buffers(store.own_count().used());
    std::uint64_t bytes = 0;
    for (const std::unique_ptr<Device>& device : core.devices())
      bytes += store.own_bytes(*device).used();
    out.set_buffer_bytes(bytes);
    out.set_calls(tenant->calls().used());
    out.set_ended_calls(tenant->ended_calls());
    out.set_refused_calls(tenant->refused_calls());
    out.set_buffers_quota(limit(store.own_count()));
    out.set_buffer_bytes_quota(limit(store.own_bytes(core.FirstDevice())));
    out.set_calls_quota(limit(tenant->calls()));
  }
}

// One operation: holds its operands from acceptance to its end, and fills in its response.
template <class Request, class Response>
class OperationCall final : public DeviceCall {
 public:
  OperationCall(Core& core, std::string_view method, UnaryExchangeOf<Request, Response>& exchange)
      : DeviceCall(core, method, exchange),
        request_(exchange.request()),
        response_(exchange.response()) {}

 private:
  absl::StatusOr<Device*> Prepare() override {
    NoteStrategy(request_.strategy());
    for (const v1::Result* destination : DestinationsOf(request_)) {
      if (destination->has_scratch()) {
        return MakeError(StatusCode::kInvalidArgument, "BAD_RESULT",
                         "scratch memory is for the steps of a program", {{"field", "result"}});
      }
      if (!destination->has_buffer()) continue;
      if (absl::Status status = RequireWrite(); !status.ok()) return status;
    }
    absl::StatusOr<Sources> sources = FindSources(OperandsOf(request_), store());
    if (!sources.ok()) return sources.status();
    sources_ = *std::move(sources);
    if constexpr (std::is_same_v<Request, v1::MatmulRequest>)
      MarkScattered(absl::MakeSpan(sources_));
    Device* const device = DeviceOf(sources_);
    return device != nullptr ? device : &core().FirstDevice();
  }

  TaskSize SizeOn(const Device& device) override {
    for (const OperandSource& source : sources_)
      if (source.IsElsewhere(device) ||
          (source.buffer != nullptr && source.buffer->shards().size() > 1))
        return TaskSize::kLarge;
    if (!request_.strategy().empty()) return TaskSize::kLarge;
    double least = LeastMicroseconds(request_, sources_, device);
    const Destinations destinations = DestinationsOf(request_);
    if (std::any_of(destinations.begin(), destinations.end(),
                    [](const v1::Result* destination) { return IsInline(*destination); })) {
      Views views;
      for (const OperandSource& source : sources_) views.push_back(source.view);
      if (const absl::StatusOr<ResultType> type = ResultTypeOf(request_, views); type.ok())
        least += AnswerMicroseconds(destinations, *type, device);
    }
    return SizeOf(least, !request_.timing());
  }

  absl::Status RunOn(Stream& stream) override {
    Views views;
    for (OperandSource& source : sources_) {
      absl::StatusOr<View> view = PlaceOnStream(core(), source, stream);
      if (!view.ok()) return view.status();
      views.push_back(*view);
    }
    absl::StatusOr<ResultType> type = ResultTypeOf(request_, views);
    if (!type.ok()) return type.status();
    absl::StatusOr<ScalarResult> result =
        type->scalar ? RunScalar(stream, views) : RunArrays(stream, views, type->arrays);
    if (!result.ok()) return result.status();
    v1::ExecutionStats& stats = *response_.mutable_stats();
    SetStats(result->stats, stream.device(), sources_, stats);
    NoteStrategy(result->stats.strategy);
    if (request_.timing()) NoteKernel(result->stats.kernel_us);
    stats.set_queue_us(queue_us());
    stats.set_total_us(total_us());
    return absl::OkStatus();
  }

  // The drafts of the arrays that become buffers.
  using Drafts = std::array<std::optional<ResultDraft>, kMostResults>;

  absl::StatusOr<ScalarResult> RunWith(Stream& stream, const Views& views, Outputs out) {
    RunOptions options = OptionsOf(request_, core(), stream.device());
    std::optional<ShardTeam> team = ShardTeam::Of(core(), request_, sources_, stream.device());
    if (team.has_value()) options.team = &*team;
    const auto find = [this](const void* address) { return BufferAt(sources_, address); };
    PreparedOperands::Call prepared(core().tenants().prepared(stream.device()), stream, find);
    absl::StatusOr<ScalarResult> result = tessera::Run(request_, stream, views, out, options);
    if (result.ok()) {
      result->stats.prepared_bytes = prepared.EndOperation(/*done=*/true);
      prepared.Finish();
    }
    return result;
  }

  absl::StatusOr<ScalarResult> RunScalar(Stream& stream, const Views& views) {
    const Output nowhere(nullptr);
    absl::StatusOr<ScalarResult> result = RunWith(stream, views, {&nowhere, 1});
    if (result.ok()) SetValue(request_, *result, response_);
    return result;
  }

  absl::StatusOr<ScalarResult> RunArrays(Stream& stream, const Views& views,
                                         absl::Span<const ArrayType> types) {
    Drafts drafts;
    if (absl::Status status = PlanArrays(stream.device(), types, drafts); !status.ok())
      return status;
    std::array<void*, kMostResults> memory{};
    const auto open = [&](std::size_t i) -> absl::StatusOr<void*> {
      if (stream.stopped()) return CallerLeft();
      absl::StatusOr<void*> opened =
          drafts[i].has_value() ? drafts[i]->Open() : Scratch(stream, types[i].bytes());
      if (opened.ok()) memory[i] = *opened;
      return opened;
    };
    const auto first = [&] { return open(0); };
    const auto second = [&] { return open(1); };
    const Output outputs[kMostResults] = {first, second};
    absl::StatusOr<ScalarResult> result = RunWith(stream, views, outputs);
    if (!result.ok()) return result;
    absl::Status answered = AnswerArrays(stream, types, memory, drafts);
    if (!answered.ok()) return answered;
    return result;
  }

  // Makes the drafts of arrays that become buffers, and takes memory in the response for the
  // others.
  absl::Status PlanArrays(Device& device, absl::Span<const ArrayType> types, Drafts& drafts) {
    const Destinations destinations = DestinationsOf(request_);
    std::uint64_t inline_bytes = 0;
    for (std::size_t i = 0; i < types.size(); ++i) {
      if (destinations[i]->has_buffer()) {
        absl::StatusOr<BufferSpec> spec =
            MakeSpec(destinations[i]->buffer(), types[i], device, core());
        if (!spec.ok()) return spec.status();
        drafts[i].emplace(store(), *std::move(spec));
        continue;
      }
      if (absl::Status status = CheckInline(types[i], inline_bytes); !status.ok()) return status;
      inline_bytes += types[i].bytes();
    }
    return inline_bytes == 0 ? absl::OkStatus() : ChargeAnswer(inline_bytes);
  }

  // Buffers get their names only after everything else has succeeded.
  absl::Status AnswerArrays(Stream& stream, absl::Span<const ArrayType> types,
                            absl::Span<void* const> memory, Drafts& drafts) {
    if constexpr (requires { TensorOf(response_, 0); }) {
      for (std::size_t i = 0; i < types.size(); ++i) {
        if (drafts[i].has_value()) continue;
        v1::Tensor& tensor = TensorOf(response_, i);
        SetType(types[i], tensor);
        std::string& data = *tensor.mutable_data();
        data.resize(types[i].bytes());
        absl::Status copied = CopyToHost(stream, data.data(), memory[i], data.size());
        if (!copied.ok()) return copied;
      }
      const bool stores = std::any_of(drafts.begin(), drafts.end(),
                                      [](const auto& draft) { return draft.has_value(); });
      if (stores && stream.stopped()) return CallerLeft();
      absl::InlinedVector<ResultDraft*, kMostResults> results;
      for (std::optional<ResultDraft>& draft : drafts)
        if (draft.has_value()) results.push_back(&*draft);
      absl::StatusOr<std::vector<BufferInfo>> sealed = ResultDraft::SealAll(results);
      if (!sealed.ok()) return sealed.status();
      auto info = sealed->begin();
      for (std::size_t i = 0; i < types.size(); ++i)
        if (drafts[i].has_value()) SetBuffer(*info++, &BufferOf(response_, i));
    }
    return absl::OkStatus();
  }

  void Release(Chores* chores) override {
    if (chores != nullptr)
      for (OperandSource& source : sources_) chores->Release(std::move(source.buffer));
    sources_.clear();
  }

  const Request& request_;
  Response& response_;
  Sources sources_;
};

// The types of a method's messages.
template <class Request, class Response>
struct Types {};

}  // namespace

void ComputeService::Serve(CallQueues& queues) {
  const auto operation = [&]<class Request, class Response>(std::string_view method, auto ask,
                                                            Types<Request, Response>) {
    AcceptUnary<Request, Response>(queues, *this, ask, AdmitTo(core_, method),
                                   [this, method](UnaryExchangeOf<Request, Response>& exchange) {
                                     auto call = std::make_unique<OperationCall<Request, Response>>(
                                         core_, method, exchange);
                                     OperationCall<Request, Response>& started = *call;
                                     exchange.Serve(std::move(call));
                                     started.Start();
                                   });
  };
  operation("Dot", &ComputeService::RequestDot, Types<v1::DotRequest, v1::DotResponse>());
  operation("Reduce", &ComputeService::RequestReduce,
            Types<v1::ReduceRequest, v1::ReduceResponse>());
  operation("Matmul", &ComputeService::RequestMatmul,
            Types<v1::MatmulRequest, v1::MatmulResponse>());
  operation("Add", &ComputeService::RequestAdd, Types<v1::AddRequest, v1::AddResponse>());
  operation("WindowSum", &ComputeService::RequestWindowSum,
            Types<v1::WindowSumRequest, v1::WindowSumResponse>());
  operation("Map", &ComputeService::RequestMap, Types<v1::MapRequest, v1::MapResponse>());
  operation("TopK", &ComputeService::RequestTopK, Types<v1::TopKRequest, v1::TopKResponse>());
  AcceptUnary<grpc::ByteBuffer, grpc::ByteBuffer>(
      queues, *this, &ComputeService::RequestExecute, AdmitTo(core_, "Execute"),
      [this](auto& exchange) {
        auto call = std::make_unique<ExecuteCall>(core_, exchange);
        ExecuteCall& started = *call;
        exchange.Serve(std::move(call));
        started.Start();
      });
  AcceptUnary<v1::ListStrategiesRequest, v1::ListStrategiesResponse>(
      queues, *this, &ComputeService::RequestListStrategies, AdmitTo(core_, "ListStrategies"),
      [this](auto& exchange) { ListStrategies(exchange); });
  AcceptUnary<v1::GetServerInfoRequest, v1::GetServerInfoResponse>(
      queues, *this, &ComputeService::RequestGetServerInfo, AdmitTo(core_, "GetServerInfo"),
      [this](auto& exchange) { GetServerInfo(exchange); });
}

void ComputeService::ListStrategies(
    UnaryExchangeOf<v1::ListStrategiesRequest, v1::ListStrategiesResponse>& exchange) {
  AnswerLater(
      core_, "ListStrategies", Effect::kNone, exchange,
      [this, request = &exchange.request(),
       response = &exchange.response()](const Caller&) -> absl::Status {
        std::vector<Device*> devices;
        for (const std::unique_ptr<Device>& device : core_.devices())
          devices.push_back(device.get());
        const std::string& operation = request->operation();
        const std::string& backend = request->backend();
        if (!backend.empty() && backend != Name(Backend::kCpu) && backend != Name(Backend::kCuda)) {
          return BadOperation("backend", backend, "cpu, cuda");
        }
        std::string operations;  // the known ones, for the error
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

void ComputeService::GetServerInfo(
    UnaryExchangeOf<v1::GetServerInfoRequest, v1::GetServerInfoResponse>& exchange) {
  AnswerLater(
      core_, "GetServerInfo", Effect::kNone, exchange,
      [this, response = &exchange.response()](const Caller& caller) {
        const bool whole = caller.sees_all();
        const BufferStore& own = caller.tenant->store();
        const Options& options = core_.options();
        response->set_version(TESSERA_VERSION);
        for (const std::unique_ptr<Device>& device : core_.devices()) {
          const DeviceInfo& info = device->info();
          const Budget& budget = core_.tenants().budget(*device);
          v1::Device* out = response->add_devices();
          out->set_name(info.name);
          out->set_model(info.model);
          out->set_backend(std::string(Name(info.backend)));
          out->set_compute_capability(info.compute_capability);
          out->set_multiprocessors(info.multiprocessors);
          out->set_memory_total_bytes(info.memory_bytes);
          out->set_workers(core_.compute(*device).workers());
          out->set_scratch_limit_bytes(core_.scratch(*device).limit());
          out->set_lost(device->lost());
          if (whole) {
            out->set_prepared_bytes(core_.tenants().prepared(*device).bytes());
            const bool answers = !device->lost() && core_.IsAnswering(*device);
            out->set_memory_free_bytes(answers ? device->FreeBytes() : 0);
            out->set_buffer_limit_bytes(budget.limit());
            out->set_buffer_used_bytes(core_.tenants().buffer_bytes(*device));
            out->set_waiting(static_cast<std::uint32_t>(core_.compute(*device).waiting()));
            out->set_scratch_used_bytes(core_.scratch(*device).used());
          } else {
            // Only an admin sees what other tenants use.
            const std::uint64_t used = own.own_bytes(*device).used();
            const std::uint64_t limit = std::min(budget.limit(), own.own_bytes(*device).limit());
            out->set_memory_free_bytes(limit - std::min(limit, used));
            out->set_buffer_limit_bytes(limit);
            out->set_buffer_used_bytes(used);
          }
        }
        const auto add_budget = [&](std::string_view name, std::uint64_t limit,
                                    std::uint64_t used) {
          v1::Budget* out = response->add_budgets();
          out->set_name(std::string(name));
          out->set_limit(limit);
          out->set_used(used);
        };
        if (whole) {
          for (const auto& [name, budget] : core_.Budgets())
            add_budget(name, budget.limit, budget.used);
        } else {
          const Quota &buffers = own.own_count(), &calls = caller.tenant->calls();
          add_budget("buffers", std::min(core_.tenants().count().limit(), buffers.limit()),
                     buffers.used());
          add_budget("calls", calls.limit(), calls.used());
        }
        if (whole && core_.access().restricted()) AddTenants(core_, *response);
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
        limits->set_max_steps(kMaxSteps);
        *response->mutable_start_time() = ToProto(core_.start_time());
        return absl::OkStatus();
      });
}

}  // namespace tessera
