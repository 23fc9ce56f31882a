// Sort many rows, each in the shared memory of a block.
//
// Compared with `onesweep`, elements stay on the chip between the passes: a block loads a row, or
// as many short rows as fit, sorts it digit by digit, and stores it. Device memory is read and
// written once. The passes are the same as those of the other radix sorts (radix.cuh), but no block
// needs the counts of another block.
//
// Rows that share a block are sorted together, by their keys alone. Each element is stored with its
// former position in the block, in 16 bits. A last pass distributes the elements by the number of
// their row, which is their position divided by n. Passes are stable, so rows stay sorted.
//
//     rows 4 1 | 3 2     by key   1 2 3 4     by row   1 4 | 2 3
//
// Cost for 65536 rows of 4096 elements, f32: 1 GiB read and 1 GiB written, 4 passes in shared
// memory; one launch.
//
// The kernel is correct for any number of rows: a grid strides over them. Rows of one element are
// copied like longer rows. Loads and stores are of single elements, so they are correct for any
// alignment.
#include <algorithm>

#include "kernels/cuda/sort/radix.cuh"
#include "kernels/cuda/top_k/top_k.cuh"

namespace tessera {
namespace {

constexpr int kItems = 16;
constexpr int kSize = kItems * kRadixThreads;  // elements of a block

template <class Word>
struct Space {
  RankSpace ranks;
  Word words[kSize];
  std::uint16_t places[kSize];
};

// Moves the thread's elements to the positions that their digits determine, in shared memory.
template <class Word, class Digit>
__device__ void Pass(const Digit& digit, int valid, Space<Word>& space, const Word (&words)[kItems],
                     const std::uint16_t (&places)[kItems]) {
  std::uint32_t ranks[kItems];
  // After RankTile's barriers, all threads have read the elements of the previous pass.
  RankTile<kItems>(digit, valid, space.ranks, ranks, [](unsigned) {});
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    if (PlaceInTile<kItems>(j) >= valid) continue;
    space.words[ranks[j]] = words[j];
    space.places[ranks[j]] = places[j];
  }
  __syncthreads();  // all elements are at their places
}

// Sorts `together` rows at a time.
template <class Word>
__global__ void __launch_bounds__(kRadixThreads, 3)
    SortInBlocks(SortArrays<Word> arrays, int together) {
  constexpr int kPasses = sizeof(Word);
  Space<Word>& space = *DynamicShared<Space<Word>>();
  const int n = static_cast<int>(arrays.n), thread = static_cast<int>(threadIdx.x);
  const std::int64_t groups = CeilDiv(arrays.rows, std::int64_t{together});
  for (std::int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
    const std::int64_t row = group * together;
    const std::int64_t left = arrays.rows - row;
    const int valid = static_cast<int>(left < together ? left : together) * n;
    const Word* const x = arrays.x + row * n;
    Word words[kItems];
    std::uint16_t places[kItems];
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int place = PlaceInTile<kItems>(j);
      words[j] = place < valid ? x[place] : Word{0};
      places[j] = static_cast<std::uint16_t>(place);
    }
    const auto reload = [&] {
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const int place = PlaceInTile<kItems>(j);
        words[j] = space.words[place];
        places[j] = space.places[place];
      }
    };
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      if (pass > 0) reload();
      const int shift = pass * kDigitBits;
      Pass([&](int j) { return DigitOf(arrays.key, words[j], shift); }, valid, space, words,
           places);
    }
    if (together > 1) {
      reload();
      // Missing elements may have any position, so the remainder keeps the digit in its range.
      const auto row_of = [&](int j) {
        return static_cast<unsigned>(places[j]) / static_cast<unsigned>(n) % kDigits;
      };
      Pass(row_of, valid, space, words, places);
    }
    for (int slot = thread; slot < valid; slot += kRadixThreads) {
      if (arrays.values != nullptr) arrays.values[row * n + slot] = space.words[slot];
      if (arrays.indices != nullptr) arrays.indices[row * n + slot] = space.places[slot] % n;
    }
  }
}

// Returns the number of rows that a block sorts at a time. A digit says which of them an element
// belongs to.
int Together(const SortProblem& p) {
  const std::int64_t fit =
      std::clamp<std::int64_t>(kSize / std::max<std::int64_t>(p.n, 1), 1, kDigits);
  return static_cast<int>(std::min(fit, std::max<std::int64_t>(p.rows, 1)));
}

template <class Word>
void Run(const SortProblem& p, CudaStream& stream) {
  const int together = Together(p);
  constexpr std::int64_t kMostBlocks = std::int64_t{1} << 30;
  const auto blocks = static_cast<unsigned>(std::min(CeilDiv(p.rows, together), kMostBlocks));
  LaunchTopK(SortInBlocks<Word>, blocks, kRadixThreads, sizeof(Space<Word>), stream,
             SortArrays<Word>(p), together);
}

Cost CostOf(const SortProblem& p) {
  const auto n = static_cast<std::uint64_t>(p.elements());
  const auto passes = static_cast<std::uint64_t>(PassesOf(p.dtype) + (Together(p) > 1 ? 1 : 0));
  return {
      .bytes = SortBytes(p, 0, 0), .flops = 30 * passes * n, .atomics = 0, .depth = passes * 512};
}

}  // namespace

extern constexpr Strategy<SortProblem> kSortSegmented = {
    .name = "segmented",
    .summary = "a block sorts a row, or several short rows, digit by digit in shared memory",
    .source =
        "Satish, Harris and Garland, Designing Efficient Sorting Algorithms for Manycore GPUs, "
        "2009, within blocks",
    .backend = Backend::kCuda,
    .deterministic = true,
    .roundoff = SortRoundoff,
    .cost = CostOf,
    .launch =
        [](const SortProblem& p, Stream& stream) {
          DispatchWord(p.dtype, [&](auto word) { Run<decltype(word)>(p, Cuda(stream)); });
        },
    .refuses = [](const SortProblem& p) -> std::string {
      return p.n <= kSize ? "" : "rows of at most 4096 elements";
    },
};

}  // namespace tessera
