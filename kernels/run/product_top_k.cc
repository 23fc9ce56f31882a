#include "kernels/run/product_top_k.h"

#include <cstdint>
#include <optional>

#include "kernels/base/status_macros.h"
#include "kernels/run/execute.h"
#include "kernels/run/matrix_operand.h"
#include "kernels/run/stage.h"

namespace tessera {

#ifdef TESSERA_WITH_CUDA
extern const ProductTopKStrategy kProductTopKTensorBf16, kProductTopKTensorF16;
#endif

namespace {

const ProductTopKStrategy* StrategyFor(std::string_view product) {
#ifdef TESSERA_WITH_CUDA
  for (const ProductTopKStrategy* strategy : {&kProductTopKTensorBf16, &kProductTopKTensorF16})
    if (strategy->product == product) return strategy;
#endif
  static_cast<void>(product);
  return nullptr;
}

// Whether one kernel is faster than Matmul, Map and TopK in sequence, as measured on an H100 and an
// H200. The kernel keeps more scores for a larger k, and saves more time for more columns. It saves
// more time for f32 scores than for 16-bit scores, which take longer to compute, and more time if
// an expression would otherwise read and write the scores as well.
bool Pays(const ProductTopKProblem& problem, bool has_expression) {
  constexpr std::int64_t kMostSteps = 1024;
  const MatmulProblem& p = problem.product;
  const bool floats = p.out_dtype == DType::kF32;
  if (p.k > kMostSteps || !(floats || has_expression)) return false;
  const std::int64_t columns_for_each = !floats ? 40'000 : has_expression ? 1000 : 4000;
  const double least_scores = floats && has_expression ? 0x1p25 : 0x1p26;
  return p.n >= problem.k * columns_for_each &&
         static_cast<double>(p.m) * static_cast<double>(p.n) >= least_scores;
}

// Returns the request as a problem, or nothing if the strategies cannot read its operands.
std::optional<ProductTopKProblem> ProblemOf(const ProductTopK& request) {
  const View &a = request.a, &b = request.b;
  if (a.shape.rank != 2 || b.shape.rank != 2) return std::nullopt;
  const MatrixOperand left = MakeMatrixOperand(a, request.transpose_a);
  const MatrixOperand right = MakeMatrixOperand(b, request.transpose_b);
  if (left.gather || right.gather) return std::nullopt;
  ProductTopKProblem problem{.product = {.dtype = a.dtype,
                                         .out_dtype = request.out_dtype,
                                         .m = a.shape[request.transpose_a ? 1 : 0],
                                         .n = b.shape[request.transpose_b ? 0 : 1],
                                         .k = a.shape[request.transpose_a ? 0 : 1],
                                         .a = a.data,
                                         .lda = left.pitch,
                                         .transpose_a = left.transpose,
                                         .b = b.data,
                                         .ldb = right.pitch,
                                         .transpose_b = right.transpose},
                             .smallest = request.smallest,
                             .k = request.k};
  if (IsTrivial(problem.product)) return std::nullopt;
  if (request.expression == nullptr) return problem;
  const absl::StatusOr<const MapProgram*> program =
      CompileFor(request.operands, *request.expression);
  const absl::StatusOr<Shape> shape =
      BroadcastShape(request.operands, [](std::size_t) { return std::string(); });
  if (!program.ok() || !shape.ok() ||
      !(*shape == request.operands[static_cast<std::size_t>(request.product)].shape))
    return std::nullopt;
  const std::optional<Score> score = FindScore(**program, request.product);
  if (!score.has_value()) return std::nullopt;
  problem.score = *score;
  if (score->vector >= 0) {
    const View vector =
        Broadcast(request.operands[static_cast<std::size_t>(score->vector)], *shape);
    if (vector.strides[0] != 0 && problem.product.m > 1) return std::nullopt;
    problem.vector = vector.data;
    problem.stride = vector.strides[1];
  }
  return problem;
}

}  // namespace

const ProductTopKStrategy* FindProductTopK(const ProductTopK& request, std::string_view product,
                                           const Device& device) {
  const ProductTopKStrategy* strategy = StrategyFor(product);
  if (strategy == nullptr) return nullptr;
  const std::optional<ProductTopKProblem> problem = ProblemOf(request);
  return problem.has_value() && strategy->refuses(*problem, device).empty() ? strategy : nullptr;
}

const ProductTopKStrategy* ChooseProductTopK(const ProductTopK& request, std::string_view product,
                                             const Device& device) {
  const std::optional<ProductTopKProblem> problem = ProblemOf(request);
  return problem.has_value() && Pays(*problem, request.expression != nullptr)
             ? FindProductTopK(request, product, device)
             : nullptr;
}

std::uint64_t ProductTopKScratch(const ProductTopK& request, const ProductTopKStrategy& strategy,
                                 const Device& device) {
  const std::optional<ProductTopKProblem> problem = ProblemOf(request);
  return problem.has_value() ? strategy.scratch(*problem, device) : 0;
}

absl::StatusOr<Stats> RunProductTopK(Stream& stream, const ProductTopK& request,
                                     const ProductTopKStrategy& strategy, const Output& values,
                                     const Output& indices, const RunOptions& options) {
  std::optional<ProductTopKProblem> problem = ProblemOf(request);
  if (!problem.has_value()) return absl::InternalError("no product that selects");
  ASSIGN_OR_RETURN(problem->values, values.Get());
  ASSIGN_OR_RETURN(void* const second, indices.Get());
  problem->indices = static_cast<std::int64_t*>(second);
  const Cost cost = strategy.cost(*problem);
  Stats stats{.strategy = strategy.name, .bytes = cost.bytes, .flops = cost.flops};
  absl::Status status = Finished(
      stream,
      [&] {
        const ProfilerRange range(strategy.name);
        const auto launch = [&] { strategy.launch(*problem, stream); };
        if (options.timing) {
          stats.kernel_us = stream.Time(launch);
        } else {
          launch();
        }
      },
      /*wait=*/!options.enqueue_only || options.timing);
  if (!status.ok()) return status;
  return stats;
}

}  // namespace tessera
