// The data about a call that is known at its end, for metrics, log and spans.
#pragma once

#include <string_view>

#include "absl/time/time.h"
#include "server/access/tenant.h"
#include "server/rpc/trace.h"

namespace tessera {

// A call, as it is counted, logged and traced. Its texts must outlive it. Its times are from
// SteadyNow.
struct CallRecord {
  std::string_view method;         // a method of the server, without its service
  std::string_view strategy;       // the one that ran or was requested; may be empty
  const Tenant* tenant = nullptr;  // the caller's; null if the caller is unknown
  Trace trace;
  absl::Time accepted;
  absl::Time begun = absl::InfinitePast();  // on a worker; InfinitePast before, and for transfers
  absl::Time ended = absl::InfinitePast();  // InfinitePast before
  absl::Duration waited = absl::ZeroDuration();  // for transfers: total wait for workers
  absl::Duration copies = absl::ZeroDuration();  // for transfers: total host-device copy time
  absl::Duration kernel = absl::ZeroDuration();  // device-clock time; 0 if not measured

  // Returns "" if the tenant has no name, or if there is no tenant.
  std::string_view tenant_name() const {
    return tenant == nullptr ? std::string_view() : std::string_view(tenant->name());
  }
  bool has_begun() const { return begun != absl::InfinitePast(); }
  absl::Duration total() const { return ended - accepted; }
  absl::Duration queue() const { return has_begun() ? begun - accepted : waited; }
  absl::Duration run() const { return has_begun() ? ended - begun : absl::ZeroDuration(); }
};

}  // namespace tessera
