// The layer below Client for transfers through shared memory. It is used if the server is on this
// host and offers shared memory. Internal to the library.
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

  // These implement Client::UploadShared, DownloadShared and MakeSharedMemory.
  absl::StatusOr<v1::Buffer> Upload(const v1::UploadSharedRequest& request,
                                    const std::stop_token& cancel);
  absl::StatusOr<v1::DownloadSharedResponse> Download(const v1::DownloadSharedRequest& request,
                                                      const std::stop_token& cancel);
  absl::StatusOr<SharedMemory> MakeMemory(std::size_t bytes);

  // These implement Client::Upload and Download through memory that this class owns. They return
  // nothing if that is impossible or not worthwhile. The caller must then use a stream.
  std::optional<absl::StatusOr<v1::Buffer>> TryUpload(const v1::CreateBufferRequest& create,
                                                      std::uint64_t size, const Source& source,
                                                      const UploadOptions& options);
  // checksum: unless null, receives the CRC-32C of the bytes if the options request checksums.
  std::optional<absl::StatusOr<v1::Buffer>> TryDownload(const std::string& name, const Sink& sink,
                                                        const DownloadOptions& options,
                                                        std::uint32_t* checksum);

 private:
  // One or two slots of the memory, which a transfer holds until it ends. No transfer waits for a
  // slot, because sources and sinks may use the client themselves.
  class Slots;
  // The time limits of a transfer and its calls, and the token that cancels them.
  class Limit;

  absl::StatusOr<v1::Buffer> Upload(const v1::UploadSharedRequest& request, const Limit& limit);
  absl::StatusOr<SharedMemory> MakeMemory(std::size_t bytes, const Limit& limit);
  // Creates the shared memory if there is none. Returns UNAVAILABLE / SHARED_MEMORY_UNAVAILABLE,
  // and the errors of SharedMemory::Make and of the limit.
  absl::Status Prepare(const Limit& limit);  // mutex_ is held
  // Takes slots for a transfer of `size` bytes, if shared memory is worthwhile and slots are free.
  absl::StatusOr<std::unique_ptr<Slots>> Take(std::uint64_t size, const Limit& limit);
  // Returns whether a call failed because the server does not know the memory. Abandons such
  // memory, and also memory that the server may still be using after the call has ended here. New
  // memory replaces it.
  bool Lost(const absl::Status& status, const Slots& slots);

  // Fills a draft through the slots.
  absl::StatusOr<v1::Buffer> Fill(const v1::CreateBufferRequest& create, std::uint64_t size,
                                  const Source& source, const UploadOptions& options,
                                  const Limit& limit, Slots& slots);

  Connection& connection_;
  const bool same_host_;

  std::mutex mutex_;
  // When the next attempt to make the memory may start.
  absl::Time next_attempt_ = absl::InfinitePast();
  std::shared_ptr<SharedMemory> memory_;
  std::vector<std::size_t> free_;  // offsets of the free slots in memory_
};

}  // namespace tessera
