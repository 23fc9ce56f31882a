// WindowSum from prefix and suffix sums, tile by tile on all cores: about three additions per
// element for any radius.
//
// A running sum would be as cheap: it adds the element that enters the window, and subtracts the
// element that leaves the window. However, it keeps every rounding error forever. For example, the
// error that one large element causes remains after the element has left. This strategy therefore
// never subtracts. The array, preceded by `radius` zeros, is divided into segments of w = 2 radius
// + 1 elements. A window has the same width, so it consists of the end of one segment and the
// beginning of the next (van Herk, "A fast algorithm for local minimum and maximum filters on
// rectangular and octagonal kernels", 1992; Gil and Werman, 1993):
//
//     segments   |. . . . . . .|. . . . . . .|. . . . . . .|
//     window            |<--------- w ------>|        at most two segments; here
//                        suffix| prefix                    suffix of the first + prefix of the next
//
// A core takes tiles of kTile windows. It computes the suffixes of a tile from its right end, and
// the prefixes from its left end. If a segment extends beyond an end of the tile, the sum of the
// part outside is added up from the totals of whole tiles, which are computed first.
//
// Cost at n = 2^20, radius 8 (f32): 12 MiB read (the array three times, twice from a cache), 4 MiB
// written, 3 * 2^20 additions; 64 tiles to divide among the cores.
#include <algorithm>

#include "kernels/device/device.h"
#include "kernels/same_bits/reduction.h"

namespace tessera {
namespace {

// Windows per tile. Their wide suffixes take 512 KiB.
constexpr std::int64_t kTile = std::int64_t{1} << 16;
static_assert(kWindowPart % kTile == 0);

// The array with `radius` zeros before it and any number of zeros after it. Position q is x[q -
// radius]. The totals of the array's tiles make the sum of a long range cheap.
template <class T>
struct Padded {
  const T* x;
  std::int64_t n;
  std::int64_t radius;
  const WideOf<T>* totals;  // totals[t] belongs to tile first_tile + t
  std::int64_t first_tile;

  WideOf<T> At(std::int64_t q) const {
    const std::int64_t i = q - radius;
    return i < 0 || i >= n ? 0 : static_cast<WideOf<T>>(static_cast<ValueOf<T>>(x[i]));
  }
  // Returns the sum of positions [begin, end).
  WideOf<T> Sum(std::int64_t begin, std::int64_t end) const {
    begin = std::max<std::int64_t>(begin, radius);
    end = std::min(end, n + radius);
    WideOf<T> sum = 0;
    while (begin < end) {
      const std::int64_t i = begin - radius;
      if (i % kTile == 0 && begin + std::min(kTile, n - i) <= end) {
        sum = WrapAdd(sum, totals[i / kTile - first_tile]);
        begin += kTile;
      } else {
        sum = WrapAdd(sum, At(begin++));
      }
    }
    return sum;
  }
};

template <class T>
void Run(const WindowSumProblem& p, Stream& stream) {
  using Sum = Fold<ReduceOp::kSum, T>;
  using Wide = WideOf<T>;
  if (p.n == 0) return;
  const std::int64_t w = 2 * p.radius + 1;
  const std::int64_t last = p.results_end();
  const std::int64_t first_tile = p.first / kTile, end_tile = (last + kTile - 1) / kTile;
  const int workers = static_cast<int>(
      std::min<std::int64_t>(end_tile - first_tile, stream.device().info().multiprocessors));
  // The tiles that contain elements of these windows, or of the segments in which the windows begin
  // and end.
  const std::int64_t first_total = std::max<std::int64_t>(0, first_tile * kTile - p.radius) / kTile;
  const std::int64_t end_total =
      (std::min(p.n, end_tile * kTile + p.radius + 1) + kTile - 1) / kTile;
  auto* totals = static_cast<Wide*>(
      stream.Scratch(static_cast<std::size_t>(end_total - first_total) * sizeof(Wide)));
  auto* suffixes =
      static_cast<Wide*>(stream.Scratch(static_cast<std::size_t>(workers * kTile) * sizeof(Wide)));
  const Padded<T> padded = {static_cast<const T*>(p.x), p.n, p.radius, totals, first_total};
  auto* out = static_cast<typename Sum::Out*>(p.out);

#pragma omp parallel for schedule(static) if (workers > 1)
  for (std::int64_t tile = first_total; tile < end_total; ++tile) {
    if (stream.stopped()) continue;
    Wide total = 0;
    const std::int64_t end = std::min(p.n, (tile + 1) * kTile);
    for (std::int64_t i = tile * kTile; i < end; ++i)
      total = WrapAdd(total, padded.At(i + p.radius));
    totals[tile - first_total] = total;
  }

  // The window of out[i] is positions [i, i + w).
#pragma omp parallel for schedule(static, 1) if (workers > 1)
  for (int worker = 0; worker < workers; ++worker) {
    Wide* suffix = suffixes + worker * kTile;
    for (std::int64_t tile = first_tile + worker; tile < end_tile && !stream.stopped();
         tile += workers) {
      const std::int64_t begin = tile * kTile;
      const std::int64_t end = std::min(p.n, begin + kTile);
      // suffix[i - begin] is the sum of the positions from i to the end of i's segment.
      Wide sum = padded.Sum(end, (end + w - 1) / w * w);
      std::int64_t offset = (end - 1) % w;  // of i in its segment
      for (std::int64_t i = end - 1; i >= begin; --i) {
        if (offset == w - 1) sum = 0;
        sum = WrapAdd(sum, padded.At(i));
        suffix[i - begin] = sum;
        offset = offset == 0 ? w - 1 : offset - 1;
      }
      // Next, `sum` becomes the sum of the positions from the beginning of the next segment to the
      // end of the window. There are no such positions if the window is itself a segment.
      sum = padded.Sum((begin + w - 1) / w * w, begin + w - 1);
      offset = begin % w;
      for (std::int64_t i = begin; i < end; ++i) {
        sum = offset == 0 ? 0 : WrapAdd(sum, padded.At(i + w - 1));
        out[i - p.first] = Sum::FinishAxis(WrapAdd(suffix[i - begin], sum), w);
        offset = offset + 1 == w ? 0 : offset + 1;
      }
    }
  }
}

// A term passes through additions within its own tile, additions within the two tiles at the ends
// of the range, additions of the totals between them, and additions within the current tile.
double Roundoff(const WindowSumProblem& p) {
  if (IsInteger(p.dtype)) return 0;
  const std::int64_t w = std::min(2 * p.radius + 1, p.n);
  return static_cast<double>(std::min(w, 4 * kTile + w / kTile) + 1) * kRoundoffF64;
}

}  // namespace

extern constexpr Strategy<WindowSumProblem> kWindowSumCpu = {
    .name = "cpu",
    .summary = "suffix of one segment + prefix of the next, on all cores, for any radius",
    .source = "van Herk's and Gil and Werman's filters, with sums in place of maxima",
    .deterministic = true,
    .roundoff = Roundoff,
    .cost =
        [](const WindowSumProblem& p) {
          const auto n = static_cast<std::uint64_t>(p.n);
          return Cost{
              .bytes = 3 * n * SizeOf(p.dtype) + n * SizeOf(ResultDType(ReduceOp::kSum, p.dtype)),
              .flops = 3 * n,
              .depth = static_cast<std::uint64_t>(std::min(p.n, 2 * kTile))};
        },
    .launch =
        [](const WindowSumProblem& p, Stream& stream) {
          DispatchDType(p.dtype, [&](auto t) { Run<decltype(t)>(p, stream); });
        },
};

}  // namespace tessera
