// The progress of a download, over any number of attempts. Internal to the library.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/guarded.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/crc32c.h"

namespace tessera {

// field: the message field that holds the checksum.
inline absl::Status BadChecksum(const std::string& name, std::string_view field,
                                std::uint32_t expected, std::uint32_t actual) {
  const auto text = [](std::uint32_t crc) { return absl::StrCat(absl::Hex(crc, absl::kZeroPad8)); };
  return MakeError(
      absl::StatusCode::kDataLoss, "BAD_CHECKSUM",
      absl::StrCat("bytes of '", name, "' were damaged in transit: their checksum is ",
                   text(actual), " and not ", text(expected)),
      {{"field", std::string(field)}, {"expected", text(expected)}, {"actual", text(actual)}});
}

// Returns the number of bytes that a download of the buffer delivers.
inline std::uint64_t WantedBytes(const v1::Buffer& buffer, const DownloadOptions& options) {
  const std::uint64_t rest = buffer.size_bytes() - std::min(options.offset, buffer.size_bytes());
  return options.limit > 0 ? std::min(options.limit, rest) : rest;
}

inline absl::Status Changed(const std::string& name) {
  return MakeError(absl::StatusCode::kAborted, "BUFFER_CHANGED",
                   absl::StrCat("'", name, "' was replaced during its download"));
}

// Compares the checksum of the bytes with the buffer's, if all of the buffer has been downloaded
// and the server knows its checksum.
inline absl::Status CheckWhole(const v1::Buffer& buffer, const DownloadOptions& options,
                               std::uint64_t bytes, std::uint32_t checksum) {
  if (!options.checksums || bytes != buffer.size_bytes() || !buffer.has_crc32c() ||
      checksum == buffer.crc32c())
    return absl::OkStatus();
  return BadChecksum(buffer.name(), "buffer.crc32c", buffer.crc32c(), checksum);
}

class Received {
 public:
  // All arguments must outlive this object.
  Received(const std::string& name, const RangeSink& sink, const DownloadOptions& options)
      : name_(name), sink_(sink), options_(options) {}

  // The buffer as described by the first message.
  const std::optional<v1::Buffer>& buffer() const { return buffer_; }
  std::uint64_t bytes() const { return bytes_; }
  bool IsAll() const { return buffer_ && bytes_ == WantedBytes(*buffer_, options_); }

  // Takes the description of the buffer, which must precede the first bytes.
  absl::Status Take(const v1::Buffer& buffer) {
    if (buffer_) return buffer_->version() == buffer.version() ? absl::OkStatus() : Changed(name_);
    buffer_ = buffer;
    return CallGuarded([&] { return sink_(buffer, options_.offset, {}); });
  }

  // Takes the next bytes, which have this offset in the buffer. expected: their checksum.
  absl::Status Take(std::uint64_t offset, std::string_view bytes,
                    std::optional<std::uint32_t> expected = std::nullopt) {
    if (!buffer_ || offset != options_.offset + bytes_)
      return absl::InternalError("the parts of a download are not contiguous");
    if (options_.checksums) {
      const std::uint32_t crc = Crc32c(bytes.data(), bytes.size());
      if (expected && crc != *expected) return BadChecksum(name_, "crc32c", *expected, crc);
      checksum_ = Crc32cCombine(checksum_, crc, bytes.size());
    }
    bytes_ += bytes.size();
    return CallGuarded([&] { return sink_(*buffer_, offset, bytes); });
  }

  // Must be called when the download has ended. Returns the buffer, or an error if bytes are
  // missing or damaged. checksum: unless null, receives the checksum of the bytes.
  absl::StatusOr<v1::Buffer> Finish(std::uint32_t* checksum) {
    if (!buffer_) return absl::InternalError("the download ended without a response");
    if (!IsAll()) return absl::InternalError("the download ended early");
    absl::Status wrong = CheckWhole(*buffer_, options_, bytes_, checksum_);
    if (!wrong.ok()) return wrong;
    if (checksum != nullptr) *checksum = checksum_;
    return *std::move(buffer_);
  }

  // Whether the error means that the buffer was replaced between two parts of the download. If the
  // caller specified a version, the server's error says what is wrong.
  bool IsChange(const absl::Status& error) const {
    return buffer_ && options_.version == 0 && ErrorReason(error) == "VERSION_MISMATCH";
  }

 private:
  const std::string& name_;
  const RangeSink& sink_;
  const DownloadOptions& options_;
  std::optional<v1::Buffer> buffer_;
  std::uint64_t bytes_ = 0;
  std::uint32_t checksum_ = 0;  // checksum of the bytes received so far
};

}  // namespace tessera
