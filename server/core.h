// The state that the handlers of all services share.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/server_context.h"
#include "kernels/choose/pace.h"
#include "server/access/access.h"
#include "server/access/tenant.h"
#include "server/buffers/buffer_store.h"
#include "server/buffers/charge.h"
#include "server/buffers/shared_region.h"
#include "server/buffers/slots.h"
#include "server/cluster/home.h"
#include "server/devices/chores.h"
#include "server/devices/device_probe.h"
#include "server/devices/executor.h"
#include "server/net/listener.h"
#include "server/observe/metrics.h"
#include "server/observe/span_file.h"
#include "server/options.h"
#include "server/rpc/admission.h"
#include "server/rpc/answers.h"
#include "server/rpc/call_record.h"

namespace tessera {

// The maximum number of simultaneous imports. Each has a thread, and all share the host's network.
inline constexpr int kMaxImports = 4;
// The maximum number of regions of shared memory. Together with the connections that are
// registering one, their connections take half of the descriptors that Listener reserves.
inline constexpr std::size_t kMaxSharedRegions = 64;

// The devices, with their buffers, budgets and workers. Immutable, except for members that are
// thread safe themselves.
class Core {
 public:
  // `devices` has at least one device and no duplicates, and begins with the most preferred device.
  static absl::StatusOr<std::unique_ptr<Core>> Make(const Options& options,
                                                    std::vector<std::unique_ptr<Device>> devices);

  const Options& options() const { return options_; }
  const std::vector<std::unique_ptr<Device>>& devices() const { return devices_; }
  Tenants& tenants() { return tenants_; }
  const Tenants& tenants() const { return tenants_; }
  // Decides which callers are admitted, and with which tenant and role.
  Access& access() { return *access_; }
  const Access& access() const { return *access_; }
  Admission& admission() { return admission_; }
  Chores& chores() { return chores_; }
  Answers& answers() { return answers_; }
  Metrics& metrics() { return metrics_; }
  absl::Time start_time() const { return start_time_; }
  // Counts a call, logs it if it failed or was slow, and writes its spans if it is sampled. It is
  // called once for each call of a known caller, before the response is sent. `peer` returns the
  // caller's address in gRPC's form.
  void Conclude(const CallRecord& call, const absl::Status& status,
                absl::FunctionRef<std::string()> peer);
  // Writes the spans of calls that have ended, but waits no longer than `limit`.
  void FlushSpans(absl::Duration limit);

  // The executor for operations on a device, which must be one of devices().
  Executor& compute(const Device& device) { return *states_.at(&device)->compute; }
  // The executor for copies to and from a device. Every upload and download has at most one task
  // here, so the number of streams bounds the queue. No operation waits behind an upload.
  Executor& transfers(const Device& device) { return *states_.at(&device)->transfers; }

  // The slots from which a device's downloads are sent.
  SlotPool& slots(const Device& device) { return *states_.at(&device)->slots; }
  // Frees slots that have not been used recently. May wait for the devices' work.
  void TrimSlots();

  // A device's stream for calls that run on another device. The caller owns the stream while it
  // holds the lock, and may have to wait for the lock. There is no deadlock, because a call that
  // holds several streams of a kind has taken them in the order of devices(), and no call takes a
  // stream of one kind while it holds one of the other kind.
  struct Bridge {
    std::unique_lock<std::mutex> lock;
    Stream& stream;
  };
  // Returns the stream that receives copies from other devices.
  Bridge BridgeTo(const Device& device);
  // Returns the stream that works on operands that devices share. Its scratch memory counts toward
  // the scratch memory of operations.
  Bridge TeamStream(const Device& device);

  // The budget for the device memory that operations need while they run, in addition to buffers.
  const Budget& scratch(const Device& device) const { return states_.at(&device)->scratch; }
  // The budget for host memory for messages: for requests from their acceptance to their end, for
  // messages of streams, and for inline results.
  Budget& host_memory() { return host_memory_; }
  // Charges for a stream of a tenant, which are held until the stream ends. If there are several
  // tenants, each may have at most half of the streams of a kind. Returns RESOURCE_EXHAUSTED /
  // TOO_MANY_UPLOADS, TOO_MANY_DOWNLOADS or TOO_MANY_IMPORTS, with {limit}, or with {quota,
  // requested, used, limit} if the tenant's half is exhausted.
  struct StreamPlace {
    Charge own;
    Charge all;
  };
  absl::StatusOr<StreamPlace> TakeStream(StreamKind kind, Tenant& tenant);
  // Charges for a stream of messages, which is also a call of the tenant and takes `memory` bytes
  // for its messages. Returns the errors of TakeStream and RESOURCE_EXHAUSTED / TOO_MANY_CALLS,
  // HOST_MEMORY_EXHAUSTED.
  struct TransferPlace {
    Charge call;
    StreamPlace stream;
    Charge memory;
  };
  absl::StatusOr<TransferPlace> TakeTransfer(StreamKind kind, Tenant& tenant, std::uint64_t memory);
  // Decides which names belong to this server. It is null if all names do.
  Home* home() { return home_.get(); }
  const Home* home() const { return home_.get(); }
  // Clients' memory that transfers may read and write.
  SharedRegions& regions() { return regions_; }
  const Budget& shared_memory() const { return shared_memory_; }
  // Returns all budgets except those of devices, by name, for GetServerInfo.
  struct Usage {
    std::uint64_t limit = 0;
    std::uint64_t used = 0;
  };
  std::map<std::string_view, Usage> Budgets() const;
  // Adds the budget "connections". Called before the first call arrives. The table must exist for
  // as long as the core uses it.
  void WatchConnections(ConnectionTable& connections) { connections_ = &connections; }
  const ConnectionTable* connections() const { return connections_; }  // null until that call

  // The rates of a device's strategies, and the estimates that follow from them.
  Pace& pace(const Device& device) { return states_.at(&device)->pace; }

  // Returns the first device that is not lost, or the first device if all are lost.
  Device& FirstDevice() const;
  // Returns the device that a BufferSpec names, or FirstDevice for an empty name. Errors:
  // INVALID_ARGUMENT / BAD_DEVICE {field, value, valid}; UNAVAILABLE / DEVICE_LOST.
  absl::StatusOr<Device*> FindDevice(std::string_view name) const;

  // Returns INVALID_ARGUMENT / BAD_MESSAGE {field, value, limit} for a message that is larger than
  // clients may send.
  absl::Status CheckSize(std::uint64_t bytes) const;
  // How much memory a transfer's message may take in addition to its data. CheckHeader returns the
  // error of CheckSize for a message that takes more.
  static constexpr std::size_t kMostHeader = std::size_t{64} << 10;
  absl::Status CheckHeader(std::size_t bytes) const;
  // Takes host memory for messages of a call that already holds `held` bytes and keeps them.
  // Returns RESOURCE_EXHAUSTED / HOST_MEMORY_EXHAUSTED {requested, free, total} if there is too
  // little. `message` is the error's message if other calls hold the rest.
  absl::StatusOr<Charge> TakeHostMemory(std::uint64_t bytes, std::string_view message,
                                        std::uint64_t held = 0);
  // The objects that a unary call holds from its acceptance to its end.
  struct Accepted {
    Admission::Ticket ticket;
    Charge call;  // counts toward the tenant's quota
  };
  // Accepts a call. Returns UNAVAILABLE / DRAINING, or the errors of Tenant::BeginCall.
  absl::StatusOr<Accepted> Accept(Tenant& tenant);

  // Returns how long the server waits for a client: `limit`, which an option sets, or less while
  // the server is draining.
  absl::Duration Patience(absl::Duration limit) const;
  // Returns an error if a stream has made no progress for longer than Patience(limit):
  // DEADLINE_EXCEEDED / reason {limit}, or UNAVAILABLE / DRAINING {limit}. `pause` is the time
  // without progress.
  absl::Status CheckPause(absl::Duration pause, absl::Duration limit, std::string_view reason,
                          std::string_view message) const;

  // Returns the longest time that an operation, a transfer or a probe has been waiting for the
  // device, or zero once the device is lost. An operation on the CPU is told to stop once it takes
  // far longer than expected (Executor::StopOverdue); only its time after that counts as a wait.
  // `counts` returns how much of a duration that ends now counts as a wait.
  absl::Duration LongestWait(const Device& device, Executor::Counts counts);
  // Whether the device responds, that is, whether its probe is not overdue.
  bool IsAnswering(const Device& device) const;

 private:
  struct DeviceState {
    DeviceState(std::uint64_t scratch_limit, const Device& device)
        : scratch(scratch_limit), pace(device.info()) {}
    Budget scratch;
    Pace pace;
    std::mutex bridge_mutex;
    std::unique_ptr<Stream> bridge;
    std::mutex team_mutex;
    std::unique_ptr<Stream> team;
    std::shared_ptr<SlotPool> slots;
    std::unique_ptr<Executor> compute;
    std::unique_ptr<Executor> transfers;
    std::unique_ptr<DeviceProbe> probe;
  };
  Core(const Options& options, std::vector<std::unique_ptr<Device>> devices);
  // Returns Home::Check, or an empty function if all names belong to this server.
  std::function<absl::Status(std::string_view)> Foreign();

  // Members are destroyed from the last to the first: work ends before buffers are freed, and
  // buffers are freed before their devices.
  const Options options_;
  const absl::Time start_time_ = SteadyNow();
  const std::vector<std::unique_ptr<Device>> devices_;
  Budget host_memory_;
  std::array<Budget, kStreamKinds> streams_;  // one per StreamKind
  Budget shared_memory_;
  Budget shared_regions_;
  SharedRegions regions_;
  std::atomic<ConnectionTable*> connections_ = nullptr;  // read by metrics before it is set
  std::unique_ptr<Home> home_;
  Tenants tenants_;
  std::unique_ptr<Access> access_;
  Metrics metrics_;
  std::unique_ptr<SpanFile> spans_;  // null without --spans
  Admission admission_;
  Answers answers_;
  std::map<const Device*, std::unique_ptr<DeviceState>> states_;
  Chores chores_;  // last, because chores use the members above
};

// Returns RESOURCE_EXHAUSTED / HOST_MEMORY_EXHAUSTED. Allocates memory only on the first call.
absl::Status HostMemoryError();

// Returns the status of body(), or HostMemoryError() if body() runs out of host memory.
template <class Body>
absl::Status Guarded(Body&& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return HostMemoryError();
  }
}

}  // namespace tessera
