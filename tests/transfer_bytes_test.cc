// Transfers to each kind of device and back, in messages of every size, from every offset, in any
// order, and with streams that are broken off. All bytes arrive, and no others.

#include <algorithm>

#include "kernels/client_and_server/crc32c.h"
#include "tests/kernel_fixture.h"
#include "tests/service_fixture.h"

namespace tessera {
namespace {

class TransferBytesTest : public TransferFixture, public testing::WithParamInterface<Backend> {
 protected:
  TransferBytesTest() : TransferFixture(TestOptions(), Devices()) {}
  void SetUp() override { TESSERA_NEED_DEVICE(GetParam()); }

 private:
  // Returns no device if the machine has none. The server then uses the CPU.
  static std::vector<std::unique_ptr<Device>> Devices() {
    std::vector<std::unique_ptr<Device>> devices;
    auto device = OpenDevice(GetParam() == Backend::kCpu ? "cpu" : "cuda:0");
    if (device.ok()) devices.push_back(*std::move(device));
    return devices;
  }
};

TEST_P(TransferBytesTest, EverySizeArrives) {
  for (const std::uint64_t size :
       {std::uint64_t{0}, std::uint64_t{2}, kSlot - 2, kSlot, kSlot + 2, 2 * kSlot, 3 * kSlot + 2,
        kLargestData - 2, kLargestData, kLargestData + 2, 5 * kSlot - 2}) {
    const std::string bytes = Random(size);
    Put("x", bytes);
    std::string data;
    for (const std::uint64_t offset : {std::uint64_t{0}, std::uint64_t{1}, kSlot - 1, kSlot}) {
      if (offset > size) continue;
      for (const std::uint64_t limit : {std::uint64_t{0}, std::uint64_t{1}, kSlot, kSlot + 1}) {
        ASSERT_TRUE(server_.Fetch("x", &data, offset, limit).ok());
        EXPECT_TRUE(data == bytes.substr(offset, limit == 0 ? bytes.npos : limit))
            << size << " bytes, from " << offset << ", at most " << limit;
      }
    }
    ASSERT_TRUE(Delete("x").ok());
  }
}

// Messages of any size, in any order, overwriting each other, with jumps that contain no data.
TEST_P(TransferBytesTest, MessagesApplyInTheirOrder) {
  for (int round = 0; round < 20; ++round) {
    const std::uint64_t size = 2 + 2 * Below(round % 4 == 0 ? 2 * kSlot : 500);
    std::string expected = Random(size);
    Reserve("x", size);
    std::vector<v1::UploadRequest> messages = {At("x", 0, expected)};
    if (expected.size() > kLargestData) messages[0].set_data(expected.substr(0, kLargestData));
    std::uint64_t position = size;
    for (int i = 0; i < 40; ++i) {
      v1::UploadRequest message;
      if (position == size || Below(3) == 0) {
        position = Below(size);
        message.set_offset(position);
      }
      if (Below(5) != 0) {
        const std::string data = Random(1 + Below(std::min(size - position, kLargestData)));
        expected.replace(position, data.size(), data);
        position += data.size();
        message.set_data(data);
        if (Below(2) == 0) message.set_crc32c(Crc32c(data.data(), data.size()));
      }
      messages.push_back(message);
    }
    const grpc::Status status = Upload(messages);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_TRUE(Seal("x").ok());
    EXPECT_TRUE(Fetched("x") == expected) << "round " << round;
    ASSERT_TRUE(Delete("x").ok());
  }
}

// Each stream continues where the previous streams stopped: with the bytes that the server says it
// lacks, or after the bytes that have been read.
TEST_P(TransferBytesTest, BrokenStreamsResume) {
  for (int round = 0; round < 8; ++round) {
    const std::string bytes = Random(2 + 2 * Below(4 * kSlot));
    Reserve("x", bytes.size());
    for (;;) {
      const v1::GetBufferResponse got = Found("x");
      if (got.missing().empty()) break;
      UploadStream upload(server_.buffers());
      bool broken = false;
      for (const v1::ByteRange& missing : got.missing()) {
        // Begins somewhere in the middle, so that later streams find gaps, or sends everything.
        std::uint64_t at = missing.begin();
        if (Below(2) == 0) at += Below(missing.end() - at);
        while (!broken && at < missing.end()) {
          const std::uint64_t size = std::min(missing.end() - at, 1 + Below(2 * kSlot));
          upload.Write(At("x", at, bytes.substr(at, size)));
          at += size;
          broken = Below(4) == 0;
        }
      }
      if (broken) upload.context.TryCancel();
      EXPECT_EQ(upload.Finish().ok(), !broken);
    }
    // A stream that was broken off may still be writing.
    ASSERT_TRUE(Eventually([&] { return Seal("x").ok(); }));
    std::string data;
    while (data.size() < bytes.size()) {
      grpc::ClientContext context;
      v1::DownloadRequest request;
      request.set_name("x");
      request.set_offset(data.size());
      auto reader = server_.buffers().Download(&context, request);
      v1::DownloadResponse response;
      do {
        ASSERT_TRUE(reader->Read(&response));
        EXPECT_EQ(response.offset(), data.size());
        data += response.data();
      } while (data.size() < bytes.size() && Below(3) != 0);
      context.TryCancel();
      (void)reader->Finish();
    }
    EXPECT_TRUE(data == bytes) << "round " << round;
    ASSERT_TRUE(Delete("x").ok());
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, TransferBytesTest, testing::Values(Backend::kCpu, Backend::kCuda),
                         [](const auto& test) { return std::string(Name(test.param)); });

}  // namespace
}  // namespace tessera
