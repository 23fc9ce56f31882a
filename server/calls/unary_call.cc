#include "server/calls/unary_call.h"

#include <optional>
#include <utility>

#include "server/observe/log.h"
#include "server/rpc/convert.h"

namespace tessera {

absl::Status UnaryCall::Accept() {
  absl::StatusOr<Core::Accepted> accepted = core_.Accept(*caller().tenant);
  if (!accepted.ok()) return accepted.status();
  accepted_ = *std::move(accepted);
  return absl::OkStatus();
}

absl::Status UnaryCall::ChargeAnswer(std::size_t bytes, std::string_view message) {
  absl::StatusOr<Charge> memory =
      core_.TakeHostMemory(bytes, message, exchange_.memory().amount() + answer_memory_.amount());
  if (!memory.ok()) return memory.status();
  answer_memory_.Add(*std::move(memory));
  return absl::OkStatus();
}

absl::Status UnaryCall::ChargeDescription() {
  return ChargeAnswer(DescriptionBytes(core_.devices().size()));
}

void UnaryCall::End(const absl::Status& status) {
  const absl::Time end = end_time();
  core_.Conclude({.method = method_,
                  .strategy = strategy_,
                  .tenant = caller().tenant,
                  .trace = exchange_.trace(),
                  .accepted = accept_time_,
                  .begun = begin_time_,
                  .ended = end,
                  .waited = waited_,
                  .copies = copies_,
                  .kernel = kernel_},
                 status, [this] { return exchange_.context().peer(); });
  accepted_.call = Charge();  // a client that has its response may make its next call
  exchange_.Finish(ToGrpc(status, caller().sees_all()));
}

namespace {

// Takes host memory for a request, until the exchange is finished.
absl::Status ChargeRequest(Core& core, UnaryExchange& exchange, std::size_t bytes) {
  absl::StatusOr<Charge> memory = core.TakeHostMemory(
      bytes, "other messages already use all memory that the server has for messages");
  if (!memory.ok()) return memory.status();
  exchange.set_memory(*std::move(memory));
  return absl::OkStatus();
}

// Counts and logs a call that ends before it is handled.
grpc::Status Refused(Core& core, std::string_view method, UnaryExchange& exchange, absl::Time begin,
                     const absl::Status& status) {
  const Caller& caller = exchange.caller();
  core.Conclude({.method = method,
                 .strategy = "",
                 .tenant = caller.tenant,
                 .trace = exchange.trace(),
                 .accepted = begin,
                 .ended = SteadyNow()},
                status, [&] { return exchange.context().peer(); });
  return ToGrpc(status, caller.sees_all());
}

}  // namespace

UnaryExchange::Admit AdmitTo(Core& core, std::string_view method) {
  const auto check = [&core, method](UnaryExchange& exchange) {
    exchange.set_answers(core.answers());
    const absl::StatusOr<Caller> caller = core.access().Admit(method, exchange.context());
    if (!caller.ok()) {
      LogFailedCall({.method = method, .strategy = "", .trace = exchange.trace()},
                    exchange.context().peer(), caller.status());
      core.metrics().Count({.rpc = method}, caller.status());
      return ToGrpc(caller.status());
    }
    exchange.set_caller(*caller);
    const absl::Time begin = SteadyNow();
    const std::size_t size = exchange.message_size();
    std::optional<MessageBound> bound = MessageBound{size};
    if (size > kSmallMessage && size <= core.options().max_message) bound = exchange.Bound();
    const absl::Status status = Guarded([&]() -> absl::Status {
      if (!bound.has_value()) return NoMessage(method);
      absl::Status checked = core.CheckSize(size);
      checked.Update(CheckRepeats(*bound));
      return checked.ok() ? ChargeRequest(core, exchange, bound->bytes) : checked;
    });
    return status.ok() ? grpc::Status::OK : Refused(core, method, exchange, begin, status);
  };
  const auto refuse = [&core, method](UnaryExchange& exchange) {
    return Refused(core, method, exchange, SteadyNow(), NoMessage(method));
  };
  return {check, refuse};
}

}  // namespace tessera
