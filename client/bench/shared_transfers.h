// Uploads and downloads through memory that a caller shares with the server.
#pragma once

#include <cstdint>
#include <memory>

#include "client/bench/channels.h"
#include "client/bench/operations.h"

namespace tessera::bench {

// Of so many MiB; as Operation::make. In place of a bare server, which shares no memory, stands
// what such a transfer cannot be faster than: a copy between page-locked memory and the GPU by its
// runtime, in this process. Without a GPU it is a memcpy. Ends the process where a server shares no
// memory.
std::unique_ptr<Call> MakeSharedUpload(Channels& channels, int caller, std::int64_t mib);
std::unique_ptr<Call> MakeSharedDownload(Channels& channels, int caller, std::int64_t mib);

}  // namespace tessera::bench
