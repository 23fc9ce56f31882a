// One of several devices is lost while callers work on all of them. Everything on that device is
// lost, and nothing else. The test uses a machine's GPUs if it has several, and otherwise four
// devices of the host.

#include <algorithm>

#include "absl/strings/match.h"
#include "tests/service_fixture.h"

namespace tessera {
namespace {

struct Machine {
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<const Device*> pointers;  // Used while a server owns the devices.
  std::int64_t columns;                 // Columns of the arrays. A row is several shard units.

  Machine() {
    for (const std::string& name : VisibleDevices()) {
      if (absl::StartsWith(name, "cuda:")) devices.push_back(*OpenDevice(name));
    }
    const bool gpus = devices.size() > 1;
    if (!gpus) {
      devices.clear();
      for (const char* name : {"cpu:0", "cpu:1", "cpu:2", "cpu:3"})
        devices.push_back(*OpenDevice(name));
    }
    for (const auto& device : devices) pointers.push_back(device.get());
    columns = gpus ? std::int64_t{1} << 20 : 4096;
  }
};

Options OptionsFor(const Machine& machine) {
  Options options = TestOptions();
  const auto rows = static_cast<std::int64_t>(32 * machine.devices.size());
  options.memory_limit = {.bytes = 4 * static_cast<std::uint64_t>(rows * machine.columns * 4)};
  return options;
}

class LostDeviceTest : public ServiceTest {
 protected:
  LostDeviceTest() : LostDeviceTest(Machine()) {}

  int count() const { return static_cast<int>(devices_.size()); }

  // Makes an array of that many rows, alternately of ones and twos, over the first `devices`
  // devices.
  grpc::Status Make(const std::string& name, std::int64_t rows, int devices) {
    std::vector<float> numbers(static_cast<std::size_t>(rows));
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(1 + i % 2);
    auto request = Of<v1::MapRequest>(
        "expression { nodes { operand: 0 } nodes { operand: 1 } "
        "nodes { op: MAP_OP_ADD args: [0, 1] } }");
    *request.add_operands() = Inline<float>(v1::DTYPE_F32, {rows, 1}, numbers);
    *request.add_operands() =
        InView(Inline<float>(v1::DTYPE_F32, {1}, {0}), 0, {1, columns_}, {0, 0});
    v1::BufferTarget& target = *request.mutable_result()->mutable_buffer();
    target.set_name(name);
    for (int i = 0; i < devices; ++i) target.add_placement(name_of(i));
    return Call(request);
  }

  grpc::Status Sum(const std::string& name, v1::ReduceResponse* response) {
    auto request = Of<v1::ReduceRequest>("op: REDUCE_OP_SUM");
    *request.mutable_x() = Named(name);
    return Call(request, response);
  }

  const std::string& name_of(int device) const {
    return devices_[static_cast<std::size_t>(device)]->info().name;
  }

  const std::vector<const Device*> devices_;
  const std::int64_t columns_;

 private:
  explicit LostDeviceTest(Machine machine)
      : ServiceTest(OptionsFor(machine), std::move(machine.devices)),
        devices_(std::move(machine.pointers)),
        columns_(machine.columns) {}
};

TEST_F(LostDeviceTest, TheOthersServeOn) {
  const std::int64_t rows = 32 * count();
  const double expected = 1.5 * static_cast<double>(rows * columns_);
  const grpc::Status made = Make("all", rows, count());
  ASSERT_TRUE(made.ok()) << made.error_message();
  ASSERT_TRUE(Make("others", rows, count() - 1).ok());
  for (int i = 0; i < count(); ++i) {
    ASSERT_TRUE(
        server_.Put<float>(absl::StrCat("on_", i), v1::DTYPE_F32, {2}, {1, 2}, false, name_of(i))
            .ok());
  }
  v1::ReduceResponse response;
  ASSERT_TRUE(Sum("all", &response).ok());
  ASSERT_EQ(response.value().real(), expected);
  ASSERT_EQ(response.stats().devices(), static_cast<unsigned>(count()));

  const int last = count() - 1;
  std::atomic<bool> lost = false, stop = false;
  std::atomic<int> answered = 0, refused = 0;
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    while (!stop) {
      const int choice = static_cast<int>(random() % static_cast<unsigned>(count() + 2));
      const bool before = !lost;
      grpc::Status status;
      v1::ReduceResponse sum;
      v1::DotResponse dot;
      bool right = true;
      if (choice < count()) {
        const v1::Operand x = Named(absl::StrCat("on_", choice));
        status = Call(DotOf(x, x), &dot);
        right = dot.value().real() == 5;
      } else {
        status = Sum(choice == count() ? "all" : "others", &sum);
        right = sum.value().real() == expected;
      }
      if (status.ok()) {
        EXPECT_TRUE(right) << choice;
        ++answered;
        continue;
      }
      // An operation without data on the lost device never fails. An operation with data there
      // fails with one of two errors.
      EXPECT_TRUE(choice == last || choice == count()) << choice << status.error_message();
      EXPECT_FALSE(before && !lost) << choice << status.error_message();
      const std::string reason = DetailsOf(status).reason;
      EXPECT_TRUE(reason == "DEVICE_LOST" || reason == "BUFFER_NOT_FOUND")
          << reason << ": " << status.error_message();
      ++refused;
    }
  };
  std::vector<std::thread> callers;
  for (unsigned i = 0; i < 8; ++i) callers.emplace_back(work, i);
  EXPECT_TRUE(Eventually([&] { return answered > 200; }));
  lost = true;
  devices_[static_cast<std::size_t>(last)]->MarkLost();
  EXPECT_TRUE(Eventually([&] { return server_.Info(last).lost(); }));
  for (const std::string& gone : {std::string("all"), absl::StrCat("on_", last)})
    EXPECT_TRUE(Eventually([&] { return IsGone(gone); })) << gone;
  answered = 0;
  EXPECT_TRUE(Eventually([&] { return answered > 200 && refused > 20; }));
  stop = true;
  for (std::thread& caller : callers) caller.join();

  // The lost device holds nothing, and the others have space for the array again.
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes(last) == 0; }));
  for (int i = 0; i < last; ++i) EXPECT_FALSE(server_.Info(i).lost()) << i;
  ASSERT_TRUE(Make("all", rows, count() - 1).ok()) << "the name is free";
  ASSERT_TRUE(Sum("all", &response).ok());
  EXPECT_EQ(response.value().real(), expected);
  EXPECT_EQ(response.stats().devices(), static_cast<unsigned>(count() - 1));
}

}  // namespace
}  // namespace tessera
