// The spans of sampled calls, as lines of JSON for trace collectors.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/observe/metrics.h"
#include "server/rpc/call_record.h"

namespace tessera {

// Appends to a file from a separate thread, so that no call waits for a disk. Spans that the disk
// does not accept in time are dropped and counted. A file that is moved or deleted is created again
// within a second of the next span, and a file that cannot be written is tried again every second.
// Thread safe.
class SpanFile {
 public:
  // `metrics` counts the spans and must outlive this object.
  SpanFile(std::string path, Metrics& metrics);
  // Writes the queued spans.
  ~SpanFile();
  SpanFile(const SpanFile&) = delete;
  SpanFile& operator=(const SpanFile&) = delete;

  // Adds a span for the call, and one for each of its phases. Never waits for the file. REQUIRES:
  // the call's trace is known.
  void Add(const CallRecord& call, const absl::Status& status);
  // Waits until all added spans have been written or dropped, but no longer than `limit`.
  void Flush(absl::Duration limit);

 private:
  // A call, with copies of the record's texts that do not live long enough.
  struct Entry {
    CallRecord call;
    std::string strategy;
    absl::StatusCode code;
    std::string reason;
    absl::Duration shift;  // from steady-clock times to wall-clock times
  };

  void Work();
  void Write(const std::vector<Entry>& calls);
  // Opens the file if none is open or if its name now belongs to another file. Returns whether
  // there is a file to write to.
  bool Look();
  static void Append(const Entry& entry, std::string& lines);
  // Writes the lines, and returns how many of them were written completely.
  std::uint64_t Write(std::string_view lines);
  // Logs the result of an attempt, an errno or 0, if it differs from the previous result.
  void Note(int error);

  const std::string path_;
  Metrics& metrics_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::vector<Entry> queue_;
  bool writing_ = false;
  bool ending_ = false;

  // Only the thread uses these.
  int file_ = -1;
  absl::Time next_look_ = absl::InfinitePast();
  int error_ = 0;      // errno of the last attempt
  bool torn_ = false;  // the last line is incomplete

  std::thread thread_;  // last, because it uses the other members
};

}  // namespace tessera
