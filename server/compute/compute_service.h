// The service of operations. Operands are named or inline; results are scalars, inline arrays or
// new buffers.
#pragma once

#include "server/calls/unary_exchange.h"
#include "server/core.h"
#include "tessera/v1/compute.grpc.pb.h"

namespace tessera {

// Execute reads its message as bytes, so that a program that is too long is refused before its
// steps take memory.
template <class Service>
using OtherComputeMethods = v1::ComputeService::WithRawMethod_Dot<
    v1::ComputeService::WithRawMethod_Reduce<v1::ComputeService::WithRawMethod_Matmul<
        v1::ComputeService::WithRawMethod_Add<v1::ComputeService::WithRawMethod_WindowSum<
            v1::ComputeService::WithRawMethod_Map<v1::ComputeService::WithRawMethod_TopK<
                v1::ComputeService::WithRawMethod_ListStrategies<
                    v1::ComputeService::WithRawMethod_GetServerInfo<Service>>>>>>>>>;
using ComputeServiceBase =
    v1::ComputeService::WithRawMethod_Execute<OtherComputeMethods<v1::ComputeService::Service>>;

// Thread safe; the core outlives it.
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
