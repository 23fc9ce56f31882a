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
// How long a server may take for each step of the setup of shared memory.
constexpr absl::Duration kHandshake = absl::Seconds(10);

bool IsUnreachable(const absl::Status& status) { return ErrorReason(status) == "UNREACHABLE"; }

// Whether the transfer must fail with this error, because a transfer over a stream would only fail
// with it again.
bool IsEnd(const absl::Status& status) {
  return IsUnreachable(status) || absl::IsDeadlineExceeded(status) || absl::IsCancelled(status);
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

SharedTransfers::SharedTransfers(Connection& connection)
    : connection_(connection),
      allowed_(connection.options().shared_memory &&
               !absl::StrContains(connection.options().server, ',') &&
               StaysHere(connection.options().server)) {}

absl::StatusOr<SharedMemory> SharedTransfers::MakeMemory(std::size_t bytes,
                                                         const TransferLimit& limit) {
  const auto answer = limit.Call(v1::GetSharedMemoryRequest(), kHandshake);
  if (!answer.ok()) return answer.status();
  // The limit is checked here, because the memory is allocated before the server could refuse it.
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

absl::Status SharedTransfers::Prepare(const TransferLimit& limit) {
  if (memory_ != nullptr && memory_->connected()) return absl::OkStatus();
  memory_ = nullptr;
  if (absl::Now() < next_attempt_) return SharedMemoryUnavailable("the server shares no memory");
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

absl::StatusOr<std::unique_ptr<SharedTransfers::Slots>> SharedTransfers::Take(
    std::uint64_t size, const TransferLimit& limit) {
  if (!allowed_ || size < kLeast)
    return SharedMemoryUnavailable("shared memory is not worthwhile here");
  const std::lock_guard lock(mutex_);
  if (absl::Status status = Prepare(limit); !status.ok()) return status;
  if (free_.empty()) return SharedMemoryUnavailable("other transfers use all of the shared memory");
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
  const TransferLimit limit(connection_, options.timeout, options.cancel);
  const auto slots = Take(size, limit);
  if (!slots.ok()) {
    if (IsEnd(slots.status())) return slots.status();
    return std::nullopt;
  }
  absl::StatusOr<v1::Buffer> buffer;
  // A progress function needs a draft, which is deleted if the function throws.
  if (size <= kSlotBytes && !options.progress) {
    if (absl::Status status = source(0, (*slots)->Bytes(0, size)); !status.ok()) return status;
    v1::UploadSharedRequest request;
    request.set_name(create.name());
    *request.mutable_spec() = create.spec();
    *request.mutable_source() = (*slots)->Range(0, size);
    buffer = TakeBuffer(limit.Call(request));
  } else {
    buffer = Fill(create, size, source, options, limit, **slots);
  }
  if (!buffer.ok() && Lost(buffer.status(), **slots)) return std::nullopt;
  return buffer;
}

absl::StatusOr<v1::Buffer> SharedTransfers::Fill(const v1::CreateBufferRequest& create,
                                                 std::uint64_t size, const Source& source,
                                                 const UploadOptions& options,
                                                 const TransferLimit& limit, Slots& slots) {
  const auto created = limit.Call(create);
  if (!created.ok()) return created.status();
  const std::uint64_t version = created->buffer().version();

  std::mutex mutex;         // guards the variables below and the calls to the source
  std::uint64_t begin = 0;  // the first byte that no thread has taken
  std::uint64_t sent = 0;
  absl::Status failure;
  const auto lane = [&](std::size_t i) {
    for (;;) {
      auto request = BufferRequest<v1::UploadSharedRequest>(create.name(), version);
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
    auto sealed =
        TakeBuffer(limit.Call(BufferRequest<v1::SealBufferRequest>(create.name(), version)));
    if (sealed.ok()) return sealed;
    failure = sealed.status();
  }
  connection_
      .Call(BufferRequest<v1::DeleteBufferRequest>(create.name(), version),
            {.timeout = absl::Seconds(5)})
      .status()
      .IgnoreError();
  return connection_.ExplainMissing(failure, 0);  // the only server
}

// --- Downloads -----------------------------------------------------------------------------------

std::optional<absl::StatusOr<v1::Buffer>> SharedTransfers::TryDownload(
    Received& received, const std::string& name, const DownloadOptions& options,
    std::uint32_t* checksum) {
  if (!allowed_ || (options.limit != 0 && options.limit < kLeast)) return std::nullopt;
  {
    const std::lock_guard lock(mutex_);
    if (memory_ == nullptr && absl::Now() < next_attempt_) return std::nullopt;
  }
  const TransferLimit limit(connection_, options.timeout, options.cancel);
  const auto found = limit.Call(BufferRequest<v1::GetBufferRequest>(name, options.version));
  if (IsEnd(found.status())) return found.status();
  // The download over a stream will report what is wrong.
  if (!found.ok() || options.offset > found->buffer().size_bytes()) return std::nullopt;
  const auto slots = Take(WantedBytes(found->buffer(), options), limit);
  if (IsEnd(slots.status())) return slots.status();
  if (!slots.ok()) return std::nullopt;

  // Fetches the bytes starting at `begin` into slot i.
  std::uint64_t version = options.version;
  const auto fetch = [&](std::size_t i, std::uint64_t begin) {
    auto request = BufferRequest<v1::DownloadSharedRequest>(name, version);
    request.set_offset(options.offset + begin);
    const std::uint64_t most = options.limit != 0 ? options.limit - begin : kSlotBytes;
    *request.mutable_target() = (*slots)->Range(i, std::min<std::uint64_t>(most, kSlotBytes));
    absl::StatusOr<v1::DownloadSharedResponse> part = limit.Call(request);
    // Lost() is called here, because the caller ignores a prefetched part if the download fails.
    if (!part.ok()) Lost(part.status(), **slots);
    return part;
  };
  using Result = std::optional<absl::StatusOr<v1::Buffer>>;
  const auto failed = [&](const absl::Status& status) -> Result {
    if (Lost(status, **slots)) return std::nullopt;
    return received.IsChange(status) ? received.Changed() : status;
  };
  absl::StatusOr<v1::DownloadSharedResponse> part = fetch(0, 0);
  if (!part.ok()) return failed(part.status());
  version = part->buffer().version();
  const std::uint64_t size = WantedBytes(part->buffer(), options);
  if (absl::Status status = received.Take(part->buffer()); !status.ok()) return status;
  for (std::size_t i = 0; received.bytes() < size; i = (i + 1) % (*slots)->count()) {
    const std::uint64_t begin = received.bytes(), end = begin + part->size();
    if (part->size() == 0 || part->size() > size - begin)
      return BadResponse("a part of a download does not have the size that was asked for");
    std::future<absl::StatusOr<v1::DownloadSharedResponse>> next;
    const bool ahead = (*slots)->count() > 1 && end < size;
    if (ahead) next = std::async(std::launch::async, fetch, 1 - i, end);
    const absl::Span<char> bytes = (*slots)->Bytes(i, end - begin);
    if (absl::Status status = received.Take(options.offset + begin, {bytes.data(), bytes.size()});
        !status.ok())
      return status;  // waits for `next` first
    if (end == size) break;
    part = ahead ? next.get() : fetch(0, end);
    if (!part.ok()) return failed(part.status());
  }
  if (absl::Status wrong = received.Check(); !wrong.ok()) return wrong;
  if (checksum != nullptr) *checksum = received.checksum();
  return *std::move(received.buffer());
}

}  // namespace tessera
