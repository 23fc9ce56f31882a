// An expression for any range of its elements, on one thread: what the strategy fused shares out,
// and what other operations read their elements from.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/cpu/map/nodes.h"
#include "kernels/device/device.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// One thread at a time. The problem's out counts for nothing.
class MapRows {
 public:
  // problem and stream outlive it.
  MapRows(const MapProblem& problem, const Stream& stream);

  // Writes elements [first, first + count) of the result to out, until the stream is stopped.
  void Run(std::int64_t first, std::int64_t count, void* out);

 private:
  void RunBlock(std::int64_t first, std::int64_t count, void* out);

  const MapProblem& problem_;
  const Stream& stream_;
  const MapOperands operands_;
  const std::unique_ptr<char[]> cells_;
  MapRegisters registers_;
};

}  // namespace tessera
