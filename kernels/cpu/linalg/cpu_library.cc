// Linalg by the LAPACK that OpenBLAS contains, with the routines that NumPy calls.
//
// LAPACK's matrices are column-major, so each matrix is transposed before the call, and the result
// after it. Cost for a system of n equations: the transposition moves 2 n^2 elements, and the
// library computes 2 n^3 / 3 operations on blocks that fit in caches.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "kernels/cpu/linalg/lapack.h"
#include "kernels/cpu/linalg/stack.h"
#include "kernels/problem/linalg.h"

// LAPACK's routines have no header in the distribution. gfortran passes the lengths of the strings
// after all other arguments.
extern "C" {
#define TESSERA_LAPACK(s, T)                                                                     \
  void s##potrf_(const char*, const int*, T*, const int*, int*, std::size_t);                    \
  void s##gesv_(const int*, const int*, T*, const int*, int*, T*, const int*, int*);             \
  void s##getrf_(const int*, const int*, T*, const int*, int*, int*);                            \
  void s##syevd_(const char*, const char*, const int*, T*, const int*, T*, T*, const int*, int*, \
                 const int*, int*, std::size_t, std::size_t);                                    \
  void s##geqrf_(const int*, const int*, T*, const int*, T*, T*, const int*, int*);              \
  void s##orgqr_(const int*, const int*, const int*, T*, const int*, const T*, T*, const int*,   \
                 int*);                                                                          \
  void s##gesdd_(const char*, const int*, const int*, T*, const int*, T*, T*, const int*, T*,    \
                 const int*, T*, const int*, int*, int*, std::size_t);
TESSERA_LAPACK(s, float)
TESSERA_LAPACK(d, double)
#undef TESSERA_LAPACK
}

namespace tessera {
namespace {

template <class T>
struct Routines;
#define TESSERA_ROUTINES(T, s)                \
  template <>                                 \
  struct Routines<T> {                        \
    static constexpr auto kPotrf = s##potrf_; \
    static constexpr auto kGesv = s##gesv_;   \
    static constexpr auto kGetrf = s##getrf_; \
    static constexpr auto kSyevd = s##syevd_; \
    static constexpr auto kGeqrf = s##geqrf_; \
    static constexpr auto kOrgqr = s##orgqr_; \
    static constexpr auto kGesdd = s##gesdd_; \
  };
TESSERA_ROUTINES(float, s)
TESSERA_ROUTINES(double, d)
#undef TESSERA_ROUTINES

// The elements of scratch memory for one matrix: the matrix, other column-major matrices, and the
// workspace that the routine needs with blocks of kPanel columns.
struct Work {
  static constexpr std::int64_t kPanel = 64;
  std::int64_t matrix = 0, others = 0, space = 0, integers = 0;

  explicit Work(const LinalgProblem& p) : matrix(p.m * p.n) {
    const std::int64_t m = p.m, n = p.n, k = p.least();
    switch (p.function) {
      case LinalgFunction::kSolve:
        others = n * p.columns;
        integers = n;
        break;
      case LinalgFunction::kInverse:
        others = n * n;
        integers = n;
        break;
      case LinalgFunction::kDeterminant:
        integers = n;
        break;
      case LinalgFunction::kEigh:
        others = n;
        space = 1 + 6 * n + 2 * n * n + kPanel * n;
        integers = 3 + 5 * n;
        break;
      case LinalgFunction::kQr:
        others = k;
        space = kPanel * std::max<std::int64_t>(1, n);
        break;
      case LinalgFunction::kSvd:
        others = m * k + k + k * n;
        space = 4 * k * k + 7 * k + kPanel * (m + n) + 1;
        integers = 8 * k;
        break;
      default:
        break;
    }
  }
  std::int64_t elements() const { return matrix + others + space; }
  std::uint64_t bytes(std::size_t size) const {
    const auto all = static_cast<std::uint64_t>(elements()) * size +
                     static_cast<std::uint64_t>(integers) * sizeof(int);
    return (all + 63) / 64 * 64;
  }
};

// Copies x[rows, columns] to out[columns, rows], in tiles that fit in the nearest cache.
template <class T>
void Transpose(const T* x, std::int64_t rows, std::int64_t columns, T* out) {
  constexpr std::int64_t kTile = 32;
  for (std::int64_t r = 0; r < rows; r += kTile)
    for (std::int64_t c = 0; c < columns; c += kTile)
      for (std::int64_t i = r; i < std::min(rows, r + kTile); ++i)
        for (std::int64_t j = c; j < std::min(columns, c + kTile); ++j)
          out[j * rows + i] = x[i * columns + j];
}

// Whether all elements that the routine reads are finite. Its iterations need not end otherwise.
template <class T>
bool IsFinite(const LinalgProblem& p, const T* x) {
  for (std::int64_t i = 0; i < p.m; ++i) {
    const std::int64_t end = p.function == LinalgFunction::kEigh ? i + 1 : p.n;
    for (std::int64_t j = 0; j < end; ++j)
      if (!std::isfinite(x[i * p.n + j])) return false;
  }
  return true;
}

// Computes the result of one matrix. Returns whether there is one.
template <class T>
bool Compute(const LinalgProblem& p, const Work& sizes, const T* x, const T* b, T* out, T* work) {
  using Lapack = Routines<T>;
  const std::int64_t m = p.m, n = p.n, k = p.least();
  const int rows = static_cast<int>(m), columns = static_cast<int>(n), least = static_cast<int>(k);
  const int pitch = std::max(1, rows), space = static_cast<int>(sizes.space);
  T *a = work, *others = a + sizes.matrix, *scratch = others + sizes.others;
  int* integers = reinterpret_cast<int*>(scratch + sizes.space);
  const int integer_space = static_cast<int>(sizes.integers);
  int info = 0;
  Transpose(x, m, n, a);
  switch (p.function) {
    case LinalgFunction::kCholesky:
      Lapack::kPotrf("L", &columns, a, &pitch, &info, 1);
      // OpenBLAS does not notice pivots that are not finite.
      for (std::int64_t i = 0; i < n; ++i) info |= !std::isfinite(a[i * n + i]);
      for (std::int64_t i = 0; i < n; ++i)
        for (std::int64_t j = 0; j < n; ++j) out[i * n + j] = j > i ? 0 : a[j * n + i];
      return info == 0;
    case LinalgFunction::kSolve:
    case LinalgFunction::kInverse: {
      const std::int64_t sides = p.function == LinalgFunction::kSolve ? p.columns : n;
      if (p.function == LinalgFunction::kSolve) {
        Transpose(b, n, sides, others);
      } else {
        for (std::int64_t i = 0; i < n * n; ++i) others[i] = i / n == i % n;
      }
      const int right = static_cast<int>(sides);
      Lapack::kGesv(&columns, &right, a, &pitch, integers, others, &pitch, &info);
      Transpose(others, sides, n, out);
      return info == 0;
    }
    case LinalgFunction::kDeterminant: {
      Lapack::kGetrf(&rows, &columns, a, &pitch, integers, &info);
      T sign = 1, log = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        const T pivot = a[i * n + i];
        if (integers[i] != i + 1) sign = -sign;
        if (!(pivot > 0)) sign = pivot < 0 ? -sign : pivot;
        log += std::log(std::abs(pivot));
      }
      out[0] = info == 0 ? sign : 0;
      out[1] = info == 0 ? log : -std::numeric_limits<T>::infinity();
      return true;
    }
    case LinalgFunction::kEigh:
      if (!IsFinite(p, x)) return false;
      Lapack::kSyevd("V", "L", &columns, a, &pitch, others, scratch, &space, integers,
                     &integer_space, &info, 1, 1);
      std::copy_n(others, n, out);
      Transpose(a, n, n, out + n);
      return info == 0;
    case LinalgFunction::kQr:
      Lapack::kGeqrf(&rows, &columns, a, &pitch, others, scratch, &space, &info);
      for (std::int64_t c = 0; c < n; ++c)
        for (std::int64_t r = 0; r < k; ++r) out[m * k + c * k + r] = r > c ? 0 : a[c * m + r];
      Lapack::kOrgqr(&rows, &least, &least, a, &pitch, others, scratch, &space, &info);
      Transpose(a, k, m, out);
      return true;
    default: {
      if (!IsFinite(p, x)) return false;
      T *u = others, *values = u + m * k, *v = values + k;
      const int pitch_v = std::max(1, least);
      Lapack::kGesdd("S", &rows, &columns, a, &pitch, values, u, &pitch, v, &pitch_v, scratch,
                     &space, integers, &info, 1);
      Transpose(u, k, m, out);
      std::copy_n(values, k + k * n, out + m * k);  // v is behind the values
      return info == 0;
    }
  }
}

// The library divides a large matrix among cores, but not the steps between its products.
constexpr double kThreadsOfLibrary = 4;

// Returns the seconds that the library needs for a matrix on one core: 20 operations per nanosecond
// in large matrices, and a time for each element of the matrix, in which small ones spend most of
// theirs (AMD EPYC, 2026-12-01).
double Seconds(const LinalgProblem& p) {
  const auto k = static_cast<double>(p.least());
  double element = 6e-9, elements = k * (k + static_cast<double>(p.columns));
  switch (p.function) {
    case LinalgFunction::kCholesky:
      element = 1.5e-9;
      break;
    case LinalgFunction::kInverse:
      element = 10e-9;
      break;
    case LinalgFunction::kEigh:
      element = 70e-9;
      break;
    case LinalgFunction::kQr:
    case LinalgFunction::kSvd:
      element = p.function == LinalgFunction::kQr ? 20e-9 : 100e-9;
      elements = k * (k + static_cast<double>(p.m + p.n) / 8);
      break;
    default:
      break;
  }
  return 0.1e-6 + LinalgFlops(p) / 20e9 + elements * element;
}

// The library divides a large matrix among cores. Cores divide a stack of small ones instead.
std::int64_t Parts(const LinalgProblem& p) {
  constexpr double kOneCore = 0x1p20;
  return LinalgFlops(p) > kOneCore ? 1 : StackParts(p);
}

template <class T>
void Run(const LinalgProblem& p, const Stream& stream, std::byte* scratch) {
  const Work sizes(p);
  const std::uint64_t bytes = sizes.bytes(sizeof(T));
  ForMatrices<T>(p, stream, Parts(p), [&](const T* x, const T* b, T* out, std::int64_t part) {
    auto* const work = reinterpret_cast<T*>(scratch + static_cast<std::uint64_t>(part) * bytes);
    return Compute(p, sizes, x, b, out, work);
  });
}

}  // namespace

std::uint64_t LapackBytes(const LinalgProblem& p) {
  return static_cast<std::uint64_t>(Parts(p)) * Work(p).bytes(SizeOf(p.dtype));
}

void RunLapack(const LinalgProblem& p, const Stream& stream, void* scratch) {
  auto* const bytes = static_cast<std::byte*>(scratch);
  p.dtype == DType::kF32 ? Run<float>(p, stream, bytes) : Run<double>(p, stream, bytes);
}

extern constexpr Strategy<LinalgProblem> kLinalgCpuLibrary = {
    .name = "cpu_library",
    .summary = "LAPACK",
    .source = "OpenBLAS",
    .dtypes = DTypesOf(DType::kF32, DType::kF64),  // the split among threads may depend on the load
    .roundoff = LinalgRoundoff,
    .cost =
        [](const LinalgProblem& p) {
          const double seconds = static_cast<double>(p.stack) * Seconds(p);
          const double threads = Parts(p) > 1 ? static_cast<double>(Parts(p)) : kThreadsOfLibrary;
          return Cost{.bytes = Whole(3 * LinalgBytes(p)),
                      .flops = Whole(seconds * kCoreFlops),
                      .atomics = 0,
                      .depth = Whole(seconds * kCoreSteps / threads)};
        },
    .launch = [](const LinalgProblem& p,
                 Stream& stream) { RunLapack(p, stream, stream.Scratch(LapackBytes(p))); },
    .scratch = LapackBytes,
    .vendor = true,
};

}  // namespace tessera
