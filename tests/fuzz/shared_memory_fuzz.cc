// The handover of shared memory: packets with descriptors of any kind. The first byte is the number
// of descriptors, and one byte for each of them gives its kind. The rest is the packet. Afterwards
// the server keeps neither memory nor a descriptor.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/compute.h"
#include "server/buffers/shared_region.h"
#include "server/devices/chores.h"
#include "server/observe/log.h"
#include "server/shared_memory/region_listener.h"
#include "tessera/v1/shared_memory.pb.h"
#include "tests/fuzz/fuzz.h"
#include "tests/temporary_file.h"

namespace tessera {
namespace {

// Makes a file of that many bytes. kind says which seals it has, and whether its pages are
// allocated.
int MemoryFile(std::size_t size, unsigned kind) {
  const int file = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) return file;
  if ((kind & 1) == 0 && size > 0) fallocate(file, 0, 0, static_cast<off_t>(size));
  int seals = 0;
  if ((kind & 2) == 0) seals |= F_SEAL_SHRINK;
  if ((kind & 4) == 0) seals |= F_SEAL_GROW;
  if ((kind & 8) != 0) seals |= F_SEAL_WRITE;
  if ((kind & 16) != 0) seals |= F_SEAL_SEAL;
  fcntl(file, F_ADD_SEALS, seals);
  return file;
}

int OpenSome(unsigned kind) {
  constexpr std::size_t kSizes[] = {4096, 8192, 0, 1, 4097, 1 << 20, 1 << 22};
  switch (kind >> 5) {
    case 0:
      return eventfd(0, EFD_CLOEXEC);
    case 1:
      return open("/dev/null", O_RDWR | O_CLOEXEC);
    case 2:
      return open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    case 3:
      return open("/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    case 4:
      return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    case 5:
      return open("/tmp", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
    case 6:
      return MemoryFile(kSizes[0], kind & 31);
    default:
      return MemoryFile(kSizes[kind % std::size(kSizes)], 0);
  }
}

class Target {
 public:
  Target() {
    SetUpLog("off", false);
    auto listener = RegionListener::Open(socket_.path(), {}, 64,
                                         {[](uid_t) { return true; }, [](uid_t) { return false; }},
                                         regions_, chores_);
    Require(listener.ok(), "no listener");
    listener_ = *std::move(listener);
  }

  void Check(std::string_view input) {
    const std::size_t wanted = static_cast<unsigned char>(input[0]) % 6u;
    input.remove_prefix(1);
    const std::size_t count = std::min(wanted, input.size());
    std::vector<Descriptor> files;
    for (std::size_t i = 0; i < count; ++i)
      files.emplace_back(OpenSome(static_cast<unsigned char>(input[i])));
    input.remove_prefix(count);
    const std::size_t before = OpenDescriptors();
    {
      const Descriptor client = Connect();
      SendPacket(client.get(), input, files);
      // There must be a response, or the connection must end.
      const bool silent = input.empty() && count == 0;
      if (silent) shutdown(client.get(), SHUT_WR);
      AwaitInput(client.get());
      char bytes[8192];
      const ssize_t size = recv(client.get(), bytes, sizeof bytes, 0);
      if (size > 0) {
        v1::RegisterRegionResponse answer;
        Require(answer.ParseFromArray(bytes, static_cast<int>(size)), "an answer that is none");
        Require(answer.region().empty() != (answer.code() == 0), "an answer of both kinds");
        Require(answer.region().empty() || (input == RegionListener::kGreeting && count == 1),
                "a region for a packet that asks for none");
      }
    }
    for (int i = 0; bytes_.used() != 0 || count_.used() != 0 || OpenDescriptors() > before; ++i) {
      Require(i < 60'000, "a region, or a descriptor, stays");
      absl::SleepFor(absl::Microseconds(i < 100 ? 10 : 1000));
    }
  }

 private:
  static std::size_t OpenDescriptors() {
    std::size_t count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
      ++count;
    return count;
  }

  Descriptor Connect() const {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, socket_.path().c_str(), sizeof address.sun_path - 1);
    Descriptor client(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    Require(connect(client.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0,
            "no connection");
    return client;
  }

  static void SendPacket(int fd, std::string_view packet, const std::vector<Descriptor>& files) {
    alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
    iovec place = {const_cast<char*>(packet.data()), packet.size()};
    msghdr message{};
    message.msg_iov = &place;
    message.msg_iovlen = 1;
    if (!files.empty()) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(files.size() * sizeof(int));
      cmsghdr* part = CMSG_FIRSTHDR(&message);
      part->cmsg_level = SOL_SOCKET;
      part->cmsg_type = SCM_RIGHTS;
      part->cmsg_len = CMSG_LEN(files.size() * sizeof(int));
      for (std::size_t i = 0; i < files.size(); ++i) {
        const int file = files[i].get();
        std::memcpy(CMSG_DATA(part) + i * sizeof(int), &file, sizeof(int));
      }
    }
    static_cast<void>(sendmsg(fd, &message, MSG_NOSIGNAL));
  }

  const TemporaryFile socket_;
  const std::unique_ptr<Device> device_ = *OpenDevice("cpu");
  Budget bytes_{2 << 20};
  Budget count_{4};
  SharedRegions regions_{{device_.get()}, bytes_, count_};
  Chores chores_{1, 16};
  std::unique_ptr<RegionListener> listener_;
};

}  // namespace
}  // namespace tessera

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static tessera::Target target;
  if (size > 0) target.Check(tessera::Text(data, size));
  return 0;
}
