#include "server/status/health.h"

#include <optional>
#include <utility>

#include "grpcpp/impl/codegen/proto_utils.h"
#include "server/calls/unary_exchange.h"

namespace tessera {
namespace {

namespace health_v1 = grpc::health::v1;

// The maximum number of watches per connection. A client that pools connections has one or two
// watches on each connection.
constexpr std::size_t kMostOfConnection = 8;

// The size of the largest request. The names of real services are shorter.
constexpr std::size_t kLongestServiceName = 1024;

grpc::ByteBuffer Message(health_v1::HealthCheckResponse::ServingStatus status) {
  health_v1::HealthCheckResponse response;
  response.set_status(status);
  const grpc::Slice bytes(response.SerializeAsString());
  return grpc::ByteBuffer(&bytes, 1);
}

grpc::Status NoMessage() {
  return {grpc::StatusCode::INVALID_ARGUMENT, "the message is not a valid HealthCheckRequest"};
}

// Admits all requests of at most kLongestServiceName bytes.
UnaryExchange::Admit AdmitNames() {
  const auto check = [](UnaryExchange& exchange) {
    return exchange.message_size() <= kLongestServiceName ? grpc::Status::OK : NoMessage();
  };
  return {check, [](UnaryExchange&) { return NoMessage(); }};
}

}  // namespace

// A call of Watch, which lasts until the client ends it.
class Health::WatchCall final : public StreamCall {
 public:
  WatchCall(Health& health, StreamExchange& exchange)
      : StreamCall(exchange), health_(health), peer_(PeerOf(exchange.context().peer())) {
    exchange.Serve(*this);
    const std::lock_guard lock(health_.mutex_);
    const std::size_t most = peer_.empty() ? health_.most_watches_ : kMostOfConnection;
    if (++health_.watches_[peer_] <= most) {
      StartRead(&request_);
    } else {
      End({grpc::StatusCode::RESOURCE_EXHAUSTED, "too many Watch calls are open"});
    }
  }

  void OnReadDone(bool ok) override {
    health_v1::HealthCheckRequest request;
    const bool valid =
        ok && request_.Length() <= kLongestServiceName &&
        grpc::SerializationTraits<health_v1::HealthCheckRequest>::Deserialize(&request_, &request)
            .ok();
    const std::lock_guard lock(health_.mutex_);
    if (!valid) {
      End(NoMessage());
    } else {
      health_.watchers_[this] = request.service();
      Tell(health_.StatusOf(request.service()));
    }
  }

  void OnWriteDone(bool ok) override {
    const std::lock_guard lock(health_.mutex_);
    writing_ = false;
    if (!ok) {
      End({grpc::StatusCode::CANCELLED, "the client accepts no more messages"});
    } else if (next_.has_value()) {
      Tell(*std::exchange(next_, std::nullopt));
    }
  }

  void OnCancel() override {
    const std::lock_guard lock(health_.mutex_);
    End({grpc::StatusCode::CANCELLED, "the client has left"});
  }

  void OnDone() override {
    {
      const std::lock_guard lock(health_.mutex_);
      health_.watchers_.erase(this);
      if (--health_.watches_[peer_] == 0) health_.watches_.erase(peer_);
    }
    delete this;
  }

  // The caller holds the mutex of Health.
  void Tell(Status status) {
    if (ended_ || (told_ == status && !next_.has_value())) return;
    if (writing_) {
      next_ = status;
      return;
    }
    told_ = status;
    writing_ = true;
    response_ = Message(status);
    StartWrite(&response_);
  }

 private:
  void End(const grpc::Status& status) {
    if (!std::exchange(ended_, true)) Finish(status);
  }

  // Returns the address and port of a connection, or "" for unix sockets, which have neither.
  static std::string PeerOf(const std::string& peer) {
    return peer.starts_with("ipv") ? peer : std::string();
  }

  Health& health_;
  const std::string peer_;
  grpc::ByteBuffer request_;
  grpc::ByteBuffer response_;
  bool writing_ = false;
  bool ended_ = false;
  std::optional<Status> told_;
  std::optional<Status> next_;  // sent once response_ has been written
};

Health::Status Health::StatusOf(const std::string& service) const {
  const auto found = serving_.find(service);
  if (found == serving_.end()) return health_v1::HealthCheckResponse::SERVICE_UNKNOWN;
  return found->second ? health_v1::HealthCheckResponse::SERVING
                       : health_v1::HealthCheckResponse::NOT_SERVING;
}

void Health::Set(const std::string& service, bool serving) {
  const std::lock_guard lock(mutex_);
  serving_[service] = serving;
  for (const auto& [call, watched] : watchers_)
    if (watched == service) call->Tell(StatusOf(service));
}

void Health::Serve(CallQueues& queues, std::size_t most_watches) {
  most_watches_ = most_watches;
  AcceptUnary<health_v1::HealthCheckRequest, health_v1::HealthCheckResponse>(
      queues, *this, &Health::RequestCheck, AdmitNames(), [this](auto& exchange) {
        const std::string& service = exchange.request().service();
        Status status = health_v1::HealthCheckResponse::SERVICE_UNKNOWN;
        {
          const std::lock_guard lock(mutex_);
          status = StatusOf(service);
        }
        if (status == health_v1::HealthCheckResponse::SERVICE_UNKNOWN) {
          exchange.Finish({grpc::StatusCode::NOT_FOUND, "the server has no service of this name"});
        } else {
          exchange.response().set_status(status);
          exchange.Finish(grpc::Status::OK);
        }
      });
}

bool Health::ServeStream(std::string_view method, StreamExchange& exchange) {
  if (method != "/grpc.health.v1.Health/Watch") return false;
  new WatchCall(*this, exchange);
  return true;
}

}  // namespace tessera
