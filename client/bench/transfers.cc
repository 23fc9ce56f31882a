#include "client/bench/transfers.h"

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "client/client.h"
#include "kernels/compute.h"

namespace tessera::bench {
namespace {

constexpr std::size_t kMessageBytes = std::size_t{1} << 20;

std::size_t BytesOf(std::int64_t mib) { return static_cast<std::size_t>(mib) << 20; }
std::int64_t ElementsOf(std::int64_t mib) {
  return (mib << 20) / static_cast<std::int64_t>(sizeof(float));
}

// A call that a blocking function makes on a separate thread.
class ThreadCall final : public Call {
 public:
  explicit ThreadCall(std::function<grpc::Status()> call)
      : call_(std::move(call)), thread_([this] { Serve(); }) {}
  ~ThreadCall() override {
    Tell(ended_);
    thread_.join();
  }
  void Start() override { Tell(wanted_); }
  grpc::Status Run() override { return call_(); }

 private:
  void Tell(bool& flag) {
    const std::lock_guard lock(mutex_);
    flag = true;
    changed_.notify_one();
  }
  void Serve() {
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return wanted_ || ended_; });
        if (ended_) return;
        wanted_ = false;
      }
      done(call_());
    }
  }

  const std::function<grpc::Status()> call_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool wanted_ = false;  // guarded by mutex_
  bool ended_ = false;   // guarded by mutex_
  std::thread thread_;
};

grpc::Status Upload(v1::BufferService::Stub& stub, const std::string& name,
                    const std::vector<std::int64_t>& shape) {
  grpc::ClientContext context;
  v1::UploadResponse response;
  const auto stream = stub.Upload(&context, &response);
  v1::UploadRequest request;
  request.set_name(name);
  request.mutable_spec()->set_dtype(v1::DTYPE_F32);
  request.mutable_spec()->set_replace(true);
  std::size_t bytes = sizeof(float);
  for (const std::int64_t extent : shape) {
    request.mutable_spec()->add_shape(extent);
    bytes *= static_cast<std::size_t>(extent);
  }
  for (std::size_t at = 0; at < bytes; at += kMessageBytes) {
    request.mutable_data()->resize(std::min(bytes - at, kMessageBytes));
    if (!stream->Write(request)) break;
  }
  stream->WritesDone();
  return stream->Finish();
}

grpc::Status Download(v1::BufferService::Stub& stub, const std::string& name, std::uint64_t bytes) {
  grpc::ClientContext context;
  v1::DownloadRequest request;
  request.set_name(name);
  request.set_limit(bytes);
  const auto stream = stub.Download(&context, request);
  v1::DownloadResponse response;
  std::uint64_t received = 0;
  while (stream->Read(&response)) received += response.data().size();
  grpc::Status status = stream->Finish();
  if (status.ok() && received != bytes)
    return {grpc::StatusCode::DATA_LOSS,
            "the download delivered " + std::to_string(received) + " bytes"};
  return status;
}

grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

template <class T>
T OrDie(absl::StatusOr<T> value, const std::string& what) {
  if (!value.ok()) Die(what + ": " + std::string(value.status().message()));
  return *std::move(value);
}

// One caller's memory, and the connection that registers it with the server.
struct Sharing {
  Sharing(const Target& target, std::int64_t mib)
      : client({.server = target.address}),
        memory(OrDie(client.MakeSharedMemory(BytesOf(mib)),
                     "cannot share memory with " + target.address)) {}

  Client client;
  SharedMemory memory;
};

// Copies between page-locked host memory and the device.
struct PinnedCopies {
  explicit PinnedCopies(std::int64_t mib)
      : stream(OrDie(MakeStream(device()), "cannot make a stream")),
        host(OrDie(MakeStaging(device(), BytesOf(mib)), "cannot allocate page-locked memory")),
        memory(OrDie(Allocate(device(), BytesOf(mib)), "cannot allocate device memory")) {}
  static Device& device() {
    static Device& device = *OrDie(OpenDevice("auto"), "cannot open a device").release();
    return device;
  }

  std::unique_ptr<Stream> stream;
  StagingMemory host;
  Memory memory;
};

}  // namespace

void Put(v1::BufferService::Stub& stub, const std::string& name,
         const std::vector<std::int64_t>& shape) {
  const grpc::Status status = Upload(stub, name, shape);
  if (!status.ok()) Die("cannot upload " + name, status);
}

void PutForDownload(Channels& channels, std::int64_t mib) {
  Put(channels.buffers(0), BufferName("down", mib), {ElementsOf(mib)});
}

std::unique_ptr<Call> MakeUpload(Channels& channels, int caller, std::int64_t mib) {
  return std::make_unique<ThreadCall>([&stub = channels.buffers(caller),
                                       name = BufferName("up", caller),
                                       mib] { return Upload(stub, name, {ElementsOf(mib)}); });
}

std::unique_ptr<Call> MakeDownload(Channels& channels, int caller, std::int64_t mib) {
  return std::make_unique<ThreadCall>([&stub = channels.buffers(caller),
                                       name = BufferName("down", mib),
                                       mib] { return Download(stub, name, BytesOf(mib)); });
}

std::unique_ptr<Call> MakeSharedUpload(Channels& channels, int caller, std::int64_t mib) {
  if (channels.target().bare) {
    return std::make_unique<ThreadCall>([copies = std::make_shared<PinnedCopies>(mib), mib] {
      const absl::Status status = CopyPinnedToDevice(*copies->stream, copies->memory.data(),
                                                     copies->host.get(), BytesOf(mib));
      return ToGrpc(status.ok() ? Synchronize(*copies->stream) : status);
    });
  }
  return std::make_unique<ThreadCall>([sharing = std::make_shared<Sharing>(channels.target(), mib),
                                       name = BufferName("up_shared", caller), mib] {
    UploadOptions options;
    options.replace = true;
    return ToGrpc(
        sharing->client
            .UploadShared(name, DType::kF32, {ElementsOf(mib)}, sharing->memory, 0, options)
            .status());
  });
}

std::unique_ptr<Call> MakeSharedDownload(Channels& channels, int, std::int64_t mib) {
  if (channels.target().bare) {
    return std::make_unique<ThreadCall>([copies = std::make_shared<PinnedCopies>(mib), mib] {
      return ToGrpc(
          CopyToHost(*copies->stream, copies->host.get(), copies->memory.data(), BytesOf(mib)));
    });
  }
  return std::make_unique<ThreadCall>([sharing = std::make_shared<Sharing>(channels.target(), mib),
                                       name = BufferName("down", mib), mib] {
    return ToGrpc(sharing->client.DownloadShared(name, sharing->memory, 0, BytesOf(mib)).status());
  });
}

}  // namespace tessera::bench
