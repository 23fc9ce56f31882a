// Loads cuBLAS at run time. The library is 500 MB large, and only the strategies `cublas` and
// `cublas_lt` need it. No program is linked with the library. The first use looks for the shared
// library. If it is not found, these strategies report what is missing. Only .cu files include it.
#pragma once

#include <cublasLt.h>
#include <cublas_v2.h>

#include <string>

#include "kernels/device/device.h"

namespace tessera {

// The entry points that are used. cublas_v2.h maps the plain names to the names of the current
// interface (for example cublasCreate to cublasCreate_v2), and cublas_loader.cu uses the same
// mapping. Functions with the suffix _64 accept 64-bit extents.
struct CublasApi {
  decltype(&cublasCreate) create;
  decltype(&cublasDestroy) destroy;
  decltype(&cublasSetStream) set_stream;
  decltype(&cublasSetMathMode) set_math_mode;
  decltype(&cublasSetPointerMode) set_pointer_mode;
  decltype(&cublasGetStatusName) status_name;
  decltype(&cublasSdot_64) sdot;
  decltype(&cublasDdot_64) ddot;
  decltype(&cublasSgemm_64) sgemm;
  decltype(&cublasDgemm_64) dgemm;
  decltype(&cublasGemmEx_64) gemm_ex;
  decltype(&cublasGemmStridedBatchedEx_64) gemm_strided_batched_ex;
  // From cublasLt, which cuBLAS is built on.
  decltype(&cublasLtMatmul) lt_matmul;
  decltype(&cublasLtMatmulDescCreate) lt_desc_create;
  decltype(&cublasLtMatmulDescDestroy) lt_desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) lt_desc_set;
  decltype(&cublasLtMatrixLayoutCreate) lt_layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) lt_layout_destroy;
  decltype(&cublasLtMatmulPreferenceCreate) lt_preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) lt_preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) lt_preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) lt_heuristic;
};

// Returns the entry points, or null if the library or one of them cannot be found. The search runs
// once. Thread safe.
const CublasApi* LoadCublas() noexcept;

// Returns what the cuBLAS strategies need but this host lacks, or an empty string.
std::string CublasMissing(const Device& device);

// Returns the library's constant for a type. REQUIRES: dtype is a floating-point type.
constexpr cudaDataType_t CublasType(DType dtype) {
  return dtype == DType::kF64   ? CUDA_R_64F
         : dtype == DType::kF32 ? CUDA_R_32F
         : dtype == DType::kF16 ? CUDA_R_16F
                                : CUDA_R_16BF;
}

// Throws DeviceError unless status is success. REQUIRES: LoadCublas() is not null.
void CheckCublas(cublasStatus_t status, const char* call);

#define CUBLAS_CHECK(expr) ::tessera::CheckCublas((expr), #expr)

}  // namespace tessera
