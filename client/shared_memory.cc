#include "client/shared_memory.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/error.h"
#include "tessera/v1/shared_memory.pb.h"

namespace tessera {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kLargestAnswer = std::size_t{64} << 10;
constexpr std::string_view kGreeting = "tessera.v1";

absl::Status CannotShare(std::string_view call) {
  const int error = errno;
  return MakeError(absl::StatusCode::kUnavailable, "SHARED_MEMORY_UNAVAILABLE",
                   absl::StrCat("no memory can be shared with the server: ", Absl(call), ": ",
                                std::strerror(error)));
}

// Waits until a packet arrives on the socket or the connection ends.
absl::Status WaitReadable(int fd, absl::Time deadline) {
  for (;;) {
    const double left = absl::ToDoubleMilliseconds(deadline - absl::Now());
    const double most = std::numeric_limits<int>::max();
    pollfd wait = {fd, POLLIN, 0};
    const int ready = poll(&wait, 1, static_cast<int>(std::clamp(left + 1, 0.0, most)));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return CannotShare("poll");
    if (left > 0) continue;
    errno = ETIMEDOUT;
    return CannotShare("poll");
  }
}

}  // namespace

absl::StatusOr<SharedMemory> SharedMemory::Make(const std::string& socket_path, std::size_t bytes,
                                                absl::Duration timeout) {
  SharedMemory memory;
  int file = -1;
  absl::Status status = memory.Allocate(bytes, file);
  if (status.ok()) status = memory.Register(socket_path, file, timeout);
  if (file >= 0) close(file);
  if (!status.ok()) return status;
  return memory;
}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(size_, other.size_);
  std::swap(socket_, other.socket_);
  std::swap(region_, other.region_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (socket_ >= 0) close(socket_);
  if (memory_ != nullptr) munmap(memory_, size_);
}

bool SharedMemory::connected() const {
  // The server sends nothing more, so the socket becomes readable only when the connection ends.
  pollfd wait = {socket_, POLLIN, 0};
  return socket_ >= 0 && poll(&wait, 1, 0) == 0;
}

absl::Status SharedMemory::Allocate(std::size_t bytes, int& file) {
  const std::size_t size = (std::max<std::size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  errno = ENOMEM;
  if (size < bytes || size > std::size_t{std::numeric_limits<off_t>::max()})
    return CannotShare("memfd_create");
  file = memfd_create("tessera", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file < 0) return CannotShare("memfd_create");
  const auto length = static_cast<off_t>(size);
  if (ftruncate(file, length) != 0 || fallocate(file, 0, 0, length) != 0)
    return CannotShare("fallocate");
  // The file is mapped before the server receives it, because the server forbids further writable
  // mappings.
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return CannotShare("mmap");
  memory_ = static_cast<char*>(memory);
  size_ = size;
  if (fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) return CannotShare("fcntl");
  return absl::OkStatus();
}

absl::Status SharedMemory::Register(const std::string& socket_path, int file,
                                    absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  errno = ENAMETOOLONG;
  if (socket_path.size() >= sizeof(name.sun_path)) return CannotShare("connect");
  std::memcpy(name.sun_path, socket_path.data(), socket_path.size());
  // The socket does not block, so a server whose backlog is full counts as one that does not
  // respond.
  socket_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (socket_ < 0 ||
      connect(socket_, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0) {
    return CannotShare("connect");
  }
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec data = {const_cast<char*>(kGreeting.data()), kGreeting.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* part = CMSG_FIRSTHDR(&message);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(part), &file, sizeof(int));
  if (sendmsg(socket_, &message, MSG_NOSIGNAL) < 0) return CannotShare("sendmsg");
  if (absl::Status status = WaitReadable(socket_, deadline); !status.ok()) return status;
  std::string packet(kLargestAnswer, '\0');
  const ssize_t size = recv(socket_, packet.data(), packet.size(), 0);
  if (size < 0) return CannotShare("recv");
  v1::RegisterRegionResponse answer;
  errno = EPROTO;
  if (size == 0 || !answer.ParseFromArray(packet.data(), static_cast<int>(size)))
    return CannotShare("recv");
  if (answer.region().empty()) {
    absl::Status refused =
        MakeError(static_cast<absl::StatusCode>(answer.code()), answer.reason(), answer.message());
    for (const auto& [key, value] : answer.metadata()) SetErrorMetadata(refused, key, value);
    return refused.ok() ? CannotShare("recv") : refused;
  }
  region_ = answer.region();
  return absl::OkStatus();
}

}  // namespace tessera
