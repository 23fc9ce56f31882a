// bench: compares the strategies of an operation.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/cli/command.h"
#include "client/cli/comparison.h"
#include "client/cli/operands.h"
#include "client/cli/operations.h"

namespace tessera {
namespace {

// `strategy` may contain several names, separated by commas.
struct BenchFlags : ProblemFlags {
  int repeat = 20;
};

BenchScale ConstantScale(long double scale) {
  return [scale](std::size_t, long double) { return scale; };
}

// One run of `tessera bench`.
class Bench {
 public:
  Bench(Session& session, const BenchFlags& flags)
      : session_(session),
        flags_(flags),
        info_(OrThrow(session.client.GetServerInfo())),
        scratch_(session.client, info_.limits()),
        options_(flags.Options()) {
    for (const std::string& text : flags.operands) {
      inputs_.push_back(ResolveInput(session, text));
      operands_.push_back(inputs_.back().operand);
    }
    options_.cancel = InterruptScope::token();
    options_.timing = true;
    if (!flags.Is("dot") && !flags.FoldsAll()) options_.target = scratch_.Target("result");
    if (flags.GivesTwo()) options_.indices_target = scratch_.Target("indices");
  }

  // Runs the problem, measures its ceiling, and prints the report.
  void Run() {
    problem_.title = Title();
    problem_.operation = OperationName(flags_.operation->name);
    if (flags_.Is("reduce") && !flags_.FoldsAll()) problem_.operation = "reduce_axes";
    problem_.repeat = flags_.repeat;
    std::set<std::string> seen;  // an operand that is given twice counts as read once
    for (const Input& x : inputs_)
      if (seen.insert(x.text).second) problem_.operand_bytes += x.bytes();
    if (flags_.Is("take")) problem_.operand_bytes = TakenBytes();
    if (flags_.Is("matmul")) {
      problem_.operations = ProductOperations();
      problem_.unit = IsInteger(inputs_.front().dtype) ? "OP/s" : "FLOP/s";
    }
    const std::vector<v1::Strategy> list =
        OrThrow(session_.client.ListStrategies(problem_.operation));
    if (flags_.strategy.empty()) {
      for (const v1::Strategy& strategy : list) AddStrategy(strategy.name());
    } else {
      for (absl::string_view name : absl::StrSplit(flags_.strategy, ',', absl::SkipEmpty()))
        AddStrategy(std::string(name));
      if (problem_.strategies.empty()) ThrowBadOption("--strategy takes names, as in a,b,c");
    }
    const InterruptScope interrupts;
    problem_.run = [this](const std::string& strategy,
                          bool with_values) -> absl::StatusOr<BenchAnswer> {
      if (absl::Status status = InterruptScope::Check(); !status.ok()) return status;
      options_.strategy = strategy;
      const auto result = flags_.operation->call(session_.client, flags_, operands_, options_);
      if (!result.ok()) return result.status();
      try {
        return Answer(*result, with_values);
      } catch (const CommandError& error) {
        return error.status;
      }
    };
    problem_.scale = [this] { return Scale(); };
    BenchReport report = OrThrow(RunBench(problem_));
    for (const v1::Device& device : info_.devices()) {
      if (device.name() != report.device) continue;
      report.ceiling = flags_.Is("matmul") ? VendorRate(report, list, device)
                                           : MeasureBandwidth(session_.client, scratch_, device);
    }
    session_.document = ToJson(report);
    if (!session_.json) {
      const bool terminal = ::isatty(STDOUT_FILENO) != 0;
      std::cout << ChartText(report, SizeOfTerminal().columns, terminal && IsUtf8Locale());
    }
    OrThrow(CheckAgreement(report));
  }

 private:
  std::string Title() const {
    const std::string name = flags_.operation->name;
    std::vector<std::string> texts, types;
    for (const Input& x : inputs_) {
      texts.push_back(x.text);
      types.push_back(absl::StrCat(x.text, " ", x.type()));
    }
    if (flags_.Is("map"))
      return absl::StrCat("map '", flags_.expression, "' of ", absl::StrJoin(types, ", "));
    if (flags_.Is("matmul")) {
      return absl::StrCat("matmul of ", texts[0], flags_.transpose_a ? " transposed" : "", " and ",
                          texts[1], flags_.transpose_b ? " transposed" : "", ", ",
                          inputs_[0].type(), " and ", inputs_[1].type());
    }
    std::string what;
    if (flags_.Is("reduce")) {
      what = " " + flags_.op;
      if (!flags_.FoldsAll()) what += " along " + absl::StrJoin(flags_.axes, ",");
    } else if (flags_.Is("window-sum")) {
      what = absl::StrCat(" with radius ", flags_.radius);
    } else if (flags_.Is("topk")) {
      what = absl::StrCat(", the ", flags_.k, flags_.smallest ? " smallest" : " largest",
                          flags_.axis ? absl::StrCat(" along ", *flags_.axis) : "");
    } else if (flags_.Is("scan")) {
      what = absl::StrCat(flags_.exclusive ? " exclusive " : " ", flags_.op,
                          flags_.reverse ? " in reverse" : "",
                          flags_.axis ? absl::StrCat(" along ", *flags_.axis) : "");
    } else if (flags_.Is("sort")) {
      what = absl::StrCat(flags_.descending ? " descending" : "",
                          flags_.axis ? absl::StrCat(" along ", *flags_.axis) : "");
    } else if (flags_.Is("histogram") && texts.size() == 1) {
      what = absl::StrCat(" with ", flags_.bins, " bins");
    } else if (flags_.Is("sum-by-label")) {
      return absl::StrCat("sum-by-label of ", types[0], " by ", types[1], " to ", flags_.length,
                          " rows");
    } else if (flags_.Is("linalg")) {
      what = " " + flags_.op;
    } else if (flags_.Is("take")) {
      return absl::StrCat("take of ", types[0], " at ", types[1],
                          flags_.axis ? absl::StrCat(" along ", *flags_.axis) : "");
    }
    return absl::StrCat(name, what, " of ", absl::StrJoin(texts, " and "), ", ", inputs_[0].type());
  }

  bool AreMatrices() const { return inputs_[0].shape.size() == 2 && inputs_[1].shape.size() == 2; }
  // Returns the number of columns of the product. REQUIRES: the second operand has rank 2 or more.
  std::int64_t Columns() const {
    const auto& shape = inputs_[1].shape;
    return shape[shape.size() - (flags_.transpose_b ? 2 : 1)];
  }
  // Each element of a is multiplied by one row of every matrix of b that it is paired with.
  double ProductOperations() const {
    const auto &a = inputs_[0].shape, &b = inputs_[1].shape;
    double operations = 2 * static_cast<double>(inputs_[0].elements());
    if (b.size() > 1) operations *= static_cast<double>(Columns());
    for (std::size_t i = 3; i <= b.size(); ++i)
      if (i > a.size() || a[a.size() - i] == 1) operations *= static_cast<double>(b[b.size() - i]);
    return operations;
  }

  // Returns the bytes of the indices and of the elements that a take reads.
  std::uint64_t TakenBytes() const {
    const Input &x = inputs_[0], &indices = inputs_[1];
    const auto rank = static_cast<int>(x.shape.size());
    auto elements = static_cast<std::uint64_t>(indices.elements());
    if (flags_.axis && !flags_.along && *flags_.axis >= -rank && *flags_.axis < rank)
      for (int i = 0; i < rank; ++i)
        if (i != (*flags_.axis + rank) % rank)
          elements *= static_cast<std::uint64_t>(x.shape[static_cast<std::size_t>(i)]);
    return indices.bytes() + elements * SizeOf(x.dtype);
  }

  BenchAnswer Answer(const v1::StepResult& result, bool with_values) {
    BenchAnswer answer;
    const auto add = [&](const v1::Buffer& buffer) {
      answer.result_bytes += buffer.size_bytes();
      answer.dtype = static_cast<DType>(buffer.dtype());
      if (!with_values) return;
      const BenchValues values = OrThrow(scratch_.Fetch(buffer));
      answer.values.insert(answer.values.end(), values.begin(), values.end());
    };
    const auto read = [&](const auto& response) {
      answer.stats = response.stats();
      if constexpr (requires { response.indices_buffer(); }) {
        add(response.values_buffer());
        add(response.indices_buffer());
      } else if constexpr (requires { response.buffer(); }) {
        if (options_.target) add(response.buffer());
      }
      if constexpr (requires { response.value(); })
        if (!options_.target) answer.values = ToValues(response.value());
      if constexpr (requires { response.index(); })
        if (response.has_index())
          answer.values.push_back(static_cast<long double>(response.index()));
    };
    VisitOperation(result, read, [] {});
    return answer;
  }

  // Returns L2 norms, with a margin for their own rounding. By the Cauchy-Schwarz inequality, the
  // sums of magnitudes in the error bounds are at most products of such norms.
  BenchValues Norms(const Operand& x, const std::vector<int>& axes) {
    constexpr long double kRoom = 1.01L;
    OperationOptions options;
    if (!axes.empty()) options.target = scratch_.Target("norms");
    const v1::ReduceResponse response =
        OrThrow(session_.client.Reduce(ReduceOp::kNormL2, x, axes, false, options));
    BenchValues norms =
        axes.empty() ? ToValues(response.value()) : OrThrow(scratch_.Fetch(response.buffer()));
    for (long double& norm : norms) norm *= kRoom;
    return norms;
  }

  // Returns the factors by which a strategy's roundoff is multiplied to get its error bounds.
  BenchScale Scale() {
    const Input& x = inputs_[0];
    if (flags_.Is("reduce")) return ScaleOfReduce(x);
    // All strategies round an element of Add once, and in the same way. They also compute a node of
    // an expression in the same way, and TopK, Sort, Take, Select, Histogram and
    // SearchSorted do not round.
    if (IsInteger(x.dtype) || flags_.Is("add") || flags_.Is("map") || flags_.GivesTwo() ||
        flags_.Is("take") || flags_.Is("histogram") || flags_.Is("search-sorted"))
      return ConstantScale(0);
    if (flags_.Is("dot") || (flags_.Is("matmul") && !AreMatrices()))
      return ConstantScale(Norms(x.operand, {}).front() * Norms(operands_[1], {}).front());
    if (flags_.Is("matmul")) {
      BenchValues rows = Norms(x.operand, {flags_.transpose_a ? 0 : 1});
      BenchValues sides = Norms(operands_[1], {flags_.transpose_b ? 1 : 0});
      const auto width = static_cast<std::uint64_t>(Columns());
      const BenchSample sample = SampleOf(rows.size() * sides.size());
      return [rows = std::move(rows), sides = std::move(sides), width, sample](std::size_t i,
                                                                               long double) {
        const std::uint64_t element = sample.offset + i * sample.step;
        return rows[element / width] * sides[element % width];
      };
    }
    // The signs of singular vectors and eigenvectors are free.
    if (flags_.Is("linalg")) return ConstantScale(HUGE_VALL);
    if (flags_.Is("scan")) {
      const ReduceOp op = Parse(kAllReduceOps, flags_.op);
      if (IsExact(op, x.dtype)) return ConstantScale(0);
      if (op == ReduceOp::kProduct) return ScaleOfProduct(x);
    }
    // The sum of the magnitudes in a window is at most the largest magnitude times the number of
    // elements in the window, which is limited by the window's width and by the array's size. In a
    // scan and in the sums by label, it is limited by the array's size.
    long double largest = 0;
    for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      if (x.elements() == 0) break;
      const v1::ReduceResponse response = OrThrow(session_.client.Reduce(op, x.operand));
      largest = std::max(largest, std::abs(ToValues(response.value()).front()));
    }
    auto terms = static_cast<long double>(x.elements());
    if (flags_.Is("window-sum"))
      terms = std::min(terms, 2 * static_cast<long double>(flags_.radius) + 1);
    return ConstantScale(largest * terms);
  }

  // Partial products of very small or large factors may overflow or underflow in one order but not
  // in another.
  static BenchScale ScaleOfProduct(const Input& x) {
    const long double small = x.dtype == DType::kF64 ? 1e-290L : 1e-30L;
    return [small](std::size_t, long double value) {
      const long double size = std::abs(value);
      return size > small && std::isfinite(size) ? size : HUGE_VALL;
    };
  }

  BenchScale ScaleOfReduce(const Input& x) {
    const ReduceOp op = Parse(kAllReduceOps, flags_.op);
    if (IsExact(op, x.dtype)) return ConstantScale(0);
    if (op == ReduceOp::kNormL1 || op == ReduceOp::kNormL2 || op == ReduceOp::kSumSquares ||
        IsDeviation(op))
      return [](std::size_t, long double value) { return std::abs(value); };
    if (op == ReduceOp::kProduct) return ScaleOfProduct(x);
    long double folded = flags_.FoldsAll() ? static_cast<long double>(x.elements()) : 1;
    const auto rank = static_cast<int>(x.shape.size());
    for (int axis : flags_.axes)
      folded *= static_cast<long double>(x.shape[static_cast<std::size_t>((axis + rank) % rank)]);
    return [norms = Norms(x.operand, flags_.axes), folded, op](std::size_t i, long double) {
      const long double magnitudes = norms[i] * std::sqrt(folded);
      return op == ReduceOp::kMean ? magnitudes / folded : magnitudes;
    };
  }

  void AddStrategy(const std::string& name) {
    // A CPU strategy and a GPU strategy may have the same name. The name keeps its last position,
    // because the CPU's strategies are listed first.
    auto& names = problem_.strategies;
    std::erase(names, name);
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
      problem_.strategies = {vendor};
      if (const auto alone = RunBench(problem_); alone.ok()) found = rate(*alone);
    }
    if (found == 0) return {0, "not known: " + vendor + " does not run this problem here"};
    return {found, vendor + " on the same problem in the same run"};
  }

  Session& session_;
  const BenchFlags& flags_;
  const v1::GetServerInfoResponse info_;
  BenchScratch scratch_;
  OperationOptions options_;
  std::vector<Input> inputs_;
  std::vector<Operand> operands_;
  BenchProblem problem_;
};

}  // namespace

void AddBench(CLI::App& app, Command& chosen) {
  CLI::App* bench = app.add_subcommand(
      "bench", "Compare the strategies of an operation on arrays that the server holds");
  bench->require_subcommand(1);
  bench->footer(
      std::string(
          "The strategies' calls are interleaved and timed by the device. Array results\n"
          "stay on the server and are deleted at the end. A strategy that has used 5 s of\n"
          "device time is not called again. The time includes gathering strided operands.\n\n"
          "Rates count one read of each operand and one write of the result; for matmul,\n"
          "they count its 2 M N K operations. The ceiling is measured on the same device\n"
          "in the same run. For matmul, it is the rate of the vendor library (cublas,\n"
          "cpu_library) on the same problem; for the others, it is how fast the server's\n"
          "dot reads arrays too large for the caches. Rates for arrays that fit in the\n"
          "caches may exceed this ceiling.\n\n"
          "Results must agree within the sum of the error bounds that the strategies\n"
          "state, or the exit code is 1. Up to 1048576 evenly spaced elements of large\n"
          "arrays are compared.\n\n") +
      std::string(ExitCodesText()));
  for (const OperationCommand& operation : OperationCommands()) {
    const auto [command, flags] = AddCommand<BenchFlags>(
        *bench, chosen, operation.name, operation.description,
        [](Session& session, const BenchFlags& given) { Bench(session, given).Run(); });
    flags->operation = &operation;
    operation.add(*command, *flags);
    command
        ->add_option("--strategy", flags->strategy,
                     "Algorithms to compare, as in a,b,c; default: all that can run")
        ->type_name("STRATEGY");
    command->add_option("--repeat", flags->repeat, "Timed calls per strategy")
        ->check(CLI::Range(1, 100'000))
        ->capture_default_str();
    AddLaunch(*command, flags->launch);
  }
}

}  // namespace tessera
