// The assembler of the CUDA toolkit, which needs no GPU, accepts the kernels that Map compiles.
#include "kernels/cuda/compile/kernel_text.h"
#include "tests/expressions.h"
#include "tests/temporary_file.h"

namespace tessera::test {
namespace {

using compiled::KernelPlan;
using compiled::Lies;

bool Assembles(const std::string& text) {
  const TemporaryFile file(text);
  const std::string command =
      absl::StrCat(TESSERA_PTXAS, " -arch=sm_90 -o /dev/null ", file.path());
  return std::system(command.c_str()) == 0;
}

TEST(KernelText, IsWhatTheAssemblerTakes) {
  Random random(1);
  for (int round = 0; round < 60; ++round) {
    const DrawnExpression e = AnyExpression(random);
    KernelPlan plan;
    plan.program = &e.program;
    plan.aligned = Below(random, 4) != 0;
    plan.rank = static_cast<int>(1 + Below(random, kMaxRank));
    plan.wide = Below(random, 3) == 0;
    std::size_t size = SizeOf(e.program.dtype);
    for (const Instruction& in : e.program) {
      const bool loads = in.kind == Instruction::Kind::kLoad;
      if (!loads && in.kind != Instruction::Kind::kCoordinate) continue;
      size = std::max(size, SizeOf(in.dtype));
      plan.lies[in.a] = loads ? static_cast<Lies>(1 + Below(random, 6)) : Lies::kEach;
      plan.moves[in.a] = static_cast<std::uint8_t>(1 + Below(random, (1 << plan.rank) - 1));
    }
    plan.width = std::max(2, static_cast<int>(16 / size) >> Below(random, 3));
    const std::string text = KernelText(plan);
    ASSERT_TRUE(Assembles(text)) << text;
  }
}

TEST(KernelText, EveryOperationAndConversionOfEveryType) {
  for (DType dtype : kArrayDTypes) {
    for (const MapOpInfo& info : kMapOpInfos) {
      Nodes one = {In(0), In(1), In(2)};
      std::vector<std::uint32_t> args;
      for (int j = 0; j < info.arguments; ++j) args.push_back(static_cast<std::uint32_t>(j));
      const bool selects = info.rule == MapRule::kSelect;
      one.push_back(
          Op(info.op, args, info.op == MapOp::kCast ? std::optional(DType::kBF16) : std::nullopt));
      const absl::StatusOr<MapProgram> program =
          CompileExpression(one, {selects ? DType::kBool : dtype, dtype, dtype});
      if (!program.ok()) continue;  // The type lacks the operation.
      KernelPlan plan;
      plan.program = &*program;
      plan.aligned = true;
      for (const Instruction& in : *program)
        if (in.kind == Instruction::Kind::kLoad) plan.lies[in.a] = Lies::kWhole;
      plan.width = static_cast<int>(16 / std::max(SizeOf(dtype), SizeOf(program->dtype)));
      const std::string text = KernelText(plan);
      ASSERT_TRUE(Assembles(text)) << info.name << " of " << Name(dtype) << "\n" << text;
    }
  }
}

// Constants are arguments, so that one kernel serves all constants.
TEST(KernelText, KeysLeaveOutTheValuesOfConstants) {
  const auto key = [](MapOp op, double constant, DType dtype, Lies lies) {
    const auto program = CompileExpression({In(0), Real(constant), Op(op, {0, 1})}, {dtype});
    KernelPlan plan;
    plan.program = &*program;
    plan.lies[0] = lies;
    return KeyOf(plan);
  };
  const std::string one = key(MapOp::kAdd, 2, DType::kF32, Lies::kWhole);
  EXPECT_EQ(key(MapOp::kAdd, 3, DType::kF32, Lies::kWhole), one);
  EXPECT_NE(key(MapOp::kMultiply, 2, DType::kF32, Lies::kWhole), one);
  EXPECT_NE(key(MapOp::kAdd, 2, DType::kF64, Lies::kWhole), one);
  EXPECT_NE(key(MapOp::kAdd, 2, DType::kF32, Lies::kOne), one);
}

}  // namespace
}  // namespace tessera::test
