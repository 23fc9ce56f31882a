// Reads small text files.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace tessera {

// Returns the content of a file without its byte order mark. Returns INVALID_ARGUMENT if the file
// cannot be read, is empty, or is larger than `most` MiB; the message continues the file's name, as
// in "is larger than 1 MiB". Memory is allocated only for the bytes that are read.
absl::StatusOr<std::string> ReadTextFile(const std::string& file, std::size_t most);

}  // namespace tessera
