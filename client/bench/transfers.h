// Uploads and downloads, in messages of 1 MiB.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/bench/channels.h"
#include "client/bench/operations.h"

namespace tessera::bench {

// Uploads an array of f32 zeros, which replaces any array with this name. Ends the process if that
// fails.
void Put(v1::BufferService::Stub& stub, const std::string& name,
         const std::vector<std::int64_t>& shape);

inline std::int64_t ElementsOf(std::int64_t mib) {
  return (mib << 20) / static_cast<std::int64_t>(sizeof(float));
}

// These implement Operation::prepare and Operation::make for transfers of this many MiB. A call
// runs on a separate thread, because a stream's messages are written and read one after the other.
void PutForDownload(Channels& channels, std::int64_t mib);
std::unique_ptr<Call> MakeUpload(Channels& channels, int caller, std::int64_t mib);
std::unique_ptr<Call> MakeDownload(Channels& channels, int caller, std::int64_t mib);

}  // namespace tessera::bench
