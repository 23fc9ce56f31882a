// Operands on the command line.
#pragma once

#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "client/cli/command.h"

namespace tessera {

// Parses NAME, NAME[slices], NAME@OFFSET:SHAPE:STRIDES or file:PATH.npy. If there are slices, asks
// the server for the buffer's shape.
Operand ResolveOperand(Session& session, const std::string& text);

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
Input ResolveInput(Session& session, const std::string& text);

// Adds a required operand.
CLI::Option* AddOperand(CLI::App& command, const std::string& name, std::string& text,
                        const std::string& description);

void AddLaunch(CLI::App& command, Launch& launch);

}  // namespace tessera
