#include "kernels/choose/pace.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/compute.h"
#include "kernels/expression/map_cost.h"
#include "kernels/problem/linalg.h"
#include "kernels/problem/select.h"
#include "kernels/problem/take.h"
#include "kernels/problem/top_k.h"

namespace tessera {
namespace {

// --- Assumed rates of a device, before anything has been measured ---

// The rates are per second and per CPU thread or SM of a GPU, and the times are in seconds.
struct Rates {
  double memory;  // maximum bytes from memory
  double cached;  // bytes that a strategy reads again, which come from caches
  double flops;
  double atomic;  // time per atomic operation on one address, for the whole device
  double step;    // time per operation in a chain of dependent operations
};
constexpr Rates kCpuRates = {20e9, 16e9, 2e9, 20e-9, 1.2e-9};
// For an H200: all SMs together read 4.75 TB/s from memory, and `naive` loads 20 TB/s. For a
// reduction, `step` is the time of each of its last steps, which one thread or the host computes.
constexpr Rates kCudaRates = {36e9, 160e9, 50e9, 1e-9, 3e-9};
// Seconds per step of a product along k. A step loads from shared memory or the L1 cache, and the
// next step waits for that load.
constexpr double kCudaMatmulStep = 70e-9;
// Seconds per product of a stack whose products are launched one after another.
constexpr double kCpuCall = 50e-9, kCudaLaunch = 4e-6;
// The bytes per second that one thread reads when there are too few threads to fill the device. The
// thread has a few loads in flight at a time, and each load takes about 0.6 us.
constexpr double kCudaThread = 20e6;
constexpr double kCudaBlocks = 32;  // resident thread blocks per SM
constexpr double kUsualBlock = 256;
// More threads than this do not read a host's memory any faster.
constexpr double kMemoryThreads = 10;

// No strategy is this many times faster or slower than its model predicts, so a measurement beyond
// this factor was disturbed.
constexpr double kMostWrong = 1000;

// --- The index of a rate ---

constexpr int kMostStrategies = 32;                   // per operation
constexpr int kStrategiesEach = 2 * kMostStrategies;  // with a separate index for narrow problems
constexpr int kOps = 16;                              // a power of two above every ReduceOp
constexpr int kKinds = (static_cast<int>(kDTypeInfos.size()) + 1) * kOps;

constexpr int kCopy = 0;
// The index of an operation's first strategy. Copies come first, then the operations in order.
template <class Problem>
constexpr int kFirstStrategy = [] {
  int first = 0, next = 0;
  ForEachOperation([&]<class P>() {
    next += kStrategiesEach;
    if (std::is_same_v<P, Problem>) first = next;
  });
  return first;
}();
constexpr int kStrategies = [] {
  int end = kStrategiesEach;
  ForEachOperation([&]<class P>() { end += kStrategiesEach; });
  return end;
}();

// Whether a problem leaves parts of a strategy's tiles idle, which makes the strategy many times
// slower.
template <class Problem>
bool IsNarrow(const Problem&) {
  return false;
}
template <>
bool IsNarrow(const ReduceAxesProblem& p) {
  return p.inner < 16;
}
template <>
bool IsNarrow(const MatmulProblem& p) {
  return std::min({p.m, p.n, p.k}) < 32;
}

// Strategies that are not in the table share the last index.
template <class Problem>
int IndexOf(const Strategy<Problem>& strategy, const Problem& problem) {
  const auto all = Strategies<Problem>();
  const auto at = std::find(all.begin(), all.end(), &strategy) - all.begin();
  return kFirstStrategy<Problem> + (IsNarrow(problem) ? kMostStrategies : 0) +
         static_cast<int>(std::min<std::ptrdiff_t>(at, kMostStrategies - 1));
}

template <class Problem>
int KindOf(const Problem& p) {
  int kind = static_cast<int>(p.dtype) * kOps;
  if constexpr (requires { p.op; }) kind += static_cast<int>(p.op);
  return kind;
}

int KindOfCopy(const View& view, DType to) {
  return static_cast<int>(view.dtype) * kOps + static_cast<int>(to);
}

// --- Problems whose costs do not fit in 64 bits ---

// A smaller problem whose costs fit in 64 bits. The original's costs are `scale` times as high.
template <class Problem>
struct Scaled {
  Problem problem;
  double scale = 1;
};

// Limits on the number of elements and of products. Costs are at most a few dozen times these
// limits, and therefore fit in 64 bits.
constexpr double kMostElements = 0x1p44;
constexpr double kMostProducts = 0x1p54;

// Halves the longest extent until the product of the extents is at most `most`. Returns 2 to the
// power of the number of halvings.
double Halve(std::initializer_list<std::int64_t*> extents, double most) {
  double scale = 1;
  while (true) {
    double product = 1;
    std::int64_t* longest = *extents.begin();
    for (std::int64_t* extent : extents) {
      product *= std::max(1.0, static_cast<double>(*extent));
      if (*extent > *longest) longest = extent;
    }
    if (product <= most) return scale;
    *longest /= 2;
    scale *= 2;
  }
}

template <class Problem>
Scaled<Problem> ScaleDown(Problem p) {
  const double scale = Halve({&p.n}, kMostElements);
  return {p, scale};
}
template <>
Scaled<ReduceAxesProblem> ScaleDown(ReduceAxesProblem p) {
  const double scale = Halve({&p.outer, &p.length, &p.inner}, kMostElements);
  return {p, scale};
}
template <>
Scaled<MatmulProblem> ScaleDown(MatmulProblem p) {
  const double scale = Halve({&p.stack, &p.m, &p.n, &p.k}, kMostProducts);
  return {p, scale};
}
// The time of some strategies grows with n * radius, and the time of others with n. The radius is
// therefore kept, unless it is larger than any array that fits in memory.
template <>
Scaled<WindowSumProblem> ScaleDown(WindowSumProblem p) {
  double scale = Halve({&p.n}, kMostElements);
  p.radius = std::min(p.radius, std::max<std::int64_t>(0, p.n - 1));
  while (static_cast<double>(p.n) * (2 * static_cast<double>(p.radius) + 1) > 0x1p58) {
    p.n /= 2;
    scale *= 2;
  }
  return {p, scale};
}
template <>
Scaled<TopKProblem> ScaleDown(TopKProblem p) {
  const double scale = Halve({&p.rows, &p.n}, kMostElements);
  p.k = std::min(p.k, std::max<std::int64_t>(1, p.n));
  p.inner = 1;
  return {p, scale};
}
template <>
Scaled<ScanProblem> ScaleDown(ScanProblem p) {
  const double scale = Halve({&p.outer, &p.length, &p.inner}, kMostElements);
  return {p, scale};
}
template <>
Scaled<SortProblem> ScaleDown(SortProblem p) {
  const double scale = Halve({&p.rows, &p.n}, kMostElements);
  return {p, scale};
}
template <>
Scaled<TakeProblem> ScaleDown(TakeProblem p) {
  const double scale = Halve({&p.outer, &p.count, &p.inner}, kMostElements);
  return {p, scale};
}
template <>
Scaled<SearchSortedProblem> ScaleDown(SearchSortedProblem p) {
  const double scale = Halve({&p.n}, kMostElements);
  return {p, scale};
}
template <>
Scaled<SumByLabelProblem> ScaleDown(SumByLabelProblem p) {
  const double scale = Halve({&p.n, &p.inner}, kMostElements);
  // No memory holds more sums than this.
  p.length = std::min(p.length, (std::int64_t{1} << 44) / std::max<std::int64_t>(1, p.inner));
  return {p, scale};
}
template <>
Scaled<LinalgProblem> ScaleDown(LinalgProblem p) {
  const double scale = Halve({&p.stack}, kMostElements);
  return {p, scale};
}
template <>
Scaled<SelectProblem> ScaleDown(SelectProblem p) {
  const double scale = Halve({&p.n}, kMostElements);
  p.count = static_cast<std::int64_t>(static_cast<double>(p.count) / scale);
  return {p, scale};
}

// Returns the bytes that any algorithm must move: each operand once, and the result. This overload
// is for arrays of n elements of one type.
template <class Problem>
double LeastBytes(const Problem& p) {
  constexpr bool kTwo = requires { &Problem::b; };
  constexpr bool kArray = requires { &Problem::out; };
  return (1.0 + kTwo + kArray) * static_cast<double>(p.n) * static_cast<double>(SizeOf(p.dtype));
}
double LeastBytes(const ReduceAxesProblem& p) {
  const double outputs = static_cast<double>(p.outer) * static_cast<double>(p.inner);
  return outputs * (static_cast<double>(p.length) * static_cast<double>(SizeOf(p.dtype)) +
                    static_cast<double>(SizeOf(ResultDType(p.op, p.dtype))));
}
double LeastBytes(const MatmulProblem& p) {
  const auto m = static_cast<double>(p.m), n = static_cast<double>(p.n),
             k = static_cast<double>(p.k), products = static_cast<double>(p.stack);
  // The numbers of distinct left and right matrices in a stack.
  double left = 1, right = 1;
  for (int i = 0; i < p.stack_rank; ++i) {
    const StackAxis& axis = p.stack_axes[i];
    if (axis.stride_a != 0) left *= static_cast<double>(axis.extent);
    if (axis.stride_b != 0) right *= static_cast<double>(axis.extent);
  }
  return (m * std::min(left, products) + n * std::min(right, products)) * k *
             static_cast<double>(SizeOf(p.dtype)) +
         products * m * n * static_cast<double>(SizeOf(p.out_dtype));
}
double LeastBytes(const WindowSumProblem& p) {
  return static_cast<double>(p.n) *
         static_cast<double>(SizeOf(p.dtype) + SizeOf(ResultDType(ReduceOp::kSum, p.dtype)));
}
double LeastBytes(const MapProblem& p) {
  return static_cast<double>(OperandBytes(p)) +
         static_cast<double>(p.n) * static_cast<double>(SizeOf(p.dtype));
}
double LeastBytes(const TopKProblem& p) {
  return static_cast<double>(p.rows) * static_cast<double>(p.n) *
             static_cast<double>(SizeOf(p.dtype)) +
         static_cast<double>(TopKOutBytes(p));
}
double LeastBytes(const ScanProblem& p) {
  return static_cast<double>(p.outer) * static_cast<double>(p.length) *
         static_cast<double>(p.inner) *
         static_cast<double>(SizeOf(p.dtype) + SizeOf(ResultDType(p.op, p.dtype)));
}
double LeastBytes(const SortProblem& p) {
  return static_cast<double>(p.rows) * static_cast<double>(p.n) *
         static_cast<double>((p.wants_values ? 2 : 1) * SizeOf(p.dtype) +
                             (p.wants_indices ? sizeof(std::int64_t) : 0));
}
// Elements that are taken several times may come from caches.
double LeastBytes(const TakeProblem& p) {
  const auto size = static_cast<double>(SizeOf(p.dtype));
  const double out = static_cast<double>(p.elements());
  const double in =
      static_cast<double>(p.outer) * static_cast<double>(p.length) * static_cast<double>(p.inner);
  return size * (out + std::min(in, out)) +
         static_cast<double>(TakeIndices(p)) * static_cast<double>(SizeOf(p.index_dtype));
}
double LeastBytes(const HistogramProblem& p) {
  return static_cast<double>(p.n) * static_cast<double>(SizeOf(p.dtype)) +
         static_cast<double>(p.bins) * sizeof(std::int64_t);
}
// The search for a key reads at least one element of x.
double LeastBytes(const SearchSortedProblem& p) {
  const auto size = static_cast<double>(SizeOf(p.dtype)), n = static_cast<double>(p.n);
  return n * (size + sizeof(std::int64_t)) + std::min(n, static_cast<double>(p.length)) * size;
}
double LeastBytes(const SumByLabelProblem& p) {
  return static_cast<double>(p.elements()) * static_cast<double>(SizeOf(p.dtype)) +
         static_cast<double>(p.n) * static_cast<double>(SizeOf(p.label_dtype)) +
         static_cast<double>(p.length) * static_cast<double>(p.inner) *
             static_cast<double>(SizeOf(ResultDType(ReduceOp::kSum, p.dtype)));
}
double LeastBytes(const LinalgProblem& p) { return LinalgBytes(p); }
double LeastBytes(const SelectProblem& p) {
  return static_cast<double>(p.n) +
         static_cast<double>(p.count) *
             static_cast<double>((p.wants_values ? 2 * SizeOf(p.dtype) : 0) +
                                 (p.wants_indices ? sizeof(std::int64_t) : 0));
}

// Returns the seconds that one CPU thread needs per element to load a view that is not contiguous,
// row by row.
double FindSeconds(const View& view) {
  constexpr double kLine = 64, kPageBytes = 4096, kNearCache = 1 << 19;
  const auto size = static_cast<double>(SizeOf(view.dtype));
  const int rank = view.shape.rank;
  // The bytes from an element to the closest other element, the bytes from an element to the next
  // one in its row, and the bytes that all elements span.
  double closest = kPageBytes, innermost = size, all = size;
  for (int i = 0; i < rank; ++i) {
    if (view.shape[i] <= 1) continue;
    innermost = std::abs(static_cast<double>(view.strides[static_cast<std::size_t>(i)])) * size;
    closest = std::min(closest, innermost);
    all += static_cast<double>(view.shape[i] - 1) * innermost;
  }
  const double columns = rank == 0 ? 1 : std::max(1.0, static_cast<double>(view.shape[rank - 1]));
  // Adjacent elements of a row, or of a few short rows, share cache lines that stay in a near
  // cache.
  const bool near = innermost < kLine || (columns < 16 && closest < kLine);
  const double element = near                   ? 0.4e-9
                         : all < kNearCache     ? 1.3e-9
                         : closest < kPageBytes ? 8e-9
                                                : 18e-9;
  return element + 1.5e-9 / columns;
}

// Returns the seconds that a CPU thread needs per access to a random place in memory of this size,
// if the accesses do not wait for each other. tests/by_hand/estimates.py compared these times, and
// the factors in the costs of CPU strategies, with measured ones (AMD EPYC, 2026).
double ScatteredSeconds(std::uint64_t bytes) {
  constexpr std::uint64_t kCache = 1 << 20;
  return bytes <= kCache ? 5e-9 : 25e-9;
}

// Returns the cost per element of a fold on a CPU, in additions.
double FoldWeight(ReduceOp op, DType dtype) {
  const bool wide = dtype == DType::kF64;
  if (IsDeviation(op)) return wide ? 7 : 4;
  if (IsArg(op)) return 4;
  return wide && op == ReduceOp::kNormL2 ? 5 : 1;
}

double Bounded(double value, double least, double most) {
  return std::min(std::max(value, least), most);
}

}  // namespace

Pace::Pace(const DeviceInfo& info)
    : backend_(info.backend),
      units_(std::max(1, info.multiprocessors)),
      slots_(new Slot[static_cast<std::size_t>(kStrategies) * kKinds]()) {}

template <class Problem>
Pace::Model Pace::ModelOf(const Strategy<Problem>& strategy, const Problem& problem,
                          double units) const {
  const auto [p, scale] = ScaleDown(problem);
  const Cost cost = CostOf(strategy, p);
  const auto bytes = static_cast<double>(cost.bytes), depth = static_cast<double>(cost.depth);
  const double least = LeastBytes(p);
  const bool cpu = backend_ == Backend::kCpu;
  const Rates& rates = cpu ? kCpuRates : kCudaRates;
  Model model;
  if constexpr (std::is_same_v<Problem, MatmulProblem>) {
    // Each product of a stack is a call of the library, or a launch.
    if (p.stack != 1 && (cpu || !strategy.stacks))
      model.latency = static_cast<double>(p.stack) * (cpu ? kCpuCall : kCudaLaunch);
  }
  model.memory = least / (rates.memory * (cpu ? std::min(units, kMemoryThreads) : units)) +
                 std::max(0.0, bytes - least) / (rates.cached * units);
  model.work = static_cast<double>(cost.flops) / (rates.flops * units) +
               static_cast<double>(cost.atomics) * rates.atomic;
  if (cpu) {
    double step = rates.step;
    if constexpr (std::is_same_v<Problem, ReduceProblem> ||
                  std::is_same_v<Problem, ReduceAxesProblem>) {
      // Along an axis each addition waits for the previous one; in other folds additions overlap.
      constexpr double kWaits = std::is_same_v<Problem, ReduceAxesProblem> ? 4 : 1;
      model.work *= kWaits * FoldWeight(p.op, p.dtype);
      step *= FoldWeight(p.op, p.dtype);
    }
    // One core does these steps in sequence, regardless of the number of cores.
    model.work = std::max(model.work, depth * step);
    // Rates that were measured with small or ordered operands do not include cache misses.
    const double threads =
        Bounded(static_cast<double>(cost.flops) / std::max(1.0, depth), 1, units);
    model.latency += static_cast<double>(cost.scattered) * ScatteredSeconds(cost.among) / threads;
    if constexpr (std::is_same_v<Problem, MapProblem>) {
      // Rates that were measured with contiguous operands do not include this cost.
      for (int i = 0; i < p.program->operands; ++i) {
        const View& view = p.operands[static_cast<std::size_t>(i)];
        if (view.shape.rank > 0 && !view.contiguous())
          model.latency += static_cast<double>(p.n) * FindSeconds(view) / units;
      }
    }
  } else {
    constexpr bool kMatmul = std::is_same_v<Problem, MatmulProblem>;
    model.latency += depth * (kMatmul ? kCudaMatmulStep : rates.step);
    if (p.launch.block_size != 0 || p.launch.grid_size != 0) {
      const double most = kCudaBlocks * units;
      const double blocks =
          p.launch.grid_size == 0 ? most : std::min(most, 1.0 * p.launch.grid_size);
      const double threads =
          blocks * (p.launch.block_size == 0 ? kUsualBlock : 1.0 * p.launch.block_size);
      model.latency += bytes / (threads * kCudaThread);
    }
  }
  return {model.work * scale, model.memory * scale, model.latency * scale};
}

Pace::Model Pace::ModelOfCopy(const View& view, DType to) const {
  const double elements = static_cast<double>(view.elements());
  const auto size = static_cast<double>(SizeOf(view.dtype));
  const bool cpu = backend_ == Backend::kCpu;
  const Rates& rates = cpu ? kCpuRates : kCudaRates;
  Model model;
  if (cpu && !view.contiguous()) {
    // A single thread gathers the view. The latency keeps the estimate from falling below half of
    // the work after faster views have been measured.
    model.work = elements * FindSeconds(view);
    model.latency = model.work / 2;
  } else if (cpu && to == view.dtype) {
    model.work = elements * 0.4e-9 + 2 * elements * size / rates.memory;
  } else if (!cpu && (to == view.dtype || !view.contiguous())) {
    // Bytes fetched per element: at most a sector, which is shared by elements that are close
    // together along any axis.
    double closest = 32;
    for (int i = 0; i < view.shape.rank; ++i) {
      const auto stride = static_cast<double>(view.strides[static_cast<std::size_t>(i)]);
      if (view.shape[i] > 1) closest = std::min(closest, std::abs(stride) * size);
    }
    model.work = elements * (size + std::max(size, closest)) / (rates.memory * units_);
  }
  if (to != view.dtype) {
    const double converted = elements * (size + static_cast<double>(SizeOf(to)));
    model.work += cpu ? elements * 1.5e-9 / units_ : converted / (rates.memory * units_);
  }
  return model;
}

double Pace::Seconds(const Model& model, const Rate& rate) {
  const double factor = rate.base == 0 ? 1.0 : static_cast<double>(rate.factor);
  return std::max({factor * model.work, model.memory, model.latency});
}

// For a kind that has not been measured, returns the slowest measured rate of the strategy.
Pace::Rate Pace::RateOf(int strategy, int kind) const {
  const Slot* slots = &slots_[static_cast<std::size_t>(strategy) * kKinds];
  const Rate own = slots[kind].load(std::memory_order_relaxed);
  if (own.base != 0) return own;
  Rate slowest;
  for (int k = 0; k < kKinds; ++k) {
    const Rate other = slots[k].load(std::memory_order_relaxed);
    if (other.base != 0 && other.factor > slowest.factor) slowest = other;
  }
  return slowest;
}

void Pace::Update(int strategy, int kind, const Model& model, double seconds) {
  if (!(seconds >= kMatters) || !(model.work >= kMatters / 10) || seconds < 2 * model.latency)
    return;
  Slot& slot = slots_[static_cast<std::size_t>(strategy) * kKinds + static_cast<std::size_t>(kind)];
  const double seen = Bounded(seconds / model.work, 1 / kMostWrong, kMostWrong);
  Rate old = slot.load(std::memory_order_relaxed);
  Rate next;
  do {
    if (old.base == 0) {
      // The first call may move the factor as far from the expected one as many later calls could
      // together.
      const Rate expected = RateOf(strategy, kind);
      const auto base = expected.base == 0 ? 1.0 : static_cast<double>(expected.base);
      next = {static_cast<float>(base),
              static_cast<float>(Bounded(seen, base / kMostApart, base * kMostApart))};
    } else {
      const auto base = static_cast<double>(old.base), factor = static_cast<double>(old.factor);
      const double moved = factor * std::pow(Bounded(seen / factor, 0.25, 3), 0.25);
      next = {old.base, static_cast<float>(Bounded(moved, base / kMostApart, base * kMostApart))};
    }
  } while (!slot.compare_exchange_weak(old, next, std::memory_order_relaxed));
}

void Pace::Forget(int strategy, int kind) {
  Slot& slot = slots_[static_cast<std::size_t>(strategy) * kKinds + static_cast<std::size_t>(kind)];
  Rate old = slot.load(std::memory_order_relaxed);
  Rate next;
  do {
    if (old.base == 0) return;
    next = {old.base, old.factor * std::pow(old.base / old.factor, 0.125f)};
  } while (!slot.compare_exchange_weak(old, next, std::memory_order_relaxed));
}

template <class Problem>
double Pace::Estimate(const Strategy<Problem>& strategy, const Problem& problem) const {
  return Seconds(ModelOf(strategy, problem, units_),
                 RateOf(IndexOf(strategy, problem), KindOf(problem)));
}

template <class Problem>
void Pace::Learn(const Strategy<Problem>& strategy, const Problem& problem, double seconds) {
  Update(IndexOf(strategy, problem), KindOf(problem), ModelOf(strategy, problem, units_), seconds);
}

template <class Problem>
void Pace::Calibrate(const Strategy<Problem>& strategy, const Problem& small, double small_seconds,
                     const Problem& large, double large_seconds) {
  const double units = backend_ == Backend::kCpu ? 1 : units_;
  const double work = ModelOf(strategy, large, units).work - ModelOf(strategy, small, units).work;
  const double seconds = large_seconds - small_seconds;
  // If the larger problem takes less than 25 % longer, the time is mostly overhead.
  if (!(work > 0) || seconds < 0.2 * large_seconds || seconds < 3e-6) return;
  const auto factor = static_cast<float>(Bounded(seconds / work, 1 / kMostWrong, kMostWrong));
  slots_[static_cast<std::size_t>(IndexOf(strategy, large)) * kKinds +
         static_cast<std::size_t>(KindOf(large))]
      .store({factor, factor}, std::memory_order_relaxed);
}

template <class Problem>
void Pace::Forget(const Strategy<Problem>& strategy, const Problem& problem) {
  Forget(IndexOf(strategy, problem), KindOf(problem));
}

double Pace::EstimateCopy(const View& view, DType to) const {
  return Seconds(ModelOfCopy(view, to), RateOf(kCopy, KindOfCopy(view, to)));
}

void Pace::LearnCopy(const View& view, DType to, double seconds) {
  Update(kCopy, KindOfCopy(view, to), ModelOfCopy(view, to), seconds);
}

void Pace::ForgetCopy(const View& view, DType to) { Forget(kCopy, KindOfCopy(view, to)); }

#define INSTANTIATE(Operation, name)                                                             \
  template double Pace::Estimate(const Strategy<Operation##Problem>&, const Operation##Problem&) \
      const;                                                                                     \
  template void Pace::Learn(const Strategy<Operation##Problem>&, const Operation##Problem&,      \
                            double);                                                             \
  template void Pace::Calibrate(const Strategy<Operation##Problem>&, const Operation##Problem&,  \
                                double, const Operation##Problem&, double);                      \
  template void Pace::Forget(const Strategy<Operation##Problem>&, const Operation##Problem&);
TESSERA_OPERATIONS(INSTANTIATE)
#undef INSTANTIATE

}  // namespace tessera
