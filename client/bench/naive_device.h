// Where a naive server keeps its vectors, and what copies to and from there cannot be faster than.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace tessera::bench {

// Thread safe; every call returns when its work is done. Ends the process for any error.
class NaiveDevice {
 public:
  virtual ~NaiveDevice() = default;
  virtual const char* name() const = 0;
  // So many f32, until the last owner is gone.
  virtual std::shared_ptr<float> Allocate(std::size_t elements) = 0;
  // Host memory that Copy reaches without a detour, until the last owner is gone.
  virtual std::shared_ptr<char> AllocatePinned(std::size_t bytes) = 0;
  // From host memory to that of Allocate, or back.
  virtual void Copy(void* to, const void* from, std::size_t bytes) = 0;
  virtual float Dot(const float* a, const float* b, std::int64_t elements) = 0;
};

// Host memory and a plain loop.
std::unique_ptr<NaiveDevice> NaiveHost();

// The first GPU with cuBLAS, or null when this host lacks either.
std::unique_ptr<NaiveDevice> NaiveCuda();

}  // namespace tessera::bench
