// A device that holds buffers and runs strategies, and a stream on it. The CPU and CUDA are the two
// implementations; tests add one that fails on demand. Standard library only.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "kernels/device/budget.h"
#include "kernels/device/prepared.h"
#include "kernels/problem/strategy.h"

namespace tessera {

struct DeviceInfo {
  std::string name;   // "cpu", "cuda:0"
  std::string model;  // the vendor's name
  Backend backend = Backend::kCpu;
  int compute_capability = 0;  // 10 * major + minor; 0 on a CPU
  int multiprocessors = 0;     // streaming multiprocessors, or threads that CPU strategies use
  std::uint64_t memory_bytes = 0;
  std::string pci_bus_id;  // "0000:65:00.0"; empty if it is not a GPU
};

// A failed call to the device's runtime. It is thrown only inside kernels/: run/ turns it into a
// Status.
class DeviceError : public std::exception {
 public:
  enum class Kind {
    kOutOfMemory,      // device memory
    kOutOfHostMemory,  // host memory, page-locked or ordinary
    kOutOfScratch,     // the stream's scratch budget has no room; nothing was allocated
    kUnsupported,      // the device, or the machine that it belongs to, cannot do this
    kFailed,           // this call failed; the device still works
    kLost,             // sticky: every later call fails too
  };
  DeviceError(Kind kind, std::string call, std::string error, std::uint64_t requested = 0)
      : kind_(kind),
        call_(std::move(call)),
        error_(std::move(error)),
        requested_(requested),
        what_(call_ + ": " + error_) {}
  // An error of kind kOutOfScratch.
  DeviceError(std::uint64_t requested, const Budget& budget)
      : DeviceError(Kind::kOutOfScratch, "Stream::Scratch", "out of scratch memory", requested) {
    free_ = budget.free();
    total_ = budget.limit();
  }

  Kind kind() const { return kind_; }
  const std::string& call() const { return call_; }       // the expression that failed
  const std::string& error() const { return error_; }     // the runtime's name for the error
  std::uint64_t requested() const { return requested_; }  // bytes, when out of memory
  // Bytes of the budget, for kOutOfScratch.
  std::uint64_t free() const { return free_; }
  std::uint64_t total() const { return total_; }
  const char* what() const noexcept override { return what_.c_str(); }

  // The device whose call failed, if it may differ from the device that the work is for; otherwise
  // null.
  Device* device() const { return device_; }
  void SetDevice(Device& device) { device_ = &device; }

 private:
  Kind kind_;
  std::string call_;
  std::string error_;
  std::uint64_t requested_;
  std::uint64_t free_ = 0;
  std::uint64_t total_ = 0;
  Device* device_ = nullptr;
  std::string what_;
};

// Bytes in host memory.
struct HostBytes {
  const void* data = nullptr;
  std::size_t size = 0;
};

// Owned host memory. It may outlive its device.
using StagingMemory = std::unique_ptr<void, void (*)(void*) noexcept>;

// While it lives, a device's copies directly reach host memory that the device did not allocate. It
// may outlive the device but not the memory.
using HostRegistration = std::unique_ptr<void, void (*)(void*) noexcept>;

// The part of an array that lies on one of several devices: bytes [begin, end) of the array.
struct Shard {
  Device* device = nullptr;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

// Memory on several devices under one range of addresses. The destructor frees it; no work that
// uses it may be in flight then. The devices outlive it.
class ShardedMemory {
 public:
  virtual ~ShardedMemory() = default;
  virtual void* data() const = 0;
};

// Device memory that can be freed when it is needed elsewhere. Thread safe.
class SpareMemory {
 public:
  virtual ~SpareMemory() = default;
  // Returns how many allocations have been freed so far.
  virtual std::uint64_t frees() const = 0;
  // Frees everything that is not in use. Never allocates.
  virtual void Clear() noexcept = 0;
};

// Thread safe. It outlives its streams and its memory.
class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceInfo& info() const = 0;
  // Returns how many bytes are free on the device, for any process. On a lost device it returns 0,
  // and marks the device lost.
  virtual std::uint64_t FreeBytes() const = 0;
  // Allocates bytes > 0 of uninitialised memory aligned to 256 bytes, usable from every stream.
  // Throws DeviceError.
  virtual void* Allocate(std::size_t bytes) = 0;
  // Returns how much of the device's memory an allocation of `bytes` takes.
  virtual std::size_t AllocationBytes(std::size_t bytes) const = 0;
  // memory: returned by Allocate; no work that uses it may be in flight. Never throws.
  virtual void Free(void* memory) noexcept = 0;
  // Sets the spare memory; null, the initial value, means that there is none. Threads that are
  // about to allocate clear it, whatever other locks they hold. REQUIRES: no thread is in WithSpare
  // or FreeSpare.
  void SetSpare(SpareMemory* spare) { spare_ = spare; }
  void FreeSpare() noexcept {
    if (spare_ != nullptr) spare_->Clear();
  }
  // Calls f(). If that runs out of device memory, frees the spare memory and, if there was any,
  // calls f() again.
  template <class F>
  auto WithSpare(F&& f) {
    const std::uint64_t frees = spare_ == nullptr ? 0 : spare_->frees();
    try {
      return f();
    } catch (const DeviceError& error) {
      if (error.kind() != DeviceError::Kind::kOutOfMemory || spare_ == nullptr) throw;
      spare_->Clear();
      if (spare_->frees() == frees) throw;
    }
    return f();
  }
  // Shards begin at multiples of this size, and each takes a whole number of such units of its
  // device's memory.
  virtual std::size_t ShardUnit() const { return 4096; }
  // Allocates uninitialised memory on several devices of one backend, including this one; streams
  // of all of them reach all of it. shards: at least two, none empty, adjacent from 0 on, on
  // different devices. Throws DeviceError; kUnsupported where such memory is impossible.
  virtual std::unique_ptr<ShardedMemory> AllocateShards(std::span<const Shard> /*shards*/) {
    throw DeviceError(DeviceError::Kind::kUnsupported, "Device::AllocateShards",
                      "devices of this kind do not reach each other's memory");
  }
  // Allocates bytes > 0 of uninitialised host memory, aligned to 64, that the device's copies reach
  // directly. It may wait for the device's work, and so may freeing the memory. Throws DeviceError.
  virtual StagingMemory MakeStaging(std::size_t bytes) = 0;
  // Lets the device's copies reach memory directly: bytes > 0, in whole pages that are present. One
  // registration serves all devices of a backend; a second one of the same memory may be empty, and
  // its effect ends with the first one. Registering may wait for the device's work, and so may
  // ending the registration. Throws DeviceError.
  virtual HostRegistration RegisterHost(void* /*memory*/, std::size_t /*bytes*/) {
    return {nullptr, [](void*) noexcept {}};
  }
  // Throws DeviceError.
  virtual std::unique_ptr<Stream> MakeStream() = 0;
  // Asks the device whether it still responds, in microseconds and without waiting for its work.
  // Throws DeviceError; kLost also for a failure that no stream has met yet.
  virtual void Probe() = 0;
  // Starts or stops a profiler's recording of the device's work, if an attached profiler waits for
  // this call.
  virtual void SetProfiling(bool /*on*/) noexcept {}
  // Makes streams of MakeLargeStream leave a part of the device to other streams, if the device can
  // be partitioned. Work on the other streams then never waits for a kernel that fills the rest.
  // From then on info() counts only the rest, so that strategies give the same bits on either kind
  // of stream. REQUIRES: there is no stream. Throws DeviceError.
  virtual void KeepRoom() {}
  // Returns a stream for operations that would occupy the device for long. Throws DeviceError.
  virtual std::unique_ptr<Stream> MakeLargeStream() { return MakeStream(); }

  // Set by the first kLost error on any stream. A lost device does not recover within the process.
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  void MarkLost() const { lost_.store(true, std::memory_order_release); }

 private:
  mutable std::atomic<bool> lost_{false};
  SpareMemory* spare_ = nullptr;
};

// How much of a stream's scratch memory has been handed out.
struct ScratchMark {
  std::size_t block = 0, used = 0;  // used: bytes of that block
};

// An in-order queue of work with its own scratch memory. Only one thread at a time may use it, and
// its device outlives it. Every function may throw DeviceError.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual Device& device() const = 0;

  // Sets the budget that blocks of Scratch and HostScratch are charged to before they are
  // allocated; null, the initial value, means none. The budget outlives the stream. REQUIRES: the
  // stream has no block yet.
  virtual void SetScratchBudget(Budget* budget) { budget_ = budget; }
  Budget* scratch_budget() const { return budget_; }

  // Sets the cancellation flag of the current request; null if it cannot be cancelled. Once the
  // flag is set, it stays set until the request ends. Any thread may set it.
  virtual void WatchStop(const std::atomic<bool>* stop) { stop_ = stop; }
  // Whether to stop. Strategies poll this every few milliseconds, where that costs nothing. A
  // strategy that stops leaves its results incomplete, and they are not read. Thread safe.
  bool stopped() const { return stop_ != nullptr && stop_->load(std::memory_order_relaxed); }
  const std::atomic<bool>* stop() const { return stop_; }

  // Adds to the seconds that the stream's work is expected to take; ExpectNothing sets the sum to
  // 0. Only one thread at a time may call these two; any thread may call expected_seconds.
  void Expect(double seconds) {
    expected_.store(expected_seconds() + seconds, std::memory_order_relaxed);
  }
  void ExpectNothing() { expected_.store(0, std::memory_order_relaxed); }
  double expected_seconds() const { return expected_.load(std::memory_order_relaxed); }

  // Begins a request: invalidates everything that Scratch has returned, and resets result().
  virtual void Reset() = 0;
  // Ends a request: waits for its work, and gives its scratch memory back to the device and the
  // budget. The stream keeps only its own small block, which no budget counts.
  virtual void Trim() = 0;
  // Returns `bytes` of uninitialised device memory aligned to 256, valid until Reset or Trim.
  // Throws kOutOfScratch when the budget has no room, and kOutOfMemory when the device has none
  // even after spare memory has been freed.
  virtual void* Scratch(std::size_t bytes) = 0;
  virtual ScratchMark MarkScratch() const = 0;
  // Lets Scratch hand out again, to later work, what it has handed out since the mark. REQUIRES:
  // neither Reset nor Trim has been called since; only work of this stream uses that memory, and
  // none of it is HostScratch.
  virtual void RewindScratch(const ScratchMark& mark) = 0;
  // Sets the keeper of what Prepare returns; null, the initial value, means that nothing is kept.
  void KeepWith(Keeper* keeper) { keeper_ = keeper; }
  // Returns memory for what is made from an operand. It is like Scratch, but the contents may be
  // there already.
  PreparedMemory Prepare(const Preparation& what, std::size_t bytes) {
    PreparedMemory memory;
    if (keeper_ != nullptr) memory = keeper_->Keep(what, bytes);
    if (memory.data == nullptr) memory = {Scratch(bytes), /*ready=*/false};
    if (memory.ready) ++prepared_found_;
    return memory;
  }
  // Returns how many times Prepare has found the contents there already.
  std::uint64_t prepared_found() const { return prepared_found_; }
  // Returns one Scalar in host memory that kernels can write, in stream order.
  virtual Scalar* result() = 0;
  // Returns bytes > 0 of uninitialised host memory, aligned to 256, that kernels can read and write
  // in stream order; otherwise like Scratch.
  virtual void* HostScratch(std::size_t bytes) = 0;

  // Copies the pieces, one after the other. They may be in any memory and may be reused on return;
  // the device sees the bytes in stream order.
  virtual void CopyToDevice(void* device, std::span<const HostBytes> pieces) = 0;
  // Copies from staging memory or registered memory, which must not change until Synchronize.
  virtual void CopyPinnedToDevice(void* device, const void* host, std::size_t bytes) {
    const HostBytes piece{host, bytes};
    CopyToDevice(device, {&piece, 1});
  }
  // The bytes are in host on return. They are copied only once if host is in the device's staging
  // memory or in registered memory.
  virtual void CopyToHost(void* host, const void* device, std::size_t bytes) = 0;
  // Whether CopyToPeer can write to the memory of the peer's device. The first call sets up what
  // that takes.
  virtual bool ReachesPeer(Stream& /*peer*/) { return false; }
  // Copies directly to memory of the peer's device, in the order of this stream: the bytes are
  // there once this stream has been synchronised. REQUIRES: ReachesPeer(peer).
  virtual void CopyToPeer(Stream& /*peer*/, void* /*out*/, const void* /*data*/,
                          std::size_t /*bytes*/) {}
  // Makes later work of this stream begin after all work that the other stream has been given so
  // far. Both devices are of the same backend.
  virtual void WaitFor(Stream& /*other*/) {}
  // Fills device memory with zero bytes.
  virtual void Zero(void* device, std::size_t bytes) = 0;
  // Writes the view's elements to out in row-major order, without gaps.
  virtual void Gather(const View& view, void* out) = 0;
  // Writes n contiguous elements as another type or the same one. Values that do not fit are
  // rounded or clipped as kernels/same_bits/convert.h says.
  virtual void Convert(const void* in, DType from, void* out, DType to, std::int64_t n) = 0;

  virtual void Synchronize() = 0;
  // Device time between the two calls, in microseconds. StopTimer synchronises.
  virtual void StartTimer() = 0;
  virtual double StopTimer() = 0;

 private:
  Budget* budget_ = nullptr;
  const std::atomic<bool>* stop_ = nullptr;
  std::atomic<double> expected_{0};
  Keeper* keeper_ = nullptr;
  std::uint64_t prepared_found_ = 0;
};

// Calls f() and marks its errors as errors of the stream's device.
template <class F>
void OnDeviceOf(Stream& stream, F&& f) {
  try {
    f();
  } catch (DeviceError& error) {
    error.SetDevice(stream.device());
    throw;
  }
}

}  // namespace tessera
