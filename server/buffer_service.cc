#include "server/buffer_service.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "server/answers.h"
#include "server/buffer_messages.h"
#include "server/convert.h"
#include "server/device_call.h"
#include "server/unary_call.h"

namespace tessera {
namespace {

using absl::StatusCode;

constexpr int kDefaultPage = 100;
constexpr int kLargestPage = 1000;

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

grpc::ServerReadReactor<grpc::ByteBuffer>* BufferService::Upload(
    grpc::CallbackServerContext* context, grpc::ByteBuffer* response) {
  UploadCall& call =
      uploads_.Add(std::make_shared<UploadCall>(core_, uploads_, *context, *response));
  call.Begin();
  return &call;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* BufferService::Download(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) {
  DownloadCall& call = downloads_.Add(std::make_shared<DownloadCall>(core_, downloads_, *context));
  call.Begin(*request);
  return &call;
}

void BufferService::EndIdleStreams(absl::Time now) {
  uploads_.EndIdle(now);
  downloads_.EndIdle(now);
}

grpc::ServerUnaryReactor* BufferService::CreateBuffer(grpc::CallbackServerContext* context,
                                                      const v1::CreateBufferRequest* request,
                                                      v1::CreateBufferResponse* response) {
  return AnswerLater(core_, "CreateBuffer", *context, *request, *response,
                     [this, request, response]() -> absl::Status {
                       absl::StatusOr<BufferSpec> spec =
                           MakeSpec(request->name(), request->spec(), core_);
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
  return Answer(core_, "GetBuffer", *context, *request, *response, [&]() -> absl::Status {
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
  return Answer(core_, "ListBuffers", *context, *request, *response, [&]() -> absl::Status {
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
  return AnswerLater(core_, "SealBuffer", *context, *request, *response,
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
  return Answer(core_, "UpdateBuffer", *context, *request, *response, [&]() -> absl::Status {
    std::optional<absl::Duration> ttl;
    if (absl::Status status = SetTtl(*request, ttl); !status.ok()) return status;
    absl::StatusOr<BufferInfo> info =
        core_.store().SetTtl(request->name(), request->version(), ttl);
    if (!info.ok()) return info.status();
    SetBuffer(*info, response->mutable_buffer());
    return absl::OkStatus();
  });
}

namespace {

// A copy, on a worker of the source's device.
class CopyCall final : public DeviceCall {
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
    if (absl::Status status = SetTtl(request_, spec_.ttl); !status.ok()) return status;
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

}  // namespace

grpc::ServerUnaryReactor* BufferService::CopyBuffer(grpc::CallbackServerContext* context,
                                                    const v1::CopyBufferRequest* request,
                                                    v1::CopyBufferResponse* response) {
  auto* call = new CopyCall(core_, *context, *request, *response);
  call->Start(request->ByteSizeLong());
  return call;
}

grpc::ServerUnaryReactor* BufferService::DeleteBuffer(grpc::CallbackServerContext* context,
                                                      const v1::DeleteBufferRequest* request,
                                                      v1::DeleteBufferResponse* response) {
  return AnswerLater(core_, "DeleteBuffer", *context, *request, *response, [this, request] {
    return core_.store().Delete(request->name(), request->version());
  });
}

}  // namespace tessera
