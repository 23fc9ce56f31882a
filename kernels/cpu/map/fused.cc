// Map in one pass: blocks of 512 elements, for each of which the whole expression is computed in
// registers that stay in the first-level cache, one instruction after the other. What an instruction
// costs to decode is shared by 512 elements, and each is a loop of vector instructions.
//
// Cost of a * b + c at n = 2^20 (f32): 16 MiB, 3 * 2^20 operations; 16 chunks to share out.
#include "kernels/cpu/chunks.h"
#include "kernels/cpu/map/nodes.h"
#include "kernels/map_cost.h"

namespace tessera {
namespace {

void RunBlock(const MapProblem& p, const MapOperands& operands, std::int64_t first,
              std::int64_t count, MapRegisters& r) {
  const Instruction* const last = p.program->end() - 1;
  for (const Instruction& in : *p.program) {
    void* memory = r.memory[in.out];
    // The result is computed where it belongs.
    if (&in == last && IsStoredAsValue(p.dtype)) {
      memory = static_cast<char*>(p.out) + first * static_cast<std::int64_t>(SizeOf(p.dtype));
    }
    RunInstruction(p, operands, in, first, count, r, memory);
  }
  StoreBlock(p, r.at[last->out], first, count);
}

void Run(const MapProblem& p, Stream& stream) {
  const MapOperands operands(p);
  const std::int64_t chunks = Chunks(p.n);
  const int workers =
      static_cast<int>(std::min<std::int64_t>(chunks, stream.device().info().multiprocessors));
  const std::int64_t cells = p.program->registers * kMapBlock * kCellBytes;
  auto* memory = static_cast<char*>(stream.Scratch(static_cast<std::size_t>(workers * cells)));
#pragma omp parallel for schedule(static, 1) num_threads(workers)
  for (int worker = 0; worker < workers; ++worker) {
    MapRegisters r;
    for (int i = 0; i < p.program->registers; ++i) {
      r.memory[static_cast<std::size_t>(i)] = memory + worker * cells + i * kMapBlock * kCellBytes;
    }
    for (std::int64_t chunk = worker; chunk < chunks && !stream.stopped(); chunk += workers) {
      const std::int64_t end = std::min(p.n, (chunk + 1) * kChunk);
      for (std::int64_t first = chunk * kChunk; first < end; first += kMapBlock)
        RunBlock(p, operands, first, std::min(kMapBlock, end - first), r);
    }
  }
}

}  // namespace

extern constexpr Strategy<MapProblem> kMapCpuFused = {
    .name = "fused",
    .summary = "one pass: the whole expression for blocks that stay in the first-level cache",
    .source = "vectorised execution of databases (Boncz, Zukowski and Nes, MonetDB/X100, 2005)",
    .deterministic = true,
    .roundoff = MapRoundoff,
    .cost = OnePassCost,
    .launch = Run,
};

}  // namespace tessera
