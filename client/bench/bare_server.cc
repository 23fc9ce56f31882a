#include "client/bench/bare_server.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "client/bench/serve.h"

namespace tessera::bench {
namespace {

constexpr std::size_t kChunk = std::size_t{1} << 20;

grpc::ServerUnaryReactor* AnswerOk(grpc::CallbackServerContext* context) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

class ReadAll final : public grpc::ServerReadReactor<v1::UploadRequest> {
 public:
  explicit ReadAll(v1::UploadResponse& response) : response_(response) { StartRead(&request_); }
  void OnReadDone(bool ok) override {
    if (!ok) {
      response_.set_received_bytes(bytes_);
      Finish(grpc::Status::OK);
      return;
    }
    bytes_ += request_.data().size();
    StartRead(&request_);
  }
  void OnDone() override { delete this; }

 private:
  v1::UploadResponse& response_;
  v1::UploadRequest request_;
  std::uint64_t bytes_ = 0;
};

class WriteAll final : public grpc::ServerWriteReactor<v1::DownloadResponse> {
 public:
  explicit WriteAll(std::uint64_t bytes) : left_(bytes) {
    response_.mutable_data()->resize(kChunk);
    Write();
  }
  void OnWriteDone(bool ok) override {
    if (ok && left_ > 0) {
      Write();
    } else {
      Finish(ok ? grpc::Status::OK : grpc::Status::CANCELLED);
    }
  }
  void OnDone() override { delete this; }

 private:
  void Write() {
    const std::uint64_t size = std::min<std::uint64_t>(kChunk, left_);
    left_ -= size;
    response_.mutable_data()->resize(size);
    StartWrite(&response_);
  }
  v1::DownloadResponse response_;
  std::uint64_t left_;
};

}  // namespace

class BareServer::Compute final : public v1::ComputeService::CallbackService {
  grpc::ServerUnaryReactor* Dot(grpc::CallbackServerContext* context, const v1::DotRequest*,
                                v1::DotResponse* response) override {
    response->mutable_value()->set_real(0);
    return AnswerOk(context);
  }
  grpc::ServerUnaryReactor* Reduce(grpc::CallbackServerContext* context, const v1::ReduceRequest*,
                                   v1::ReduceResponse* response) override {
    response->mutable_value()->set_real(0);
    return AnswerOk(context);
  }
  grpc::ServerUnaryReactor* Execute(grpc::CallbackServerContext* context,
                                    const v1::ExecuteRequest* request,
                                    v1::ExecuteResponse* response) override {
    for (int i = 0; i < request->steps_size(); ++i)
      response->add_results()->mutable_dot()->mutable_value()->set_real(0);
    return AnswerOk(context);
  }
  grpc::ServerUnaryReactor* Matmul(grpc::CallbackServerContext* context, const v1::MatmulRequest*,
                                   v1::MatmulResponse*) override {
    return AnswerOk(context);
  }
};

class BareServer::Buffers final : public v1::BufferService::CallbackService {
  grpc::ServerReadReactor<v1::UploadRequest>* Upload(grpc::CallbackServerContext*,
                                                     v1::UploadResponse* response) override {
    return new ReadAll(*response);
  }
  // request->limit() is the number of bytes to send.
  grpc::ServerWriteReactor<v1::DownloadResponse>* Download(
      grpc::CallbackServerContext*, const v1::DownloadRequest* request) override {
    return new WriteAll(request->limit());
  }
};

BareServer::BareServer(std::vector<std::string> addresses)
    : compute_(std::make_unique<Compute>()),
      buffers_(std::make_unique<Buffers>()),
      addresses_(std::move(addresses)),
      server_(Serve(addresses_, {compute_.get(), buffers_.get()})) {}

BareServer::~BareServer() { server_->Shutdown(); }

}  // namespace tessera::bench
