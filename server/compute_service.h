// The operations: operands by name or inline, results as scalars, inline or as new buffers.
#pragma once

#include "server/core.h"
#include "tessera/v1/compute.grpc.pb.h"

namespace tessera {

// All methods in callback form; Execute reads its message as bytes, because only then programs that
// are too long can be refused before they take the memory of their steps.
using ComputeServiceBase =
    v1::ComputeService::WithRawCallbackMethod_Execute<v1::ComputeService::CallbackService>;

// Thread safe; the core outlives it.
class ComputeService final : public ComputeServiceBase {
 public:
  explicit ComputeService(Core& core) : core_(core) {}

  grpc::ServerUnaryReactor* Dot(grpc::CallbackServerContext* context, const v1::DotRequest* request,
                                v1::DotResponse* response) override;
  grpc::ServerUnaryReactor* Reduce(grpc::CallbackServerContext* context,
                                   const v1::ReduceRequest* request,
                                   v1::ReduceResponse* response) override;
  grpc::ServerUnaryReactor* Matmul(grpc::CallbackServerContext* context,
                                   const v1::MatmulRequest* request,
                                   v1::MatmulResponse* response) override;
  grpc::ServerUnaryReactor* Add(grpc::CallbackServerContext* context, const v1::AddRequest* request,
                                v1::AddResponse* response) override;
  grpc::ServerUnaryReactor* WindowSum(grpc::CallbackServerContext* context,
                                      const v1::WindowSumRequest* request,
                                      v1::WindowSumResponse* response) override;
  grpc::ServerUnaryReactor* Execute(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListStrategies(grpc::CallbackServerContext* context,
                                           const v1::ListStrategiesRequest* request,
                                           v1::ListStrategiesResponse* response) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* response) override;

 private:
  Core& core_;
};

}  // namespace tessera
