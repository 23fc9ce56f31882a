// A message of an upload. Its data stays in the slices in which gRPC received it, unless they are
// tiny.
#pragma once

#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"
#include "kernels/device/device.h"
#include "tessera/v1/buffer.pb.h"

namespace tessera {

// Not thread safe.
class UploadMessage {
 public:
  UploadMessage() = default;
  UploadMessage(UploadMessage&&) = default;
  UploadMessage& operator=(UploadMessage&&) = default;

  // Reads a message and keeps its slices. Returns false and leaves the message empty if
  // UploadRequest::ParseFromString would fail, or if the fields other than data could take more
  // than `most` bytes of memory.
  bool Parse(const grpc::ByteBuffer& bytes, std::size_t most = kUnbounded);
  // Releases the slices.
  void Clear() { *this = UploadMessage(); }

  // All fields except data.
  const v1::UploadRequest& header() const { return header_; }
  // The field data, in pieces.
  std::span<const HostBytes> data() const { return data_; }
  std::size_t data_size() const { return data_size_; }

 private:
  static constexpr std::size_t kUnbounded = std::numeric_limits<std::size_t>::max();

  bool ParseWhole(std::size_t size, std::size_t most);

  v1::UploadRequest header_;
  std::vector<grpc::Slice> slices_;
  std::vector<HostBytes> data_;
  std::size_t data_size_ = 0;
};

}  // namespace tessera
