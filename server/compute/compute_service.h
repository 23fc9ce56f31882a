// The compute service. Operands are named or inline; results are scalars, inline arrays or new
// buffers.
#pragma once

#include "server/access/methods.h"
#include "server/calls/call_parts.h"
#include "server/calls/unary_exchange.h"
#include "server/devices/devices.h"
#include "tessera/v1/compute.grpc.pb.h"

namespace tessera {

// All methods receive bytes, which are parsed once there is memory for the message.
#define TESSERA_BEGIN(Method, field) v1::ComputeService::WithRawMethod_##Method <
#define TESSERA_END(Method, field) >
using ComputeServiceBase = TESSERA_OPERATION_METHODS(TESSERA_BEGIN)
    v1::ComputeService::WithRawMethod_Execute<v1::ComputeService::WithRawMethod_ListStrategies<
        v1::ComputeService::WithRawMethod_GetServerInfo<
            v1::ComputeService::Service>>> TESSERA_OPERATION_METHODS(TESSERA_END);
#undef TESSERA_BEGIN
#undef TESSERA_END

// Thread safe. The parts of the server must outlive the service.
class ComputeService final : public ComputeServiceBase {
 public:
  ComputeService(const CallParts& parts, const Devices& devices, Tenants& tenants,
                 const Options& options, absl::Time start_time)
      : parts_(parts),
        devices_(devices),
        tenants_(tenants),
        options_(options),
        start_time_(start_time) {}

  // Called once the server has been built.
  void Serve(CallQueues& queues);

 private:
  absl::Status ListStrategies(const Caller& caller, const v1::ListStrategiesRequest& request,
                              v1::ListStrategiesResponse& response);
  absl::Status GetServerInfo(const Caller& caller, const v1::GetServerInfoRequest& request,
                             v1::GetServerInfoResponse& response);
  // These functions add the parts of the response of GetServerInfo. An admin sees what all tenants
  // together use; others see only what their tenant uses.
  void AddDevice(const Caller& caller, Device& device, v1::GetServerInfoResponse& response) const;
  void AddBudgets(const Caller& caller, v1::GetServerInfoResponse& response) const;
  void AddTenants(v1::GetServerInfoResponse& response) const;
  void SetLimits(v1::Limits& limits) const;

  const CallParts parts_;
  const Devices& devices_;
  Tenants& tenants_;
  const Options& options_;
  const absl::Time start_time_;
};

}  // namespace tessera
