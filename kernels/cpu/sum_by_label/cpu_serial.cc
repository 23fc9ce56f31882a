// SumByLabel as it is defined: one core adds one row after the other to the sums of its label.
//
// Each sum has three accumulators: for the current chunk, for the current group, and for all
// complete groups. The number of a label's rows so far determines whether a chunk or a group is
// complete.
//
// Cost at 2^20 f32 and 1024 labels: 4 MiB of x and 8 MiB of labels read; 32 KiB of accumulators.
#include "kernels/device/device.h"
#include "kernels/same_bits/label_sums.h"

namespace tessera {
namespace {

// Number of elements between two checks of Stream::stopped().
constexpr std::int64_t kLook = std::int64_t{1} << 16;

template <class Wide>
struct Sums {
  Wide chunk, group, all;
};

template <class Wide>
void Close(Wide& from, Wide& to) {
  to = WrapAdd(to, from);
  from = 0;
}

std::uint64_t SumsOf(const SumByLabelProblem& p) {
  return static_cast<std::uint64_t>(p.length * p.inner);
}
std::uint64_t ScratchOf(const SumByLabelProblem& p) {
  return SumsOf(p) * sizeof(Sums<double>) +
         static_cast<std::uint64_t>(p.length) * sizeof(std::int64_t);
}

template <class T, class I>
void Run(const SumByLabelProblem& p, Stream& stream) {
  using Wide = WideOf<T>;
  const auto* x = static_cast<const T*>(p.x);
  const auto* labels = static_cast<const I*>(p.labels);
  auto* const sums = static_cast<Sums<Wide>*>(stream.Scratch(SumsOf(p) * sizeof(Sums<Wide>)));
  auto* const rows = static_cast<std::int64_t*>(
      stream.Scratch(static_cast<std::uint64_t>(p.length) * sizeof(std::int64_t)));
  std::fill_n(sums, SumsOf(p), Sums<Wide>{});
  std::fill_n(rows, p.length, 0);
  std::int64_t bad = -1, looked = 0;
  for (std::int64_t i = 0; i < p.n; ++i) {
    const std::int64_t label = ResolveIndex(labels[i], p.length, p.mode);
    if (label < 0) {
      if (bad < 0) bad = i;
      continue;
    }
    const std::int64_t row = ++rows[label];
    for (std::int64_t c = 0; c < p.inner; ++c) {
      if (looked++ % kLook == 0 && stream.stopped()) return;
      Sums<Wide>& sum = sums[label * p.inner + c];
      sum.chunk = WrapAdd(sum.chunk, LabelTerm(x[i * p.inner + c]));
      if (row % kLabelChunk == 0) Close(sum.chunk, sum.group);
      if (row % kLabelGroupTerms == 0) Close(sum.group, sum.all);
    }
  }
  if (p.mode == TakeMode::kError) p.result->index = bad;
  auto* const out = static_cast<LabelSumOf<T>*>(p.out);
  for (std::int64_t i = 0; i < p.length * p.inner; ++i) {
    if (i % kLook == 0 && stream.stopped()) return;
    Sums<Wide>& sum = sums[i];
    Close(sum.chunk, sum.group);
    Close(sum.group, sum.all);
    out[i] = FinishLabelSum<T>(sum.all);
  }
}

}  // namespace

extern constexpr Strategy<SumByLabelProblem> kSumByLabelCpuSerial = {
    .name = "cpu_serial",
    .summary = "one row after the other on one core, with three accumulators for each sum",
    .source = "definition",
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = LabelRoundoff,
    .cost =
        [](const SumByLabelProblem& p) {
          Cost cost = LabelCost(p, 0, 0, static_cast<std::uint64_t>(p.elements() + p.n));
          cost.among = ScratchOf(p);
          cost.scattered = static_cast<std::uint64_t>(2 * p.n) +
                           static_cast<std::uint64_t>(p.elements()) * sizeof(Sums<double>) / 64;
          return cost;
        },
    .launch =
        [](const SumByLabelProblem& p, Stream& stream) {
          DispatchElement(p.dtype, [&]<class T>(T) {
            DispatchIndex(LabelsAsIndices(p), [&]<class I>(I) { Run<T, I>(p, stream); });
          });
        },
    .scratch = ScratchOf,
};

}  // namespace tessera
