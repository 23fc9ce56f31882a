// The host's memory and processors: how much of them this process may use, and memory whose pages
// are allocated when it is requested instead of when it is first written to. Thread safe; standard
// library only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera {

struct HostMemory {
  std::uint64_t total = 0;  // the machine's, or the least limit of a control group around us
  std::uint64_t free = 0;   // what may be allocated without swapping or being killed
};

// Now. Takes some tens of microseconds. root: of the file system, for tests.
HostMemory ReadHostMemory(const std::string& root = "");

// Returns how many cores the control groups' CPU quota allows, rounded up; 0: there is no quota.
// root: the root of the file system, for tests.
int ReadCpuQuota(const std::string& root = "");

// Gives mapped memory, which starts with a page, all its pages. false: errno says why, EINVAL that
// the kernel is older than 5.14.
bool PopulateHost(void* memory, std::size_t bytes);

// bytes of uninitialised memory aligned to 256, with all its pages. Null when so much is not free;
// the last 64 MiB of it count as taken, for the rest of the process.
void* AllocateHost(std::size_t bytes);
// memory: of AllocateHost.
void FreeHost(void* memory) noexcept;
// What AllocateHost takes for so many bytes.
std::size_t HostAllocationBytes(std::size_t bytes);

}  // namespace tessera
