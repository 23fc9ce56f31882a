#include "client/bench/transfers.h"

#include <algorithm>
#include <cstddef>

#include "client/bench/thread_call.h"

namespace tessera::bench {
namespace {

constexpr std::size_t kMessageBytes = std::size_t{1} << 20;

grpc::Status Upload(v1::BufferService::Stub& stub, const std::string& name,
                    const std::vector<std::int64_t>& shape) {
  grpc::ClientContext context;
  v1::UploadResponse response;
  const auto stream = stub.Upload(&context, &response);
  v1::UploadRequest request;
  request.set_name(name);
  request.mutable_spec()->set_dtype(v1::DTYPE_F32);
  request.mutable_spec()->set_replace(true);
  std::size_t bytes = sizeof(float);
  for (const std::int64_t extent : shape) {
    request.mutable_spec()->add_shape(extent);
    bytes *= static_cast<std::size_t>(extent);
  }
  for (std::size_t at = 0; at < bytes; at += kMessageBytes) {
    request.mutable_data()->resize(std::min(bytes - at, kMessageBytes));
    if (!stream->Write(request)) break;
  }
  stream->WritesDone();
  return stream->Finish();
}

grpc::Status Download(v1::BufferService::Stub& stub, const std::string& name, std::uint64_t bytes) {
  grpc::ClientContext context;
  v1::DownloadRequest request;
  request.set_name(name);
  request.set_limit(bytes);
  const auto stream = stub.Download(&context, request);
  v1::DownloadResponse response;
  std::uint64_t received = 0;
  while (stream->Read(&response)) received += response.data().size();
  grpc::Status status = stream->Finish();
  if (status.ok() && received != bytes)
    return {grpc::StatusCode::DATA_LOSS, "a download of " + std::to_string(received) + " bytes"};
  return status;
}

}  // namespace

void Put(v1::BufferService::Stub& stub, const std::string& name,
         const std::vector<std::int64_t>& shape) {
  const grpc::Status status = Upload(stub, name, shape);
  if (!status.ok()) Die("upload of " + name, status);
}

void PutForDownload(Channels& channels, std::int64_t mib) {
  Put(channels.buffers(0), BufferName("down", mib), {ElementsOf(mib)});
}

std::unique_ptr<Call> MakeUpload(Channels& channels, int caller, std::int64_t mib) {
  return std::make_unique<ThreadCall>([&stub = channels.buffers(caller),
                                       name = BufferName("up", caller),
                                       mib] { return Upload(stub, name, {ElementsOf(mib)}); });
}

std::unique_ptr<Call> MakeDownload(Channels& channels, int caller, std::int64_t mib) {
  return std::make_unique<ThreadCall>(
      [&stub = channels.buffers(caller), name = BufferName("down", mib), mib] {
        return Download(stub, name, static_cast<std::uint64_t>(mib) << 20);
      });
}

}  // namespace tessera::bench
