// The tree of kernels/same_bits/fixed_tree.h over the values of an expression. A thread loads the
// vectors of all operands for some rows, runs the steps of the chain on them
// (kernels/cuda/map/chain.cuh) and folds the values into its columns as FoldLane does. The only
// memory traffic is one read of each operand. The bits are the same as in a Map followed by a
// reduction of its result: values are rounded to the type that the intermediate array would have.
//
// A step is decoded once for the kRows vectors of values that a thread computes at a time.
//
// Invariant: while a thread folds the rows of one batch, the loads of the next batch into the other
// half of its shared memory are in flight.
//
// The .cu files that include this file are compiled with -fmad=false.
#pragma once

#include <cstdint>

#include "kernels/cuda/map/chain.cuh"
#include "kernels/cuda/tree/launch.cuh"

namespace tessera {

// The shape of a kernel. kRows: the number of rows that a thread processes at a time. kBlocks:
// blocks per SM, as in TreeBlocks.
template <int kRowsOf, int kBlocksOf>
struct MappedShape {
  static constexpr int kRows = kRowsOf;
  static constexpr int kBlocks = kBlocksOf;
};
template <class C>
constexpr auto MappedShapeOf() {
  constexpr int kBytes =
      static_cast<int>(sizeof(typename C::Column)) * kTreeVector<typename C::Element>;
  return MappedShape < 2, kBytes >= 32 ? 3 : 4 > {};
}

// The part of the operands from which one lane of the chunk [begin, end) is computed. T: their
// element type, which has the same size as the element type of C.
template <class C, class T, class Shape>
struct MappedLane {
  using O = typename C::Element;
  static_assert(sizeof(O) == sizeof(T));
  static constexpr int V = kTreeVector<O>;
  static constexpr int kRow = kTreeRow<O>;
  static constexpr int kRows = Shape::kRows;
  static_assert(kTreeSegmentRows % kRows == 0);
  using Batch = chained::Groups<T, kRows>;

  const chained::Chain& chain;
  uint4* loaded;  // shared memory for two batches of rows
  std::int64_t end, first;
  int rows;   // rows with an element of this lane
  int whole;  // rows with all V of its elements

  __device__ __forceinline__ MappedLane(const chained::Chain& of, uint4* memory, std::int64_t begin,
                                        std::int64_t until, int lane)
      : chain(of), loaded(memory), end(until), first(begin + lane * V) {
    rows = first >= end ? 0 : static_cast<int>((end - 1 - first) / kRow) + 1;
    whole = end - first < V ? 0 : static_cast<int>((end - V - first) / kRow) + 1;
  }

  __device__ __forceinline__ Batch BatchAt(int i) const {
    return Batch{reinterpret_cast<chained::Group<T>*>(loaded) +
                 i * chain.inputs * kRows * chained::kMostThreads + threadIdx.x};
  }

  // Starts the loads of kRows rows. Groups that begin at or after the end are not loaded.
  __device__ __forceinline__ void StartRows(int row, const Batch& to) const {
    const std::int64_t at = first + std::int64_t{row} * kRow;
    const bool full = row + kRows <= whole;
    if (chain.simple && full) {
#pragma unroll 1
      for (int i = 0; i < chain.inputs; ++i) {
        const T* from = static_cast<const T*>(chain.input[i].data) + at;
#pragma unroll
        for (int j = 0; j < kRows; ++j) chained::StartCopy<16>(&to(i, j), from + j * kRow);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < chain.inputs; ++i) {
#pragma unroll 1
        for (int j = 0; j < kRows; ++j) {
          const std::int64_t left = end - at - j * kRow;
          if (left > 0) chained::StartLoad<T>(chain.input[i], at + j * kRow, left, to(i, j));
        }
      }
    }
    chained::EndLoads();
  }

  // Folds the values of rows row, row + 1, ... of the segment that begins at row `top`.
  __device__ __forceinline__ void FoldValues(const ValueOf<T> (&value)[kRows * V],
                                             typename C::Column (&column)[V], int row, int top,
                                             bool mirror) const {
    const std::int64_t at = first + std::int64_t{row} * kRow;
    const bool full = row + kRows <= whole;
    const auto step = [&](int j, int k) {
      TreeVectorOf<O> v[1];
      v[0].element[k] = static_cast<O>(value[j * V + k]);
      if (j == 0 && row == top) column[k] = C::Start(v[0].element[k]);
      StepElement<C>(column[k], v, k, row - top + j, mirror);
    };
    if (full) {
#pragma unroll
      for (int j = 0; j < kRows; ++j)
#pragma unroll
        for (int k = 0; k < V; ++k) step(j, k);
    } else {
#pragma unroll
      for (int j = 0; j < kRows; ++j)
#pragma unroll
        for (int k = 0; k < V; ++k)
          if (at + j * kRow + k < end) step(j, k);
    }
  }
};

// Returns the value of one lane of the chunk [begin, end): the fold C of the values that the chain
// computes from operands of type T.
template <class C, class T, bool kSaves, class Shape>
__device__ __forceinline__ typename C::Wide FoldMappedLane(const chained::Chain& chain,
                                                           const ValueOf<T>* singles, uint4* loaded,
                                                           const TreeWork& work, std::int64_t begin,
                                                           std::int64_t end, int lane) {
  using Lane = MappedLane<C, T, Shape>;
  constexpr int V = Lane::V;
  constexpr int kRow = Lane::kRow;
  constexpr int kRows = Lane::kRows;
  const Lane part(chain, loaded, begin, end, lane);
  part.StartRows(0, part.BatchAt(0));
  typename C::Wide total = C::Identity();
#pragma unroll 1
  for (int top = 0; top < part.rows; top += kTreeSegmentRows) {
    typename C::Column column[V];
#pragma unroll
    for (int k = 0; k < V; ++k) column[k] = C::Start(typename C::Element{});
    const int bottom = min(part.rows, top + kTreeSegmentRows);
#pragma unroll 1
    for (int row = top; row < bottom; row += kRows) {
      const int turn = row / kRows % 2;
      part.StartRows(row + kRows, part.BatchAt(1 - turn));
      chained::WaitForLoads<1>();
      const auto groups = part.BatchAt(turn);
      chained::Settle(chain, groups);
      ValueOf<T> value[kRows * V];
      chained::Evaluate<kSaves>(chain, groups, singles, value);
      part.FoldValues(value, column, row, top, work.mirror);
    }
    const std::int64_t at = part.first + std::int64_t{top} * kRow;
    const std::int64_t stop = min(end, begin + std::int64_t{top + kTreeSegmentRows} * kRow);
    total = C::Combine(total, FoldColumns<C>(column, at, stop));
  }
  return total;
}

template <class C, class T, bool kSaves, class Shape>
__global__ void __launch_bounds__(kTreeLanes, Shape::kBlocks)
    FoldMapped(const __grid_constant__ chained::Chain chain, const TreeWork work) {
  extern __shared__ uint4 loaded[];
  __shared__ ValueOf<T> singles[chained::kMostSingles];
  chained::LoadSingles<T>(chain, singles);
  __syncthreads();  // singles are written
  FoldChunks<C>(work, [&](std::int64_t begin, std::int64_t end, int lane) {
    return FoldMappedLane<C, T, kSaves, Shape>(chain, singles, loaded, work, begin, end, lane);
  });
}

template <class C, class T, bool kSaves, class Shape = decltype(MappedShapeOf<C>())>
void LaunchMapped(const chained::Chain& chain, TreeWork work, const TreeLaunch& launch,
                  CudaStream& stream) {
  const std::int64_t chunks = work.end - work.first;
  const auto grid = static_cast<unsigned>(
      launch.grid == 0 ? chunks : std::min<std::int64_t>(launch.grid, chunks));
  if (work.last_ticket != kNoTicket) work.last_ticket = grid - 1;
  constexpr auto kernel = FoldMapped<C, T, kSaves, Shape>;
  const std::uint32_t bytes = 2 * chained::Groups<T, Shape::kRows>::Bytes(chain);
  if (bytes > 32768) AllowSharedBytes(kernel, bytes);
  kernel<<<grid, launch.block == 0 ? kTreeLanes : launch.block, bytes, stream.handle()>>>(chain,
                                                                                          work);
  CUDA_CHECK_LAUNCH(FoldMapped);
}

template <class C, class T>
void LaunchMappedAs(const chained::Chain& chain, const ReduceProblem& p, const TreeLaunch& launch,
                    std::span<const TeamShare> shares, CudaStream& stream) {
  const auto launch_work = [&](const TreeWork& work, CudaStream& on) {
    chain.saves ? LaunchMapped<C, T, true>(chain, work, launch, on)
                : LaunchMapped<C, T, false>(chain, work, launch, on);
    return true;
  };
  if (shares.empty()) {
    LaunchTreeAlone(p.op, launch, p.result, stream, launch_work);
  } else {
    LaunchTreeShares<C>(p.op, launch, p.result, shares, stream, launch_work);
  }
}

// Whether there is a kernel for the operation on values that are folded as T.
template <ReduceOp op, class T>
constexpr bool kIsMapped = [] {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean:
      return true;
    case ReduceOp::kNormL1:
    case ReduceOp::kNormL2:
    case ReduceOp::kSumSquares:
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return !std::is_integral_v<T>;
    default:
      return false;
  }
}();

// Handles sums, norms and extremes of floating-point numbers. It also handles sums of bools, which
// are folded as I32. Such a sum counts the F32 elements that pass a comparison.
template <class T>
bool LaunchTreeMapped(const ReduceProblem& p, const TreeLaunch& launch,
                      std::span<const TeamShare> shares, CudaStream& stream) {
  constexpr bool kCounts = std::is_same_v<T, std::int32_t>;
  using From = std::conditional_t<kCounts, float, T>;
  chained::Chain chain;
  if (!chained::Match(*p.map, &chain) || chain.out != p.dtype ||
      chain.dtype != (kCounts ? DType::kF32 : p.dtype))
    return false;
  bool launched = false;
  DispatchOp(p.op, [&](auto op) {
    if constexpr (kIsMapped<op(), T>) {
      LaunchMappedAs<decltype(ColumnsOf<op(), T, false>()), From>(chain, p, launch, shares, stream);
      launched = true;
    }
  });
  return launched;
}

// Instantiates LaunchTreeMapped for the element type T. It is used outside the namespace.
#define TESSERA_MAPPED_INSTANCE(T)                                            \
  namespace tessera {                                                         \
  template bool LaunchTreeMapped<T>(const ReduceProblem&, const TreeLaunch&,  \
                                    std::span<const TeamShare>, CudaStream&); \
  }

}  // namespace tessera
