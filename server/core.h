// What the handlers of all services work on.
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

// Devices, their buffers, budgets and workers. Immutable but for what its members guard themselves.
class Core {
 public:
  // devices: at least one, all different; they serve in this order.
  static absl::StatusOr<std::unique_ptr<Core>> Make(const Options& options,
                                                    std::vector<std::unique_ptr<Device>> devices);

  const Options& options() const { return options_; }
  const std::vector<std::unique_ptr<Device>>& devices() const { return devices_; }
  Tenants& tenants() { return tenants_; }
  const Tenants& tenants() const { return tenants_; }
  // Who may call, as whom.
  Access& access() { return *access_; }
  const Access& access() const { return *access_; }
  Admission& admission() { return admission_; }
  Chores& chores() { return chores_; }
  Answers& answers() { return answers_; }
  Metrics& metrics() { return metrics_; }
  absl::Time start_time() const { return start_time_; }
  // Once for each call of a caller that the server knows, before its answer leaves: counts it, logs
  // it if it failed or was slow, and writes the spans of one that is sampled. peer: returns the
  // caller's address, as gRPC gives it.
  void Conclude(const CallRecord& call, const absl::Status& status,
                absl::FunctionRef<std::string()> peer);
  // Writes the spans of calls that have ended, but waits no longer than limit.
  void FlushSpans(absl::Duration limit);

  // Runs the operations on a device of devices().
  Executor& compute(const Device& device) { return *states_.at(&device)->compute; }
  // Moves bytes between the wire and a device. Every upload and download has at most one task here,
  // so that their number bounds the queue, and no operation waits behind an upload.
  Executor& transfers(const Device& device) { return *states_.at(&device)->transfers; }

  // What downloads from a device travel in.
  SlotPool& slots(const Device& device) { return *states_.at(&device)->slots; }
  // Frees slots that have not been needed lately. May wait for the devices' work.
  void TrimSlots();

  // A stream of a device for calls that run on another one. It belongs to the caller as long as he
  // holds the lock, for which he may have to wait: for others who have all that they need, because
  // whoever holds several of a kind has taken them in the order of devices(), and nobody asks for a
  // stream of the one kind while he holds one of the other.
  struct Bridge {
    std::unique_lock<std::mutex> lock;
    Stream& stream;
  };
  // That receives copies from other devices.
  Bridge BridgeTo(const Device& device);
  // That works on operands which devices share. Its scratch memory counts as that of operations.
  Bridge TeamStream(const Device& device);

  // Beside buffers: what operations need of a device while they run.
  const Budget& scratch(const Device& device) const { return states_.at(&device)->scratch; }
  // Messages: requests from their acceptance to their end, those of streams, inline results.
  Budget& host_memory() { return host_memory_; }
  // A stream of a tenant, as long as both charges are held. Where there are several tenants, one
  // has half of the streams of a kind at most. RESOURCE_EXHAUSTED / TOO_MANY_UPLOADS,
  // TOO_MANY_DOWNLOADS, TOO_MANY_IMPORTS {limit}, of its half {quota, requested, used, limit}.
  struct StreamPlace {
    Charge own;
    Charge all;
  };
  absl::StatusOr<StreamPlace> TakeStream(StreamKind kind, Tenant& tenant);
  // The same for a stream of messages, which is a call of the tenant's and has so much memory for
  // its messages. Also RESOURCE_EXHAUSTED / TOO_MANY_CALLS, HOST_MEMORY_EXHAUSTED.
  struct TransferPlace {
    Charge call;
    StreamPlace stream;
    Charge memory;
  };
  absl::StatusOr<TransferPlace> TakeTransfer(StreamKind kind, Tenant& tenant, std::uint64_t memory);
  // Which names are this server's; null: all are.
  Home* home() { return home_.get(); }
  const Home* home() const { return home_.get(); }
  // Memory of clients that transfers may go to and come from.
  SharedRegions& regions() { return regions_; }
  const Budget& shared_memory() const { return shared_memory_; }
  // All budgets but those of a device, by name, for GetServerInfo.
  struct Usage {
    std::uint64_t limit = 0;
    std::uint64_t used = 0;
  };
  std::map<std::string_view, Usage> Budgets() const;
  // Adds the budget "connections"; before the first call comes. The table outlives the core's use.
  void WatchConnections(ConnectionTable& connections) { connections_ = &connections; }
  const ConnectionTable* connections() const { return connections_; }  // null before

  // The rates of a device's strategies, and what they say about how long a call will take.
  Pace& pace(const Device& device) { return states_.at(&device)->pace; }

  // The first device that has not been lost; if all have, the first.
  Device& FirstDevice() const;
  // The device of a BufferSpec; empty: FirstDevice. INVALID_ARGUMENT / BAD_DEVICE {field, value,
  // valid}; UNAVAILABLE / DEVICE_LOST.
  absl::StatusOr<Device*> FindDevice(std::string_view name) const;

  // INVALID_ARGUMENT / BAD_MESSAGE {field, value, limit} for a message larger than clients may
  // send.
  absl::Status CheckSize(std::uint64_t bytes) const;
  // The same for what a message of a transfer holds in memory beside data.
  static constexpr std::size_t kMostHeader = std::size_t{64} << 10;
  absl::Status CheckHeader(std::size_t bytes) const;
  // Host memory for messages of a call, which goes on to need what it holds already.
  // RESOURCE_EXHAUSTED / HOST_MEMORY_EXHAUSTED {requested, free, total}. message: what is wrong
  // where others hold the rest.
  absl::StatusOr<Charge> TakeHostMemory(std::uint64_t bytes, std::string_view message,
                                        std::uint64_t held = 0);
  // What a unary call holds from its acceptance to its end.
  struct Accepted {
    Admission::Ticket ticket;
    Charge call;  // of the tenant's
  };
  // UNAVAILABLE / DRAINING; the errors of Tenant::BeginCall.
  absl::StatusOr<Accepted> Accept(Tenant& tenant);

  // For how long the server waits for a client: limit, which an option says, or less while it
  // stops.
  absl::Duration Patience(absl::Duration limit) const;
  // Of a stream on which nothing has moved for longer than that: DEADLINE_EXCEEDED / reason
  // {limit}, or UNAVAILABLE / DRAINING {limit}.
  absl::Status CheckPause(absl::Duration pause, absl::Duration limit, std::string_view reason,
                          std::string_view message) const;

  // Returns how long the operation, the transfer or the probe that has waited longest for the
  // device has waited for it. Zero once the device is lost. An operation of the CPU is told to stop
  // once it takes far longer than expected (Executor::StopOverdue); only its time after that is a
  // wait. counts: returns how much of a time that ends now counts as a wait.
  absl::Duration LongestWait(const Device& device, Executor::Counts counts);
  // Whether the device answers: its probe is not overdue.
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
  // Home::Check; empty where all names are this server's.
  std::function<absl::Status(std::string_view)> Foreign();

  // Destroyed from the last to the first: work ends before buffers go, and they before their
  // devices.
  const Options options_;
  const absl::Time start_time_ = SteadyNow();
  const std::vector<std::unique_ptr<Device>> devices_;
  Budget host_memory_;
  std::array<Budget, kStreamKinds> streams_;  // by StreamKind
  Budget shared_memory_;
  Budget shared_regions_;
  SharedRegions regions_;
  std::atomic<ConnectionTable*> connections_ = nullptr;  // read by metrics before it is set
  std::unique_ptr<Home> home_;
  Tenants tenants_;
  std::unique_ptr<Access> access_;
  Metrics metrics_;
  std::unique_ptr<SpanFile> spans_;  // null: without
  Admission admission_;
  Answers answers_;
  std::map<const Device*, std::unique_ptr<DeviceState>> states_;
  Chores chores_;  // they use what is above
};

// The host's memory is exhausted: RESOURCE_EXHAUSTED / HOST_MEMORY_EXHAUSTED. Takes none, but when
// it is first called.
absl::Status HostMemoryError();

// The Status of body(), which may run out of the host's memory.
template <class Body>
absl::Status Guarded(Body&& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return HostMemoryError();
  }
}

}  // namespace tessera
