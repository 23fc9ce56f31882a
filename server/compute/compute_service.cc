#include "server/compute/compute_service.h"

#include <algorithm>
#include <memory>
#include <string>
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

void SetStrategy(const StrategyInfo& strategy, v1::Strategy& out) {
  out.set_operation(std::string(strategy.operation));
  out.set_name(std::string(strategy.name));
  out.set_summary(std::string(strategy.summary));
  out.set_backend(std::string(Name(strategy.backend)));
  for (int dtype = v1::Dtype_MIN + 1; dtype <= v1::Dtype_MAX; ++dtype)
    if (strategy.dtypes.Contains(static_cast<DType>(dtype)))
      out.add_dtypes(static_cast<v1::Dtype>(dtype));
  out.set_deterministic(strategy.deterministic);
  out.set_vendor(strategy.vendor);
  out.set_available(strategy.available);
  out.set_needs(strategy.needs);
  out.set_bytes(strategy.cost.bytes);
  out.set_flops(strategy.cost.flops);
  out.set_roundoff(strategy.roundoff);
  out.set_min_compute_capability(strategy.min_compute_capability);
  out.set_source(std::string(strategy.source));
  out.set_default_(strategy.chosen);
  SetRange(strategy.limits.block_size, [&] { return out.mutable_block_size(); });
  SetRange(strategy.limits.grid_size, [&] { return out.mutable_grid_size(); });
  SetRange(strategy.limits.items_per_thread, [&] { return out.mutable_items_per_thread(); });
}

}  // namespace

void ComputeService::Serve(CallQueues& queues) {
  // Accepts the calls of a method. Each call is handled by an object of class Call.
  const auto serve = [&]<class Call, class Request, class Response>(std::string_view method,
                                                                    auto ask) {
    AcceptUnary<Request, Response>(
        queues, *this, ask, AdmitTo(parts_, method),
        [this, method](UnaryExchangeOf<Request, Response>& exchange) {
          exchange.Serve(std::make_unique<Call>(parts_, devices_, method, exchange)).Start();
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
  AnswerCalls(queues, parts_, *this, &ComputeService::RequestListStrategies, "ListStrategies",
              Effect::kNone, Thread::kChores, &ComputeService::ListStrategies);
  AnswerCalls(queues, parts_, *this, &ComputeService::RequestGetServerInfo, "GetServerInfo",
              Effect::kNone, Thread::kChores, &ComputeService::GetServerInfo);
}

absl::Status ComputeService::ListStrategies(const Caller&, const v1::ListStrategiesRequest& request,
                                            v1::ListStrategiesResponse& response) {
  std::vector<Device*> devices;
  for (const std::unique_ptr<Device>& device : devices_.list()) devices.push_back(device.get());
  const std::string& operation = request.operation();
  const std::string& backend = request.backend();
  if (!backend.empty() && backend != Name(Backend::kCpu) && backend != Name(Backend::kCuda))
    return BadOperation("backend", backend, "cpu, cuda");
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
    SetStrategy(strategy, *response.add_strategies());
  }
  return known ? absl::OkStatus() : BadOperation("operation", operation, operations);
}

absl::Status ComputeService::GetServerInfo(const Caller& caller, const v1::GetServerInfoRequest&,
                                           v1::GetServerInfoResponse& response) {
  response.set_version(TESSERA_VERSION);
  for (const std::unique_ptr<Device>& device : devices_.list())
    AddDevice(caller, *device, response);
  AddBudgets(caller, response);
  if (caller.sees_all() && parts_.access.restricted()) AddTenants(response);
  SetLimits(*response.mutable_limits());
  *response.mutable_start_time() = ToProto(start_time_);
  return absl::OkStatus();
}

void ComputeService::AddDevice(const Caller& caller, Device& device,
                               v1::GetServerInfoResponse& response) const {
  const DeviceInfo& info = device.info();
  const Budget &budget = tenants_.budget(device), &scratch = devices_.scratch(device);
  const Executor& compute = devices_.compute(device);
  v1::Device& out = *response.add_devices();
  out.set_name(info.name);
  out.set_model(info.model);
  out.set_backend(std::string(Name(info.backend)));
  out.set_compute_capability(info.compute_capability);
  out.set_multiprocessors(info.multiprocessors);
  out.set_workers(compute.workers());
  out.set_scratch_limit_bytes(scratch.limit());
  out.set_lost(device.lost());
  if (caller.sees_all()) {
    out.set_memory_total_bytes(info.memory_bytes);
    out.set_prepared_bytes(tenants_.prepared(device).bytes());
    const bool answers = !device.lost() && devices_.IsAnswering(device);
    out.set_memory_free_bytes(answers ? device.FreeBytes() : 0);
    out.set_buffer_limit_bytes(budget.limit());
    out.set_buffer_used_bytes(tenants_.buffer_bytes(device));
    out.set_waiting(static_cast<std::uint32_t>(compute.waiting()));
    out.set_scratch_used_bytes(scratch.used());
    return;
  }
  const Quota& own = caller.tenant->store().own_bytes(device);
  const std::uint64_t used = own.used(), limit = std::min(budget.limit(), own.limit());
  out.set_memory_free_bytes(limit - std::min(limit, used));
  out.set_buffer_limit_bytes(limit);
  out.set_buffer_used_bytes(used);
}

void ComputeService::AddBudgets(const Caller& caller, v1::GetServerInfoResponse& response) const {
  const auto add = [&](std::string_view name, std::uint64_t limit, std::uint64_t used) {
    v1::Budget* out = response.add_budgets();
    out->set_name(std::string(name));
    out->set_limit(limit);
    out->set_used(used);
  };
  if (caller.sees_all()) {
    for (const auto& [name, budget] : parts_.limits.Budgets()) add(name, budget.limit, budget.used);
    return;
  }
  const Quota &buffers = caller.tenant->store().own_count(), &calls = caller.tenant->calls();
  add("buffers", std::min(tenants_.count().limit(), buffers.limit()), buffers.used());
  add("calls", calls.limit(), calls.used());
}

void ComputeService::AddTenants(v1::GetServerInfoResponse& response) const {
  const auto limit = [](const Quota& quota) {
    return quota.limit() == kUnlimited ? 0 : quota.limit();
  };
  for (Tenant* tenant : tenants_.All()) {
    if (tenant->name().empty()) continue;
    const BufferStore& store = tenant->store();
    v1::TenantUsage& out = *response.add_tenants();
    out.set_name(tenant->name());
    out.set_buffers(store.own_count().used());
    std::uint64_t bytes = 0;
    for (const std::unique_ptr<Device>& device : devices_.list())
      bytes += store.own_bytes(*device).used();
    out.set_buffer_bytes(bytes);
    out.set_calls(tenant->calls().used());
    out.set_ended_calls(tenant->ended_calls());
    out.set_refused_calls(tenant->refused_calls());
    out.set_buffers_quota(limit(store.own_count()));
    out.set_buffer_bytes_quota(limit(store.own_bytes(devices_.First())));
    out.set_calls_quota(limit(tenant->calls()));
  }
}

void ComputeService::SetLimits(v1::Limits& limits) const {
  limits.set_max_message_bytes(options_.max_message);
  limits.set_max_inline_result_bytes(kMaxInlineResult);
  limits.set_queue_length(options_.queue);
  if (options_.default_ttl != absl::InfiniteDuration())
    *limits.mutable_default_ttl() = ToProto(options_.default_ttl);
  if (options_.max_ttl != absl::InfiniteDuration())
    *limits.mutable_max_ttl() = ToProto(options_.max_ttl);
  *limits.mutable_max_operation() = ToProto(absl::Seconds(options_.max_operation_seconds));
  *limits.mutable_max_slow_operation() = ToProto(absl::Seconds(options_.MaxSlowSeconds()));
  limits.set_max_ranges(static_cast<std::uint32_t>(options_.max_ranges));
  limits.set_max_steps(kMaxSteps);
}

}  // namespace tessera
