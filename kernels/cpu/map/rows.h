// Computes an expression for any range of its elements, on one thread. The strategy `fused` divides
// such ranges among threads, and other operations use them to compute their input.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/cpu/map/nodes.h"
#include "kernels/device/device.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// Computes ranges of a map's result. Only one thread at a time may use it. Ignores problem.out.
class MapRows {
 public:
  // The problem and the stream must outlive the MapRows.
  MapRows(const MapProblem& problem, const Stream& stream);

  // Writes elements [first, first + count) of the result to out. Returns early if the stream is
  // stopped.
  void Run(std::int64_t first, std::int64_t count, void* out);

 private:
  void RunBlock(std::int64_t first, std::int64_t count, void* out);
  void RunBlockWide(std::int64_t first, std::int64_t count, void* out);  // the same, with AVX2

  const MapProblem& problem_;
  const Stream& stream_;
  const MapOperands operands_;
  std::unique_ptr<char[]> cells_;  // blocks of registers, and then of constants
  MapRegisters registers_;
};

}  // namespace tessera
