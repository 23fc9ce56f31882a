// Says how much of the host's memory and processors this process may use, and allocates memory
// whose pages are present at once rather than when they are first written. Thread safe; uses only
// the standard library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera {

struct HostMemory {
  std::uint64_t total = 0;  // the machine's memory, or the smallest limit of the process's cgroups
  std::uint64_t free = 0;   // may be allocated without swapping or being killed
};

// Reads the current values, which takes some tens of microseconds. root: the root of the file
// system, for tests.
HostMemory ReadHostMemory(const std::string& root = "");

// Returns how many cores the cgroups' CPU quota allows, rounded up, or 0 if there is no quota.
// root: the root of the file system, for tests.
int ReadCpuQuota(const std::string& root = "");

// Makes all pages of mapped memory present. The memory must begin at a page boundary. On failure,
// returns false and sets errno; EINVAL means that the kernel is older than 5.14.
bool PopulateHost(void* memory, std::size_t bytes);

// Allocates `bytes` of uninitialised memory, aligned to 256 bytes, whose pages are all present.
// Returns null unless that much is free in addition to 64 MiB for the rest of the process.
void* AllocateHost(std::size_t bytes);
// `memory` is a result of AllocateHost.
void FreeHost(void* memory) noexcept;
// Returns how many bytes AllocateHost(bytes) uses.
std::size_t HostAllocationBytes(std::size_t bytes);

}  // namespace tessera
