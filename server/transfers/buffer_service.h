// The buffer service: creation, streamed uploads and downloads, and queries.
#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/calls/call_parts.h"
#include "server/calls/unary_exchange.h"
#include "server/devices/devices.h"
#include "server/durable/snapshots.h"
#include "server/rpc/live_calls.h"
#include "server/transfers/download_call.h"
#include "server/transfers/importer.h"
#include "server/transfers/upload_call.h"
#include "tessera/v1/buffer.grpc.pb.h"

namespace tessera {

// Upload and Download are left to the server's generic service, which passes messages as bytes.
// Data is therefore not copied, and an upload message that cannot be parsed is not mistaken for the
// end of the stream.
template <class Service>
using UnaryBufferMethods = v1::BufferService::WithRawMethod_CreateBuffer<
    v1::BufferService::WithRawMethod_GetBuffer<v1::BufferService::WithRawMethod_ListBuffers<
        v1::BufferService::WithRawMethod_SealBuffer<v1::BufferService::WithRawMethod_UpdateBuffer<
            v1::BufferService::WithRawMethod_CopyBuffer<
                v1::BufferService::WithRawMethod_ImportBuffer<
                    v1::BufferService::WithRawMethod_DeleteBuffer<
                        v1::BufferService::WithRawMethod_Snapshot<Service>>>>>>>>>;
using BufferServiceBase = v1::BufferService::WithGenericMethod_Upload<
    v1::BufferService::WithGenericMethod_Download<UnaryBufferMethods<v1::BufferService::Service>>>;

// Thread safe. The parts of the server must outlive the service, and the service must outlive its
// calls.
class BufferService final : public BufferServiceBase {
 public:
  // snapshots: null without --data-dir.
  BufferService(const CallParts& parts, const Devices& devices, Snapshots* snapshots,
                const Options& options)
      : parts_(parts),
        devices_(devices),
        snapshots_(snapshots),
        importer_(parts_, devices, options) {}

  // Serves the unary methods; called once the server has been built.
  void Serve(CallQueues& queues);
  // Begins to serve a call if its method is Upload or Download, and returns false otherwise.
  // `method` is in the form /package.Service/Method.
  bool ServeStream(std::string_view method, StreamExchange& exchange);

  // Ends uploads that have waited longer than --transfer-timeout for a message (DEADLINE_EXCEEDED /
  // UPLOAD_IDLE) or whose draft is gone, downloads whose client has read nothing for that long, and
  // stalled imports.
  void EndIdleStreams(absl::Time now);

 private:
  absl::Status CreateBuffer(const Caller& caller, const v1::CreateBufferRequest& request,
                            v1::CreateBufferResponse& response);
  absl::Status GetBuffer(const Caller& caller, const v1::GetBufferRequest& request,
                         v1::GetBufferResponse& response);
  absl::Status ListBuffers(const Caller& caller, const v1::ListBuffersRequest& request,
                           v1::ListBuffersResponse& response);
  absl::Status SealBuffer(const Caller& caller, const v1::SealBufferRequest& request,
                          v1::SealBufferResponse& response);
  absl::Status UpdateBuffer(const Caller& caller, const v1::UpdateBufferRequest& request,
                            v1::UpdateBufferResponse& response);
  absl::Status DeleteBuffer(const Caller& caller, const v1::DeleteBufferRequest& request,
                            v1::DeleteBufferResponse& response);
  void CopyBuffer(UnaryExchangeOf<v1::CopyBufferRequest, v1::CopyBufferResponse>& exchange);
  void Snapshot(UnaryExchangeOf<v1::SnapshotRequest, v1::SnapshotResponse>& exchange);

  const CallParts parts_;
  const Devices& devices_;
  Snapshots* const snapshots_;
  LiveCalls<UploadCall> uploads_;
  LiveCalls<DownloadCall> downloads_;
  Importer importer_;
};

}  // namespace tessera
