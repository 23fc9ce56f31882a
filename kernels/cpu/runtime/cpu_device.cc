#include "kernels/cpu/runtime/cpu_device.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>

#include "kernels/cpu/runtime/chunks.h"
#include "kernels/cpu/runtime/gather.h"
#include "kernels/cpu/runtime/host_threads.h"
#include "kernels/device/host_memory.h"
#include "kernels/same_bits/convert.h"

namespace tessera {
namespace {

// Elements that a loop processes between two checks of Stream::stopped().
constexpr std::int64_t kPiece = std::int64_t{1} << 16;

std::string CpuModel() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    const std::size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos)
      return line.substr(colon + 2);
  }
  return "CPU";
}

// CPU devices share the host's memory, so all shards are one allocation.
class CpuShards final : public ShardedMemory {
 public:
  explicit CpuShards(std::size_t bytes) : data_(AllocateHost(bytes)) {
    if (data_ == nullptr)
      throw DeviceError(DeviceError::Kind::kOutOfMemory, "AllocateHost", "ENOMEM", bytes);
  }
  ~CpuShards() override { FreeHost(data_); }
  CpuShards(const CpuShards&) = delete;
  CpuShards& operator=(const CpuShards&) = delete;
  void* data() const override { return data_; }

 private:
  void* const data_;
};

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(std::string name) {
    info_.name = std::move(name);
    info_.model = CpuModel();
    info_.backend = Backend::kCpu;
    info_.multiprocessors = HostThreads();
    info_.memory_bytes = ReadHostMemory().total;
    info_.shard_unit = 4096;  // a page, which is also a row of the fixed tree
  }

  std::uint64_t FreeBytes() const override {
    return std::min(ReadHostMemory().free, info_.memory_bytes);
  }
  void* Allocate(std::size_t bytes) override {
    void* memory = AllocateHost(bytes);
    if (memory == nullptr)
      throw DeviceError(DeviceError::Kind::kOutOfMemory, "AllocateHost", "ENOMEM", bytes);
    return memory;
  }
  std::size_t AllocationBytes(std::size_t bytes) const override {
    return HostAllocationBytes(bytes);
  }
  void Free(void* memory) noexcept override { FreeHost(memory); }
  std::unique_ptr<ShardedMemory> AllocateShards(std::span<const Shard> shards) override {
    return std::make_unique<CpuShards>(static_cast<std::size_t>(shards.back().end));
  }
  StagingMemory MakeStaging(std::size_t bytes) override {
    constexpr std::size_t kPage = 4096;
    void* memory = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
    if (memory == nullptr)
      throw DeviceError(DeviceError::Kind::kOutOfHostMemory, "aligned_alloc", "ENOMEM", bytes);
    return {memory, [](void* staging) noexcept { std::free(staging); }};
  }
  void Probe() override {}
  std::unique_ptr<Stream> MakeStream() override;
};

class CpuStream final : public Stream {
 public:
  explicit CpuStream(Device& device) : Stream(device, MemoryOf(device), MemoryOf(device)) {}

  Scalar* result() override { return &result_; }

  void CopyToDevice(void* device, std::span<const HostBytes> pieces) override {
    auto* to = static_cast<char*>(device);
    for (const HostBytes& piece : pieces) {
      if (piece.size != 0) std::memcpy(to, piece.data, piece.size);
      to += piece.size;
    }
  }
  void CopyToHost(void* host, const void* device, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(host, device, bytes);
  }

  bool ReachesPeer(Stream& peer) override {
    return dynamic_cast<const CpuStream*>(&peer) != nullptr;
  }
  void CopyToPeer(Stream&, void* out, const void* data, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(out, data, bytes);
  }

  void Zero(void* device, std::size_t bytes) override {
    if (bytes != 0) std::memset(device, 0, bytes);
  }
  void Gather(const View& view, void* out) override {
    switch (SizeOf(view.dtype)) {
      case 1:
        return GatherAs<std::uint8_t>(view, out);
      case 2:
        return GatherAs<std::uint16_t>(view, out);
      case 4:
        return GatherAs<std::uint32_t>(view, out);
      default:
        return GatherAs<std::uint64_t>(view, out);
    }
  }

  void Count(const View& view) override {
    const View merged = Merged(view);
    result_.integer = FoldChunks(
        *this, merged.elements(), std::int64_t{0},
        [&merged](std::int64_t begin, std::int64_t end) {
          std::array<std::uint8_t, kChunk> copy;
          const auto* bytes = static_cast<const std::uint8_t*>(merged.data) + begin;
          if (!merged.contiguous()) {
            GatherRange(merged, begin, end - begin, copy.data());
            bytes = copy.data();
          }
          return static_cast<std::int64_t>(
              std::count_if(bytes, bytes + (end - begin), [](auto byte) { return byte != 0; }));
        },
        std::plus<std::int64_t>());
  }

  void Convert(const void* in, DType from, void* out, DType to, std::int64_t n) override {
    DispatchDType(from, [&](auto f) {
      const auto* elements = static_cast<const decltype(f)*>(in);
      DispatchDType(to, [&](auto t) {
        using To = decltype(t);
        auto* converted = static_cast<To*>(out);
#pragma omp parallel for schedule(static) if (n > kPiece)
        for (std::int64_t piece = 0; piece < n; piece += kPiece) {
          if (stopped()) continue;
          const std::int64_t end = std::min(n, piece + kPiece);
          for (std::int64_t i = piece; i < end; ++i) converted[i] = ConvertElement<To>(elements[i]);
        }
      });
    });
  }

  void Synchronize() override {}

  double Time(const std::function<void()>& work) override {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
        .count();
  }

 private:
  static ScratchBlocks::Source MemoryOf(Device& device) {
    return {[&device](std::size_t bytes) {
              return device.WithSpare([&] { return device.Allocate(bytes); });
            },
            [&device](void* memory) { device.Free(memory); }};
  }
  template <class T>
  void GatherAs(const View& view, void* out) const {
    const View merged = Merged(view);
    const std::int64_t n = merged.elements();
    for (std::int64_t piece = 0; piece < n && !stopped(); piece += kPiece)
      GatherRange(merged, piece, std::min(kPiece, n - piece), static_cast<T*>(out) + piece);
  }

  Scalar result_;
};

std::unique_ptr<Stream> CpuDevice::MakeStream() { return std::make_unique<CpuStream>(*this); }

}  // namespace

std::unique_ptr<Device> OpenCpuDevice(std::string name) {
  return std::make_unique<CpuDevice>(std::move(name));
}

}  // namespace tessera
