// A product on Hopper's tensor cores that selects the best scores of each row. Scores are computed
// from the sums in registers and compared with the k-th best score of their row so far. Most scores
// are rejected at that point, and the score matrix never reaches memory.
//
// The main loop, the producer (gemm.cuh, mainloop.cuh) and the sums are the same as in
// `tensor_bf16` and `tensor_f16`. Compared with running one of these and then `threshold`, only the
// order of tiles and the epilogue are different.
//
//     c     row tile  | part 0 ..........| part 1 ..........|     a block takes a part at a time
//                     | t0 | t1 | t2 |.. |                        and walks along n, tile by tile
//
// - A warp has 16 rows of a tile, and four of its lanes together have all columns of a row. So a
//   single warp selects the best scores of a row, and no thread waits for another warp.
// - A score is compared with its row's limit, the k-th best score so far, and most scores are
//   rejected by this one comparison. The others go to queues in shared memory, one for each lane
//   and row. When a queue is full, the warp sorts all queues of the row and merges them with the
//   row's list, which lowers the limit for the rest of the tile. The list is in device memory,
//   because it is not needed between merges.
// - Without a limit, every score in the first tile of each part would pass. So the initial limits
//   come from a sample: the product of the first columns is written to memory, and TopK selects its
//   best scores. Of n random scores, at most k n / s pass the limit of a sample of s scores.
// - Another kernel merges the lists of a row's parts.
//
// Scores are ordered as in TopK. An entry combines a key and a column in one number, so the order
// in which lanes finish has no effect. A key does not distinguish -0 from 0; the lowest bit of an
// entry does. All NaNs here are the same NaN, the one that arithmetic produces.
//
// The kernel is correct for any m, n and k if TMA can read the operands: scores beyond the edges
// are computed but enter no list. Scores have the same bits as with `tensor_bf16` and `tensor_f16`
// where these strategies do not cut tiles along k. Every operation rounds to the type of the
// scores, as in Map, and no multiply-adds are fused.
//
// Cost for 1024 x 2^20 x 128, k = 10, bf16: 8 row tiles in 16 parts each; 3 GiB of loads, nearly
// all from the L2; two multiplications, an addition and a comparison per sum.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "kernels/cuda/matmul/hopper/gemm/plan.cuh"
#include "kernels/cuda/matmul/hopper/strategy.cuh"
#include "kernels/cuda/product_top_k/lists.cuh"
#include "kernels/problem/product_top_k.h"
#include "kernels/problem/top_k.h"

namespace tessera {

// An entry consists of a 32-bit key, a 31-bit column, and a bit that says whether the score is -0.
// Smaller entries are better.
using ScoreEntry = unsigned long long;
inline constexpr ScoreEntry kNoScore = ~ScoreEntry{0};

inline constexpr int kScoreRegisters = 4;                          // registers per lane for a list
inline constexpr int kMostSelected = kScoreRegisters * kWarpSize;  // entries per list
inline constexpr int kFreshRegisters = 2;                          // for a row's queues
inline constexpr int kFreshScores = kFreshRegisters * kWarpSize;
inline constexpr int kWarpRows = 16;

extern const Strategy<TopKProblem> kTopKThreshold;

template <class T>
using SelectingTile = TensorTile<T, 128, 256, 1, 3, /*kBoxes=*/0>;

// The parameters of a launch, in addition to TensorWork. Scores are always compared as if the
// smallest were wanted. If the largest scores are wanted, the sign of `outer` is reversed, which
// reverses the sign of all scores.
struct SelectionWork {
  int row_tiles, column_tiles, parts;  // parts per row of tiles, after the sample
  int sample_tiles;
  int k;
  bool smallest;
  float scale, outer, sign;  // the vector is multiplied by sign
  const void* vector;        // elements have the scores' type; null if there is no vector
  std::int64_t stride;
  ScoreEntry* lists;  // [rows, parts, k]
  // The best scores of the sample as TopK writes them; null if there is no sample.
  const void* sample_values;
  const std::int64_t* sample_indices;
};

// A score that has passed the limit, and its column.
struct FreshScore {
  float score;
  int column;
};

// The shared memory that follows the k-tiles.
template <class C>
struct SelectionMemory {
  // Each row has a queue for each of its four lanes; the four queues are interleaved.
  FreshScore fresh[C::kRows][kFreshScores];
  float vectors[C::kConsumers][2][C::kColumns];  // for this tile and the previous one
};
template <class C>
inline constexpr int kSelectingBytes = C::kSharedBytes +
                                       static_cast<int>(sizeof(SelectionMemory<C>));

// --- Scores ---

template <class S>
__device__ float RoundedTo(float x) {
  return static_cast<float>(static_cast<S>(x));
}

template <class S>
__device__ float ScoreOf(const SelectionWork& work, float c, float vector) {
  const float scaled = RoundedTo<S>(__fmul_rn(work.scale, RoundedTo<S>(c)));
  return RoundedTo<S>(__fmul_rn(work.outer, RoundedTo<S>(__fadd_rn(vector, scaled))));
}

inline constexpr std::uint32_t kSignBit = 0x80000000u, kInfinityBits = 0x7f800000u;

// NaN has the largest key if the smallest scores are wanted, and otherwise the smallest key.
__device__ inline ScoreEntry EntryOf(float score, int column, bool smallest) {
  const std::uint32_t bits = __float_as_uint(score), magnitude = bits & ~kSignBit;
  const std::uint32_t number = magnitude == 0 ? 0 : bits;
  std::uint32_t key = (number & kSignBit) != 0 ? ~number : number | kSignBit;
  if (magnitude > kInfinityBits) key = smallest ? ~0u : 0u;
  return ScoreEntry{key} << 32 | static_cast<std::uint32_t>(column) << 1 | (bits == kSignBit);
}
__device__ inline float NumberOf(std::uint32_t key) {
  return __uint_as_float((key & kSignBit) != 0 ? key ^ kSignBit : ~key);
}
// Returns the entry's score as it is written to memory.
__device__ inline float ScoreOfEntry(ScoreEntry entry, bool smallest) {
  const auto key = static_cast<std::uint32_t>(entry >> 32);
  if (key == 0 || key == ~0u) return __uint_as_float(0x7fffffffu);
  const float score = (entry & 1) != 0 ? -0.0f : NumberOf(key);
  return smallest ? score : -score;
}
// Returns a bound on the scores of all columns starting at `column`: no score above this bound
// comes before the limit. A score in a column after the limit's column has to be better than the
// limit; in other columns, a score may also equal the limit. If all scores have to be examined, the
// bound is NaN, because no score is greater than NaN.
__device__ inline float BoundOf(ScoreEntry limit, int column) {
  const auto key = static_cast<std::uint32_t>(limit >> 32);
  if (key <= ~(kSignBit | kInfinityBits)) return -std::numeric_limits<float>::infinity();
  const bool later = static_cast<std::uint32_t>(limit) >> 1 < static_cast<std::uint32_t>(column);
  // The next number below 0 must not be -0, which compares equal to 0.
  return NumberOf(later ? key - (key == kSignBit ? 2 : 1) : key);
}

// Returns entry `at` of a row's best scores in the sample.
template <class S>
__device__ ScoreEntry SampleEntry(const SelectionWork& work, std::int64_t row, int at) {
  const std::int64_t place = row * work.k + at;
  const auto value = static_cast<float>(static_cast<const S*>(work.sample_values)[place]);
  return EntryOf(work.smallest ? value : -value, static_cast<int>(work.sample_indices[place]),
                 work.smallest);
}

// --- A warp's rows ---

template <class C, class S>
class RowSelection {
 public:
  __device__ RowSelection(const SelectionWork& work, SelectionMemory<C>& memory, int rows,
                          int columns)
      : work_(work),
        rows_(rows),
        columns_(columns),
        lane_(LaneIndex()),
        warp_row_(WarpIndex() * kWarpRows),
        fresh_(&memory.fresh[warp_row_]) {}

  // Begins a part of a row of tiles with empty lists and with the limits from the sample. In rows
  // beyond the end of c, only NaNs pass.
  __device__ void Begin(int row_tile, int part) {
    first_row_ = row_tile * C::kRows + warp_row_;
    part_ = part;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row_ + half * 8 + lane_ / 4;
      limits_[half] = row >= rows_                     ? 0
                      : work_.sample_values == nullptr ? kNoScore
                                                       : SampleEntry<S>(work_, row, work_.k - 1);
    }
    for (int row = 0; row < kWarpRows && first_row_ + row < rows_; ++row)
      for (int i = lane_; i < work_.k; i += kWarpSize) List(row)[i] = kNoScore;
  }

  // Processes the warp's sums of the tile that begins at first_column. `vector` has the vector's
  // elements for the columns of the tile.
  __device__ void Take(const float (&d)[C::kColumns / 2], int first_column, const float* vector) {
    if (first_row_ >= rows_) return;
    vector += 2 * (lane_ % 4);
    const int column = first_column + 2 * (lane_ % 4);
    for (int begin = 0; begin < kGroups;) {
      const float bounds[2] = {BoundOf(limits_[0], first_column),
                               BoundOf(limits_[1], first_column)};
      // If the smallest scores are wanted, NaNs are queued only while other scores are too few.
      const bool nans[2] = {!work_.smallest || bounds[0] != bounds[0],
                            !work_.smallest || bounds[1] != bounds[1]};
      float2 next[kGroup];
#pragma unroll
      for (int j = 0; j < kGroup; ++j) next[j] = *reinterpret_cast<const float2*>(vector + 8 * j);
      const int resumed = begin;
      begin = kGroups;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        float scores[4 * kGroup];
        bool passes = false;
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          const int eight = group * kGroup + j;
          const float2 pair = next[j];
          // The elements of the next group are loaded early, so that no lane waits for them.
          if (group + 1 < kGroups)
            next[j] = *reinterpret_cast<const float2*>(vector + 8 * (eight + kGroup));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            scores[4 * j + i] = ScoreOf<S>(work_, d[4 * eight + i], i % 2 == 0 ? pair.x : pair.y);
            passes |= !(scores[4 * j + i] > bounds[i / 2]);
          }
        }
        // Either all lanes take this branch or none of them does, so that the warp does not
        // diverge.
        if (__any_sync(kFullMask, passes && group >= resumed)) {
          if (__any_sync(kFullMask, max(counts_[0], counts_[1]) > kQueue - kRowScores)) {
            begin = group;
            break;
          }
#pragma unroll
          for (int i = 0; i < 4 * kGroup; ++i) {
            const int half = i % 4 / 2;
            if (scores[i] > bounds[half] || (scores[i] != scores[i] && !nans[half])) continue;
            fresh_[half * 8 + lane_ / 4][4 * counts_[half] + lane_ % 4] = {
                scores[i], column + 8 * (group * kGroup + i / 4) + i % 2};
            ++counts_[half];
          }
          __syncwarp();
        }
      }
      if (begin < kGroups) MergeFrom(kQueue - kRowScores + 1);
    }
  }

  // Ends the part: merges all remaining scores into the lists.
  __device__ void End() { MergeFrom(1); }

 private:
  static constexpr int kQueue = kFreshScores / 4;
  static constexpr int kGroup = 2;  // pieces of eight columns that are compared together
  static constexpr int kGroups = C::kColumns / 8 / kGroup;
  static constexpr int kRowScores = 2 * kGroup;  // scores per lane and row in a group

  __device__ ScoreEntry* List(int row) const {
    return work_.lists +
           (static_cast<std::int64_t>(first_row_ + row) * work_.parts + part_) * work_.k;
  }

  // Merges the queues of each row into the row's list if one of the queues holds at least `least`
  // scores.
  __device__ void MergeFrom(int least) {
    __syncwarp();  // the queues are written
    const unsigned upper = __ballot_sync(kFullMask, counts_[0] >= least);
    const unsigned lower = __ballot_sync(kFullMask, counts_[1] >= least);
#pragma unroll 1
    for (int row = 0; row < kWarpRows; ++row) {
      const int half = row / 8, lanes = row % 8 * 4;
      if (((half == 0 ? upper : lower) >> lanes & 15) == 0) continue;
      const int held =
          __shfl_sync(kFullMask, half == 0 ? counts_[0] : counts_[1], lanes + lane_ % 4);
      const bool own = lane_ / 4 == row % 8;
      if (own && half == 0) counts_[0] = 0;
      if (own && half == 1) counts_[1] = 0;
      if (first_row_ + row >= rows_) continue;
      ScoreEntry* const list = List(row);
      ScoreEntry best[kScoreRegisters], fresh[kFreshRegisters];
#pragma unroll
      for (int i = 0; i < kScoreRegisters; ++i) {
        const int at = i * kWarpSize + lane_;
        best[i] = at < work_.k ? list[at] : kNoScore;
      }
#pragma unroll
      for (int i = 0; i < kFreshRegisters; ++i) {
        const int at = i * kWarpSize + lane_;
        const FreshScore score = fresh_[row][at];
        fresh[i] = at / 4 < held && score.column < columns_
                       ? EntryOf(score.score, score.column, work_.smallest)
                       : kNoScore;
      }
      SortWarp(fresh, lane_);
      MergeIntoBest(best, fresh, lane_);
#pragma unroll
      for (int i = 0; i < kScoreRegisters; ++i) {
        const int at = i * kWarpSize + lane_;
        if (at < work_.k) list[at] = best[i];
      }
      const ScoreEntry limit = EntryAt(best, work_.k - 1);
      if (own && half == 0) limits_[0] = min(limits_[0], limit);
      if (own && half == 1) limits_[1] = min(limits_[1], limit);
    }
    __syncwarp();  // the queues are free
  }

  const SelectionWork& work_;
  const int rows_, columns_;  // the extents of c
  const int lane_;
  const int warp_row_;  // in the tile
  FreshScore (*const fresh_)[kFreshScores];
  int first_row_ = 0;  // in c
  int part_ = 0;
  // Each lane has two rows, row lane / 4 and the row 8 further down. limits_ holds their limits,
  // and counts_ the number of scores in the lane's queue for each row.
  ScoreEntry limits_[2] = {};
  int counts_[2] = {0, 0};
};

// --- The kernels ---

// A part of a row of tiles. A block processes one part at a time.
struct SelectionPart {
  int row_tile, part, begin, end;  // tiles [begin, end) of the row

  __device__ SelectionPart(const SelectionWork& work, int item)
      : row_tile(item % work.row_tiles), part(item / work.row_tiles) {
    const auto first = [&](int p) {
      return work.sample_tiles +
             static_cast<int>(std::int64_t{p} * (work.column_tiles - work.sample_tiles) /
                              work.parts);
    };
    begin = first(part);
    end = first(part + 1);
  }
};

template <class C, bool kMnB, class S>
__global__ void __launch_bounds__(C::kThreads, 1)
    SelectFromProduct(const __grid_constant__ CUtensorMap a_map,
                      const __grid_constant__ CUtensorMap b_map,
                      const __grid_constant__ TensorWork work,
                      const __grid_constant__ SelectionWork selection) {
  __shared__ alignas(8) std::uint64_t barriers[2 * C::kStages];
  const std::uint32_t shared = SharedAddress(DynamicShared<char>());
  const std::uint32_t k_tiles = (shared + C::kAlignment - 1) / C::kAlignment * C::kAlignment;
  auto& memory = *reinterpret_cast<SelectionMemory<C>*>(DynamicShared<char>() + (k_tiles - shared) +
                                                        C::kStages * C::kStageBytes);
  TensorPipeline<C> pipeline(k_tiles, SharedAddress(barriers));
  const int warpgroup = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / C::kWarpgroup, 0);
  if (threadIdx.x == C::kThreads - kWarpSize) {
    PrefetchMap(&a_map);
    PrefetchMap(&b_map);
    pipeline.Init();
  }
  __syncthreads();  // the barriers are initialized
  WaitForKernelBefore();
  const int items = selection.row_tiles * selection.parts;

  if (warpgroup == C::kConsumers) {
    GiveRegistersBack<40>();
    if (threadIdx.x != C::kConsumers * C::kWarpgroup) return;
    Abreast abreast;
    for (int item = static_cast<int>(blockIdx.x); item < items;
         item += static_cast<int>(gridDim.x)) {
      const SelectionPart part(selection, item);
      for (int tile = part.begin; tile < part.end; ++tile) {
        const Piece piece{part.row_tile * selection.column_tiles + tile, 0, work.k_tiles, true,
                          true};
        FetchKTiles<C, false, kMnB>(a_map, b_map, work, TensorPlace(work, piece), 0, abreast,
                                    pipeline);
      }
    }
    AllowNextKernel();
    return;
  }
  TakeRegisters<232>();
  const int thread = static_cast<int>(threadIdx.x) % C::kWarpgroup;
  constexpr int kEach = C::kColumns / C::kWarpgroup;  // elements of the vector per thread
  const auto* const vector = static_cast<const S*>(selection.vector);
  RowSelection<C, S> rows(selection, memory, work.rows, work.columns);
  int turn = 0;
  for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
    const SelectionPart part(selection, item);
    rows.Begin(part.row_tile, part.part);
    for (int tile = part.begin; tile < part.end; ++tile, turn ^= 1) {
      const int column = tile * C::kColumns;
      S elements[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int at = column + i * C::kWarpgroup + thread;
        elements[i] =
            vector == nullptr || at >= work.columns ? S(-0.0f) : vector[at * selection.stride];
      }
      float d[C::kColumns / 2];
      MultiplyKTiles<C, false, kMnB>(work.k_tiles, warpgroup, thread, pipeline, d);
      // Threads that are still reading the previous tile's elements use the other buffer. A thread
      // that writes here has passed the previous barrier, so all threads have finished reading this
      // buffer.
      float* const shared_vector = memory.vectors[warpgroup][turn];
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        shared_vector[i * C::kWarpgroup + thread] =
            selection.sign * static_cast<float>(elements[i]);
      NamedBarrier(BarrierOf<C>(Meeting::kStaging, warpgroup), C::kWarpgroup);
      rows.Take(d, column, shared_vector);
    }
    rows.End();
  }
}

// Merges the lists of a row's parts into one, with one block per row. Each warp merges every
// kMergeWarps-th list, and the first warp then merges the results.
inline constexpr int kMergeWarps = 8;

template <class S>
__global__ void __launch_bounds__(kMergeWarps* kWarpSize)
    MergeSelected(SelectionWork work, S* values, std::int64_t* indices) {
  __shared__ ScoreEntry of_warps[kMergeWarps][kMostSelected];
  AllowNextKernel();
  WaitForKernelBefore();
  const int warp = WarpIndex(), lane = LaneIndex();
  const std::int64_t row = blockIdx.x;
  const ScoreEntry* const lists = work.lists + row * work.parts * work.k;
  ScoreEntry best[kScoreRegisters];
#pragma unroll
  for (ScoreEntry& entry : best) entry = kNoScore;
  // The sample counts as one more part.
  const int parts = work.parts + (work.sample_values != nullptr ? 1 : 0);
  for (int part = warp; part < parts; part += kMergeWarps) {
    ScoreEntry other[kScoreRegisters];
#pragma unroll
    for (int i = 0; i < kScoreRegisters; ++i) {
      const int at = i * kWarpSize + lane;
      other[i] = at >= work.k        ? kNoScore
                 : part < work.parts ? lists[part * work.k + at]
                                     : SampleEntry<S>(work, row, at);
    }
    MergeIntoBest(best, other, lane);
  }
#pragma unroll
  for (int i = 0; i < kScoreRegisters; ++i) of_warps[warp][i * kWarpSize + lane] = best[i];
  __syncthreads();  // all warps have written their lists
  if (warp != 0) return;
  for (int other_warp = 1; other_warp < min(kMergeWarps, parts); ++other_warp) {
    ScoreEntry other[kScoreRegisters];
#pragma unroll
    for (int i = 0; i < kScoreRegisters; ++i) other[i] = of_warps[other_warp][i * kWarpSize + lane];
    MergeIntoBest(best, other, lane);
  }
#pragma unroll
  for (int i = 0; i < kScoreRegisters; ++i) {
    const int at = i * kWarpSize + lane;
    if (at >= work.k) continue;
    values[row * work.k + at] = static_cast<S>(ScoreOfEntry(best[i], work.smallest));
    indices[row * work.k + at] = static_cast<std::uint32_t>(best[i]) >> 1;
  }
}

// Replaces the sample's product, [rows, columns], with its scores. There is one block per row.
template <class S>
__global__ void __launch_bounds__(256) ScoreSample(SelectionWork work, S* c, int columns) {
  AllowNextKernel();
  WaitForKernelBefore();
  constexpr int kEach = 4;
  S* const row = c + std::int64_t{blockIdx.x} * columns;
  const int threads = static_cast<int>(blockDim.x);
  for (int first = static_cast<int>(threadIdx.x); first < columns; first += kEach * threads) {
    // All loads come before the first store.
    S sums[kEach];
    float vectors[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int j = min(first + i * threads, columns - 1);
      sums[i] = row[j];
      vectors[i] =
          work.vector == nullptr
              ? -0.0f
              : work.sign * static_cast<float>(static_cast<const S*>(work.vector)[j * work.stride]);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float score = ScoreOf<S>(work, static_cast<float>(sums[i]), vectors[i]);
      if (first + i * threads < columns)
        row[first + i * threads] = static_cast<S>(work.smallest ? score : -score);
    }
  }
}

// --- Launch ---

// Returns the number of columns in the sample, or 0 if there is no sample. The sample is large
// enough that only about a dozen other scores in each row of a part pass its limit, unless a sample
// of that size would be too expensive.
inline std::int64_t SampleColumns(const MatmulProblem& p, std::int64_t k, int multiprocessors) {
  constexpr std::int64_t kTile = 256, kPasses = 12, kMostScores = std::int64_t{1} << 26;
  const std::int64_t parts = std::max<std::int64_t>(1, multiprocessors / CeilDiv(p.m, 128));
  const std::int64_t most = std::min(p.n / 8, kMostScores / p.m) / kTile * kTile;
  const std::int64_t wanted = CeilDiv(p.n * k / (kPasses * parts), kTile) * kTile;
  const std::int64_t columns = std::min(most, std::max<std::int64_t>(wanted, 16 * kTile));
  return columns < 8 * k ? 0 : columns;
}

// Returns the number of parts per row of tiles, chosen so that waves of blocks are full or nearly
// full. Every part begins without a limit, which costs as much as a few tiles.
inline int SelectionParts(std::int64_t row_tiles, std::int64_t column_tiles, int multiprocessors) {
  constexpr std::int64_t kLeastTiles = 8;
  const std::int64_t most = std::max<std::int64_t>(1, column_tiles / kLeastTiles);
  const std::int64_t few = std::clamp<std::int64_t>(multiprocessors / row_tiles, 1, most);
  std::int64_t parts = few;
  const auto waves = [&](std::int64_t p) {
    return static_cast<double>(CeilDiv(row_tiles * p, multiprocessors)) / static_cast<double>(p);
  };
  for (std::int64_t p = few + 1; p <= std::min(few + 7, most); ++p)
    if (waves(p) < 0.95 * waves(parts)) parts = p;
  return static_cast<int>(parts);
}

template <class T>
TensorOperand<T> SelectionOperandA(const MatmulProblem& p) {
  return {static_cast<const T*>(p.a), p.m, p.k, p.lda, false};
}
template <class T>
TensorOperand<T> SelectionOperandB(const MatmulProblem& p) {
  return p.transpose_b ? TensorOperand<T>{static_cast<const T*>(p.b), p.n, p.k, p.ldb, false}
                       : TensorOperand<T>{static_cast<const T*>(p.b), p.k, p.n, p.ldb, true};
}

template <class T>
std::string SelectionRefusal(const ProductTopKProblem& problem, const Device& device) {
  using C = SelectingTile<T>;
  const MatmulProblem& p = problem.product;
  if (std::string missing = TensorMissing(device); !missing.empty()) return missing;
  if (problem.k > kMostSelected) return "k of at most " + std::to_string(kMostSelected);
  if (std::string refusal = TensorRefusal(p); !refusal.empty()) return refusal;
  if (CeilDiv(p.m, C::kRows) * CeilDiv(p.n, C::kColumns) > std::numeric_limits<std::int32_t>::max())
    return "a smaller product";
  const auto a = SelectionOperandA<T>(p), b = SelectionOperandB<T>(p);
  const auto aligned = [](const TensorOperand<T>& x) {
    return IsBoxAligned(x.data, x.rows, x.pitch * static_cast<std::int64_t>(sizeof(T)));
  };
  if (p.transpose_a || !aligned(a) || !aligned(b))
    return "k along the rows of a, and operands that TMA can read";
  // Tiles that are cut along k would give different bits.
  bool whole = false;
  RunBestPlan(
      TensorProduct{p.m, p.n, p.k, FetchTime(a), FetchTime(b), device.info().multiprocessors},
      tuning::kTiles16<T>,
      [&](auto, const TensorPlan& plan) { whole = plan.splits == 1 && !plan.shares; });
  return whole ? "" : "a product in whole tiles";
}

// Returns the number of bytes in the lists of all parts, without the sample.
inline std::uint64_t SelectionLists(const ProductTopKProblem& problem, std::int64_t sample,
                                    int multiprocessors) {
  const MatmulProblem& p = problem.product;
  const int parts = SelectionParts(CeilDiv(p.m, 128), CeilDiv(p.n - sample, 256), multiprocessors);
  return static_cast<std::uint64_t>(p.m * parts * problem.k) * sizeof(ScoreEntry);
}

// Counts the loads of tiles, the sample's scores (written and read twice), the lists, and the
// results.
inline Cost SelectionCost(const ProductTopKProblem& problem) {
  constexpr int kMultiprocessors = 132;  // the number on an H200
  const MatmulProblem& p = problem.product;
  const std::int64_t sample = SampleColumns(p, problem.k, kMultiprocessors);
  const auto m = static_cast<std::uint64_t>(p.m), n = static_cast<std::uint64_t>(p.n);
  const auto k = static_cast<std::uint64_t>(problem.k);
  const std::uint64_t size = SizeOf(p.out_dtype);
  Cost cost = MatmulCost(p, MatmulTileLoads(p, 128, 256));
  cost.bytes -= m * n * size;
  cost.bytes += 4 * m * static_cast<std::uint64_t>(sample) * size +
                2 * SelectionLists(problem, sample, kMultiprocessors) +
                m * k * (size + sizeof(std::int64_t));
  cost.flops += 4 * m * n;
  return cost;
}

// Returns the number of scratch bytes for the lists and for LaunchSample.
inline std::uint64_t SelectionScratch(const ProductTopKProblem& problem, const Device& device) {
  const MatmulProblem& p = problem.product;
  const int multiprocessors = device.info().multiprocessors;
  const std::int64_t sample = SampleColumns(p, problem.k, multiprocessors);
  const auto m = static_cast<std::uint64_t>(p.m), k = static_cast<std::uint64_t>(problem.k);
  const std::uint64_t size = SizeOf(p.out_dtype);
  const std::uint64_t lists = SelectionLists(problem, sample, multiprocessors);
  if (sample == 0) return lists;
  const TopKProblem top_k = {.dtype = p.out_dtype, .rows = p.m, .n = sample, .k = problem.k};
  return lists + m * static_cast<std::uint64_t>(sample) * size +
         m * k * (size + sizeof(std::int64_t)) + kTopKThreshold.scratch(top_k);
}

// Selects the best scores of the first columns, with a product in whole tiles and TopK.
template <class T, bool kMnB, class S>
void LaunchSample(const ProductTopKProblem& problem, std::int64_t columns, SelectionWork& selection,
                  CudaStream& stream) {
  MatmulProblem p = problem.product;
  p.n = columns;
  auto* const scores =
      static_cast<S*>(stream.Scratch(static_cast<std::size_t>(p.m * columns) * sizeof(S)));
  p.c = scores;
  RunPlan<TensorTile<T, 128, 256, 1, 4>, false, kMnB>(
      p, SelectionOperandA<T>(p), SelectionOperandB<T>(p), {.splits = 1}, nullptr, stream, columns);
  LaunchOverlapping(ScoreSample<S>, {static_cast<unsigned>(p.m), 256, 0}, stream, selection, scores,
                    static_cast<int>(columns));
  const auto best = static_cast<std::size_t>(p.m * problem.k);
  auto* const values = stream.Scratch(best * sizeof(S));
  auto* const indices = static_cast<std::int64_t*>(stream.Scratch(best * sizeof(std::int64_t)));
  kTopKThreshold.launch({.dtype = p.out_dtype,
                         .smallest = problem.smallest,
                         .rows = p.m,
                         .n = columns,
                         .k = problem.k,
                         .x = scores,
                         .values = values,
                         .indices = indices},
                        stream);
  selection.sample_values = values;
  selection.sample_indices = indices;
}

template <class T, bool kMnB, class S>
void LaunchSelection(const ProductTopKProblem& problem, CudaStream& stream) {
  using C = SelectingTile<T>;
  static_assert(C::kColumns % 64 == 0 && kSelectingBytes<C> <= 227 << 10);
  const MatmulProblem& p = problem.product;
  const auto map = [](const TensorOperand<T>& x, bool mn_major) {
    return MakeTensorMap<T>(x.data, 1, x.rows, x.columns, x.pitch,
                            mn_major ? C::kDepth : C::kGroupRows, mn_major ? 128 : C::kRowBytes);
  };
  const CUtensorMap a_map = map(SelectionOperandA<T>(p), false);
  const CUtensorMap b_map = map(SelectionOperandB<T>(p), kMnB);
  const int multiprocessors = stream.device().info().multiprocessors;

  SelectionWork selection{};
  selection.row_tiles = static_cast<int>(CeilDiv(p.m, C::kRows));
  selection.column_tiles = static_cast<int>(CeilDiv(p.n, C::kColumns));
  const std::int64_t sample = SampleColumns(p, problem.k, multiprocessors);
  selection.sample_tiles = static_cast<int>(sample / C::kColumns);
  selection.parts = SelectionParts(
      selection.row_tiles, selection.column_tiles - selection.sample_tiles, multiprocessors);
  selection.k = static_cast<int>(problem.k);
  selection.smallest = problem.smallest;
  selection.scale = problem.score.scale;
  selection.outer = problem.smallest ? problem.score.outer : -problem.score.outer;
  selection.sign = problem.score.negated ? -1.0f : 1.0f;
  selection.vector = problem.vector;
  selection.stride = problem.stride;
  selection.lists = static_cast<ScoreEntry*>(stream.Scratch(
      static_cast<std::size_t>(p.m * selection.parts * problem.k) * sizeof(ScoreEntry)));

  if (sample > 0) LaunchSample<T, kMnB, S>(problem, sample, selection, stream);

  // A group is one row of tiles, so tiles are numbered row by row.
  TensorWork work{};
  work.rows = static_cast<int>(p.m);
  work.columns = static_cast<int>(p.n);
  work.row_tiles = selection.row_tiles;
  work.tiles = Divisor(selection.row_tiles * selection.column_tiles);
  work.group_tiles = Divisor(selection.column_tiles);
  work.group_rows = work.last_rows = Divisor(1);
  work.k_tiles = static_cast<int>(CeilDiv(p.k, C::kDepth));

  const auto kernel = SelectFromProduct<C, kMnB, S>;
  AllowSharedBytes(kernel, kSelectingBytes<C>);
  const auto blocks =
      static_cast<unsigned>(std::min(multiprocessors, selection.row_tiles * selection.parts));
  LaunchOverlapping(kernel, {blocks, C::kThreads, kSelectingBytes<C>}, stream, a_map, b_map, work,
                    selection);
  LaunchOverlapping(MergeSelected<S>, {static_cast<unsigned>(p.m), kMergeWarps * kWarpSize, 0},
                    stream, selection, static_cast<S*>(problem.values), problem.indices);
}

template <class T>
void EnqueueSelection(const ProductTopKProblem& problem, Stream& any_stream) {
  CudaStream& stream = Cuda(any_stream);
  const MatmulProblem& p = problem.product;
  const auto launch = [&](auto score) {
    using S = decltype(score);
    if (p.transpose_b) {
      LaunchSelection<T, false, S>(problem, stream);
    } else {
      LaunchSelection<T, true, S>(problem, stream);
    }
  };
  if (p.out_dtype == DType::kF32) {
    launch(float{});
  } else {
    launch(T{});
  }
}

}  // namespace tessera
