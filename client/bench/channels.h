// The servers that are measured, and connections to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "tessera/v1/buffer.grpc.pb.h"
#include "tessera/v1/compute.grpc.pb.h"

namespace tessera::bench {

// Ends the process with "service_bench: WHAT" on standard error and exit code 1, at once: other
// threads may be in the midst of calls.
[[noreturn]] void Die(const std::string& what);
[[noreturn]] void Die(const std::string& what, const grpc::Status& status);

struct Target {
  enum class Kind { kTessera, kBare, kNaive };
  std::string name;
  std::string address;  // as gRPC takes it: host:port, unix:/path, unix-abstract:name
  Kind kind = Kind::kTessera;
};

// Whether an address is that of a unix socket.
bool IsUnix(std::string_view address);

// Connections to one server for so many callers, at most 16 callers a connection: a channel hands
// its answers out one after the other. Thread safe.
class Channels {
 public:
  // Connects. Ends the process when nobody answers within ten seconds.
  Channels(const Target& target, int callers);

  const Target& target() const { return target_; }
  grpc::health::v1::Health::Stub& health(int caller) { return *of(caller).health; }
  v1::BufferService::Stub& buffers(int caller) { return *of(caller).buffers; }
  v1::ComputeService::Stub& compute(int caller) { return *of(caller).compute; }

 private:
  struct Stubs {
    std::unique_ptr<grpc::health::v1::Health::Stub> health;
    std::unique_ptr<v1::BufferService::Stub> buffers;
    std::unique_ptr<v1::ComputeService::Stub> compute;
  };
  Stubs& of(int caller) { return stubs_[static_cast<std::size_t>(caller) % stubs_.size()]; }
  const Target target_;
  std::vector<Stubs> stubs_;
};

// A name for a buffer on the server that no other run of service_bench uses.
std::string BufferName(const std::string& what, std::int64_t number);

// Deletes every buffer that BufferName has named.
void DeleteBuffers(const Target& target);

}  // namespace tessera::bench
