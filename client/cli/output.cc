#include "client/cli/output.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <ostream>
#include <type_traits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "google/protobuf/duration.pb.h"
#include "kernels/base/element.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/printable.h"

namespace tessera {
namespace {

constexpr std::size_t kAbbreviateAbove = 1000;  // elements
constexpr std::int64_t kEdge = 3;               // elements shown at each end of an axis

std::string TimeText(const google::protobuf::Timestamp& time) {
  return absl::FormatTime(absl::RFC3339_sec, absl::FromUnixSeconds(time.seconds()),
                          absl::UTCTimeZone());
}

// Calls f with element i of the tensor, as a double for the floating-point types, a bool for bool,
// and a std::int64_t for the other types.
template <class F>
decltype(auto) WithElement(const v1::Tensor& tensor, std::size_t i, F&& f) {
  if (tensor.dtype() == v1::DTYPE_BOOL) return f(tensor.data()[i] != 0);
  return DispatchElement(static_cast<DType>(tensor.dtype()), [&]<class T>(T value) {
    std::memcpy(&value, tensor.data().data() + i * sizeof(T), sizeof(T));
    if constexpr (std::is_integral_v<T>) {
      return f(static_cast<std::int64_t>(value));
    } else {
      return f(static_cast<double>(static_cast<ValueOf<T>>(value)));
    }
  });
}

std::string ElementText(const v1::Tensor& tensor, std::size_t i) {
  return WithElement(tensor, i, [](auto value) -> std::string {
    if constexpr (std::is_same_v<decltype(value), bool>) {
      return value ? "true" : "false";
    } else if constexpr (std::is_integral_v<decltype(value)>) {
      return absl::StrCat(value);
    } else {
      std::string text = absl::StrFormat("%.8g", value);
      // A point distinguishes a whole floating-point number from an integer.
      if (text.find_first_of(".en") == std::string::npos) text += '.';
      return text;
    }
  });
}

class ArrayPrinter {
 public:
  explicit ArrayPrinter(const v1::Tensor& tensor) : tensor_(tensor) {
    std::size_t elements = 1;
    for (std::int64_t extent : tensor.shape()) elements *= static_cast<std::size_t>(extent);
    abbreviated_ = elements > kAbbreviateAbove;
  }

  std::string Print() {
    if (tensor_.shape_size() == 0) return ElementText(tensor_, 0);
    // The first pass finds the width of the widest element, and the second pass writes the text.
    std::string text;
    Walk(0, 0, text);
    text.clear();
    Walk(0, 0, text);
    return text;
  }

 private:
  void Walk(int axis, std::size_t row, std::string& text) {
    const std::int64_t extent = tensor_.shape(axis);
    const bool last = axis + 1 == tensor_.shape_size();
    const bool gap = abbreviated_ && extent > 2 * kEdge;
    // Each row of a matrix has its own line, and each further axis adds a blank line.
    const std::string separator =
        last ? " "
             : std::string(static_cast<std::size_t>(tensor_.shape_size() - axis - 1), '\n') +
                   std::string(static_cast<std::size_t>(axis + 1), ' ');
    text += '[';
    for (std::int64_t i = 0; i < extent; ++i) {
      if (i > 0) text += separator;
      if (gap && i == kEdge) {
        text += "...";
        i = extent - kEdge - 1;
        continue;
      }
      const std::size_t index =
          row * static_cast<std::size_t>(extent) + static_cast<std::size_t>(i);
      if (last) {
        const std::string element = ElementText(tensor_, index);
        width_ = std::max(width_, element.size());
        text.append(width_ - element.size(), ' ');
        text += element;
      } else {
        Walk(axis + 1, index, text);
      }
    }
    text += ']';
  }

  const v1::Tensor& tensor_;
  bool abbreviated_ = false;
  std::size_t width_ = 0;
};

Json Nested(const v1::Tensor& tensor, int axis, std::size_t row) {
  if (axis == tensor.shape_size()) {
    return WithElement(tensor, row, [](auto value) -> Json {
      if constexpr (std::is_integral_v<decltype(value)>) {
        return value;
      } else {
        return NumberJson(value);
      }
    });
  }
  Json list = Json::array();
  for (std::int64_t i = 0; i < tensor.shape(axis); ++i) {
    list.push_back(
        Nested(tensor, axis + 1,
               row * static_cast<std::size_t>(tensor.shape(axis)) + static_cast<std::size_t>(i)));
  }
  return list;
}

}  // namespace

// --- Text ----------------------------------------------------------------------------------------

std::string HumanBytes(std::uint64_t bytes) {
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  constexpr std::array<const char*, 6> kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  // 1023.95 would be printed as 1024.0.
  while (value >= 1023.95 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  std::string number = absl::StrFormat("%.1f", value);
  if (number.ends_with(".0")) number.resize(number.size() - 2);
  return absl::StrCat(number, " ", kUnits[unit]);
}

std::string HumanDuration(absl::Duration duration) {
  const double seconds = absl::ToDoubleSeconds(duration);
  if (seconds < 1e-3) return absl::StrFormat("%.1f us", seconds * 1e6);
  if (seconds < 1) return absl::StrFormat("%.1f ms", seconds * 1e3);
  if (seconds < 60) return absl::StrFormat("%.1f s", seconds);
  const auto whole = static_cast<std::int64_t>(seconds);
  if (whole < 3600) return absl::StrFormat("%d m %d s", whole / 60, whole % 60);
  if (whole < 86400) return absl::StrFormat("%d h %d m", whole / 3600, whole % 3600 / 60);
  return absl::StrFormat("%d d %d h", whole / 86400, whole % 86400 / 3600);
}

std::string AgeText(const google::protobuf::Timestamp& since) {
  const absl::Duration age = absl::Now() - absl::FromUnixSeconds(since.seconds());
  return HumanDuration(std::max(age, absl::ZeroDuration()));
}

std::string ShapeText(absl::Span<const std::int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

std::string DtypeText(v1::Dtype dtype) { return std::string(Name(static_cast<DType>(dtype))); }

std::string NumberText(double value) {
  std::array<char, 32> text;
  const auto [end, error] = std::to_chars(text.data(), text.data() + text.size(), value);
  return std::string(text.data(), end);
}

TerminalSize SizeOfTerminal() {
  winsize size{};
  TerminalSize known;
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) return known;
  if (size.ws_col > 0) known.columns = size.ws_col;
  if (size.ws_row > 0) known.rows = size.ws_row;
  return known;
}

bool IsUtf8Locale() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    const std::string_view text(value);
    return text.ends_with(".UTF-8") || text.ends_with(".utf8");
  }
  return false;
}

void Table::Add(std::vector<std::string> row) {
  for (std::string& cell : row) cell = Printable(cell);
  rows_.push_back(std::move(row));
}

void Table::Print(std::ostream& out) const {
  std::vector<std::size_t> widths(rows_[0].size(), 0);
  std::vector<bool> right(widths.size());
  for (std::size_t c = 0; c < widths.size(); ++c) right[c] = rows_[0][c].starts_with('>');
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    for (std::size_t c = 0; c < widths.size(); ++c) {
      widths[c] = std::max(widths[c], rows_[r][c].size() - (r == 0 && right[c] ? 1 : 0));
    }
  }
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    std::string line;
    for (std::size_t c = 0; c < widths.size(); ++c) {
      const std::string cell = r == 0 && right[c] ? rows_[r][c].substr(1) : rows_[r][c];
      const std::string padding(widths[c] - cell.size(), ' ');
      if (c > 0) line += "  ";
      line += right[c] ? padding + cell : cell + padding;
    }
    line.resize(line.find_last_not_of(' ') + 1);
    out << line << '\n';
  }
}

void Table::PrintBelow(std::ostream& out) const {
  if (rows_.size() == 1) return;
  out << '\n';
  Print(out);
}

std::string ArrayText(const v1::Tensor& tensor) {
  return tensor.data().empty() ? "[]" : ArrayPrinter(tensor).Print();
}

// --- JSON ----------------------------------------------------------------------------------------

Json NumberJson(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

namespace {

// Returns the value of a field, or of element i of a repeated field.
Json FieldJson(const google::protobuf::Message& message,
               const google::protobuf::FieldDescriptor& field, int i) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  const auto get = [&](auto one, auto element) {
    return field.is_repeated() ? (reflection.*element)(message, &field, i)
                               : (reflection.*one)(message, &field);
  };
  using Field = google::protobuf::FieldDescriptor;
  using Reflection = google::protobuf::Reflection;
  switch (field.cpp_type()) {
    case Field::CPPTYPE_INT32:
      return get(&Reflection::GetInt32, &Reflection::GetRepeatedInt32);
    case Field::CPPTYPE_INT64:
      return get(&Reflection::GetInt64, &Reflection::GetRepeatedInt64);
    case Field::CPPTYPE_UINT32:
      return get(&Reflection::GetUInt32, &Reflection::GetRepeatedUInt32);
    case Field::CPPTYPE_UINT64:
      return get(&Reflection::GetUInt64, &Reflection::GetRepeatedUInt64);
    case Field::CPPTYPE_DOUBLE:
      return NumberJson(get(&Reflection::GetDouble, &Reflection::GetRepeatedDouble));
    case Field::CPPTYPE_BOOL:
      return get(&Reflection::GetBool, &Reflection::GetRepeatedBool);
    case Field::CPPTYPE_STRING:
      return get(&Reflection::GetString, &Reflection::GetRepeatedString);
    case Field::CPPTYPE_ENUM: {
      const int value = get(&Reflection::GetEnumValue, &Reflection::GetRepeatedEnumValue);
      if (field.enum_type() == v1::Dtype_descriptor())
        return DtypeText(static_cast<v1::Dtype>(value));
      return value == v1::Buffer::STATE_READY ? "READY" : "WRITING";
    }
    default:
      break;
  }
  const google::protobuf::Message& value = field.is_repeated()
                                               ? reflection.GetRepeatedMessage(message, &field, i)
                                               : reflection.GetMessage(message, &field);
  if (const auto* time = dynamic_cast<const google::protobuf::Timestamp*>(&value))
    return TimeText(*time);
  if (const auto* length = dynamic_cast<const google::protobuf::Duration*>(&value))
    return static_cast<double>(length->seconds()) + length->nanos() * 1e-9;
  return ToJson(value);
}

}  // namespace

Json ToJson(const google::protobuf::Message& message) {
  Json json = Json::object();
  const google::protobuf::Descriptor& type = *message.GetDescriptor();
  for (int f = 0; f < type.field_count(); ++f) {
    const google::protobuf::FieldDescriptor& field = *type.field(f);
    const bool length = field.message_type() == google::protobuf::Duration::descriptor();
    Json& value = json[field.name() + (length ? "_s" : "")];
    if (field.is_repeated()) {
      value = Json::array();
      for (int i = 0; i < message.GetReflection()->FieldSize(message, &field); ++i)
        value.push_back(FieldJson(message, field, i));
    } else if (!field.has_presence() || message.GetReflection()->HasField(message, &field)) {
      value = FieldJson(message, field, 0);
    }
  }
  return json;
}

Json ToJson(const v1::Buffer& buffer) {
  Json json = ToJson(static_cast<const google::protobuf::Message&>(buffer));
  for (Json& shard : json["shards"])
    shard = {{"device", shard["device"]}, {"bytes", {shard["begin"], shard["end"]}}};
  if (buffer.has_crc32c())
    json["crc32c"] = absl::StrCat(absl::Hex(buffer.crc32c(), absl::kZeroPad8));
  return json;
}

Json ToJson(const v1::GetServerInfoResponse& info) {
  Json json = ToJson(static_cast<const google::protobuf::Message&>(info));
  if (info.tenants().empty()) {
    json.erase("tenants");
    return json;
  }
  for (Json& tenant : json["tenants"]) {
    for (const char* quota : {"buffers_quota", "buffer_bytes_quota", "calls_quota"})
      if (tenant[quota] == 0) tenant[quota] = nullptr;
  }
  return json;
}

void WriteTenants(const v1::GetServerInfoResponse& info, std::ostream& out) {
  Table tenants({"TENANT", ">MEMORY", ">QUOTA", ">BUFFERS", ">QUOTA", ">CALLS", ">QUOTA", ">ENDED",
                 ">REFUSED"});
  const auto quota = [](std::uint64_t limit) { return limit == 0 ? "-" : absl::StrCat(limit); };
  for (const v1::TenantUsage& tenant : info.tenants()) {
    tenants.Add({tenant.name(), HumanBytes(tenant.buffer_bytes()),
                 tenant.buffer_bytes_quota() == 0 ? "-" : HumanBytes(tenant.buffer_bytes_quota()),
                 absl::StrCat(tenant.buffers()), quota(tenant.buffers_quota()),
                 absl::StrCat(tenant.calls()), quota(tenant.calls_quota()),
                 absl::StrCat(tenant.ended_calls()), absl::StrCat(tenant.refused_calls())});
  }
  tenants.PrintBelow(out);
}

Json ToJson(const v1::Tensor& tensor) {
  return tensor.data().empty() ? Json::array() : Nested(tensor, 0, 0);
}

Json ToJson(const absl::Status& error) {
  Json json;
  json["code"] = absl::StatusCodeToString(error.code());
  json["reason"] = ErrorReason(error);
  json["message"] = std::string(error.message());
  json["metadata"] = ErrorMetadata(error);
  return json;
}

// --- Errors --------------------------------------------------------------------------------------

int ExitCode(const absl::Status& status) {
  if (ErrorReason(status) == "BAD_OPTION") return kUsageExitCode;
  static constexpr std::pair<absl::StatusCode, int> kCodes[] = {
      {absl::StatusCode::kOk, 0},
      {absl::StatusCode::kNotFound, 3},
      {absl::StatusCode::kInvalidArgument, 4},
      {absl::StatusCode::kOutOfRange, 4},
      {absl::StatusCode::kFailedPrecondition, 5},
      {absl::StatusCode::kAborted, 5},
      {absl::StatusCode::kResourceExhausted, 6},
      {absl::StatusCode::kUnavailable, 7},
      {absl::StatusCode::kDeadlineExceeded, 8},
      {absl::StatusCode::kCancelled, 8},
      {absl::StatusCode::kAlreadyExists, 9},
      {absl::StatusCode::kDataLoss, 10},
  };
  for (const auto& [code, exit] : kCodes)
    if (code == status.code()) return exit;
  return 1;
}

std::string_view ExitCodesText() {
  return "Exit codes: 0 done, 1 internal or other, 2 usage, 3 not found, 4 invalid argument,\n"
         "5 precondition failed, 6 memory, quota or queue exhausted, 7 server unavailable,\n"
         "8 deadline passed or cancelled, 9 already exists, 10 data damaged in transit";
}

namespace {

// Returns advice for an error with this reason, or "" if there is none or it depends on the error's
// metadata.
std::string_view AdviceFor(std::string_view reason) {
  static constexpr std::string_view kMemory =
      "other calls use the server's memory, or this call needs more memory than the server has; "
      "'tessera --json info' shows the limits";
  static constexpr std::pair<std::string_view, std::string_view> kAdvice[] = {
      {"BUFFER_NOT_FOUND", "'tessera ls' lists the buffers"},
      {"BUFFER_EXISTS",
       "--replace replaces the existing buffer, or choose another name; 'tessera info NAME' shows "
       "the existing buffer"},
      {"BUFFER_NOT_READY",
       "the buffer's upload has not ended; 'tessera info NAME' shows the progress, and 'tessera rm "
       "NAME --version V' drops the upload"},
      {"VERSION_MISMATCH",
       "the buffer was replaced or deleted in the meantime; 'tessera info NAME' shows the versions "
       "that exist"},
      {"BAD_CHECKSUM", "try again; --no-checksums skips the check, if the check itself is wrong"},
      {"HOST_MEMORY_EXHAUSTED", kMemory},
      {"SCRATCH_EXHAUSTED", kMemory},
      {"BAD_TOKEN",
       "TESSERA_TOKEN or --token-file gives the token, and --tls-cert gives a certificate; the "
       "server's operator decides which tokens and certificates are accepted"},
      {"TENANT_QUOTA_EXCEEDED",
       "'tessera rm NAME' frees space; the server's operator sets the quotas"},
      {"TOO_MANY_CALLS", "try again when other calls of this tenant have ended"},
      {"TOO_MANY_BUFFERS", "'tessera rm NAME' deletes a buffer"},
      {"QUEUE_FULL", "the server is busy; try again, or set a longer --timeout"},
      {"RESULT_TOO_LARGE", "--out NAME keeps it on the device, -o FILE.npy saves it"},
      {"OPERATION_TOO_LONG",
       "the server limits how long one call may take; another --strategy may be faster"},
      {"OPERAND_TOO_LARGE", "upload it with 'tessera put' and name the buffer"},
      {"BAD_MESSAGE", "upload it with 'tessera put' and name the buffer"},
      {"BAD_NAME", "a name has 1 to 128 characters of a-z A-Z 0-9 . _ / -"},
      {"BAD_OPERAND", "operands: NAME, NAME[10:20, ::-1], NAME@OFFSET:SHAPE:STRIDES, file:X.npy"},
      {"BAD_VIEW", "'tessera info NAME' shows a buffer's type and shape"},
      {"BAD_SHAPE", "'tessera info NAME' shows a buffer's type and shape"},
      {"BAD_AXES", "'tessera info NAME' shows a buffer's type and shape"},
      {"BAD_DTYPE", "'tessera info NAME' shows a buffer's type and shape"},
      {"EMPTY_INPUT", "'tessera info NAME' shows a buffer's type and shape"},
      {"BAD_DEVICE", "'tessera info' lists the server's devices"},
      {"BAD_PLACEMENT", "'tessera info' lists the server's devices"},
      {"BAD_LAUNCH", "without the option, the strategy chooses the value"},
      {"BAD_RADIUS", "--radius takes whole numbers of 0 or more"},
      {"BAD_EXPRESSION",
       "operand 0 is a, 1 is b, and so on; 'tessera map --help' shows what an expression may "
       "contain"},
      {"BAD_PROGRAM",
       "a program is JSON such as {\"steps\": [{\"dot\": {\"a\": \"x\", \"b\": \"y\"}}]}"},
      {"BAD_CREDENTIALS",
       "--tls-ca, --tls-cert, --tls-key and --token-file name the files; a token is sent "
       "to other hosts only over TLS, with --tls-ca"},
      {"BAD_MATRIX", "'tessera linalg svd' decomposes every matrix whose elements are finite"},
      {"BAD_BOOL", "a bool is a byte, 0 or 1; NumPy's astype(bool) makes such bytes"},
      {"BAD_K",
       "--k takes whole numbers from 1 to 4096, up to the number of elements along the axis"},
      {"BAD_BINS", "--bins takes 1 to 2^30, and --range two finite numbers, the lower one first"},
      {"BAD_INDEX", "--mode wrap or --mode clip accepts any index"},
      {"RESULTS_DISAGREE",
       "one of the two strategies is wrong; 'tessera strategies' describes both"},
      {"BAD_OPTION", "'tessera COMMAND --help' shows the options"},
      {"BAD_TTL",
       "a ttl is a time above 0 such as 10m; the server's --max-ttl may limit it, and 'tessera "
       "--json info' shows that limit"},
      {"SNAPSHOT_FAILED",
       "the server's log says what could not be written to its --data-dir, and why"},
      {"BAD_NPY", "write the file with numpy.save"},
      {"BAD_FILE", "write the file again with numpy.savez or the safetensors package"},
      {"FILE_NOT_FOUND", "check the path and its permissions"},
      {"FILE_ERROR", "check the path, its permissions and the free space"},
      {"DRAINING", "the server is stopping; try again when it is back"},
      {"DEVICE_LOST", "the GPU failed and the server restarts; upload the buffers again"},
      {"BUFFER_CHANGED", "download it again to get the new version"},
  };
  for (const auto& [known, advice] : kAdvice)
    if (known == reason) return advice;
  return "";
}

}  // namespace

std::string Advice(const absl::Status& error, std::string_view server) {
  const std::string reason = ErrorReason(error);
  std::map<std::string, std::string> metadata = ErrorMetadata(error);
  const auto figure = [&](const std::string& key) { return metadata[key]; };
  const auto bytes = [&](const std::string& key) {
    std::uint64_t value = 0;
    return HumanBytes(absl::SimpleAtoi(figure(key), &value) ? value : 0);
  };
  const std::string at(server);
  if (reason == "UNREACHABLE" && absl::StrContains(error.message(), "client certificate"))
    return "--tls-cert and --tls-key name the client's certificate and its key";
  if (reason == "UNREACHABLE" || reason == "CONNECTION_LOST") {
    return "is tessera-server running at " + at +
           "? --server or TESSERA_SERVER names another server";
  }
  if (reason == "CERTIFICATE_REFUSED")
    return "--tls-ca names the CA, and --tls-server-name gives the host name in the certificate";
  if (reason == "WRONG_HOST") return "the buffer's home is --server " + figure("address");
  if (reason == "SOURCE_NOT_ALLOWED") return "start " + at + " with --import-from to allow it";
  if (reason == "UNKNOWN_STRATEGY") {
    return figure("valid").empty() ? "'tessera strategies' lists the names"
                                   : "valid names: " + figure("valid");
  }
  if (reason == "STRATEGY_UNSUPPORTED") {
    return (figure("needs").empty() ? "" : "it needs " + figure("needs") + "; ") +
           "'tessera strategies' shows what this server can run";
  }
  if (reason == "GPU_MEMORY_EXHAUSTED" || reason == "QUOTA_EXCEEDED") {
    // On a server with tenants, only admins are told how much is free.
    const std::string free =
        figure("free").empty() ? ""
                               : absl::StrCat(", ", bytes("free"), " of ", bytes("total"), " free");
    return absl::StrCat(bytes("requested"), " requested", free,
                        "; 'tessera rm NAME' frees a buffer");
  }
  if ((reason == "BAD_DTYPE" || reason == "BAD_SHAPE") && !figure("path").empty())
    return "convert the array, and write the file again with numpy.save";
  if (reason == "ROLE_TOO_SMALL")
    return "the call needs a token with the role " + figure("needed") +
           "; ask the server's operator for one";
  if (const std::string_view advice = AdviceFor(reason); !advice.empty())
    return std::string(advice);
  if (absl::IsUnimplemented(error))
    return "the server at " + at + " is older than this client, or is not a Tessera server";
  if (absl::IsDeadlineExceeded(error)) return "allow more time with --timeout";
  if (absl::IsCancelled(error)) return "nothing was kept";
  if (absl::IsInternal(error) || absl::IsUnknown(error)) return "the server's log may say more";
  return "see 'tessera --help'";
}

// --- Progress ------------------------------------------------------------------------------------

ProgressBar::ProgressBar(std::string_view label, std::uint64_t total_bytes)
    : label_(Printable(label)),
      total_(total_bytes),
      terminal_(::isatty(STDERR_FILENO) != 0),
      start_(std::chrono::steady_clock::now()),
      next_(start_ + std::chrono::seconds(1)) {}

ProgressBar::~ProgressBar() {
  if (shown_) std::fputs("\r\x1b[K", stderr);
}

void ProgressBar::Update(std::uint64_t done_bytes) {
  const auto now = std::chrono::steady_clock::now();
  if (!terminal_ || now < next_ || total_ == 0) return;
  next_ = now + std::chrono::milliseconds(100);
  shown_ = true;
  constexpr std::size_t kWidth = 24;
  const double part = static_cast<double>(done_bytes) / static_cast<double>(total_);
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const double rate = static_cast<double>(done_bytes) / seconds;  // bytes per second
  const double left = rate > 0 ? static_cast<double>(total_ - done_bytes) / rate : 0;
  const auto full = static_cast<std::size_t>(part * kWidth);
  absl::FPrintF(stderr, "\r\x1b[K%s  %3.0f%% [%s%s] %s of %s, %s/s, %s left", label_, part * 100,
                std::string(full, '#'), std::string(kWidth - std::min(full, kWidth), '.'),
                HumanBytes(done_bytes), HumanBytes(total_),
                HumanBytes(static_cast<std::uint64_t>(rate)), HumanDuration(absl::Seconds(left)));
}

std::string InstalledText(const v1::Device& device) {
  return device.memory_total_bytes() == 0 ? "-" : HumanBytes(device.memory_total_bytes());
}

std::string ExpiryText(const v1::Buffer& buffer) {
  if (!buffer.has_expire_time()) return "never";
  const absl::Duration left = absl::FromUnixSeconds(buffer.expire_time().seconds()) - absl::Now();
  return left <= absl::ZeroDuration() ? "now"
                                      : "in " + HumanDuration(absl::Ceil(left, absl::Seconds(1)));
}

std::string StateText(const v1::Buffer& buffer) {
  if (buffer.state() == v1::Buffer::STATE_READY) return "ready";
  return absl::StrCat("writing, ", HumanBytes(buffer.committed_bytes()));
}

std::string PlaceText(const v1::Buffer& buffer) {
  if (buffer.shards().empty()) return buffer.device();
  return absl::StrJoin(buffer.shards(), ",",
                       [](std::string* out, const v1::Shard& shard) { *out += shard.device(); });
}

void WriteBuffers(std::string heading, absl::Span<const v1::Buffer> buffers, std::ostream& out) {
  Table table({std::move(heading), "DTYPE", "SHAPE", ">SIZE", "DEVICE", "STATE", "EXPIRES"});
  for (const v1::Buffer& buffer : buffers) {
    table.Add({buffer.name(), DtypeText(buffer.dtype()), ShapeText(buffer.shape()),
               HumanBytes(buffer.size_bytes()), PlaceText(buffer), StateText(buffer),
               ExpiryText(buffer)});
  }
  table.Print(out);
}

}  // namespace tessera
