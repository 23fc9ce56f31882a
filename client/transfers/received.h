// The progress of a download, over any number of attempts. Internal to the library.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/rpc/requests.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/crc32c.h"

namespace tessera {

// `field` is the message field that holds the checksum.
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

class Received {
 public:
  // All arguments must outlive this object. The sink must not throw.
  Received(const std::string& name, const RangeSink& sink, const DownloadOptions& options)
      : name_(name), sink_(sink), options_(options) {}

  // The buffer as described by the first message.
  std::optional<v1::Buffer>& buffer() { return buffer_; }
  // The number of bytes that the sink has accepted.
  std::uint64_t bytes() const { return bytes_; }
  std::uint32_t checksum() const { return checksum_; }
  bool IsAll() const { return buffer_ && bytes_ == WantedBytes(*buffer_, options_); }

  // Takes the description of the buffer, which must precede the first bytes.
  absl::Status Take(const v1::Buffer& buffer) {
    if (buffer_) return buffer_->version() == buffer.version() ? absl::OkStatus() : Changed();
    buffer_ = buffer;
    return sink_(buffer, options_.offset, {});
  }

  // Takes the next bytes, which have this offset in the buffer. `expected` is their checksum.
  absl::Status Take(std::uint64_t offset, std::string_view bytes,
                    std::optional<std::uint32_t> expected = std::nullopt) {
    if (!buffer_ || offset != options_.offset + bytes_ ||
        bytes.size() > WantedBytes(*buffer_, options_) - bytes_)
      return BadResponse(
          "the parts of a download are not contiguous, or are not what was asked for");
    const std::uint32_t crc = options_.checksums ? Crc32c(bytes.data(), bytes.size()) : 0;
    if (options_.checksums && expected && crc != *expected)
      return BadChecksum(name_, "crc32c", *expected, crc);
    if (absl::Status status = sink_(*buffer_, offset, bytes); !status.ok()) return status;
    bytes_ += bytes.size();
    if (options_.checksums) checksum_ = Crc32cCombine(checksum_, crc, bytes.size());
    return absl::OkStatus();
  }

  // Must be called when the download has ended. Returns an error if bytes are missing or damaged.
  absl::Status Check() const {
    if (!buffer_) return BadResponse("the download ended without a response");
    if (!IsAll()) return BadResponse("the download ended early");
    if (options_.checksums && bytes_ == buffer_->size_bytes() && buffer_->has_crc32c() &&
        checksum_ != buffer_->crc32c())
      return BadChecksum(name_, "buffer.crc32c", buffer_->crc32c(), checksum_);
    return absl::OkStatus();
  }

  // Whether the error means that the buffer was replaced between two parts of the download. If the
  // caller specified a version, the server's error says what is wrong.
  bool IsChange(const absl::Status& error) const {
    return buffer_ && options_.version == 0 && ErrorReason(error) == "VERSION_MISMATCH";
  }
  absl::Status Changed() const {
    return MakeError(absl::StatusCode::kAborted, "BUFFER_CHANGED",
                     absl::StrCat("'", name_, "' was replaced during its download"));
  }

 private:
  const std::string& name_;
  const RangeSink& sink_;
  const DownloadOptions& options_;
  std::optional<v1::Buffer> buffer_;
  std::uint64_t bytes_ = 0;
  std::uint32_t checksum_ = 0;  // checksum of these bytes, if the options request checksums
};

}  // namespace tessera
