// Checks that the list in strategies.cc is consistent with itself and with the files next to it.
#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/choose/pace.h"
#include "kernels/choose/tuning.h"
#include "kernels/expression/map_cost.h"
#include "tests/described_device.h"
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;

std::string TextOf(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Calls f(path) for the files in a folder and its subfolders that have one of these extensions.
void ForFiles(const fs::path& folder, const std::set<std::string>& extensions, const auto& f) {
  for (const auto& file : fs::recursive_directory_iterator(folder))
    if (extensions.contains(file.path().extension())) f(file.path());
}

constexpr std::string_view kName = ".name = \"";

template <class Problem>
void CheckTable() {
  const std::string operation(Problem::kOperation);
  std::set<std::string> strategies, files;
  for (const Strategy<Problem>* strategy : Strategies<Problem>()) {
    const std::string key =
        std::string(Name(strategy->backend)) + "/" + std::string(strategy->name);
    EXPECT_TRUE(strategies.insert(key).second) << operation << " lists " << key << " twice";
    EXPECT_FALSE(strategy->summary.empty()) << key;
    EXPECT_FALSE(strategy->source.empty()) << key;
    EXPECT_NE(strategy->dtypes.bits, 0u) << key;
    EXPECT_NE(strategy->cost, nullptr) << key;
    EXPECT_NE(strategy->roundoff, nullptr) << key;
    EXPECT_NE(strategy->launch, nullptr) << key;
  }
  for (const char* backend : {"cpu", "cuda"}) {
#ifndef TESSERA_WITH_CUDA
    if (std::string(backend) == "cuda") continue;
#endif
    const fs::path folder = fs::path(TESSERA_SOURCE_DIR) / "kernels" / backend / operation;
    ForFiles(folder, {".cc", ".cu"}, [&](const fs::path& file) {
      // Files of an element type instantiate the kernels of a strategy.
      if (std::ranges::any_of(kDTypeInfos, [&](auto& type) { return type.name == file.stem(); }))
        return;
      const std::string text = TextOf(file);
      bool own = false;
      for (std::size_t at = 0; (at = text.find(kName, at)) != std::string::npos;) {
        at += kName.size();
        const std::string name = text.substr(at, text.find('"', at) - at);
        EXPECT_TRUE(files.insert(std::string(backend) + "/" + name).second) << name;
        own |= name == file.stem();
      }
      EXPECT_TRUE(own) << file << " does not define the strategy that it is named after";
    });
  }
  EXPECT_EQ(strategies, files) << "strategies of " << operation
                               << " in the table (left) and in its files (right) differ";
}

// Checks that a file defines the strategy that it is named after, and perhaps variants of it.
TEST(TableTest, EveryStrategyIsInTheTable) {
  ForEachOperation([]<class Problem>() { CheckTable<Problem>(); });
}

// Checks that the chapter of an operation, kernels/cuda/OPERATION/README.md, links every strategy
// by its name.
TEST(TableTest, EveryStrategyIsInItsChapter) {
  Device* cpu = TestDevice(Backend::kCpu);
  for (const StrategyInfo& strategy : ListStrategies({&cpu, 1})) {
    const std::string operation(strategy.operation);
    const std::string chapter =
        TextOf(fs::path(TESSERA_SOURCE_DIR) / "kernels" / "cuda" / operation / "README.md");
    const std::string link = "[`" + std::string(strategy.name) + "`](";
    const std::string on_cpu = "../../cpu/" + operation + "/";
    bool found = false;
    for (std::size_t at = 0; (at = chapter.find(link, at)) != std::string::npos;) {
      at += link.size();
      const bool to_cpu = chapter.compare(at, on_cpu.size(), on_cpu) == 0;
      found |= to_cpu == (strategy.backend == Backend::kCpu);
    }
    EXPECT_TRUE(found) << Name(strategy.backend) << " " << operation << " " << strategy.name;
  }
}

// Returns the paths of files in `folder` that the text names.
std::set<std::string> FilesIn(const std::string& folder, const std::string& text) {
  std::set<std::string> files;
  for (std::size_t at = 0; (at = text.find(folder, at)) != std::string::npos; ++at) {
    const std::size_t end = text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_/", at);
    if (end != std::string::npos && text.compare(end, 3, ".cu") == 0)
      files.insert(text.substr(at, end + 3 - at));
  }
  return files;
}

// Checks that each strategy that teaches sums and products, other than the vendor's libraries,
// names the lessons about its idea, and that each lesson names a strategy that names it.
TEST(TableTest, LessonsAndStrategiesNameEachOther) {
  const fs::path root(TESSERA_SOURCE_DIR);
  int strategies = 0, lessons = 0;
  for (const char* operation : {"dot", "reduce", "matmul"}) {
    ForFiles(root / "kernels/cuda" / operation, {".cu"}, [&](const fs::path& file) {
      const std::string text = TextOf(file);
      if (absl::StrContains(text, ".vendor = true")) return;
      ++strategies;
      const std::set<std::string> named = FilesIn("kernels/lessons/", text);
      EXPECT_FALSE(named.empty()) << file << " names no lesson";
      for (const std::string& lesson : named)
        EXPECT_TRUE(fs::exists(root / lesson)) << file << " names " << lesson;
    });
  }
  ForFiles(root / "kernels/lessons", {".cu"}, [&](const fs::path& file) {
    ++lessons;
    const std::string lesson = fs::relative(file, root);
    const std::set<std::string> named = FilesIn("kernels/cuda/", TextOf(file));
    EXPECT_FALSE(named.empty()) << lesson << " names no strategy";
    for (const std::string& strategy : named) {
      EXPECT_TRUE(FilesIn("kernels/lessons/", TextOf(root / strategy)).contains(lesson))
          << lesson << " names " << strategy << ", which does not name it";
    }
  });
  EXPECT_GT(strategies, 30);
  EXPECT_GT(lessons, 10);
}

// A list of operations is read from operations.h wherever that is possible. The other files that
// name an operation are those in CONTRIBUTING.md's recipe.
TEST(TableTest, OnlyTheFilesOfTheRecipeNameAnOperation) {
  const fs::path root(TESSERA_SOURCE_DIR);
  const std::string all = TextOf(root / "CONTRIBUTING.md");
  const std::size_t begin = all.find("**An RPC that computes**");
  ASSERT_NE(begin, std::string::npos);
  const std::string recipe = all.substr(begin, all.find("\n\n", begin) - begin);
  int files = 0;
  for (const char* folder : {"kernels", "server", "client"}) {
    ForFiles(root / folder, {".h", ".cc"}, [&](const fs::path& file) {
      const std::string text = TextOf(file), name = fs::relative(file, root);
      if (file.parent_path().filename() == "window_sum") return;
      if (!absl::StrContains(text, "WindowSum") && !absl::StrContains(text, "window_sum")) return;
      ++files;
      EXPECT_TRUE(absl::StrContains(recipe, "`" + name + "`"))
          << name << " names an operation, and the recipe does not name the file";
    });
  }
  EXPECT_GT(files, 5);
}

TEST(TableTest, LinksInTheDocumentsResolve) {
  const fs::path root(TESSERA_SOURCE_DIR);
  std::vector<fs::path> documents;
  for (const auto& entry : fs::directory_iterator(root))
    if (entry.path().extension() == ".md") documents.push_back(entry.path());
  for (const char* folder : {"client", "deploy", "docs", "kernels"}) {
    ForFiles(root / folder, {".md"}, [&](const fs::path& file) { documents.push_back(file); });
  }
  int links = 0;
  for (const fs::path& document : documents) {
    const std::string text = TextOf(document);
    for (std::size_t at = 0; (at = text.find("](", at)) != std::string::npos;) {
      at += 2;
      const std::string target = text.substr(at, text.find_first_of("#)", at) - at);
      if (target.empty() || target.find(':') != std::string::npos) continue;  // A heading or a URL.
      ++links;
      EXPECT_TRUE(fs::exists(document.parent_path() / target)) << document << " links " << target;
    }
  }
  EXPECT_GT(links, 100);
}

// Appends the values of each strategy's models for the problem, and its bound for each type.
template <class Problem>
void AppendModels(Problem p, std::string_view name, std::vector<std::string>& lines) {
  for (const Strategy<Problem>* strategy : Strategies<Problem>()) {
    std::string line;
    for (DType dtype : kAllDTypes) {
      p.dtype = dtype;
      if constexpr (requires { p.out_dtype; }) p.out_dtype = dtype;
      if (!strategy->dtypes.Contains(dtype) || !Refusal(*strategy, p).empty()) continue;
      if (line.empty()) {
        const Cost cost = strategy->cost(p);
        const std::uint64_t scratch = strategy->scratch == nullptr ? 0 : strategy->scratch(p);
        const Pace pace(Described(strategy->backend).info());
        line = absl::StrFormat("%s/%s/%s %s:", Name(strategy->backend), Problem::kOperation,
                               strategy->name, name);
        for (const auto& [knob, range] : {std::pair("block", strategy->limits.block_size),
                                          {"grid", strategy->limits.grid_size},
                                          {"items", strategy->limits.items_per_thread}}) {
          if (range.max != 0)
            absl::StrAppendFormat(&line, " %s %d-%d,", knob, range.min, range.max);
        }
        absl::StrAppendFormat(
            &line, " %d bytes, %d flops, %d atomics, depth %d, scratch %d, %.5g s; roundoff",
            cost.bytes, cost.flops, cost.atomics, cost.depth, scratch, pace.Estimate(*strategy, p));
      }
      absl::StrAppendFormat(&line, " %s %.5g", Name(dtype), strategy->roundoff(p));
    }
    if (!line.empty()) lines.push_back(line);
  }
}

void AppendCopies(Backend backend, std::vector<std::string>& lines) {
  const Pace pace(Described(backend).info());
  constexpr std::int64_t kSide = 1024;
  View view = WholeView({DType::kF32, MakeShape({kSide, kSide})}, nullptr);
  for (const auto& [name, row_stride, column_stride] :
       {std::tuple("whole", kSide, std::int64_t{1}),
        {"transposed", std::int64_t{1}, kSide},
        {"spread", std::int64_t{5000}, std::int64_t{3}},
        {"repeated", std::int64_t{0}, std::int64_t{0}}}) {
    view.strides[0] = row_stride;
    view.strides[1] = column_stride;
    for (DType to : {DType::kF32, DType::kF64}) {
      lines.push_back(absl::StrFormat("%s/copy %s f32 to %s: %.5g s", Name(backend), name, Name(to),
                                      pace.EstimateCopy(view, to)));
    }
  }
}

// Refusals, bounds and names are promises, so changing them means changing models.txt as well.
TEST(TableTest, ModelsAreThoseOfTheFile) {
  std::vector<std::string> lines;
  for (const auto& [op, name] : {std::pair(ReduceOp::kSum, "sum"),
                                 {ReduceOp::kProduct, "product"},
                                 {ReduceOp::kNormL2, "l2"},
                                 {ReduceOp::kVariance, "variance"}}) {
    AppendModels<ReduceProblem>({.op = op, .n = 1000003}, absl::StrCat(name, " n=1000003"), lines);
    AppendModels<ReduceAxesProblem>({.op = op, .outer = 300, .length = 1001, .inner = 7},
                                    absl::StrCat(name, " 300x1001x7"), lines);
    AppendModels<ReduceAxesProblem>({.op = op, .outer = 1, .length = 1000003, .inner = 7},
                                    absl::StrCat(name, " 1x1000003x7"), lines);
  }
  for (const auto& [m, n, k] :
       {std::array<std::int64_t, 3>{8, 5000, 3000}, {1000, 3000, 5}, {300, 200, 20000}}) {
    AppendModels<MatmulProblem>({.m = m, .n = n, .k = k, .lda = k, .ldb = n},
                                absl::StrCat(m, "x", n, "x", k), lines);
  }
  for (std::int64_t radius : {40, 400000}) {
    AppendModels<WindowSumProblem>({.n = 1000003, .radius = radius},
                                   absl::StrCat("n=1000003 radius=", radius), lines);
  }
  AppendModels<MapProblem>(ReferenceMap(1000003), "a*b+c n=1000003", lines);
  AppendModels<TopKProblem>({.rows = 5, .n = 1000003, .k = 100}, "5x1000003 k=100", lines);
  AppendModels<TopKProblem>({.rows = 3000, .n = 5000, .k = 4000}, "3000x5000 k=4000", lines);
  // These problems are too small for the memory of cpu_radix to depend on the number of cores.
  AppendModels<SortProblem>({.rows = 1, .n = 100003}, "1x100003", lines);
  AppendModels<SortProblem>({.wants_indices = false, .rows = 16, .n = 4000}, "16x4000", lines);
  AppendModels<SumByLabelProblem>({.n = 100003, .inner = 3, .length = 1024}, "100003x3 to 1024",
                                  lines);
  // The other operations have one line each.
  const std::string others = absl::StrJoin(lines, "\n");
  ForEachOperation([&]<class Problem>() {
    if (!absl::StrContains(others, absl::StrCat("/", Absl(Problem::kOperation), "/")))
      AppendModels(ReferenceProblem<Problem>(1000003), "n=1000003", lines);
  });
  AppendCopies(Backend::kCpu, lines);
#ifdef TESSERA_WITH_CUDA
  AppendCopies(Backend::kCuda, lines);
#endif
  const std::set<std::string> got(lines.begin(), lines.end());

  std::set<std::string> want;
  std::istringstream file(TextOf(fs::path(TESSERA_SOURCE_DIR) / "tests" / "models.txt"));
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("cpu/")) want.insert(line);
#ifdef TESSERA_WITH_CUDA
    if (line.starts_with("cuda/")) want.insert(line);
#endif
  }
  for (const std::string& line : want) EXPECT_TRUE(got.contains(line)) << "the file has " << line;
  for (const std::string& line : lines) EXPECT_TRUE(want.contains(line)) << "it lacks " << line;
}

template <class Problem>
std::string_view Chosen(const Problem& problem, const Device& device) {
  const Strategy<Problem>* strategy = Choose(problem, device);
  return strategy == nullptr ? "none" : strategy->name;
}

MatmulProblem Matmul(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k) {
  return {.dtype = dtype, .out_dtype = dtype, .m = m, .n = n, .k = k, .lda = k, .ldb = n};
}

TEST(ChoiceTest, OnTheCpu) {
  const Described cpu(Backend::kCpu);
  for (DType dtype : kAllDTypes) {
    EXPECT_EQ(Chosen<DotProblem>({.dtype = dtype}, cpu), "fixed_tree");
    EXPECT_EQ(Chosen<ReduceProblem>({.dtype = dtype}, cpu), "fixed_tree");
  }
  const Described many_cores(Backend::kCpu, 0, 3);
  for (DType dtype : {DType::kF32, DType::kF64}) {
    EXPECT_EQ(Chosen(Matmul(dtype, 127, 1000, 1000), many_cores), "cpu_library");
    EXPECT_EQ(Chosen(Matmul(dtype, 1000, 127, 1000), many_cores), "cpu_library");
    EXPECT_EQ(Chosen(Matmul(dtype, 128, 128, 16), many_cores), "cpu_library");
    EXPECT_EQ(Chosen(Matmul(dtype, 128, 128, 17), many_cores), "cpu_cache_tiled");
    EXPECT_EQ(Chosen(Matmul(dtype, 128, 128, 1000), cpu), "cpu_library");
    EXPECT_EQ(Chosen(Matmul(dtype, 1797, 1797, 64), cpu), "cpu_library");
  }
  EXPECT_EQ(Chosen(Matmul(DType::kI32, 4, 4, 4), cpu), "cpu_cache_tiled");
  for (DType dtype : kArrayDTypes)
    for (std::string_view chosen :
         {Chosen<TakeProblem>({.dtype = dtype}, cpu), Chosen<SelectProblem>({.dtype = dtype}, cpu),
          Chosen<HistogramProblem>({.dtype = dtype}, cpu),
          Chosen<SearchSortedProblem>({.dtype = dtype}, cpu)})
      EXPECT_EQ(chosen, "cpu_parallel");
  const Described eight_cores(Backend::kCpu, 0, 8);
  for (DType dtype : kArrayDTypes) {
    const SumByLabelProblem narrow{.dtype = dtype, .n = 9, .inner = 31, .length = 9};
    EXPECT_EQ(Chosen(narrow, cpu), "cpu_serial");
    EXPECT_EQ(Chosen(narrow, eight_cores), "cpu_parallel");
    SumByLabelProblem other = narrow;
    other.inner = 32;
    EXPECT_EQ(Chosen(other, cpu), "cpu_parallel");
    other = narrow;
    other.length = 10;
    EXPECT_EQ(Chosen(other, cpu), "cpu_parallel");
  }
}

#ifdef TESSERA_WITH_CUDA
// The vendor's library, which a machine need not have, is not available here.
TEST(ChoiceTest, OnHopper) {
  const Described hopper(Backend::kCuda);
  for (DType dtype : kAllDTypes) {
    EXPECT_EQ(Chosen<DotProblem>({.dtype = dtype}, hopper), "fixed_tree");
    EXPECT_EQ(Chosen<ReduceProblem>({.dtype = dtype}, hopper), "fixed_tree");
    EXPECT_EQ(Chosen<WindowSumProblem>({.dtype = dtype, .radius = 24}, hopper), "simple");
    EXPECT_EQ(Chosen<WindowSumProblem>({.dtype = dtype, .radius = 25}, hopper), "running_sum");
    EXPECT_EQ(Chosen<TopKProblem>({.dtype = dtype, .rows = 3, .n = 5000, .k = kMostTopK}, hopper),
              "threshold");
  }
  EXPECT_EQ(Chosen(Matmul(DType::kF32, 4096, 4096, 4096), hopper), "tensor_f32x3");
  EXPECT_EQ(Chosen(Matmul(DType::kBF16, 4096, 4096, 4096), hopper), "tensor_bf16");
  EXPECT_EQ(Chosen(Matmul(DType::kF16, 4096, 4096, 4096), hopper), "tensor_f16");
  EXPECT_EQ(Chosen(Matmul(DType::kF16, 4096, 4096, 4), hopper), "outer_product");
  EXPECT_EQ(Chosen(Matmul(DType::kF32, 4, 400000, 4), hopper), "outer_product");
  EXPECT_EQ(Chosen(Matmul(DType::kF64, 400000, 4, 4), hopper), "naive");
  EXPECT_EQ(Chosen(Matmul(DType::kF64, 4096, 4096, 4096), hopper), "ozaki_f64");
  EXPECT_EQ(Chosen(Matmul(DType::kF64, 2048, 12288, 1024), hopper), "ozaki_f64");
  EXPECT_NE(Chosen(Matmul(DType::kF64, 512, 512, 512), hopper), "ozaki_f64");
  // ozaki_f64 would need gigabytes of scratch memory for a product with few results.
  EXPECT_NE(Chosen(Matmul(DType::kF64, 1024, 1024, 1 << 18), hopper), "ozaki_f64");
}

// There is always a strategy, regardless of the trees, and it rounds no more than the strategy that
// accepts all problems.
TEST(ChoiceTest, OfRandomProducts) {
  const Described hopper(Backend::kCuda);
  Random random(11);
  const auto extent = [&] {
    return static_cast<std::int64_t>(std::exp2(static_cast<double>(random.Bits() % 1500) / 100));
  };
  std::set<std::string_view> chosen;
  for (int i = 0; i < 20000; ++i) {
    const DType dtype = std::array{DType::kF32, DType::kF64, DType::kF16, DType::kBF16,
                                   DType::kI32}[random.Bits() % 5];
    MatmulProblem p = Matmul(dtype, extent(), extent(), extent());
    p.transpose_a = random.Bits() % 2 != 0, p.transpose_b = random.Bits() % 2 != 0;
    p.lda = (p.transpose_a ? p.m : p.k) + static_cast<std::int64_t>(random.Bits() % 2);
    p.ldb = (p.transpose_b ? p.k : p.n) + static_cast<std::int64_t>(random.Bits() % 2);
    SCOPED_TRACE(absl::StrCat(Absl(Name(dtype)), " ", p.m, " x ", p.n, " x ", p.k));
    EXPECT_TRUE(std::ranges::any_of(Strategies<MatmulProblem>(), [&](const auto* strategy) {
      return strategy->name == TunedStrategy(p) && strategy->dtypes.Contains(dtype);
    })) << TunedStrategy(p);
    const Strategy<MatmulProblem>* strategy = Choose(p, hopper);
    ASSERT_NE(strategy, nullptr);
    EXPECT_LE(strategy->roundoff(p), ChooseInPlace(p, hopper)->roundoff(p)) << strategy->name;
    chosen.insert(strategy->name);
  }
  EXPECT_GT(chosen.size(), 8u);
  EXPECT_FALSE(chosen.contains("tensor_tf32"));
}

TEST(ChoiceTest, OnWhatIsNotHopper) {
  for (int compute_capability : {75, 80, 100}) {
    const Described other(Backend::kCuda, compute_capability);
    for (DType dtype : {DType::kF32, DType::kF64, DType::kF16, DType::kBF16, DType::kI32}) {
      const std::string_view name = Chosen(Matmul(dtype, 4096, 4096, 4096), other);
      EXPECT_NE(name, "none") << Name(dtype) << " on " << compute_capability;
      for (const char* hopper : {"tensor_f32x3", "tensor_bf16", "tensor_f16", "ozaki_f64"})
        EXPECT_NE(name, hopper);
    }
    EXPECT_EQ(Chosen<HistogramProblem>({.bins = 12288}, other), "privatized");
    EXPECT_EQ(Chosen<HistogramProblem>({.bins = 12289}, other), "global_atomics");
    EXPECT_EQ(Chosen<TopKProblem>({.rows = 3, .n = 5000, .k = 10}, other),
              compute_capability < 80 ? "radix_select" : "threshold");
  }
}
#endif

TEST(TableTest, EveryOperationHasADefaultOnTheCpu) {
  Device* cpu = TestDevice(Backend::kCpu);
  std::set<std::string> defaults;
  for (const StrategyInfo& strategy : ListStrategies({&cpu, 1})) {
    if (strategy.chosen) defaults.insert(std::string(strategy.operation));
    EXPECT_EQ(strategy.available, strategy.backend == Backend::kCpu) << strategy.name;
    EXPECT_EQ(strategy.available, strategy.needs.empty()) << strategy.name;
    EXPECT_GT(strategy.cost.bytes, 0u) << strategy.name;
  }
  std::set<std::string> operations;
  ForEachOperation([&]<class Problem>() { operations.emplace(Problem::kOperation); });
  EXPECT_EQ(defaults, operations);
}

}  // namespace
}  // namespace tessera::test
