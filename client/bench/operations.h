// What callers ask of a server: the table of operations.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "client/bench/channels.h"

namespace tessera::bench {

// One caller's call, made again and again, one at a time.
class Call {
 public:
  virtual ~Call() = default;
  // Returns at once. `done` then gets the status, on a thread that belongs to gRPC or to the call;
  // it may call Start.
  virtual void Start() = 0;
  // Makes the call and waits for it on this thread, without those of gRPC's callbacks, which nap
  // for 100 ms after a second without calls. Leaves `done` alone.
  virtual grpc::Status Run() = 0;

  std::function<void(const grpc::Status&)> done;
};

// What the size of an operation counts.
enum class SizeUnit { kNone, kElements, kSide, kSteps, kMib };

struct Operation {
  std::string_view name;
  SizeUnit size_unit;
  bool naive;  // whether the naive server has it
  // Uploads what calls of this size read; null: nothing.
  void (*prepare)(Channels& channels, std::int64_t size);
  // Caller 0, 1, ...: its connection, and the names of its results.
  std::unique_ptr<Call> (*make)(Channels& channels, int caller, std::int64_t size);
};

// In the order of the command line's help.
std::span<const Operation> Operations();

// REQUIRES: there is one of this name.
const Operation& FindOperation(std::string_view name);

// Bytes that one call moves, for transfers; steps of a program of many; 1 for the others.
std::uint64_t WorkOf(const Operation& operation, std::int64_t size);

}  // namespace tessera::bench
