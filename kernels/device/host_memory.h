// The host's memory and processors: how much of them this process may use, and memory whose pages
// are allocated when it is requested rather than when it is first written. Thread safe; standard
// library only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera {

struct HostMemory {
  std::uint64_t total = 0;  // the machine's memory, or our cgroups' smallest limit
  std::uint64_t free = 0;   // what may be allocated without swapping or being killed
};

// Reads the current values, which takes some tens of microseconds. root: the root of the file
// system, for tests.
HostMemory ReadHostMemory(const std::string& root = "");

// Returns how many cores the cgroups' CPU quota allows, rounded up; 0 if there is no quota. root:
// the root of the file system, for tests.
int ReadCpuQuota(const std::string& root = "");

// Allocates all pages of mapped memory that begins at a page boundary. On failure it returns false,
// and errno says why: EINVAL means that the kernel is older than 5.14.
bool PopulateHost(void* memory, std::size_t bytes);

// Allocates `bytes` of uninitialised memory aligned to 256, with all its pages. Returns null if
// that much memory is not free; the last 64 MiB are reserved for the rest of the process.
void* AllocateHost(std::size_t bytes);
// memory: returned by AllocateHost.
void FreeHost(void* memory) noexcept;
// Returns how much memory AllocateHost takes for `bytes`.
std::size_t HostAllocationBytes(std::size_t bytes);

}  // namespace tessera
