// The layer below Client for transfers through shared memory, if the server is on this host and
// offers it. Internal to the library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "client/rpc/connection.h"
#include "client/shared_memory.h"

namespace tessera {

// Thread safe.
class SharedTransfers {
 public:
  explicit SharedTransfers(Connection& connection);

  // Client::UploadShared, DownloadShared and MakeSharedMemory.
  absl::StatusOr<v1::Buffer> Upload(const v1::UploadSharedRequest& request,
                                    const std::stop_token& cancel);
  absl::StatusOr<v1::DownloadSharedResponse> Download(const v1::DownloadSharedRequest& request,
                                                      const std::stop_token& cancel);
  absl::StatusOr<SharedMemory> MakeMemory(std::size_t bytes);

  // Client::Upload and Download through memory of this class. Return nothing if that is impossible
  // or not worthwhile. The caller then proceeds as if there were no shared memory.
  std::optional<absl::StatusOr<v1::Buffer>> TryUpload(const v1::CreateBufferRequest& create,
                                                      std::uint64_t size, const Source& source,
                                                      const UploadOptions& options);
  // checksum: unless null, receives the CRC-32C of the bytes if options ask for checksums.
  std::optional<absl::StatusOr<v1::Buffer>> TryDownload(const std::string& name, const Sink& sink,
                                                        const DownloadOptions& options,
                                                        std::uint32_t* checksum);

 private:
  // One or two slots of the memory, which a transfer holds until it ends. No transfer waits for a
  // slot, since sources and sinks may use the client themselves.
  class Slots;
  // How long a transfer and its calls may take, and how it is cancelled.
  class Limit;

  absl::StatusOr<v1::Buffer> Upload(const v1::UploadSharedRequest& request, const Limit& limit);
  absl::StatusOr<SharedMemory> MakeMemory(std::size_t bytes, const Limit& limit);
  // Returns UNAVAILABLE / SHARED_MEMORY_UNAVAILABLE and the errors of SharedMemory::Make and of the
  // limit.
  absl::Status Prepare(const Limit& limit);  // mutex_ is held
  // Takes slots for a transfer of `size` bytes, if it is worthwhile and slots are free.
  absl::StatusOr<std::unique_ptr<Slots>> Take(std::uint64_t size, const Limit& limit);
  // Whether a call failed because the server does not know the memory. Such memory is replaced by
  // new memory, and so is memory whose slot the server may still use after the call has ended here.
  bool Lost(const absl::Status& status, const Slots& slots);

  // Fills a draft through the slots.
  absl::StatusOr<v1::Buffer> Fill(const v1::CreateBufferRequest& create, std::uint64_t size,
                                  const Source& source, const UploadOptions& options,
                                  const Limit& limit, Slots& slots);

  Connection& connection_;
  const bool same_host_;

  std::mutex mutex_;
  absl::Time next_attempt_ = absl::InfinitePast();  // after a failed attempt
  std::shared_ptr<SharedMemory> memory_;
  std::vector<std::size_t> free_;  // offsets of the slots of memory_ that are free
};

}  // namespace tessera
