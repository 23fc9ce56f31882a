// Uploads and downloads through memory that a caller shares with the server.
#pragma once

#include <cstdint>
#include <memory>

#include "client/bench/channels.h"
#include "client/bench/operations.h"

namespace tessera::bench {

// Transfers of this many MiB; as Operation::make. A bare server shares no memory, so the peer is a
// lower bound on such a transfer's time: the GPU runtime's copy between page-locked memory and the
// GPU, in this process. Without a GPU it is a memcpy. Ends the process if a server shares no
// memory.
std::unique_ptr<Call> MakeSharedUpload(Channels& channels, int caller, std::int64_t mib);
std::unique_ptr<Call> MakeSharedDownload(Channels& channels, int caller, std::int64_t mib);

}  // namespace tessera::bench
