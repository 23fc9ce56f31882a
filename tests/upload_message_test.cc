// Upload messages as UploadMessage reads them, compared with protobuf's own parser.
#include "server/transfers/upload_message.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "google/protobuf/stubs/logging.h"

namespace tessera {
namespace {

class UploadMessageTest : public testing::Test {
 protected:
  std::size_t Below(std::size_t n) { return random_() % n; }
  bool OneOf(int n) { return Below(static_cast<std::size_t>(n)) == 0; }

  std::string Varint(std::uint64_t value, std::size_t padding = 0) {
    std::string bytes;
    for (; value > 127; value >>= 7) bytes += static_cast<char>(value | 128);
    bytes += static_cast<char>(value);
    for (; padding > 0; --padding) {
      bytes.back() = static_cast<char>(bytes.back() | 128);
      bytes += '\0';
    }
    return bytes;
  }

  std::string Text(std::size_t longest) {
    std::string text(Below(longest + 1), ' ');
    for (char& c : text) c = static_cast<char>(OneOf(50) ? Below(256) : 'a' + Below(26));
    return text;
  }

  // Returns a field of any number and any wire type, valid or not.
  std::string Field(int depth = 0) {
    const std::uint64_t number = OneOf(4) ? 1 + Below(1 << 20) : 1 + Below(9);
    const std::size_t type =
        Below(40) < 36 ? std::vector<std::size_t>{0, 1, 2, 5}[Below(4)] : Below(8);
    std::string bytes = Varint(number << 3 | type, OneOf(20) ? Below(4) : 0);
    switch (type) {
      case 0:
        return bytes + Varint(random_() >> Below(64), OneOf(20) ? Below(8) : 0);
      case 1:
        return bytes + std::string(8, 'x');
      case 2: {
        const std::string text = Text(300);
        return bytes + Varint(text.size(), OneOf(20) ? Below(4) : 0) + text;
      }
      case 3: {
        for (std::size_t n = Below(3); n > 0 && depth < 5; --n) bytes += Field(depth + 1);
        return bytes + Varint(number << 3 | 4);
      }
      case 5:
        return bytes + "1234";
      default:
        return bytes;
    }
  }

  // Returns a message as clients write it, possibly with other fields.
  std::string Message() {
    std::string bytes;
    for (std::size_t parts = 1 + Below(3); parts > 0; --parts) {
      v1::UploadRequest message;
      if (OneOf(2)) message.set_name(Text(20));
      if (OneOf(2)) {
        message.mutable_spec()->set_dtype(static_cast<v1::Dtype>(Below(10)));
        for (std::size_t n = Below(4); n > 0; --n) {
          message.mutable_spec()->add_shape(static_cast<std::int64_t>(random_() >> Below(64)));
        }
        if (OneOf(2)) message.mutable_spec()->mutable_ttl()->set_seconds(5);
      }
      if (OneOf(2)) message.set_offset(random_() >> Below(64));
      if (OneOf(2)) message.set_data(Text(OneOf(10) ? 20000 : 200));
      if (OneOf(3)) message.set_version(random_() >> Below(64));
      if (OneOf(2)) message.set_crc32c(static_cast<std::uint32_t>(random_()));
      if (OneOf(3)) message.set_buffer_crc32c(static_cast<std::uint32_t>(random_()));
      if (OneOf(2)) bytes += Field();
      bytes += message.SerializePartialAsString();
    }
    return bytes;
  }

  grpc::ByteBuffer InSlices(const std::string& bytes) {
    std::vector<grpc::Slice> slices;
    const std::size_t longest = std::vector<std::size_t>{1, 10, 100, 10000}[Below(4)];
    for (std::size_t at = 0; at < bytes.size();) {
      const std::size_t size = std::min(Below(longest + 1), bytes.size() - at);
      slices.emplace_back(bytes.data() + at, size);
      at += size;
    }
    if (OneOf(2)) slices.emplace_back("");
    return grpc::ByteBuffer(slices.data(), slices.size());
  }

  // Returns whether protobuf accepts the message. UploadMessage must agree.
  bool Check(const std::string& bytes) {
    v1::UploadRequest expected;
    const bool valid = expected.ParseFromString(bytes);
    UploadMessage message;
    EXPECT_EQ(message.Parse(InSlices(bytes)), valid) << testing::PrintToString(bytes);
    std::string data;
    for (const HostBytes& piece : message.data()) {
      data.append(static_cast<const char*>(piece.data), piece.size);
    }
    EXPECT_EQ(message.data_size(), data.size());
    if (!valid) expected.Clear();
    EXPECT_EQ(data, expected.data()) << testing::PrintToString(bytes);
    v1::UploadRequest header = message.header();
    header.clear_data();
    expected.clear_data();
    EXPECT_EQ(header.SerializeAsString(), expected.SerializeAsString())
        << testing::PrintToString(bytes);
    return valid;
  }

  // Returns the number of iterations, which TESSERA_FUZZ increases.
  static int Rounds(int usual) {
    const char* factor = std::getenv("TESSERA_FUZZ");
    return usual * (factor == nullptr ? 1 : std::atoi(factor));
  }

  std::mt19937_64 random_{1};
  // Suppresses protobuf's log messages about invalid text.
  google::protobuf::LogSilencer silence_;
};

TEST_F(UploadMessageTest, ReadsWhatProtobufReads) {
  EXPECT_TRUE(Check(""));
  int valid = 0;
  const int rounds = Rounds(20000);
  for (int i = 0; i < rounds && !HasFailure(); ++i) valid += Check(Message()) ? 1 : 0;
  EXPECT_GT(valid, rounds / 4);
  EXPECT_LT(valid, rounds);
}

TEST_F(UploadMessageTest, RefusesWhatProtobufRefuses) {
  for (int i = 0; i < Rounds(300) && !HasFailure(); ++i) {
    std::string bytes = Message();
    if (bytes.size() > 400) bytes.resize(400);
    for (std::size_t size = 0; size < bytes.size(); ++size) Check(bytes.substr(0, size));
  }
  for (int i = 0; i < Rounds(20000) && !HasFailure(); ++i) {
    std::string bytes = Message();
    for (std::size_t n = 1 + Below(4); n > 0 && !bytes.empty(); --n) {
      const std::size_t at = Below(std::min<std::size_t>(bytes.size(), OneOf(2) ? 20 : 100000));
      if (OneOf(3)) {
        bytes.erase(at, 1);
      } else if (OneOf(3)) {
        bytes.insert(at, 1, static_cast<char>(Below(256)));
      } else {
        bytes[at] = static_cast<char>(OneOf(2) ? Below(256) : bytes[at] ^ (1 << Below(8)));
      }
    }
    Check(bytes);
  }
  for (int i = 0; i < Rounds(20000) && !HasFailure(); ++i) {
    std::string bytes(Below(30), ' ');
    for (char& c : bytes) c = static_cast<char>(OneOf(2) ? Below(64) : Below(256));
    Check(bytes);
  }
}

TEST_F(UploadMessageTest, TinySlicesAreCopiedIntoOne) {
  v1::UploadRequest message;
  message.set_data(std::string(100'000, 'x'));
  const std::string bytes = message.SerializeAsString();
  for (const auto& [size, pieces] :
       {std::pair<std::size_t, std::size_t>{1, 1}, {255, 1}, {10'000, 11}}) {
    std::vector<grpc::Slice> slices;
    for (std::size_t at = 0; at < bytes.size(); at += size)
      slices.emplace_back(bytes.data() + at, std::min(size, bytes.size() - at));
    UploadMessage read;
    ASSERT_TRUE(read.Parse(grpc::ByteBuffer(slices.data(), slices.size())));
    EXPECT_EQ(read.data_size(), 100'000U);
    EXPECT_EQ(read.data().size(), pieces) << size;
  }
}

// Cases that hardly ever occur in random messages.
TEST_F(UploadMessageTest, TheEdgesOfTheFormat) {
  EXPECT_TRUE(Check(std::string("\xa2\x80\x80\x80\x00\x01x", 7))) << "a tag of five bytes";
  EXPECT_TRUE(Check(std::string("\x22\x81\x80\x80\x80\x00x", 7))) << "a length of five bytes";
  EXPECT_FALSE(Check(std::string("\x22\x81\x80\x80\x80\x80\x00x", 8)));
  EXPECT_FALSE(Check(std::string("\x00\x00", 2))) << "tag 0";
  EXPECT_FALSE(Check(std::string("\x02\x00", 2))) << "field 0";
  EXPECT_TRUE(Check("\x23\x22\x01x\x24")) << "a group of data's number with a field of it inside";
  EXPECT_FALSE(Check("\x23\x22\x01x\x2c")) << "a group that ends as another one";
  EXPECT_TRUE(Check(std::string("\x78") + std::string(9, '\xff') + '\1'))
      << "a varint of ten bytes";
  EXPECT_FALSE(Check(std::string("\x78") + std::string(10, '\xff') + '\1'));
}

TEST_F(UploadMessageTest, DataStaysWhereItIs) {
  v1::UploadRequest request;
  request.set_name("x");
  request.set_data(std::string(100000, 'd'));
  request.set_version(3);
  const std::string bytes = request.SerializeAsString();
  const grpc::Slice slices[] = {grpc::Slice(bytes.data(), 50000),
                                grpc::Slice(bytes.data() + 50000, bytes.size() - 50000)};
  UploadMessage message;
  ASSERT_TRUE(message.Parse(grpc::ByteBuffer(slices, 2)));
  ASSERT_EQ(message.data().size(), 2u);
  EXPECT_EQ(message.data()[1].data, slices[1].begin());
  EXPECT_TRUE(message.header().data().empty());
  message.Clear();
  EXPECT_EQ(message.data_size(), 0u);
  EXPECT_TRUE(message.data().empty());
}

}  // namespace
}  // namespace tessera
