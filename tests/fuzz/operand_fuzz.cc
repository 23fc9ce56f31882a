// The text of operands on the command line, and the windows that they describe.
#include <array>
#include <cstdlib>

#include "client/slice.h"
#include "tests/fuzz/fuzz.h"

namespace tessera {
namespace {

constexpr std::array<std::int64_t, 3> kShape = {5, 1, 7};

// Checks that a window is inside its array, that is, the address of every element is.
void CheckInside(const ViewSpec& view) {
  std::int64_t first = view.offset, last = view.offset;
  for (std::size_t i = 0; i < view.shape.size(); ++i) {
    if (view.shape[i] == 0) return;
    const std::int64_t reach = (view.shape[i] - 1) * view.strides[i];
    (reach < 0 ? first : last) += reach;
  }
  Require(first >= 0 && last < 5 * 1 * 7, "a window that leaves its array");
}

}  // namespace
}  // namespace tessera

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto operand = tessera::ParseOperand(tessera::Text(data, size));
  if (!operand.ok()) return 0;
  const auto view = tessera::ResolveSubscripts(operand->subscripts, tessera::kShape);
  if (view.ok()) tessera::CheckInside(*view);
  return 0;
}
