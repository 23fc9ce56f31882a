// The compute service. Operands are named or inline; results are scalars, inline arrays or new
// buffers.
#pragma once

#include "server/access/methods.h"
#include "server/calls/unary_exchange.h"
#include "server/core.h"
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

// Thread safe. The core must outlive the service.
class ComputeService final : public ComputeServiceBase {
 public:
  explicit ComputeService(Core& core) : core_(core) {}

  // Called once the server has been built.
  void Serve(CallQueues& queues);

 private:
  void ListStrategies(
      UnaryExchangeOf<v1::ListStrategiesRequest, v1::ListStrategiesResponse>& exchange);
  void GetServerInfo(
      UnaryExchangeOf<v1::GetServerInfoRequest, v1::GetServerInfoResponse>& exchange);

  Core& core_;
};

}  // namespace tessera
