// dot, reduce, matmul, add, window-sum, map, topk, scan, sort, take, select, histogram,
// search-sorted, sum-by-label and linalg.
#include "client/cli/operations.h"

#include <iostream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/comparison.h"
#include "client/cli/results.h"
#include "client/expression_text.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/printable.h"

namespace tessera {
namespace {

#define TESSERA_SET_RESULT(Method, field)                           \
  void Set(v1::StepResult& result, v1::Method##Response response) { \
    *result.mutable_##field() = std::move(response);                \
  }
TESSERA_OPERATION_METHODS(TESSERA_SET_RESULT)
#undef TESSERA_SET_RESULT

template <class Response>
absl::StatusOr<v1::StepResult> AsStep(absl::StatusOr<Response> response) {
  if (!response.ok()) return response.status();
  v1::StepResult result;
  Set(result, *std::move(response));
  return result;
}

std::optional<DType> DTypeOf(const std::string& name) {
  if (name.empty()) return std::nullopt;
  return Parse(kAllDTypes, name);
}

void AddOne(CLI::App& command, ProblemFlags& flags, const char* description = "The operand") {
  flags.operands.resize(1);
  AddOperand(command, "x", flags.operands[0], description);
}

void AddTwo(CLI::App& command, ProblemFlags& flags) {
  flags.operands.resize(2);
  AddOperand(command, "a", flags.operands[0], "First operand");
  AddOperand(command, "b", flags.operands[1], "Second operand");
}

void AddOfReduce(CLI::App& command, ProblemFlags& flags) {
  command.add_option("op", flags.op, "The operation")
      ->required()
      ->check(CLI::IsMember(NamesOf(kAllReduceOps)));
  AddOne(command, flags);
  command
      .add_option("--axes", flags.axes,
                  "Axes to fold, as in 0,1 or -1; default: all, to one number")
      ->delimiter(',')
      ->check([](const std::string& text) {  // CLI11 takes an empty text for 0
        int axis = 0;
        return absl::SimpleAtoi(text, &axis) ? "" : "'" + text + "' is not an axis";
      })
      ->allow_extra_args(false);
}

void AddOfMatmul(CLI::App& command, ProblemFlags& flags) {
  AddTwo(command, flags);
  command.add_flag("--transpose-a", flags.transpose_a, "Use the transpose of the first operand");
  command.add_flag("--transpose-b", flags.transpose_b, "Use the transpose of the second operand");
  command
      .add_option("--out-dtype", flags.out_dtype,
                  "Type of the product; default: i32 for u8 and i8, otherwise the operands'")
      ->check(CLI::IsMember(NamesOf(kAllDTypes)));
}

void AddOfWindowSum(CLI::App& command, ProblemFlags& flags) {
  AddOne(command, flags, "The operand, of rank 1");
  command.add_option("--radius", flags.radius, "The radius, in elements")
      ->required()
      ->check(Fits<std::int64_t>());
}

void AddOfMap(CLI::App& command, ProblemFlags& flags) {
  command
      .add_option("expression", flags.expression,
                  "Operators with Python's precedence, named operations such as where(a < b, a, "
                  "0), casts such as f32(a), and coordinates along an axis such as coordinate(0)")
      ->required();
  command
      .add_option("operands", flags.operands,
                  "Operands a, b, ... of the expression, which are broadcast")
      ->type_name("OPERAND")
      ->required()
      ->expected(1, 8);
}

void AddOfTopK(CLI::App& command, ProblemFlags& flags) {
  AddOne(command, flags);
  command.add_option("--k", flags.k, "How many elements to find along the axis, from 1 to 4096")
      ->required()
      ->check(Fits<std::int64_t>());
  command.add_flag("--smallest", flags.smallest, "Find the smallest elements, not the largest");
  command.add_option("--axis", flags.axis, "The axis; default: the last");
}

void AddOfScan(CLI::App& command, ProblemFlags& flags) {
  std::vector<std::string> names;
  for (ReduceOp op : kAllReduceOps)
    if (Scans(op)) names.emplace_back(Name(op));
  command.add_option("op", flags.op, "The operation")->required()->check(CLI::IsMember(names));
  AddOne(command, flags);
  command.add_option("--axis", flags.axis, "The axis; default: the last");
  command.add_flag("--exclusive", flags.exclusive,
                   "Exclude each element from the fold at its own position");
  command.add_flag("--reverse", flags.reverse, "Begin at the end of the axis");
}

void AddOfSort(CLI::App& command, ProblemFlags& flags) {
  AddOne(command, flags);
  command.add_option("--axis", flags.axis, "The axis; default: the last");
  command.add_flag("--descending", flags.descending, "Put the largest elements first");
}

void AddMode(CLI::App& command, ProblemFlags& flags, const char* description) {
  command.add_option("--mode", flags.mode, description)
      ->check(CLI::IsMember(NamesOf(kAllTakeModes)));
}

void AddOfTake(CLI::App& command, ProblemFlags& flags) {
  flags.operands.resize(2);
  AddOperand(command, "x", flags.operands[0], "The operand");
  AddOperand(command, "indices", flags.operands[1], "The indices, of type i32 or i64");
  command.add_option("--axis", flags.axis, "The axis; default: all elements, as a vector");
  AddMode(command, flags,
          "For an index out of range: error fails, wrap takes the index modulo the extent, and "
          "clip takes the first or last element; default: error");
  command.add_flag("--along", flags.along,
                   "Take one element for each index, at the index's position on the other axes");
}

void AddOfSelect(CLI::App& command, ProblemFlags& flags) {
  flags.operands.resize(2);
  AddOperand(command, "x", flags.operands[0], "The operand");
  AddOperand(command, "mask", flags.operands[1], "The mask, of type bool and of the same shape");
}

void AddOfHistogram(CLI::App& command, ProblemFlags& flags) {
  flags.operands.reserve(2);  // options refer to the operands
  AddOne(command, flags);
  auto* bins =
      command.add_option("--bins", flags.bins, "The number of bins, if there are no edges")
          ->check(Fits<std::int64_t>());
  auto* range = command
                    .add_option("--range", flags.range,
                                "The outer edges of bins of equal width, as in 0,1; default: "
                                "one bin for each integer from 0 on")
                    ->delimiter(',')
                    ->expected(2)
                    ->allow_extra_args(false);
  command
      .add_option_function<std::string>(
          "edges", [&flags](const std::string& text) { flags.operands.push_back(text); },
          "The edges of the bins, in ascending order: f64, or i64 if x has integers")
      ->type_name("OPERAND")
      ->excludes(bins)
      ->excludes(range);
}

Bins BinsOf(const ProblemFlags& flags, Operands x) {
  if (x.size() > 1) return x[1];
  if (flags.range.empty()) return IntegerBins{flags.bins};
  return EvenBins{flags.bins, flags.range[0], flags.range[1]};
}

void AddOfSearchSorted(CLI::App& command, ProblemFlags& flags) {
  flags.operands.resize(2);
  AddOperand(command, "x", flags.operands[0], "The sorted vector");
  AddOperand(command, "keys", flags.operands[1], "The keys to look up, of the same type");
  command.add_flag("--right", flags.right,
                   "Return positions after the elements that are equal to a key, not before them");
}

void AddOfSumByLabel(CLI::App& command, ProblemFlags& flags) {
  flags.operands.resize(2);
  AddOperand(command, "x", flags.operands[0], "The rows, along the first axis");
  AddOperand(command, "labels", flags.operands[1],
             "The label of each row, from 0 on: a vector of type i32 or i64");
  command.add_option("--length", flags.length, "The number of sums; labels must be less than this")
      ->required()
      ->check(Fits<std::int64_t>());
  AddMode(command, flags,
          "For a label out of range: error fails, wrap takes the label modulo the length, and "
          "clip takes the first or last label; default: error");
}

void AddOfLinalg(CLI::App& command, ProblemFlags& flags) {
  flags.operands.reserve(2);  // options refer to the operands
  command.add_option("function", flags.op, "The function")
      ->required()
      ->check(CLI::IsMember(NamesOf(kAllLinalgFunctions)));
  AddOne(command, flags, "The matrix or the stack of matrices, of type f32 or f64");
  command
      .add_option_function<std::string>(
          "b", [&flags](const std::string& text) { flags.operands.push_back(text); },
          "The right sides of solve, of the same type")
      ->type_name("OPERAND");
}

const OperationCommand kOperations[] = {
    {"dot", "Sum of the products of two arrays' elements", AddTwo,
     [](Client& client, const ProblemFlags&, Operands x, const OperationOptions& options) {
       return AsStep(client.Dot(x[0], x[1], options));
     }},
    {"reduce", "Fold an array, or some of its axes", AddOfReduce,
     [](Client& client, const ProblemFlags& flags, Operands x, const OperationOptions& options) {
       return AsStep(client.Reduce(Parse(kAllReduceOps, flags.op), x[0], flags.axes,
                                   flags.keep_dims && !flags.FoldsAll(), options));
     }},
    {"matmul", "Product of two matrices, or of two stacks of matrices", AddOfMatmul,
     [](Client& client, const ProblemFlags& flags, Operands x, const OperationOptions& options) {
       return AsStep(client.Matmul(x[0], x[1], flags.transpose_a, flags.transpose_b,
                                   DTypeOf(flags.out_dtype), options));
     }},
    {"add", "Sum of two arrays, elementwise", AddTwo,
     [](Client& client, const ProblemFlags&, Operands x, const OperationOptions& options) {
       return AsStep(client.Add(x[0], x[1], options));
     }},
    {"window-sum", "Sums of the elements within a radius of each element", AddOfWindowSum,
     [](Client& client, const ProblemFlags& flags, Operands x, const OperationOptions& options) {
       return AsStep(client.WindowSum(x[0], flags.radius, options));
     }},
    {"map", "Compute an expression for each element, as in: map '(a - b) * 2' x y", AddOfMap,
     [](Client& client, const ProblemFlags&, Operands x, const OperationOptions& options) {
       return AsStep(client.Map(x, options.expression.value_or(v1::Expression()), options));
     }},
    {"topk", "The largest or smallest elements along an axis, sorted, and their positions",
     AddOfTopK,
     [](Client& client, const ProblemFlags& flags, Operands x, const OperationOptions& options) {
       return AsStep(client.TopK(x[0], flags.k, flags.smallest, flags.axis, options));
     }},
    {"scan", "For each element, fold all elements up to this one along an axis, as in running sums",
     AddOfScan,
     [](Client& client, const ProblemFlags& flags, Operands x, const OperationOptions& options) {
       return AsStep(client.Scan(Parse(kAllReduceOps, flags.op), x[0], flags.axis, flags.exclusive,
                                 flags.reverse, options));
     }},
    {"sort", "The elements along an axis in order, and their positions", AddOfSort,
     [](Client& client, const ProblemFlags& flags, Operands x, const OperationOptions& options) {
       return AsStep(client.Sort(x[0], flags.axis, flags.descending, flags.Wanted(), options));
     }},
    {"take", "Elements, or slices along an axis, at the positions in another array", AddOfTake,
     [](Client& client, const ProblemFlags& flags, Operands x, const OperationOptions& options) {
       return AsStep(client.Take(x[0], x[1], flags.axis, Parse(kAllTakeModes, flags.mode),
                                 flags.along, options));
     }},
    {"select", "The elements where a mask is true, and their positions", AddOfSelect,
     [](Client& client, const ProblemFlags& flags, Operands x, const OperationOptions& options) {
       return AsStep(client.Select(x[0], x[1], flags.Wanted(), options));
     }},
    {"histogram", "The number of elements in each bin", AddOfHistogram,
     [](Client& client, const ProblemFlags& flags, Operands x, const OperationOptions& options) {
       return AsStep(client.Histogram(x[0], BinsOf(flags, x), options));
     }},
    {"search-sorted", "The positions at which keys can be inserted into a sorted vector",
     AddOfSearchSorted,
     [](Client& client, const ProblemFlags& flags, Operands x, const OperationOptions& options) {
       return AsStep(client.SearchSorted(x[0], x[1], flags.right, options));
     }},
    {"sum-by-label", "The sums of rows that have the same label", AddOfSumByLabel,
     [](Client& client, const ProblemFlags& flags, Operands x, const OperationOptions& options) {
       return AsStep(
           client.SumByLabel(x[0], x[1], flags.length, Parse(kAllTakeModes, flags.mode), options));
     }},
    {"linalg", "Decompose matrices, invert them or solve linear equations", AddOfLinalg,
     [](Client& client, const ProblemFlags& flags, Operands x, const OperationOptions& options) {
       return AsStep(client.Linalg(Parse(kAllLinalgFunctions, flags.op), x[0],
                                   x.size() > 1 ? std::optional(x[1]) : std::nullopt, options));
     }},
};

// The flags of an operation's own command.
struct OperationFlags : ProblemFlags {
  std::vector<std::string> with;
  bool timing = false;
  ResultFlags result;
};

void RunOperation(Session& session, const OperationFlags& flags) {
  flags.result.Check(session, flags.only);
  if (flags.FoldsAll() && flags.result.given())
    ThrowBadOption("without --axes, the result is one number, which is printed");
  OperationOptions options = flags.Options();
  options.timing = flags.timing;
  std::vector<Operand> operands;
  for (const std::string& text : flags.operands) operands.push_back(ResolveOperand(session, text));
  for (const std::string& text : flags.with) options.with.push_back(ResolveOperand(session, text));
  flags.result.SetTargets(options);
  auto start = Clock::now();
  auto result = flags.operation->call(session.client, flags, operands, options);
  std::optional<BenchScratch> scratch;
  if (ErrorReason(result.status()) == "RESULT_TOO_LARGE" &&
      !(flags.result.file.empty() && flags.result.indices_file.empty())) {
    // The result goes to a buffer, which is deleted after it has been downloaded to the file.
    scratch.emplace(session.client, session.Limits());
    if (!flags.result.file.empty()) options.target = scratch->Target("result");
    if (!flags.result.indices_file.empty()) options.indices_target = scratch->Target("indices");
    start = Clock::now();
    result = flags.operation->call(session.client, flags, operands, options);
  }
  const absl::Duration wall = Since(start);
  const v1::ExecutionStats stats =
      ReportResult(session, OrThrow(std::move(result)), flags.result, flags.only);
  if (session.json) {
    session.document["stats"]["wall_us"] = absl::ToDoubleMicroseconds(wall);
  } else if (flags.timing) {  // printed to stderr, because stdout carries the result
    std::cerr << Printable(stats.strategy()) << " on " << Printable(stats.device())
              << (stats.devices() > 1 ? absl::StrCat(" and ", stats.devices() - 1, " more") : "")
              << ": " << HumanDuration(absl::Microseconds(stats.kernel_us())) << " on the device, "
              << HumanDuration(wall) << " in all, " << HumanBytes(stats.bytes()) << " moved, "
              << absl::StrFormat("roundoff %.2g", stats.roundoff()) << '\n';
  }
}

// Adds the options for the expression of a Reduce, Scan, Sort or Matmul.
void AddExpression(CLI::App& command, OperationFlags& flags, const char* description) {
  auto* text = command.add_option("--expression", flags.expression, description)->type_name("TEXT");
  command
      .add_option("--with", flags.with, "Operands b, c, ... of the expression, which are broadcast")
      ->type_name("OPERAND")
      ->needs(text)
      ->expected(1, 7);
}

}  // namespace

OperationOptions ProblemFlags::Options() const {
  OperationOptions options;
  options.strategy = strategy;
  options.launch = launch;
  if (!expression.empty() || Is("map"))
    options.expression = OrThrow(ParseExpression(expression)).ToMessage();
  return options;
}

bool ProblemFlags::Is(std::string_view name) const { return name == operation->name; }

absl::Span<const OperationCommand> OperationCommands() { return kOperations; }

void AddOperations(CLI::App& app, Command& chosen) {
  for (const OperationCommand& operation : kOperations) {
    const auto [command, flags] =
        AddCommand(app, chosen, operation.name, operation.description, RunOperation);
    flags->operation = &operation;
    operation.add(*command, *flags);
    if (flags->Is("reduce")) {
      command->add_flag("--keep-dims", flags->keep_dims, "Keep folded axes with extent 1");
      AddExpression(
          *command, *flags,
          "Fold this expression, in which a is the operand, as in '(a - b) ** 2' --with y");
    } else if (flags->Is("scan")) {
      AddExpression(*command, *flags,
                    "Scan this expression, in which a is the operand, as in 'a > b' --with y");
    } else if (flags->Is("sort")) {
      AddExpression(*command, *flags,
                    "Sort this expression, in which a is the operand, as in 'abs(a)'");
    } else if (flags->Is("matmul")) {
      AddExpression(
          *command, *flags,
          "Compute this expression, in which a is the product, as in 'tanh(a + b)' --with bias");
    }
    command
        ->add_option("--strategy", flags->strategy,
                     "Algorithm from 'tessera strategies'; default: the fastest")
        ->type_name("STRATEGY");
    AddLaunch(*command, flags->launch);
    command->add_flag("--timing", flags->timing,
                      "Measure the time on the device and print what the call cost");
    if (flags->Is("sort") || flags->Is("select"))
      command->add_option("--only", flags->only, "Compute only the values or only the indices")
          ->check(CLI::IsMember({"values", "indices"}));
    if (flags->GivesTwo()) {
      flags->result.AddForTwo(*command);
    } else if (!flags->Is("dot")) {
      flags->result.AddForOne(*command);
    }
  }
}

}  // namespace tessera
