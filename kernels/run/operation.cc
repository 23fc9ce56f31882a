#include "kernels/run/operation.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"

namespace tessera {
namespace {

// --- Types ---

absl::StatusOr<ResultType> ArrayOf(const absl::StatusOr<ArrayType>& type) {
  if (!type.ok()) return type.status();
  return ResultType{.arrays = {*type}};
}

// Returns an operation's expression with the operands that only the expression uses.
std::optional<MapStage> StageOf(const std::optional<Expression>& expression,
                                absl::Span<const View> with) {
  if (!expression.has_value()) return std::nullopt;
  return MapStage{*expression, with};
}

const MapStage* Get(const std::optional<MapStage>& stage) {
  return stage.has_value() ? &*stage : nullptr;
}

DType OutDType(const MatmulSpec& spec, const View& a) {
  return spec.out_dtype.value_or(MatmulDefaultType(a.dtype));
}

}  // namespace

absl::StatusOr<ResultType> TypeOf(const DotSpec&, absl::Span<const View> x) {
  const absl::StatusOr<ArrayType> same = AddType(x[0], x[1]);
  if (!same.ok()) return same.status();
  return ResultType{.scalar = true,
                    .arrays = {ArrayType{ResultDType(ReduceOp::kSum, x[0].dtype), {}}}};
}

absl::StatusOr<ResultType> TypeOf(const ReduceSpec& spec, absl::Span<const View> x) {
  const std::optional<MapStage> in = StageOf(spec.expression, x.subspan(1));
  if (!spec.axes.empty())
    return ArrayOf(ReduceAxesType(x[0], spec.op, spec.axes, spec.keep_dims, Get(in)));
  ASSIGN_OR_RETURN(const ArrayType type, ReduceType(x[0], spec.op, Get(in)));
  return ResultType{.scalar = true, .is_index = IsArg(spec.op), .arrays = {type}};
}

absl::StatusOr<ResultType> TypeOf(const MatmulSpec& spec, absl::Span<const View> x) {
  const std::optional<MapStage> out_of = StageOf(spec.expression, x.subspan(2));
  return ArrayOf(MatmulType(x[0], x[1], spec.transpose_a, spec.transpose_b, OutDType(spec, x[0]),
                            Get(out_of)));
}

absl::StatusOr<ResultType> TypeOf(const AddSpec&, absl::Span<const View> x) {
  return ArrayOf(AddType(x[0], x[1]));
}

absl::StatusOr<ResultType> TypeOf(const MapSpec& spec, absl::Span<const View> x) {
  return ArrayOf(MapType(x, spec.expression));
}

absl::StatusOr<ResultType> TypeOf(const TopKSpec& spec, absl::Span<const View> x) {
  ASSIGN_OR_RETURN(const ArrayType values, TopKType(x[0], spec.k, spec.axis));
  ASSIGN_OR_RETURN(const ArrayType indices,
                   MakeArrayType(DType::kI64, {values.shape.dims.data(),
                                               static_cast<std::size_t>(values.shape.rank)}));
  return ResultType{.arrays = {values, indices}};
}

// --- Runs ---

absl::StatusOr<ScalarResult> ArrayRun(const absl::StatusOr<Stats>& stats) {
  if (!stats.ok()) return stats.status();
  return ScalarResult{.stats = *stats};
}

absl::StatusOr<ScalarResult> Run(const DotSpec&, const Arguments& w) {
  return RunDot(w.stream, w.x[0], w.x[1], w.options);
}

absl::StatusOr<ScalarResult> Run(const ReduceSpec& spec, const Arguments& w) {
  const std::optional<MapStage> in = StageOf(spec.expression, w.x.subspan(1));
  if (spec.axes.empty()) return RunReduce(w.stream, w.x[0], spec.op, w.options, Get(in));
  return ArrayRun(
      RunReduceAxes(w.stream, w.x[0], spec.op, spec.axes, w.out[0], w.options, Get(in)));
}

absl::StatusOr<ScalarResult> Run(const MatmulSpec& spec, const Arguments& w) {
  const std::optional<MapStage> out_of = StageOf(spec.expression, w.x.subspan(2));
  return ArrayRun(RunMatmul(w.stream, w.x[0], w.x[1], spec.transpose_a, spec.transpose_b,
                            OutDType(spec, w.x[0]), w.out[0], w.options, Get(out_of)));
}

absl::StatusOr<ScalarResult> Run(const AddSpec&, const Arguments& w) {
  return ArrayRun(RunAdd(w.stream, w.x[0], w.x[1], w.out[0], w.options));
}

absl::StatusOr<ScalarResult> Run(const MapSpec& spec, const Arguments& w) {
  return ArrayRun(RunMap(w.stream, w.x, spec.expression, w.out[0], w.options));
}

absl::StatusOr<ScalarResult> Run(const TopKSpec& spec, const Arguments& w) {
  return ArrayRun(
      RunTopK(w.stream, w.x[0], spec.k, spec.axis, spec.smallest, w.out[0], w.out[1], w.options));
}

// --- The least time ---

namespace {

// What a GPU or a CPU core does in a microsecond.
struct Speed {
  double bytes, flops, found;

  // `found` is the number of elements that TopK selects. An H200 takes 1.1 ms to find the best 100
  // elements of each of 65,536 rows of 1024 f32 (2026-11-27).
  explicit Speed(Backend backend)
      : bytes(backend == Backend::kCuda ? 1e6 : 4e3),
        flops(backend == Backend::kCuda ? 5e6 : 5e3),
        found(backend == Backend::kCuda ? 8e3 : 80) {}
};

// Returns the number of operations per element, according to the cost model.
double FlopsOf(const Expression& expression) {
  double flops = 0;
  for (const ExpressionNode& node : expression.nodes()) {
    const MapOpInfo* info = InfoOf(node.op);
    flops += info == nullptr ? 1 : info->flops;
  }
  return flops;
}

// Returns the time of a Map. If operands are broadcast, the result may be larger than each of them.
double MapMicroseconds(const Expression& expression, absl::Span<const View> x, const Speed& speed) {
  std::array<std::int64_t, kMaxRank> extents;  // counted from the last axis
  extents.fill(1);
  double element_bytes = 0;
  for (const View& view : x) {
    for (int i = 0; i < view.shape.rank; ++i) {
      std::int64_t& extent = extents[static_cast<std::size_t>(i)];
      extent = std::max(extent, view.shape[view.shape.rank - 1 - i]);
    }
    element_bytes = std::max(element_bytes, static_cast<double>(SizeOf(view.dtype)));
  }
  double elements = 1;
  for (const std::int64_t extent : extents) elements *= static_cast<double>(extent);
  return elements * element_bytes / speed.bytes + elements * FlopsOf(expression) / speed.flops;
}

// Returns the bytes that an operation reads and, for a Take, writes.
template <class Spec>
double LeastBytes(const Spec&, absl::Span<const View> x) {
  double bytes = 0;
  for (const View& view : x)
    bytes += static_cast<double>(view.elements()) * static_cast<double>(SizeOf(view.dtype));
  return bytes;
}
// A Take reads at most as many bytes of x as it writes, unless x has to be copied first.
double LeastBytes(const TakeSpec& spec, absl::Span<const View> x) {
  const absl::StatusOr<ResultType> type = TypeOf(spec, x);
  return LeastBytes(AddSpec(), x[0].contiguous() ? x.subspan(1) : x) +
         (type.ok() ? 2 * static_cast<double>(type->arrays[0].bytes()) : 0);
}

// A Histogram clears and writes its counters.
double LeastBytes(const HistogramSpec& spec, absl::Span<const View> x) {
  const std::int64_t bins = x.size() > 1 ? x[1].elements() : spec.bins;
  return LeastBytes(AddSpec(), x) + 2.0 * sizeof(std::int64_t) * static_cast<double>(bins);
}

// A Select reads only the elements of x that its mask selects.
double LeastBytes(const SelectSpec&, absl::Span<const View> x) {
  return LeastBytes(AddSpec(), x.subspan(1));
}

// Returns the microseconds that an operation takes in addition to reading its operands.
template <class Spec>
double More(const Spec&, absl::Span<const View>, const Speed&) {
  return 0;
}
double More(const ReduceSpec& spec, absl::Span<const View> x, const Speed& speed) {
  return spec.expression.has_value() ? MapMicroseconds(*spec.expression, x, speed) : 0;
}
double More(const ScanSpec& spec, absl::Span<const View> x, const Speed& speed) {
  return spec.expression.has_value() ? MapMicroseconds(*spec.expression, x, speed) : 0;
}
double More(const SortSpec& spec, absl::Span<const View> x, const Speed& speed) {
  constexpr double kFlops = 20;  // per element
  const double map = spec.expression.has_value() ? MapMicroseconds(*spec.expression, x, speed) : 0;
  return map + static_cast<double>(x[0].elements()) * kFlops / speed.flops;
}
double More(const SumByLabelSpec& spec, absl::Span<const View> x, const Speed& speed) {
  constexpr double kFlops = 20;  // per label, to sort it
  const double rows = static_cast<double>(x[1].elements());
  const double columns = static_cast<double>(x[0].elements()) / std::max(1.0, rows);
  return columns * static_cast<double>(spec.length) * 2 / speed.bytes + rows * kFlops / speed.flops;
}
double More(const SearchSortedSpec&, absl::Span<const View> x, const Speed& speed) {
  const double keys = static_cast<double>(x[1].elements());
  const double steps = 1 + std::log2(1 + static_cast<double>(x[0].elements()));
  return keys * (sizeof(std::int64_t) / speed.bytes + steps / speed.flops);
}
// Most functions take at least n / 3 operations for each element of x.
double More(const LinalgSpec&, absl::Span<const View> x, const Speed& speed) {
  const Shape& shape = x[0].shape;
  const double n = shape.rank == 0 ? 0 : static_cast<double>(shape[shape.rank - 1]);
  return static_cast<double>(x[0].elements()) * n / 3 / speed.flops;
}
double More(const MapSpec& spec, absl::Span<const View> x, const Speed& speed) {
  return MapMicroseconds(spec.expression, x, speed);
}
double More(const MatmulSpec& spec, absl::Span<const View> x, const Speed& speed) {
  const absl::StatusOr<ArrayType> product =
      MatmulType(x[0], x[1], spec.transpose_a, spec.transpose_b, OutDType(spec, x[0]));
  if (!product.ok()) return 0;
  const Shape& a = x[0].shape;
  const auto k = static_cast<double>(a[a.rank - (spec.transpose_a && a.rank > 1 ? 2 : 1)]);
  const double flops = spec.expression.has_value() ? FlopsOf(*spec.expression) : 0;
  return static_cast<double>(product->shape.elements()) * (2 * k + 8 + flops) / speed.flops;
}
double More(const TopKSpec& spec, absl::Span<const View> x, const Speed& speed) {
  const absl::StatusOr<ArrayType> type = TopKType(x[0], spec.k, spec.axis);
  return type.ok() ? static_cast<double>(type->shape.elements()) / speed.found : 0;
}

}  // namespace

absl::StatusOr<ResultType> TypeOf(const OperationSpec& spec, absl::Span<const View> x) {
  return std::visit([&](const auto& one) { return TypeOf(one, x); }, spec);
}

absl::StatusOr<ScalarResult> Run(const OperationSpec& spec, Stream& stream,
                                 absl::Span<const View> x, absl::Span<const Output> out,
                                 const RunOptions& options) {
  const Arguments arguments{stream, x, out, options};
  return std::visit([&](const auto& one) { return Run(one, arguments); }, spec);
}

absl::Status OfOperand(std::string_view name, const absl::Status& status) {
  const std::string operand(name);
  absl::Status named(status.code(),
                     absl::StrCat("operand ", operand, ": ", std::string(status.message())));
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { named.SetPayload(url, payload); });
  SetErrorMetadata(named, "operand", operand);
  return named;
}

absl::Status BadOutput(std::uint32_t output) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPERAND",
                   "the operand's source does not have an array with that number",
                   {{"field", "output"}, {"value", absl::StrCat(output)}});
}

bool FitsBatch(const OperationSpec& spec, const ResultType& result, absl::Span<const View> x) {
  const auto* reduce = std::get_if<ReduceSpec>(&spec);
  return (std::holds_alternative<DotSpec>(spec) ||
          (reduce != nullptr && result.scalar && !reduce->expression.has_value())) &&
         x[0].elements() > 0 &&
         std::all_of(x.begin(), x.end(), [](const View& view) { return FitsBatch(view); });
}

bool SharesBatch(const OperationSpec& a, const View& of_a, const OperationSpec& b,
                 const View& of_b) {
  if (a.index() != b.index() || of_a.dtype != of_b.dtype) return false;
  const auto* reduce = std::get_if<ReduceSpec>(&a);
  return reduce == nullptr || reduce->op == std::get<ReduceSpec>(b).op;
}

absl::Status RunBatch(const OperationSpec& spec, Stream& stream, BatchOperand operand,
                      absl::Span<ScalarResult> results) {
  if (const auto* reduce = std::get_if<ReduceSpec>(&spec); reduce != nullptr)
    return RunReduceBatch(stream, reduce->op, operand, results);
  return RunDotBatch(stream, operand, results);
}

double LeastMicroseconds(const OperationSpec& spec, absl::Span<const View> x, Backend backend) {
  const Speed speed(backend);
  return std::visit(
      [&](const auto& one) { return LeastBytes(one, x) / speed.bytes + More(one, x, speed); },
      spec);
}

}  // namespace tessera
