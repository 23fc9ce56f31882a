// Small operations on a stream that lingers have the bits of a stream that does not.
#include <chrono>

#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr microseconds kLong = milliseconds(20);
constexpr std::int64_t kElements = 20000;

class PersistentTest : public BackendDTypeTest {
 protected:
  std::unique_ptr<Stream> Lingering(microseconds linger = kLong) const {
    std::unique_ptr<Stream> stream = *MakeStream(*TestDevice(backend()));
    EXPECT_TRUE(SetLinger(*stream, linger).ok());
    return stream;
  }
  static Stream& Fresh(const std::unique_ptr<Stream>& stream) {
    EXPECT_TRUE(BeginRequest(*stream).ok());
    return *stream;
  }
  std::int64_t most() const { return (32 << 10) / static_cast<std::int64_t>(SizeOf(dtype())); }

  // run(stream): the same bits from the stream as from one that launches every operation.
  void Compare(Stream& own, const auto& run) const {
    const std::string got = Bits(run(own));
    EXPECT_EQ(got, Bits(run(stream())));
  }
};

TEST_P(PersistentTest, HasTheBitsOfALaunch) {
  DispatchDType(dtype(), [&]<class T>(T) {
    DeviceArray<T> x(stream(), NormalVector<T>(kElements, 1, 0.25)),
        y(stream(), NormalVector<T>(kElements, 2), 3);
    auto own = Lingering();
    for (std::int64_t n :
         {std::int64_t{0}, std::int64_t{1}, std::int64_t{7}, std::int64_t{255}, std::int64_t{1024},
          std::int64_t{2047}, most() - 1, most(), most() + 1}) {
      for (int offset : {0, 1, 5}) {
        SCOPED_TRACE(absl::StrCat(n, " elements from ", offset));
        const View a = VectorView(x.data() + offset, n), b = VectorView(y.data() + 2 * offset, n);
        Compare(Fresh(own), [&](Stream& s) { return RunDot(s, a, b, {}); });
        for (ReduceOp op : kAllReduceOps) {
          if (n == 0 && NeedsElements(op)) continue;
          Compare(Fresh(own), [&](Stream& s) { return RunReduce(s, a, op, {}); });
        }
        if (HasFailure()) return;
      }
    }
  });
}

// The kernel that stays has read what was at the same place before.
TEST_P(PersistentTest, SeesWhatIsWrittenMeanwhile) {
  DispatchDType(dtype(), [&]<class T>(T) {
    auto own = Lingering();
    const std::int64_t n = most();
    DeviceArray<T> x(stream(), n);
    const View view = x.view();
    for (std::uint64_t round = 0; round < (Watched() ? 20 : 2000); ++round) {
      const std::vector<T> values = NormalVector<T>(n, 100 + round);
      // By a copy, and every other time by a kernel.
      ASSERT_TRUE(CopyToDevice(stream(), x.data(), values.data(), values.size() * sizeof(T)).ok());
      if (round % 2 == 1) {
        ASSERT_TRUE(RunAdd(stream(), view, view, x.data(), {}).ok());
      }
      ASSERT_TRUE(Synchronize(stream()).ok());
      Compare(Fresh(own), [&](Stream& s) { return RunReduce(s, view, ReduceOp::kSum, {}); });
      Compare(Fresh(own), [&](Stream& s) { return RunDot(s, view, view, {}); });
      if (HasFailure()) return;
    }
  });
}

// Whatever the kernel is doing when more work comes: waiting, leaving, gone.
TEST_P(PersistentTest, TakesWorkAtAnyTime) {
  DispatchDType(dtype(), [&]<class T>(T) {
    auto own = Lingering(microseconds(100));
    DeviceArray<T> x(stream(), NormalVector<T>(kElements, 3, 0.25));
    Random random(4);
    for (int i = 0; i < (Watched() ? 50 : 3000); ++i) {
      const View view = VectorView(x.data() + random.Bits() % 64,
                                   static_cast<std::int64_t>(1 + random.Bits() % 2000));
      const std::string want = Bits(RunReduce(stream(), view, ReduceOp::kSum, {}));
      // Around the moment at which it leaves.
      const auto until = std::chrono::steady_clock::now() + microseconds(random.Bits() % 200);
      while (std::chrono::steady_clock::now() < until) {
      }
      EXPECT_EQ(Bits(RunReduce(Fresh(own), view, ReduceOp::kSum, {})), want);
      if (HasFailure()) return;
    }
  });
}

// Kernels, copies and larger operations on the same stream come behind what it has been given.
TEST_P(PersistentTest, KeepsTheOrderOfTheStream) {
  DispatchDType(dtype(), [&]<class T>(T) {
    auto own = Lingering();
    DeviceArray<T> x(stream(), NormalVector<T>(1000, 5)), out(stream(), 1000);
    const View view = x.view();
    for (int i = 0; i < (Watched() ? 5 : 200); ++i) {
      Compare(Fresh(own), [&](Stream& s) { return RunDot(s, view, view, {}); });
      // Enqueued only: the next operation reads what it writes.
      ASSERT_TRUE(RunAdd(*own, view, view, out.data(), {.enqueue_only = true}).ok());
      Compare(*own, [&](Stream& s) { return RunReduce(s, out.view(), ReduceOp::kSum, {}); });
      ASSERT_TRUE(EndRequest(*own).ok());
      if (HasFailure()) return;
    }
  });
}

TEST_P(PersistentTest, StreamsDoNotDisturbEachOther) {
  DispatchDType(dtype(), [&]<class T>(T) {
    DeviceArray<T> x(stream(), NormalVector<T>(kElements, 6, 0.25));
    const std::int64_t many = Sizes({1 << 22, 1000}).front();
    DeviceArray<T> large(stream(), NormalVector<T>(many, 7)), out(stream(), many);
    std::vector<std::string> want;
    for (int n = 1; n <= 50; ++n)
      want.push_back(Bits(RunReduce(stream(), VectorView(x.data(), n), ReduceOp::kSum, {})));
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (int caller = 0; caller < 4; ++caller) {
      threads.emplace_back([&, caller] {
        auto own = Lingering();
        for (int i = 0; i < (Watched() ? 10 : 1000); ++i) {
          const int n = 1 + (i + caller) % 50;
          const View view = VectorView(x.data(), n);
          EXPECT_EQ(Bits(RunReduce(Fresh(own), view, ReduceOp::kSum, {})), At(want, n - 1));
        }
      });
    }
    std::thread other([&] {
      auto own = Lingering();
      while (!stop) EXPECT_TRUE(RunAdd(*own, large.view(), large.view(), out.data(), {}).ok());
    });
    for (std::thread& thread : threads) thread.join();
    stop = true;
    other.join();
  });
}

INSTANTIATE_TEST_SUITE_P(Devices, PersistentTest, BackendDTypes(), BackendDTypeName);

}  // namespace
}  // namespace tessera::test
