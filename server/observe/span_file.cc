#include "server/observe/span_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/printable.h"
#include "server/clock.h"
#include "spdlog/spdlog.h"
#include "tessera/v1/buffer.pb.h"
#include "tessera/v1/compute.pb.h"
#include "tessera/v1/shared_memory.pb.h"

namespace tessera {
namespace {

// How many calls may wait to be written. That many take about 1 MiB.
constexpr std::size_t kMostWaiting = 4096;
constexpr std::size_t kLongestSpanText = 64;

// How often the server checks whether the path still names the open file.
constexpr absl::Duration kLookInterval = absl::Seconds(1);

// Numbers that OpenTelemetry defines.
constexpr int kKindInternal = 1;
constexpr int kKindServer = 2;
constexpr int kStatusError = 2;

absl::string_view ToAbsl(std::string_view text) { return {text.data(), text.size()}; }

std::uint64_t CountSpans(const CallRecord& call) { return call.has_begun() ? 3 : 1; }

// Quotes a printable text.
std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + '"';
}

// Returns a method's service, for example "tessera.v1.ComputeService" for "Dot".
std::string ServiceOf(std::string_view method) {
  for (const google::protobuf::FileDescriptor* file :
       {v1::Buffer::descriptor()->file(), v1::DotRequest::descriptor()->file(),
        v1::UploadSharedRequest::descriptor()->file()}) {
    const google::protobuf::ServiceDescriptor* service = file->service(0);
    if (service->FindMethodByName(std::string(method)) != nullptr) return service->full_name();
  }
  return "";
}

// Whether the code means that the server, rather than its client, is at fault, according to
// OpenTelemetry's conventions for gRPC.
bool IsFaultOfServer(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDataLoss:
      return true;
    default:
      return false;
  }
}

// Writes one span. Its functions are called in the order in which they are declared.
class Line {
 public:
  Line(const Trace& trace, std::string_view id, std::string_view parent, std::string_view name,
       int kind, std::string& out)
      : out_(out) {
    absl::StrAppend(&out_, "{\"traceId\":\"", ToAbsl(trace.id()), "\",\"spanId\":\"", ToAbsl(id),
                    "\",\"parentSpanId\":\"", ToAbsl(parent), "\",\"name\":\"", ToAbsl(name),
                    "\",\"kind\":", kind);
  }
  // 64-bit integers are strings in the JSON of protobuf.
  void SetTimes(absl::Time begin, absl::Time end) {
    absl::StrAppend(&out_, ",\"startTimeUnixNano\":\"", absl::ToUnixNanos(begin),
                    "\",\"endTimeUnixNano\":\"", absl::ToUnixNanos(end), "\",\"attributes\":[");
  }
  // Empty attributes are left out.
  void AddText(std::string_view key, std::string_view text) {
    if (!text.empty()) Add(key, "stringValue", Quoted(text));
  }
  void AddInteger(std::string_view key, std::int64_t value) {
    Add(key, "intValue", absl::StrCat("\"", value, "\""));
  }
  void AddSeconds(std::string_view key, absl::Duration duration) {
    if (duration > absl::ZeroDuration())
      Add(key, "doubleValue", absl::StrCat(absl::ToDoubleSeconds(duration)));
  }
  void End(bool error) {
    absl::StrAppend(&out_, "],\"status\":{");
    if (error) absl::StrAppend(&out_, "\"code\":", kStatusError);
    absl::StrAppend(&out_, "}}\n");
  }

 private:
  void Add(std::string_view key, std::string_view type, std::string_view value) {
    absl::StrAppend(&out_, out_.back() == '[' ? "" : ",", "{\"key\":\"", ToAbsl(key),
                    "\",\"value\":{\"", ToAbsl(type), "\":", ToAbsl(value), "}}");
  }

  std::string& out_;
};

}  // namespace

SpanFile::SpanFile(std::string path, Metrics& metrics)
    : path_(std::move(path)), metrics_(metrics), thread_(&SpanFile::Work, this) {}

SpanFile::~SpanFile() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_one();
  thread_.join();
  if (file_ >= 0) close(file_);
}

void SpanFile::Add(const CallRecord& call, const absl::Status& status) {
  bool taken = false, first = false;
  try {
    Entry entry{call, Printable(call.strategy, kLongestSpanText), status.code(),
                ErrorReason(status), absl::Now() - SteadyNow()};
    const std::lock_guard lock(mutex_);
    if (queue_.size() < kMostWaiting) {
      first = queue_.empty();
      queue_.push_back(std::move(entry));
      taken = true;
    }
  } catch (const std::bad_alloc&) {  // the call is dropped
  }
  if (first) wake_.notify_one();
  if (!taken) metrics_.CountSpans(0, CountSpans(call));
}

void SpanFile::Flush(absl::Duration limit) {
  std::unique_lock lock(mutex_);
  idle_.wait_for(lock, absl::ToChronoNanoseconds(limit),
                 [this] { return queue_.empty() && !writing_; });
}

void SpanFile::Work() {
  Look();  // logs a problem with the file immediately
  std::vector<Entry> calls;
  std::unique_lock lock(mutex_);
  while (true) {
    writing_ = false;
    if (queue_.empty()) idle_.notify_all();
    wake_.wait(lock, [this] { return !queue_.empty() || ending_; });
    if (queue_.empty()) return;
    calls.swap(queue_);
    writing_ = true;
    lock.unlock();
    Write(calls);
    calls.clear();
    lock.lock();
  }
}

void SpanFile::Write(const std::vector<Entry>& calls) {
  std::uint64_t spans = 0, written = 0;
  for (const Entry& entry : calls) spans += CountSpans(entry.call);
  try {
    if (Look()) {
      std::string lines;
      for (const Entry& entry : calls) Append(entry, lines);
      written = Write(lines);
    }
  } catch (const std::bad_alloc&) {  // the calls are dropped
  }
  metrics_.CountSpans(written, spans - written);
}

bool SpanFile::Look() {
  const absl::Time now = SteadyNow();
  if (now < next_look_) return file_ >= 0 && error_ == 0;
  next_look_ = now + kLookInterval;
  struct stat named {
  }, own{};
  if (file_ >= 0 && stat(path_.c_str(), &named) == 0 && fstat(file_, &own) == 0 &&
      named.st_dev == own.st_dev && named.st_ino == own.st_ino)
    return true;
  if (file_ >= 0) close(file_);
  // With O_NONBLOCK, a pipe without a reader does not block the thread.
  file_ = open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0640);
  torn_ = false;
  if (file_ < 0) Note(errno);
  return file_ >= 0;
}

void SpanFile::Append(const Entry& entry, std::string& lines) {
  const CallRecord& call = entry.call;
  const std::string_view id(call.trace.span_id.data(), call.trace.span_id.size());
  const auto phase = [&](std::string_view name, absl::Time begin, absl::Time end) {
    const std::array<char, 16> own = MakeSpanId();
    Line line(call.trace, {own.data(), own.size()}, id, name, kKindInternal, lines);
    line.SetTimes(begin + entry.shift, end + entry.shift);
    line.End(false);
  };
  if (call.has_begun()) {
    phase("queue", call.accepted, call.begun);
    phase("run", call.begun, call.ended);
  }
  const std::string service = ServiceOf(call.method);
  Line line(call.trace, id, {call.trace.parent_id.data(), call.trace.parent_id.size()},
            service + "/" + std::string(call.method), kKindServer, lines);
  line.SetTimes(call.accepted + entry.shift, call.ended + entry.shift);
  line.AddText("rpc.system", "grpc");
  line.AddText("rpc.service", service);
  line.AddText("rpc.method", call.method);
  line.AddInteger("rpc.grpc.status_code", static_cast<std::int64_t>(entry.code));
  line.AddText("error.type", entry.reason);
  line.AddText("tessera.strategy", entry.strategy);
  line.AddText("tessera.tenant", call.tenant_name());
  line.AddSeconds("tessera.kernel_seconds", call.kernel);
  line.AddSeconds("tessera.queue_seconds", call.waited);
  line.AddSeconds("tessera.copy_seconds", call.copies);
  line.End(IsFaultOfServer(entry.code));
}

std::uint64_t SpanFile::Write(std::string_view lines) {
  // Ends a line that was only partly written, so that the next line is not lost with it.
  if (torn_ && write(file_, "\n", 1) == 1) torn_ = false;
  int error = torn_ ? errno : 0;
  std::size_t done = 0;
  while (error == 0 && done < lines.size()) {
    const ssize_t size = write(file_, lines.data() + done, lines.size() - done);
    if (size >= 0) {
      done += static_cast<std::size_t>(size);
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (done > 0) torn_ = lines[done - 1] != '\n';
  if (error != 0) next_look_ = SteadyNow() + kLookInterval;
  Note(error);
  return static_cast<std::uint64_t>(
      std::count(lines.begin(), lines.begin() + static_cast<std::ptrdiff_t>(done), '\n'));
}

void SpanFile::Note(int error) {
  const int before = std::exchange(error_, error);
  if (error == before) return;
  if (error == 0) {
    spdlog::info("spans are written to {} again", path_);
  } else {
    spdlog::warn("spans are dropped until they can be written to {}: {}", path_,
                 std::strerror(error));
  }
}

}  // namespace tessera
