#include "client/async.h"

#include "client/rpc/connection.h"
#include "client/rpc/event_loop.h"
#include "client/rpc/requests.h"

namespace tessera {
namespace {

template <class Request>
AsyncCall Begin(Connection& connection, Request request, std::optional<absl::Duration> timeout,
                Callback<ResponseOf<Request>> done) {
  return AsyncCall(StartCall(connection, connection.events(), std::move(request),
                             {.timeout = timeout}, std::move(done)));
}

}  // namespace

void AsyncCall::Cancel() const {
  if (const std::shared_ptr<AsyncCallBase> call = call_.lock()) call->Cancel();
}

AsyncCall AsyncClient::Dot(const Operand& a, const Operand& b, const OperationOptions& options,
                           Callback<v1::DotResponse> done) {
  return Begin(*connection_, DotRequest(a, b, options), options.timeout, std::move(done));
}

AsyncCall AsyncClient::Reduce(ReduceOp op, const Operand& x, absl::Span<const int> axes,
                              bool keep_dims, const OperationOptions& options,
                              Callback<v1::ReduceResponse> done) {
  return Begin(*connection_, ReduceRequest(op, x, axes, keep_dims, options), options.timeout,
               std::move(done));
}

AsyncCall AsyncClient::Matmul(const Operand& a, const Operand& b, bool transpose_a,
                              bool transpose_b, std::optional<DType> out_dtype,
                              const OperationOptions& options, Callback<v1::MatmulResponse> done) {
  return Begin(*connection_, MatmulRequest(a, b, transpose_a, transpose_b, out_dtype, options),
               options.timeout, std::move(done));
}

AsyncCall AsyncClient::Add(const Operand& a, const Operand& b, const OperationOptions& options,
                           Callback<v1::AddResponse> done) {
  return Begin(*connection_, AddRequest(a, b, options), options.timeout, std::move(done));
}

AsyncCall AsyncClient::WindowSum(const Operand& x, std::int64_t radius,
                                 const OperationOptions& options,
                                 Callback<v1::WindowSumResponse> done) {
  return Begin(*connection_, WindowSumRequest(x, radius, options), options.timeout,
               std::move(done));
}

AsyncCall AsyncClient::TopK(const Operand& x, std::int64_t k, bool smallest,
                            std::optional<int> axis, const OperationOptions& options,
                            Callback<v1::TopKResponse> done) {
  return Begin(*connection_, TopKRequest(x, k, smallest, axis, options), options.timeout,
               std::move(done));
}

AsyncCall AsyncClient::Map(absl::Span<const Operand> operands, const v1::Expression& expression,
                           const OperationOptions& options, Callback<v1::MapResponse> done) {
  return Begin(*connection_, MapRequest(operands, expression, options), options.timeout,
               std::move(done));
}

AsyncCall AsyncClient::Execute(const Program& program, const CallOptions& call,
                               Callback<v1::ExecuteResponse> done) {
  const int steps = program.request().steps_size();
  return Begin(*connection_, program.request(), call.timeout,
               Callback<v1::ExecuteResponse>(
                   [steps, done = std::move(done)](absl::StatusOr<v1::ExecuteResponse> response) {
                     if (absl::Status status = CheckAnswer(steps, response); !status.ok()) {
                       response = std::move(status);
                     }
                     if (done) done(std::move(response));
                   }));
}

AsyncCall AsyncClient::GetBuffer(const std::string& name, std::uint64_t version,
                                 const CallOptions& call, Callback<v1::GetBufferResponse> done) {
  v1::GetBufferRequest request;
  request.set_name(name);
  request.set_version(version);
  return Begin(*connection_, std::move(request), call.timeout, std::move(done));
}

AsyncCall AsyncClient::CopyBuffer(const Operand& source, const ResultBuffer& target,
                                  std::optional<DType> dtype, const std::string& device,
                                  const CallOptions& call, Callback<v1::CopyBufferResponse> done) {
  absl::StatusOr<v1::CopyBufferRequest> request = CopyRequest(source, target, dtype, device);
  return AsyncCall(StartCall(
      *connection_, connection_->events(), request.ok() ? *request : v1::CopyBufferRequest(),
      {.timeout = call.timeout, .refused = request.status()}, std::move(done)));
}

AsyncCall AsyncClient::DeleteBuffer(const std::string& name, std::uint64_t version,
                                    const CallOptions& call,
                                    Callback<v1::DeleteBufferResponse> done) {
  v1::DeleteBufferRequest request;
  request.set_name(name);
  request.set_version(version);
  return Begin(*connection_, std::move(request), call.timeout, std::move(done));
}

AsyncCall AsyncClient::GetServerInfo(const CallOptions& call,
                                     Callback<v1::GetServerInfoResponse> done) {
  return Begin(*connection_, v1::GetServerInfoRequest(), call.timeout, std::move(done));
}

}  // namespace tessera
