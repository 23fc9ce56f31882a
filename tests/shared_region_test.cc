// Regions of shared memory: which files are accepted, what they cost, and when they end.
#include "server/buffers/shared_region.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "server/devices/chores.h"
#include "server/shared_memory/region_listener.h"
#include "tessera/v1/shared_memory.pb.h"
#include "tests/fake_device.h"
#include "tests/temporary_file.h"

namespace tessera {
namespace {

constexpr std::size_t kPage = 4096;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

// A client's file and its mapping.
class File {
 public:
  explicit File(std::size_t size, int seals = kSeals, bool allocated = true)
      : size_(size), file_(memfd_create("tessera_test_region", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    EXPECT_EQ(ftruncate(file_.get(), static_cast<off_t>(size)), 0);
    if (allocated && size > 0) {
      EXPECT_EQ(fallocate(file_.get(), 0, 0, static_cast<off_t>(size)), 0);
    }
    if (size > 0) {
      memory_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
    }
    EXPECT_EQ(fcntl(file_.get(), F_ADD_SEALS, seals), 0);
  }
  ~File() {
    if (memory_ != MAP_FAILED) munmap(memory_, size_);
  }
  const Descriptor& descriptor() const { return file_; }
  char* data() const { return static_cast<char*>(memory_); }

 private:
  const std::size_t size_;
  Descriptor file_;
  void* memory_ = MAP_FAILED;
};

// Returns how often this process has files of the test mapped, including its own mappings.
int Mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:tessera_test_region") != line.npos) ++count;
  }
  return count;
}

class SharedRegionTest : public ::testing::Test {
 protected:
  // field: the part of the region that a BAD_REGION error names.
  void ExpectRefused(const Descriptor& file, const std::string& field,
                     const std::string& reason = "BAD_REGION") {
    const int mapped = Mappings();
    const absl::StatusOr<std::string> token = regions_.Add(file);
    ASSERT_FALSE(token.ok());
    EXPECT_EQ(ErrorReason(token.status()), reason) << token.status();
    EXPECT_EQ(ErrorMetadata(token.status())["field"], field);
    EXPECT_EQ(bytes_.used(), 0);
    EXPECT_EQ(count_.used(), 0);
    EXPECT_EQ(Mappings(), mapped);
  }

  FakeDevice first_, second_;
  Budget bytes_{16 * kPage};
  Budget count_{3};
  SharedRegions regions_{{&first_, &second_}, bytes_, count_};
};

TEST_F(SharedRegionTest, IsTheClientsMemory) {
  const File file(2 * kPage);
  const absl::StatusOr<std::string> token = regions_.Add(file.descriptor());
  ASSERT_TRUE(token.ok()) << token.status();
  EXPECT_EQ(token->size(), SharedRegions::kTokenBytes);
  const auto region = regions_.Find(*token);
  ASSERT_TRUE(region.ok()) << region.status();
  std::strcpy(file.data() + kPage, "from the client");
  EXPECT_STREQ((*region)->At(kPage, 16), "from the client");
  std::strcpy((*region)->At(0, 16), "from the server");
  EXPECT_STREQ(file.data(), "from the server");
  EXPECT_EQ(first_.Count(FakeDevice::Step::kRegister), 1);
  EXPECT_EQ(second_.Count(FakeDevice::Step::kRegister), 1);
}

TEST_F(SharedRegionTest, RangesAreCheckedIn64Bits) {
  const File file(2 * kPage);
  const auto region = regions_.Find(*regions_.Add(file.descriptor()));
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  const auto inside = [&](std::uint64_t offset, std::uint64_t size) {
    return (*region)->At(offset, size) != nullptr;
  };
  using Ranges = std::vector<std::pair<std::uint64_t, std::uint64_t>>;
  for (const auto& [offset, size] :
       Ranges{{0, 0}, {0, 2 * kPage}, {2 * kPage, 0}, {2 * kPage - 1, 1}})
    EXPECT_TRUE(inside(offset, size)) << offset << " " << size;
  for (const auto& [offset, size] : Ranges{{0, 2 * kPage + 1},
                                           {2 * kPage, 1},
                                           {2 * kPage + 1, 0},
                                           {1, kMost},
                                           {kMost, 1},
                                           {kMost, kMost},
                                           {kMost - kPage + 1, 2 * kPage}})
    EXPECT_FALSE(inside(offset, size)) << offset << " " << size;
}

TEST_F(SharedRegionTest, TakesFilesThatCannotLosePages) {
  for (const int seals :
       {0, F_SEAL_GROW, F_SEAL_SHRINK, kSeals | F_SEAL_SEAL, kSeals | F_SEAL_FUTURE_WRITE})
    ExpectRefused(File(kPage, seals).descriptor(), "seals");
  ExpectRefused(File(0).descriptor(), "size");
  ExpectRefused(File(kPage + 1).descriptor(), "size");
  ExpectRefused(File(4 * kPage, kSeals, /*allocated=*/false).descriptor(), "allocation");
  ExpectRefused(Descriptor(open("/dev/null", O_RDWR | O_CLOEXEC)), "file");
  ExpectRefused(Descriptor(open("/proc/self/exe", O_RDONLY | O_CLOEXEC)), "file");
}

TEST_F(SharedRegionTest, SealsTheFileAgainstHolesAndNewWriters) {
  const File file(4 * kPage);
  ASSERT_TRUE(regions_.Add(file.descriptor()).ok());
  const int fd = file.descriptor().get();
  EXPECT_NE(ftruncate(fd, 0), 0);
  EXPECT_NE(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kPage), 0);
  EXPECT_NE(madvise(file.data(), kPage, MADV_REMOVE), 0);
  EXPECT_EQ(mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  EXPECT_NE(write(fd, "x", 1), 1);
  file.data()[0] = 'x';  // The earlier mapping can still write.
  EXPECT_EQ(ErrorReason(regions_.Add(file.descriptor()).status()), "BAD_REGION") << "again";
}

TEST_F(SharedRegionTest, MemoryAndCountAreBounded) {
  ExpectRefused(File(17 * kPage).descriptor(), "", "SHARED_MEMORY_EXHAUSTED");
  const File a(8 * kPage), b(8 * kPage), c(kPage), d(kPage), e(kPage);
  const auto first = regions_.Add(a.descriptor());
  const auto second = regions_.Add(b.descriptor());
  ASSERT_TRUE(first.ok() && second.ok());
  const absl::Status full = regions_.Add(c.descriptor()).status();
  EXPECT_EQ(ErrorReason(full), "SHARED_MEMORY_EXHAUSTED");
  EXPECT_EQ(ErrorMetadata(full)["requested"], std::to_string(kPage));
  EXPECT_EQ(ErrorMetadata(full)["free"], "0");
  EXPECT_EQ(ErrorMetadata(full)["total"], std::to_string(16 * kPage));
  regions_.Remove(*first);
  ASSERT_TRUE(regions_.Add(c.descriptor()).ok());
  ASSERT_TRUE(regions_.Add(d.descriptor()).ok());
  const absl::Status many = regions_.Add(e.descriptor()).status();
  EXPECT_EQ(ErrorReason(many), "TOO_MANY_REGIONS");
  EXPECT_EQ(ErrorMetadata(many)["limit"], "3");
}

TEST_F(SharedRegionTest, AUserThatSharesHasHalf) {
  const File nine(9 * kPage), eight(8 * kPage), another(kPage), third(kPage);
  EXPECT_EQ(ErrorReason(regions_.Add(nine.descriptor(), 7).status()), "SHARED_MEMORY_EXHAUSTED");
  const auto first = regions_.Add(eight.descriptor(), 7);
  ASSERT_TRUE(first.ok());
  // A user may have only one of three regions.
  const absl::Status many = regions_.Add(another.descriptor(), 7).status();
  EXPECT_EQ(ErrorReason(many), "TOO_MANY_REGIONS");
  EXPECT_EQ(ErrorMetadata(many)["used"], "1");
  EXPECT_EQ(ErrorMetadata(many)["limit"], "1");
  // Other users have the same limit. A caller that names no user may have all that is left.
  ASSERT_TRUE(regions_.Add(another.descriptor(), 8).ok());
  ASSERT_TRUE(regions_.Add(third.descriptor()).ok());
  regions_.Remove(*first);
  EXPECT_TRUE(regions_.Add(nine.descriptor()).ok()) << "a refused file is unchanged";
  EXPECT_EQ(count_.used(), 3);
  // Every user may have the only region.
  Budget bytes(16 * kPage), one(1);
  SharedRegions single({&first_}, bytes, one);
  EXPECT_TRUE(single.Add(File(kPage).descriptor(), 7).ok());
}

TEST_F(SharedRegionTest, EndsWithItsLastUser) {
  const int before = Mappings();
  std::shared_ptr<const SharedRegion> user;
  {
    const File file(kPage);
    const std::string token = *regions_.Add(file.descriptor());
    std::strcpy(file.data(), "kept");
    user = *regions_.Find(token);
    EXPECT_NE(regions_.Remove(token), nullptr);
    EXPECT_EQ(regions_.Remove(token), nullptr);
    EXPECT_EQ(ErrorReason(regions_.Find(token).status()), "REGION_NOT_FOUND");
  }
  EXPECT_STREQ(user->At(0, 5), "kept");
  EXPECT_EQ(bytes_.used(), kPage);
  EXPECT_EQ(Mappings(), before + 1);
  user.reset();
  EXPECT_EQ(bytes_.used(), 0);
  EXPECT_EQ(count_.used(), 0);
  EXPECT_EQ(Mappings(), before);
}

TEST_F(SharedRegionTest, ADeviceThatCannotPinLeavesNothing) {
  second_.Fail(FakeDevice::Step::kRegister, DeviceError::Kind::kOutOfHostMemory);
  const File file(kPage);
  ExpectRefused(file.descriptor(), "", "HOST_MEMORY_EXHAUSTED");
}

TEST_F(SharedRegionTest, NoTokenIsGivenTwiceOrGuessed) {
  std::set<std::string> tokens;
  for (int i = 0; i < 100; ++i) {
    const File file(kPage);
    const std::string token = *regions_.Add(file.descriptor());
    EXPECT_TRUE(tokens.insert(token).second);
    for (std::string other : {token.substr(1), token + "x", std::string(), std::string(16, '\0')})
      EXPECT_FALSE(regions_.Find(other).ok());
    regions_.Remove(token);
  }
}

TEST_F(SharedRegionTest, ManyThreadsAddFindAndRemove) {
  std::vector<std::jthread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        const File file(kPage);
        const absl::StatusOr<std::string> token = regions_.Add(file.descriptor());
        ASSERT_TRUE(token.ok()) << token.status();
        file.data()[7] = 'x';
        EXPECT_EQ(*(*regions_.Find(*token))->At(7, 1), 'x');
        EXPECT_NE(regions_.Remove(*token), nullptr);
      }
    });
  }
  threads.clear();
  EXPECT_EQ(bytes_.used(), 0);
  EXPECT_EQ(Mappings(), 0);
}

// A client's end of a connection. Its calls fail rather than wait for longer than 20 seconds.
class Handshake {
 public:
  Handshake() {
    const timeval patience = {.tv_sec = 20, .tv_usec = 0};
    setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  }
  // Returns 0 or errno.
  int Connect(const std::string& path) {
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    path.copy(name.sun_path, sizeof(name.sun_path) - 1);
    return connect(socket_.get(), reinterpret_cast<sockaddr*>(&name), sizeof name) == 0 ? 0 : errno;
  }
  // Registers a file. Returns the reason of the server's refusal, or a text if none arrived.
  std::string Register(const Descriptor& file) {
    std::string greeting(RegionListener::kGreeting);
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    iovec data = {greeting.data(), greeting.size()};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = file.get();
    std::memcpy(CMSG_DATA(part), &fd, sizeof fd);
    if (sendmsg(socket_.get(), &message, MSG_NOSIGNAL) < 0) return std::strerror(errno);
    char packet[4096];
    const ssize_t size = recv(socket_.get(), packet, sizeof packet, 0);
    if (size <= 0) return size == 0 ? "closed" : std::strerror(errno);
    v1::RegisterRegionResponse response;
    return response.ParseFromArray(packet, static_cast<int>(size)) ? response.reason() : "garbage";
  }

 private:
  const Descriptor socket_{socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)};
};

TEST_F(SharedRegionTest, EveryClientThatHasConnectedIsToldOfADrain) {
  constexpr std::size_t kClients = 100;  // more than the listener accepts at once
  const TemporaryFile path;
  std::promise<void> closed;
  // The listener's thread waits here when it has accepted the first client.
  const auto admits = [is_closed = closed.get_future().share()](uid_t) {
    is_closed.wait();
    return true;
  };
  Chores chores(1, 8);
  const auto listener = RegionListener::Open(
      path.path(), {}, kClients, {.admits = admits, .shares = [](uid_t) { return false; }},
      regions_, chores);
  ASSERT_TRUE(listener.ok()) << listener.status();
  std::vector<Handshake> clients(kClients);
  for (Handshake& client : clients) ASSERT_EQ(client.Connect(path.path()), 0);
  (*listener)->Close();
  closed.set_value();
  EXPECT_EQ(Handshake().Connect(path.path()), ENOENT);
  const File file(kPage);
  for (Handshake& client : clients) ASSERT_EQ(client.Register(file.descriptor()), "DRAINING");
}

}  // namespace
}  // namespace tessera
