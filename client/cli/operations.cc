// dot, reduce, matmul, add and window-sum.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "client/cli/command.h"
#include "client/cli/operands.h"
#include "client/cli/results.h"

namespace tessera {
namespace {

// Both operands of a command, and its options.
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

absl::Status Matmul(Session& session, const BinaryFlags& flags) {
  const auto operands = ResolveBoth(session, flags);
  if (!operands.ok()) return operands.status();
  std::optional<DType> out_dtype;
  if (!flags.out_dtype.empty()) out_dtype = Parse(kAllDTypes, flags.out_dtype);
  return DeliverArray(session, flags.operation, flags.result, [&](const OperationOptions& options) {
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
  if (!axes.empty()) {
    return DeliverArray(session, flags.operation, flags.result,
                        [&](const OperationOptions& options) {
                          return session.client.Reduce(op, *x, axes, flags.keep_dims, options);
                        });
  }
  const auto start = Clock::now();
  const auto response = session.client.Reduce(op, *x, {}, false, flags.operation.Options());
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

}  // namespace

void AddOperations(CLI::App& app, Command& chosen) {
  const auto binary = [&](const char* name, const char* description,
                          absl::Status (*run)(Session&, const BinaryFlags&)) {
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
  reduce->operation.Add(*command);
  reduce->result.Add(*command);
  command->callback(
      [reduce, &chosen] { chosen = [reduce](Session& s) { return Reduce(s, *reduce); }; });

  const auto [matmul, flags] = binary("matmul", "Product of two matrices", Matmul);
  flags->result.Add(*matmul);
  matmul->add_flag("--transpose-a", flags->transpose_a, "Use the transpose of the first");
  matmul->add_flag("--transpose-b", flags->transpose_b, "Use the transpose of the second");
  matmul->add_option("--out-dtype", flags->out_dtype, "Type of the result; default: the operands'")
      ->check(CLI::IsMember(NamesOf(kAllDTypes)));

  const auto [add, add_flags] = binary("add", "Sum of two arrays, elementwise", Add);
  add_flags->result.Add(*add);

  auto window = std::make_shared<WindowSumFlags>();
  command = app.add_subcommand("window-sum", "Sums of the elements within a radius of each");
  command->add_option("x", window->x, "The operand, of rank 1")->type_name("OPERAND")->required();
  command->add_option("--radius", window->radius, "In elements")->required();
  window->operation.Add(*command);
  window->result.Add(*command);
  command->callback(
      [window, &chosen] { chosen = [window](Session& s) { return WindowSum(s, *window); }; });
}

}  // namespace tessera
