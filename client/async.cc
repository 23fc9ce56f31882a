#include "client/async.h"

#include "client/rpc/connection.h"
#include "client/rpc/event_loop.h"
#include "client/transfers/shared_transfers.h"

namespace tessera {

void Cancel(const std::weak_ptr<AsyncCallBase>& call) {
  if (const std::shared_ptr<AsyncCallBase> running = call.lock()) running->Cancel();
}

std::weak_ptr<AsyncCallBase> StartTask(
    ClientConnection& connection,
    std::function<std::function<void()>(const std::stop_token& cancel)> work) {
  auto task = std::make_shared<AsyncTask>(connection.events(), std::move(work));
  connection.events().Add(task);
  task->Start();
  return task;
}

template <class Request>
std::weak_ptr<AsyncCallBase> AsyncClient::Start(Prepared<Request> request, const CallOptions& call,
                                                Callback<AnswerTo<Request>> done) {
  return StartCall(*connection_, std::move(request.message),
                   {.call = call, .refused = std::move(request.refused)},
                   [done = std::move(done)](absl::StatusOr<ResponseOf<Request>> response) {
                     if (response.ok()) return done(AnswerOf(*std::move(response)));
                     done(response.status());
                   });
}
#define TESSERA_START(Name, field)                                  \
  template std::weak_ptr<AsyncCallBase> AsyncClient::Start(         \
      Prepared<v1::Name##Request> request, const CallOptions& call, \
      Callback<AnswerTo<v1::Name##Request>> done);
TESSERA_CALL_METHODS(TESSERA_START)
#undef TESSERA_START

}  // namespace tessera
