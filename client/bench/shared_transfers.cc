#include "client/bench/shared_transfers.h"

#include <cstddef>
#include <string>
#include <utility>

#include "client/bench/naive_device.h"
#include "client/bench/thread_call.h"
#include "client/bench/transfers.h"
#include "client/client.h"

namespace tessera::bench {
namespace {

std::size_t BytesOf(std::int64_t mib) { return static_cast<std::size_t>(mib) << 20; }

// One caller's memory, and the connection that registers it with the server.
struct Sharing {
  Sharing(const Target& target, std::int64_t mib) : client(OptionsFor(target)) {
    absl::StatusOr<SharedMemory> made = client.MakeSharedMemory(BytesOf(mib));
    if (!made.ok())
      Die("shared memory of " + target.address + ": " + std::string(made.status().message()));
    memory = std::make_unique<SharedMemory>(*std::move(made));
  }
  static ClientOptions OptionsFor(const Target& target) {
    ClientOptions options;
    options.server = target.address;
    return options;
  }

  Client client;
  std::unique_ptr<SharedMemory> memory;
};

grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

// Copies between page-locked host memory and the device.
struct PinnedCopies {
  explicit PinnedCopies(std::int64_t mib)
      : host(device().AllocatePinned(BytesOf(mib))),
        memory(device().Allocate(BytesOf(mib) / sizeof(float))) {}
  static NaiveDevice& device() {
    static const std::unique_ptr<NaiveDevice> device = [] {
      std::unique_ptr<NaiveDevice> cuda = NaiveCuda();
      return cuda != nullptr ? std::move(cuda) : NaiveHost();
    }();
    return *device;
  }

  std::shared_ptr<char> host;
  std::shared_ptr<float> memory;
};

}  // namespace

std::unique_ptr<Call> MakeSharedUpload(Channels& channels, int caller, std::int64_t mib) {
  if (channels.target().kind == Target::Kind::kBare) {
    return std::make_unique<ThreadCall>([copies = PinnedCopies(mib), mib] {
      PinnedCopies::device().Copy(copies.memory.get(), copies.host.get(), BytesOf(mib));
      return grpc::Status::OK;
    });
  }
  return std::make_unique<ThreadCall>([sharing = std::make_shared<Sharing>(channels.target(), mib),
                                       name = BufferName("up_shared", caller), mib] {
    UploadOptions options;
    options.replace = true;
    return ToGrpc(
        sharing->client
            .UploadShared(name, DType::kF32, {ElementsOf(mib)}, *sharing->memory, 0, options)
            .status());
  });
}

std::unique_ptr<Call> MakeSharedDownload(Channels& channels, int, std::int64_t mib) {
  if (channels.target().kind == Target::Kind::kBare) {
    return std::make_unique<ThreadCall>([copies = PinnedCopies(mib), mib] {
      PinnedCopies::device().Copy(copies.host.get(), copies.memory.get(), BytesOf(mib));
      return grpc::Status::OK;
    });
  }
  return std::make_unique<ThreadCall>([sharing = std::make_shared<Sharing>(channels.target(), mib),
                                       name = BufferName("down", mib), mib] {
    return ToGrpc(sharing->client.DownloadShared(name, *sharing->memory, 0, BytesOf(mib)).status());
  });
}

}  // namespace tessera::bench
