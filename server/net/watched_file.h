// Files that an operator replaces while the server runs.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "absl/status/statusor.h"

namespace tessera {

// Distinguishes one state of a file from another without reading it. It consists of the device, the
// inode, the size, and the time at which the contents or the permissions last changed, in seconds
// and nanoseconds.
using FileStamp = std::tuple<dev_t, ino_t, off_t, std::int64_t, std::int64_t>;

// Returns the stamp of a file, with all values zero if there is no file.
FileStamp StampOf(const std::string& file);

// Returns the contents of a regular file of at most 1 MiB, without a byte order mark. For any other
// file, returns an error. Its message completes "cannot use FILE: " and never quotes the contents.
// If `refuse_writable` is set, a file to which its group or others may write is also rejected.
absl::StatusOr<std::string> ReadWatched(const std::string& file, bool refuse_writable = false);

}  // namespace tessera
