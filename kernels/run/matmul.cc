// Matmul, and an expression applied to its result.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/choose/map_range.h"
#include "kernels/compute.h"
#include "kernels/problem/matmul.h"
#include "kernels/run/execute.h"
#include "kernels/run/matrix_operand.h"
#include "kernels/run/stage.h"

namespace tessera {

namespace {

// Matmul into scratch memory, which the map reads as operand 0.
class MatmulThenMap final : public Work<MatmulProblem> {
 public:
  MatmulThenMap(const WholeLaunch<MatmulProblem>& product, MapProblem& map, const Stream& stream,
                std::uint64_t product_bytes)
      : product_(product), map_(map), stream_(stream), product_bytes_(product_bytes) {}

  std::uint64_t CopyBytes(const Stream& on, const Chosen& strategy) const override {
    return SaturatingAdd(product_.CopyBytes(on, strategy), product_bytes_);
  }
  double GatherSeconds(const Pace& pace) const override {
    return product_.GatherSeconds(pace) + MapSeconds(map_, stream_, pace);
  }
  Division Divide(const MatmulProblem&, const Chosen&, const Team&) const override { return {}; }
  void Account(const Chosen&, Stats& stats) const override {
    AccountMap(map_, /*in_cache=*/false, stats);
  }
  std::uint64_t SettleBytes() const override { return map_.n == 0 ? 0 : product_bytes_; }
  double SettleSeconds(const Pace& pace) const override {
    return map_.n == 0 ? 0 : MapSeconds(map_, stream_, pace);
  }
  void Settle(MatmulProblem& problem, Stream& on) const override {
    if (map_.n == 0) return;
    problem.c = on.Scratch(static_cast<std::size_t>(product_bytes_));
    tessera::Settle(problem, on);
    Finish(problem, on);
  }
  void Launch(Stream& on, MatmulProblem& problem, const Chosen& strategy) const override {
    problem.c = on.Scratch(static_cast<std::size_t>(product_bytes_));
    product_.Launch(on, problem, strategy);
    if (!on.stopped()) Finish(problem, on);
  }

 private:
  void Finish(const MatmulProblem& problem, Stream& on) const {
    map_.operands[0].data = problem.c;
    LaunchMapRange(map_, 0, map_.n, map_.out, on);
  }

  const WholeLaunch<MatmulProblem>& product_;
  MapProblem& map_;
  const Stream& stream_;
  const std::uint64_t product_bytes_;
};

absl::StatusOr<ArrayType> ProductType(const View& a, const View& b, bool transpose_a,
                                      bool transpose_b, DType out_dtype) {
  if (a.dtype != b.dtype) return DtypesDiffer(a, b);
  if (a.shape.rank != 2 || b.shape.rank != 2) return ShapesDiffer("both must have rank 2", a, b);
  const std::int64_t a_k = a.shape[transpose_a ? 0 : 1];
  const std::int64_t b_k = b.shape[transpose_b ? 1 : 0];
  if (a_k != b_k) {
    return ShapesDiffer(absl::StrCat("the inner extents ", a_k, " and ", b_k, " must agree"), a, b);
  }
  RETURN_IF_ERROR(CheckComputed("matmul", a.dtype));
  if (!IsMatmulPair(a.dtype, out_dtype)) {
    return Invalid(
        "BAD_DTYPE",
        absl::StrCat("no strategy multiplies ", Absl(Name(a.dtype)), " operands into a product of ",
                     Absl(Name(out_dtype))),
        {{"dtype", std::string(Name(a.dtype))}, {"out_dtype", std::string(Name(out_dtype))}});
  }
  return MakeArrayType(out_dtype, {a.shape[transpose_a ? 1 : 0], b.shape[transpose_b ? 0 : 1]});
}

absl::StatusOr<std::unique_ptr<StagedMap>> StageMatmul(const ArrayType& product,
                                                       const MapStage& out_of) {
  absl::StatusOr<std::unique_ptr<StagedMap>> staged =
      StagedMap::Make(WholeView(product, nullptr), &out_of, "product", /*numeric=*/false);
  if (!staged.ok() || (*staged)->type().shape == product.shape) return staged;
  // Some other operand would broadcast the product to a larger shape.
  std::size_t at = 0;
  const auto stretches = [&](const Shape& own) {
    if (own.rank > product.shape.rank) return true;
    for (int i = 1; i <= own.rank; ++i) {
      const std::int64_t extent = own[own.rank - i];
      if (extent != 1 && extent != product.shape[product.shape.rank - i]) return true;
    }
    return false;
  };
  while (!stretches(out_of.with[at].shape)) ++at;
  const std::string name = absl::StrCat("with[", at, "]");
  return Invalid("BAD_SHAPE",
                 absl::StrCat("operand ", name, " has shape ", ToString(out_of.with[at].shape),
                              ", which cannot be broadcast to ", ToString(product.shape)),
                 {{"operand", name},
                  {"shape", ToString(out_of.with[at].shape)},
                  {"others", ToString(product.shape)}});
}

}  // namespace

absl::StatusOr<ArrayType> MatmulType(const View& a, const View& b, bool transpose_a,
                                     bool transpose_b, DType out_dtype, const MapStage* out_of) {
  absl::StatusOr<ArrayType> product = ProductType(a, b, transpose_a, transpose_b, out_dtype);
  if (!product.ok() || out_of == nullptr) return product;
  ASSIGN_OR_RETURN(std::unique_ptr<StagedMap> staged, StageMatmul(*product, *out_of));
  return staged->type();
}

absl::StatusOr<Stats> RunMatmul(Stream& stream, const View& a, const View& b, bool transpose_a,
                                bool transpose_b, DType out_dtype, const Output& out,
                                const RunOptions& options, const MapStage* out_of) {
  ASSIGN_OR_RETURN(ArrayType type, ProductType(a, b, transpose_a, transpose_b, out_dtype));
  const MatrixOperand left = MakeMatrixOperand(a, transpose_a);
  const MatrixOperand right = MakeMatrixOperand(b, transpose_b);
  MatmulProblem problem{.dtype = a.dtype,
                        .out_dtype = out_dtype,
                        .m = type.shape[0],
                        .n = type.shape[1],
                        .k = a.shape[transpose_a ? 0 : 1],
                        .lda = left.pitch,
                        .transpose_a = left.transpose,
                        .ldb = right.pitch,
                        .transpose_b = right.transpose,
                        .c = nullptr};
  const OperandSlot operands[] = {{a, left.gather && HasGaps(a), &problem.a},
                                  {b, right.gather && HasGaps(b), &problem.b}};
  const WholeLaunch<MatmulProblem> product(operands);
  if (out_of == nullptr) return ExecuteTo(out, &problem.c, stream, problem, options, product);
  ASSIGN_OR_RETURN(std::unique_ptr<StagedMap> staged, StageMatmul(type, *out_of));
  MapProblem& map = staged->problem();
  return ExecuteTo(out, &map.out, stream, problem, options,
                   MatmulThenMap(product, map, stream, type.bytes()));
}

}  // namespace tessera
