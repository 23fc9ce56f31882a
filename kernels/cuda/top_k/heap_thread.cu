// TopK as in the textbook: one thread per row, and a heap of the best elements so far.
//
// The worst of the k best elements is at the top of the heap, and each element is no better than
// the two below it. An element that beats the top replaces it and sinks to its place. Any other
// element is done after one comparison. When the row has been read, the heap becomes a sorted list
// in k steps. In each step, the top, which is the worst element, is swapped with the last element
// of the heap, the heap shrinks by one, and the new top sinks.
//
//     heap, places of values and indices     0
//     of the row's results                1     2      place j is no better than 2 j + 1 and
//                                        3 4   5 6     2 j + 2
//
// The heap is stored where the results will be, so no other memory is needed. On a GPU, the heap
// has no other advantage. Adjacent threads read elements a whole row apart, so each 4-byte load
// moves 32 bytes. The threads of a warp sink elements at different times, while the other threads
// wait. If there are only a few long rows, all but a few threads of the GPU have no work.
//
// Cost for 16 rows of 2^16, k = 100, f32: 4 MiB read by 16 threads; in random order k (1 + ln(n /
// k)) = 750 elements per row enter the heap, with up to 7 steps each; a depth of 2^16 dependent
// loads.
//
// The kernel is correct for any k, n, number of rows and block size. Elements with equal keys stay
// in the order of their indices, because a later one never beats the top, and the heap orders equal
// keys by index.
#include <cmath>

#include "kernels/cuda/top_k/top_k.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 128;

// The heap of one row.
template <class T>
class RowHeap {
 public:
  struct Item {
    T value;
    std::int64_t index;
  };

  __device__ RowHeap(const TopKArrays<T>& arrays, std::int64_t row) : arrays_(arrays), row_(row) {}

  __device__ Item Get(std::int64_t j) const {
    const std::int64_t place = TopKPlace(row_, j, arrays_.k, arrays_.inner);
    return {arrays_.values[place], arrays_.indices[place]};
  }
  __device__ void Set(std::int64_t j, Item item) {
    const std::int64_t place = TopKPlace(row_, j, arrays_.k, arrays_.inner);
    arrays_.values[place] = item.value;
    arrays_.indices[place] = item.index;
  }
  __device__ KeyOf<T> KeyAt(std::int64_t j) const {
    return TopKKey(Get(j).value, arrays_.smallest);
  }

  // Puts the item at place `at` of a heap of `count` elements, or at a place below it.
  __device__ void Sink(std::int64_t at, Item item, std::int64_t count) {
    for (std::int64_t child; (child = 2 * at + 1) < count; at = child) {
      Item worse = Get(child);
      if (child + 1 < count) {
        const Item other = Get(child + 1);
        if (ComesBefore(worse, other)) {
          worse = other;
          ++child;
        }
      }
      if (!ComesBefore(item, worse)) break;
      Set(at, worse);
    }
    Set(at, item);
  }

 private:
  __device__ bool ComesBefore(const Item& a, const Item& b) const {
    const KeyOf<T> key_a = TopKKey(a.value, arrays_.smallest);
    const KeyOf<T> key_b = TopKKey(b.value, arrays_.smallest);
    return key_a != key_b ? key_a < key_b : a.index < b.index;
  }

  const TopKArrays<T>& arrays_;
  const std::int64_t row_;
};

template <class T>
__global__ void __launch_bounds__(kAnyBlockSize.max) TopKHeapThread(TopKArrays<T> arrays) {
  const std::int64_t n = arrays.n, k = arrays.k;
  for (std::int64_t row = GridThread(); row < arrays.rows; row += GridThreads()) {
    const T* x = arrays.x + row * n;
    RowHeap<T> heap(arrays, row);
    for (std::int64_t i = 0; i < k; ++i) heap.Set(i, {x[i], i});
    for (std::int64_t at = k / 2 - 1; at >= 0; --at) heap.Sink(at, heap.Get(at), k);
    KeyOf<T> worst = heap.KeyAt(0);
    for (std::int64_t i = k; i < n; ++i) {
      const T element = x[i];
      if (!(TopKKey(element, arrays.smallest) < worst)) continue;
      heap.Sink(0, {element, i}, k);
      worst = heap.KeyAt(0);
    }
    for (std::int64_t count = k - 1; count > 0; --count) {
      const auto last = heap.Get(count);
      heap.Set(count, heap.Get(0));
      heap.Sink(0, last, count);
    }
  }
}

template <class T>
void Run(const TopKProblem& p, CudaStream& stream) {
  if (p.rows == 0) return;
  const Grid grid = MakeGrid(p.rows, p.launch, kBlock, 1);
  TopKHeapThread<<<grid.blocks, grid.block_size, 0, stream.handle()>>>(TopKArrays<T>(p));
  CUDA_CHECK_LAUNCH(TopKHeapThread);
}

Cost CostOf(const TopKProblem& p) {
  const auto n = static_cast<double>(p.n);
  const double k = std::max(1.0, static_cast<double>(p.k));
  const double steps = k * (2 + std::log(std::max(1.0, n / k))) * std::log2(k + 1);
  return {.bytes = TopKBytes(p, 1),
          .flops = static_cast<std::uint64_t>(static_cast<double>(p.rows) * (n + 4 * steps)),
          .atomics = 0,
          .depth = static_cast<std::uint64_t>(n + steps)};
}

void Enqueue(const TopKProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto t) { Run<decltype(t)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<TopKProblem> kTopKHeapThread = {
    .name = "heap_thread",
    .summary = "one thread per row, with a heap of the k best in the memory of the results",
    .source = "partial sort by a bounded heap (Williams, Algorithm 232, 1964)",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = TopKRoundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
