// Small operations on a stream that lingers: bit by bit what a stream without gives, whatever comes
// between them.
#include <chrono>
#include <cstring>
#include <thread>

#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr microseconds kLong = milliseconds(20);
constexpr std::int64_t kElements = 20000;

class PersistentTest : public BackendDTypeTest {
 protected:
  // Launches every operation.
  Stream& plain() const { return TestStream(backend()); }
  std::unique_ptr<Stream> Lingering(microseconds linger = kLong) const {
    std::unique_ptr<Stream> stream = *MakeStream(*TestDevice(backend()));
    EXPECT_TRUE(SetLinger(*stream, linger).ok());
    return stream;
  }
  // As a request of its own.
  static Stream& Fresh(const std::unique_ptr<Stream>& stream) {
    EXPECT_TRUE(BeginRequest(*stream).ok());
    return *stream;
  }
  std::int64_t most() const { return (32 << 10) / static_cast<std::int64_t>(SizeOf(dtype())); }

  static void ExpectSame(const absl::StatusOr<ScalarResult>& got,
                         const absl::StatusOr<ScalarResult>& want) {
    ASSERT_TRUE(got.ok()) << got.status();
    ASSERT_TRUE(want.ok()) << want.status();
    EXPECT_EQ(std::memcmp(&got->value.real, &want->value.real, sizeof(double)), 0)
        << got->value.real << " " << want->value.real;
    EXPECT_EQ(got->value.integer, want->value.integer);
    EXPECT_EQ(got->value.index, want->value.index);
  }
};

TEST_P(PersistentTest, HasTheBitsOfALaunch) {
  DispatchDType(dtype(), [&]<class T>(T) {
    DeviceArray<T> x(plain(), NormalVector<T>(kElements, 1, 0.25)),
        y(plain(), NormalVector<T>(kElements, 2), 3);
    auto stream = Lingering();
    for (std::int64_t n :
         {std::int64_t{0}, std::int64_t{1}, std::int64_t{7}, std::int64_t{255}, std::int64_t{1024},
          std::int64_t{2047}, most() - 1, most(), most() + 1}) {
      for (int offset : {0, 1, 5}) {
        SCOPED_TRACE(absl::StrCat(n, " elements from ", offset));
        const View a = VectorView(x.data() + offset, n), b = VectorView(y.data() + 2 * offset, n);
        ExpectSame(RunDot(Fresh(stream), a, b, {}), RunDot(plain(), a, b, {}));
        for (ReduceOp op : kAllReduceOps) {
          if (n == 0 && NeedsElements(op)) continue;
          ExpectSame(RunReduce(Fresh(stream), a, op, {}), RunReduce(plain(), a, op, {}));
        }
        if (HasFailure()) return;
      }
    }
  });
}

// The kernel that stays has read what was at the same place before.
TEST_P(PersistentTest, SeesWhatIsWrittenMeanwhile) {
  DispatchDType(dtype(), [&]<class T>(T) {
    auto stream = Lingering();
    const std::int64_t n = most();
    DeviceArray<T> x(plain(), n);
    const View view = VectorView(x.data(), n);
    for (std::uint64_t round = 0; round < (Watched() ? 20 : 2000); ++round) {
      const std::vector<T> values = NormalVector<T>(n, 100 + round);
      // By a copy, and every other time by a kernel.
      ASSERT_TRUE(CopyToDevice(plain(), x.data(), values.data(), values.size() * sizeof(T)).ok());
      if (round % 2 == 1) {
        ASSERT_TRUE(RunAdd(plain(), view, view, x.data(), {}).ok());
      }
      ASSERT_TRUE(Synchronize(plain()).ok());
      ExpectSame(RunReduce(Fresh(stream), view, ReduceOp::kSum, {}),
                 RunReduce(plain(), view, ReduceOp::kSum, {}));
      ExpectSame(RunDot(Fresh(stream), view, view, {}), RunDot(plain(), view, view, {}));
      if (HasFailure()) return;
    }
  });
}

// Whatever the kernel is doing when more work comes: waiting, leaving, gone.
TEST_P(PersistentTest, TakesWorkAtAnyTime) {
  DispatchDType(dtype(), [&]<class T>(T) {
    auto stream = Lingering(microseconds(100));
    DeviceArray<T> x(plain(), NormalVector<T>(kElements, 3, 0.25));
    Random random(4);
    for (int i = 0; i < (Watched() ? 50 : 3000); ++i) {
      const View view = VectorView(x.data() + random.Bits() % 64,
                                   static_cast<std::int64_t>(1 + random.Bits() % 2000));
      const auto want = RunReduce(plain(), view, ReduceOp::kSum, {});
      // Around the moment at which it leaves.
      const auto until = std::chrono::steady_clock::now() + microseconds(random.Bits() % 200);
      while (std::chrono::steady_clock::now() < until) {
      }
      ExpectSame(RunReduce(Fresh(stream), view, ReduceOp::kSum, {}), want);
      if (HasFailure()) return;
    }
  });
}

// Kernels, copies and larger operations on the same stream come behind what it has been given.
TEST_P(PersistentTest, KeepsTheOrderOfTheStream) {
  DispatchDType(dtype(), [&]<class T>(T) {
    auto stream = Lingering();
    const std::int64_t n = 1000;
    DeviceArray<T> x(plain(), NormalVector<T>(n, 5)), out(plain(), n);
    const View view = VectorView(x.data(), n), sums = VectorView(out.data(), n);
    for (int i = 0; i < (Watched() ? 5 : 200); ++i) {
      ExpectSame(RunDot(Fresh(stream), view, view, {}), RunDot(plain(), view, view, {}));
      // Enqueued only: the next operation reads what it writes.
      RunOptions later;
      later.enqueue_only = true;
      ASSERT_TRUE(RunAdd(*stream, view, view, out.data(), later).ok());
      const auto sum = RunReduce(*stream, sums, ReduceOp::kSum, {});
      ExpectSame(sum, RunReduce(plain(), sums, ReduceOp::kSum, {}));
      ASSERT_TRUE(EndRequest(*stream).ok());
      if (HasFailure()) return;
    }
  });
}

TEST_P(PersistentTest, StreamsDoNotDisturbEachOther) {
  DispatchDType(dtype(), [&]<class T>(T) {
    DeviceArray<T> x(plain(), NormalVector<T>(kElements, 6, 0.25));
    DeviceArray<T> large(plain(), NormalVector<T>(Sizes({1 << 22, 1000}).front(), 7));
    DeviceArray<T> out(plain(), Sizes({1 << 22, 1000}).front());
    const View all = VectorView(large.data(), Sizes({1 << 22, 1000}).front());
    std::vector<ScalarResult> want;
    for (int n = 1; n <= 50; ++n)
      want.push_back(*RunReduce(plain(), VectorView(x.data(), n), ReduceOp::kSum, {}));
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (int caller = 0; caller < 4; ++caller) {
      threads.emplace_back([&, caller] {
        auto stream = Lingering();
        for (int i = 0; i < (Watched() ? 10 : 1000); ++i) {
          const int n = 1 + (i + caller) % 50;
          ExpectSame(RunReduce(Fresh(stream), VectorView(x.data(), n), ReduceOp::kSum, {}),
                     want[static_cast<std::size_t>(n - 1)]);
        }
      });
    }
    // Fills the device again and again.
    std::thread other([&] {
      auto stream = Lingering();
      while (!stop) EXPECT_TRUE(RunAdd(*stream, all, all, out.data(), {}).ok());
    });
    for (std::thread& thread : threads) thread.join();
    stop = true;
    other.join();
  });
}

INSTANTIATE_TEST_SUITE_P(Devices, PersistentTest, BackendDTypes(), BackendDTypeName);

}  // namespace
}  // namespace tessera::test
