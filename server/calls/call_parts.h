// The parts of the server that calls of every method use.
#pragma once

#include "server/access/access.h"
#include "server/devices/chores.h"
#include "server/observe/call_records.h"
#include "server/rpc/call_limits.h"

namespace tessera {

// The parts must outlive the calls.
struct CallParts {
  Access& access;        // finds the tenant and the role of the caller
  CallLimits& limits;    // accepts the call, and charges its memory
  CallRecords& records;  // counts and logs the call when it ends
  Chores& chores;        // allocates and frees memory for the call
};

}  // namespace tessera
