// Memory that clients share with the server.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/compute.h"
#include "server/buffers/charge.h"

namespace tessera {

class Tenant;

// A descriptor that is closed in the end. Movable.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const { return fd_; }

 private:
  int fd_;
};

// A client's file, mapped, and pinned on the devices. The client reads and writes it at any time:
// no byte may be looked at twice. It cannot take pages away: reading it never faults.
class SharedRegion {
 public:
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  // Null unless [offset, offset + size) lies inside.
  char* At(std::uint64_t offset, std::uint64_t size) const {
    return size <= size_ && offset <= size_ - size ? memory_ + offset : nullptr;
  }
  std::uint64_t size() const { return size_; }

 private:
  friend class SharedRegions;
  // What a user has who shares.
  struct UserQuotas {
    Quota count;
    Quota bytes;
  };
  SharedRegion() = default;
  absl::Status Map(const Descriptor& file);

  // The memory goes before it counts as free, and is not mapped by then.
  std::shared_ptr<UserQuotas> user_quotas_;  // null: without
  Charge own_count_;
  Charge own_bytes_;
  Charge count_;
  Charge bytes_;
  char* memory_ = nullptr;
  std::uint64_t size_ = 0;
  std::vector<HostRegistration> registrations_;
  // Null: nobody has asked for it yet. Guarded by the mutex of the regions.
  mutable const Tenant* tenant_ = nullptr;
};

// The regions that requests can name. Thread safe.
class SharedRegions {
 public:
  static constexpr std::size_t kTokenBytes = 16;

  // Every region is pinned on all devices, which outlive the regions, as the budgets do. bytes: of
  // the regions together; count: how many there are.
  SharedRegions(std::vector<Device*> devices, Budget& bytes, Budget& count)
      : devices_(std::move(devices)), bytes_(bytes), count_(count) {}

  // Whether a descriptor may be that of a region: cheap, and without asking a file system, which
  // may let the caller wait. INVALID_ARGUMENT / BAD_REGION {field}.
  static absl::Status CheckFile(const Descriptor& file);

  // Checks, maps and pins a client's file, and returns the token that names it from then on. May
  // take a second for some GiB. sharer: a user who has half of all regions, and of their bytes, at
  // most; nothing: one who may have all. INVALID_ARGUMENT / BAD_REGION {field}; RESOURCE_EXHAUSTED
  // / TOO_MANY_REGIONS {limit}, SHARED_MEMORY_EXHAUSTED {requested, free, total}, both with {quota,
  // requested, used, limit} where a half is meant, HOST_MEMORY_EXHAUSTED; FAILED_PRECONDITION /
  // REGIONS_UNSUPPORTED before Linux 5.14.
  absl::StatusOr<std::string> Add(const Descriptor& file,
                                  std::optional<uid_t> sharer = std::nullopt);

  // What is returned is the region, or null. It ends, which may take as long as Add, with its last
  // user.
  std::shared_ptr<const SharedRegion> Remove(std::string_view token);

  // A region belongs to the first who asks for it; to others it is not there. NOT_FOUND /
  // REGION_NOT_FOUND.
  absl::StatusOr<std::shared_ptr<const SharedRegion>> Find(std::string_view token,
                                                           const Tenant* tenant = nullptr) const;

 private:
  absl::Status TakeQuotas(uid_t sharer, SharedRegion& region);

  const std::vector<Device*> devices_;
  Budget& bytes_;
  Budget& count_;
  mutable std::mutex mutex_;
  std::map<uid_t, std::shared_ptr<SharedRegion::UserQuotas>> user_quotas_;
  absl::flat_hash_map<std::string, std::shared_ptr<const SharedRegion>> regions_;
};

}  // namespace tessera
