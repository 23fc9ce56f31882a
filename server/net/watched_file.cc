#include "server/net/watched_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <string>
#include <system_error>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/client_and_server/word_lines.h"

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
  // O_NONBLOCK is needed because a pipe may have taken the file's place. The checks below apply to
  // the opened file.
  const int fd = open(file.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) return absl::InvalidArgumentError("there is no such file");
  if (fd < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "it cannot be opened: ", std::error_code(errno, std::generic_category()).message()));
  }
  const absl::Cleanup closer = [fd] { close(fd); };
  struct stat status {};
  if (fstat(fd, &status) != 0) return absl::InvalidArgumentError("it cannot be inspected");
  if (!S_ISREG(status.st_mode)) return absl::InvalidArgumentError("it is not a regular file");
  if (refuse_writable && (status.st_mode & (S_IWGRP | S_IWOTH)) != 0)
    return absl::InvalidArgumentError("it is writable by its group or by others");
  std::string text(kLargestFile + 1, '\0');
  std::size_t size = 0;
  while (size < text.size()) {
    const ssize_t more = read(fd, text.data() + size, text.size() - size);
    if (more < 0 && errno == EINTR) continue;
    if (more <= 0) break;
    size += static_cast<std::size_t>(more);
  }
  text.resize(size);
  if (text.empty()) return absl::InvalidArgumentError("it cannot be read, or is empty");
  if (text.size() > kLargestFile) return absl::InvalidArgumentError("it is larger than 1 MiB");
  text.erase(0, text.size() - BehindByteOrderMark(text).size());
  return text;
}

}  // namespace tessera
