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

// A file descriptor, which is closed on destruction. Movable.
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

// A client's file that is mapped, and pinned for the devices. The client may write to the file at
// any time, so the server must not read any byte twice. The client cannot remove pages, so reading
// never faults.
class SharedRegion {
 public:
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  // Returns the address of [offset, offset + size), or null if that is not inside the region.
  char* At(std::uint64_t offset, std::uint64_t size) const {
    return size <= size_ && offset <= size_ - size ? memory_ + offset : nullptr;
  }
  std::uint64_t size() const { return size_; }

 private:
  friend class SharedRegions;
  // The quotas of a user that may have at most half of the regions and of their bytes.
  struct UserQuotas {
    Quota count;
    Quota bytes;
  };
  SharedRegion() = default;
  absl::Status Map(const Descriptor& file);

  // The destructor unmaps the memory before these charges end.
  std::shared_ptr<UserQuotas> user_quotas_;  // null if the user may have all
  Charge own_count_;
  Charge own_bytes_;
  Charge count_;
  Charge bytes_;
  char* memory_ = nullptr;
  std::uint64_t size_ = 0;
  std::vector<HostRegistration> registrations_;
  // The first tenant that requested the region, or null. Guarded by the mutex of SharedRegions.
  mutable const Tenant* tenant_ = nullptr;
};

// The regions that requests can name. Thread safe.
class SharedRegions {
 public:
  static constexpr std::size_t kTokenBytes = 16;

  // Every region is pinned for all devices. The devices and the budgets must outlive the regions.
  // `bytes` is the budget for the bytes of all regions. `count` is the budget for the number of
  // regions.
  SharedRegions(std::vector<Device*> devices, Budget& bytes, Budget& count)
      : devices_(std::move(devices)), bytes_(bytes), count_(count) {}

  // Checks whether a descriptor may belong to a region. The check is cheap and does not access a
  // file system, which might block. Returns INVALID_ARGUMENT / BAD_REGION {field} if it may not.
  static absl::Status CheckFile(const Descriptor& file);

  // Checks, maps and pins a client's file, and returns the token that names the region from then
  // on. This may take a second for a few GiB. `sharer` is a user that may have at most half of all
  // regions and of their bytes. If it has no value, there is no such limit. Errors:
  // INVALID_ARGUMENT / BAD_REGION {field}; RESOURCE_EXHAUSTED / TOO_MANY_REGIONS {limit} or
  // SHARED_MEMORY_EXHAUSTED {requested, free, total}, each with {quota, requested, used, limit}
  // instead if the sharer's half is exceeded; HOST_MEMORY_EXHAUSTED; FAILED_PRECONDITION /
  // REGIONS_UNSUPPORTED before Linux 5.14.
  absl::StatusOr<std::string> Add(const Descriptor& file,
                                  std::optional<uid_t> sharer = std::nullopt);

  // Removes the token and returns its region, or null if there is none. The region is destroyed
  // with the last reference to it, which may take as long as Add.
  std::shared_ptr<const SharedRegion> Remove(std::string_view token);

  // Returns a region, or NOT_FOUND / REGION_NOT_FOUND. A region belongs to the first tenant that
  // requests it, and other tenants do not find it.
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
