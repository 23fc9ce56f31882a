// Files that an operator replaces while the server runs.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "absl/status/statusor.h"

namespace tessera {

// Tells one state of a file from another without reading it: device, inode, size, and the time at
// which its content or its permissions last changed, in seconds and nanoseconds.
using FileStamp = std::tuple<dev_t, ino_t, off_t, std::int64_t, std::int64_t>;

// All zero if there is no file.
FileStamp StampOf(const std::string& file);

// Returns the content of a regular file of at most 1 MiB, without a byte order mark. For any other
// file, the message says what is wrong in words that follow "cannot use FILE: ", and never quotes
// the content. refuse_writable: also rejects a file that its group or others may write.
absl::StatusOr<std::string> ReadWatched(const std::string& file, bool refuse_writable = false);

}  // namespace tessera
