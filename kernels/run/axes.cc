#include "kernels/run/axes.h"

#include "absl/strings/str_cat.h"
#include "kernels/run/execute.h"

namespace tessera {

absl::StatusOr<std::array<bool, kMaxRank>> FoldedAxes(const Shape& shape,
                                                      absl::Span<const int> axes) {
  std::array<bool, kMaxRank> folded{};
  const int rank = shape.rank;
  for (int axis : axes) {
    if (axis < -rank || axis >= rank) {
      return Invalid("BAD_AXES",
                     absl::StrCat("axis ", axis, " of an operand of rank ", rank, "; allowed: ",
                                  rank == 0 ? "none" : absl::StrCat(-rank, " to ", rank - 1)),
                     {{"axis", absl::StrCat(axis)}, {"rank", absl::StrCat(rank)}});
    }
    bool& flag = folded[static_cast<std::size_t>(axis < 0 ? axis + rank : axis)];
    if (flag) {
      return Invalid("BAD_AXES", absl::StrCat("axis ", axis, " is named twice"),
                     {{"axis", absl::StrCat(axis)}, {"rank", absl::StrCat(rank)}});
    }
    flag = true;
  }
  return folded;
}

}  // namespace tessera
