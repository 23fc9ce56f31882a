// Owns the server's parts. Each handler receives the parts that it uses.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/access/access.h"
#include "server/access/tenant.h"
#include "server/buffers/shared_region.h"
#include "server/calls/call_parts.h"
#include "server/cluster/home.h"
#include "server/devices/chores.h"
#include "server/devices/devices.h"
#include "server/durable/snapshots.h"
#include "server/observe/call_records.h"
#include "server/options.h"
#include "server/rpc/call_limits.h"

namespace tessera {

// Members are destroyed from the last to the first: work ends before buffers are freed, and buffers
// are freed before their devices. All parts are thread safe.
struct Core {
  // list: the devices, at least one, without duplicates, the most preferred first.
  static absl::StatusOr<std::unique_ptr<Core>> Make(const Options& options, Devices::List list);

  // The parts that all calls need, whatever their methods.
  CallParts call_parts() { return {*access, limits, records, chores}; }

  const Options options;
  const absl::Time start_time;
  const Devices::List device_list;
  std::unique_ptr<Home> home;  // decides which names belong to this server; null if all names do
  Tenants tenants;
  std::unique_ptr<Access> access;
  CallLimits limits;
  SharedRegions regions;
  CallRecords records;
  std::unique_ptr<Devices> devices;
  std::unique_ptr<Snapshots> snapshots;  // null without --data-dir
  Chores chores;                         // last, because chores use the members above

 private:
  Core(const Options& options, Devices::List list,
       const std::vector<BufferStore::DeviceLimit>& buffer_limits);
};

}  // namespace tessera
