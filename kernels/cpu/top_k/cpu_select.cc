// TopK by selection, on all cores, for each row or for each part of a long row.
//
// The best elements so far are kept in a buffer with space for twice as many elements as are
// wanted. When the buffer is full, its k best elements are selected (in linear time for any order),
// and the worst of these becomes the limit: an element that is not better than the limit is
// rejected after one comparison. In a random row of n elements, all except about k (1 + ln(n / k))
// are rejected. A core therefore compares kBlock elements with the limit in one vectorised loop,
// and examines them one by one only if any of them passes. If there are fewer rows than cores, rows
// are divided into parts, and the result of a row is selected from the best elements of its parts.
//
// Cost: every element is read once. If elements come in random order, selections examine k (1 +
// ln(n / k)) of them. If every element is better than all previous ones, they examine all n, and
// the operation takes two to four times as long. It takes up to eleven times as long if each
// element is better than most of the previous k to 3k elements, as in a noisy increasing sequence.
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "kernels/device/device.h"
#include "kernels/problem/top_k.h"

namespace tessera {
namespace {

// kBlock is the number of elements that are compared together. kLook is the number of elements
// between two checks of Stream::stopped().
constexpr std::int64_t kBlock = 64, kLook = std::int64_t{1} << 14;
// The minimum number of elements for which a part of a row is worth a separate selection.
constexpr std::int64_t kLeastPart = std::int64_t{1} << 16;
static_assert(kLeastPart >= kMostTopK, "every part has k elements");

template <class T>
struct Entry {
  KeyOf<T> key;
  std::int64_t index;

  // Whether this entry comes before the other one in the result.
  bool operator<(const Entry& other) const {
    return key != other.key ? key < other.key : index < other.index;
  }
};

// Whether any key of x[0, n) is less than limit. A key that equals the limit comes later in the row
// and is therefore worse.
template <class T>
bool AnyBefore(const T* x, std::int64_t n, KeyOf<T> limit, bool smallest) {
  bool any = false;
  for (std::int64_t i = 0; i < n; ++i) any |= TopKKey(x[i], smallest) < limit;
  return any;
}

// Returns the number of entries in the memory that Best needs to find the k best.
constexpr std::int64_t Room(std::int64_t k) { return 2 * k + kBlock; }

// The k best entries so far, and others that have not been compared with them yet.
template <class T>
class Best {
 public:
  // `entries` is memory for Room(k) entries.
  Best(Entry<T>* entries, std::int64_t k) : entries_(entries), k_(k) {}

  // Inserts x[begin, end) in index order.
  void InsertAll(const T* x, std::int64_t begin, std::int64_t end, bool smallest) {
    for (std::int64_t i = begin; i < end; i += kBlock) {
      const std::int64_t last = std::min(end, i + kBlock);
      if (limited_ && !AnyBefore(x + i, last - i, limit_, smallest)) continue;
      if (count_ + kBlock > Room(k_)) Select();
      for (std::int64_t j = i; j < last; ++j) {
        const KeyOf<T> key = TopKKey(x[j], smallest);
        entries_[count_] = {key, j};
        count_ += !limited_ || key < limit_ ? 1 : 0;
      }
    }
  }
  // Drops all entries but the k best, whose order is then unspecified.
  void Select() {
    if (count_ <= k_) return;
    std::nth_element(entries_, entries_ + k_ - 1, entries_ + count_);
    count_ = k_;
    limit_ = entries_[k_ - 1].key;
    limited_ = true;
  }
  std::int64_t count() const { return count_; }

 private:
  Entry<T>* const entries_;
  const std::int64_t k_;
  std::int64_t count_ = 0;
  bool limited_ = false;  // whether there is a limit
  KeyOf<T> limit_ = 0;    // the worst of the k best at the last selection
};

// The maximum number of cores that select at the same time.
constexpr std::int64_t kMostWorkers = 256;

// Returns the number of parts into which every row is divided.
std::int64_t Parts(const TopKProblem& p, std::int64_t workers) {
  const std::int64_t wanted = (workers + p.rows - 1) / p.rows;
  return std::clamp<std::int64_t>(p.n / kLeastPart, 1, wanted);
}

template <class T>
void Run(const TopKProblem& p, Stream& stream) {
  const auto workers =
      std::clamp<std::int64_t>(stream.device().info().multiprocessors, 1, kMostWorkers);
  const std::int64_t parts = Parts(p, workers);
  const auto* x = static_cast<const T*>(p.x);
  auto* values = static_cast<T*>(p.values);
  // An undivided row is computed by one worker, which reuses its entries for the next row.
  const std::int64_t places = parts > 1 ? p.rows * parts : std::min(workers, p.rows);
  const std::int64_t room = Room(p.k);
  auto* entries = static_cast<Entry<T>*>(
      stream.Scratch(static_cast<std::size_t>(places * room) * sizeof(Entry<T>)));

  // Finds the best elements of a part, using memory for Room(k) entries, and returns their number.
  const auto find = [&](Entry<T>* found, std::int64_t row, std::int64_t part) {
    Best<T> best(found, p.k);
    const std::int64_t begin = p.n / parts * part;
    const std::int64_t end = part + 1 == parts ? p.n : p.n / parts * (part + 1);
    for (std::int64_t i = begin; i < end && !stream.stopped(); i += kLook)
      best.InsertAll(x + row * p.n, i, std::min(end, i + kLook), p.smallest);
    best.Select();
    return best.count();
  };
  const auto store = [&](Entry<T>* found, std::int64_t count, std::int64_t row) {
    std::sort(found, found + count);
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t place = TopKPlace(row, j, p.k, p.inner);
      values[place] = x[row * p.n + found[j].index];
      p.indices[place] = found[j].index;
    }
  };

  if (parts == 1) {
#pragma omp parallel for schedule(static, 1) if (places > 1 && p.rows * p.n > (1 << 16))
    for (std::int64_t worker = 0; worker < places; ++worker) {
      for (std::int64_t row = worker; row < p.rows && !stream.stopped(); row += places) {
        Entry<T>* const found = entries + worker * room;
        const std::int64_t count = find(found, row, 0);
        store(found, count, row);
      }
    }
    return;
  }
#pragma omp parallel for schedule(dynamic, 1)
  for (std::int64_t i = 0; i < p.rows * parts; ++i) find(entries + i * room, i / parts, i % parts);
  if (stream.stopped()) return;
  for (std::int64_t row = 0; row < p.rows; ++row) {
    Entry<T>* const first = entries + row * parts * room;
    Entry<T>* end = first + p.k;
    for (std::int64_t part = 1; part < parts; ++part)
      end = std::copy_n(first + part * room, p.k, end);
    std::nth_element(first, first + p.k - 1, end);
    store(first, p.k, row);
  }
}

}  // namespace

extern constexpr Strategy<TopKProblem> kTopKCpuSelect = {
    .name = "cpu_select",
    .summary = "one comparison with a limit rejects most elements; the k best are selected",
    .source = "introselect (Musser, Introspective Sorting and Selection Algorithms, 1997)",
    .deterministic = true,
    .roundoff = [](const TopKProblem&) { return 0.0; },
    .cost =
        [](const TopKProblem& p) {
          const auto elements = static_cast<double>(p.rows) * static_cast<double>(p.n);
          const double levels = std::log2(static_cast<double>(std::max<std::int64_t>(1, p.k)) + 1);
          return Cost{
              .bytes = static_cast<std::uint64_t>(elements) * SizeOf(p.dtype) + TopKOutBytes(p),
              .flops = static_cast<std::uint64_t>(elements),
              .depth = static_cast<std::uint64_t>(std::min(p.n, kLeastPart)),
              // In the worst order, all elements take part in selections.
              .scattered = static_cast<std::uint64_t>(elements * (1 + levels / 3)),
              .among = static_cast<std::uint64_t>(Room(p.k)) * 2 * sizeof(std::int64_t)};
        },
    .launch =
        [](const TopKProblem& p, Stream& stream) {
          DispatchDType(p.dtype, [&](auto t) { Run<decltype(t)>(p, stream); });
        },
    .scratch =
        [](const TopKProblem& p) {
          constexpr std::int64_t kMostPlaces = 2 * kMostWorkers;
          const std::int64_t places = p.rows > kMostPlaces
                                          ? kMostPlaces
                                          : std::min(kMostPlaces, p.rows * (1 + p.n / kLeastPart));
          return static_cast<std::uint64_t>(places * Room(p.k)) * 2 * sizeof(std::int64_t);
        },
};

}  // namespace tessera
