#include "server/net/closing_channel.h"

#include <fcntl.h>
#include <grpc/support/sync.h>
#include <grpcpp/version_info.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/clock.h"

// gRPC passes each new socket to a mutator before it connects. The type of a mutator is in a header
// that is not installed (src/core/lib/iomgr/socket_mutator.h); this is its layout in 1.51.
struct grpc_socket_mutator_vtable {
  bool (*mutate)(int socket, grpc_socket_mutator* mutator);  // false makes gRPC drop the socket
  int (*compare)(grpc_socket_mutator* a, grpc_socket_mutator* b);
  void (*destroy)(grpc_socket_mutator* mutator);
  bool (*mutate_with_usage)(const void* info, grpc_socket_mutator* mutator);  // may be null
};
struct grpc_socket_mutator {
  const grpc_socket_mutator_vtable* vtable;
  gpr_refcount references;
};

namespace tessera {
namespace {

// How long gRPC may take to close a socket that has been shut down. gRPC takes 2 ms if a thread is
// polling.
constexpr absl::Duration kLongestEnd = absl::Seconds(2);

// Returns the cookie of an open socket. It identifies the socket even after its descriptor has been
// reused.
std::optional<std::uint64_t> CookieIfOpen(int socket) {
  std::uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  if (getsockopt(socket, SOL_SOCKET, SO_COOKIE, &cookie, &size) != 0) return std::nullopt;
  return cookie;
}

struct Socket {
  int number;
  std::uint64_t cookie;
};

// A descriptor that this file reserves. A socket is duplicated to it for inspection, because gRPC
// may close the original descriptor at any time. This works even if no descriptors are left. Thread
// safe.
class OwnNumber {
 public:
  static OwnNumber& Get() {
    static OwnNumber number;
    return number;
  }
  // Shuts the socket down if its descriptor has not been reused for another socket.
  void ShutDown(const Socket& socket) {
    const std::lock_guard lock(mutex_);
    if (dup3(socket.number, number_, O_CLOEXEC) < 0) return;
    if (CookieIfOpen(number_) == socket.cookie) shutdown(number_, SHUT_RDWR);
    dup3(nothing_, number_, O_CLOEXEC);
  }

 private:
  std::mutex mutex_;
  const int nothing_ = eventfd(0, EFD_CLOEXEC);
  const int number_ = fcntl(nothing_, F_DUPFD_CLOEXEC, 0);
};

// The sockets of one channel. Thread safe.
class Sockets {
 public:
  // Adds a socket. Returns false after Close.
  bool Add(int socket) {
    const std::lock_guard lock(mutex_);
    if (closed_) return false;
    std::erase_if(sockets_,
                  [](const Socket& one) { return CookieIfOpen(one.number) != one.cookie; });
    if (const std::optional<std::uint64_t> cookie = CookieIfOpen(socket))
      sockets_.push_back({socket, *cookie});
    return true;
  }
  // Shuts down all sockets, and refuses further ones.
  void Close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (const Socket& one : sockets_) OwnNumber::Get().ShutDown(one);
  }
  // Whether gRPC still has any of the sockets open.
  bool open() {
    const std::lock_guard lock(mutex_);
    return std::any_of(sockets_.begin(), sockets_.end(),
                       [](const Socket& one) { return CookieIfOpen(one.number) == one.cookie; });
  }

 private:
  std::mutex mutex_;
  bool closed_ = false;
  std::vector<Socket> sockets_;
};

struct Mutator : grpc_socket_mutator {
  std::shared_ptr<Sockets> sockets;
};

bool Mutate(int socket, grpc_socket_mutator* mutator) {
  return static_cast<Mutator*>(mutator)->sockets->Add(socket);
}
int Compare(grpc_socket_mutator* a, grpc_socket_mutator* b) { return a < b ? -1 : a > b; }
void Destroy(grpc_socket_mutator* mutator) { delete static_cast<Mutator*>(mutator); }
constexpr grpc_socket_mutator_vtable kMutator = {Mutate, Compare, Destroy, nullptr};

}  // namespace

std::shared_ptr<grpc::Channel> CreateClosingChannel(
    const std::string& target, const std::shared_ptr<grpc::ChannelCredentials>& credentials,
    grpc::ChannelArguments arguments) {
  const auto sockets = std::make_shared<Sockets>();
  OwnNumber::Get();  // reserved while descriptors are available
  if (GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR == 51) {
    auto mutator = std::make_unique<Mutator>();
    mutator->vtable = &kMutator;
    gpr_ref_init(&mutator->references, 1);
    mutator->sockets = sockets;
    arguments.SetSocketMutator(mutator.release());
  }
  std::shared_ptr<grpc::Channel> channel =
      grpc::CreateCustomChannel(target, credentials, arguments);
  grpc::Channel* const outside = channel.get();
  return std::shared_ptr<grpc::Channel>(
      outside, [sockets, channel = std::move(channel)](grpc::Channel*) mutable {
        sockets->Close();
        // Data that the peer has already sent may still establish a connection.
        const absl::Time end = SteadyNow() + kLongestEnd;
        while (sockets->open() && SteadyNow() < end) absl::SleepFor(absl::Milliseconds(1));
        channel.reset();
      });
}

}  // namespace tessera
