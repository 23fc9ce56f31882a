#include "server/calls/unary_call.h"

#include <optional>
#include <utility>

#include "kernels/base/status_macros.h"
#include "server/rpc/convert.h"

namespace tessera {

absl::Status UnaryCall::Accept() {
  ASSIGN_OR_RETURN(accepted_, parts_.limits.Accept(*caller().tenant));
  return absl::OkStatus();
}

absl::Status UnaryCall::ChargeAnswer(std::size_t bytes, std::string_view message) {
  ASSIGN_OR_RETURN(Charge memory,
                   parts_.limits.TakeHostMemory(
                       bytes, message, exchange_.memory().amount() + answer_memory_.amount()));
  answer_memory_.Add(std::move(memory));
  return absl::OkStatus();
}

void UnaryCall::End(const absl::Status& status) {
  NoteEnd();
  parts_.records.Add(record_, status, [this] { return exchange_.context().peer(); });
  accepted_.call = Charge();  // a client that has its response may make its next call
  exchange_.Finish(ToGrpc(status, caller().sees_all()));
}

namespace {

// Takes host memory for a request, until the exchange is finished.
absl::Status ChargeRequest(CallLimits& limits, UnaryExchange& exchange, std::size_t bytes) {
  ASSIGN_OR_RETURN(
      Charge memory,
      limits.TakeHostMemory(
          bytes, "other messages already use all memory that the server has for messages"));
  exchange.set_memory(std::move(memory));
  return absl::OkStatus();
}

// Counts and logs a call that ends before it is handled.
grpc::Status Refused(CallRecords& records, std::string_view method, UnaryExchange& exchange,
                     absl::Time begin, const absl::Status& status) {
  const Caller& caller = exchange.caller();
  records.Add({.method = method,
               .strategy = "",
               .tenant = caller.tenant,
               .trace = exchange.trace(),
               .accepted = begin,
               .ended = SteadyNow()},
              status, [&] { return exchange.context().peer(); });
  return ToGrpc(status, caller.sees_all());
}

}  // namespace

UnaryExchange::Admit AdmitTo(const CallParts& parts, std::string_view method) {
  const auto check = [parts, method](UnaryExchange& exchange) {
    const absl::StatusOr<Caller> caller = parts.access.Admit(method, exchange.context());
    if (!caller.ok()) {
      parts.records.AddRefused(method, exchange.trace(), caller.status(),
                               exchange.context().peer());
      return ToGrpc(caller.status());
    }
    exchange.set_caller(*caller);
    const absl::Time begin = SteadyNow();
    const std::size_t size = exchange.message_size();
    std::optional<MessageBound> bound = MessageBound{size};
    if (size > kSmallMessage && size <= parts.limits.max_message()) bound = exchange.Bound();
    const absl::Status status = Guarded([&]() -> absl::Status {
      if (!bound.has_value()) return NoMessage(method);
      absl::Status checked = parts.limits.CheckSize(size);
      checked.Update(CheckRepeats(*bound));
      return checked.ok() ? ChargeRequest(parts.limits, exchange, bound->bytes) : checked;
    });
    return status.ok() ? grpc::Status::OK : Refused(parts.records, method, exchange, begin, status);
  };
  const auto refuse = [parts, method](UnaryExchange& exchange) {
    return Refused(parts.records, method, exchange, SteadyNow(), NoMessage(method));
  };
  return {check, refuse};
}

}  // namespace tessera
