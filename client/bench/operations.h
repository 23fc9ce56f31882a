// A table of the operations that callers request.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "client/bench/channels.h"

namespace tessera::bench {

// A call that one caller makes repeatedly, one at a time.
class Call {
 public:
  virtual ~Call() = default;
  // Starts the call without waiting. `done` then receives the status, on a thread that belongs to
  // gRPC or to the call. `done` may call Start.
  virtual void Start() = 0;
  // Makes the call and waits for it on this thread. Does not use gRPC's callback threads, which
  // sleep for 100 ms at a time after a second without calls. Does not call `done`.
  virtual grpc::Status Run() = 0;

  std::function<void(const grpc::Status&)> done;
};

struct Operation {
  std::string_view name;
  // elements, side, steps or MiB; empty if the operation has no size. Only transfers use MiB.
  std::string_view size_unit;
  // Uploads the buffers that calls of this size read. It is null if they read none.
  void (*prepare)(Channels& channels, std::int64_t size);
  // `caller` is 0, 1, and so on. It determines the connection and the names of results.
  std::unique_ptr<Call> (*make)(Channels& channels, int caller, std::int64_t size);
};

// The operations, in the order of the command line's help.
std::span<const Operation> Operations();

// Returns null if no operation has this name.
const Operation* FindOperation(std::string_view name);

// Returns the number of bytes for a transfer, the number of steps for `dots`, and 1 for other
// operations.
std::uint64_t WorkOf(const Operation& operation, std::int64_t size);

}  // namespace tessera::bench
