#include "kernels/bench/product_peers.h"

#include <cublasXt.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cuda/team/shares.h"

namespace tessera::bench {
namespace {

struct XtApi {
  decltype(&cublasXtCreate) create;
  decltype(&cublasXtDestroy) destroy;
  decltype(&cublasXtDeviceSelect) select;
  decltype(&cublasXtSetBlockDim) set_block;
  decltype(&cublasXtSgemm) sgemm;
  decltype(&cublasXtDgemm) dgemm;
};

template <class Function>
bool Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

const XtApi* LoadXt() {
  static XtApi api{};
  void* library =
      dlopen(("libcublas.so." + std::to_string(CUBLAS_VER_MAJOR)).c_str(), RTLD_NOW | RTLD_LOCAL);
  const bool found = library != nullptr && Find(library, "cublasXtCreate", api.create) &&
                     Find(library, "cublasXtDestroy", api.destroy) &&
                     Find(library, "cublasXtDeviceSelect", api.select) &&
                     Find(library, "cublasXtSetBlockDim", api.set_block) &&
                     Find(library, "cublasXtSgemm", api.sgemm) &&
                     Find(library, "cublasXtDgemm", api.dgemm);
  return found ? &api : nullptr;
}

template <class T, class Gemm>
bool Multiply(Gemm gemm, cublasXtHandle_t handle, std::size_t n, const void* a, const void* b,
              void* c) {
  const T one = 1, zero = 0;
  // The library stores matrices by columns, so it computes c' = b' a'.
  return gemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, static_cast<const T*>(b), n,
              static_cast<const T*>(a), n, &zero, static_cast<T*>(c), n) == CUBLAS_STATUS_SUCCESS;
}

}  // namespace

void SetWay(Way way) {
  SetWayOfB(way == Way::kRemote       ? WayOfB::kRemote
            : way == Way::kBeforehand ? WayOfB::kBeforehand
                                      : WayOfB::kChosen);
}

double XtMicroseconds(DType dtype, std::int64_t side, const void* a, const void* b, int count,
                      int rounds) {
  const XtApi* api = LoadXt();
  cublasXtHandle_t handle = nullptr;
  if (api == nullptr || (dtype != DType::kF32 && dtype != DType::kF64) ||
      api->create(&handle) != CUBLAS_STATUS_SUCCESS)
    return 0;
  std::vector<int> ordinals;
  for (int i = 0; i < count; ++i) ordinals.push_back(i);
  bool fine = api->select(handle, count, ordinals.data()) == CUBLAS_STATUS_SUCCESS &&
              api->set_block(handle, 4096) == CUBLAS_STATUS_SUCCESS;
  double best = std::numeric_limits<double>::infinity();
  const auto n = static_cast<std::size_t>(side);
  // Ordinary memory is used, because the library may not support pools.
  void* memory[3] = {};
  cudaSetDevice(0);
  for (void*& one : memory) fine = fine && cudaMalloc(&one, n * n * SizeOf(dtype)) == cudaSuccess;
  for (int i = 0; i < 2; ++i)
    fine = fine && cudaMemcpy(memory[i], i == 0 ? a : b, n * n * SizeOf(dtype),
                              cudaMemcpyDefault) == cudaSuccess;
  for (int i = -1; i < rounds && fine; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    fine = dtype == DType::kF32
               ? Multiply<float>(api->sgemm, handle, n, memory[0], memory[1], memory[2])
               : Multiply<double>(api->dgemm, handle, n, memory[0], memory[1], memory[2]);
    for (int ordinal : ordinals)
      fine =
          fine && cudaSetDevice(ordinal) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
    const std::chrono::duration<double, std::micro> us = std::chrono::steady_clock::now() - begin;
    if (i >= 0) best = std::min(best, us.count());
  }
  api->destroy(handle);
  cudaSetDevice(0);
  for (void* one : memory) cudaFree(one);
  cudaGetLastError();
  return fine ? best : 0;
}

}  // namespace tessera::bench
