// bench: compares the strategies of an operation.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/cli/command.h"
#include "client/cli/comparison.h"
#include "client/cli/operands.h"
#include "client/cli/results.h"
#include "client/expression_text.h"

namespace tessera {
namespace {

struct BenchFlags {
  std::string strategies;
  int repeat = 20;
  Launch launch;
  std::string op;
  std::string a;
  std::string b;
  std::string axes;
  std::int64_t radius = 0;
  std::int64_t k = 0;
  bool smallest = false;
  std::optional<int> axis;
  bool transpose_a = false;
  bool transpose_b = false;
  std::string out_dtype;
  std::string expression;
  std::vector<std::string> operands;

  // Returns the options of one call. The caller sets the target of an array result.
  OperationOptions Options(const std::string& strategy) const {
    OperationOptions options;
    options.cancel = InterruptScope::token();
    options.strategy = strategy;
    options.launch = launch;
    options.timing = true;
    return options;
  }
};

// One run of `tessera bench`, with the state and functions that all operations share.
class Bench {
 public:
  Bench(Session& session, const BenchFlags& flags, const v1::GetServerInfoResponse& info)
      : session_(session), flags_(flags), info_(info), scratch_(session.client, info.limits()) {
    problem.repeat = flags.repeat;
  }

  absl::StatusOr<Input> Resolve(const std::string& text) { return ResolveInput(session_, text); }
  // Returns both operands. An operand that is given twice counts as read once.
  absl::StatusOr<std::pair<Input, Input>> ResolveBoth() {
    auto a = Resolve(flags_.a);
    if (!a.ok()) return a.status();
    auto b = Resolve(flags_.b);
    if (!b.ok()) return b.status();
    problem.operand_bytes = a->bytes() + (a->text == b->text ? 0 : b->bytes());
    return std::make_pair(*std::move(a), *std::move(b));
  }

  // Returns the result of a call that stored its array in Target().
  template <class Response>
  absl::StatusOr<BenchAnswer> ArrayAnswer(const absl::StatusOr<Response>& response,
                                          bool with_values) {
    if (!response.ok()) return response.status();
    BenchAnswer answer{.stats = response->stats(),
                       .result_bytes = response->buffer().size_bytes(),
                       .dtype = static_cast<DType>(response->buffer().dtype())};
    if (with_values) {
      auto values = scratch_.Fetch(response->buffer());
      if (!values.ok()) return values.status();
      answer.values = *std::move(values);
    }
    return answer;
  }
  ResultBuffer Target(std::string_view name = "result") { return scratch_.Target(name); }
  absl::StatusOr<BenchValues> Fetch(const v1::Buffer& buffer) { return scratch_.Fetch(buffer); }

  // Returns L2 norms, with a margin for their own rounding. By the Cauchy-Schwarz inequality, the
  // sums of magnitudes in the error bounds are at most products of such norms.
  absl::StatusOr<BenchValues> Norms(const Operand& x, const std::vector<int>& axes) {
    constexpr long double kRoom = 1.01L;
    OperationOptions options;
    if (!axes.empty()) options.target = scratch_.Target("norms");
    const auto response = client().Reduce(ReduceOp::kNormL2, x, axes, false, options);
    if (!response.ok()) return response.status();
    absl::StatusOr<BenchValues> norms =
        axes.empty() ? ToValues(response->value()) : scratch_.Fetch(response->buffer());
    if (norms.ok()) {
      for (long double& norm : *norms) norm *= kRoom;
    }
    return norms;
  }

  enum class Ceiling { kMemory, kVendor };

  // Runs the problem, measures its ceiling, and prints the report.
  absl::Status Report(Ceiling ceiling) {
    const auto list = client().ListStrategies(problem.operation);
    if (!list.ok()) return list.status();
    if (flags_.strategies.empty()) {
      for (const v1::Strategy& strategy : *list) AddStrategy(strategy.name());
    } else {
      for (absl::string_view name : absl::StrSplit(flags_.strategies, ',', absl::SkipEmpty())) {
        AddStrategy(std::string(name));
      }
      if (problem.strategies.empty()) return BadOption("--strategy takes names, as in a,b,c");
    }
    const InterruptScope interrupts;
    problem.run = [run = problem.run](const std::string& strategy,
                                      bool with_values) -> absl::StatusOr<BenchAnswer> {
      if (absl::Status status = InterruptScope::Check(); !status.ok()) return status;
      return run(strategy, with_values);
    };
    auto report = RunBench(problem);
    if (!report.ok()) return report.status();
    const auto device =
        std::find_if(info_.devices().begin(), info_.devices().end(),
                     [&](const v1::Device& d) { return d.name() == report->device; });
    if (device != info_.devices().end()) {
      report->ceiling = ceiling == Ceiling::kVendor ? VendorRate(*report, *list, *device)
                                                    : MeasureBandwidth(client(), scratch_, *device);
    }
    if (session_.json) {
      session_.document = ToJson(*report);
    } else {
      const bool terminal = ::isatty(STDOUT_FILENO) != 0;
      std::cout << ChartText(*report, TerminalColumns(), terminal && IsUtf8Locale());
    }
    return CheckAgreement(*report);
  }

  Client& client() { return session_.client; }

  BenchProblem problem;

 private:
  void AddStrategy(const std::string& name) {
    // A name may stand for a strategy on each kind of device. It keeps its last position, because
    // the CPU's strategies are listed first. Without GPUs, this does not change the order.
    auto& names = problem.strategies;
    names.erase(std::remove(names.begin(), names.end(), name), names.end());
    names.push_back(name);
  }

  // Returns the vendor library's rate on the same problem. list: the operation's strategies.
  BenchCeiling VendorRate(const BenchReport& report, const std::vector<v1::Strategy>& list,
                          const v1::Device& device) {
    const auto library = std::find_if(list.begin(), list.end(), [&](const v1::Strategy& s) {
      return s.vendor() && s.backend() == device.backend();
    });
    if (library == list.end()) return {0, "not known: the server lists no library"};
    const std::string& vendor = library->name();
    const auto rate = [&](const BenchReport& in) {
      const auto row = std::find_if(in.rows.begin(), in.rows.end(),
                                    [&](const auto& r) { return r.strategy == vendor; });
      return row == in.rows.end() ? 0 : row->rate;
    };
    double found = rate(report);
    if (found == 0) {
      problem.strategies = {vendor};
      if (const auto alone = RunBench(problem); alone.ok()) found = rate(*alone);
    }
    if (found == 0) return {0, "not known: " + vendor + " does not run this problem here"};
    return {found, vendor + " on the same problem in the same run"};
  }

  Session& session_;
  const BenchFlags& flags_;
  const v1::GetServerInfoResponse& info_;
  BenchScratch scratch_;
};

BenchScale ConstantScale(long double scale) {
  return [scale](std::size_t, long double) { return scale; };
}

absl::Status BenchDot(Bench& bench, const BenchFlags& flags) {
  const auto inputs = bench.ResolveBoth();
  if (!inputs.ok()) return inputs.status();
  const auto& [a, b] = *inputs;
  bench.problem.operation = "dot";
  bench.problem.title = absl::StrCat("dot of ", a.text, " and ", b.text, ", ", a.type());
  bench.problem.run = [&, &a = a, &b = b](const std::string& strategy,
                                          bool) -> absl::StatusOr<BenchAnswer> {
    const auto response = bench.client().Dot(a.operand, b.operand, flags.Options(strategy));
    if (!response.ok()) return response.status();
    return BenchAnswer{.stats = response->stats(), .values = ToValues(response->value())};
  };
  bench.problem.scale = [&, &a = a, &b = b]() -> absl::StatusOr<BenchScale> {
    if (IsInteger(a.dtype)) return ConstantScale(0);
    const auto norm_a = bench.Norms(a.operand, {});
    if (!norm_a.ok()) return norm_a.status();
    const auto norm_b = bench.Norms(b.operand, {});
    if (!norm_b.ok()) return norm_b.status();
    return ConstantScale(norm_a->front() * norm_b->front());
  };
  return bench.Report(Bench::Ceiling::kMemory);
}

absl::Status BenchReduce(Bench& bench, const BenchFlags& flags) {
  const auto parsed = ParseAxes(flags.axes);
  if (!parsed.ok()) return parsed.status();
  const std::vector<int>& axes = *parsed;
  const auto x = bench.Resolve(flags.a);
  if (!x.ok()) return x.status();
  const ReduceOp op = Parse(kAllReduceOps, flags.op);
  bench.problem.operand_bytes = x->bytes();
  bench.problem.operation = axes.empty() ? "reduce" : "reduce_axes";
  bench.problem.title =
      absl::StrCat("reduce ", flags.op, axes.empty() ? "" : " along " + flags.axes, " of ", x->text,
                   ", ", x->type());
  bench.problem.run = [&](const std::string& strategy,
                          bool with_values) -> absl::StatusOr<BenchAnswer> {
    OperationOptions options = flags.Options(strategy);
    if (!axes.empty()) options.target = bench.Target();
    const auto response = bench.client().Reduce(op, x->operand, axes, false, options);
    if (!axes.empty()) return bench.ArrayAnswer(response, with_values);
    if (!response.ok()) return response.status();
    BenchAnswer answer{.stats = response->stats(), .values = ToValues(response->value())};
    if (IsArg(op)) answer.values.push_back(static_cast<long double>(response->index()));
    return answer;
  };
  bench.problem.scale = [&]() -> absl::StatusOr<BenchScale> {
    if (IsExact(op, x->dtype)) return ConstantScale(0);
    if (op == ReduceOp::kNormL1 || op == ReduceOp::kNormL2 || op == ReduceOp::kSumSquares ||
        IsDeviation(op))
      return [](std::size_t, long double value) { return std::abs(value); };
    if (op == ReduceOp::kProduct) {
      // Partial products of very small or large factors may overflow or underflow in one order but
      // not in another.
      const long double small = x->dtype == DType::kF64 ? 1e-290L : 1e-30L;
      return [small](std::size_t, long double value) {
        const long double size = std::abs(value);
        return size > small && std::isfinite(size) ? size : HUGE_VALL;
      };
    }
    auto norms = bench.Norms(x->operand, axes);
    if (!norms.ok()) return norms.status();
    long double folded = 1;
    const auto rank = static_cast<int>(x->shape.size());
    for (int axis : axes)
      folded *= static_cast<long double>(x->shape[static_cast<std::size_t>((axis + rank) % rank)]);
    const long double n = axes.empty() ? static_cast<long double>(x->elements()) : folded;
    return [norms = *std::move(norms), n, op](std::size_t i, long double) {
      const long double magnitudes = norms[i] * std::sqrt(n);
      return op == ReduceOp::kMean ? magnitudes / n : magnitudes;
    };
  };
  return bench.Report(Bench::Ceiling::kMemory);
}

absl::Status BenchMatmul(Bench& bench, const BenchFlags& flags) {
  const auto inputs = bench.ResolveBoth();
  if (!inputs.ok()) return inputs.status();
  const auto& [a, b] = *inputs;
  std::optional<DType> out_dtype;
  if (!flags.out_dtype.empty()) out_dtype = Parse(kAllDTypes, flags.out_dtype);
  bench.problem.operation = "matmul";
  bench.problem.title =
      absl::StrCat("matmul of ", a.text, flags.transpose_a ? " transposed" : "", " and ", b.text,
                   flags.transpose_b ? " transposed" : "", ", ", a.type(), " and ", b.type());
  std::int64_t columns = 1;
  if (a.shape.size() == 2 && b.shape.size() == 2) {  // otherwise, the server refuses them
    const double m = static_cast<double>(a.shape[flags.transpose_a ? 1 : 0]);
    const double k = static_cast<double>(a.shape[flags.transpose_a ? 0 : 1]);
    columns = b.shape[flags.transpose_b ? 0 : 1];
    bench.problem.operations = 2 * m * k * static_cast<double>(columns);
    bench.problem.unit = IsInteger(a.dtype) ? "OP/s" : "FLOP/s";
  }
  bench.problem.run = [&, &a = a, &b = b](const std::string& strategy, bool with_values) {
    OperationOptions options = flags.Options(strategy);
    options.target = bench.Target();
    return bench.ArrayAnswer(bench.client().Matmul(a.operand, b.operand, flags.transpose_a,
                                                   flags.transpose_b, out_dtype, options),
                             with_values);
  };
  bench.problem.scale = [&, &a = a, &b = b]() -> absl::StatusOr<BenchScale> {
    if (IsInteger(a.dtype)) return ConstantScale(0);
    auto rows = bench.Norms(a.operand, {flags.transpose_a ? 0 : 1});
    if (!rows.ok()) return rows.status();
    auto sides = bench.Norms(b.operand, {flags.transpose_b ? 1 : 0});
    if (!sides.ok()) return sides.status();
    const auto width = static_cast<std::uint64_t>(columns);
    const BenchSample sample = SampleOf(rows->size() * sides->size());
    return [rows = *std::move(rows), sides = *std::move(sides), width, sample](std::size_t i,
                                                                               long double) {
      const std::uint64_t element = sample.offset + i * sample.step;
      return rows[element / width] * sides[element % width];
    };
  };
  return bench.Report(Bench::Ceiling::kVendor);
}

absl::Status BenchAdd(Bench& bench, const BenchFlags& flags) {
  const auto inputs = bench.ResolveBoth();
  if (!inputs.ok()) return inputs.status();
  const auto& [a, b] = *inputs;
  bench.problem.operation = "add";
  bench.problem.title = absl::StrCat("add of ", a.text, " and ", b.text, ", ", a.type());
  bench.problem.run = [&, &a = a, &b = b](const std::string& strategy, bool with_values) {
    OperationOptions options = flags.Options(strategy);
    options.target = bench.Target();
    return bench.ArrayAnswer(bench.client().Add(a.operand, b.operand, options), with_values);
  };
  // There is a single rounding, which is the same for all strategies.
  bench.problem.scale = []() -> absl::StatusOr<BenchScale> { return ConstantScale(0); };
  return bench.Report(Bench::Ceiling::kMemory);
}

absl::Status BenchWindowSum(Bench& bench, const BenchFlags& flags) {
  const auto x = bench.Resolve(flags.a);
  if (!x.ok()) return x.status();
  bench.problem.operation = "window_sum";
  bench.problem.operand_bytes = x->bytes();
  bench.problem.title =
      absl::StrCat("window-sum with radius ", flags.radius, " of ", x->text, ", ", x->type());
  bench.problem.run = [&](const std::string& strategy, bool with_values) {
    OperationOptions options = flags.Options(strategy);
    options.target = bench.Target();
    return bench.ArrayAnswer(bench.client().WindowSum(x->operand, flags.radius, options),
                             with_values);
  };
  bench.problem.scale = [&]() -> absl::StatusOr<BenchScale> {
    if (IsInteger(x->dtype) || x->elements() == 0) return ConstantScale(0);
    // The sum of the magnitudes in a window is at most the largest magnitude times the number of
    // elements in the window, which is limited by the window's width and by the array's size.
    long double largest = 0;
    for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      const auto response = bench.client().Reduce(op, x->operand);
      if (!response.ok()) return response.status();
      largest = std::max(largest, std::abs(ToValues(response->value()).front()));
    }
    const auto n = static_cast<long double>(x->elements());
    return ConstantScale(largest * std::min(n, 2 * static_cast<long double>(flags.radius) + 1));
  };
  return bench.Report(Bench::Ceiling::kMemory);
}

absl::Status BenchMap(Bench& bench, const BenchFlags& flags) {
  const absl::StatusOr<Expr> expression = ParseExpression(flags.expression);
  if (!expression.ok()) return expression.status();
  std::vector<Operand> operands;
  std::vector<std::string> types;
  for (const std::string& text : flags.operands) {
    const auto x = bench.Resolve(text);
    if (!x.ok()) return x.status();
    // An operand that is given twice counts as read once.
    const auto before = flags.operands.begin() + static_cast<std::ptrdiff_t>(operands.size());
    if (std::find(flags.operands.begin(), before, text) == before)
      bench.problem.operand_bytes += x->bytes();
    operands.push_back(x->operand);
    types.push_back(absl::StrCat(x->text, " ", x->type()));
  }
  bench.problem.operation = "map";
  bench.problem.title =
      absl::StrCat("map '", flags.expression, "' of ", absl::StrJoin(types, ", "));
  bench.problem.run = [&](const std::string& strategy, bool with_values) {
    OperationOptions options = flags.Options(strategy);
    options.target = bench.Target();
    return bench.ArrayAnswer(bench.client().Map(operands, *expression, options), with_values);
  };
  // All strategies of a device compute a node in the same way.
  bench.problem.scale = []() -> absl::StatusOr<BenchScale> { return ConstantScale(0); };
  return bench.Report(Bench::Ceiling::kMemory);
}

absl::Status BenchTopK(Bench& bench, const BenchFlags& flags) {
  const auto x = bench.Resolve(flags.a);
  if (!x.ok()) return x.status();
  bench.problem.operation = "top_k";
  bench.problem.operand_bytes = x->bytes();
  bench.problem.title = absl::StrCat(
      "topk, the ", flags.k, flags.smallest ? " smallest" : " largest",
      flags.axis ? absl::StrCat(" along ", *flags.axis) : "", " of ", x->text, ", ", x->type());
  bench.problem.run = [&](const std::string& strategy,
                          bool with_values) -> absl::StatusOr<BenchAnswer> {
    OperationOptions options = flags.Options(strategy);
    options.target = bench.Target();
    options.indices_target = bench.Target("indices");
    const auto response =
        bench.client().TopK(x->operand, flags.k, flags.smallest, flags.axis, options);
    if (!response.ok()) return response.status();
    BenchAnswer answer{.stats = response->stats()};
    for (const v1::Buffer* buffer : {&response->values_buffer(), &response->indices_buffer()}) {
      answer.result_bytes += buffer->size_bytes();
      if (!with_values) continue;
      const auto values = bench.Fetch(*buffer);
      if (!values.ok()) return values.status();
      answer.values.insert(answer.values.end(), values->begin(), values->end());
    }
    return answer;
  };
  bench.problem.scale = []() -> absl::StatusOr<BenchScale> { return ConstantScale(0); };
  return bench.Report(Bench::Ceiling::kMemory);
}

}  // namespace

void AddBench(CLI::App& app, Command& chosen) {
  CLI::App* bench = app.add_subcommand(
      "bench", "Compare the strategies of an operation on arrays that the server holds");
  bench->require_subcommand(1);
  bench->footer(
      std::string(
          "The strategies' calls are interleaved and timed by the device. Array results\n"
          "stay on the server and are deleted at the end. A strategy that has used 5 s of\n"
          "device time is not called again. Gathering strided operands is part of a call.\n\n"
          "Rates count each operand read once and the result written once; for matmul,\n"
          "they count its 2 M N K operations. The ceiling is measured on the same device\n"
          "in the same run. For matmul, it is the rate of the vendor library (cublas,\n"
          "cpu_library) on the same problem; for the others, it is how fast the server's\n"
          "dot reads arrays too large for the caches. Rates for arrays that fit in the\n"
          "caches may exceed this ceiling.\n\n"
          "Results must agree within the sum of the error bounds that the strategies\n"
          "state, or the exit code is 1. Up to 1048576 evenly spaced elements of large\n"
          "arrays are compared.\n\n") +
      std::string(ExitCodesText()));
  const auto add = [&](const char* name, const char* description,
                       absl::Status (*run)(Bench&, const BenchFlags&)) {
    auto flags = std::make_shared<BenchFlags>();
    CLI::App* command = bench->add_subcommand(name, description);
    command
        ->add_option("--strategy", flags->strategies,
                     "Algorithms to compare, as in a,b,c; default: all that run")
        ->type_name("STRATEGY");
    command->add_option("--repeat", flags->repeat, "Timed calls per strategy")
        ->check(CLI::Range(1, 100'000))
        ->capture_default_str();
    AddLaunch(*command, flags->launch);
    command->callback([flags, run, &chosen] {
      chosen = [flags, run](Session& session) -> absl::Status {
        const auto info = session.client.GetServerInfo();
        if (!info.ok()) return info.status();
        Bench state(session, *flags, *info);
        return run(state, *flags);
      };
    });
    return std::make_pair(command, flags);
  };
  const auto add_binary = [&](const char* name, const char* description,
                              absl::Status (*run)(Bench&, const BenchFlags&)) {
    auto [command, flags] = add(name, description, run);
    command->add_option("a", flags->a, "First operand")->type_name("OPERAND")->required();
    command->add_option("b", flags->b, "Second operand")->type_name("OPERAND")->required();
    return std::make_pair(command, flags);
  };
  add_binary("dot", "Sum of the products of two arrays' elements", BenchDot);

  auto [reduce, reduce_flags] = add("reduce", "Fold an array, or some of its axes", BenchReduce);
  reduce->add_option("op", reduce_flags->op, "The operation")
      ->required()
      ->check(CLI::IsMember(NamesOf(kAllReduceOps)));
  reduce->add_option("x", reduce_flags->a, "The operand")->type_name("OPERAND")->required();
  reduce->add_option("--axes", reduce_flags->axes,
                     "Axes to fold, as in 0,1 or -1; default: all, to one number");

  auto [matmul, matmul_flags] = add_binary("matmul", "Product of two matrices", BenchMatmul);
  matmul->add_flag("--transpose-a", matmul_flags->transpose_a, "Use the transpose of the first");
  matmul->add_flag("--transpose-b", matmul_flags->transpose_b, "Use the transpose of the second");
  matmul
      ->add_option("--out-dtype", matmul_flags->out_dtype,
                   "Type of the result; default: the operands'")
      ->check(CLI::IsMember(NamesOf(kAllDTypes)));

  add_binary("add", "Sum of two arrays, elementwise", BenchAdd);

  auto [window, window_flags] =
      add("window-sum", "Sums of the elements within a radius of each", BenchWindowSum);
  window->add_option("x", window_flags->a, "The operand, of rank 1")
      ->type_name("OPERAND")
      ->required();
  window->add_option("--radius", window_flags->radius, "The radius, in elements")
      ->required()
      ->check(Fits<std::int64_t>());

  auto [map, map_flags] = add("map", "An expression for each element", BenchMap);
  map->add_option("expression", map_flags->expression, "The expression, as for 'tessera map'")
      ->required();
  map->add_option("operands", map_flags->operands,
                  "Operands a, b, ... of the expression, which are broadcast")
      ->type_name("OPERAND")
      ->required()
      ->expected(1, 8);

  auto [topk, topk_flags] = add("topk", "The largest or smallest elements", BenchTopK);
  topk->add_option("x", topk_flags->a, "The operand")->type_name("OPERAND")->required();
  topk->add_option("--k", topk_flags->k, "How many along the axis")
      ->required()
      ->check(Fits<std::int64_t>());
  topk->add_flag("--smallest", topk_flags->smallest, "The smallest rather than the largest");
  topk->add_option("--axis", topk_flags->axis, "The axis; default: the last");
}

}  // namespace tessera
