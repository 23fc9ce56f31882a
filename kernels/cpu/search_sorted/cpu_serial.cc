// SearchSorted as it is defined: one core looks up one key after the other.
//
// Cost at 2^20 keys among 2^20 f32: 4 MiB of keys and 4 MiB of x read, 8 MiB written.
#include "kernels/cpu/runtime/chunks.h"
#include "kernels/problem/search_sorted.h"

namespace tessera {
namespace {

void Run(const SearchSortedProblem& p, Stream& stream) {
  DispatchElement(p.dtype, [&]<class T>(T) {
    const auto* keys = static_cast<const T*>(p.keys);
    ForChunks(stream, p.n, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i)
        p.out[i] = PlaceOfKey(static_cast<const T*>(p.x), 0, p.length,
                              static_cast<ValueOf<T>>(keys[i]), p.right);
    });
  });
}

}  // namespace

extern constexpr Strategy<SearchSortedProblem> kSearchSortedCpuSerial = {
    .name = "cpu_serial",
    .summary = "one key after the other on one core",
    .source = "definition",
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = [](const SearchSortedProblem&) { return 0.0; },
    .cost =
        [](const SearchSortedProblem& p) {
          return SearchSortedCost(p, 64, static_cast<std::uint64_t>(p.n));
        },
    .launch = Run,
};

}  // namespace tessera
