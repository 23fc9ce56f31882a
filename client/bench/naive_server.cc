#include "client/bench/naive_server.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "client/bench/serve.h"
#include "tessera/v1/buffer.grpc.pb.h"
#include "tessera/v1/compute.grpc.pb.h"

namespace tessera::bench {

class NaiveServer::Arrays {
 public:
  struct Array {
    std::shared_ptr<float> data;
    std::int64_t elements = 0;
  };
  explicit Arrays(NaiveDevice& device) : device_(device) {}
  NaiveDevice& device() { return device_; }
  Array Find(const std::string& name) {
    const std::lock_guard lock(mutex_);
    const auto found = arrays_.find(name);
    return found == arrays_.end() ? Array() : found->second;
  }
  void Put(const std::string& name, Array array) {
    const std::lock_guard lock(mutex_);
    std::swap(arrays_[name], array);
  }

 private:
  NaiveDevice& device_;
  std::mutex mutex_;
  std::map<std::string, Array> arrays_;  // guarded by mutex_
};

class NaiveServer::Compute final : public v1::ComputeService::Service {
 public:
  explicit Compute(Arrays& arrays) : arrays_(arrays) {}
  grpc::Status Dot(grpc::ServerContext*, const v1::DotRequest* request,
                   v1::DotResponse* response) override {
    const Arrays::Array a = arrays_.Find(request->a().buffer());
    const Arrays::Array b = arrays_.Find(request->b().buffer());
    if (a.data == nullptr || b.data == nullptr) return {grpc::StatusCode::NOT_FOUND, "no array"};
    if (a.elements != b.elements) return {grpc::StatusCode::INVALID_ARGUMENT, "shapes differ"};
    response->mutable_value()->set_real(
        arrays_.device().Dot(a.data.get(), b.data.get(), a.elements));
    return grpc::Status::OK;
  }
  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                             v1::GetServerInfoResponse* response) override {
    response->add_devices()->set_name(arrays_.device().name());
    return grpc::Status::OK;
  }

 private:
  Arrays& arrays_;
};

class NaiveServer::Buffers final : public v1::BufferService::Service {
 public:
  explicit Buffers(Arrays& arrays) : arrays_(arrays) {}
  grpc::Status Upload(grpc::ServerContext*, grpc::ServerReader<v1::UploadRequest>* reader,
                      v1::UploadResponse* response) override {
    v1::UploadRequest request;
    if (!reader->Read(&request) || request.spec().dtype() != v1::DTYPE_F32)
      return {grpc::StatusCode::INVALID_ARGUMENT, "the first message needs a spec of f32"};
    const std::string name = request.name();
    Arrays::Array array{.elements = 1};
    for (const std::int64_t extent : request.spec().shape()) array.elements *= extent;
    const auto size = static_cast<std::size_t>(array.elements) * sizeof(float);
    array.data = arrays_.device().Allocate(static_cast<std::size_t>(array.elements));
    std::size_t at = 0;
    do {
      const std::string& data = request.data();
      if (data.size() > size - at) return {grpc::StatusCode::INVALID_ARGUMENT, "too much data"};
      arrays_.device().Copy(reinterpret_cast<char*>(array.data.get()) + at, data.data(),
                            data.size());
      at += data.size();
    } while (reader->Read(&request));
    if (at < size) return {grpc::StatusCode::INVALID_ARGUMENT, "too little data"};
    response->set_received_bytes(at);
    arrays_.Put(name, std::move(array));
    return grpc::Status::OK;
  }

 private:
  Arrays& arrays_;
};

NaiveServer::NaiveServer(std::vector<std::string> addresses)
    : device_(NaiveCuda()), addresses_(std::move(addresses)) {
  if (device_ == nullptr) device_ = NaiveHost();
  arrays_ = std::make_unique<Arrays>(*device_);
  compute_ = std::make_unique<Compute>(*arrays_);
  buffers_ = std::make_unique<Buffers>(*arrays_);
  server_ = Serve(addresses_, {compute_.get(), buffers_.get()});
}

NaiveServer::~NaiveServer() { server_->Shutdown(); }

}  // namespace tessera::bench
