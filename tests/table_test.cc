// The list in strategies.cc against the files beside it and against itself.
#include <filesystem>
#include <set>

#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;

template <class Problem>
void CheckTable() {
  const std::string operation(kOperation<Problem>);
  std::set<std::string> rows, files;
  for (const Strategy<Problem>* row : Strategies<Problem>()) {
    const std::string key = std::string(Name(row->backend)) + "/" + std::string(row->name);
    EXPECT_TRUE(rows.insert(key).second) << operation << " lists " << key << " twice";
    EXPECT_FALSE(row->summary.empty()) << key;
    EXPECT_FALSE(row->source.empty()) << key;
    EXPECT_NE(row->dtypes.bits, 0u) << key;
    EXPECT_NE(row->cost, nullptr) << key;
    EXPECT_NE(row->roundoff, nullptr) << key;
    EXPECT_NE(row->launch, nullptr) << key;
  }
  for (const char* backend : {"cpu", "cuda"}) {
#ifndef TESSERA_WITH_CUDA
    if (std::string(backend) == "cuda") continue;
#endif
    for (const auto& file :
         fs::directory_iterator(fs::path(TESSERA_SOURCE_DIR) / "kernels" / backend / operation)) {
      const std::string extension = file.path().extension();
      if (extension == ".cc" || extension == ".cu")
        files.insert(std::string(backend) + "/" + file.path().stem().string());
    }
  }
  EXPECT_EQ(rows, files) << "rows of " << operation << " (left) and its files (right) differ";
}

TEST(TableTest, EveryFileHasARowOfItsName) {
  CheckTable<DotProblem>();
  CheckTable<ReduceProblem>();
  CheckTable<ReduceAxesProblem>();
  CheckTable<MatmulProblem>();
  CheckTable<AddProblem>();
  CheckTable<WindowSumProblem>();
}

TEST(TableTest, EveryOperationHasADefaultOnTheCpu) {
  Device* cpu = TestDevice(Backend::kCpu);
  std::set<std::string> defaults;
  for (const StrategyInfo& row : ListStrategies({&cpu, 1})) {
    if (row.chosen) defaults.insert(std::string(row.operation));
    EXPECT_EQ(row.available, row.backend == Backend::kCpu) << row.name;
    EXPECT_EQ(row.available, row.needs.empty()) << row.name;
    EXPECT_GT(row.cost.bytes, 0u) << row.name;
  }
  EXPECT_EQ(defaults,
            (std::set<std::string>{"add", "dot", "matmul", "reduce", "reduce_axes", "window_sum"}));
}

}  // namespace
}  // namespace tessera::test
