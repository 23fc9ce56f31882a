// Channels that take their sockets along.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

namespace tessera {

// A channel whose TCP connections, made and under way, end with its last pointer. gRPC 1.51 by itself
// leaves a connection open that is made after its channel has gone, for as long as the other end
// does.
std::shared_ptr<grpc::Channel> CreateClosingChannel(
    const std::string& target, const std::shared_ptr<grpc::ChannelCredentials>& credentials,
    grpc::ChannelArguments arguments);

}  // namespace tessera
