// Times every strategy of the table with the events of one device, and also the vendor's calls and
// the ceilings.
//
//   strategy_bench [--device=auto|cuda:0|cpu] [--max_exponent=30] [Google Benchmark's flags]
//   strategy_bench [--device=...] --regret=PROBLEMS [--seed=1] [--operation=matmul] [--json=FILE]
//
// The second form is described in regret.h. In the first form, benchmarks are named
// operation/strategy/dtype/size. For reductions other than sums, the operation is, for example,
// reduce_max. Times are device times (manual time), from the first to the last step of one
// operation; the host enqueues all steps before the first one begins. Operands hold normally
// distributed random values and rotate through memory of more than three times the largest L2
// cache, so every pass reads from memory. Run with --benchmark_enable_random_interleaving and
// repetitions to compare strategies fairly.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/bench/ceilings.h"
#include "kernels/bench/regret.h"
#include "kernels/bench/rig.h"
#include "kernels/expression/expression.h"
#include "kernels/expression/map_cost.h"
#include "kernels/same_bits/batch.h"
#ifdef TESSERA_WITH_CUDA
#include "kernels/bench/peers.h"
#include "kernels/cuda/matmul/cublas.h"
#endif

namespace tessera::bench {
namespace {

// Times launch(), which enqueues one operation, until Google Benchmark has enough samples. bytes
// and flops: what the problem itself requires, with each input read once and each output written
// once. held: whether a kernel holds the device first, as in Rig::Time.
void Time(Rig& rig, benchmark::State& state, double bytes, double flops,
          const std::function<void()>& launch, bool held = true) {
  try {
    const double enqueueing_us = rig.WarmUp(launch);
    for (auto _ : state)
      state.SetIterationTime(rig.Time(launch, held ? enqueueing_us : Rig::kIdle) * 1e-6);
  } catch (const DeviceError& error) {
    state.SkipWithError(error.what());
    return;
  }
  using benchmark::Counter;
  const auto iterations = static_cast<double>(state.iterations());
  if (bytes > 0) state.counters["bytes_per_second"] = Counter(bytes * iterations, Counter::kIsRate);
  if (flops > 0) state.counters["flops_per_second"] = Counter(flops * iterations, Counter::kIsRate);
}

std::string Join(std::initializer_list<std::string_view> parts, std::string_view separator) {
  std::string joined;
  for (const std::string_view* part = parts.begin(); part != parts.end(); ++part) {
    if (part != parts.begin()) joined += separator;
    joined += *part;
  }
  return joined;
}

// Registers body for every strategy that the device offers for problems like `like`.
template <class Problem, class Body>
void ForStrategies(
    Rig& rig, const Problem& like, const std::string& size, Body body,
    std::string_view operation = Problem::kOperation,
    bool (*wanted)(const Strategy<Problem>&) = [](const Strategy<Problem>&) { return true; }) {
  for (const Strategy<Problem>* strategy : Strategies<Problem>()) {
    if (!strategy->dtypes.Contains(like.dtype) || !Missing(*strategy, rig.device()).empty() ||
        !Refusal(*strategy, like).empty() || !wanted(*strategy))
      continue;
    const bool chosen = Choose(like, rig.device()) == strategy;
    const std::string name = Join({operation, strategy->name, Name(like.dtype), size}, "/");
    benchmark::RegisterBenchmark(name.c_str(),
                                 [strategy, body, chosen](benchmark::State& state) mutable {
                                   body(state, *strategy);
                                   if (chosen) state.counters["chosen"] = 1;
                                 })
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
  }
}

// Where operands are: anywhere in the arena (kCold); one element after an aligned address
// (kMisaligned); or always in the same memory, so that operands that fit the caches stay there
// (kWarm). With kLone they are anywhere in the arena, and the device is idle when the host begins
// to enqueue, as for a caller that waits for each response. The host's time for launching a second
// kernel then counts.
enum class Setting { kCold, kMisaligned, kWarm, kLone };

// Returns the name under which an operation is timed in a setting.
std::string In(Setting setting, std::string_view operation) {
  switch (setting) {
    case Setting::kCold:
      return std::string(operation);
    case Setting::kMisaligned:
      return Join({operation, "misaligned"}, "_");
    case Setting::kWarm:
      return Join({operation, "warm"}, "_");
    case Setting::kLone:
      return Join({"lone", operation}, "_");
  }
  std::abort();
}

// Returns a function that says which strategies are timed in a setting. With kLone, these are only
// the strategies that are compared with the vendor's calls.
template <class Problem>
bool (*StrategiesIn(Setting setting))(const Strategy<Problem>&) {
  using Reference = const Strategy<Problem>&;
  if (setting != Setting::kLone) return [](Reference) { return true; };
  return
      [](Reference strategy) { return strategy.name == "fixed_tree" || strategy.name == "cublas"; };
}

// Returns the next operand of n elements.
const void* NextOperand(Arena& arena, Setting setting, DType dtype, std::int64_t n) {
  if (setting == Setting::kWarm) arena.Rewind();
  const std::size_t size = SizeOf(dtype);
  auto* operand = static_cast<char*>(arena.Next(static_cast<std::size_t>(n + 1) * size));
  return operand + (setting == Setting::kMisaligned ? size : 0);
}

void RegisterDot(Rig& rig, DType dtype, std::int64_t n, Setting setting = Setting::kCold) {
  const std::size_t bytes = static_cast<std::size_t>(n) * SizeOf(dtype);
  rig.Need(dtype, 2 * bytes);
  const DotProblem like{.dtype = dtype, .n = n};
  ForStrategies(
      rig, like, absl::StrCat(n),
      [&rig, like, bytes, setting](auto& state, auto& strategy) {
        const auto launch = [&] {
          Arena& arena = rig.Operands(like.dtype);
          DotProblem p = like;
          p.a = NextOperand(arena, setting, like.dtype, like.n);
          p.b = NextOperand(arena, setting == Setting::kWarm ? Setting::kCold : setting, like.dtype,
                            like.n);
          p.result = rig.stream().result();
          strategy.launch(p, rig.stream());
        };
        Time(rig, state, 2.0 * static_cast<double>(bytes), 2.0 * static_cast<double>(like.n),
             launch, setting != Setting::kLone);
      },
      In(setting, DotProblem::kOperation), StrategiesIn<DotProblem>(setting));
}

void RegisterReduce(Rig& rig, DType dtype, std::int64_t n, ReduceOp op, std::string_view operation,
                    Setting setting = Setting::kCold) {
  const std::size_t bytes = static_cast<std::size_t>(n) * SizeOf(dtype);
  rig.Need(dtype, bytes);
  const ReduceProblem like{.dtype = dtype, .op = op, .n = n};
  ForStrategies(
      rig, like, absl::StrCat(n),
      [&rig, like, bytes, setting](auto& state, auto& strategy) {
        const auto launch = [&] {
          ReduceProblem p = like;
          p.x = NextOperand(rig.Operands(like.dtype), setting, like.dtype, like.n);
          p.result = rig.stream().result();
          strategy.launch(p, rig.stream());
        };
        Time(rig, state, static_cast<double>(bytes), static_cast<double>(like.n), launch,
             setting != Setting::kLone);
      },
      In(setting, operation), StrategiesIn<ReduceProblem>(setting));
}

// Registers batches of `count` vectors of n elements each, in one launch.
void RegisterBatches(Rig& rig, std::int64_t count, std::int64_t n) {
  const std::size_t bytes = static_cast<std::size_t>(count * n) * sizeof(float);
  rig.Need(DType::kF32, 2 * bytes);
  for (bool dot : {false, true}) {
    const std::string name =
        absl::StrCat("batch/", dot ? "dot" : "reduce_sum", "/f32/", count, "x", n);
    const double moved = static_cast<double>(dot ? 2 * bytes : bytes);
    benchmark::RegisterBenchmark(
        name.c_str(),
        [&rig, dot, count, n, bytes, moved](benchmark::State& state) {
          Arena& arena = rig.Operands(DType::kF32);
          std::vector<DotItem> dots(static_cast<std::size_t>(count));
          std::vector<ReduceItem> sums(dots.size());
          const auto launch = [&] {
            const auto* a = static_cast<const float*>(arena.Next(bytes));
            const auto* b = static_cast<const float*>(arena.Next(bytes));
            auto* results =
                static_cast<Scalar*>(rig.stream().HostScratch(dots.size() * sizeof(Scalar)));
            for (std::size_t i = 0; i < dots.size(); ++i) {
              const std::int64_t at = static_cast<std::int64_t>(i) * n;
              dots[i] = {{a + at, b + at}, n};
              sums[i] = {{a + at}, n};
            }
            dot ? LaunchBatch(DType::kF32, dots, results, rig.stream())
                : LaunchBatch(DType::kF32, ReduceOp::kSum, sums, results, rig.stream());
          };
          Time(rig, state, moved, moved / sizeof(float), launch);
        })
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
  }
}

// Registers the vendor's own calls, to be compared with the strategies.
void RegisterPeers([[maybe_unused]] Rig& rig, [[maybe_unused]] std::int64_t n,
                   [[maybe_unused]] Setting setting = Setting::kCold) {
#ifdef TESSERA_WITH_CUDA
  if (rig.device().info().backend != Backend::kCuda || !HasPeers()) return;
  const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(float);
  for (const auto& [peer, operation] : {std::pair{Peer::kCubSum, "cub_sum"},
                                        {Peer::kCubMax, "cub_max"},
                                        {Peer::kCubArgMax, "cub_argmax"},
                                        {Peer::kCublasNrm2, "cublas_nrm2"},
                                        {Peer::kCublasAsum, "cublas_asum"}}) {
    if (setting == Setting::kLone && peer != Peer::kCubSum) continue;
    benchmark::RegisterBenchmark(
        absl::StrCat(In(setting, "peer"), "/", operation, "/f32/", n).c_str(),
        [&rig, peer = peer, n, bytes, setting](benchmark::State& state) {
          const auto launch = [&] {
            const void* x = rig.Operands(DType::kF32).Next(bytes);
            LaunchPeer(peer, rig.stream(), static_cast<const float*>(x), n);
          };
          Time(rig, state, static_cast<double>(bytes), static_cast<double>(n), launch,
               setting != Setting::kLone);
        })
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
  }
#endif
}

void RegisterAdd(Rig& rig, DType dtype, std::int64_t n) {
  const std::size_t bytes = static_cast<std::size_t>(n) * SizeOf(dtype);
  rig.Need(dtype, 2 * bytes);
  rig.NeedOutput(bytes);
  const AddProblem like{.dtype = dtype, .n = n};
  ForStrategies(rig, like, absl::StrCat(n), [&rig, like, bytes](auto& state, auto& strategy) {
    Time(rig, state, 3.0 * static_cast<double>(bytes), static_cast<double>(like.n), [&] {
      Arena& arena = rig.Operands(like.dtype);
      AddProblem p = like;
      p.a = arena.Next(bytes);
      p.b = arena.Next(bytes);
      p.out = rig.Output(bytes);
      strategy.launch(p, rig.stream());
    });
  });
}

// An expression that is timed in addition to a * b + c. has_row: operand 1 is one row of
// kRowLength, which is broadcast to all rows.
struct MapCase {
  std::string_view name;
  int operands;
  std::vector<ExpressionNode> nodes;
  bool has_row = false;
};
constexpr std::int64_t kRowLength = 8192;

const std::vector<MapCase>& MapCases() {
  using Kind = ExpressionNode::Kind;
  const auto in = [](std::uint32_t i) {
    return ExpressionNode{.kind = Kind::kOperand, .operand = i};
  };
  const auto real = [](double x) { return ExpressionNode{.kind = Kind::kReal, .real = x}; };
  const auto op = [](MapOp o, absl::InlinedVector<std::uint32_t, kMostArguments> args) {
    return ExpressionNode{.kind = Kind::kOperation, .op = o, .args = std::move(args)};
  };
  static const auto& cases = *new std::vector<MapCase>{
      // 2 a + 1
      {"scale",
       1,
       {in(0), real(2), real(1), op(MapOp::kMultiply, {0, 1}), op(MapOp::kAdd, {3, 2})}},
      // (a - b)^2
      {"distance", 2, {in(0), in(1), op(MapOp::kSubtract, {0, 1}), op(MapOp::kMultiply, {2, 2})}},
      // a < b ? c : d
      {"where",
       4,
       {in(0), in(1), in(2), in(3), op(MapOp::kLess, {0, 1}), op(MapOp::kWhere, {4, 2, 3})}},
      // a / 2 (1 + tanh(0.79788456 (a + 0.044715 a^3)))
      {"gelu",
       1,
       {in(0), op(MapOp::kMultiply, {0, 0}), op(MapOp::kMultiply, {1, 0}), real(0.044715),
        op(MapOp::kMultiply, {2, 3}), op(MapOp::kAdd, {0, 4}), real(0.79788456),
        op(MapOp::kMultiply, {5, 6}), op(MapOp::kTanh, {7}), real(1), op(MapOp::kAdd, {8, 9}),
        real(0.5), op(MapOp::kMultiply, {0, 11}), op(MapOp::kMultiply, {12, 10})}},
      // a + b, and its tanh: the addition of a bias to a product
      {"row", 2, {in(0), in(1), op(MapOp::kAdd, {0, 1})}, true},
      {"tanh_row", 2, {in(0), in(1), op(MapOp::kAdd, {0, 1}), op(MapOp::kTanh, {2})}, true},
  };
  return cases;
}

// Registers an expression. The one that is called `map` is a * b + c.
void RegisterMap(Rig& rig, const MapProblem& like, std::string_view operation) {
  const auto bytes = static_cast<std::size_t>(like.n) * SizeOf(like.dtype);
  const int operands = like.program->operands;
  rig.Need(like.dtype, static_cast<std::size_t>(operands) * bytes);
  rig.NeedOutput(bytes);
  int whole = 0;
  for (int i = 0; i < operands; ++i)
    whole += like.operands[static_cast<std::size_t>(i)].contiguous() ? 1 : 0;
  ForStrategies(
      rig, like, absl::StrCat(like.n),
      [&rig, like, bytes, operands, whole](auto& state, auto& strategy) {
        Time(rig, state, (whole + 1.0) * static_cast<double>(bytes),
             static_cast<double>(like.program->flops) * static_cast<double>(like.n), [&] {
               Arena& arena = rig.Operands(like.dtype);
               MapProblem p = like;
               for (int i = 0; i < operands; ++i)
                 p.operands[static_cast<std::size_t>(i)].data = arena.Next(bytes);
               p.out = rig.Output(bytes);
               strategy.launch(p, rig.stream());
             });
      },
      operation);
}

void RegisterMaps(Rig& rig, DType dtype, std::int64_t n, bool all) {
  const MapProblem like = WarmUpMap(n, dtype, nullptr, nullptr);
  RegisterMap(rig, like, MapProblem::kOperation);
  if (!all || IsInteger(dtype)) return;
  for (const MapCase& c : MapCases()) {
    const std::vector<DType> dtypes(static_cast<std::size_t>(c.operands), dtype);
    const absl::StatusOr<MapProgram> program = CompileExpression(c.nodes, dtypes);
    if (!program.ok()) std::abort();
    MapProblem p = like;
    p.program = new MapProgram(*program);  // never freed
    for (std::size_t i = 3; i < dtypes.size(); ++i) p.operands[i] = p.operands[0];
    if (c.has_row) {
      for (std::size_t i = 0; i < dtypes.size(); ++i) {
        View& view = p.operands[i];
        view.shape.rank = 2;
        view.shape[0] = n / kRowLength;
        view.shape[1] = kRowLength;
        view.strides = {i == 1 ? 0 : kRowLength, 1};
      }
    }
    RegisterMap(rig, p, Join({MapProblem::kOperation, c.name}, "_"));
  }
}

// Registers the sum of an expression's result, for the strategies that compute the expression
// themselves.
void RegisterMappedReduce(Rig& rig, DType dtype, std::int64_t n, std::string_view name,
                          const std::vector<ExpressionNode>& nodes) {
  const std::size_t bytes = static_cast<std::size_t>(n) * SizeOf(dtype);
  const absl::StatusOr<MapProgram> program = CompileExpression(nodes, std::vector<DType>(2, dtype));
  if (!program.ok()) std::abort();
  MapProblem map = WarmUpMap(n, dtype, nullptr, nullptr);
  map.program = new MapProgram(*program);  // never freed
  rig.Need(dtype, 2 * bytes);
  const ReduceProblem like{.dtype = dtype, .op = ReduceOp::kSum, .n = n};
  ForStrategies<ReduceProblem>(
      rig, like, absl::StrCat(n),
      [&rig, like, map, bytes](auto& state, auto& strategy) {
        Time(rig, state, 2.0 * static_cast<double>(bytes), static_cast<double>(like.n), [&] {
          Arena& arena = rig.Operands(like.dtype);
          MapProblem operands = map;
          for (std::size_t i = 0; i < 2; ++i) operands.operands[i].data = arena.Next(bytes);
          ReduceProblem p = like;
          p.map = &operands;
          p.result = rig.stream().result();
          strategy.launch(p, rig.stream());
        });
      },
      Join({"mapped_reduce", name}, "_"),
      [](const Strategy<ReduceProblem>& strategy) { return strategy.reads_views; });
}

// Registers the sums of a * b and of (a - b)^2.
void RegisterMappedReduces(Rig& rig, DType dtype, std::int64_t n) {
  const auto in = [](std::uint32_t i) {
    return ExpressionNode{.kind = ExpressionNode::Kind::kOperand, .operand = i};
  };
  const auto op = [](MapOp o, absl::InlinedVector<std::uint32_t, kMostArguments> args) {
    return ExpressionNode{
        .kind = ExpressionNode::Kind::kOperation, .op = o, .args = std::move(args)};
  };
  RegisterMappedReduce(rig, dtype, n, "product", {in(0), in(1), op(MapOp::kMultiply, {0, 1})});
  RegisterMappedReduce(rig, dtype, n, "distance",
                       {in(0), in(1), op(MapOp::kSubtract, {0, 1}), op(MapOp::kMultiply, {2, 2})});
}

void RegisterWindowSum(Rig& rig, DType dtype, std::int64_t n, std::int64_t radius) {
  const std::size_t bytes = static_cast<std::size_t>(n) * SizeOf(dtype);
  const std::size_t out_bytes =
      static_cast<std::size_t>(n) * SizeOf(ResultDType(ReduceOp::kSum, dtype));
  rig.Need(dtype, bytes);
  rig.NeedOutput(out_bytes);
  const WindowSumProblem like{.dtype = dtype, .n = n, .radius = radius};
  ForStrategies(
      rig, like, absl::StrCat(n),
      [&rig, like, bytes, out_bytes](auto& state, auto& strategy) {
        const auto count = static_cast<double>(like.n);
        const double flops = 2.0 * static_cast<double>(like.radius) * count;
        Time(rig, state, static_cast<double>(bytes + out_bytes), flops, [&] {
          Arena& arena = rig.Operands(like.dtype);
          WindowSumProblem p = like;
          p.x = arena.Next(bytes);
          p.out = rig.Output(out_bytes);
          strategy.launch(p, rig.stream());
        });
      },
      Join({WindowSumProblem::kOperation, absl::StrCat(radius)}, "_"));
}

// Registers the selection of the k largest elements of each row. The benchmark's size is ROWSxN.
// rising: every element of an f32 row is larger than all previous ones, which is the worst case for
// a strategy with a threshold. These rows are always in the same memory, which is larger than the
// caches.
void RegisterTopK(Rig& rig, DType dtype, std::int64_t rows, std::int64_t n, std::int64_t k,
                  bool rising = false) {
  const std::size_t bytes = static_cast<std::size_t>(rows * n) * SizeOf(dtype);
  const auto results = static_cast<std::size_t>(rows * k);
  const std::size_t out_bytes = results * (SizeOf(dtype) + sizeof(std::int64_t));
  rig.Need(dtype, rising ? 0 : bytes);
  rig.NeedOutput(out_bytes);
  const TopKProblem like{.dtype = dtype, .rows = rows, .n = n, .k = k};
  // A single thread takes seconds for a long row.
  constexpr std::int64_t kLong = std::int64_t{1} << 20;
  bool (*const wanted)(const Strategy<TopKProblem>&) =
      n > kLong || rising ? [](const Strategy<TopKProblem>& s) { return s.name != "heap_thread"; }
                          : [](const Strategy<TopKProblem>&) { return true; };
  ForStrategies(
      rig, like, absl::StrCat(rows, "x", n),
      [&rig, like, bytes, results, out_bytes, rising](auto& state, auto& strategy) {
        Memory rows_that_rise;
        if (rising) {
          std::vector<float> row(static_cast<std::size_t>(like.n));
          std::iota(row.begin(), row.end(), 0.0f);
          rows_that_rise = OrDie(Allocate(rig.device(), bytes));
          auto* to = static_cast<float*>(rows_that_rise.data());
          for (std::int64_t r = 0; r < like.rows; ++r) {
            const absl::Status status =
                CopyToDevice(rig.stream(), to + r * like.n, row.data(), row.size() * sizeof(float));
            if (!status.ok()) Die(status);
          }
        }
        Time(rig, state, static_cast<double>(bytes + out_bytes), 0, [&] {
          TopKProblem p = like;
          p.x = rising ? rows_that_rise.data() : rig.Operands(like.dtype).Next(bytes);
          p.indices = static_cast<std::int64_t*>(rig.Output(out_bytes));
          p.values = p.indices + results;
          strategy.launch(p, rig.stream());
        });
      },
      Join({TopKProblem::kOperation, absl::StrCat(rising ? "rising_" : "", k)}, "_"), wanted);
}

// Registers many long rows, a few longer ones, and rows that fit the caches.
void RegisterTopKs(Rig& rig, DType dtype, bool gpu) {
  const bool f32 = dtype == DType::kF32;
  const int shift = gpu ? 0 : 4;  // rows are 16 times shorter on a CPU
  for (std::int64_t k : {10, 100}) {
    RegisterTopK(rig, dtype, 64, 4096, k);
    RegisterTopK(rig, dtype, 8, std::int64_t{1} << (24 - shift), k);
    if (f32) RegisterTopK(rig, dtype, 1024, std::int64_t{1} << (20 - shift), k);
  }
  if (!f32) return;
  for (std::int64_t k : {10, 100, 4096})
    RegisterTopK(rig, dtype, 64, std::int64_t{1} << (20 - shift), k, true);
  RegisterTopK(rig, dtype, 1, std::int64_t{1} << (20 - shift), 100);
  RegisterTopK(rig, dtype, 100000, 128, 10);
  for (std::int64_t k : {1000, 4096})
    RegisterTopK(rig, dtype, 8, std::int64_t{1} << (24 - shift), k);
}

// Registers SUM over the rows (inner 1) or the columns (outer 1) of a square matrix.
void RegisterAxes(Rig& rig, DType dtype, std::int64_t side) {
  const std::size_t bytes = static_cast<std::size_t>(side * side) * SizeOf(dtype);
  const std::size_t out_bytes =
      static_cast<std::size_t>(side) * SizeOf(ResultDType(ReduceOp::kSum, dtype));
  rig.Need(dtype, bytes);
  rig.NeedOutput(out_bytes);
  for (bool rows : {true, false}) {
    const ReduceAxesProblem like{
        .dtype = dtype, .outer = rows ? side : 1, .length = side, .inner = rows ? 1 : side};
    ForStrategies(rig, like, absl::StrCat(side, rows ? "_rows" : "_columns"),
                  [&rig, like, bytes, out_bytes](auto& state, auto& strategy) {
                    const auto count = static_cast<double>(like.length * like.length);
                    Time(rig, state, static_cast<double>(bytes), count, [&] {
                      Arena& arena = rig.Operands(like.dtype);
                      ReduceAxesProblem p = like;
                      p.x = arena.Next(bytes);
                      p.out = rig.Output(out_bytes);
                      strategy.launch(p, rig.stream());
                    });
                  });
  }
}

// Returns the largest error over some elements of c = a b, relative to the sum of the magnitudes of
// the terms.
double LargestError(Rig& rig, const MatmulProblem& p) {
  constexpr int kElements = 64;
  const Arena& arena = rig.Operands(p.dtype);
  std::mt19937_64 random(2);
  double largest = 0;
  DispatchDType(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (int element = 0; element < kElements; ++element) {
      const auto i = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(p.m));
      const auto j = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(p.n));
      T computed;
      const absl::Status status = CopyToHost(
          rig.stream(), &computed, static_cast<const T*>(p.c) + i * p.n + j, sizeof computed);
      if (!status.ok()) Die(status);
      long double sum = 0, sizes = 0;
      for (std::int64_t l = 0; l < p.k; ++l) {
        const long double term = static_cast<long double>(arena.Value<T>(p.a, i * p.lda + l)) *
                                 arena.Value<T>(p.b, l * p.ldb + j);
        sum += term;
        sizes += std::abs(term);
      }
      const long double error =
          std::abs(static_cast<long double>(static_cast<ValueOf<T>>(computed)) - sum);
      if (sizes > 0) largest = std::max(largest, static_cast<double>(error / sizes));
    }
  });
  return largest;
}

// Times launch(problem), which enqueues products like `like`. error: the result of LargestError, or
// a negative value before the first call. It is computed only once, because a benchmark is called
// many times.
template <class Launch>
void TimeMatmul(Rig& rig, benchmark::State& state, const MatmulProblem& like, double& error,
                Launch launch) {
  const auto bytes_of = [&](std::int64_t rows, std::int64_t columns) {
    return static_cast<std::size_t>(rows * columns) * SizeOf(like.dtype);
  };
  const std::size_t a_bytes = bytes_of(like.m, like.k);
  const std::size_t b_bytes = bytes_of(like.k, like.n);
  const std::size_t c_bytes = bytes_of(like.m, like.n);
  const double flops =
      2.0 * static_cast<double>(like.m) * static_cast<double>(like.n) * static_cast<double>(like.k);
  MatmulProblem p = like;
  Time(rig, state, static_cast<double>(a_bytes + b_bytes + c_bytes), flops, [&] {
    Arena& arena = rig.Operands(like.dtype);
    p.a = arena.Next(a_bytes);
    p.b = arena.Next(b_bytes);
    p.c = rig.Output(c_bytes);
    launch(p);
  });
  if (error < 0) error = LargestError(rig, p);
  state.counters["error"] = error;
}

// Registers the vendor's best call for f32 operands that are rounded to TF32.
void RegisterMatmulPeers([[maybe_unused]] Rig& rig, [[maybe_unused]] const MatmulProblem& like,
                         [[maybe_unused]] const std::string& size) {
#ifdef TESSERA_WITH_CUDA
  if (rig.device().info().backend != Backend::kCuda || !HasPeers() || like.dtype != DType::kF32)
    return;
  benchmark::RegisterBenchmark(Join({"peer/cublaslt_tf32", Name(like.dtype), size}, "/").c_str(),
                               [&rig, like, error = -1.0](benchmark::State& state) mutable {
                                 TimeMatmul(rig, state, like, error, [&](const MatmulProblem& p) {
                                   LaunchCublasLt(p, /*tf32=*/true, rig.stream());
                                 });
                               })
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
#endif
}

void RegisterMatmul(Rig& rig, DType dtype, std::int64_t m, std::int64_t n, std::int64_t k) {
  rig.Need(dtype, static_cast<std::size_t>(m * k + k * n) * SizeOf(dtype));
  rig.NeedOutput(static_cast<std::size_t>(m * n) * SizeOf(dtype));
  const MatmulProblem like{
      .dtype = dtype, .out_dtype = dtype, .m = m, .n = n, .k = k, .lda = k, .ldb = n};
  const std::string size = m == n && n == k ? absl::StrCat(m) : absl::StrCat(m, "x", n, "x", k);
  // Each strategy's benchmark has its own copy of this function, and therefore its own error.
  const auto body = [&rig, like, error = -1.0](auto& state, auto& strategy) mutable {
    TimeMatmul(rig, state, like, error,
               [&](const MatmulProblem& p) { strategy.launch(p, rig.stream()); });
  };
  const auto all = [](const Strategy<MatmulProblem>&) { return true; };
  // The strategies for the largest products, for which the simpler strategies take seconds.
  const auto fast = [](const Strategy<MatmulProblem>& strategy) {
    return strategy.vendor || strategy.name == "warp_tiled_tma" || strategy.name == "ozaki_f64" ||
           strategy.name.substr(0, 7) == "tensor_";
  };
  const double products = static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  const bool large = products > (dtype == DType::kF32 ? 0x1p39 : 0x1p38);
  ForStrategies<MatmulProblem>(rig, like, size, body, MatmulProblem::kOperation,
                               large ? +fast : +all);
  RegisterMatmulPeers(rig, like, size);
}

void RegisterCeilings(Rig& rig, bool gpu) {
  const std::size_t bytes = std::size_t{1} << (gpu ? 32 : 28);
  rig.Need(DType::kF32, bytes);
  rig.NeedOutput(bytes);
  const auto add = [](const std::string& name, auto body) {
    benchmark::RegisterBenchmark(name.c_str(), body)
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
  };
  add(absl::StrCat("ceiling/read/f32/", bytes), [&rig, bytes](benchmark::State& state) {
    Time(rig, state, static_cast<double>(bytes), 0, [&] {
      LaunchRead(rig.stream(), rig.Operands(DType::kF32).Next(bytes), bytes,
                 rig.stream().Scratch(16));
    });
  });
  add(absl::StrCat("ceiling/copy/f32/", bytes), [&rig, bytes](benchmark::State& state) {
    Time(rig, state, 2.0 * static_cast<double>(bytes), 0, [&] {
      Arena& arena = rig.Operands(DType::kF32);
      void* from = arena.Next(bytes);
      LaunchCopy(rig.stream(), rig.Output(bytes), from, bytes);
    });
  });
  for (bool wide : {false, true}) {
    add(wide ? "ceiling/fma/f64/0" : "ceiling/fma/f32/0", [&rig, wide](benchmark::State& state) {
      const double flops = LaunchFma(rig.stream(), wide, rig.stream().Scratch(16));
      Time(rig, state, 0, flops, [&] { LaunchFma(rig.stream(), wide, rig.stream().Scratch(16)); });
    });
  }
}

// f32 is timed at every other power of two from 2^8 up, and the other types at three sizes. The
// largest arrays of the other types all have about the same number of bytes.
void RegisterAll(Rig& rig, bool gpu, int max_exponent) {
  for (DType dtype : kAllDTypes) {
    const bool f32 = dtype == DType::kF32;
    const int top = f32 ? max_exponent : std::min(max_exponent, SizeOf(dtype) == 8 ? 27 : 28);
    for (int exponent = 8; exponent <= top; ++exponent) {
      if (f32 ? exponent % 2 != 0 : exponent != 16 && exponent != 22 && exponent != top) continue;
      const std::int64_t n = std::int64_t{1} << exponent;
      RegisterDot(rig, dtype, n);
      RegisterReduce(rig, dtype, n, ReduceOp::kSum, "reduce");
      RegisterAdd(rig, dtype, n);
      RegisterMaps(rig, dtype, n, exponent == 16 || exponent == 22 || exponent == top);
      if (exponent == 16 || exponent == 22 || exponent == std::min(top, 28))
        RegisterMappedReduces(rig, dtype, n);
      RegisterWindowSum(rig, dtype, n, 8);
      if (!f32) continue;
      RegisterPeers(rig, n);
      if (gpu && exponent <= 22) {
        RegisterDot(rig, dtype, n, Setting::kLone);
        RegisterReduce(rig, dtype, n, ReduceOp::kSum, "reduce", Setting::kLone);
        RegisterPeers(rig, n, Setting::kLone);
      }
      if (exponent == 20 || exponent == 22) {
        RegisterDot(rig, dtype, n, Setting::kWarm);
        RegisterReduce(rig, dtype, n, ReduceOp::kSum, "reduce", Setting::kWarm);
      }
      if (exponent != 20 && exponent != std::min(top, 28)) continue;
      RegisterDot(rig, dtype, n, Setting::kMisaligned);
      RegisterReduce(rig, dtype, n, ReduceOp::kSum, "reduce", Setting::kMisaligned);
      RegisterReduce(rig, dtype, n, ReduceOp::kMax, "reduce_max");
      RegisterReduce(rig, dtype, n, ReduceOp::kArgMax, "reduce_argmax");
      RegisterReduce(rig, dtype, n, ReduceOp::kNormL1, "reduce_norm_l1");
      RegisterReduce(rig, dtype, n, ReduceOp::kNormL2, "reduce_norm_l2");
      RegisterReduce(rig, dtype, n, ReduceOp::kVariance, "reduce_variance");
      for (std::int64_t radius : {1, 64, 512}) RegisterWindowSum(rig, dtype, n, radius);
    }
    RegisterTopKs(rig, dtype, gpu);
    for (std::int64_t side : {256, 512, 1024, 2048, 4096, 8192, 16384}) {
      if (!gpu && side > 1024) break;
      const bool shown = side == (gpu ? 4096 : 512);
      const bool tensors = gpu && !IsInteger(dtype) && side >= 2048;
      if (f32 || shown || tensors) RegisterMatmul(rig, dtype, side, side, side);
      if (side >= 1024 && side <= 8192 && (f32 || side >= (gpu ? 4096 : 1024)))
        RegisterAxes(rig, dtype, side);
    }
    if (f32) {
      RegisterMatmul(rig, dtype, 1021, 1031, 1033);  // primes: no tile size divides them
      RegisterMatmul(rig, dtype, 1, 4096, 4096);
      for (std::int64_t count : {64, 1000, 10000}) RegisterBatches(rig, count, 4096);
    }
    if (gpu && dtype == DType::kF64) RegisterMatmul(rig, dtype, 1, 8192, 8192);
    if (gpu && (f32 || dtype == DType::kBF16 || dtype == DType::kF16)) {
      RegisterMatmul(rig, dtype, 1, 8192, 8192);
      RegisterMatmul(rig, dtype, 16, 8192, 8192);
      RegisterMatmul(rig, dtype, 8192, 1, 8192);  // the large operand is contiguous along k
      RegisterMatmul(rig, dtype, 8192, 16, 8192);
      RegisterMatmul(rig, dtype, 64, 8192, 8192);
      RegisterMatmul(rig, dtype, 256, 8192, 8192);
      RegisterMatmul(rig, dtype, 4096, 14336, 4096);
      RegisterMatmul(rig, dtype, 8192, 1024, 8192);
      RegisterMatmul(rig, dtype, 4093, 4099, 4111);
    }
    if (gpu) {
      for (std::int64_t k : {1, 8}) RegisterMatmul(rig, dtype, 4096, 4096, k);
    }
  }
  RegisterCeilings(rig, gpu);
}

// Removes --name=value from the arguments and returns its value.
std::string TakeFlag(std::vector<char*>& arguments, std::string_view name, std::string value) {
  const std::string prefix = absl::StrCat("--", std::string(name), "=");
  for (auto it = arguments.begin(); it != arguments.end();) {
    const std::string_view argument = *it;
    if (argument.substr(0, prefix.size()) == prefix) {
      value = argument.substr(prefix.size());
      it = arguments.erase(it);
    } else {
      ++it;
    }
  }
  return value;
}

int Main(int argc, char** argv) {
  std::vector<char*> arguments(argv, argv + argc);
  const std::string device = TakeFlag(arguments, "device", "auto");
  int max_exponent = 0;
  RegretOptions regret;
  if (!absl::SimpleAtoi(TakeFlag(arguments, "max_exponent", "0"), &max_exponent) ||
      !absl::SimpleAtoi(TakeFlag(arguments, "regret", "0"), &regret.problems) ||
      !absl::SimpleAtoi(TakeFlag(arguments, "seed", "1"), &regret.seed))
    return 2;
  regret.operation = TakeFlag(arguments, "operation", "");
  regret.json = TakeFlag(arguments, "json", "");
  Rig rig(device);
  if (regret.problems > 0) return RunRegret(rig, regret);
  const bool gpu = rig.gpu();
  if (max_exponent == 0) max_exponent = gpu ? 30 : 24;

  RegisterAll(rig, gpu, max_exponent);

  benchmark::AddCustomContext("tessera_device", rig.device().info().name);
  benchmark::AddCustomContext("tessera_model", rig.device().info().model);
  int count = static_cast<int>(arguments.size());
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) { return tessera::bench::Main(argc, argv); }
