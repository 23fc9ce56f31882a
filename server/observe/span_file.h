// The spans of sampled calls, a line of JSON each, for collectors of traces.
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

// Appends to a file from a thread of its own, so that no call waits for a disk. What the disk does
// not take in time is dropped and counted. A file that is moved away or deleted is made again
// within a second of the next span, and one that cannot be written is tried again every second.
// Thread safe.
class SpanFile {
 public:
  // metrics: where spans are counted; outlives it.
  SpanFile(std::string path, Metrics& metrics);
  // Writes what is queued.
  ~SpanFile();
  SpanFile(const SpanFile&) = delete;
  SpanFile& operator=(const SpanFile&) = delete;

  // A span for the call, and one for each of its phases. Never waits for the file.
  // REQUIRES: its trace is known.
  void Add(const CallRecord& call, const absl::Status& status);
  // Waits until what was added has been written or dropped, but no longer than limit.
  void Flush(absl::Duration limit);

 private:
  // A call, with texts of its own where those of the record end before.
  struct Entry {
    CallRecord call;
    std::string strategy;
    absl::StatusCode code;
    std::string reason;
    absl::Duration shift;  // from the steady clock to the wall clock
  };

  void Work();
  void Write(const std::vector<Entry>& calls);
  // Whether there is a file to write to: opens it if there is none, or another one under its name.
  bool Look();
  static void Append(const Entry& entry, std::string& lines);
  // How many lines it has written.
  std::uint64_t Write(std::string_view lines);
  // An attempt has ended so, with an errno or 0: says what is news.
  void Note(int error);

  const std::string path_;
  Metrics& metrics_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::vector<Entry> queue_;
  bool writing_ = false;
  bool ending_ = false;

  // These belong to the thread.
  int file_ = -1;
  absl::Time next_look_ = absl::InfinitePast();
  int error_ = 0;      // of the last attempt
  bool torn_ = false;  // the last line lacks its end

  std::thread thread_;  // the last, as it uses the others
};

}  // namespace tessera
