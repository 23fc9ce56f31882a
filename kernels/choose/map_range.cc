#include "kernels/choose/map_range.h"

#include "kernels/compute.h"

namespace tessera {
namespace {

std::int64_t StrideOf(const View& view, int axis) {
  return view.strides[static_cast<std::size_t>(axis)];
}

// Returns a problem with the same elements in the same order. Extents of 1 are dropped, and
// adjacent axes are merged if a single stride covers both in every operand.
MapProblem Merged(const MapProblem& p) {
  MapProblem merged = p;
  const int operands = p.program->operands;
  const Shape& shape = p.operands[0].shape;
  for (int i = 0; i < operands; ++i) {
    View& view = merged.operands[static_cast<std::size_t>(i)];
    view.shape = {};
    view.strides = {};
  }
  Shape& joint = merged.operands[0].shape;
  for (int axis = 0; axis < shape.rank; ++axis) {
    if (shape[axis] == 1) continue;
    bool joins = joint.rank > 0;
    for (int i = 0; i < operands && joins; ++i) {
      joins = StrideOf(merged.operands[static_cast<std::size_t>(i)], joint.rank - 1) ==
              shape[axis] * StrideOf(p.operands[static_cast<std::size_t>(i)], axis);
    }
    if (!joins) {
      joint[joint.rank] = 1;
      ++joint.rank;
    }
    joint[joint.rank - 1] *= shape[axis];
    for (int i = 0; i < operands; ++i) {
      merged.operands[static_cast<std::size_t>(i)]
          .strides[static_cast<std::size_t>(joint.rank - 1)] =
          StrideOf(p.operands[static_cast<std::size_t>(i)], axis);
    }
  }
  for (int i = 1; i < operands; ++i) merged.operands[static_cast<std::size_t>(i)].shape = joint;
  return merged;
}

// Returns the problem for index `index` of the outermost axis, without that axis. If keeps_axis is
// set, returns the problem for `rows` indices starting at `index` and keeps the axis.
MapProblem Rows(const MapProblem& p, std::int64_t index, std::int64_t rows, bool keeps_axis) {
  MapProblem part = p;
  for (int i = 0; i < p.program->operands; ++i) {
    View& view = part.operands[static_cast<std::size_t>(i)];
    view.data = static_cast<const char*>(view.data) +
                index * view.strides[0] * static_cast<std::int64_t>(SizeOf(view.dtype));
    view.shape[0] = rows;
    if (keeps_axis) continue;
    --view.shape.rank;
    for (int axis = 0; axis < view.shape.rank; ++axis) {
      view.shape[axis] = view.shape[axis + 1];
      view.strides[static_cast<std::size_t>(axis)] = StrideOf(view, axis + 1);
    }
  }
  part.n = part.operands[0].shape.elements();
  return part;
}

// Divides elements [first, first + count) into boxes and calls f(part) for each, in order: the rest
// of the row in which they begin, whole rows, and the beginning of a last row.
template <class F>
void ForBoxes(const MapProblem& p, std::int64_t first, std::int64_t count, const F& f) {
  const Shape& shape = p.operands[0].shape;
  if (count == 0) return;
  if (shape.rank == 0) return f(p);
  const std::int64_t row = p.n / shape[0];
  const std::int64_t lead = first % row;
  if (lead != 0 || count < row) {
    const std::int64_t part = std::min(count, row - lead);
    ForBoxes(Rows(p, first / row, 1, false), lead, part, f);
    first += part;
    count -= part;
  }
  const std::int64_t rows = count / row;
  if (rows > 0) f(Rows(p, first / row, rows, true));
  first += rows * row;
  count -= rows * row;
  if (count > 0) ForBoxes(Rows(p, first / row, 1, false), 0, count, f);
}

}  // namespace

void LaunchMapRange(const MapProblem& problem, std::int64_t first, std::int64_t count, void* out,
                    Stream& stream) {
  if (count == 0) return;
  MapProblem merged = Merged(problem);
  merged.launch = {};
  const Strategy<MapProblem>& strategy = *Choose(merged, stream.device());
  auto* to = static_cast<char*>(out);
  ForBoxes(merged, first, count, [&](MapProblem part) {
    part.out = to;
    if (!stream.stopped()) strategy.launch(part, stream);
    to += part.n * static_cast<std::int64_t>(SizeOf(part.dtype));
  });
}

}  // namespace tessera
