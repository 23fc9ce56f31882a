// One pass of a radix sort for one tile: a block ranks the elements of a tile by 8 bits of their
// keys, and moves them, in this order, to the buckets of these bits. `radix`, `onesweep` and
// `segmented` share this code.
//
// A warp owns 32 * kItems adjacent elements of the tile, and each lane every 32nd of them. So a
// warp loads adjacent elements together, and item j of every lane comes before item j + 1 of any
// lane. First the warps count their digits. Adding the counts of lower warps and lower digits turns
// each warp's counter of a digit into the rank of its next element with this digit:
//
//     rank = elements with lower digits + those of lower warps with this digit
//            + earlier ones of this warp
//
// Then, for each item, every lane sets its bit in the warp's mask of its digit, so that the mask
// says which lanes have this digit. A lane's rank is the counter's value plus the number of lower
// lanes in the mask. The lowest lane advances the counter.
//
// The elements then go to their ranks in shared memory, and the block stores them in this order:
// elements of one bucket are adjacent both there and in memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/sort/sort.cuh"

namespace tessera {

inline constexpr int kDigitBits = 8;
inline constexpr int kDigits = 1 << kDigitBits;
inline constexpr int kRadixThreads = kDigits;  // a thread per digit where digits are counted
inline constexpr int kRadixWarps = kRadixThreads / kWarpSize;

template <class Word>
__device__ unsigned DigitOf(const SortKey<Word>& key, Word word, int shift) {
  return static_cast<unsigned>(key(word) >> shift) & (kDigits - 1);
}

// Returns the place in the tile of the thread's item j.
template <int kItems>
__device__ int PlaceInTile(int j) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  return (warp * kItems + j) * kWarpSize + lane;
}

// The shared memory of RankTile.
struct RankSpace {
  // At first the number of a warp's elements with each digit, later the rank of the next one.
  std::uint32_t counts[kRadixWarps][kDigits];
  std::uint32_t masks[kRadixWarps][kDigits];  // per digit, the lanes of a warp whose item has it
  std::uint32_t starts[kDigits];  // the number of elements of the tile with lower digits
};

// Ranks the first `valid` elements of a tile, where digit(j) is the digit of the thread's item j.
// Ranks of other items are undefined. Calls counted(number of elements whose digit is threadIdx.x)
// as soon as this number is known, and returns it. space.starts is complete on return. REQUIRES: a
// block has kRadixThreads threads. `space` may be reused without a barrier if it has only been read
// in between.
template <int kItems, class Digit, class Counted>
__device__ unsigned RankTile(const Digit& digit, int valid, RankSpace& space,
                             std::uint32_t (&ranks)[kItems], const Counted& counted) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  std::uint32_t *const counts = space.counts[warp], *const masks = space.masks[warp];
  __syncwarp();  // the warp has read the counts of the previous tile
#pragma unroll
  for (int d = lane; d < kDigits; d += kWarpSize) counts[d] = masks[d] = 0;
  __syncwarp();  // the warp's counts and masks are zero
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    ranks[j] = digit(j);
    if (PlaceInTile<kItems>(j) < valid) atomicAdd(counts + ranks[j], 1u);
  }
  __syncthreads();  // the counts of all warps are complete
  unsigned count = 0, of_lower_warps[kRadixWarps];
#pragma unroll
  for (int w = 0; w < kRadixWarps; ++w) {
    of_lower_warps[w] = count;
    count += space.counts[w][threadIdx.x];
  }
  counted(count);
  std::int64_t all;
  const auto start =
      static_cast<std::uint32_t>(ScanBlock<Fold<ReduceOp::kSum, std::int32_t>>(count, &all));
  space.starts[threadIdx.x] = start;
#pragma unroll
  for (int w = 0; w < kRadixWarps; ++w) space.counts[w][threadIdx.x] = start + of_lower_warps[w];
  __syncthreads();  // the starts and the ranks of the next elements have been stored
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const unsigned d = ranks[j];
    const bool there = PlaceInTile<kItems>(j) < valid;
    if (there) atomicOr(masks + d, 1u << lane);
    __syncwarp();  // the masks have all lanes
    const unsigned peers = masks[d], lower = peers & ((1u << lane) - 1), next = counts[d];
    __syncwarp();  // all lanes have read the masks and the counts
    if (there && lower == 0) {
      counts[d] = next + __popc(peers);
      masks[d] = 0;
    }
    __syncwarp();  // the counts include this item
    ranks[j] = next + __popc(lower);
  }
  return count;
}

// One pass over all rows. An element has a word, and an index if `indices` or `to_index` is set.
template <class Word, class Count>
struct RadixPass {
  const Word* from;
  Word* to;                 // null in the last pass if values are not wanted
  const Count* from_index;  // null in the first pass: the index of an element is its position
  Count* to_index;          // null in the last pass
  std::int64_t* indices;    // the result; null before the last pass
  std::int64_t n;
  int shift;
  SortKey<Word> key;

  __device__ unsigned Digit(Word word) const { return DigitOf(key, word, shift); }
};

// The tile of a block in one pass. Count is wide enough for an index. Every function is called by
// all threads, in the order of the declarations.
template <class Word, class Count>
class RadixTile {
 public:
  static constexpr int kItems = sizeof(Word) == 8 || sizeof(Count) == 8 ? 10 : 16;
  static constexpr int kSize = kItems * kRadixThreads;
  using Pass = RadixPass<Word, Count>;

  struct Shared {
    RankSpace ranks;
    std::int64_t bases[kDigits];
    union {
      Word words[kSize];
      Count indices[kSize];
    };
  };

  __device__ RadixTile(const Pass& pass, Shared& shared) : pass_(pass), shared_(shared) {}

  // Loads the tile that begins with element `first` of a row. Elements at or after `end` are not
  // part of it. Calls counted(number of its elements whose digit is threadIdx.x) as soon as this
  // number is known, and returns it.
  template <class Counted>
  __device__ unsigned Load(std::int64_t row, std::int64_t first, std::int64_t end,
                           const Counted& counted) {
    begin_ = row * pass_.n;
    first_ = first;
    valid_ = static_cast<int>(min(std::int64_t{kSize}, end - first));
    const Word* const from = pass_.from + begin_ + first_;
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int place = PlaceInTile<kItems>(j);
      words_[j] = place < valid_ ? from[place] : Word{0};
    }
    return RankTile<kItems>([this](int j) { return pass_.Digit(words_[j]); }, valid_, shared_.ranks,
                            ranks_, counted);
  }

  // Puts the words into shared memory, in the order of their ranks.
  __device__ void Arrange() {
#pragma unroll
    for (int j = 0; j < kItems; ++j)
      if (PlaceInTile<kItems>(j) < valid_) shared_.words[ranks_[j]] = words_[j];
  }

  // Stores the tile. base: the place in the row of the tile's first element whose digit is
  // threadIdx.x.
  __device__ void Store(std::int64_t base) {
    shared_.bases[threadIdx.x] = base - shared_.ranks.starts[threadIdx.x];
    __syncthreads();  // the words are in order, and the bases have been stored
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int slot = Slot(j);
      if (slot >= valid_) continue;
      words_[j] = shared_.words[slot];
      if (pass_.to != nullptr) pass_.to[Target(j)] = words_[j];
    }
    if (pass_.indices == nullptr && pass_.to_index == nullptr) return;
    __syncthreads();  // the words have been read
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int place = PlaceInTile<kItems>(j);
      if (place >= valid_) continue;
      shared_.indices[ranks_[j]] = pass_.from_index == nullptr
                                       ? static_cast<Count>(first_ + place)
                                       : pass_.from_index[begin_ + first_ + place];
    }
    __syncthreads();  // the indices are in order
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int slot = Slot(j);
      if (slot >= valid_) continue;
      const Count index = shared_.indices[slot];
      if (pass_.indices != nullptr) {
        pass_.indices[Target(j)] = static_cast<std::int64_t>(index);
      } else {
        pass_.to_index[Target(j)] = index;
      }
    }
  }

 private:
  // Returns the rank of the element that the thread stores as its item j.
  __device__ static int Slot(int j) { return j * kRadixThreads + static_cast<int>(threadIdx.x); }
  // Returns the element's destination in the array. REQUIRES: words_[j] is the element.
  __device__ std::int64_t Target(int j) const {
    return begin_ + shared_.bases[pass_.Digit(words_[j])] + Slot(j);
  }

  const Pass& pass_;
  Shared& shared_;
  std::int64_t begin_ = 0, first_ = 0;
  int valid_ = 0;
  Word words_[kItems];
  std::uint32_t ranks_[kItems];
};

// --- Host ---

// The arrays between which the passes of a sort move elements. The number of passes is even, so
// odd passes write to scratch memory, and even passes to the results, whose memory also holds the
// indices between passes.
template <class Word, class Count>
class RadixPasses {
 public:
  RadixPasses(const SortProblem& p, CudaStream& stream)
      : p_(p), key_(MakeSortKey<Word>(p.dtype, p.descending)) {
    const auto n = static_cast<std::size_t>(p.elements());
    odd_ = static_cast<Word*>(stream.Scratch(n * sizeof(Word)));
    even_ = static_cast<Word*>(p.wants_values ? p.values : stream.Scratch(n * sizeof(Word)));
    if (p.wants_indices) odd_index_ = static_cast<Count*>(stream.Scratch(n * sizeof(Count)));
  }
  static std::uint64_t Bytes(const SortProblem& p) {
    const auto n = static_cast<std::uint64_t>(p.elements());
    return n * ((p.wants_values ? 1 : 2) * sizeof(Word) + (p.wants_indices ? sizeof(Count) : 0));
  }

  int count() const { return PassesOf(p_.dtype); }
  // Returns pass i.
  RadixPass<Word, Count> At(int i) const {
    const bool odd = i % 2 == 0, last = i + 1 == count();
    auto* const even_index = reinterpret_cast<Count*>(p_.wants_indices ? p_.indices : nullptr);
    return {.from = i == 0 ? static_cast<const Word*>(p_.x)
                    : odd  ? even_
                           : odd_,
            .to = odd                        ? odd_
                  : last && !p_.wants_values ? nullptr
                                             : even_,
            .from_index = i == 0 ? nullptr
                          : odd  ? even_index
                                 : odd_index_,
            .to_index = last  ? nullptr
                        : odd ? odd_index_
                              : even_index,
            .indices = last && p_.wants_indices ? p_.indices : nullptr,
            .n = p_.n,
            .shift = i * kDigitBits,
            .key = key_};
  }

 private:
  const SortProblem& p_;
  const SortKey<Word> key_;
  Word *odd_, *even_;
  Count* odd_index_ = nullptr;
};

// How rows are divided among blocks that count digits.
struct RowParts {
  std::int64_t count;   // parts per row
  std::int64_t length;  // elements of each part but the last
};

// Returns parts of at least least_part elements, for about 4 blocks per SM. A block's counters have
// 32 bits, so a part has at most 2^31 elements. An array without elements has no parts.
inline RowParts MakeParts(const SortProblem& p, std::int64_t least_part, int multiprocessors) {
  if (p.elements() == 0) return {0, 0};
  constexpr std::int64_t kBlocksEach = 4;
  const std::int64_t wanted = CeilDiv(kBlocksEach * multiprocessors, p.rows);
  const std::int64_t least = CeilDiv(p.n, std::int64_t{1} << 31);
  const std::int64_t count = std::max(std::clamp<std::int64_t>(p.n / least_part, 1, wanted), least);
  const std::int64_t length = CeilDiv(p.n, count);
  return {CeilDiv(p.n, length), length};
}

// Rows below this length have counters and indices of 32 bits. Two bits are left for flags.
inline constexpr std::int64_t kShortRow = std::int64_t{1} << 30;

// Calls f(Word{}, Count{}).
template <class F>
void DispatchRadix(const SortProblem& p, const F& f) {
  DispatchWord(p.dtype, [&](auto word) {
    if (p.n < kShortRow) {
      f(word, std::uint32_t{});
    } else {
      f(word, std::uint64_t{});
    }
  });
}

}  // namespace tessera
