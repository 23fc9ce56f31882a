// Opens devices by name, owns memory, and turns exceptions of devices and streams into a Status.
#include <algorithm>
#include <charconv>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/compute.h"
#include "kernels/cpu/runtime/cpu_device.h"
#include "kernels/cpu/runtime/host_threads.h"
#include "kernels/device/guard.h"
#include "kernels/device/host_memory.h"
#ifdef TESSERA_WITH_CUDA
#include "kernels/cuda/runtime/cuda_device.h"
#endif

namespace tessera {
namespace {

absl::Status Exhausted(std::string_view reason, const Device& device, std::string_view owner,
                       std::uint64_t requested, std::uint64_t free, std::uint64_t total) {
  return MakeError(absl::StatusCode::kResourceExhausted, reason,
                   absl::StrCat(Absl(owner), " has no room for ", requested, " bytes"),
                   {{"requested", absl::StrCat(requested)},
                    {"free", absl::StrCat(free)},
                    {"total", absl::StrCat(total)},
                    {"device", device.info().name}});
}

absl::Status MemoryExhausted(const Device& device, std::uint64_t requested) {
  return Exhausted(
      device.info().backend == Backend::kCpu ? "HOST_MEMORY_EXHAUSTED" : "GPU_MEMORY_EXHAUSTED",
      device, device.info().name, requested, device.FreeBytes(), device.info().memory_bytes);
}

absl::Status HostMemoryExhausted(const Device& device, std::uint64_t requested) {
  const HostMemory memory = ReadHostMemory();
  return Exhausted("HOST_MEMORY_EXHAUSTED", device, "the host's memory", requested, memory.free,
                   memory.total);
}

#ifdef TESSERA_WITH_CUDA
int GpuCount() { return CudaDeviceCount(); }
#else
int GpuCount() { return 0; }
#endif

std::string GpuMissingReason() {
#ifdef TESSERA_WITH_CUDA
  return CudaUnavailableReason();
#else
  return "this build has no CUDA device";
#endif
}

absl::StatusOr<std::unique_ptr<Device>> OpenGpu([[maybe_unused]] int ordinal) {
  const std::string name = absl::StrCat("cuda:", ordinal);
  std::string reason = GpuMissingReason();
  if (ordinal < GpuCount()) {
#ifdef TESSERA_WITH_CUDA
    try {
      return OpenCudaDevice(ordinal);
    } catch (const DeviceError& error) {
      reason = error.what();
    }
#endif
  } else if (GpuCount() > 0) {
    reason = absl::StrCat("this machine has ", GpuCount(), " GPU(s)");
  }
  return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_UNAVAILABLE",
                   absl::StrCat("device ", name, " cannot be used: ", reason),
                   {{"device", name}, {"cause", reason}});
}

}  // namespace

absl::Status ScratchExhausted(const Device& device, std::uint64_t requested, std::uint64_t free,
                              std::uint64_t total) {
  return Exhausted("SCRATCH_EXHAUSTED", device, "the scratch memory of operations", requested, free,
                   total);
}

absl::Status CurrentExceptionStatus(Device& at) {
  try {
    throw;
  } catch (const DeviceError& error) {
    Device& device = error.device() != nullptr ? *error.device() : at;
    switch (error.kind()) {
      case DeviceError::Kind::kOutOfMemory:
        return MemoryExhausted(device, error.requested());
      case DeviceError::Kind::kOutOfHostMemory:
        return HostMemoryExhausted(device, error.requested());
      case DeviceError::Kind::kOutOfScratch:
        return ScratchExhausted(device, error.requested(), error.free(), error.total());
      case DeviceError::Kind::kUnsupported:
        return MakeError(
            absl::StatusCode::kFailedPrecondition, "PLACEMENT_UNSUPPORTED",
            absl::StrCat("an array cannot be placed on these devices together: ", error.error()),
            {{"device", device.info().name}, {"cause", error.error()}});
      case DeviceError::Kind::kLost:
        device.MarkLost();
        return MakeError(
            absl::StatusCode::kUnavailable, "DEVICE_LOST",
            absl::StrCat(device.info().name, " is lost: ", error.what()),
            {{"device", device.info().name}, {"call", error.call()}, {"error", error.error()}});
      case DeviceError::Kind::kFailed:
        break;
    }
    return MakeError(
        absl::StatusCode::kInternal, "CUDA_ERROR",
        absl::StrCat(device.info().name, ": ", error.what()),
        {{"device", device.info().name}, {"call", error.call()}, {"error", error.error()}});
  } catch (const std::bad_alloc&) {
    return MakeError(absl::StatusCode::kResourceExhausted, "HOST_MEMORY_EXHAUSTED",
                     "the server's host memory is exhausted");
  } catch (const std::exception& error) {
    return MakeError(absl::StatusCode::kInternal, "INTERNAL", error.what());
  }
}

std::vector<std::string> VisibleDevices() {
  std::vector<std::string> names;
  for (int i = 0; i < GpuCount(); ++i) names.push_back(absl::StrCat("cuda:", i));
  names.emplace_back("cpu");
  return names;
}

absl::StatusOr<std::unique_ptr<Device>> OpenDevice(std::string_view name) {
  if (name == "cpu" || (name == "auto" && GpuCount() == 0)) return OpenCpuDevice();
  if (name == "cuda" || name == "auto") return OpenGpu(0);
  const std::size_t colon = name.find(':');
  const std::string_view family = name.substr(0, colon);
  if (colon != std::string_view::npos && (family == "cpu" || family == "cuda")) {
    const char* const begin = name.data() + colon + 1;
    const char* const end = name.data() + name.size();
    int ordinal = 0;
    const auto [stop, error] = std::from_chars(begin, end, ordinal);
    // Only the canonical spelling is accepted, because it becomes the device's name.
    if (error == std::errc() && ordinal >= 0 &&
        std::string_view(begin, end) == absl::StrCat(ordinal)) {
      if (family == "cpu") return OpenCpuDevice(std::string(name));
      return OpenGpu(ordinal);
    }
  }
  return MakeError(
      absl::StatusCode::kInvalidArgument, "BAD_DEVICE",
      absl::StrCat("device '", std::string(name),
                   "' is not one of auto, cpu, cpu:0, cpu:1, ..., cuda, cuda:0, cuda:1, ..."),
      {{"device", std::string(name)}});
}

absl::StatusOr<std::unique_ptr<Stream>> MakeStream(Device& device) {
  return Guard(device, [&] { return device.MakeStream(); });
}

absl::Status KeepRoom(Device& device) {
  return Guard(device, [&] { device.KeepRoom(); });
}

absl::StatusOr<std::unique_ptr<Stream>> MakeLargeStream(Device& device) {
  return Guard(device, [&] { return device.MakeLargeStream(); });
}

std::vector<Shard> MakeShards(absl::Span<Device* const> devices, std::uint64_t bytes) {
  const std::uint64_t unit = devices.front()->info().shard_unit;
  const std::uint64_t units = bytes / unit + (bytes % unit != 0);
  const std::uint64_t count = devices.size();
  std::vector<Shard> shards;
  std::uint64_t begin = 0;
  for (std::uint64_t i = 1; i <= count; ++i) {
    // The first units % count devices get one unit more than the others.
    const std::uint64_t last = units / count * i + std::min(i, units % count);
    const std::uint64_t end = std::min(bytes, last * unit);
    if (end > begin) shards.push_back({devices[i - 1], begin, end});
    begin = end;
  }
  if (shards.empty()) shards.push_back({devices.front(), 0, bytes});
  return shards;
}

std::uint64_t AllocationBytes(const Shard& shard, std::size_t count) {
  const std::uint64_t bytes = shard.end - shard.begin;
  if (count == 1) return shard.device->AllocationBytes(bytes);
  const std::uint64_t unit = shard.device->info().shard_unit;
  return (bytes / unit + (bytes % unit != 0)) * unit;
}

Memory::Memory(Memory&& other) noexcept
    : device_(other.device_),
      sharded_(std::move(other.sharded_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(sharded_, other.sharded_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Memory::~Memory() {
  if (data_ != nullptr && sharded_ == nullptr) device_->Free(data_);
}

absl::StatusOr<Memory> Allocate(Device& device, std::size_t bytes) {
  if (bytes == 0) return Memory();
  ASSIGN_OR_RETURN(void* const data, Guard(device, [&] { return device.Allocate(bytes); }));
  return Memory(&device, data, bytes);
}

absl::StatusOr<Memory> Allocate(absl::Span<const Shard> shards) {
  const Shard& last = shards.back();
  if (shards.size() == 1) return Allocate(*last.device, last.end);
  Device& first = *shards.front().device;
  ASSIGN_OR_RETURN(std::unique_ptr<ShardedMemory> sharded, Guard(first, [&] {
                     return first.AllocateShards(std::span(shards.data(), shards.size()));
                   }));
  return Memory(std::move(sharded), last.end);
}

absl::StatusOr<StagingMemory> MakeStaging(Device& device, std::size_t bytes) {
  return Guard(device, [&] { return device.MakeStaging(bytes); });
}

absl::StatusOr<HostRegistration> RegisterHost(Device& device, void* memory, std::size_t bytes) {
  return Guard(device, [&] { return device.RegisterHost(memory, bytes); });
}

int LoopThreads(const Device& device) {
  // The maximum with a GPU. Few host loops are then long, and bandwidth limits those.
  constexpr int kMostWithGpu = 8;
  return device.info().backend == Backend::kCpu ? device.info().multiprocessors
                                                : std::min(HostThreads(), kMostWithGpu);
}

void PrepareThread(const Device& device, bool shares_loops) {
  ShareLoops(shares_loops ? LoopThreads(device) : 1);
}

absl::Status Probe(Device& device) {
  return Guard(device, [&] { device.Probe(); });
}

absl::Status BeginRequest(Stream& stream) {
  return Guard(stream.device(), [&] { stream.Reset(); });
}

absl::Status EndRequest(Stream& stream) {
  return Guard(stream.device(), [&] { stream.Trim(); });
}

absl::StatusOr<void*> Scratch(Stream& stream, std::size_t bytes) {
  if (bytes == 0) return nullptr;
  return Guard(stream.device(), [&] { return stream.Scratch(bytes); });
}

absl::Status CopyToDevice(Stream& stream, void* device, const void* host, std::size_t bytes) {
  const HostBytes piece{host, bytes};
  return CopyToDevice(stream, device, {&piece, 1});
}

absl::Status CopyToDevice(Stream& stream, void* device, std::span<const HostBytes> pieces) {
  return Guard(stream.device(), [&] { stream.CopyToDevice(device, pieces); });
}

absl::Status CopyPinnedToDevice(Stream& stream, void* device, const void* host, std::size_t bytes) {
  return Guard(stream.device(), [&] { stream.CopyPinnedToDevice(device, host, bytes); });
}

absl::Status CopyToHost(Stream& stream, void* host, const void* device, std::size_t bytes) {
  return Guard(stream.device(), [&] { stream.CopyToHost(host, device, bytes); });
}

absl::Status Zero(Stream& stream, void* device, std::size_t bytes) {
  return Guard(stream.device(), [&] { stream.Zero(device, bytes); });
}

absl::Status Synchronize(Stream& stream) {
  return Guard(stream.device(), [&] { stream.Synchronize(); });
}

}  // namespace tessera
