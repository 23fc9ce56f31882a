// Channels that take their sockets along.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

namespace tessera {

// A channel whose TCP connections, made and under way, end with its last pointer, which takes up to
// two seconds to go, and some milliseconds where a thread polls gRPC's queues. gRPC 1.51 by itself
// never closes the descriptor of a connection that is made when its channel has gone.
std::shared_ptr<grpc::Channel> CreateClosingChannel(
    const std::string& target, const std::shared_ptr<grpc::ChannelCredentials>& credentials,
    grpc::ChannelArguments arguments);

}  // namespace tessera
