// THE list: every strategy of every operation, roughly from slowest to fastest. A new strategy
// needs its own file and one line here; lookup, ListStrategies, the CLI, tests, benchmarks and
// tables all read this list. The last strategy that a device can run is the default, unless
// DefaultOf below says otherwise.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/choose/tuning.h"
#include "kernels/compute.h"
#include "kernels/expression/map_cost.h"
#include "kernels/team/share_out.h"

#define STRATEGIES_Dot(CPU, CUDA) \
  CPU(Dot, CpuSerial)             \
  CPU(Dot, CpuParallel)           \
  CPU(Dot, CpuFixedTree)          \
  CPU(Dot, CpuCompensated)        \
  CUDA(Dot, Elementwise)          \
  CUDA(Dot, BlockSerial)          \
  CUDA(Dot, BlockSerialAtomic)    \
  CUDA(Dot, ThreadPartials)       \
  CUDA(Dot, BlockPartials)        \
  CUDA(Dot, TreeGlobal)           \
  CUDA(Dot, TreeInterleaved)      \
  CUDA(Dot, TreeSequential)       \
  CUDA(Dot, Hierarchical)         \
  CUDA(Dot, Coarsened)            \
  CUDA(Dot, WarpShuffle)          \
  CUDA(Dot, SinglePass)           \
  CUDA(Dot, FixedTree)            \
  CUDA(Dot, Compensated)          \
  CUDA(Dot, Cublas)

#define STRATEGIES_Reduce(CPU, CUDA) \
  CPU(Reduce, CpuSerial)             \
  CPU(Reduce, CpuParallel)           \
  CPU(Reduce, CpuFixedTree)          \
  CPU(Reduce, CpuCompensated)        \
  CUDA(Reduce, Interleaved)          \
  CUDA(Reduce, Coalesced)            \
  CUDA(Reduce, Privatized)           \
  CUDA(Reduce, Coarsened)            \
  CUDA(Reduce, NoStride)             \
  CUDA(Reduce, GridStride)           \
  CUDA(Reduce, Atomic)               \
  CUDA(Reduce, TwoPass)              \
  CUDA(Reduce, TwoKernelsUnrolled)   \
  CUDA(Reduce, WarpShuffle)          \
  CUDA(Reduce, SinglePass)           \
  CUDA(Reduce, FixedTree)            \
  CUDA(Reduce, Compensated)          \
  CUDA(Reduce, Library)

#define STRATEGIES_ReduceAxes(CPU, CUDA) \
  CPU(ReduceAxes, CpuAxis)               \
  CUDA(ReduceAxes, Axis)

#define STRATEGIES_Matmul(CPU, CUDA)  \
  CPU(Matmul, CpuNaive)               \
  CPU(Matmul, CpuRegisterTiled)       \
  CPU(Matmul, CpuCacheTiled)          \
  CPU(Matmul, CpuLibrary)             \
  CUDA(Matmul, Naive)                 \
  CUDA(Matmul, RegisterTiled)         \
  CUDA(Matmul, SharedTiled)           \
  CUDA(Matmul, SharedTiledVectorized) \
  CUDA(Matmul, DoubleBuffered)        \
  CUDA(Matmul, WarpTiled)             \
  CUDA(Matmul, WarpTiledTma)          \
  CUDA(Matmul, Skinny)                \
  CUDA(Matmul, Stack)                 \
  CUDA(Matmul, SkinnyTma)             \
  CUDA(Matmul, OuterProduct)          \
  CUDA(Matmul, TensorMma)             \
  CUDA(Matmul, TensorF64)             \
  CUDA(Matmul, TensorTf32)            \
  CUDA(Matmul, TensorBf16)            \
  CUDA(Matmul, TensorF16)             \
  CUDA(Matmul, TensorF32x3)           \
  CUDA(Matmul, TensorI8)              \
  CUDA(Matmul, OzakiF64)              \
  CUDA(Matmul, Cublas)                \
  CUDA(Matmul, CublasLt)

#define STRATEGIES_Add(CPU, CUDA) \
  CPU(Add, Cpu)                   \
  CUDA(Add, Simple)

#define STRATEGIES_WindowSum(CPU, CUDA) \
  CPU(WindowSum, Cpu)                   \
  CUDA(WindowSum, Simple)               \
  CUDA(WindowSum, Shared)               \
  CUDA(WindowSum, RunningSum)

#define STRATEGIES_Map(CPU, CUDA) \
  CPU(Map, CpuOneNode)            \
  CPU(Map, CpuFused)              \
  CUDA(Map, OneNode)              \
  CUDA(Map, Fused)                \
  CUDA(Map, Compiled)

#define STRATEGIES_TopK(CPU, CUDA) \
  CPU(TopK, CpuSelect)             \
  CUDA(TopK, HeapThread)           \
  CUDA(TopK, BitonicBlock)         \
  CUDA(TopK, RadixSelect)          \
  CUDA(TopK, Threshold)

#define STRATEGIES_Scan(CPU, CUDA) \
  CPU(Scan, CpuSerial)             \
  CPU(Scan, CpuFixedOrder)         \
  CUDA(Scan, Serial)               \
  CUDA(Scan, KoggeStone)           \
  CUDA(Scan, BrentKung)            \
  CUDA(Scan, ReduceThenScan)       \
  CUDA(Scan, LookBack)             \
  CUDA(Scan, FixedOrder)           \
  CUDA(Scan, Library)

#define STRATEGIES_Sort(CPU, CUDA) \
  CPU(Sort, CpuSerial)             \
  CPU(Sort, CpuRadix)              \
  CUDA(Sort, Bitonic)              \
  CUDA(Sort, BlockMerge)           \
  CUDA(Sort, Radix)                \
  CUDA(Sort, Onesweep)             \
  CUDA(Sort, Segmented)            \
  CUDA(Sort, Library)

#define STRATEGIES_Take(CPU, CUDA) \
  CPU(Take, CpuSerial)             \
  CPU(Take, CpuParallel)           \
  CUDA(Take, Element)              \
  CUDA(Take, Library)              \
  CUDA(Take, Rows)

#define STRATEGIES_Select(CPU, CUDA) \
  CPU(Select, CpuSerial)             \
  CPU(Select, CpuParallel)           \
  CUDA(Select, TwoPass)              \
  CUDA(Select, LookBack)             \
  CUDA(Select, Library)

#define STRATEGIES_Histogram(CPU, CUDA) \
  CPU(Histogram, CpuSerial)             \
  CPU(Histogram, CpuParallel)           \
  CUDA(Histogram, GlobalAtomics)        \
  CUDA(Histogram, Privatized)           \
  CUDA(Histogram, Library)

#define STRATEGIES_SearchSorted(CPU, CUDA) \
  CPU(SearchSorted, CpuSerial)             \
  CPU(SearchSorted, CpuParallel)           \
  CUDA(SearchSorted, Binary)               \
  CUDA(SearchSorted, TopLevels)            \
  CUDA(SearchSorted, Library)

#define STRATEGIES_SumByLabel(CPU, CUDA) \
  CPU(SumByLabel, CpuSerial)             \
  CPU(SumByLabel, CpuParallel)           \
  CUDA(SumByLabel, Atomic)               \
  CUDA(SumByLabel, Sorted)

#define STRATEGIES_Linalg(CPU, CUDA) \
  CPU(Linalg, CpuDirect)             \
  CPU(Linalg, CpuLibrary)            \
  CUDA(Linalg, Block)                \
  CUDA(Linalg, HostLibrary)

#define NOTHING(Operation, Row)
#ifdef TESSERA_WITH_CUDA
#define IF_CUDA(macro) macro
#else
#define IF_CUDA(macro) NOTHING
#endif
#define DECLARE(Operation, Row) extern const Strategy<Operation##Problem> k##Operation##Row;
#define ADDRESS(Operation, Row) &k##Operation##Row,

// Defines the table of one operation.
#define TABLE(Operation, name)                                           \
  STRATEGIES_##Operation(DECLARE, IF_CUDA(DECLARE)) template <>          \
  absl::Span<const Strategy<Operation##Problem>* const> Strategies() {   \
    static constinit const Strategy<Operation##Problem>* const all[] = { \
        STRATEGIES_##Operation(ADDRESS, IF_CUDA(ADDRESS))};              \
    return all;                                                          \
  }

namespace tessera {

TESSERA_OPERATIONS(TABLE)

namespace {

template <class Problem>
int MinComputeCapability(const Strategy<Problem>& strategy) {
  return strategy.backend == Backend::kCuda
             ? std::max(strategy.min_compute_capability, kBaseComputeCapability)
             : 0;
}

}  // namespace

template <class Problem>
std::string Missing(const Strategy<Problem>& strategy, const Device& device) {
  const DeviceInfo& info = device.info();
  if (strategy.backend != info.backend)
    return strategy.backend == Backend::kCuda ? "a CUDA device" : "the CPU device";
  if (const int needed = MinComputeCapability(strategy); needed > info.compute_capability) {
    return absl::StrCat("compute capability ", needed / 10, ".", needed % 10, " or higher");
  }
  return strategy.missing == nullptr ? "" : strategy.missing(device);
}

namespace {

template <class Problem>
bool Runs(const Strategy<Problem>& strategy, const Problem& problem, const Device& device) {
  return strategy.dtypes.Contains(problem.dtype) && Missing(strategy, device).empty() &&
         Refusal(strategy, problem).empty();
}

// Returns the first of the named strategies that the device can run on the problem.
template <class Problem>
const Strategy<Problem>* FirstOf(std::initializer_list<std::string_view> names,
                                 const Problem& problem, const Device& device) {
  for (std::string_view name : names) {
    for (const Strategy<Problem>* strategy : Strategies<Problem>()) {
      if (strategy->name == name && Runs(*strategy, problem, device)) return strategy;
    }
  }
  return nullptr;
}

// Returns the last strategy that the device can run on the problem.
template <class Problem>
const Strategy<Problem>* DefaultOf(const Problem& problem, const Device& device) {
  const auto all = Strategies<Problem>();
  const auto last = std::find_if(all.rbegin(), all.rend(), [&](const auto* strategy) {
    return Runs(*strategy, problem, device);
  });
  return last == all.rend() ? nullptr : *last;
}

// The default is the fixed tree on every device, so a request that names no strategy gets the same
// bits everywhere.
const Strategy<DotProblem>* DefaultOf(const DotProblem& problem, const Device& device) {
  return FirstOf({"fixed_tree"}, problem, device);
}

const Strategy<ReduceProblem>* DefaultOf(const ReduceProblem& problem, const Device& device) {
  return FirstOf({"fixed_tree"}, problem, device);
}

// Returns this project's own strategy for Hopper's tensor cores.
std::string_view OwnTensorStrategy(const MatmulProblem& problem) {
  switch (problem.dtype) {
    case DType::kBF16:
      return "tensor_bf16";
    case DType::kF16:
      return "tensor_f16";
    case DType::kU8:
    case DType::kI8:
      return "tensor_i8";
    default:
      return "tensor_f32x3";
  }
}

// Whether `ozaki_f64`, which multiplies 8-bit integers, is worth its overhead for an f64 product.
// This overrides the tree, because products this large are rare among the random products to which
// the tree was fitted. On an H200 `ozaki_f64` takes 0.85 times as long as cuBLAS at 3000 per side
// and for 12288 x 12288 x 1024, and 0.6 times as long for sides of 8192 or more.
bool RepaysIntegers(const MatmulProblem& problem) {
  constexpr std::int64_t kLeastSide = 2048, kLeastSteps = 1024;
  constexpr double kLeastWork = 0x1p34 * 1.5;
  const double work = static_cast<double>(problem.m) * static_cast<double>(problem.n) *
                      static_cast<double>(problem.k);
  return problem.dtype == DType::kF64 && std::min(problem.m, problem.n) >= kLeastSide &&
         problem.k >= kLeastSteps && work >= kLeastWork;
}

// Returns a strategy for products with few steps along k and few rows or columns, which are rare
// among the products to which the tree was fitted. Their time is dominated by reading the long
// operand and writing c. With 400000 columns `outer_product` takes 0.79 times as long as `naive`
// (median of 30 shapes and types, 0.45 to 1.6). With 400000 rows `naive` takes 0.50 times as long
// as `outer_product` (median of 18, 0.36 to 0.83; NVIDIA H200, 2026-11-28).
std::string_view ThinStrategy(const MatmulProblem& problem) {
  constexpr std::int64_t kFewSteps = 8, kFew = 16, kMany = 1024;
  if (problem.k > kFewSteps) return "";
  if (problem.m <= kFew && problem.n >= kMany) return "outer_product";
  return problem.n <= kFew && problem.m >= kMany ? "naive" : "";
}

// Returns the decision tree's choice, or "" if `ozaki_f64` is chosen and needs more than 1 GiB of
// scratch memory. The limit is a constant because the choice must depend neither on the size of a
// GPU's memory nor on how much of it other requests use.
std::string_view TunedWithin(const MatmulProblem& problem, const Device& device) {
  constexpr std::uint64_t kMostScratch = std::uint64_t{1} << 30;
  const std::string_view tuned = TunedStrategy(problem);
  if (tuned != "ozaki_f64") return tuned;
  const Strategy<MatmulProblem>* integers = FirstOf({tuned}, problem, device);
  return integers != nullptr && integers->scratch(problem) > kMostScratch ? "" : tuned;
}

// Returns this project's own strategy for a stack of products that do not fill a GPU.
std::string_view OwnStackStrategy(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "warp_tiled";
    case DType::kF64:
      return "tensor_f64";
    case DType::kF16:
    case DType::kBF16:
      return "tensor_mma";
    default:
      return "shared_tiled";
  }
}

// Returns the strategy for a stack of such products, or "" if each of them fills a GPU. On an H200,
// `stack` takes 0.07 to 0.88 times as long as cuBLAS for sides of 4 to 16, and longer than cuBLAS
// for sides of 32 and more. `warp_tiled` takes 0.89 to 0.97 times as long for sides from 128 to
// 512, and `tensor_f32x3`, launched once for each product of 1024^3, 0.81 times (2026-12-01).
std::string_view StackStrategy(const MatmulProblem& product) {
  constexpr std::int64_t kSmall = 16, kShort = 32, kTile = 128;
  constexpr double kFull = 0x1p21, kFullF32 = 0x1p20;
  if (std::max(product.m, product.n) <= kSmall && product.k <= kShort) return "stack";
  const double results = static_cast<double>(product.m) * static_cast<double>(product.n);
  const bool single = product.dtype == DType::kF32;
  if (results >= (single ? kFullF32 : kFull)) return "";
  return single && std::min(product.m, product.n) >= kTile ? "warp_tiled" : "cublas";
}

// A stack gets the strategy of one of its products. However, products that do not fill a GPU by
// themselves get a strategy that computes many of them at the same time.
//
// On a GPU, except for large f64 products and thin products, the choice follows the measured times
// of random products (kernels/choose/tuning.h). The chosen strategy's error bound never exceeds
// that of ChooseInPlace. f32 operands are therefore never rounded to a smaller type: `tensor_tf32`
// and `tensor_bf16` accept them only when named. On a CPU with 16 cores `cpu_cache_tiled` is five
// times as fast as Debian's OpenBLAS, but on a single core OpenBLAS takes only 0.4 to 0.9 times as
// long as `cpu_cache_tiled`. The library is therefore chosen for small products (up to 2^18
// multiply-adds), for few rows or columns, and always if there are few cores.
const Strategy<MatmulProblem>* DefaultOf(const MatmulProblem& problem, const Device& device) {
  const MatmulProblem one = problem.stack == 1 ? problem : LeastAlignedProduct(problem);
  if (device.info().backend == Backend::kCpu) {
    constexpr std::int64_t kMany = 128;
    constexpr double kLittle = 0x1p18;
    constexpr int kFewCores = 2;
    const double work =
        static_cast<double>(one.m) * static_cast<double>(one.n) * static_cast<double>(one.k);
    return std::min(one.m, one.n) >= kMany && work > kLittle &&
                   device.info().multiprocessors > kFewCores
               ? FirstOf({"cpu_cache_tiled", "cpu_library"}, problem, device)
               : FirstOf({"cpu_library", "cpu_cache_tiled"}, problem, device);
  }
  const std::string_view integers = RepaysIntegers(one) ? "ozaki_f64" : "";
  const std::string_view together = problem.stack > 1 ? StackStrategy(one) : "";
  const std::string_view own = together.empty() ? "" : OwnStackStrategy(one.dtype);
  const auto* fast = FirstOf({together, own, integers, ThinStrategy(one), TunedWithin(one, device),
                              "cublas", OwnTensorStrategy(one)},
                             problem, device);
  const auto* any = ChooseInPlace(problem, device);
  if (fast == nullptr || any == nullptr) return any;
  return fast->roundoff(problem) <= any->roundoff(problem) ? fast : any;
}

// For small windows, the L1 cache is faster than shared memory, which needs barriers. Above a
// radius of about kSmallRadius, reading whole windows costs more than the passes of `running_sum`
// over the array (docs/measured).
const Strategy<WindowSumProblem>* DefaultOf(const WindowSumProblem& problem, const Device& device) {
  constexpr std::int64_t kSmallRadius = 24;
  return FirstOf({problem.radius <= kSmallRadius ? "simple" : "running_sum", "cpu"}, problem,
                 device);
}

// The order of the combinations, and therefore the bits, are the same on every device.
const Strategy<ScanProblem>* DefaultOf(const ScanProblem& problem, const Device& device) {
  return FirstOf({"fixed_order"}, problem, device);
}

// `segmented` accepts only rows that fit in a block's shared memory, which it reads and writes
// once. `library` takes 0.56 times as long as `onesweep` for a row of integers without positions,
// and 0.95 to 3.4 times as long otherwise (2^28 elements, NVIDIA H200, 2026-11-30). `onesweep`
// refuses problems that need too many blocks, and leaves them to `block_merge`.
const Strategy<SortProblem>* DefaultOf(const SortProblem& problem, const Device& device) {
  const bool direct = problem.rows == 1 && IsInteger(problem.dtype) && !problem.wants_indices;
  return FirstOf(
      {"segmented", direct ? "library" : "onesweep", "onesweep", "block_merge", "cpu_radix"},
      problem, device);
}

// `library` is never the default, because it takes only vectors, as `element` does.
const Strategy<TakeProblem>* DefaultOf(const TakeProblem& problem, const Device& device) {
  return FirstOf({"rows", "element", "cpu_parallel"}, problem, device);
}

const Strategy<SelectProblem>* DefaultOf(const SelectProblem& problem, const Device& device) {
  return FirstOf({"look_back", "cpu_parallel"}, problem, device);
}

// `privatized` refuses bins whose counters do not fit in shared memory.
const Strategy<HistogramProblem>* DefaultOf(const HistogramProblem& problem, const Device& device) {
  return FirstOf({"privatized", "global_atomics", "cpu_parallel"}, problem, device);
}

// The default is `top_levels`, because it takes only 0.72 to 1.04 times as long as `binary`,
// with a geometric mean of 0.89 over 16 combinations of length and type (NVIDIA H200,
// 2026-12-01).
const Strategy<SearchSortedProblem>* DefaultOf(const SearchSortedProblem& problem,
                                               const Device& device) {
  return FirstOf({"top_levels", "cpu_parallel"}, problem, device);
}

// `atomic` is never the default, because its bits change from run to run. The sort of
// `cpu_parallel` takes longer than the additions of `cpu_serial`, unless rows are long or many
// cores share the sort. Both give the same bits. `cpu_serial` needs memory for every sum.
const Strategy<SumByLabelProblem>* DefaultOf(const SumByLabelProblem& problem,
                                             const Device& device) {
  constexpr std::int64_t kLongRow = 32;
  constexpr int kManyCores = 8;
  const bool serial = problem.inner < kLongRow && problem.length <= problem.n &&
                      device.info().multiprocessors < kManyCores;
  return FirstOf({"sorted", serial ? "cpu_serial" : "cpu_parallel"}, problem, device);
}

// `block` computes each matrix on one multiprocessor, and `host_library` on the cores of the host,
// which are faster for a single large matrix. OpenBLAS divides even small triangular systems among
// threads, whose waits for each other take longer than the loops of `cpu_direct`.
const Strategy<LinalgProblem>* DefaultOf(const LinalgProblem& problem, const Device& device) {
  constexpr std::int64_t kFewOfBlock = 128, kFewOfLoops = 64, kFewToRotate = 8;
  const std::int64_t side = std::max(problem.m, problem.n);
  const bool rotates = problem.function == LinalgFunction::kEigh;
  return FirstOf({side <= kFewOfBlock ? "block" : "host_library", "host_library",
                  side <= (rotates ? kFewToRotate : kFewOfLoops) ? "cpu_direct" : "cpu_library",
                  "cpu_library"},
                 problem, device);
}

template <class Problem>
Problem Reference(std::int64_t elements) {
  return {.n = elements};
}
template <>
ReduceAxesProblem Reference(std::int64_t elements) {
  const std::int64_t side = std::llround(std::sqrt(elements));
  return {.outer = side, .length = side, .inner = 1};
}
template <>
MatmulProblem Reference(std::int64_t elements) {
  const std::int64_t side = std::llround(std::sqrt(elements));
  return {.m = side, .n = side, .k = side, .lda = side, .ldb = side};
}
template <>
WindowSumProblem Reference(std::int64_t elements) {
  return {.n = elements, .radius = 8};
}
template <>
MapProblem Reference(std::int64_t elements) {
  return ReferenceMap(elements);
}
template <>
TopKProblem Reference(std::int64_t elements) {
  return {.rows = 16, .n = elements / 16, .k = 100};
}
template <>
ScanProblem Reference(std::int64_t elements) {
  return {.outer = 16, .length = elements / 16};
}
template <>
SortProblem Reference(std::int64_t elements) {
  return {.rows = 1, .n = elements};
}
template <>
TakeProblem Reference(std::int64_t elements) {
  const std::int64_t row = 64, rows = elements / row;
  return {.length = rows, .inner = row, .count = rows, .strides = {0, row, 1}};
}
template <>
SelectProblem Reference(std::int64_t elements) {
  return {.n = elements, .count = elements / 2};
}
template <>
HistogramProblem Reference(std::int64_t elements) {
  return {.n = elements, .bins = 256};
}
template <>
SearchSortedProblem Reference(std::int64_t elements) {
  return {.length = elements, .n = elements};
}
template <>
SumByLabelProblem Reference(std::int64_t elements) {
  return {.n = elements, .length = 1024};
}
template <>
LinalgProblem Reference(std::int64_t elements) {
  const std::int64_t side = 32;
  return {.stack = elements / (side * side), .m = side, .n = side, .columns = 1};
}

}  // namespace

#define DEFINE(Operation, name)                                                     \
  template std::string Missing(const Strategy<Operation##Problem>&, const Device&); \
  template <>                                                                       \
  const Strategy<Operation##Problem>* Choose(const Operation##Problem& problem,     \
                                             const Device& device) {                \
    return DefaultOf(problem, device);                                              \
  }                                                                                 \
  template <>                                                                       \
  Operation##Problem ReferenceProblem(std::int64_t elements) {                      \
    return Reference<Operation##Problem>(elements);                                 \
  }
TESSERA_OPERATIONS(DEFINE)

template <>
const Strategy<MatmulProblem>* ChooseInPlace(const MatmulProblem& problem, const Device& device) {
  return FirstOf({"cublas", "tensor_f64", "tensor_mma", "warp_tiled", "shared_tiled", "naive"},
                 problem, device);
}

const Strategy<MatmulProblem>* ChooseShared(const MatmulProblem& problem,
                                            const Strategy<MatmulProblem>& alone,
                                            const Device& device) {
  if (alone.shared.launch != nullptr) return &alone;
  const auto* fast = FirstOf({OwnTensorStrategy(problem)}, problem, device);
  if (fast != nullptr && fast->roundoff(problem) <= alone.roundoff(problem)) return fast;
  return ChooseSharedInPlace(problem, device);
}

const Strategy<MatmulProblem>* ChooseSharedInPlace(const MatmulProblem& problem,
                                                   const Device& device) {
  return FirstOf(
      {"tensor_f64", "tensor_mma", "warp_tiled", "shared_tiled", "naive", "cpu_cache_tiled"},
      problem, device);
}

namespace {

template <class Problem>
void Append(const Problem& reference, absl::Span<Device* const> devices,
            std::vector<StrategyInfo>& list) {
  for (const Strategy<Problem>* strategy : Strategies<Problem>()) {
    StrategyInfo info{.operation = Problem::kOperation,
                      .name = strategy->name,
                      .summary = strategy->summary,
                      .source = strategy->source,
                      .backend = strategy->backend,
                      .dtypes = strategy->dtypes,
                      .min_compute_capability = MinComputeCapability(*strategy),
                      .limits = strategy->limits,
                      .deterministic = strategy->deterministic,
                      .vendor = strategy->vendor,
                      .available = false,
                      .chosen = false,
                      .needs = "",
                      .cost = strategy->cost(reference),
                      .roundoff = strategy->roundoff(reference)};
    for (const Device* device : devices) {
      std::string missing = Missing(*strategy, *device);
      info.available |= missing.empty();
      info.chosen |= Choose(reference, *device) == strategy;
      // The best description of what is missing comes from a device of the strategy's backend.
      if (info.needs.empty() || device->info().backend == strategy->backend)
        info.needs = std::move(missing);
    }
    if (info.available) info.needs.clear();
    list.push_back(std::move(info));
  }
}

}  // namespace

std::vector<StrategyInfo> ListStrategies(absl::Span<Device* const> devices) {
  std::vector<StrategyInfo> list;
  ForEachOperation(
      [&]<class Problem>() { Append(ReferenceProblem<Problem>(1 << 20), devices, list); });
  return list;
}

}  // namespace tessera
