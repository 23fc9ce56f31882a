#include "server/status/reflection.h"

#include <atomic>
#include <cstdint>
#include <mutex>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/descriptor.pb.h"
#include "grpc/grpc.h"
#include "grpc/reflection/v1/reflection.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "server/clock.h"

namespace tessera {
namespace {

using google::protobuf::DescriptorPool;
using google::protobuf::FileDescriptor;

constexpr std::size_t kMostStreams = 128;
constexpr std::size_t kLargestRequest = 64 << 10;
constexpr absl::Duration kLongestRest = absl::Minutes(1);

template <class Response>
void SetError(grpc::StatusCode code, const std::string& message, Response& response) {
  response.mutable_error_response()->set_error_code(code);
  response.mutable_error_response()->set_error_message(message);
}

// Adds the file and all files that it imports, each once.
template <class Files>
void AddFile(const FileDescriptor& file, std::set<const FileDescriptor*>& added, Files& files) {
  if (!added.insert(&file).second) return;
  google::protobuf::FileDescriptorProto proto;
  file.CopyTo(&proto);
  files.add_file_descriptor_proto(proto.SerializeAsString());
  for (int i = 0; i < file.dependency_count(); ++i) AddFile(*file.dependency(i), added, files);
}

template <class Response>
void SetFile(const FileDescriptor* file, const char* what, Response& response) {
  if (file == nullptr) return SetError(grpc::StatusCode::NOT_FOUND, what, response);
  std::set<const FileDescriptor*> added;
  AddFile(*file, added, *response.mutable_file_descriptor_response());
}

template <class Request, class Response>
void Answer(const Request& request, const std::vector<std::string>& services, Response& response) {
  const DescriptorPool& pool = *DescriptorPool::generated_pool();
  response.set_valid_host(request.host());
  *response.mutable_original_request() = request;
  switch (request.message_request_case()) {
    case Request::kFileByFilename:
      return SetFile(pool.FindFileByName(request.file_by_filename()), "there is no such file",
                     response);
    case Request::kFileContainingSymbol:
      return SetFile(pool.FindFileContainingSymbol(request.file_containing_symbol()),
                     "there is no such symbol", response);
    case Request::kFileContainingExtension: {
      const auto& asked = request.file_containing_extension();
      const auto* type = pool.FindMessageTypeByName(asked.containing_type());
      const auto* extension =
          type == nullptr ? nullptr : pool.FindExtensionByNumber(type, asked.extension_number());
      return SetFile(extension == nullptr ? nullptr : extension->file(),
                     "there is no such extension", response);
    }
    case Request::kAllExtensionNumbersOfType: {
      const std::string& name = request.all_extension_numbers_of_type();
      const auto* type = pool.FindMessageTypeByName(name);
      if (type == nullptr) {
        return SetError(grpc::StatusCode::NOT_FOUND, "there is no such type", response);
      }
      std::vector<const google::protobuf::FieldDescriptor*> extensions;
      pool.FindAllExtensions(type, &extensions);
      auto& numbers = *response.mutable_all_extension_numbers_response();
      numbers.set_base_type_name(name);
      for (const auto* extension : extensions) numbers.add_extension_number(extension->number());
      return;
    }
    case Request::kListServices:
      for (const std::string& name : services) {
        response.mutable_list_services_response()->add_service()->set_name(name);
      }
      return;
    case Request::MESSAGE_REQUEST_NOT_SET:
      break;
  }
  SetError(grpc::StatusCode::INVALID_ARGUMENT, "the request is empty", response);
}

// The data needed to end a stream that is idle.
struct Stream {
  grpc_call* call;
  std::atomic<std::int64_t> last_use_ns;
};

// The open streams. Thread safe.
class Streams {
 public:
  // Adds a stream. Returns false if there are too many.
  bool Add(Stream& stream) {
    const std::lock_guard lock(mutex_);
    return streams_.size() < kMostStreams && streams_.insert(&stream).second;
  }
  void Remove(Stream& stream) {
    const std::lock_guard lock(mutex_);
    streams_.erase(&stream);
  }
  void EndIdle(absl::Time now) {
    std::vector<grpc_call*> idle;
    {
      const std::lock_guard lock(mutex_);
      for (Stream* stream : streams_) {
        if (now - absl::FromUnixNanos(stream->last_use_ns) <= kLongestRest) continue;
        grpc_call_ref(stream->call);
        idle.push_back(stream->call);
      }
    }
    // The mutex is not held here, because a cancelled call may end in this thread and remove its
    // stream.
    for (grpc_call* call : idle) {
      grpc_call_cancel_with_status(call, GRPC_STATUS_DEADLINE_EXCEEDED,
                                   "the stream was idle for too long", nullptr);
      grpc_call_unref(call);
    }
  }

 private:
  std::mutex mutex_;
  std::set<Stream*> streams_;
};

// Reads a request, writes the response, and reads the next request. It holds no message in between.
template <class Request, class Response>
class ReflectionCall final : public StreamCall {
 public:
  ReflectionCall(StreamExchange& exchange, const std::vector<std::string>& services,
                 Streams& streams)
      : StreamCall(exchange),
        services_(services),
        streams_(streams),
        stream_{context().c_call(), absl::ToUnixNanos(SteadyNow())} {
    exchange.Serve(*this);
    if (streams_.Add(stream_)) {
      StartRead(&message_);
    } else {
      Finish({grpc::StatusCode::RESOURCE_EXHAUSTED, "too many reflection streams are open"});
    }
  }

  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    stream_.last_use_ns = absl::ToUnixNanos(SteadyNow());
    if (message_.Length() > kLargestRequest)
      return Finish(Invalid("a reflection request may have at most 65536 bytes"));
    Request request;
    if (!grpc::SerializationTraits<Request>::Deserialize(&message_, &request).ok())
      return Finish(Invalid("the message is not a valid reflection request"));
    Response response;
    Answer(request, services_, response);
    bool owned = false;
    grpc::SerializationTraits<Response>::Serialize(response, &message_, &owned);
    StartWrite(&message_);
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::CANCELLED);
    message_.Clear();
    StartRead(&message_);
  }
  void OnDone() override {
    streams_.Remove(stream_);
    delete this;
  }

 private:
  static grpc::Status Invalid(const char* message) {
    return {grpc::StatusCode::INVALID_ARGUMENT, message};
  }

  const std::vector<std::string>& services_;
  Streams& streams_;
  Stream stream_;
  grpc::ByteBuffer message_;
};

namespace reflection_v1 = grpc::reflection::v1;
namespace v1alpha = grpc::reflection::v1alpha;

std::string MethodOf(const char* service) {
  return absl::StrCat("/", service, "/ServerReflectionInfo");
}

}  // namespace

class Reflection::Impl {
 public:
  explicit Impl(std::vector<std::string> names) : names_(std::move(names)) {
    names_.emplace_back(reflection_v1::ServerReflection::service_full_name());
    names_.emplace_back(v1alpha::ServerReflection::service_full_name());
  }

  std::vector<std::string> names_;
  Streams streams_;
};

Reflection::Reflection(std::vector<std::string> services)
    : impl_(std::make_unique<Impl>(std::move(services))) {}

Reflection::~Reflection() = default;

bool Reflection::Serve(std::string_view method, StreamExchange& exchange) {
  const bool is_v1 = method == MethodOf(reflection_v1::ServerReflection::service_full_name());
  const bool is_v1alpha = method == MethodOf(v1alpha::ServerReflection::service_full_name());
  if (is_v1) {
    new ReflectionCall<reflection_v1::ServerReflectionRequest,
                       reflection_v1::ServerReflectionResponse>(exchange, impl_->names_,
                                                                impl_->streams_);
  } else if (is_v1alpha) {
    new ReflectionCall<v1alpha::ServerReflectionRequest, v1alpha::ServerReflectionResponse>(
        exchange, impl_->names_, impl_->streams_);
  }
  return is_v1 || is_v1alpha;
}

void Reflection::EndIdleStreams(absl::Time now) { impl_->streams_.EndIdle(now); }

}  // namespace tessera
