// Matmul with OpenBLAS. The library uses cache blocks, register tiles and vector code for the
// processor on which it runs, and it uses all cores.
//
// Its interface takes 32-bit extents, so larger extents are computed in slabs of 2^30; along k the
// slabs accumulate into c. A call cannot be stopped, so a long product is also computed in slabs of
// rows or columns of c. The number of slabs depends only on the extents. The library may use
// different code for a slab than for the whole product, with different roundings.
//
// The library computes a small product on one core, so the small products of a stack are divided
// among the cores.
#include <cblas.h>

#include <algorithm>

#include "kernels/device/device.h"
#include "kernels/problem/matmul.h"

namespace tessera {
namespace {

constexpr std::int64_t kSlab = std::int64_t{1} << 30;
// kLong: the maximum number of multiply-adds of a product that is computed in one call (0.2 s on
// two cores). kSlabWork: the number of multiply-adds in a slab of a longer product (40 ms, so that
// the cost of starting a slab does not matter).
constexpr double kLong = 0x1p33, kSlabWork = 0x1p31;
// The number of rows or columns in a slab is a multiple of this, which is several register tiles on
// any processor.
constexpr std::int64_t kSlabUnit = 64;
// The maximum number of multiply-adds of a product that the library computes on one core, and the
// number for which waking the other cores is worthwhile.
constexpr double kOneCore = 0x1p18, kManyCores = 0x1p19;

double WorkOf(const MatmulProblem& p) {
  return static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
}

int Int(std::int64_t extent) { return static_cast<int>(extent); }

void Gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, const float* a, int lda,
          const float* b, int ldb, float beta, float* c, int ldc) {
  cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, 1.0f, a, lda, b, ldb, beta, c, ldc);
}
void Gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, const double* a, int lda,
          const double* b, int ldb, double beta, double* c, int ldc) {
  cblas_dgemm(CblasRowMajor, ta, tb, m, n, k, 1.0, a, lda, b, ldb, beta, c, ldc);
}

// The numbers of rows and columns of c that one call computes.
struct Slabs {
  std::int64_t rows = kSlab, columns = kSlab;
};

Slabs SlabsOf(const MatmulProblem& p) {
  Slabs slabs;
  const double work = WorkOf(p);
  if (work <= kLong) return slabs;
  const std::int64_t extent = std::max(p.m, p.n);
  const auto part = static_cast<std::int64_t>(static_cast<double>(extent) * (kSlabWork / work));
  const std::int64_t slab = std::max<std::int64_t>(1, part / kSlabUnit) * kSlabUnit;
  (p.m >= p.n ? slabs.rows : slabs.columns) = std::min(slab, kSlab);
  return slabs;
}

template <class T>
void Run(const MatmulProblem& p, const Stream& stream) {
  const auto* a = static_cast<const T*>(p.a);
  const auto* b = static_cast<const T*>(p.b);
  auto* c = static_cast<T*>(p.c);
  const auto ta = p.transpose_a ? CblasTrans : CblasNoTrans;
  const auto tb = p.transpose_b ? CblasTrans : CblasNoTrans;
  const Slabs slabs = SlabsOf(p);
  for (std::int64_t i = 0; i < p.m; i += slabs.rows) {
    for (std::int64_t j = 0; j < p.n; j += slabs.columns) {
      for (std::int64_t l = 0; l < p.k; l += kSlab) {
        if (stream.stopped()) return;
        const T* a_slab = p.transpose_a ? a + l * p.lda + i : a + i * p.lda + l;
        const T* b_slab = p.transpose_b ? b + j * p.ldb + l : b + l * p.ldb + j;
        Gemm(ta, tb, Int(std::min(slabs.rows, p.m - i)), Int(std::min(slabs.columns, p.n - j)),
             Int(std::min(kSlab, p.k - l)), a_slab, Int(p.lda), b_slab, Int(p.ldb),
             l == 0 ? T(0) : T(1), c + i * p.n + j, Int(p.n));
      }
    }
  }
}

template <class T>
void RunStack(const MatmulProblem& p, const Stream& stream) {
  if (std::max({p.lda, p.ldb, p.n}) > std::int64_t{INT32_MAX}) {
    throw DeviceError(DeviceError::Kind::kFailed, "cblas_gemm",
                      "the row pitch is above 2^31 - 1 elements");
  }
  const double work = WorkOf(p);
#pragma omp parallel for schedule(static) if (work <= kOneCore && \
                                              static_cast <double>(p.stack) * work > kManyCores)
  for (std::int64_t i = 0; i < p.stack; ++i)
    if (!stream.stopped()) Run<T>(ProductOf(p, i), stream);
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulCpuLibrary = {
    .name = "cpu_library",
    .summary = "OpenBLAS gemm",
    .source = "OpenBLAS",
    .dtypes = DTypesOf(DType::kF32, DType::kF64),  // the split among threads may depend on the load
    // The bound holds for any order of k products and k - 1 additions in the operands' own type.
    .roundoff =
        [](const MatmulProblem& p) {
          return (static_cast<double>(p.k) + 1) *
                 (p.dtype == DType::kF32 ? kRoundoffF32 : kRoundoffF64);
        },
    .cost =
        [](const MatmulProblem& p) {
          const auto m = static_cast<std::uint64_t>(p.m), n = static_cast<std::uint64_t>(p.n),
                     k = static_cast<std::uint64_t>(p.k);
          return Cost{.bytes = (m * k + k * n + m * n) * SizeOf(p.dtype),
                      .flops = 2 * m * n * k,
                      .depth = k};
        },
    .launch =
        [](const MatmulProblem& p, Stream& stream) {
          p.dtype == DType::kF32 ? RunStack<float>(p, stream) : RunStack<double>(p, stream);
        },
    .vendor = true,
    .stacks = true,
};

}  // namespace tessera
