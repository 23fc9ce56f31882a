// A chunk is read from front to back, row by row, with its W columns in the L1 cache, in loops over
// columns that the compiler vectorises. OpenMP divides the chunks among the cores, and the tree
// defines how their values are combined. Rows of non-contiguous operands are copied to the stack
// before they are used, and rows of operands that a map computes are computed there. The elements
// and their positions stay the same, so the bits are the same too.
//
// This file is compiled without contraction of a * b + c, and the fold is compiled twice
// (kernels/cpu/runtime/wide.h). With a fused multiply-add, an error-free product costs two
// instructions; without one, std::fma in the C library computes the same bits.
#include "kernels/cpu/tree/tree.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/cpu/map/rows.h"
#include "kernels/cpu/runtime/gather.h"
#include "kernels/cpu/runtime/wide.h"
#include "kernels/same_bits/tree_columns.h"

namespace tessera {
namespace {

template <class C>
struct Operands {
  const typename C::Element* x[C::kOperands];
  const View* view[C::kOperands];  // Merged; null where x is contiguous
  MapRows* map = nullptr;          // computes x[0]; null if it is in memory
};

// One row of the operands, in place or as a copy.
template <class C>
struct Row {
  using T = typename C::Element;
  const T* x[C::kOperands];
  T copy[C::kOperands][kTreeRow<T>];

  void Load(const Operands<C>& in, std::int64_t first, std::int64_t count) {
    for (int o = 0; o < C::kOperands; ++o) {
      if (in.map != nullptr) {
        in.map->Run(first, count, copy[o]);
        x[o] = copy[o];
      } else if (in.view[o] == nullptr) {
        x[o] = in.x[o] + first;
      } else {
        GatherRange(*in.view[o], first, count, copy[o]);
        x[o] = copy[o];
      }
    }
  }
};

template <class C>
inline void StepAt(typename C::Column& column, const Row<C>& in, int i, int row, bool mirror) {
  if constexpr (C::kOperands == 2) {
    C::Step(column, in.x[0][i], in.x[1][i], row, mirror);
  } else {
    C::Step(column, in.x[0][i], row, mirror);
  }
}

// Folds `count` values in place into values[0], as a halving tree. REQUIRES: count is a power of
// two.
template <class C>
inline void FoldHalving(typename C::Wide* values, int count) {
  for (int half = count / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) values[i] = C::Combine(values[i], values[i + half]);
}

template <class C>
inline typename C::Wide FoldChunk(const Operands<C>& in, std::int64_t begin, std::int64_t end,
                                  bool mirror) {
  using T = typename C::Element;
  using Wide = typename C::Wide;
  constexpr int V = kTreeVector<T>;
  constexpr int kRow = kTreeRow<T>;
  typename C::Column columns[kRow];
  Row<C> elements;
  Wide lanes[kTreeLanes];
  for (Wide& lane : lanes) lane = C::Identity();
  for (std::int64_t top = begin; top < end; top += std::int64_t{kTreeSegmentRows} * kRow) {
    const std::int64_t bottom = std::min(end, top + std::int64_t{kTreeSegmentRows} * kRow);
    const int used = static_cast<int>(std::min<std::int64_t>(kRow, bottom - top));
    elements.Load(in, top, used);
    for (int j = 0; j < used; ++j) columns[j] = C::Start(elements.x[0][j]);
    for (int j = used; j < kRow; ++j) columns[j] = C::Start(T{});
    int row = 0;
    for (std::int64_t at = top; at < bottom; at += kRow, ++row) {
      if (row > 0) elements.Load(in, at, std::min<std::int64_t>(kRow, bottom - at));
      if (bottom - at >= kRow) {
#pragma omp simd
        for (int j = 0; j < kRow; ++j) StepAt<C>(columns[j], elements, j, row, mirror);
      } else {
        const int left = static_cast<int>(bottom - at);
#pragma omp simd
        for (int j = 0; j < left; ++j) StepAt<C>(columns[j], elements, j, row, mirror);
      }
    }
    for (int lane = 0; lane < kTreeLanes; ++lane) {
      Wide wide[V];
      for (int k = 0; k < V; ++k)
        wide[k] = C::Widen(columns[lane * V + k], {top + lane * V + k, bottom});
      FoldHalving<C>(wide, V);
      lanes[lane] = C::Combine(lanes[lane], wide[0]);
    }
  }
  FoldHalving<C>(lanes, kTreeLanes);
  return lanes[0];
}

template <class C>
using ChunkFunction = typename C::Wide (*)(const Operands<C>&, std::int64_t, std::int64_t, bool);

template <class C>
TESSERA_WIDE typename C::Wide FoldChunkWide(const Operands<C>& in, std::int64_t begin,
                                            std::int64_t end, bool mirror) {
  return FoldChunk<C>(in, begin, end, mirror);
}

int Thread() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}
int MostThreads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

// Writes the values of the shares' chunks to `values`, in order. `map` computes x[0], or is null.
// REQUIRES: the shares are adjacent.
template <class C>
void FoldChunks(const Operands<C>& in, const MapProblem* map, const Tree& tree, bool mirror,
                std::span<const TeamShare> shares, typename C::Wide* values) {
  // Up to this many elements there is too little work to divide among threads.
  constexpr std::int64_t kShared = std::int64_t{1} << 16;
  const std::int64_t first = shares.front().first;
  const std::int64_t n = std::min(tree.n, shares.back().end * tree.chunk) - first * tree.chunk;
  const ChunkFunction<C> fold = IsWide() ? FoldChunkWide<C> : FoldChunk<C>;
  std::vector<std::unique_ptr<MapRows>> rows;  // one for each thread
  if (map != nullptr) {
    rows.resize(static_cast<std::size_t>(n > kShared ? MostThreads() : 1));
    for (auto& one : rows) one = std::make_unique<MapRows>(*map, *shares.front().stream);
  }
  for (const TeamShare& share : shares) {
#pragma omp parallel for schedule(static) if (n > kShared)
    for (std::int64_t c = share.first; c < share.end; ++c) {
      if (share.stream->stopped()) continue;
      Operands<C> operands = in;
      if (map != nullptr) operands.map = rows[static_cast<std::size_t>(Thread())].get();
      values[c - first] =
          fold(operands, c * tree.chunk, std::min(tree.n, (c + 1) * tree.chunk), mirror);
    }
  }
}

// Computes step 5 of the tree. value(c) is the value of chunk c.
template <class C, class F>
void FinishChunks(const F& value, const Tree& tree, ReduceOp op, Scalar* result) {
  typename C::Wide total = value(0);
  if (tree.chunks > 1) {
    typename C::Wide lanes[kTreeLanes];
    for (typename C::Wide& lane : lanes) lane = C::Identity();
    for (std::int64_t c = 0; c < tree.chunks; ++c) {
      typename C::Wide& lane = lanes[c % kTreeLanes];
      lane = C::Combine(lane, value(c));
    }
    FoldHalving<C>(lanes, kTreeLanes);
    total = lanes[0];
  }
  C::Finish(total, op, tree.n, IsMirrored(op), result);
}

// `shares` covers all chunks, in order.
template <class C>
void FoldTree(const Operands<C>& in, const MapProblem* map, ReduceOp op, std::int64_t n,
              Scalar* result, std::span<const TeamShare> shares) {
  const Tree tree = FixedTree(n, sizeof(typename C::Element));
  std::vector<typename C::Wide> chunks(static_cast<std::size_t>(tree.chunks));
  FoldChunks<C>(in, map, tree, IsMirrored(op), shares, chunks.data());
  const auto value = [&](std::int64_t c) { return chunks[static_cast<std::size_t>(c)]; };
  FinishChunks<C>(value, tree, op, result);
}

// Holds a view in the form in which the fold reads it, or null.
class MergedView {
 public:
  explicit MergedView(const View* view) {
    if (view != nullptr) view_ = Merged(*view);
  }
  const View* get() const { return view_.has_value() ? &*view_ : nullptr; }

 private:
  std::optional<View> view_;
};

template <class C, class F>
void WithOperands(const ReduceProblem& p, const F& f) {
  const MergedView x(p.x_view);
  f(Operands<C>{{static_cast<const typename C::Element*>(p.x)}, {x.get()}});
}
template <class C, class F>
void WithOperands(const DotProblem& p, const F& f) {
  using T = typename C::Element;
  const MergedView a(p.a_view), b(p.b_view);
  f(Operands<C>{{static_cast<const T*>(p.a), static_cast<const T*>(p.b)}, {a.get(), b.get()}});
}

// Calls f(kind), where `kind` is the kind of columns that folds dtype for op.
template <class F>
void DispatchKind(ReduceOp op, DType dtype, bool compensated, const F& f) {
  DispatchDType(dtype, [&](auto t) {
    using T = decltype(t);
    compensated ? DispatchColumns<T, true>(op, f) : DispatchColumns<T, false>(op, f);
  });
}
template <class F>
void DispatchDotKind(DType dtype, bool compensated, const F& f) {
  DispatchDType(dtype, [&](auto t) {
    using T = decltype(t);
    compensated ? f(DotColumnsType<T, true>()) : f(DotColumnsType<T, false>());
  });
}

}  // namespace

void FoldTreeReduce(const ReduceProblem& p, bool compensated, std::span<const TeamShare> shares) {
  DispatchKind(p.op, p.dtype, compensated, [&](auto kind) {
    WithOperands<decltype(kind)>(
        p, [&](const auto& in) { FoldTree(in, p.map, p.op, p.n, p.result, shares); });
  });
}

void FoldTreeDot(const DotProblem& p, bool compensated, std::span<const TeamShare> shares) {
  DispatchDotKind(p.dtype, compensated, [&](auto kind) {
    WithOperands<decltype(kind)>(
        p, [&](const auto& in) { FoldTree(in, nullptr, ReduceOp::kSum, p.n, p.result, shares); });
  });
}

}  // namespace tessera
