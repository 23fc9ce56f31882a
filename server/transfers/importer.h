// The ImportBuffer method, which copies buffers from other servers.
#pragma once

#include <mutex>
#include <set>

#include "absl/time/time.h"
#include "server/calls/call_parts.h"
#include "server/calls/unary_exchange.h"
#include "server/cluster/import_sources.h"
#include "server/devices/chores.h"
#include "server/devices/devices.h"
#include "tessera/v1/buffer.pb.h"

namespace tessera {

class ImportCall;

// Thread safe. The parts of the server must outlive the importer, and the importer must outlive its
// calls. Each import has a thread. A server that may not import has no such threads.
class Importer {
 public:
  Importer(const CallParts& parts, const Devices& devices, const Options& options);

  void Begin(UnaryExchangeOf<v1::ImportBufferRequest, v1::ImportBufferResponse>& exchange);
  // Ends imports that have received nothing for longer than --transfer-timeout.
  void EndIdle(absl::Time now);

 private:
  friend class ImportCall;

  const CallParts& parts_;
  const Devices& devices_;
  const Options& options_;
  const ImportSources sources_;
  std::mutex mutex_;
  std::set<ImportCall*> running_;
  Chores threads_;  // destroyed first
};

}  // namespace tessera
