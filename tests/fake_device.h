// A device that fails and stalls on demand: the CPU device behind switches.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/compute.h"

namespace tessera {

// Thread safe.
class FakeDevice final : public Device {
 public:
  // The points where a failure or a stall can be requested. kBegin is only the first step of every
  // operation. kLaunch covers the work of a stream, and the start and end of a timer. kFree cannot
  // fail.
  enum class Step {
    kAllocate,
    kFree,
    kStaging,
    kRegister,
    kStream,
    kBegin,
    kScratch,
    kCopyToDevice,
    kCopyToHost,
    kLaunch,
    kSynchronize,
    kProbe
  };

  // backend: the kind of device that it claims to be.
  explicit FakeDevice(const std::string& name = "fake:0", const std::string& pci_bus_id = "",
                      Backend backend = Backend::kCpu)
      : cpu_(*OpenDevice("cpu")) {
    info_ = cpu_->info();
    info_.name = name;
    info_.pci_bus_id = pci_bus_id;
    info_.backend = backend;
  }

  // From now on, after `after` successes, the step fails in this way `times` times.
  void Fail(Step step, DeviceError::Kind kind, int times = 1, int after = 0) {
    Locked([&] { failures_[step] = Failure{kind, times, after}; });
  }
  // Cancels the rest of Fail, and returns how often the step would still have failed.
  int Relent(Step step) {
    return Locked([&] { return std::exchange(failures_[step].times, 0); });
  }

  // From now on, only this step blocks, until Open.
  void Close(Step step) {
    const std::lock_guard lock(mutex_);
    closed_ = step;
    changed_.notify_all();
  }
  void Open() {
    const std::lock_guard lock(mutex_);
    closed_.reset();
    changed_.notify_all();
  }
  // Lets one of the calls that are blocked by the closed step continue. REQUIRES: there is such a
  // call.
  void Pass() {
    std::unique_lock lock(mutex_);
    passing_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !passing_; });
  }
  // Waits until that many calls are blocked by the closed step.
  void WaitForBlocked(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return blocked_ >= count; });
  }

  // Sets a function that each thread calls before it frees device memory. Must precede the first
  // allocation.
  void OnFree(std::function<void()> on_free) { on_free_ = std::move(on_free); }

  // Returns how often a step was reached.
  int Count(Step step) {
    return Locked([&] { return counts_[step]; });
  }

  // Returns the thread that reached the step last.
  std::thread::id ThreadOf(Step step) {
    return Locked([&] { return threads_[step]; });
  }

  // The number of bytes that its streams have copied from the host to the device.
  std::uint64_t copied_to_device() const { return copied_to_device_; }

  // The number of allocations that have not been freed.
  std::uint64_t allocations() {
    return Locked([&] { return allocations_; });
  }

  std::uint64_t FreeBytes() const override { return cpu_->FreeBytes(); }
  void* Allocate(std::size_t bytes) override {
    Reach(Step::kAllocate, bytes);
    void* memory = cpu_->Allocate(bytes);
    Locked([&] { ++allocations_; });
    return memory;
  }
  void Free(void* memory) noexcept override {
    if (on_free_) on_free_();
    Reach(Step::kFree);
    cpu_->Free(memory);
    Locked([&] { --allocations_; });
  }
  std::size_t AllocationBytes(std::size_t bytes) const override {
    return cpu_->AllocationBytes(bytes);
  }
  std::unique_ptr<ShardedMemory> AllocateShards(std::span<const Shard> shards) override {
    Reach(Step::kAllocate, static_cast<std::size_t>(shards.back().end));
    return cpu_->AllocateShards(shards);
  }
  StagingMemory MakeStaging(std::size_t bytes) override {
    Reach(Step::kStaging, bytes);
    return cpu_->MakeStaging(bytes);
  }
  HostRegistration RegisterHost(void* memory, std::size_t bytes) override {
    Reach(Step::kRegister, bytes);
    return cpu_->RegisterHost(memory, bytes);
  }
  std::unique_ptr<Stream> MakeStream() override;
  std::unique_ptr<Stream> MakeLargeStream() override;
  // Returns whether MakeLargeStream made the stream.
  bool IsLarge(const Stream& stream) {
    return Locked([&] { return large_.contains(&stream); });
  }
  void Probe() override { Reach(Step::kProbe); }

 private:
  friend class FakeStream;

  template <class F>
  std::invoke_result_t<F> Locked(F f) {
    const std::lock_guard lock(mutex_);
    return f();
  }
  void Reach(Step step, std::size_t bytes = 0) {
    std::unique_lock lock(mutex_);
    ++counts_[step];
    threads_[step] = std::this_thread::get_id();
    if (closed_ == step) {
      ++blocked_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return closed_ != step || passing_; });
      passing_ = false;
      --blocked_;
      changed_.notify_all();
    }
    const auto it = failures_.find(step);
    if (it == failures_.end() || it->second.times == 0) return;
    if (it->second.after > 0) {
      --it->second.after;
      return;
    }
    --it->second.times;
    const DeviceError::Kind kind = it->second.kind;
    throw DeviceError(kind, "fakeCall(x)",
                      kind == DeviceError::Kind::kOutOfMemory ? "fakeErrorMemoryAllocation"
                      : kind == DeviceError::Kind::kLost      ? "fakeErrorIllegalAddress"
                                                              : "fakeErrorInvalidValue",
                      bytes);
  }

  const std::unique_ptr<Device> cpu_;
  std::function<void()> on_free_;
  std::mutex mutex_;
  std::condition_variable changed_;
  struct Failure {
    DeviceError::Kind kind = DeviceError::Kind::kFailed;
    int times = 0;
    int after = 0;
  };
  std::map<Step, Failure> failures_;
  std::map<Step, int> counts_;
  std::map<Step, std::thread::id> threads_;
  std::optional<Step> closed_;
  int blocked_ = 0;
  bool passing_ = false;  // Whether Pass waits for a call to continue.
  std::uint64_t allocations_ = 0;
  std::atomic<std::uint64_t> copied_to_device_{0};
  std::set<const Stream*> large_;
};

class FakeStream final : public Stream {
 public:
  FakeStream(FakeDevice& device, std::unique_ptr<Stream> stream)
      : Stream(device, MemoryOf(*device.cpu_), MemoryOf(*device.cpu_)),
        device_(device),
        stream_(std::move(stream)) {}
  void Reset() override {
    device_.Reach(Step::kBegin);
    Stream::Reset();
  }
  void* Scratch(std::size_t bytes) override {
    return device_.WithSpare([&] {
      device_.Reach(Step::kScratch, bytes);
      return Stream::Scratch(bytes);
    });
  }
  Scalar* result() override { return stream_->result(); }
  void CopyToDevice(void* to, std::span<const HostBytes> pieces) override {
    Stream& stream = After(Step::kCopyToDevice);
    for (const HostBytes& piece : pieces) device_.copied_to_device_ += piece.size;
    stream.CopyToDevice(to, pieces);
  }
  void CopyToHost(void* to, const void* from, std::size_t bytes) override {
    After(Step::kCopyToHost).CopyToHost(to, from, bytes);
  }
  void Zero(void* data, std::size_t bytes) override { After(Step::kLaunch).Zero(data, bytes); }
  void Gather(const View& view, void* out) override { After(Step::kLaunch).Gather(view, out); }
  void Count(const View& view) override { After(Step::kLaunch).Count(view); }
  void Convert(const void* in, DType from, void* out, DType to, std::int64_t n) override {
    After(Step::kLaunch).Convert(in, from, out, to, n);
  }
  void Synchronize() override { After(Step::kSynchronize).Synchronize(); }
  double Time(const std::function<void()>& work) override {
    return After(Step::kLaunch).Time([&] {
      work();
      device_.Reach(Step::kLaunch);
    });
  }

 private:
  using Step = FakeDevice::Step;
  static ScratchBlocks::Source MemoryOf(Device& cpu) {
    return {[&cpu](std::size_t bytes) { return cpu.Allocate(bytes); },
            [&cpu](void* memory) { cpu.Free(memory); }};
  }
  Stream& After(Step step) {
    device_.Reach(step);
    stream_->WatchStop(stop());
    return *stream_;
  }

  FakeDevice& device_;
  const std::unique_ptr<Stream> stream_;
};

inline std::unique_ptr<Stream> FakeDevice::MakeStream() {
  Reach(Step::kStream);
  return std::make_unique<FakeStream>(*this, cpu_->MakeStream());
}

inline std::unique_ptr<Stream> FakeDevice::MakeLargeStream() {
  std::unique_ptr<Stream> stream = MakeStream();
  Locked([&] { large_.insert(stream.get()); });
  return stream;
}

// Returns the devices of a server that has only this one.
inline std::vector<std::unique_ptr<Device>> Only(FakeDevice* device) {
  std::vector<std::unique_ptr<Device>> devices;
  devices.emplace_back(device);
  return devices;
}

// Returns devices with the names fake:0, fake:1 and so on.
inline std::vector<std::unique_ptr<Device>> FakeDevices(int count) {
  std::vector<std::unique_ptr<Device>> devices;
  for (int i = 0; i < count; ++i)
    devices.push_back(std::make_unique<FakeDevice>("fake:" + std::to_string(i)));
  return devices;
}

}  // namespace tessera
