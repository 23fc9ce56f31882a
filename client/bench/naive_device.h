// The device of a naive server: memory for vectors, their dot product, and copies. The speed of the
// copies is an upper bound on the speed of transfers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace tessera::bench {

// Thread safe. Every call waits until its work is done. Ends the process on any error.
class NaiveDevice {
 public:
  virtual ~NaiveDevice() = default;
  virtual const char* name() const = 0;
  // Allocates memory for this many f32. It is freed when its last owner is gone.
  virtual std::shared_ptr<float> Allocate(std::size_t elements) = 0;
  // Allocates host memory that the device can access directly. It is freed when its last owner is
  // gone.
  virtual std::shared_ptr<char> AllocatePinned(std::size_t bytes) = 0;
  // Copies from host memory to memory from Allocate, or back.
  virtual void Copy(void* to, const void* from, std::size_t bytes) = 0;
  virtual float Dot(const float* a, const float* b, std::int64_t elements) = 0;
};

// Uses host memory and a plain loop.
std::unique_ptr<NaiveDevice> NaiveHost();

// Uses the first GPU with cuBLAS. Returns null if this host lacks either.
std::unique_ptr<NaiveDevice> NaiveCuda();

}  // namespace tessera::bench
