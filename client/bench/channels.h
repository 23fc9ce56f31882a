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

// Ends the process immediately, because other threads may be in calls. Prints "service_bench: WHAT"
// to standard error and exits with code 1.
[[noreturn]] void Die(const std::string& what);
[[noreturn]] void Die(const std::string& what, const grpc::Status& status);

struct Target {
  std::string name;
  std::string address;  // in gRPC's form: host:port, unix:/path, unix-abstract:name
  bool bare = false;    // whether it is a bare server of this program
};

// Whether the address refers to a Unix socket.
bool IsUnix(std::string_view address);

// Connections to one server for a number of callers. At most 16 callers share a connection, because
// a channel delivers its responses one after the other. Thread safe.
class Channels {
 public:
  // Connects. Ends the process if the server does not respond within ten seconds.
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

// Returns a name for a buffer on the server that no other run of service_bench uses.
std::string BufferName(const std::string& what, std::int64_t number);

// Deletes every buffer whose name comes from BufferName.
void DeleteBuffers(const Target& target);

}  // namespace tessera::bench
