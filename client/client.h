// A client of the service. Each RPC has one method, which takes C++ arguments and returns the
// messages of proto/tessera/v1.
//
//   tessera::Client client({.server = "gpu-host:50051"});
//   client.Upload("x", tessera::DType::kF32, {1000}, tessera::FromMemory(bytes));
//   absl::StatusOr<tessera::v1::DotResponse> dot = client.Dot("x", "x");
//
// Errors are absl::Status with the server's reason and metadata (kernels/base/error.h: ErrorReason,
// ErrorMetadata). Two errors have no reason: CANCELLED, and DEADLINE_EXCEEDED, whose text names the
// deadline. Calls with invalid options fail immediately with INVALID_ARGUMENT / BAD_ADDRESS
// {address} or BAD_CREDENTIALS {file}.
//
// The client adds these reasons:
//  - UNREACHABLE {server, cause}: no connection within connect_timeout. A name that does not
//    resolve may do so later.
//  - CERTIFICATE_REFUSED {server, cause}: reported immediately if there is only one server.
//  - CONNECTION_LOST: the connection broke during a call.
//  - SERVER_SILENT: no server responded within attempt_timeout.
//  - STALLED: a transfer made no progress for stall_timeout.
//  - BUFFER_CHANGED: the buffer was replaced between two parts of one download.
//
// The client itself returns VERSION_MISMATCH when the server's response is about a version other
// than the requested one, and DATA_LOSS / BAD_CHECKSUM when bytes were damaged on their way to the
// client. A BUFFER_NOT_FOUND error of a call that reads buffers has metadata "server_start" if the
// server has restarted, and so has lost its buffers, since this client first saw one of them.
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
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/expression.h"
#include "client/shared_memory.h"
#include "kernels/base/dtype.h"
#include "kernels/base/launch.h"
#include "kernels/base/reduce_op.h"
#include "tessera/v1/buffer.pb.h"
#include "tessera/v1/compute.pb.h"
#include "tessera/v1/shared_memory.pb.h"

namespace tessera {

class AsyncClient;
class ResidentBuffer;

struct ClientOptions {
  // host:port or unix:/path. May list several servers, separated by commas, that hold the same
  // buffers. Calls go to the first one that responds and stay with it until it fails. Those that
  // are safe to repeat are then sent to the next one.
  std::string server = "127.0.0.1:50051";
  // PEM files. If tls_ca is given, the connection uses TLS and the server's certificate must be
  // signed by that CA. The client presents tls_cert and tls_key. Empty: none.
  std::string tls_ca = {};
  std::string tls_cert = {};
  std::string tls_key = {};
  // The name that the server's certificate is for; empty: the host of `server`.
  std::string tls_server_name = {};
  // Identifies the caller to a server with --tokens: the token itself, or a file that holds it. The
  // file is read again at most once a second. Empty: none. A token for a server on another host
  // requires TLS.
  std::string token = {};
  std::string token_file = {};
  // Deadline of a unary call, retries included.
  absl::Duration timeout = absl::Seconds(60);
  // How long a call waits for a server that cannot be reached, which may still be starting.
  absl::Duration connect_timeout = absl::Seconds(10);
  // How long a transfer may make no progress; its total time is not limited. A TCP connection whose
  // other end accepts no bytes for this long (at least 1 s) is closed. Over a Unix socket, an
  // upload to a process that hangs may never end. After a transfer has stalled, the destructor of
  // the process's last client may wait up to 10 s for gRPC's threads.
  absl::Duration stall_timeout = absl::Seconds(60);
  // Whether a call that the server refuses for lack of memory or queue space (QUEUE_FULL,
  // HOST_MEMORY_EXHAUSTED, SCRATCH_EXHAUSTED with a RetryInfo) is repeated until its deadline,
  // after the delay that the server suggests. Transfers are repeated for stall_timeout.
  bool retry_refused = true;
  // Whether Upload and Download of several MiB go through memory that is shared with the server.
  // The server must be on this host and offer that (--shared-memory).
  bool shared_memory = true;
  // The maximum number of connections to a server over which calls are spread. More are opened when
  // calls arrive while others are under way.
  int connections = 4;
  // With several servers: how long a call that is safe to repeat waits for one server's response
  // before it goes to another. It is meant for servers that hang but keep their connections, and
  // should be longer than any call takes.
  absl::Duration attempt_timeout = absl::InfiniteDuration();
  // Whether calls about a buffer carry the route of its name (kernels/client_and_server/ring.h) as
  // metadata "tessera-route". Proxies use it to find the buffer's server (deploy/README.md).
  bool send_route = false;
};

struct CallOptions {
  std::optional<absl::Duration> timeout = {};  // absent: the client's timeout
  // Ends a blocking call with CANCELLED once a stop is requested. Asynchronous calls ignore it and
  // have AsyncCall::Cancel instead.
  std::stop_token cancel = {};
};

// The result of a step of a Program, by the step's number. TopK has two: the values are output 0
// and the indices are output 1.
struct ProgramStep {
  std::uint32_t number = 0;
  std::uint32_t output = 0;

  // Returns the positions of TopK's values.
  ProgramStep indices() const { return {number, 1}; }
};

// The input of an operation: a resident buffer by name, a small inline array or, in a program, the
// result of an earlier step. It is read whole or through a view.
struct Operand {
  Operand(std::string buffer) : source(std::move(buffer)) {}  // NOLINT(google-explicit-constructor)
  Operand(const char* buffer) : source(buffer) {}             // NOLINT(google-explicit-constructor)
  Operand(v1::Tensor tensor) : source(std::move(tensor)) {}   // NOLINT(google-explicit-constructor)
  Operand(ProgramStep step) : source(step) {}                 // NOLINT(google-explicit-constructor)

  std::variant<std::string, v1::Tensor, ProgramStep> source;
  std::optional<v1::View> view;
  std::uint64_t version = 0;  // the version that the buffer must have; 0: any
};

// A new resident buffer for an array result.
struct ResultBuffer {
  std::string name = {};
  std::optional<absl::Duration> ttl = {};  // absent: the server's default
  bool replace = false;
  // The devices among which the array is divided, or only "all". Empty: one device, or for a copy
  // the devices of the source.
  std::vector<std::string> placement = {};
};

struct OperationOptions {
  std::string strategy = {};  // empty: the fastest correct one
  Launch launch = {};
  bool timing = false;  // whether the response has kernel_us
  // Keeps an array result on the device. Absent: the response carries it, up to
  // Limits.max_inline_result_bytes.
  std::optional<ResultBuffer> target = {};
  // For a step of a program without a target: keeps an array result on the device for later steps,
  // without a name.
  bool scratch = false;
  // For TopK, target and scratch apply to the values, and these two apply to the indices.
  std::optional<ResultBuffer> indices_target = {};
  bool indices_scratch = false;
  // For Reduce: the expression that is folded, of x as operand 0 and of `with` from operand 1 on.
  // For Matmul: the expression that is applied to the product, which is operand 0.
  // Expr::ToMessage() makes this message.
  std::optional<v1::Expression> expression = {};
  std::vector<Operand> with = {};
  // Used as in CallOptions, but not in a program.
  std::optional<absl::Duration> timeout = {};
  std::stop_token cancel = {};
};

// Operations that are sent together and run in order (ExecuteRequest). Each method adds a step. It
// has the arguments of Client's method of the same name and returns an operand for later steps:
//
//   tessera::Program program;
//   const auto scores = program.Matmul("queries", "items", false, true, {}, {.scratch = true});
//   program.Reduce(tessera::ReduceOp::kArgMax, scores, {1});
//   absl::StatusOr<tessera::v1::ExecuteResponse> answer = client.Execute(program);
class Program {
 public:
  ProgramStep Dot(const Operand& a, const Operand& b, const OperationOptions& options = {});
  ProgramStep Reduce(ReduceOp op, const Operand& x, absl::Span<const int> axes = {},
                     bool keep_dims = false, const OperationOptions& options = {});
  ProgramStep Matmul(const Operand& a, const Operand& b, bool transpose_a = false,
                     bool transpose_b = false, std::optional<DType> out_dtype = std::nullopt,
                     const OperationOptions& options = {});
  ProgramStep Add(const Operand& a, const Operand& b, const OperationOptions& options = {});
  ProgramStep WindowSum(const Operand& x, std::int64_t radius,
                        const OperationOptions& options = {});
  ProgramStep TopK(const Operand& x, std::int64_t k, bool smallest = false,
                   std::optional<int> axis = std::nullopt, const OperationOptions& options = {});
  ProgramStep Map(absl::Span<const Operand> operands, const v1::Expression& expression,
                  const OperationOptions& options = {});
  ProgramStep Map(const std::vector<Operand>& operands, const Expr& expression,
                  const OperationOptions& options = {}) {
    return Map(operands, expression.ToMessage(), options);
  }
  // Names a step so that ProgramResults can find its result (client/program_results.h). A name that
  // is given twice refers to the later step.
  ProgramStep Name(std::string name, ProgramStep step) {
    names_.insert_or_assign(std::move(name), step);
    return step;
  }
  const std::map<std::string, ProgramStep>& names() const { return names_; }
  // Requests the ExecutionStats of every step.
  void WantStats() { request_.set_stats(true); }

  const v1::ExecuteRequest& request() const { return request_; }
  v1::ExecuteRequest& request() { return request_; }
  // Whether a step makes a buffer, which makes the program unsafe to repeat.
  bool has_target() const;

 private:
  v1::Step& Next() { return *request_.add_steps(); }
  ProgramStep Last() const { return {static_cast<std::uint32_t>(request_.steps_size() - 1)}; }
  v1::ExecuteRequest request_;
  std::map<std::string, ProgramStep> names_;
};

// The source of an upload's bytes: a function that fills `out` with the array's bytes [offset,
// offset + out.size()), row-major and little endian. An upload with several streams calls it from
// several threads at the same time. Each stream requests its ranges in order, and some of them
// again after a broken connection. offset and out.size() are multiples of the element size. If the
// function throws, the upload ends with INTERNAL / CALLER_EXCEPTION.
class Source {
 public:
  using Function = std::function<absl::Status(std::uint64_t offset, absl::Span<char> out)>;

  // bytes: the size of the source, if it is known. If the array has another size, the upload fails
  // with INVALID_ARGUMENT / BAD_RANGE {needed, given} before anything is sent. An upload from a
  // null function fails with INVALID_ARGUMENT / BAD_OPTION.
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

// Returns a source of exactly the array's bytes, which the caller must keep until the upload has
// ended.
Source FromMemory(std::string_view bytes);

// Takes the next bytes of a download, in order. The first call comes before any data and has empty
// bytes, so that a sink can look at the buffer's type. For an empty buffer it is the only call. If
// the sink throws, the download ends with INTERNAL / CALLER_EXCEPTION. A null sink fails with
// INVALID_ARGUMENT / BAD_OPTION.
using Sink = std::function<absl::Status(const v1::Buffer& buffer, std::string_view bytes)>;

// Takes bytes of a download that begin at this offset of the buffer. It is called from several
// threads at the same time, in order within a stream. The first call has no data, as for a Sink.
using RangeSink = std::function<absl::Status(const v1::Buffer& buffer, std::uint64_t offset,
                                             std::string_view bytes)>;

struct UploadOptions {
  std::optional<absl::Duration> ttl = {};  // absent: the server's default
  bool replace = false;
  std::string device = {};  // empty: the server's first
  // Replaces `device`: the devices among which the array is divided, or only "all".
  std::vector<std::string> placement = {};
  // Bytes of data per message: a multiple of 64, at most 4 MiB minus room for the rest of the
  // message.
  std::size_t chunk_bytes = std::size_t{1} << 20;
  // 1: one stream; if it breaks, the server discards what it received. 2 to 64: that many
  // connections fill ranges of a draft, and a broken one resumes where it stopped. If the upload
  // fails, only the draft is deleted, and nothing else with that name.
  int streams = 1;
  // Sends the CRC-32C of every message and of the whole array, which the server checks. Damaged
  // data is sent again. Transfers through shared memory have no messages, and their buffers have no
  // checksum.
  bool checksums = true;
  // Receives the number of bytes sent so far. It is called from the sending threads, one at a time.
  // If it throws, the upload ends with INTERNAL / CALLER_EXCEPTION.
  std::function<void(std::uint64_t sent)> progress = {};
  // Timeout of the whole upload. Absent: none while the upload makes progress
  // (ClientOptions::stall_timeout).
  std::optional<absl::Duration> timeout = {};
  std::stop_token cancel = {};  // as in CallOptions
};

struct DownloadOptions {
  std::uint64_t offset = 0;  // first byte
  std::uint64_t limit = 0;   // the most bytes to download; 0: to the end
  // The version that the buffer must have; 0: any. Otherwise the download fails with
  // FAILED_PRECONDITION / VERSION_MISMATCH.
  std::uint64_t version = 0;
  // How many connections fetch ranges of a large buffer in parallel, at most 64. Applies to
  // downloads into memory or to a RangeSink; a download to a Sink uses one.
  int streams = 1;
  // Requests and checks the CRC-32C of every message. Also checks that of the whole buffer if the
  // server knows it and the whole buffer is downloaded. Damaged data is fetched again.
  bool checksums = true;
  // Timeout of the whole download. Absent: none while the download makes progress
  // (ClientOptions::stall_timeout).
  std::optional<absl::Duration> timeout = {};
  std::stop_token cancel = {};  // as in CallOptions
};

struct HoldOptions {
  bool delete_with_handle = false;  // whether the buffer is deleted when its handle ends
};

// Bytes of a client's messages so far, without the framing of HTTP/2.
struct Traffic {
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
};

// Thread safe. Move-only. Connects at the first call, and again after a connection breaks. Calls
// that may run twice without harm (all but creating, deleting and storing results) are repeated a
// few times when the server is UNAVAILABLE. Any call is repeated when the server refused it because
// it is DRAINING or has no room (ClientOptions::retry_refused).
//
// Where a method takes a version, 0 means any version. Any other value means the buffer or draft
// with that version.
class Client {
 public:
  explicit Client(ClientOptions options = {});
  // Every call of a moved-from client fails with FAILED_PRECONDITION / MOVED_FROM. A move must not
  // happen while a blocking call is under way, but asynchronous calls and handles continue.
  // Assignment first ends the previous state, as the destructor does.
  Client(Client&& other) noexcept;
  Client& operator=(Client&& other) noexcept;
  // Cancels the asynchronous calls under way and waits until their callbacks have returned. No
  // blocking call may be under way.
  ~Client();

  // Reserves memory for a buffer that is filled by ranges. Upload needs no such call.
  absl::StatusOr<v1::Buffer> CreateBuffer(const std::string& name, const v1::BufferSpec& spec,
                                          const CallOptions& call = {});
  // Creates a buffer of any size from the source and waits until it is READY. Holds one chunk per
  // stream in memory.
  absl::StatusOr<v1::Buffer> Upload(const std::string& name, DType dtype,
                                    absl::Span<const std::int64_t> shape, const Source& source,
                                    const UploadOptions& options = {});
  // Streams the bytes of a buffer to the sink. After its connection breaks, a download resumes
  // where it stopped.
  absl::StatusOr<v1::Buffer> Download(const std::string& name, const Sink& sink,
                                      const DownloadOptions& options = {});
  // Downloads over several connections in parallel (DownloadOptions::streams). Each connection
  // fetches a range of the same version. Fails with ABORTED / BUFFER_CHANGED if the buffer is
  // replaced during the download.
  absl::StatusOr<v1::Buffer> DownloadRanges(const std::string& name, const RangeSink& sink,
                                            const DownloadOptions& options = {});
  // Downloads into out, whose size must be exactly that of the requested range.
  absl::StatusOr<v1::Buffer> Download(const std::string& name, absl::Span<char> out,
                                      const DownloadOptions& options = {});
  // Downloads the version that the handle holds. Fails with VERSION_MISMATCH once it has been
  // replaced.
  absl::StatusOr<v1::Buffer> Download(const ResidentBuffer& buffer, const Sink& sink,
                                      DownloadOptions options = {});
  absl::StatusOr<v1::Buffer> Download(const ResidentBuffer& buffer, absl::Span<char> out,
                                      DownloadOptions options = {});
  // Makes memory for transfers without a copy in this process, shared with a server on this host.
  // Fails with UNIMPLEMENTED if the server shares no memory, with UNAVAILABLE /
  // SHARED_MEMORY_UNAVAILABLE, and with the errors of RegisterRegionResponse.
  absl::StatusOr<SharedMemory> MakeSharedMemory(std::size_t bytes);
  // Creates a buffer from the memory's bytes that begin at `offset`, which must not change during
  // the call. Uses only the options ttl, replace, device, placement and cancel.
  absl::StatusOr<v1::Buffer> UploadShared(const std::string& name, DType dtype,
                                          absl::Span<const std::int64_t> shape,
                                          const SharedMemory& memory, std::size_t offset = 0,
                                          const UploadOptions& options = {});
  // Copies the buffer's bytes from `begin` on into [offset, offset + size) of the memory. Fewer are
  // copied if the buffer ends earlier; the response has the number.
  absl::StatusOr<v1::DownloadSharedResponse> DownloadShared(const std::string& name,
                                                            const SharedMemory& memory,
                                                            std::size_t offset, std::size_t size,
                                                            std::uint64_t begin = 0,
                                                            std::uint64_t version = 0);
  absl::StatusOr<v1::GetBufferResponse> GetBuffer(const std::string& name,
                                                  std::uint64_t version = 0,
                                                  const CallOptions& call = {});
  // Returns the buffers of all pages.
  absl::StatusOr<std::vector<v1::Buffer>> ListBuffers(const std::string& prefix = {},
                                                      const CallOptions& call = {});
  absl::StatusOr<v1::Buffer> SealBuffer(const std::string& name, std::uint64_t version = 0,
                                        const CallOptions& call = {});
  // Restarts the ttl now. Absent: the buffer never expires.
  absl::StatusOr<v1::Buffer> UpdateBuffer(const std::string& name,
                                          std::optional<absl::Duration> ttl,
                                          const CallOptions& call = {});
  // Makes a new buffer from a view of one, on the device: a window, a transpose, another dtype
  // (absent: the source's), or another device or placement (both empty: the source's). source: a
  // buffer, with or without a view.
  absl::StatusOr<v1::Buffer> CopyBuffer(const Operand& source, const ResultBuffer& target,
                                        std::optional<DType> dtype = std::nullopt,
                                        const std::string& device = {},
                                        const CallOptions& call = {});
  // Makes another name for the memory of a buffer, whose content never changes; nothing is copied.
  // With a ttl, the name is a ticket: others can fetch the array with it even after the array's own
  // name is gone. version: the source's.
  absl::StatusOr<v1::Buffer> LinkBuffer(const std::string& source, const ResultBuffer& target,
                                        std::uint64_t version = 0, const CallOptions& call = {});
  // Makes a new buffer from one on another server. The client's server fetches it itself, so
  // `server` is the host:port at which it reaches the other one. device: empty for the server's
  // first. There is no timeout unless one is given.
  absl::StatusOr<v1::ImportBufferResponse> ImportBuffer(
      const std::string& server, const std::string& source, const ResultBuffer& target,
      std::uint64_t version = 0, const std::string& device = {}, const CallOptions& call = {});
  // Deletes the buffer and all drafts of the name if no version is given.
  absl::Status DeleteBuffer(const std::string& name, std::uint64_t version = 0,
                            const CallOptions& call = {});

  absl::StatusOr<v1::DotResponse> Dot(const Operand& a, const Operand& b,
                                      const OperationOptions& options = {});
  // Folds the whole operand to a scalar if there are no axes.
  absl::StatusOr<v1::ReduceResponse> Reduce(ReduceOp op, const Operand& x,
                                            absl::Span<const int> axes = {}, bool keep_dims = false,
                                            const OperationOptions& options = {});
  absl::StatusOr<v1::MatmulResponse> Matmul(const Operand& a, const Operand& b,
                                            bool transpose_a = false, bool transpose_b = false,
                                            std::optional<DType> out_dtype = std::nullopt,
                                            const OperationOptions& options = {});
  absl::StatusOr<v1::AddResponse> Add(const Operand& a, const Operand& b,
                                      const OperationOptions& options = {});
  absl::StatusOr<v1::WindowSumResponse> WindowSum(const Operand& x, std::int64_t radius,
                                                  const OperationOptions& options = {});
  // Returns the k largest elements along an axis (absent: the last), in descending order, and their
  // positions. With `smallest`, returns the k smallest in ascending order.
  absl::StatusOr<v1::TopKResponse> TopK(const Operand& x, std::int64_t k, bool smallest = false,
                                        std::optional<int> axis = std::nullopt,
                                        const OperationOptions& options = {});
  // Computes the expression for each element of the operands, which are broadcast.
  absl::StatusOr<v1::MapResponse> Map(absl::Span<const Operand> operands,
                                      const v1::Expression& expression,
                                      const OperationOptions& options = {});
  absl::StatusOr<v1::MapResponse> Map(const std::vector<Operand>& operands, const Expr& expression,
                                      const OperationOptions& options = {}) {
    return Map(operands, expression.ToMessage(), options);
  }

  // Returns a result for every step, in order. Also returns OK if steps have failed, which StatusOf
  // reports.
  absl::StatusOr<v1::ExecuteResponse> Execute(const Program& program, const CallOptions& call = {});
  // Run any number of Dots, or of whole Reduces, as programs of many steps, several of which are
  // under way at the same time. Each operation has a response or an error, in order. The error of a
  // failed call is the error of all its steps. The timeout applies to each call.
  std::vector<absl::StatusOr<v1::DotResponse>> Dots(
      absl::Span<const std::pair<Operand, Operand>> pairs, const CallOptions& call = {});
  std::vector<absl::StatusOr<v1::ReduceResponse>> Reduces(ReduceOp op,
                                                          absl::Span<const Operand> operands,
                                                          const CallOptions& call = {});
  // Returns the error of a step as a separate call would have it, or OK for a result.
  static absl::Status StatusOf(const v1::StepResult& result);

  // An empty operation or backend means all of them.
  absl::StatusOr<std::vector<v1::Strategy>> ListStrategies(const std::string& operation = {},
                                                           const std::string& backend = {},
                                                           const CallOptions& call = {});
  absl::StatusOr<v1::GetServerInfoResponse> GetServerInfo(const CallOptions& call = {});
  // Whether the server reports SERVING through grpc.health.v1. For "", this means that it is alive;
  // for "tessera.v1.ComputeService", that it accepts operations.
  absl::StatusOr<bool> CheckHealth(const std::string& service = {}, const CallOptions& call = {});

  // Returns the same calls without waiting for their responses: client/async.h.
  AsyncClient Async();
  // Holds a buffer by its version: client/resident_buffer.h. A handle keeps the client's
  // connections open until it ends. The last handle of a client that has ended must not end in a
  // callback of Async(), because closing the connections waits for the thread of that callback.
  ResidentBuffer Hold(v1::Buffer buffer, const HoldOptions& options = {});

  Traffic traffic() const;

 private:
  class Impl;
  Impl& impl() const;  // after a move, all its calls fail with MOVED_FROM
  void End();

  std::shared_ptr<Impl> impl_;  // shared with what Hold has returned; null after a move
};

}  // namespace tessera
