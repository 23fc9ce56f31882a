// Upload messages as the server reads them, in slices, compared with protobuf's own parser. The
// first byte says how long the slices are.
#include <algorithm>
#include <string>
#include <vector>

#include "google/protobuf/stubs/logging.h"
#include "google/protobuf/util/message_differencer.h"
#include "server/transfers/upload_message.h"
#include "tests/fuzz/fuzz.h"

namespace tessera {
namespace {

void Check(std::string_view bytes, std::size_t longest) {
  std::vector<grpc::Slice> slices;
  for (std::size_t at = 0; at < bytes.size(); at += longest) {
    const std::string_view part = bytes.substr(at, longest);
    slices.emplace_back(part.data(), part.size());
    if (at % 3 == 0) slices.emplace_back("");
  }
  UploadMessage message;
  const bool parsed = message.Parse(grpc::ByteBuffer(slices.data(), slices.size()));
  v1::UploadRequest expected;
  Require(parsed == expected.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())),
          "a message that one parser takes and the other refuses");
  if (!parsed) return;
  std::string data;
  for (const HostBytes& piece : message.data())
    data.append(static_cast<const char*>(piece.data), piece.size);
  Require(data.size() == message.data_size() && data == expected.data(), "other data");
  v1::UploadRequest header = message.header();
  header.clear_data();
  expected.clear_data();
  Require(google::protobuf::util::MessageDifferencer::Equals(header, expected), "another header");
}

}  // namespace
}  // namespace tessera

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const google::protobuf::LogSilencer quiet;
  if (size == 0) return 0;
  tessera::Check(tessera::Text(data + 1, size - 1), 1 + data[0] % 64u);
  return 0;
}
