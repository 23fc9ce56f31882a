#include "client/cli/results.h"

#include <unistd.h>

#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/npy.h"
#include "kernels/client_and_server/printable.h"

namespace tessera {

void ReportStats(Session& session, const v1::ExecutionStats& stats, absl::Duration wall,
                 bool timing) {
  if (session.json) {
    session.document["stats"] = ToJson(stats);
    session.document["stats"]["wall_us"] = absl::ToDoubleMicroseconds(wall);
    return;
  }
  if (!timing) return;
  std::cerr << Printable(stats.strategy()) << " on " << Printable(stats.device())
            << (stats.devices() > 1 ? absl::StrCat(" and ", stats.devices() - 1, " more") : "")
            << ": " << HumanDuration(absl::Microseconds(stats.kernel_us())) << " on the device, "
            << HumanDuration(wall) << " in all, " << HumanBytes(stats.bytes()) << " moved, "
            << absl::StrFormat("roundoff %.2g", stats.roundoff()) << '\n';
}

void ReportScalar(Session& session, const v1::Scalar& value) {
  const bool integer = value.value_case() == v1::Scalar::kInteger;
  if (session.json) {
    session.document["value"] = integer ? Json(value.integer()) : NumberJson(value.real());
  } else {
    std::cout << (integer ? absl::StrCat(value.integer()) : NumberText(value.real())) << '\n';
  }
}

void ReportBuffer(Session& session, const v1::Buffer& buffer) {
  if (session.json) {
    session.document["buffer"] = ToJson(buffer);
  } else {
    std::cout << Printable(buffer.name()) << ": " << DtypeText(buffer.dtype()) << ' '
              << ShapeText(absl::MakeConstSpan(buffer.shape().data(),
                                               static_cast<std::size_t>(buffer.shape_size())))
              << ", " << HumanBytes(buffer.size_bytes()) << " on " << Printable(PlaceText(buffer))
              << '\n';
  }
}

absl::Status ReportTensor(Session& session, const v1::Tensor& tensor) {
  const auto shape =
      absl::MakeConstSpan(tensor.shape().data(), static_cast<std::size_t>(tensor.shape_size()));
  const auto bytes = ArrayBytes(static_cast<DType>(tensor.dtype()), shape);
  if (!bytes.ok() || *bytes != tensor.data().size()) {
    return absl::InternalError("the size of the server's response does not match its shape");
  }
  if (session.json) {
    session.document["dtype"] = DtypeText(tensor.dtype());
    session.document["shape"] = std::vector<std::int64_t>(shape.begin(), shape.end());
    session.document["data"] = ToJson(tensor);
  } else {
    std::cout << ArrayText(tensor) << '\n';
  }
  return absl::OkStatus();
}

absl::Status CheckOutput(const Session& session, const std::string& path) {
  if (!session.json || !NpyWriter::IsStandardOutput(path)) return absl::OkStatus();
  return BadOption("--json and an array cannot both go to standard output");
}

absl::Status CheckOutputs(const Session& session, const std::string& a, const std::string& b,
                          bool a_resident, bool b_resident) {
  for (const std::string& path : {a, b}) {
    if (absl::Status status = CheckOutput(session, path); !status.ok()) return status;
  }
  if (!a.empty() && a == b && !NpyWriter::IsStandardOutput(a))
    return BadOption("the two results cannot go to the same file");
  const bool prints = (a.empty() && !a_resident) || (b.empty() && !b_resident);
  if (prints && (NpyWriter::IsStandardOutput(a) || NpyWriter::IsStandardOutput(b)))
    return BadOption("standard output cannot receive both a file and the other result");
  return absl::OkStatus();
}

void ReportFile(Session& session, const std::string& path, std::uint64_t bytes) {
  if (session.json) {
    session.document["file"] = path;
  } else if (!NpyWriter::IsStandardOutput(path)) {
    std::cout << Printable(path) << ": " << HumanBytes(bytes) << '\n';
  }
}

absl::StatusOr<v1::Buffer> SaveBuffer(Session& session, const std::string& name,
                                      const std::string& path, const DownloadOptions& options) {
  const InterruptScope interrupts;
  DownloadOptions download = options;
  download.cancel = InterruptScope::token();
  std::optional<NpyWriter> writer;
  std::unique_ptr<ProgressBar> progress;
  std::mutex mutex;
  std::uint64_t received = 0;  // guarded by mutex
  const auto begin = [&](const v1::Buffer& buffer) -> absl::Status {
    const absl::Span<const std::int64_t> shape(buffer.shape().data(),
                                               static_cast<std::size_t>(buffer.shape_size()));
    writer.reset();  // left by the attempt with several streams
    auto created = NpyWriter::Create(path, static_cast<DType>(buffer.dtype()), shape);
    if (!created.ok()) return created.status();
    writer.emplace(*std::move(created));
    progress = std::make_unique<ProgressBar>(name, buffer.size_bytes());
    received = 0;
    return absl::OkStatus();
  };
  const auto count = [&](std::size_t bytes) {
    const std::lock_guard lock(mutex);
    received += bytes;
    progress->Update(received);
  };
  // Several streams need an output that can be written at any offset, and a buffer that is not
  // replaced during the download. Otherwise, one stream downloads the bytes in order.
  constexpr int kStreams = 8;
  absl::StatusOr<v1::Buffer> buffer;
  if (NpyWriter::MakesFile(path)) {
    download.streams = kStreams;
    buffer = session.client.DownloadRanges(
        name,
        [&](const v1::Buffer& from, std::uint64_t offset, std::string_view bytes) {
          if (bytes.empty()) return begin(from);
          count(bytes.size());
          return writer->WriteAt(offset, bytes);
        },
        download);
  }
  if (!NpyWriter::MakesFile(path) || ErrorReason(buffer.status()) == "BUFFER_CHANGED") {
    buffer = session.client.Download(
        name,
        [&](const v1::Buffer& from, std::string_view bytes) {
          if (bytes.empty()) return begin(from);
          count(bytes.size());
          return writer->Append(bytes);
        },
        download);
  }
  if (!buffer.ok()) return buffer.status();
  if (absl::Status status = writer->Finish(); !status.ok()) return status;
  return buffer;
}

absl::Status SaveTensor(const v1::Tensor& tensor, const std::string& path) {
  auto writer = NpyWriter::Create(
      path, static_cast<DType>(tensor.dtype()),
      absl::MakeConstSpan(tensor.shape().data(), static_cast<std::size_t>(tensor.shape_size())));
  if (!writer.ok()) return writer.status();
  if (absl::Status status = writer->Append(tensor.data()); !status.ok()) return status;
  return writer->Finish();
}

absl::Status DeliverResult(Session& session, const std::string& file, const v1::Tensor& tensor,
                           const v1::Buffer& buffer) {
  if (file.empty()) {
    if (buffer.name().empty()) return ReportTensor(session, tensor);
    ReportBuffer(session, buffer);
    return absl::OkStatus();
  }
  absl::Status status;
  if (buffer.name().empty()) {
    status = SaveTensor(tensor, file);
  } else {
    status = SaveBuffer(session, buffer.name(), file).status();
    session.client.DeleteBuffer(buffer.name()).IgnoreError();
  }
  if (status.ok()) {
    ReportFile(session, file, buffer.name().empty() ? tensor.data().size() : buffer.size_bytes());
  }
  return status;
}

absl::StatusOr<ResultBuffer> TemporaryBuffer(Session& session, std::string_view suffix) {
  const auto limits = session.Limits();
  if (!limits.ok()) return limits.status();
  std::string name =
      absl::StrCat("tessera-cli/", ::getpid(), "-", absl::GetCurrentTimeNanos(), Absl(suffix));
  return ResultBuffer{std::move(name), TemporaryTtl(*limits)};
}

}  // namespace tessera
