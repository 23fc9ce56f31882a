#include "server/durable/snapshots.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "server/buffers/slots.h"
#include "server/clock.h"
#include "server/rpc/call_limits.h"
#include "spdlog/spdlog.h"

namespace tessera {
namespace {

// How many arrays are loaded at the same time.
constexpr int kLoaders = 2;
// How many snapshots of a tenant may wait.
constexpr std::size_t kWaiting = 16;

absl::Status Stopping() {
  return MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                   "the server is stopping and restores no more arrays");
}

// The stores use the server's clock, and files use the wall clock.
absl::Time ToWall(absl::Time time) { return absl::Now() + (time - SteadyNow()); }
absl::Time FromWall(absl::Time time) { return SteadyNow() + (time - absl::Now()); }

std::vector<std::string> NamesOf(absl::Span<const Shard> shards) {
  std::vector<std::string> names;
  for (const Shard& shard : shards) names.emplace_back(shard.device->info().name);
  return names;
}

}  // namespace

Snapshots::Snapshots(std::unique_ptr<DataFolder> folder, absl::Duration interval,
                     const Devices& devices, Tenants& tenants)
    : folder_(std::move(folder)),
      interval_(interval),
      devices_(devices),
      tenants_(tenants),
      begun_(SteadyNow()),
      thread_(1, kWaiting) {
  figures_.last = begun_;
}

absl::StatusOr<std::unique_ptr<Snapshots>> Snapshots::Open(const std::string& folder,
                                                           absl::Duration interval,
                                                           const Devices& devices,
                                                           Tenants& tenants) {
  ASSIGN_OR_RETURN(std::unique_ptr<DataFolder> opened, DataFolder::Open(folder));
  ASSIGN_OR_RETURN(Manifest manifest, opened->ReadManifest());
  if (manifest.time == absl::Time()) {
    // There are no arrays yet. From now on, a folder without a manifest is a damaged one.
    manifest.time = absl::Now();
    bool replaced = false;
    RETURN_IF_ERROR(opened->WriteManifest(manifest, &replaced));
  }
  std::unique_ptr<Snapshots> snapshots(
      new Snapshots(std::move(opened), interval, devices, tenants));
  snapshots->manifest_ = std::move(manifest);
  snapshots->folder_->RemoveOthers(snapshots->manifest_, {});
  snapshots->Restore();
  return snapshots;
}

Snapshots::~Snapshots() {
  stopping_ = true;
  for (std::thread& loader : loaders_) loader.join();
  Unloaded left;
  while (TakeNext(left)) left.arrival->End(Stopping());
}

void Snapshots::Restore() {
  for (auto& [name, stored] : manifest_.tenants)
    RestoreTenant(stored, (name.empty() ? tenants_.unnamed() : tenants_.Named(name)).store());
  const std::size_t count = unloaded_.size();
  if (count == 0) return;
  spdlog::info("restoring {} arrays from --data-dir", count);
  for (int i = 0; i < kLoaders; ++i) loaders_.emplace_back(&Snapshots::Load, this);
}

void Snapshots::RestoreTenant(Manifest::OfTenant& stored, BufferStore& store) {
  const absl::Time now = absl::Now();
  std::map<std::uint64_t, std::shared_ptr<const Buffer>> owners;  // by number of the file
  store.SkipVersions(stored.last_version);
  for (Manifest::Entry& entry : stored.buffers) {
    // If the clock has been set back, use the time to live that was left at the snapshot.
    const absl::Duration left =
        std::min(entry.expire_time - now, entry.expire_time - manifest_.time);
    if (left <= absl::ZeroDuration()) continue;
    const ArrayFile& file = manifest_.files.at(entry.file);
    BufferStore::Restored restored;
    restored.spec.name = entry.name;
    restored.spec.type = file.type;
    restored.version = entry.version;
    restored.create_time = std::min(FromWall(entry.create_time), SteadyNow());
    restored.expire_time = SteadyNow() + left;
    restored.checksum = file.checksum;
    restored.arrival = std::make_shared<Arrival>([this, number = file.number] {
      const std::lock_guard lock(mutex_);
      asked_.push_back(number);
    });
    std::shared_ptr<const Buffer>& owner = owners[file.number];
    restored.origin = owner;
    SetPlace(entry, restored.spec);
    const std::shared_ptr<const Buffer> buffer = store.Restore(restored);
    entry.owner = buffer->owner().version();
    if (owner != nullptr) continue;
    owner = buffer;
    if (!restored.arrival->ended()) {
      unloaded_.emplace(file.number, Unloaded{buffer, restored.arrival, file});
    } else {
      ++figures_.lost;
      spdlog::error("buffer '{}' cannot be restored: {}", entry.name,
                    std::string(restored.arrival->status().message()));
    }
  }
}

void Snapshots::SetPlace(const Manifest::Entry& entry, BufferSpec& spec) const {
  std::vector<Device*>& place = spec.placement;
  for (const std::string& name : entry.devices) {
    const absl::StatusOr<Device*> device = devices_.Find(name);
    if (!device.ok() || std::find(place.begin(), place.end(), *device) != place.end()) continue;
    if (place.empty() || (*device)->info().backend == place.front()->info().backend)
      place.push_back(*device);
  }
  spec.device = spec.placement.empty() ? &devices_.First() : spec.placement.front();
  if (spec.placement.size() == 1) spec.placement.clear();
}

bool Snapshots::TakeNext(Unloaded& next) {
  const std::lock_guard lock(mutex_);
  auto it = unloaded_.begin();
  for (; !asked_.empty(); asked_.pop_front()) {
    if (const auto asked = unloaded_.find(asked_.front()); asked != unloaded_.end()) {
      it = asked;
      break;
    }
  }
  if (it == unloaded_.end()) return false;
  next = std::move(it->second);
  loading_.insert(it->first);
  unloaded_.erase(it);
  return true;
}

void Snapshots::Load() {
  for (Unloaded next; !stopping_ && TakeNext(next);) {
    const absl::Cleanup done = [this, number = next.file.number] {
      const std::lock_guard lock(mutex_);
      loading_.erase(number);
    };
    const std::shared_ptr<const Buffer> buffer = next.buffer.lock();
    if (buffer == nullptr) continue;
    absl::Status status = Guarded([&] { return LoadOne(*buffer, next.file); });
    if (ErrorReason(status).empty() && !status.ok()) {
      const std::string cause(status.message());
      status =
          MakeError(absl::StatusCode::kDataLoss, "DATA_LOST",
                    absl::StrCat("the bytes of buffer '", buffer->name(), "' are lost: ", cause),
                    {{"name", buffer->name()}, {"cause", cause}});
    }
    if (!status.ok() && !stopping_) {
      spdlog::error("buffer '{}' cannot be restored: {}", buffer->name(),
                    std::string(status.message()));
      const std::lock_guard lock(mutex_);
      ++figures_.lost;
    }
    next.arrival->End(std::move(status));
  }
}

absl::Status Snapshots::LoadOne(const Buffer& buffer, const ArrayFile& file) {
  ASSIGN_OR_RETURN(DataFolder::Reader reader, folder_->Read(file));
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, MakeStream(buffer.device()));
  ASSIGN_OR_RETURN(const Slot slot, devices_.slots(buffer.device()).Take());
  // A copy may still be writing to memory that is about to be freed.
  const absl::Cleanup arrive = [&] { Synchronize(*stream).IgnoreError(); };
  const std::uint64_t size = buffer.type().bytes();
  for (std::uint64_t begin = 0; begin < size; begin += Slot::kBytes) {
    if (stopping_) return Stopping();
    const std::size_t piece = std::min<std::uint64_t>(Slot::kBytes, size - begin);
    RETURN_IF_ERROR(reader.Read(slot.data(), piece));
    RETURN_IF_ERROR(
        CopyPinnedToDevice(*stream, static_cast<char*>(buffer.data()) + begin, slot.data(), piece));
    RETURN_IF_ERROR(Synchronize(*stream));
  }
  return reader.Finish();
}

std::set<std::uint64_t> Snapshots::Needed() const {
  const std::lock_guard lock(mutex_);
  std::set<std::uint64_t> needed = loading_;
  for (const auto& [number, unloaded] : unloaded_)
    if (!unloaded.buffer.expired()) needed.insert(number);
  return needed;
}

absl::StatusOr<Snapshots::Taken> Snapshots::Take(Tenant* only) {
  const std::lock_guard turn(turn_);
  {
    const std::lock_guard lock(mutex_);
    ++figures_.begun;
  }
  absl::StatusOr<Taken> taken = Taken();
  const absl::Status guarded = Guarded([&] {
    taken = TakeNow(only);
    return taken.status();
  });
  if (!guarded.ok()) taken = guarded;
  if (taken.ok()) {
    spdlog::info("snapshot of {} buffers: {} arrays with {} bytes were written", taken->buffers,
                 taken->written_arrays, taken->written_bytes);
  } else {
    spdlog::error("{}", std::string(taken.status().message()));
  }
  const std::lock_guard lock(mutex_);
  ++(taken.ok() ? figures_.taken : figures_.failed);
  if (taken.ok()) figures_.last = SteadyNow();
  return taken;
}

absl::StatusOr<Snapshots::Taken> Snapshots::TakeNow(Tenant* only) {
  struct Held {
    Tenant* tenant;
    std::vector<BufferInfo> infos;
    std::uint64_t last_version;
  };
  Manifest next = manifest_;
  next.time = absl::Now();
  std::vector<Held> held;
  for (Tenant* tenant : only != nullptr ? std::vector<Tenant*>{only} : tenants_.All()) {
    BufferStore& store = tenant->store();
    std::vector<BufferInfo> infos = store.List("", "", std::numeric_limits<std::size_t>::max());
    std::erase_if(infos, [](const BufferInfo& info) { return !info.ready; });
    held.push_back({tenant, std::move(infos), store.last_version()});
  }
  // The lists may lack the buffers of a device that was lost before the lists were made.
  for (const std::unique_ptr<Device>& device : devices_.list()) {
    if (!device->lost()) continue;
    const std::string cause = absl::StrCat("device ", device->info().name, " is lost");
    return MakeError(absl::StatusCode::kFailedPrecondition, "SNAPSHOT_FAILED",
                     absl::StrCat("no snapshot can be taken, because ", cause,
                                  "; a new server restores the previous snapshot"),
                     {{"cause", cause}});
  }

  // If this snapshot fails, removes the files that it has written; their numbers are not used
  // again. If it succeeds, removes the files that are no longer needed.
  const absl::Cleanup tidy = [&] {
    manifest_.next_file = next.next_file;
    folder_->RemoveOthers(manifest_, Needed());
  };
  Taken taken;
  std::set<std::uint64_t> named;
  for (Held& of : held) {
    Manifest::OfTenant& stored = next.tenants[of.tenant->name()];
    std::map<std::uint64_t, std::uint64_t> files;  // by version
    for (const Manifest::Entry& entry : stored.buffers) {
      files.emplace(entry.version, entry.file);
      files.emplace(entry.owner, entry.file);
    }
    stored = {.last_version = of.last_version};
    for (BufferInfo& info : of.infos) {
      const std::shared_ptr<const Buffer> buffer = std::move(info.buffer);
      const Buffer& owner = buffer->owner();
      auto file = files.find(buffer->version());
      if (file == files.end()) file = files.find(owner.version());
      if (file == files.end()) {
        ArrayFile made{.number = next.next_file++, .array = buffer->name(), .type = buffer->type()};
        RETURN_IF_ERROR(Write(owner, made));
        ++taken.written_arrays;
        taken.written_bytes += made.type.bytes();
        file = files.emplace(owner.version(), made.number).first;
        next.files.emplace(made.number, std::move(made));
      }
      stored.buffers.push_back({.name = buffer->name(),
                                .version = buffer->version(),
                                .file = file->second,
                                .owner = owner.version(),
                                .create_time = ToWall(buffer->create_time()),
                                .expire_time = info.expire_time == absl::InfiniteFuture()
                                                   ? info.expire_time
                                                   : ToWall(info.expire_time),
                                .devices = NamesOf(buffer->shards())});
      ++taken.buffers;
    }
  }
  for (const auto& [name, tenant] : next.tenants)
    for (const Manifest::Entry& entry : tenant.buffers) named.insert(entry.file);
  std::erase_if(next.files, [&](const auto& file) { return !named.contains(file.first); });
  bool replaced = false;
  const absl::Status written = folder_->WriteManifest(next, &replaced);
  if (replaced) manifest_ = next;
  return written.ok() ? absl::StatusOr<Taken>(taken) : written;
}

absl::Status Snapshots::Write(const Buffer& buffer, ArrayFile& file) {
  ASSIGN_OR_RETURN(DataFolder::Writer writer, folder_->Create(file));
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, MakeStream(buffer.device()));
  ASSIGN_OR_RETURN(const Slot slot, devices_.slots(buffer.device()).Take());
  const std::uint64_t size = buffer.type().bytes();
  for (std::uint64_t begin = 0; begin < size; begin += Slot::kBytes) {
    const std::size_t piece = std::min<std::uint64_t>(Slot::kBytes, size - begin);
    RETURN_IF_ERROR(
        CopyToHost(*stream, slot.data(), static_cast<const char*>(buffer.data()) + begin, piece));
    RETURN_IF_ERROR(writer.Write(slot.data(), piece));
    const std::lock_guard lock(mutex_);
    figures_.bytes += piece;
  }
  return writer.Finish(file);
}

void Snapshots::Tick(absl::Time now) {
  if (now - begun_ < interval_ || ticking_.exchange(true)) return;
  begun_ = now;
  const absl::Status submitted = Submit(
      [this] {
        Take(nullptr).IgnoreError();
        ticking_ = false;
      },
      0);
  if (!submitted.ok()) ticking_ = false;
}

Snapshots::Figures Snapshots::figures() const {
  const std::lock_guard lock(mutex_);
  Figures figures = figures_;
  figures.waiting = unloaded_.size();
  figures.loading = loading_.size();
  return figures;
}

}  // namespace tessera
