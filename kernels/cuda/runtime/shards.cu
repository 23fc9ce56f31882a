#include "kernels/cuda/runtime/shards.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/runtime/driver.h"

namespace tessera {
namespace {

// --- The driver's functions ---

struct DriverApi {
  decltype(&cuGetErrorName) get_error_name =
      DriverFunction<decltype(&cuGetErrorName)>("cuGetErrorName", 6000);
  decltype(&cuDeviceGetAttribute) get_attribute =
      DriverFunction<decltype(&cuDeviceGetAttribute)>("cuDeviceGetAttribute", 2000);
  decltype(&cuMemGetAllocationGranularity) get_granularity =
      DriverFunction<decltype(&cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity",
                                                               10020);
  decltype(&cuMemAddressReserve) reserve =
      DriverFunction<decltype(&cuMemAddressReserve)>("cuMemAddressReserve", 10020);
  decltype(&cuMemAddressFree) free_address =
      DriverFunction<decltype(&cuMemAddressFree)>("cuMemAddressFree", 10020);
  decltype(&cuMemCreate) create = DriverFunction<decltype(&cuMemCreate)>("cuMemCreate", 10020);
  decltype(&cuMemRelease) release = DriverFunction<decltype(&cuMemRelease)>("cuMemRelease", 10020);
  decltype(&cuMemMap) map = DriverFunction<decltype(&cuMemMap)>("cuMemMap", 10020);
  decltype(&cuMemUnmap) unmap = DriverFunction<decltype(&cuMemUnmap)>("cuMemUnmap", 10020);
  decltype(&cuMemSetAccess) set_access =
      DriverFunction<decltype(&cuMemSetAccess)>("cuMemSetAccess", 10020);
};

const DriverApi& Driver() {
  static const DriverApi api;
  return api;
}

void CheckDriver(CUresult result, const char* call, std::uint64_t requested = 0) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  if (Driver().get_error_name(result, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown";
  throw DeviceError(result == CUDA_ERROR_OUT_OF_MEMORY ? DeviceError::Kind::kOutOfMemory
                                                       : DeviceError::Kind::kFailed,
                    call, name, requested);
}
#define DRIVER_CHECK(expr) CheckDriver((expr), #expr)

// --- Which addresses are sharded ---

// All shards of sharded memory, by their first address. Every copy looks up its addresses.
class ShardMap {
 public:
  void Add(std::uintptr_t begin, std::uintptr_t end, int ordinal) {
    const std::unique_lock lock(mutex_);
    shards_[begin] = {end, ordinal};
    count_.store(shards_.size(), std::memory_order_release);
  }
  void Remove(std::uintptr_t begin) {
    const std::unique_lock lock(mutex_);
    shards_.erase(begin);
    count_.store(shards_.size(), std::memory_order_release);
  }
  CudaShardPart Find(std::uintptr_t address, std::size_t bytes, int otherwise) const {
    if (count_.load(std::memory_order_acquire) == 0) return {bytes, otherwise};
    const std::shared_lock lock(mutex_);
    auto shard = shards_.upper_bound(address);
    if (shard == shards_.begin() || (--shard)->second.end <= address) return {bytes, otherwise};
    return {std::min<std::size_t>(bytes, shard->second.end - address), shard->second.ordinal};
  }

 private:
  struct Entry {
    std::uintptr_t end;
    int ordinal;
  };
  mutable std::shared_mutex mutex_;
  std::map<std::uintptr_t, Entry> shards_;
  std::atomic<std::size_t> count_{0};
};

ShardMap& TheShards() {
  static ShardMap shards;
  return shards;
}

// --- The memory ---

CUmemAllocationProp PropertiesOn(const CudaDevice& device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device.ordinal();
  return properties;
}

bool CanReach(int ordinal, int other) {
  int possible = ordinal == other ? 1 : 0;
  if (possible == 0) CUDA_CHECK(cudaDeviceCanAccessPeer(&possible, ordinal, other));
  return possible != 0;
}

// Returns the number of bytes to map for a shard: whole units, even for an array's last shard.
std::size_t MappedBytes(const Shard& shard) {
  return (shard.end - shard.begin + kCudaShardUnit - 1) / kCudaShardUnit * kCudaShardUnit;
}

class CudaShards final : public ShardedMemory {
 public:
  explicit CudaShards(std::span<const Shard> shards) {
    for (const Shard& shard : shards) bytes_ += MappedBytes(shard);
    DRIVER_CHECK(Driver().reserve(&address_, bytes_, kCudaShardUnit, 0, 0));
    try {
      for (const Shard& shard : shards) {
        auto& device = static_cast<CudaDevice&>(*shard.device);
        devices_.push_back(&device);
        MapOne(device, MappedBytes(shard));
      }
      // GPUs without a shard get access too: an operation that writes the array may run on a team
      // with more devices than the array has units.
      std::vector<CUmemAccessDesc> access;
      for (int ordinal : CudaDevice::OpenOrdinals()) {
        const bool reaches_all = std::all_of(
            devices_.begin(), devices_.end(),
            [&](const CudaDevice* device) { return CanReach(ordinal, device->ordinal()); });
        if (!reaches_all) continue;
        CUmemAccessDesc& one = access.emplace_back();
        one.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal};
        one.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      }
      DRIVER_CHECK(Driver().set_access(address_, bytes_, access.data(), access.size()));
    } catch (...) {
      Release();
      throw;
    }
  }
  ~CudaShards() override { Release(); }
  CudaShards(const CudaShards&) = delete;
  CudaShards& operator=(const CudaShards&) = delete;

  void* data() const override { return reinterpret_cast<void*>(address_); }

 private:
  struct Mapping {
    CUdeviceptr address;
    std::size_t bytes;
  };

  // Maps `bytes` bytes of the device's memory after the previous mappings.
  void MapOne(CudaDevice& device, std::size_t bytes) {
    mappings_.reserve(mappings_.size() + 1);  // so that nothing throws once there is a mapping
    const CUmemAllocationProp properties = PropertiesOn(device);
    CUmemGenericAllocationHandle memory{};
    CUresult result = Driver().create(&memory, bytes, &properties, 0);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
      // The device's pool may hold enough unused memory.
      device.Trim();
      result = Driver().create(&memory, bytes, &properties, 0);
    }
    try {
      CheckDriver(result, "cuMemCreate", bytes);
    } catch (DeviceError& error) {
      error.SetDevice(device);
      throw;
    }
    const Mapping mapping{
        mappings_.empty() ? address_ : mappings_.back().address + mappings_.back().bytes, bytes};
    result = Driver().map(mapping.address, bytes, 0, memory, 0);
    // A mapping keeps the memory alive. If the mapping failed, this call frees the memory.
    Driver().release(memory);
    CheckDriver(result, "cuMemMap");
    mappings_.push_back(mapping);
    TheShards().Add(mapping.address, mapping.address + bytes, device.ordinal());
  }

  // Ignores errors: on a lost device every call fails, and no caller could handle such an error.
  void Release() noexcept {
    for (const CudaDevice* device : devices_)
      if (cudaSetDevice(device->ordinal()) != cudaSuccess) cudaGetLastError();
    for (const Mapping& mapping : mappings_) {
      TheShards().Remove(mapping.address);
      Driver().unmap(mapping.address, mapping.bytes);
    }
    Driver().free_address(address_, bytes_);
  }

  CUdeviceptr address_ = 0;
  std::size_t bytes_ = 0;
  std::vector<const CudaDevice*> devices_;
  std::vector<Mapping> mappings_;
};

[[noreturn]] void Unsupported(const std::string& cause) {
  throw DeviceError(DeviceError::Kind::kUnsupported, "MakeCudaShards", cause);
}

void CheckManages(const CudaDevice& device) {
  int managed = 0;
  DRIVER_CHECK(Driver().get_attribute(
      &managed, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device.ordinal()));
  if (managed == 0) Unsupported(device.info().name + " has no virtual memory management");
  const CUmemAllocationProp properties = PropertiesOn(device);
  std::size_t granularity = 0;
  DRIVER_CHECK(
      Driver().get_granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  if (granularity == 0 || kCudaShardUnit % granularity != 0)
    Unsupported(device.info().name + " allocates memory in units of " +
                std::to_string(granularity) + " bytes");
}

}  // namespace

std::unique_ptr<ShardedMemory> MakeCudaShards(std::span<const Shard> shards) {
  for (const Shard& shard : shards) {
    auto& device = static_cast<CudaDevice&>(*shard.device);
    device.Use();
    CheckManages(device);
    for (const Shard& other : shards) {
      if (other.device == shard.device) continue;
      // Results and the values of chunks are also copied between the devices' pools.
      auto& peer = static_cast<CudaDevice&>(*other.device);
      if (!device.OpenTo(peer))
        Unsupported(peer.info().name + " cannot access the memory of " + device.info().name);
    }
  }
  return std::make_unique<CudaShards>(shards);
}

void CopyByShards(void* out, const void* data, std::size_t bytes, cudaMemcpyKind kind,
                  cudaStream_t stream) {
  ForShardParts(out, 0, data, 0, bytes,
                [&](void* to, const void* from, std::size_t part, int, int) {
                  CUDA_CHECK(cudaMemcpyAsync(to, from, part, kind, stream));
                });
}

CudaShardPart ShardPartAt(const void* address, std::size_t bytes, int otherwise) {
  return TheShards().Find(reinterpret_cast<std::uintptr_t>(address), bytes, otherwise);
}

}  // namespace tessera
