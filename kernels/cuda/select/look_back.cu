// Select in one launch that reads the mask once, by decoupled look-back.
//
// Compared with `two_pass`, a block that has counted its tile does not end. It publishes the count
// and looks back at the tiles before its own, as in Scan's `look_back`: it adds up their counts
// until it reaches a tile that has already published the count of everything up to its end. The
// first warp reads the states of 32 tiles at a time, so looking back over many tiles waits for few
// loads. Meanwhile the values are loaded into registers: the block knows which elements are
// selected, but not yet where they go. Blocks take tiles by ticket, so the blocks that a block
// waits for are done or running. Sums of counts do not depend on how far a block looks, so the
// result is always the same.
//
// Cost at n = 2^20, f32, half of them selected: 1 MiB of mask and 4 MiB of x read, 2 MiB written; 2
// KiB of states; one launch and a memset.
//
// The kernel is correct for any n, because elements beyond the end are not selected, and for any
// alignment, because loads and stores are of single elements.
#include "kernels/cuda/scan/states.cuh"
#include "kernels/cuda/select/select.cuh"

namespace tessera {
namespace {

using State = std::uint64_t;

// Returns the number of selected elements in the tiles before this one, to all lanes of a warp.
// Lane l reads the state of the tile l + 1 places before this one. Before the first tile, the count
// is 0. REQUIRES: the first tile publishes kAll.
__device__ std::int64_t LookBack(const State* states, std::int64_t tile) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  std::int64_t sum = 0;
  for (std::int64_t at = tile - 1 - lane;; at -= kWarpSize) {
    State state;
    do {
      state = at >= 0 ? LoadState(states + at) : StateOf<State>(kAll, 0);
    } while (__any_sync(kFullMask, KindOf(state) == kNothing));
    const unsigned all = __ballot_sync(kFullMask, KindOf(state) == kAll);
    // Tiles before the nearest one that has published kAll do not count.
    const bool counts = all == 0 || lane < __ffs(static_cast<int>(all));
    auto count = counts ? static_cast<std::int64_t>(state & kCountMask<State>) : 0;
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
      count += __shfl_xor_sync(kFullMask, count, distance);
    sum += count;
    if (all != 0) return sum;
  }
}

// states: one state per tile, initially zero.
template <class E>
__global__ void __launch_bounds__(kSelectThreads)
    SelectLookBack(SelectArrays<E> arrays, State* states, unsigned* tickets) {
  __shared__ typename SelectTile<E>::Shared shared;
  __shared__ unsigned ticket;
  __shared__ std::int64_t base;
  if (threadIdx.x == 0) ticket = atomicAdd(tickets, 1u);
  __syncthreads();  // the ticket has been stored
  const std::int64_t at = ticket;
  SelectTile<E> tile(arrays, at, shared);
  const auto count = static_cast<State>(tile.count());
  if (threadIdx.x == 0) StoreState(states + at, StateOf<State>(at == 0 ? kAll : kOwn, count));
  tile.Load();
  if (threadIdx.x < kWarpSize) {
    const std::int64_t before = LookBack(states, at);
    if (threadIdx.x == 0) {
      if (at > 0) StoreState(states + at, StateOf<State>(kAll, static_cast<State>(before) + count));
      base = before;
    }
  }
  __syncthreads();  // the number of elements before the tile has been stored
  tile.Store(base);
}

// Returns the bytes of the states and of the ticket, which follows them so that one memset clears
// both.
std::uint64_t ScratchOf(const SelectProblem& p) {
  return static_cast<std::uint64_t>(SelectTiles(p)) * sizeof(State) + sizeof(unsigned);
}

void Enqueue(const SelectProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  const std::int64_t tiles = SelectTiles(p);
  auto* const states = static_cast<State*>(cuda.Scratch(ScratchOf(p)));
  cuda.Zero(states, ScratchOf(p));
  DispatchSize(p.dtype, [&]<class E>(E) {
    SelectLookBack<<<static_cast<unsigned>(tiles), kSelectThreads, 0, cuda.handle()>>>(
        SelectArrays<E>(p), states, reinterpret_cast<unsigned*>(states + tiles));
    CUDA_CHECK_LAUNCH(SelectLookBack);
  });
}

}  // namespace

extern constexpr Strategy<SelectProblem> kSelectLookBack = {
    .name = "look_back",
    .summary = "one launch; a block adds the counts before it until it finds a finished sum",
    .source =
        "Merrill and Garland, Single-pass Parallel Prefix Scan with Decoupled Look-back, 2016",
    .backend = Backend::kCuda,
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = [](const SelectProblem&) { return 0.0; },
    .cost =
        [](const SelectProblem& p) {
          Cost cost = CudaSelectCost(p, 1, 2 * kSelectEach + 16);
          cost.atomics = static_cast<std::uint64_t>(SelectTiles(p));
          return cost;
        },
    .launch = Enqueue,
    .refuses = SelectRefuses,
    .scratch = ScratchOf,
};

}  // namespace tessera
