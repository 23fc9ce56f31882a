// Fuses a Matmul, a Map and a TopK into one kernel (FuseSelections).

#include <algorithm>
#include <cstdint>

#include "kernels/program/program.h"

namespace tessera {
namespace {

// Returns the step whose whole result is the operand. Returns null if anything else reads that
// result, or if the request specifies how the step is computed.
PlannedStep* FoldableAt(ProgramPlan& program, const PlannedOperand& operand) {
  if (operand.kind != PlannedOperand::Kind::kResult || operand.window.has_value()) return nullptr;
  PlannedStep& step = program.steps[operand.step];
  const bool shared = std::any_of(step.operands.begin(), step.operands.end(),
                                  [](const PlannedOperand& one) { return one.sharded; });
  const bool in_scratch =
      step.destinations.size() == 1 && step.destinations[0] == Destination::kScratch;
  return step.status.ok() && step.readers == 1 && step.IsPlain() && !step.options.timing &&
                 !shared && in_scratch
             ? &step
             : nullptr;
}

// Returns the Matmul step whose product is an operand of the step `scores`, or null.
PlannedStep* ProductIn(ProgramPlan& program, const PlannedStep& scores) {
  PlannedStep* product = nullptr;
  for (const PlannedOperand& operand : scores.operands) {
    PlannedStep* const step = FoldableAt(program, operand);
    const auto* matmul = step == nullptr ? nullptr : std::get_if<MatmulSpec>(&step->spec);
    if (matmul != nullptr && !matmul->expression.has_value()) product = step;
  }
  return product;
}

void Fuse(ProgramPlan& program, PlannedStep& top_k, const Device& device) {
  const auto* spec = std::get_if<TopKSpec>(&top_k.spec);
  if (spec == nullptr || !top_k.status.ok() || !top_k.IsPlain()) return;
  const bool along_rows = top_k.views[0].shape.rank == 2 && spec->axis % 2 != 0;
  if (!along_rows || top_k.outcome.stats.strategy != "threshold") return;
  PlannedStep* const scores = FoldableAt(program, top_k.operands[0]);
  if (scores == nullptr) return;
  PlannedStep* product = std::holds_alternative<MatmulSpec>(scores->spec) ? scores : nullptr;
  if (std::holds_alternative<MapSpec>(scores->spec)) product = ProductIn(program, *scores);
  if (product == nullptr) return;
  top_k.scores = static_cast<std::uint32_t>(scores - program.steps.data());
  top_k.product = static_cast<std::uint32_t>(product - program.steps.data());
  top_k.selection =
      ChooseProductTopK(SelectionOf(program, top_k), product->outcome.stats.strategy, device);
  if (top_k.selection == nullptr) return;
  // The statistics of the TopK include the memory traffic and the time of all three steps.
  for (PlannedStep* step : {product, scores}) {
    step->folded = true;
    step->outcome.stats.strategy = top_k.selection->name;
    step->outcome.stats.bytes = 0;
  }
}

}  // namespace

ProductTopK SelectionOf(const ProgramPlan& program, const PlannedStep& top_k) {
  const PlannedStep &product = program.steps[top_k.product], &scores = program.steps[top_k.scores];
  const auto& matmul = std::get<MatmulSpec>(product.spec);
  const auto& selects = std::get<TopKSpec>(top_k.spec);
  ProductTopK request{.a = product.views[0],
                      .b = product.views[1],
                      .transpose_a = matmul.transpose_a,
                      .transpose_b = matmul.transpose_b,
                      .out_dtype = matmul.out_dtype.value_or(product.views[0].dtype),
                      .k = selects.k,
                      .smallest = selects.smallest};
  if (&scores != &product) {
    request.expression = &std::get<MapSpec>(scores.spec).expression;
    request.operands.assign(scores.views.begin(), scores.views.end());
    for (std::size_t i = 0; i < scores.operands.size(); ++i) {
      const PlannedOperand& operand = scores.operands[i];
      if (operand.kind == PlannedOperand::Kind::kResult && operand.step == top_k.product)
        request.product = static_cast<int>(i);
    }
  } else if (matmul.expression.has_value()) {
    request.expression = &*matmul.expression;
    request.operands.assign(product.views.begin() + 1, product.views.end());
    // The product has the shape of the expression's result.
    request.operands[0] = WholeView({request.out_dtype, product.result.arrays[0].shape}, nullptr);
  }
  return request;
}

void FuseSelections(ProgramPlan& program, const Device& device) {
  for (PlannedStep& step : program.steps) Fuse(program, step, device);
}

}  // namespace tessera
