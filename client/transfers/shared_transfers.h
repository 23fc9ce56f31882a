// Beneath Client: transfers through shared memory, where the server is on this host and offers it.
// Not for users of the library.
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

  // Client::Upload and Download by way of memory of this class. Nothing: not possible, or not worth
  // it, or no longer possible; the caller goes on as if there were no shared memory.
  std::optional<absl::StatusOr<v1::Buffer>> TryUpload(const v1::CreateBufferRequest& create,
                                                      std::uint64_t size, const Source& source,
                                                      const UploadOptions& options);
  // checksum: unless null, receives the CRC-32C of the bytes if options ask for checksums.
  std::optional<absl::StatusOr<v1::Buffer>> TryDownload(const std::string& name, const Sink& sink,
                                                        const DownloadOptions& options,
                                                        std::uint32_t* checksum);

 private:
  // One or two parts of the memory, which a transfer has until it ends: nobody waits for one, since
  // sources and sinks may use the client themselves.
  class Slots;
  // How long a transfer and its calls may take, and what cancels it.
  class Limit;

  absl::StatusOr<v1::Buffer> Upload(const v1::UploadSharedRequest& request, const Limit& limit);
  absl::StatusOr<SharedMemory> MakeMemory(std::size_t bytes, const Limit& limit);
  // UNAVAILABLE / SHARED_MEMORY_UNAVAILABLE, the errors of SharedMemory::Make and of the limit.
  absl::Status Prepare(const Limit& limit);  // with the mutex
  // Whether a transfer of size bytes (0: not known) is worth a slot, and there is one.
  absl::StatusOr<std::unique_ptr<Slots>> Take(std::uint64_t size, const Limit& limit);
  // Whether a call failed because the server does not know the memory any more. The memory is made
  // anew then, and where the call ended here while the server may still use its slot.
  bool Lost(const absl::Status& status, const Slots& slots);

  // Fills a draft through the slots.
  absl::StatusOr<v1::Buffer> Fill(const v1::CreateBufferRequest& create, std::uint64_t size,
                                  const Source& source, const UploadOptions& options,
                                  const Limit& limit, Slots& slots);

  Connection& connection_;
  const bool same_host_;

  std::mutex mutex_;
  absl::Time next_attempt_ = absl::InfinitePast();  // after one that failed
  std::shared_ptr<SharedMemory> memory_;
  std::vector<std::size_t> free_;  // slots of memory_, by their offsets
};

}  // namespace tessera
