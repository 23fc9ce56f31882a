#include "client/client.h"

#include <algorithm>
#include <string>
#include <utility>

#include "client/async.h"
#include "client/npy.h"
#include "client/resident_buffer.h"
#include "client/rpc/connection.h"
#include "client/rpc/event_loop.h"
#include "client/rpc/requests.h"
#include "client/transfers/parallel.h"
#include "client/transfers/shared_transfers.h"

namespace tessera {
namespace {

// Returns `size` bytes of the memory from `offset` on, or an error if it ends earlier. The memory
// consists of whole pages and may be larger than needed.
absl::StatusOr<v1::RegionRange> RangeOf(const SharedMemory& memory, std::size_t offset,
                                        std::uint64_t size) {
  const std::size_t bytes = memory.bytes().size();
  const std::uint64_t rest = bytes - std::min(offset, bytes);
  if (absl::Status status = CheckSize(size, rest, /*exact=*/false); !status.ok()) return status;
  v1::RegionRange range;
  range.set_region(memory.region());
  range.set_offset(offset);
  range.set_size(size);
  return range;
}

}  // namespace

Client::Client(ClientOptions options)
    : connection_(std::make_shared<ClientConnection>(std::move(options))) {}

Client& Client::operator=(Client&& other) noexcept {
  Client old(std::move(other));  // ends the calls of the client that was overwritten
  std::swap(connection_, old.connection_);
  return *this;
}

Client::~Client() {
  if (connection_ != nullptr) connection_->events().CancelAll();
}

ClientConnection& Client::connection() const {
  if (connection_ != nullptr) return *connection_;
  static ClientConnection& none = *new ClientConnection({}, MovedFrom());
  return none;
}

template <class Request, class Options>
absl::StatusOr<AnswerTo<Request>> Client::Send(const Prepared<Request>& request,
                                               const Options& options) {
  if (!request.refused.ok()) return request.refused;
  auto response = connection().Call(request.message, CallOptionsOf(options));
  if (!response.ok()) return response.status();
  return AnswerOf(*std::move(response));
}
#define TESSERA_SEND(Name, field)                                    \
  template absl::StatusOr<AnswerTo<v1::Name##Request>> Client::Send( \
      const Prepared<v1::Name##Request>& request, const CallOptions& options);
TESSERA_CALL_METHODS(TESSERA_SEND)
#undef TESSERA_SEND
#define TESSERA_SEND(Name, field)                                    \
  template absl::StatusOr<AnswerTo<v1::Name##Request>> Client::Send( \
      const Prepared<v1::Name##Request>& request, const OperationOptions& options);
TESSERA_OPERATION_METHODS(TESSERA_SEND)
#undef TESSERA_SEND

AsyncClient Client::Async() { return AsyncClient(&connection()); }

ResidentBuffer Client::Hold(v1::Buffer buffer, const HoldOptions& options) {
  return {connection_, std::move(buffer), options};
}

Traffic Client::traffic() const { return connection().traffic(); }

absl::StatusOr<SharedMemory> Client::MakeSharedMemory(std::size_t bytes) {
  return connection().shared().MakeMemory(bytes, TransferLimit(connection(), {}));
}

absl::StatusOr<v1::Buffer> Client::UploadShared(const std::string& name, DType dtype,
                                                absl::Span<const std::int64_t> shape,
                                                const SharedMemory& memory, std::size_t offset,
                                                const UploadOptions& options) {
  const absl::StatusOr<std::uint64_t> size = ArrayBytes(dtype, shape);
  if (!size.ok()) return size.status();
  const absl::StatusOr<v1::RegionRange> range = RangeOf(memory, offset, *size);
  if (!range.ok()) return range.status();
  v1::UploadSharedRequest request;
  request.set_name(name);
  *request.mutable_spec() = SpecOf(dtype, shape, options);
  *request.mutable_source() = *range;
  const CallOptions call = {.cancel = options.cancel, .metadata = options.metadata};
  return TakeBuffer(TransferLimit(connection(), call).Call(request));
}

absl::StatusOr<v1::DownloadSharedResponse> Client::DownloadShared(
    const std::string& name, const SharedMemory& memory, std::size_t offset, std::size_t size,
    std::uint64_t begin, std::uint64_t version) {
  const absl::StatusOr<v1::RegionRange> range = RangeOf(memory, offset, size);
  if (!range.ok()) return range.status();
  auto request = BufferRequest<v1::DownloadSharedRequest>(name, version);
  request.set_offset(begin);
  *request.mutable_target() = *range;
  return TransferLimit(connection(), {}).Call(request);
}

absl::StatusOr<std::vector<v1::Buffer>> Client::ListBuffers(const std::string& prefix,
                                                            const CallOptions& call) {
  std::vector<v1::Buffer> buffers;
  v1::ListBuffersRequest request;
  request.set_page_size(1000);
  request.set_prefix(prefix);
  do {
    auto page = connection().Call(request, call);
    if (!page.ok()) return page.status();
    for (v1::Buffer& buffer : *page->mutable_buffers()) buffers.push_back(std::move(buffer));
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  return buffers;
}

absl::Status Client::DeleteBuffer(const std::string& name, std::uint64_t version,
                                  const CallOptions& call) {
  return connection().Delete(name, version, call);
}

absl::Status Client::StatusOf(const v1::StepResult& result) {
  if (!result.has_error()) return absl::OkStatus();
  const v1::StepError& error = result.error();
  return ErrorOf(static_cast<absl::StatusCode>(error.code()), error.message(), error);
}

absl::StatusOr<bool> Client::CheckHealth(const std::string& service, const CallOptions& call) {
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  const auto response = connection().Call(request, call);
  if (!response.ok()) return response.status();
  return response->status() == grpc::health::v1::HealthCheckResponse::SERVING;
}

}  // namespace tessera
