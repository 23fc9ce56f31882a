#include "server/watched_file.h"

#include <sys/stat.h>

#include <cstddef>
#include <fstream>

#include "absl/status/status.h"

namespace tessera {
namespace {

constexpr std::size_t kLargestFile = std::size_t{1} << 20;

}  // namespace

FileStamp StampOf(const std::string& file) {
  struct stat status {};
  if (file.empty() || stat(file.c_str(), &status) != 0) return {};
  return {status.st_dev, status.st_ino, status.st_size, status.st_ctim.tv_sec,
          status.st_ctim.tv_nsec};
}

absl::StatusOr<std::string> ReadWatched(const std::string& file, bool refuse_writable) {
  struct stat status {};
  if (stat(file.c_str(), &status) != 0) return absl::InvalidArgumentError("there is no such file");
  if (!S_ISREG(status.st_mode)) return absl::InvalidArgumentError("it is no regular file");
  if (refuse_writable && (status.st_mode & (S_IWGRP | S_IWOTH)) != 0)
    return absl::InvalidArgumentError("its group or others may write it");
  std::ifstream in(file, std::ios::binary);
  std::string text(kLargestFile + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(in.gcount()));
  if (text.empty()) return absl::InvalidArgumentError("it cannot be read, or is empty");
  if (text.size() > kLargestFile) return absl::InvalidArgumentError("it is larger than 1 MiB");
  return text;
}

}  // namespace tessera
