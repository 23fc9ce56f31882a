// The limits on the memory and the streams that calls hold, and on how long the server waits for
// their clients.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <new>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/access/tenant.h"
#include "server/buffers/charge.h"
#include "server/net/listener.h"
#include "server/options.h"
#include "server/rpc/admission.h"

namespace tessera {

// The maximum number of simultaneous imports. Each has a thread, and all share the host's network.
inline constexpr int kMaxImports = 4;
// The maximum number of regions of shared memory. The connections of regions, and those that are
// registering a region, together take half of the descriptors that Listener reserves.
inline constexpr std::size_t kMaxSharedRegions = 64;

// The maximum memory that the description of a buffer needs in a response: for a name of 128 bytes,
// a shape with 8 axes, and a shard for each device.
constexpr std::size_t DescriptionBytes(std::size_t devices) { return 1024 + 256 * devices; }

// Thread safe. The options and the tenants must outlive it.
class CallLimits {
 public:
  CallLimits(const Options& options, const Tenants& tenants, std::size_t devices);

  // The maximum memory that the description of any buffer of this server needs.
  std::size_t description_bytes() const { return description_bytes_; }

  // The maximum size of a message, in bytes.
  std::uint64_t max_message() const { return options_.max_message; }
  // Returns INVALID_ARGUMENT / BAD_MESSAGE {field, value, limit} for a message that is larger than
  // clients may send.
  absl::Status CheckSize(std::uint64_t bytes) const;
  // How much memory a transfer's message may take in addition to its data. CheckHeader returns the
  // error of CheckSize for a message that takes more.
  static constexpr std::size_t kMostHeader = std::size_t{64} << 10;
  absl::Status CheckHeader(std::size_t bytes) const;

  // The budget for host memory for messages: for requests from their acceptance to their end, for
  // messages of streams, and for inline results.
  const Budget& host_memory() const { return host_memory_; }
  // Takes host memory for messages of a call that already holds `held` bytes and keeps them.
  // Returns RESOURCE_EXHAUSTED / HOST_MEMORY_EXHAUSTED {requested, free, total} if there is too
  // little. message: the error's message if other calls hold too much memory.
  absl::StatusOr<Charge> TakeHostMemory(std::uint64_t bytes, std::string_view message,
                                        std::uint64_t held = 0);

  // Counts the calls in progress.
  Admission& admission() { return admission_; }
  const Admission& admission() const { return admission_; }
  // What a call holds from its acceptance to its end.
  struct Accepted {
    Admission::Ticket ticket;
    Charge call;  // counts toward the tenant's quota
  };
  // Accepts a call. Returns UNAVAILABLE / DRAINING, or the errors of Tenant::BeginCall.
  absl::StatusOr<Accepted> Accept(Tenant& tenant);
  // Charges for a stream of a tenant, which are held until the stream ends. If there are several
  // tenants, each may have at most half of the streams of a kind. memory: the bytes that the stream
  // takes for its messages. Returns RESOURCE_EXHAUSTED / TOO_MANY_UPLOADS, TOO_MANY_DOWNLOADS or
  // TOO_MANY_IMPORTS, with {limit}, or with {quota, requested, used, limit} if the tenant's half is
  // exhausted; or the error of TakeHostMemory.
  struct StreamPlace {
    Charge own;
    Charge all;
    Charge memory;
  };
  absl::StatusOr<StreamPlace> TakeStream(StreamKind kind, Tenant& tenant, std::uint64_t memory = 0);

  // Returns how long the server waits for a client: --transfer-timeout, or less while the server is
  // draining.
  absl::Duration Patience() const;
  // Returns an error if a stream has made no progress for longer than Patience():
  // DEADLINE_EXCEEDED / reason {limit}, or UNAVAILABLE / DRAINING {limit}. pause: the time without
  // progress.
  absl::Status CheckPause(absl::Duration pause, std::string_view reason,
                          std::string_view message) const;

  // The budgets for the bytes and for the number of the regions of shared memory.
  Budget& shared_memory() { return shared_memory_; }
  Budget& shared_regions() { return shared_regions_; }

  // Returns all budgets except those of devices, by name, for GetServerInfo.
  struct Usage {
    std::uint64_t limit = 0;
    std::uint64_t used = 0;
  };
  std::map<std::string_view, Usage> Budgets() const;
  // Adds the budget "connections". Called before the first call arrives. The table must outlive
  // this object's last use.
  void WatchConnections(ConnectionTable& connections) { connections_ = &connections; }
  const ConnectionTable* connections() const { return connections_; }  // null until that call

 private:
  const Options& options_;
  const Tenants& tenants_;
  const std::size_t description_bytes_;
  Admission admission_;
  Budget host_memory_;
  std::array<Budget, kStreamKinds> streams_;  // one per StreamKind
  Budget shared_memory_;
  Budget shared_regions_;
  std::atomic<ConnectionTable*> connections_ = nullptr;  // read by metrics before it is set
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
