#include "kernels/bench/peers.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cub/device/device_reduce.cuh>
#include <cub/device/device_segmented_reduce.cuh>
#include <limits>
#include <string>
#include <utility>

#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include "kernels/cuda/cublas_loader.h"
#include "kernels/cuda/cuda.h"

namespace tessera::bench {
namespace {

// As the strategies do, programs look for the libraries at run time (kernels/cuda/cublas_loader.h).
struct Api {
  decltype(&cublasSnrm2_64) snrm2;
  decltype(&cublasSasum_64) sasum;
  decltype(&cublasSgemmStridedBatched_64) sgemm_strided_batched;
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
};

template <class Function>
bool Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

const Api* Load() {
  static Api api{};
  const std::string version = "so." + std::to_string(CUBLAS_VER_MAJOR);
  void* blas = dlopen(("libcublas." + version).c_str(), RTLD_NOW | RTLD_LOCAL);
  void* lt = dlopen(("libcublasLt." + version).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (blas == nullptr || lt == nullptr) return nullptr;
  const bool found =
      Find(blas, "cublasSnrm2_v2_64", api.snrm2) && Find(blas, "cublasSasum_v2_64", api.sasum) &&
      Find(blas, "cublasSgemmStridedBatched_64", api.sgemm_strided_batched) &&
      Find(lt, "cublasLtCreate", api.create) && Find(lt, "cublasLtMatmul", api.matmul) &&
      Find(lt, "cublasLtMatmulDescCreate", api.desc_create) &&
      Find(lt, "cublasLtMatmulDescSetAttribute", api.desc_set) &&
      Find(lt, "cublasLtMatrixLayoutCreate", api.layout_create) &&
      Find(lt, "cublasLtMatmulPreferenceCreate", api.preference_create) &&
      Find(lt, "cublasLtMatmulPreferenceSetAttribute", api.preference_set) &&
      Find(lt, "cublasLtMatmulAlgoGetHeuristic", api.heuristic);
  return found ? &api : nullptr;
}

const Api& Libraries() {
  static const Api* const api = Load();
  return *api;
}

// Where a row begins.
struct RowBegin {
  std::int64_t length;
  __host__ __device__ std::int64_t operator()(std::int64_t row) const { return row * length; }
};

// One handle for all problems: it brings a workspace of its own.
cublasLtHandle_t LtHandle() {
  static const cublasLtHandle_t handle = [] {
    cublasLtHandle_t made = nullptr;
    CUBLAS_CHECK(Libraries().create(&made));
    return made;
  }();
  return handle;
}

// The largest power of two, up to 256, that the address is a multiple of.
std::uint32_t AlignmentOf(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data) | 256;
  return static_cast<std::uint32_t>(address & (~address + 1));
}

constexpr cudaDataType_t DataType(DType dtype) {
  return dtype == DType::kF64   ? CUDA_R_64F
         : dtype == DType::kF32 ? CUDA_R_32F
         : dtype == DType::kF16 ? CUDA_R_16F
                                : CUDA_R_16BF;
}

}  // namespace

bool HasPeers() { return LoadCublas() != nullptr && Load() != nullptr; }

void LaunchPeer(Peer peer, Stream& stream, const float* x, std::int64_t n) {
  CudaStream& cuda = Cuda(stream);
  auto* value = static_cast<float*>(cuda.Scratch(sizeof(float)));
  if (peer == Peer::kCublasNrm2 || peer == Peer::kCublasAsum) {
    cublasHandle_t handle = cuda.Cublas();
    CUBLAS_CHECK(LoadCublas()->set_pointer_mode(handle, CUBLAS_POINTER_MODE_DEVICE));
    const auto call = peer == Peer::kCublasNrm2 ? Libraries().snrm2 : Libraries().sasum;
    CUBLAS_CHECK(call(handle, n, x, 1, value));
    return;
  }
  auto* index = static_cast<std::int64_t*>(cuda.Scratch(sizeof(std::int64_t)));
  // Each of CUB's calls is made twice: first to ask how much temporary memory it wants.
  void* temporary = nullptr;
  std::size_t bytes = 0;
  const auto call = [&] {
    switch (peer) {
      case Peer::kCubSum:
        return cub::DeviceReduce::Sum(temporary, bytes, x, value, n, cuda.handle());
      case Peer::kCubMax:
        return cub::DeviceReduce::Max(temporary, bytes, x, value, n, cuda.handle());
      default:
        return cub::DeviceReduce::ArgMax(temporary, bytes, x, value, index, n, cuda.handle());
    }
  };
  CUDA_CHECK(call());
  temporary = cuda.Scratch(bytes);
  CUDA_CHECK(call());
}

void LaunchRowSums(Stream& stream, const float* x, std::int64_t rows, std::int64_t length) {
  CudaStream& cuda = Cuda(stream);
  auto* sums = static_cast<float*>(cuda.Scratch(static_cast<std::size_t>(rows) * sizeof(float)));
  const auto begins =
      thrust::make_transform_iterator(thrust::counting_iterator<std::int64_t>(0), RowBegin{length});
  void* temporary = nullptr;
  std::size_t bytes = 0;
  const auto call = [&] {
    return cub::DeviceSegmentedReduce::Sum(temporary, bytes, x, sums, rows, begins, begins + 1,
                                           cuda.handle());
  };
  CUDA_CHECK(call());
  temporary = cuda.Scratch(bytes);
  CUDA_CHECK(call());
}

void LaunchDots(Stream& stream, const float* a, const float* b, std::int64_t count,
                std::int64_t n) {
  CudaStream& cuda = Cuda(stream);
  auto* dots = static_cast<float*>(cuda.Scratch(static_cast<std::size_t>(count) * sizeof(float)));
  cublasHandle_t handle = cuda.Cublas();
  const CublasApi& blas = *LoadCublas();
  CUBLAS_CHECK(blas.set_pointer_mode(handle, CUBLAS_POINTER_MODE_HOST));
  CUBLAS_CHECK(blas.set_math_mode(handle, CUBLAS_PEDANTIC_MATH));
  const float one = 1, zero = 0;
  CUBLAS_CHECK(Libraries().sgemm_strided_batched(handle, CUBLAS_OP_T, CUBLAS_OP_N, 1, 1, n, &one, a,
                                                 n, n, b, n, n, &zero, dots, 1, 1, count));
}

// Descriptions of problems are small and live as long as the benchmark.
struct LtMatmul::State {
  cublasLtHandle_t handle = LtHandle();
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t first = nullptr, second = nullptr, result = nullptr;
  DType dtype = DType::kF32;
  bool tried = false, found = false;
  cublasLtMatmulAlgo_t algorithm{};

  static constexpr std::size_t kWorkspace = std::size_t{32} << 20;

  bool Call(const MatmulProblem& p, CudaStream& stream, const cublasLtMatmulAlgo_t& with) const {
    const float one_f32 = 1, zero_f32 = 0;
    const double one_f64 = 1, zero_f64 = 0;
    const bool wide = dtype == DType::kF64;
    const void* one = wide ? static_cast<const void*>(&one_f64) : &one_f32;
    const void* zero = wide ? static_cast<const void*>(&zero_f64) : &zero_f32;
    return Libraries().matmul(handle, desc, one, p.b, first, p.a, second, zero, p.c, result, p.c,
                              result, &with, stream.Scratch(kWorkspace), kWorkspace,
                              stream.handle()) == CUBLAS_STATUS_SUCCESS;
  }

  void Try(const MatmulProblem& p, CudaStream& stream) {
    const Api& api = Libraries();
    cublasLtMatmulPreference_t preference = nullptr;
    CUBLAS_CHECK(api.preference_create(&preference));
    CUBLAS_CHECK(api.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                    &kWorkspace, sizeof kWorkspace));
    // Parts of a sum are not rounded to 16 bits, as in the strategy `cublas`.
    const std::uint32_t schemes =
        CUBLASLT_REDUCTION_SCHEME_INPLACE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    CUBLAS_CHECK(api.preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                    &schemes, sizeof schemes));
    // a and b change places.
    const std::pair<cublasLtMatmulPreferenceAttributes_t, const void*> places[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, p.b},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p.a},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, p.c},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, p.c}};
    for (const auto& [which, data] : places) {
      const std::uint32_t alignment = AlignmentOf(data);
      CUBLAS_CHECK(api.preference_set(preference, which, &alignment, sizeof alignment));
    }
    std::array<cublasLtMatmulHeuristicResult_t, 8> proposals;
    int count = 0;
    if (api.heuristic(handle, desc, first, second, result, result, preference,
                      static_cast<int>(proposals.size()), proposals.data(),
                      &count) != CUBLAS_STATUS_SUCCESS)
      count = 0;
    // The order is the library's guess; of products that take a tenth of a second it has to do.
    const double products =
        static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
    if (products > 0x1p40) count = std::min(count, 3);
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < count; ++i) {
      const auto& with = proposals[static_cast<std::size_t>(i)].algo;
      double shortest = std::numeric_limits<double>::infinity();
      bool works = true;
      for (int pass = 0; pass < 3 && works; ++pass) {  // the first loads the kernel
        stream.Reset();
        stream.StartTimer();
        works = Call(p, stream, with);
        const double us = stream.StopTimer();
        if (pass > 0) shortest = std::min(shortest, us);
      }
      if (!works || shortest >= best) continue;
      best = shortest;
      algorithm = with;
      found = true;
    }
    tried = true;
  }
};

// Row-major operands read as columns, so that they change places: kernels/cuda/matmul/cublas.cu.
LtMatmul::LtMatmul(const MatmulProblem& like, bool tf32) : state_(std::make_unique<State>()) {
  const Api& api = Libraries();
  State& s = *state_;
  s.dtype = like.dtype;
  const cublasComputeType_t compute = like.dtype == DType::kF64   ? CUBLAS_COMPUTE_64F
                                      : like.dtype != DType::kF32 ? CUBLAS_COMPUTE_32F
                                      : tf32                      ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                  : CUBLAS_COMPUTE_32F_PEDANTIC;
  CUBLAS_CHECK(
      api.desc_create(&s.desc, compute, like.dtype == DType::kF64 ? CUDA_R_64F : CUDA_R_32F));
  const auto turn = [&](cublasLtMatmulDescAttributes_t which, bool transpose) {
    const cublasOperation_t operation = transpose ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(api.desc_set(s.desc, which, &operation, sizeof operation));
  };
  turn(CUBLASLT_MATMUL_DESC_TRANSA, like.transpose_b);
  turn(CUBLASLT_MATMUL_DESC_TRANSB, like.transpose_a);
  const auto layout = [&](cublasLtMatrixLayout_t& made, DType dtype, std::int64_t rows,
                          std::int64_t columns, std::int64_t pitch, bool transpose) {
    if (transpose) std::swap(rows, columns);
    CUBLAS_CHECK(api.layout_create(&made, DataType(dtype), static_cast<std::uint64_t>(rows),
                                   static_cast<std::uint64_t>(columns), pitch));
  };
  layout(s.first, like.dtype, like.n, like.k, like.ldb, like.transpose_b);
  layout(s.second, like.dtype, like.k, like.m, like.lda, like.transpose_a);
  layout(s.result, like.out_dtype, like.n, like.m, like.n, false);
}

LtMatmul::~LtMatmul() = default;

bool LtMatmul::Launch(const MatmulProblem& problem, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  if (!state_->tried) state_->Try(problem, cuda);
  return state_->found && state_->Call(problem, cuda, state_->algorithm);
}

}  // namespace tessera::bench
