#include "server/compute/operations.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "kernels/problem/map.h"
#include "server/rpc/convert.h"

namespace tessera {
namespace {

// --- Expressions ---

constexpr std::array<std::string_view, kMostOperands> kMapNames = {
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
  ExpressionNode out;
  ASSIGN_OR_RETURN(out.dtype, NodeDType(node, index));
  switch (node.value_case()) {
    case v1::Expression::Node::kOperand:
      out.kind = Kind::kOperand;
      out.operand = node.operand();
      break;
    case v1::Expression::Node::kCoordinate:
      out.kind = Kind::kCoordinate;
      out.axis = node.coordinate();
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
      // MapOp is narrower, so the cast could turn an unknown value into a known one.
      if (!v1::MapOp_IsValid(node.op())) return BadNode(index, "operation", node.op());
      out.op = static_cast<MapOp>(node.op());
      break;
    case v1::Expression::Node::VALUE_NOT_SET:
      break;
  }
  // One argument beyond the maximum is kept, so that the node is refused.
  const int arguments = std::min(node.args_size(), kMostArguments + 1);
  out.args.assign(node.args().begin(), node.args().begin() + arguments);
  return out;
}

absl::StatusOr<Expression> ToExpression(const v1::Expression& expression) {
  std::vector<ExpressionNode> nodes;
  nodes.reserve(static_cast<std::size_t>(expression.nodes_size()));
  for (int i = 0; i < expression.nodes_size(); ++i) {
    ASSIGN_OR_RETURN(ExpressionNode node, ToNode(expression.nodes(i), i));
    nodes.push_back(std::move(node));
  }
  return Expression(std::move(nodes));
}

absl::Status BadCount(std::string_view field, int least, int most) {
  return MakeError(
      absl::StatusCode::kInvalidArgument, "BAD_EXPRESSION",
      absl::StrCat("'", Absl(field), "' must have from ", least, " to ", most, " entries"),
      {{"field", std::string(field)}, {"limit", absl::StrCat(most)}});
}

// Checks the number of nodes in an expression, and the number of operands in this field of the
// request.
absl::Status CheckCounts(const v1::Expression& expression, std::string_view field, int operands,
                         int least, int most) {
  if (operands > most || operands < least) return BadCount(field, least, most);
  const int nodes = expression.nodes_size();
  if (nodes < 1 || nodes > kMostNodes) return BadCount("expression.nodes", 1, kMostNodes);
  return absl::OkStatus();
}

// Sets the expression of a Reduce, a Scan, a Sort or a Matmul, if the request has one.
template <class Request>
absl::Status SetExpression(const Request& request, std::optional<Expression>& expression) {
  if (!request.has_expression() && request.with().empty()) return absl::OkStatus();
  RETURN_IF_ERROR(
      CheckCounts(request.expression(), "with", request.with_size(), 0, kMostOperands - 1));
  ASSIGN_OR_RETURN(expression, ToExpression(request.expression()));
  return absl::OkStatus();
}

// --- Specs ---

// Read sets an operation's options. An operation that has none needs no separate function.
template <class Request, class Spec>
absl::Status Read(const Request&, Spec&) {
  static_assert(std::is_empty_v<Spec>);
  return absl::OkStatus();
}

absl::Status Read(const v1::ReduceRequest& request, ReduceSpec& spec) {
  ASSIGN_OR_RETURN(spec.op, FromProto(request.op()));
  if (request.axes().empty() && !IsInline(request.result())) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_AXES",
                     "a result in a buffer requires axes; to fold all axes, list them all",
                     {{"field", "axes"}});
  }
  spec.keep_dims = request.keep_dims();
  spec.axes.assign(request.axes().begin(), request.axes().end());
  return SetExpression(request, spec.expression);
}

absl::Status Read(const v1::MatmulRequest& request, MatmulSpec& spec) {
  spec.transpose_a = request.transpose_a();
  spec.transpose_b = request.transpose_b();
  if (request.out_dtype() != v1::DTYPE_UNSPECIFIED) {
    ASSIGN_OR_RETURN(spec.out_dtype, FromProto(request.out_dtype(), "out_dtype"));
  }
  return SetExpression(request, spec.expression);
}

absl::Status Read(const v1::WindowSumRequest& request, WindowSumSpec& spec) {
  spec.radius = request.radius();
  return absl::OkStatus();
}

absl::Status Read(const v1::MapRequest& request, MapSpec& spec) {
  RETURN_IF_ERROR(
      CheckCounts(request.expression(), "operands", request.operands_size(), 1, kMostOperands));
  ASSIGN_OR_RETURN(spec.expression, ToExpression(request.expression()));
  return absl::OkStatus();
}

absl::Status Read(const v1::ScanRequest& request, ScanSpec& spec) {
  const absl::StatusOr<ReduceOp> op = FromProto(request.op());
  if (!op.ok()) return op.status();
  spec.op = *op;
  if (request.has_axis()) spec.axis = request.axis();
  spec.exclusive = request.exclusive();
  spec.reverse = request.reverse();
  return SetExpression(request, spec.expression);
}

// Checks that the two results of a request go to different buffers.
template <class Request>
absl::Status CheckApart(const Request& request) {
  const bool same = request.values().has_buffer() && request.indices().has_buffer() &&
                    request.values().buffer().name() == request.indices().buffer().name();
  if (!same) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInvalidArgument, "BAD_RESULT",
      "values and indices cannot be stored in the same buffer",
      {{"field", "indices.buffer.name"}, {"value", request.indices().buffer().name()}});
}

// Reads which of the two results of a Sort or a Select are wanted.
template <class Request, class Spec>
absl::Status ReadWanted(const Request& request, Spec& spec) {
  spec.values = !request.values().has_none();
  spec.indices = !request.indices().has_none();
  if (spec.values || spec.indices) return CheckApart(request);
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_RESULT",
                   "values and indices cannot both be left out", {{"field", "values.none"}});
}

absl::Status Read(const v1::SortRequest& request, SortSpec& spec) {
  RETURN_IF_ERROR(ReadWanted(request, spec));
  if (request.has_axis()) spec.axis = request.axis();
  spec.descending = request.descending();
  return SetExpression(request, spec.expression);
}

absl::Status Read(const v1::SelectRequest& request, SelectSpec& spec) {
  return ReadWanted(request, spec);
}

absl::Status SetMode(v1::TakeMode mode, TakeMode& spec) {
  // TakeMode is narrower, so the cast could turn an unknown value into a known one.
  if (!v1::TakeMode_IsValid(mode)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPERATION",
                     absl::StrCat("there is no mode ", static_cast<int>(mode)),
                     {{"field", "mode"}, {"value", absl::StrCat(static_cast<int>(mode))}});
  }
  if (mode != v1::TAKE_MODE_UNSPECIFIED) spec = static_cast<TakeMode>(mode);
  return absl::OkStatus();
}

absl::Status Read(const v1::TakeRequest& request, TakeSpec& spec) {
  if (request.has_axis()) spec.axis = request.axis();
  spec.along = request.along();
  return SetMode(request.mode(), spec.mode);
}

absl::Status Read(const v1::SumByLabelRequest& request, SumByLabelSpec& spec) {
  spec.length = request.length();
  return SetMode(request.mode(), spec.mode);
}

absl::Status Read(const v1::HistogramRequest& request, HistogramSpec& spec) {
  switch (request.bins_case()) {
    case v1::HistogramRequest::kEven:
      spec = {.kind = BinKind::kEven,
              .bins = request.even().count(),
              .low = request.even().low(),
              .high = request.even().high()};
      return absl::OkStatus();
    case v1::HistogramRequest::kIntegers:
      spec = {.kind = BinKind::kIntegers, .bins = request.integers()};
      return absl::OkStatus();
    case v1::HistogramRequest::kEdges:
      spec.kind = BinKind::kEdges;
      return absl::OkStatus();
    case v1::HistogramRequest::BINS_NOT_SET:
      break;
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_BINS", "a histogram requires bins",
                   {{"field", "bins"}});
}

absl::Status Read(const v1::SearchSortedRequest& request, SearchSortedSpec& spec) {
  spec.right = request.right();
  return absl::OkStatus();
}

absl::Status Read(const v1::LinalgRequest& request, LinalgSpec& spec) {
  // LinalgFunction is narrower, so the cast could turn an unknown value into a known one.
  const v1::LinalgFunction function = request.function();
  if (!v1::LinalgFunction_IsValid(function) || function == v1::LINALG_FUNCTION_UNSPECIFIED) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPERATION",
                     absl::StrCat("there is no function ", static_cast<int>(function)),
                     {{"field", "function"}, {"value", absl::StrCat(static_cast<int>(function))}});
  }
  spec.function = static_cast<LinalgFunction>(function);
  return absl::OkStatus();
}

absl::Status Read(const v1::TopKRequest& request, TopKSpec& spec) {
  RETURN_IF_ERROR(CheckApart(request));
  spec = {.k = request.k(),
          .axis = request.has_axis() ? request.axis() : -1,
          .smallest = request.smallest()};
  return absl::OkStatus();
}

// Operands in repeated fields follow the others.
template <class Spec, class Request>
absl::StatusOr<Operation> Make(const Request& request) {
  Spec spec;
  RETURN_IF_ERROR(Read(request, spec));
  Operation operation{.spec = std::move(spec),
                      .options = {.strategy = request.strategy(),
                                  .launch = FromProto(request.launch()),
                                  .timing = request.timing()}};
  NamedOperands& operands = operation.operands;
  if constexpr (requires { request.a(); }) operands = {{"a", &request.a()}, {"b", &request.b()}};
  if constexpr (requires { request.x(); }) operands = {{"x", &request.x()}};
  if constexpr (requires { request.along(); }) operands.push_back({"indices", &request.indices()});
  if constexpr (requires { request.mask(); }) operands.push_back({"mask", &request.mask()});
  if constexpr (requires { request.labels(); }) operands.push_back({"labels", &request.labels()});
  if constexpr (requires { request.keys(); }) operands.push_back({"keys", &request.keys()});
  if constexpr (requires { request.edges(); })
    if (request.has_edges()) operands.push_back({"edges", &request.edges()});
  if constexpr (requires { request.function(); })
    if (request.has_b()) operands.push_back({"b", &request.b()});
  if constexpr (requires { request.with(); })
    for (int i = 0; i < request.with_size(); ++i)
      operands.push_back({kWithNames[static_cast<std::size_t>(i)], &request.with(i)});
  if constexpr (requires { request.operands(); })
    for (int i = 0; i < request.operands_size(); ++i)
      operands.push_back({kMapNames[static_cast<std::size_t>(i)], &request.operands(i)});
  if constexpr (requires { request.result(); }) operation.destinations = {&request.result()};
  if constexpr (requires { request.values(); })
    operation.destinations = {&request.values(), &request.indices()};
  for (const v1::Result* destination : operation.destinations) {
    constexpr bool kMayLeaveOut = requires { spec.indices; };
    if (destination->has_none() && !kMayLeaveOut) {
      return MakeError(absl::StatusCode::kInvalidArgument, "BAD_RESULT",
                       "only Sort and Select have results that may be left out",
                       {{"field", "result.none"}});
    }
  }
  return operation;
}

}  // namespace

#define TESSERA_MAKE(Method, name)                                              \
  absl::StatusOr<Operation> MakeOperation(const v1::Method##Request& request) { \
    return Make<Method##Spec>(request);                                         \
  }
TESSERA_OPERATION_METHODS(TESSERA_MAKE)
#undef TESSERA_MAKE

absl::StatusOr<Operation> MakeOperation(const v1::Step& step) {
  return VisitOperation(
      step, [](const auto& request) { return MakeOperation(request); },
      []() -> absl::StatusOr<Operation> {
        return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPERATION",
                         "a step has no operation, or one that this server does not know",
                         {{"field", "operation"}});
      });
}

namespace {

// A request with too many operands or nodes is refused before it is converted.
template <class Request>
OperationSize SizeOfRequest(const Request& request) {
  OperationSize size;
  if constexpr (requires { request.a(); }) size.operands = 2;
  if constexpr (requires { request.x(); }) size.operands = 1;
  if constexpr (requires { request.along(); }) size.operands = 2;
  if constexpr (requires { request.mask(); }) size.operands = 2;
  if constexpr (requires { request.keys(); }) size.operands = 2;
  if constexpr (requires { request.edges(); }) size.operands = request.has_edges() ? 2 : 1;
  if constexpr (requires { request.function(); }) size.operands = request.has_b() ? 2 : 1;
  const auto add = [&](int operands, int most) {
    size.operands = operands > most ? 0 : size.operands + static_cast<std::size_t>(operands);
  };
  if constexpr (requires { request.operands(); }) add(request.operands_size(), kMostOperands);
  if constexpr (requires { request.with(); }) add(request.with_size(), kMostOperands - 1);
  if constexpr (requires { request.expression(); }) {
    const auto& nodes = request.expression().nodes();
    // Reduce, Scan and Sort compile an expression a second time, with a cast.
    constexpr bool kCasts = requires { request.op(); }
    || requires { request.descending(); };
    constexpr std::size_t kPrograms = kCasts ? 2 : 1;
    if (!nodes.empty() && nodes.size() <= kMostNodes) {
      size.bytes = static_cast<std::size_t>(nodes.size()) * sizeof(ExpressionNode) + kHeap +
                   kPrograms * (sizeof(MapProgram) + kHeap);
      // An invalid node may have one argument too many, for which heap memory is allocated.
      for (const v1::Expression::Node& node : nodes)
        if (node.args_size() > kMostArguments) size.bytes += 16 + kHeap;
    }
  }
  return size;
}

}  // namespace

OperationSize SizeOf(const v1::Step& step) {
  return VisitOperation(
      step, [](const auto& request) { return SizeOfRequest(request); },
      [] { return OperationSize(); });
}

double TravelMicroseconds(absl::Span<const OperandSource> sources, const Destinations& destinations,
                          const ResultType* result, const Device& device) {
  if (device.info().backend != Backend::kCuda) return 0;
  std::uint64_t bytes = 0;
  for (const OperandSource& source : sources)
    if (source.named.operand->has_tensor()) bytes += source.type.bytes();
  if (result != nullptr && !result->scalar)
    for (std::size_t i = 0; i < destinations.size(); ++i)
      if (IsInline(*destinations[i])) bytes += result->arrays[i].bytes();
  return static_cast<double>(bytes) / 1e4;
}

// --- Responses ---

OperationResponse OperationResponse::In(const v1::Step& step, v1::StepResult& result) {
  switch (step.operation_case()) {
#define TESSERA_CASE(Method, field) \
  case v1::Step::k##Method:         \
    return OperationResponse(*result.mutable_##field());
    TESSERA_OPERATION_METHODS(TESSERA_CASE)
#undef TESSERA_CASE
    case v1::Step::OPERATION_NOT_SET:
      break;
  }
  std::abort();
}

void OperationResponse::SetValue(const ScalarResult& result, const ResultType& type) const {
  v1::Scalar& value = *parts_.value(message_);
  if (result.integer) {
    value.set_integer(result.value.integer);
  } else {
    value.set_real(result.value.real);
  }
  if (type.is_index) parts_.set_index(message_, result.value.index);
}

absl::Status CheckInline(const ArrayType& type, std::uint64_t before) {
  const std::uint64_t bytes = type.bytes();
  if (bytes <= kMaxInlineResult - before) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInvalidArgument, "RESULT_TOO_LARGE",
      before == 0 ? "the result is too large for a response; store it in result.buffer"
                  : "the results do not fit in one response; store some of them in result.buffer",
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
