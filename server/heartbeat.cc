#include "server/heartbeat.h"

#include <condition_variable>
#include <memory>
#include <mutex>

#include "absl/time/time.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/clock.h"

namespace tessera {
namespace {

// A thread that gets nothing for a second sleeps: whichever of them the calls meet, the last one
// was met less than a second ago.
constexpr absl::Duration kInterval = absl::Milliseconds(200);

}  // namespace

struct Heartbeat::State {
  explicit State(const std::shared_ptr<grpc::Channel>& channel) : stub(channel) {}

  grpc::GenericStub stub;
  std::unique_ptr<grpc::ClientContext> context;
  grpc::ByteBuffer request;
  grpc::ByteBuffer response;
  absl::Time next = absl::InfinitePast();
  std::mutex mutex;
  std::condition_variable ended;
  bool busy = false;
};

Heartbeat::Heartbeat(const std::shared_ptr<grpc::Channel>& channel)
    : state_(std::make_shared<State>(channel)) {}

Heartbeat::~Heartbeat() {
  std::unique_lock lock(state_->mutex);
  if (state_->busy) state_->context->TryCancel();
  state_->ended.wait(lock, [this] { return !state_->busy; });
}

void Heartbeat::Beat() {
  State& state = *state_;
  const absl::Time now = SteadyNow();
  {
    const std::lock_guard lock(state.mutex);
    if (state.busy || now < state.next) return;
    state.busy = true;
    state.next = now + kInterval;
  }
  state.context = std::make_unique<grpc::ClientContext>();
  state.request = grpc::ByteBuffer(nullptr, 0);  // a HealthCheckRequest for the server as a whole
  state.response.Clear();
  state.stub.UnaryCall(state.context.get(), "/grpc.health.v1.Health/Check", grpc::StubOptions(),
                       &state.request, &state.response, [held = state_](const grpc::Status&) {
                         const std::lock_guard lock(held->mutex);
                         held->busy = false;
                         held->ended.notify_all();
                       });
}

}  // namespace tessera
