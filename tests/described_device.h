// A device that has only a description. It cannot do anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/device/device.h"

namespace tessera::test {

class Described : public Device {
 public:
  explicit Described(Backend backend, int compute_capability = 90, int cores = 2) {
    info_.backend = backend;
    info_.multiprocessors = backend == Backend::kCpu ? cores : 132;
    info_.compute_capability = backend == Backend::kCpu ? 0 : compute_capability;
  }
  std::uint64_t FreeBytes() const override { return 0; }
  void* Allocate(std::size_t) override { return nullptr; }
  std::size_t AllocationBytes(std::size_t bytes) const override { return bytes; }
  void Free(void*) noexcept override {}
  StagingMemory MakeStaging(std::size_t) override { return {nullptr, nullptr}; }
  std::unique_ptr<Stream> MakeStream() override { return nullptr; }
  void Probe() override {}
};

}  // namespace tessera::test
