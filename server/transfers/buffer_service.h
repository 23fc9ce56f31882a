// The buffer service: creation, streamed uploads and downloads, and queries.
#pragma once

#include <string_view>

#include "absl/time/time.h"
#include "server/calls/call_parts.h"
#include "server/calls/unary_exchange.h"
#include "server/devices/devices.h"
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
                    v1::BufferService::WithRawMethod_DeleteBuffer<Service>>>>>>>>;
using BufferServiceBase = v1::BufferService::WithGenericMethod_Upload<
    v1::BufferService::WithGenericMethod_Download<UnaryBufferMethods<v1::BufferService::Service>>>;

// Thread safe. The parts of the server must outlive the service, and the service must outlive its
// calls.
class BufferService final : public BufferServiceBase {
 public:
  BufferService(const CallParts& parts, const Devices& devices, const Options& options)
      : parts_(parts), devices_(devices), importer_(parts_, devices, options) {}

  // Serves the unary methods; called once the server has been built.
  void Serve(CallQueues& queues);
  // Begins to serve a call if its method is Upload or Download, and returns false otherwise.
  // method: in the form /package.Service/Method.
  bool ServeStream(std::string_view method, StreamExchange& exchange);

  // Ends uploads that have waited longer than --transfer-timeout for a message (DEADLINE_EXCEEDED /
  // UPLOAD_IDLE) or whose draft is gone, downloads whose client has read nothing for that long, and
  // stalled imports.
  void EndIdleStreams(absl::Time now);

 private:
  void CreateBuffer(UnaryExchangeOf<v1::CreateBufferRequest, v1::CreateBufferResponse>& exchange);
  void GetBuffer(UnaryExchangeOf<v1::GetBufferRequest, v1::GetBufferResponse>& exchange);
  void ListBuffers(UnaryExchangeOf<v1::ListBuffersRequest, v1::ListBuffersResponse>& exchange);
  void SealBuffer(UnaryExchangeOf<v1::SealBufferRequest, v1::SealBufferResponse>& exchange);
  void UpdateBuffer(UnaryExchangeOf<v1::UpdateBufferRequest, v1::UpdateBufferResponse>& exchange);
  void CopyBuffer(UnaryExchangeOf<v1::CopyBufferRequest, v1::CopyBufferResponse>& exchange);
  void LinkBuffer(UnaryExchangeOf<v1::CopyBufferRequest, v1::CopyBufferResponse>& exchange);
  void ImportBuffer(UnaryExchangeOf<v1::ImportBufferRequest, v1::ImportBufferResponse>& exchange);
  void DeleteBuffer(UnaryExchangeOf<v1::DeleteBufferRequest, v1::DeleteBufferResponse>& exchange);

  const CallParts parts_;
  const Devices& devices_;
  LiveCalls<UploadCall> uploads_;
  LiveCalls<DownloadCall> downloads_;
  Importer importer_;
};

}  // namespace tessera
