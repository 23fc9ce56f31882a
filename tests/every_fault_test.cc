// Every request with a fault of the device at every place where one can come: the k-th allocation,
// copy or wait fails, for each k there is. The call says so or goes well, nothing is left of it,
// and the same call goes well afterwards.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/service_fixture.h"

namespace tessera {
namespace {

using Step = FakeDevice::Step;
using Kind = DeviceError::Kind;

class EveryFaultTest : public ServiceTest {
 protected:
  EveryFaultTest() : EveryFaultTest(OneDevice()) {}

  void SetUp() override {
    std::vector<float> values(64 * 64);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 17);
    ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {64, 64}, values).ok());
    used_ = server_.used_bytes();
    allocations_ = device_.allocations();
  }

  // stored: the names of what the request stores when it goes well.
  void Try(const std::string& what, const std::function<grpc::Status()>& request,
           const std::vector<std::string>& stored = {}) {
    ASSERT_NO_FATAL_FAILURE(ExpectGood(what, request, stored));  // pools have grown
    int hit = 0;
    for (const Step step : {Step::kAllocate, Step::kStaging, Step::kBegin, Step::kScratch,
                            Step::kCopyToDevice, Step::kCopyToHost, Step::kSynchronize}) {
      for (const Kind kind : {Kind::kFailed, Kind::kOutOfMemory, Kind::kOutOfHostMemory}) {
        for (int k = 0;; ++k) {
          SCOPED_TRACE(what + ": step " + std::to_string(static_cast<int>(step)) + ", kind " +
                       std::to_string(static_cast<int>(kind)) + ", time " + std::to_string(k));
          ASSERT_LT(k, 1000) << "it never ends";
          device_.Fail(step, kind, 1, k);
          const grpc::Status status = request();
          const bool over = device_.Relent(step) > 0;
          if (!status.ok()) {
            ASSERT_FALSE(over) << status.error_message();
            ASSERT_TRUE(status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED ||
                        status.error_code() == grpc::StatusCode::INTERNAL)
                << status.error_message();
            if (!status.error_details().empty()) {
              ASSERT_NE(DetailsOf(status).reason, "INTERNAL") << status.error_message();
            }
            ++hit;
          } else {
            for (const std::string& name : stored) ASSERT_TRUE(Delete(name).ok()) << name;
          }
          ASSERT_NO_FATAL_FAILURE(ExpectNothingLeft());
          if (over) break;
          ASSERT_NO_FATAL_FAILURE(ExpectGood(what, request, stored));
        }
      }
    }
    EXPECT_GT(hit, 0) << what << " cannot fail";
    faults_ += hit;
  }

  void TearDown() override {
    ServiceTest::TearDown();
    RecordProperty("faults", faults_);
    std::printf("%d faults survived\n", faults_);
  }

  grpc::Status Put(const std::string& name) {
    return server_.Put<float>(name, v1::DTYPE_F32, {1000}, std::vector<float>(1000, 1));
  }
  static void Into(const std::string& name, v1::Result* result) {
    result->mutable_buffer()->set_name(name);
  }

  FakeDevice& device_;

 private:
  using Devices = std::vector<std::unique_ptr<Device>>;
  static Devices OneDevice() {
    Devices devices;
    devices.push_back(std::make_unique<FakeDevice>());
    return devices;
  }
  explicit EveryFaultTest(Devices&& devices)
      : EveryFaultTest(std::move(devices), static_cast<FakeDevice&>(*devices[0])) {}
  EveryFaultTest(Devices&& devices, FakeDevice& device)
      : ServiceTest(TestOptions(), std::move(devices)), device_(device) {}

  void ExpectGood(const std::string& what, const std::function<grpc::Status()>& request,
                  const std::vector<std::string>& stored) {
    const grpc::Status status = request();
    ASSERT_TRUE(status.ok()) << what << ": " << status.error_message();
    for (const std::string& name : stored) ASSERT_TRUE(Delete(name).ok()) << name;
    ASSERT_NO_FATAL_FAILURE(ExpectNothingLeft());
  }
  void ExpectNothingLeft() {
    ASSERT_TRUE(Eventually([&] { return server_.used_bytes() == used_; })) << server_.used_bytes();
    ASSERT_TRUE(Eventually([&] { return device_.allocations() == allocations_; }))
        << device_.allocations() << " allocations, not " << allocations_;
    ASSERT_EQ(server_.Info().scratch_used_bytes(), 0);
  }

  std::uint64_t used_ = 0;
  std::uint64_t allocations_ = 0;
  int faults_ = 0;
};

TEST_F(EveryFaultTest, Transfers) {
  Try("Upload", [&] { return Put("y"); }, {"y"});
  Try("Download", [&] {
    std::string data;
    return server_.Fetch("x", &data);
  });
  Try("CopyBuffer",
      [&] {
        v1::CopyBufferRequest request;
        request.set_source("x");
        request.set_name("y");
        request.set_dtype(v1::DTYPE_F64);
        v1::CopyBufferResponse response;
        return Call(&v1::BufferService::Stub::CopyBuffer, request, &response);
      },
      {"y"});
}

TEST_F(EveryFaultTest, Operations) {
  const v1::Operand x = Named("x"), turned = InView(x, 0, {64, 64}, {1, 64});
  Try("Dot", [&] {
    v1::DotResponse response;
    return Dot(InView(turned, 0, {64}, {64}),
               Inline<float>(v1::DTYPE_F32, {64}, std::vector<float>(64, 2)), &response);
  });
  Try("Reduce",
      [&] {
        v1::ReduceRequest request;
        *request.mutable_x() = turned;
        request.set_op(v1::REDUCE_OP_VARIANCE);
        request.add_axes(1);
        Into("y", request.mutable_result());
        v1::ReduceResponse response;
        return Call(&v1::ComputeService::Stub::Reduce, request, &response);
      },
      {"y"});
  Try("Matmul",
      [&] {
        v1::MatmulRequest request;
        *request.mutable_a() = turned;
        *request.mutable_b() = x;
        Into("y", request.mutable_result());
        v1::MatmulResponse response;
        return Call(&v1::ComputeService::Stub::Matmul, request, &response);
      },
      {"y"});
  Try("Map",
      [&] {
        v1::MapRequest request;
        *request.add_operands() = turned;
        request.mutable_expression()->add_nodes()->set_operand(0);
        v1::Expression::Node& node = *request.mutable_expression()->add_nodes();
        node.set_op(v1::MAP_OP_SQRT);
        node.add_args(0);
        Into("y", request.mutable_result());
        v1::MapResponse response;
        return Call(&v1::ComputeService::Stub::Map, request, &response);
      },
      {"y"});
  Try("TopK",
      [&] {
        v1::TopKRequest request;
        *request.mutable_x() = turned;
        request.set_k(3);
        request.set_axis(0);
        Into("y", request.mutable_values());
        Into("z", request.mutable_indices());
        v1::TopKResponse response;
        return Call(&v1::ComputeService::Stub::TopK, request, &response);
      },
      {"y", "z"});
}

// The error of a step is its own: a program with one that fails goes well, and stores what it can.
TEST_F(EveryFaultTest, Programs) {
  Try("Execute", [&] {
    v1::ExecuteRequest request;
    v1::MatmulRequest& product = *request.add_steps()->mutable_matmul();
    *product.mutable_a() = Named("x");
    *product.mutable_b() = Named("x");
    product.mutable_result()->set_scratch(true);
    v1::ReduceRequest& sum = *request.add_steps()->mutable_reduce();
    sum.mutable_x()->set_step(0);
    sum.set_op(v1::REDUCE_OP_SUM);
    sum.add_axes(0);
    sum.mutable_result()->set_inline_(true);
    v1::ExecuteResponse response;
    grpc::Status status = Call(&v1::ComputeService::Stub::Execute, request, &response);
    for (const v1::StepResult& result : response.results())
      if (status.ok() && result.has_error())
        status = grpc::Status(static_cast<grpc::StatusCode>(result.error().code()),
                              result.error().message());
    return status;
  });
}

}  // namespace
}  // namespace tessera
