#include "server/buffers/shared_region.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "kernels/device/host_memory.h"

namespace tessera {
namespace {

using absl::StatusCode;

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kBlock = 512;  // the unit of st_blocks

// The seals that a client must have set, and the seals that would prevent the server from adding
// further seals.
constexpr int kSealsWanted = F_SEAL_SHRINK | F_SEAL_GROW;
constexpr int kSealsRefused = F_SEAL_WRITE | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;

absl::Status BadRegion(std::string_view field, std::string_view message) {
  return MakeError(StatusCode::kInvalidArgument, "BAD_REGION", message,
                   {{"field", std::string(field)}});
}

absl::Status SystemError(std::string_view call) {
  const int error = errno;
  return MakeError(StatusCode::kInternal, "SHARED_MEMORY_FAILED",
                   absl::StrCat(Absl(call), ": ", std::strerror(error)),
                   {{"call", std::string(call)}});
}

absl::StatusOr<std::string> MakeToken() {
  std::string token(SharedRegions::kTokenBytes, '\0');
  // A request this small always returns all bytes, and never blocks once the system has started.
  if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size()))
    return SystemError("getrandom");
  return token;
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

// --- SharedRegion ------------------------------------------------------------------------------

SharedRegion::~SharedRegion() {
  registrations_.clear();
  if (memory_ != nullptr) munmap(memory_, size_);
}

absl::Status SharedRegion::Map(const Descriptor& file) {
  void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) return BadRegion("file", "the file cannot be mapped for writing");
  memory_ = static_cast<char*>(memory);
  // From here on, neither truncation nor holes can remove the file's pages: F_SEAL_FUTURE_WRITE
  // forbids both write() and FALLOC_FL_PUNCH_HOLE, and does not affect existing mappings.
  if (fcntl(file.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0)
    return BadRegion("seals", "the file accepts no further seals");
  // The pages belong to the client and are charged to it.
  struct stat status;
  if (fstat(file.get(), &status) != 0) return SystemError("fstat");
  if (static_cast<std::uint64_t>(status.st_blocks) < size_ / kBlock) {
    return MakeError(StatusCode::kInvalidArgument, "BAD_REGION",
                     "the file's memory is not allocated; use fallocate",
                     {{"field", "allocation"},
                      {"size", absl::StrCat(size_)},
                      {"allocated", absl::StrCat(status.st_blocks * kBlock)}});
  }
  // A malicious client may have allocated pages only beyond the region's end. This call either
  // allocates the missing pages or fails. After success, every page stays present.
  if (!PopulateHost(memory, size_)) {
    if (errno == EINVAL) {
      return MakeError(StatusCode::kFailedPrecondition, "REGIONS_UNSUPPORTED",
                       "the server's kernel is older than Linux 5.14, which regions need");
    }
    return MakeError(StatusCode::kResourceExhausted, "HOST_MEMORY_EXHAUSTED",
                     absl::StrCat("the file's pages cannot be mapped: ", std::strerror(errno)),
                     {{"requested", absl::StrCat(size_)}});
  }
  return absl::OkStatus();
}

// --- SharedRegions -----------------------------------------------------------------------------

absl::Status SharedRegions::CheckFile(const Descriptor& file) {
  const int seals = fcntl(file.get(), F_GET_SEALS);
  if (seals < 0) return BadRegion("file", "the descriptor does not belong to a memfd_create file");
  if ((seals & kSealsWanted) != kSealsWanted || (seals & kSealsRefused) != 0) {
    return MakeError(StatusCode::kInvalidArgument, "BAD_REGION",
                     "the file must have the seals F_SEAL_SHRINK and F_SEAL_GROW, and must not "
                     "have F_SEAL_WRITE, F_SEAL_FUTURE_WRITE or F_SEAL_SEAL",
                     {{"field", "seals"},
                      {"value", absl::StrCat(seals)},
                      {"expected", absl::StrCat(kSealsWanted)}});
  }
  return absl::OkStatus();
}

absl::Status SharedRegions::TakeQuotas(uid_t sharer, SharedRegion& region) {
  {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<SharedRegion::UserQuotas>& quotas = user_quotas_[sharer];
    if (quotas == nullptr) quotas = std::make_shared<SharedRegion::UserQuotas>();
    region.user_quotas_ = quotas;
  }
  region.user_quotas_->count.SetLimit(std::max<std::uint64_t>(1, count_.limit() / 2));
  region.user_quotas_->bytes.SetLimit(bytes_.limit() / 2);
  ASSIGN_OR_RETURN(region.own_count_,
                   region.user_quotas_->count.Take(
                       1, "TOO_MANY_REGIONS", "regions",
                       "the user already shares half of the maximum number of regions"));
  ASSIGN_OR_RETURN(
      region.own_bytes_,
      region.user_quotas_->bytes.Take(
          region.size_, "SHARED_MEMORY_EXHAUSTED", "bytes",
          "the user would share more than half of the memory that the server accepts"));
  return absl::OkStatus();
}

absl::StatusOr<std::string> SharedRegions::Add(const Descriptor& file,
                                               std::optional<uid_t> sharer) {
  RETURN_IF_ERROR(CheckFile(file));
  // Huge pages come from a separate pool, which may be empty when a page is first touched.
  struct statfs system;
  if (fstatfs(file.get(), &system) != 0) return SystemError("fstatfs");
  if (system.f_type != TMPFS_MAGIC) return BadRegion("file", "the file does not use normal pages");
  // The seals keep the size constant.
  struct stat status;
  if (fstat(file.get(), &status) != 0) return SystemError("fstat");
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (size == 0 || size % kPage != 0) {
    return MakeError(
        StatusCode::kInvalidArgument, "BAD_REGION",
        "the file's size is not a positive multiple of 4096 bytes",
        {{"field", "size"}, {"value", absl::StrCat(size)}, {"multiple", absl::StrCat(kPage)}});
  }
  std::shared_ptr<SharedRegion> region(new SharedRegion);
  region->size_ = size;
  if (sharer.has_value()) RETURN_IF_ERROR(TakeQuotas(*sharer, *region));
  ASSIGN_OR_RETURN(region->count_,
                   Charge::TakeOne(count_, "TOO_MANY_REGIONS",
                                   "clients already share the maximum number of regions"));
  ASSIGN_OR_RETURN(region->bytes_,
                   Charge::Take(bytes_, size, "SHARED_MEMORY_EXHAUSTED",
                                "clients would share more memory than the server accepts"));
  RETURN_IF_ERROR(region->Map(file));
  for (Device* device : devices_) {
    ASSIGN_OR_RETURN(HostRegistration registration, RegisterHost(*device, region->memory_, size));
    region->registrations_.push_back(std::move(registration));
  }
  absl::StatusOr<std::string> token = MakeToken();
  if (!token.ok()) return token.status();
  const std::lock_guard lock(mutex_);
  regions_.emplace(*token, std::move(region));
  return token;
}

std::shared_ptr<const SharedRegion> SharedRegions::Remove(std::string_view token) {
  const std::lock_guard lock(mutex_);
  const auto it = regions_.find(Absl(token));
  if (it == regions_.end()) return nullptr;
  std::shared_ptr<const SharedRegion> region = std::move(it->second);
  regions_.erase(it);
  return region;
}

absl::StatusOr<std::shared_ptr<const SharedRegion>> SharedRegions::Find(
    std::string_view token, const Tenant* tenant) const {
  const std::lock_guard lock(mutex_);
  if (const auto it = regions_.find(Absl(token)); it != regions_.end()) {
    const Tenant*& owner = it->second->tenant_;
    if (owner == nullptr) owner = tenant;
    if (owner == tenant) return it->second;
  }
  return MakeError(StatusCode::kNotFound, "REGION_NOT_FOUND",
                   "no connection has a region with this token");
}

}  // namespace tessera
