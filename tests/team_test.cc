// Sharded memory, and operations that several devices share out: the bits of one device.
#include <bit>
#include <numeric>
#include <random>
#include <utility>

#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

// Eight CPU devices; all GPUs or, where there is but one, that one twice, which lacks nothing but
// the link.
std::vector<std::unique_ptr<Device>> OpenDevices(Backend backend) {
  std::vector<std::unique_ptr<Device>> devices;
  const std::size_t gpus = VisibleDevices().size() - 1;
  const std::size_t count = backend == Backend::kCpu ? 8 : std::max<std::size_t>(2, gpus);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t ordinal = backend == Backend::kCpu ? i : i % gpus;
    devices.push_back(
        *OpenDevice(absl::StrCat(Name(backend) == "cpu" ? "cpu:" : "cuda:", ordinal)));
  }
  return devices;
}

class TeamTest : public testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    TESSERA_NEED_DEVICE(GetParam());
    devices_ = OpenDevices(GetParam());
    for (const auto& device : devices_) streams_.push_back(*MakeStream(*device));
  }
  // Several units a device, and enough for them to share; on the CPU too few to wake its cores for.
  std::int64_t Floats() const {
    return GetParam() == Backend::kCuda ? (std::int64_t{68} << 18) + 4099 : 60'003;
  }

  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<Stream>> streams_;
};

// An array over the first devices, and those as a team.
class ShardedArray final : public Team {
 public:
  ShardedArray(const std::vector<std::unique_ptr<Device>>& devices,
               const std::vector<std::unique_ptr<Stream>>& streams, std::size_t count,
               std::uint64_t bytes)
      : streams_(streams) {
    std::vector<Device*> some;
    for (std::size_t i = 0; i < count; ++i) some.push_back(devices[i].get());
    shards_ = MakeShards(some, bytes);
    auto memory = Allocate(shards_);
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
  }
  const void* data() const override { return memory_.data(); }
  absl::Span<const Shard> shards() const override { return shards_; }
  absl::StatusOr<std::vector<Stream*>> Assemble(Stream& own) override {
    std::vector<Stream*> team;
    for (const Shard& shard : shards_) {
      Stream* found = nullptr;
      for (const auto& stream : streams_) {
        if (&stream->device() == shard.device) found = stream.get();
      }
      if (found != &own) {
        EXPECT_TRUE(BeginRequest(*found).ok());
      }
      team.push_back(found);
    }
    return team;
  }
  void* memory() const { return memory_.data(); }

 private:
  const std::vector<std::unique_ptr<Stream>>& streams_;
  std::vector<Shard> shards_;
  Memory memory_;
};

std::string Bits(const absl::StatusOr<ScalarResult>& result) {
  if (!result.ok()) return result.status().ToString();
  return absl::StrCat(absl::Hex(std::bit_cast<std::uint64_t>(result->value.real)), " ",
                      result->value.integer, " ", result->value.index);
}

std::vector<float> RandomFloats(std::int64_t n) {
  std::mt19937 random(7);
  std::vector<float> values(static_cast<std::size_t>(n));
  for (float& value : values) value = static_cast<float>(random() % 20001) / 1000.f - 10.f;
  return values;
}

View ViewOf(const void* data, std::initializer_list<std::int64_t> shape) {
  return WholeView(*MakeArrayType(DType::kF32, std::vector<std::int64_t>(shape)), data);
}

TEST_P(TeamTest, ShardsAreEvenAndWhole) {
  std::vector<Device*> devices;
  for (const auto& device : devices_) devices.push_back(device.get());
  const std::uint64_t unit = devices[0]->ShardUnit();
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
  const std::uint64_t unit = devices_[0]->ShardUnit();
  const std::uint64_t bytes = 5 * unit + 1000;
  ShardedArray array(devices_, streams_, 2, bytes);
  std::vector<char> in(bytes), out(bytes);
  std::iota(in.begin(), in.end(), '\x1');
  for (const auto& stream : {streams_[0].get(), streams_[1].get()}) {
    ASSERT_TRUE(BeginRequest(*stream).ok());
    ASSERT_TRUE(Zero(*stream, array.memory(), bytes).ok());
    ASSERT_TRUE(CopyToHost(*stream, out.data(), array.memory(), bytes).ok());
    EXPECT_EQ(std::count(out.begin(), out.end(), '\0'), static_cast<std::ptrdiff_t>(bytes));
    ASSERT_TRUE(CopyToDevice(*stream, array.memory(), in.data(), bytes).ok());
    ASSERT_TRUE(CopyToHost(*stream, out.data(), array.memory(), bytes).ok());
    EXPECT_TRUE(in == out);
    auto staging = MakeStaging(stream->device(), bytes);
    ASSERT_TRUE(staging.ok());
    std::fill_n(static_cast<char*>(staging->get()), bytes, 'y');
    ASSERT_TRUE(CopyPinnedToDevice(*stream, array.memory(), staging->get(), bytes).ok());
    ASSERT_TRUE(Synchronize(*stream).ok());
    ASSERT_TRUE(CopyToHost(*stream, staging->get(), array.memory(), bytes).ok());
    EXPECT_EQ(static_cast<char*>(staging->get())[bytes - 1], 'y');
    // From range to range, by a stream of its own device and to another one.
    ShardedArray copy(devices_, streams_, devices_.size(), bytes);
    ASSERT_TRUE(CopyToDevice(*stream, array.memory(), in.data(), bytes).ok());
    const View view = WholeView(*MakeArrayType(DType::kF32, {static_cast<std::int64_t>(bytes / 4)}),
                                array.data());
    ASSERT_TRUE(RunCopy(*stream, view, DType::kF32, copy.memory()).ok());
    ASSERT_TRUE(CopyToHost(*stream, out.data(), copy.memory(), bytes).ok());
    EXPECT_TRUE(in == out);
    Stream& other = *streams_[stream == streams_[0].get() ? 1 : 0];
    auto plain = Allocate(other.device(), bytes);
    ASSERT_TRUE(plain.ok());
    ASSERT_TRUE(RunCopyAcross(*stream, view, DType::kF32, other, plain->data()).ok());
    ASSERT_TRUE(CopyToHost(other, out.data(), plain->data(), bytes).ok());
    EXPECT_TRUE(in == out);
  }
}

TEST_P(TeamTest, SumsHaveTheBitsOfOneDevice) {
  const std::vector<float> values = RandomFloats(Floats());
  const std::uint64_t bytes = values.size() * sizeof(float);
  for (std::size_t count : {std::size_t{2}, std::size_t{3}, std::size_t{4}, devices_.size()}) {
    if (count > devices_.size()) continue;
    ShardedArray array(devices_, streams_, count, bytes);
    for (std::size_t own : {std::size_t{0}, count - 1}) {
      Stream& stream = *streams_[own];
      ASSERT_TRUE(BeginRequest(stream).ok());
      ASSERT_TRUE(CopyToDevice(stream, array.memory(), values.data(), bytes).ok());
      for (std::int64_t offset : {0, 1, 4, 1023}) {
        const View x = ViewOf(static_cast<const float*>(array.data()) + offset,
                              {Floats() - offset - (offset == 4 ? 5 : 0)});
        const View y = ViewOf(array.data(), {x.elements()});
        for (std::string_view strategy : {"fixed_tree", "compensated"}) {
          for (bool dot : {true, false}) {
            for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kArgMax, ReduceOp::kVariance}) {
              if (dot && op != ReduceOp::kSum) continue;
              const auto run = [&](Team* team) {
                const RunOptions options{.strategy = strategy, .team = team};
                return dot ? RunDot(stream, x, y, options) : RunReduce(stream, x, op, options);
              };
              const auto alone = run(nullptr), together = run(&array);
              EXPECT_EQ(Bits(together), Bits(alone)) << count << " " << offset << " " << strategy;
              ASSERT_TRUE(together.ok());
              EXPECT_EQ(together->stats.devices, static_cast<int>(count));
              EXPECT_EQ(alone->stats.devices, 1);
            }
          }
        }
      }
      ASSERT_TRUE(Synchronize(stream).ok());
    }
  }
}

TEST_P(TeamTest, RowsHaveTheBitsOfOneDevice) {
  const std::int64_t rows = 321, columns = Floats() / rows;
  const std::vector<float> values = RandomFloats(rows * columns);
  const std::uint64_t bytes = values.size() * sizeof(float);
  ShardedArray array(devices_, streams_, devices_.size(), bytes);
  Stream& stream = *streams_[1];
  ASSERT_TRUE(BeginRequest(stream).ok());
  ASSERT_TRUE(CopyToDevice(stream, array.memory(), values.data(), bytes).ok());
  const View x = ViewOf(array.data(), {rows, columns});
  View bias = ViewOf(array.data(), {columns});
  std::vector<ExpressionNode> sum(3);
  sum[0].kind = sum[1].kind = ExpressionNode::Kind::kOperand;
  sum[1].operand = 1;
  sum[2] = {.kind = ExpressionNode::Kind::kOperation, .op = MapOp::kAdd, .args = {0, 1}};
  const auto compare = [&](const char* what, std::int64_t size, const auto& run) {
    std::string got[2];
    for (bool together : {false, true}) {
      auto out = Allocate(stream.device(), static_cast<std::size_t>(size));
      ASSERT_TRUE(out.ok());
      ASSERT_TRUE(Zero(stream, out->data(), static_cast<std::size_t>(size)).ok());
      RunOptions options;
      if (together) options.team = &array;
      const absl::StatusOr<Stats> stats = run(out->data(), options);
      ASSERT_TRUE(stats.ok()) << what << stats.status();
      EXPECT_EQ(stats->devices, together ? static_cast<int>(devices_.size()) : 1) << what;
      got[together].resize(static_cast<std::size_t>(size));
      ASSERT_TRUE(CopyToHost(stream, got[together].data(), out->data(), got[0].size()).ok());
    }
    EXPECT_TRUE(got[0] == got[1]) << what;
  };
  compare("add", rows * columns * 4,
          [&](void* out, const RunOptions& o) { return RunAdd(stream, x, x, out, o); });
  compare("map", rows * columns * 4, [&](void* out, const RunOptions& o) {
    return RunMap(stream, {x, bias}, sum, out, o);
  });
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kVariance}) {
    compare("rows", rows * 4, [&](void* out, const RunOptions& o) {
      return RunReduceAxes(stream, x, op, {1}, out, o);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, TeamTest, testing::Values(Backend::kCpu, Backend::kCuda),
                         [](const auto& param) { return std::string(Name(param.param)); });

}  // namespace
}  // namespace tessera::test
