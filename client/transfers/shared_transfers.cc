#include "client/transfers/shared_transfers.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/rpc/address.h"
#include "client/rpc/guarded.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/crc32c.h"

namespace tessera {
namespace {

// If a transfer has two slots, the server can copy one while the client fills or reads the other.
constexpr std::size_t kSlotBytes = std::size_t{16} << 20;
constexpr std::size_t kSlots = 4;
constexpr std::size_t kSlotsATransfer = 2;

// The minimum size of a transfer through shared memory. Below it, the messages of a stream cost no
// more than the calls would.
constexpr std::uint64_t kLeast = std::uint64_t{4} << 20;

// How long to wait before a server that shares no memory is asked again.
constexpr absl::Duration kAskAgain = absl::Minutes(1);
// How long a server may take to share its memory.
constexpr absl::Duration kHandshake = absl::Seconds(10);

// Whether the list has only one server, which is on this host. With several servers, parts of a
// transfer could go to different ones.
bool IsSameHost(const std::string& server) {
  return !absl::StrContains(server, ',') && StaysHere(server);
}

bool IsUnreachable(const absl::Status& status) { return ErrorReason(status) == "UNREACHABLE"; }

// Whether the transfer fails with this error, because a stream would only wait for the same thing
// again.
bool IsEnd(const absl::Status& status) {
  return IsUnreachable(status) || absl::IsDeadlineExceeded(status) || absl::IsCancelled(status);
}

absl::Status Unavailable(std::string_view why) {
  return MakeError(absl::StatusCode::kUnavailable, "SHARED_MEMORY_UNAVAILABLE", why);
}

}  // namespace

class SharedTransfers::Slots {
 public:
  Slots(SharedTransfers& owner, std::shared_ptr<SharedMemory> memory,
        std::vector<std::size_t> parts)
      : owner_(owner), memory_(std::move(memory)), parts_(std::move(parts)) {}
  ~Slots() {
    const std::lock_guard lock(owner_.mutex_);
    if (owner_.memory_ == memory_)
      owner_.free_.insert(owner_.free_.end(), parts_.begin(), parts_.end());
  }
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  std::size_t count() const { return parts_.size(); }
  const std::shared_ptr<SharedMemory>& memory() const { return memory_; }
  absl::Span<char> Bytes(std::size_t i, std::size_t size) const {
    return memory_->bytes().subspan(parts_[i], size);
  }
  v1::RegionRange Range(std::size_t i, std::uint64_t size) const {
    v1::RegionRange range;
    range.set_region(memory_->region());
    range.set_offset(parts_[i]);
    range.set_size(size);
    return range;
  }

 private:
  SharedTransfers& owner_;
  const std::shared_ptr<SharedMemory> memory_;
  const std::vector<std::size_t> parts_;
};

class SharedTransfers::Limit {
 public:
  // timeout: if absent, there is no limit as long as every call ends within stall_timeout.
  Limit(Connection& connection, std::optional<absl::Duration> timeout,
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
    if (const auto channel = connection_.Connect(attempts); !channel.ok()) return channel.status();
    const absl::Duration left = Left(), stall = connection_.options().stall_timeout;
    auto response =
        connection_.Call(request, {.timeout = std::min({left, stall, most}), .cancel = cancel_});
    const absl::Status& status = response.status();
    if (!absl::IsDeadlineExceeded(status) || !ErrorReason(status).empty()) return response;
    if (most < std::min(left, stall)) return Unavailable(std::string(status.message()));
    return stall < left ? Stalled(stall) : WithDeadline(status, timeout_);
  }

 private:
  using Clock = std::chrono::steady_clock;

  Connection& connection_;
  const absl::Duration timeout_;
  const std::stop_token cancel_;
  const Clock::time_point since_ = Clock::now();
};

SharedTransfers::SharedTransfers(Connection& connection)
    : connection_(connection), same_host_(IsSameHost(connection.options().server)) {}

// --- One call each -------------------------------------------------------------------------------

absl::StatusOr<v1::Buffer> SharedTransfers::Upload(const v1::UploadSharedRequest& request,
                                                   const Limit& limit) {
  auto response = limit.Call(request);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_buffer());
}

absl::StatusOr<v1::Buffer> SharedTransfers::Upload(const v1::UploadSharedRequest& request,
                                                   const std::stop_token& cancel) {
  return Upload(request, Limit(connection_, std::nullopt, cancel));
}

absl::StatusOr<v1::DownloadSharedResponse> SharedTransfers::Download(
    const v1::DownloadSharedRequest& request, const std::stop_token& cancel) {
  return Limit(connection_, std::nullopt, cancel).Call(request);
}

absl::StatusOr<SharedMemory> SharedTransfers::MakeMemory(std::size_t bytes) {
  return MakeMemory(bytes, Limit(connection_, std::nullopt, {}));
}

absl::StatusOr<SharedMemory> SharedTransfers::MakeMemory(std::size_t bytes, const Limit& limit) {
  const auto answer = limit.Call(v1::GetSharedMemoryRequest(), kHandshake);
  if (!answer.ok()) return answer.status();
  // Checked here, because the memory is allocated before the server could refuse it.
  const std::uint64_t total = answer->limit_bytes();
  const std::uint64_t free = total - std::min(total, answer->used_bytes());
  if (bytes > free) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "SHARED_MEMORY_EXHAUSTED",
        absl::StrCat("the server shares at most ", total, " bytes, of which ", free, " are free"),
        {{"requested", absl::StrCat(bytes)},
         {"free", absl::StrCat(free)},
         {"total", absl::StrCat(total)}});
  }
  return SharedMemory::Make(answer->socket_path(), bytes, std::min(kHandshake, limit.Left()));
}

// --- Slots ---------------------------------------------------------------------------------------

absl::Status SharedTransfers::Prepare(const Limit& limit) {
  if (memory_ != nullptr && memory_->connected()) return absl::OkStatus();
  memory_ = nullptr;
  if (absl::Now() < next_attempt_) return Unavailable("the server shares no memory");
  absl::StatusOr<SharedMemory> memory = MakeMemory(kSlots * kSlotBytes, limit);
  if (!memory.ok()) {
    if (IsUnreachable(memory.status())) return memory.status();
    // If one of the caller's limits has ended the attempt, the failure says nothing about the
    // server.
    if (absl::Status ended = limit.Check(); !ended.ok()) return ended;
    next_attempt_ = absl::Now() + kAskAgain;
    return memory.status();
  }
  memory_ = std::make_shared<SharedMemory>(*std::move(memory));
  free_.clear();
  for (std::size_t i = 0; i < kSlots; ++i) free_.push_back(i * kSlotBytes);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<SharedTransfers::Slots>> SharedTransfers::Take(std::uint64_t size,
                                                                              const Limit& limit) {
  if (!connection_.options().shared_memory || !same_host_ || size < kLeast)
    return Unavailable("shared memory is not worthwhile here");
  const std::lock_guard lock(mutex_);
  if (absl::Status status = Prepare(limit); !status.ok()) return status;
  if (free_.empty()) return Unavailable("other transfers use all of the shared memory");
  const std::size_t count = size <= kSlotBytes ? 1 : std::min(kSlotsATransfer, free_.size());
  std::vector<std::size_t> parts(free_.end() - static_cast<std::ptrdiff_t>(count), free_.end());
  free_.resize(free_.size() - count);
  return std::make_unique<Slots>(*this, memory_, std::move(parts));
}

bool SharedTransfers::Lost(const absl::Status& status, const Slots& slots) {
  const bool gone = ErrorReason(status) == "REGION_NOT_FOUND" || absl::IsUnimplemented(status);
  // The call has ended on this side, but the server may still be using the memory.
  const bool in_use =
      absl::IsDeadlineExceeded(status) || absl::IsCancelled(status) || absl::IsUnavailable(status);
  if (gone || in_use) {
    const std::lock_guard lock(mutex_);
    if (memory_ == slots.memory()) memory_ = nullptr;
  }
  return gone;
}

// --- Uploads -------------------------------------------------------------------------------------

std::optional<absl::StatusOr<v1::Buffer>> SharedTransfers::TryUpload(
    const v1::CreateBufferRequest& create, std::uint64_t size, const Source& source,
    const UploadOptions& options) {
  const Limit limit(connection_, options.timeout, options.cancel);
  const auto slots = Take(size, limit);
  if (!slots.ok()) {
    if (IsEnd(slots.status())) return slots.status();
    return std::nullopt;
  }
  absl::StatusOr<v1::Buffer> buffer;
  // A progress function may fail the upload, but a single call could not be undone.
  if (size <= kSlotBytes && !options.progress) {
    if (absl::Status status = source(0, (*slots)->Bytes(0, size)); !status.ok()) return status;
    v1::UploadSharedRequest request;
    request.set_name(create.name());
    *request.mutable_spec() = create.spec();
    *request.mutable_source() = (*slots)->Range(0, size);
    buffer = Upload(request, limit);
  } else {
    buffer = Fill(create, size, source, options, limit, **slots);
  }
  if (!buffer.ok() && Lost(buffer.status(), **slots)) return std::nullopt;
  return buffer;
}

absl::StatusOr<v1::Buffer> SharedTransfers::Fill(const v1::CreateBufferRequest& create,
                                                 std::uint64_t size, const Source& source,
                                                 const UploadOptions& options, const Limit& limit,
                                                 Slots& slots) {
  const auto created = limit.Call(create);
  if (!created.ok()) return created.status();
  const std::uint64_t version = created->buffer().version();

  std::mutex mutex;         // guards the variables below and the calls to the source
  std::uint64_t begin = 0;  // the first byte that no thread has taken
  std::uint64_t sent = 0;
  absl::Status failure;
  const auto lane = [&](std::size_t i) {
    for (;;) {
      v1::UploadSharedRequest request;
      request.set_name(create.name());
      request.set_version(version);
      std::uint64_t part = 0;
      {
        const std::lock_guard lock(mutex);
        if (!failure.ok() || begin == size) return;
        part = std::min<std::uint64_t>(kSlotBytes, size - begin);
        failure = source(begin, slots.Bytes(i, part));
        if (!failure.ok()) return;
        request.set_offset(begin);
        begin += part;
      }
      *request.mutable_source() = slots.Range(i, part);
      const absl::Status status = limit.Call(request).status();
      const std::lock_guard lock(mutex);
      if (!status.ok()) {
        if (failure.ok()) failure = status;
        return;
      }
      sent += part;
      if (options.progress) failure.Update(Guarded([&] { options.progress(sent); }));
    }
  };
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 1; i < slots.count(); ++i) threads.emplace_back(lane, i);
    lane(0);
  }
  if (failure.ok()) {
    v1::SealBufferRequest seal;
    seal.set_name(create.name());
    seal.set_version(version);
    auto sealed = limit.Call(seal);
    if (sealed.ok()) return std::move(*sealed->mutable_buffer());
    failure = sealed.status();
  }
  v1::DeleteBufferRequest doomed;
  doomed.set_name(create.name());
  doomed.set_version(version);
  connection_.Call(doomed, {.timeout = absl::Seconds(5)}).status().IgnoreError();
  return failure;
}

// --- Downloads -----------------------------------------------------------------------------------

std::optional<absl::StatusOr<v1::Buffer>> SharedTransfers::TryDownload(
    const std::string& name, const Sink& sink, const DownloadOptions& options,
    std::uint32_t* checksum) {
  if (!connection_.options().shared_memory || !same_host_ ||
      (options.limit != 0 && options.limit < kLeast)) {
    return std::nullopt;
  }
  {
    const std::lock_guard lock(mutex_);
    if (memory_ == nullptr && absl::Now() < next_attempt_) return std::nullopt;
  }
  v1::GetBufferRequest find;
  find.set_name(name);
  find.set_version(options.version);
  const Limit limit(connection_, options.timeout, options.cancel);
  const auto found = limit.Call(find);
  if (IsEnd(found.status())) return found.status();
  // The download over a stream will report what is wrong.
  if (!found.ok() || options.offset > found->buffer().size_bytes()) return std::nullopt;
  const std::uint64_t rest = found->buffer().size_bytes() - options.offset;
  const auto slots = Take(options.limit != 0 ? std::min(options.limit, rest) : rest, limit);
  if (IsEnd(slots.status())) return slots.status();
  if (!slots.ok()) return std::nullopt;

  // Fetches the bytes from `begin` on into slot i.
  std::uint64_t version = options.version;
  const auto fetch = [&](std::size_t i, std::uint64_t begin) {
    v1::DownloadSharedRequest request;
    request.set_name(name);
    request.set_version(version);
    request.set_offset(options.offset + begin);
    const std::uint64_t most = options.limit != 0 ? options.limit - begin : kSlotBytes;
    *request.mutable_target() = (*slots)->Range(i, std::min<std::uint64_t>(most, kSlotBytes));
    absl::StatusOr<v1::DownloadSharedResponse> part = limit.Call(request);
    // Lost() is called here, because the caller ignores a prefetched part if the download fails.
    if (!part.ok()) Lost(part.status(), **slots);
    return part;
  };
  absl::StatusOr<v1::DownloadSharedResponse> part = fetch(0, 0);
  if (!part.ok()) {
    if (Lost(part.status(), **slots)) return std::nullopt;
    return part.status();
  }
  const v1::Buffer buffer = part->buffer();
  version = buffer.version();
  std::uint64_t size = buffer.size_bytes() - std::min(options.offset, buffer.size_bytes());
  if (options.limit != 0) size = std::min(size, options.limit);
  if (absl::Status status = sink(buffer, {}); !status.ok()) return status;
  std::uint32_t crc = 0;
  std::uint64_t received = 0;
  for (std::size_t i = 0; received < size; i = (i + 1) % (*slots)->count()) {
    const std::uint64_t got = part->size();
    if (got == 0 || got > size - received)
      return absl::InternalError("the parts of a download are not contiguous");
    std::future<absl::StatusOr<v1::DownloadSharedResponse>> next;
    const bool ahead = (*slots)->count() > 1 && received + got < size;
    if (ahead) next = std::async(std::launch::async, fetch, 1 - i, received + got);
    const absl::Span<char> bytes = (*slots)->Bytes(i, got);
    if (options.checksums) crc = Crc32cExtend(crc, bytes.data(), bytes.size());
    if (absl::Status status = sink(buffer, {bytes.data(), bytes.size()}); !status.ok())
      return status;  // waits for `next` first
    received += got;
    if (received == size) break;
    part = ahead ? next.get() : fetch(0, received);
    if (!part.ok()) {
      // If the caller specified a version, the server's error says what is wrong.
      if (options.version != 0 || ErrorReason(part.status()) != "VERSION_MISMATCH")
        return part.status();
      return MakeError(absl::StatusCode::kAborted, "BUFFER_CHANGED",
                       absl::StrCat("'", name, "' was replaced during its download"));
    }
  }
  if (options.checksums && buffer.has_crc32c() && received == buffer.size_bytes() &&
      crc != buffer.crc32c()) {
    return MakeError(absl::StatusCode::kDataLoss, "BAD_CHECKSUM",
                     absl::StrCat("bytes of '", name, "' were damaged in transit"),
                     {{"field", "buffer.crc32c"},
                      {"expected", absl::StrCat(absl::Hex(buffer.crc32c(), absl::kZeroPad8))},
                      {"actual", absl::StrCat(absl::Hex(crc, absl::kZeroPad8))}});
  }
  if (checksum != nullptr) *checksum = crc;
  return buffer;
}

}  // namespace tessera
