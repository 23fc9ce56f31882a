// Sort digit by digit, with one launch per digit that reads and writes each element once.
//
// Compared with `radix`, each pass saves one of its two reads. The digits of all passes are counted
// in one launch before the first pass, because the number of elements with a digit does not depend
// on their order. A tile still needs the number of elements with the same digit in earlier tiles.
// Blocks learn it from each other by decoupled look-back, as in Scan's `look_back`: a block
// publishes its counts and adds up the counts of the tiles before it, starting with the nearest,
// until it reaches a tile that has already published the counts of all tiles up to itself. The
// block then publishes such counts for its own tile. Thread d of a block does this for digit d.
//
//     states   tile 0   tile 1   tile 2   tile 3        tile 3 adds the counts of tiles 2 and 1,
//               all      all     count    count         and then knows those of all before it
//
// A state is one word (kernels/cuda/scan/states.cuh). Blocks take tiles by ticket, so the blocks
// that a block waits for have started, and wait only for earlier blocks. All sums are of integers,
// so the result does not depend on how far a block looks.
//
// Cost at n = 2^20, f32, one row: x is read once to count digits. Each of 4 passes reads and writes
// 4 MiB of elements, as much again if there are indices, and 1 KiB of states for each tile of 4096
// elements; 6 launches and 5 memsets.
//
// The kernels are correct for any n: a row of 2^30 elements or more has states and indices of 64
// bits. Loads and stores are of single elements, so they are correct for any alignment.
#include <algorithm>

#include "kernels/cuda/scan/states.cuh"
#include "kernels/cuda/sort/radix.cuh"

namespace tessera {
namespace {

constexpr int kHistograms = 4;                // copies of each digit's counter in a block
constexpr std::int64_t kLeastPart = 1 << 15;  // minimum number of elements in a part

// --- Counts of digits ---

__device__ inline void AtomicAdd(std::uint32_t* cell, std::uint32_t x) { atomicAdd(cell, x); }
__device__ inline void AtomicAdd(std::uint64_t* cell, std::uint32_t x) {
  atomicAdd(reinterpret_cast<unsigned long long*>(cell), static_cast<unsigned long long>(x));
}

// Adds the number of elements with each digit of each pass to counts[row][pass][digit]. Block b has
// part b % parts.count of row b / parts.count.
template <class Word, class Count>
__global__ void __launch_bounds__(kRadixThreads)
    CountAllDigits(RadixPass<Word, Count> first_pass, RowParts parts, Count* counts) {
  constexpr int kPasses = sizeof(Word);
  // The extra element puts a digit's counts into different banks.
  __shared__ std::uint32_t own[kHistograms][kPasses][kDigits + 1];
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t row = blockIdx.x / parts.count, part = blockIdx.x % parts.count;
  for (auto& histogram : own)
    for (auto& of_pass : histogram) of_pass[thread] = 0;
  __syncthreads();  // all counts are zero
  const std::int64_t n = first_pass.n;
  const std::int64_t begin = part * parts.length, end = min(n, begin + parts.length);
  const Word* const from = first_pass.from + row * n;
  auto& mine = own[thread % kHistograms];
#pragma unroll 4
  for (std::int64_t i = begin + thread; i < end; i += kRadixThreads) {
    const Word key = first_pass.key(from[i]);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      atomicAdd(&mine[pass][static_cast<unsigned>(key >> (pass * kDigitBits)) % kDigits], 1u);
  }
  __syncthreads();  // the part is counted
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    std::uint32_t sum = 0;
    for (const auto& histogram : own) sum += histogram[pass][thread];
    if (sum > 0) AtomicAdd(counts + (row * kPasses + pass) * kDigits + thread, sum);
  }
}

// Replaces the counts of each row and pass with the sums of the counts of lower digits.
template <class Count>
__global__ void __launch_bounds__(kRadixThreads) ScanDigits(Count* counts) {
  Count* const count = counts + std::int64_t{blockIdx.x} * kDigits + threadIdx.x;
  std::int64_t all;
  const std::int64_t before =
      ScanBlock<Fold<ReduceOp::kSum, std::int64_t>>(static_cast<std::int64_t>(*count), &all);
  *count = static_cast<Count>(before);
}

// --- States ---

// Returns the number of elements with a digit in the `tiles` tiles of the row before this one.
// state: the state of the previous tile. REQUIRES: the first tile of a row publishes kAll.
template <class Count>
__device__ Count LookBack(const Count* state, std::int64_t tiles) {
  Count sum = 0;
  while (tiles > 0) {
    const Count value = LoadState(state);
    const unsigned kind = KindOf(value);
    if (kind == kNothing) continue;
    sum += value & kCountMask<Count>;
    if (kind == kAll) break;
    state -= kDigits;
    --tiles;
  }
  return sum;
}

// --- Passes ---

// A block takes a tile. `tiles` is the number of tiles of a row; ticket t is tile t % tiles of row
// t / tiles. starts: [row][passes][digit], from this pass on. states: [ticket][digit], zeros.
template <class Word, class Count>
__global__ void __launch_bounds__(kRadixThreads, 4)
    Sweep(RadixPass<Word, Count> pass, std::int64_t tiles, const Count* starts, Count* states,
          unsigned* tickets) {
  using Tile = RadixTile<Word, Count>;
  __shared__ typename Tile::Shared shared;
  __shared__ unsigned ticket;
  if (threadIdx.x == 0) ticket = atomicAdd(tickets, 1u);
  __syncthreads();  // the ticket has been stored
  const std::int64_t row = ticket / tiles, at = ticket % tiles;
  Tile tile(pass, shared);
  Count* const state = states + std::int64_t{ticket} * kDigits + threadIdx.x;
  const Count count = tile.Load(row, at * Tile::kSize, pass.n, [&](unsigned own) {
    StoreState(state, StateOf<Count>(at == 0 ? kAll : kOwn, own));
  });
  tile.Arrange();
  Count before = 0;
  if (at > 0) {
    before = LookBack(state - kDigits, at);
    StoreState(state, StateOf<Count>(kAll, before + count));
  }
  const Count start = starts[row * static_cast<int>(sizeof(Word)) * kDigits + threadIdx.x];
  tile.Store(static_cast<std::int64_t>(start + before));
}

template <class Word, class Count>
std::int64_t TilesOf(const SortProblem& p) {
  return CeilDiv(p.n, RadixTile<Word, Count>::kSize);
}

// The counters of a sort in scratch memory.
template <class Word, class Count>
struct Counters {
  std::size_t starts, states;  // elements

  explicit Counters(const SortProblem& p)
      : starts(static_cast<std::size_t>(p.rows) * sizeof(Word) * kDigits),
        states(static_cast<std::size_t>(p.rows * TilesOf<Word, Count>(p)) * kDigits) {}
  std::size_t starts_bytes() const { return starts * sizeof(Count); }
  // The ticket follows the states, so that one memset clears both.
  std::size_t states_bytes() const { return states * sizeof(Count) + sizeof(unsigned); }
};

template <class Word, class Count>
void Run(const SortProblem& p, CudaStream& stream) {
  const RowParts parts = MakeParts(p, kLeastPart, stream.device().info().multiprocessors);
  const RadixPasses<Word, Count> passes(p, stream);
  const Counters<Word, Count> sizes(p);
  auto* const starts = static_cast<Count*>(stream.Scratch(sizes.starts_bytes()));
  auto* const states = static_cast<Count*>(stream.Scratch(sizes.states_bytes()));
  auto* const ticket = reinterpret_cast<unsigned*>(states + sizes.states);
  stream.Zero(starts, sizes.starts_bytes());
  CountAllDigits<<<static_cast<unsigned>(p.rows * parts.count), kRadixThreads, 0,
                   stream.handle()>>>(passes.At(0), parts, starts);
  CUDA_CHECK_LAUNCH(CountAllDigits);
  ScanDigits<<<static_cast<unsigned>(p.rows * passes.count()), kRadixThreads, 0, stream.handle()>>>(
      starts);
  CUDA_CHECK_LAUNCH(ScanDigits);
  const std::int64_t tiles = TilesOf<Word, Count>(p);
  for (int i = 0; i < passes.count(); ++i) {
    stream.Zero(states, sizes.states_bytes());
    Sweep<<<static_cast<unsigned>(p.rows * tiles), kRadixThreads, 0, stream.handle()>>>(
        passes.At(i), tiles, starts + i * kDigits, states, ticket);
    CUDA_CHECK_LAUNCH(Sweep);
  }
}

std::uint64_t ScratchOf(const SortProblem& p) {
  std::uint64_t bytes = 0;
  DispatchRadix(p, [&]<class Word, class Count>(Word, Count) {
    const Counters<Word, Count> sizes(p);
    bytes = RadixPasses<Word, Count>::Bytes(p) + sizes.starts_bytes() + sizes.states_bytes();
  });
  return bytes;
}

std::string Refuses(const SortProblem& p) {
  const std::string short_rows = RefusesManyShortRows(p);
  if (!short_rows.empty()) return short_rows;
  double blocks = 0;
  DispatchRadix(p, [&]<class Word, class Count>(Word, Count) {
    blocks = static_cast<double>(p.rows) *
             std::max(static_cast<double>(TilesOf<Word, Count>(p)), 1.0 * sizeof(Word));
  });
  return RefusesBlocks(blocks);
}

Cost CostOf(const SortProblem& p) {
  const auto n = static_cast<std::uint64_t>(p.elements());
  const auto passes = static_cast<std::uint64_t>(PassesOf(p.dtype));
  const std::uint64_t index = p.wants_indices ? sizeof(std::uint32_t) : 0;
  return {.bytes = SortBytes(p, 2 * passes, index),
          .flops = 30 * passes * n,
          .atomics = 0,
          .depth = passes * 512};
}

}  // namespace

extern constexpr Strategy<SortProblem> kSortOnesweep = {
    .name = "onesweep",
    .summary = "distributes elements by one digit of the keys at a time, with one launch per digit",
    .source =
        "Adinets and Merrill, Onesweep: A Faster Least Significant Digit Radix Sort for GPUs, 2022",
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
