// The free memory that the system reports, in any version of cgroups, and allocated memory.
#include "kernels/device/host_memory.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "kernels/compute.h"
#include "kernels/cpu/runtime/host_threads.h"

extern "C" int openblas_get_num_threads();

namespace tessera {
namespace {

class Root {
 public:
  Root() {
    std::string name = (std::filesystem::temp_directory_path() / "host_memory_XXXXXX").string();
    path_ = mkdtemp(name.data());
    Write("/proc/meminfo", "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  600 kB\n");
  }
  ~Root() { std::filesystem::remove_all(path_); }
  void Write(const std::string& file, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(path_ + file).parent_path());
    std::ofstream(path_ + file) << text;
  }
  HostMemory Read() const { return ReadHostMemory(path_); }
  int Quota() const { return ReadCpuQuota(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(HostMemoryTest, WithoutControlGroups) {
  EXPECT_EQ(Root().Read().total, 1000u * 1024);
  EXPECT_EQ(Root().Read().free, 600u * 1024);
}

TEST(HostMemoryTest, Version2CountsTheFilesThatCanBeDropped) {
  Root root;
  root.Write("/proc/self/cgroup", "0::/\n");
  root.Write("/sys/fs/cgroup/memory.max", "500000\n");
  root.Write("/sys/fs/cgroup/memory.current", "450000\n");
  root.Write("/sys/fs/cgroup/memory.stat", "anon 1\ninactive_file 100000\n");
  EXPECT_EQ(root.Read().total, 500000u);
  EXPECT_EQ(root.Read().free, 150000u);
}

TEST(HostMemoryTest, Version2ObeysEveryGroupAround) {
  Root root;
  root.Write("/proc/self/cgroup", "0::/a/b\n");
  root.Write("/sys/fs/cgroup/a/memory.max", "300000\n");
  root.Write("/sys/fs/cgroup/a/memory.current", "290000\n");
  root.Write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  root.Write("/sys/fs/cgroup/a/b/memory.current", "1000\n");
  EXPECT_EQ(root.Read().total, 300000u);
  EXPECT_EQ(root.Read().free, 10000u);
  root.Write("/sys/fs/cgroup/a/memory.current", "310000\n");
  EXPECT_EQ(root.Read().free, 0u);
}

TEST(HostMemoryTest, Version1) {
  Root root;
  root.Write("/proc/self/cgroup", "4:memory:/docker/x\n1:cpu:/docker/x\n0::/\n");
  // Inside a container, the path is that of the host, but the mount is the cgroup itself.
  root.Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "400000\n");
  root.Write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "150000\n");
  EXPECT_EQ(root.Read().total, 400000u);
  EXPECT_EQ(root.Read().free, 250000u);
  root.Write("/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "9223372036854771712\n");
  root.Write("/sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes", "1\n");
  EXPECT_EQ(root.Read().free, 250000u);
}

TEST(HostMemoryTest, AQuotaOfProcessorTimeIsRoundedUpToCores) {
  Root root;
  EXPECT_EQ(root.Quota(), 0);
  root.Write("/proc/self/cgroup", "0::/a/b\n");
  root.Write("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(root.Quota(), 0);
  root.Write("/sys/fs/cgroup/a/b/cpu.max", "250000 100000\n");
  EXPECT_EQ(root.Quota(), 3);
  // The smallest quota of the cgroup and its ancestors applies.
  root.Write("/sys/fs/cgroup/a/cpu.max", "50000 100000\n");
  EXPECT_EQ(root.Quota(), 1);
}

TEST(HostMemoryTest, AQuotaOfVersion1) {
  Root root;
  root.Write("/proc/self/cgroup", "5:cpuset:/x\n4:cpu,cpuacct:/docker/x\n");
  // Inside a container, the path is that of the host, but the mount is the cgroup itself.
  root.Write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  root.Write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(root.Quota(), 0);
  root.Write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "400000\n");
  EXPECT_EQ(root.Quota(), 4);
  root.Write("/sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us", "150000\n");
  root.Write("/sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(root.Quota(), 2);
  root.Write("/proc/self/cgroup", "4:cpu,cpuacct:/pod:cri:y\n");
  root.Write("/sys/fs/cgroup/cpu/pod:cri:y/cpu.cfs_quota_us", "50000\n");
  root.Write("/sys/fs/cgroup/cpu/pod:cri:y/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(root.Quota(), 1);
}

TEST(HostMemoryTest, LoopsAndOpenBlasObeyTheQuota) {
  Root root;
  root.Write("/proc/self/cgroup", "0::/\n");
  root.Write("/sys/fs/cgroup/cpu.max", "50000 100000\n");
  EXPECT_EQ(LimitThreads(root.path()), 1);
  EXPECT_EQ(openblas_get_num_threads(), 1);
}

TEST(HostMemoryTest, AllocationsAreThereAtOnceAndAligned) {
  for (std::size_t bytes : {std::size_t{1}, std::size_t{100000}, (std::size_t{256} << 10) - 1,
                            std::size_t{256} << 10, (std::size_t{37} << 20) + 1}) {
    void* memory = AllocateHost(bytes);
    ASSERT_NE(memory, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 256, 0u);
    if (bytes >= std::size_t{256} << 10) {
      std::vector<unsigned char> resident((bytes + 4095) / 4096);
      ASSERT_EQ(mincore(memory, bytes, resident.data()), 0);
      EXPECT_TRUE(std::all_of(resident.begin(), resident.end(),
                              [](unsigned char page) { return (page & 1) != 0; }));
    }
    FreeHost(memory);
  }
}

TEST(HostMemoryTest, WhatIsNotFreeIsRefused) {
  const HostMemory memory = ReadHostMemory();
  EXPECT_GT(memory.free, 0u);
  EXPECT_LE(memory.free, memory.total);
  EXPECT_EQ(AllocateHost(memory.total), nullptr);
  EXPECT_EQ(AllocateHost(SIZE_MAX), nullptr);
}

TEST(HostMemoryTest, RoundsAsItAllocates) {
  EXPECT_EQ(HostAllocationBytes(1), 256u);
  EXPECT_EQ(HostAllocationBytes(256), 256u);
  EXPECT_EQ(HostAllocationBytes((1 << 20) + 1), (std::size_t{1} << 20) + 4096);
  EXPECT_EQ(HostAllocationBytes(SIZE_MAX), SIZE_MAX);
  EXPECT_EQ((*OpenDevice("cpu"))->AllocationBytes(1), 256u);
}

}  // namespace
}  // namespace tessera
