// Keeps the threads of gRPC awake.
#pragma once

#include <memory>

#include "grpcpp/channel.h"

namespace tessera {

// gRPC 1.51 serves callbacks from a few threads, each of which sleeps for 100 ms, without looking
// at its sockets, after it has waited for a second in vain (CallbackAlternativeCQ in
// completion_queue_cc.cc): the first call after a rest would wait for that. A call to oneself now
// and then, which the thread that serves it has not waited for in vain, leaves at least one awake.
// One thread uses it at a time.
class Heartbeat {
 public:
  // channel: to the server itself, without a socket.
  explicit Heartbeat(const std::shared_ptr<grpc::Channel>& channel);
  // Waits for the call under way.
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  // Calls when it is time again. Never waits.
  void Beat();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera
