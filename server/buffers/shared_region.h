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

// A client's file that is mapped, and pinned on the devices. The client may write it at any time,
// so no byte may be read twice. It cannot remove pages, so reading never faults.
class SharedRegion {
 public:
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  // Returns null unless [offset, offset + size) lies inside.
  char* At(std::uint64_t offset, std::uint64_t size) const {
    return size <= size_ && offset <= size_ - size ? memory_ + offset : nullptr;
  }
  std::uint64_t size() const { return size_; }

 private:
  friend class SharedRegions;
  // The quotas of a user who may have at most half of the regions.
  struct UserQuotas {
    Quota count;
    Quota bytes;
  };
  SharedRegion() = default;
  absl::Status Map(const Descriptor& file);

  // The destructor unmaps the memory before the charges return it.
  std::shared_ptr<UserQuotas> user_quotas_;  // null: the user may take all
  Charge own_count_;
  Charge own_bytes_;
  Charge count_;
  Charge bytes_;
  char* memory_ = nullptr;
  std::uint64_t size_ = 0;
  std::vector<HostRegistration> registrations_;
  // The first tenant that asked for the region; null if none has. Guarded by the mutex of the
  // regions.
  mutable const Tenant* tenant_ = nullptr;
};

// The regions that requests can name. Thread safe.
class SharedRegions {
 public:
  static constexpr std::size_t kTokenBytes = 16;

  // Every region is pinned on all devices. The devices and the budgets outlive the regions. bytes:
  // the budget of all regions together; count: the budget of their number.
  SharedRegions(std::vector<Device*> devices, Budget& bytes, Budget& count)
      : devices_(std::move(devices)), bytes_(bytes), count_(count) {}

  // Checks whether a descriptor may be that of a region. It is cheap and does not access a file
  // system, which might block. INVALID_ARGUMENT / BAD_REGION {field}.
  static absl::Status CheckFile(const Descriptor& file);

  // Checks, maps and pins a client's file, and returns the token that names it from then on. May
  // take a second for some GiB. sharer: a user who may have at most half of all regions and of
  // their bytes; nothing: there is no such limit. INVALID_ARGUMENT / BAD_REGION {field};
  // RESOURCE_EXHAUSTED / TOO_MANY_REGIONS {limit}, SHARED_MEMORY_EXHAUSTED {requested, free,
  // total}, both with {quota, requested, used, limit} if the half is exceeded,
  // HOST_MEMORY_EXHAUSTED; FAILED_PRECONDITION / REGIONS_UNSUPPORTED before Linux 5.14.
  absl::StatusOr<std::string> Add(const Descriptor& file,
                                  std::optional<uid_t> sharer = std::nullopt);

  // Removes the token and returns its region, or null if there is none. The region ends with its
  // last user, which may take as long as Add.
  std::shared_ptr<const SharedRegion> Remove(std::string_view token);

  // Returns a region, which belongs to the first tenant that asks for it; other tenants do not find
  // it. NOT_FOUND / REGION_NOT_FOUND.
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
