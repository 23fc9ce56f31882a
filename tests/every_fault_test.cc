// Makes a device fail at every possible point of every request: the k-th allocation, copy, launch
// or wait fails, for each possible k. The call reports the fault or succeeds, leaves nothing
// behind, and the same call succeeds afterwards. Also loses the device at each of these places: the
// call reports the loss, and nothing remains on the device.
#include <cstddef>

#include "client/shared_memory.h"
#include "tessera/v1/shared_memory.pb.h"
#include "tests/service_fixture.h"

namespace tessera {
namespace {

using Step = FakeDevice::Step;
using Kind = DeviceError::Kind;

constexpr Step kSteps[] = {Step::kAllocate, Step::kStaging,      Step::kBegin,
                           Step::kScratch,  Step::kCopyToDevice, Step::kCopyToHost,
                           Step::kLaunch,   Step::kSynchronize};

class EveryFaultTest : public ServiceTest {
 protected:
  EveryFaultTest() : EveryFaultTest(TestOptions(), 1) {}
  EveryFaultTest(const Options& options, int devices)
      : EveryFaultTest(options, FakeDevices(devices)) {}

  // Stores the operands of the requests. It runs for each new server too.
  void SetUp() override {
    std::vector<float> values(64 * 64);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 17);
    ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {64, 64}, values).ok());
  }

  // Sends the request with each fault. stored: the names that the request stores if it succeeds.
  void Try(const std::string& what, const std::function<grpc::Status()>& request,
           const std::vector<std::string>& stored = {}) {
    int hit = 0;
    for (std::size_t device = 0; device < devices_.size(); ++device) {
      for (const Step step : kSteps) {
        for (const Kind kind :
             {Kind::kFailed, Kind::kOutOfMemory, Kind::kOutOfHostMemory, Kind::kLost}) {
          for (int k = 0;; ++k) {
            SCOPED_TRACE(what + ": device " + std::to_string(device) + ", step " +
                         std::to_string(static_cast<int>(step)) + ", kind " +
                         std::to_string(static_cast<int>(kind)) + ", time " + std::to_string(k));
            ASSERT_LT(k, 1000) << "the faults never end";
            ASSERT_NO_FATAL_FAILURE(ExpectGood(request, stored));  // Pools have grown.
            devices_[device]->Fail(step, kind, 1, k);
            const grpc::Status status = request();
            const bool over = devices_[device]->Relent(step) > 0;
            if (over) {
              ASSERT_TRUE(status.ok()) << status.error_message();
              ASSERT_NO_FATAL_FAILURE(ExpectDeleted(stored));
              break;
            }
            if (kind == Kind::kLost) {
              ++hit;
              ASSERT_NO_FATAL_FAILURE(ExpectLost(*devices_[device], status));
              continue;
            }
            if (status.ok()) {
              ASSERT_NO_FATAL_FAILURE(ExpectDeleted(stored));
              continue;
            }
            ++hit;
            ASSERT_TRUE(status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED ||
                        status.error_code() == grpc::StatusCode::INTERNAL)
                << status.error_message();
            if (!status.error_details().empty()) {
              ASSERT_NE(DetailsOf(status).reason, "INTERNAL") << status.error_message();
            }
            ASSERT_NO_FATAL_FAILURE(ExpectNothingLeft());
          }
        }
      }
    }
    EXPECT_GT(hit, 0) << what << " cannot fail";
    faults_ += hit;
  }

  // Like Try, but with timing, because launches on this device can fail only with timing.
  template <class Request>
  void TryTimed(const std::string& text, const std::vector<std::string>& stored) {
    auto request = Of<Request>(text);
    request.set_timing(true);
    Try(
        Request::descriptor()->name(), [&] { return Call(request); }, stored);
  }

  void TearDown() override {
    ServiceTest::TearDown();
    RecordProperty("faults", faults_);
    std::printf("%d faults survived\n", faults_);
  }

  grpc::Status Put(const std::string& name) {
    return server_.Put<float>(name, v1::DTYPE_F32, {1000}, std::vector<float>(1000, 1));
  }
  static std::string Ones(std::size_t floats) { return Bytes(std::vector<float>(floats, 1)); }

 private:
  using Devices = std::vector<std::unique_ptr<Device>>;
  static std::vector<FakeDevice*> Pointers(const Devices& devices) {
    std::vector<FakeDevice*> pointers;
    for (const auto& device : devices) pointers.push_back(static_cast<FakeDevice*>(device.get()));
    return pointers;
  }
  EveryFaultTest(const Options& options, Devices&& devices)
      : EveryFaultTest(options, std::move(devices), Pointers(devices)) {}
  EveryFaultTest(const Options& options, Devices&& devices, std::vector<FakeDevice*> pointers)
      : ServiceTest(options, std::move(devices)),
        options_(Hasty(options)),
        devices_(std::move(pointers)) {}

  // Starts a new server with new devices.
  void Restart() {
    Devices devices = FakeDevices(static_cast<int>(devices_.size()));
    devices_ = Pointers(devices);
    server_.server().Drain();  // Closes its socket.
    server_ = TestServer(options_, std::move(devices));
    used_.clear();
    SetUp();
  }

  // Checks that the request succeeds without a fault.
  void ExpectGood(const std::function<grpc::Status()>& request,
                  const std::vector<std::string>& stored) {
    if (used_.empty()) Remember();
    const grpc::Status status = request();
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_NO_FATAL_FAILURE(ExpectDeleted(stored));
  }
  void ExpectDeleted(const std::vector<std::string>& stored) {
    for (const std::string& name : stored) ASSERT_TRUE(Delete(name).ok()) << name;
    ASSERT_NO_FATAL_FAILURE(ExpectNothingLeft());
  }
  void Remember() {
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      used_.push_back(server_.used_bytes(static_cast<int>(i)));
      allocations_.push_back(devices_[i]->allocations());
    }
  }
  void ExpectNothingLeft() {
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      const int index = static_cast<int>(i);
      ASSERT_TRUE(Eventually([&] { return server_.used_bytes(index) == used_[i]; }))
          << server_.used_bytes(index);
      ASSERT_TRUE(Eventually([&] { return devices_[i]->allocations() == allocations_[i]; }))
          << devices_[i]->allocations() << " allocations, not " << allocations_[i];
      ASSERT_EQ(server_.Info(index).scratch_used_bytes(), 0);
    }
  }
  // Checks that the call reports the loss and that the device's memory is freed, and starts a new
  // server.
  void ExpectLost(FakeDevice& device, const grpc::Status& status) {
    EXPECT_TRUE(device.lost());
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
    if (!status.error_details().empty()) {
      EXPECT_EQ(DetailsOf(status).reason, "DEVICE_LOST");
    }
    const int index = device.info().name.back() - '0';
    EXPECT_TRUE(Eventually([&] {
      const v1::Device info = server_.Info(index);
      return info.lost() && info.buffer_used_bytes() == 0 && info.scratch_used_bytes() == 0;
    }));
    EXPECT_TRUE(Eventually([&] { return device.allocations() == 0; })) << device.allocations();
    Restart();
  }

  const Options options_;
  std::vector<FakeDevice*> devices_;  // Owned by the server.
  // The state of each device before the first request.
  std::vector<std::uint64_t> used_;
  std::vector<std::uint64_t> allocations_;
  int faults_ = 0;
};

TEST_F(EveryFaultTest, Transfers) {
  Try("Upload", [&] { return Put("y"); }, {"y"});
  Try("Upload of several messages",
      [&] {
        return Upload({First("y", 3000, Ones(1000)), More(Ones(1000)), More(Ones(1000))});
      },
      {"y"});
  Try("CreateBuffer, Upload into it, UpdateBuffer, SealBuffer",
      [&] {
        grpc::Status status = Create("y", {2000});
        if (!status.ok()) return status;
        status = Upload({At("y", 4000, Ones(1000))});
        if (status.ok()) status = Upload({At("y", 0, Ones(1000))});
        if (status.ok()) {
          status = Call(Of<v1::UpdateBufferRequest>("name: 'y' ttl { seconds: 3600 }"));
        }
        if (status.ok()) status = Seal("y");
        if (!status.ok()) Delete("y");
        return status;
      },
      {"y"});
  Try("Download", [&] {
    std::string data;
    return server_.Fetch("x", &data);
  });
  Try("CopyBuffer",
      [&] { return Call(Of<v1::CopyBufferRequest>("source: 'x' name: 'y' dtype: DTYPE_F64")); },
      {"y"});
}

TEST_F(EveryFaultTest, Operations) {
  const std::string turned = "{ buffer: 'x' view { shape: [64, 64] strides: [1, 64] } }";
  const std::string column = "{ buffer: 'x' view { shape: 64 strides: 64 } }";
  const std::string into_y = " result { buffer { name: 'y' } }";
  const std::string into_both = " values { buffer { name: 'y' } } indices { buffer { name: 'z' } }";
  const std::string roots =
      " expression { nodes { operand: 0 } nodes { op: MAP_OP_SQRT args: 0 } }";
  Try("Dot", [&] {
    return Dot(InView(Named("x"), 0, {64}, {64}),
               Inline<float>(v1::DTYPE_F32, {64}, std::vector<float>(64, 2)));
  });
  TryTimed<v1::DotRequest>("a " + column + " b " + column, {});
  TryTimed<v1::AddRequest>("a " + turned + " b { buffer: 'x' }" + into_y, {"y"});
  TryTimed<v1::WindowSumRequest>(
      "x { buffer: 'x' view { shape: 2048 strides: 2 } } radius: 3" + into_y, {"y"});
  TryTimed<v1::ReduceRequest>("x " + turned + " op: REDUCE_OP_VARIANCE axes: 1" + into_y, {"y"});
  TryTimed<v1::MatmulRequest>("a " + turned + " b { buffer: 'x' }" + into_y, {"y"});
  TryTimed<v1::MapRequest>("operands " + turned + roots + into_y, {"y"});
  TryTimed<v1::ScanRequest>("x " + turned + " op: REDUCE_OP_SUM" + into_y, {"y"});
  TryTimed<v1::ScanRequest>("x " + turned + " op: REDUCE_OP_MAX axis: 0" + roots + into_y, {"y"});
  TryTimed<v1::SortRequest>("x " + turned + " axis: 0" + into_both, {"y", "z"});
  TryTimed<v1::SortRequest>(
      "x " + turned + roots + " values { none: true } indices { buffer { name: 'z' } }", {"z"});
  TryTimed<v1::TakeRequest>("x " + turned +
                                " indices { tensor { dtype: DTYPE_I64 shape: 1 data: "
                                "'\\001\\000\\000\\000\\000\\000\\000\\000' } } axis: 1" +
                                into_y,
                            {"y"});
  TryTimed<v1::SelectRequest>(
      "x { buffer: 'x' view { shape: 2 shape: 1 } } mask { tensor { dtype: "
      "DTYPE_BOOL shape: 2 shape: 1 data: '\\001\\001' } }" +
          into_both,
      {"y", "z"});
  TryTimed<v1::HistogramRequest>("x " + turned + " even { count: 9 low: 0 high: 1 }" + into_y,
                                 {"y"});
  TryTimed<v1::SearchSortedRequest>(
      "x { tensor { dtype: DTYPE_F32 shape: 1 data: '\\000\\000\\000\\000' } } keys " + turned +
          into_y,
      {"y"});
  TryTimed<v1::SumByLabelRequest>(
      "x " + turned +
          " labels { tensor { dtype: DTYPE_I32 shape: 1 data: '\\000\\000\\000\\000' } "
          "view { shape: 64 strides: 0 } } length: 3" +
          into_y,
      {"y"});
  TryTimed<v1::LinalgRequest>("x " + turned + " function: LINALG_FUNCTION_QR" + into_y, {"y"});
  TryTimed<v1::TopKRequest>("x " + turned + " k: 3 axis: 0" + into_both, {"y", "z"});
}

// Each step reports its own error. A program with a failing step succeeds, and stores what it can.
TEST_F(EveryFaultTest, Programs) {
  Try("Execute", [&] {
    v1::ExecuteResponse response;
    grpc::Status status = Call(Of<v1::ExecuteRequest>(R"(
        steps { matmul { a { buffer: 'x' } b { buffer: 'x' } timing: true
                         result { scratch: true } } }
        steps { reduce { x { step: 0 } op: REDUCE_OP_SUM axes: 0 result { inline: true } } })"),
                               &response);
    for (const v1::StepResult& result : response.results())
      if (status.ok() && result.has_error())
        status = grpc::Status(static_cast<grpc::StatusCode>(result.error().code()),
                              result.error().message());
    return status;
  });
}

// x is on one device, and s on both.
class EveryFaultOfTwoTest : public EveryFaultTest {
 protected:
  EveryFaultOfTwoTest() : EveryFaultTest(TestOptions(), 2) {}
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(EveryFaultTest::SetUp());
    ASSERT_TRUE(Copy("x", "s").ok());
  }
  grpc::Status Copy(const std::string& from, const std::string& to) {
    return Call(Of<v1::CopyBufferRequest>(
        absl::StrCat("source: '", from, "' name: '", to, "' placement: 'all'")));
  }
};

TEST_F(EveryFaultOfTwoTest, ShardedBuffers) {
  Try("CopyBuffer of one device to both", [&] { return Copy("x", "y"); }, {"y"});
  Try("CopyBuffer of both to both", [&] { return Copy("s", "y"); }, {"y"});
  Try("Upload",
      [&] {
        v1::UploadRequest first = First("y", 4096, Ones(2000));
        first.mutable_spec()->add_placement("all");
        return Upload({first, More(Ones(2096))});
      },
      {"y"});
  Try("Download", [&] {
    std::string data;
    return server_.Fetch("s", &data);
  });
  const v1::Operand s = Named("s");
  Try("Dot", [&] { return Dot(InView(s, 0, {4096}), InView(s, 0, {4096})); });
  Try("Map",
      [&] {
        return Call(Of<v1::MapRequest>(R"(operands { buffer: 's' }
            expression { nodes { operand: 0 } nodes { op: MAP_OP_SQRT args: 0 } }
            result { buffer { name: 'y' placement: 'all' } })"));
      },
      {"y"});
}

// A region of memory that the test shares with the server.
class EveryFaultOfSharedMemoryTest : public EveryFaultTest {
 protected:
  EveryFaultOfSharedMemoryTest() : EveryFaultTest(SharedOptions(), 1) {}
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(EveryFaultTest::SetUp());
    auto shared = SharedMemory::Make(SocketPath("every_fault"), 1 << 14, absl::Seconds(10));
    ASSERT_TRUE(shared.ok()) << shared.status();
    shared_.emplace(*std::move(shared));
  }
  v1::RegionRange Range() const {
    v1::RegionRange range;
    range.set_region(shared_->region());
    range.set_size(1 << 14);
    return range;
  }

 private:
  static Options SharedOptions() {
    return With([](Options& options) { options.shared_memory = SocketPath("every_fault"); });
  }

  std::optional<SharedMemory> shared_;
};

TEST_F(EveryFaultOfSharedMemoryTest, Transfers) {
  Try("UploadShared",
      [&] {
        auto request =
            Of<v1::UploadSharedRequest>("name: 'y' spec { dtype: DTYPE_F32 shape: 4096 }");
        *request.mutable_source() = Range();
        return Call(request);
      },
      {"y"});
  Try("DownloadShared", [&] {
    auto request = Of<v1::DownloadSharedRequest>("name: 'x'");
    *request.mutable_target() = Range();
    return Call(request);
  });
}

}  // namespace
}  // namespace tessera
