// Every strategy of the table, timed by the device's events on one device, beside the vendor's row
// and the ceilings.
//
//   strategy_bench [--device=auto|cuda:0|cpu] [--max_exponent=30] [Google Benchmark's flags]
//
// Names are operation/strategy/dtype/size. Time is device time (manual time), from the first to the
// last piece of work of one operation. Operands hold random normal values and rotate through more
// than three times the largest L2 cache, so that every pass reads memory. Run with
// --benchmark_enable_random_interleaving and repetitions to compare rows fairly.
#include <benchmark/benchmark.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/compute.h"
#ifdef TESSERA_WITH_CUDA
#include "tests/bench/ceilings.h"
#endif

namespace tessera::bench {
namespace {

// More than three times 60 MB, the L2 cache of an H200.
constexpr std::size_t kRotation = std::size_t{256} << 20;
constexpr std::size_t kAlignment = 256;

[[noreturn]] void Die(const absl::Status& status) {
  std::fprintf(stderr, "strategy_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}

template <class T>
T OrDie(absl::StatusOr<T> value) {
  if (!value.ok()) Die(value.status());
  return *std::move(value);
}

// Device memory full of normal values of one type, from which operands are cut in turn.
class Arena {
 public:
  Arena(Lane& lane, DType dtype, std::size_t bytes)
      : memory_(OrDie(Allocate(lane.device(), bytes + kRotation))) {
    std::mt19937 random(1);
    std::normal_distribution<double> normal;
    std::vector<char> block(std::size_t{16} << 20);
    for (std::size_t at = 0; at < block.size(); at += SizeOf(dtype)) {
      const double value = normal(random);
      const auto real = static_cast<float>(value);
      if (dtype == DType::kF32) {
        std::memcpy(&block[at], &real, 4);
      } else {
        std::memcpy(&block[at], &value, 8);
      }
    }
    for (std::size_t at = 0; at < memory_.size(); at += block.size()) {
      const absl::Status status =
          CopyToDevice(lane, static_cast<char*>(memory_.data()) + at, block.data(),
                       std::min(block.size(), memory_.size() - at));
      if (!status.ok()) Die(status);
    }
  }

  // bytes of operand, elsewhere than the last ones.
  void* Next(std::size_t bytes) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (at_ + bytes > memory_.size()) at_ = 0;
    void* operand = static_cast<char*>(memory_.data()) + at_;
    at_ += bytes;
    return operand;
  }

 private:
  Memory memory_;
  std::size_t at_ = 0;
};

class Rig {
 public:
  explicit Rig(std::string_view name)
      : device_(OrDie(OpenDevice(name))), lane_(OrDie(MakeLane(*device_))) {}

  Device& device() { return *device_; }
  Lane& lane() { return *lane_; }

  // Operands of `bytes` a call in all; made on the first use and as large as any use needs.
  void Need(DType dtype, std::size_t bytes) { needs_[dtype] = std::max(needs_[dtype], bytes); }
  Arena& Operands(DType dtype) {
    std::unique_ptr<Arena>& arena = arenas_[dtype];
    if (arena == nullptr) arena = std::make_unique<Arena>(*lane_, dtype, needs_[dtype]);
    return *arena;
  }

  // Times launch(), which enqueues one operation, until Google Benchmark has enough. bytes and
  // flops: of the problem itself, each input read once and each output written once.
  void Time(benchmark::State& state, double bytes, double flops,
            const std::function<void()>& launch) {
    try {
      for (int warm = 0; warm < 2; ++warm) {
        lane_->Reset();
        launch();
        lane_->Synchronize();
      }
      for (auto _ : state) {
        lane_->Reset();
        lane_->StartTimer();
        launch();
        state.SetIterationTime(lane_->StopTimer() * 1e-6);
      }
    } catch (const DeviceError& error) {
      state.SkipWithError(error.what());
      return;
    }
    using benchmark::Counter;
    const auto iterations = static_cast<double>(state.iterations());
    if (bytes > 0)
      state.counters["bytes_per_second"] = Counter(bytes * iterations, Counter::kIsRate);
    if (flops > 0)
      state.counters["flops_per_second"] = Counter(flops * iterations, Counter::kIsRate);
  }

 private:
  std::unique_ptr<Device> device_;
  std::unique_ptr<Lane> lane_;
  std::map<DType, std::size_t> needs_;
  std::map<DType, std::unique_ptr<Arena>> arenas_;
};

// Every row for the type that runs here and, if there is a problem to ask it about, takes that.
template <class Problem, class Body>
void ForRows(Rig& rig, DType dtype, const std::string& size, Body body,
             const Problem* problem = nullptr) {
  for (const Strategy<Problem>* row : Strategies<Problem>()) {
    if (!row->dtypes.Contains(dtype) || !Missing(*row, rig.device()).empty()) continue;
    if (problem != nullptr && !Refusal(*row, *problem).empty()) continue;
    const std::string name =
        absl::StrCat(std::string(kOperation<Problem>), "/", std::string(row->name), "/",
                     std::string(Name(dtype)), "/", size);
    benchmark::RegisterBenchmark(name.c_str(),
                                 [row, body](benchmark::State& state) { body(state, *row); })
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
  }
}

void RegisterVectors(Rig& rig, DType dtype, std::int64_t n) {
  const std::size_t bytes = static_cast<std::size_t>(n) * SizeOf(dtype);
  const auto count = static_cast<double>(n);
  const std::string size = absl::StrCat(n);
  rig.Need(dtype, 3 * bytes);
  ForRows<DotProblem>(rig, dtype, size, [&rig, dtype, n, bytes, count](auto& state, auto& row) {
    rig.Time(state, 2.0 * static_cast<double>(bytes), 2 * count, [&] {
      Arena& arena = rig.Operands(dtype);
      DotProblem p{.dtype = dtype, .n = n, .result = rig.lane().result()};
      p.a = arena.Next(bytes);
      p.b = arena.Next(bytes);
      row.launch(p, rig.lane());
    });
  });
  ForRows<ReduceProblem>(rig, dtype, size, [&rig, dtype, n, bytes, count](auto& state, auto& row) {
    rig.Time(state, static_cast<double>(bytes), count, [&] {
      ReduceProblem p{.dtype = dtype, .n = n, .result = rig.lane().result()};
      p.x = rig.Operands(dtype).Next(bytes);
      row.launch(p, rig.lane());
    });
  });
  ForRows<AddProblem>(rig, dtype, size, [&rig, dtype, n, bytes, count](auto& state, auto& row) {
    rig.Time(state, 3.0 * static_cast<double>(bytes), count, [&] {
      Arena& arena = rig.Operands(dtype);
      AddProblem p{.dtype = dtype, .n = n};
      p.a = arena.Next(bytes);
      p.b = arena.Next(bytes);
      p.out = arena.Next(bytes);
      row.launch(p, rig.lane());
    });
  });
}

// SUM over the rows (inner 1) or the columns (outer 1) of a square matrix.
void RegisterAxes(Rig& rig, DType dtype, std::int64_t side) {
  const std::size_t bytes = static_cast<std::size_t>(side * side) * SizeOf(dtype);
  rig.Need(dtype, 2 * bytes);
  for (bool rows : {true, false}) {
    const std::string size = absl::StrCat(side, rows ? "_rows" : "_columns");
    ForRows<ReduceAxesProblem>(
        rig, dtype, size, [&rig, dtype, side, bytes, rows](auto& state, auto& row) {
          const auto count = static_cast<double>(side * side);
          rig.Time(state, static_cast<double>(bytes), count, [&] {
            Arena& arena = rig.Operands(dtype);
            ReduceAxesProblem p{
                .dtype = dtype, .outer = rows ? side : 1, .length = side, .inner = rows ? 1 : side};
            p.x = arena.Next(bytes);
            p.out = arena.Next(static_cast<std::size_t>(side) * SizeOf(dtype));
            row.launch(p, rig.lane());
          });
        });
  }
}

void RegisterMatmul(Rig& rig, DType dtype, std::int64_t side) {
  const std::size_t bytes = static_cast<std::size_t>(side * side) * SizeOf(dtype);
  rig.Need(dtype, 3 * bytes);
  const MatmulProblem problem{.dtype = dtype,
                              .out_dtype = dtype,
                              .m = side,
                              .n = side,
                              .k = side,
                              .lda = side,
                              .ldb = side};
  ForRows<MatmulProblem>(
      rig, dtype, absl::StrCat(side),
      [&rig, dtype, side, bytes, problem](auto& state, auto& row) {
        const auto s = static_cast<double>(side);
        rig.Time(state, 3.0 * static_cast<double>(bytes), 2 * s * s * s, [&] {
          Arena& arena = rig.Operands(dtype);
          MatmulProblem p = problem;
          p.a = arena.Next(bytes);
          p.b = arena.Next(bytes);
          p.c = arena.Next(bytes);
          row.launch(p, rig.lane());
        });
      },
      &problem);
}

void RegisterCeilings([[maybe_unused]] Rig& rig) {
#ifdef TESSERA_WITH_CUDA
  if (rig.device().info().backend != Backend::kCuda) return;
  constexpr std::size_t kBytes = std::size_t{4} << 30;
  rig.Need(DType::kF32, 2 * kBytes);
  const auto add = [](const char* name, auto body) {
    benchmark::RegisterBenchmark(name, body)->UseManualTime()->Unit(benchmark::kMicrosecond);
  };
  add("ceiling/read/f32/4294967296", [&rig](benchmark::State& state) {
    rig.Time(state, static_cast<double>(kBytes), 0, [&] {
      LaunchRead(rig.lane(), rig.Operands(DType::kF32).Next(kBytes), kBytes,
                 rig.lane().Scratch(16));
    });
  });
  add("ceiling/copy/f32/4294967296", [&rig](benchmark::State& state) {
    rig.Time(state, 2.0 * static_cast<double>(kBytes), 0, [&] {
      Arena& arena = rig.Operands(DType::kF32);
      void* from = arena.Next(kBytes);
      LaunchCopy(rig.lane(), arena.Next(kBytes), from, kBytes);
    });
  });
  for (bool wide : {false, true}) {
    add(wide ? "ceiling/fma/f64/0" : "ceiling/fma/f32/0", [&rig, wide](benchmark::State& state) {
      const double flops = LaunchFma(rig.lane(), wide, rig.lane().Scratch(16));
      rig.Time(state, 0, flops, [&] { LaunchFma(rig.lane(), wide, rig.lane().Scratch(16)); });
    });
  }
#endif
}

// Takes --name=value out of the arguments.
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
  if (!absl::SimpleAtoi(TakeFlag(arguments, "max_exponent", "0"), &max_exponent)) return 2;
  Rig rig(device);
  const bool gpu = rig.device().info().backend == Backend::kCuda;
  if (max_exponent == 0) max_exponent = gpu ? 30 : 24;

  for (DType dtype : {DType::kF32, DType::kF64}) {
    // An f64 array of 2^n elements has the bytes of an f32 array of 2^(n + 1).
    const int top = dtype == DType::kF32 ? max_exponent : std::min(max_exponent, 28);
    for (int exponent = 10; exponent <= top; exponent += dtype == DType::kF32 ? 2 : 6)
      RegisterVectors(rig, dtype, std::int64_t{1} << exponent);
    for (std::int64_t side : {512, 1024, 2048, 4096, 8192}) {
      if (!gpu && side > 1024) break;
      if (dtype == DType::kF32 || side == 4096) {
        RegisterMatmul(rig, dtype, side);
        RegisterAxes(rig, dtype, side);
      }
    }
  }
  RegisterCeilings(rig);

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
