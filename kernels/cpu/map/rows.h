// An expression for any range of its elements, on one thread: what the strategy fused shares out, and
// what other operations read their elements from.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/cpu/map/nodes.h"
#include "kernels/strategy.h"

namespace tessera {

// One thread at a time. The problem's out counts for nothing.
class MapRows {
 public:
  // problem outlives it.
  explicit MapRows(const MapProblem& problem);

  // Writes elements [first, first + count) of the result to out.
  void Run(std::int64_t first, std::int64_t count, void* out);

 private:
  void RunBlock(std::int64_t first, std::int64_t count, void* out);

  const MapProblem& problem_;
  const MapOperands operands_;
  const std::unique_ptr<char[]> cells_;
  MapRegisters registers_;
};

}  // namespace tessera
