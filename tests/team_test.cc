// Sharded memory, and operations that are divided among several devices, with the bits of one
// device.
#include <numeric>
#include <random>
#include <utility>

#include "kernels/device/scratch.h"
#include "kernels/run/operation.h"
#include "kernels/team/axis_slabs.h"
#include "kernels/team/matmul_shares.h"
#include "tests/expressions.h"

namespace tessera::test {
namespace {

// Opens eight CPU devices, or all GPUs. A single GPU is opened twice.
std::vector<std::unique_ptr<Device>> OpenDevices(Backend backend) {
  std::vector<std::unique_ptr<Device>> devices;
  const std::size_t gpus = VisibleDevices().size() - 1;
  const std::size_t count = backend == Backend::kCpu ? 8 : std::max<std::size_t>(2, gpus);
  for (std::size_t i = 0; i < count; ++i)
    devices.push_back(*OpenDevice(backend == Backend::kCpu ? absl::StrCat("cpu:", i)
                                                           : absl::StrCat("cuda:", i % gpus)));
  return devices;
}

// An array over the first devices, which are also its team.
class ShardedArray final : public Team {
 public:
  using Streams = std::vector<std::unique_ptr<Stream>>;

  ShardedArray(const Streams& streams, std::size_t count, std::uint64_t bytes) : streams_(streams) {
    std::vector<Device*> some;
    for (std::size_t i = 0; i < count; ++i) some.push_back(&streams[i]->device());
    shards_ = MakeShards(some, bytes);
    auto memory = Allocate(shards_);
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
  }
  // Makes an array with values. In a new request, the stream of one of the devices copies them
  // there.
  template <class T>
  ShardedArray(const Streams& streams, std::size_t count, const std::vector<T>& values,
               Stream& stream)
      : ShardedArray(streams, count, values.size() * sizeof(T)) {
    EXPECT_TRUE(BeginRequest(stream).ok());
    EXPECT_TRUE(CopyToDevice(stream, memory(), values.data(), values.size() * sizeof(T)).ok());
  }
  const void* data() const override { return memory_.data(); }
  absl::Span<const Shard> shards() const override { return shards_; }
  absl::StatusOr<std::vector<Stream*>> Assemble(Stream& own) override {
    std::vector<Stream*> team;
    for (std::size_t i = 0; i < shards_.size(); ++i) {
      team.push_back(streams_[i].get());
      if (team.back() != &own) {
        EXPECT_TRUE(BeginRequest(*team.back()).ok());
      }
    }
    return team;
  }
  void* memory() const { return memory_.data(); }
  // Returns a view of the f32 elements from `first` on.
  View view(std::initializer_list<std::int64_t> shape, std::int64_t first = 0) const {
    return WholeView({DType::kF32, MakeShape(shape)}, static_cast<float*>(memory_.data()) + first);
  }

 private:
  const Streams& streams_;
  std::vector<Shard> shards_;
  Memory memory_;
};

class TeamTest : public BackendTest {
 protected:
  void SetUp() override {
    BackendTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    devices_ = OpenDevices(GetParam());
    for (const auto& device : devices_) streams_.push_back(*MakeStream(*device));
  }
  void TearDown() override {
    for (const auto& stream : streams_) stream->SetScratchBudget(nullptr);
  }
  bool gpu() const { return GetParam() == Backend::kCuda; }
  // Begins a request of the first stream, with these budgets of the first two streams.
  void Start(Budget* own, Budget* other) {
    for (const auto& each : streams_) EXPECT_TRUE(EndRequest(*each).ok());
    streams_[0]->SetScratchBudget(own);
    streams_[1]->SetScratchBudget(other);
    EXPECT_TRUE(BeginRequest(*streams_[0]).ok());
  }
  // Several units per device, and enough to divide. On the CPU there are too few to wake its cores.
  std::int64_t Floats() const { return gpu() ? (std::int64_t{68} << 18) + 4099 : 60'003; }
  std::vector<std::size_t> Counts(std::vector<std::size_t> counts = {2, 3}) const {
    counts.push_back(devices_.size());
    std::erase_if(counts, [&](std::size_t count) { return count > devices_.size(); });
    return counts;
  }

  // Checks that one device and the team give the same bits, and returns them. run(out, options) has
  // a result of that many bytes. devices: how many devices share the work; 0 means at most the
  // whole team.
  template <class F>
  static std::string AloneAndTogether(Stream& stream, Team& team, std::size_t bytes,
                                      std::size_t devices, const F& run) {
    std::string got[2];
    for (const bool together : {false, true}) {
      const Memory out = Get(Allocate(stream.device(), bytes));
      EXPECT_TRUE(Zero(stream, out.data(), bytes).ok());
      RunOptions options;
      if (together) options.team = &team;
      const auto by = static_cast<std::size_t>(Get(run(out.data(), options)).devices);
      if (together && devices == 0) {
        EXPECT_LE(by, team.shards().size());
      } else {
        EXPECT_EQ(by, together ? devices : 1);
      }
      got[together].resize(bytes);
      EXPECT_TRUE(CopyToHost(stream, got[together].data(), out.data(), bytes).ok());
    }
    EXPECT_TRUE(got[0] == got[1]);
    return got[0];
  }
  // Does the same for a reduction along an axis.
  static std::string Fold(Stream& stream, Team& team, std::int64_t bytes, std::size_t devices,
                          const View& x, ReduceOp op, int axis, const MapStage* stage = nullptr) {
    return AloneAndTogether(stream, team, static_cast<std::size_t>(bytes), devices,
                            [&](void* out, const RunOptions& o) {
                              return RunReduceAxes(stream, x, op, {axis}, out, o, stage);
                            });
  }
  // Does the same for an operation with a scalar result, run(options).
  template <class F>
  static void ScalarAloneAndTogether(Team& team, std::string_view strategy, const F& run) {
    const ScalarResult alone = Get(run(RunOptions{.strategy = strategy})),
                       together = Get(run({.strategy = strategy, .team = &team}));
    EXPECT_EQ(Bits(together), Bits(alone)) << strategy;
    EXPECT_EQ(together.stats.devices, static_cast<int>(team.shards().size()));
    EXPECT_EQ(alone.stats.devices, 1);
  }

  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<Stream>> streams_;
};

std::vector<float> RandomFloats(std::int64_t n) {
  std::mt19937 random(7);
  std::vector<float> values(static_cast<std::size_t>(n));
  for (float& value : values) value = static_cast<float>(random() % 20001) / 1000.f - 10.f;
  return values;
}

// Makes the sums of the first rows overflow f32 in the first quarter of the row and return to its
// range in the second.
void LeaveRange(std::int64_t rows, std::int64_t columns, std::vector<float>& values) {
  const std::int64_t quarter = columns / 4;
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    const std::int64_t column = i % columns;
    if (column < 2 * quarter) At(values, i) = column < quarter ? 3e38f : -3e38f;
  }
}

TEST_P(TeamTest, ShardsAreEvenAndWhole) {
  std::vector<Device*> devices;
  for (const auto& device : devices_) devices.push_back(device.get());
  const std::uint64_t unit = devices[0]->info().shard_unit;
  for (std::uint64_t bytes :
       {std::uint64_t{0}, std::uint64_t{1}, unit, unit + 1, 7 * unit, 8 * unit, 1001 * unit - 3}) {
    const std::vector<Shard> shards = MakeShards(devices, bytes);
    std::uint64_t end = 0, least = UINT64_MAX, most = 0;
    for (const Shard& shard : shards) {
      EXPECT_EQ(shard.begin, end);
      EXPECT_EQ(shard.begin % unit, 0u);
      end = shard.end;
      least = std::min(least, AllocationBytes(shard, 2) / unit);
      most = std::max(most, AllocationBytes(shard, 2) / unit);
    }
    EXPECT_EQ(end, bytes);
    EXPECT_LE(most - least, 1u) << bytes;
    EXPECT_EQ(shards.size(),
              std::clamp<std::uint64_t>((bytes + unit - 1) / unit, 1, devices.size()));
  }
}

TEST_P(TeamTest, BytesAcrossTheBoundary) {
  const std::uint64_t unit = devices_[0]->info().shard_unit;
  const std::uint64_t bytes = 5 * unit + 1000;
  ShardedArray array(streams_, 2, bytes);
  std::vector<char> in(bytes), out(bytes);
  std::iota(in.begin(), in.end(), '\x1');
  const View view = array.view({static_cast<std::int64_t>(bytes / 4)});
  for (const int own : {0, 1}) {
    Stream &stream = *streams_[own], &other = *streams_[1 - own];
    const auto fetched = [&](Stream& by, const void* from) {
      EXPECT_TRUE(CopyToHost(by, out.data(), from, bytes).ok());
      return out;
    };
    ASSERT_TRUE(BeginRequest(stream).ok());
    ASSERT_TRUE(Zero(stream, array.memory(), bytes).ok());
    EXPECT_TRUE(fetched(stream, array.memory()) == std::vector<char>(bytes));
    const auto staging = *MakeStaging(stream.device(), bytes);
    std::fill_n(static_cast<char*>(staging.get()), bytes, 'y');
    ASSERT_TRUE(CopyPinnedToDevice(stream, array.memory(), staging.get(), bytes).ok());
    ASSERT_TRUE(Synchronize(stream).ok());
    EXPECT_TRUE(fetched(stream, array.memory()) == std::vector<char>(bytes, 'y'));
    ASSERT_TRUE(CopyToDevice(stream, array.memory(), in.data(), bytes).ok());
    EXPECT_TRUE(fetched(stream, array.memory()) == in);
    // Copies from array to array with a stream of the array's own device, and to another device.
    ShardedArray copy(streams_, devices_.size(), bytes);
    ASSERT_TRUE(RunCopy(stream, view, DType::kF32, copy.memory()).ok());
    EXPECT_TRUE(fetched(stream, copy.memory()) == in);
    const Memory plain = Get(Allocate(other.device(), bytes));
    ASSERT_TRUE(RunCopyAcross(stream, view, DType::kF32, other, plain.data()).ok());
    EXPECT_TRUE(fetched(other, plain.data()) == in);
  }
}

TEST_P(TeamTest, SumsHaveTheBitsOfOneDevice) {
  const std::vector<float> values = RandomFloats(Floats());
  for (std::size_t count : Counts({2, 3, 4})) {
    for (std::size_t own : {std::size_t{0}, count - 1}) {
      Stream& stream = *streams_[own];
      ShardedArray array(streams_, count, values, stream);
      for (std::int64_t offset : {0, 1, 4, 1023}) {
        SCOPED_TRACE(absl::StrCat(count, " ", offset));
        const View x = array.view({Floats() - offset - (offset == 4 ? 5 : 0)}, offset);
        const View y = array.view({x.elements()});
        for (std::string_view strategy : {"fixed_tree", "compensated"}) {
          ScalarAloneAndTogether(array, strategy,
                                 [&](const RunOptions& o) { return RunDot(stream, x, y, o); });
          for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kArgMax, ReduceOp::kVariance})
            ScalarAloneAndTogether(
                array, strategy, [&](const RunOptions& o) { return RunReduce(stream, x, op, o); });
        }
      }
      ASSERT_TRUE(Synchronize(stream).ok());
    }
  }
}

TEST_P(TeamTest, RowsHaveTheBitsOfOneDevice) {
  const std::int64_t rows = 321, columns = Floats() / rows;
  Stream& stream = *streams_[1];
  ShardedArray array(streams_, devices_.size(), RandomFloats(rows * columns), stream);
  const View x = array.view({rows, columns}), bias = array.view({columns});
  const Nodes sum = {In(0), In(1), Op(MapOp::kAdd, {0, 1})};
  const auto compare = [&](const char* what, std::int64_t bytes, const auto& run) {
    SCOPED_TRACE(what);
    AloneAndTogether(stream, array, static_cast<std::size_t>(bytes), devices_.size(), run);
  };
  compare("add", rows * columns * 4,
          [&](void* out, const RunOptions& o) { return RunAdd(stream, x, x, out, o); });
  compare("map", rows * columns * 4, [&](void* out, const RunOptions& o) {
    return RunMap(stream, {x, bias}, sum, out, o);
  });
  compare("scan", rows * columns * 4, [&](void* out, const RunOptions& o) -> absl::StatusOr<Stats> {
    return Get(tessera::Run(ScanSpec{}, stream, {x}, {out}, o)).stats;
  });
  compare("sort", rows * columns * 12,
          [&](void* out, const RunOptions& o) -> absl::StatusOr<Stats> {
            void* const found = static_cast<char*>(out) + rows * columns * 8;
            return Get(tessera::Run(SortSpec{}, stream, {x}, {found, out}, o)).stats;
          });
  for (std::int64_t k : {1, 10}) {
    compare("top k", rows * k * 12, [&](void* out, const RunOptions& o) {
      void* const found = static_cast<char*>(out) + rows * k * 8;
      return RunTopK(stream, x, k, 1, false, found, out, o);
    });
  }
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kVariance})
    Fold(stream, array, rows * 4, devices_.size(), x, op, 1);
}

TEST_P(TeamTest, ColumnsHaveTheBitsOfOneDevice) {
  struct Case {
    std::int64_t length, inner, offset;
  };
  // There are more columns than one launch has blocks for, or so few that the axis is split.
  const std::int64_t n = Floats() - 3;
  for (const Case& c : {Case{3, n / 3, 0}, Case{n / 2048, 2048, 0}, Case{n / 1029, 1029, 3},
                        Case{n / 1111, 1111, 1}, Case{1, n / 2, 2}}) {
    for (std::size_t count : Counts()) {
      Stream& stream = *streams_[count - 1];
      ShardedArray array(streams_, count, RandomFloats(n + 3), stream);
      const View x = array.view({c.length, c.inner}, c.offset);
      const bool large = !gpu() || x.elements() * 4 >= 64 << 20;
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kVariance, ReduceOp::kArgMin, ReduceOp::kMax}) {
        SCOPED_TRACE(absl::StrCat(c.length, " x ", c.inner, " ", count, " ", Absl(Name(op))));
        Fold(stream, array, c.inner * 8, large && c.length > 1 ? count : 0, x, op, 0);
      }
    }
  }
}

void ExpectFinite(const std::string& bytes) {
  std::vector<float> sums(bytes.size() / sizeof(float));
  std::memcpy(sums.data(), bytes.data(), bytes.size());
  for (float sum : sums) EXPECT_TRUE(std::isfinite(sum));
}

// The sums of a column overflow f32 on one device, and not on the others.
TEST_P(TeamTest, ColumnsOutOfRange) {
  const std::int64_t rows = 41, columns = Floats() / rows;
  std::vector<float> values = RandomFloats(rows * columns);
  for (std::int64_t column : {std::int64_t{2}, columns / 2, columns - 1}) {
    for (std::int64_t row = 0; row < rows - 1; ++row)
      At(values, row * columns + column) = row < rows / 2 ? 3e38f : -3e38f;
  }
  Stream& stream = *streams_[0];
  ShardedArray array(streams_, devices_.size(), values, stream);
  ExpectFinite(Fold(stream, array, columns * 4, devices_.size(), array.view({rows, columns}),
                    ReduceOp::kSum, 0));
}

// On GPUs, arrays just above a gigabyte are folded along the outermost axis in slabs
// (kernels/team/axis_slabs.h). Sums of some columns leave the range of f32, within or between
// slabs, and return. The extremes of other columns are in the remaining rows.
class SlabTest : public TeamTest {
 protected:
  static constexpr std::int64_t kRows = 1000 * kSlabs + 5;
  static constexpr std::int64_t kColumns = (std::int64_t{1} << 28) / kRows + 130;

  static std::vector<float> Values(std::int64_t columns) {
    std::vector<float> values = RandomFloats(kRows * columns);
    const auto at = [&](std::int64_t row, std::int64_t column) -> float& {
      return At(values, row * columns + column);
    };
    for (std::int64_t row = 0; row < 40; ++row) {
      at(row, 1) = row < 20 ? 3e38f : -3e38f;
      at(row, columns / 2) = 3e38f;
      at(kRows - 41 + row, columns / 2) = -3e38f;
    }
    for (std::int64_t column : {std::int64_t{3}, columns - 1}) {
      at(kRows - 1, column) = -1000;
      at(kRows - 3, column) = 1000;
    }
    return values;
  }
  template <class T>
  static std::vector<T> OnCpu(const View& x, ReduceOp op) {
    std::vector<T> out(static_cast<std::size_t>(x.shape[1]));
    EXPECT_TRUE(RunReduceAxes(TestStream(Backend::kCpu), x, op, {0}, out.data(), {}).ok());
    return out;
  }
  // got: the bytes of the results. host: the array in the host's memory.
  static void ExpectRight(const std::string& got, const View& host, ReduceOp op) {
    const auto columns = static_cast<std::size_t>(host.shape[1]);
    if (op == ReduceOp::kArgMin) {
      const auto want = OnCpu<std::int64_t>(host, op);
      EXPECT_EQ(std::memcmp(got.data(), want.data(), columns * sizeof(std::int64_t)), 0);
      return;
    }
    const auto want = OnCpu<float>(host, op), magnitudes = OnCpu<float>(host, ReduceOp::kNormL1);
    std::int64_t wrong = 0;
    for (std::size_t c = 0; c < columns; ++c) {
      float value = 0;
      std::memcpy(&value, &got[c * sizeof value], sizeof value);
      // Sums are chains of at most 64 additions in f32. A magnitude may exceed the range of f32.
      const float bound = op == ReduceOp::kSum        ? 0x1p-17f * magnitudes[c]
                          : op == ReduceOp::kVariance ? 2e-6f * want[c]
                                                      : 0;
      wrong += value != want[c] && !(std::isfinite(value) && std::abs(value - want[c]) <= bound);
    }
    EXPECT_EQ(wrong, 0);
  }
};

TEST_P(SlabTest, LargeColumnsHaveTheBitsOfOneDeviceAndAreRight) {
  // Rows of whole vectors, and rows that are not aligned for any vector.
  for (const std::int64_t offset : {0, 1}) {
    const std::int64_t columns = kColumns / 4 * 4 + offset;
    std::vector<float> values = Values(columns);
    values.insert(values.begin(), static_cast<std::size_t>(offset), 7.f);
    const View host = WholeView({DType::kF32, MakeShape({kRows, columns})}, &At(values, offset));
    for (std::size_t count : Counts()) {
      Stream& stream = *streams_[offset == 0 ? 0 : count - 1];
      ShardedArray array(streams_, count, values, stream);
      const View x = array.view({kRows, columns}, offset);
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kVariance, ReduceOp::kArgMin, ReduceOp::kMax}) {
        SCOPED_TRACE(absl::StrCat(offset, " ", count, " ", Absl(Name(op))));
        ExpectRight(Fold(stream, array, columns * 8, count, x, op, 0), host, op);
      }
      // The same bytes as other types, and rows that fill the slabs exactly.
      for (const auto& [dtype, op] :
           {std::pair(DType::kI32, ReduceOp::kMean), std::pair(DType::kI32, ReduceOp::kSum),
            std::pair(DType::kF64, ReduceOp::kSum), std::pair(DType::kF64, ReduceOp::kVariance)}) {
        SCOPED_TRACE(absl::StrCat(offset, " ", count, " ", Absl(Name(op)), Absl(Name(dtype))));
        if (dtype == DType::kF64 && offset != 0) continue;
        const std::int64_t size = static_cast<std::int64_t>(SizeOf(dtype)) / 4;
        const View other =
            WholeView({dtype, MakeShape({kRows / kSlabs * kSlabs, columns / size})}, x.data);
        Fold(stream, array, columns * 8, count, other, op, 0);
      }
    }
  }
}

TEST_P(SlabTest, LargeColumnsAloneWhereAnotherHasNoRoom) {
  const std::vector<float> values = Values(kColumns);
  Budget plenty(std::uint64_t{1} << 30), little(1 << 20);
  Stream& stream = *streams_[0];
  stream.SetScratchBudget(&plenty);
  std::string got[2];
  for (bool room : {false, true}) {
    streams_[1]->SetScratchBudget(room ? &plenty : &little);
    ShardedArray array(streams_, 2, values, stream);
    got[room] = Fold(stream, array, kColumns * 4, room ? 2 : 1, array.view({kRows, kColumns}),
                     ReduceOp::kSum, 0);
    for (const auto& each : streams_) ASSERT_TRUE(EndRequest(*each).ok());
  }
  EXPECT_TRUE(got[0] == got[1]);
  TearDown();  // Must precede the end of the budgets.
}

INSTANTIATE_TEST_SUITE_P(Devices, SlabTest, testing::Values(Backend::kCuda), BackendName);

TEST_P(TeamTest, FoldsOfExpressionsHaveTheBitsOfOneDevice) {
  const std::int64_t rows = 211, columns = Floats() / rows;
  const Nodes nodes = {In(0), In(1), Op(MapOp::kSubtract, {0, 1}), Op(MapOp::kMultiply, {2, 0})};
  // The same expression with an operation that no kernel computes while it folds.
  Nodes tangents = nodes;
  tangents.push_back(Op(MapOp::kTanh, {3}));
  const Nodes greater = {In(0), In(1), Op(MapOp::kGreater, {0, 1})};
  for (std::size_t count : Counts()) {
    Stream& stream = *streams_[count - 1];
    ShardedArray array(streams_, count, RandomFloats(rows * columns), stream);
    const View x = array.view({rows, columns}), row = array.view({columns});
    View backwards = array.view({rows, columns}, columns - 1);
    backwards.strides[1] = -1;
    for (const View& operand : {x, backwards}) {
      for (const Nodes& expression : {nodes, tangents, greater}) {
        const MapStage stage{expression, {&row, 1}};
        for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kArgMin, ReduceOp::kNormL2}) {
          if (expression.size() == 3 && op != ReduceOp::kSum) continue;
          SCOPED_TRACE(absl::StrCat(count, " ", Absl(Name(op)), " ", expression.size()));
          for (std::string_view strategy : {"", "fixed_tree", "compensated"})
            ScalarAloneAndTogether(array, strategy, [&](const RunOptions& o) {
              return RunReduce(stream, operand, op, o, &stage);
            });
          Fold(stream, array, rows * 8, count, operand, op, 1, &stage);
        }
      }
    }
    ASSERT_TRUE(EndRequest(stream).ok());
  }
}

// Partial sums overflow f32 only in rows of one device.
TEST_P(TeamTest, FoldsOfExpressionsOutOfRange) {
  const std::int64_t rows = 211, columns = Floats() / rows;
  std::vector<float> values = RandomFloats(rows * columns);
  LeaveRange(5, columns, values);
  const Nodes nodes = {In(0), Op(MapOp::kNegate, {0})};
  const MapStage stage{nodes, {}};
  Stream& stream = *streams_[1];
  ShardedArray array(streams_, devices_.size(), values, stream);
  const View x = array.view({rows, columns});
  const auto whole = [&](Team* team) {
    return Bits(RunReduce(stream, x, ReduceOp::kSum, {.team = team}, &stage));
  };
  EXPECT_EQ(whole(&array), whole(nullptr));
  ExpectFinite(Fold(stream, array, rows * 4, devices_.size(), x, ReduceOp::kSum, 1, &stage));
}

// Each device computes pieces in scratch memory, and takes no share if it lacks space.
TEST_P(TeamTest, FoldsOfExpressionsInLittleMemory) {
  // A row is larger than a stream's own memory.
  const std::int64_t rows = 8, columns = std::max<std::int64_t>(Floats() / rows, 500'003);
  std::vector<float> values = RandomFloats(rows * columns);
  LeaveRange(rows, columns, values);
  const Nodes nodes = {In(0), Op(MapOp::kNegate, {0})};
  const MapStage stage{nodes, {}};
  Stream& stream = *streams_[0];
  ShardedArray array(streams_, 2, values, stream);
  DeviceArray<std::uint32_t> out(stream, rows);
  const auto run = [&](Team* team) {
    return RunReduceAxes(stream, array.view({rows, columns}), ReduceOp::kSum, {1}, out.data(),
                         {.team = team}, &stage);
  };
  // A piece takes a quarter of a budget, which is one row here.
  const std::uint64_t row = static_cast<std::uint64_t>(columns) * sizeof(float);
  Budget plenty(7 * row);
  Start(&plenty, &plenty);
  ASSERT_TRUE(run(nullptr).ok());
  const std::vector<std::uint32_t> expected = out.Values();
  const std::uint64_t used = plenty.used();
  ASSERT_GE(used, row);
  ASSERT_LT(used, 2 * row);
  Budget enough(used + row / 2), as_much(used + row / 2), too_little(row / 2);
  for (Budget* other : {&as_much, &too_little}) {
    Start(&enough, other);
    const auto stats = Get(run(&array));
    EXPECT_EQ(stats.devices, other == &as_much ? 2 : 1);
    EXPECT_EQ(out.Values(), expected);
  }
  TearDown();  // Must precede the end of the budgets.
}

// The memory of a share is enough for each device. Another device that lacks it takes no share.
TEST_P(TeamTest, RowsInLittleMemory) {
  const std::int64_t rows = 8, columns = std::max<std::int64_t>(Floats() / rows, 500'003);
  Stream& stream = *streams_[0];
  ShardedArray array(streams_, 2, RandomFloats(rows * columns), stream);
  const View x = array.view({rows, columns});
  const auto check = [&](const auto& whole, std::int64_t elements, const auto& run) {
    auto half = whole;
    half.rows = rows / 2 + (gpu() ? 1 : 0);  // A shard of a GPU may end within a row.
    const auto* strategy = Choose(whole, stream.device());
    const std::uint64_t share = strategy->scratch(half),
                        spare = std::uint64_t{2} << (gpu() ? 22 : 20);
    ASSERT_GT(share, ScratchBlocks::kKept * 2);
    Budget plenty(strategy->scratch(whole) + spare), enough(share + spare), as_much(share + spare),
        too_little(share / 2);
    DeviceArray<float> values(stream, elements);
    DeviceArray<std::int64_t> indices(stream, elements);
    std::vector<float> expected;
    const auto expect = [&](Budget* own, Budget* other, Team* team, int devices) {
      Start(own, other);
      const absl::StatusOr<Stats> stats = run(values.data(), indices.data(), team);
      ASSERT_TRUE(stats.ok()) << stats.status();
      EXPECT_EQ(stats->devices, devices);
      if (expected.empty()) expected = values.Values();
      EXPECT_EQ(values.Values(), expected);
    };
    expect(&plenty, &plenty, nullptr, 1);
    expect(&plenty, &too_little, &array, 1);
    expect(&enough, &as_much, &array, 2);
    TearDown();  // Must precede the end of the budgets.
  };
  check(SortProblem{.rows = rows, .n = columns}, rows * columns,
        [&](void* values, void* indices, Team* team) -> absl::StatusOr<Stats> {
          const absl::StatusOr<ScalarResult> result =
              tessera::Run(SortSpec{}, stream, {x}, {values, indices}, {.team = team});
          if (!result.ok()) return result.status();
          return result->stats;
        });
  // Not every strategy for a GPU needs memory.
  if (gpu()) return;
  check(TopKProblem{.rows = rows, .n = columns, .k = kMostTopK}, rows * kMostTopK,
        [&](void* values, void* indices, Team* team) {
          return RunTopK(stream, x, kMostTopK, 1, false, values, indices, {.team = team});
        });
}

// Every piece except for the last one has whole rounds.
TEST(PieceSizesTest, PiecesGrowWithWhatComes) {
  const auto pieces = [](const PieceSizes& sizes, std::int64_t columns) {
    std::vector<std::int64_t> found;
    for (std::int64_t last = 0, left = columns; left > 0; left -= last)
      found.push_back(last = sizes.Next(last, left));
    return found;
  };
  using Pieces = std::vector<std::int64_t>;
  EXPECT_EQ(pieces({1024, 4096, 3.7}, 8192), (Pieces{1024, 3072, 4096}));
  EXPECT_EQ(pieces({512, 8192, 7.9}, 16384), (Pieces{512, 3584, 8192, 4096}));
  EXPECT_EQ(pieces({2048, 4096, 1.3}, 8192), (Pieces{2048, 2048, 2048, 2048}));
  EXPECT_EQ(pieces({256, 1024, 2}, 1300), (Pieces{256, 512, 532}));
  EXPECT_EQ(pieces({256, 256, 8}, 700), (Pieces{256, 256, 188}));
  EXPECT_EQ(pieces({256, 256, 1}, 100), (Pieces{100}));
  EXPECT_EQ(pieces({100, 100, 1}, 100), (Pieces{100}));
}

TEST_P(TeamTest, WindowsHaveTheBitsOfOneDevice) {
  const std::int64_t n = gpu() ? Floats() : 1'100'003;
  std::vector<float> values = RandomFloats(n);
  At(values, n / 2) = 1e30f;
  for (std::size_t count : Counts()) {
    Stream& stream = *streams_[count - 1];
    ShardedArray array(streams_, count, values, stream);
    for (std::int64_t offset : {0, 5}) {
      const View x = array.view({n - offset}, offset);
      for (std::int64_t radius :
           {std::int64_t{0}, std::int64_t{1}, std::int64_t{37}, std::int64_t{70'000}, n / 4, n}) {
        const bool narrow = 2 * radius + 1 <= x.elements() / static_cast<std::int64_t>(count);
        for (const Strategy<WindowSumProblem>* strategy : Strategies<WindowSumProblem>()) {
          if (strategy->backend != GetParam() ||
              (strategy->name != "running_sum" && strategy->name != "cpu" && radius > 100))
            continue;
          SCOPED_TRACE(absl::StrCat(count, " ", offset, " ", radius, " ", Absl(strategy->name)));
          AloneAndTogether(
              stream, array, static_cast<std::size_t>(n - offset) * 4, narrow ? count : 1,
              [&](void* out, RunOptions o) -> absl::StatusOr<Stats> {
                o.strategy = strategy->name;
                return Get(tessera::Run(WindowSumSpec{radius}, stream, {x}, {out}, o)).stats;
              });
        }
      }
    }
  }
}

struct ProductCase {
  DType dtype, out_dtype;
  std::int64_t m, n, k;
  bool transpose_b;
  // Rows of a and of b are longer than their multiplied part, by this number of elements.
  std::int64_t gap;
  std::string_view strategy;  // Empty means the default.
  bool leaves_range = false;  // For f32: sums of some rows are infinities.
};

// Returns n random elements as bytes.
std::string RandomElements(DType dtype, std::int64_t n, std::uint64_t seed) {
  std::string bytes;
  DispatchDType(dtype, [&]<class T>(T) {
    const std::vector<T> elements = NormalVector<T>(n, seed);
    bytes.assign(reinterpret_cast<const char*>(elements.data()), elements.size() * sizeof(T));
  });
  return bytes;
}

class TeamProductTest : public TeamTest {
 protected:
  // Memory over the first devices, or only on the last one of them.
  struct Place {
    Place(TeamProductTest& test, std::size_t count, bool divided, std::uint64_t bytes) {
      if (divided) {
        sharded.emplace(test.streams_, count, bytes);
      } else {
        plain = *Allocate(*test.devices_[count - 1], bytes);
      }
    }
    void* data() const { return sharded.has_value() ? sharded->memory() : plain.data(); }
    std::optional<ShardedArray> sharded;
    Memory plain;
  };

  // b and the result are on the devices of a or on the last device. matmul_test checks values.
  void Compare(const ProductCase& c, std::mt19937& random) {
    SCOPED_TRACE(absl::StrCat(Absl(Name(c.dtype)), " ", c.m, " x ", c.n, " x ", c.k, " b' ",
                              c.transpose_b, " gap ", c.gap, " ", Absl(c.strategy)));
    const std::int64_t lda = c.k + c.gap, ldb = (c.transpose_b ? c.k : c.n) + c.gap;
    const std::int64_t b_rows = c.transpose_b ? c.n : c.k, b_columns = c.transpose_b ? c.k : c.n;
    std::string a = RandomElements(c.dtype, c.m * lda, random());
    const std::string b = RandomElements(c.dtype, b_rows * ldb, random());
    if (c.leaves_range) {
      const auto set = [&](std::int64_t row, float value) {
        std::memcpy(&At(a, row * lda * 4), &value, sizeof value);
      };
      set(c.m / 2 + 5, 3e38f);
      set(c.m - 1, std::numeric_limits<float>::infinity());
    }
    const std::size_t bytes = static_cast<std::size_t>(c.m * c.n) * SizeOf(c.out_dtype);
    std::string expected;
    for (std::size_t count : Counts({1, 2, 3})) {
      ShardedArray left(streams_, count, a.size());
      for (const bool divided : {true, false}) {
        if (count == 1 && divided) continue;
        const Place right(*this, count, divided, b.size()), out(*this, count, divided, bytes);
        Stream& stream = *streams_[divided ? 0 : count - 1];
        ASSERT_TRUE(BeginRequest(stream).ok());
        ASSERT_TRUE(CopyToDevice(stream, left.memory(), a.data(), a.size()).ok());
        ASSERT_TRUE(CopyToDevice(stream, right.data(), b.data(), b.size()).ok());
        ASSERT_TRUE(Zero(stream, out.data(), bytes).ok());
        const auto stats = Get(RunMatmul(
            stream, StridedView(left.data(), c.dtype, {c.m, c.k}, {lda, 1}),
            StridedView(right.data(), c.dtype, {b_rows, b_columns}, {ldb, 1}), false, c.transpose_b,
            c.out_dtype, out.data(), {.strategy = c.strategy, .team = &left}));
        std::string got(bytes, '\0');
        ASSERT_TRUE(CopyToHost(stream, got.data(), out.data(), bytes).ok());
        for (const auto& other : streams_) EXPECT_TRUE(Synchronize(*other).ok());
        if (expected.empty()) expected = got;
        EXPECT_TRUE(got == expected) << count << " devices, b " << divided;
        EXPECT_LE(stats.devices, static_cast<int>(count));
        if (a.size() > 2 * count * devices_[0]->info().shard_unit &&
            c.m > 128 * 2 * static_cast<std::int64_t>(count)) {
          EXPECT_EQ(stats.devices, static_cast<int>(count));
        }
        ASSERT_TRUE(EndRequest(stream).ok());
      }
    }
  }
};

TEST_P(TeamProductTest, ProductsHaveTheBitsOfOneDevice) {
  std::mt19937 random(11);
  constexpr std::pair<DType, DType> kTypes[] = {
      {DType::kF32, DType::kF32}, {DType::kF64, DType::kF64},  {DType::kBF16, DType::kBF16},
      {DType::kF16, DType::kF16}, {DType::kBF16, DType::kF32}, {DType::kI32, DType::kI64}};
  const auto between = [&](std::int64_t least, std::int64_t most) {
    return least + static_cast<std::int64_t>(random()) % (most - least + 1);
  };
  for (int i = 0; i < (gpu() ? 12 : 24); ++i) {
    const auto [dtype, out_dtype] = kTypes[i % 6];
    ProductCase c{dtype, out_dtype, 0, 0, 0, i % 4 >= 2, i % 3 == 2 ? between(1, 9) : 0, ""};
    if (gpu()) {
      // Large enough to be divided. Half of the results have rows that TMA can write in pieces.
      c.m = between(2000, 2400), c.k = between(1100, 1300), c.n = between(250, 300) * 8 + i % 2 * 3;
    } else {
      c.m = between(1, 400), c.k = between(1, 150), c.n = between(1, 300);
    }
    Compare(c, random);
  }
}

TEST_P(TeamProductTest, EveryStrategyThatIsSharedOut) {
  std::mt19937 random(12);
  int compared = 0;
  for (const Strategy<MatmulProblem>* strategy : Strategies<MatmulProblem>()) {
    if (strategy->shared.launch == nullptr || strategy->backend != GetParam() ||
        !Missing(*strategy, *devices_[0]).empty())
      continue;
    // With a k of 8, a product that is large enough to be divided has gigabytes of results, and
    // `stack` accepts only small results.
    if (gpu() && (strategy->name == "outer_product" || strategy->name == "stack")) continue;
    for (DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
      if (!strategy->dtypes.Contains(dtype)) continue;
      ProductCase c{dtype, dtype, 333, 130, 77, compared % 2 == 0, 0, strategy->name};
      if (gpu()) c.m = 4096 + 300, c.n = 2304, c.k = 512;
      Compare(c, random);
      ++compared;
    }
  }
  EXPECT_GE(compared, 3);
}

// Some tiles of tensor_f32x3 are computed again. This does not change the sums of other shares.
TEST_P(TeamProductTest, InfinitiesStayInTheirTiles) {
  std::mt19937 random(13);
  ProductCase c{DType::kF32, DType::kF32, 200, 70, 90, false, 0, "", /*leaves_range=*/true};
  if (gpu()) c.m = 4096, c.n = 2048, c.k = 600;
  Compare(c, random);
}

// These products use ozaki_f64, whose GPUs tell each other whether their rows fit integers.
class TeamIntegersTest : public TeamTest {
 protected:
  static constexpr std::int64_t kM = 4096, kN = 2048, kK = 600;

  void SetUp() override {
    TeamTest::SetUp();
    if (IsSkipped()) return;
    if (devices_[0]->info().compute_capability != 90) GTEST_SKIP() << "only 9.0 has wgmma";
    std::mt19937 random(14);
    std::uniform_real_distribution<double> any(-1, 1);
    for (double& x : a_) x = any(random);
    for (double& x : b_) x = any(random);
  }
  // Returns the bytes of the result that the first `count` GPUs compute for the stream of one of
  // them.
  std::string Run(std::size_t count, std::size_t own) {
    Stream& stream = *streams_[own];
    const ShardedArray right(streams_, count, b_, stream);
    ShardedArray left(streams_, count, a_, stream);
    std::string got(static_cast<std::size_t>(kM * kN) * 8, '\0');
    const Memory out = Get(Allocate(stream.device(), got.size()));
    const View x = WholeView({DType::kF64, MakeShape({kM, kK})}, left.data());
    const View y = WholeView({DType::kF64, MakeShape({kK, kN})}, right.data());
    const auto stats = Get(RunMatmul(stream, x, y, false, false, DType::kF64, out.data(),
                                     {.strategy = "ozaki_f64", .team = &left}));
    EXPECT_EQ(stats.devices, static_cast<int>(count));
    EXPECT_TRUE(CopyToHost(stream, got.data(), out.data(), got.size()).ok());
    for (const auto& each : streams_) EXPECT_TRUE(EndRequest(*each).ok());
    return got;
  }

  std::vector<double> a_ = std::vector<double>(static_cast<std::size_t>(kM * kK));
  std::vector<double> b_ = std::vector<double>(static_cast<std::size_t>(kK * kN));
};

// At first all rows fit integers, and later all except the last row, which is in the last share.
TEST_P(TeamIntegersTest, OneRowDecidesForAllShares) {
  std::string before;
  for (bool spoiled : {false, true}) {
    if (spoiled) a_.back() = 1e9;
    const std::string alone = Run(1, 0);
    for (std::size_t count : {std::size_t{2}, devices_.size()}) {
      EXPECT_TRUE(Run(count, 0) == alone) << spoiled << " " << count;
      EXPECT_TRUE(Run(count, count - 1) == alone) << spoiled << " " << count;
    }
    // Without integers, products are added in another order, which changes the bits even in rows
    // whose operands have not changed.
    const std::string first = alone.substr(0, 1 << 20);
    if (spoiled) {
      EXPECT_NE(first, before);
    }
    before = first;
  }
}

// A GPU that has memory for its share but not for a copy of b reads b where it is.
TEST_P(TeamIntegersTest, WithoutRoomForACopyOfB) {
  const std::string alone = Run(1, 0);
  const Strategy<MatmulProblem>* ozaki = nullptr;
  for (const Strategy<MatmulProblem>* strategy : Strategies<MatmulProblem>())
    if (strategy->name == "ozaki_f64") ozaki = strategy;
  ASSERT_NE(ozaki, nullptr);
  MatmulProblem half{.dtype = DType::kF64, .out_dtype = DType::kF64, .m = kM / 2, .n = kN, .k = kK};
  Budget plenty(std::uint64_t{1} << 30), enough(ozaki->scratch(half) + (std::uint64_t{4} << 20));
  ASSERT_LT(std::uint64_t{4} << 20, b_.size() * 8);
  streams_[0]->SetScratchBudget(&plenty);
  streams_[1]->SetScratchBudget(&enough);
  EXPECT_TRUE(Run(2, 0) == alone);
  TearDown();  // Must precede the end of the budgets.
}

INSTANTIATE_TEST_SUITE_P(Devices, TeamIntegersTest, testing::Values(Backend::kCuda), BackendName);

TEST_P(TeamProductTest, OtherProductsStayOnOneDevice) {
  const std::int64_t side = gpu() ? 2048 : 128;
  Stream& stream = *streams_[0];
  const std::vector<float> zeros(static_cast<std::size_t>(side * side));
  ShardedArray array(streams_, 2, zeros, stream);
  DeviceArray<float> plain(stream, zeros), out(stream, side * side);
  const View sharded = array.view({side, side}), own = plain.view({side, side});
  const auto devices = [&](const View& a, const View& b, bool transpose_a,
                           std::string_view strategy) {
    return Get(RunMatmul(stream, a, b, transpose_a, false, DType::kF32, out.data(),
                         {.strategy = strategy, .team = &array}))
        .devices;
  };
  EXPECT_EQ(devices(sharded, own, false, ""), 2);
  EXPECT_EQ(devices(sharded, own, true, ""), 1) << "a transposed would be cut along k";
  EXPECT_EQ(devices(own, sharded, false, ""), 1);
  if (gpu()) {
    View small = sharded;
    small.shape[0] = 7;
    EXPECT_EQ(devices(small, own, false, ""), 1);
  } else {
    EXPECT_EQ(devices(sharded, own, false, "cpu_library"), 1);
  }
}

TESSERA_BACKENDS(TeamProductTest);

TESSERA_BACKENDS(TeamTest);

}  // namespace
}  // namespace tessera::test
