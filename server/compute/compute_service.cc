#include "server/compute/compute_service.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "server/calls/unary_call.h"
#include "server/compute/execute_call.h"
#include "server/compute/operation_call.h"
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

}  // namespace

void ComputeService::Serve(CallQueues& queues) {
  // Accepts the calls of a method. Each call is handled by an object of class Call.
  const auto serve = [&]<class Call, class Request, class Response>(std::string_view method,
                                                                    auto ask) {
    AcceptUnary<Request, Response>(queues, *this, ask, AdmitTo(core_, method),
                                   [this, method](UnaryExchangeOf<Request, Response>& exchange) {
                                     auto call = std::make_unique<Call>(core_, method, exchange);
                                     Call& started = *call;
                                     exchange.Serve(std::move(call));
                                     started.Start();
                                   });
  };
#define TESSERA_SERVE(Method, field)                                           \
  serve.operator()<OperationCallOf<v1::Method##Request, v1::Method##Response>, \
                   v1::Method##Request, v1::Method##Response>(#Method,         \
                                                              &ComputeService::Request##Method);
  TESSERA_OPERATION_METHODS(TESSERA_SERVE)
#undef TESSERA_SERVE
  serve.operator()<ExecuteCall, v1::ExecuteRequest, v1::ExecuteResponse>(
      "Execute", &ComputeService::RequestExecute);
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
        std::string operations;  // the known operations, for the error
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
        *limits->mutable_max_slow_operation() = ToProto(absl::Seconds(options.MaxSlowSeconds()));
        limits->set_max_ranges(static_cast<std::uint32_t>(options.max_ranges));
        limits->set_max_steps(kMaxSteps);
        *response->mutable_start_time() = ToProto(core_.start_time());
        return absl::OkStatus();
      });
}

}  // namespace tessera
