// THE list: every strategy of every operation, slowest lesson first. A new strategy is its own file
// and one row here; lookup, ListStrategies, the CLI, tests, benchmarks and tables all read it.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/compute.h"

#define DOT_ROWS(CPU, CUDA)   \
  CPU(kDotCpuSerial)          \
  CPU(kDotCpuParallel)        \
  CPU(kDotCpuFixedTree)       \
  CPU(kDotCpuCompensated)     \
  CUDA(kDotElementwise)       \
  CUDA(kDotBlockSerial)       \
  CUDA(kDotBlockSerialAtomic) \
  CUDA(kDotThreadPartials)    \
  CUDA(kDotBlockPartials)     \
  CUDA(kDotTreeGlobal)        \
  CUDA(kDotTreeInterleaved)   \
  CUDA(kDotTreeSequential)    \
  CUDA(kDotHierarchical)      \
  CUDA(kDotCoarsened)         \
  CUDA(kDotWarpShuffle)       \
  CUDA(kDotSinglePass)        \
  CUDA(kDotFixedTree)         \
  CUDA(kDotCompensated)       \
  CUDA(kDotCublas)

#define REDUCE_ROWS(CPU, CUDA)    \
  CPU(kReduceCpuSerial)           \
  CPU(kReduceCpuParallel)         \
  CPU(kReduceCpuFixedTree)        \
  CPU(kReduceCpuCompensated)      \
  CUDA(kReduceInterleaved)        \
  CUDA(kReduceCoalesced)          \
  CUDA(kReducePrivatized)         \
  CUDA(kReduceCoarsened)          \
  CUDA(kReduceNoStride)           \
  CUDA(kReduceGridStride)         \
  CUDA(kReduceAtomic)             \
  CUDA(kReduceTwoPass)            \
  CUDA(kReduceTwoKernelsUnrolled) \
  CUDA(kReduceWarpShuffle)        \
  CUDA(kReduceSinglePass)         \
  CUDA(kReduceFixedTree)          \
  CUDA(kReduceCompensated)        \
  CUDA(kReduceLibrary)

#define REDUCE_AXES_ROWS(CPU, CUDA) \
  CPU(kReduceAxesCpuAxis)           \
  CUDA(kReduceAxesAxis)

#define MATMUL_ROWS(CPU, CUDA)       \
  CPU(kMatmulCpuNaive)               \
  CPU(kMatmulCpuRegisterTiled)       \
  CPU(kMatmulCpuCacheTiled)          \
  CPU(kMatmulCpuLibrary)             \
  CUDA(kMatmulNaive)                 \
  CUDA(kMatmulRegisterTiled)         \
  CUDA(kMatmulSharedTiled)           \
  CUDA(kMatmulSharedTiledVectorized) \
  CUDA(kMatmulDoubleBuffered)        \
  CUDA(kMatmulWarpTiled)             \
  CUDA(kMatmulWarpTiledTma)          \
  CUDA(kMatmulSkinny)                \
  CUDA(kMatmulSkinnyTma)             \
  CUDA(kMatmulOuterProduct)          \
  CUDA(kMatmulTensorMma)             \
  CUDA(kMatmulTensorF64)             \
  CUDA(kMatmulTensorTf32)            \
  CUDA(kMatmulTensorBf16)            \
  CUDA(kMatmulTensorF16)             \
  CUDA(kMatmulTensorF32x3)           \
  CUDA(kMatmulCublas)

#define ADD_ROWS(CPU, CUDA) \
  CPU(kAddCpu)              \
  CUDA(kAddSimple)

#define WINDOW_SUM_ROWS(CPU, CUDA) \
  CPU(kWindowSumCpu)               \
  CUDA(kWindowSumSimple)           \
  CUDA(kWindowSumShared)           \
  CUDA(kWindowSumRunningSum)

#define NOTHING(row)
#ifdef TESSERA_WITH_CUDA
#define IF_CUDA(macro) macro
#else
#define IF_CUDA(macro) NOTHING
#endif
#define ADDRESS(row) &row,

// The table of one operation, as Strategies<Problem>(). DECLARE is a macro of its own an operation,
// because a macro can not carry the problem's type through the list.
#define TABLE(Problem, ROWS, DECLARE)                                                           \
  ROWS(DECLARE, IF_CUDA(DECLARE))                                                               \
  template <>                                                                                   \
  absl::Span<const Strategy<Problem>* const> Strategies<Problem>() {                            \
    static constinit const Strategy<Problem>* const rows[] = {ROWS(ADDRESS, IF_CUDA(ADDRESS))}; \
    return rows;                                                                                \
  }
#define DECLARE_DOT(row) extern const Strategy<DotProblem> row;
#define DECLARE_REDUCE(row) extern const Strategy<ReduceProblem> row;
#define DECLARE_REDUCE_AXES(row) extern const Strategy<ReduceAxesProblem> row;
#define DECLARE_MATMUL(row) extern const Strategy<MatmulProblem> row;
#define DECLARE_ADD(row) extern const Strategy<AddProblem> row;
#define DECLARE_WINDOW_SUM(row) extern const Strategy<WindowSumProblem> row;

namespace tessera {

TABLE(DotProblem, DOT_ROWS, DECLARE_DOT)
TABLE(ReduceProblem, REDUCE_ROWS, DECLARE_REDUCE)
TABLE(ReduceAxesProblem, REDUCE_AXES_ROWS, DECLARE_REDUCE_AXES)
TABLE(MatmulProblem, MATMUL_ROWS, DECLARE_MATMUL)
TABLE(AddProblem, ADD_ROWS, DECLARE_ADD)
TABLE(WindowSumProblem, WINDOW_SUM_ROWS, DECLARE_WINDOW_SUM)

template <class Problem>
std::string Missing(const Strategy<Problem>& row, const Device& device) {
  const DeviceInfo& info = device.info();
  if (row.backend != info.backend)
    return row.backend == Backend::kCuda ? "a CUDA device" : "the CPU device";
  if (row.min_compute_capability > info.compute_capability) {
    return absl::StrCat("compute capability ", row.min_compute_capability / 10, ".",
                        row.min_compute_capability % 10, " or higher");
  }
  return row.missing == nullptr ? "" : row.missing(device);
}

namespace {

// The first of the named rows that the device can run on the problem.
template <class Problem>
const Strategy<Problem>* FirstOf(std::initializer_list<std::string_view> names,
                                 const Problem& problem, const Device& device) {
  for (std::string_view name : names) {
    for (const Strategy<Problem>* row : Strategies<Problem>()) {
      if (row->name == name && row->dtypes.Contains(problem.dtype) &&
          Missing(*row, device).empty() && Refusal(*row, problem).empty())
        return row;
    }
  }
  return nullptr;
}

}  // namespace

// On every device the row of that name, so that a client that names no strategy gets the same bits
// wherever it asks.
template <>
const Strategy<DotProblem>* Choose(const DotProblem& problem, const Device& device) {
  return FirstOf({"fixed_tree"}, problem, device);
}

template <>
const Strategy<ReduceProblem>* Choose(const ReduceProblem& problem, const Device& device) {
  return FirstOf({"fixed_tree"}, problem, device);
}

template <>
const Strategy<ReduceAxesProblem>* Choose(const ReduceAxesProblem& problem, const Device& device) {
  return FirstOf({"axis", "cpu_axis"}, problem, device);
}

// By what was measured on an H200 (kernels/README.md): f32 beside few rows or columns is bound by
// memory, which `skinny` reads at its pace for one vector and `skinny_tma` for more; products of a
// few steps along k are, too, and `outer_product` writes them at its pace; other products of 16-bit
// operands go to the tensor cores, where our rows keep up with the library within a few percent,
// for some shapes only within about a fifth, and are far ahead of it for ragged ones; unless there
// are few rows or columns, or few results of long sums, for which it needs 0.6 to 0.95 of our time.
// To the tensor cores go also those of f32 that are large enough to repay the splitting of the
// operands. From kLongF32 steps along k on the bound of `tensor_f32x3` is below that of plain f32
// sums. f32 operands are never rounded to less: `tensor_tf32` and `tensor_bf16` take them only when
// they are named.
template <>
const Strategy<MatmulProblem>* Choose(const MatmulProblem& problem, const Device& device) {
  constexpr std::int64_t kFew = 16, kFewTma = 32, kMany = 128;
  constexpr std::int64_t kManyF32 = 256, kLongF32 = 256;
  constexpr std::int64_t kFewResults = 1 << 19, kLong = 2048;
  // With half the bytes to write, in 16 bits the tensor cores are ahead from fewer steps on.
  const std::int64_t short_k = SizeOf(problem.dtype) == 2 ? 4 : 8;
  constexpr double kLargeF32 = 0x1p28;
  const std::int64_t least = std::min(problem.m, problem.n);
  const double products = static_cast<double>(problem.m) * static_cast<double>(problem.n) *
                          static_cast<double>(problem.k);
  const bool few_long = problem.m * problem.n <= kFewResults && problem.k >= kLong;
  // Rows of whole packs of 16 bytes: without them the library takes twice as long and more.
  const bool packs = (problem.lda | problem.ldb) % 8 == 0;
  std::string_view best, otherwise;
  if (problem.dtype == DType::kF32) {
    if (least > 1 && least <= kFewTma) best = "skinny_tma";
    if (least <= kFew) otherwise = "skinny";
    if (least >= kManyF32 && problem.k >= kLongF32 && products >= kLargeF32) best = "tensor_f32x3";
  } else if (least >= kMany && !(few_long && packs)) {
    if (problem.dtype == DType::kBF16) best = "tensor_bf16";
    if (problem.dtype == DType::kF16) best = "tensor_f16";
  }
  if (least > kFewTma && problem.k <= short_k) best = "outer_product";
  if (const auto* row = FirstOf({best, otherwise}, problem, device)) return row;
  if (const auto* row = ChooseInPlace(problem, device)) return row;
  // Five times as fast as Debian's OpenBLAS on 16 cores, as fast within a sixth on 2; the library
  // is better with few rows or columns.
  return least >= kMany ? FirstOf({"cpu_cache_tiled", "cpu_library"}, problem, device)
                        : FirstOf({"cpu_library", "cpu_cache_tiled"}, problem, device);
}

template <>
const Strategy<MatmulProblem>* ChooseInPlace(const MatmulProblem& problem, const Device& device) {
  return FirstOf({"cublas", "tensor_f64", "tensor_mma", "warp_tiled", "shared_tiled"}, problem,
                 device);
}

template <>
const Strategy<AddProblem>* Choose(const AddProblem& problem, const Device& device) {
  return FirstOf({"simple", "cpu"}, problem, device);
}

// The first-level cache serves small windows better than shared memory with its barriers; from
// about this radius on, reading a window at all costs more than the passes that running_sum makes
// over the array (measured in kernels/README.md).
template <>
const Strategy<WindowSumProblem>* Choose(const WindowSumProblem& problem, const Device& device) {
  constexpr std::int64_t kSmallRadius = 24;
  return FirstOf({problem.radius <= kSmallRadius ? "simple" : "running_sum", "cpu"}, problem,
                 device);
}

namespace {

template <class Problem>
void Append(const Problem& reference, absl::Span<Device* const> devices,
            std::vector<StrategyInfo>& list) {
  for (const Strategy<Problem>* row : Strategies<Problem>()) {
    StrategyInfo info{.operation = kOperation<Problem>,
                      .name = row->name,
                      .summary = row->summary,
                      .source = row->source,
                      .backend = row->backend,
                      .dtypes = row->dtypes,
                      .min_compute_capability = row->min_compute_capability,
                      .limits = row->limits,
                      .deterministic = row->deterministic,
                      .available = false,
                      .chosen = false,
                      .needs = "",
                      .cost = row->cost(reference),
                      .roundoff = row->roundoff(reference)};
    for (const Device* device : devices) {
      std::string missing = Missing(*row, *device);
      info.available |= missing.empty();
      info.chosen |= Choose(reference, *device) == row;
      // A device of the row's own kind says best what is missing.
      if (info.needs.empty() || device->info().backend == row->backend)
        info.needs = std::move(missing);
    }
    if (info.available) info.needs.clear();
    list.push_back(std::move(info));
  }
}

}  // namespace

std::vector<StrategyInfo> ListStrategies(absl::Span<Device* const> devices) {
  constexpr std::int64_t kElements = 1 << 20;
  constexpr std::int64_t kSide = 1024;
  DotProblem dot;
  dot.n = kElements;
  ReduceProblem reduce;
  reduce.n = kElements;
  ReduceAxesProblem axes;
  axes.outer = axes.length = kSide;
  axes.inner = 1;
  MatmulProblem matmul;
  matmul.m = matmul.n = matmul.k = matmul.lda = matmul.ldb = kSide;
  AddProblem add;
  add.n = kElements;
  WindowSumProblem window_sum;
  window_sum.n = kElements;
  window_sum.radius = 8;

  std::vector<StrategyInfo> list;
  Append(dot, devices, list);
  Append(reduce, devices, list);
  Append(axes, devices, list);
  Append(matmul, devices, list);
  Append(add, devices, list);
  Append(window_sum, devices, list);
  return list;
}

template std::string Missing(const Strategy<DotProblem>&, const Device&);
template std::string Missing(const Strategy<ReduceProblem>&, const Device&);
template std::string Missing(const Strategy<ReduceAxesProblem>&, const Device&);
template std::string Missing(const Strategy<MatmulProblem>&, const Device&);
template std::string Missing(const Strategy<AddProblem>&, const Device&);
template std::string Missing(const Strategy<WindowSumProblem>&, const Device&);

}  // namespace tessera
