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
#include "client/transfers/received.h"

namespace tessera {

// Returns UNAVAILABLE / SHARED_MEMORY_UNAVAILABLE.
inline absl::Status SharedMemoryUnavailable(std::string_view why) {
  return MakeError(absl::StatusCode::kUnavailable, "SHARED_MEMORY_UNAVAILABLE", why);
}

// The time limits of a transfer and its calls, and the token that cancels them.
class TransferLimit {
 public:
  // If `timeout` is absent, only the duration of each call is limited, by stall_timeout.
  TransferLimit(Connection& connection, std::optional<absl::Duration> timeout,
                const std::stop_token& cancel)
      : connection_(connection),
        timeout_(timeout.value_or(absl::InfiniteDuration())),
        cancel_(cancel) {}

  absl::Duration Left() const { return timeout_ - absl::FromChrono(Clock::now() - since_); }
  // Returns why the transfer has to end now, or OK.
  absl::Status Check() const {
    if (cancel_.stop_requested()) return Cancelled();
    if (Left() > absl::ZeroDuration()) return absl::OkStatus();
    return WithDeadline(absl::DeadlineExceededError(""), timeout_);
  }
  template <class Request>
  absl::StatusOr<ResponseOf<Request>> Call(const Request& request,
                                           absl::Duration most = absl::InfiniteDuration()) const {
    // A call whose deadline has already passed might still succeed, so the limits are checked
    // first.
    if (absl::Status ended = Check(); !ended.ok()) return ended;
    // Connects first, so that the time to connect does not count toward the call's timeout.
    Attempts attempts(connection_, {.timeout = Left(), .patience = Left(), .cancel = cancel_});
    if (const auto channel = connection_.Connect(attempts); !channel.ok())
      return WithDeadline(channel.status(), timeout_);
    const absl::Duration left = Left(), stall = connection_.options().stall_timeout;
    auto response =
        connection_.Call(request, {.timeout = std::min({left, stall, most}), .cancel = cancel_});
    const absl::Status& status = response.status();
    if (!absl::IsDeadlineExceeded(status) || !ErrorReason(status).empty()) return response;
    if (most < std::min(left, stall)) return SharedMemoryUnavailable(std::string(status.message()));
    return stall < left ? Stalled(stall) : WithDeadline(status, timeout_);
  }

 private:
  using Clock = std::chrono::steady_clock;

  Connection& connection_;
  const absl::Duration timeout_;
  const std::stop_token cancel_;
  const Clock::time_point since_ = Clock::now();
};

// Thread safe.
class SharedTransfers {
 public:
  explicit SharedTransfers(Connection& connection);

  // Implements Client::MakeSharedMemory.
  absl::StatusOr<SharedMemory> MakeMemory(std::size_t bytes, const TransferLimit& limit);

  // These implement Client::Upload and Download through memory that this class owns. They return
  // nothing if shared memory is impossible, not worthwhile or lost. The caller must then use a
  // stream, for a download from received.bytes() on.
  std::optional<absl::StatusOr<v1::Buffer>> TryUpload(const v1::CreateBufferRequest& create,
                                                      std::uint64_t size, const Source& source,
                                                      const UploadOptions& options);
  // If the options request checksums and `checksum` is not null, it receives the CRC-32C of the
  // bytes.
  std::optional<absl::StatusOr<v1::Buffer>> TryDownload(Received& received, const std::string& name,
                                                        const DownloadOptions& options,
                                                        std::uint32_t* checksum);

 private:
  // One or two slots of the memory, which a transfer holds until it ends. No transfer waits for a
  // slot, because sources and sinks may use the client themselves.
  class Slots;

  // Creates the shared memory if there is none. Returns UNAVAILABLE / SHARED_MEMORY_UNAVAILABLE,
  // and the errors of SharedMemory::Make and of the limit.
  absl::Status Prepare(const TransferLimit& limit);  // mutex_ is held
  // Takes slots for a transfer of `size` bytes, if shared memory is worthwhile and slots are free.
  absl::StatusOr<std::unique_ptr<Slots>> Take(std::uint64_t size, const TransferLimit& limit);
  // Returns whether a call failed because the server does not know the memory. Abandons such
  // memory, and also memory that the server may still be using after the call has ended here. The
  // next transfer makes new memory.
  bool Lost(const absl::Status& status, const Slots& slots);

  // Fills a draft through the slots.
  absl::StatusOr<v1::Buffer> Fill(const v1::CreateBufferRequest& create, std::uint64_t size,
                                  const Source& source, const UploadOptions& options,
                                  const TransferLimit& limit, Slots& slots);

  Connection& connection_;
  // Whether the options allow shared memory, and there is only one server, which is on this host.
  // With several servers, parts of a transfer could go to different ones.
  const bool allowed_;

  std::mutex mutex_;
  // When the next attempt to make the memory may start.
  absl::Time next_attempt_ = absl::InfinitePast();
  std::shared_ptr<SharedMemory> memory_;
  std::vector<std::size_t> free_;  // offsets of the free slots in memory_
};

}  // namespace tessera
