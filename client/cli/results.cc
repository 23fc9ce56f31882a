#include "client/cli/results.h"

#include <iostream>
#include <mutex>
#include <optional>

#include "absl/strings/str_cat.h"
#include "client/npy.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/printable.h"

namespace tessera {
namespace {

void ReportScalar(Session& session, const v1::Scalar& value) {
  const bool integer = value.value_case() == v1::Scalar::kInteger;
  if (session.json) {
    session.document["value"] = integer ? Json(value.integer()) : NumberJson(value.real());
  } else {
    std::cout << (integer ? absl::StrCat(value.integer()) : NumberText(value.real())) << '\n';
  }
}

void ReportTensor(Session& session, const v1::Tensor& tensor) {
  const auto bytes = ArrayBytes(static_cast<DType>(tensor.dtype()), tensor.shape());
  if (!bytes.ok() || *bytes != tensor.data().size()) {
    throw CommandError(
        absl::InternalError("the size of the server's response does not match its shape"));
  }
  if (session.json) {
    session.document["dtype"] = DtypeText(tensor.dtype());
    session.document["shape"] = tensor.shape();
    session.document["data"] = ToJson(tensor);
  } else {
    std::cout << ArrayText(tensor) << '\n';
  }
}

void SaveTensor(const v1::Tensor& tensor, const std::string& path) {
  NpyWriter writer =
      OrThrow(NpyWriter::Create(path, static_cast<DType>(tensor.dtype()), tensor.shape()));
  OrThrow(writer.Append(tensor.data()));
  OrThrow(writer.Finish());
}

// Adds an option for a buffer and an option for a file. Returns the option for the buffer.
CLI::Option* AddPlaces(CLI::App& command, const std::string& to_buffer, std::string& buffer,
                       const std::string& to_file, std::string& file, const std::string& what) {
  auto* name =
      command.add_option(to_buffer, buffer, "Keep the " + what + " on the device as this buffer");
  command.add_option(to_file, file, "Save the " + what + " as a .npy file; - is standard output")
      ->type_name("FILE")
      ->excludes(name);
  return name->type_name("BUFFER");
}

}  // namespace

void ResultFlags::AddForOne(CLI::App& command) {
  auto* name = AddPlaces(command, "--out", out, "-o,--output", file, "result");
  command.add_flag("--replace", replace, "Replace any buffer that has the name given to --out")
      ->needs(name);
  AddTtl(command, ttl, "How long the buffer of --out lives, such as 10m")->needs(name);
  command
      .add_option("--placement", placement,
                  "Devices among which the buffer of --out is divided, such as cuda:0,cuda:1; "
                  "'all' means every device")
      ->type_name("DEVICES")
      ->delimiter(',')
      ->needs(name);
}

void ResultFlags::AddForTwo(CLI::App& command) {
  two = true;
  AddPlaces(command, "--out", out, "-o,--output", file, "values");
  AddPlaces(command, "--indices-out", indices_out, "--indices-output", indices_file, "indices");
  command.add_flag("--replace", replace, "Replace any buffers that have the given names");
  AddTtl(command, ttl, "How long the buffers live, such as 10m");
}

void ResultFlags::Check(const Session& session, const std::string& only) const {
  const bool values = only != "indices", indices = two && only != "values";
  if ((!values && given()) || (two && !indices && !(indices_out.empty() && indices_file.empty())))
    ThrowBadOption("--only " + only + " leaves out the result that another option stores");
  CheckOutputs(session, file, indices_file, !values || !out.empty(),
               !indices || !indices_out.empty());
  if (out.empty() && indices_out.empty() && (replace || !ttl.empty()))
    ThrowBadOption("--replace and --ttl are for --out and --indices-out");
}

void ResultFlags::SetTargets(OperationOptions& options) const {
  if (!out.empty()) options.target = {out, ParseDuration(ttl), replace, placement};
  if (!indices_out.empty()) options.indices_target = {indices_out, ParseDuration(ttl), replace};
}

v1::ExecutionStats ReportResult(Session& session, const v1::StepResult& result,
                                const ResultFlags& flags, const std::string& only) {
  const auto report = [&](const auto& response) {
    if constexpr (requires { response.indices(); }) {
      const NamedArray values{"values", flags.file, response.values(), response.values_buffer()};
      const NamedArray indices{"indices", flags.indices_file, response.indices(),
                               response.indices_buffer()};
      if (only.empty()) {
        ReportArrays(session, {values, indices});
      } else {
        ReportArrays(session, {only == "values" ? values : indices});
      }
    } else if constexpr (requires { response.index(); }) {
      if (response.has_index() && !session.json) {
        std::cout << response.index() << '\n';
      } else if (response.has_value()) {
        if (response.has_index()) session.document["index"] = response.index();
        ReportScalar(session, response.value());
      } else {
        ReportArray(session, flags.file, response.tensor(), response.buffer());
      }
    } else if constexpr (requires { response.value(); }) {
      ReportScalar(session, response.value());
    } else {
      ReportArray(session, flags.file, response.tensor(), response.buffer());
    }
    if (session.json && response.has_stats()) session.document["stats"] = ToJson(response.stats());
    return response.stats();
  };
  return VisitOperation(result, report, [&] {
    OrThrow(Client::StatusOf(result));
    return v1::ExecutionStats();
  });
}

void ReportBuffer(Session& session, const v1::Buffer& buffer) {
  if (session.json) {
    session.document["buffer"] = ToJson(buffer);
  } else {
    std::cout << Printable(buffer.name()) << ": " << DtypeText(buffer.dtype()) << ' '
              << ShapeText(buffer.shape()) << ", " << HumanBytes(buffer.size_bytes()) << " on "
              << Printable(PlaceText(buffer)) << '\n';
  }
}

void ReportArray(Session& session, const std::string& file, const v1::Tensor& tensor,
                 const v1::Buffer& buffer) {
  const bool resident = !buffer.name().empty();
  if (!file.empty()) {
    if (resident) {
      SaveBuffer(session, buffer.name(), file);
    } else {
      SaveTensor(tensor, file);
    }
    ReportFile(session, file, resident ? buffer.size_bytes() : tensor.data().size());
  } else if (resident) {
    ReportBuffer(session, buffer);
  } else if (tensor.dtype() != v1::DTYPE_UNSPECIFIED) {
    ReportTensor(session, tensor);
  } else if (session.json) {
    session.document["scratch"] = true;
  } else {
    std::cout << "in scratch memory\n";
  }
}

void ReportArrays(Session& session, std::initializer_list<NamedArray> arrays) {
  absl::Status first;
  for (const NamedArray& array : arrays) {
    Session part{session.client, session.json};
    try {
      ReportArray(part, array.file, array.tensor, array.buffer);
    } catch (const CommandError& error) {
      first.Update(error.status);
    }
    session.document[array.name] = std::move(part.document);
  }
  OrThrow(first);
}

void CheckOutputs(const Session& session, const std::string& a, const std::string& b,
                  bool a_resident, bool b_resident) {
  const bool standard = NpyWriter::IsStandardOutput(a) || NpyWriter::IsStandardOutput(b);
  if (session.json && standard)
    ThrowBadOption("--json and an array cannot both go to standard output");
  if (!a.empty() && a == b && !standard)
    ThrowBadOption("the two results cannot go to the same file");
  if (standard && ((a.empty() && !a_resident) || (b.empty() && !b_resident))) {
    ThrowBadOption("standard output cannot receive both a file and the other result");
  }
}

void ReportFile(Session& session, const std::string& path, std::uint64_t bytes) {
  if (session.json) {
    session.document["file"] = path;
  } else if (!NpyWriter::IsStandardOutput(path)) {
    std::cout << Printable(path) << ": " << HumanBytes(bytes) << '\n';
  }
}

v1::Buffer SaveBuffer(Session& session, const std::string& name, const std::string& path,
                      const DownloadOptions& options) {
  const InterruptScope interrupts;
  // Several streams need an output that can be written at any offset, and a buffer that is not
  // replaced during the download. Otherwise, one stream downloads the bytes in order.
  constexpr int kStreams = 8;
  const bool any_order = NpyWriter::MakesFile(path);
  DownloadOptions download = options;
  download.streams = any_order ? kStreams : 1;
  download.cancel = InterruptScope::token();
  std::optional<NpyWriter> writer;
  std::optional<ProgressBar> progress;
  std::mutex mutex;
  std::uint64_t received = 0;  // guarded by mutex
  const auto sink = [&](const v1::Buffer& buffer, std::uint64_t offset,
                        std::string_view bytes) -> absl::Status {
    if (bytes.empty()) {
      writer.reset();  // left by the attempt with several streams
      auto created = NpyWriter::Create(path, static_cast<DType>(buffer.dtype()), buffer.shape());
      if (!created.ok()) return created.status();
      writer.emplace(*std::move(created));
      progress.emplace(name, buffer.size_bytes());
      received = 0;
      return any_order ? writer->Reserve(buffer.size_bytes()) : absl::OkStatus();
    }
    {
      const std::lock_guard lock(mutex);
      received += bytes.size();
      progress->Update(received);
    }
    return any_order ? writer->WriteAt(offset, bytes) : writer->Append(bytes);
  };
  auto buffer = session.client.DownloadRanges(name, sink, download);
  if (ErrorReason(buffer.status()) == "BUFFER_CHANGED") {
    download.streams = 1;
    buffer = session.client.DownloadRanges(name, sink, download);
  }
  OrThrow(buffer.status());
  OrThrow(writer->Finish());
  return *std::move(buffer);
}

}  // namespace tessera
