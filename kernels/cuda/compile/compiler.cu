#include "kernels/cuda/compile/compiler.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/runtime/driver.h"

namespace tessera::compiled {
namespace {

// The maximum number of kernels in a process, so that a client that keeps sending new expressions
// cannot fill the process's memory. A further kernel replaces the one that was last used longest
// ago.
constexpr std::size_t kMostKernels = 1024;
// The longest text that is compiled, in bytes. CUDA's assembler needs less than a second for this
// length, but 19 s and 0.9 GB for 62 floor divisions of bf16, which are 2 MB of text.
constexpr std::size_t kMostText = std::size_t{256} << 10;
// The maximum number of texts that wait to be compiled, so that no text waits behind hundreds of
// others. If the queue is full, an expression is not compiled until its next use.
constexpr std::size_t kMostWaiting = 32;
// The maximum number of plans that are remembered after their first use.
constexpr std::size_t kMostSeen = 4096;

// Returns the machine code of the text for the current device, or nullopt if the text is too long
// or the driver cannot compile it.
std::optional<std::string> Compile(const std::string& text) {
  if (text.size() > kMostText) return std::nullopt;
  try {
    const auto create = DriverFunction<decltype(&cuLinkCreate)>("cuLinkCreate", 6050);
    const auto add = DriverFunction<decltype(&cuLinkAddData)>("cuLinkAddData", 6050);
    const auto complete = DriverFunction<decltype(&cuLinkComplete)>("cuLinkComplete", 5050);
    const auto destroy = DriverFunction<decltype(&cuLinkDestroy)>("cuLinkDestroy", 5050);
    CUlinkState link = nullptr;
    if (create(0, nullptr, nullptr, &link) != CUDA_SUCCESS) return std::nullopt;
    void* image = nullptr;
    std::size_t bytes = 0;
    std::optional<std::string> code;
    // The terminating zero belongs to the input.
    if (add(link, CU_JIT_INPUT_PTX, const_cast<char*>(text.c_str()), text.size() + 1, kKernelName,
            0, nullptr, nullptr) == CUDA_SUCCESS &&
        complete(link, &image, &bytes) == CUDA_SUCCESS)
      code.emplace(static_cast<const char*>(image), bytes);
    destroy(link);
    return code;
  } catch (const DeviceError&) {
    return std::nullopt;
  }
}

// A kernel for devices of one compute capability.
class Kernel {
 public:
  explicit Kernel(std::string code) : code_(std::move(code)) {}

  // Loads the kernel for launches on the device. Returns null if it cannot be loaded. If memory ran
  // out, the next call retries.
  cudaKernel_t Load(int device) {
    const std::lock_guard lock(mutex_);
    devices_.insert(device);
    if (kernel_ != nullptr || broken_) return kernel_;
    cudaError_t error =
        cudaLibraryLoadData(&library_, code_.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (error == cudaSuccess) error = cudaLibraryGetKernel(&kernel_, library_, kKernelName);
    if (error != cudaSuccess) {
      kernel_ = nullptr;
      broken_ = error != cudaErrorMemoryAllocation;
      (void)cudaGetLastError();
    }
    return kernel_;
  }

  // Frees the devices' memory once all launches have ended. REQUIRES: no call launches the kernel.
  void Unload() {
    for (int device : devices_)
      if (cudaSetDevice(device) != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) return;
    if (library_ != nullptr) (void)cudaLibraryUnload(library_);
  }

 private:
  const std::string code_;
  std::mutex mutex_;
  bool broken_ = false;
  std::set<int> devices_;
  cudaLibrary_t library_ = nullptr;
  cudaKernel_t kernel_ = nullptr;
};

// All kernels of the process. Thread safe.
class Kernels {
 public:
  // The driver loads its compiler on first use, and at process exit libraries are destroyed in the
  // reverse order of loading. Because the compiler is loaded here, ~Kernels, which waits for the
  // thread that compiles, runs before the compiler is destroyed.
  Kernels() { dlopen("libnvidia-ptxjitcompiler.so.1", RTLD_NOW | RTLD_LOCAL); }

  static Kernels& All() {
    static Kernels all;
    return all;
  }

  ~Kernels() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    wake_.notify_all();
    if (worker_.joinable()) worker_.join();
  }

  void CompileBeforeUse(bool on) {
    const std::lock_guard lock(mutex_);
    before_use_ = on;
  }

  // Returns null if the kernel is not compiled yet or cannot be compiled. Throws if memory runs out
  // or no thread can be started.
  std::shared_ptr<Kernel> Find(const KernelPlan& plan, const CudaDevice& device) {
    std::string key = KeyOf(plan);
    key.push_back(static_cast<char>(device.info().compute_capability));
    std::unique_lock lock(mutex_);
    if (const auto known = kernels_.find(key); known != kernels_.end()) {
      known->second.last_use = ++uses_;
      return known->second.kernel;
    }
    if (!worker_.joinable()) worker_ = std::thread([this] { Work(); });
    if (before_use_) {
      lock.unlock();
      std::shared_ptr<Kernel> made = Make(plan);
      lock.lock();
      return Put(std::move(key), std::move(made));
    }
    if (seen_.size() >= kMostSeen) seen_.clear();
    if (seen_.insert(key).second || jobs_.size() >= kMostWaiting) return nullptr;
    seen_.erase(key);
    Put(key, nullptr);
    jobs_.push_back({std::move(key), plan, *plan.program, device.ordinal()});
    wake_.notify_one();
    return nullptr;
  }

 private:
  struct Job {
    std::string key;
    KernelPlan plan;
    MapProgram program;  // the program that the plan points to
    int device;
  };

  struct Entry {
    std::shared_ptr<Kernel> kernel;  // null while it is being compiled or if it cannot be compiled
    std::uint64_t last_use;
  };

  static std::shared_ptr<Kernel> Make(const KernelPlan& plan) {
    std::optional<std::string> code = Compile(KernelText(plan));
    return code ? std::make_shared<Kernel>(*std::move(code)) : nullptr;
  }

  // Stores the kernel and returns it. REQUIRES: mutex_ is held.
  std::shared_ptr<Kernel> Put(std::string key, std::shared_ptr<Kernel> made) {
    kernels_[std::move(key)] = {made, ++uses_};
    if (kernels_.size() > kMostKernels) {
      const auto oldest = std::ranges::min_element(
          kernels_, {}, [](const auto& entry) { return entry.second.last_use; });
      if (oldest->second.kernel != nullptr) replaced_.push_back(std::move(oldest->second.kernel));
      kernels_.erase(oldest);
      wake_.notify_one();
    }
    return made;
  }

  // Returns the position of a replaced kernel that no call launches any more, or replaced_.size().
  std::size_t Unused() const {
    return static_cast<std::size_t>(
        std::ranges::find(replaced_, 1, &std::shared_ptr<Kernel>::use_count) - replaced_.begin());
  }

  void Work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return ends_ || !jobs_.empty() || Unused() < replaced_.size(); });
      if (ends_) return;
      if (const std::size_t unused = Unused(); unused < replaced_.size()) {
        std::swap(replaced_[unused], replaced_.back());
        const std::shared_ptr<Kernel> kernel = std::move(replaced_.back());
        replaced_.pop_back();
        lock.unlock();
        kernel->Unload();
        lock.lock();
        continue;
      }
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job.plan.program = &job.program;
      std::shared_ptr<Kernel> made;
      try {
        if (cudaSetDevice(job.device) == cudaSuccess) made = Make(job.plan);
      } catch (const std::exception&) {  // out of memory: the plan gets no kernel
      }
      lock.lock();
      try {
        Put(std::move(job.key), std::move(made));
      } catch (const std::bad_alloc&) {  // the plan gets no kernel, or no kernel is replaced
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::unordered_map<std::string, Entry> kernels_;
  std::vector<std::shared_ptr<Kernel>> replaced_;
  std::uint64_t uses_ = 0;
  std::unordered_set<std::string> seen_;
  std::deque<Job> jobs_;
  bool ends_ = false;
  bool before_use_ = false;
  std::thread worker_;
};

std::atomic<std::int64_t> launches{0};

}  // namespace

bool Launch(const KernelPlan& plan, const Arguments& arguments, std::uint32_t blocks,
            std::uint32_t threads, CudaStream& stream) {
  std::shared_ptr<Kernel> kernel;
  try {
    kernel = Kernels::All().Find(plan, stream.device());
  } catch (const std::exception&) {
    return false;
  }
  if (kernel == nullptr) return false;
  const cudaStream_t handle = stream.handle();
  const cudaKernel_t function = kernel->Load(stream.device().ordinal());
  if (function == nullptr) return false;
  void* parameters[] = {const_cast<Arguments*>(&arguments)};
  // The device may lack memory for the kernel's code. If there is another error, the strategy that
  // runs instead reports it.
  if (cudaLaunchKernel(reinterpret_cast<const void*>(function), blocks, threads, parameters, 0,
                       handle) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  launches.fetch_add(1, std::memory_order_relaxed);
  return true;
}

void CompileBeforeUse(bool on) { Kernels::All().CompileBeforeUse(on); }
std::int64_t Launches() { return launches.load(std::memory_order_relaxed); }

}  // namespace tessera::compiled
