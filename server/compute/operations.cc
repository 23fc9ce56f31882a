#include "server/compute/operations.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/problem/map.h"
#include "kernels/run/product_top_k.h"
#include "server/rpc/convert.h"

namespace tessera {
namespace {

absl::StatusOr<ResultType> ArrayOf(const absl::StatusOr<ArrayType>& type) {
  if (!type.ok()) return type.status();
  return ResultType{.scalar = false, .arrays = {*type}};
}

absl::StatusOr<ScalarResult> ArrayRun(const absl::StatusOr<Stats>& stats) {
  if (!stats.ok()) return stats.status();
  return ScalarResult{.stats = *stats};
}

absl::StatusOr<DType> OutDType(const v1::MatmulRequest& request, const View& a) {
  if (request.out_dtype() == v1::DTYPE_UNSPECIFIED) return a.dtype;
  return FromProto(request.out_dtype(), "out_dtype");
}

// --- Expressions ---

constexpr std::array<std::string_view, kMostOperands> kMapOperandNames = {
    "operands[0]", "operands[1]", "operands[2]", "operands[3]",
    "operands[4]", "operands[5]", "operands[6]", "operands[7]"};
constexpr std::array<std::string_view, kMostOperands - 1> kWithNames = {
    "with[0]", "with[1]", "with[2]", "with[3]", "with[4]", "with[5]", "with[6]"};

absl::Status BadNode(int index, std::string_view what, int number) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_EXPRESSION",
                   absl::StrCat("node ", index, ": there is no ", Absl(what), " ", number),
                   {{"node", absl::StrCat(index)}});
}

absl::StatusOr<std::optional<DType>> NodeDType(const v1::Expression::Node& node, int index) {
  if (node.dtype() == v1::DTYPE_UNSPECIFIED) return std::nullopt;
  absl::StatusOr<DType> dtype = FromProto(node.dtype(), "expression.nodes.dtype");
  if (dtype.ok()) return *dtype;
  return BadNode(index, "element type", node.dtype());
}

absl::StatusOr<ExpressionNode> ToNode(const v1::Expression::Node& node, int index) {
  using Kind = ExpressionNode::Kind;
  absl::StatusOr<std::optional<DType>> dtype = NodeDType(node, index);
  if (!dtype.ok()) return dtype.status();
  ExpressionNode out;
  out.dtype = *dtype;
  switch (node.value_case()) {
    case v1::Expression::Node::kOperand:
      out.kind = Kind::kOperand;
      out.operand = node.operand();
      break;
    case v1::Expression::Node::kReal:
      out.kind = Kind::kReal;
      out.real = node.real();
      break;
    case v1::Expression::Node::kInteger:
      out.kind = Kind::kInteger;
      out.integer = node.integer();
      break;
    case v1::Expression::Node::kBoolean:
      out.kind = Kind::kBoolean;
      out.boolean = node.boolean();
      break;
    case v1::Expression::Node::kOp:
      out.kind = Kind::kOperation;
      // MapOp is narrower, so a value that this server does not know could turn into a known one.
      if (!v1::MapOp_IsValid(node.op())) return BadNode(index, "operation", node.op());
      out.op = static_cast<MapOp>(node.op());
      break;
    case v1::Expression::Node::VALUE_NOT_SET:
      break;
  }
  // One argument too many is enough to be refused.
  const int arguments = std::min(node.args_size(), kMostArguments + 1);
  out.args.assign(node.args().begin(), node.args().begin() + arguments);
  return out;
}

absl::StatusOr<std::vector<ExpressionNode>> ToNodes(const v1::Expression& expression) {
  std::vector<ExpressionNode> nodes;
  const int count = std::min(expression.nodes_size(), kMostNodes + 1);
  for (int i = 0; i < count; ++i) {
    absl::StatusOr<ExpressionNode> node = ToNode(expression.nodes(i), i);
    if (!node.ok()) return node.status();
    nodes.push_back(*std::move(node));
  }
  return nodes;
}

absl::Status BadCount(std::string_view field, int least, int most) {
  return MakeError(
      absl::StatusCode::kInvalidArgument, "BAD_EXPRESSION",
      absl::StrCat("'", Absl(field), "' must have from ", least, " to ", most, " entries"),
      {{"field", std::string(field)}, {"limit", absl::StrCat(most)}});
}

// Checks the number of nodes of an expression, and of operands in this field of the request. If a
// request has too many of either, its parser leaves none of the other
// (server/compute/map_message.h).
absl::Status CheckCounts(const v1::Expression& expression, std::string_view field, int operands,
                         int least, int most) {
  const int nodes = expression.nodes_size();
  if (operands > most || (operands < least && nodes <= kMostNodes))
    return BadCount(field, least, most);
  if (nodes < 1 || nodes > kMostNodes) return BadCount("expression.nodes", 1, kMostNodes);
  return absl::OkStatus();
}

absl::Status CheckCounts(const v1::MapRequest& request) {
  return CheckCounts(request.expression(), "operands", request.operands_size(), 1, kMostOperands);
}

// For a Reduce or a Matmul, which need no expression.
template <class Request>
absl::Status CheckCounts(const Request& request) {
  if (!request.has_expression() && request.with().empty()) return absl::OkStatus();
  return CheckCounts(request.expression(), "with", request.with_size(), 0, kMostOperands - 1);
}

// Returns the operands of an operation and the additional operands of its expression, or none for a
// request that CheckCounts refuses.
template <class Request>
NamedOperands OperandsWith(const Request& request, NamedOperands operands) {
  if (!CheckCounts(request).ok()) return {};
  for (int i = 0; i < request.with_size(); ++i)
    operands.push_back({kWithNames[static_cast<std::size_t>(i)], &request.with(i)});
  return operands;
}

// The expression of a Reduce or a Matmul.
struct Stage {
  std::vector<ExpressionNode> nodes;
  std::optional<MapStage> stage;  // of these nodes; absent: the request has no expression

  const MapStage* get() const { return stage.has_value() ? &*stage : nullptr; }
};

// with: the views of request.with.
template <class Request>
absl::StatusOr<Stage> StageOf(const Request& request, absl::Span<const View> with) {
  if (!request.has_expression() && with.empty()) return Stage();
  absl::StatusOr<std::vector<ExpressionNode>> nodes = ToNodes(request.expression());
  if (!nodes.ok()) return nodes.status();
  Stage stage{*std::move(nodes), {}};
  stage.stage = MapStage{stage.nodes, with};
  return stage;
}

void SetScalar(const ScalarResult& result, v1::Scalar* out) {
  if (result.integer) {
    out->set_integer(result.value.integer);
  } else {
    out->set_real(result.value.real);
  }
}

}  // namespace

// --- Dot ---

NamedOperands OperandsOf(const v1::DotRequest& request) {
  return {{"a", &request.a()}, {"b", &request.b()}};
}

absl::StatusOr<ResultType> ResultTypeOf(const v1::DotRequest&, absl::Span<const View> x) {
  const absl::StatusOr<ArrayType> same = AddType(x[0], x[1]);
  if (!same.ok()) return same.status();
  return ResultType{.scalar = true,
                    .arrays = {ArrayType{ResultDType(ReduceOp::kSum, x[0].dtype), {}}}};
}

absl::StatusOr<ScalarResult> Run(const v1::DotRequest&, Stream& stream, absl::Span<const View> x,
                                 Outputs, const RunOptions& options) {
  return RunDot(stream, x[0], x[1], options);
}

void SetValue(const v1::DotRequest&, const ScalarResult& result, v1::DotResponse& response) {
  SetScalar(result, response.mutable_value());
}

// --- Reduce ---

NamedOperands OperandsOf(const v1::ReduceRequest& request) {
  return OperandsWith(request, {{"x", &request.x()}});
}

absl::StatusOr<ResultType> ResultTypeOf(const v1::ReduceRequest& request,
                                        absl::Span<const View> x) {
  if (absl::Status status = CheckCounts(request); !status.ok()) return status;
  const absl::StatusOr<ReduceOp> op = FromProto(request.op());
  if (!op.ok()) return op.status();
  const absl::StatusOr<Stage> in = StageOf(request, x.subspan(1));
  if (!in.ok()) return in.status();
  if (request.axes_size() > 0) {
    return ArrayOf(
        ReduceAxesType(x[0], *op, ToSpan(request.axes()), request.keep_dims(), in->get()));
  }
  if (request.result().has_buffer() || request.result().has_scratch()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_AXES",
                     "a result buffer needs axes; name all of them to fold all",
                     {{"field", "axes"}});
  }
  const absl::StatusOr<ArrayType> type = ReduceType(x[0], *op, in->get());
  if (!type.ok()) return type.status();
  return ResultType{.scalar = true, .arrays = {*type}};
}

absl::StatusOr<ScalarResult> Run(const v1::ReduceRequest& request, Stream& stream,
                                 absl::Span<const View> x, Outputs out, const RunOptions& options) {
  const absl::StatusOr<ReduceOp> op = FromProto(request.op());
  if (!op.ok()) return op.status();
  const absl::StatusOr<Stage> in = StageOf(request, x.subspan(1));
  if (!in.ok()) return in.status();
  if (request.axes_size() == 0) return RunReduce(stream, x[0], *op, options, in->get());
  return ArrayRun(
      RunReduceAxes(stream, x[0], *op, ToSpan(request.axes()), out[0], options, in->get()));
}

void SetValue(const v1::ReduceRequest& request, const ScalarResult& result,
              v1::ReduceResponse& response) {
  SetScalar(result, response.mutable_value());
  if (request.op() == v1::REDUCE_OP_ARGMIN || request.op() == v1::REDUCE_OP_ARGMAX)
    response.set_index(result.value.index);
}

// --- Matmul ---

NamedOperands OperandsOf(const v1::MatmulRequest& request) {
  return OperandsWith(request, {{"a", &request.a()}, {"b", &request.b()}});
}

absl::StatusOr<ResultType> ResultTypeOf(const v1::MatmulRequest& request,
                                        absl::Span<const View> x) {
  if (absl::Status status = CheckCounts(request); !status.ok()) return status;
  const absl::StatusOr<DType> out = OutDType(request, x[0]);
  if (!out.ok()) return out.status();
  const absl::StatusOr<Stage> out_of = StageOf(request, x.subspan(2));
  if (!out_of.ok()) return out_of.status();
  return ArrayOf(
      MatmulType(x[0], x[1], request.transpose_a(), request.transpose_b(), *out, out_of->get()));
}

absl::StatusOr<ScalarResult> Run(const v1::MatmulRequest& request, Stream& stream,
                                 absl::Span<const View> x, Outputs out, const RunOptions& options) {
  const absl::StatusOr<DType> dtype = OutDType(request, x[0]);
  if (!dtype.ok()) return dtype.status();
  const absl::StatusOr<Stage> out_of = StageOf(request, x.subspan(2));
  if (!out_of.ok()) return out_of.status();
  return ArrayRun(RunMatmul(stream, x[0], x[1], request.transpose_a(), request.transpose_b(),
                            *dtype, out[0], options, out_of->get()));
}

// --- Add ---

NamedOperands OperandsOf(const v1::AddRequest& request) {
  return {{"a", &request.a()}, {"b", &request.b()}};
}

absl::StatusOr<ResultType> ResultTypeOf(const v1::AddRequest&, absl::Span<const View> x) {
  return ArrayOf(AddType(x[0], x[1]));
}

absl::StatusOr<ScalarResult> Run(const v1::AddRequest&, Stream& stream, absl::Span<const View> x,
                                 Outputs out, const RunOptions& options) {
  return ArrayRun(RunAdd(stream, x[0], x[1], out[0], options));
}

// --- WindowSum ---

NamedOperands OperandsOf(const v1::WindowSumRequest& request) { return {{"x", &request.x()}}; }

absl::StatusOr<ResultType> ResultTypeOf(const v1::WindowSumRequest& request,
                                        absl::Span<const View> x) {
  return ArrayOf(WindowSumType(x[0], request.radius()));
}

absl::StatusOr<ScalarResult> Run(const v1::WindowSumRequest& request, Stream& stream,
                                 absl::Span<const View> x, Outputs out, const RunOptions& options) {
  return ArrayRun(RunWindowSum(stream, x[0], request.radius(), out[0], options));
}

// --- Map ---

NamedOperands OperandsOf(const v1::MapRequest& request) {
  NamedOperands operands;
  if (!CheckCounts(request).ok()) return operands;
  for (int i = 0; i < request.operands_size(); ++i)
    operands.push_back({kMapOperandNames[static_cast<std::size_t>(i)], &request.operands(i)});
  return operands;
}

absl::StatusOr<ResultType> ResultTypeOf(const v1::MapRequest& request, absl::Span<const View> x) {
  if (absl::Status status = CheckCounts(request); !status.ok()) return status;
  const absl::StatusOr<std::vector<ExpressionNode>> nodes = ToNodes(request.expression());
  if (!nodes.ok()) return nodes.status();
  return ArrayOf(MapType(x, *nodes));
}

absl::StatusOr<ScalarResult> Run(const v1::MapRequest& request, Stream& stream,
                                 absl::Span<const View> x, Outputs out, const RunOptions& options) {
  const absl::StatusOr<std::vector<ExpressionNode>> nodes = ToNodes(request.expression());
  if (!nodes.ok()) return nodes.status();
  return ArrayRun(RunMap(stream, x, *nodes, out[0], options));
}

// --- TopK ---

namespace {

int AxisOf(const v1::TopKRequest& request) { return request.has_axis() ? request.axis() : -1; }

}  // namespace

NamedOperands OperandsOf(const v1::TopKRequest& request) { return {{"x", &request.x()}}; }

absl::StatusOr<ResultType> ResultTypeOf(const v1::TopKRequest& request, absl::Span<const View> x) {
  if (request.values().has_buffer() && request.indices().has_buffer() &&
      request.values().buffer().name() == request.indices().buffer().name()) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "BAD_RESULT",
        "values and indices cannot become one buffer",
        {{"field", "indices.buffer.name"}, {"value", request.indices().buffer().name()}});
  }
  const absl::StatusOr<ArrayType> values = TopKType(x[0], request.k(), AxisOf(request));
  if (!values.ok()) return values.status();
  absl::StatusOr<ArrayType> indices = MakeArrayType(
      DType::kI64, {values->shape.dims.data(), static_cast<std::size_t>(values->shape.rank)});
  if (!indices.ok()) return indices.status();
  return ResultType{.scalar = false, .arrays = {*values, *indices}};
}

absl::StatusOr<ScalarResult> Run(const v1::TopKRequest& request, Stream& stream,
                                 absl::Span<const View> x, Outputs out, const RunOptions& options) {
  return ArrayRun(RunTopK(stream, x[0], request.k(), AxisOf(request), request.smallest(), out[0],
                          out[1], options));
}

Destinations DestinationsOf(const v1::TopKRequest& request) {
  return {&request.values(), &request.indices()};
}

v1::Tensor& TensorOf(v1::TopKResponse& response, std::size_t array) {
  return array == 0 ? *response.mutable_values() : *response.mutable_indices();
}

v1::Buffer& BufferOf(v1::TopKResponse& response, std::size_t array) {
  return array == 0 ? *response.mutable_values_buffer() : *response.mutable_indices_buffer();
}

// --- A product that selects ---

namespace {

// The request that the steps make, with the data that it refers to.
class SelectionRequest {
 public:
  static absl::StatusOr<SelectionRequest> Of(const SelectionSteps& steps) {
    SelectionRequest made;
    ProductTopK& request = made.request_;
    const View &a = steps.matmul_operands[0], &b = steps.matmul_operands[1];
    const absl::StatusOr<DType> dtype = OutDType(steps.matmul, a);
    if (!dtype.ok()) return dtype.status();
    request = {.a = a,
               .b = b,
               .transpose_a = steps.matmul.transpose_a(),
               .transpose_b = steps.matmul.transpose_b(),
               .out_dtype = *dtype,
               .product = steps.product,
               .k = steps.top_k.k(),
               .smallest = steps.top_k.smallest()};
    const v1::Expression* expression = nullptr;
    if (steps.map != nullptr) {
      expression = &steps.map->expression();
      made.operands_.assign(steps.map_operands.begin(), steps.map_operands.end());
    } else if (steps.matmul.has_expression()) {
      expression = &steps.matmul.expression();
      const absl::StatusOr<ArrayType> product =
          MatmulType(a, b, request.transpose_a, request.transpose_b, *dtype);
      if (!product.ok()) return product.status();
      made.operands_.assign(steps.matmul_operands.begin() + 1, steps.matmul_operands.end());
      made.operands_[0] = WholeView(*product, nullptr);
    }
    if (expression == nullptr) return made;
    absl::StatusOr<std::vector<ExpressionNode>> nodes = ToNodes(*expression);
    if (!nodes.ok()) return nodes.status();
    made.nodes_ = *std::move(nodes);
    return made;
  }

  ProductTopK get() const {
    ProductTopK request = request_;
    request.expression = nodes_;
    request.operands = operands_;
    return request;
  }

 private:
  ProductTopK request_;
  std::vector<ExpressionNode> nodes_;
  std::vector<View> operands_;
};

}  // namespace

const ProductTopKStrategy* ChooseSelection(const SelectionSteps& steps, std::string_view matmul,
                                           std::string_view top_k, const Device& device) {
  if (top_k != "threshold") return nullptr;
  const absl::StatusOr<SelectionRequest> request = SelectionRequest::Of(steps);
  return request.ok() ? ChooseProductTopK(request->get(), matmul, device) : nullptr;
}

std::uint64_t SelectionScratch(const SelectionSteps& steps, const ProductTopKStrategy& strategy,
                               const Device& device) {
  const absl::StatusOr<SelectionRequest> request = SelectionRequest::Of(steps);
  return request.ok() ? ProductTopKScratch(request->get(), strategy, device) : 0;
}

absl::StatusOr<ScalarResult> RunSelection(const SelectionSteps& steps,
                                          const ProductTopKStrategy& strategy, Stream& stream,
                                          Outputs out, const RunOptions& options) {
  const absl::StatusOr<SelectionRequest> request = SelectionRequest::Of(steps);
  if (!request.ok()) return request.status();
  return ArrayRun(RunProductTopK(stream, request->get(), strategy, out[0], out[1], options));
}

// --- All ---

namespace {

// Returns the time that bytes of a message take to a GPU or from it.
double TravelMicroseconds(std::uint64_t bytes, const Device& device) {
  return device.info().backend == Backend::kCuda ? static_cast<double>(bytes) / 1e4 : 0;
}

}  // namespace

double LeastMicroseconds(absl::Span<const OperandSource> sources, const Device& device) {
  const double bytes_per_us = device.info().backend == Backend::kCuda ? 1e6 : 4e3;
  double bytes = 0, travel = 0;
  for (const OperandSource& source : sources) {
    bytes += static_cast<double>(source.view.elements()) *
             static_cast<double>(SizeOf(source.view.dtype));
    if (source.named.operand->has_tensor())
      travel += TravelMicroseconds(source.type.bytes(), device);
  }
  return bytes / bytes_per_us + travel;
}

double AnswerMicroseconds(const Destinations& destinations, const ResultType& result,
                          const Device& device) {
  double travel = 0;
  for (std::size_t i = 0; i < destinations.size() && !result.scalar; ++i)
    if (IsInline(*destinations[i])) travel += TravelMicroseconds(result.arrays[i].bytes(), device);
  return travel;
}

namespace {

// Returns the operations for one element, by the cost model.
double FlopsOf(const v1::Expression& expression) {
  double flops = 0;
  for (const v1::Expression::Node& node : expression.nodes()) {
    const MapOpInfo* info = InfoOf(static_cast<MapOp>(node.op()));
    flops += info == nullptr ? 1 : info->flops;
  }
  return flops;
}

// If operands are broadcast, the result may be larger than every one of them.
double MapMicroseconds(const v1::Expression& expression, absl::Span<const OperandSource> sources,
                       const Device& device) {
  std::array<std::int64_t, kMaxRank> extents;  // counted from the last axis
  extents.fill(1);
  double element_bytes = 0;
  for (const OperandSource& source : sources) {
    const Shape& shape = source.view.shape;
    for (int i = 0; i < shape.rank; ++i) {
      std::int64_t& extent = extents[static_cast<std::size_t>(i)];
      extent = std::max(extent, shape[shape.rank - 1 - i]);
    }
    element_bytes = std::max(element_bytes, static_cast<double>(SizeOf(source.view.dtype)));
  }
  double elements = 1;
  for (const std::int64_t extent : extents) elements *= static_cast<double>(extent);
  const bool cuda = device.info().backend == Backend::kCuda;
  return LeastMicroseconds(sources, device) + elements * element_bytes / (cuda ? 1e6 : 4e3) +
         elements * FlopsOf(expression) / (cuda ? 5e6 : 5e3);
}

}  // namespace

double LeastMicroseconds(const v1::ReduceRequest& request, absl::Span<const OperandSource> sources,
                         const Device& device) {
  return request.has_expression() ? MapMicroseconds(request.expression(), sources, device)
                                  : LeastMicroseconds(sources, device);
}

double LeastMicroseconds(const v1::MapRequest& request, absl::Span<const OperandSource> sources,
                         const Device& device) {
  return MapMicroseconds(request.expression(), sources, device);
}

double LeastMicroseconds(const v1::MatmulRequest& request, absl::Span<const OperandSource> sources,
                         const Device& device) {
  if (sources.size() < 2) return 0;  // it will be refused
  const View &a = sources[0].view, &b = sources[1].view;
  if (a.shape.rank != 2 || b.shape.rank != 2) return 0;  // it will be refused
  const double per_us = device.info().backend == Backend::kCuda ? 5e6 : 5e3;
  const auto m = static_cast<double>(a.shape[request.transpose_a() ? 1 : 0]);
  const auto n = static_cast<double>(b.shape[request.transpose_b() ? 0 : 1]);
  const auto k = static_cast<double>(a.shape[request.transpose_a() ? 0 : 1]);
  const double flops = request.has_expression() ? FlopsOf(request.expression()) : 0;
  return LeastMicroseconds(sources, device) + m * n * (2 * k + 8 + flops) / per_us;
}

double LeastMicroseconds(const v1::TopKRequest& request, absl::Span<const OperandSource> sources,
                         const Device& device) {
  const View& x = sources[0].view;
  const absl::StatusOr<ArrayType> type = TopKType(x, request.k(), AxisOf(request));
  if (!type.ok()) return 0;  // it will be refused
  // The best 100 of each of 65,536 rows of 1024 f32 take an H200 1.1 ms (2026-11-27).
  const double found_per_us = device.info().backend == Backend::kCuda ? 8e3 : 80;
  return LeastMicroseconds(sources, device) +
         static_cast<double>(type->shape.elements()) / found_per_us;
}

absl::Status CheckInline(const ArrayType& type, std::uint64_t before) {
  const std::uint64_t bytes = type.bytes();
  if (bytes <= kMaxInlineResult - before) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInvalidArgument, "RESULT_TOO_LARGE",
      before == 0 ? "the result is too large for a response; ask for it in result.buffer"
                  : "the results are together too large for a response; ask for some in buffers",
      {{"size", absl::StrCat(before + bytes)}, {"limit", absl::StrCat(kMaxInlineResult)}});
}

void SetType(const ArrayType& type, v1::Tensor& out) {
  out.set_dtype(ToProto(type.dtype));
  SetShape(type.shape, out.mutable_shape());
}

void SetStats(const Stats& stats, const Device& device, absl::Span<const OperandSource> sources,
              v1::ExecutionStats& out) {
  out.set_strategy(std::string(stats.strategy));
  out.set_device(device.info().name);
  out.set_kernel_us(stats.kernel_us);
  out.set_bytes(stats.bytes);
  out.set_flops(stats.flops);
  out.set_roundoff(stats.roundoff);
  std::uint64_t moved = 0;
  for (const OperandSource& source : sources) {
    out.add_operand_versions(source.version());
    moved += source.moved_bytes;
  }
  out.set_moved_bytes(moved);
  out.set_devices(static_cast<std::uint32_t>(stats.devices));
  out.set_prepared_bytes(stats.prepared_bytes);
}

}  // namespace tessera
