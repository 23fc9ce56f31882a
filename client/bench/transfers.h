// Uploads and downloads, in messages of 1 MiB and through memory that a caller shares with the
// server.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/bench/channels.h"
#include "client/bench/operations.h"

namespace tessera::bench {

// Uploads f32 zeros, which replace any array with this name. Ends the process on failure.
void Put(v1::BufferService::Stub& stub, const std::string& name,
         const std::vector<std::int64_t>& shape);

// These implement Operation::prepare and Operation::make for transfers of this many MiB. A call
// runs on a separate thread, because a stream's messages are written and read one after the other.
void PutForDownload(Channels& channels, std::int64_t mib);
std::unique_ptr<Call> MakeUpload(Channels& channels, int caller, std::int64_t mib);
std::unique_ptr<Call> MakeDownload(Channels& channels, int caller, std::int64_t mib);

// These use shared memory. For a bare server, which shares no memory, they measure a lower bound on
// the time of such a transfer: a copy between page-locked memory and the GPU, in this process, or a
// memcpy if there is no GPU. If any other server shares no memory, they end the process.
std::unique_ptr<Call> MakeSharedUpload(Channels& channels, int caller, std::int64_t mib);
std::unique_ptr<Call> MakeSharedDownload(Channels& channels, int caller, std::int64_t mib);

}  // namespace tessera::bench
