// The kernels of the strategies single_pass, fixed_tree and compensated. One launch folds an array
// along the tree of kernels/same_bits/fixed_tree.h, with chunks of any size, and stores the result.
//
// For short arrays, which have a few rows in each chunk, the time is the latency of dependent
// steps. They have a separate kernel, FoldShort, in which each block makes one trip to memory.
//
// Invariant: each chunk has one value, which one block sends to the chunk's slot (or keeps, if it
// is the receiver), and the receiver folds the values in the order of the chunks. So the bits
// depend only on the tree, not on the grid, the block size or the order in which blocks run.
//
// The .cu files that include this file are compiled with -fmad=false.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/tree/lane.cuh"
#include "kernels/cuda/tree/mailbox.cuh"

namespace tessera {

// The number of lanes per thread of a warp: thread t has lanes t, t + kWarpSize, ...
inline constexpr int kLanesEach = kTreeLanes / kWarpSize;

// Folds the lanes' values, which are spread over the threads of a warp, along the halving tree. The
// first thread gets the result.
template <class C>
__device__ typename C::Wide FoldLanes(typename C::Wide (&v)[kLanesEach]) {
#pragma unroll
  for (int half = kLanesEach / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) v[i] = C::Combine(v[i], v[i + half]);
      // Threads in the upper half fold as well, but their results are not used.
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    v[0] = C::Combine(v[0], ShuffleDown(kFullMask, v[0], offset));
  return v[0];
}

// Like FoldLanes above, for values in shared memory. All threads of the first warp call it after a
// barrier that makes the values visible.
template <class C>
__device__ typename C::Wide FoldLanes(const typename C::Wide* cells) {
  typename C::Wide v[kLanesEach];
#pragma unroll
  for (int i = 0; i < kLanesEach; ++i) v[i] = cells[threadIdx.x + i * kWarpSize];
  return FoldLanes<C>(v);
}

// Finishes a chunk whose lane values are in `cells`. All threads of the block call it. If `alone`
// is set, the chunk is the only one, and thread 0 stores the result. Otherwise thread 0 sends the
// chunk's value to the receiving block. If `direct` is set, each lane has at most one slot, and the
// receiving block keeps the value of its own chunk instead of sending it. `receiver` is in shared
// memory and is read only where it is needed.
template <class C>
__device__ void Deliver(const typename C::Wide* cells, const TreeWork& work, std::int64_t chunk,
                        bool alone, bool direct, const bool& receiver, typename C::Wide* received) {
  if (threadIdx.x < kWarpSize) {
    const typename C::Wide value = FoldLanes<C>(cells);
    if (threadIdx.x == 0) {
      if (alone) {
        C::Finish(value, work.op, work.tree.n, work.mirror, work.result);
      } else if (direct && receiver) {
        received[chunk] = value;
      } else {
        Send(work.mailbox, chunk, value);
      }
    }
  }
}

// The last step of the receiver. All of its threads call it. `received` has one value per lane: the
// fold of the lane's chunks.
template <class C>
__device__ void FinishReceived(const typename C::Wide* received, const TreeWork& work) {
  if (threadIdx.x == 0) *work.mailbox.ticket = 0;
  __syncthreads();  // received is written
  if (threadIdx.x >= kWarpSize) return;
  const typename C::Wide value = FoldLanes<C>(received);
  if (threadIdx.x == 0) C::Finish(value, work.op, work.tree.n, work.mirror, work.result);
}

// --- Any array ---

// The number of blocks per SM for __launch_bounds__. 5 blocks of 256 threads leave 48 registers per
// thread. Large columns and unaligned loads need more registers and therefore fewer blocks. A block
// runs for a long time, because it folds all rows of a chunk, so the last wave matters. For
// example, a Dot of 2^26 f32 has 1093 blocks. With 4 blocks per SM, an H200 runs 528 at a time, and
// the last wave has only 37 blocks. With 5 blocks per SM, the compensated Dot has no such wave and
// takes 131 us instead of 154.
template <class C, Placement kPlacement>
constexpr int TreeBlocks() {
  using Column = typename C::Column;
  constexpr int kBytes = static_cast<int>(sizeof(Column)) * kTreeVector<typename C::Element>;
  constexpr bool kDot = C::kOperands == 2, kAny = kPlacement == Placement::kAny;
  if (kAny && !kDot) return 3;
  const bool five = kBytes <= (kAny ? 16 : 32) && (kDot || std::is_arithmetic_v<Column>);
  return five ? 5 : kBytes <= 40 ? 4 : 3;
}

// Does the work of a block, for any grid and any block of at least one warp. With B blocks, each
// block takes every B-th chunk. With T threads per block, each thread takes every T-th lane of a
// chunk. fold_lane(begin, end, lane) returns the value of one lane of the chunk [begin, end). All
// threads of the block call this function.
template <class C, class F>
__device__ __forceinline__ void FoldChunks(const TreeWork& work, F fold_lane) {
  using Wide = typename C::Wide;
  constexpr int kPairs = kMailPairs<Wide>;
  constexpr int kAtOnce = kPairs == 1 ? 4 : kPairs == 2 ? 2 : 1;
  __shared__ Wide cells[kTreeLanes];
  __shared__ Wide received[kTreeLanes];
  __shared__ bool receiver;
  const Tree& tree = work.tree;
  const bool alone = tree.chunks == 1;
  // The receiver need not send its own chunk if each lane has at most one slot.
  const bool direct = tree.chunks <= kTreeLanes && gridDim.x == tree.chunks;
  unsigned ticket = 0;
  if (!alone && threadIdx.x == 0) ticket = TakeTicket(work.mailbox);

#pragma unroll 1
  for (std::int64_t chunk = work.first + blockIdx.x; chunk < work.end; chunk += gridDim.x) {
    const std::int64_t begin = chunk * tree.chunk;
    const std::int64_t end = min(tree.n, begin + tree.chunk);
#pragma unroll 1
    for (int lane = static_cast<int>(threadIdx.x); lane < kTreeLanes;
         lane += static_cast<int>(blockDim.x))
      cells[lane] = fold_lane(begin, end, lane);
    if (threadIdx.x == 0) receiver = !alone && ticket == work.last_ticket;
    __syncthreads();  // cells and receiver are written
    Deliver<C>(cells, work, chunk, alone, direct, receiver, received);
    if (chunk + gridDim.x < work.end) __syncthreads();  // cells have been read
  }
  if (alone || !receiver) return;

  for (int lane = static_cast<int>(threadIdx.x); lane < kTreeLanes;
       lane += static_cast<int>(blockDim.x)) {
    if (direct && lane == static_cast<int>(blockIdx.x)) continue;
    received[lane] = Receive<C, kAtOnce>(work.mailbox, lane, tree.chunks);
  }
  FinishReceived<C>(received, work);
}

template <class C, Placement kPlacement>
__global__ void __launch_bounds__(kTreeLanes, TreeBlocks<C, kPlacement>())
    FoldTree(const TreeOperands<C> in, const TreeWork work) {
  FoldChunks<C>(work, [&](std::int64_t begin, std::int64_t end, int lane) {
    return FoldLane<C, kPlacement>(in, work, begin, end, lane);
  });
}

// Receives the values of all chunks, which blocks of earlier launches have sent. The grid is one
// block of kTreeLanes threads, which has an SM to itself.
template <class C>
__global__ void __launch_bounds__(kTreeLanes) ReceiveTree(const TreeWork work) {
  constexpr int kPairs = kMailPairs<typename C::Wide>;
  constexpr int kAtOnce = kPairs == 1 ? 16 : kPairs == 2 ? 8 : 4;
  __shared__ typename C::Wide received[kTreeLanes];
  received[threadIdx.x] = Receive<C, kAtOnce>(work.mailbox, threadIdx.x, work.tree.chunks);
  FinishReceived<C>(received, work);
}

// --- Short arrays ---

// Folds a whole array that is one chunk of up to kRows rows. All threads of a block of kTreeLanes
// threads call it, and thread 0 stores the result.
template <class C, int kRows = kShortRows>
__device__ void FoldArray(const TreeOperands<C>& in, std::int64_t n, ReduceOp op, bool mirror,
                          Scalar* result) {
  __shared__ typename C::Wide cells[kTreeLanes];
  TreeWork work = {};
  work.tree = {n, kRows * kTreeRow<typename C::Element>, 1};
  work.op = op;
  work.mirror = mirror;
  std::uintptr_t places = 0;
#pragma unroll
  for (const auto* x : in.x) places |= reinterpret_cast<std::uintptr_t>(x);
  cells[threadIdx.x] =
      places % kTreeVectorBytes == 0
          ? FoldShortLane<C, kRows>(in, work, /*number=*/0)
          : FoldLane<C, Placement::kAny>(in, work, 0, n, static_cast<int>(threadIdx.x));
  __syncthreads();  // cells are written
  if (threadIdx.x >= kWarpSize) return;
  const typename C::Wide value = FoldLanes<C>(cells);
  if (threadIdx.x == 0) C::Finish(value, op, n, mirror, result);
}

// Like FoldTree, for aligned operands, one chunk of up to kShortRows rows per block, and at most as
// many chunks as lanes. It reduces the latency, which determines the time of short arrays: a
// chunk's rows are loaded together, and indices are 32 bits wide.
template <class C>
__global__ void __launch_bounds__(kTreeLanes, 2)
    FoldShort(const TreeOperands<C> in, const TreeWork work) {
  using Wide = typename C::Wide;
  __shared__ Wide cells[kTreeLanes];
  __shared__ Wide received[kTreeLanes];
  __shared__ bool receiver;
  const bool alone = gridDim.x == 1;
  unsigned ticket = 0;
  if (!alone && threadIdx.x == 0) ticket = TakeTicket(work.mailbox);
  cells[threadIdx.x] = FoldShortLane<C>(in, work, static_cast<int>(blockIdx.x));
  if (threadIdx.x == 0) receiver = !alone && ticket == gridDim.x - 1;
  __syncthreads();  // cells and receiver are written
  Deliver<C>(cells, work, blockIdx.x, alone, true, receiver, received);
  if (!receiver) return;
  if (threadIdx.x != blockIdx.x)
    received[threadIdx.x] = Receive<C, 1>(work.mailbox, threadIdx.x, gridDim.x);
  FinishReceived<C>(received, work);
}

}  // namespace tessera
