#include "kernels/cpu/cpu_device.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/convert.h"

namespace tessera {
namespace {

constexpr std::size_t kAlignment = 256;
// A lane gives scratch above this back when the request ends, so that one large gather does not
// hold memory for ever.
constexpr std::size_t kKeptScratch = std::size_t{64} << 20;

std::string CpuModel() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    const std::size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos)
      return line.substr(colon + 2);
  }
  return "CPU";
}

// A figure of /proc/meminfo in bytes; 0 when it is not there.
std::uint64_t MemInfo(const std::string& key) {
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    if (line.rfind(key + ":", 0) == 0)
      return std::strtoull(line.c_str() + key.size() + 1, nullptr, 10) * 1024;
  }
  return 0;
}

// A number in a file of the control group; "max" and a missing file are no limit.
std::uint64_t CgroupFigure(const char* path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  return file >> value ? value : std::numeric_limits<std::uint64_t>::max();
}

void* AllocateHost(std::size_t bytes) {
  const std::size_t rounded = bytes > std::numeric_limits<std::size_t>::max() - kAlignment
                                  ? 0
                                  : (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* memory = rounded == 0 ? nullptr : std::aligned_alloc(kAlignment, rounded);
  if (memory == nullptr)
    throw DeviceError(DeviceError::Kind::kOutOfMemory, "aligned_alloc", "ENOMEM", bytes);
  return memory;
}

class CpuDevice final : public Device {
 public:
  CpuDevice() {
    info_.name = "cpu";
    info_.model = CpuModel();
    info_.backend = Backend::kCpu;
#ifdef _OPENMP
    info_.multiprocessors = omp_get_max_threads();
#else
    info_.multiprocessors = 1;
#endif
    info_.memory_bytes = std::min(MemInfo("MemTotal"), CgroupFigure("/sys/fs/cgroup/memory.max"));
  }

  const DeviceInfo& info() const override { return info_; }

  std::uint64_t FreeBytes() const override {
    const std::uint64_t limit = CgroupFigure("/sys/fs/cgroup/memory.max");
    const std::uint64_t used = CgroupFigure("/sys/fs/cgroup/memory.current");
    const std::uint64_t group = limit > used ? limit - used : 0;
    return std::min(MemInfo("MemAvailable"),
                    limit == std::numeric_limits<std::uint64_t>::max() ? limit : group);
  }

  void* Allocate(std::size_t bytes) override { return AllocateHost(bytes); }
  void Free(void* memory) noexcept override { std::free(memory); }
  std::unique_ptr<Lane> MakeLane() override;

 private:
  DeviceInfo info_;
};

class CpuLane final : public Lane {
 public:
  explicit CpuLane(Device& device) : device_(device) {}

  Device& device() const override { return device_; }
  CUstream_st* stream() const override { return nullptr; }

  void Reset() override {
    result_ = {};
    std::size_t kept = 0;
    std::size_t keep = 0;
    while (keep < blocks_.size() && kept + blocks_[keep].size <= kKeptScratch)
      kept += blocks_[keep++].size;
    blocks_.resize(keep);
    used_ = 0;
  }

  void* Scratch(std::size_t bytes) override {
    for (; used_ < blocks_.size(); ++used_)
      if (blocks_[used_].size >= bytes) return blocks_[used_++].memory.get();
    blocks_.push_back({std::unique_ptr<void, FreeHost>(AllocateHost(bytes)), bytes});
    ++used_;
    return blocks_.back().memory.get();
  }

  Scalar* result() override { return &result_; }
  void* HostScratch(std::size_t bytes) override { return Scratch(bytes); }

  void CopyToDevice(void* device, const void* host, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(device, host, bytes);
  }
  void CopyToHost(void* host, const void* device, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(host, device, bytes);
  }

  void Gather(const View& view, void* out) override {
    switch (SizeOf(view.dtype)) {
      case 2:
        return GatherAs<std::uint16_t>(view, out);
      case 4:
        return GatherAs<std::uint32_t>(view, out);
      default:
        return GatherAs<std::uint64_t>(view, out);
    }
  }

  void Convert(const void* in, DType from, void* out, DType to, std::int64_t n) override {
    DispatchDType(from, [&](auto f) {
      const auto* elements = static_cast<const decltype(f)*>(in);
      DispatchDType(to, [&](auto t) {
        using To = decltype(t);
        auto* converted = static_cast<To*>(out);
#pragma omp parallel for schedule(static) if (n > (1 << 16))
        for (std::int64_t i = 0; i < n; ++i) converted[i] = ConvertElement<To>(elements[i]);
      });
    });
  }

  void Synchronize() override {}

  void StartTimer() override { start_ = std::chrono::steady_clock::now(); }
  double StopTimer() override {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start_)
        .count();
  }

 private:
  struct FreeHost {
    void operator()(void* memory) const { std::free(memory); }
  };
  struct Block {
    std::unique_ptr<void, FreeHost> memory;
    std::size_t size = 0;
  };

  // Walks the outer axes like an odometer and copies one innermost row at a time.
  template <class T>
  static void GatherAs(const View& view, void* out) {
    const int rank = view.shape.rank;
    if (view.elements() == 0) return;
    const auto* base = static_cast<const T*>(view.data);
    auto* to = static_cast<T*>(out);
    const std::int64_t row = rank == 0 ? 1 : view.shape[rank - 1];
    const std::int64_t stride = rank == 0 ? 1 : view.strides[static_cast<std::size_t>(rank - 1)];
    std::array<std::int64_t, kMaxRank> index{};
    std::int64_t offset = 0;
    while (true) {
      for (std::int64_t i = 0; i < row; ++i) *to++ = base[offset + i * stride];
      int axis = rank - 2;
      for (; axis >= 0; --axis) {
        const auto a = static_cast<std::size_t>(axis);
        offset += view.strides[a];
        if (++index[a] < view.shape[axis]) break;
        offset -= view.strides[a] * view.shape[axis];
        index[a] = 0;
      }
      if (axis < 0) return;
    }
  }

  Device& device_;
  Scalar result_;
  std::vector<Block> blocks_;
  std::size_t used_ = 0;
  std::chrono::steady_clock::time_point start_;
};

std::unique_ptr<Lane> CpuDevice::MakeLane() { return std::make_unique<CpuLane>(*this); }

}  // namespace

std::unique_ptr<Device> OpenCpuDevice() { return std::make_unique<CpuDevice>(); }

}  // namespace tessera
