// Select as it is defined: one core looks at one byte of the mask after the other, and copies the
// element of x if the byte is not 0.
//
// Cost at n = 2^20, f32, half of them selected: 1 MiB of mask and 4 MiB of x read, 2 MiB written.
#include "kernels/cpu/runtime/chunks.h"
#include "kernels/problem/select.h"
#include "kernels/problem/take.h"

namespace tessera {
namespace {

template <class E>
void Run(const SelectProblem& p, const Stream& stream) {
  const auto* x = static_cast<const E*>(p.x);
  const auto* mask = static_cast<const std::uint8_t*>(p.mask);
  auto* values = static_cast<E*>(p.values);
  std::int64_t found = 0;
  ForChunks(stream, p.n, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      if (mask[i] == 0) continue;
      if (p.wants_values) values[found] = x[i];
      if (p.wants_indices) p.indices[found] = i;
      ++found;
    }
  });
}

}  // namespace

extern constexpr Strategy<SelectProblem> kSelectCpuSerial = {
    .name = "cpu_serial",
    .summary = "one element after the other on one core",
    .source = "definition",
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = [](const SelectProblem&) { return 0.0; },
    .cost = [](const SelectProblem& p) { return SelectCost(p, 1, 64, SelectFlops(p)); },
    .launch = [](const SelectProblem& p,
                 Stream& stream) { DispatchSize(p.dtype, [&]<class E>(E) { Run<E>(p, stream); }); },
};

}  // namespace tessera
