// Map in one pass over blocks of 512 elements. For each block, all instructions of the expression
// run one after the other, on registers that stay in the L1 cache. An instruction is decoded once
// per block, and its loop over the 512 elements is vectorised. Constants are written once, to their
// own blocks. The loops are compiled twice (kernels/cpu/runtime/wide.h).
//
// Cost of a * b + c at n = 2^20 (f32): 16 MiB, 3 * 2^20 operations; 16 chunks to divide among the
// cores.
#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/cpu/map/rows.h"
#include "kernels/cpu/runtime/chunks.h"
#include "kernels/cpu/runtime/wide.h"
#include "kernels/expression/map_cost.h"

namespace tessera {
namespace {

constexpr std::int64_t kBlockBytes = kMapBlock * kCellBytes;

bool IsConstant(const Instruction& in) { return in.kind == Instruction::Kind::kConstant; }

}  // namespace

MapRows::MapRows(const MapProblem& problem, const Stream& stream)
    : problem_(problem), stream_(stream), operands_(problem) {
  const MapProgram& program = *problem.program;
  const auto blocks = program.registers + std::count_if(program.begin(), program.end(), IsConstant);
  cells_ = std::make_unique_for_overwrite<char[]>(static_cast<std::size_t>(blocks * kBlockBytes));
  char* block = cells_.get();
  for (int i = 0; i < program.registers; ++i, block += kBlockBytes)
    registers_.memory[static_cast<std::size_t>(i)] = block;
  for (const Instruction& in : program) {
    if (!IsConstant(in)) continue;
    RunInstruction(problem_, operands_, in, 0, kMapBlock, registers_, block);
    block += kBlockBytes;
  }
}

void MapRows::RunBlock(std::int64_t first, std::int64_t count, void* out) {
  const MapProgram& program = *problem_.program;
  const Instruction* const last = program.end() - 1;
  const char* constant = cells_.get() + program.registers * kBlockBytes;
  for (const Instruction& in : program) {
    if (IsConstant(in)) {
      registers_.at[in.out] = constant;
      constant += kBlockBytes;
      continue;
    }
    void* memory = registers_.memory[in.out];
    // The last instruction computes directly into out.
    if (&in == last && IsStoredAsValue(problem_.dtype)) memory = out;
    RunInstruction(problem_, operands_, in, first, count, registers_, memory);
  }
  StoreBlock(problem_.dtype, registers_.at[last->out], count, out);
}

TESSERA_WIDE void MapRows::RunBlockWide(std::int64_t first, std::int64_t count, void* out) {
  RunBlock(first, count, out);
}

void MapRows::Run(std::int64_t first, std::int64_t count, void* out) {
  const auto run = IsWide() ? &MapRows::RunBlockWide : &MapRows::RunBlock;
  const auto size = static_cast<std::int64_t>(SizeOf(problem_.dtype));
  // Checks for a stop after every block, because an operation may need hundreds of nanoseconds per
  // element.
  for (std::int64_t done = 0; done < count && !stream_.stopped(); done += kMapBlock) {
    (this->*run)(first + done, std::min(kMapBlock, count - done),
                 static_cast<char*>(out) + done * size);
  }
}

namespace {

void Run(const MapProblem& p, Stream& stream) {
  const std::int64_t chunks = Chunks(p.n);
  const int workers =
      static_cast<int>(std::min<std::int64_t>(chunks, stream.device().info().multiprocessors));
  std::vector<std::unique_ptr<MapRows>> rows;
  for (int worker = 0; worker < workers; ++worker)
    rows.push_back(std::make_unique<MapRows>(p, stream));
#pragma omp parallel for schedule(static, 1) if (workers > 1)
  for (int worker = 0; worker < workers; ++worker) {
    for (std::int64_t chunk = worker; chunk < chunks && !stream.stopped(); chunk += workers) {
      const std::int64_t first = chunk * kChunk;
      rows[static_cast<std::size_t>(worker)]->Run(first, std::min(kChunk, p.n - first),
                                                  ResultAt(p, first));
    }
  }
}

}  // namespace

extern constexpr Strategy<MapProblem> kMapCpuFused = {
    .name = "fused",
    .summary = "one pass: evaluates the whole expression for blocks that stay in the L1 cache",
    .source = "vectorised execution in databases (Boncz, Zukowski and Nes, MonetDB/X100, 2005)",
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = MapRoundoff,
    .cost = OnePassCost,
    .launch = Run,
};

}  // namespace tessera
