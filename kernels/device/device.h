// A device that holds buffers and runs strategies, and a stream on it. The CPU and CUDA are the two
// implementations; tests add one that fails on demand. Uses only the standard library.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "kernels/device/budget.h"
#include "kernels/device/device_error.h"
#include "kernels/device/prepared.h"
#include "kernels/device/scratch.h"
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
  // Shards begin at multiples of this size, and each takes a whole number of such units of its
  // device's memory.
  std::size_t shard_unit = 4096;
};

// Bytes in host memory.
struct HostBytes {
  const void* data = nullptr;
  std::size_t size = 0;
};

// Owned host memory. It may outlive its device.
using StagingMemory = std::unique_ptr<void, void (*)(void*) noexcept>;

// While a registration exists, a device's copies have direct access to host memory that the device
// did not allocate. The registration may outlive the device but not the memory.
using HostRegistration = std::unique_ptr<void, void (*)(void*) noexcept>;

// The part of an array that is on one of several devices: bytes [begin, end) of the array.
struct Shard {
  Device* device = nullptr;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

// Memory on several devices with one contiguous range of addresses. The destructor frees it, so no
// work that uses it may be in flight at that point. The devices must outlive it.
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

// Thread safe. It must outlive its streams and its memory.
class Device {
 public:
  virtual ~Device() = default;
  const DeviceInfo& info() const { return info_; }
  // Returns the number of free bytes on the device, which any process may allocate. If the device
  // turns out to be lost, marks it as lost and returns 0.
  virtual std::uint64_t FreeBytes() const = 0;
  // Allocates uninitialised memory that is aligned to 256 bytes and usable from every stream.
  // REQUIRES: bytes > 0. Throws DeviceError.
  virtual void* Allocate(std::size_t bytes) = 0;
  // Returns how many bytes of the device's memory an allocation of `bytes` uses.
  virtual std::size_t AllocationBytes(std::size_t bytes) const = 0;
  // `memory` is a result of Allocate that no work in flight uses. Never throws.
  virtual void Free(void* memory) noexcept = 0;
  // Sets the spare memory; null, the initial value, means that there is none. A thread that is
  // about to allocate may clear the spare memory, whatever other locks it holds. REQUIRES: no
  // thread is in WithSpare or FreeSpare.
  void SetSpare(SpareMemory* spare) { spare_ = spare; }
  void FreeSpare() noexcept {
    if (spare_ != nullptr) spare_->Clear();
  }
  // Calls f(). If f runs out of device memory, frees the spare memory and, if there was any, calls
  // f() again.
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
  // Allocates uninitialised memory on several devices of one backend, including this one. Streams
  // of all these devices can access all of the memory. There are at least two `shards`. None is
  // empty, they are adjacent and begin at byte 0, and they are on different devices. Throws
  // DeviceError; its kind is kUnsupported if the devices cannot share memory.
  virtual std::unique_ptr<ShardedMemory> AllocateShards(std::span<const Shard> /*shards*/) {
    throw DeviceError(DeviceError::Kind::kUnsupported, "Device::AllocateShards",
                      "devices of this kind cannot access each other's memory");
  }
  // Allocates uninitialised host memory, aligned to 64 bytes, that the device's copy engines access
  // directly. Allocating and freeing it may wait for the device's work. REQUIRES: bytes > 0. Throws
  // DeviceError.
  virtual StagingMemory MakeStaging(std::size_t bytes) = 0;
  // Gives the device's copies direct access to host memory. One registration serves all devices of
  // a backend. A second registration of the same memory may be empty; access then ends with the
  // first one. Registering and unregistering may wait for the device's work. REQUIRES: the memory
  // consists of whole pages, all of which are present. Throws DeviceError.
  virtual HostRegistration RegisterHost(void* /*memory*/, std::size_t /*bytes*/) {
    return {nullptr, [](void*) noexcept {}};
  }
  // Throws DeviceError.
  virtual std::unique_ptr<Stream> MakeStream() = 0;
  // Checks that the device still responds. Takes microseconds and does not wait for the device's
  // work. Throws DeviceError, even if no stream has yet reported that the device is lost (kLost).
  virtual void Probe() = 0;
  // Starts or stops the recording of work by a profiler, if a profiler is waiting for this call.
  virtual void SetProfiling(bool /*on*/) noexcept {}
  // If the device can be partitioned, reserves a part of it that the streams from MakeLargeStream
  // do not use. Work on other streams then never waits for a kernel that fills the rest of the
  // device. From then on, info() describes only the rest, so that strategies give the same bits on
  // both kinds of streams. REQUIRES: no stream exists. Throws DeviceError.
  virtual void KeepRoom() {}
  // Returns a stream for operations that would occupy the device for a long time. Throws
  // DeviceError.
  virtual std::unique_ptr<Stream> MakeLargeStream() { return MakeStream(); }

  // Whether a kLost error has been reported. A lost device does not recover within the process.
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  void MarkLost() const { lost_.store(true, std::memory_order_release); }

 protected:
  DeviceInfo info_;

 private:
  mutable std::atomic<bool> lost_{false};
  SpareMemory* spare_ = nullptr;
};

// An in-order queue of work with its own scratch memory. Only one thread at a time may use it, and
// its device must outlive it. Every function may throw DeviceError.
class Stream {
 public:
  virtual ~Stream() {
    scratch_.Free(budget_);
    host_scratch_.Free(budget_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  Device& device() const { return device_; }

  // Sets the budget that blocks of Scratch and HostScratch are charged to before they are
  // allocated; null, the initial value, means no budget. The budget must outlive the stream.
  // REQUIRES: the stream has no block yet.
  void SetScratchBudget(Budget* budget) { budget_ = budget; }
  Budget* scratch_budget() const { return budget_; }

  // Sets the cancellation flag of the current request, or null if the request cannot be cancelled.
  // Once the flag is set, it stays set until the request ends. Any thread may set it.
  void WatchStop(const std::atomic<bool>* stop) { stop_ = stop; }
  // Whether the request has been cancelled. Strategies poll this every few milliseconds where that
  // costs nothing. Incomplete results of a strategy that stops are not read. Thread safe.
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
  virtual void Reset() {
    Trim();
    *result() = Scalar{};
  }
  // Ends a request: waits for its work, and returns its scratch memory to the device and the
  // budget. The stream keeps only its own small block, which no budget counts.
  virtual void Trim() {
    scratch_.Trim(budget_);
    host_scratch_.Trim(budget_);
  }
  // Returns `bytes` of uninitialised device memory, aligned to 256 bytes and valid until Reset or
  // Trim, or null if `bytes` is 0. Throws kOutOfScratch if the budget is used up, and kOutOfMemory
  // if the device has too little memory even after spare memory has been freed.
  virtual void* Scratch(std::size_t bytes) { return scratch_.Take(bytes, budget_); }
  ScratchMark MarkScratch() const { return scratch_.Mark(); }
  // Allows Scratch to reuse, for later work, the memory that it has handed out since the mark.
  // REQUIRES: neither Reset nor Trim has been called since the mark, and only work on this stream
  // uses that memory.
  void RewindScratch(const ScratchMark& mark) { scratch_.Rewind(mark); }
  // Sets the object that keeps what Prepare returns; null, the initial value, means that nothing is
  // kept.
  void KeepWith(Keeper* keeper) { keeper_ = keeper; }
  // Returns memory for data that is prepared from an operand. It is like memory from Scratch,
  // except that it may already hold the prepared data (`ready`).
  PreparedMemory Prepare(const Preparation& what, std::size_t bytes) {
    PreparedMemory memory;
    if (keeper_ != nullptr) memory = keeper_->Keep(what, bytes);
    if (memory.data == nullptr) memory = {Scratch(bytes), /*ready=*/false};
    if (memory.ready) ++prepared_found_;
    return memory;
  }
  // Returns how many times Prepare has returned memory that already held its data.
  std::uint64_t prepared_found() const { return prepared_found_; }
  // Returns one Scalar in host memory that kernels can write, in stream order.
  virtual Scalar* result() = 0;
  // Like Scratch, but returns uninitialised host memory, aligned to 256 bytes, that kernels can
  // read and write in stream order.
  void* HostScratch(std::size_t bytes) { return host_scratch_.Take(bytes, budget_); }

  // Copies the pieces to adjacent addresses. The pieces may be in any host memory, which may be
  // reused on return. The device sees the bytes in stream order.
  virtual void CopyToDevice(void* device, std::span<const HostBytes> pieces) = 0;
  // Copies from staging memory or registered memory, which must not change until Synchronize.
  virtual void CopyPinnedToDevice(void* device, const void* host, std::size_t bytes) {
    const HostBytes piece{host, bytes};
    CopyToDevice(device, {&piece, 1});
  }
  // The bytes are at `host` on return. They are copied directly if `host` is in the device's
  // staging memory or in registered memory.
  virtual void CopyToHost(void* host, const void* device, std::size_t bytes) = 0;
  // Whether CopyToPeer can write to the memory of the peer's device. The first call does the
  // necessary setup.
  virtual bool ReachesPeer(Stream& /*peer*/) { return false; }
  // Copies directly to memory of the peer's device, in the order of this stream. The copy is
  // complete once this stream has been synchronised. REQUIRES: ReachesPeer(peer).
  virtual void CopyToPeer(Stream& /*peer*/, void* /*out*/, const void* /*data*/,
                          std::size_t /*bytes*/) {}
  // Makes later work on this stream wait for all work that has been enqueued on the other stream so
  // far. REQUIRES: both devices have the same backend.
  virtual void WaitFor(Stream& /*other*/) {}
  // Fills device memory with zero bytes.
  virtual void Zero(void* device, std::size_t bytes) = 0;
  // Writes the view's elements to out in row-major order, without gaps.
  virtual void Gather(const View& view, void* out) = 0;
  // Stores the number of the view's bytes that are not 0 in result()->integer. Needs no scratch
  // memory. REQUIRES: the elements have one byte.
  virtual void Count(const View& view) = 0;
  // Copies n contiguous elements and converts them to the type `to`, which may equal `from`. Values
  // that do not fit are rounded or clipped as kernels/same_bits/convert.h describes.
  virtual void Convert(const void* in, DType from, void* out, DType to, std::int64_t n) = 0;

  virtual void Synchronize() = 0;
  // Calls work(), waits for the work that it enqueues, and returns the time that this work took on
  // the device, in microseconds.
  virtual double Time(const std::function<void()>& work) = 0;

 protected:
  // If the device is a GPU, host_scratch provides page-locked memory. Both sources must outlive the
  // stream.
  Stream(Device& device, ScratchBlocks::Source scratch, ScratchBlocks::Source host_scratch)
      : device_(device), scratch_(std::move(scratch)), host_scratch_(std::move(host_scratch)) {}

 private:
  Device& device_;
  ScratchBlocks scratch_;
  ScratchBlocks host_scratch_;
  Budget* budget_ = nullptr;
  const std::atomic<bool>* stop_ = nullptr;
  std::atomic<double> expected_{0};
  Keeper* keeper_ = nullptr;
  std::uint64_t prepared_found_ = 0;
};

// Calls f() and attributes its errors to the stream's device.
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
