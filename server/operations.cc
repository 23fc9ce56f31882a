#include "server/operations.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "server/convert.h"

namespace tessera {
namespace {

absl::StatusOr<ResultType> ArrayOf(const absl::StatusOr<ArrayType>& type) {
  if (!type.ok()) return type.status();
  return ResultType{.scalar = false, .type = *type};
}

absl::StatusOr<ScalarResult> ArrayRun(const absl::StatusOr<Stats>& stats) {
  if (!stats.ok()) return stats.status();
  return ScalarResult{.stats = *stats};
}

absl::StatusOr<DType> OutDType(const v1::MatmulRequest& request, const View& a) {
  if (request.out_dtype() == v1::DTYPE_UNSPECIFIED) return a.dtype;
  return FromProto(request.out_dtype(), "out_dtype");
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
  return ResultType{.scalar = true, .type = {ResultDType(ReduceOp::kSum, x[0].dtype), {}}};
}

absl::StatusOr<ScalarResult> Run(const v1::DotRequest&, Stream& stream, absl::Span<const View> x,
                                 const Output&, const RunOptions& options) {
  return RunDot(stream, x[0], x[1], options);
}

void SetValue(const v1::DotRequest&, const ScalarResult& result, v1::DotResponse& response) {
  SetScalar(result, response.mutable_value());
}

// --- Reduce ---

NamedOperands OperandsOf(const v1::ReduceRequest& request) { return {{"x", &request.x()}}; }

absl::StatusOr<ResultType> ResultTypeOf(const v1::ReduceRequest& request,
                                        absl::Span<const View> x) {
  const absl::StatusOr<ReduceOp> op = FromProto(request.op());
  if (!op.ok()) return op.status();
  if (request.axes_size() > 0)
    return ArrayOf(ReduceAxesType(x[0], *op, ToSpan(request.axes()), request.keep_dims()));
  if (request.result().has_buffer() || request.result().has_scratch()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_AXES",
                     "a result buffer needs axes; name all of them to fold all",
                     {{"field", "axes"}});
  }
  return ResultType{.scalar = true, .type = {ResultDType(*op, x[0].dtype), {}}};
}

absl::StatusOr<ScalarResult> Run(const v1::ReduceRequest& request, Stream& stream,
                                 absl::Span<const View> x, const Output& out,
                                 const RunOptions& options) {
  const absl::StatusOr<ReduceOp> op = FromProto(request.op());
  if (!op.ok()) return op.status();
  if (request.axes_size() == 0) return RunReduce(stream, x[0], *op, options);
  return ArrayRun(RunReduceAxes(stream, x[0], *op, ToSpan(request.axes()), out, options));
}

void SetValue(const v1::ReduceRequest& request, const ScalarResult& result,
              v1::ReduceResponse& response) {
  SetScalar(result, response.mutable_value());
  if (request.op() == v1::REDUCE_OP_ARGMIN || request.op() == v1::REDUCE_OP_ARGMAX)
    response.set_index(result.value.index);
}

// --- Matmul ---

NamedOperands OperandsOf(const v1::MatmulRequest& request) {
  return {{"a", &request.a()}, {"b", &request.b()}};
}

absl::StatusOr<ResultType> ResultTypeOf(const v1::MatmulRequest& request,
                                        absl::Span<const View> x) {
  const absl::StatusOr<DType> out = OutDType(request, x[0]);
  if (!out.ok()) return out.status();
  return ArrayOf(MatmulType(x[0], x[1], request.transpose_a(), request.transpose_b(), *out));
}

absl::StatusOr<ScalarResult> Run(const v1::MatmulRequest& request, Stream& stream,
                                 absl::Span<const View> x, const Output& out,
                                 const RunOptions& options) {
  const absl::StatusOr<DType> dtype = OutDType(request, x[0]);
  if (!dtype.ok()) return dtype.status();
  return ArrayRun(RunMatmul(stream, x[0], x[1], request.transpose_a(), request.transpose_b(),
                            *dtype, out, options));
}

// --- Add ---

NamedOperands OperandsOf(const v1::AddRequest& request) {
  return {{"a", &request.a()}, {"b", &request.b()}};
}

absl::StatusOr<ResultType> ResultTypeOf(const v1::AddRequest&, absl::Span<const View> x) {
  return ArrayOf(AddType(x[0], x[1]));
}

absl::StatusOr<ScalarResult> Run(const v1::AddRequest&, Stream& stream, absl::Span<const View> x,
                                 const Output& out, const RunOptions& options) {
  return ArrayRun(RunAdd(stream, x[0], x[1], out, options));
}

// --- WindowSum ---

NamedOperands OperandsOf(const v1::WindowSumRequest& request) { return {{"x", &request.x()}}; }

absl::StatusOr<ResultType> ResultTypeOf(const v1::WindowSumRequest& request,
                                        absl::Span<const View> x) {
  return ArrayOf(WindowSumType(x[0], request.radius()));
}

absl::StatusOr<ScalarResult> Run(const v1::WindowSumRequest& request, Stream& stream,
                                 absl::Span<const View> x, const Output& out,
                                 const RunOptions& options) {
  return ArrayRun(RunWindowSum(stream, x[0], request.radius(), out, options));
}

// --- All ---

double LeastMicroseconds(absl::Span<const Source> sources, const Device& device) {
  const double bytes_per_us = device.info().backend == Backend::kCuda ? 1e6 : 4e3;
  double bytes = 0;
  for (const Source& source : sources) {
    bytes += static_cast<double>(source.view.elements()) *
             static_cast<double>(SizeOf(source.view.dtype));
  }
  return bytes / bytes_per_us;
}

double LeastMicroseconds(const v1::MatmulRequest& request, absl::Span<const Source> sources,
                         const Device& device) {
  const View &a = sources[0].view, &b = sources[1].view;
  if (a.shape.rank != 2 || b.shape.rank != 2) return 0;  // it will be refused
  const double per_us = device.info().backend == Backend::kCuda ? 5e6 : 5e3;
  const auto m = static_cast<double>(a.shape[request.transpose_a() ? 1 : 0]);
  const auto n = static_cast<double>(b.shape[request.transpose_b() ? 0 : 1]);
  const auto k = static_cast<double>(a.shape[request.transpose_a() ? 0 : 1]);
  return LeastMicroseconds(sources, device) + m * n * (2 * k + 8) / per_us;
}

absl::Status CheckInline(const ArrayType& type, std::uint64_t before) {
  const std::uint64_t bytes = type.bytes();
  if (bytes <= kMaxInlineResult - before) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "RESULT_TOO_LARGE",
                   "the result is too large for a response; ask for it in result.buffer",
                   {{"size", absl::StrCat(bytes)}, {"limit", absl::StrCat(kMaxInlineResult)}});
}

void SetType(const ArrayType& type, v1::Tensor& out) {
  out.set_dtype(ToProto(type.dtype));
  SetShape(type.shape, out.mutable_shape());
}

void SetStats(const Stats& stats, const Device& device, absl::Span<const Source> sources,
              v1::ExecutionStats& out) {
  out.set_strategy(std::string(stats.strategy));
  out.set_device(device.info().name);
  out.set_kernel_us(stats.kernel_us);
  out.set_bytes(stats.bytes);
  out.set_flops(stats.flops);
  out.set_roundoff(stats.roundoff);
  for (const Source& source : sources) out.add_operand_versions(source.version());
}

}  // namespace tessera
