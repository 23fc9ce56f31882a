// Buffers on the wire: creation, upload and download as streams, and what may be asked about them.
#pragma once

#include "absl/time/time.h"
#include "server/core.h"
#include "server/download_call.h"
#include "server/live_calls.h"
#include "server/upload_call.h"
#include "tessera/v1/buffer.grpc.pb.h"

namespace tessera {

// All methods in callback form. Upload and Download take and give their messages as bytes: data
// stays where it is, and a message of an upload that cannot be parsed differs from the end of the
// stream.
using BufferServiceBase = v1::BufferService::WithRawCallbackMethod_Upload<
    v1::BufferService::WithRawCallbackMethod_Download<v1::BufferService::CallbackService>>;

// Thread safe; the core outlives it, and it the calls.
class BufferService final : public BufferServiceBase {
 public:
  explicit BufferService(Core& core) : core_(core) {}

  grpc::ServerUnaryReactor* CreateBuffer(grpc::CallbackServerContext* context,
                                         const v1::CreateBufferRequest* request,
                                         v1::CreateBufferResponse* response) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* Upload(grpc::CallbackServerContext* context,
                                                    grpc::ByteBuffer* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Download(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* GetBuffer(grpc::CallbackServerContext* context,
                                      const v1::GetBufferRequest* request,
                                      v1::GetBufferResponse* response) override;
  grpc::ServerUnaryReactor* ListBuffers(grpc::CallbackServerContext* context,
                                        const v1::ListBuffersRequest* request,
                                        v1::ListBuffersResponse* response) override;
  grpc::ServerUnaryReactor* SealBuffer(grpc::CallbackServerContext* context,
                                       const v1::SealBufferRequest* request,
                                       v1::SealBufferResponse* response) override;
  grpc::ServerUnaryReactor* UpdateBuffer(grpc::CallbackServerContext* context,
                                         const v1::UpdateBufferRequest* request,
                                         v1::UpdateBufferResponse* response) override;
  grpc::ServerUnaryReactor* CopyBuffer(grpc::CallbackServerContext* context,
                                       const v1::CopyBufferRequest* request,
                                       v1::CopyBufferResponse* response) override;
  grpc::ServerUnaryReactor* DeleteBuffer(grpc::CallbackServerContext* context,
                                         const v1::DeleteBufferRequest* request,
                                         v1::DeleteBufferResponse* response) override;

  // Ends uploads that have waited longer than --upload-timeout for a message (DEADLINE_EXCEEDED /
  // UPLOAD_IDLE) or whose draft is gone, and downloads whose reader has taken nothing for longer
  // than --download-timeout.
  void EndIdleStreams(absl::Time now);

 private:
  Core& core_;
  LiveCalls<UploadCall> uploads_;
  LiveCalls<DownloadCall> downloads_;
};

}  // namespace tessera
