// The launches behind tree.h, for files that instantiate them for some types.
//
// Operands that are not contiguous are copied to scratch memory a piece of some chunks at a time,
// and each piece is a launch. Tickets count on from launch to launch, so that the last block of the
// last one to start is the receiver, and what the others have sent waits in the mailbox.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/cuda/tree/kernel.cuh"

namespace tessera {

static_assert(3 * kTreeMaxChunks <= Mailbox::kSlots, "three pairs of words for the largest value");

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

// Bytes of a piece of an operand that is not contiguous: enough to outlast its launches.
inline constexpr std::int64_t kTreePieceBytes = std::int64_t{32} << 20;

// views: of operands that are not contiguous, null for others.
template <class C>
void LaunchTree(TreeOperands<C> in, const View* const (&views)[C::kOperands], ReduceOp op,
                const TreeLaunch& launch, Scalar* result, CudaStream& stream) {
  using T = typename C::Element;
  const Tree& tree = launch.tree;
  const unsigned block = launch.block == 0 ? kTreeLanes : launch.block;
  const auto blocks = [&](std::int64_t chunks) {
    return launch.grid == 0 ? chunks : std::min<std::int64_t>(launch.grid, chunks);
  };
  // Chunks of a piece.
  std::int64_t piece = tree.chunks;
  int copies = 0;
  for (const View* view : views) copies += view != nullptr;
  if (copies > 0) {
    std::int64_t most = kTreePieceBytes;
    if (const Budget* budget = stream.scratch_budget(); budget != nullptr)
      most = static_cast<std::int64_t>(
          std::min<std::uint64_t>(static_cast<std::uint64_t>(most), budget->limit() / 4));
    const auto chunk_bytes = tree.chunk * static_cast<std::int64_t>(sizeof(T)) * copies;
    piece = std::clamp<std::int64_t>(most / chunk_bytes, 1, tree.chunks);
  }
  const std::int64_t whole = tree.chunks / piece, rest = tree.chunks % piece;
  TreeWork work = {
      tree,   op, IsMirrored(op), tree.chunks > 1 ? stream.mailbox() : Mailbox{},
      result, 0,  tree.chunks,    static_cast<unsigned>(whole * blocks(piece) + blocks(rest) - 1)};
  if (copies == 0)
    return LaunchTreePart<C>(in, work, static_cast<unsigned>(blocks(piece)), block, stream);

  T* copy[C::kOperands] = {};
  for (int o = 0; o < C::kOperands; ++o) {
    // What follows a vector is loaded with it where another operand is not aligned.
    if (views[o] != nullptr)
      copy[o] = static_cast<T*>(stream.Scratch(
          static_cast<std::size_t>(piece * tree.chunk) * sizeof(T) + kTreeVectorBytes));
  }
  try {
    for (; work.first < tree.chunks && !stream.stopped(); work.first = work.end) {
      work.end = std::min(tree.chunks, work.first + piece);
      const std::int64_t begin = work.first * tree.chunk;
      const std::int64_t count = std::min(tree.n, work.end * tree.chunk) - begin;
      for (int o = 0; o < C::kOperands; ++o) {
        if (views[o] == nullptr) continue;
        if (piece == tree.chunks) {
          GatherAsync(*views[o], copy[o], stream.handle());
        } else {
          GatherRangeAsync(*views[o], begin, count, copy[o], stream.handle());
        }
        // Where element 0 would stand; chunks are multiples of 16 bytes.
        in.x[o] = reinterpret_cast<const T*>(reinterpret_cast<std::uintptr_t>(copy[o]) -
                                             static_cast<std::uintptr_t>(begin) * sizeof(T));
      }
      LaunchTreePart<C>(in, work, static_cast<unsigned>(blocks(work.end - work.first)), block,
                        stream);
    }
  } catch (...) {
    stream.ClearMailbox();
    throw;
  }
  if (work.first < tree.chunks) stream.ClearMailbox();
}

template <class T, bool kCompensated>
void LaunchTreeReduce(const ReduceProblem& p, const TreeLaunch& launch, CudaStream& stream) {
  DispatchColumns<T, kCompensated>(p.op, [&](auto kind) {
    using C = decltype(kind);
    LaunchTree<C>({{static_cast<const T*>(p.x)}}, {p.x_view}, p.op, launch, p.result, stream);
  });
}

template <class T, bool kCompensated>
void LaunchTreeDot(const DotProblem& p, const TreeLaunch& launch, CudaStream& stream) {
  using C = decltype(DotColumnsType<T, kCompensated>());
  LaunchTree<C>({{static_cast<const T*>(p.a), static_cast<const T*>(p.b)}}, {p.a_view, p.b_view},
                ReduceOp::kSum, launch, p.result, stream);
}

#define TESSERA_TREE_INSTANCES(T)                                                                 \
  template void LaunchTreeReduce<T, false>(const ReduceProblem&, const TreeLaunch&, CudaStream&); \
  template void LaunchTreeReduce<T, true>(const ReduceProblem&, const TreeLaunch&, CudaStream&);  \
  template void LaunchTreeDot<T, false>(const DotProblem&, const TreeLaunch&, CudaStream&);       \
  template void LaunchTreeDot<T, true>(const DotProblem&, const TreeLaunch&, CudaStream&);

}  // namespace tessera
