// A client of the service: one method an RPC, arguments in C++ terms, answers as the messages of
// proto/tessera/v1.
//
//   tessera::Client client({.server = "gpu-host:50051"});
//   client.Upload("x", tessera::DType::kF32, {1000}, tessera::FromMemory(bytes));
//   absl::StatusOr<tessera::v1::DotResponse> dot = client.Dot("x", "x");
//
// Errors are absl::Status with the server's reason and figures (kernels/base/error.h: ErrorReason,
// ErrorMetadata). Two have no reason: CANCELLED, and DEADLINE_EXCEEDED, whose text names the
// deadline. Calls with invalid options fail at once with INVALID_ARGUMENT / BAD_ADDRESS {address}
// or BAD_CREDENTIALS {file}. The client adds these reasons: UNREACHABLE {server, cause} (no
// connection within connect_timeout; a name that does not resolve may do so later),
// CERTIFICATE_REFUSED {server, cause} (at once, if it is the only server), CONNECTION_LOST (it
// broke during a call), SERVER_SILENT (no answer of any server within attempt_timeout), STALLED (a
// transfer without progress for stall_timeout) and BUFFER_CHANGED (replaced between two parts of
// one download). It answers with the server's VERSION_MISMATCH when the server speaks of another
// version than it was asked about, and with DATA_LOSS / BAD_CHECKSUM when bytes have changed on
// their way to it. A BUFFER_NOT_FOUND of a call that reads buffers has metadata "server_start" when
// the server has been started again, and so has lost its buffers, since this client first saw one
// of them.
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
  // host:port or unix:/path; several, separated by commas, that hold the same buffers: calls go to
  // the first one that answers and stay there until it fails, then those that are safe to repeat to
  // the next.
  std::string server = "127.0.0.1:50051";
  // Files in PEM. With tls_ca, whose certificate the server has to have, the connection is TLS;
  // tls_cert and tls_key are what the client shows. Empty: without.
  std::string tls_ca = {};
  std::string tls_cert = {};
  std::string tls_key = {};
  // The name that the server's certificate is for; empty: the host of `server`.
  std::string tls_server_name = {};
  // Says to a server with --tokens who calls: the token, or a file that holds it, which is read
  // again after a second. Empty: none. A token needs TLS where it leaves this host.
  std::string token = {};
  std::string token_file = {};
  // Deadline of a unary call, retries included.
  absl::Duration timeout = absl::Seconds(60);
  // How long a call waits for a server that cannot be reached: one that starts a moment later is
  // fine.
  absl::Duration connect_timeout = absl::Seconds(10);
  // A transfer may take as long as it needs, but not stand still for so long. TCP connections whose
  // other end takes no bytes for so long, and for a second, are closed; by a unix socket an upload
  // to a process that hangs may not end. After a transfer that has stood still the destructor of
  // the process's last client may take up to 10 s, for gRPC's threads.
  absl::Duration stall_timeout = absl::Seconds(60);
  // Whether a call that the server refuses for lack of memory or queue space (QUEUE_FULL,
  // HOST_MEMORY_EXHAUSTED, SCRATCH_EXHAUSTED with a RetryInfo) is repeated until its deadline,
  // after the delay that the server suggests. Transfers are repeated for stall_timeout.
  bool retry_refused = true;
  // Whether Upload and Download of some MiB go through memory that is shared with the server, where
  // it is on this host and offers that (--shared-memory).
  bool shared_memory = true;
  // The most connections to a server that calls are spread over; further ones are opened as calls
  // come while others are under way.
  int connections = 4;
  // With several servers: how long a call that is safe to repeat waits for the answer of one before
  // it goes to another, for servers that hang and keep their connections. To be longer than any
  // call takes.
  absl::Duration attempt_timeout = absl::InfiniteDuration();
  // Whether calls about a buffer carry the route of its name (kernels/client_and_server/ring.h) as
  // metadata "tessera-route", by which proxies find the buffer's server (deploy/README.md).
  bool send_route = false;
};

struct CallOptions {
  std::optional<absl::Duration> timeout = {};  // absent: that of the client
  // Ends a blocking call with CANCELLED once a stop is requested. Asynchronous calls ignore it: use
  // AsyncCall::Cancel.
  std::stop_token cancel = {};
};

// The result of a step of a Program, by the step's number. TopK has two: the values are output 0,
// the indices output 1.
struct ProgramStep {
  std::uint32_t number = 0;
  std::uint32_t output = 0;

  // Of TopK: where its values stand.
  ProgramStep indices() const { return {number, 1}; }
};

// What an operation works on: a resident buffer by name, a small inline array or, in a program, the
// result of an earlier step, whole or through a view.
struct Operand {
  Operand(std::string buffer) : source(std::move(buffer)) {}  // NOLINT(google-explicit-constructor)
  Operand(const char* buffer) : source(buffer) {}             // NOLINT(google-explicit-constructor)
  Operand(v1::Tensor tensor) : source(std::move(tensor)) {}   // NOLINT(google-explicit-constructor)
  Operand(ProgramStep step) : source(step) {}                 // NOLINT(google-explicit-constructor)

  std::variant<std::string, v1::Tensor, ProgramStep> source;
  std::optional<v1::View> view;
  std::uint64_t version = 0;  // that the buffer must have; 0: any
};

// A new resident buffer for an array result.
struct ResultBuffer {
  std::string name = {};
  std::optional<absl::Duration> ttl = {};  // absent: the server's default
  bool replace = false;
  // Devices among which it is divided, or "all" alone; empty: one device, or of a copy as the
  // source.
  std::vector<std::string> placement = {};
};

struct OperationOptions {
  std::string strategy = {};  // empty: the fastest correct one
  Launch launch = {};
  bool timing = false;  // whether the answer has kernel_us
  // Keeps an array result on the device; absent: the answer carries it, up to
  // Limits.max_inline_result_bytes.
  std::optional<ResultBuffer> target = {};
  // Of a step of a program without a target: keeps an array result on the device, without a name,
  // for later steps.
  bool scratch = false;
  // The same two for the indices of TopK; those above are for its values.
  std::optional<ResultBuffer> indices_target = {};
  bool indices_scratch = false;
  // Of Reduce: what is folded, of x as operand 0 and of `with` from 1 on. Of Matmul: what becomes
  // of the product, which is operand 0. Expr::ToMessage() of Expr.
  std::optional<v1::Expression> expression = {};
  std::vector<Operand> with = {};
  // As in CallOptions; unused in a program.
  std::optional<absl::Duration> timeout = {};
  std::stop_token cancel = {};
};

// Operations that travel together and run in order (ExecuteRequest). Each method adds a step, with
// the arguments of Client's method of that name, and returns it as an operand for later ones:
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
  // Gives a step a name, by which ProgramResults finds its answer (client/program_results.h); a
  // name given twice means the later step.
  ProgramStep Name(std::string name, ProgramStep step) {
    names_.insert_or_assign(std::move(name), step);
    return step;
  }
  const std::map<std::string, ProgramStep>& names() const { return names_; }
  // Asks for the ExecutionStats of every step.
  void WantStats() { request_.set_stats(true); }

  const v1::ExecuteRequest& request() const { return request_; }
  v1::ExecuteRequest& request() { return request_; }
  // Whether a step makes a buffer, so that running it twice is not running it once.
  bool has_target() const;

 private:
  v1::Step& Next() { return *request_.add_steps(); }
  ProgramStep Last() const { return {static_cast<std::uint32_t>(request_.steps_size() - 1)}; }
  v1::ExecuteRequest request_;
  std::map<std::string, ProgramStep> names_;
};

// The source of an upload's bytes: a function that fills `out` with the array's bytes
// [offset, offset + out.size()), row-major and little endian. It is called from several threads at
// once when an upload has several streams; every range is asked for in order within a stream, and
// again after a broken connection. offset and out.size() are multiples of the size of an element.
// If the function throws, the upload ends with INTERNAL / CALLER_EXCEPTION.
class Source {
 public:
  using Function = std::function<absl::Status(std::uint64_t offset, absl::Span<char> out)>;

  // bytes: the size of the source, if it is known. The upload of an array of another size fails
  // with INVALID_ARGUMENT / BAD_RANGE {needed, given} before anything is sent, and an upload from a
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

// A source of exactly the bytes of the array, which the caller keeps until the upload has ended.
Source FromMemory(std::string_view bytes);

// Takes the next bytes of a download, in order. The first call comes before any data with empty
// bytes, so that a sink can look at the buffer's type; it is the only call for an empty buffer.
// If it throws, the download ends with INTERNAL / CALLER_EXCEPTION; a null sink fails with
// INVALID_ARGUMENT / BAD_OPTION.
using Sink = std::function<absl::Status(const v1::Buffer& buffer, std::string_view bytes)>;

// Takes bytes of a download that begin at this offset of the buffer. It is called from several
// threads at once, in order within a stream. As with a Sink, the first call has no data.
using RangeSink = std::function<absl::Status(const v1::Buffer& buffer, std::uint64_t offset,
                                             std::string_view bytes)>;

struct UploadOptions {
  std::optional<absl::Duration> ttl = {};  // absent: the server's default
  bool replace = false;
  std::string device = {};  // empty: the server's first
  // Instead of device: those among which the array is divided, or "all" alone.
  std::vector<std::string> placement = {};
  // Of one message; a multiple of 64, at most 4 MiB less some room for the rest of the message.
  std::size_t chunk_bytes = std::size_t{1} << 20;
  // 1: one stream, which the server undoes when it breaks. More, up to 64: that many connections
  // fill ranges of a draft, and a broken one resumes where it stood; on failure the draft is
  // deleted, and nothing else of that name.
  int streams = 1;
  // CRC-32C of every message and of the whole array, which the server checks. What arrives damaged
  // is sent again. Through shared memory there are no messages, and the buffer has no checksum.
  bool checksums = true;
  // Called with the bytes sent so far, from the sending threads, one at a time. If it throws,
  // the upload ends with INTERNAL / CALLER_EXCEPTION.
  std::function<void(std::uint64_t sent)> progress = {};
  // Of the whole upload; absent: as long as it makes progress (ClientOptions::stall_timeout).
  std::optional<absl::Duration> timeout = {};
  std::stop_token cancel = {};  // as in CallOptions
};

struct DownloadOptions {
  std::uint64_t offset = 0;  // first byte
  std::uint64_t limit = 0;   // at most so many bytes; 0: to the end
  // The version that the buffer must have, or the download fails with FAILED_PRECONDITION /
  // VERSION_MISMATCH; 0: any.
  std::uint64_t version = 0;
  // How many connections fetch ranges of a large buffer at once, at most 64. Applies to downloads
  // into memory or to a RangeSink; a download to a Sink uses one.
  int streams = 1;
  // Asks for the CRC-32C of every message and checks it, and that of the whole buffer when the
  // server knows it and the download is one of the whole. What arrives damaged is fetched again.
  bool checksums = true;
  // Of the whole download; absent: as long as it makes progress (ClientOptions::stall_timeout).
  std::optional<absl::Duration> timeout = {};
  std::stop_token cancel = {};  // as in CallOptions
};

struct HoldOptions {
  bool delete_with_handle = false;  // whether the buffer is deleted when its handle ends
};

// What the messages of a client have measured so far, without the framing of HTTP/2.
struct Traffic {
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
};

// Thread safe. Move-only. Connects at the first call and again after the connection broke. Calls
// that may run twice without harm (all but creating, deleting and storing results) are repeated a
// few times when the server is UNAVAILABLE, and any call when the server refused it because it is
// DRAINING or has no room (ClientOptions::retry_refused).
//
// Where a method takes a version, 0 means any, and another one is that of the buffer or draft that
// is meant.
class Client {
 public:
  explicit Client(ClientOptions options = {});
  // Every call of a client that has been moved from fails with FAILED_PRECONDITION / MOVED_FROM. A
  // move must not happen while a blocking call is under way; asynchronous calls and handles
  // continue. Assignment first ends the previous state, as the destructor does.
  Client(Client&& other) noexcept;
  Client& operator=(Client&& other) noexcept;
  // Cancels the asynchronous calls under way and waits until their callbacks have returned; no
  // blocking call may be under way.
  ~Client();

  // Reserves memory for a buffer that is filled by ranges; Upload does it by itself.
  absl::StatusOr<v1::Buffer> CreateBuffer(const std::string& name, const v1::BufferSpec& spec,
                                          const CallOptions& call = {});
  // Creates a buffer of any size from the source and waits until it is READY. Holds a chunk a
  // stream in memory.
  absl::StatusOr<v1::Buffer> Upload(const std::string& name, DType dtype,
                                    absl::Span<const std::int64_t> shape, const Source& source,
                                    const UploadOptions& options = {});
  // Streams the bytes of a buffer to the sink. A broken connection resumes where it stood.
  absl::StatusOr<v1::Buffer> Download(const std::string& name, const Sink& sink,
                                      const DownloadOptions& options = {});
  // Downloads over several connections at once (DownloadOptions::streams), each of which fetches a
  // range of the same version. Fails with ABORTED / BUFFER_CHANGED if the buffer is replaced
  // meanwhile.
  absl::StatusOr<v1::Buffer> DownloadRanges(const std::string& name, const RangeSink& sink,
                                            const DownloadOptions& options = {});
  // Into out, which has exactly the size of the bytes asked for.
  absl::StatusOr<v1::Buffer> Download(const std::string& name, absl::Span<char> out,
                                      const DownloadOptions& options = {});
  // Downloads the version that the handle holds. Fails with VERSION_MISMATCH once it has been
  // replaced.
  absl::StatusOr<v1::Buffer> Download(const ResidentBuffer& buffer, const Sink& sink,
                                      DownloadOptions options = {});
  absl::StatusOr<v1::Buffer> Download(const ResidentBuffer& buffer, absl::Span<char> out,
                                      DownloadOptions options = {});
  // Memory for transfers without a copy in this process, of a server on this host. UNIMPLEMENTED:
  // it shares none; UNAVAILABLE / SHARED_MEMORY_UNAVAILABLE, and the errors of
  // RegisterRegionResponse.
  absl::StatusOr<SharedMemory> MakeSharedMemory(std::size_t bytes);
  // Creates a buffer from the memory's bytes from offset on, which are left alone meanwhile. Of the
  // options ttl, replace and device.
  absl::StatusOr<v1::Buffer> UploadShared(const std::string& name, DType dtype,
                                          absl::Span<const std::int64_t> shape,
                                          const SharedMemory& memory, std::size_t offset = 0,
                                          const UploadOptions& options = {});
  // Copies a buffer from byte `begin` on into [offset, offset + size) of the memory, as far as
  // there are bytes: the answer's size.
  absl::StatusOr<v1::DownloadSharedResponse> DownloadShared(const std::string& name,
                                                            const SharedMemory& memory,
                                                            std::size_t offset, std::size_t size,
                                                            std::uint64_t begin = 0,
                                                            std::uint64_t version = 0);
  absl::StatusOr<v1::GetBufferResponse> GetBuffer(const std::string& name,
                                                  std::uint64_t version = 0,
                                                  const CallOptions& call = {});
  // All pages.
  absl::StatusOr<std::vector<v1::Buffer>> ListBuffers(const std::string& prefix = {},
                                                      const CallOptions& call = {});
  absl::StatusOr<v1::Buffer> SealBuffer(const std::string& name, std::uint64_t version = 0,
                                        const CallOptions& call = {});
  // Renews the ttl from now; absent: the buffer never expires.
  absl::StatusOr<v1::Buffer> UpdateBuffer(const std::string& name,
                                          std::optional<absl::Duration> ttl,
                                          const CallOptions& call = {});
  // A new buffer from a view of one, on the device: a window, a transpose, another dtype (absent:
  // the source's), another device or placement (empty, both: as the source). source: a buffer, with
  // or without a view.
  absl::StatusOr<v1::Buffer> CopyBuffer(const Operand& source, const ResultBuffer& target,
                                        std::optional<DType> dtype = std::nullopt,
                                        const std::string& device = {},
                                        const CallOptions& call = {});
  // Another name for the memory of a buffer, which never changes: nothing is copied. With a ttl: a
  // ticket, by which others can fetch the array when its own name may be gone. version: of the
  // source.
  absl::StatusOr<v1::Buffer> LinkBuffer(const std::string& source, const ResultBuffer& target,
                                        std::uint64_t version = 0, const CallOptions& call = {});
  // A new buffer from one of another server, host:port as this client's server reaches it, which
  // fetches it by itself. device: empty: the server's first. Has no timeout unless one is given.
  absl::StatusOr<v1::ImportBufferResponse> ImportBuffer(
      const std::string& server, const std::string& source, const ResultBuffer& target,
      std::uint64_t version = 0, const std::string& device = {}, const CallOptions& call = {});
  // Without a version: the buffer and all drafts of the name.
  absl::Status DeleteBuffer(const std::string& name, std::uint64_t version = 0,
                            const CallOptions& call = {});

  absl::StatusOr<v1::DotResponse> Dot(const Operand& a, const Operand& b,
                                      const OperationOptions& options = {});
  // No axes: folds the whole operand to a scalar.
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
  // The k largest elements along an axis (absent: the last), from the largest on, and where they
  // stand; or the k smallest, from the smallest on.
  absl::StatusOr<v1::TopKResponse> TopK(const Operand& x, std::int64_t k, bool smallest = false,
                                        std::optional<int> axis = std::nullopt,
                                        const OperationOptions& options = {});
  // The expression for each element of the operands, which are broadcast.
  absl::StatusOr<v1::MapResponse> Map(absl::Span<const Operand> operands,
                                      const v1::Expression& expression,
                                      const OperationOptions& options = {});
  absl::StatusOr<v1::MapResponse> Map(const std::vector<Operand>& operands, const Expr& expression,
                                      const OperationOptions& options = {}) {
    return Map(operands, expression.ToMessage(), options);
  }

  // A result for every step, in order. OK as well where steps have failed, which StatusOf tells.
  absl::StatusOr<v1::ExecuteResponse> Execute(const Program& program, const CallOptions& call = {});
  // Any number of Dots, or of whole Reduces, in programs of many steps of which several are under
  // way at once: an answer for each, in order, or its own error. A call that fails is the error of
  // all its steps. The timeout is that of each call.
  std::vector<absl::StatusOr<v1::DotResponse>> Dots(
      absl::Span<const std::pair<Operand, Operand>> pairs, const CallOptions& call = {});
  std::vector<absl::StatusOr<v1::ReduceResponse>> Reduces(ReduceOp op,
                                                          absl::Span<const Operand> operands,
                                                          const CallOptions& call = {});
  // The error of a step, as a call of its own would have it; OK for a result.
  static absl::Status StatusOf(const v1::StepResult& result);

  // Empty operation or backend: all of them.
  absl::StatusOr<std::vector<v1::Strategy>> ListStrategies(const std::string& operation = {},
                                                           const std::string& backend = {},
                                                           const CallOptions& call = {});
  absl::StatusOr<v1::GetServerInfoResponse> GetServerInfo(const CallOptions& call = {});
  // grpc.health.v1: whether the server says SERVING. "": it lives; "tessera.v1.ComputeService": it
  // takes operations.
  absl::StatusOr<bool> CheckHealth(const std::string& service = {}, const CallOptions& call = {});

  // The same calls without waiting for their answers: client/async.h.
  AsyncClient Async();
  // Takes hold of a buffer, by its version: client/resident_buffer.h. A handle keeps the client's
  // connections open until it ends. The last handle of a client that has ended must not end in a
  // callback of Async(): closing the connections waits for the thread of that callback.
  ResidentBuffer Hold(v1::Buffer buffer, const HoldOptions& options = {});

  Traffic traffic() const;

 private:
  class Impl;
  Impl& impl() const;  // after a move: one whose calls all fail with MOVED_FROM
  void End();

  std::shared_ptr<Impl> impl_;  // shared with what Hold has returned; null after a move
};

}  // namespace tessera
