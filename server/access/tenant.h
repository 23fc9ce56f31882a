// The parties that share a server: each has names, quotas and a turn at the devices of its own.
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

// What a tenant may hold at once; kUnlimited: as much as the server has.
struct Quotas {
  std::uint64_t bytes = kUnlimited;    // of buffers, on each device
  std::uint64_t buffers = kUnlimited;  // those being written included
  std::uint64_t calls = kUnlimited;    // that have no answer yet
};

// What moves an array, and takes one of the places that tenants share. A transfer through shared
// memory counts as an upload or a download.
enum class StreamKind { kUpload, kDownload, kImport };
inline constexpr std::size_t kStreamKinds = 3;

// Thread safe.
class Tenant {
 public:
  // number: counts the tenants of a server from 0.
  Tenant(std::string name, std::size_t number, std::unique_ptr<BufferStore> store)
      : name_(std::move(name)), number_(number), store_(std::move(store)) {}
  Tenant(const Tenant&) = delete;
  Tenant& operator=(const Tenant&) = delete;

  // Empty: the tenant of a server that knows no others.
  const std::string& name() const { return name_; }
  std::size_t number() const { return number_; }
  BufferStore& store() { return *store_; }
  const Quota& calls() const { return calls_; }

  // Counts a call that has ended. refused: whether with RESOURCE_EXHAUSTED, because a quota, a
  // queue, memory or another limit was used up.
  void CountCall(bool refused) const {
    ended_.fetch_add(1, std::memory_order_relaxed);
    if (refused) refused_.fetch_add(1, std::memory_order_relaxed);
  }
  std::uint64_t ended_calls() const { return ended_.load(std::memory_order_relaxed); }
  std::uint64_t refused_calls() const { return refused_.load(std::memory_order_relaxed); }

  // From now on; what is held stays.
  void SetQuotas(const Quotas& quotas);
  // A call in flight, until what is returned ends. RESOURCE_EXHAUSTED / TOO_MANY_CALLS {quota,
  // requested, used, limit}.
  absl::StatusOr<Charge> BeginCall();
  // A stream of a kind, until what is returned ends, of so many at once as the tenant may have:
  // RESOURCE_EXHAUSTED / reason {quota, requested, used, limit}.
  absl::StatusOr<Charge> BeginStream(StreamKind kind, std::uint64_t most, std::string_view reason);

 private:
  const std::string name_;
  const std::size_t number_;
  const std::unique_ptr<BufferStore> store_;
  Quota calls_;
  std::array<Quota, kStreamKinds> streams_;
  mutable std::atomic<std::uint64_t> ended_{0}, refused_{0};
};

// All of them. Thread safe. A tenant stays to the end, because others hold on to its buffers.
class Tenants {
 public:
  // The memory of the devices, which is all tenants' together, and the limits of a store.
  Tenants(const std::vector<BufferStore::DeviceLimit>& devices, const BufferStore::Limits& limits);

  // Who calls where nobody has to say so.
  Tenant& unnamed() { return *unnamed_; }
  // Made when first asked for.
  Tenant& Named(const std::string& name);
  // Whether more than one has been asked for.
  bool several() const { return several_.load(std::memory_order_relaxed); }

  // Of all buffers together.
  const Budget& budget(const Device& device) const { return unnamed_->store().budget(device); }
  const Budget& count() const { return unnamed_->store().count(); }
  // What is kept of their operands, out of the same budget.
  PreparedOperands& prepared(const Device& device) const {
    return unnamed_->store().prepared(device);
  }
  // Of the budget, what buffers take.
  std::uint64_t buffer_bytes(const Device& device) const {
    const std::uint64_t used = budget(device).used();
    return used - std::min(used, prepared(device).bytes());
  }

  // The unnamed one first.
  std::vector<Tenant*> All();

  // BufferStore::Sweep of every tenant.
  std::vector<std::shared_ptr<const void>> Sweep(absl::Time now);
  // BufferStore::Evict of every tenant.
  std::vector<std::shared_ptr<const void>> Evict(const Device& device);

 private:
  const std::unique_ptr<Tenant> unnamed_;
  std::atomic<bool> several_{false};
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Tenant>> named_;
};

}  // namespace tessera
