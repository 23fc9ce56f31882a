// The unary methods of the protocol. For each request type, this file defines the service, the
// response type, and whether the request may be sent again if the client does not know whether the
// server has executed it. Internal to the library.
//
// When a request is sent again (decided by Attempts in client/rpc/connection.h, after AIP-194):
//   UNAVAILABLE (a broken connection, a server that stops)        only if it is safe to repeat
//   UNAVAILABLE / DRAINING, DATA_LOSS / BAD_CHECKSUM               always: the server did nothing
//   RESOURCE_EXHAUSTED with a RetryInfo                            always: the server did nothing
//   anything else, including DEADLINE_EXCEEDED                     never

#pragma once

#include <grpcpp/grpcpp.h>

#include <type_traits>

#include "client/rpc/requests.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "tessera/v1/buffer.grpc.pb.h"
#include "tessera/v1/compute.grpc.pb.h"
#include "tessera/v1/shared_memory.grpc.pb.h"

namespace tessera {

enum class Repeatable {
  kAlways,        // the call only reads, or would set the same value again
  kNever,         // the call creates a buffer
  kUnlessSpec,    // the call creates a buffer if the request has a spec
  kUnlessStored,  // the call creates a buffer if its result, or a step's result, has a target
  kWithVersion,   // safe only with a version, and if all attempts go to the same server
};

template <class Request>
struct Method;

#define TESSERA_METHOD_OF(NAMESPACE, SERVICE, CALL, MESSAGE, REPEATABLE)          \
  template <>                                                                     \
  struct Method<NAMESPACE::MESSAGE##Request> {                                    \
    using Service = NAMESPACE::SERVICE;                                           \
    using Response = NAMESPACE::MESSAGE##Response;                                \
    static constexpr auto kCall = &Service::StubInterface::CALL;                  \
    static constexpr auto kPrepare = &Service::StubInterface::PrepareAsync##CALL; \
    static constexpr Repeatable kRepeatable = Repeatable::REPEATABLE;             \
  };
#define TESSERA_METHOD(NAMESPACE, SERVICE, NAME, REPEATABLE) \
  TESSERA_METHOD_OF(NAMESPACE, SERVICE, NAME, NAME, REPEATABLE)

TESSERA_METHOD(v1, BufferService, CreateBuffer, kNever)
TESSERA_METHOD(v1, BufferService, GetBuffer, kAlways)
TESSERA_METHOD(v1, BufferService, ListBuffers, kAlways)
TESSERA_METHOD(v1, BufferService, SealBuffer, kWithVersion)
TESSERA_METHOD(v1, BufferService, UpdateBuffer, kAlways)
TESSERA_METHOD(v1, BufferService, CopyBuffer, kNever)
TESSERA_METHOD(v1, BufferService, ImportBuffer, kNever)
TESSERA_METHOD(v1, BufferService, DeleteBuffer, kWithVersion)
TESSERA_METHOD(v1, BufferService, Snapshot, kAlways)
#define TESSERA_OPERATION(Name, field) TESSERA_METHOD(v1, ComputeService, Name, kUnlessStored)
TESSERA_OPERATION_METHODS(TESSERA_OPERATION)
#undef TESSERA_OPERATION
TESSERA_METHOD(v1, ComputeService, Execute, kUnlessStored)
TESSERA_METHOD(v1, ComputeService, ListStrategies, kAlways)
TESSERA_METHOD(v1, ComputeService, GetServerInfo, kAlways)
TESSERA_METHOD(v1, SharedMemoryService, GetSharedMemory, kAlways)
TESSERA_METHOD(v1, SharedMemoryService, UploadShared, kUnlessSpec)
TESSERA_METHOD(v1, SharedMemoryService, DownloadShared, kAlways)
TESSERA_METHOD_OF(grpc::health::v1, Health, Check, HealthCheck, kAlways)
#undef TESSERA_METHOD
#undef TESSERA_METHOD_OF

template <class Request>
using ResponseOf = typename Method<Request>::Response;

// Whether the call reads named buffers, which may have been lost in a restart of the server.
template <class Request>
inline constexpr bool kReadsBuffers =
    std::is_same_v<typename Method<Request>::Service, v1::ComputeService> ||
    std::is_same_v<Request, v1::CopyBufferRequest> ||
    std::is_same_v<Request, v1::DownloadSharedRequest>;

template <class Request>
bool IsSafeToRepeat(const Request& request) {
  constexpr Repeatable kRepeatable = Method<Request>::kRepeatable;
  if constexpr (kRepeatable == Repeatable::kUnlessStored) {
    return !Stores(request);
  } else if constexpr (kRepeatable == Repeatable::kUnlessSpec) {
    return !request.has_spec();
  } else if constexpr (kRepeatable == Repeatable::kWithVersion) {
    return request.version() != 0;
  } else {
    return kRepeatable == Repeatable::kAlways;
  }
}

}  // namespace tessera
