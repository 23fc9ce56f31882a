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
#include "kernels/error.h"
#include "server/convert.h"
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
  out->set_version(buffer.version());
}

// One stream of data into a draft. gRPC and the transfer worker take turns with it: a message is
// read, copied by the worker, and only then the next one is read, so that a stream never holds more
// than one message.
class BufferService::UploadCall final : public grpc::ServerReadReactor<v1::UploadRequest> {
 public:
  UploadCall(BufferService& service, grpc::CallbackServerContext& context,
             v1::UploadResponse& response)
      : service_(service), core_(service.core_), context_(context), response_(response) {}

  // Once the service knows the call.
  void Begin() {
    absl::StatusOr<Admission::Ticket> ticket = core_.admission().Enter();
    if (!ticket.ok()) {
      End(ticket.status());
      return;
    }
    ticket_ = *std::move(ticket);
    Read();
  }

  void OnReadDone(bool ok) override {
    if (reading_since_.exchange(0) == 0) return;  // timed out, and ended
    try {
      if (!ok) {
        End(HalfClosed());
        return;
      }
      absl::Status status = Accept();
      if (!status.ok()) {
        End(status);
      } else if (message_.data().empty()) {
        Read();
      } else {
        Copy();
      }
    } catch (const std::bad_alloc&) {
      End(HostMemoryError());
    }
  }

  void OnDone() override {
    std::shared_ptr<UploadCall> self = shared_self_.lock();
    const std::lock_guard lock(service_.mutex_);
    service_.uploads_.erase(self);
  }

  // Safe at any time: while a call waits for a message no one else ends it.
  void EndIfIdle(absl::Time now) {
    std::int64_t since = reading_since_.load();
    if (since == 0 || now - absl::FromUnixNanos(since) <= core_.options().upload_timeout) return;
    if (!reading_since_.compare_exchange_strong(since, 0)) return;
    End(MakeError(StatusCode::kDeadlineExceeded, "UPLOAD_IDLE",
                  "no data has come for longer than the server waits",
                  {{"limit", absl::FormatDuration(core_.options().upload_timeout)}}));
  }

  std::weak_ptr<UploadCall> shared_self_;

 private:
  void Read() {
    reading_since_ = absl::GetCurrentTimeNanos();
    StartRead(&message_);
  }

  // Checks a message and finds where its data goes; the first one opens the buffer.
  absl::Status Accept() {
    if (absl::Status status = core_.CheckSize(message_); !status.ok()) return status;
    if (draft_ == nullptr) {
      if (absl::Status status = Open(); !status.ok()) return status;
    } else {
      const bool same_name = message_.name().empty() || message_.name() == name_;
      const bool same_spec =
          !message_.has_spec() ||
          (creates_ && google::protobuf::util::MessageDifferencer::Equals(message_.spec(), spec_));
      if (!same_name || !same_spec) {
        return MakeError(StatusCode::kInvalidArgument, "BAD_MESSAGE",
                         "a later message of an upload names another buffer or spec",
                         {{"field", same_name ? "spec" : "name"},
                          {"value", same_name ? "" : message_.name()},
                          {"expected", name_}});
      }
    }
    if (message_.has_offset()) position_ = message_.offset();
    return absl::OkStatus();
  }

  absl::Status Open() {
    name_ = message_.name();
    creates_ = message_.has_spec();
    absl::StatusOr<std::shared_ptr<Draft>> draft;
    if (creates_) {
      spec_ = message_.spec();
      absl::StatusOr<BufferSpec> spec = MakeSpec(name_, spec_, core_);
      if (!spec.ok()) return spec.status();
      spec->exclusive = true;
      draft = core_.store().Create(*spec);
    } else {
      draft = core_.store().FindDraft(name_);
    }
    if (!draft.ok()) return draft.status();
    draft_ = *std::move(draft);
    return absl::OkStatus();
  }

  void Copy() {
    const std::uint64_t offset = position_;
    const std::uint64_t size = message_.data().size();
    absl::StatusOr<void*> memory = core_.store().BeginWrite(*draft_, offset, size);
    if (!memory.ok()) {
      End(memory.status());
      return;
    }
    Task task;
    task.run = [this, offset, size, to = *memory](absl::StatusOr<Lane*> lane) {
      absl::Status status = lane.status();
      if (status.ok()) status = CopyToDevice(**lane, to, message_.data().data(), size);
      if (status.ok()) status = Synchronize(**lane);
      core_.store().EndWrite(*draft_, offset, size, status.ok());
      if (!status.ok()) {
        End(status);
        return;
      }
      position_ = offset + size;
      received_ += size;
      Read();
    };
    absl::Status status = core_.transfers(draft_->buffer().device()).Submit(std::move(task));
    if (!status.ok()) {
      core_.store().EndWrite(*draft_, offset, size, false);
      End(status);
    }
  }

  // The end of the client's data, or of the client: then the answer goes nowhere.
  absl::Status HalfClosed() {
    if (context_.IsCancelled()) {
      return MakeError(StatusCode::kCancelled, "CANCELLED", "the client broke the upload off");
    }
    if (draft_ == nullptr) {
      return MakeError(StatusCode::kInvalidArgument, "BAD_MESSAGE",
                       "an upload needs a message with a name", {{"field", "name"}});
    }
    BufferInfo info = core_.store().Describe(*draft_);
    if (creates_) {
      if (!info.missing.empty()) {
        return MakeError(StatusCode::kInvalidArgument, "MISSING_DATA",
                         "the stream ended before the buffer was full",
                         {{"name", name_},
                          {"size", absl::StrCat(info.buffer->type().bytes())},
                          {"missing", ToString(info.missing)}});
      }
      absl::StatusOr<BufferInfo> sealed = core_.store().Seal(draft_);
      if (!sealed.ok()) return sealed.status();
      info = *std::move(sealed);
    }
    SetBuffer(info, response_.mutable_buffer());
    response_.set_received_bytes(received_);
    return absl::OkStatus();
  }

  // By the one who has the turn, once. The call may be gone on return.
  void End(const absl::Status& status) {
    if (!status.ok()) {
      LogFailedCall("Upload", context_.peer(), status);
      if (creates_ && draft_ != nullptr) core_.store().Discard(*draft_);
    }
    draft_.reset();
    Finish(ToGrpc(status));
  }

  BufferService& service_;
  Core& core_;
  grpc::CallbackServerContext& context_;
  v1::UploadResponse& response_;
  Admission::Ticket ticket_;
  // Unix time in ns while gRPC reads a message, else 0. Whoever sets it to 0 has the turn.
  std::atomic<std::int64_t> reading_since_{0};

  v1::UploadRequest message_;
  std::string name_;
  v1::BufferSpec spec_;
  bool creates_ = false;
  std::shared_ptr<Draft> draft_;
  std::uint64_t position_ = 0;
  std::uint64_t received_ = 0;
};

// One stream of data out of a buffer. A chunk leaves the device only when the one before is on its
// way.
class BufferService::DownloadCall final : public grpc::ServerWriteReactor<v1::DownloadResponse> {
 public:
  DownloadCall(Core& core, grpc::CallbackServerContext& context, const v1::DownloadRequest& request)
      : core_(core), context_(context) {
    absl::Status status = Open(request);
    if (status.ok()) {
      Next();
    } else {
      End(status);
    }
  }

  void OnWriteDone(bool ok) override {
    if (!ok) {
      End(MakeError(StatusCode::kCancelled, "CANCELLED", "the client broke the download off"));
    } else if (position_ == end_) {
      End(absl::OkStatus());
    } else {
      message_.clear_buffer();
      Next();
    }
  }

  void OnDone() override { delete this; }

 private:
  absl::Status Open(const v1::DownloadRequest& request) {
    absl::StatusOr<Admission::Ticket> ticket = core_.admission().Enter();
    if (!ticket.ok()) return ticket.status();
    ticket_ = *std::move(ticket);
    absl::StatusOr<std::shared_ptr<const Buffer>> buffer = core_.store().Find(request.name());
    if (!buffer.ok()) return buffer.status();
    buffer_ = *std::move(buffer);
    const std::uint64_t size = buffer_->type().bytes();
    if (request.offset() > size) {
      return MakeError(StatusCode::kInvalidArgument, "BAD_RANGE",
                       "the download begins beyond the end of the buffer",
                       {{"offset", absl::StrCat(request.offset())},
                        {"size", absl::StrCat(request.limit())},
                        {"limit", absl::StrCat(size)}});
    }
    position_ = request.offset();
    const std::uint64_t rest = size - position_;
    end_ = position_ + (request.limit() == 0 ? rest : std::min(request.limit(), rest));
    absl::StatusOr<BufferInfo> info = core_.store().Get(request.name());
    SetBuffer(info.ok() && info->buffer == buffer_
                  ? *info
                  : BufferInfo{buffer_, true, size, absl::InfiniteFuture(), {}},
              message_.mutable_buffer());
    return absl::OkStatus();
  }

  void Next() {
    Task task;
    task.deadline = context_.deadline();
    task.run = [this](absl::StatusOr<Lane*> lane) {
      absl::Status status = lane.status();
      if (status.ok()) status = Fill(**lane);
      if (status.ok()) {
        StartWrite(&message_);
      } else {
        End(status);
      }
    };
    absl::Status status = core_.transfers(buffer_->device()).Submit(std::move(task));
    if (!status.ok()) End(status);
  }

  absl::Status Fill(Lane& lane) try {
    const std::uint64_t size = std::min(end_ - position_, kDownloadChunk);
    message_.set_offset(position_);
    message_.mutable_data()->resize(size);
    absl::Status status = CopyToHost(lane, message_.mutable_data()->data(),
                                     static_cast<const char*>(buffer_->data()) + position_, size);
    position_ += size;
    return status;
  } catch (const std::bad_alloc&) {
    return HostMemoryError();
  }

  void End(const absl::Status& status) {
    if (!status.ok()) LogFailedCall("Download", context_.peer(), status);
    buffer_.reset();
    Finish(ToGrpc(status));
  }

  Core& core_;
  grpc::CallbackServerContext& context_;
  Admission::Ticket ticket_;
  std::shared_ptr<const Buffer> buffer_;
  std::uint64_t position_ = 0;
  std::uint64_t end_ = 0;
  v1::DownloadResponse message_;
};

grpc::ServerReadReactor<v1::UploadRequest>* BufferService::Upload(
    grpc::CallbackServerContext* context, v1::UploadResponse* response) {
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
  return new DownloadCall(core_, *context, *request);
}

void BufferService::EndIdleUploads(absl::Time now) {
  std::vector<std::shared_ptr<UploadCall>> calls;
  {
    const std::lock_guard lock(mutex_);
    calls.assign(uploads_.begin(), uploads_.end());
  }
  for (const std::shared_ptr<UploadCall>& call : calls) call->EndIfIdle(now);
}

grpc::ServerUnaryReactor* BufferService::CreateBuffer(grpc::CallbackServerContext* context,
                                                      const v1::CreateBufferRequest* request,
                                                      v1::CreateBufferResponse* response) {
  return Answer(core_, "CreateBuffer", *context, *request, [&]() -> absl::Status {
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
    absl::StatusOr<BufferInfo> info = core_.store().Get(request->name());
    if (!info.ok()) return info.status();
    SetBuffer(*info, response->mutable_buffer());
    for (const Range& range : info->missing) {
      v1::ByteRange* out = response->add_missing();
      out->set_begin(range.begin);
      out->set_end(range.end);
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
  return Answer(core_, "SealBuffer", *context, *request, [&]() -> absl::Status {
    absl::StatusOr<BufferInfo> info = core_.store().Seal(request->name());
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
    absl::StatusOr<BufferInfo> info = core_.store().SetTtl(request->name(), ttl);
    if (!info.ok()) return info.status();
    SetBuffer(*info, response->mutable_buffer());
    return absl::OkStatus();
  });
}

// A copy from its acceptance to its end, on a worker of the source's device.
struct BufferService::CopyCall {
  Core& core;
  grpc::CallbackServerContext& context;
  grpc::ServerUnaryReactor& reactor;
  v1::CopyBufferResponse& response;
  Admission::Ticket ticket;
  std::shared_ptr<const Buffer> source;
  View view;
  BufferSpec spec;

  void Run(const absl::StatusOr<Lane*>& lane) {
    absl::Status status = lane.status();
    if (lane.ok()) {
      absl::StatusOr<BufferInfo> copy =
          core.store().CreateFrom(spec, [&](void* memory) { return Fill(**lane, memory); });
      status = copy.status();
      if (copy.ok()) SetBuffer(*copy, response.mutable_buffer());
    }
    source.reset();
    Finish("CopyBuffer", context, reactor, status);
  }

  absl::Status Fill(Lane& lane, void* memory) {
    if (absl::Status status = BeginRequest(lane); !status.ok()) return status;
    if (spec.device == &lane.device()) return RunCopy(lane, view, spec.type.dtype, memory);
    // Between devices by way of the host: gathered and cast where it lives, then a chunk at a time.
    const std::uint64_t size = spec.type.bytes();
    absl::StatusOr<void*> gathered = Scratch(lane, size);
    if (!gathered.ok()) return gathered.status();
    absl::Status status = RunCopy(lane, view, spec.type.dtype, *gathered);
    if (!status.ok()) return status;
    absl::StatusOr<std::unique_ptr<Lane>> other = MakeLane(*spec.device);
    if (!other.ok()) return other.status();
    std::string chunk(std::min(size, kDownloadChunk), '\0');
    for (std::uint64_t at = 0; at < size; at += chunk.size()) {
      const std::uint64_t part = std::min<std::uint64_t>(chunk.size(), size - at);
      status = CopyToHost(lane, chunk.data(), static_cast<char*>(*gathered) + at, part);
      if (status.ok()) {
        status = CopyToDevice(**other, static_cast<char*>(memory) + at, chunk.data(), part);
      }
      if (!status.ok()) return status;
    }
    return Synchronize(**other);
  }
};

grpc::ServerUnaryReactor* BufferService::CopyBuffer(grpc::CallbackServerContext* context,
                                                    const v1::CopyBufferRequest* request,
                                                    v1::CopyBufferResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const auto enqueue = [&]() -> absl::Status {
    absl::StatusOr<Admission::Ticket> ticket = core_.admission().Enter();
    if (!ticket.ok()) return ticket.status();
    if (absl::Status status = core_.CheckSize(*request); !status.ok()) return status;
    absl::StatusOr<std::shared_ptr<const Buffer>> source = core_.store().Find(request->source());
    if (!source.ok()) return source.status();
    const ArrayType& type = (*source)->type();
    const void* data = (*source)->data();
    absl::StatusOr<View> view = request->has_view() ? MakeView(type, data, request->view().offset(),
                                                               ToSpan(request->view().shape()),
                                                               ToSpan(request->view().strides()))
                                                    : WholeView(type, data);
    if (!view.ok()) return view.status();
    BufferSpec spec{.name = request->name(), .replace = request->replace(), .exclusive = true};
    spec.type = {view->dtype, view->shape};
    if (request->dtype() != v1::DTYPE_UNSPECIFIED) {
      absl::StatusOr<DType> dtype = FromProto(request->dtype(), "dtype");
      if (!dtype.ok()) return dtype.status();
      // A view may repeat elements: the size in the new type is checked anew.
      const Shape& shape = view->shape;
      absl::StatusOr<ArrayType> cast =
          MakeArrayType(*dtype, {shape.dims.data(), static_cast<std::size_t>(shape.rank)});
      if (!cast.ok()) return cast.status();
      spec.type = *cast;
    }
    spec.device = &(*source)->device();
    if (!request->device().empty()) {
      absl::StatusOr<Device*> device = core_.FindDevice(request->device());
      if (!device.ok()) return device.status();
      spec.device = *device;
    }
    if (request->has_ttl()) {
      absl::StatusOr<absl::Duration> ttl = FromProto(request->ttl());
      if (!ttl.ok()) return ttl.status();
      spec.ttl = *ttl;
    }
    Executor& executor = core_.compute((*source)->device());
    auto call = std::make_unique<CopyCall>(CopyCall{core_, *context, *reactor, *response,
                                                    *std::move(ticket), *std::move(source), *view,
                                                    std::move(spec)});
    Task task;
    task.deadline = context->deadline();
    task.cancelled = [context] { return context->IsCancelled(); };
    task.run = [held = std::move(call)](const absl::StatusOr<Lane*>& lane) { held->Run(lane); };
    return executor.Submit(std::move(task));
  };
  absl::Status status;
  try {
    status = enqueue();
  } catch (const std::bad_alloc&) {
    status = HostMemoryError();
  }
  if (!status.ok()) Finish("CopyBuffer", *context, *reactor, status);
  return reactor;
}

grpc::ServerUnaryReactor* BufferService::DeleteBuffer(grpc::CallbackServerContext* context,
                                                      const v1::DeleteBufferRequest* request,
                                                      v1::DeleteBufferResponse*) {
  return Answer(core_, "DeleteBuffer", *context, *request,
                [&] { return core_.store().Delete(request->name()); });
}

}  // namespace tessera
