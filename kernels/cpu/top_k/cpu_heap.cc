// TopK by heaps: one for each row, or for each part of a long one, over all cores.
//
// A heap of the k best elements so far has the worst of them on top. An element that is no better
// than that is done after one comparison, and in a random row of n elements all but about
// k (1 + ln(n / k)) are; so a core compares kBlock of them with the top in one loop, which becomes
// vector instructions, and looks closer only where some element passed. Where there are fewer rows
// than cores, rows are cut into parts, and the heaps of a row's parts go into one heap at the end.
//
// Cost: every element is read once; k (1 + ln(n / k)) insertions of log2(k) steps per row where
// elements come in random order, n of them where every element is better than those before it.
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "kernels/device.h"
#include "kernels/top_k.h"

namespace tessera {
namespace {

// Elements compared at once; between two looks at Stream::stopped() are kLook.
constexpr std::int64_t kBlock = 64, kLook = std::int64_t{1} << 14;
// Elements that make a part of a row worth its own heap.
constexpr std::int64_t kLeastPart = std::int64_t{1} << 16;
static_assert(kLeastPart >= kMostTopK, "the heaps of parts are full");

template <class T>
struct Entry {
  KeyOf<T> key;
  std::int64_t index;

  // Whether this one comes before the other in the result.
  bool operator<(const Entry& other) const {
    return key != other.key ? key < other.key : index < other.index;
  }
};

// The k best entries seen, in memory for as many.
template <class T>
class Heap {
 public:
  Heap(Entry<T>* entries, std::int64_t k) : entries_(entries), k_(k) {}

  void Insert(Entry<T> entry) {
    if (count_ < k_) {
      entries_[count_++] = entry;
      std::push_heap(entries_, entries_ + count_);
    } else if (entry < entries_[0]) {
      std::pop_heap(entries_, entries_ + k_);
      entries_[k_ - 1] = entry;
      std::push_heap(entries_, entries_ + k_);
    }
  }
  // x[begin, end), in order of their indices.
  void InsertAll(const T* x, std::int64_t begin, std::int64_t end, bool smallest) {
    std::int64_t i = begin;
    while (i < end && count_ < k_) InsertOne(x, i++, smallest);
    for (; i < end; i += kBlock) {
      const std::int64_t last = std::min(end, i + kBlock);
      // What comes later in the row and is equal is worse.
      const KeyOf<T> worst = entries_[0].key;
      bool any = false;
      for (std::int64_t j = i; j < last; ++j) any |= TopKKey(x[j], smallest) < worst;
      if (!any) continue;
      for (std::int64_t j = i; j < last; ++j) InsertOne(x, j, smallest);
    }
  }
  const Entry<T>* begin() const { return entries_; }
  const Entry<T>* end() const { return entries_ + count_; }
  // From the best to the worst; no heap any more.
  void Sort() { std::sort_heap(entries_, entries_ + count_); }

 private:
  void InsertOne(const T* x, std::int64_t i, bool smallest) {
    Insert({TopKKey(x[i], smallest), i});
  }

  Entry<T>* const entries_;
  const std::int64_t k_;
  std::int64_t count_ = 0;
};

// Parts of every row.
std::int64_t Parts(const TopKProblem& p, std::int64_t workers) {
  const std::int64_t wanted = (workers + p.rows - 1) / p.rows;
  return std::clamp<std::int64_t>(p.n / kLeastPart, 1, wanted);
}

template <class T>
void Run(const TopKProblem& p, Stream& stream) {
  const std::int64_t workers = std::max(1, stream.device().info().multiprocessors);
  const std::int64_t parts = Parts(p, workers);
  const auto* x = static_cast<const T*>(p.x);
  auto* values = static_cast<T*>(p.values);
  // A row without parts is done by one worker, which uses its entries again for the next.
  const std::int64_t heaps = parts > 1 ? p.rows * parts : std::min(workers, p.rows);
  auto* entries = static_cast<Entry<T>*>(
      stream.Scratch(static_cast<std::size_t>((heaps + 1) * p.k) * sizeof(Entry<T>)));

  const auto fill = [&](Heap<T>& heap, std::int64_t row, std::int64_t part) {
    const std::int64_t begin = p.n / parts * part;
    const std::int64_t end = part + 1 == parts ? p.n : p.n / parts * (part + 1);
    for (std::int64_t i = begin; i < end && !stream.stopped(); i += kLook)
      heap.InsertAll(x + row * p.n, i, std::min(end, i + kLook), p.smallest);
  };
  const auto store = [&](Heap<T>& heap, std::int64_t row) {
    heap.Sort();
    std::int64_t j = 0;
    for (const Entry<T>& entry : heap) {
      const std::int64_t place = TopKPlace(row, j++, p.k, p.inner);
      values[place] = x[row * p.n + entry.index];
      p.indices[place] = entry.index;
    }
  };

  if (parts == 1) {
    const int used = static_cast<int>(heaps);
#pragma omp parallel for schedule(static, 1) num_threads(used) if (p.rows * p.n > (1 << 16))
    for (std::int64_t worker = 0; worker < heaps; ++worker) {
      for (std::int64_t row = worker; row < p.rows && !stream.stopped(); row += heaps) {
        Heap<T> heap(entries + worker * p.k, p.k);
        fill(heap, row, 0);
        store(heap, row);
      }
    }
    return;
  }
#pragma omp parallel for schedule(dynamic, 1)
  for (std::int64_t i = 0; i < p.rows * parts; ++i) {
    Heap<T> heap(entries + i * p.k, p.k);
    fill(heap, i / parts, i % parts);
  }
  if (stream.stopped()) return;
  for (std::int64_t row = 0; row < p.rows; ++row) {
    Heap<T> heap(entries + heaps * p.k, p.k);
    const Entry<T>* first = entries + row * parts * p.k;
    for (const Entry<T>* entry = first; entry != first + parts * p.k; ++entry) heap.Insert(*entry);
    store(heap, row);
  }
}

}  // namespace

extern constexpr Strategy<TopKProblem> kTopKCpuHeap = {
    .name = "cpu_heap",
    .summary = "a heap for each row or part of one; most elements fail one comparison with its top",
    .source = "partial sort by a bounded heap (Williams, Algorithm 232, 1964)",
    .deterministic = true,
    .roundoff = [](const TopKProblem&) { return 0.0; },
    .cost =
        [](const TopKProblem& p) {
          const auto elements = static_cast<double>(p.rows) * static_cast<double>(p.n);
          const auto k = static_cast<double>(std::max<std::int64_t>(1, p.k));
          const double inserted = static_cast<double>(p.rows) * k *
                                  (1 + std::log(std::max(1.0, static_cast<double>(p.n) / k)));
          return Cost{
              .bytes = static_cast<std::uint64_t>(elements) * SizeOf(p.dtype) + TopKOutBytes(p),
              .flops = static_cast<std::uint64_t>(elements + inserted * 4 * std::log2(k + 1)),
              .atomics = 0,
              .depth = static_cast<std::uint64_t>(std::min(p.n, kLeastPart)),
          };
        },
    .launch =
        [](const TopKProblem& p, Stream& stream) {
          DispatchDType(p.dtype, [&](auto t) { Run<decltype(t)>(p, stream); });
        },
    .scratch =
        [](const TopKProblem& p) {
          constexpr std::int64_t kMostHeaps = 512;  // two for each of as many cores
          const std::int64_t heaps = p.rows > kMostHeaps
                                         ? kMostHeaps
                                         : std::min(kMostHeaps, p.rows * (1 + p.n / kLeastPart));
          return static_cast<std::uint64_t>((heaps + 1) * p.k) * 2 * sizeof(std::int64_t);
        },
};

}  // namespace tessera
