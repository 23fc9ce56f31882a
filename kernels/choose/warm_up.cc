// Runs strategies on small problems before the first request, so that no request has to load a
// kernel's code or create a library's handle. The runs also measure how fast the strategies are.
#include <algorithm>
#include <cstddef>
#include <ctime>
#include <random>
#include <type_traits>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/choose/pace.h"
#include "kernels/compute.h"
#include "kernels/device/guard.h"
#include "kernels/expression/map_cost.h"
#include "kernels/problem/matmul.h"

namespace tessera {
namespace {

// The two sizes are far enough apart that the difference in time comes from work rather than
// overhead, and small enough that all strategies together take little time. On a CPU, no strategy
// uses other threads at these sizes.
struct Sizes {
  std::int64_t elements;  // for vectors
  std::int64_t m, n, k;
  std::int64_t side;  // of narrow products, which have kFew rows
};
constexpr Sizes kCpuSmall = {1 << 13, 24, 32, 32, 128}, kCpuLarge = {1 << 16, 48, 64, 64, 256};
constexpr Sizes kCudaSmall = {1 << 18, 512, 512, 512, 512},
                kCudaLarge = {1 << 21, 1536, 1536, 1536, 1536};
constexpr std::int64_t kFew = 2, kTopKRows = 8, kTopK = 32;

// Device memory for the operands and results of the largest problem.
struct Arena {
  Memory a, b;            // zeros
  Memory out;             // uninitialised
  Memory bits;            // random bits
  Memory indices;         // random positions of rows
  std::int64_t rows = 0;  // of the array that Take reads
  Memory mask;            // of every two adjacent elements, a random one is true
};

template <class Problem>
Problem MakeProblem(const Sizes& s, DType dtype, const Arena& arena, bool /*narrow*/) {
  Problem p = ReferenceProblem<Problem>(s.elements);
  p.dtype = dtype;
  if constexpr (requires { p.x; }) p.x = arena.a.data();
  if constexpr (requires { p.a; }) p.a = arena.a.data();
  if constexpr (requires { p.b; }) p.b = arena.b.data();
  if constexpr (requires { p.out; }) p.out = arena.out.data();
  return p;
}
template <>
ReduceAxesProblem MakeProblem(const Sizes& s, DType dtype, const Arena& arena, bool narrow) {
  ReduceAxesProblem p;
  p.dtype = dtype;
  // A narrow problem has short rows. Otherwise, elements of a column are pages apart.
  p.inner = narrow ? 1 : 1024;
  p.length = narrow ? 16 : s.elements / p.inner;
  p.outer = s.elements / (p.inner * p.length);
  p.x = arena.a.data();
  p.out = arena.out.data();
  return p;
}
template <>
MatmulProblem MakeProblem(const Sizes& s, DType dtype, const Arena& arena, bool narrow) {
  MatmulProblem p;
  p.dtype = dtype;
  p.out_dtype = MatmulDefaultType(dtype);
  p.m = narrow ? kFew : s.m;
  p.n = p.ldb = narrow ? s.side : s.n;
  p.k = p.lda = narrow ? s.side : s.k;
  p.a = arena.a.data();
  p.b = arena.b.data();
  p.c = arena.out.data();
  return p;
}
template <>
MapProblem MakeProblem(const Sizes& s, DType dtype, const Arena& arena, bool) {
  return WarmUpMap(s.elements, dtype, arena.a.data(), arena.out.data());
}
template <>
TopKProblem MakeProblem(const Sizes& s, DType dtype, const Arena& arena, bool) {
  TopKProblem p;
  p.dtype = dtype;
  p.rows = kTopKRows;
  p.n = s.elements / kTopKRows;
  p.k = kTopK;
  p.x = arena.a.data();
  p.values = arena.out.data();
  p.indices = static_cast<std::int64_t*>(arena.b.data());
  return p;
}
template <>
SortProblem MakeProblem(const Sizes& s, DType dtype, const Arena& arena, bool) {
  // All strategies accept this length. The bits are random: equal elements may be sorted faster.
  SortProblem p = {.dtype = dtype, .rows = s.elements / 1024, .n = 1024};
  p.x = arena.bits.data();
  p.values = arena.out.data();
  p.indices = static_cast<std::int64_t*>(arena.b.data());
  return p;
}
template <>
TakeProblem MakeProblem(const Sizes& s, DType dtype, const Arena& arena, bool) {
  TakeProblem p = ReferenceProblem<TakeProblem>(s.elements);
  p.dtype = dtype;
  p.length = arena.rows;
  p.x = arena.a.data();
  p.indices = arena.indices.data();
  p.out = arena.out.data();
  return p;
}
template <>
SelectProblem MakeProblem(const Sizes& s, DType dtype, const Arena& arena, bool) {
  SelectProblem p = {
      .dtype = dtype, .wants_indices = false, .n = s.elements, .count = s.elements / 2};
  p.x = arena.a.data();
  p.mask = arena.mask.data();
  p.values = arena.out.data();
  return p;
}
template <>
HistogramProblem MakeProblem(const Sizes& s, DType dtype, const Arena& arena, bool) {
  HistogramProblem p = ReferenceProblem<HistogramProblem>(s.elements);
  p.dtype = dtype;
  p.low = -0x1p31;
  p.high = 0x1p31;
  p.x = arena.bits.data();
  p.counts = static_cast<std::int64_t*>(arena.out.data());
  return p;
}
template <>
SearchSortedProblem MakeProblem(const Sizes& s, DType dtype, const Arena& arena, bool) {
  // Zeros are a sorted array, but most keys, which are random bits, are not among them.
  SearchSortedProblem p = ReferenceProblem<SearchSortedProblem>(s.elements);
  p.dtype = dtype;
  p.x = arena.a.data();
  p.keys = arena.bits.data();
  p.out = static_cast<std::int64_t*>(arena.out.data());
  return p;
}
template <>
SumByLabelProblem MakeProblem(const Sizes& s, DType dtype, const Arena& arena, bool) {
  SumByLabelProblem p = ReferenceProblem<SumByLabelProblem>(s.elements);
  p.dtype = dtype;
  p.mode = TakeMode::kWrap;  // random bits become random labels
  p.x = arena.a.data();
  p.labels = arena.bits.data();
  p.out = arena.out.data();
  return p;
}

template <>
LinalgProblem MakeProblem(const Sizes& s, DType dtype, const Arena& arena, bool) {
  // A decomposition that does not depend on the elements.
  LinalgProblem p = ReferenceProblem<LinalgProblem>(s.elements);
  p.dtype = dtype;
  p.function = LinalgFunction::kQr;
  p.stack /= 2;  // the result is twice as large as x
  p.x = arena.bits.data();
  p.out = arena.out.data();
  return p;
}

// Whether the operation has two kinds of problems with different rates; see IsNarrow in pace.cc.
template <class Problem>
constexpr bool kHasNarrow =
    std::is_same_v<Problem, MatmulProblem> || std::is_same_v<Problem, ReduceAxesProblem>;

// Reduces p.k for strategies that accept only a small k.
template <class Problem>
void Suit(const Strategy<Problem>& strategy, Problem& p) {
  if constexpr (std::is_same_v<Problem, MatmulProblem>)
    if (!Refusal(strategy, p).empty()) p.k = p.lda = kFew;
}

class WarmUpRun {
 public:
  WarmUpRun(Stream& stream, Pace& pace)
      : stream_(stream), pace_(pace), cpu_(stream.device().info().backend == Backend::kCpu) {}

  const Sizes& small() const { return cpu_ ? kCpuSmall : kCudaSmall; }
  const Sizes& large() const { return cpu_ ? kCpuLarge : kCudaLarge; }

  // Allocates and fills the arena. The copies, one of which goes to the host, also make the stream
  // do its setup.
  absl::Status MakeArena() {
    const Sizes& s = large();
    const auto most = std::max({s.elements, s.m * s.k, s.k * s.n, s.m * s.n, s.side * s.side});
    const std::size_t bytes = static_cast<std::size_t>(most) * sizeof(double);
    std::vector<unsigned char> zeros(std::min<std::size_t>(bytes, 1 << 20));
    for (Memory* memory : {&arena_.a, &arena_.b, &arena_.out}) {
      ASSIGN_OR_RETURN(*memory, Allocate(stream_.device(), bytes));
    }
    for (const Memory* memory : {&arena_.a, &arena_.b}) {
      for (std::size_t at = 0; at < bytes; at += zeros.size()) {
        RETURN_IF_ERROR(CopyToDevice(stream_, static_cast<unsigned char*>(memory->data()) + at,
                                     zeros.data(), std::min(zeros.size(), bytes - at)));
      }
    }
    return CopyToHost(stream_, zeros.data(), arena_.a.data(), zeros.size());
  }

  // Allocates and fills the memory for the problems whose pace depends on their elements.
  absl::Status MakeRandom() {
    std::mt19937 random;
    std::vector<std::uint32_t> bits(2 * static_cast<std::size_t>(large().elements));
    for (std::uint32_t& word : bits) word = static_cast<std::uint32_t>(random());
    const TakeProblem take = ReferenceProblem<TakeProblem>(large().elements);
    arena_.rows = take.length;
    std::vector<std::int64_t> indices(static_cast<std::size_t>(take.count));
    for (std::int64_t& index : indices) index = static_cast<std::int64_t>(random()) % take.length;
    std::vector<unsigned char> mask(static_cast<std::size_t>(large().elements));
    for (std::size_t i = 0; i < mask.size(); i += 2) mask[i + random() % 2] = 1;
    const auto send = [&](Memory& memory, const auto& elements) -> absl::Status {
      const std::size_t bytes = elements.size() * sizeof elements[0];
      ASSIGN_OR_RETURN(memory, Allocate(stream_.device(), bytes));
      return CopyToDevice(stream_, memory.data(), elements.data(), bytes);
    };
    RETURN_IF_ERROR(send(arena_.bits, bits));
    RETURN_IF_ERROR(send(arena_.mask, mask));
    return send(arena_.indices, indices);
  }

  // Runs one problem with the default strategy.
  template <class Problem>
  absl::Status Default() {
    Problem p = MakeProblem<Problem>(small(), DType::kF32, arena_, false);
    const Strategy<Problem>* strategy = Choose(p, stream_.device());
    return strategy == nullptr ? absl::OkStatus() : Run(*strategy, p).status();
  }

  // Runs a sum of an expression's result in each type, because each type has separate code that
  // must be loaded.
  absl::Status SumsOfExpressions() {
    if (cpu_) return absl::OkStatus();
    for (DType dtype : kAllDTypes) {
      const MapProblem map = MakeProblem<MapProblem>(small(), dtype, arena_, false);
      const ReduceProblem p = {.dtype = dtype, .n = map.n, .map = &map};
      const Strategy<ReduceProblem>* strategy = Choose(p, stream_.device());
      if (strategy == nullptr || !strategy->reads_views || Run(*strategy, p).ok()) continue;
      if (stream_.device().lost()) return Synchronize(stream_);
    }
    return absl::OkStatus();
  }

  template <class Problem>
  absl::Status EveryStrategy() {
    for (const Strategy<Problem>* strategy : Strategies<Problem>()) {
      if (!Missing(*strategy, stream_.device()).empty()) continue;
      for (bool narrow : {false, true}) {
        if (narrow && !kHasNarrow<Problem>) continue;
        bool first = true;
        for (DType dtype : kArrayDTypes) {
          if (!strategy->dtypes.Contains(dtype)) continue;
          if (!IsComputed(dtype) && !std::is_same_v<Problem, MatmulProblem>) continue;
          Problem little = MakeProblem<Problem>(small(), dtype, arena_, narrow);
          Problem much = MakeProblem<Problem>(large(), dtype, arena_, narrow);
          Suit(*strategy, little);
          Suit(*strategy, much);
          if (!Refusal(*strategy, little).empty() || !Refusal(*strategy, much).empty()) continue;
          // kArrayDTypes begins with F32.
          const bool every = cpu_ || Choose(little, stream_.device()) == strategy ||
                             Choose(much, stream_.device()) == strategy;
          if (!first && !every) continue;
          first = false;
          for (ReduceOp op : Ops<Problem>(every)) {
            if constexpr (requires { little.op; }) little.op = much.op = op;
            Measure(*strategy, little, much);
            if (stream_.device().lost()) return Synchronize(stream_);
          }
        }
      }
    }
    return absl::OkStatus();
  }

 private:
  template <class Problem>
  static std::vector<ReduceOp> Ops(bool every) {
    if constexpr (requires(Problem p) { p.op; }) {
      if (every) return {kAllReduceOps.begin(), kAllReduceOps.end()};
    }
    return {ReduceOp::kSum};
  }

  // Runs the strategy in a separate request, and returns the seconds that it takes.
  template <class Problem>
  absl::StatusOr<double> Run(const Strategy<Problem>& strategy, Problem p) {
    RETURN_IF_ERROR(BeginRequest(stream_));
    const double start = Now();
    absl::Status status = Guard(stream_.device(), [&] {
      if constexpr (requires { p.result; }) p.result = stream_.result();
      strategy.launch(p, stream_);
      stream_.Synchronize();
    });
    if (!status.ok()) return status;
    return Now() - start;
  }

  // CPU strategies run on this thread, and its CPU time excludes other work on the host.
  double Now() const {
    timespec now{};
    clock_gettime(cpu_ ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  }

  template <class Problem>
  void Measure(const Strategy<Problem>& strategy, const Problem& little, const Problem& much) {
    // The first run of each problem loads code and allocates. Of the two later runs of the large
    // problem, the faster one was disturbed less.
    if (!Run(strategy, little).ok() || !Run(strategy, much).ok()) return;
    const absl::StatusOr<double> small_seconds = Run(strategy, little);
    const absl::StatusOr<double> once = Run(strategy, much), again = Run(strategy, much);
    if (!small_seconds.ok() || !once.ok() || !again.ok()) return;
    pace_.Calibrate(strategy, little, *small_seconds, much, std::min(*once, *again));
  }

  Stream& stream_;
  Pace& pace_;
  const bool cpu_;
  Arena arena_;
};

}  // namespace

absl::Status WarmUp(Stream& stream, Pace& pace, bool every_strategy) {
  WarmUpRun run(stream, pace);
  absl::Status status = run.MakeArena();
  if (!status.ok()) return status;
  if (!every_strategy) {
    status.Update(run.Default<DotProblem>());
    status.Update(run.Default<ReduceProblem>());
    status.Update(run.Default<MatmulProblem>());
    return stream.device().lost() ? status : BeginRequest(stream);
  }
  RETURN_IF_ERROR(run.MakeRandom());
  ForEachOperation([&]<class Problem>() { status.Update(run.EveryStrategy<Problem>()); });
  status.Update(run.SumsOfExpressions());
  if (!status.ok()) return status;
  return BeginRequest(stream);
}

}  // namespace tessera
