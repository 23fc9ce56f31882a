// Sort digit by digit, on all cores.
//
// A pass distributes the elements among 256 buckets by 8 bits of their keys, and keeps the order
// within a bucket. After passes from the lowest digit to the highest, the row is sorted, without a
// comparison. If all keys have the same digit, the pass is skipped. The elements of a long row are
// divided into parts: each core counts the digits of its parts, the sums of these counts give the
// place where each part's share of each bucket begins, and each core then moves its parts.
//
//     keys   31 12 32 11      last digit   31 11 | 12 32      first digit   11 12 | 31 32
//
// A part has at least kLeastPart elements. If more cores have work when rows are not divided, each
// core sorts whole rows. Rows of up to kShort elements are sorted by comparisons, because 256
// counters would take longer.
//
// Cost at n = 2^20 (f32): 4 passes; each reads the elements twice and writes them once, with 32-bit
// indices if indices are wanted.
#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "kernels/cpu/runtime/host_threads.h"
#include "kernels/device/device.h"
#include "kernels/problem/sort.h"

namespace tessera {
namespace {

constexpr int kDigits = 256;
// kLook is the number of elements between two checks of Stream::stopped().
constexpr std::int64_t kShort = 200, kLeastPart = std::int64_t{1} << 16, kLook = kLeastPart;
constexpr std::int64_t kMostWorkers = 64;
// The maximum memory for all cores together if each sorts whole rows.
constexpr std::uint64_t kMostMemory = std::uint64_t{160} << 20;
// Rows of up to this length have 32-bit indices while they are sorted.
constexpr std::int64_t kMostShortIndex = std::numeric_limits<std::uint32_t>::max();

// Returns the bytes for two copies of a row, and for the counters of its parts.
std::uint64_t WorkerBytes(const SortProblem& p, std::int64_t parts) {
  const std::uint64_t index = !p.wants_indices         ? 0
                              : p.n <= kMostShortIndex ? sizeof(std::uint32_t)
                                                       : sizeof(std::uint64_t);
  const std::uint64_t bytes = 2 * static_cast<std::uint64_t>(p.n) * (SizeOf(p.dtype) + index) +
                              static_cast<std::uint64_t>(parts) * sizeof(std::int64_t[kDigits]);
  return (bytes + 63) / 64 * 64;
}

// The number of cores that sort whole rows, and the number of parts of a row. One of them is 1.
struct Plan {
  std::int64_t workers, parts;
};

Plan PlanOf(const SortProblem& p, std::int64_t cores) {
  const std::int64_t parts = std::clamp<std::int64_t>(p.n / kLeastPart, 1, cores);
  // All cores have work, or there is too little work for a second one.
  if (parts == cores || p.elements() <= kLook) return {1, parts};
  const auto fit = static_cast<std::int64_t>(kMostMemory / WorkerBytes(p, 1));
  const std::int64_t workers = std::clamp<std::int64_t>(std::min(p.rows, fit), 1, cores);
  return parts < workers ? Plan{workers, 1} : Plan{1, parts};
}

Plan PlanHere(const SortProblem& p) {
  return PlanOf(p, std::clamp<std::int64_t>(HostThreads(), 1, kMostWorkers));
}

// The elements of a row in some order. Without an index, element i is the row's element i.
template <class Word, class Index>
struct List {
  const Word* words;
  const Index* indices;
};

// Memory for the elements of a row.
template <class Word, class Index>
struct Space {
  Word* words;
  Index* indices;  // null if indices are not wanted
};

// The parts of a row, and the counters of each part.
struct Parts {
  std::int64_t n, count;
  std::int64_t (*counters)[kDigits];
  const Stream& stream;

  // Calls f(i, counters of the part) for the row's elements, part by part on the cores, until the
  // stream is stopped.
  template <class F>
  void ForEach(const F& f) const {
    if (count == 1) return ForPart(0, f);
#pragma omp parallel for schedule(static)
    for (std::int64_t part = 0; part < count; ++part) ForPart(part, f);
  }

  template <class F>
  void ForPart(std::int64_t part, const F& f) const {
    const std::int64_t begin = n / count * part;
    const std::int64_t end = part + 1 == count ? n : begin + n / count;
    for (std::int64_t i = begin; i < end && !stream.stopped(); i += kLook) {
      const std::int64_t last = std::min(end, i + kLook);
      for (std::int64_t j = i; j < last; ++j) f(j, counters[part]);
    }
  }
};

// Moves the elements in the order of one digit of their keys. Returns false, and moves nothing, if
// all of them have the same digit.
template <class Word, class Index>
bool Distribute(const Parts& parts, const SortKey<Word>& key, int shift, List<Word, Index> from,
                Space<Word, Index> to) {
  const auto digit = [&](std::int64_t i) {
    return static_cast<unsigned>(key(from.words[i]) >> shift) % kDigits;
  };
  for (std::int64_t part = 0; part < parts.count; ++part)
    std::fill_n(parts.counters[part], kDigits, 0);
  parts.ForEach([&](std::int64_t i, std::int64_t* counters) { ++counters[digit(i)]; });
  std::int64_t sum = 0;
  for (int d = 0; d < kDigits; ++d) {
    const std::int64_t before = sum;
    for (std::int64_t part = 0; part < parts.count; ++part)
      sum += std::exchange(parts.counters[part][d], sum);
    if (sum - before == parts.n) return false;
  }
  if (parts.stream.stopped()) return false;
  parts.ForEach([&](std::int64_t i, std::int64_t* counters) {
    const std::int64_t place = counters[digit(i)]++;
    to.words[place] = from.words[i];
    if (to.indices != nullptr)
      to.indices[place] = from.indices == nullptr ? static_cast<Index>(i) : from.indices[i];
  });
  return true;
}

// Sorts rows with the memory of one worker.
template <class Word, class Index>
class Worker {
 public:
  // `memory` has WorkerBytes, and is aligned to 8 bytes.
  Worker(const SortProblem& p, std::int64_t parts, void* memory, const Stream& stream)
      : p_(p),
        key_(MakeSortKey<Word>(p.dtype, p.descending)),
        parts_{p.n, parts, static_cast<std::int64_t (*)[kDigits]>(memory), stream} {
    auto* const indices = reinterpret_cast<Index*>(parts_.counters + parts);
    auto* const words = reinterpret_cast<Word*>(indices + (p.wants_indices ? 2 * p.n : 0));
    for (int i = 0; i < 2; ++i)
      spaces_[i] = {words + i * p.n, p.wants_indices ? indices + i * p.n : nullptr};
  }

  void SortRow(std::int64_t row) const {
    const std::int64_t first = row * p_.n;
    const Word* const x = static_cast<const Word*>(p_.x) + first;
    const List<Word, Index> sorted = p_.n <= kShort ? Compared(x) : Distributed(x);
    if (parts_.stream.stopped()) return;
    if (p_.wants_values) {
      Word* const values = static_cast<Word*>(p_.values) + first;
      parts_.ForEach([&](std::int64_t i, std::int64_t*) { values[i] = sorted.words[i]; });
    }
    if (!p_.wants_indices) return;
    std::int64_t* const indices = p_.indices + first;
    parts_.ForEach([&](std::int64_t i, std::int64_t*) {
      indices[i] = sorted.indices == nullptr ? i : static_cast<std::int64_t>(sorted.indices[i]);
    });
  }

 private:
  List<Word, Index> Distributed(const Word* x) const {
    List<Word, Index> now = {x, nullptr};
    int space = 0;
    for (int shift = 0; shift < static_cast<int>(8 * sizeof(Word)); shift += 8) {
      if (!Distribute(parts_, key_, shift, now, spaces_[space])) continue;
      now = {spaces_[space].words, spaces_[space].indices};
      space = 1 - space;
    }
    return now;
  }

  List<Word, Index> Compared(const Word* x) const {
    struct Entry {
      Word key;
      std::int32_t index;
    };
    Entry entries[kShort];
    for (std::int64_t i = 0; i < p_.n; ++i) entries[i] = {key_(x[i]), static_cast<int>(i)};
    std::sort(entries, entries + p_.n, [](const Entry& a, const Entry& b) {
      return a.key != b.key ? a.key < b.key : a.index < b.index;
    });
    const Space<Word, Index>& to = spaces_[0];
    for (std::int64_t i = 0; i < p_.n; ++i) {
      to.words[i] = x[entries[i].index];
      if (to.indices != nullptr) to.indices[i] = static_cast<Index>(entries[i].index);
    }
    return {to.words, to.indices};
  }

  const SortProblem& p_;
  const SortKey<Word> key_;
  const Parts parts_;
  Space<Word, Index> spaces_[2];
};

template <class Word, class Index>
void Run(const SortProblem& p, Stream& stream) {
  const Plan plan = PlanHere(p);
  const std::uint64_t bytes = WorkerBytes(p, plan.parts);
  auto* const memory =
      static_cast<char*>(stream.Scratch(static_cast<std::uint64_t>(plan.workers) * bytes));
#pragma omp parallel for schedule(static, 1) if (plan.workers > 1)
  for (std::int64_t worker = 0; worker < plan.workers; ++worker) {
    const Worker<Word, Index> own(p, plan.parts,
                                  memory + static_cast<std::uint64_t>(worker) * bytes, stream);
    for (std::int64_t row = worker; row < p.rows && !stream.stopped(); row += plan.workers)
      own.SortRow(row);
  }
}

void Enqueue(const SortProblem& p, Stream& stream) {
  DispatchWord(p.dtype, [&](auto word) {
    if (p.n <= kMostShortIndex) {
      Run<decltype(word), std::uint32_t>(p, stream);
    } else {
      Run<decltype(word), std::uint64_t>(p, stream);
    }
  });
}

std::uint64_t ScratchOf(const SortProblem& p) {
  const auto [workers, parts] = PlanHere(p);
  return static_cast<std::uint64_t>(workers) * WorkerBytes(p, parts);
}

// If a row has more bytes, its buckets do not fit in a near cache.
constexpr std::uint64_t kNear = 1 << 20;

// The depth is half of the busiest core's operations, because those on adjacent elements overlap.
Cost CostOf(const SortProblem& p) {
  const auto n = static_cast<std::uint64_t>(p.elements());
  const std::uint64_t passes = SizeOf(p.dtype), moved = p.wants_indices ? 4 : 2;
  const auto [workers, parts] = PlanOf(p, kMostWorkers);
  const std::int64_t alone = (p.rows + workers - 1) / workers * (p.n / parts);
  return {
      .bytes = n * SizeOf(p.dtype) + SortOutBytes(p),
      .flops = n * passes * moved,
      .atomics = 0,
      .depth = static_cast<std::uint64_t>(alone) * passes * moved / 2,
      .scattered = static_cast<std::uint64_t>(p.n) * SizeOf(p.dtype) > kNear ? 2 * n * passes : 0,
      .among = kNear};
}

}  // namespace

extern constexpr Strategy<SortProblem> kSortCpuRadix = {
    .name = "cpu_radix",
    .summary = "distributes the elements by one digit of their keys at a time, on all cores",
    .source = "least-significant-digit radix sort (Seward, 1954)",
    .deterministic = true,
    .roundoff = SortRoundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .scratch = ScratchOf,
};

}  // namespace tessera
