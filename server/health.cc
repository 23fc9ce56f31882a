#include "server/health.h"

#include <optional>
#include <utility>
#include <vector>

#include "grpc/health/v1/health.pb.h"
#include "grpcpp/impl/codegen/proto_utils.h"

namespace tessera {
namespace {

namespace v1 = grpc::health::v1;

// A name that no server of any use has.
constexpr std::size_t kLongestName = 1024;

grpc::ByteBuffer Message(v1::HealthCheckResponse::ServingStatus status) {
  v1::HealthCheckResponse response;
  response.set_status(status);
  const grpc::Slice bytes(response.SerializeAsString());
  return grpc::ByteBuffer(&bytes, 1);
}

}  // namespace

// Check, which ends with its answer, or Watch, which goes on until the client has enough.
class Health::HealthCall final : public StreamCall {
 public:
  HealthCall(Health& health, StreamExchange& exchange, bool watches)
      : StreamCall(exchange), health_(health), watches_(watches) {
    exchange.Serve(*this);
    StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    v1::HealthCheckRequest request;
    if (!ok || request_.Length() > kLongestName ||
        !grpc::SerializationTraits<v1::HealthCheckRequest>::Deserialize(&request_, &request).ok()) {
      const std::lock_guard lock(health_.mutex_);
      End({grpc::StatusCode::INVALID_ARGUMENT, "the message is no valid HealthCheckRequest"});
    } else if (watches_) {
      const std::lock_guard lock(health_.mutex_);
      health_.watchers_[this] = request.service();
      Tell(health_.StatusOf(request.service()));
    } else {
      const std::lock_guard lock(health_.mutex_);
      const auto status = health_.StatusOf(request.service());
      if (status == v1::HealthCheckResponse::SERVICE_UNKNOWN) {
        End({grpc::StatusCode::NOT_FOUND, "the server has no service of this name"});
      } else {
        response_ = Message(status);
        FinishWith(response_);
      }
    }
  }

  void OnWriteDone(bool ok) override {
    const std::lock_guard lock(health_.mutex_);
    writing_ = false;
    if (!ok) {
      End({grpc::StatusCode::CANCELLED, "the client takes no more"});
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
    }
    delete this;
  }

  // With the health's mutex.
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

  Health& health_;
  const bool watches_;
  grpc::ByteBuffer request_;
  grpc::ByteBuffer response_;
  bool writing_ = false;
  bool ended_ = false;
  std::optional<Status> told_;
  std::optional<Status> next_;  // once response_ has been written
};

Health::Status Health::StatusOf(const std::string& service) const {
  const auto found = serving_.find(service);
  if (found == serving_.end()) return v1::HealthCheckResponse::SERVICE_UNKNOWN;
  return found->second ? v1::HealthCheckResponse::SERVING : v1::HealthCheckResponse::NOT_SERVING;
}

void Health::Set(const std::string& service, bool serving) {
  const std::lock_guard lock(mutex_);
  serving_[service] = serving;
  for (const auto& [call, watched] : watchers_)
    if (watched == service) call->Tell(StatusOf(service));
}

bool Health::Serve(std::string_view method, StreamExchange& exchange) {
  const bool check = method == "/grpc.health.v1.Health/Check";
  const bool watch = method == "/grpc.health.v1.Health/Watch";
  if (check || watch) new HealthCall(*this, exchange, watch);
  return check || watch;
}

}  // namespace tessera
