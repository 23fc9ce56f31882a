// What is known of a call at its end, for metrics, log and spans.
#pragma once

#include <string_view>

#include "absl/time/time.h"
#include "server/trace.h"

namespace tessera {

// Of a caller that the server knows. Its texts outlive its use; times are those of SteadyNow.
struct CallRecord {
  std::string_view method;    // of the server's, without its service
  std::string_view strategy;  // that ran or was asked for, by a client's own words; empty: none
  std::string_view tenant;    // empty: the server has none
  Trace trace;
  absl::Time accepted;
  absl::Time begun = absl::InfinitePast();  // on a worker; until then, and of transfers, infinite
  absl::Time ended;
  absl::Duration waited = absl::ZeroDuration();  // of transfers: for workers, in all
  absl::Duration copies = absl::ZeroDuration();  // of transfers: between host and device, in all
  absl::Duration kernel = absl::ZeroDuration();  // by the device's clock; 0: not measured

  bool has_begun() const { return begun != absl::InfinitePast(); }
  absl::Duration total() const { return ended - accepted; }
  absl::Duration queue() const { return has_begun() ? begun - accepted : waited; }
  absl::Duration run() const { return has_begun() ? ended - begun : absl::ZeroDuration(); }
};

}  // namespace tessera
