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

// The number of axes before the rows and columns.
int StackRank(const View& view) { return std::max(0, view.shape.rank - 2); }

// The extents of a product's operands. A vector is a matrix with one row (a) or one column (b).
struct Extents {
  std::int64_t m = 1, n = 1, k = 0, k_of_b = 0;

  Extents(const View& a, const View& b, bool transpose_a, bool transpose_b) {
    // The extent of the last axis, or of the one before it.
    const auto extent = [](const View& x, bool last) { return x.shape[x.shape.rank - 2 + last]; };
    k = extent(a, a.shape.rank == 1 || !transpose_a);
    k_of_b = extent(b, b.shape.rank == 1 || transpose_b);
    if (a.shape.rank > 1) m = extent(a, transpose_a);
    if (b.shape.rank > 1) n = extent(b, !transpose_b);
  }
};

absl::StatusOr<ArrayType> ProductType(const View& a, const View& b, bool transpose_a,
                                      bool transpose_b, DType out_dtype) {
  if (!MayMultiply(a.dtype, b.dtype)) return DtypesDiffer(a, b);
  if (a.shape.rank == 0 || b.shape.rank == 0)
    return ShapesDiffer("both must have rank 1 or more", a, b);
  const Extents extents(a, b, transpose_a, transpose_b);
  if (extents.k != extents.k_of_b) {
    return ShapesDiffer(
        absl::StrCat("the inner extents ", extents.k, " and ", extents.k_of_b, " must agree"), a,
        b);
  }
  Shape shape;
  shape.rank = std::max(StackRank(a), StackRank(b));
  for (int i = 0; i < shape.rank; ++i) {
    const int in_a = i - shape.rank + StackRank(a), in_b = i - shape.rank + StackRank(b);
    const std::int64_t of_a = in_a < 0 ? 1 : a.shape[in_a], of_b = in_b < 0 ? 1 : b.shape[in_b];
    if (of_a != of_b && of_a != 1 && of_b != 1) {
      return ShapesDiffer(absl::StrCat("the leading extents ", of_a, " and ", of_b,
                                       " must agree, or one of them must be 1"),
                          a, b);
    }
    shape[i] = of_a == 1 ? of_b : of_a;
  }
  if (a.shape.rank > 1) shape[shape.rank++] = extents.m;
  if (b.shape.rank > 1) shape[shape.rank++] = extents.n;
  if (!kMatmulDTypes.Contains(a.dtype)) RETURN_IF_ERROR(CheckComputed("matmul", a.dtype));
  if (!IsMatmulPair(a.dtype, out_dtype)) {
    return Invalid(
        "BAD_DTYPE",
        absl::StrCat("no strategy multiplies ", Absl(Name(a.dtype)), " operands into a product of ",
                     Absl(Name(out_dtype))),
        {{"dtype", std::string(Name(a.dtype))}, {"out_dtype", std::string(Name(out_dtype))}});
  }
  return MakeArrayType(out_dtype, {shape.dims.data(), static_cast<std::size_t>(shape.rank)});
}

// An operand of a stack of products.
struct StackOperand {
  // What is copied if the strategy cannot read the operand in place: each matrix once, even if the
  // operand repeats it.
  View view;
  MatrixOperand matrix;

  StackOperand(const View& operand, bool transpose, bool is_a) : view(operand) {
    if (view.shape.rank == 1) {
      const int axis = is_a ? 1 : 0;
      view.shape = {2, {1, 1}};
      view.shape[axis] = operand.shape[0];
      view.strides = {1, 1};
      view.strides[static_cast<std::size_t>(axis)] = operand.strides[0];
      transpose = false;
    }
    for (int i = 0; i < StackRank(view); ++i)
      if (view.strides[static_cast<std::size_t>(i)] == 0 && view.shape[i] > 1) view.shape[i] = 1;
    matrix = MakeMatrixOperand(view, transpose);
  }

  // Returns the distance between matrices along an axis of the stack, counted from its last axis,
  // in elements of what the strategy reads.
  std::int64_t Stride(int from_last) const {
    const int axis = StackRank(view) - 1 - from_last;
    if (axis < 0 || view.shape[axis] == 1) return 0;
    if (!matrix.gather) return view.strides[static_cast<std::size_t>(axis)];
    std::int64_t stride = 1;
    for (int i = axis + 1; i < view.shape.rank; ++i) stride *= view.shape[i];
    return stride;
  }
};

// Merges the innermost axis of the stack with the rows or columns of c if the axis repeats one
// operand and the other operand remains a matrix. Returns whether it has merged them.
bool MergeIntoMatrix(MatmulProblem& p) {
  const StackAxis& axis = p.stack_axes[p.stack_rank - 1];
  // `rows` are those of the operand as an m x k or n x k matrix.
  const auto merge = [&](std::int64_t stride, bool k_is_last, std::int64_t& rows,
                         std::int64_t& pitch) {
    if (k_is_last) {
      if (rows == 1 && stride >= p.k) {
        pitch = stride;
      } else if (stride != rows * pitch) {
        return false;
      }
    } else if (stride != rows || pitch < rows * axis.extent) {
      return false;
    }
    rows *= axis.extent;
    return true;
  };
  const bool merged = axis.stride_b == 0 ? merge(axis.stride_a, !p.transpose_a, p.m, p.lda)
                      : axis.stride_a == 0
                          ? p.m == 1 && merge(axis.stride_b, p.transpose_b, p.n, p.ldb)
                          : false;
  if (merged) --p.stack_rank;
  return merged;
}

// Sets the stack of the problem. REQUIRES: its m and n are set.
void SetStack(const Shape& shape, int rank, const StackOperand& a, const StackOperand& b,
              MatmulProblem& p) {
  for (int i = 0; i < rank; ++i) {
    const StackAxis axis{shape[i], a.Stride(rank - 1 - i), b.Stride(rank - 1 - i)};
    if (axis.extent == 1) continue;
    if (p.stack_rank > 0) {
      StackAxis& outer = p.stack_axes[p.stack_rank - 1];
      if (outer.stride_a == axis.stride_a * axis.extent &&
          outer.stride_b == axis.stride_b * axis.extent) {
        outer = {outer.extent * axis.extent, axis.stride_a, axis.stride_b};
        continue;
      }
    }
    p.stack_axes[p.stack_rank++] = axis;
  }
  while (p.stack_rank > 0 && MergeIntoMatrix(p)) continue;
  for (int i = 0; i < p.stack_rank; ++i) p.stack *= p.stack_axes[i].extent;
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
  const Extents extents(a, b, transpose_a, transpose_b);
  const StackOperand left(a, transpose_a, /*is_a=*/true);
  const StackOperand right(b, transpose_b, /*is_a=*/false);
  MatmulProblem problem{.dtype = a.dtype,
                        .out_dtype = out_dtype,
                        .mixed = a.dtype != b.dtype,
                        .m = extents.m,
                        .n = extents.n,
                        .k = extents.k,
                        .lda = left.matrix.pitch,
                        .transpose_a = left.matrix.transpose,
                        .ldb = right.matrix.pitch,
                        .transpose_b = right.matrix.transpose,
                        .c = nullptr};
  if (type.shape.elements() == 0) {
    problem.stack = 0;
  } else if (extents.k > 0) {
    SetStack(type.shape, std::max(StackRank(a), StackRank(b)), left, right, problem);
  } else {
    problem.stack = type.shape.elements() / (problem.m * problem.n);
  }
  const OperandSlot operands[] = {
      {left.view, left.matrix.gather && HasGaps(left.view), &problem.a},
      {right.view, right.matrix.gather && HasGaps(right.view), &problem.b}};
  const WholeLaunch<MatmulProblem> product(operands);
  if (out_of == nullptr) return ExecuteTo(out, &problem.c, stream, problem, options, product);
  ASSIGN_OR_RETURN(std::unique_ptr<StagedMap> staged, StageMatmul(type, *out_of));
  MapProblem& map = staged->problem();
  return ExecuteTo(out, &map.out, stream, problem, options,
                   MatmulThenMap(product, map, stream, type.bytes()));
}

}  // namespace tessera
