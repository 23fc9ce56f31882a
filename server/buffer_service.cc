#include "server/buffer_service.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/util/message_differencer.h"
#include "kernels/base/crc32c.h"
#include "kernels/base/error.h"
#include "server/convert.h"
#include "server/device_call.h"
#include "server/log.h"

namespace tessera {
namespace {

using absl::StatusCode;

constexpr std::uint64_t kDownloadChunk = 1 << 20;
constexpr int kDefaultPage = 100;
constexpr int kLargestPage = 1000;

absl::StatusOr<BufferSpec> MakeSpec(const std::string& name, const v1::BufferSpec& proto,
                                    const Core& core) {
  BufferSpec spec{.name = name, .replace = proto.replace()};
  absl::StatusOr<ArrayType> type = MakeArrayType(proto.dtype(), proto.shape(), "spec");
  if (!type.ok()) return type.status();
  spec.type = *type;
  absl::StatusOr<Device*> device = core.FindDevice(proto.device());
  if (!device.ok()) return device.status();
  spec.device = *device;
  if (proto.has_ttl()) {
    absl::StatusOr<absl::Duration> ttl = FromProto(proto.ttl());
    if (!ttl.ok()) return ttl.status();
    spec.ttl = *ttl;
  }
  return spec;
}

// Where a list goes on: after this name, for this prefix only. Neither contains a NUL that a client
// could forge: names never do, and the prefix comes last.
std::string PageToken(std::string_view last_name, const std::string& prefix) {
  std::string token(last_name);
  token += '\0';
  token += prefix;
  return absl::WebSafeBase64Escape(token);
}

absl::StatusOr<std::string> NameOfPageToken(const std::string& token, const std::string& prefix) {
  std::string text;
  if (absl::WebSafeBase64Unescape(token, &text)) {
    const std::size_t end = text.find('\0');
    if (end != text.npos && text.compare(end + 1, text.npos, prefix) == 0) {
      return text.substr(0, end);
    }
  }
  return MakeError(StatusCode::kInvalidArgument, "BAD_PAGE",
                   "the page token does not belong to this query", {{"field", "page_token"}});
}

}  // namespace

void SetBuffer(const BufferInfo& info, v1::Buffer* out) {
  const Buffer& buffer = *info.buffer;
  out->set_name(buffer.name());
  out->set_dtype(ToProto(buffer.type().dtype));
  SetShape(buffer.type().shape, out->mutable_shape());
  out->set_size_bytes(buffer.type().bytes());
  out->set_state(info.ready ? v1::Buffer::STATE_READY : v1::Buffer::STATE_WRITING);
  out->set_committed_bytes(info.committed_bytes);
  *out->mutable_create_time() = ToProto(buffer.create_time());
  if (info.expire_time != absl::InfiniteFuture()) {
    *out->mutable_expire_time() = ToProto(info.expire_time);
  }
  out->set_device(buffer.device().info().name);
  out->set_version(info.version);
  if (info.checksum.has_value()) out->set_crc32c(*info.checksum);
}

// One stream of data into a draft. gRPC, the chores and the transfer worker take turns with it: a
// message is read, copied by the worker, and only then the next one is read, so that a stream never
// holds more than one message, and none while it waits.
class BufferService::UploadCall final : public grpc::ServerReadReactor<grpc::ByteBuffer>,
                                        private Task {
 public:
  UploadCall(BufferService& service, grpc::CallbackServerContext& context,
             grpc::ByteBuffer& response)
      : service_(service), core_(service.core_), context_(context), response_(response) {}

  // Once the service knows the call.
  void Begin() {
    const absl::Status status = Guarded([&]() -> absl::Status {
      absl::StatusOr<Admission::Ticket> ticket = core_.admission().Enter();
      if (!ticket.ok()) return ticket.status();
      ticket_ = *std::move(ticket);
      absl::StatusOr<Charge> stream =
          Charge::TakeOne(core_.uploads(), "TOO_MANY_UPLOADS",
                          "as many uploads are in progress as the server accepts");
      if (!stream.ok()) return stream.status();
      stream_ = *std::move(stream);
      absl::StatusOr<Charge> memory =
          Charge::Take(core_.host_memory(), core_.options().max_message, "HOST_MEMORY_EXHAUSTED",
                       "there is no memory for another stream of messages");
      if (!memory.ok()) return memory.status();
      memory_ = *std::move(memory);
      return absl::OkStatus();
    });
    if (status.ok()) {
      Read();
    } else {
      End(status);
    }
  }

  void OnReadDone(bool ok) override {
    if (reading_since_.exchange(0) == 0) return;  // timed out, and ended
    if (!ok) {
      // The end of the client's data, of the client, or of what gRPC accepts: in all cases but the
      // first gRPC has cancelled the call before, and cannot send metadata any more.
      StartSendInitialMetadata();
      return;
    }
    const absl::Status status = Guarded([&] { return Accept(); });
    if (!status.ok()) End(status);
  }

  void OnSendInitialMetadataDone(bool ok) override {
    if (!ok || context_.IsCancelled()) {
      End(MakeError(StatusCode::kCancelled, "CANCELLED", "the client broke the upload off"));
      return;
    }
    // What is replaced may be freed.
    const absl::Status status =
        core_.chores().Submit([this] { End(Guarded([&] { return Close(); })); });
    if (!status.ok()) End(status);
  }

  void OnDone() override {
    std::shared_ptr<UploadCall> self = shared_self_.lock();
    const std::lock_guard lock(service_.mutex_);
    service_.uploads_.erase(self);
  }

  // Safe at any time: while a call waits for a message no one else ends it.
  void EndIfIdle(absl::Time now) {
    std::int64_t since = reading_since_.load();
    if (since == 0) return;
    absl::Status status = absl::OkStatus();
    if (now - absl::FromUnixNanos(since) > core_.options().upload_timeout) {
      status = MakeError(StatusCode::kDeadlineExceeded, "UPLOAD_IDLE",
                         "no message has come for longer than the server waits",
                         {{"limit", absl::FormatDuration(core_.options().upload_timeout)}});
    } else if (const std::shared_ptr<Draft> draft = this->draft(); draft != nullptr) {
      status = core_.store().CheckOpen(*draft);
    }
    if (!status.ok() && reading_since_.compare_exchange_strong(since, 0)) End(status);
  }

  std::weak_ptr<UploadCall> shared_self_;

 private:
  void Read() {
    message_.reset();
    reading_since_ = absl::ToUnixNanos(SteadyNow());
    StartRead(&bytes_);
  }

  // Parses and checks a message and sends it on its way; the first one opens the buffer.
  absl::Status Accept() {
    if (absl::Status status = core_.CheckSize(bytes_.Length()); !status.ok()) return status;
    message_.emplace();
    const bool parsed =
        grpc::SerializationTraits<v1::UploadRequest>::Deserialize(&bytes_, &*message_).ok();
    bytes_.Clear();
    if (!parsed) {
      return MakeError(StatusCode::kInvalidArgument, "BAD_MESSAGE",
                       "a message is no valid UploadRequest", {{"field", "message"}});
    }
    if (draft() == nullptr) {
      // Memory may have to be found.
      return core_.chores().Submit([this] {
        absl::Status status = Guarded([&]() -> absl::Status {
          absl::Status opened = Open();
          return opened.ok() ? Proceed() : opened;
        });
        if (!status.ok()) End(status);
      });
    }
    const bool same_name = message_->name().empty() || message_->name() == name_;
    const bool same_version = message_->version() == 0 || message_->version() == version_;
    const bool same_spec =
        !message_->has_spec() ||
        (creates_ && google::protobuf::util::MessageDifferencer::Equals(message_->spec(), spec_));
    if (!same_name || !same_version || !same_spec) {
      return MakeError(
          StatusCode::kInvalidArgument, "BAD_MESSAGE",
          "a later message of an upload names another buffer, version or spec",
          {{"field", !same_name      ? "name"
                     : !same_version ? "version"
                                     : "spec"},
           {"value", !same_name ? message_->name() : absl::StrCat(message_->version())},
           {"expected", !same_name ? name_ : absl::StrCat(version_)}});
    }
    return Proceed();
  }

  absl::Status Open() {
    name_ = message_->name();
    version_ = message_->version();
    creates_ = message_->has_spec();
    absl::StatusOr<std::shared_ptr<Draft>> draft;
    if (creates_) {
      spec_ = message_->spec();
      absl::StatusOr<BufferSpec> spec = MakeSpec(name_, spec_, core_);
      if (!spec.ok()) return spec.status();
      spec->kind = Draft::Kind::kStream;
      draft = core_.store().Create(*spec);
    } else {
      draft = core_.store().FindDraft(name_, version_);
    }
    if (!draft.ok()) return draft.status();
    const std::lock_guard lock(draft_mutex_);
    draft_ = *std::move(draft);
    return absl::OkStatus();
  }

  // A message whose buffer is known: its data goes to the device.
  absl::Status Proceed() {
    if (message_->has_offset()) position_ = message_->offset();
    if (message_->has_buffer_crc32c()) buffer_checksum_ = message_->buffer_crc32c();
    if (message_->data().empty()) {
      size_ = 0;
      std::optional<std::uint32_t> checksum;
      absl::Status status = CheckChecksum(checksum);
      if (status.ok()) status = core_.store().CheckOpen(*draft_);
      if (status.ok()) Read();
      return status;
    }
    size_ = message_->data().size();
    absl::StatusOr<void*> memory = core_.store().BeginWrite(*draft_, position_, size_);
    if (!memory.ok()) return memory.status();
    memory_of_data_ = *memory;
    absl::Status status = core_.transfers(draft_->buffer().device()).Submit(*this);
    if (!status.ok()) core_.store().AbandonWrite(*draft_);
    return status;
  }

  void Run(Stream& stream) override {
    std::optional<std::uint32_t> checksum;
    if (absl::Status wrong = CheckChecksum(checksum); !wrong.ok()) {
      core_.store().AbandonWrite(*draft_);
      End(wrong);
      return;
    }
    absl::Status status = CopyToDevice(stream, memory_of_data_, message_->data().data(), size_);
    // Also after a copy that failed: part of it may still be under way to memory that is about to
    // be freed.
    const absl::Status arrived = Synchronize(stream);
    if (status.ok()) status = arrived;
    core_.store().EndWrite(*draft_, position_, size_, status.ok(), checksum);
    if (!status.ok()) {
      End(status);
      return;
    }
    position_ += size_;
    received_ += size_;
    Read();
  }

  void Refuse(const absl::Status& status) override {
    core_.store().AbandonWrite(*draft_);
    End(status);
  }

  absl::Status CheckChecksum(std::optional<std::uint32_t>& checksum) const {
    if (!message_->has_crc32c()) return absl::OkStatus();
    checksum = Crc32c(message_->data().data(), size_);
    if (*checksum == message_->crc32c()) return absl::OkStatus();
    return MakeError(StatusCode::kDataLoss, "BAD_CHECKSUM",
                     "the data of a message has another CRC-32C than the message says",
                     {{"field", "crc32c"},
                      {"offset", absl::StrCat(position_)},
                      {"expected", absl::StrCat(message_->crc32c())},
                      {"actual", absl::StrCat(*checksum)}});
  }

  // The client has sent all it wants to send.
  absl::Status Close() {
    if (draft_ == nullptr) {
      return MakeError(StatusCode::kInvalidArgument, "BAD_MESSAGE",
                       "an upload needs a message with a name", {{"field", "name"}});
    }
    BufferInfo info;
    if (creates_) {
      info = core_.store().Describe(*draft_);
      if (!info.missing.empty()) {
        return MakeError(StatusCode::kInvalidArgument, "MISSING_DATA",
                         "the stream ended before the buffer was full",
                         {{"name", name_},
                          {"size", absl::StrCat(info.buffer->type().bytes())},
                          {"missing", ToString(info.missing)}});
      }
      absl::StatusOr<BufferInfo> sealed = core_.store().Seal(*draft_, buffer_checksum_);
      if (!sealed.ok()) {
        absl::Status status = sealed.status();
        if (absl::IsDataLoss(status)) SetErrorMetadata(status, "field", "buffer_crc32c");
        return status;
      }
      info = *std::move(sealed);
    } else {
      if (absl::Status status = core_.store().CheckOpen(*draft_); !status.ok()) return status;
      info = core_.store().Describe(*draft_);
    }
    v1::UploadResponse response;
    SetBuffer(info, response.mutable_buffer());
    response.set_received_bytes(received_);
    bool owned = false;
    grpc::SerializationTraits<v1::UploadResponse>::Serialize(response, &response_, &owned);
    return absl::OkStatus();
  }

  std::shared_ptr<Draft> draft() {
    const std::lock_guard lock(draft_mutex_);
    return draft_;
  }

  // By the one who has the turn, once. The call may be gone on return.
  void End(const absl::Status& status) {
    if (!status.ok()) LogFailedCall("Upload", context_.peer(), status);
    message_.reset();
    bytes_.Clear();
    std::shared_ptr<Draft> draft;
    {
      const std::lock_guard lock(draft_mutex_);
      draft = std::move(draft_);
    }
    if (draft != nullptr) {
      if (!status.ok() && creates_) core_.store().Discard(*draft);
      core_.chores().Release(std::move(draft));
    }
    stream_ = Charge();
    memory_ = Charge();
    Finish(ToGrpc(status));
  }

  BufferService& service_;
  Core& core_;
  grpc::CallbackServerContext& context_;
  grpc::ByteBuffer& response_;
  Admission::Ticket ticket_;
  Charge stream_;
  Charge memory_;
  // Nanoseconds of SteadyNow while gRPC reads a message, else 0. Whoever sets it to 0 has the turn.
  std::atomic<std::int64_t> reading_since_{0};

  // All of these belong to the one who has the turn; draft_ may be read by others, with its mutex.
  grpc::ByteBuffer bytes_;
  std::optional<v1::UploadRequest> message_;
  std::string name_;
  std::uint64_t version_ = 0;
  v1::BufferSpec spec_;
  bool creates_ = false;
  std::mutex draft_mutex_;
  std::shared_ptr<Draft> draft_;
  std::uint64_t position_ = 0;
  std::uint64_t size_ = 0;  // of the message's data
  void* memory_of_data_ = nullptr;
  std::uint64_t received_ = 0;
  std::optional<std::uint32_t> buffer_checksum_;
};

// One stream of data out of a buffer. A chunk leaves the device only when the one before is on its
// way.
class BufferService::DownloadCall final : public grpc::ServerWriteReactor<v1::DownloadResponse>,
                                          private Task {
 public:
  DownloadCall(BufferService& service, grpc::CallbackServerContext& context,
               const v1::DownloadRequest& request)
      : service_(service), core_(service.core_), context_(context), request_(request) {}

  // Once the service knows the call.
  void Begin() {
    const absl::Status status = Guarded([&] { return Open(); });
    if (status.ok()) {
      Next();
    } else {
      End(status);
    }
  }

  void OnWriteDone(bool ok) override {
    const std::int64_t since = writing_since_.exchange(0);
    if (!ok) {
      const absl::Duration limit = core_.options().download_timeout;
      End(SteadyNow() - absl::FromUnixNanos(since) > limit
              ? MakeError(StatusCode::kDeadlineExceeded, "DOWNLOAD_IDLE",
                          "nothing was read for longer than the server waits",
                          {{"limit", absl::FormatDuration(limit)}})
              : MakeError(StatusCode::kCancelled, "CANCELLED",
                          "the client broke the download off"));
    } else if (position_ == end_) {
      End(absl::OkStatus());
    } else {
      message_.clear_buffer();
      Next();
    }
  }

  void OnCancel() override {
    if (executor_ != nullptr && executor_->Cancel(*this)) End(CallerLeft());
  }

  void OnDone() override {
    std::shared_ptr<DownloadCall> self = shared_self_.lock();
    const std::lock_guard lock(service_.mutex_);
    service_.downloads_.erase(self);
  }

  // Safe at any time. gRPC ends the write, and thereby the call.
  void EndIfIdle(absl::Time now) {
    const std::int64_t since = writing_since_.load();
    if (since == 0 || now - absl::FromUnixNanos(since) <= core_.options().download_timeout) return;
    if (!given_up_.exchange(true)) context_.TryCancel();
  }

  std::weak_ptr<DownloadCall> shared_self_;

 private:
  absl::Status Open() {
    absl::StatusOr<Admission::Ticket> ticket = core_.admission().Enter();
    if (!ticket.ok()) return ticket.status();
    ticket_ = *std::move(ticket);
    absl::StatusOr<Charge> stream =
        Charge::TakeOne(core_.downloads(), "TOO_MANY_DOWNLOADS",
                        "as many downloads are in progress as the server accepts");
    if (!stream.ok()) return stream.status();
    stream_ = *std::move(stream);
    // A chunk, and the chunk as gRPC sends it.
    absl::StatusOr<Charge> memory =
        Charge::Take(core_.host_memory(), 2 * kDownloadChunk, "HOST_MEMORY_EXHAUSTED",
                     "there is no memory for another stream of messages");
    if (!memory.ok()) return memory.status();
    memory_ = *std::move(memory);
    absl::StatusOr<BufferInfo> info = core_.store().Find(request_.name(), request_.version());
    if (!info.ok()) return info.status();
    buffer_ = info->buffer;
    const std::uint64_t size = buffer_->type().bytes();
    if (request_.offset() > size) {
      return MakeError(
          StatusCode::kInvalidArgument, "BAD_RANGE",
          "the download begins beyond the end of the buffer",
          {{"offset", absl::StrCat(request_.offset())}, {"limit", absl::StrCat(size)}});
    }
    position_ = request_.offset();
    const std::uint64_t rest = size - position_;
    end_ = position_ + (request_.limit() == 0 ? rest : std::min(request_.limit(), rest));
    SetBuffer(*info, message_.mutable_buffer());
    executor_ = &core_.transfers(buffer_->device());
    return absl::OkStatus();
  }

  void Next() {
    absl::Status status = executor_->Submit(*this);
    if (!status.ok()) End(status);
  }

  void Run(Stream& stream) override {
    const absl::Status status = Guarded([&] { return Fill(stream); });
    if (!status.ok()) {
      End(status);
      return;
    }
    writing_since_ = absl::ToUnixNanos(SteadyNow());
    StartWrite(&message_);
  }

  void Refuse(const absl::Status& status) override { End(status); }

  absl::Status Fill(Stream& stream) {
    const std::uint64_t size = std::min(end_ - position_, kDownloadChunk);
    std::string& data = *message_.mutable_data();
    message_.set_offset(position_);
    data.resize(size);
    absl::Status status = CopyToHost(stream, data.data(),
                                     static_cast<const char*>(buffer_->data()) + position_, size);
    if (request_.checksums()) message_.set_crc32c(Crc32c(data.data(), size));
    position_ += size;
    return status;
  }

  void End(const absl::Status& status) {
    if (!status.ok()) LogFailedCall("Download", context_.peer(), status);
    core_.chores().Release(std::move(buffer_));
    message_ = v1::DownloadResponse();
    stream_ = Charge();
    memory_ = Charge();
    Finish(ToGrpc(status));
  }

  BufferService& service_;
  Core& core_;
  grpc::CallbackServerContext& context_;
  const v1::DownloadRequest& request_;
  Admission::Ticket ticket_;
  Charge stream_;
  Charge memory_;
  Executor* executor_ = nullptr;
  std::shared_ptr<const Buffer> buffer_;
  std::uint64_t position_ = 0;
  std::uint64_t end_ = 0;
  v1::DownloadResponse message_;
  // Nanoseconds of SteadyNow while gRPC sends a message, else 0.
  std::atomic<std::int64_t> writing_since_{0};
  std::atomic<bool> given_up_{false};
};

grpc::ServerReadReactor<grpc::ByteBuffer>* BufferService::Upload(
    grpc::CallbackServerContext* context, grpc::ByteBuffer* response) {
  auto call = std::make_shared<UploadCall>(*this, *context, *response);
  call->shared_self_ = call;
  {
    const std::lock_guard lock(mutex_);
    uploads_.insert(call);
  }
  call->Begin();
  return call.get();
}

grpc::ServerWriteReactor<v1::DownloadResponse>* BufferService::Download(
    grpc::CallbackServerContext* context, const v1::DownloadRequest* request) {
  auto call = std::make_shared<DownloadCall>(*this, *context, *request);
  call->shared_self_ = call;
  {
    const std::lock_guard lock(mutex_);
    downloads_.insert(call);
  }
  call->Begin();
  return call.get();
}

void BufferService::EndIdleStreams(absl::Time now) {
  std::vector<std::shared_ptr<UploadCall>> uploads;
  std::vector<std::shared_ptr<DownloadCall>> downloads;
  {
    const std::lock_guard lock(mutex_);
    uploads.assign(uploads_.begin(), uploads_.end());
    downloads.assign(downloads_.begin(), downloads_.end());
  }
  for (const std::shared_ptr<UploadCall>& call : uploads) call->EndIfIdle(now);
  for (const std::shared_ptr<DownloadCall>& call : downloads) call->EndIfIdle(now);
}

grpc::ServerUnaryReactor* BufferService::CreateBuffer(grpc::CallbackServerContext* context,
                                                      const v1::CreateBufferRequest* request,
                                                      v1::CreateBufferResponse* response) {
  return AnswerLater(
      core_, "CreateBuffer", *context, *request, [this, request, response]() -> absl::Status {
        absl::StatusOr<BufferSpec> spec = MakeSpec(request->name(), request->spec(), core_);
        if (!spec.ok()) return spec.status();
        absl::StatusOr<std::shared_ptr<Draft>> draft = core_.store().Create(*spec);
        if (!draft.ok()) return draft.status();
        SetBuffer(core_.store().Describe(**draft), response->mutable_buffer());
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* BufferService::GetBuffer(grpc::CallbackServerContext* context,
                                                   const v1::GetBufferRequest* request,
                                                   v1::GetBufferResponse* response) {
  return Answer(core_, "GetBuffer", *context, *request, [&]() -> absl::Status {
    absl::StatusOr<BufferInfo> info = core_.store().Get(request->name(), request->version());
    if (!info.ok()) return info.status();
    SetBuffer(*info, response->mutable_buffer());
    for (const Range& range : info->missing) {
      v1::ByteRange* out = response->add_missing();
      out->set_begin(range.begin);
      out->set_end(range.end);
    }
    for (const BufferInfo& draft : core_.store().Drafts(request->name())) {
      SetBuffer(draft, response->add_drafts());
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* BufferService::ListBuffers(grpc::CallbackServerContext* context,
                                                     const v1::ListBuffersRequest* request,
                                                     v1::ListBuffersResponse* response) {
  return Answer(core_, "ListBuffers", *context, *request, [&]() -> absl::Status {
    if (request->page_size() < 0 || request->page_size() > kLargestPage) {
      return MakeError(StatusCode::kInvalidArgument, "BAD_PAGE", "a page holds 1 to 1000 buffers",
                       {{"field", "page_size"},
                        {"value", absl::StrCat(request->page_size())},
                        {"limit", absl::StrCat(kLargestPage)}});
    }
    const std::size_t size =
        request->page_size() == 0 ? kDefaultPage : static_cast<std::size_t>(request->page_size());
    std::string after;
    if (!request->page_token().empty()) {
      absl::StatusOr<std::string> name = NameOfPageToken(request->page_token(), request->prefix());
      if (!name.ok()) return name.status();
      after = *std::move(name);
    }
    std::vector<BufferInfo> infos = core_.store().List(request->prefix(), after, size + 1);
    if (infos.size() > size) {
      infos.pop_back();
      response->set_next_page_token(PageToken(infos.back().buffer->name(), request->prefix()));
    }
    for (const BufferInfo& info : infos) SetBuffer(info, response->add_buffers());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* BufferService::SealBuffer(grpc::CallbackServerContext* context,
                                                    const v1::SealBufferRequest* request,
                                                    v1::SealBufferResponse* response) {
  return AnswerLater(core_, "SealBuffer", *context, *request,
                     [this, request, response]() -> absl::Status {
                       std::optional<std::uint32_t> checksum;
                       if (request->has_crc32c()) checksum = request->crc32c();
                       absl::StatusOr<BufferInfo> info =
                           core_.store().Seal(request->name(), request->version(), checksum);
                       if (!info.ok()) return info.status();
                       SetBuffer(*info, response->mutable_buffer());
                       return absl::OkStatus();
                     });
}

grpc::ServerUnaryReactor* BufferService::UpdateBuffer(grpc::CallbackServerContext* context,
                                                      const v1::UpdateBufferRequest* request,
                                                      v1::UpdateBufferResponse* response) {
  return Answer(core_, "UpdateBuffer", *context, *request, [&]() -> absl::Status {
    std::optional<absl::Duration> ttl;
    if (request->has_ttl()) {
      absl::StatusOr<absl::Duration> asked = FromProto(request->ttl());
      if (!asked.ok()) return asked.status();
      ttl = *asked;
    }
    absl::StatusOr<BufferInfo> info =
        core_.store().SetTtl(request->name(), request->version(), ttl);
    if (!info.ok()) return info.status();
    SetBuffer(*info, response->mutable_buffer());
    return absl::OkStatus();
  });
}

// A copy, on a worker of the source's device.
class BufferService::CopyCall final : public DeviceCall {
 public:
  CopyCall(Core& core, grpc::CallbackServerContext& context, const v1::CopyBufferRequest& request,
           v1::CopyBufferResponse& response)
      : DeviceCall(core, "CopyBuffer", context), request_(request), response_(response) {}

 private:
  absl::StatusOr<Device*> Prepare() override {
    absl::StatusOr<BufferInfo> source =
        core().store().Find(request_.source(), request_.source_version());
    if (!source.ok()) return source.status();
    source_ = source->buffer;
    const ArrayType& type = source_->type();
    const void* data = source_->data();
    absl::StatusOr<View> view = request_.has_view() ? MakeView(type, data, request_.view().offset(),
                                                               ToSpan(request_.view().shape()),
                                                               ToSpan(request_.view().strides()))
                                                    : WholeView(type, data);
    if (!view.ok()) return view.status();
    view_ = *view;
    spec_ = {.name = request_.name(),
             .type = {view_.dtype, view_.shape},
             .device = &source_->device(),
             .replace = request_.replace()};
    if (request_.dtype() != v1::DTYPE_UNSPECIFIED) {
      absl::StatusOr<DType> dtype = FromProto(request_.dtype(), "dtype");
      if (!dtype.ok()) return dtype.status();
      // A view may repeat elements: the size in the new type is checked anew.
      const Shape& shape = view_.shape;
      absl::StatusOr<ArrayType> cast =
          MakeArrayType(*dtype, {shape.dims.data(), static_cast<std::size_t>(shape.rank)});
      if (!cast.ok()) return cast.status();
      spec_.type = *cast;
    }
    if (!request_.device().empty()) {
      absl::StatusOr<Device*> device = core().FindDevice(request_.device());
      if (!device.ok()) return device.status();
      spec_.device = *device;
    }
    if (request_.has_ttl()) {
      absl::StatusOr<absl::Duration> ttl = FromProto(request_.ttl());
      if (!ttl.ok()) return ttl.status();
      spec_.ttl = *ttl;
    }
    return &source_->device();
  }

  absl::Status RunOn(Stream& stream) override {
    ResultDraft copy(core().store(), spec_);
    absl::StatusOr<void*> memory = copy.Open();
    if (!memory.ok()) return memory.status();
    const RunOptions options{.pace = &core().pace(stream.device()),
                             .max_seconds = core().options().max_operation_seconds};
    absl::Status status;
    if (spec_.device == &stream.device()) {
      status = RunCopy(stream, view_, spec_.type.dtype, *memory, options);
    } else {
      const Core::Bridge bridge = core().BridgeTo(*spec_.device);
      status = RunCopyAcross(stream, view_, spec_.type.dtype, bridge.stream, *memory, options);
    }
    if (!status.ok()) return status;
    if (stream.stopped()) return CallerLeft();
    absl::StatusOr<BufferInfo> info = copy.Seal();
    if (!info.ok()) return info.status();
    SetBuffer(*info, response_.mutable_buffer());
    return absl::OkStatus();
  }

  void Release() override { source_.reset(); }

  const v1::CopyBufferRequest& request_;
  v1::CopyBufferResponse& response_;
  std::shared_ptr<const Buffer> source_;
  View view_;
  BufferSpec spec_;
};

grpc::ServerUnaryReactor* BufferService::CopyBuffer(grpc::CallbackServerContext* context,
                                                    const v1::CopyBufferRequest* request,
                                                    v1::CopyBufferResponse* response) {
  auto* call = new CopyCall(core_, *context, *request, *response);
  call->Start(*request);
  return call;
}

grpc::ServerUnaryReactor* BufferService::DeleteBuffer(grpc::CallbackServerContext* context,
                                                      const v1::DeleteBufferRequest* request,
                                                      v1::DeleteBufferResponse*) {
  return AnswerLater(core_, "DeleteBuffer", *context, *request, [this, request] {
    return core_.store().Delete(request->name(), request->version());
  });
}

}  // namespace tessera
