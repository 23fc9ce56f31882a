// Channels that close their sockets when they end.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

namespace tessera {

// Returns a channel. When its last pointer is released, its TCP connections end, including those
// that are being established. The release takes up to two seconds, or a few milliseconds if a
// thread is polling gRPC's queues. Ordinary channels of gRPC 1.51 never close the descriptor of a
// connection that is established after the channel is gone.
std::shared_ptr<grpc::Channel> CreateClosingChannel(
    const std::string& target, const std::shared_ptr<grpc::ChannelCredentials>& credentials,
    grpc::ChannelArguments arguments);

}  // namespace tessera
