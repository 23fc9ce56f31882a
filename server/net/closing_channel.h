// Channels that close their sockets when they end.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

namespace tessera {

// Returns a channel whose TCP connections, including those being established, end with its last
// pointer. Releasing that pointer takes up to two seconds, or some milliseconds if a thread polls
// gRPC's queues. gRPC 1.51 by itself never closes the descriptor of a connection that is
// established after its channel is gone.
std::shared_ptr<grpc::Channel> CreateClosingChannel(
    const std::string& target, const std::shared_ptr<grpc::ChannelCredentials>& credentials,
    grpc::ChannelArguments arguments);

}  // namespace tessera
