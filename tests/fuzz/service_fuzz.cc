// Calls every method of a server in this process, with any bytes as the request. Between two inputs
// the server must have no buffers, and must have all of their memory back. With TESSERA_FUZZ_TOKENS
// in the environment, the server knows callers by tokens, and one of these callers makes each call.
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "client/shared_memory.h"
#include "google/protobuf/stubs/logging.h"
#include "grpcpp/grpcpp.h"
#include "kernels/compute.h"
#include "server/observe/log.h"
#include "server/server.h"
#include "tessera/v1/buffer.grpc.pb.h"
#include "tessera/v1/compute.grpc.pb.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/service_calls.h"
#include "tests/temporary_file.h"

namespace tessera {
namespace {

using grpc::ByteBuffer;
using grpc::internal::RpcMethod;

// In requests, this stands for the token of a region that the server knows.
constexpr std::string_view kRegion = "0123456789abcdef";

// The tokens of the callers, for a server that needs tokens. The last token is unknown.
constexpr const char* kTokens[] = {"fuzz-admin", "fuzz-writer", "fuzz-reader", "fuzz-other",
                                   "fuzz-nobody"};
constexpr const char* kTokenFile =
    "1c64ed42d0e14a2b1a137b7634c45cc09a6b67d48ea1767a8a30cdad14225918 admin one bytes=2Mi "
    "calls=100\n"
    "7587a8bd06280b7b0084eaba60a044474bee0330daa0463c1a2a8cbee39afa1c write one\n"
    "443c9d4e4dd4a1fbda9796696a2935a4244bdb7fe633d31067a0add17470a492 read one\n"
    "6670cc9dfb2ee76efcd16e75a0b5631a14b274622fb9e29ccb2a8802e2f4a8a2 write two buffers=3\n";

class Service {
 public:
  Service() {
    SetUpLog("off", false);
    Options options;
    options.listen.clear();
    options.workers = 2;
    options.warm_up = false;  // It would slow down the first input.
    options.memory_limit = {.bytes = 4 << 20};
    options.scratch_limit = 4 << 20;
    options.host_memory = 64 << 20;
    options.max_operation_seconds = 0.05;
    options.shared_memory = socket_.path();
    options.shared_memory_limit = 1 << 20;
    if (with_tokens_) options.tokens = token_file_.path();
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(*OpenDevice("cpu"));
    auto started = Server::Start(options, std::move(devices));
    Require(started.ok(), "no server");
    server_ = *std::move(started);
    channel_ = server_->InProcessChannel();
    buffers_ = v1::BufferService::NewStub(channel_);
    compute_ = v1::ComputeService::NewStub(channel_);
    auto memory = SharedMemory::Make(socket_.path(), 64 << 10, absl::Seconds(60));
    Require(memory.ok() && memory->region().size() == kRegion.size(), "no region");
    memory_.emplace(*std::move(memory));
    for (std::size_t i = 0; i < std::size(kFuzzMethods); ++i)
      Require(MethodOf(i) != nullptr, "no method " + kFuzzMethods[i]);
  }
  ~Service() {
    channel_.reset();
    buffers_.reset();
    compute_.reset();
    server_.reset();
  }

  void Run(std::vector<FuzzCall> calls) {
    for (auto call = calls.begin(); call != calls.end();) {
      auto end = call + 1;
      if (call->method == kUploadMethod) {
        while (end != calls.end() && end->method == kUploadMethod) ++end;
      }
      Call(call, end);
      call = end;
    }
    DeleteAll();
  }

 private:
  using Iterator = std::vector<FuzzCall>::iterator;

  void Call(Iterator call, Iterator end) {
    const google::protobuf::MethodDescriptor* method = MethodOf(call->method);
    const std::string path = "/" + method->service()->full_name() + "/" + method->name();
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(100)));
    // The caller is usually the writer, which finds what earlier calls have left.
    const std::size_t draw = (7 * call->method + 5 * call->request.size()) % 16;
    const std::size_t caller = draw < std::size(kTokens) ? draw : 1;
    Identify(context, kTokens[caller]);
    // A bidirectional stream can carry methods of every kind.
    const RpcMethod rpc(path.c_str(), RpcMethod::BIDI_STREAMING);
    const std::unique_ptr<grpc::ClientReaderWriter<ByteBuffer, ByteBuffer>> stream(
        grpc::internal::ClientReaderWriterFactory<ByteBuffer, ByteBuffer>::Create(channel_.get(),
                                                                                  rpc, &context));
    while (call != end && stream->Write(Message(*call++))) {
    }
    stream->WritesDone();
    for (ByteBuffer answer; stream->Read(&answer);) {
      CheckAnswer(*method, answer);
      if (method->name() == "Watch") context.TryCancel();  // Watch never ends by itself
    }
    const grpc::Status status = stream->Finish();
    CheckStatus(path, status);
    const bool asked = with_tokens_ && method->file()->package() == "tessera.v1";
    Require((status.error_code() == grpc::StatusCode::UNAUTHENTICATED) ==
                (asked && caller == std::size(kTokens) - 1),
            path + ": unknown callers must be refused, and known callers admitted");
  }

  // Checks that the error is one that a request can cause, which is an error of the request or a
  // limit.
  static void CheckStatus(const std::string& path, const grpc::Status& status) {
    switch (status.error_code()) {
      case grpc::StatusCode::INTERNAL:
      case grpc::StatusCode::UNKNOWN:
      case grpc::StatusCode::UNAVAILABLE:
      case grpc::StatusCode::DEADLINE_EXCEEDED:
        Require(false,
                path + ": " + std::to_string(status.error_code()) + " " + status.error_message());
      default:
        break;
    }
  }

  static void CheckAnswer(const google::protobuf::MethodDescriptor& method,
                          const ByteBuffer& bytes) {
    const std::unique_ptr<google::protobuf::Message> message(
        PrototypeOf(method.output_type()).New());
    Require(message->ParseFromString(TextOf(bytes)),
            "an answer that is no " + message->GetTypeName());
  }

  static std::string TextOf(const ByteBuffer& bytes) {
    std::vector<grpc::Slice> slices;
    Require(bytes.Dump(&slices).ok(), "an answer without bytes");
    std::string text;
    for (const grpc::Slice& slice : slices)
      text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    return text;
  }

  ByteBuffer Message(const FuzzCall& call) const {
    std::string bytes = call.request;
    for (std::size_t at = 0; (at = bytes.find(kRegion, at)) != bytes.npos;)
      bytes.replace(at, kRegion.size(), memory_->region());
    const grpc::Slice slice(bytes.data(), bytes.size());
    return ByteBuffer(&slice, 1);
  }

  void Identify(grpc::ClientContext& context, const char* token) const {
    if (with_tokens_) context.AddMetadata("authorization", std::string("Bearer ") + token);
  }

  void DeleteAll() {
    DeleteAllOf("fuzz-admin");
    if (with_tokens_) DeleteAllOf("fuzz-other");
    // Memory is released independently of the responses.
    for (int i = 0;; ++i) {
      grpc::ClientContext context;
      Identify(context, "fuzz-admin");
      v1::GetServerInfoResponse info;
      Require(compute_->GetServerInfo(&context, {}, &info).ok(), "no information");
      const v1::Device& device = info.devices(0);
      if (device.buffer_used_bytes() == 0) return;
      Require(i < 10'000, "memory is lost: " + device.ShortDebugString());
      absl::SleepFor(absl::Milliseconds(i < 100 ? 0 : 1));
    }
  }

  void DeleteAllOf(const char* token) {
    for (;;) {
      grpc::ClientContext context;
      Identify(context, token);
      v1::ListBuffersResponse list;
      Require(buffers_->ListBuffers(&context, {}, &list).ok(), "no list of buffers");
      if (list.buffers().empty()) return;
      for (const v1::Buffer& buffer : list.buffers()) {
        grpc::ClientContext of_delete;
        Identify(of_delete, token);
        v1::DeleteBufferRequest request;
        request.set_name(buffer.name());
        v1::DeleteBufferResponse response;
        const grpc::Status status = buffers_->DeleteBuffer(&of_delete, request, &response);
        // The buffer may have expired.
        Require(status.ok() || status.error_code() == grpc::StatusCode::NOT_FOUND,
                "a buffer that cannot be deleted: " + status.error_message());
      }
    }
  }

  const bool with_tokens_ = std::getenv("TESSERA_FUZZ_TOKENS") != nullptr;
  const TemporaryFile socket_;
  const TemporaryFile token_file_{kTokenFile};
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::BufferService::Stub> buffers_;
  std::unique_ptr<v1::ComputeService::Stub> compute_;
  std::optional<SharedMemory> memory_;
};

}  // namespace
}  // namespace tessera

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const google::protobuf::LogSilencer quiet;
  static tessera::Service service;
  service.Run(tessera::ParseCalls(tessera::Text(data, size)));
  return 0;
}
