// The launches that tree.h declares, for files that instantiate them for certain element types.
//
// Operands that are not contiguous are copied to scratch memory in pieces of several chunks. The
// values of a map are written to scratch memory as well, unless the kernel that folds them also
// computes them (mapped.cuh). Each piece has its own launch. Ticket numbers continue from launch to
// launch, so the receiver is the last block to start in the last launch. Until then the mailbox
// holds the values that the other blocks have sent.
//
// Invariant: after the last launch of a fold, and after an error, the mailbox is empty again.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>

#include "kernels/choose/map_range.h"
#include "kernels/cuda/tree/kernel.cuh"

namespace tessera {

static_assert(kMailPairs<PairMomentColumns::Wide> * kTreeMaxChunks <= Mailbox::kSlots,
              "pairs of words for the largest value");

template <class C>
void LaunchTreePart(const TreeOperands<C>& in, const TreeWork& work, unsigned grid, unsigned block,
                    CudaStream& stream) {
  const Tree& tree = work.tree;
  bool aligned = true, alike = C::kOperands > 1;
  for (const auto* x : in.x) {
    const auto place = reinterpret_cast<std::uintptr_t>(x) % kTreeVectorBytes;
    aligned &= place == 0;
    alike &= place == reinterpret_cast<std::uintptr_t>(in.x[0]) % kTreeVectorBytes;
  }
  const bool is_short = tree.chunk <= kShortRows * kTreeRow<typename C::Element> &&
                        tree.chunks <= kTreeLanes && grid == tree.chunks;
  const auto launch_kernel = [&](auto kernel) {
    kernel<<<grid, block, 0, stream.handle()>>>(in, work);
  };
  if (aligned && block == kTreeLanes && is_short) {
    launch_kernel(FoldShort<C>);
  } else if (aligned) {
    launch_kernel(FoldTree<C, Placement::kAligned>);
  } else if (alike && block == kTreeLanes) {
    if constexpr (C::kOperands > 1) launch_kernel(FoldTree<C, Placement::kAlike>);
  } else {
    launch_kernel(FoldTree<C, Placement::kAny>);
  }
  CUDA_CHECK_LAUNCH(FoldTree);
}

// Operands that are not contiguous are copied piece by piece. The pieces of all operands that are
// copied together have about this many bytes, so that the work on them takes longer than its
// launches.
inline constexpr std::int64_t kTreePieceBytes = std::int64_t{32} << 20;

// A ticket that no block gets, for launches in which no block receives.
inline constexpr unsigned kNoTicket = ~0u;

// Returns how many of `chunks` chunks are in a piece if `copies` operands are copied: all of them
// if nothing is copied.
template <class T>
std::int64_t ChunksOfPiece(const Tree& tree, std::int64_t chunks, int copies, CudaStream& stream) {
  if (copies == 0) return chunks;
  std::int64_t most = kTreePieceBytes;
  if (const Budget* budget = stream.scratch_budget(); budget != nullptr)
    most = static_cast<std::int64_t>(
        std::min<std::uint64_t>(static_cast<std::uint64_t>(most), budget->limit() / 4));
  const auto chunk_bytes = tree.chunk * static_cast<std::int64_t>(sizeof(T)) * copies;
  return std::clamp<std::int64_t>(most / chunk_bytes, 1, chunks);
}

// Enqueues the copy of elements [begin, begin + count) of an operand: from a map if there is one,
// otherwise from a view.
inline void CopyPiece(const View* view, const MapProblem* map, std::int64_t begin,
                      std::int64_t count, bool whole, void* to, CudaStream& stream) {
  if (map != nullptr) {
    LaunchMapRange(*map, begin, count, to, stream);
  } else if (whole) {
    GatherAsync(*view, to, stream.handle());
  } else {
    GatherRangeAsync(*view, begin, count, to, stream.handle());
  }
}

// The operands of a fold. `views` has the views of the operands that are not contiguous, and null
// for the others. `map` is the map that computes the only operand, or null.
template <class C>
struct TreeSource {
  TreeOperands<C> in;
  const View* views[C::kOperands];
  const MapProblem* map = nullptr;
};

// Launches the chunks of the work. One block receives the values of all chunks unless the work's
// last_ticket is kNoTicket. Returns false if the stream was stopped before all chunks were
// launched.
template <class C>
bool LaunchTreeWork(const TreeSource<C>& source, TreeWork work, const TreeLaunch& launch,
                    CudaStream& stream) {
  using T = typename C::Element;
  auto [in, views, map] = source;
  const Tree& tree = launch.tree;
  const unsigned block = launch.block == 0 ? kTreeLanes : launch.block;
  const auto blocks = [&](std::int64_t chunks) {
    return launch.grid == 0 ? chunks : std::min<std::int64_t>(launch.grid, chunks);
  };
  const std::int64_t last = work.end, chunks = last - work.first;
  int copies = map != nullptr ? 1 : 0;
  for (const View* view : views) copies += view != nullptr;
  const std::int64_t piece = ChunksOfPiece<T>(tree, chunks, copies, stream);
  if (work.last_ticket != kNoTicket)
    work.last_ticket =
        static_cast<unsigned>(chunks / piece * blocks(piece) + blocks(chunks % piece) - 1);
  if (copies == 0) {
    LaunchTreePart<C>(in, work, static_cast<unsigned>(blocks(piece)), block, stream);
    return true;
  }

  T* copy[C::kOperands] = {};
  for (int o = 0; o < C::kOperands; ++o) {
    // If another operand is not aligned, the load of a vector also reads the bytes after it.
    if (views[o] != nullptr || map != nullptr)
      copy[o] = static_cast<T*>(stream.Scratch(
          static_cast<std::size_t>(piece * tree.chunk) * sizeof(T) + kTreeVectorBytes));
  }
  for (; work.first < last && !stream.stopped(); work.first = work.end) {
    work.end = std::min(last, work.first + piece);
    const std::int64_t begin = work.first * tree.chunk;
    const std::int64_t count = std::min(tree.n, work.end * tree.chunk) - begin;
    for (int o = 0; o < C::kOperands; ++o) {
      if (copy[o] == nullptr) continue;
      CopyPiece(views[o], map, begin, count, piece == tree.chunks, copy[o], stream);
      // The address that the tree's element 0 would have. Chunks are multiples of 16 bytes, so the
      // alignment does not change.
      in.x[o] = reinterpret_cast<const T*>(reinterpret_cast<std::uintptr_t>(copy[o]) -
                                           static_cast<std::uintptr_t>(begin) * sizeof(T));
    }
    LaunchTreePart<C>(in, work, static_cast<unsigned>(blocks(work.end - work.first)), block,
                      stream);
  }
  return work.first >= last;
}

// Launches the whole work with launch_work(work, stream), which is like LaunchTreeWork.
template <class LaunchWork>
void LaunchTreeAlone(ReduceOp op, const TreeLaunch& launch, Scalar* result, CudaStream& stream,
                     const LaunchWork& launch_work) {
  const std::int64_t chunks = launch.tree.chunks;
  const TreeWork work = {launch.tree, op, IsMirrored(op), chunks > 1 ? stream.mailbox() : Mailbox{},
                         result,      0,  chunks,         /*last_ticket=*/0};
  try {
    if (!launch_work(work, stream)) stream.ClearMailbox();
  } catch (...) {
    stream.ClearMailbox();
    throw;
  }
}

// launch_share(work, stream) launches the chunks of a share, like LaunchTreeWork. All GPUs send to
// the mailbox of `own`. They can access each other's memory, because access was set up when the
// operand was divided among them.
template <class C, class LaunchShare>
void LaunchTreeShares(ReduceOp op, const TreeLaunch& launch, Scalar* result,
                      std::span<const TeamShare> shares, CudaStream& own,
                      const LaunchShare& launch_share) {
  const auto work_of = [&](CudaStream& stream, std::int64_t first, std::int64_t end) {
    // Tickets are counted on the GPU that runs the kernel, because not all GPUs support atomics in
    // each other's memory.
    const Mailbox mailbox = {stream.mailbox().ticket, own.mailbox().slots};
    return TreeWork{launch.tree, op, IsMirrored(op), mailbox, result, first, end, kNoTicket};
  };
  // No value may remain in the mailbox for later work. Errors here are ignored, because the failure
  // that led here is already reported.
  const auto clear = [&] {
    const auto quietly = [](Stream& stream, const auto& f) {
      try {
        f(Cuda(stream));
      } catch (const DeviceError&) {
      }
    };
    for (const TeamShare& share : shares) {
      quietly(*share.stream, [](CudaStream& stream) { stream.ClearTicket(); });
      quietly(*share.stream, [](CudaStream& stream) { stream.Synchronize(); });
    }
    quietly(own, [](CudaStream& stream) { stream.ClearMailbox(); });
  };
  try {
    bool sent = true;
    for (const TeamShare& share : shares) {
      OnDeviceOf(*share.stream, [&] {
        CudaStream& stream = Cuda(*share.stream);
        sent = launch_share(work_of(stream, share.first, share.end), stream) && sent;
      });
    }
    if (!sent) return clear();
    for (const TeamShare& share : shares) {
      if (share.stream == &own) continue;
      own.WaitFor(*share.stream);
      OnDeviceOf(*share.stream, [&] { Cuda(*share.stream).ClearTicket(); });
    }
    ReceiveTree<C><<<1, kTreeLanes, 0, Cuda(own).handle()>>>(work_of(own, 0, launch.tree.chunks));
    CUDA_CHECK_LAUNCH(ReceiveTree);
  } catch (...) {
    clear();
    throw;
  }
}

// Enqueues a Reduce of a map's values in one launch that reads only the map's operands. Returns
// false and launches nothing if the map is not a chain over elements of a suitable type
// (kernels/cuda/map/chain.cuh), or if there is no kernel for the operation. mapped.cuh defines the
// function for every T except I64. `shares` is empty if the stream folds all chunks.
template <class T>
bool LaunchTreeMapped(const ReduceProblem& p, const TreeLaunch& launch,
                      std::span<const TeamShare> shares, CudaStream& stream);

// Calls f(source, op) with the TreeSource of the problem.
template <class T, bool kCompensated, class F>
void DispatchSource(const DotProblem& p, F&& f) {
  using C = decltype(DotColumnsType<T, kCompensated>());
  f(TreeSource<C>{{{static_cast<const T*>(p.a), static_cast<const T*>(p.b)}}, {p.a_view, p.b_view}},
    ReduceOp::kSum);
}
template <class T, bool kCompensated, class F>
void DispatchSource(const ReduceProblem& p, F&& f) {
  DispatchColumns<T, kCompensated>(p.op, [&](auto kind) {
    f(TreeSource<decltype(kind)>{{{static_cast<const T*>(p.x)}}, {p.x_view}, p.map}, p.op);
  });
}

// Folds on `stream` if there are no shares, and otherwise on the shares' streams.
template <class T, bool kCompensated, class Problem>
void LaunchTreeShared(const Problem& p, const TreeLaunch& launch, std::span<const TeamShare> shares,
                      CudaStream& stream) {
  if constexpr (std::is_same_v<Problem, ReduceProblem> && !kCompensated &&
                !std::is_same_v<T, std::int64_t>) {
    if (p.map != nullptr && LaunchTreeMapped<T>(p, launch, shares, stream)) return;
  }
  DispatchSource<T, kCompensated>(p, [&]<class C>(const TreeSource<C>& source, ReduceOp op) {
    const auto launch_work = [&](const TreeWork& work, CudaStream& on) {
      return LaunchTreeWork(source, work, launch, on);
    };
    if (shares.empty()) {
      LaunchTreeAlone(op, launch, p.result, stream, launch_work);
    } else {
      LaunchTreeShares<C>(op, launch, p.result, shares, stream, launch_work);
    }
  });
}

template <class T, bool kCompensated, class Problem>
void LaunchTree(const Problem& p, const TreeLaunch& launch, CudaStream& stream) {
  LaunchTreeShared<T, kCompensated>(p, launch, {}, stream);
}

#define TESSERA_TREE_INSTANCES_OF(T, kCompensated, Problem)                                  \
  template void LaunchTree<T, kCompensated>(const Problem&, const TreeLaunch&, CudaStream&); \
  template void LaunchTreeShared<T, kCompensated>(const Problem&, const TreeLaunch&,         \
                                                  std::span<const TeamShare>, CudaStream&);
// Instantiates the launches for the element type T. It is used outside the namespace.
#define TESSERA_TREE_INSTANCES(T)                    \
  namespace tessera {                                \
  TESSERA_TREE_INSTANCES_OF(T, false, DotProblem)    \
  TESSERA_TREE_INSTANCES_OF(T, false, ReduceProblem) \
  TESSERA_TREE_INSTANCES_OF(T, true, DotProblem)     \
  TESSERA_TREE_INSTANCES_OF(T, true, ReduceProblem)  \
  }

}  // namespace tessera
