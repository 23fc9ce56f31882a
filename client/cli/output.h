// The output of the command line: tables, sizes, arrays as NumPy shows them, JSON, errors with
// advice, and progress.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/base/dtype.h"
#include "tessera/v1/buffer.pb.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// A JSON value that keeps fields in the order in which they are set.
using Json = nlohmann::ordered_json;

// Returns a string such as "0 B", "312.5 KiB" or "8 GiB".
std::string HumanBytes(std::uint64_t bytes);
// Returns a string such as "12.3 us", "1.2 ms", "3.4 s" or "2 h 5 m".
std::string HumanDuration(absl::Duration duration);
// Returns a string such as "[1257, 64]".
std::string ShapeText(absl::Span<const std::int64_t> shape);
std::string DtypeText(v1::Dtype dtype);
// Returns the time that has passed since a timestamp, in the form of HumanDuration.
std::string AgeText(const google::protobuf::Timestamp& since);
// Returns the shortest decimal that reads back as the same number.
std::string NumberText(double value);

struct TerminalSize {
  std::size_t columns = 80;
  std::size_t rows = 24;
};
// Returns the size of the terminal on stdout, or 80 x 24 if there is none.
TerminalSize SizeOfTerminal();
// Whether the user's locale uses UTF-8.
bool IsUtf8Locale();

// Rows of cells under headings. Columns are aligned and two spaces apart.
class Table {
 public:
  // A heading that begins with '>' aligns its column to the right.
  explicit Table(std::vector<std::string> headings) : rows_{std::move(headings)} {}
  // Adds a row. Its cells are made printable.
  void Add(std::vector<std::string> row);
  void Print(std::ostream& out) const;
  // Writes an empty line and the table, or nothing if there are no rows.
  void PrintBelow(std::ostream& out) const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// Returns the elements in nested brackets, as NumPy prints them. If there are more than 1000, only
// three are shown at each end of an axis. An array without elements, whose other extents may be
// huge, is "[]". REQUIRES: the tensor's data has the size of its type and shape.
std::string ArrayText(const v1::Tensor& tensor);

// Returns the fields by their names: types and states as on the command line, times in RFC 3339,
// durations in seconds as NAME_s, and null for absent fields.
Json ToJson(const google::protobuf::Message& message);
Json ToJson(const v1::Buffer& buffer);
Json ToJson(const v1::GetServerInfoResponse& info);
template <class Messages>
Json ListJson(const Messages& messages) {
  Json json = Json::array();
  for (const auto& message : messages) json.push_back(ToJson(message));
  return json;
}
// Writes an empty line and a table of the tenants, or nothing if there are none.
void WriteTenants(const v1::GetServerInfoResponse& info, std::ostream& out);
// Returns nested lists, or an empty list if there are no elements. NaN and the infinities, which
// JSON lacks, are the strings "NaN", "Infinity" and "-Infinity".
Json ToJson(const v1::Tensor& tensor);
Json NumberJson(double value);
// Returns {code, reason, message, metadata}.
Json ToJson(const absl::Status& error);

inline constexpr int kOutputExitCode = 1;  // standard output cannot be written
inline constexpr int kUsageExitCode = 2;
// Returns the process's exit code for a status. Reason BAD_OPTION counts as a usage error.
int ExitCode(const absl::Status& status);
// Returns the list of exit codes for --help.
std::string_view ExitCodesText();
// Returns one line that says what to do about the error.
std::string Advice(const absl::Status& error, std::string_view server);

// A line on a terminal that shows the progress of a transfer longer than a second. Not thread safe.
class ProgressBar {
 public:
  // Shows nothing unless stderr is a terminal.
  ProgressBar(std::string_view label, std::uint64_t total_bytes);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  void Update(std::uint64_t done_bytes);

 private:
  const std::string label_;
  const std::uint64_t total_;
  const bool terminal_;
  const std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point next_;
  bool shown_ = false;
};

// Returns how much memory a device has, or "-" if the server does not tell this caller.
std::string InstalledText(const v1::Device& device);
// These return a buffer's columns in lists: its state, its devices, and when it expires ("never" if
// it does not).
std::string StateText(const v1::Buffer& buffer);
// Returns "cuda:0", or "cuda:0,cuda:1" for a sharded buffer.
std::string PlaceText(const v1::Buffer& buffer);
std::string ExpiryText(const v1::Buffer& buffer);
// `heading` is the heading of the column of names.
void WriteBuffers(std::string heading, absl::Span<const v1::Buffer> buffers, std::ostream& out);

}  // namespace tessera
