// Map runs one node of the expression after the other, each for the whole array. A library of
// elementwise functions works in this way, so a chain of such functions is slow. Every value except
// the last is an array in memory that is written once, and read again long after it has left the
// caches.
//
// Cost of a * b + c at n = 2^20 (f32): 16 MiB for the operands and the result, plus 8 bytes per
// element for each value that is written and read. Scratch memory: one array for each register of
// the program.
#include <cstring>

#include "kernels/cpu/map/nodes.h"
#include "kernels/cpu/runtime/chunks.h"
#include "kernels/expression/map_cost.h"

namespace tessera {
namespace {

std::uint64_t ScratchOf(const MapProblem& p) {
  const std::uint64_t cells = static_cast<std::uint64_t>(p.program->registers) * kCellBytes;
  const auto n = static_cast<std::uint64_t>(p.n);
  return n > UINT64_MAX / cells ? UINT64_MAX : n * cells;
}

// Runs one instruction over [begin, end). The result is written to the array of its register, even
// if it is an operand that could be read in place.
void RunChunk(const MapProblem& p, const MapOperands& operands, const Instruction& in, char* arrays,
              std::int64_t begin, std::int64_t end) {
  for (std::int64_t first = begin; first < end; first += kMapBlock) {
    const std::int64_t count = std::min(kMapBlock, end - first);
    MapRegisters r;
    for (int i = 0; i < p.program->registers; ++i) {
      r.memory[static_cast<std::size_t>(i)] = arrays + (i * p.n + first) * kCellBytes;
      r.at[static_cast<std::size_t>(i)] = r.memory[static_cast<std::size_t>(i)];
    }
    void* const memory = r.memory[in.out];
    RunInstruction(p, operands, in, first, count, r, memory);
    if (r.at[in.out] != memory)
      std::memcpy(memory, r.at[in.out], static_cast<std::size_t>(count) * SizeOf(in.dtype));
    if (&in + 1 == p.program->end()) StoreBlock(p.dtype, memory, count, ResultAt(p, first));
  }
}

void Run(const MapProblem& p, Stream& stream) {
  const MapOperands operands(p);
  auto* arrays = static_cast<char*>(stream.Scratch(static_cast<std::size_t>(ScratchOf(p))));
  for (const Instruction& in : *p.program) {
#pragma omp parallel for schedule(static) if (p.n > kChunk)
    for (std::int64_t begin = 0; begin < p.n; begin += kChunk) {
      if (stream.stopped()) continue;
      RunChunk(p, operands, in, arrays, begin, std::min(p.n, begin + kChunk));
    }
  }
}

}  // namespace

extern constexpr Strategy<MapProblem> kMapCpuOneNode = {
    .name = "one_node",
    .summary = "one pass for each node, with arrays of intermediate values",
    .source = "how libraries evaluate chains of array functions",
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = MapRoundoff,
    .cost = PassEachCost,
    .launch = Run,
    .scratch = ScratchOf,
};

}  // namespace tessera
