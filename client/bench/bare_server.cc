#include "client/bench/bare_server.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <fstream>
#include <memory>

#include "client/bench/channels.h"
#include "grpcpp/health_check_service_interface.h"

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

class Compute final : public v1::ComputeService::CallbackService {
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

class Buffers final : public v1::BufferService::CallbackService {
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

// Serves until the process ends. Writes the addresses, including chosen ports, to `out`.
[[noreturn]] void Serve(const std::vector<std::string>& addresses, std::FILE* out) {
  Compute compute;
  Buffers buffers;
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  std::deque<int> ports(addresses.size());
  for (std::size_t i = 0; i < addresses.size(); ++i)
    builder.AddListeningPort(addresses[i], grpc::InsecureServerCredentials(), &ports[i]);
  builder.RegisterService(&compute);
  builder.RegisterService(&buffers);
  builder.SetMaxReceiveMessageSize(8 << 20);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    std::string address = addresses[i];
    if (server == nullptr || ports[i] == 0) Die("cannot listen on " + address);
    if (!IsUnix(address)) address = "127.0.0.1:" + std::to_string(ports[i]);
    std::fprintf(out, "%s\n", address.c_str());
  }
  std::fclose(out);
  for (;;) pause();
}

}  // namespace

BareServer::BareServer(const std::vector<std::string>& addresses) {
  int ends[2];
  if (pipe(ends) != 0) Die("pipe failed");
  pid_ = fork();
  if (pid_ < 0) Die("fork failed");
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    Serve(addresses, fdopen(ends[1], "w"));
  }
  close(ends[1]);
  std::ifstream in("/dev/fd/" + std::to_string(ends[0]));
  for (std::string address; std::getline(in, address);) addresses_.push_back(address);
  close(ends[0]);
  if (addresses_.empty()) Die("the bare server did not start");
}

BareServer::~BareServer() {
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

}  // namespace tessera::bench
