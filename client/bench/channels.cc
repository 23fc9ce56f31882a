#include "client/bench/channels.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>

namespace tessera::bench {
namespace {

constexpr int kCallersPerChannel = 16;
constexpr int kMaxReceiveBytes = 8 << 20;
constexpr std::chrono::seconds kConnectTimeout{10};

const std::string& Prefix() {
  static const std::string prefix = "service_bench/" + std::to_string(getpid()) + "/";
  return prefix;
}

}  // namespace

void Die(const std::string& what) {
  std::fflush(stdout);
  std::fprintf(stderr, "service_bench: %s\n", what.c_str());
  _exit(1);
}

void Die(const std::string& what, const grpc::Status& status) {
  Die(what + ": " + std::to_string(status.error_code()) + " " + status.error_message());
}

bool IsUnix(std::string_view address) {
  return address.starts_with("unix:") || address.starts_with("unix-abstract:");
}

Channels::Channels(const Target& target, int callers) : target_(target) {
  grpc::ChannelArguments arguments;
  // Channels to one server share a connection unless each has its own pool.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(kMaxReceiveBytes);
  for (int i = 0; i < callers; i += kCallersPerChannel) {
    const auto channel =
        grpc::CreateCustomChannel(target.address, grpc::InsecureChannelCredentials(), arguments);
    if (!channel->WaitForConnected(std::chrono::system_clock::now() + kConnectTimeout))
      Die("no server answers at " + target.address);
    stubs_.push_back({grpc::health::v1::Health::NewStub(channel),
                      v1::BufferService::NewStub(channel), v1::ComputeService::NewStub(channel)});
  }
}

std::string BufferName(const std::string& what, std::int64_t number) {
  return Prefix() + what + std::to_string(number);
}

void DeleteBuffers(const Target& target) {
  Channels channels(target, 1);
  v1::BufferService::Stub& stub = channels.buffers(0);
  v1::ListBuffersRequest list;
  list.set_prefix(Prefix());
  list.set_page_size(1000);
  for (;;) {
    grpc::ClientContext context;
    v1::ListBuffersResponse found;
    const grpc::Status listed = stub.ListBuffers(&context, list, &found);
    if (!listed.ok()) Die("cannot list buffers", listed);
    for (const v1::Buffer& buffer : found.buffers()) {
      grpc::ClientContext deletion;
      v1::DeleteBufferRequest request;
      v1::DeleteBufferResponse response;
      request.set_name(buffer.name());
      const grpc::Status deleted = stub.DeleteBuffer(&deletion, request, &response);
      if (!deleted.ok() && deleted.error_code() != grpc::StatusCode::NOT_FOUND)
        Die("cannot delete " + buffer.name(), deleted);
    }
    if (found.next_page_token().empty()) return;
    list.set_page_token(found.next_page_token());
  }
}

}  // namespace tessera::bench
