// The services as a client sees them, on the CPU device: what the suites of both share.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "server/slots.h"
#include "tests/fake_device.h"
#include "tests/test_server.h"

namespace tessera {

template <class T>
std::string Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

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

class ServiceTest : public testing::Test {
 protected:
  ServiceTest() : ServiceTest(TestOptions()) {}
  explicit ServiceTest(const Options& options, std::vector<std::unique_ptr<Device>> devices = {})
      : server_(options, std::move(devices)) {}

  // After each error the server must answer as ever.
  void TearDown() override { ExpectWorks(); }
  void ExpectWorks() {
    v1::DotResponse response;
    const v1::Operand x = Inline<float>(v1::DTYPE_F32, {3}, {1, 2, 3});
    ASSERT_TRUE(Dot(x, x, &response).ok());
    ASSERT_EQ(response.value().real(), 14);
  }

  grpc::Status Dot(const v1::Operand& a, const v1::Operand& b, v1::DotResponse* response,
                   const std::string& strategy = "") {
    v1::DotRequest request;
    *request.mutable_a() = a;
    *request.mutable_b() = b;
    request.set_strategy(strategy);
    return Call(&v1::ComputeService::Stub::Dot, request, response);
  }

  template <class Request, class Response>
  grpc::Status Call(grpc::Status (v1::ComputeService::Stub::*method)(grpc::ClientContext*,
                                                                     const Request&, Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext context;
    return (server_.compute().*method)(&context, request, response);
  }
  template <class Request, class Response>
  grpc::Status Call(grpc::Status (v1::BufferService::Stub::*method)(grpc::ClientContext*,
                                                                    const Request&, Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext context;
    return (server_.buffers().*method)(&context, request, response);
  }

  grpc::Status Create(const std::string& name, const std::vector<std::int64_t>& shape,
                      v1::CreateBufferResponse* response = nullptr) {
    v1::CreateBufferRequest request;
    request.set_name(name);
    request.mutable_spec()->set_dtype(v1::DTYPE_F32);
    request.mutable_spec()->mutable_shape()->Assign(shape.begin(), shape.end());
    v1::CreateBufferResponse ignored;
    return Call(&v1::BufferService::Stub::CreateBuffer, request,
                response == nullptr ? &ignored : response);
  }
  grpc::Status Get(const std::string& name, v1::GetBufferResponse* response) {
    v1::GetBufferRequest request;
    request.set_name(name);
    return Call(&v1::BufferService::Stub::GetBuffer, request, response);
  }
  grpc::Status Seal(const std::string& name, v1::SealBufferResponse* response) {
    v1::SealBufferRequest request;
    request.set_name(name);
    return Call(&v1::BufferService::Stub::SealBuffer, request, response);
  }
  grpc::Status Delete(const std::string& name) {
    v1::DeleteBufferRequest request;
    request.set_name(name);
    v1::DeleteBufferResponse response;
    return Call(&v1::BufferService::Stub::DeleteBuffer, request, &response);
  }
  grpc::Status Upload(const std::vector<v1::UploadRequest>& messages,
                      v1::UploadResponse* response = nullptr) {
    grpc::ClientContext context;
    v1::UploadResponse ignored;
    auto writer = server_.buffers().Upload(&context, response == nullptr ? &ignored : response);
    for (const v1::UploadRequest& message : messages) {
      if (!writer->Write(message)) break;
    }
    writer->WritesDone();
    return writer->Finish();
  }

  // A message that creates a buffer of so many floats.
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

// What a message of a download has of data, and one of an upload at most.
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

  // A buffer of so many bytes, an even number, as a draft to be written in ranges.
  void Reserve(const std::string& name, std::uint64_t size) {
    v1::CreateBufferRequest request;
    request.set_name(name);
    request.mutable_spec()->set_dtype(v1::DTYPE_F16);
    request.mutable_spec()->add_shape(static_cast<std::int64_t>(size / 2));
    v1::CreateBufferResponse response;
    const grpc::Status status = Call(&v1::BufferService::Stub::CreateBuffer, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  // The bytes as a READY buffer.
  void Put(const std::string& name, const std::string& bytes) {
    Reserve(name, bytes.size());
    std::vector<v1::UploadRequest> messages;
    for (std::uint64_t at = 0; at < bytes.size(); at += kLargestData) {
      messages.push_back(At(name, at, bytes.substr(at, kLargestData)));
    }
    ASSERT_TRUE(messages.empty() || Upload(messages).ok());
    v1::SealBufferResponse sealed;
    ASSERT_TRUE(Seal(name, &sealed).ok());
  }

 private:
  std::mt19937_64 random_{1};
};

inline std::vector<std::unique_ptr<Device>> Only(FakeDevice* device) {
  std::vector<std::unique_ptr<Device>> devices;
  devices.emplace_back(device);
  return devices;
}

class TwoDevicesTest : public ServiceTest {
 protected:
  TwoDevicesTest() : TwoDevicesTest(TwoDevices()) {}

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
