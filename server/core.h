// What the handlers of all services work on.
#pragma once

#include <map>
#include <memory>
#include <new>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "google/protobuf/message.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"
#include "server/admission.h"
#include "server/buffer_store.h"
#include "server/executor.h"
#include "server/options.h"

namespace tessera {

// Devices, their buffers and their workers. Immutable but for what its members guard themselves.
class Core {
 public:
  // devices: at least one, all different; they serve in this order.
  static absl::StatusOr<std::unique_ptr<Core>> Make(const Options& options,
                                                    std::vector<std::unique_ptr<Device>> devices);

  const Options& options() const { return options_; }
  const std::vector<std::unique_ptr<Device>>& devices() const { return devices_; }
  BufferStore& store() { return store_; }
  Admission& admission() { return admission_; }
  absl::Time start_time() const { return start_time_; }

  // Runs the operations on a device of devices().
  Executor& compute(const Device& device) { return *workers_.at(&device).compute; }
  // Moves bytes between the wire and a device. Every stream has at most one task here, so that the
  // number of streams bounds the queue, and no operation waits behind an upload.
  Executor& transfers(const Device& device) { return *workers_.at(&device).transfers; }

  // The device of a BufferSpec; empty: the first. INVALID_ARGUMENT / BAD_DEVICE {field, value,
  // valid}.
  absl::StatusOr<Device*> FindDevice(std::string_view name) const;

  // INVALID_ARGUMENT / BAD_MESSAGE {field, value, limit} when it is larger than clients may send.
  absl::Status CheckSize(const google::protobuf::Message& message) const;

 private:
  struct Workers {
    std::unique_ptr<Executor> compute;
    std::unique_ptr<Executor> transfers;
  };
  Core(const Options& options, std::vector<std::unique_ptr<Device>> devices);

  // Destroyed from the last to the first: work ends before buffers go, and they before their
  // devices.
  const Options options_;
  const absl::Time start_time_ = absl::Now();
  const std::vector<std::unique_ptr<Device>> devices_;
  BufferStore store_;
  Admission admission_;
  std::map<const Device*, Workers> workers_;
};

// Ends a unary call and logs it when it failed. Nothing of the call may be touched afterwards.
void Finish(std::string_view method, grpc::CallbackServerContext& context,
            grpc::ServerUnaryReactor& reactor, const absl::Status& status);

// The host's memory is exhausted: RESOURCE_EXHAUSTED / HOST_MEMORY_EXHAUSTED.
absl::Status HostMemoryError();

// A unary call that needs no lane: body() gives its Status at once.
template <class Request, class Body>
grpc::ServerUnaryReactor* Answer(Core& core, std::string_view method,
                                 grpc::CallbackServerContext& context, const Request& request,
                                 Body body) {
  grpc::ServerUnaryReactor* reactor = context.DefaultReactor();
  const auto run = [&]() -> absl::Status {
    absl::StatusOr<Admission::Ticket> ticket = core.admission().Enter();
    if (!ticket.ok()) return ticket.status();
    if (absl::Status status = core.CheckSize(request); !status.ok()) return status;
    return body();
  };
  absl::Status status;
  try {
    status = run();
  } catch (const std::bad_alloc&) {
    status = HostMemoryError();
  }
  Finish(method, context, *reactor, status);
  return reactor;
}

}  // namespace tessera
