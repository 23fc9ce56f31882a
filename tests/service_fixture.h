// The services as a client sees them, on the CPU device. Common parts of the suites of both
// services.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "server/buffers/slots.h"
#include "tests/fake_device.h"
#include "tests/test_server.h"

namespace tessera {

template <class T>
std::vector<T> Values(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

inline v1::Operand Named(const std::string& name) {
  v1::Operand operand;
  operand.set_buffer(name);
  return operand;
}

template <class T>
v1::Operand Inline(v1::Dtype dtype, const std::vector<std::int64_t>& shape,
                   const std::vector<T>& values) {
  v1::Operand operand;
  operand.mutable_tensor()->set_dtype(dtype);
  operand.mutable_tensor()->mutable_shape()->Assign(shape.begin(), shape.end());
  operand.mutable_tensor()->set_data(Bytes(values));
  return operand;
}

inline v1::Operand InView(v1::Operand operand, std::int64_t offset,
                          const std::vector<std::int64_t>& shape,
                          const std::vector<std::int64_t>& strides = {}) {
  operand.mutable_view()->set_offset(offset);
  operand.mutable_view()->mutable_shape()->Assign(shape.begin(), shape.end());
  operand.mutable_view()->mutable_strides()->Assign(strides.begin(), strides.end());
  return operand;
}

// Returns the ranges that a buffer lacks, such as "0-4, 8-12".
inline std::string MissingOf(const v1::GetBufferResponse& got) {
  return absl::StrJoin(got.missing(), ", ", [](std::string* out, const v1::ByteRange& range) {
    absl::StrAppend(out, range.begin(), "-", range.end());
  });
}

// Returns the options of a server that stops without waiting.
inline Options Hasty(Options options) {
  options.drain_timeout = absl::ZeroDuration();
  return options;
}

class ServiceTest : public testing::Test {
 protected:
  ServiceTest() : ServiceTest(TestOptions()) {}
  explicit ServiceTest(const Options& options, std::vector<std::unique_ptr<Device>> devices = {})
      : server_(Hasty(options), std::move(devices)) {}

  // After each error, the server must still respond correctly.
  void TearDown() override {
    const v1::Operand x = Inline<float>(v1::DTYPE_F32, {3}, {1, 2, 3});
    ASSERT_EQ(GoodDot(x, x).value().real(), 14);
  }

  // Like TestServer::Call.
  template <class... Arguments>
  grpc::Status Call(const Arguments&... arguments) {
    return server_.Call(arguments...);
  }
  template <class Response, class Request>
  Response Good(const Request& request) {
    return server_.Good<Response>(request);
  }

  static v1::DotRequest DotOf(const v1::Operand& a, const v1::Operand& b) {
    v1::DotRequest request;
    *request.mutable_a() = a;
    *request.mutable_b() = b;
    return request;
  }
  grpc::Status Dot(const v1::Operand& a, const v1::Operand& b) { return Call(DotOf(a, b)); }
  v1::DotResponse GoodDot(const v1::Operand& a, const v1::Operand& b) {
    return Good<v1::DotResponse>(DotOf(a, b));
  }

  grpc::Status Create(const std::string& name, const std::vector<std::int64_t>& shape) {
    auto request = Of<v1::CreateBufferRequest>("spec { dtype: DTYPE_F32 }");
    request.set_name(name);
    request.mutable_spec()->mutable_shape()->Assign(shape.begin(), shape.end());
    return Call(request);
  }
  grpc::Status Get(const std::string& name, v1::GetBufferResponse* response) {
    v1::GetBufferRequest request;
    request.set_name(name);
    return Call(request, response);
  }
  grpc::Status Get(const std::string& name) {
    v1::GetBufferResponse ignored;
    return Get(name, &ignored);
  }
  bool IsGone(const std::string& name) {
    return Get(name).error_code() == grpc::StatusCode::NOT_FOUND;
  }
  v1::GetBufferResponse Found(const std::string& name) {
    v1::GetBufferResponse response;
    const grpc::Status status = Get(name, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }
  grpc::Status Seal(const std::string& name) {
    v1::SealBufferRequest request;
    request.set_name(name);
    return Call(request);
  }
  grpc::Status Delete(const std::string& name) {
    v1::DeleteBufferRequest request;
    request.set_name(name);
    return Call(request);
  }
  std::string Fetched(const std::string& name) {
    std::string data;
    const grpc::Status status = server_.Fetch(name, &data);
    EXPECT_TRUE(status.ok()) << name << ": " << status.error_message();
    return data;
  }
  grpc::Status Upload(const std::vector<v1::UploadRequest>& messages,
                      v1::UploadResponse* response = nullptr) {
    UploadStream upload(server_.buffers());
    for (const v1::UploadRequest& message : messages) {
      if (!upload.Write(message)) break;
    }
    const grpc::Status status = upload.Finish();
    if (response != nullptr) *response = upload.response;
    return status;
  }

  // Returns a message that creates a buffer of that many floats.
  static v1::UploadRequest First(const std::string& name, std::int64_t floats,
                                 const std::string& data = "") {
    v1::UploadRequest message;
    message.set_name(name);
    message.mutable_spec()->set_dtype(v1::DTYPE_F32);
    message.mutable_spec()->add_shape(floats);
    message.set_data(data);
    return message;
  }
  static v1::UploadRequest More(const std::string& data) {
    v1::UploadRequest message;
    message.set_data(data);
    return message;
  }
  static v1::UploadRequest At(const std::string& name, std::uint64_t offset,
                              const std::string& data) {
    v1::UploadRequest message;
    message.set_name(name);
    message.set_offset(offset);
    message.set_data(data);
    return message;
  }

  TestServer server_;
};

// The data in a download's message, and the maximum data in an upload's message.
constexpr std::uint64_t kSlot = Slot::kBytes;
constexpr std::uint64_t kLargestData = 4 << 20;

// Arrays of random bytes, for uploads and downloads.
class TransferFixture : public ServiceTest {
 protected:
  using ServiceTest::ServiceTest;

  std::string Random(std::uint64_t size) {
    std::string bytes(size, '\0');
    for (char& c : bytes) c = static_cast<char>(random_());
    return bytes;
  }
  std::uint64_t Below(std::uint64_t n) { return random_() % n; }

  // Creates a draft of that many bytes, an even number, to be written in ranges.
  void Reserve(const std::string& name, std::uint64_t size) {
    Good<v1::CreateBufferResponse>(Of<v1::CreateBufferRequest>(
        absl::StrCat("name: '", name, "' spec { dtype: DTYPE_F16 shape: ", size / 2, " }")));
  }
  // Stores the bytes as a READY buffer.
  void Put(const std::string& name, const std::string& bytes) {
    Reserve(name, bytes.size());
    std::vector<v1::UploadRequest> messages;
    for (std::uint64_t at = 0; at < bytes.size(); at += kLargestData) {
      messages.push_back(At(name, at, bytes.substr(at, kLargestData)));
    }
    ASSERT_TRUE(messages.empty() || Upload(messages).ok());
    ASSERT_TRUE(Seal(name).ok());
  }

 private:
  std::mt19937_64 random_{1};
};

// A suite whose server has different options.
template <class Suite, auto change>
class Changed : public Suite {
 protected:
  Changed() : Suite(With(change)) {}
};

// A suite whose server has only a fake device.
template <class Suite>
class OnFakeDevice : public Suite {
 protected:
  explicit OnFakeDevice(const Options& options = TestOptions())
      : OnFakeDevice(options, new FakeDevice) {}
  void TearDown() override {
    device_.Open();
    Suite::TearDown();
  }

  FakeDevice& device_;

 private:
  OnFakeDevice(const Options& options, FakeDevice* device)
      : Suite(options, Only(device)), device_(*device) {}
};

class TwoDevicesTest : public ServiceTest {
 protected:
  TwoDevicesTest() : TwoDevicesTest(FakeDevices(2)) {}

  FakeDevice &first_, &second_;

 private:
  using Devices = std::vector<std::unique_ptr<Device>>;
  explicit TwoDevicesTest(Devices&& devices)
      : TwoDevicesTest(std::move(devices), static_cast<FakeDevice&>(*devices[0]),
                       static_cast<FakeDevice&>(*devices[1])) {}
  TwoDevicesTest(Devices&& devices, FakeDevice& first, FakeDevice& second)
      : ServiceTest(TestOptions(), std::move(devices)), first_(first), second_(second) {}
};

}  // namespace tessera
