// The tenants that share a server. Each tenant has its own buffers, quotas and queues for the
// devices.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/buffers/buffer_store.h"
#include "server/buffers/charge.h"

namespace tessera {

// The limits on what a tenant may hold at the same time. With kUnlimited, only the server's own
// limits apply.
struct Quotas {
  std::uint64_t bytes = kUnlimited;    // total size of buffers on each device
  std::uint64_t buffers = kUnlimited;  // including drafts
  std::uint64_t calls = kUnlimited;    // calls without a response yet
};

// A kind of stream that moves an array. The tenants share the server's limit on each kind. A
// transfer through shared memory counts as an upload or a download.
enum class StreamKind { kUpload, kDownload, kImport };
inline constexpr std::size_t kStreamKinds = 3;

// Thread safe.
class Tenant {
 public:
  // `number` is its position among the server's tenants, counted from 0.
  Tenant(std::string name, std::size_t number, std::unique_ptr<BufferStore> store)
      : name_(std::move(name)), number_(number), store_(std::move(store)) {}
  Tenant(const Tenant&) = delete;
  Tenant& operator=(const Tenant&) = delete;

  // Empty for the unnamed tenant.
  const std::string& name() const { return name_; }
  std::size_t number() const { return number_; }
  BufferStore& store() { return *store_; }
  const Quota& calls() const { return calls_; }

  // Counts a call that has ended. `refused` says whether the call ended with RESOURCE_EXHAUSTED
  // because a quota, a queue, memory or another limit was exhausted.
  void CountCall(bool refused) const {
    ended_.fetch_add(1, std::memory_order_relaxed);
    if (refused) refused_.fetch_add(1, std::memory_order_relaxed);
  }
  std::uint64_t ended_calls() const { return ended_.load(std::memory_order_relaxed); }
  std::uint64_t refused_calls() const { return refused_.load(std::memory_order_relaxed); }

  // Sets the quotas for later requests. The tenant keeps what it already holds, even if that
  // exceeds a quota.
  void SetQuotas(const Quotas& quotas);
  // Counts a call as in flight until the returned charge is destroyed. Returns RESOURCE_EXHAUSTED /
  // TOO_MANY_CALLS {quota, requested, used, limit} if the quota is exhausted.
  absl::StatusOr<Charge> BeginCall();
  // Counts a stream of a kind until the returned charge is destroyed. Returns RESOURCE_EXHAUSTED /
  // reason {quota, requested, used, limit} if the tenant already has `most` streams of that kind.
  absl::StatusOr<Charge> BeginStream(StreamKind kind, std::uint64_t most, std::string_view reason);

 private:
  const std::string name_;
  const std::size_t number_;
  const std::unique_ptr<BufferStore> store_;
  Quota calls_;
  std::array<Quota, kStreamKinds> streams_;
  mutable std::atomic<std::uint64_t> ended_{0}, refused_{0};
};

// All tenants of a server. Thread safe. Tenants are never removed, because other objects refer to
// their buffers.
class Tenants {
 public:
  // `devices` gives the memory that all tenants share on each device. `limits` are the limits on
  // each store.
  Tenants(const std::vector<BufferStore::DeviceLimit>& devices, const BufferStore::Limits& limits);

  // The tenant of all calls on a server without --tokens.
  Tenant& unnamed() { return *unnamed_; }
  // Returns the tenant with this name. The first call for a name creates the tenant.
  Tenant& Named(const std::string& name);
  // Whether there is more than one named tenant.
  bool several() const { return several_.load(std::memory_order_relaxed); }

  // The budgets for the memory and for the number of buffers, which all tenants share.
  const Budget& budget(const Device& device) const { return unnamed_->store().budget(device); }
  const Budget& count() const { return unnamed_->store().count(); }
  // The prepared operands that are kept for later calls. Their memory counts toward the budget for
  // buffers.
  PreparedOperands& prepared(const Device& device) const {
    return unnamed_->store().prepared(device);
  }
  // The part of the budget that buffers use.
  std::uint64_t buffer_bytes(const Device& device) const {
    const std::uint64_t used = budget(device).used();
    return used - std::min(used, prepared(device).bytes());
  }

  // Returns all tenants, the unnamed one first.
  std::vector<Tenant*> All();

  // Calls BufferStore::Sweep for every tenant.
  std::vector<std::shared_ptr<const void>> Sweep(absl::Time now);
  // Calls BufferStore::Evict for every tenant.
  std::vector<std::shared_ptr<const void>> Evict(const Device& device);

 private:
  const std::unique_ptr<Tenant> unnamed_;
  std::atomic<bool> several_{false};
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Tenant>> named_;
};

}  // namespace tessera
