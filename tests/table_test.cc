// The list in strategies.cc against the files beside it and against itself.
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;

std::string TextOf(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

constexpr std::string_view kName = ".name = \"";

template <class Problem>
void CheckTable() {
  const std::string operation(Problem::kOperation);
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
    for (const auto& file : fs::recursive_directory_iterator(fs::path(TESSERA_SOURCE_DIR) /
                                                             "kernels" / backend / operation)) {
      const std::string extension = file.path().extension();
      if (extension != ".cc" && extension != ".cu") continue;
      const std::string text = TextOf(file.path());
      bool own = false;
      for (std::size_t at = 0; (at = text.find(kName, at)) != std::string::npos;) {
        at += kName.size();
        const std::string name = text.substr(at, text.find('"', at) - at);
        EXPECT_TRUE(files.insert(std::string(backend) + "/" + name).second) << name;
        own |= name == file.path().stem();
      }
      EXPECT_TRUE(own) << file.path() << " does not define the strategy it is named after";
    }
  }
  EXPECT_EQ(rows, files) << "strategies of " << operation
                         << " in the table (left) and in its files (right) differ";
}

// A file defines the strategy it is named after, and perhaps variants of it.
TEST(TableTest, EveryStrategyIsInTheTable) {
  ForEachOperation([]<class Problem>() { CheckTable<Problem>(); });
}

// "cuda/dot/tree_global": where the row's file is, but for its extension.
std::string KeyOf(const StrategyInfo& row) {
  return std::string(Name(row.backend)) + "/" + std::string(row.operation) + "/" +
         std::string(row.name);
}

// Targets of the links [text](target) in Markdown.
std::vector<std::string> LinksIn(std::string_view text) {
  std::vector<std::string> targets;
  for (std::size_t at = 0; (at = text.find("](", at)) != std::string_view::npos;) {
    at += 2;
    targets.emplace_back(text.substr(at, text.find(')', at) - at));
  }
  return targets;
}

// The chapter of an operation, kernels/cuda/OPERATION/README.md, links every strategy by its name:
// those of the CPU to a file in kernels/cpu, those of CUDA to one beside or below the chapter.
TEST(TableTest, EveryStrategyIsInItsChapter) {
  Device* cpu = TestDevice(Backend::kCpu);
  for (const StrategyInfo& row : ListStrategies({&cpu, 1})) {
    const std::string operation(row.operation);
    const std::string chapter =
        TextOf(fs::path(TESSERA_SOURCE_DIR) / "kernels" / "cuda" / operation / "README.md");
    const std::string link = "[`" + std::string(row.name) + "`](";
    const std::string on_cpu = "../../cpu/" + operation + "/";
    bool found = false;
    for (std::size_t at = 0; (at = chapter.find(link, at)) != std::string::npos;) {
      at += link.size();
      const bool to_cpu = chapter.compare(at, on_cpu.size(), on_cpu) == 0;
      found |= to_cpu == (row.backend == Backend::kCpu);
    }
    EXPECT_TRUE(found) << KeyOf(row);
  }
}

TEST(TableTest, LinksInTheDocumentsResolve) {
  const fs::path root(TESSERA_SOURCE_DIR);
  std::vector<fs::path> documents;
  for (const auto& entry : fs::directory_iterator(root)) documents.push_back(entry.path());
  for (const char* folder : {"client", "deploy", "docs", "kernels"}) {
    for (const auto& entry : fs::recursive_directory_iterator(root / folder))
      documents.push_back(entry.path());
  }
  int links = 0;
  for (const fs::path& document : documents) {
    if (document.extension() != ".md") continue;
    for (const std::string& link : LinksIn(TextOf(document))) {
      const std::string target = link.substr(0, link.find('#'));
      if (target.empty() || target.find(':') != std::string::npos) continue;  // a heading, a URL
      ++links;
      EXPECT_TRUE(fs::exists(document.parent_path() / target)) << document << " links " << link;
    }
  }
  EXPECT_GT(links, 100);
}

// The names that clients rely on: a row may join them, none may leave.
TEST(TableTest, NoPromisedRowIsMissing) {
  const std::map<std::string, std::string> promised = {
      {"cpu/dot", "cpu_serial cpu_parallel fixed_tree compensated"},
      {"cpu/reduce", "cpu_serial cpu_parallel fixed_tree compensated"},
      {"cpu/reduce_axes", "cpu_axis"},
      {"cpu/matmul", "cpu_naive cpu_register_tiled cpu_cache_tiled cpu_library"},
      {"cpu/add", "cpu"},
      {"cpu/window_sum", "cpu"},
#ifdef TESSERA_WITH_CUDA
      {"cuda/dot",
       "elementwise block_serial block_serial_atomic thread_partials block_partials tree_global "
       "tree_interleaved tree_sequential hierarchical coarsened warp_shuffle "
       "single_pass fixed_tree compensated cublas"},
      {"cuda/reduce",
       "interleaved coalesced privatized coarsened no_stride grid_stride atomic two_pass "
       "two_kernels_unrolled warp_shuffle single_pass fixed_tree compensated library"},
      {"cuda/reduce_axes", "axis"},
      {"cuda/matmul",
       "naive register_tiled shared_tiled shared_tiled_vectorized double_buffered warp_tiled "
       "skinny tensor_mma tensor_f64 tensor_tf32 tensor_bf16 tensor_f16 tensor_f32x3 cublas"},
      {"cuda/add", "simple"},
      {"cuda/window_sum", "simple shared running_sum"},
#endif
  };
  Device* cpu = TestDevice(Backend::kCpu);
  std::set<std::string> rows;
  for (const StrategyInfo& row : ListStrategies({&cpu, 1})) rows.insert(KeyOf(row));
  for (const auto& [table, names] : promised) {
    std::istringstream words(names);
    for (std::string name; words >> name;)
      EXPECT_TRUE(rows.contains(table + "/" + name)) << table << "/" << name;
  }
}

// The models of a row are asked before anything runs, on whatever a request brings.
template <class Problem>
void CheckModels(std::initializer_list<Problem> problems) {
  for (const Strategy<Problem>* row : Strategies<Problem>()) {
    for (Problem p : problems) {
      for (DType dtype : kAllDTypes) {
        p.dtype = dtype;
        if constexpr (requires { p.out_dtype; }) p.out_dtype = dtype;
        if (!row->dtypes.Contains(dtype) || !Refusal(*row, p).empty()) continue;
        SCOPED_TRACE(std::string(row->name));
        EXPECT_GE(row->roundoff(p), 0);
        const Cost cost = row->cost(p);
        EXPECT_LT(cost.bytes, std::uint64_t{1} << 62);
        EXPECT_LT(cost.flops, std::uint64_t{1} << 62);
      }
    }
  }
}

TEST(TableTest, ModelsTakeEveryProblem) {
  CheckModels<DotProblem>({{.n = 0}, {.n = 1}, {.n = 1000003}});
  CheckModels<ReduceProblem>({{.n = 0}, {.n = 1}, {.n = 1000003}});
  CheckModels<ReduceAxesProblem>(
      {{}, {.outer = 1}, {.length = 5}, {.outer = 3, .length = 5, .inner = 7}});
  CheckModels<AddProblem>({{.n = 0}, {.n = 1}});
  CheckModels<WindowSumProblem>({{.n = 0}, {.n = 1}, {.n = 1000003, .radius = 1000002}});
  for (std::int64_t m : {0, 1, 2, 33, 4099}) {
    for (std::int64_t n : {0, 1, 2, 33, 4099}) {
      for (std::int64_t k : {0, 1, 2, 33, 4099}) {
        SCOPED_TRACE(std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k));
        CheckModels<MatmulProblem>({{.m = m, .n = n, .k = k, .lda = k, .ldb = n}});
        CheckModels<MatmulProblem>({{.m = m,
                                     .n = n,
                                     .k = k,
                                     .lda = m,
                                     .transpose_a = true,
                                     .ldb = k,
                                     .transpose_b = true}});
      }
    }
  }
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
