// map: computes expressions for each element.
#include <memory>
#include <string>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/operands.h"
#include "client/cli/results.h"
#include "client/expression_text.h"

namespace tessera {
namespace {

struct MapFlags {
  std::string expression;
  std::vector<std::string> operands;
  OperationFlags operation;
  ResultFlags result;
};

absl::Status Map(Session& session, const MapFlags& flags) {
  const absl::StatusOr<Expr> expression = ParseExpression(flags.expression);
  if (!expression.ok()) return expression.status();
  std::vector<Operand> operands;
  for (const std::string& text : flags.operands) {
    absl::StatusOr<Operand> operand = ResolveOperand(session, text);
    if (!operand.ok()) return operand.status();
    operands.push_back(*std::move(operand));
  }
  return DeliverArray(session, flags.operation, flags.result, [&](const OperationOptions& options) {
    return session.client.Map(operands, *expression, options);
  });
}

}  // namespace

void AddMap(CLI::App& app, Command& chosen) {
  auto flags = std::make_shared<MapFlags>();
  CLI::App* command = app.add_subcommand(
      "map", "Compute an expression for each element, as in: map '(a - b) * 2' x y");
  command
      ->add_option(
          "expression", flags->expression,
          "Operators with Python's precedence, operations by name, as in where(a < b, a, 0), "
          "and casts such as f32(a)")
      ->required();
  command
      ->add_option("operands", flags->operands,
                   "Operands a, b, ... of the expression, which are broadcast")
      ->type_name("OPERAND")
      ->required()
      ->expected(1, 8);
  flags->operation.Add(*command);
  flags->result.Add(*command);
  command->callback([flags, &chosen] { chosen = [flags](Session& s) { return Map(s, *flags); }; });
}

}  // namespace tessera
