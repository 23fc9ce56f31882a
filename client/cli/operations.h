// The operations, for their commands and for `tessera bench`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cli/command.h"
#include "client/cli/operands.h"

namespace tessera {

struct OperationCommand;

// What an operation computes, and how.
struct ProblemFlags {
  const OperationCommand* operation = nullptr;
  std::vector<std::string> operands;
  std::string op;
  std::vector<int> axes;
  bool keep_dims = false;
  bool transpose_a = false;
  bool transpose_b = false;
  std::string out_dtype;
  std::int64_t radius = 0;
  std::int64_t k = 0;
  bool smallest = false;
  std::optional<int> axis;
  bool exclusive = false;
  bool reverse = false;
  bool descending = false;
  std::string only;  // "values" or "indices": the only result of sort or select that is computed
  std::string mode = "error";
  bool along = false;
  bool right = false;
  std::int64_t length = 0;
  std::int64_t bins = 0;
  std::vector<double> range;  // the outer edges of bins of equal width, or empty
  std::string expression;
  std::string strategy;
  Launch launch;

  bool Is(std::string_view name) const;  // whether the operation has this name
  // Whether the results are values and indices.
  bool GivesTwo() const { return Is("topk") || Is("sort") || Is("select"); }
  Results Wanted() const {
    return only.empty() ? Results::kBoth : only == "values" ? Results::kValues : Results::kIndices;
  }
  // Whether a Reduce has one number as its result.
  bool FoldsAll() const { return Is("reduce") && axes.empty(); }
  // Returns the options that these flags set. Throws CommandError.
  OperationOptions Options() const;
};

using Operands = absl::Span<const Operand>;

struct OperationCommand {
  const char* name;
  const char* description;
  // Adds the operands, and the options that say what is computed.
  void (*add)(CLI::App& command, ProblemFlags& flags);
  absl::StatusOr<v1::StepResult> (*call)(Client& client, const ProblemFlags& flags,
                                         Operands operands, const OperationOptions& options);
};

absl::Span<const OperationCommand> OperationCommands();

}  // namespace tessera
