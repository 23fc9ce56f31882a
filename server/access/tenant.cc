#include "server/access/tenant.h"

#include <iterator>
#include <utility>
#include <vector>

namespace tessera {

void Tenant::SetQuotas(const Quotas& quotas) {
  store_->SetQuotas(quotas.bytes, quotas.buffers);
  calls_.SetLimit(quotas.calls);
}

absl::StatusOr<Charge> Tenant::BeginCall() {
  return calls_.Take(1, "TOO_MANY_CALLS", "calls",
                     "the tenant's calls in flight have reached its quota of calls");
}

absl::StatusOr<Charge> Tenant::BeginStream(StreamKind kind, std::uint64_t most,
                                           std::string_view reason) {
  Quota& streams = streams_[static_cast<std::size_t>(kind)];
  streams.SetLimit(most);
  return streams.Take(1, reason, "streams",
                      "the tenant already uses its share, which is half of the server's limit");
}

Tenants::Tenants(const std::vector<BufferStore::DeviceLimit>& devices,
                 const BufferStore::Limits& limits)
    : unnamed_(std::make_unique<Tenant>("", 0, std::make_unique<BufferStore>(devices, limits))) {}

Tenant& Tenants::Named(const std::string& name) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Tenant>& tenant = named_[name];
  if (tenant == nullptr)
    tenant = std::make_unique<Tenant>(name, named_.size(), unnamed_->store().MakeAnother());
  several_ = named_.size() > 1;
  return *tenant;
}

std::vector<Tenant*> Tenants::All() {
  const std::lock_guard lock(mutex_);
  std::vector<Tenant*> all = {unnamed_.get()};
  for (const auto& [name, tenant] : named_) all.push_back(tenant.get());
  return all;
}

namespace {

using Doomed = std::vector<std::shared_ptr<const void>>;

// Returns the results of forget(store) for all tenants in one list.
template <class Forget>
Doomed OfAll(const std::vector<Tenant*>& tenants, const Forget& forget) {
  Doomed all;
  for (Tenant* tenant : tenants) {
    Doomed doomed = forget(tenant->store());
    std::move(doomed.begin(), doomed.end(), std::back_inserter(all));
  }
  return all;
}

}  // namespace

Doomed Tenants::Sweep(absl::Time now) {
  return OfAll(All(), [now](BufferStore& store) { return store.Sweep(now); });
}

Doomed Tenants::Evict(const Device& device) {
  return OfAll(All(), [&device](BufferStore& store) { return store.Evict(device); });
}

}  // namespace tessera
