#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

#include "client/bench/naive_device.h"
#include "kernels/cuda/runtime/cublas_loader.h"

namespace tessera::bench {
namespace {

void Check(bool ok, const char* call) {
  if (ok) return;
  std::fprintf(stderr, "service_bench: %s failed\n", call);
  std::_Exit(1);
}

#define NAIVE_CUDA(expr) Check((expr) == cudaSuccess, #expr)
#define NAIVE_CUBLAS(expr) Check((expr) == CUBLAS_STATUS_SUCCESS, #expr)

// The stream and the cuBLAS handle that a thread uses while it computes. Creating a handle takes
// milliseconds and gRPC's threads are short-lived, so the threads share a pool of workers.
struct Worker {
  explicit Worker(const CublasApi& api) : cublas(api) {
    NAIVE_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    NAIVE_CUBLAS(cublas.create(&handle));
    NAIVE_CUBLAS(cublas.set_stream(handle, stream));
  }
  ~Worker() {
    cublas.destroy(handle);
    cudaStreamDestroy(stream);
  }
  const CublasApi& cublas;
  cudaStream_t stream = nullptr;
  cublasHandle_t handle = nullptr;
};

class Cuda final : public NaiveDevice {
 public:
  explicit Cuda(const CublasApi& cublas) : cublas_(cublas) {}
  const char* name() const override { return "cuBLAS"; }
  std::shared_ptr<float> Allocate(std::size_t elements) override {
    void* memory = nullptr;
    NAIVE_CUDA(cudaMalloc(&memory, elements * sizeof(float)));
    return {static_cast<float*>(memory), cudaFree};
  }
  std::shared_ptr<char> AllocatePinned(std::size_t bytes) override {
    void* memory = nullptr;
    NAIVE_CUDA(cudaMallocHost(&memory, bytes));
    return {static_cast<char*>(memory), cudaFreeHost};
  }
  void Copy(void* to, const void* from, std::size_t bytes) override {
    NAIVE_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
  }
  float Dot(const float* a, const float* b, std::int64_t elements) override {
    std::unique_ptr<Worker> worker = Take();
    float result = 0;  // cuBLAS waits for the result, because it is in host memory
    NAIVE_CUBLAS(cublas_.sdot(worker->handle, elements, a, 1, b, 1, &result));
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(worker));
    return result;
  }

 private:
  std::unique_ptr<Worker> Take() {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        std::unique_ptr<Worker> worker = std::move(idle_.back());
        idle_.pop_back();
        return worker;
      }
    }
    return std::make_unique<Worker>(cublas_);
  }

  const CublasApi& cublas_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Worker>> idle_;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<NaiveDevice> NaiveCuda() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return nullptr;
  const CublasApi* cublas = LoadCublas();
  return cublas == nullptr ? nullptr : std::make_unique<Cuda>(*cublas);
}

}  // namespace tessera::bench
