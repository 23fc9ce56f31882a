// The operations: operands by name or inline, results as scalars, inline or as new buffers.
#pragma once

#include <initializer_list>
#include <string_view>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/compute.h"
#include "server/core.h"
#include "tessera/v1/compute.grpc.pb.h"

namespace tessera {

// The largest array that travels in a response.
inline constexpr std::uint64_t kMaxInlineResult = 4 << 20;

// Thread safe; the core outlives it.
class ComputeService final : public v1::ComputeService::CallbackService {
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
  grpc::ServerUnaryReactor* ListStrategies(grpc::CallbackServerContext* context,
                                           const v1::ListStrategiesRequest* request,
                                           v1::ListStrategiesResponse* response) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* response) override;

 private:
  // What an operation does once its operands are on the lane's device.
  using Body = absl::AnyInvocable<absl::Status(Lane& lane, absl::Span<const View> operands)>;
  struct Call;

  // Looks the operands up, keeps them alive, and has the body run where they live.
  grpc::ServerUnaryReactor* Start(std::string_view method, grpc::CallbackServerContext* context,
                                  const google::protobuf::Message& request,
                                  std::initializer_list<const v1::Operand*> operands, Body body);
  absl::Status Enqueue(std::unique_ptr<Call>& call, const google::protobuf::Message& request,
                       std::initializer_list<const v1::Operand*> operands);

  // Runs an operation whose result is an array, and leaves it where the request wants it. run gets
  // the memory for it.
  template <class Response, class Run>
  absl::Status ReturnArray(Lane& lane, const absl::StatusOr<ArrayType>& type,
                           const v1::Result& result, Response* response, Run run);

  Core& core_;
};

}  // namespace tessera
