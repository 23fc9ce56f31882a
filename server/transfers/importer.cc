#include "server/transfers/importer.h"

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/crc32c.h"
#include "server/calls/buffer_messages.h"
#include "server/calls/device_call.h"
#include "server/calls/unary_call.h"
#include "server/rpc/convert.h"
#include "tessera/v1/buffer.grpc.pb.h"

namespace tessera {
namespace {

using absl::StatusCode;

// An import fails after this many consecutive attempts that receive no new byte.
constexpr int kMostFailures = 7;
// The pause after the first failed attempt. Each further pause is twice as long as the previous
// one.
constexpr absl::Duration kFirstPause = absl::Milliseconds(200);
constexpr absl::Duration kLongestPause = absl::Seconds(5);
// The memory that gRPC and this call hold for messages.
constexpr std::uint64_t kMessageBytes = 4 << 20;

std::string ReasonOf(const grpc::Status& status) {
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return "";
  for (const google::protobuf::Any& detail : details.details()) {
    google::rpc::ErrorInfo info;
    if (detail.UnpackTo(&info)) return info.reason();
  }
  return "";
}

// Whether the same request may succeed a little later.
bool IsTransient(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::CANCELLED:  // sent by a server that is stopping
    case grpc::StatusCode::INTERNAL:   // a stream that was reset
    case grpc::StatusCode::UNKNOWN:
    case grpc::StatusCode::DEADLINE_EXCEEDED:  // this side was slow
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return true;
    default:
      return false;
  }
}

}  // namespace

class ImportCall final : public UnaryCall {
 public:
  ImportCall(Importer& importer,
             UnaryExchangeOf<v1::ImportBufferRequest, v1::ImportBufferResponse>& exchange)
      : UnaryCall(importer.parts_, "ImportBuffer", exchange),
        importer_(importer),
        request_(exchange.request()),
        response_(exchange.response()) {
    // The caller's token is passed on, so that the other server decides what the caller may read.
    // If this server checks no tokens, the token is passed on over TLS only.
    if (!parts().access.restricted() && importer.options_.import_tls_ca.empty()) return;
    const auto& metadata = exchange.context().client_metadata();
    if (const auto token = metadata.find("authorization"); token != metadata.end())
      token_.assign(token->second.data(), token->second.size());
  }

  // Called once, on the thread on which the call arrived.
  void Start() {
    const absl::Status status = Guarded([&]() -> absl::Status {
      if (absl::Status accepted = Accept(); !accepted.ok()) return accepted;
      if (absl::Status checked = importer_.sources_.Check(request_.source()); !checked.ok())
        return checked;
      if (absl::Status checked = CheckSpec(); !checked.ok()) return checked;
      absl::StatusOr<CallLimits::StreamPlace> place =
          parts().limits.TakeStream(StreamKind::kImport, *caller().tenant);
      if (!place.ok()) return place.status();
      {
        const std::lock_guard lock(mutex_);
        if (stopped_ == Why::kNot) place_ = *std::move(place);
      }
      return importer_.threads_.Submit([this] { Run(); });
    });
    if (!status.ok()) End(status);
  }

  void OnCancel() override { Stop(Why::kCancelled); }

  void EndIfIdle(absl::Time now) {
    bool idle = false;
    {
      const std::lock_guard lock(mutex_);
      idle = now - moved_ > parts().limits.Patience();
    }
    if (idle) Stop(Why::kStalled);
  }

 private:
  enum class Why { kNot, kCancelled, kStalled };

  // How an attempt ended. OK means that all bytes have arrived.
  struct Ended {
    absl::Status status;
    bool transient = false;  // the attempt may be repeated
  };

  void Stop(Why why) {
    const std::lock_guard lock(mutex_);
    if (stopped_ == Why::kNot) stopped_ = why;
    // The caller may begin its next import at once, while this one waits for a copy. The next
    // import then waits for a thread.
    place_ = {};
    if (context_ != nullptr) context_->TryCancel();
    wake_.notify_all();
  }

  void NoteMoved(absl::Time when) {
    const std::lock_guard lock(mutex_);
    moved_ = when;
  }

  void Run() {
    NoteBegin();
    NoteMoved(SteadyNow());
    {
      const std::lock_guard lock(importer_.mutex_);
      importer_.running_.insert(this);
    }
    absl::Status status = Guarded([&] { return Import(); });
    // Copies may still be writing to memory that is about to be freed.
    if (stream_ != nullptr) Synchronize(*stream_).IgnoreError();
    if (draft_ != nullptr) store().Discard(*draft_);
    draft_.reset();
    stream_.reset();
    stub_.reset();
    // The channel is destroyed after the response is sent, because its destruction takes some
    // milliseconds.
    const std::shared_ptr<grpc::Channel> channel = std::move(channel_);
    {
      const std::lock_guard lock(mutex_);
      place_ = {};
    }
    {
      const std::lock_guard lock(importer_.mutex_);
      importer_.running_.erase(this);
    }
    End(status);
  }

  absl::Status Import() {
    absl::StatusOr<Charge> memory = parts().limits.TakeHostMemory(
        kMessageBytes, "other calls' messages leave too little memory for an import");
    if (!memory.ok()) return memory.status();
    absl::StatusOr<std::shared_ptr<grpc::Channel>> channel =
        importer_.sources_.Connect(request_.source());
    if (!channel.ok()) return channel.status();
    channel_ = *std::move(channel);
    stub_ = v1::BufferService::NewStub(channel_);
    version_ = request_.source_version();
    std::uint32_t interruptions = 0;
    for (int failures = 0;; ++interruptions) {
      const std::uint64_t before = position_;
      const Ended ended = Attempt();
      if (ended.status.ok()) break;
      if (absl::Status stopped = Stopped(); !stopped.ok()) return stopped;
      if (!ended.transient) return ended.status;
      last_error_ = std::string(ended.status.message());
      failures = position_ > before ? 1 : failures + 1;
      if (failures >= kMostFailures) return Unreachable(ended.status);
      Pause(std::min(kFirstPause * (1 << (failures - 1)), kLongestPause));
      if (absl::Status stopped = Stopped(); !stopped.ok()) return stopped;
    }
    NoteMoved(absl::InfiniteFuture());  // no more data is expected
    if (absl::Status arrived = Synchronize(*stream_); !arrived.ok()) return arrived;
    if (absl::Status stopped = Stopped(); !stopped.ok()) return stopped;
    absl::StatusOr<BufferInfo> info = store().Seal(*draft_, checksum_, request_.source());
    if (!info.ok()) return info.status();
    SetBuffer(*info, response_.mutable_buffer());
    response_.set_interruptions(interruptions);
    return absl::OkStatus();
  }

  // Makes one attempt: a stream that begins where the last one ended.
  Ended Attempt() {
    grpc::ClientContext context;
    if (!token_.empty()) context.AddMetadata("authorization", token_);
    {
      const std::lock_guard lock(mutex_);
      if (stopped_ != Why::kNot) return {CallerLeft()};
      context_ = &context;
    }
    const absl::Cleanup over = [this] {
      const std::lock_guard lock(mutex_);
      context_ = nullptr;
    };
    v1::DownloadRequest ask;
    ask.set_name(request_.source_name());
    ask.set_version(version_);
    ask.set_offset(position_);
    ask.set_checksums(true);
    const std::unique_ptr<grpc::ClientReader<v1::DownloadResponse>> reader =
        stub_->Download(&context, ask);
    v1::DownloadResponse message;
    Ended ended;
    while (ended.status.ok() && reader->Read(&message)) {
      const bool described = draft_ != nullptr;
      const std::uint64_t before = position_;
      ended = Take(message);
      if (described && position_ == before) continue;  // the message contained no data
      NoteMoved(SteadyNow());
    }
    if (!ended.status.ok()) context.TryCancel();
    const grpc::Status finished = reader->Finish();
    if (!ended.status.ok()) return ended;
    if (finished.ok() && (draft_ == nullptr || position_ < size_))
      return Damaged("the stream ended too early");
    if (finished.ok()) return ended;
    const std::string why =
        absl::StrCat(request_.source(), ": ", WithoutToken(finished.error_message()));
    if (IsTransient(finished.error_code())) return {absl::UnavailableError(why), true};
    return {MakeError(
        StatusCode::kFailedPrecondition, "SOURCE_REFUSED", why,
        {{"source", request_.source()},
         {"code", absl::StatusCodeToString(static_cast<absl::StatusCode>(finished.error_code()))},
         {"reason", WithoutToken(ReasonOf(finished))}})};
  }

  // Takes the next bytes.
  Ended Take(const v1::DownloadResponse& message) {
    if (draft_ == nullptr) {
      if (!message.has_buffer()) return Damaged("the first message describes no buffer");
      if (message.buffer().state() != v1::Buffer::STATE_READY)
        return Damaged("the source is not READY");
      // The next attempt recognises the same array by its version.
      const std::uint64_t version = message.buffer().version();
      if (version == 0 || (version_ != 0 && version != version_))
        return Damaged("the source describes a buffer without a version, or with another version");
      if (absl::Status opened = Open(message.buffer()); !opened.ok()) return {opened};
    } else if (message.has_buffer() && !IsSource(message.buffer())) {
      return Damaged("the buffer on the source is not the buffer from which the first bytes came");
    }
    const std::string& data = message.data();
    if (message.offset() != position_ || data.size() > size_ - position_)
      return Damaged("the source sent bytes that were not requested");
    if (!message.has_crc32c() || message.crc32c() != Crc32c(data.data(), data.size()))
      return Damaged("the bytes of a message do not match its checksum");
    if (data.empty()) return {};
    absl::Status checked =
        CheckElements(draft_->buffer().type().dtype, {data.data(), data.size()}, position_);
    if (!checked.ok()) return {checked};
    absl::StatusOr<void*> place = store().BeginWrite(*draft_, position_, data.size());
    if (!place.ok()) return {place.status()};
    const absl::Time begin = SteadyNow();
    absl::Status copied = CopyToDevice(*stream_, *place, data.data(), data.size());
    NoteCopy(SteadyNow() - begin);
    store().EndWrite(*draft_, position_, data.size(), copied.ok(), message.crc32c());
    if (copied.ok()) position_ += data.size();
    return {copied};
  }

  // Reads the draft's properties, except its type, from the request, and checks them.
  absl::Status CheckSpec() {
    spec_ = {.name = request_.name(), .replace = request_.replace(), .kind = Draft::Kind::kStream};
    absl::StatusOr<Device*> device = importer_.devices_.Find(request_.device());
    if (!device.ok()) return device.status();
    spec_.device = *device;
    if (absl::Status status = SetTtl(request_, spec_.ttl); !status.ok()) return status;
    return store().Check(spec_);
  }

  // Creates the draft, with the type that the source reports.
  absl::Status Open(const v1::Buffer& source) {
    absl::StatusOr<ArrayType> type = MakeArrayType(source.dtype(), source.shape(), "source");
    if (!type.ok()) return type.status();
    spec_.type = *type;
    absl::StatusOr<std::unique_ptr<Stream>> stream = MakeStream(*spec_.device);
    if (!stream.ok()) return stream.status();
    stream_ = *std::move(stream);
    absl::StatusOr<std::shared_ptr<Draft>> draft = store().Create(spec_);
    if (!draft.ok()) return draft.status();
    draft_ = *std::move(draft);
    size_ = spec_.type.bytes();
    version_ = source.version();
    dtype_ = source.dtype();
    shape_.assign(source.shape().begin(), source.shape().end());
    if (source.has_crc32c()) checksum_ = source.crc32c();
    return absl::OkStatus();
  }

  // Whether this is the buffer that the first message described.
  bool IsSource(const v1::Buffer& buffer) const {
    return buffer.version() == version_ && buffer.dtype() == dtype_ &&
           std::equal(shape_.begin(), shape_.end(), buffer.shape().begin(), buffer.shape().end());
  }

  // Returns a text from the source without the token that was sent to the source. The token is the
  // last word of the header. The rest of the text may go to the log and to the caller.
  std::string WithoutToken(const std::string& text) const {
    const absl::string_view header = absl::StripAsciiWhitespace(token_);
    const absl::string_view token = header.substr(header.rfind(' ') + 1);
    return token.empty() ? text : absl::StrReplaceAll(text, {{token, "(token)"}});
  }

  Ended Damaged(std::string_view what) const {
    return {absl::UnavailableError(absl::StrCat(request_.source(), ": ", Absl(what))), true};
  }

  void Pause(absl::Duration duration) {
    std::unique_lock lock(mutex_);
    wake_.wait_for(lock, absl::ToChronoNanoseconds(duration),
                   [this] { return stopped_ != Why::kNot; });
  }

  // Returns the error of a call that was ended from outside, or OK.
  absl::Status Stopped() {
    const std::lock_guard lock(mutex_);
    if (stopped_ == Why::kNot) return absl::OkStatus();
    if (stopped_ == Why::kCancelled) return CallerLeft();
    const std::string limit = absl::FormatDuration(parts().limits.Patience());
    const std::string what =
        absl::StrCat("nothing has arrived from ", request_.source(), " for ", limit,
                     last_error_.empty() ? "" : "; the last attempt ended with ", last_error_);
    if (parts().limits.admission().closed()) {
      return MakeError(StatusCode::kUnavailable, "DRAINING",
                       absl::StrCat(what, ", and the server is stopping"), {{"limit", limit}});
    }
    return MakeError(StatusCode::kDeadlineExceeded, "SOURCE_STALLED", what,
                     {{"source", request_.source()}, {"limit", limit}});
  }

  absl::Status Unreachable(const absl::Status& last) const {
    return MakeError(
        StatusCode::kUnavailable, "SOURCE_UNREACHABLE",
        absl::StrCat(last.message(), "; ", kMostFailures, " attempts brought no further data"),
        {{"source", request_.source()},
         {"received", absl::StrCat(position_)},
         {"size", draft_ != nullptr ? absl::StrCat(size_) : "unknown"}});
  }

  Importer& importer_;
  const v1::ImportBufferRequest& request_;
  BufferSpec spec_;
  v1::ImportBufferResponse& response_;
  std::string token_;

  std::mutex mutex_;
  std::condition_variable wake_;
  CallLimits::StreamPlace place_;  // guarded by mutex_, as are the following ones
  Why stopped_ = Why::kNot;
  grpc::ClientContext* context_ = nullptr;     // the current attempt's
  absl::Time moved_ = absl::InfiniteFuture();  // when data last arrived, in any attempt

  // Used only by the import's thread.
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::BufferService::Stub> stub_;
  std::unique_ptr<Stream> stream_;
  std::shared_ptr<Draft> draft_;
  std::uint64_t version_ = 0;
  v1::Dtype dtype_ = v1::DTYPE_UNSPECIFIED;
  std::vector<std::int64_t> shape_;
  std::uint64_t size_ = 0;
  std::uint64_t position_ = 0;
  std::optional<std::uint32_t> checksum_;  // checksum of the whole buffer
  std::string last_error_;                 // error of the last attempt
};

Importer::Importer(const CallParts& parts, const Devices& devices, const Options& options)
    : parts_(parts),
      devices_(devices),
      options_(options),
      sources_(options),
      // One thread for each import, and the one that Chores keeps free for other queues.
      threads_(options.import_from.empty() ? 0 : 1 + kMaxImports, kMaxImports) {}

void Importer::Begin(UnaryExchangeOf<v1::ImportBufferRequest, v1::ImportBufferResponse>& exchange) {
  exchange.Serve(std::make_unique<ImportCall>(*this, exchange)).Start();
}

void Importer::EndIdle(absl::Time now) {
  const std::lock_guard lock(mutex_);
  for (ImportCall* call : running_) call->EndIfIdle(now);
}

}  // namespace tessera
