// Defines the launches of `axis` (launch.h).
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/reduce_axes/fold_axis.cuh"
#include "kernels/cuda/reduce_axes/fold_short.cuh"
#include "kernels/cuda/reduce_axes/launch.h"

namespace tessera::axes {
namespace {

template <class F, class T>
void LaunchShort(const ReduceAxesProblem& p, CudaStream& stream) {
  if (p.outer * p.inner == 0) return;
  const std::int64_t groups = GroupsOfRun(p);
  const auto blocks = static_cast<unsigned>(CeilDiv(p.outer, groups));
  FoldShort<F, T><<<blocks, kBlock, 0, stream.handle()>>>(
      static_cast<const T*>(p.x), p.outer, static_cast<int>(p.length), static_cast<int>(p.inner),
      static_cast<int>(std::max(p.inner, p.inner_of_all)), static_cast<int>(groups),
      static_cast<typename F::Out*>(p.out));
  CUDA_CHECK_LAUNCH(FoldShort);
}

template <class F, class T>
void LaunchFold(const ReduceAxesProblem& p, const Plan& plan, CudaStream& stream) {
  using Wide = typename F::Wide;
  const std::int64_t pitch = std::max(p.inner, p.inner_of_all);
  Wide* partials = nullptr;
  std::uint32_t* tickets = nullptr;
  if (plan.segments > 1) {
    const std::int64_t outputs = plan.rows ? 1 : std::int64_t{kVector<T>} << plan.width_bits;
    partials = static_cast<Wide*>(stream.Scratch(
        static_cast<std::size_t>(plan.tiles * plan.segments * outputs) * sizeof(Wide)));
    tickets = stream.Tickets();
  }
  const auto blocks = static_cast<unsigned>(plan.tiles * plan.segments);
  const auto launch = [&](auto aligned) {
    constexpr bool kWhole = aligned();
    constexpr bool kKnown = kWhole || sizeof(T) >= 4;
    constexpr Lines kRows = kKnown ? Lines::kRows : Lines::kEither;
    constexpr Lines kColumns = kKnown ? Lines::kColumns : Lines::kEither;
    const auto kernel =
        plan.rows ? FoldAxis<F, T, kWhole, kRows> : FoldAxis<F, T, kWhole, kColumns>;
    kernel<<<blocks, kBlock, 0, stream.handle()>>>(
        static_cast<const T*>(p.x), p.outer, p.length, p.inner, pitch, plan, partials, tickets,
        static_cast<typename F::Out*>(p.out), stream.result());
  };
  // Whether every line of vectors begins and ends at a multiple of 16 bytes.
  const auto line = static_cast<std::uintptr_t>(plan.rows ? p.length : pitch) * sizeof(T);
  const bool whole = (reinterpret_cast<std::uintptr_t>(p.x) | line) % kVectorBytes == 0;
  if constexpr (kIsWide<F>) {
    launch(std::false_type{});  // this launch is rare, and the general kernel is fast enough
  } else if (whole) {
    launch(std::true_type{});
  } else {
    launch(std::false_type{});
  }
  CUDA_CHECK_LAUNCH(FoldAxis);
}

// Folds the partial results of `slabs` slabs, each of `rows` rows, into the results. Each thread
// computes one result.
template <class F, class T>
__global__ void __launch_bounds__(kBlock)
    FoldSlabs(const typename F::Wide* partials, std::int64_t slabs, std::int64_t rows,
              std::int64_t length, std::int64_t inner, typename F::Out* out, Scalar* mark) {
  const std::int64_t column = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (column >= inner) return;
  typename F::Wide value = partials[column];
#pragma unroll 4
  for (std::int64_t slab = 1; slab < slabs; ++slab) {
    typename F::Wide next = partials[slab * inner + column];
    if constexpr (F::kArg) next.index += slab * rows;
    value = F::Combine(value, next);
  }
  Store<F, T>(value, length, out[column], mark);
}

// Folds slabs [first, end) into partial results, the first of which is at `partials`.
template <class F, class T>
void LaunchSlabs(const ReduceAxesProblem& p, std::int64_t first, std::int64_t end,
                 typename F::Wide* partials, CudaStream& stream) {
  const std::int64_t whole = std::min(end, kSlabs);
  if (first < whole) {
    ReduceAxesProblem slabs = Slabs(p);
    slabs.outer = whole - first;
    slabs.x = static_cast<const T*>(p.x) + first * slabs.length * p.inner;
    slabs.out = partials;
    LaunchFold<PartialFold<F>, T>(slabs, MakeSlabPlan(slabs), stream);
  }
  if (end > kSlabs) {
    ReduceAxesProblem rest = Rest(p);
    rest.x = static_cast<const T*>(p.x) + (p.length - rest.length) * p.inner;
    rest.out = partials + (kSlabs - first) * p.inner;
    LaunchFold<PartialFold<F>, T>(rest, MakePlan(rest), stream);
  }
}

// Folds p in slabs. shares: the shares of the slabs, or empty if the stream folds all of them.
template <class F, class T>
void RunSlabs(const ReduceAxesProblem& p, std::span<const TeamShare> shares, CudaStream& own) {
  using Wide = typename F::Wide;
  const std::int64_t slabs = SlabCount(p);
  const auto bytes = [&](std::int64_t count) {
    return static_cast<std::size_t>(count * p.inner) * sizeof(Wide);
  };
  auto* const partials = static_cast<Wide*>(own.Scratch(bytes(slabs)));
  if (shares.empty()) LaunchSlabs<F, T>(p, 0, slabs, partials, own);
  for (const TeamShare& share : shares) {
    OnDeviceOf(*share.stream, [&] {
      CudaStream& stream = Cuda(*share.stream);
      Wide* const from_first = partials + share.first * p.inner;
      if (&stream == &own) return LaunchSlabs<F, T>(p, share.first, share.end, from_first, own);
      const std::size_t size = bytes(share.end - share.first);
      auto* const here = static_cast<Wide*>(stream.Scratch(size));
      LaunchSlabs<F, T>(p, share.first, share.end, here, stream);
      stream.CopyToPeer(own, from_first, here, size);
    });
  }
  for (const TeamShare& share : shares) {
    if (share.stream != &own) own.WaitFor(*share.stream);
  }
  const auto blocks = static_cast<unsigned>(CeilDiv(p.inner, kBlock));
  FoldSlabs<F, T><<<blocks, kBlock, 0, Cuda(own).handle()>>>(
      partials, slabs, SlabRows(p), p.length, p.inner, static_cast<typename F::Out*>(p.out),
      own.result());
  CUDA_CHECK_LAUNCH(FoldSlabs);
}

}  // namespace

template <class T>
void Launch(const ReduceAxesProblem& p, std::span<const TeamShare> shares, CudaStream& stream) {
  DispatchOp(p.op, [&](auto op) {
    using F = Fold<op(), T>;
    if (IsShort(p)) {
      LaunchShort<F, T>(p, stream);
    } else if (SlabRows(p) > 0) {
      RunSlabs<F, T>(p, shares, stream);
    } else {
      LaunchFold<F, T>(p, MakePlan(p), stream);
    }
  });
}

template <class T>
void LaunchWide(const ReduceAxesProblem& p, CudaStream& stream) {
  DispatchOp(p.op, [&](auto op) {
    using F = Fold<op(), T>;
    if constexpr (kMayLeaveRange<F, T>) LaunchFold<WideFold<F, T>, T>(p, MakePlan(p), stream);
  });
}

#define TESSERA_AXIS_INSTANCES(T)                                                             \
  template void Launch<T>(const ReduceAxesProblem&, std::span<const TeamShare>, CudaStream&); \
  template void LaunchWide<T>(const ReduceAxesProblem&, CudaStream&);

}  // namespace tessera::axes
