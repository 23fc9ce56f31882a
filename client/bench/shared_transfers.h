// Uploads and downloads through memory that a caller shares with the server.
#pragma once

#include <cstdint>
#include <memory>

#include "client/bench/channels.h"
#include "client/bench/operations.h"

namespace tessera::bench {

// These implement Operation::make for transfers of this many MiB. For a bare server, which shares
// no memory, they measure a lower bound on the time of such a transfer: the GPU runtime's copy
// between page-locked memory and the GPU, in this process, or a memcpy if there is no GPU. They end
// the process if any other server shares no memory.
std::unique_ptr<Call> MakeSharedUpload(Channels& channels, int caller, std::int64_t mib);
std::unique_ptr<Call> MakeSharedDownload(Channels& channels, int caller, std::int64_t mib);

}  // namespace tessera::bench
