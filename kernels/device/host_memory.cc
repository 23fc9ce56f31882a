#include "kernels/device/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <mutex>
#include <sstream>
#include <unordered_map>

namespace tessera {
namespace {

constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();
constexpr std::size_t kAlignment = 256;
constexpr std::size_t kPage = 4096;
// The number of bytes that one system call populates. During the call, no other thread of the
// process can map or unmap memory. While four callers were creating buffers of 1 GiB, the p99 of
// other callers' small calls was 0.8 to 6 s if one call populated a whole buffer, and 36 to 140 ms
// if each call populated this many bytes (2 busy cores, 2026-11-27).
constexpr std::size_t kPopulated = std::size_t{16} << 20;
// Allocations of at least this size are mapped, so that freeing them returns the memory to the
// system. Smaller ones come from the heap, which keeps some of the freed memory.
constexpr std::size_t kLeastMapping = std::size_t{256} << 10;
// The number of bytes that small allocations may use before the amount of free memory is read
// again.
constexpr std::uint64_t kCredit = std::uint64_t{16} << 20;
// Reserved for the stacks, messages and tables of the process.
constexpr std::uint64_t kReserve = std::uint64_t{64} << 20;

// Returns the number in a file, or kNoLimit if the file is missing or contains "max".
std::uint64_t Figure(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  return file >> value ? value : kNoLimit;
}

// Returns the number after a key, as in "MemTotal:  24 kB" and "inactive_file 24"; 0 if the key is
// missing.
std::uint64_t FigureOf(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(key, 0) == 0 && line.size() > key.size() &&
        (line[key.size()] == ':' || line[key.size()] == ' '))
      return std::strtoull(line.c_str() + key.size() + 1, nullptr, 10);
  }
  return 0;
}

// The names of the files of one cgroup version.
struct Files {
  const char* limit;
  const char* used;
  const char* cache;  // the key in memory.stat for file pages that can be dropped
};
constexpr Files kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                             "total_inactive_file"};
constexpr Files kVersion2 = {"memory.max", "memory.current", "inactive_file"};

// Calls f(group) for the group at mount + path and for each enclosing group, up to the mount
// itself, because the limits of all of them apply. path is empty or begins with '/'. In a container
// the path may be the host's, and then only the mount itself exists.
template <class F>
void ForGroups(const std::string& mount, std::string path, const F& f) {
  while (true) {
    f(mount + path + "/");
    if (path.empty()) return;
    path.resize(path.rfind('/'));
  }
}

void ApplyGroups(const std::string& mount, const std::string& path, const Files& files,
                 HostMemory& memory) {
  ForGroups(mount, path, [&](const std::string& group) {
    const std::uint64_t limit = Figure(group + files.limit);
    if (limit < memory.total) memory.total = limit;
    const std::uint64_t used = Figure(group + files.used);
    if (limit != kNoLimit && used != kNoLimit) {
      const std::uint64_t cache = std::min(used, FigureOf(group + "memory.stat", files.cache));
      const std::uint64_t taken = used - cache;
      memory.free = std::min(memory.free, limit > taken ? limit - taken : 0);
    }
  });
}

// Returns the path in a line of /proc/self/cgroup, "hierarchy:controllers:path", without a trailing
// '/'.
std::string PathOf(const std::string& line) {
  std::string path = line.substr(line.find(':', line.find(':') + 1) + 1);
  while (!path.empty() && path.back() == '/') path.pop_back();
  return path.empty() || path[0] == '/' ? path : "";
}

// This process's cgroup paths for one controller, under cgroup v1 and v2.
struct GroupPaths {
  std::string version1, version2;
};
GroupPaths PathsOf(const std::string& root, const std::string& controller) {
  GroupPaths paths;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (line.rfind("0::", 0) == 0) paths.version2 = PathOf(line);
    // "4:cpu,cpuacct:/path", whose path may also contain colons
    const std::size_t begin = line.find(':') + 1;
    std::istringstream controllers(line.substr(begin, line.find(':', begin) - begin));
    for (std::string one; std::getline(controllers, one, ',');)
      if (one == controller) paths.version1 = PathOf(line);
  }
  return paths;
}

// Maps memory and makes all its pages present. Returns null on failure.
void* Map(std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  // Where huge pages are allowed, 32 MiB are populated in 1.7 ms instead of 8.5 ms (a virtual
  // machine, 2026-11-30).
  madvise(memory, bytes, MADV_HUGEPAGE);
  if (PopulateHost(memory, bytes)) return memory;
  if (errno != EINVAL) {
    munmap(memory, bytes);
    return nullptr;
  }
  // The kernel is older than 5.14.
  for (std::size_t at = 0; at < bytes; at += kPage) static_cast<volatile char*>(memory)[at] = 0;
  return memory;
}

// Decides which allocations may take free memory. The process has one ledger, because its threads
// share the memory.
class Ledger {
 public:
  // Reserves the bytes if that many are free, and returns whether they were. The ledger counts them
  // as used until Settle; from then on, the system's figures include them.
  bool Reserve(std::size_t bytes) {
    std::unique_lock lock(mutex_);
    while (!Fits(bytes)) {
      // Waits, because memory that is being populated may be counted twice: here and by the system.
      if (populating_ == 0) return false;
      changed_.wait(lock);
    }
    populating_ += bytes;
    return true;
  }
  // `memory` is null if the allocation failed.
  void Settle(void* memory, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    populating_ -= bytes;
    changed_.notify_all();
    if (memory != nullptr) mappings_.emplace(memory, bytes);
  }
  bool ReserveSmall(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (credit_ < bytes) {
      if (!Fits(kCredit)) return false;
      credit_ = kCredit;
    }
    credit_ -= bytes;
    return true;
  }
  // Forgets a mapping and returns its size, or returns 0 if the memory is from the heap.
  std::size_t Forget(void* memory) {
    const std::lock_guard lock(mutex_);
    const auto it = mappings_.find(memory);
    if (it == mappings_.end()) return 0;
    const std::size_t bytes = it->second;
    mappings_.erase(it);
    return bytes;
  }

 private:
  bool Fits(std::uint64_t bytes) const {
    const std::uint64_t free = ReadHostMemory().free, taken = populating_ + kReserve;
    return free > taken && bytes <= free - taken;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t populating_ = 0;
  std::uint64_t credit_ = 0;
  std::unordered_map<void*, std::size_t> mappings_;
};

Ledger& TheLedger() {
  static auto& ledger = *new Ledger;
  return ledger;
}

}  // namespace

bool PopulateHost(void* memory, std::size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  for (std::size_t at = 0; at < bytes; at += kPopulated) {
    int failed = 0;
    do {
      failed = madvise(static_cast<char*>(memory) + at, std::min(kPopulated, bytes - at),
                       MADV_POPULATE_WRITE);
    } while (failed != 0 && (errno == EINTR || errno == EAGAIN));
    if (failed != 0) return false;
  }
  return true;
#else
  errno = EINVAL;
  return false;
#endif
}

HostMemory ReadHostMemory(const std::string& root) {
  const std::string meminfo = root + "/proc/meminfo";
  HostMemory memory = {FigureOf(meminfo, "MemTotal") * 1024,
                       FigureOf(meminfo, "MemAvailable") * 1024};
  const GroupPaths paths = PathsOf(root, "memory");
  ApplyGroups(root + "/sys/fs/cgroup", paths.version2, kVersion2, memory);
  ApplyGroups(root + "/sys/fs/cgroup/memory", paths.version1, kVersion1, memory);
  memory.free = std::min(memory.free, memory.total);
  return memory;
}

int ReadCpuQuota(const std::string& root) {
  double least = 0;  // cores; 0: no quota
  const auto apply = [&least](double quota, double period) {
    if (quota > 0 && period > 0)
      least = least == 0 ? quota / period : std::min(least, quota / period);
  };
  const GroupPaths paths = PathsOf(root, "cpu");
  ForGroups(root + "/sys/fs/cgroup", paths.version2, [&](const std::string& group) {
    double quota = 0, period = 0;  // without a quota the file contains "max", which does not parse
    if (std::ifstream(group + "cpu.max") >> quota >> period) apply(quota, period);
  });
  ForGroups(root + "/sys/fs/cgroup/cpu", paths.version1, [&](const std::string& group) {
    double quota = 0, period = 0;  // -1: no quota
    if (std::ifstream(group + "cpu.cfs_quota_us") >> quota &&
        std::ifstream(group + "cpu.cfs_period_us") >> period)
      apply(quota, period);
  });
  return static_cast<int>(std::min(std::ceil(least), 1e6));
}

std::size_t HostAllocationBytes(std::size_t bytes) {
  const std::size_t unit = bytes < kLeastMapping ? kAlignment : kPage;
  return bytes > std::numeric_limits<std::size_t>::max() - unit
             ? std::numeric_limits<std::size_t>::max()
             : (bytes + unit - 1) / unit * unit;
}

void* AllocateHost(std::size_t bytes) {
  const std::size_t size = HostAllocationBytes(bytes);
  Ledger& ledger = TheLedger();
  if (bytes < kLeastMapping) {
    if (!ledger.ReserveSmall(size)) return nullptr;
    auto* memory = static_cast<volatile char*>(std::aligned_alloc(kAlignment, size));
    if (memory == nullptr) return nullptr;
    for (std::size_t at = 0; at < size; at += kPage) memory[at] = 0;
    return const_cast<char*>(memory);
  }
  if (!ledger.Reserve(size)) return nullptr;
  void* memory = Map(size);
  ledger.Settle(memory, size);
  return memory;
}

void FreeHost(void* memory) noexcept {
  if (const std::size_t bytes = TheLedger().Forget(memory); bytes != 0) {
    munmap(memory, bytes);
  } else {
    std::free(memory);
  }
}

}  // namespace tessera
