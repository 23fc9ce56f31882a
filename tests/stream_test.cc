// The memory that a request may take, and when it is returned.
#include <sys/mman.h>

#include <chrono>

#include "kernels/device/guard.h"
#include "kernels/run/operation.h"
#include "tests/fake_device.h"
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

TEST(BudgetTest, TakesAllOrNothing) {
  Budget budget(100);
  EXPECT_TRUE(budget.TryTake(60));
  EXPECT_FALSE(budget.TryTake(41));
  EXPECT_FALSE(budget.TryTake(UINT64_MAX));
  EXPECT_TRUE(budget.TryTake(40));
  EXPECT_EQ(budget.free(), 0u);
  budget.Return(60);
  EXPECT_EQ(budget.used(), 40u);
  EXPECT_EQ(budget.limit(), 100u);
}

TEST(BudgetTest, ManyThreadsNeverTakeMoreThanThereIs) {
  Budget budget(10);
  std::atomic<int> holders{0}, most{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 2000; ++round) {
        if (!budget.TryTake(4)) continue;
        const int now = ++holders;
        for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
        }
        --holders;
        budget.Return(4);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(most, 2);
  EXPECT_EQ(budget.used(), 0u);
}

class StreamTest : public BackendTest {
 protected:
  std::unique_ptr<Stream> NewStream() { return *MakeStream(*TestDevice(GetParam())); }
};

TEST_P(StreamTest, ScratchIsChargedBeforeItIsAllocatedAndReturnedWhenTheRequestEnds) {
  Limited l(GetParam(), 8 * kMiB);
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(BeginRequest(*l.stream).ok());
    ASSERT_TRUE(Scratch(*l.stream, 100).ok());
    ASSERT_TRUE(Scratch(*l.stream, 4 * kMiB).ok());
    EXPECT_EQ(l.budget.used(), 4 * kMiB) << "the stream's own block is not counted";
    const auto more = Scratch(*l.stream, 5 * kMiB);
    EXPECT_EQ(more.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(ErrorReason(more.status()), "SCRATCH_EXHAUSTED");
    auto figures = ErrorMetadata(more.status());
    EXPECT_EQ(figures["requested"], absl::StrCat(5 * kMiB));
    EXPECT_EQ(figures["free"], absl::StrCat(4 * kMiB));
    EXPECT_EQ(figures["total"], absl::StrCat(8 * kMiB));
    EXPECT_EQ(l.budget.used(), 4 * kMiB);
    ASSERT_TRUE(EndRequest(*l.stream).ok());
    EXPECT_EQ(l.budget.used(), 0u);
  }
  void* kept = *Scratch(*l.stream, 1);
  ASSERT_TRUE(EndRequest(*l.stream).ok());
  EXPECT_EQ(*Scratch(*l.stream, kMiB), kept) << "a small request gets the block of the last one";
  l.stream.reset();
  EXPECT_EQ(l.budget.used(), 0u);
}

// The stream keeps its own block, even if another block was allocated first.
TEST_P(StreamTest, ALargeBlockBeforeTheStreamsOwnIsReturned) {
  Limited l(GetParam(), 8 * kMiB);
  ASSERT_TRUE(Scratch(*l.stream, 4 * kMiB).ok());
  void* own = *Scratch(*l.stream, 1);
  EXPECT_EQ(l.budget.used(), 4 * kMiB);
  ASSERT_TRUE(EndRequest(*l.stream).ok());
  EXPECT_EQ(l.budget.used(), 0u);
  EXPECT_EQ(*Scratch(*l.stream, 1), own);
  l.stream.reset();
  EXPECT_EQ(l.budget.used(), 0u);
}

TEST_P(StreamTest, ScratchBehindAMarkIsHandedOutAgain) {
  Limited l(GetParam(), 8 * kMiB);
  const void* const kept = *Scratch(*l.stream, 100);
  const ScratchMark mark = l.stream->MarkScratch();
  std::vector<void*> first;
  for (int round = 0; round < 10; ++round) {
    std::vector<void*> taken;
    for (std::uint64_t bytes : {3 * kMiB, 2 * kMiB, kMiB / 2})
      taken.push_back(Get(Scratch(*l.stream, bytes)));
    if (round == 0) first = taken;
    EXPECT_EQ(taken, first);
    EXPECT_EQ(l.budget.used(), 6 * kMiB) << "one block each";
    EXPECT_FALSE(Scratch(*l.stream, 4 * kMiB).ok());
    EXPECT_EQ(*Scratch(*l.stream, 1), static_cast<char*>(taken[2]) + kMiB / 2)
        << "what is refused takes no room";
    l.stream->RewindScratch(mark);
  }
  EXPECT_EQ(*Scratch(*l.stream, 1), static_cast<const char*>(kept) + 256);
  ASSERT_TRUE(EndRequest(*l.stream).ok());
  EXPECT_EQ(l.budget.used(), 0u);
}

TEST_P(StreamTest, ABlockThatCannotBeAllocatedIsNotCharged) {
  Limited l(GetParam(), std::uint64_t{1} << 60);
  EXPECT_EQ(Scratch(*l.stream, std::size_t{1} << 50).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(l.budget.used(), 0u);
}

TEST_P(StreamTest, HostScratchIsChargedToo) {
  Limited l(GetParam(), 2 * kMiB);
  const auto take = [&] {
    return Guard(l.stream->device(), [&] { l.stream->HostScratch(2 * kMiB); });
  };
  EXPECT_TRUE(take().ok());
  EXPECT_EQ(l.budget.used(), 2 * kMiB);
  EXPECT_EQ(ErrorReason(take()), "SCRATCH_EXHAUSTED");
  ASSERT_TRUE(EndRequest(*l.stream).ok());
  EXPECT_EQ(l.budget.used(), 0u);
}

TEST_P(StreamTest, RepeatedElementsNeedNoMemory) {
  const std::int64_t n = std::min<std::int64_t>(Largest(), std::int64_t{1} << 24);
  const Limited l(GetParam(), GetParam() == Backend::kCpu ? 2 * kMiB : 40 * kMiB);
  DeviceArray<float> one(*l.stream, std::vector<float>{3});
  const View x = StridedView(one.data(), DType::kF32, {n / 4, 4}, {});
  const auto dot = Get(RunDot(*l.stream, x, x, {}));
  EXPECT_EQ(dot.value.real, 9.0 * static_cast<double>(n / 4 * 4));
  const auto sum = Get(RunReduce(*l.stream, x, ReduceOp::kSum, {}));
  EXPECT_EQ(sum.value.real, 3.0 * static_cast<double>(n / 4 * 4));
  ASSERT_TRUE(EndRequest(*l.stream).ok());

  DeviceArray<float> out(*l.stream, n / 4 * 4);
  Get(RunAdd(*l.stream, x, x, out.data(), {}));
  for (float value : out.Values()) ASSERT_EQ(value, 6);
}

// Returns non-contiguous views, of many ranks, of one array of n elements.
std::vector<View> StridedViews(const View& all) {
  const std::int64_t n = all.elements(), side = 200, pitch = 211;
  std::vector<View> views;
  for (const StridedWindow& w : {StridedWindow{n - 1, {n}, {-1}},            // reversed
                                 {1, {(n - 1) / 2}, {2}},                    // every other
                                 {3, {side, side}, {pitch, 1}},              // a pitch
                                 {3, {side, side}, {1, pitch}},              // a transpose
                                 {0, {5, side, 1, side}, {7, pitch, 0, 1}},  // overlapping
                                 {9, {70000, 3}, {0, 2}},                    // repeated rows
                                 {9, {3, 70000}, {2, 0}},                    // repeated elements
                                 {0, {2, 2, 2, 3, 5, 7, 11, 13}, {1, 0, 5, 0, 9, 1000, 3, 2}},
                                 {0, {1, 1}, {0, 0}}})
    views.push_back(w.Of(all.data, all.dtype));
  return views;
}

TEST_P(StreamTest, StridedOperandsGiveTheBitsOfTheirCopies) {
  auto stream = NewStream();
  for (DType dtype : kAllDTypes) {
    DispatchDType(dtype, [&]<class T>(T) {
      DeviceArray<T> array(*stream, NormalVector<T>(60007, 5, 0.25), 1);
      for (const View& view : StridedViews(array.view())) {
        SCOPED_TRACE(absl::StrCat(Absl(Name(dtype)), " ", ToString(view.shape)));
        ASSERT_TRUE(BeginRequest(*stream).ok());
        DeviceArray<T> copy(*stream, view.elements());
        ASSERT_TRUE(RunCopy(*stream, view, dtype, copy.data()).ok());
        const View whole = WholeView({dtype, view.shape}, copy.data());
        // Operations that read in place need at most this much. A copy of a large view would need
        // more.
        const Limited small(GetParam(), GetParam() == Backend::kCpu ? kMiB : 40 * kMiB);
        for (ReduceOp op : kAllReduceOps)
          ASSERT_EQ(Bits(RunReduce(*small.stream, view, op, {})),
                    Bits(RunReduce(*stream, whole, op, {})))
              << Name(op);
        const auto sum = [&](Stream& by, const View& a, const View& b) {
          DeviceArray<T> out(*stream, view.elements());
          Get(RunAdd(by, a, b, out.data(), {}));
          const std::vector<T> values = out.Values();
          return std::string(reinterpret_cast<const char*>(values.data()),
                             values.size() * sizeof(T));
        };
        for (const auto& [a, b] :
             {std::pair(view, view), std::pair(view, whole), std::pair(whole, view)}) {
          ASSERT_EQ(Bits(RunDot(*small.stream, a, b, {})), Bits(RunDot(*stream, whole, whole, {})));
          ASSERT_TRUE(sum(*small.stream, a, b) == sum(*stream, whole, whole));
        }
      }
    });
  }
}

TEST_P(StreamTest, ConversionsOfStridedArraysNeedAPieceOnly) {
  Limited l(GetParam(), kMiB);
  DeviceArray<float> array(*l.stream, NormalVector<float>(60007, 7));
  for (const View& view : StridedViews(array.view())) {
    SCOPED_TRACE(ToString(view.shape));
    DeviceArray<float> plain(*l.stream, view.elements());
    DeviceArray<double> wide(*l.stream, view.elements());
    ASSERT_TRUE(RunCopy(*l.stream, view, DType::kF32, plain.data()).ok());
    ASSERT_TRUE(BeginRequest(*l.stream).ok());
    ASSERT_TRUE(RunCopy(*l.stream, view, DType::kF64, wide.data()).ok());
    const auto want = plain.Values();
    const auto got = wide.Values();
    for (std::size_t i = 0; i < want.size(); ++i) ASSERT_EQ(got[i], want[i]) << i;
  }
}

TEST_P(StreamTest, ACopyBeyondTheLimitIsRefusedAtOnce) {
  const Limited l(GetParam(), 2 * kMiB);
  DeviceArray<float> one(*l.stream, std::vector<float>{1});
  const View x = StridedView(one.data(), DType::kF32, {12000, 12000}, {});
  bool asked = false;
  const auto stats = RunMatmul(*l.stream, x, x, false, false, DType::kF32,
                               [&]() -> absl::StatusOr<void*> {
                                 asked = true;
                                 return absl::InternalError("not wanted");
                               },
                               {});
  EXPECT_EQ(ErrorReason(stats.status()), "SCRATCH_EXHAUSTED") << stats.status();
  auto figures = ErrorMetadata(stats.status());
  EXPECT_GE(std::stoull(figures["requested"]), std::uint64_t{2} * 12000 * 12000 * 4);
  EXPECT_EQ(figures["total"], absl::StrCat(2 * kMiB));
  EXPECT_FALSE(asked);
  EXPECT_EQ(l.budget.used(), 0u);
}

TEST(ScratchLimitTest, WhatTakesAllOfItRuns) {
  const float one = 1;
  const View x = StridedView(&one, DType::kF32, {1 << 19}, {});  // A copy of it has 2 MiB.
  for (const auto& [limit, reason] :
       {std::pair(2 * kMiB, ""), {2 * kMiB - 1, "SCRATCH_EXHAUSTED"}}) {
    const Limited l(Backend::kCpu, limit);
    const auto result = RunReduce(*l.stream, x, ReduceOp::kSum, {.strategy = "cpu_serial"});
    EXPECT_EQ(ErrorReason(result.status()), reason) << limit;
    ASSERT_TRUE(EndRequest(*l.stream).ok());
  }
}

// The call fits the limit, but others hold the memory. It must not use another strategy, whose bits
// may differ.
TEST_P(StreamTest, WhatFitsTheLimitWaitsForItsTurn) {
  Limited l(GetParam(), 64 * kMiB);
  const std::int64_t side = 1024;
  DeviceArray<float> c(*l.stream, side * side), one(*l.stream, std::vector<float>{1});
  const View x = StridedView(one.data(), DType::kF32, {side, side}, {});
  const auto run = [&] {
    return RunMatmul(*l.stream, x, x, false, false, DType::kF32, c.data(), {}).status();
  };
  ASSERT_TRUE(l.budget.TryTake(63 * kMiB));
  EXPECT_EQ(ErrorReason(run()), "SCRATCH_EXHAUSTED");
  ASSERT_TRUE(EndRequest(*l.stream).ok());
  l.budget.Return(63 * kMiB);
  EXPECT_TRUE(run().ok());
  EXPECT_EQ(c.Values()[1], 1024);
}

TEST_P(StreamTest, ResultsAreAskedForOnceAndWhenEverythingHasBeenChecked) {
  DeviceArray<float> x(stream(), std::vector<float>{1, 2, 3, 4}), out(stream(), 4);
  const View vector = x.view(), matrix = x.view({2, 2});
  const View places = WholeView({DType::kI64, MakeShape({2})}, x.data());
  const View mask = WholeView({DType::kBool, MakeShape({2})}, x.data());
  int asked = 0;
  const auto give = [&]() -> absl::StatusOr<void*> {
    ++asked;
    return out.data();
  };
  Stream& stream = BackendTest::stream();
  const RunOptions unknown = {.strategy = "nobody"};
  const RunOptions launch = {.launch = {.items_per_thread = 4000000000u}};
  for (const RunOptions& bad : {unknown, launch}) {
    EXPECT_FALSE(RunAdd(stream, vector, vector, give, bad).ok());
    EXPECT_FALSE(tessera::Run(WindowSumSpec{1}, stream, {vector}, {give}, bad).ok());
    EXPECT_FALSE(RunTopK(stream, vector, 2, 0, false, give, give, bad).ok());
    EXPECT_FALSE(tessera::Run(ScanSpec{}, stream, {vector}, {give}, bad).ok());
    EXPECT_FALSE(tessera::Run(SortSpec{}, stream, {vector}, {give, give}, bad).ok());
    EXPECT_FALSE(tessera::Run(TakeSpec{}, stream, {vector, places}, {give}, bad).ok());
    EXPECT_FALSE(
        tessera::Run(SelectSpec{.count = 2}, stream, {places, mask}, {give, give}, bad).ok());
    EXPECT_FALSE(tessera::Run(HistogramSpec{.bins = 2}, stream, {vector}, {give}, bad).ok());
    EXPECT_FALSE(tessera::Run(SearchSortedSpec{}, stream, {vector, vector}, {give}, bad).ok());
    EXPECT_FALSE(tessera::Run(SumByLabelSpec{2}, stream, {places, places}, {give}, bad).ok());
    const LinalgSpec inverse{LinalgFunction::kInverse};
    EXPECT_FALSE(tessera::Run(inverse, stream, {matrix}, {give}, bad).ok());
    EXPECT_FALSE(RunMatmul(stream, matrix, matrix, false, false, DType::kF32, give, bad).ok());
    EXPECT_FALSE(RunReduceAxes(stream, matrix, ReduceOp::kSum, {1}, give, bad).ok());
  }
  EXPECT_FALSE(RunAdd(stream, vector, matrix, give, {}).ok());
  EXPECT_FALSE(RunReduceAxes(stream, matrix, ReduceOp::kSum, {5}, give, {}).ok());
  EXPECT_EQ(asked, 0);

  EXPECT_TRUE(RunAdd(stream, vector, vector, give, {}).ok());
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(out.Values(), (std::vector<float>{2, 4, 6, 8}));
  const auto refuse = [&]() -> absl::StatusOr<void*> { return absl::DataLossError("no"); };
  EXPECT_EQ(tessera::Run(WindowSumSpec{1}, stream, {vector}, {refuse}, {}).status().code(),
            absl::StatusCode::kDataLoss);
}

TEST_P(StreamTest, StoppedOperationsAreCancelled) {
  auto stream = NewStream();
  std::atomic<bool> stop{false};
  stream->WatchStop(&stop);
  DeviceArray<float> x(*stream, std::vector<float>{1, 2, 3, 4}), out(*stream, 4);
  const View vector = x.view();
  EXPECT_TRUE(RunDot(*stream, vector, vector, {}).ok());
  stop = true;
  const auto operand = [&](std::size_t, int) -> const View& { return vector; };
  ScalarResult result;
  for (const absl::Status& status : {RunDot(*stream, vector, vector, {}).status(),
                                     RunReduce(*stream, vector, ReduceOp::kSum, {}).status(),
                                     RunAdd(*stream, vector, vector, out.data(), {}).status(),
                                     RunCopy(*stream, vector, DType::kF32, out.data()),
                                     RunDotBatch(*stream, operand, {&result, 1})}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
    EXPECT_EQ(ErrorReason(status), "CANCELLED");
  }
  stream->WatchStop(nullptr);
  EXPECT_TRUE(RunDot(*stream, vector, vector, {}).ok());
}

TESSERA_BACKENDS(StreamTest);

// Launches each CPU strategy on a stopped stream and checks that nothing was computed.
class StopTest : public testing::Test {
 protected:
  StopTest() : stream_(*MakeStream(*TestDevice(Backend::kCpu))) {
    stop_ = true;
    stream_->WatchStop(&stop_);
  }
  template <class Problem, class F>
  void ForRows(Problem problem, const F& untouched) {
    for (const Strategy<Problem>* row : Strategies<Problem>()) {
      if (row->backend != Backend::kCpu || !row->dtypes.Contains(problem.dtype)) continue;
      row->launch(problem, *stream_);
      EXPECT_TRUE(untouched()) << Problem::kOperation << " " << row->name;
    }
  }

  std::atomic<bool> stop_;
  std::unique_ptr<Stream> stream_;
  static constexpr std::int64_t kN = 1 << 18;
  std::vector<float> ones_ = std::vector<float>(kN, 1), out_ = std::vector<float>(kN, -1);
};

TEST_F(StopTest, EveryCpuRowLooksAtTheFlag) {
  Scalar scalar;
  const auto nothing_folded = [&] { return scalar.real == 0; };
  const auto nothing_written = [&] {
    return std::all_of(out_.begin(), out_.end(), [](float x) { return x == -1; });
  };
  DotProblem dot{.n = kN, .a = ones_.data(), .b = ones_.data()};
  dot.result = &scalar;
  ForRows(dot, nothing_folded);
  ReduceProblem reduce{.n = kN, .x = ones_.data()};
  reduce.result = &scalar;
  ForRows(reduce, nothing_folded);
  ForRows(AddProblem{.n = kN, .a = ones_.data(), .b = ones_.data(), .out = out_.data()},
          nothing_written);
  ForRows(WindowSumProblem{.n = kN, .radius = 3, .x = ones_.data(), .out = out_.data()},
          nothing_written);
  for (const auto& [outer, inner] : {std::pair(std::int64_t{1}, std::int64_t{1}), {64, 1}, {1, 64}})
    ForRows(ScanProblem{.outer = outer,
                        .length = kN / outer / inner,
                        .inner = inner,
                        .x = ones_.data(),
                        .out = out_.data()},
            nothing_written);
  for (std::int64_t rows : {1, 64, 1 << 14})
    ForRows(SortProblem{.wants_indices = false,
                        .rows = rows,
                        .n = kN / rows,
                        .x = ones_.data(),
                        .values = out_.data()},
            nothing_written);
  const std::vector<std::int32_t> zeros(kN);
  for (std::int64_t inner : {1, 64})
    ForRows(TakeProblem{.index_dtype = DType::kI32,
                        .length = kN / inner,
                        .inner = inner,
                        .count = kN / inner,
                        .strides = {0, inner, 1},
                        .x = ones_.data(),
                        .indices = zeros.data(),
                        .out = out_.data(),
                        .result = &scalar},
            nothing_written);
  const std::vector<std::uint8_t> mask(kN, 1);
  ForRows(SelectProblem{.wants_indices = false,
                        .n = kN,
                        .count = kN,
                        .x = ones_.data(),
                        .mask = mask.data(),
                        .values = out_.data()},
          nothing_written);
  std::int64_t count = 0;
  ForRows(HistogramProblem{.n = kN, .bins = 1, .x = ones_.data(), .counts = &count},
          [&] { return count == 0; });
  std::vector<std::int64_t> places(kN, -1);
  ForRows(
      SearchSortedProblem{
          .length = 1, .n = kN, .x = ones_.data(), .keys = ones_.data(), .out = places.data()},
      [&] { return places.back() == -1; });
  for (std::int64_t inner : {1, 64})
    ForRows(SumByLabelProblem{.label_dtype = DType::kI32,
                              .n = kN / inner,
                              .inner = inner,
                              .length = kN / inner,
                              .x = ones_.data(),
                              .labels = zeros.data(),
                              .out = out_.data(),
                              .result = &scalar},
            nothing_written);
  ForRows(LinalgProblem{.function = LinalgFunction::kQr,
                        .stack = kN / 128,
                        .m = 8,
                        .n = 8,
                        .x = ones_.data(),
                        .out = out_.data(),
                        .result = &scalar},
          nothing_written);
  std::vector<std::int64_t> indices(16, -1);
  ForRows(
      TopKProblem{.rows = 4,
                  .n = kN / 4,
                  .k = 4,
                  .x = ones_.data(),
                  .values = out_.data(),
                  .indices = indices.data()},
      [&] { return std::all_of(indices.begin(), indices.end(), [](auto i) { return i == -1; }); });
  ForRows(MatmulProblem{.m = 512,
                        .n = 512,
                        .k = 512,
                        .a = ones_.data(),
                        .lda = 512,
                        .b = ones_.data(),
                        .ldb = 512,
                        .c = out_.data()},
          nothing_written);
  ForRows(
      ReduceAxesProblem{
          .outer = 1, .length = 512, .inner = 512, .x = ones_.data(), .out = out_.data()},
      [&] { return std::none_of(out_.begin(), out_.end(), [](float x) { return x == 512; }); });
}

// The slowest strategy, with half a minute of work, is stopped before its last element.
TEST_F(StopTest, LongWorkEndsSoon) {
  stop_ = false;
  DeviceArray<float> one(*stream_, std::vector<float>{1}), out(*stream_, 3000 * 3000);
  const View x = StridedView(one.data(), DType::kF32, {3000, 3000}, {});
  std::thread leaves([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    stop_ = true;
  });
  const auto stats =
      RunMatmul(*stream_, x, x, false, false, DType::kF32, out.data(), {.strategy = "cpu_naive"});
  leaves.join();
  EXPECT_EQ(ErrorReason(stats.status()), "CANCELLED");
  EXPECT_TRUE(std::isnan(out.Values().back()));
}

// The caller leaves once the first element has been read. The zeros of the array take no memory.
TEST_F(StopTest, ALongAxisIsLeftInTheMiddle) {
  constexpr std::int64_t kLength = std::int64_t{1} << 31;
  constexpr std::size_t kBytes = kLength * sizeof(float);
  void* const memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  float* const x = static_cast<float*>(memory);
  x[kLength - 1] = 1;
  stop_ = false;
  std::thread leaves([&] {
    unsigned char is_read = 0;
    while (mincore(memory, 1, &is_read) == 0 && is_read % 2 == 0) std::this_thread::yield();
    stop_ = true;
  });
  ForRows(ReduceAxesProblem{.outer = 1, .length = kLength, .inner = 1, .x = x, .out = out_.data()},
          [&] { return out_[0] != 1; });
  leaves.join();
  munmap(memory, kBytes);
}

// The caller leaves when the strategy writes a byte of the result that is also the flag.
TEST_F(StopTest, LongRowsAreLeftInTheMiddle) {
  constexpr std::int64_t kRow = (std::int64_t{1} << 17) - 1;
  const std::vector<float> x(kRow, std::bit_cast<float>(0x01010101));
  const auto watch = [&](void* flag) {
    stream_->WatchStop(static_cast<const std::atomic<bool>*>(flag));
  };
  const auto values_left = [&] {
    const bool left = out_[0] == x[0] && out_[kRow - 1] == 0;
    out_.assign(kRow, 0);
    return left;
  };
  out_.assign(kRow, 0);
  watch(out_.data());
  ForRows(
      SortProblem{
          .wants_indices = false, .rows = 1, .n = kRow, .x = x.data(), .values = out_.data()},
      values_left);
  const std::vector<std::int32_t> zeros(kRow);
  Scalar scalar;
  for (bool along : {false, true})
    for (std::int64_t stride : {0, 1})
      ForRows(TakeProblem{.index_dtype = DType::kI32,
                          .along = along,
                          .length = 1,
                          .inner = kRow,
                          .count = 1,
                          .strides = {0, kRow, stride},
                          .x = x.data(),
                          .indices = zeros.data(),
                          .out = out_.data(),
                          .result = &scalar},
              values_left);
  std::vector<std::int64_t> indices(kRow);
  watch(&indices[1]);
  ForRows(
      SortProblem{
          .wants_values = false, .rows = 1, .n = kRow, .x = x.data(), .indices = indices.data()},
      [&] {
        const bool left = indices[1] == 1 && indices.back() == 0;
        indices.assign(kRow, 0);
        return left;
      });
  stream_->WatchStop(nullptr);
}

class AcrossTest : public testing::Test {
 protected:
  AcrossTest() { from_->SetScratchBudget(&budget_); }
  static std::vector<float> Values() {
    std::vector<float> values(3 << 20);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 5003);
    return values;
  }
  FakeDevice source_{"fake:0"}, target_{"fake:1"};
  Budget budget_{2 * kMiB};
  std::unique_ptr<Stream> from_ = *MakeStream(source_), to_ = *MakeStream(target_);
  const std::vector<float> values_ = Values();
  DeviceArray<float> array_{*from_, values_};
};

TEST_F(AcrossTest, CopiesPieceByPiece) {
  DeviceArray<float> plain(*to_, std::ssize(values_));
  ASSERT_TRUE(RunCopyAcross(*from_, array_.view(), DType::kF32, *to_, plain.data()).ok());
  EXPECT_EQ(plain.Values(), values_);
  EXPECT_EQ(budget_.used(), 0u) << "contiguous operands need no scratch memory";
}

TEST_F(AcrossTest, GathersAndConverts) {
  const View view = StridedView(array_.data(), DType::kF32, {1000, 3000}, {1, 1000});
  DeviceArray<std::int64_t> out(*to_, 3000000);
  ASSERT_TRUE(RunCopyAcross(*from_, view, DType::kI64, *to_, out.data()).ok());
  const auto got = out.Values();
  for (std::int64_t i = 0; i < 3000000; ++i)
    ASSERT_EQ(At(got, i), (i / 3000 + i % 3000 * 1000) % 5003) << i;
}

TEST_F(AcrossTest, FailuresOfEitherSideAndStops) {
  DeviceArray<float> out(*to_, 3 << 20);
  const auto copy = [&] {
    return ErrorReason(RunCopyAcross(*from_, array_.view(), DType::kF32, *to_, out.data()));
  };
  target_.Fail(FakeDevice::Step::kCopyToDevice, DeviceError::Kind::kLost);
  EXPECT_EQ(copy(), "DEVICE_LOST");
  EXPECT_TRUE(target_.lost());
  EXPECT_FALSE(source_.lost());
  source_.Fail(FakeDevice::Step::kCopyToHost, DeviceError::Kind::kFailed);
  EXPECT_EQ(copy(), "CUDA_ERROR");
  const std::atomic<bool> stop{true};
  from_->WatchStop(&stop);
  EXPECT_EQ(copy(), "CANCELLED");
}

TEST(ProbeTest, NoticesALostDevice) {
  FakeDevice device;
  EXPECT_TRUE(Probe(device).ok());
  device.Fail(FakeDevice::Step::kProbe, DeviceError::Kind::kLost);
  EXPECT_EQ(ErrorReason(Probe(device)), "DEVICE_LOST");
  EXPECT_TRUE(device.lost());
}

}  // namespace
}  // namespace tessera::test
