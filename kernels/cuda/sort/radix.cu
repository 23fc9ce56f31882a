// Sort digit by digit, with three launches per digit.
//
// Compared with `block_merge`, no elements are compared: a pass distributes all elements of a row
// among 256 buckets by 8 bits of their keys, from the lowest bits to the highest, and keeps the
// order within a bucket. A row is divided into parts, one per block.
//
//     count     a block counts the digits of its part
//     scan      for each digit and part, the counts of the earlier parts are added up
//     scatter   a block ranks the elements of its part (radix.cuh) and moves each to
//               the elements with lower digits + those of earlier parts with this digit + its rank
//
// Buckets are filled tile by tile, so neighbours in a bucket are neighbours in memory, and most
// stores are coalesced. The price is that a pass reads the elements twice.
//
// Cost at n = 2^20, f32, one row: 4 passes; each reads 8 MiB and writes 4 MiB, plus 4 MiB of
// indices read and written; 12 launches.
//
// The kernels are correct for any n: a row of 2^30 elements or more has counters and indices of 64
// bits. Loads and stores are of single elements, so they are correct for any alignment.
#include <algorithm>

#include "kernels/cuda/sort/radix.cuh"

namespace tessera {
namespace {

constexpr int kHistograms = 8;                // copies of a block's counters
constexpr std::int64_t kLeastPart = 1 << 14;  // minimum number of elements in a part

// Block b has part b % parts.count of row b / parts.count. Writes table[row][digit][part].
template <class Word, class Count>
__global__ void __launch_bounds__(kRadixThreads)
    CountParts(RadixPass<Word, Count> pass, RowParts parts, Count* table) {
  // The extra element puts a digit's counts into different banks.
  __shared__ std::uint32_t counts[kHistograms][kDigits + 1];
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t row = blockIdx.x / parts.count, part = blockIdx.x % parts.count;
  for (auto& histogram : counts) histogram[thread] = 0;
  __syncthreads();  // all counts are zero
  const std::int64_t begin = part * parts.length, end = min(pass.n, begin + parts.length);
  const Word* const from = pass.from + row * pass.n;
  std::uint32_t* const mine = counts[thread % kHistograms];
#pragma unroll 8
  for (std::int64_t i = begin + thread; i < end; i += kRadixThreads)
    atomicAdd(mine + pass.Digit(from[i]), 1u);
  __syncthreads();  // the part is counted
  Count sum = 0;
  for (const auto& histogram : counts) sum += histogram[thread];
  table[(row * kDigits + thread) * parts.count + part] = sum;
}

// Block b replaces the counts of digit b % 256 of row b / 256 with the sums of the counts before
// them, and writes the sum of all counts to totals[b].
template <class Count>
__global__ void __launch_bounds__(kRadixThreads)
    ScanParts(std::int64_t parts, Count* table, Count* totals) {
  Count* const counts = table + blockIdx.x * parts;
  std::int64_t base = 0;
  for (std::int64_t first = 0; first < parts; first += kRadixThreads) {
    const std::int64_t i = first + threadIdx.x;
    const std::int64_t count = i < parts ? static_cast<std::int64_t>(counts[i]) : 0;
    std::int64_t all;
    const std::int64_t before = ScanBlock<Fold<ReduceOp::kSum, std::int64_t>>(count, &all);
    if (i < parts) counts[i] = static_cast<Count>(base + before);
    base += all;
    __syncthreads();  // the warps' totals have been read
  }
  if (threadIdx.x == 0) totals[blockIdx.x] = static_cast<Count>(base);
}

template <class Word, class Count>
__global__ void __launch_bounds__(kRadixThreads, 4)
    ScatterParts(RadixPass<Word, Count> pass, RowParts parts, const Count* table,
                 const Count* totals) {
  using Tile = RadixTile<Word, Count>;
  __shared__ typename Tile::Shared shared;
  const std::int64_t row = blockIdx.x / parts.count, part = blockIdx.x % parts.count;
  const std::int64_t list = row * kDigits + threadIdx.x;
  std::int64_t all;
  // The place of the next element whose digit is threadIdx.x.
  std::int64_t next =
      ScanBlock<Fold<ReduceOp::kSum, std::int64_t>>(static_cast<std::int64_t>(totals[list]), &all);
  next += static_cast<std::int64_t>(table[list * parts.count + part]);
  const std::int64_t end = min(pass.n, (part + 1) * parts.length);
  for (std::int64_t first = part * parts.length; first < end; first += Tile::kSize) {
    Tile tile(pass, shared);
    const unsigned count = tile.Load(row, first, end, [](unsigned) {});
    tile.Arrange();
    tile.Store(next);
    next += count;
  }
}

template <class Word, class Count>
void Run(const SortProblem& p, CudaStream& stream) {
  const RowParts parts = MakeParts(p, kLeastPart, stream.device().info().multiprocessors);
  const RadixPasses<Word, Count> passes(p, stream);
  const auto lists = static_cast<std::size_t>(p.rows) * kDigits;
  auto* const totals = static_cast<Count*>(stream.Scratch(lists * sizeof(Count)));
  auto* const table = static_cast<Count*>(
      stream.Scratch(lists * static_cast<std::size_t>(parts.count) * sizeof(Count)));
  const auto blocks = static_cast<unsigned>(p.rows * parts.count);
  for (int i = 0; i < passes.count(); ++i) {
    const RadixPass<Word, Count> pass = passes.At(i);
    CountParts<<<blocks, kRadixThreads, 0, stream.handle()>>>(pass, parts, table);
    CUDA_CHECK_LAUNCH(CountParts);
    ScanParts<<<static_cast<unsigned>(lists), kRadixThreads, 0, stream.handle()>>>(parts.count,
                                                                                   table, totals);
    CUDA_CHECK_LAUNCH(ScanParts);
    ScatterParts<<<blocks, kRadixThreads, 0, stream.handle()>>>(pass, parts, table, totals);
    CUDA_CHECK_LAUNCH(ScatterParts);
  }
}

std::uint64_t ScratchOf(const SortProblem& p) {
  std::uint64_t bytes = 0;
  DispatchRadix(p, [&]<class Word, class Count>(Word, Count) {
    const std::int64_t parts = MakeParts(p, kLeastPart, kMostMultiprocessors).count;
    bytes = RadixPasses<Word, Count>::Bytes(p) +
            static_cast<std::uint64_t>(p.rows * (parts + 1)) * kDigits * sizeof(Count);
  });
  return bytes;
}

std::string Refuses(const SortProblem& p) {
  const std::string short_rows = RefusesManyShortRows(p);
  if (!short_rows.empty()) return short_rows;
  const auto parts = static_cast<double>(MakeParts(p, kLeastPart, kMostMultiprocessors).count);
  return RefusesBlocks(static_cast<double>(p.rows) * std::max<double>(kDigits, parts));
}

Cost CostOf(const SortProblem& p) {
  const auto n = static_cast<std::uint64_t>(p.elements());
  const auto passes = static_cast<std::uint64_t>(PassesOf(p.dtype));
  const std::uint64_t index = p.wants_indices ? sizeof(std::uint32_t) : 0;
  return {.bytes = SortBytes(p, 3 * passes, index),
          .flops = 40 * passes * n,
          .atomics = 0,
          .depth = passes * static_cast<std::uint64_t>(kLeastPart / kRadixThreads)};
}

}  // namespace

extern constexpr Strategy<SortProblem> kSortRadix = {
    .name = "radix",
    .summary = "distributes elements by one digit of the keys at a time; three launches per digit",
    .source =
        "Satish, Harris and Garland, Designing Efficient Sorting Algorithms for Manycore GPUs, "
        "2009",
    .backend = Backend::kCuda,
    .deterministic = true,
    .roundoff = SortRoundoff,
    .cost = CostOf,
    .launch =
        [](const SortProblem& p, Stream& stream) {
          DispatchRadix(
              p, [&]<class Word, class Count>(Word, Count) { Run<Word, Count>(p, Cuda(stream)); });
        },
    .refuses = Refuses,
    .scratch = ScratchOf,
};

}  // namespace tessera
