// Matmul with cublasLt. The library is the same as in `cublas`, but the algorithm is chosen by
// timing.
//
// `cublas` takes the algorithm that the library's heuristics rank first. cublasLt returns the whole
// ranking, and for products that are far from square the first algorithm is often not the fastest.
// So the first call for a problem times each proposal twice. Later calls for a similar problem (the
// same extents, pitches, transposes, types and alignments) use the fastest. Since the choice
// depends on timing, the bits of a result may differ from one server to the next. This strategy is
// therefore never a default.
//
// As in cublas.cu, a row-major problem is passed as a column-major one with its operands swapped.
// f32 is computed in f32, and partial sums of 16-bit operands are kept in f32.
//
// Cost for 1024 x 1024 x 1024, f32: 2^31 flops. At best each operand is read once, 8 MiB in total,
// and 4 MiB are written.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/cuda/matmul/cublas.h"
#include "kernels/cuda/runtime/cublas_loader.h"
#include "kernels/cuda/runtime/cuda.h"

namespace tessera {
namespace {

constexpr std::size_t kWorkspace = std::size_t{32} << 20;
constexpr int kMostProposals = 8;
// If a product has more multiply-adds than this, a trial takes a tenth of a second, so only the
// first kLongProposals proposals are tried.
constexpr double kLong = 0x1p40;
constexpr int kLongProposals = 3;
// The maximum number of problems whose plans are kept.
constexpr std::size_t kMostPlans = 4096;

template <class T>
using Owned = std::unique_ptr<T, cublasStatus_t (*)(T*)>;

// Returns the largest power of two, up to 256, that divides the address.
std::uint32_t AlignmentOf(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data) | 256;
  return static_cast<std::uint32_t>(address & (~address + 1));
}

Owned<cublasLtMatrixLayoutOpaque_t> MakeLayout(const CublasApi& api, DType dtype, std::int64_t rows,
                                               std::int64_t columns, std::int64_t pitch,
                                               bool transpose) {
  if (transpose) std::swap(rows, columns);
  cublasLtMatrixLayout_t layout = nullptr;
  CUBLAS_CHECK(api.lt_layout_create(&layout, CublasType(dtype), static_cast<std::uint64_t>(rows),
                                    static_cast<std::uint64_t>(columns), pitch));
  return {layout, api.lt_layout_destroy};
}

Owned<cublasLtMatmulDescOpaque_t> MakeDescription(const CublasApi& api, const MatmulProblem& p,
                                                  bool tf32) {
  const bool wide = p.dtype == DType::kF64;
  const cublasComputeType_t compute = wide   ? CUBLAS_COMPUTE_64F
                                      : tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                             : CUBLAS_COMPUTE_32F;
  cublasLtMatmulDesc_t made = nullptr;
  CUBLAS_CHECK(api.lt_desc_create(&made, compute, wide ? CUDA_R_64F : CUDA_R_32F));
  Owned<cublasLtMatmulDescOpaque_t> description(made, api.lt_desc_destroy);
  for (const auto& [which, transpose] : {std::pair{CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_b},
                                         std::pair{CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_a}}) {
    const cublasOperation_t operation = transpose ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(api.lt_desc_set(made, which, &operation, sizeof operation));
  }
  return description;
}

// A cublasLt plan for problems that differ only in their addresses.
class Plan {
 public:
  // Tries the library's proposals on the problem. This writes the result several times. `workspace`
  // has kWorkspace bytes.
  Plan(const MatmulProblem& p, bool tf32, CudaStream& stream, void* workspace)
      : wide_(p.dtype == DType::kF64),
        description_(MakeDescription(*LoadCublas(), p, tf32)),
        first_(MakeLayout(*LoadCublas(), p.dtype, p.n, p.k, p.ldb, p.transpose_b)),
        second_(MakeLayout(*LoadCublas(), p.dtype, p.k, p.m, p.lda, p.transpose_a)),
        result_(MakeLayout(*LoadCublas(), p.out_dtype, p.n, p.m, p.n, false)) {
    std::array<cublasLtMatmulHeuristicResult_t, kMostProposals> proposals;
    int count = Ask(p, stream, proposals);
    const double products =
        static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
    if (products > kLong) count = std::min(count, kLongProposals);
    const Event begin = MakeEvent(/*timed=*/true), end = MakeEvent(/*timed=*/true);
    float best = std::numeric_limits<float>::infinity();
    for (int i = 0; i < count; ++i) {
      const auto& proposal = proposals[static_cast<std::size_t>(i)];
      float shortest = std::numeric_limits<float>::infinity();
      bool works = true;
      for (int pass = 0; pass < 3 && works; ++pass) {  // the first pass loads the kernel
        CUDA_CHECK(cudaEventRecord(begin.get(), stream.handle()));
        works = Enqueue(p, stream, proposal.algo, workspace, proposal.workspaceSize) ==
                CUBLAS_STATUS_SUCCESS;
        CUDA_CHECK(cudaEventRecord(end.get(), stream.handle()));
        CUDA_CHECK(cudaEventSynchronize(end.get()));
        float ms = 0;
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin.get(), end.get()));
        if (pass > 0) shortest = std::min(shortest, ms);
      }
      if (!works || shortest >= best) continue;
      best = shortest;
      algorithm_ = proposal.algo;
      workspace_bytes_ = proposal.workspaceSize;
      found_ = true;
    }
  }

  std::size_t workspace_bytes() const { return workspace_bytes_; }

  void Launch(const MatmulProblem& p, CudaStream& stream, void* workspace) const {
    if (!found_)
      throw DeviceError(DeviceError::Kind::kFailed, "cublasLtMatmulAlgoGetHeuristic",
                        "the library has no algorithm for this product");
    CUBLAS_CHECK(Enqueue(p, stream, algorithm_, workspace, workspace_bytes_));
  }

 private:
  // Fills `proposals` with the library's proposals, the most promising first, and returns their
  // number.
  int Ask(const MatmulProblem& p, CudaStream& stream,
          std::array<cublasLtMatmulHeuristicResult_t, kMostProposals>& proposals) const {
    const CublasApi& api = *LoadCublas();
    cublasLtMatmulPreference_t made = nullptr;
    CUBLAS_CHECK(api.lt_preference_create(&made));
    const Owned<cublasLtMatmulPreferenceOpaque_t> preference(made, api.lt_preference_destroy);
    CUBLAS_CHECK(api.lt_preference_set(made, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspace,
                                       sizeof kWorkspace));
    // Partial sums are not rounded to 16 bits.
    const std::uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    CUBLAS_CHECK(api.lt_preference_set(made, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes,
                                       sizeof schemes));
    for (const auto& [which, data] : {std::pair<cublasLtMatmulPreferenceAttributes_t, const void*>{
                                          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, p.b},
                                      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p.a},
                                      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, p.c},
                                      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, p.c}}) {
      const std::uint32_t alignment = AlignmentOf(data);
      CUBLAS_CHECK(api.lt_preference_set(made, which, &alignment, sizeof alignment));
    }
    int count = 0;
    const cublasStatus_t status = api.lt_heuristic(Handle(stream), description_.get(), first_.get(),
                                                   second_.get(), result_.get(), result_.get(),
                                                   made, kMostProposals, proposals.data(), &count);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return 0;
    CUBLAS_CHECK(status);
    return count;
  }

  cublasStatus_t Enqueue(const MatmulProblem& p, CudaStream& stream,
                         const cublasLtMatmulAlgo_t& algorithm, void* workspace,
                         std::size_t workspace_bytes) const {
    const float one_f32 = 1, zero_f32 = 0;
    const double one_f64 = 1, zero_f64 = 0;
    const void* one = wide_ ? static_cast<const void*>(&one_f64) : &one_f32;
    const void* zero = wide_ ? static_cast<const void*>(&zero_f64) : &zero_f32;
    return LoadCublas()->lt_matmul(Handle(stream), description_.get(), one, p.b, first_.get(), p.a,
                                   second_.get(), zero, p.c, result_.get(), p.c, result_.get(),
                                   &algorithm, workspace, workspace_bytes, stream.handle());
  }

  // A cuBLAS handle is also a valid cublasLt handle.
  static cublasLtHandle_t Handle(CudaStream& stream) {
    return reinterpret_cast<cublasLtHandle_t>(stream.Cublas());
  }

  const bool wide_;
  const Owned<cublasLtMatmulDescOpaque_t> description_;
  const Owned<cublasLtMatrixLayoutOpaque_t> first_, second_, result_;
  cublasLtMatmulAlgo_t algorithm_{};
  std::size_t workspace_bytes_ = 0;  // needed by the algorithm
  bool found_ = false;
};

// Returns everything that a plan depends on.
auto KeyOf(const MatmulProblem& p, bool tf32, const CudaStream& stream) {
  return std::tuple(stream.device().ordinal(), p.dtype, p.out_dtype, p.m, p.n, p.k, p.lda, p.ldb,
                    p.transpose_a, p.transpose_b, AlignmentOf(p.a), AlignmentOf(p.b),
                    AlignmentOf(p.c), tf32);
}
using Key = std::invoke_result_t<decltype(KeyOf), const MatmulProblem&, bool, const CudaStream&>;

// Plans by key. If there are kMostPlans plans, all of them are removed before another plan is
// added.
struct Plans {
  std::mutex mutex;
  std::map<Key, std::shared_ptr<const Plan>> by_key;
};

void Enqueue(const MatmulProblem& p, Stream& stream) { LaunchCublasLt(p, /*tf32=*/false, stream); }

}  // namespace

void LaunchCublasLt(const MatmulProblem& p, bool tf32, Stream& any_stream) {
  static Plans* const plans = new Plans;  // never freed, because the library is never unloaded
  CudaStream& stream = Cuda(any_stream);
  const Key key = KeyOf(p, tf32, stream);
  std::unique_lock lock(plans->mutex);
  if (const auto found = plans->by_key.find(key); found != plans->by_key.end()) {
    const std::shared_ptr<const Plan> plan = found->second;
    lock.unlock();
    return plan->Launch(p, stream, stream.Scratch(plan->workspace_bytes()));
  }
  lock.unlock();
  void* const workspace = stream.Scratch(kWorkspace);
  const auto plan = std::make_shared<const Plan>(p, tf32, stream, workspace);
  lock.lock();
  if (plans->by_key.size() >= kMostPlans) plans->by_key.clear();
  plans->by_key.emplace(key, plan);
  lock.unlock();
  plan->Launch(p, stream, workspace);
}

extern constexpr Strategy<MatmulProblem> kMatmulCublasLt = {
    .name = "cublas_lt",
    .summary = "the library's gemm, with the fastest of the algorithms that it proposes",
    .source = "NVIDIA cublasLt",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32, DType::kF64, DType::kF16, DType::kBF16),
    .deterministic = false,
    .roundoff = CublasRoundoff,
    .cost = CublasCost,
    .launch = Enqueue,
    .missing = CublasMissing,
    .scratch = [](const MatmulProblem&) -> std::uint64_t { return kWorkspace; },
    .vendor = true,
};

}  // namespace tessera
