#include "kernels/cuda/runtime/cublas_loader.h"

#include <dlfcn.h>

#include <optional>

#include "kernels/cuda/runtime/cuda.h"

// There are two levels, so that macros are expanded before they are quoted.
#define TESSERA_QUOTE(x) #x
#define TESSERA_QUOTE_EXPANDED(x) TESSERA_QUOTE(x)

namespace tessera {
namespace {

// The library must have the header's major version, because the header's types cross the interface.
constexpr char kSoname[] = "libcublas.so." TESSERA_QUOTE_EXPANDED(CUBLAS_VER_MAJOR);

template <class Function>
bool Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

std::optional<CublasApi> Load() {
  // The library is never closed. Like a linked library, it stays loaded as long as the process
  // runs.
  void* library = dlopen(kSoname, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::nullopt;
  CublasApi api{};
#define FIND(member, function) Find(library, TESSERA_QUOTE_EXPANDED(function), api.member)
  if (FIND(create, cublasCreate) && FIND(destroy, cublasDestroy) &&
      FIND(set_stream, cublasSetStream) && FIND(set_math_mode, cublasSetMathMode) &&
      FIND(set_pointer_mode, cublasSetPointerMode) && FIND(status_name, cublasGetStatusName) &&
      FIND(sdot, cublasSdot_64) && FIND(ddot, cublasDdot_64) && FIND(sgemm, cublasSgemm_64) &&
      FIND(dgemm, cublasDgemm_64) && FIND(gemm_ex, cublasGemmEx_64) &&
      FIND(gemm_strided_batched_ex, cublasGemmStridedBatchedEx_64) &&
      // dlsym also searches the library's dependencies, and cublasLt is one of them.
      FIND(lt_matmul, cublasLtMatmul) && FIND(lt_desc_create, cublasLtMatmulDescCreate) &&
      FIND(lt_desc_destroy, cublasLtMatmulDescDestroy) &&
      FIND(lt_desc_set, cublasLtMatmulDescSetAttribute) &&
      FIND(lt_layout_create, cublasLtMatrixLayoutCreate) &&
      FIND(lt_layout_destroy, cublasLtMatrixLayoutDestroy) &&
      FIND(lt_preference_create, cublasLtMatmulPreferenceCreate) &&
      FIND(lt_preference_destroy, cublasLtMatmulPreferenceDestroy) &&
      FIND(lt_preference_set, cublasLtMatmulPreferenceSetAttribute) &&
      FIND(lt_heuristic, cublasLtMatmulAlgoGetHeuristic))
    return api;
#undef FIND
  return std::nullopt;
}

}  // namespace

const CublasApi* LoadCublas() noexcept {
  static const std::optional<CublasApi> api = Load();
  return api ? &*api : nullptr;
}

std::string CublasMissing(const Device&) {
  return LoadCublas() != nullptr ? "" : std::string(kSoname) + " on the library path";
}

void CheckCublas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) [[likely]]
    return;
  // If a CUDA error caused the failure, its kind says whether the device is still usable.
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    ThrowCudaError(error, call);
  throw DeviceError(status == CUBLAS_STATUS_ALLOC_FAILED ? DeviceError::Kind::kOutOfMemory
                                                         : DeviceError::Kind::kFailed,
                    call, LoadCublas()->status_name(status));
}

}  // namespace tessera
