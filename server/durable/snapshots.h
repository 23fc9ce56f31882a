// Arrays that outlive the server: snapshots of the tenants' buffers in --data-dir, and the buffers
// of an earlier server, which are restored from there. docs/durability.md describes the guarantees.
//
// READY buffers never change, so a snapshot is a list of buffers. It keeps them alive until their
// bytes are in files. Buffers whose version is already in a file are not written again.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/access/tenant.h"
#include "server/devices/chores.h"
#include "server/devices/devices.h"
#include "server/durable/data_folder.h"

namespace tessera {

// Thread safe. A server without --data-dir has no object of this class. The devices and the tenants
// must outlive it.
class Snapshots {
 public:
  // Adds the buffers that the manifest names to their tenants' stores, and begins to load their
  // bytes. interval: the time between two snapshots that Tick takes. Returns the errors of
  // DataFolder::Open and DataFolder::ReadManifest, and those of DataFolder::WriteManifest for a
  // folder that has no manifest yet.
  static absl::StatusOr<std::unique_ptr<Snapshots>> Open(const std::string& folder,
                                                         absl::Duration interval,
                                                         const Devices& devices, Tenants& tenants);
  // Ends, with UNAVAILABLE / DRAINING, the arrivals of buffers that have not been loaded.
  ~Snapshots();

  // What a snapshot holds, and what was written for it.
  struct Taken {
    std::uint64_t buffers = 0;
    std::uint64_t written_arrays = 0;
    std::uint64_t written_bytes = 0;
  };
  // Takes a snapshot of the buffers of one tenant, or of all tenants if `only` is null, once the
  // snapshots that began earlier have ended. The manifest keeps its entries of other tenants.
  // Returns the errors of DataFolder, or SNAPSHOT_FAILED if a device is lost, because the manifest
  // would then lose the buffers of that device.
  absl::StatusOr<Taken> Take(Tenant* only);
  // Calls work() on the thread for snapshots. Errors: as for Chores::Submit.
  absl::Status Submit(absl::AnyInvocable<void()> work, std::size_t share) {
    return thread_.Submit(std::move(work), share);
  }
  // To be called regularly, by one thread: begins a snapshot of all tenants if one is due.
  void Tick(absl::Time now);

  struct Figures {
    std::uint64_t begun = 0;
    std::uint64_t taken = 0;
    std::uint64_t failed = 0;
    std::uint64_t bytes = 0;    // written to files of arrays, even for snapshots that failed later
    absl::Time last;            // when the last complete snapshot ended; the start if there is none
    std::uint64_t waiting = 0;  // arrays that are on disk only
    std::uint64_t loading = 0;  // arrays that are being loaded
    std::uint64_t lost = 0;     // arrays that could not be loaded
  };
  Figures figures() const;

 private:
  // A buffer whose bytes are in a file.
  struct Unloaded {
    std::weak_ptr<const Buffer> buffer;  // expired once the buffer is deleted
    std::shared_ptr<Arrival> arrival;
    ArrayFile file;
  };
  Snapshots(std::unique_ptr<DataFolder> folder, absl::Duration interval, const Devices& devices,
            Tenants& tenants);

  void Restore();
  void RestoreTenant(Manifest::OfTenant& stored, BufferStore& store);
  // Places a buffer on those of its devices that this server has.
  void SetPlace(const Manifest::Entry& entry, BufferSpec& spec) const;
  // Loads buffers until all are loaded or the server stops.
  void Load();
  // Takes the next buffer to load. Returns false if none is left.
  bool TakeNext(Unloaded& next);
  absl::Status LoadOne(const Buffer& buffer, const ArrayFile& file);
  // The files of arrays that calls may be waiting for, even if their names have been deleted.
  std::set<std::uint64_t> Needed() const;

  absl::StatusOr<Taken> TakeNow(Tenant* only);
  absl::Status Write(const Buffer& buffer, ArrayFile& file);

  const std::unique_ptr<DataFolder> folder_;
  const absl::Duration interval_;
  const Devices& devices_;
  Tenants& tenants_;

  std::mutex turn_;    // held while a snapshot is taken
  Manifest manifest_;  // the manifest in the folder

  mutable std::mutex mutex_;
  Figures figures_;
  std::map<std::uint64_t, Unloaded> unloaded_;  // by number of the file
  std::set<std::uint64_t> loading_;             // the files that are being loaded
  std::deque<std::uint64_t> asked_;             // the files for which calls wait

  std::atomic<bool> stopping_{false};
  absl::Time begun_;                  // when Tick last began a snapshot
  std::atomic<bool> ticking_{false};  // whether that snapshot is still being taken
  std::vector<std::thread> loaders_;
  Chores thread_;  // destroyed first
};

}  // namespace tessera
