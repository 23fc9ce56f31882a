// Divides one operation among the devices over which its operands are sharded. Each device computes
// the parts whose first byte it holds. The parts depend only on the problem (see below), so every
// assignment of parts to devices gives the same bits.
//
//   Dot, Reduce                    a chunk of the fixed tree
//   Map, Reduce along inner axes   an index of the outermost axis
//   TopK                           the rows of one index of the preceding axes
//   Add                            an element
//   WindowSum                      kWindowPart results
//   Matmul                         some rows of c
//
// A reduction along the outermost axis has no such parts, because each result depends on all
// shards. If the axis is long, each device folds some slabs of rows (axis_slabs.h). Otherwise every
// device folds the same number of columns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kernels/base/status_macros.h"
#include "kernels/compute.h"
#include "kernels/same_bits/fixed_tree.h"
#include "kernels/team/axis_slabs.h"
#include "kernels/team/matmul_shares.h"

namespace tessera {

// A division of the array at `data` into `parts` parts of part_bytes each. If `parts` is 0, the
// problem cannot be shared out.
struct Division {
  const void* data = nullptr;
  std::int64_t part_bytes = 1;
  std::int64_t parts = 0;
  // Whether the parts are computed as a share even if a single device has all of them, because the
  // bits would differ otherwise.
  bool also_alone = false;
  // Whether each part extends over all shards. If so, each device that holds some of the array
  // takes the same number of parts, and part_bytes is the size of a part on all shards together.
  bool across = false;
};

// Less work than this is not shared out, because a GPU would finish it before the other devices
// have begun. The first limit counts bytes of an operand, and the second multiply-adds of a
// product.
inline constexpr std::int64_t kLeastSharedBytes = std::int64_t{64} << 20;
inline constexpr double kLeastSharedProduct = 0x1p32;

inline bool IsIn(const Team& team, const void* data) {
  const auto* begin = static_cast<const char*>(team.data());
  return data >= begin && data < begin + team.shards().back().end;
}

inline void* Advanced(void* data, std::int64_t bytes) {
  return data == nullptr ? nullptr : static_cast<char*>(data) + bytes;
}
inline const void* Advanced(const void* data, std::int64_t bytes) {
  return data == nullptr ? nullptr : static_cast<const char*>(data) + bytes;
}

// Whether the strategy itself launches all shares of such a problem.
template <class Problem>
bool LaunchesShares(const Problem&, const Strategy<Problem>& strategy) {
  return strategy.shared.launch != nullptr;
}
inline bool LaunchesShares(const ReduceAxesProblem& p,
                           const Strategy<ReduceAxesProblem>& strategy) {
  return strategy.shared.launch != nullptr && SlabRows(p) > 0;
}

// --- Divisions of problems ---

template <class Problem>
Division DivisionOf(const Problem&, const Strategy<Problem>&, const Team&) {
  return {};
}

// Whether the rows of a product are shared out, so that each device multiplies the rows of a that
// it holds. The decision depends only on the operands, so the strategy and the bits are the same
// for any number of devices. A stack is computed by one device.
inline bool SharesRows(const MatmulProblem& p, Backend backend, const Team& team) {
  if (p.stack != 1 || p.a == nullptr || p.b == nullptr || p.transpose_a || !IsIn(team, p.a))
    return false;
  return backend == Backend::kCpu ||
         static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k) >=
             kLeastSharedProduct;
}

// Returns the strategy for a product whose rows are shared out. `alone` is the strategy that is
// chosen for one device. Returns `alone` if its work can be shared out. Otherwise returns the
// fastest strategy whose work can be shared out and whose error bound is not larger.
const Strategy<MatmulProblem>* ChooseShared(const MatmulProblem& problem,
                                            const Strategy<MatmulProblem>& alone,
                                            const Device& device);
// Like ChooseShared, but considers only strategies that need almost no scratch memory.
const Strategy<MatmulProblem>* ChooseSharedInPlace(const MatmulProblem& problem,
                                                   const Device& device);

// Returns the strategy for a request that names none: `alone` or its replacement.
template <class Problem>
const Strategy<Problem>* ForTeam(const Problem&, const Strategy<Problem>& alone, const Device&,
                                 const Team&) {
  return &alone;
}
inline const Strategy<MatmulProblem>* ForTeam(const MatmulProblem& p,
                                              const Strategy<MatmulProblem>& alone,
                                              const Device& device, const Team& team) {
  return SharesRows(p, device.info().backend, team) ? ChooseShared(p, alone, device) : &alone;
}
template <class Problem>
const Strategy<Problem>* ForTeamInPlace(const Problem& p, const Device& device, const Team*) {
  return ChooseInPlace(p, device);
}
inline const Strategy<MatmulProblem>* ForTeamInPlace(const MatmulProblem& p, const Device& device,
                                                     const Team* team) {
  return team != nullptr && SharesRows(p, device.info().backend, *team)
             ? ChooseSharedInPlace(p, device)
             : ChooseInPlace(p, device);
}

// Returns the outermost axis with an extent above 1, or the last axis.
inline int AxisOf(const MapProblem& p) {
  const Shape& shape = p.operands[0].shape;
  int axis = 0;
  while (axis < shape.rank - 1 && shape[axis] == 1) ++axis;
  return axis;
}
inline Division MapDivision(const MapProblem& p, const Team& team) {
  const int axis = AxisOf(p);
  for (const View& x : p.operands) {
    if (x.data == nullptr || axis >= x.shape.rank || !IsIn(team, x.data)) continue;
    const std::int64_t stride = x.strides[static_cast<std::size_t>(axis)];
    if (stride > 0)
      return {x.data, stride * static_cast<std::int64_t>(SizeOf(x.dtype)), x.shape[axis]};
  }
  return {};
}
inline Division DivisionOf(const MapProblem& p, const Strategy<MapProblem>&, const Team& team) {
  return MapDivision(p, team);
}
// Divides the same memory into `parts` parts of about the same number of bytes.
inline Division InParts(const Division& division, std::int64_t parts) {
  const std::int64_t bytes = division.parts * division.part_bytes;
  if (bytes == 0) return {};
  return {division.data, std::max<std::int64_t>(1, bytes / parts), parts};
}

inline Division TreeDivision(const void* data, std::int64_t n, DType dtype) {
  const auto size = static_cast<std::int64_t>(SizeOf(dtype));
  const Tree tree = FixedTree(n, size);
  return {data, tree.chunk * size, tree.chunks};
}
inline Division DivisionOf(const DotProblem& p, const Strategy<DotProblem>& strategy,
                           const Team& team) {
  // p.a and p.b are null for operands with gaps.
  if (strategy.shared.launch == nullptr || p.a == nullptr || p.b == nullptr) return {};
  return TreeDivision(IsIn(team, p.a) ? p.a : p.b, p.n, p.dtype);
}
inline Division DivisionOf(const ReduceProblem& p, const Strategy<ReduceProblem>& strategy,
                           const Team& team) {
  if (strategy.shared.launch == nullptr) return {};
  if (p.map != nullptr) {
    const Tree tree = FixedTree(p.n, static_cast<std::int64_t>(SizeOf(p.dtype)));
    return InParts(MapDivision(*p.map, team), tree.chunks);
  }
  if (p.x == nullptr) return {};
  return TreeDivision(p.x, p.n, p.dtype);
}
// The number of columns in a part. It is a whole number of vectors of any element type, and of
// cache lines.
inline constexpr std::int64_t kPartColumns = 128;
inline Division DivisionOf(const ReduceAxesProblem& p, const Strategy<ReduceAxesProblem>& strategy,
                           const Team&) {
  if (p.x == nullptr) return {};
  // A single row is not divided into columns if it is a share of a larger problem.
  if (p.outer == 1 && p.outer_of_all > 1) return {};
  const std::int64_t row = p.inner * static_cast<std::int64_t>(SizeOf(p.dtype));
  const std::int64_t bytes = p.length * row;
  if (p.outer > 1) return {p.x, bytes, p.outer};
  if (LaunchesShares(p, strategy)) {
    // A slab is assigned to the device that holds its middle, so that little of the slab is on
    // other devices.
    const std::int64_t slab = SlabRows(p) * row;
    return {Advanced(p.x, slab / 2), slab, SlabCount(p)};
  }
  const std::int64_t parts = (p.inner + kPartColumns - 1) / kPartColumns;
  return {p.x, bytes / parts, parts, /*also_alone=*/false, /*across=*/true};
}

inline Division DivisionOf(const MatmulProblem& p, const Strategy<MatmulProblem>& strategy,
                           const Team& team) {
  if (strategy.shared.launch == nullptr || !SharesRows(p, strategy.backend, team)) return {};
  const std::int64_t rows = MatmulPartRows(strategy.backend);
  return {p.a, rows * p.lda * static_cast<std::int64_t>(SizeOf(p.dtype)), (p.m + rows - 1) / rows,
          /*also_alone=*/true};
}

inline Division DivisionOf(const AddProblem& p, const Strategy<AddProblem>&, const Team& team) {
  const void* const data = IsIn(team, p.a) ? p.a : p.b;
  if (!IsIn(team, data)) return {};
  return {data, static_cast<std::int64_t>(SizeOf(p.dtype)), p.n};
}

// A part is kWindowPart results. A device reads the elements beyond both ends of its parts from
// other devices. The problem is not divided if a window is wider than a device's share of the
// array, because each device would then read most of the array.
inline Division DivisionOf(const WindowSumProblem& p, const Strategy<WindowSumProblem>&,
                           const Team& team) {
  if (p.x == nullptr || 2 * p.radius + 1 > p.n / std::ssize(team.shards())) return {};
  return {p.x, kWindowPart * static_cast<std::int64_t>(SizeOf(p.dtype)),
          (p.n + kWindowPart - 1) / kWindowPart};
}

// A part consists of the rows that belong to one index of the axes before the searched axis; these
// rows are adjacent.
inline Division DivisionOf(const TopKProblem& p, const Strategy<TopKProblem>&, const Team&) {
  if (p.x == nullptr) return {};
  return {p.x, p.inner * p.n * static_cast<std::int64_t>(SizeOf(p.dtype)), p.rows / p.inner};
}

// A part consists of the lines that belong to one index of the axes before the scanned axis.
inline Division DivisionOf(const ScanProblem& p, const Strategy<ScanProblem>&, const Team&) {
  if (p.x == nullptr || p.outer == 1) return {};
  return {p.x, p.length * p.inner * static_cast<std::int64_t>(SizeOf(p.dtype)), p.outer};
}

// A part is a row.
inline Division DivisionOf(const SortProblem& p, const Strategy<SortProblem>&, const Team&) {
  if (p.x == nullptr || p.rows == 1) return {};
  return {p.x, p.n * static_cast<std::int64_t>(SizeOf(p.dtype)), p.rows};
}

// Indices may select any element, so the location of x does not say which device should read it.
inline Division DivisionOf(const TakeProblem&, const Strategy<TakeProblem>&, const Team&) {
  return {};
}

// The place of a part's elements in the result depends on the mask of all earlier parts.
inline Division DivisionOf(const SelectProblem&, const Strategy<SelectProblem>&, const Team&) {
  return {};
}

// The counts of several devices would have to be added up.
inline Division DivisionOf(const HistogramProblem&, const Strategy<HistogramProblem>&,
                           const Team&) {
  return {};
}

// Keys may be anywhere in x.
inline Division DivisionOf(const SearchSortedProblem&, const Strategy<SearchSortedProblem>&,
                           const Team&) {
  return {};
}

// Equal labels may be anywhere in x, and the sums of several devices would have to be added up.
inline Division DivisionOf(const SumByLabelProblem&, const Strategy<SumByLabelProblem>&,
                           const Team&) {
  return {};
}

// One device computes a whole stack.
inline Division DivisionOf(const LinalgProblem&, const Strategy<LinalgProblem>&, const Team&) {
  return {};
}

// --- A share as a problem ---

// Returns the problem of the indices [share.first, share.end) of outer.
inline ReduceAxesProblem RowsOf(const ReduceAxesProblem& p, const TeamShare& share) {
  ReduceAxesProblem part = p;
  part.outer = share.end - share.first;
  part.outer_of_all = std::max(p.outer, p.outer_of_all);
  const std::int64_t outputs = share.first * p.inner;
  part.x = Advanced(p.x, outputs * p.length * static_cast<std::int64_t>(SizeOf(p.dtype)));
  part.out =
      Advanced(p.out, outputs * static_cast<std::int64_t>(SizeOf(ResultDType(p.op, p.dtype))));
  return part;
}

inline ReduceAxesProblem PartOf(const ReduceAxesProblem& p, const TeamShare& share) {
  if (p.outer > 1) return RowsOf(p, share);
  ReduceAxesProblem part = p;
  const std::int64_t first = share.first * kPartColumns;
  part.inner = std::min(p.inner, share.end * kPartColumns) - first;
  part.inner_of_all = p.inner;
  part.x = Advanced(p.x, first * static_cast<std::int64_t>(SizeOf(p.dtype)));
  part.out = Advanced(p.out, first * static_cast<std::int64_t>(SizeOf(ResultDType(p.op, p.dtype))));
  return part;
}

inline WindowSumProblem PartOf(const WindowSumProblem& p, const TeamShare& share) {
  WindowSumProblem part = p;
  part.first = share.first * kWindowPart;
  part.end = std::min(p.n, share.end * kWindowPart);
  const DType dtype = ResultDType(ReduceOp::kSum, p.dtype);
  part.out = Advanced(p.out, part.first * static_cast<std::int64_t>(SizeOf(dtype)));
  return part;
}

inline TopKProblem PartOf(const TopKProblem& p, const TeamShare& share) {
  TopKProblem part = p;
  const std::int64_t rows = share.first * p.inner;
  part.rows = (share.end - share.first) * p.inner;
  part.x = Advanced(p.x, rows * p.n * static_cast<std::int64_t>(SizeOf(p.dtype)));
  part.values = Advanced(p.values, rows * p.k * static_cast<std::int64_t>(SizeOf(p.dtype)));
  part.indices = p.indices == nullptr ? nullptr : p.indices + rows * p.k;
  return part;
}

inline ScanProblem PartOf(const ScanProblem& p, const TeamShare& share) {
  ScanProblem part = p;
  const std::int64_t first = share.first * p.length * p.inner;
  part.outer = share.end - share.first;
  part.x = Advanced(p.x, first * static_cast<std::int64_t>(SizeOf(p.dtype)));
  part.out = Advanced(p.out, first * static_cast<std::int64_t>(SizeOf(ResultDType(p.op, p.dtype))));
  return part;
}

inline SortProblem PartOf(const SortProblem& p, const TeamShare& share) {
  SortProblem part = p;
  const std::int64_t first = share.first * p.n;
  part.rows = share.end - share.first;
  part.x = Advanced(p.x, first * static_cast<std::int64_t>(SizeOf(p.dtype)));
  part.values = Advanced(p.values, first * static_cast<std::int64_t>(SizeOf(p.dtype)));
  part.indices = p.indices == nullptr ? nullptr : p.indices + first;
  return part;
}

inline AddProblem PartOf(const AddProblem& p, const TeamShare& share) {
  AddProblem part = p;
  const std::int64_t offset = share.first * static_cast<std::int64_t>(SizeOf(p.dtype));
  part.n = share.end - share.first;
  part.a = Advanced(p.a, offset);
  part.b = Advanced(p.b, offset);
  part.out = Advanced(p.out, offset);
  return part;
}

inline MapProblem PartOf(const MapProblem& p, const TeamShare& share) {
  MapProblem part = p;
  const int axis = AxisOf(p);
  const std::int64_t step = p.n / p.operands[0].shape[axis];
  for (View& x : part.operands) {
    if (axis >= x.shape.rank) continue;  // there is no such operand
    x.data = Advanced(x.data, share.first * x.strides[static_cast<std::size_t>(axis)] *
                                  static_cast<std::int64_t>(SizeOf(x.dtype)));
    x.shape[axis] = share.end - share.first;
  }
  part.n = (share.end - share.first) * step;
  part.out = Advanced(p.out, share.first * step * static_cast<std::int64_t>(SizeOf(p.dtype)));
  return part;
}

// --- Sharing out ---

// Returns the share of each shard, without its stream. Returns none if only one device would have
// work or the problem is too small.
inline std::vector<TeamShare> SharesByShard(const Team& team, const Division& division,
                                            Backend backend) {
  std::vector<TeamShare> shares;
  const std::int64_t bytes = division.parts * division.part_bytes;
  if (bytes == 0) return shares;
  if (!division.also_alone && backend == Backend::kCuda && bytes < kLeastSharedBytes) return shares;
  const std::int64_t offset =
      static_cast<const char*>(division.data) - static_cast<const char*>(team.data());
  const auto first_behind = [&](std::uint64_t boundary) {
    const std::int64_t distance = static_cast<std::int64_t>(boundary) - offset;
    if (distance <= 0) return std::int64_t{0};
    return std::min(division.parts,
                    distance / division.part_bytes + (distance % division.part_bytes != 0));
  };
  const auto has_some = [&](const Shard& shard) {
    const auto begin = static_cast<std::int64_t>(shard.begin);
    const auto end = static_cast<std::int64_t>(shard.end);
    return begin < offset + bytes && end > offset;
  };
  const std::int64_t holders = std::count_if(team.shards().begin(), team.shards().end(), has_some);
  std::int64_t holder = 0;
  int workers = 0;
  for (const Shard& shard : team.shards()) {
    if (division.across) {
      const std::int64_t next = holder + has_some(shard);
      shares.push_back(
          {nullptr, division.parts * holder / holders, division.parts * next / holders});
      holder = next;
    } else {
      shares.push_back({nullptr, first_behind(shard.begin), first_behind(shard.end)});
    }
    workers += shares.back().first < shares.back().end;
  }
  // The parts of a view may reach past the end of the last shard.
  shares.back().end = division.parts;
  if (workers < 2) shares.clear();
  return shares;
}

// Returns at least two shares, or none if only one device would have work or the problem is too
// small. If also_alone is set, a single device gets one share.
inline absl::StatusOr<std::vector<TeamShare>> ShareOut(Team& team, const Division& division,
                                                       Stream& own) {
  std::vector<TeamShare> shares = SharesByShard(team, division, own.device().info().backend);
  if (shares.empty()) {
    if (division.also_alone && division.parts * division.part_bytes != 0)
      shares.push_back({&own, 0, division.parts});
    return shares;
  }
  ASSIGN_OR_RETURN(std::vector<Stream*> streams, team.Assemble(own));
  for (std::size_t i = 0; i < shares.size(); ++i) shares[i].stream = streams[i];
  std::erase_if(shares, [](const TeamShare& share) { return share.first >= share.end; });
  return shares;
}

// Waits for the shares of other devices, and attributes errors to the devices on which they occur.
inline void AwaitOthers(const std::vector<TeamShare>& shares, const Stream& own) {
  for (const TeamShare& share : shares) {
    if (share.stream != &own) OnDeviceOf(*share.stream, [&] { share.stream->Synchronize(); });
  }
}

// Enqueues all shares or, for a wide launch, the shares that have overflowed. They run after all
// earlier work on `own`, and before all later work on it. `launch` launches one share, unless the
// strategy launches all shares itself.
template <class Problem>
void LaunchShares(const Problem& problem, const Strategy<Problem>& strategy,
                  const std::vector<TeamShare>& shares, Stream& own, bool wide,
                  absl::FunctionRef<void(const TeamShare& share, const Problem& part)> launch) {
  for (const TeamShare& share : shares) {
    if (share.stream != &own) OnDeviceOf(*share.stream, [&] { share.stream->WaitFor(own); });
  }
  if (LaunchesShares(problem, strategy)) {
    (wide ? strategy.shared.launch_wide : strategy.shared.launch)(problem, shares, own);
  } else if constexpr (requires { PartOf(problem, shares.front()); }) {
    for (const TeamShare& share : shares) {
      OnDeviceOf(*share.stream, [&] {
        const auto part = PartOf(problem, share);
        if (wide && !strategy.wide.left_range(part, *share.stream)) return;
        launch(share, part);
      });
    }
  }
  for (const TeamShare& share : shares)
    if (share.stream != &own) own.WaitFor(*share.stream);
}

// Whether any share has overflowed. REQUIRES: all shares have been synchronised.
template <class Problem>
bool LeftRange(const Problem& problem, const Strategy<Problem>& strategy,
               const std::vector<TeamShare>& shares, Stream& own) {
  if (strategy.wide.left_range == nullptr) return false;
  if constexpr (requires { PartOf(problem, TeamShare{}); }) {
    if (!shares.empty() && !LaunchesShares(problem, strategy)) {
      return std::any_of(shares.begin(), shares.end(), [&](const TeamShare& share) {
        return strategy.wide.left_range(PartOf(problem, share), *share.stream);
      });
    }
  }
  return strategy.wide.left_range(problem, own);
}

}  // namespace tessera
