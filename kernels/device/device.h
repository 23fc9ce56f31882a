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
  std::string pci_bus_id;  // "0000:65:00.0"; empty: it is no GPU
};

// A failed call to the device's runtime. Thrown inside kernels/ only: run/ turns it into a
// Status.
class DeviceError : public std::exception {
 public:
  enum class Kind {
    kOutOfMemory,      // of the device
    kOutOfHostMemory,  // page-locked or ordinary
    kOutOfScratch,     // the stream's scratch budget has no room; nothing was allocated
    kUnsupported,      // the device, or the machine that it is part of, cannot do this
    kFailed,           // this call failed, the device goes on
    kLost,             // sticky: every later call fails too
  };
  DeviceError(Kind kind, std::string call, std::string error, std::uint64_t requested = 0)
      : kind_(kind),
        call_(std::move(call)),
        error_(std::move(error)),
        requested_(requested),
        what_(call_ + ": " + error_) {}
  // kOutOfScratch.
  DeviceError(std::uint64_t requested, const Budget& budget)
      : DeviceError(Kind::kOutOfScratch, "Stream::Scratch", "out of scratch memory", requested) {
    free_ = budget.free();
    total_ = budget.limit();
  }

  Kind kind() const { return kind_; }
  const std::string& call() const { return call_; }       // the expression
  const std::string& error() const { return error_; }     // the runtime's name for the error
  std::uint64_t requested() const { return requested_; }  // bytes, when out of memory
  // Bytes of the budget, when out of scratch.
  std::uint64_t free() const { return free_; }
  std::uint64_t total() const { return total_; }
  const char* what() const noexcept override { return what_.c_str(); }

  // The device whose call it was, where that need not be the one that the work is for; else null.
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

// Bytes in memory of the host.
struct HostBytes {
  const void* data = nullptr;
  std::size_t size = 0;
};

// Host memory with an owner, which may outlive its device.
using StagingMemory = std::unique_ptr<void, void (*)(void*) noexcept>;

// That copies of a device reach host memory of others without a detour, until it ends. May outlive
// the device, not the memory.
using HostRegistration = std::unique_ptr<void, void (*)(void*) noexcept>;

// The part of an array that lies on one of several devices: bytes [begin, end) of the array.
struct Shard {
  Device* device = nullptr;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

// Memory on several devices under one range of addresses. Its end frees it, when no work that uses
// it may be in flight. The devices outlive it.
class ShardedMemory {
 public:
  virtual ~ShardedMemory() = default;
  virtual void* data() const = 0;
};

// Memory of a device that its owner can do without. Thread safe.
class SpareMemory {
 public:
  virtual ~SpareMemory() = default;
  // Counts what has been freed.
  virtual std::uint64_t frees() const = 0;
  // Frees all that nobody uses at the moment. Never allocates.
  virtual void Clear() noexcept = 0;
};

// Thread safe, long-lived: outlives its streams and its memory.
class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceInfo& info() const = 0;
  // Bytes free on the device now, for any process. 0 on a lost device, which marks it so.
  virtual std::uint64_t FreeBytes() const = 0;
  // bytes > 0 of uninitialised memory aligned to 256 bytes, usable from every stream. Throws
  // DeviceError.
  virtual void* Allocate(std::size_t bytes) = 0;
  // What an allocation of so many bytes takes of the device's memory.
  virtual std::size_t AllocationBytes(std::size_t bytes) const = 0;
  // memory: of Allocate, with no work in flight that uses it. Never throws.
  virtual void Free(void* memory) noexcept = 0;
  // Null, as in the beginning: there is none. It is cleared on threads that are about to allocate,
  // whatever locks of others they hold. REQUIRES: nobody is in WithSpare or FreeSpare.
  void SetSpare(SpareMemory* spare) { spare_ = spare; }
  void FreeSpare() noexcept {
    if (spare_ != nullptr) spare_->Clear();
  }
  // f(), and if that runs out of the device's memory and there was any to spare, once more without
  // that.
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
  // What shards begin at multiples of. Each takes so many multiples of it of its device's memory as
  // it needs.
  virtual std::size_t ShardUnit() const { return 4096; }
  // Uninitialised memory on several devices of one backend, this one among them, which streams of
  // all of them reach as a whole. shards: two at least, none empty, one right behind the other from
  // 0 on, on different devices. Throws DeviceError: kUnsupported where such memory cannot be.
  virtual std::unique_ptr<ShardedMemory> AllocateShards(std::span<const Shard> /*shards*/) {
    throw DeviceError(DeviceError::Kind::kUnsupported, "Device::AllocateShards",
                      "devices of this kind do not reach each other's memory");
  }
  // bytes > 0 of uninitialised host memory, aligned to 64, that copies of the device reach without
  // a detour. May wait for the device's work, and so may its end. Throws DeviceError.
  virtual StagingMemory MakeStaging(std::size_t bytes) = 0;
  // Makes copies of the device reach memory without a detour: bytes > 0, in whole pages that are
  // there. One registration serves all devices of a backend: another one of the same memory may be
  // empty, and has no effect beyond the first one. May wait for the device's work, and so may its
  // end. Throws DeviceError.
  virtual HostRegistration RegisterHost(void* /*memory*/, std::size_t /*bytes*/) {
    return {nullptr, [](void*) noexcept {}};
  }
  // Throws DeviceError.
  virtual std::unique_ptr<Stream> MakeStream() = 0;
  // Asks the device whether it still answers, in microseconds and without waiting for its work.
  // Throws DeviceError: kLost after a failure that no stream has met yet.
  virtual void Probe() = 0;
  // Begins or ends what a profiler records of the device's work, if one is attached that waits to
  // be told.
  virtual void SetProfiling(bool /*on*/) noexcept {}
  // Has streams of MakeLargeStream leave a part of the device to the others, if it can be parted:
  // work of those then never waits for a kernel that fills all the rest. info() counts the rest
  // from here on, so that strategies do the same, to the last bit, on either kind of stream.
  // REQUIRES: there is no stream. Throws DeviceError.
  virtual void KeepRoom() {}
  // A stream for operations that would hold the device for long. Throws DeviceError.
  virtual std::unique_ptr<Stream> MakeLargeStream() { return MakeStream(); }

  // Latched by the first kLost error on any stream; there is no way back within the process.
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  void MarkLost() const { lost_.store(true, std::memory_order_release); }

 private:
  mutable std::atomic<bool> lost_{false};
  SpareMemory* spare_ = nullptr;
};

// How far a stream's scratch memory has been handed out.
struct ScratchMark {
  std::size_t block = 0, used = 0;  // bytes of that block
};

// An in-order queue of work with its own scratch memory. One thread at a time; outlived by its
// device. Every function may throw DeviceError.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual Device& device() const = 0;

  // What the blocks of Scratch and HostScratch are charged to from here on, before they are
  // allocated; null, as in the beginning: nothing. It outlives the stream. REQUIRES: the stream has
  // no block yet.
  virtual void SetScratchBudget(Budget* budget) { budget_ = budget; }
  Budget* scratch_budget() const { return budget_; }

  // The cancellation flag of the current request; null if it cannot be cancelled. Once set it stays
  // set until the request ends. Any thread may set it.
  virtual void WatchStop(const std::atomic<bool>* stop) { stop_ = stop; }
  // Whether to stop. Strategies look at it as they go, where that costs nothing, every few
  // milliseconds; one that stops leaves its results as they are, which are not read. Thread
  // safe.
  bool stopped() const { return stop_ != nullptr && stop_->load(std::memory_order_relaxed); }
  const std::atomic<bool>* stop() const { return stop_; }

  // Adds to the seconds that the stream's work is expected to take; ExpectNothing sets the sum to
  // 0. Only one thread at a time may call these two; any thread may call expected_seconds.
  void Expect(double seconds) {
    expected_.store(expected_seconds() + seconds, std::memory_order_relaxed);
  }
  void ExpectNothing() { expected_.store(0, std::memory_order_relaxed); }
  double expected_seconds() const { return expected_.load(std::memory_order_relaxed); }

  // Begins a request: everything Scratch returned before is invalid, result() is reset.
  virtual void Reset() = 0;
  // Ends a request: waits for its work, and gives all but the stream's own small block of scratch
  // memory, which no budget counts, back to the device and the budget.
  virtual void Trim() = 0;
  // bytes of uninitialised device memory aligned to 256, valid until Reset or Trim. Throws
  // kOutOfScratch when the budget has no room, kOutOfMemory when the device has none, not even
  // spare memory.
  virtual void* Scratch(std::size_t bytes) = 0;
  virtual ScratchMark MarkScratch() const = 0;
  // Lets Scratch hand out again, to work that follows, what it has since the mark. REQUIRES:
  // neither Reset nor Trim since; only work that this stream has had, and no HostScratch, lies
  // there.
  virtual void RewindScratch(const ScratchMark& mark) = 0;
  // Who keeps from here on what Prepare gives out; null, as in the beginning: nobody.
  void KeepWith(Keeper* keeper) { keeper_ = keeper; }
  // Memory for what is made of an operand, as of Scratch, but that it may be there already.
  PreparedMemory Prepare(const Preparation& what, std::size_t bytes) {
    PreparedMemory memory;
    if (keeper_ != nullptr) memory = keeper_->Keep(what, bytes);
    if (memory.data == nullptr) memory = {Scratch(bytes), /*ready=*/false};
    if (memory.ready) ++prepared_found_;
    return memory;
  }
  // How often Prepare has given out what was there already.
  std::uint64_t prepared_found() const { return prepared_found_; }
  // One Scalar in host memory that kernels can write, in stream order.
  virtual Scalar* result() = 0;
  // bytes > 0 of uninitialised host memory, aligned to 256, that kernels can read and write in
  // stream order; otherwise like Scratch.
  virtual void* HostScratch(std::size_t bytes) = 0;

  // Copies the pieces, one behind the other. They may be in any memory, which may be reused on
  // return; the device sees the bytes in stream order.
  virtual void CopyToDevice(void* device, std::span<const HostBytes> pieces) = 0;
  // Copies from staging memory or memory that is registered, which stays as it is until
  // Synchronize.
  virtual void CopyPinnedToDevice(void* device, const void* host, std::size_t bytes) {
    const HostBytes piece{host, bytes};
    CopyToDevice(device, {&piece, 1});
  }
  // The bytes are in host on return. Copied once if host is in the device's staging memory, or in
  // memory that is registered.
  virtual void CopyToHost(void* host, const void* device, std::size_t bytes) = 0;
  // Whether CopyToPeer can write to the memory of the peer's device. What that takes is set up the
  // first time.
  virtual bool ReachesPeer(Stream& /*peer*/) { return false; }
  // Copies to memory of the peer's device without a detour, in the order of this stream: the bytes
  // are there once this stream has been synchronised. REQUIRES: ReachesPeer(peer).
  virtual void CopyToPeer(Stream& /*peer*/, void* /*out*/, const void* /*data*/,
                          std::size_t /*bytes*/) {}
  // Makes what this stream is given from here on begin behind what the other one, of a device of
  // the same backend, has been given so far.
  virtual void WaitFor(Stream& /*other*/) {}
  // Fills device memory with zero bytes.
  virtual void Zero(void* device, std::size_t bytes) = 0;
  // Writes the view's elements to out in row-major order, without gaps.
  virtual void Gather(const View& view, void* out) = 0;
  // Writes n contiguous elements as another type, or the same. What does not fit is rounded or
  // clipped as kernels/same_bits/convert.h says.
  virtual void Convert(const void* in, DType from, void* out, DType to, std::int64_t n) = 0;

  virtual void Synchronize() = 0;
  // Device time between the two, in microseconds. StopTimer synchronises.
  virtual void StartTimer() = 0;
  virtual double StopTimer() = 0;

 private:
  Budget* budget_ = nullptr;
  const std::atomic<bool>* stop_ = nullptr;
  std::atomic<double> expected_{0};
  Keeper* keeper_ = nullptr;
  std::uint64_t prepared_found_ = 0;
};

// f(), whose errors say that they are of the stream's device.
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
