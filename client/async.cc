#include "client/async.h"

#include "client/rpc/connection.h"
#include "client/rpc/event_loop.h"

namespace tessera {

void AsyncCall::Cancel() const {
  if (const std::shared_ptr<AsyncCallBase> call = call_.lock()) call->Cancel();
}

template <class Request>
AsyncCall AsyncClient::Start(absl::StatusOr<Request> request, std::optional<absl::Duration> timeout,
                             Callback<ResponseTo<Request>> done) {
  absl::Status refused = request.status();
  return AsyncCall(StartCall(*connection_, request.ok() ? *std::move(request) : Request(),
                             {.timeout = timeout, .refused = std::move(refused)}, std::move(done)));
}
#define TESSERA_START(Name, field)                                                 \
  template AsyncCall AsyncClient::Start(absl::StatusOr<v1::Name##Request> request, \
                                        std::optional<absl::Duration> timeout,     \
                                        Callback<v1::Name##Response> done);
TESSERA_ASYNC_METHODS(TESSERA_START)
#undef TESSERA_START

}  // namespace tessera
