// A client for the service. Each RPC has one method, which takes C++ arguments and returns messages
// of proto/tessera/v1.
//
//   tessera::Client client({.server = "gpu-host:50051"});
//   client.Upload("x", tessera::DType::kF32, {1000}, tessera::FromMemory(bytes));
//   absl::StatusOr<tessera::v1::DotResponse> dot = client.Dot("x", "x");
//
// Errors are absl::Status with the server's reason and metadata (kernels/base/error.h: ErrorReason,
// ErrorMetadata). These errors have no reason: CANCELLED; DEADLINE_EXCEEDED when the deadline of a
// call has passed, whose message contains the deadline; UNIMPLEMENTED from a server without the
// call; and errors that gRPC itself or a proxy returns because the two ends do not understand each
// other. Calls with invalid options fail immediately with INVALID_ARGUMENT / BAD_ADDRESS {address}
// or BAD_CREDENTIALS {file}, and requests that are too large for any server with INVALID_ARGUMENT /
// BAD_MESSAGE {field, value, limit}.
//
// The client adds these reasons:
//  - UNREACHABLE {server, cause}: no connection within connect_timeout. This includes a
//    name that does not resolve, because it may resolve later. A call whose deadline is earlier
//    also ends with UNREACHABLE if an attempt to connect has failed, and otherwise with
//    DEADLINE_EXCEEDED.
//  - CERTIFICATE_REFUSED {server, cause}: reported immediately if there is only one server.
//  - CONNECTION_LOST: the connection broke during a call.
//  - SERVER_SILENT: no server responded within attempt_timeout.
//  - STALLED: a transfer made no progress for stall_timeout.
//  - BUFFER_CHANGED: the buffer was replaced between two parts of one download.
//  - BAD_RESPONSE: the server's response does not match the request.
//  - UNKNOWN_SERVICE {service}: CheckHealth was called with a name that the server does not know.
//
// The client itself returns VERSION_MISMATCH when the server's response is about a version other
// than the requested one, and DATA_LOSS / BAD_CHECKSUM when bytes were damaged in transit. A
// BUFFER_NOT_FOUND error of a call that reads buffers, or of an upload whose draft was lost, has
// metadata "server_start" if the server has restarted, and thereby lost its buffers, since this
// client first saw one of them.
//
// An error that a source or a sink returns ends the transfer, which returns this error unchanged.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/operations.h"
#include "client/shared_memory.h"
#include "kernels/base/dtype.h"
#include "kernels/base/reduce_op.h"
#include "tessera/v1/buffer.pb.h"
#include "tessera/v1/compute.pb.h"
#include "tessera/v1/shared_memory.pb.h"

namespace tessera {

class AsyncClient;
class ResidentBuffer;

// In an address, a name or a token, a byte order mark and whitespace at both ends are ignored.
struct ClientOptions {
  // host:port or unix:/path, or a comma-separated list of servers that hold the same buffers. Calls
  // go to the first server that responds, until it fails. Calls that are safe to repeat are then
  // sent to the next server.
  std::string server = "127.0.0.1:50051";
  // Paths of PEM files, or empty. If tls_ca is given, connections use TLS, and the server's
  // certificate must be signed by that CA. tls_cert and tls_key are the client's own certificate
  // and key.
  std::string tls_ca = {};
  std::string tls_cert = {};
  std::string tls_key = {};
  // The name for which the server's certificate must be valid. Empty means the host of `server`.
  std::string tls_server_name = {};
  // The token that identifies the caller to a server with --tokens, or the path of a file that
  // contains it. Both may be empty. The file is reread at most once a second. A token for a server
  // on another host requires TLS.
  std::string token = {};
  std::string token_file = {};
  // The deadline of a unary call, including the time to connect and retries.
  absl::Duration timeout = absl::Seconds(60);
  // How long a call tries to reach a server, which may still be starting.
  absl::Duration connect_timeout = absl::Seconds(10);
  // How long a transfer may go without progress. Its total time is not limited. A TCP connection
  // whose other end accepts no bytes for this long (at least 1 s) is closed. Over a Unix socket, or
  // if this is infinite, an upload to a process that hangs may never end, not even when it is
  // cancelled. After a transfer has stalled, the destructor of the process's last client may wait
  // up to 10 s for gRPC's threads.
  absl::Duration stall_timeout = absl::Seconds(60);
  // Whether a call that the server refuses for lack of memory or queue space (QUEUE_FULL,
  // HOST_MEMORY_EXHAUSTED, SCRATCH_EXHAUSTED with a RetryInfo) is repeated until its deadline, each
  // time after the delay that the server suggests. Transfers are repeated for at most
  // stall_timeout.
  bool retry_refused = true;
  // Whether Upload and Download of several MiB go through memory that is shared with the server.
  // The server must be on this host and offer shared memory (--shared-memory).
  bool shared_memory = true;
  // The maximum number of connections per server, over which calls are spread. A connection is
  // added when a call arrives while all connections are busy.
  int connections = 4;
  // With several servers, how long a call that is safe to repeat waits for a response before it is
  // sent to another server. The timeout is meant for servers that hang while their connections stay
  // open. It should be longer than any call takes.
  absl::Duration attempt_timeout = absl::InfiniteDuration();
  // Whether calls about a buffer carry the route of its name (kernels/client_and_server/ring.h) as
  // metadata "tessera-route". Proxies use this metadata to find the buffer's server
  // (deploy/README.md).
  bool send_route = false;
};

struct CallOptions {
  std::optional<absl::Duration> timeout = {};  // the client's timeout if absent
  // Ends a blocking call with CANCELLED once a stop is requested. Asynchronous calls ignore this
  // token and have AsyncCall::Cancel instead.
  std::stop_token cancel = {};
};

// Operations that are sent together and run in order (ExecuteRequest). Each method adds a step,
// takes the arguments of the Client method with the same name, and returns an operand for later
// steps:
//
//   tessera::Program program;
//   const auto scores = program.Matmul("queries", "items", false, true, {}, {.scratch = true});
//   program.Reduce(tessera::ReduceOp::kArgMax, scores, {1});
//   absl::StatusOr<tessera::v1::ExecuteResponse> answer = client.Execute(program);
class Program : public Operations<Program> {
 public:
  // Names a step so that ProgramResults can find its result (client/program_results.h). If a name
  // is used twice, it refers to the later step.
  ProgramStep Name(std::string name, ProgramStep step) {
    names_.insert_or_assign(std::move(name), step);
    return step;
  }
  const std::map<std::string, ProgramStep>& names() const { return names_; }
  // Requests the ExecutionStats of every step.
  void WantStats() { request_.set_stats(true); }

  const v1::ExecuteRequest& request() const { return request_; }
  v1::ExecuteRequest& request() { return request_; }
  // Whether a step creates a buffer. Such a program is not safe to repeat.
  bool has_target() const;

 private:
  friend class Operations<Program>;
  template <class Request>
  ProgramStep Send(Request request, const OperationOptions& options);

  v1::ExecuteRequest request_;
  std::map<std::string, ProgramStep> names_;
};

// The source of an upload's bytes: a function that fills `out` with the array's bytes [offset,
// offset + out.size()), row-major and little endian. An upload with several streams calls the
// function from several threads at the same time. Each stream requests its ranges in order, and may
// request some of them again after its connection has broken. offset and out.size() are multiples
// of the element size. If the function throws, the upload ends with INTERNAL / CALLER_EXCEPTION.
class Source {
 public:
  using Function = std::function<absl::Status(std::uint64_t offset, absl::Span<char> out)>;

  // `bytes` is the size of the source, if it is known. If the array has another size, the upload
  // fails with INVALID_ARGUMENT / BAD_RANGE {needed, given} before anything is sent. An upload from
  // a null function fails with INVALID_ARGUMENT / BAD_OPTION.
  template <class F>
  requires std::constructible_from<Function, F>
  // NOLINTNEXTLINE(google-explicit-constructor)
  Source(F function, std::optional<std::uint64_t> bytes = std::nullopt)
      : function_(std::move(function)), bytes_(bytes) {}

  // Returns OK if the source can fill an array of array_bytes bytes.
  absl::Status Check(std::uint64_t array_bytes) const;
  absl::Status operator()(std::uint64_t offset, absl::Span<char> out) const;

 private:
  Function function_;
  std::optional<std::uint64_t> bytes_;
};

// Returns a source for an array of exactly these bytes. They must stay valid until the upload has
// ended.
Source FromMemory(std::string_view bytes);

// Takes the next bytes of a download, in order. The first call comes before any data, with empty
// `bytes`, so that the sink can look at the buffer's type. For an empty buffer, it is the only
// call. If the sink throws, the download ends with INTERNAL / CALLER_EXCEPTION. If the sink is
// null, the download fails with INVALID_ARGUMENT / BAD_OPTION.
using Sink = std::function<absl::Status(const v1::Buffer& buffer, std::string_view bytes)>;

// Takes bytes of a download that begin at this offset of the buffer. It is called from several
// threads at the same time, but in order within each stream. The first call has no data, as for a
// Sink.
using RangeSink = std::function<absl::Status(const v1::Buffer& buffer, std::uint64_t offset,
                                             std::string_view bytes)>;

struct UploadOptions {
  // The server's default if absent. An infinite ttl is sent as 100 years, which a server with a
  // maximum ttl refuses.
  std::optional<absl::Duration> ttl = {};
  bool replace = false;
  std::string device = {};  // the server's first device if empty
  // The devices among which the array is divided, or the single entry "all". Used instead of
  // `device`.
  std::vector<std::string> placement = {};
  // Bytes of data per message: a positive multiple of 64, and at most 4 MiB.
  std::size_t chunk_bytes = std::size_t{1} << 20;
  // If 1, the array is sent over one stream; if the stream breaks, the server discards what it has
  // received. If 2 to 64, that many connections fill ranges of a draft; if a connection breaks, its
  // range is continued where it stopped. If the upload fails, only the draft is deleted, and
  // nothing else with that name.
  int streams = 1;
  // Sends the CRC-32C of every message and of the whole array, which the server checks. Damaged
  // data is sent again. Transfers through shared memory have no messages, and their buffers have no
  // checksum.
  bool checksums = true;
  // Receives the number of bytes sent so far. It is called from the sending threads, one at a time.
  // If it throws, the upload ends with INTERNAL / CALLER_EXCEPTION.
  std::function<void(std::uint64_t sent)> progress = {};
  // The timeout of the whole upload. If absent, only the time without progress is limited
  // (ClientOptions::stall_timeout).
  std::optional<absl::Duration> timeout = {};
  std::stop_token cancel = {};  // as in CallOptions
};

struct DownloadOptions {
  std::uint64_t offset = 0;  // the first byte
  std::uint64_t limit = 0;   // the maximum number of bytes; 0 means up to the end
  // The version that the buffer must have; 0 means any. If the buffer has another version, the
  // download fails with FAILED_PRECONDITION / VERSION_MISMATCH.
  std::uint64_t version = 0;
  // How many connections fetch ranges of a large buffer in parallel, at most 64. Applies to
  // downloads into memory or to a RangeSink; a download to a Sink uses one connection.
  int streams = 1;
  // Requests and checks the CRC-32C of every message. If the whole buffer is downloaded and the
  // server knows its CRC-32C, checks that as well. Damaged data is fetched again.
  bool checksums = true;
  // The timeout of the whole download. If absent, only the time without progress is limited
  // (ClientOptions::stall_timeout).
  std::optional<absl::Duration> timeout = {};
  std::stop_token cancel = {};  // as in CallOptions
};

struct HoldOptions {
  bool delete_with_handle = false;  // whether the buffer is deleted when its handle is destroyed
};

// The number of bytes in a client's messages so far, without HTTP/2 framing.
struct Traffic {
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
};

// Thread safe. Move-only. Connects at the first call, and again after a connection breaks. Calls
// that can safely run twice (all except those that create or delete buffers or store results) are
// repeated a few times when the server is UNAVAILABLE. Any call is repeated when the server refuses
// it because the server is DRAINING or lacks memory or queue space (ClientOptions::retry_refused).
//
// Where a method takes a version, 0 means any version. Any other value means the buffer or draft
// with that version.
class Client : public Operations<Client> {
 public:
  explicit Client(ClientOptions options = {});
  // Every call on a moved-from client fails with FAILED_PRECONDITION / MOVED_FROM. A client must
  // not be moved while a blocking call is under way, but asynchronous calls and handles continue.
  // Assignment first ends the calls of the client that is overwritten, as the destructor does.
  Client(Client&& other) noexcept;
  Client& operator=(Client&& other) noexcept;
  // Cancels the asynchronous calls under way and waits until their callbacks have returned. No
  // blocking call may be under way.
  ~Client();

  // Reserves memory for a buffer that is then filled range by range. Upload does not need this
  // call.
  absl::StatusOr<v1::Buffer> CreateBuffer(const std::string& name, const v1::BufferSpec& spec,
                                          const CallOptions& call = {});
  // Creates a buffer of any size from the source and waits until it is READY. Holds one chunk per
  // stream in memory. After an upload over one stream has failed in this process (an error of the
  // source, a cancellation), another upload without `replace` may fail with BUFFER_EXISTS until the
  // server has noticed the end of the stream.
  absl::StatusOr<v1::Buffer> Upload(const std::string& name, DType dtype,
                                    absl::Span<const std::int64_t> shape, const Source& source,
                                    const UploadOptions& options = {});
  // Streams the bytes of a buffer to the sink. After its connection breaks, a download resumes
  // where it stopped.
  absl::StatusOr<v1::Buffer> Download(const std::string& name, const Sink& sink,
                                      const DownloadOptions& options = {});
  // Downloads over several connections in parallel (DownloadOptions::streams). Each connection
  // fetches a range of the same version. Fails with ABORTED / BUFFER_CHANGED if the buffer is
  // replaced during the download, and with NOT_FOUND / BUFFER_NOT_FOUND if it is lost.
  absl::StatusOr<v1::Buffer> DownloadRanges(const std::string& name, const RangeSink& sink,
                                            const DownloadOptions& options = {});
  // Downloads into out, whose size must be exactly that of the requested range.
  absl::StatusOr<v1::Buffer> Download(const std::string& name, absl::Span<char> out,
                                      const DownloadOptions& options = {});
  // Downloads the version that the handle holds. Fails with VERSION_MISMATCH once that version has
  // been replaced.
  absl::StatusOr<v1::Buffer> Download(const ResidentBuffer& buffer, const Sink& sink,
                                      DownloadOptions options = {});
  absl::StatusOr<v1::Buffer> Download(const ResidentBuffer& buffer, absl::Span<char> out,
                                      DownloadOptions options = {});
  // Allocates memory that is shared with a server on this host. Transfers through it need no copy
  // in this process. Fails with UNIMPLEMENTED if the server shares no memory, with UNAVAILABLE /
  // SHARED_MEMORY_UNAVAILABLE if memory cannot be set up, and with the errors of
  // RegisterRegionResponse.
  absl::StatusOr<SharedMemory> MakeSharedMemory(std::size_t bytes);
  // Creates a buffer from the bytes of `memory` that begin at `offset`. They must not change during
  // the call. Uses only the options ttl, replace, device, placement and cancel.
  absl::StatusOr<v1::Buffer> UploadShared(const std::string& name, DType dtype,
                                          absl::Span<const std::int64_t> shape,
                                          const SharedMemory& memory, std::size_t offset = 0,
                                          const UploadOptions& options = {});
  // Copies the buffer's bytes starting at `begin` into [offset, offset + size) of the memory. Fewer
  // bytes are copied if the buffer ends earlier; the response says how many.
  absl::StatusOr<v1::DownloadSharedResponse> DownloadShared(const std::string& name,
                                                            const SharedMemory& memory,
                                                            std::size_t offset, std::size_t size,
                                                            std::uint64_t begin = 0,
                                                            std::uint64_t version = 0);
  absl::StatusOr<v1::GetBufferResponse> GetBuffer(const std::string& name,
                                                  std::uint64_t version = 0,
                                                  const CallOptions& call = {});
  // Returns all buffers whose names begin with the prefix. Requests as many pages as needed.
  absl::StatusOr<std::vector<v1::Buffer>> ListBuffers(const std::string& prefix = {},
                                                      const CallOptions& call = {});
  absl::StatusOr<v1::Buffer> SealBuffer(const std::string& name, std::uint64_t version = 0,
                                        const CallOptions& call = {});
  // Sets the ttl, which counts from now. If it is absent or infinite, the buffer never expires.
  absl::StatusOr<v1::Buffer> UpdateBuffer(const std::string& name,
                                          std::optional<absl::Duration> ttl,
                                          const CallOptions& call = {});
  // Creates a buffer from another buffer or a view of it, within the server. The view may be a
  // window or a transpose. The copy may have another dtype, device or placement. If dtype is
  // absent, the copy has the source's dtype. If device and placement are both empty, the copy is
  // placed like the source.
  absl::StatusOr<v1::Buffer> CopyBuffer(const Operand& source, const ResultBuffer& target,
                                        std::optional<DType> dtype = std::nullopt,
                                        const std::string& device = {},
                                        const CallOptions& call = {});
  // Gives a buffer's memory another name. Nothing is copied, because a buffer's content never
  // changes. With a ttl, the name serves as a ticket: other clients can fetch the array with it
  // even after the array's original name is gone. `version` is the version of the source.
  absl::StatusOr<v1::Buffer> LinkBuffer(const std::string& source, const ResultBuffer& target,
                                        std::uint64_t version = 0, const CallOptions& call = {});
  // Creates a buffer from a buffer on another server. The client's server fetches the array itself,
  // so `server` is the other server's host:port as seen from the client's server. If `device` is
  // empty, the server's first device is used. There is no timeout unless `call` has one.
  absl::StatusOr<v1::ImportBufferResponse> ImportBuffer(
      const std::string& server, const std::string& source, const ResultBuffer& target,
      std::uint64_t version = 0, const std::string& device = {}, const CallOptions& call = {});
  // If no version is given, deletes the buffer and all drafts with this name.
  absl::Status DeleteBuffer(const std::string& name, std::uint64_t version = 0,
                            const CallOptions& call = {});
  // Makes the server write READY buffers to its --data-dir: those of the caller's tenant, or, for
  // an admin, those of all tenants. There is no timeout unless `call` has one.
  absl::StatusOr<v1::SnapshotResponse> Snapshot(const CallOptions& call = {});

  // Returns a result for every step, in order. Returns OK even if steps have failed; StatusOf
  // returns the error of a step.
  absl::StatusOr<v1::ExecuteResponse> Execute(const Program& program, const CallOptions& call = {});
  // Dots and Reduces run any number of operations as programs of many steps. Each Reduce folds its
  // whole operand. Several programs run at the same time. Both methods return a response or an
  // error for each operation, in order. If the call for a program fails, every operation of that
  // program returns the call's error. The timeout applies to each call.
  std::vector<absl::StatusOr<v1::DotResponse>> Dots(
      absl::Span<const std::pair<Operand, Operand>> pairs, const CallOptions& call = {});
  std::vector<absl::StatusOr<v1::ReduceResponse>> Reduces(ReduceOp op,
                                                          absl::Span<const Operand> operands,
                                                          const CallOptions& call = {});
  // Returns the error of a step as a separate call would return it, or OK if the step has a result.
  static absl::Status StatusOf(const v1::StepResult& result);

  // An empty operation or backend means all of them.
  absl::StatusOr<std::vector<v1::Strategy>> ListStrategies(const std::string& operation = {},
                                                           const std::string& backend = {},
                                                           const CallOptions& call = {});
  absl::StatusOr<v1::GetServerInfoResponse> GetServerInfo(const CallOptions& call = {});
  // Whether the server reports SERVING through grpc.health.v1. For service "", SERVING means that
  // the server is alive; for "tessera.v1.ComputeService", that it accepts operations. Fails with
  // NOT_FOUND / UNKNOWN_SERVICE for any other service.
  absl::StatusOr<bool> CheckHealth(const std::string& service = {}, const CallOptions& call = {});

  // Returns the asynchronous versions of these calls (client/async.h).
  AsyncClient Async();
  // Returns a handle to this version of a buffer (client/resident_buffer.h). A handle keeps the
  // client's connections open until it is destroyed. After the client has been destroyed, its last
  // handle must not be destroyed in a callback of Async(), because closing the connections waits
  // for the thread that runs the callbacks.
  ResidentBuffer Hold(v1::Buffer buffer, const HoldOptions& options = {});

  Traffic traffic() const;

 private:
  friend class Operations<Client>;
  template <class Request>
  absl::StatusOr<ResponseTo<Request>> Send(const Request& request, const OperationOptions& options);

  class Impl;
  Impl& impl() const;  // after a move, all its calls fail with MOVED_FROM
  void End();

  std::shared_ptr<Impl> impl_;  // shared with the handles from Hold; null after a move
};

}  // namespace tessera
