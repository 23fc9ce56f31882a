// dot, reduce, matmul, add, window-sum and topk.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "client/cli/command.h"
#include "client/cli/operands.h"
#include "client/cli/results.h"
#include "client/expression_text.h"

namespace tessera {
namespace {

// The two operands and the options of a command.
struct BinaryFlags {
  std::string a;
  std::string b;
  OperationFlags operation;
  ResultFlags result;
  bool transpose_a = false;
  bool transpose_b = false;
  std::string out_dtype;

  void AddOperands(CLI::App& command) {
    command.add_option("a", a, "First operand")->type_name("OPERAND")->required();
    command.add_option("b", b, "Second operand")->type_name("OPERAND")->required();
    operation.Add(command);
  }
};

absl::StatusOr<std::pair<Operand, Operand>> ResolveBoth(Session& session,
                                                        const BinaryFlags& flags) {
  auto a = ResolveOperand(session, flags.a);
  if (!a.ok()) return a.status();
  auto b = ResolveOperand(session, flags.b);
  if (!b.ok()) return b.status();
  return std::make_pair(*std::move(a), *std::move(b));
}

absl::Status Dot(Session& session, const BinaryFlags& flags) {
  const auto operands = ResolveBoth(session, flags);
  if (!operands.ok()) return operands.status();
  const auto start = Clock::now();
  const auto response =
      session.client.Dot(operands->first, operands->second, flags.operation.Options());
  if (!response.ok()) return response.status();
  const absl::Duration wall = Since(start);
  ReportScalar(session, response->value());
  ReportStats(session, response->stats(), wall, flags.operation.timing);
  return absl::OkStatus();
}

// The expression of Reduce and Matmul.
struct ExpressionFlags {
  std::string expression;
  std::vector<std::string> with;

  void Add(CLI::App& command, const std::string& description) {
    auto* text = command.add_option("--expression", expression, description)->type_name("TEXT");
    command.add_option("--with", with, "Operands b, c, ... of the expression, which are broadcast")
        ->type_name("OPERAND")
        ->needs(text)
        ->expected(1, 7);
  }
  // Sets `expression` and `with` of the options.
  absl::Status Set(Session& session, OperationOptions& options) const {
    if (expression.empty()) return absl::OkStatus();
    const absl::StatusOr<Expr> parsed = ParseExpression(expression);
    if (!parsed.ok()) return parsed.status();
    options.expression = parsed->ToMessage();
    for (const std::string& text : with) {
      absl::StatusOr<Operand> operand = ResolveOperand(session, text);
      if (!operand.ok()) return operand.status();
      options.with.push_back(*std::move(operand));
    }
    return absl::OkStatus();
  }
};

absl::Status Matmul(Session& session, const BinaryFlags& flags, const ExpressionFlags& expression) {
  const auto operands = ResolveBoth(session, flags);
  if (!operands.ok()) return operands.status();
  std::optional<DType> out_dtype;
  if (!flags.out_dtype.empty()) out_dtype = Parse(kAllDTypes, flags.out_dtype);
  OperationOptions stage;
  if (absl::Status status = expression.Set(session, stage); !status.ok()) return status;
  return DeliverArray(session, flags.operation, flags.result, [&](OperationOptions options) {
    options.expression = stage.expression;
    options.with = stage.with;
    return session.client.Matmul(operands->first, operands->second, flags.transpose_a,
                                 flags.transpose_b, out_dtype, options);
  });
}

absl::Status Add(Session& session, const BinaryFlags& flags) {
  const auto operands = ResolveBoth(session, flags);
  if (!operands.ok()) return operands.status();
  return DeliverArray(session, flags.operation, flags.result, [&](const OperationOptions& options) {
    return session.client.Add(operands->first, operands->second, options);
  });
}

struct ReduceFlags {
  std::string op;
  std::string x;
  std::string axes;
  bool keep_dims = false;
  ExpressionFlags expression;
  OperationFlags operation;
  ResultFlags result;
};

absl::Status Reduce(Session& session, const ReduceFlags& flags) {
  const auto parsed = ParseAxes(flags.axes);
  if (!parsed.ok()) return parsed.status();
  const std::vector<int>& axes = *parsed;
  if (axes.empty() && flags.result.given()) {
    return BadOption("without --axes the result is one number, which is printed");
  }
  const auto x = ResolveOperand(session, flags.x);
  if (!x.ok()) return x.status();
  const ReduceOp op = Parse(kAllReduceOps, flags.op);
  OperationOptions stage = flags.operation.Options();
  if (absl::Status status = flags.expression.Set(session, stage); !status.ok()) return status;
  if (!axes.empty()) {
    return DeliverArray(session, flags.operation, flags.result, [&](OperationOptions options) {
      options.expression = stage.expression;
      options.with = stage.with;
      return session.client.Reduce(op, *x, axes, flags.keep_dims, options);
    });
  }
  const auto start = Clock::now();
  const auto response = session.client.Reduce(op, *x, {}, false, stage);
  if (!response.ok()) return response.status();
  const absl::Duration wall = Since(start);
  if (IsArg(op)) {
    if (session.json) {
      session.document["index"] = response->index();
    } else {
      std::cout << response->index() << '\n';
    }
  }
  if (session.json || !IsArg(op)) ReportScalar(session, response->value());
  ReportStats(session, response->stats(), wall, flags.operation.timing);
  return absl::OkStatus();
}

struct WindowSumFlags {
  std::string x;
  std::int64_t radius = 0;
  OperationFlags operation;
  ResultFlags result;
};

absl::Status WindowSum(Session& session, const WindowSumFlags& flags) {
  const auto x = ResolveOperand(session, flags.x);
  if (!x.ok()) return x.status();
  return DeliverArray(session, flags.operation, flags.result, [&](const OperationOptions& options) {
    return session.client.WindowSum(*x, flags.radius, options);
  });
}

struct TopKFlags {
  std::string x;
  std::int64_t k = 0;
  bool smallest = false;
  std::optional<int> axis;
  OperationFlags operation;
  std::string out;
  std::string indices_out;
  std::string file;
  std::string indices_file;
  bool replace = false;
  std::string ttl;

  void Add(CLI::App& command) {
    command.add_option("x", x, "The operand")->type_name("OPERAND")->required();
    command.add_option("--k", k, "How many along the axis, from 1 to 4096")
        ->required()
        ->check(Fits<std::int64_t>());
    command.add_flag("--smallest", smallest, "The smallest rather than the largest");
    command.add_option("--axis", axis, "The axis; default: the last");
    operation.Add(command);
    const auto add = [&](const std::string& to_buffer, std::string& buffer,
                         const std::string& to_file, std::string& path, const std::string& what) {
      auto* name = command.add_option(to_buffer, buffer,
                                      "Keep the " + what + " on the device as this buffer");
      name->type_name("BUFFER");
      command
          .add_option(to_file, path, "Save the " + what + " as a .npy file; - is standard output")
          ->type_name("FILE")
          ->excludes(name);
    };
    add("--out", out, "-o,--output", file, "values");
    add("--indices-out", indices_out, "--indices-output", indices_file, "indices");
    command.add_flag("--replace", replace, "Replace any buffers with the given names");
    command.add_option("--ttl", ttl, "How long the buffers live, such as 10m")
        ->check(DurationCheck());
  }
  // Returns the target of a result, or nullopt if there is no name, so that the response contains
  // the result.
  std::optional<ResultBuffer> Target(const std::string& name) const {
    if (name.empty()) return std::nullopt;
    return ResultBuffer{name, ParseDuration(ttl), replace};
  }
};

absl::Status TopK(Session& session, const TopKFlags& flags) {
  if (absl::Status status = CheckOutputs(session, flags.file, flags.indices_file,
                                         !flags.out.empty(), !flags.indices_out.empty());
      !status.ok())
    return status;
  if (flags.out.empty() && flags.indices_out.empty() && (flags.replace || !flags.ttl.empty()))
    return BadOption("--replace and --ttl are for --out and --indices-out");
  const auto x = ResolveOperand(session, flags.x);
  if (!x.ok()) return x.status();
  OperationOptions options = flags.operation.Options();
  options.target = flags.Target(flags.out);
  options.indices_target = flags.Target(flags.indices_out);
  const auto run = [&] {
    return session.client.TopK(*x, flags.k, flags.smallest, flags.axis, options);
  };
  auto start = Clock::now();
  auto response = run();
  if (ErrorReason(response.status()) == "RESULT_TOO_LARGE") {
    // Results that are saved to files may be too large for one message. They go to temporary
    // buffers instead.
    const auto move = [&](const std::string& file, std::optional<ResultBuffer>& target,
                          const char* suffix) -> absl::Status {
      if (file.empty()) return absl::OkStatus();
      auto temporary = TemporaryBuffer(session, suffix);
      if (!temporary.ok()) return temporary.status();
      target = *std::move(temporary);
      return absl::OkStatus();
    };
    absl::Status status = move(flags.file, options.target, "/values");
    status.Update(move(flags.indices_file, options.indices_target, "/indices"));
    if (!status.ok()) return status;
    if (!flags.file.empty() || !flags.indices_file.empty()) {
      start = Clock::now();
      response = run();
    }
  }
  if (!response.ok()) return response.status();
  const absl::Duration wall = Since(start);
  absl::Status status = ReportPart(session, "values", [&](Session& part) {
    return DeliverResult(part, flags.file, response->values(), response->values_buffer());
  });
  status.Update(ReportPart(session, "indices", [&](Session& part) {
    return DeliverResult(part, flags.indices_file, response->indices(), response->indices_buffer());
  }));
  if (status.ok()) ReportStats(session, response->stats(), wall, flags.operation.timing);
  return status;
}

}  // namespace

void AddOperations(CLI::App& app, Command& chosen) {
  const auto binary = [&](const char* name, const char* description, auto run) {
    auto flags = std::make_shared<BinaryFlags>();
    CLI::App* command = app.add_subcommand(name, description);
    flags->AddOperands(*command);
    command->callback(
        [flags, run, &chosen] { chosen = [flags, run](Session& s) { return run(s, *flags); }; });
    return std::make_pair(command, flags);
  };
  binary("dot", "Sum of the products of two arrays' elements", Dot);

  auto reduce = std::make_shared<ReduceFlags>();
  CLI::App* command = app.add_subcommand("reduce", "Fold an array, or some of its axes");
  command->add_option("op", reduce->op, "The operation")
      ->required()
      ->check(CLI::IsMember(NamesOf(kAllReduceOps)));
  command->add_option("x", reduce->x, "The operand")->type_name("OPERAND")->required();
  command->add_option("--axes", reduce->axes,
                      "Axes to fold, as in 0,1 or -1; default: all, to one number");
  command->add_flag("--keep-dims", reduce->keep_dims, "Keep folded axes with extent 1");
  reduce->expression.Add(
      *command, "Fold this expression of the operand, which is a, as in '(a - b) ** 2' --with y");
  reduce->operation.Add(*command);
  reduce->result.Add(*command);
  command->callback(
      [reduce, &chosen] { chosen = [reduce](Session& s) { return Reduce(s, *reduce); }; });

  auto expression = std::make_shared<ExpressionFlags>();
  const auto [matmul, flags] =
      binary("matmul", "Product of two matrices",
             [expression](Session& s, const BinaryFlags& f) { return Matmul(s, f, *expression); });
  flags->result.Add(*matmul);
  matmul->add_flag("--transpose-a", flags->transpose_a, "Use the transpose of the first");
  matmul->add_flag("--transpose-b", flags->transpose_b, "Use the transpose of the second");
  expression->Add(
      *matmul, "Apply this expression to the product, which is a, as in 'tanh(a + b)' --with bias");
  matmul->add_option("--out-dtype", flags->out_dtype, "Type of the product; default: the operands'")
      ->check(CLI::IsMember(NamesOf(kAllDTypes)));

  const auto [add, add_flags] = binary("add", "Sum of two arrays, elementwise", Add);
  add_flags->result.Add(*add);

  auto window = std::make_shared<WindowSumFlags>();
  command = app.add_subcommand("window-sum", "Sums of the elements within a radius of each");
  command->add_option("x", window->x, "The operand, of rank 1")->type_name("OPERAND")->required();
  command->add_option("--radius", window->radius, "The radius, in elements")
      ->required()
      ->check(Fits<std::int64_t>());
  window->operation.Add(*command);
  window->result.Add(*command);
  command->callback(
      [window, &chosen] { chosen = [window](Session& s) { return WindowSum(s, *window); }; });

  auto topk = std::make_shared<TopKFlags>();
  command = app.add_subcommand(
      "topk", "The largest or smallest elements along an axis, sorted, and their positions");
  topk->Add(*command);
  command->callback([topk, &chosen] { chosen = [topk](Session& s) { return TopK(s, *topk); }; });
}

}  // namespace tessera
