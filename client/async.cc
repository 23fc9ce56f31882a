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

template <class Request>
AsyncCall AsyncClient::Send(Request request, const OperationOptions& options,
                            Callback<ResponseTo<Request>> done) {
  return Begin(*connection_, std::move(request), options.timeout, std::move(done));
}
#define TESSERA_SEND(Name, field)                                                                  \
  template AsyncCall AsyncClient::Send(v1::Name##Request request, const OperationOptions& options, \
                                       Callback<v1::Name##Response> done);
TESSERA_OPERATION_METHODS(TESSERA_SEND)
#undef TESSERA_SEND

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
