// A server inside the test's process, stubs to call it, and its errors.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "google/protobuf/text_format.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/impl/client_unary_call.h"
#include "kernels/compute.h"
#include "server/observe/log.h"
#include "server/server.h"
#include "tessera/v1/buffer.grpc.pb.h"
#include "tessera/v1/compute.grpc.pb.h"
#include "tests/fake_device.h"

namespace tessera {

// Waits up to a minute until the condition is true, for effects that follow a response or do not
// depend on one.
template <class Condition>
bool Eventually(Condition condition) {
  for (int i = 0; i < 6000; ++i) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(i < 20 ? 1 : 10));
  }
  return false;
}

template <class T>
std::string Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// Returns the path of a socket that no other process uses.
inline std::string SocketPath(const std::string& name) {
  return absl::StrCat(testing::TempDir(), "/", name, "_", getpid(), ".sock");
}

// Parses a message from its text form: Of<v1::GetBufferRequest>("name: 'x'").
template <class Message>
Message Of(const std::string& text) {
  Message message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message)) << text;
  return message;
}

// Returns options for a small, quiet server without a socket.
inline Options TestOptions() {
  Options options;
  options.listen.clear();
  options.workers = 2;
  options.memory_limit = {.bytes = 256 << 20};
  options.warm_up = false;  // A fake device may fail in its first operation.
  options.drain_timeout = absl::Seconds(10);
  return options;
}

// Returns TestOptions() with a change.
template <class Change>
Options With(const Change& change) {
  Options options = TestOptions();
  change(options);
  return options;
}

// The messages of an upload, one by one.
struct UploadStream {
  explicit UploadStream(v1::BufferService::Stub& stub) : writer(stub.Upload(&context, &response)) {}
  bool Write(const v1::UploadRequest& message) { return writer->Write(message); }
  // Ends the upload after the last message.
  grpc::Status Finish() {
    writer->WritesDone();
    return writer->Finish();
  }

  grpc::ClientContext context;
  v1::UploadResponse response;
  const std::unique_ptr<grpc::ClientWriter<v1::UploadRequest>> writer;
};

class TestServer {
 public:
  explicit TestServer(const Options& options = TestOptions(),
                      std::vector<std::unique_ptr<Device>> devices = {}) {
    SetUpLog("off", false);
    if (devices.empty()) devices.push_back(*OpenDevice("cpu"));
    auto started = Server::Start(options, std::move(devices));
    if (!started.ok()) {
      ADD_FAILURE() << started.status();
      std::abort();
    }
    server_ = *std::move(started);
    channel_ = server_->InProcessChannel();
    buffers_ = v1::BufferService::NewStub(channel_);
    compute_ = v1::ComputeService::NewStub(channel_);
  }

  Server& server() { return *server_; }
  std::shared_ptr<grpc::Channel> channel() { return channel_; }
  v1::BufferService::Stub& buffers() { return *buffers_; }
  v1::ComputeService::Stub& compute() { return *compute_; }
  // The address of the first --listen.
  const std::string& address() { return server_->addresses().front(); }

  // Calls the unary method that takes this type of request.
  template <class Request, class Response>
  grpc::Status Call(const Request& request, Response* response, grpc::ClientContext& context) {
    const google::protobuf::Descriptor& type = *Request::descriptor();
    const std::string path = absl::StrCat("/", type.file()->service(0)->full_name(), "/",
                                          absl::StripSuffix(type.name(), "Request"));
    const grpc::internal::RpcMethod method(path.c_str(), grpc::internal::RpcMethod::NORMAL_RPC);
    return grpc::internal::BlockingUnaryCall(channel_.get(), method, &context, request, response);
  }
  template <class Request, class Response>
  grpc::Status Call(const Request& request, Response* response) {
    grpc::ClientContext context;
    return Call(request, response, context);
  }
  template <class Request>
  grpc::Status Call(const Request& request) {
    grpc::ByteBuffer ignored;
    return Call(request, &ignored);
  }
  // Returns the response to a request that must succeed.
  template <class Response, class Request>
  Response Good(const Request& request) {
    Response response;
    const grpc::Status status = Call(request, &response);
    EXPECT_TRUE(status.ok()) << request.ShortDebugString() << ": " << status.error_message();
    return response;
  }

  v1::Device Info(int device = 0) {
    const auto info = Good<v1::GetServerInfoResponse>(v1::GetServerInfoRequest());
    return info.devices_size() > device ? info.devices(device) : v1::Device();
  }
  std::uint64_t used_bytes(int device = 0) { return Info(device).buffer_used_bytes(); }

  // Returns when the server has looked for everything that may have expired since the call.
  void AwaitTurn() {
    const std::uint64_t used = used_bytes();
    for (int i = 0; i < 2; ++i) {
      UploadStream upload(*buffers_);
      upload.Write(Of<v1::UploadRequest>(
          "name: 'moment' spec { dtype: DTYPE_F32 ttl { nanos: 1 } } data: 'abcd'"));
      ASSERT_TRUE(upload.Finish().ok());
      ASSERT_TRUE(Eventually([&] { return used_bytes() == used; }));
    }
  }

  // Uploads in one message.
  template <class T>
  grpc::Status Put(const std::string& name, v1::Dtype dtype, const std::vector<std::int64_t>& shape,
                   const std::vector<T>& values, bool replace = false,
                   const std::string& device = "") {
    UploadStream upload(*buffers_);
    v1::UploadRequest request;
    request.set_name(name);
    v1::BufferSpec* spec = request.mutable_spec();
    spec->set_dtype(dtype);
    spec->mutable_shape()->Assign(shape.begin(), shape.end());
    spec->set_replace(replace);
    spec->set_device(device);
    request.set_data(Bytes(values));
    upload.Write(request);
    return upload.Finish();
  }

  // Gets the bytes of a buffer. A limit of 0 means up to the end.
  grpc::Status Fetch(const std::string& name, std::string* data, std::uint64_t offset = 0,
                     std::uint64_t limit = 0) {
    grpc::ClientContext context;
    v1::DownloadRequest request;
    request.set_name(name);
    request.set_offset(offset);
    request.set_limit(limit);
    auto reader = buffers_->Download(&context, request);
    v1::DownloadResponse response;
    data->clear();
    while (reader->Read(&response)) {
      EXPECT_EQ(response.offset(), offset + data->size());
      *data += response.data();
    }
    return reader->Finish();
  }

 private:
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::BufferService::Stub> buffers_;
  std::unique_ptr<v1::ComputeService::Stub> compute_;
};

// The machine-readable part of an error.
struct ErrorDetails {
  std::string reason;
  std::string domain;
  std::map<std::string, std::string> metadata;
  bool retry = false;  // Whether the error says when to retry.
};

inline ErrorDetails DetailsOf(const grpc::Status& status) {
  ErrorDetails details;
  google::rpc::Status proto;
  EXPECT_TRUE(proto.ParseFromString(status.error_details()));
  if (!status.ok()) {
    EXPECT_EQ(proto.code(), static_cast<int>(status.error_code()));
    EXPECT_EQ(proto.message(), status.error_message());
  }
  for (const google::protobuf::Any& any : proto.details()) {
    google::rpc::ErrorInfo info;
    if (any.UnpackTo(&info)) {
      details.reason = info.reason();
      details.domain = info.domain();
      details.metadata = {info.metadata().begin(), info.metadata().end()};
    }
    google::rpc::RetryInfo retry;
    if (any.UnpackTo(&retry)) details.retry = retry.retry_delay().nanos() > 0;
  }
  return details;
}

// Returns the bytes that a buffer of this size counts against the limit on a device.
inline std::uint64_t Charged(std::uint64_t bytes) {
  static const std::unique_ptr<Device> device = *OpenDevice("cpu");
  return device->AllocationBytes(static_cast<std::size_t>(bytes));
}

// Returns the code of a reason. Reasons that are not listed have INVALID_ARGUMENT.
inline grpc::StatusCode CodeOf(const std::string& reason) {
  static const std::map<std::string, grpc::StatusCode> codes = {
      {"BAD_CHECKSUM", grpc::StatusCode::DATA_LOSS},
      {"BUFFER_EXISTS", grpc::StatusCode::ALREADY_EXISTS},
      {"BUFFER_NOT_FOUND", grpc::StatusCode::NOT_FOUND},
      {"BUFFER_NOT_READY", grpc::StatusCode::FAILED_PRECONDITION},
      {"BUFFER_SEALED", grpc::StatusCode::FAILED_PRECONDITION},
      {"CHECKSUM_UNKNOWN", grpc::StatusCode::FAILED_PRECONDITION},
      {"CUDA_ERROR", grpc::StatusCode::INTERNAL},
      {"DEVICE_LOST", grpc::StatusCode::UNAVAILABLE},
      {"HOST_MEMORY_EXHAUSTED", grpc::StatusCode::RESOURCE_EXHAUSTED},
      {"OPERATION_TOO_LONG", grpc::StatusCode::FAILED_PRECONDITION},
      {"QUEUE_FULL", grpc::StatusCode::RESOURCE_EXHAUSTED},
      {"QUOTA_EXCEEDED", grpc::StatusCode::RESOURCE_EXHAUSTED},
      {"SCRATCH_EXHAUSTED", grpc::StatusCode::RESOURCE_EXHAUSTED},
      {"STRATEGY_UNSUPPORTED", grpc::StatusCode::FAILED_PRECONDITION},
      {"UPLOAD_IDLE", grpc::StatusCode::DEADLINE_EXCEEDED}};
  const auto it = codes.find(reason);
  return it == codes.end() ? grpc::StatusCode::INVALID_ARGUMENT : it->second;
}

// Usage: ExpectError(status, "BUFFER_NOT_FOUND", {{"name", "x"}}). The entries of metadata must be
// present; "*" stands for any value.
inline void ExpectError(const grpc::Status& status, const std::string& reason,
                        const std::map<std::string, std::string>& metadata = {}) {
  const ErrorDetails details = DetailsOf(status);
  EXPECT_EQ(status.error_code(), CodeOf(reason)) << status.error_message();
  EXPECT_EQ(details.reason, reason) << status.error_message();
  EXPECT_EQ(details.domain, "tessera");
  for (const auto& [key, value] : metadata) {
    const auto it = details.metadata.find(key);
    if (it == details.metadata.end()) {
      ADD_FAILURE() << reason << " has no " << key;
    } else if (value != "*") {
      EXPECT_EQ(it->second, value) << reason << " " << key;
    } else {
      EXPECT_NE(it->second, "") << reason << " " << key;
    }
  }
}

}  // namespace tessera
