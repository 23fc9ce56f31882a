#include "server/unary_call.h"

#include "server/convert.h"
#include "server/log.h"
#include "server/peer.h"

namespace tessera {

UnaryCall::~UnaryCall() { core_.answers().Remove(answer_); }

absl::Status UnaryCall::Accept(std::size_t request_bytes) {
  absl::StatusOr<Core::Accepted> accepted =
      core_.Accept(request_bytes, exchange_.parts_bytes(), *caller().tenant);
  if (!accepted.ok()) return accepted.status();
  accepted_ = *std::move(accepted);
  return absl::OkStatus();
}

absl::Status UnaryCall::ChargeAnswer(std::size_t bytes) {
  absl::StatusOr<Charge> memory =
      Charge::Take(core_.host_memory(), bytes, "HOST_MEMORY_EXHAUSTED",
                   "there is no memory for the answer beside the messages of other calls");
  if (!memory.ok()) return memory.status();
  answer_memory_ = *std::move(memory);
  return absl::OkStatus();
}

void UnaryCall::End(const absl::Status& status) {
  const absl::Time end = end_time();
  core_.answers().Add(answer_, exchange_.context().c_call(), end);
  core_.Conclude({.method = method_,
                  .strategy = strategy_,
                  .tenant = caller().tenant->name(),
                  .trace = exchange_.trace(),
                  .accepted = accept_time_,
                  .begun = begin_time_,
                  .ended = end,
                  .waited = waited_,
                  .copies = copies_,
                  .kernel = kernel_},
                 status, [this] { return PeerText(exchange_.context(), *caller().tenant); });
  accepted_.call = Charge();  // a client that has its answer may make its next call
  exchange_.Finish(ToGrpc(status, caller().sees_all()));
}

UnaryExchange::Admit AdmitTo(Core& core, std::string_view method) {
  return [&core, method](UnaryExchange& exchange) {
    const absl::StatusOr<Caller> caller = core.access().Admit(method, exchange.context());
    if (caller.ok()) {
      exchange.set_caller(*caller);
      return grpc::Status::OK;
    }
    LogFailedCall(method, exchange.context().peer(), caller.status(), exchange.trace().id());
    core.metrics().Count({.rpc = method}, caller.status());
    return ToGrpc(caller.status());
  };
}

}  // namespace tessera
