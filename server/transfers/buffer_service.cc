#include "server/transfers/buffer_service.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "server/calls/buffer_messages.h"
#include "server/calls/device_call.h"
#include "server/calls/unary_call.h"
#include "server/rpc/convert.h"

namespace tessera {
namespace {

using absl::StatusCode;

constexpr int kDefaultPage = 100;
constexpr int kLargestPage = 1000;

// Returns a page token: the name after which the list continues and the prefix for which the token
// is valid, separated by NUL. A client cannot forge the separator, because names never contain a
// NUL and the prefix comes last.
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

// Describes a buffer in *out. Other calls may have deleted the buffer, so `info` may have the last
// reference to it. A chore releases the reference, because a thread that accepts calls must not
// free memory.
void Tell(Chores& chores, BufferInfo info, v1::Buffer* out) {
  SetBuffer(info, out);
  chores.Release(std::move(info.buffer));
}

}  // namespace

bool BufferService::ServeStream(std::string_view method, StreamExchange& exchange) {
  const auto begin = [&]<class Call>(std::string_view name, LiveCalls<Call>& live) {
    const absl::StatusOr<Caller> caller = parts_.access.Admit(name, exchange.context());
    if (!caller.ok()) {
      parts_.records.AddRefused(name, exchange.trace(), caller.status(), exchange.context().peer());
      exchange.Refuse(ToGrpc(caller.status()));
      return true;
    }
    Call& call = live.Add(std::make_shared<Call>(parts_, devices_, *caller, live, exchange));
    exchange.Serve(call);
    call.Begin();
    return true;
  };
  if (method == "/tessera.v1.BufferService/Upload") return begin("Upload", uploads_);
  if (method == "/tessera.v1.BufferService/Download") return begin("Download", downloads_);
  return false;
}

void BufferService::Serve(CallQueues& queues) {
  const auto serve = [&](std::string_view method, auto ask, Effect effect, Thread thread,
                         auto handle) {
    AnswerCalls(queues, parts_, *this, ask, method, effect, thread, handle);
  };
  using Self = BufferService;
  constexpr Effect kNone = Effect::kNone, kChange = Effect::kChange;
  constexpr Thread kQueue = Thread::kQueue, kChores = Thread::kChores;
  serve("CreateBuffer", &Self::RequestCreateBuffer, kChange, kChores, &Self::CreateBuffer);
  serve("GetBuffer", &Self::RequestGetBuffer, kNone, kQueue, &Self::GetBuffer);
  serve("ListBuffers", &Self::RequestListBuffers, kNone, kQueue, &Self::ListBuffers);
  serve("SealBuffer", &Self::RequestSealBuffer, kChange, kChores, &Self::SealBuffer);
  serve("UpdateBuffer", &Self::RequestUpdateBuffer, kChange, kQueue, &Self::UpdateBuffer);
  serve("DeleteBuffer", &Self::RequestDeleteBuffer, kChange, kChores, &Self::DeleteBuffer);
  AcceptUnary<v1::CopyBufferRequest, v1::CopyBufferResponse>(
      queues, *this, &Self::RequestCopyBuffer, AdmitTo(parts_, "CopyBuffer"),
      [this](auto& exchange) { CopyBuffer(exchange); });
  AcceptUnary<v1::ImportBufferRequest, v1::ImportBufferResponse>(
      queues, *this, &Self::RequestImportBuffer, AdmitTo(parts_, "ImportBuffer"),
      [this](auto& exchange) { importer_.Begin(exchange); });
  AcceptUnary<v1::SnapshotRequest, v1::SnapshotResponse>(
      queues, *this, &Self::RequestSnapshot, AdmitTo(parts_, "Snapshot"),
      [this](auto& exchange) { Snapshot(exchange); });
}

void BufferService::EndIdleStreams(absl::Time now) {
  uploads_.EndIdle(now);
  downloads_.EndIdle(now);
  importer_.EndIdle(now);
}

absl::Status BufferService::CreateBuffer(const Caller& caller,
                                         const v1::CreateBufferRequest& request,
                                         v1::CreateBufferResponse& response) {
  ASSIGN_OR_RETURN(BufferSpec spec, MakeSpec(request.name(), request.spec(), devices_));
  ASSIGN_OR_RETURN(std::shared_ptr<Draft> draft, caller.tenant->store().Create(spec));
  SetBuffer(caller.tenant->store().Describe(*draft), response.mutable_buffer());
  return absl::OkStatus();
}

absl::Status BufferService::GetBuffer(const Caller& caller, const v1::GetBufferRequest& request,
                                      v1::GetBufferResponse& response) {
  ASSIGN_OR_RETURN(BufferInfo info, caller.tenant->store().Get(request.name(), request.version()));
  for (const Range& range : info.missing) {
    v1::ByteRange* out = response.add_missing();
    out->set_begin(range.begin);
    out->set_end(range.end);
  }
  Tell(parts_.chores, std::move(info), response.mutable_buffer());
  for (BufferInfo& draft : caller.tenant->store().Drafts(request.name()))
    Tell(parts_.chores, std::move(draft), response.add_drafts());
  return absl::OkStatus();
}

absl::Status BufferService::ListBuffers(const Caller& caller, const v1::ListBuffersRequest& request,
                                        v1::ListBuffersResponse& response) {
  if (request.page_size() < 0 || request.page_size() > kLargestPage) {
    return MakeError(StatusCode::kInvalidArgument, "BAD_PAGE", "a page holds 1 to 1000 buffers",
                     {{"field", "page_size"},
                      {"value", absl::StrCat(request.page_size())},
                      {"limit", absl::StrCat(kLargestPage)}});
  }
  const std::size_t size =
      request.page_size() == 0 ? kDefaultPage : static_cast<std::size_t>(request.page_size());
  std::string after;
  if (!request.page_token().empty()) {
    ASSIGN_OR_RETURN(after, NameOfPageToken(request.page_token(), request.prefix()));
  }
  std::vector<BufferInfo> infos = caller.tenant->store().List(request.prefix(), after, size + 1);
  if (infos.size() > size) {
    infos.pop_back();
    response.set_next_page_token(PageToken(infos.back().buffer->name(), request.prefix()));
  }
  for (BufferInfo& info : infos) Tell(parts_.chores, std::move(info), response.add_buffers());
  return absl::OkStatus();
}

absl::Status BufferService::SealBuffer(const Caller& caller, const v1::SealBufferRequest& request,
                                       v1::SealBufferResponse& response) {
  std::optional<std::uint32_t> checksum;
  if (request.has_crc32c()) checksum = request.crc32c();
  ASSIGN_OR_RETURN(BufferInfo info,
                   caller.tenant->store().Seal(request.name(), request.version(), checksum));
  SetBuffer(info, response.mutable_buffer());
  return absl::OkStatus();
}

absl::Status BufferService::UpdateBuffer(const Caller& caller,
                                         const v1::UpdateBufferRequest& request,
                                         v1::UpdateBufferResponse& response) {
  std::optional<absl::Duration> ttl;
  RETURN_IF_ERROR(SetTtl(request, ttl));
  ASSIGN_OR_RETURN(BufferInfo info,
                   caller.tenant->store().SetTtl(request.name(), request.version(), ttl));
  Tell(parts_.chores, std::move(info), response.mutable_buffer());
  return absl::OkStatus();
}

namespace {

// A copy that runs on a worker of the source's device.
class CopyCall final : public DeviceCall {
 public:
  CopyCall(const CallParts& parts, const Devices& devices,
           UnaryExchangeOf<v1::CopyBufferRequest, v1::CopyBufferResponse>& exchange)
      : DeviceCall(parts, devices, "CopyBuffer", exchange),
        request_(exchange.request()),
        response_(exchange.response()) {}

 private:
  absl::StatusOr<Device*> Prepare() override {
    ASSIGN_OR_RETURN(BufferInfo source,
                     store().Find(request_.source(), request_.source_version(), &awaited()));
    source_ = source.buffer;
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
    if (source_->shards().size() > 1) {
      for (const Shard& shard : source_->shards()) spec_.placement.push_back(shard.device);
    }
    if (request_.dtype() != v1::DTYPE_UNSPECIFIED) {
      ASSIGN_OR_RETURN(DType dtype, FromProto(request_.dtype(), "dtype"));
      // A view may repeat elements, so the size in the new type is checked again.
      const Shape& shape = view_.shape;
      ASSIGN_OR_RETURN(spec_.type, MakeArrayType(dtype, {shape.dims.data(),
                                                         static_cast<std::size_t>(shape.rank)}));
    }
    if (!request_.device().empty() || !request_.placement().empty()) {
      RETURN_IF_ERROR(SetPlace(request_.device(), request_.placement(), devices(), spec_));
    }
    RETURN_IF_ERROR(SetTtl(request_, spec_.ttl));
    return &source_->device();
  }

  // Whether the result, or a shard of it, is on the device.
  bool IsResultOn(const Device& device) const {
    if (spec_.placement.empty()) return spec_.device == &device;
    return std::find(spec_.placement.begin(), spec_.placement.end(), &device) !=
           spec_.placement.end();
  }

  absl::Status RunOn(Stream& stream) override {
    ResultDraft copy(store(), spec_);
    RunOptions options;
    devices().SetLimits(stream.device(), options);
    absl::Status status;
    if (IsResultOn(stream.device())) {
      const auto open = [&copy] { return copy.Open(); };  // runs after the expected time is checked
      status = RunCopy(stream, view_, spec_.type.dtype, open, options);
    } else {
      ASSIGN_OR_RETURN(void* const memory, copy.Open());
      ASSIGN_OR_RETURN(const Devices::Bridge bridge, devices().BridgeTo(copy.buffer().device()));
      status = RunCopyAcross(stream, view_, spec_.type.dtype, *bridge, memory, options);
    }
    if (!status.ok()) return status;
    if (stream.stopped()) return CallerLeft();
    ASSIGN_OR_RETURN(BufferInfo info, copy.Seal());
    SetBuffer(info, response_.mutable_buffer());
    return absl::OkStatus();
  }

  void Release(Chores* chores) override {
    if (chores != nullptr) chores->Release(std::move(source_));
    source_.reset();
  }

  const v1::CopyBufferRequest& request_;
  v1::CopyBufferResponse& response_;
  std::shared_ptr<const Buffer> source_;
  View view_;
  BufferSpec spec_;
};

absl::Status LinkBuffer(const Caller& caller, const v1::CopyBufferRequest& request,
                        v1::CopyBufferResponse& response) {
  const std::string_view field = request.has_view()             ? "view"
                                 : request.dtype() != 0         ? "dtype"
                                 : !request.device().empty()    ? "device"
                                 : !request.placement().empty() ? "placement"
                                                                : "";
  if (!field.empty()) {
    return MakeError(
        StatusCode::kInvalidArgument, "BAD_LINK",
        "a link shares its source unchanged, so it cannot have its own view, type or placement",
        {{"field", std::string(field)}});
  }
  BufferSpec link{.name = request.name(), .replace = request.replace()};
  RETURN_IF_ERROR(SetTtl(request, link.ttl));
  ASSIGN_OR_RETURN(BufferInfo info,
                   caller.tenant->store().Link(request.source(), request.source_version(), link));
  SetBuffer(info, response.mutable_buffer());
  return absl::OkStatus();
}

}  // namespace

void BufferService::CopyBuffer(
    UnaryExchangeOf<v1::CopyBufferRequest, v1::CopyBufferResponse>& exchange) {
  if (exchange.request().link())
    return Answer(parts_, "CopyBuffer", Effect::kChange, Thread::kChores, exchange, LinkBuffer);
  exchange.Serve(std::make_unique<CopyCall>(parts_, devices_, exchange)).Start();
}

void BufferService::Snapshot(UnaryExchangeOf<v1::SnapshotRequest, v1::SnapshotResponse>& exchange) {
  UnaryCall& call = exchange.Serve(std::make_unique<UnaryCall>(parts_, "Snapshot", exchange));
  const auto take = [&call, &exchange, this] {
    const Caller& caller = call.caller();
    const absl::StatusOr<Snapshots::Taken> taken =
        snapshots_->Take(caller.sees_all() ? nullptr : caller.tenant);
    if (taken.ok()) {
      exchange.response().set_buffers(taken->buffers);
      exchange.response().set_written_arrays(taken->written_arrays);
      exchange.response().set_written_bytes(taken->written_bytes);
    }
    call.End(taken.status());
  };
  const absl::Status status = Guarded([&]() -> absl::Status {
    RETURN_IF_ERROR(call.Accept());
    if (snapshots_ == nullptr) {
      return MakeError(StatusCode::kFailedPrecondition, "SNAPSHOTS_OFF",
                       "the server keeps no snapshots, because it has no --data-dir");
    }
    return snapshots_->Submit(take, call.caller().tenant->number());
  });
  if (!status.ok()) call.End(status);
}

absl::Status BufferService::DeleteBuffer(const Caller& caller,
                                         const v1::DeleteBufferRequest& request,
                                         v1::DeleteBufferResponse&) {
  return caller.tenant->store().Delete(request.name(), request.version());
}

}  // namespace tessera
