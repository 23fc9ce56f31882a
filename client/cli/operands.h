// Operands and options that the operations have on the command line.
#pragma once

#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/command.h"

namespace tessera {

// Parses NAME, NAME[slices], NAME@OFFSET:SHAPE:STRIDES or file:PATH.npy. Asks the server for the
// shape to which slices refer.
absl::StatusOr<Operand> ResolveOperand(Session& session, const std::string& text);

// An operand and its properties. REQUIRES: the operand is not a result of a step.
struct Input {
  Operand operand;
  std::string text;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::uint64_t version = 0;  // the buffer's version; 0 if there is no buffer

  std::int64_t elements() const {
    return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
  }
  std::uint64_t bytes() const { return static_cast<std::uint64_t>(elements()) * SizeOf(dtype); }
  // Returns a text such as "f32 [1000, 64]".
  std::string type() const;
};
absl::StatusOr<Input> ResolveInput(Session& session, const std::string& text);

void AddLaunch(CLI::App& command, Launch& launch);

// The options that all operations share.
struct OperationFlags {
  std::string strategy;
  Launch launch;
  bool timing = false;

  void Add(CLI::App& command) {
    command
        .add_option("--strategy", strategy,
                    "Algorithm from 'tessera strategies'; default: the fastest")
        ->type_name("STRATEGY");
    AddLaunch(command, launch);
    command.add_flag("--timing", timing,
                     "Measure the time on the device and print what the call cost");
  }

  OperationOptions Options() const {
    OperationOptions options;
    options.strategy = strategy;
    options.launch = launch;
    options.timing = timing;
    return options;
  }
};

// Options for where an array result goes.
struct ResultFlags {
  std::string out;
  std::string file;
  bool replace = false;
  std::string ttl;
  std::vector<std::string> placement;

  void Add(CLI::App& command) {
    auto* name = command.add_option("--out", out, "Keep the result on the device as this buffer")
                     ->type_name("BUFFER");
    auto* path =
        command
            .add_option("-o,--output", file, "Save the result as a .npy file; - is standard output")
            ->type_name("FILE");
    path->excludes(name);
    command.add_flag("--replace", replace, "Replace any buffer with the name given to --out")
        ->needs(name);
    command.add_option("--ttl", ttl, "How long the buffer of --out lives, such as 10m")
        ->check(DurationCheck())
        ->needs(name);
    command
        .add_option("--placement", placement,
                    "Devices among which the buffer of --out is divided, such as cuda:0,cuda:1; "
                    "all: every device")
        ->type_name("DEVICES")
        ->delimiter(',')
        ->needs(name);
  }
  bool given() const { return !out.empty() || !file.empty(); }
};

// Parses axes such as "0,-1". An empty text means no axes.
absl::StatusOr<std::vector<int>> ParseAxes(const std::string& text);

}  // namespace tessera
