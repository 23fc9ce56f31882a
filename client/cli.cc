// The command line client, `tessera`. Each Add... function declares one subcommand and what it
// runs.
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/bench.h"
#include "client/cli_output.h"
#include "client/client.h"
#include "client/npy.h"
#include "client/random_array.h"
#include "client/slice.h"
#include "kernels/base/error.h"
#include "kernels/base/printable.h"

namespace tessera {
namespace {

// What a subcommand works with. With json set it prints nothing and fills the document.
struct Session {
  Client& client;
  bool json = false;
  Json document = Json::object();

  // Of the server, asked for once.
  absl::StatusOr<v1::Limits> Limits() {
    if (!limits) {
      const auto info = client.GetServerInfo();
      if (!info.ok()) return info.status();
      limits = info->limits();
    }
    return *limits;
  }
  std::optional<v1::Limits> limits = std::nullopt;
};

using Clock = std::chrono::steady_clock;

absl::Duration Since(Clock::time_point start) { return absl::FromChrono(Clock::now() - start); }

using Command = std::function<absl::Status(Session&)>;

// Options that do not go together in a way that the parser cannot see.
absl::Status BadOption(std::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPTION", what);
}

// --- Values of options ---------------------------------------------------------------------------

// "90", "90s", "10m", "1h30m", "inf".
std::optional<absl::Duration> ParseDuration(const std::string& text) {
  absl::Duration duration;
  if (double seconds; absl::SimpleAtod(text, &seconds)) {
    duration = absl::Seconds(seconds);
  } else if (!absl::ParseDuration(text, &duration)) {
    return std::nullopt;
  }
  if (duration <= absl::ZeroDuration()) return std::nullopt;
  return duration;
}

CLI::Validator DurationCheck() {
  return CLI::Validator(
      [](std::string& text) {
        return ParseDuration(text) ? ""
                                   : "'" + text + "' is not a duration such as 90s, 10m or 1h30m";
      },
      "DURATION");
}

// The names of kAllDTypes or kAllReduceOps.
template <class Values>
std::vector<std::string> NamesOf(const Values& values) {
  std::vector<std::string> names;
  for (const auto value : values) names.emplace_back(Name(value));
  return names;
}

// REQUIRES: text is one of NamesOf(values).
template <class Values>
auto Parse(const Values& values, std::string_view text) {
  return *std::find_if(values.begin(), values.end(), [&](auto v) { return Name(v) == text; });
}

// --- Interrupts ----------------------------------------------------------------------------------

volatile std::sig_atomic_t interrupted = 0;

// While it lives, the first SIGINT, SIGTERM or SIGHUP lets a transfer end by itself, which undoes
// it; the second one kills.
class InterruptScope {
 public:
  InterruptScope() {
    struct sigaction action {};
    action.sa_handler = [](int) { interrupted = 1; };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], nullptr, &before_[i]);
      // What nohup has set to be ignored stays so.
      if (before_[i].sa_handler != SIG_IGN) ::sigaction(kSignals[i], &action, nullptr);
    }
  }
  ~InterruptScope() {
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], &before_[i], nullptr);
    }
  }
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

  static absl::Status Check() {
    return interrupted == 0 ? absl::OkStatus() : absl::CancelledError("interrupted");
  }

 private:
  static constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, kSignals.size()> before_{};
};

// --- Operands and results ------------------------------------------------------------------------

absl::StatusOr<Operand> ReadInlineOperand(Session& session, const std::string& path) {
  constexpr std::uint64_t kRoom = std::uint64_t{64} << 10;  // for the rest of the request
  absl::StatusOr<NpyFile> file = NpyFile::Open(path);
  if (!file.ok()) return file.status();
  const NpyHeader& header = file->header();
  const auto limits = session.Limits();
  if (!limits.ok()) return limits.status();
  if (const std::uint64_t message = limits->max_message_bytes();
      header.data_bytes + kRoom > message) {
    return MakeError(absl::StatusCode::kInvalidArgument, "OPERAND_TOO_LARGE",
                     absl::StrCat(path, " has ", HumanBytes(header.data_bytes),
                                  ", and an inline operand at most ",
                                  HumanBytes(message - std::min(message, kRoom))));
  }
  v1::Tensor tensor;
  tensor.set_dtype(static_cast<v1::Dtype>(header.dtype));
  tensor.mutable_shape()->Add(header.shape.begin(), header.shape.end());
  tensor.mutable_data()->resize(header.data_bytes);
  absl::Status status = file->Read(0, absl::MakeSpan(*tensor.mutable_data()));
  if (!status.ok()) return status;
  return Operand(std::move(tensor));
}

absl::StatusOr<Operand> ResolveOperand(Session& session, const std::string& text) {
  absl::StatusOr<ParsedOperand> parsed = ParseOperand(text);
  if (!parsed.ok()) return parsed.status();
  if (parsed->kind == ParsedOperand::Kind::kFile) return ReadInlineOperand(session, parsed->name);
  Operand operand(parsed->name);
  if (!parsed->subscripts.empty()) {
    const auto response = session.client.GetBuffer(parsed->name);
    if (!response.ok()) return response.status();
    const auto& shape = response->buffer().shape();
    auto view = ResolveSubscripts(
        parsed->subscripts,
        absl::MakeConstSpan(shape.data(), static_cast<std::size_t>(shape.size())));
    if (!view.ok()) return view.status();
    parsed->view = *std::move(view);
  }
  if (parsed->view) {
    v1::View view;
    view.set_offset(parsed->view->offset);
    view.mutable_shape()->Add(parsed->view->shape.begin(), parsed->view->shape.end());
    view.mutable_strides()->Add(parsed->view->strides.begin(), parsed->view->strides.end());
    operand.view = std::move(view);
  }
  return operand;
}

void AddLaunch(CLI::App& command, Launch& launch) {
  command.add_option("--block-size", launch.block_size, "Threads a block; default: the strategy's");
  command.add_option("--grid-size", launch.grid_size, "Blocks; default: the strategy's");
  command.add_option("--items-per-thread", launch.items_per_thread,
                     "Elements a thread handles; default: the strategy's");
}

// Options that all operations share.
struct OperationFlags {
  std::string strategy;
  Launch launch;
  bool timing = false;

  void Add(CLI::App& command) {
    command.add_option("--strategy", strategy,
                       "Algorithm, of 'tessera strategies'; default: the fastest");
    AddLaunch(command, launch);
    command.add_flag("--timing", timing,
                     "Measure the time on the device and print what the call cost");
  }

  OperationOptions Options() const {
    OperationOptions options;
    options.strategy = strategy;
    options.launch = launch;
    options.timing = timing;
    return options;
  }
};

// Where an array result goes.
struct ResultFlags {
  std::string out;
  std::string file;
  bool replace = false;
  std::string ttl;

  void Add(CLI::App& command) {
    auto* name = command.add_option("--out", out, "Keep the result on the device as this buffer");
    auto* path = command.add_option("-o,--output", file,
                                    "Save the result as a .npy file; - is standard output");
    path->excludes(name);
    command.add_flag("--replace", replace, "Replace a buffer of the name given to --out")
        ->needs(name);
    command.add_option("--ttl", ttl, "How long the buffer of --out lives, such as 10m")
        ->check(DurationCheck())
        ->needs(name);
  }
  bool given() const { return !out.empty() || !file.empty(); }
};

// Says what a call cost: on stderr, for stdout carries the result.
void ReportStats(Session& session, const v1::ExecutionStats& stats, absl::Duration wall,
                 bool timing) {
  if (session.json) {
    session.document["stats"] = ToJson(stats);
    session.document["stats"]["wall_us"] = absl::ToDoubleMicroseconds(wall);
    return;
  }
  if (!timing) return;
  std::cerr << Printable(stats.strategy()) << " on " << Printable(stats.device()) << ": "
            << HumanDuration(absl::Microseconds(stats.kernel_us())) << " on the device, "
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
              << ", " << HumanBytes(buffer.size_bytes()) << " on " << Printable(buffer.device())
              << '\n';
  }
}

absl::Status ReportTensor(Session& session, const v1::Tensor& tensor) {
  const auto shape =
      absl::MakeConstSpan(tensor.shape().data(), static_cast<std::size_t>(tensor.shape_size()));
  const auto bytes = ArrayBytes(static_cast<DType>(tensor.dtype()), shape);
  if (!bytes.ok() || *bytes != tensor.data().size()) {
    return absl::InternalError("the server's answer does not have the size of its shape");
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

// Standard output takes the document or the array.
absl::Status CheckOutput(const Session& session, const std::string& path) {
  if (!session.json || !NpyWriter::IsStandardOutput(path)) return absl::OkStatus();
  return BadOption("--json and an array cannot both go to standard output");
}

// bytes: of elements.
void ReportFile(Session& session, const std::string& path, std::uint64_t bytes) {
  if (session.json) {
    session.document["file"] = path;
  } else if (!NpyWriter::IsStandardOutput(path)) {
    std::cout << Printable(path) << ": " << HumanBytes(bytes) << '\n';
  }
}

// Downloads a buffer into a .npy file.
absl::StatusOr<v1::Buffer> SaveBuffer(Session& session, const std::string& name,
                                      const std::string& path,
                                      const DownloadOptions& options = {}) {
  const InterruptScope interrupts;
  std::optional<NpyWriter> writer;
  std::unique_ptr<ProgressBar> progress;
  std::uint64_t received = 0;
  const auto sink = [&](const v1::Buffer& buffer, std::string_view bytes) -> absl::Status {
    if (absl::Status status = InterruptScope::Check(); !status.ok()) return status;
    if (!writer) {
      const absl::Span<const std::int64_t> shape(buffer.shape().data(),
                                                 static_cast<std::size_t>(buffer.shape_size()));
      auto created = NpyWriter::Create(path, static_cast<DType>(buffer.dtype()), shape);
      if (!created.ok()) return created.status();
      writer.emplace(*std::move(created));
      progress = std::make_unique<ProgressBar>(name, buffer.size_bytes());
    }
    received += bytes.size();
    progress->Update(received);
    return writer->Append(bytes);
  };
  auto buffer = session.client.Download(name, sink, options);
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

// Runs an operation with an array result and delivers it where the flags say. run: OperationOptions
// -> its response.
template <class Run>
absl::Status DeliverArray(Session& session, const OperationFlags& operation,
                          const ResultFlags& result, const Run& run) {
  if (absl::Status status = CheckOutput(session, result.file); !status.ok()) return status;
  OperationOptions options = operation.Options();
  if (!result.out.empty()) {
    options.target = ResultBuffer{result.out, ParseDuration(result.ttl), result.replace};
  }
  auto start = Clock::now();
  auto response = run(options);
  bool temporary = false;
  if (!result.file.empty() && ErrorReason(response.status()) == "RESULT_TOO_LARGE") {
    // Too much for one message: let it become a buffer for as long as the download takes.
    const auto limits = session.Limits();
    if (!limits.ok()) return limits.status();
    options.target =
        ResultBuffer{absl::StrCat("tessera-cli/", ::getpid(), "-", absl::GetCurrentTimeNanos()),
                     TemporaryTtl(*limits)};
    temporary = true;
    start = Clock::now();
    response = run(options);
  }
  if (!response.ok()) return response.status();
  const absl::Duration wall = Since(start);

  absl::Status status;
  if (temporary) {
    status = SaveBuffer(session, options.target->name, result.file).status();
    session.client.DeleteBuffer(options.target->name).IgnoreError();
    if (status.ok()) ReportFile(session, result.file, response->buffer().size_bytes());
  } else if (!result.file.empty()) {
    status = SaveTensor(response->tensor(), result.file);
    if (status.ok()) ReportFile(session, result.file, response->tensor().data().size());
  } else if (!result.out.empty()) {
    ReportBuffer(session, response->buffer());
  } else {
    status = ReportTensor(session, response->tensor());
  }
  if (status.ok()) ReportStats(session, response->stats(), wall, operation.timing);
  return status;
}

// --- Buffers -------------------------------------------------------------------------------------

// The file's stem with every character that a name may not have replaced.
std::string NameOfFile(const std::string& path) {
  std::string name = std::filesystem::path(path).stem().string();
  for (char& c : name) {
    const bool allowed = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                         (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
    if (!allowed) c = '_';
  }
  return name;
}

struct PutFlags {
  std::string file;
  std::string name;
  std::string ttl;
  bool replace = false;
  std::string device;
  int streams = 0;
  bool no_checksums = false;
  std::string random;
  std::string shape;
  std::string dtype = "f32";
  std::uint64_t seed = 0;
};

absl::Status Put(Session& session, const PutFlags& flags) {
  DType dtype;
  std::vector<std::int64_t> shape;
  Source source;
  std::optional<NpyFile> file;
  std::string name = flags.name;
  if (flags.random.empty()) {
    if (flags.file.empty()) return BadOption("give a FILE, or --random with --shape and --name");
    auto opened = NpyFile::Open(flags.file);
    if (!opened.ok()) return opened.status();
    file.emplace(*std::move(opened));
    dtype = file->header().dtype;
    shape = file->header().shape;
    source = [&file](std::uint64_t offset, absl::Span<char> out) {
      return file->Read(offset, out);
    };
    if (name.empty()) name = NameOfFile(flags.file);
  } else {
    const auto extents = ParseExtents(flags.shape);
    if (!extents) return BadOption("'" + flags.shape + "' is not a shape such as 1000x1000");
    if (name.empty()) return BadOption("--random needs a --name");
    dtype = Parse(kAllDTypes, flags.dtype);
    shape = *extents;
    source = RandomArray(*ParseDistribution(flags.random), dtype, flags.seed);
  }
  const auto bytes = ArrayBytes(dtype, shape);
  if (!bytes.ok()) return bytes.status();

  UploadOptions options;
  if (!flags.ttl.empty()) options.ttl = ParseDuration(flags.ttl);
  options.replace = flags.replace;
  options.device = flags.device;
  options.checksums = !flags.no_checksums;
  // Several connections pay for large arrays.
  constexpr std::uint64_t kLarge = std::uint64_t{64} << 20;
  constexpr int kStreams = 4;
  options.streams = flags.streams > 0 ? flags.streams : *bytes >= kLarge ? kStreams : 1;
  const auto start = Clock::now();
  absl::StatusOr<v1::Buffer> buffer;
  {
    const InterruptScope interrupts;
    ProgressBar progress(name, *bytes);
    options.progress = [&](std::uint64_t sent) { progress.Update(sent); };
    const Source checked = [&](std::uint64_t offset, absl::Span<char> out) {
      absl::Status status = InterruptScope::Check();
      return status.ok() ? source(offset, out) : status;
    };
    buffer = session.client.Upload(name, dtype, shape, checked, options);
  }
  if (!buffer.ok()) return buffer.status();
  const absl::Duration wall = Since(start);
  const double seconds = std::max(absl::ToDoubleSeconds(wall), 1e-9);
  if (session.json) {
    session.document["wall_us"] = absl::ToDoubleMicroseconds(wall);
    ReportBuffer(session, *buffer);
    return absl::OkStatus();
  }
  ReportBuffer(session, *buffer);
  if (wall >= absl::Seconds(1)) {
    const auto rate = static_cast<std::uint64_t>(static_cast<double>(*bytes) / seconds);
    std::cerr << HumanDuration(wall) << ", " << HumanBytes(rate) << "/s\n";
  }
  return absl::OkStatus();
}

void AddPut(CLI::App& app, Command& chosen) {
  auto flags = std::make_shared<PutFlags>();
  CLI::App* command = app.add_subcommand("put", "Upload an array");
  auto* file = command->add_option("file", flags->file, "A .npy file");
  command->add_option("--name", flags->name, "Name of the buffer; default: the file's");
  command->add_option("--ttl", flags->ttl, "How long it lives, such as 10m; default: the server's")
      ->check(DurationCheck());
  command->add_flag("--replace", flags->replace, "Replace a buffer of this name");
  command->add_option("--device", flags->device,
                      "Device that holds it; default: the server's first");
  command
      ->add_option("--streams", flags->streams, "Connections to use; default: 1, 4 from 64 MiB on")
      ->check(CLI::Range(1, 64));
  command->add_flag("--no-checksums", flags->no_checksums,
                    "Do not have the server check a CRC-32C of the bytes");
  auto* random =
      command->add_option("--random", flags->random, "Upload random numbers instead of a file")
          ->check(CLI::IsMember({"normal", "uniform", "ones", "zeros"}))
          ->excludes(file);
  command->add_option("--shape", flags->shape, "Shape of --random, such as 1000x1000")
      ->needs(random);
  random->needs("--shape");
  command->add_option("--dtype", flags->dtype, "Type of --random")
      ->check(CLI::IsMember(NamesOf(kAllDTypes)))
      ->needs(random)
      ->capture_default_str();
  command->add_option("--seed", flags->seed, "Seed of --random")
      ->needs(random)
      ->capture_default_str();
  command->callback([flags, &chosen] { chosen = [flags](Session& s) { return Put(s, *flags); }; });
}

void AddGet(CLI::App& app, Command& chosen) {
  struct Flags {
    std::string name;
    std::string file;
    bool no_checksums = false;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("get", "Download a buffer into a .npy file");
  command->add_option("name", flags->name, "Name of the buffer")->required();
  command->add_option("-o,--output", flags->file, "The file to write; - is standard output")
      ->required();
  command->add_flag("--no-checksums", flags->no_checksums,
                    "Do not ask for a CRC-32C of the bytes, and check none");
  command->callback([flags, &chosen] {
    chosen = [flags](Session& session) {
      if (absl::Status status = CheckOutput(session, flags->file); !status.ok()) return status;
      DownloadOptions options;
      options.checksums = !flags->no_checksums;
      const auto buffer = SaveBuffer(session, flags->name, flags->file, options);
      if (!buffer.ok()) return buffer.status();
      ReportFile(session, flags->file, buffer->size_bytes());
      return absl::OkStatus();
    };
  });
}

std::string ExpiryText(const v1::Buffer& buffer) {
  if (!buffer.has_expire_time()) return "never";
  const absl::Duration left = absl::FromUnixSeconds(buffer.expire_time().seconds()) - absl::Now();
  return left <= absl::ZeroDuration() ? "now"
                                      : "in " + HumanDuration(absl::Ceil(left, absl::Seconds(1)));
}

std::string StateText(const v1::Buffer& buffer) {
  if (buffer.state() == v1::Buffer::STATE_READY) return "ready";
  return absl::StrCat("writing, ", HumanBytes(buffer.committed_bytes()));
}

std::string BufferShapeText(const v1::Buffer& buffer) {
  return ShapeText(
      absl::MakeConstSpan(buffer.shape().data(), static_cast<std::size_t>(buffer.shape_size())));
}

absl::Status List(Session& session, const std::string& prefix) {
  const auto buffers = session.client.ListBuffers(prefix);
  if (!buffers.ok()) return buffers.status();
  if (session.json) {
    Json& list = session.document["buffers"] = Json::array();
    for (const v1::Buffer& buffer : *buffers) list.push_back(ToJson(buffer));
    return absl::OkStatus();
  }
  if (buffers->empty()) {
    std::cerr << (prefix.empty() ? "no buffers"
                                 : "no buffers begin with '" + Printable(prefix) + "'")
              << '\n';
    return absl::OkStatus();
  }
  Table table({"NAME", "DTYPE", "SHAPE", ">SIZE", "DEVICE", "STATE", "EXPIRES"});
  std::uint64_t total = 0;
  for (const v1::Buffer& buffer : *buffers) {
    table.Add({buffer.name(), DtypeText(buffer.dtype()), BufferShapeText(buffer),
               HumanBytes(buffer.size_bytes()), buffer.device(), StateText(buffer),
               ExpiryText(buffer)});
    total += buffer.size_bytes();
  }
  table.Print(std::cout);
  std::cerr << buffers->size() << (buffers->size() == 1 ? " buffer, " : " buffers, ")
            << HumanBytes(total) << '\n';
  return absl::OkStatus();
}

void AddLs(CLI::App& app, Command& chosen) {
  auto prefix = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("ls", "List buffers");
  command->add_option("prefix", *prefix, "Only names that begin so");
  command->callback(
      [prefix, &chosen] { chosen = [prefix](Session& s) { return List(s, *prefix); }; });
}

// Removes as many as it can; the first error is the result. version 0: all of each name.
absl::Status Remove(Session& session, const std::vector<std::string>& names,
                    std::uint64_t version) {
  if (version != 0 && names.size() > 1) return BadOption("--version goes with one name");
  absl::Status first;
  Json& removed = session.document["removed"] = Json::array();
  for (const std::string& name : names) {
    absl::Status status = session.client.DeleteBuffer(name, version);
    if (status.ok()) {
      removed.push_back(name);
    } else {
      first.Update(status);
    }
  }
  return first;
}

void AddRm(CLI::App& app, Command& chosen) {
  struct Flags {
    std::vector<std::string> names;
    std::uint64_t version = 0;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* command =
      app.add_subcommand("rm", "Delete buffers, with what is being uploaded to them");
  command->add_option("names", flags->names, "Names of the buffers")->required();
  command
      ->add_option("--version", flags->version,
                   "Delete this version alone, a buffer or a draft; 'tessera info NAME' lists them")
      ->check(CLI::PositiveNumber);
  command->callback([flags, &chosen] {
    chosen = [flags](Session& s) { return Remove(s, flags->names, flags->version); };
  });
}

struct CopyFlags {
  std::string source;
  std::string name;
  std::string dtype;
  std::string device;
  std::string ttl;
  bool replace = false;
};

absl::Status Copy(Session& session, const CopyFlags& flags) {
  const auto source = ResolveOperand(session, flags.source);
  if (!source.ok()) return source.status();
  ResultBuffer target{flags.name, std::nullopt, flags.replace};
  if (!flags.ttl.empty()) target.ttl = *ParseDuration(flags.ttl);
  std::optional<DType> dtype;
  if (!flags.dtype.empty()) dtype = Parse(kAllDTypes, flags.dtype);
  const auto buffer = session.client.CopyBuffer(*source, target, dtype, flags.device);
  if (!buffer.ok()) return buffer.status();
  ReportBuffer(session, *buffer);
  return absl::OkStatus();
}

void AddCp(CLI::App& app, Command& chosen) {
  auto flags = std::make_shared<CopyFlags>();
  CLI::App* command =
      app.add_subcommand("cp", "Copy a buffer, or a window of it, without leaving the server");
  command->add_option("source", flags->source, "NAME, NAME[slices] or NAME@OFFSET:SHAPE:STRIDES")
      ->required();
  command->add_option("name", flags->name, "The new buffer")->required();
  command->add_option("--dtype", flags->dtype, "Cast to this type; default: the source's")
      ->check(CLI::IsMember(NamesOf(kAllDTypes)));
  command->add_option("--device", flags->device, "Where it goes; default: the source's device");
  command->add_option("--ttl", flags->ttl, "How long it lives, such as 10m")
      ->check(DurationCheck());
  command->add_flag("--replace", flags->replace, "Replace a buffer of that name");
  command->callback([flags, &chosen] { chosen = [flags](Session& s) { return Copy(s, *flags); }; });
}

// --- The server ----------------------------------------------------------------------------------

absl::Status BufferInfo(Session& session, const std::string& name) {
  const auto response = session.client.GetBuffer(name);
  if (!response.ok()) return response.status();
  const v1::Buffer& buffer = response->buffer();
  if (session.json) {
    session.document["buffer"] = ToJson(buffer);
    Json& missing = session.document["missing"] = Json::array();
    for (const v1::ByteRange& range : response->missing()) {
      missing.push_back({range.begin(), range.end()});
    }
    Json& drafts = session.document["drafts"] = Json::array();
    for (const v1::Buffer& draft : response->drafts()) drafts.push_back(ToJson(draft));
    return absl::OkStatus();
  }
  const absl::Time created = absl::FromUnixSeconds(buffer.create_time().seconds());
  std::cout << "name     " << Printable(buffer.name()) << "\ndtype    " << DtypeText(buffer.dtype())
            << "\nshape    " << BufferShapeText(buffer) << "\nsize     "
            << HumanBytes(buffer.size_bytes()) << " (" << buffer.size_bytes() << " bytes)"
            << "\nstate    " << StateText(buffer) << "\ndevice   " << Printable(buffer.device())
            << "\ncreated  "
            << absl::FormatTime("%Y-%m-%d %H:%M:%S", created, absl::LocalTimeZone())
            << "\nexpires  " << ExpiryText(buffer) << "\nversion  " << buffer.version() << '\n';
  if (buffer.has_crc32c()) std::cout << absl::StrFormat("crc32c   %08x\n", buffer.crc32c());
  for (const v1::ByteRange& range : response->missing()) {
    std::cout << "missing  bytes " << range.begin() << " to " << range.end() << '\n';
  }
  for (const v1::Buffer& draft : response->drafts()) {
    const absl::Duration age = absl::Now() - absl::FromUnixSeconds(draft.create_time().seconds());
    std::cout << "draft    version " << draft.version() << ", " << StateText(draft) << " of "
              << HumanBytes(draft.size_bytes()) << ", begun "
              << HumanDuration(std::max(age, absl::ZeroDuration())) << " ago\n";
  }
  return absl::OkStatus();
}

absl::Status ServerInfo(Session& session) {
  const auto info = session.client.GetServerInfo();
  if (!info.ok()) return info.status();
  if (session.json) {
    session.document = ToJson(*info);
    return absl::OkStatus();
  }
  const absl::Duration up = absl::Now() - absl::FromUnixSeconds(info->start_time().seconds());
  std::cout << "tessera-server " << Printable(info->version()) << ", up " << HumanDuration(up)
            << "\nqueue of " << info->limits().queue_length() << " operations, messages up to "
            << HumanBytes(info->limits().max_message_bytes()) << ", inline results up to "
            << HumanBytes(info->limits().max_inline_result_bytes()) << "\n\n";
  Table table({"DEVICE", "MODEL", ">UNITS", ">MEMORY", ">FREE", ">BUFFERS", ">LIMIT", ">WORKERS",
               ">WAITING"});
  for (const v1::Device& device : info->devices()) {
    table.Add({device.name(), device.model(), absl::StrCat(device.multiprocessors()),
               HumanBytes(device.memory_total_bytes()), HumanBytes(device.memory_free_bytes()),
               HumanBytes(device.buffer_used_bytes()), HumanBytes(device.buffer_limit_bytes()),
               absl::StrCat(device.workers()), absl::StrCat(device.waiting())});
  }
  table.Print(std::cout);
  return absl::OkStatus();
}

void AddInfo(CLI::App& app, Command& chosen) {
  auto name = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("info", "Describe the server, or a buffer");
  command->add_option("name", *name, "Name of a buffer");
  command->callback([name, &chosen] {
    chosen = [name](Session& s) { return name->empty() ? ServerInfo(s) : BufferInfo(s, *name); };
  });
}

absl::Status ListStrategies(Session& session, const std::string& operation) {
  const auto strategies = session.client.ListStrategies(operation);
  if (!strategies.ok()) return strategies.status();
  if (session.json) {
    Json& list = session.document["strategies"] = Json::array();
    for (const v1::Strategy& strategy : *strategies) list.push_back(ToJson(strategy));
    return absl::OkStatus();
  }
  Table table({"OPERATION", "STRATEGY", "DEVICE", "DTYPES", "RUNS HERE", "SUMMARY"});
  for (const v1::Strategy& strategy : *strategies) {
    const std::string runs = strategy.default_()    ? "default"
                             : strategy.available() ? "yes"
                                                    : "no: " + strategy.needs();
    table.Add({strategy.operation(), strategy.name(), strategy.backend(), DtypesText(strategy),
               runs, strategy.summary()});
  }
  table.Print(std::cout);
  return absl::OkStatus();
}

void AddStrategies(CLI::App& app, Command& chosen) {
  auto operation = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("strategies", "List the algorithms");
  command->add_option("operation", *operation,
                      "dot, reduce, reduce_axes, matmul, add or window_sum; default: all");
  command->callback([operation, &chosen] {
    chosen = [operation](Session& s) { return ListStrategies(s, *operation); };
  });
}

absl::Status Health(Session& session, const std::string& service) {
  const auto serving = session.client.CheckHealth(service);
  if (!serving.ok()) return serving.status();
  if (session.json) session.document["serving"] = *serving;
  if (!*serving) {
    return MakeError(absl::StatusCode::kUnavailable, "NOT_SERVING",
                     "the server does not take calls");
  }
  if (!session.json) std::cout << "serving\n";
  return absl::OkStatus();
}

void AddHealth(CLI::App& app, Command& chosen) {
  auto service = std::make_shared<std::string>("tessera.v1.ComputeService");
  CLI::App* command = app.add_subcommand("health", "Ask whether the server takes operations");
  command->add_option("service", *service, "Name of the service; empty: the process")
      ->capture_default_str();
  command->callback(
      [service, &chosen] { chosen = [service](Session& s) { return Health(s, *service); }; });
}

// --- Operations ----------------------------------------------------------------------------------

// Both operands of a command, and its options.
struct BinaryFlags {
  std::string a;
  std::string b;
  OperationFlags operation;
  ResultFlags result;
  bool transpose_a = false;
  bool transpose_b = false;
  std::string out_dtype;

  void AddOperands(CLI::App& command) {
    command.add_option("a", a, "First operand")->required();
    command.add_option("b", b, "Second operand")->required();
    operation.Add(command);
  }
};

absl::StatusOr<std::pair<Operand, Operand>> ResolveBoth(Session& session,
                                                        const BinaryFlags& flags) {
  auto a = ResolveOperand(session, flags.a);
  if (!a.ok()) return a.status();
  auto b = ResolveOperand(session, flags.b);
  if (!b.ok()) return b.status();
  return std::make_pair(*std::move(a), *std::move(b));
}

absl::Status Dot(Session& session, const BinaryFlags& flags) {
  const auto operands = ResolveBoth(session, flags);
  if (!operands.ok()) return operands.status();
  const auto start = Clock::now();
  const auto response =
      session.client.Dot(operands->first, operands->second, flags.operation.Options());
  if (!response.ok()) return response.status();
  const absl::Duration wall = Since(start);
  ReportScalar(session, response->value());
  ReportStats(session, response->stats(), wall, flags.operation.timing);
  return absl::OkStatus();
}

absl::Status Matmul(Session& session, const BinaryFlags& flags) {
  const auto operands = ResolveBoth(session, flags);
  if (!operands.ok()) return operands.status();
  std::optional<DType> out_dtype;
  if (!flags.out_dtype.empty()) out_dtype = Parse(kAllDTypes, flags.out_dtype);
  return DeliverArray(session, flags.operation, flags.result, [&](const OperationOptions& options) {
    return session.client.Matmul(operands->first, operands->second, flags.transpose_a,
                                 flags.transpose_b, out_dtype, options);
  });
}

absl::Status Add(Session& session, const BinaryFlags& flags) {
  const auto operands = ResolveBoth(session, flags);
  if (!operands.ok()) return operands.status();
  return DeliverArray(session, flags.operation, flags.result, [&](const OperationOptions& options) {
    return session.client.Add(operands->first, operands->second, options);
  });
}

struct ReduceFlags {
  std::string op;
  std::string x;
  std::string axes;
  bool keep_dims = false;
  OperationFlags operation;
  ResultFlags result;
};

// "0,-1"; empty: none.
absl::StatusOr<std::vector<int>> ParseAxes(const std::string& text) {
  std::vector<int> axes;
  if (text.empty()) return axes;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    if (!absl::SimpleAtoi(part, &axes.emplace_back())) {
      return BadOption("--axes takes whole numbers, as in 0,1 or -1");
    }
  }
  return axes;
}

absl::Status Reduce(Session& session, const ReduceFlags& flags) {
  const auto parsed = ParseAxes(flags.axes);
  if (!parsed.ok()) return parsed.status();
  const std::vector<int>& axes = *parsed;
  if (axes.empty() && flags.result.given()) {
    return BadOption("without --axes the result is one number, which is printed");
  }
  const auto x = ResolveOperand(session, flags.x);
  if (!x.ok()) return x.status();
  const ReduceOp op = Parse(kAllReduceOps, flags.op);
  if (!axes.empty()) {
    return DeliverArray(session, flags.operation, flags.result,
                        [&](const OperationOptions& options) {
                          return session.client.Reduce(op, *x, axes, flags.keep_dims, options);
                        });
  }
  const auto start = Clock::now();
  const auto response = session.client.Reduce(op, *x, {}, false, flags.operation.Options());
  if (!response.ok()) return response.status();
  const absl::Duration wall = Since(start);
  if (IsArg(op)) {
    if (session.json) {
      session.document["index"] = response->index();
    } else {
      std::cout << response->index() << '\n';
    }
  }
  if (session.json || !IsArg(op)) ReportScalar(session, response->value());
  ReportStats(session, response->stats(), wall, flags.operation.timing);
  return absl::OkStatus();
}

struct WindowSumFlags {
  std::string x;
  std::int64_t radius = 0;
  OperationFlags operation;
  ResultFlags result;
};

absl::Status WindowSum(Session& session, const WindowSumFlags& flags) {
  const auto x = ResolveOperand(session, flags.x);
  if (!x.ok()) return x.status();
  return DeliverArray(session, flags.operation, flags.result, [&](const OperationOptions& options) {
    return session.client.WindowSum(*x, flags.radius, options);
  });
}

void AddOperations(CLI::App& app, Command& chosen) {
  const auto binary = [&](const char* name, const char* description,
                          absl::Status (*run)(Session&, const BinaryFlags&)) {
    auto flags = std::make_shared<BinaryFlags>();
    CLI::App* command = app.add_subcommand(name, description);
    flags->AddOperands(*command);
    command->callback(
        [flags, run, &chosen] { chosen = [flags, run](Session& s) { return run(s, *flags); }; });
    return std::make_pair(command, flags);
  };
  binary("dot", "Sum of the products of two arrays' elements", Dot);

  auto reduce = std::make_shared<ReduceFlags>();
  CLI::App* command = app.add_subcommand("reduce", "Fold an array, or some of its axes");
  command->add_option("op", reduce->op, "The operation")
      ->required()
      ->check(CLI::IsMember(NamesOf(kAllReduceOps)));
  command->add_option("x", reduce->x, "The operand")->required();
  command->add_option("--axes", reduce->axes,
                      "Axes to fold, as in 0,1 or -1; default: all, to one number");
  command->add_flag("--keep-dims", reduce->keep_dims, "Keep folded axes with extent 1");
  reduce->operation.Add(*command);
  reduce->result.Add(*command);
  command->callback(
      [reduce, &chosen] { chosen = [reduce](Session& s) { return Reduce(s, *reduce); }; });

  const auto [matmul, flags] = binary("matmul", "Product of two matrices", Matmul);
  flags->result.Add(*matmul);
  matmul->add_flag("--transpose-a", flags->transpose_a, "Use the transpose of the first");
  matmul->add_flag("--transpose-b", flags->transpose_b, "Use the transpose of the second");
  matmul->add_option("--out-dtype", flags->out_dtype, "Type of the result; default: the operands'")
      ->check(CLI::IsMember(NamesOf(kAllDTypes)));

  const auto [add, add_flags] = binary("add", "Sum of two arrays, elementwise", Add);
  add_flags->result.Add(*add);

  auto window = std::make_shared<WindowSumFlags>();
  command = app.add_subcommand("window-sum", "Sums of the elements within a radius of each");
  command->add_option("x", window->x, "The operand, of rank 1")->required();
  command->add_option("--radius", window->radius, "In elements")->required();
  window->operation.Add(*command);
  window->result.Add(*command);
  command->callback(
      [window, &chosen] { chosen = [window](Session& s) { return WindowSum(s, *window); }; });
}

// --- Comparing strategies ------------------------------------------------------------------------

struct BenchFlags {
  std::string strategies;
  int repeat = 20;
  Launch launch;
  std::string op;
  std::string a;
  std::string b;
  std::string axes;
  std::int64_t radius = 0;
  bool transpose_a = false;
  bool transpose_b = false;
  std::string out_dtype;

  // Of one call; its result goes to a buffer of the run.
  OperationOptions Options(const std::string& strategy) const {
    OperationOptions options;
    options.strategy = strategy;
    options.launch = launch;
    options.timing = true;
    return options;
  }
};

// One run of `tessera bench`: what all operations share.
class Bench {
 public:
  Bench(Session& session, const BenchFlags& flags, const v1::GetServerInfoResponse& info)
      : session_(session), flags_(flags), info_(info), scratch_(session.client, info.limits()) {
    problem.repeat = flags.repeat;
  }

  // An operand and what is known of it beforehand.
  struct Input {
    Operand operand;
    std::string text;
    DType dtype = DType::kF32;
    std::vector<std::int64_t> shape;

    std::int64_t elements() const {
      return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
    }
    std::uint64_t bytes() const { return static_cast<std::uint64_t>(elements()) * SizeOf(dtype); }
    std::string type() const {
      return absl::StrCat(DtypeText(static_cast<v1::Dtype>(dtype)), " ", ShapeText(shape));
    }
  };
  absl::StatusOr<Input> Resolve(const std::string& text) {
    auto operand = ResolveOperand(session_, text);
    if (!operand.ok()) return operand.status();
    Input input{*std::move(operand), text};
    const auto describe = [&](v1::Dtype dtype, const auto& shape) {
      input.dtype = static_cast<DType>(dtype);
      input.shape.assign(shape.begin(), shape.end());
    };
    if (const auto* tensor = std::get_if<v1::Tensor>(&input.operand.source)) {
      describe(tensor->dtype(), tensor->shape());
    } else {
      const auto response = client().GetBuffer(std::get<std::string>(input.operand.source));
      if (!response.ok()) return response.status();
      describe(response->buffer().dtype(), response->buffer().shape());
    }
    if (const auto& view = input.operand.view)
      input.shape.assign(view->shape().begin(), view->shape().end());
    return input;
  }
  // Both operands; one that is named twice is read once.
  absl::StatusOr<std::pair<Input, Input>> ResolveBoth() {
    auto a = Resolve(flags_.a);
    if (!a.ok()) return a.status();
    auto b = Resolve(flags_.b);
    if (!b.ok()) return b.status();
    problem.operand_bytes = a->bytes() + (a->text == b->text ? 0 : b->bytes());
    return std::make_pair(*std::move(a), *std::move(b));
  }

  // The answer of a call whose result went to Target().
  template <class Response>
  absl::StatusOr<BenchAnswer> ArrayAnswer(const absl::StatusOr<Response>& response,
                                          bool with_values) {
    if (!response.ok()) return response.status();
    BenchAnswer answer{.stats = response->stats(),
                       .result_bytes = response->buffer().size_bytes(),
                       .dtype = static_cast<DType>(response->buffer().dtype())};
    if (with_values) {
      auto values = scratch_.Fetch(response->buffer());
      if (!values.ok()) return values.status();
      answer.values = *std::move(values);
    }
    return answer;
  }
  ResultBuffer Target() { return scratch_.Target("result"); }

  // The square root of the sum of squares, with room for its own rounding: by Cauchy and Schwarz
  // the sums of magnitudes that error bounds refer to are at most products of such norms.
  absl::StatusOr<BenchValues> Norms(const Operand& x, const std::vector<int>& axes) {
    constexpr long double kRoom = 1.01L;
    OperationOptions options;
    if (!axes.empty()) options.target = scratch_.Target("norms");
    const auto response = client().Reduce(ReduceOp::kNormL2, x, axes, false, options);
    if (!response.ok()) return response.status();
    absl::StatusOr<BenchValues> norms =
        axes.empty() ? ToValues(response->value()) : scratch_.Fetch(response->buffer());
    if (norms.ok()) {
      for (long double& norm : *norms) norm *= kRoom;
    }
    return norms;
  }

  enum class Ceiling { kMemory, kVendor };

  // Runs the problem, measures its ceiling, and prints.
  absl::Status Report(Ceiling ceiling) {
    if (flags_.strategies.empty()) {
      const auto list = client().ListStrategies(problem.operation);
      if (!list.ok()) return list.status();
      for (const v1::Strategy& strategy : *list) AddStrategy(strategy.name());
    } else {
      for (absl::string_view name : absl::StrSplit(flags_.strategies, ',', absl::SkipEmpty())) {
        AddStrategy(std::string(name));
      }
      if (problem.strategies.empty()) return BadOption("--strategy takes names, as in a,b,c");
    }
    const InterruptScope interrupts;
    problem.run = [run = problem.run](const std::string& strategy,
                                      bool with_values) -> absl::StatusOr<BenchAnswer> {
      if (absl::Status status = InterruptScope::Check(); !status.ok()) return status;
      return run(strategy, with_values);
    };
    auto report = RunBench(problem);
    if (!report.ok()) return report.status();
    const auto device =
        std::find_if(info_.devices().begin(), info_.devices().end(),
                     [&](const v1::Device& d) { return d.name() == report->device; });
    if (device != info_.devices().end()) {
      report->ceiling = ceiling == Ceiling::kVendor ? VendorRate(*report, *device)
                                                    : MeasureBandwidth(client(), scratch_, *device);
    }
    if (session_.json) {
      session_.document = ToJson(*report);
    } else {
      const bool terminal = ::isatty(STDOUT_FILENO) != 0;
      std::cout << ChartText(*report, TerminalColumns(), terminal && IsUtf8Locale());
    }
    return CheckAgreement(*report);
  }

  Client& client() { return session_.client; }

  BenchProblem problem;

 private:
  void AddStrategy(const std::string& name) {
    // A name may stand for a row on each kind of device. The last place counts: rows of the CPU
    // come first, and without the others their order is the same.
    auto& names = problem.strategies;
    names.erase(std::remove(names.begin(), names.end(), name), names.end());
    names.push_back(name);
  }

  // The vendor library's rate on the same problem.
  BenchCeiling VendorRate(const BenchReport& report, const v1::Device& device) {
    const std::string vendor = device.backend() == "cuda" ? "cublas" : "cpu_library";
    const auto rate = [&](const BenchReport& in) {
      const auto row = std::find_if(in.rows.begin(), in.rows.end(),
                                    [&](const auto& r) { return r.strategy == vendor; });
      return row == in.rows.end() ? 0 : row->rate;
    };
    double found = rate(report);
    if (found == 0) {
      problem.strategies = {vendor};
      if (const auto alone = RunBench(problem); alone.ok()) found = rate(*alone);
    }
    if (found == 0) return {0, "not known: " + vendor + " does not run this problem here"};
    return {found, vendor + " on the same problem in the same run"};
  }

  Session& session_;
  const BenchFlags& flags_;
  const v1::GetServerInfoResponse& info_;
  BenchScratch scratch_;
};

BenchScale ConstantScale(long double scale) {
  return [scale](std::size_t, long double) { return scale; };
}

absl::Status BenchDot(Bench& bench, const BenchFlags& flags) {
  const auto inputs = bench.ResolveBoth();
  if (!inputs.ok()) return inputs.status();
  const auto& [a, b] = *inputs;
  bench.problem.operation = "dot";
  bench.problem.title = absl::StrCat("dot of ", a.text, " and ", b.text, ", ", a.type());
  bench.problem.run = [&, &a = a, &b = b](const std::string& strategy,
                                          bool) -> absl::StatusOr<BenchAnswer> {
    const auto response = bench.client().Dot(a.operand, b.operand, flags.Options(strategy));
    if (!response.ok()) return response.status();
    return BenchAnswer{.stats = response->stats(), .values = ToValues(response->value())};
  };
  bench.problem.scale = [&, &a = a, &b = b]() -> absl::StatusOr<BenchScale> {
    if (IsInteger(a.dtype)) return ConstantScale(0);
    const auto norm_a = bench.Norms(a.operand, {});
    if (!norm_a.ok()) return norm_a.status();
    const auto norm_b = bench.Norms(b.operand, {});
    if (!norm_b.ok()) return norm_b.status();
    return ConstantScale(norm_a->front() * norm_b->front());
  };
  return bench.Report(Bench::Ceiling::kMemory);
}

absl::Status BenchReduce(Bench& bench, const BenchFlags& flags) {
  const auto parsed = ParseAxes(flags.axes);
  if (!parsed.ok()) return parsed.status();
  const std::vector<int>& axes = *parsed;
  const auto x = bench.Resolve(flags.a);
  if (!x.ok()) return x.status();
  const ReduceOp op = Parse(kAllReduceOps, flags.op);
  bench.problem.operand_bytes = x->bytes();
  bench.problem.operation = axes.empty() ? "reduce" : "reduce_axes";
  bench.problem.title =
      absl::StrCat("reduce ", flags.op, axes.empty() ? "" : " along " + flags.axes, " of ", x->text,
                   ", ", x->type());
  bench.problem.run = [&](const std::string& strategy,
                          bool with_values) -> absl::StatusOr<BenchAnswer> {
    OperationOptions options = flags.Options(strategy);
    if (!axes.empty()) options.target = bench.Target();
    const auto response = bench.client().Reduce(op, x->operand, axes, false, options);
    if (!axes.empty()) return bench.ArrayAnswer(response, with_values);
    if (!response.ok()) return response.status();
    BenchAnswer answer{.stats = response->stats(), .values = ToValues(response->value())};
    if (IsArg(op)) answer.values.push_back(static_cast<long double>(response->index()));
    return answer;
  };
  bench.problem.scale = [&]() -> absl::StatusOr<BenchScale> {
    if (IsExact(op, x->dtype)) return ConstantScale(0);
    if (op == ReduceOp::kNormL1 || op == ReduceOp::kNormL2 || op == ReduceOp::kSumSquares)
      return [](std::size_t, long double value) { return std::abs(value); };
    if (op == ReduceOp::kProduct) {
      // Partial products of very small or large ones leave the range in one order and not in
      // another.
      const long double small = x->dtype == DType::kF64 ? 1e-290L : 1e-30L;
      return [small](std::size_t, long double value) {
        const long double size = std::abs(value);
        return size > small && std::isfinite(size) ? size : HUGE_VALL;
      };
    }
    auto norms = bench.Norms(x->operand, axes);
    if (!norms.ok()) return norms.status();
    long double folded = 1;
    const auto rank = static_cast<int>(x->shape.size());
    for (int axis : axes)
      folded *= static_cast<long double>(x->shape[static_cast<std::size_t>((axis + rank) % rank)]);
    const long double n = axes.empty() ? static_cast<long double>(x->elements()) : folded;
    return [norms = *std::move(norms), n, op](std::size_t i, long double) {
      const long double magnitudes = norms[i] * std::sqrt(n);
      return op == ReduceOp::kSum    ? magnitudes
             : op == ReduceOp::kMean ? magnitudes / n
                                     : norms[i] * norms[i] / n;
    };
  };
  return bench.Report(Bench::Ceiling::kMemory);
}

absl::Status BenchMatmul(Bench& bench, const BenchFlags& flags) {
  const auto inputs = bench.ResolveBoth();
  if (!inputs.ok()) return inputs.status();
  const auto& [a, b] = *inputs;
  std::optional<DType> out_dtype;
  if (!flags.out_dtype.empty()) out_dtype = Parse(kAllDTypes, flags.out_dtype);
  bench.problem.operation = "matmul";
  bench.problem.title =
      absl::StrCat("matmul of ", a.text, flags.transpose_a ? " transposed" : "", " and ", b.text,
                   flags.transpose_b ? " transposed" : "", ", ", a.type(), " and ", b.type());
  std::int64_t columns = 1;
  if (a.shape.size() == 2 && b.shape.size() == 2) {  // else the server refuses them
    const double m = static_cast<double>(a.shape[flags.transpose_a ? 1 : 0]);
    const double k = static_cast<double>(a.shape[flags.transpose_a ? 0 : 1]);
    columns = b.shape[flags.transpose_b ? 0 : 1];
    bench.problem.operations = 2 * m * k * static_cast<double>(columns);
    bench.problem.unit = IsInteger(a.dtype) ? "OP/s" : "FLOP/s";
  }
  bench.problem.run = [&, &a = a, &b = b](const std::string& strategy, bool with_values) {
    OperationOptions options = flags.Options(strategy);
    options.target = bench.Target();
    return bench.ArrayAnswer(bench.client().Matmul(a.operand, b.operand, flags.transpose_a,
                                                   flags.transpose_b, out_dtype, options),
                             with_values);
  };
  bench.problem.scale = [&, &a = a, &b = b]() -> absl::StatusOr<BenchScale> {
    if (IsInteger(a.dtype)) return ConstantScale(0);
    auto rows = bench.Norms(a.operand, {flags.transpose_a ? 0 : 1});
    if (!rows.ok()) return rows.status();
    auto sides = bench.Norms(b.operand, {flags.transpose_b ? 1 : 0});
    if (!sides.ok()) return sides.status();
    const auto width = static_cast<std::uint64_t>(columns);
    const BenchSample sample = SampleOf(rows->size() * sides->size());
    return [rows = *std::move(rows), sides = *std::move(sides), width, sample](std::size_t i,
                                                                               long double) {
      const std::uint64_t element = sample.offset + i * sample.step;
      return rows[element / width] * sides[element % width];
    };
  };
  return bench.Report(Bench::Ceiling::kVendor);
}

absl::Status BenchAdd(Bench& bench, const BenchFlags& flags) {
  const auto inputs = bench.ResolveBoth();
  if (!inputs.ok()) return inputs.status();
  const auto& [a, b] = *inputs;
  bench.problem.operation = "add";
  bench.problem.title = absl::StrCat("add of ", a.text, " and ", b.text, ", ", a.type());
  bench.problem.run = [&, &a = a, &b = b](const std::string& strategy, bool with_values) {
    OperationOptions options = flags.Options(strategy);
    options.target = bench.Target();
    return bench.ArrayAnswer(bench.client().Add(a.operand, b.operand, options), with_values);
  };
  // One rounding, the same for all.
  bench.problem.scale = []() -> absl::StatusOr<BenchScale> { return ConstantScale(0); };
  return bench.Report(Bench::Ceiling::kMemory);
}

absl::Status BenchWindowSum(Bench& bench, const BenchFlags& flags) {
  const auto x = bench.Resolve(flags.a);
  if (!x.ok()) return x.status();
  bench.problem.operation = "window_sum";
  bench.problem.operand_bytes = x->bytes();
  bench.problem.title =
      absl::StrCat("window-sum with radius ", flags.radius, " of ", x->text, ", ", x->type());
  bench.problem.run = [&](const std::string& strategy, bool with_values) {
    OperationOptions options = flags.Options(strategy);
    options.target = bench.Target();
    return bench.ArrayAnswer(bench.client().WindowSum(x->operand, flags.radius, options),
                             with_values);
  };
  bench.problem.scale = [&]() -> absl::StatusOr<BenchScale> {
    if (IsInteger(x->dtype) || x->elements() == 0) return ConstantScale(0);
    // The magnitudes of a window: at most its width times the largest, and at most those of all.
    long double largest = 0;
    for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      const auto response = bench.client().Reduce(op, x->operand);
      if (!response.ok()) return response.status();
      largest = std::max(largest, std::abs(ToValues(response->value()).front()));
    }
    const auto n = static_cast<long double>(x->elements());
    return ConstantScale(largest * std::min(n, 2 * static_cast<long double>(flags.radius) + 1));
  };
  return bench.Report(Bench::Ceiling::kMemory);
}

void AddBench(CLI::App& app, Command& chosen) {
  CLI::App* bench = app.add_subcommand(
      "bench", "Compare the strategies of an operation on arrays that the server holds");
  bench->require_subcommand(1);
  bench->footer(
      std::string("The strategies are called in turn and timed by the device. Array results stay\n"
                  "on the server and are deleted at the end. One that has used 5 s of device time\n"
                  "is not called again. Gathering strided operands counts as part of the call.\n\n"
                  "Rates count each operand read once and the result written once; of matmul its\n"
                  "2 M N K operations. The ceiling is measured on the same device in the same\n"
                  "run: of matmul the vendor library (cublas, cpu_library) on this very problem,\n"
                  "of the others how fast the server's dot reads arrays too large for caches.\n"
                  "What fits the caches may pass it.\n\n"
                  "Answers must agree within the sum of the error bounds that the strategies\n"
                  "state, else the exit code is 1. Of large arrays, up to 1048576 evenly spaced\n"
                  "elements are compared.\n\n") +
      std::string(ExitCodesText()));
  const auto add = [&](const char* name, const char* description,
                       absl::Status (*run)(Bench&, const BenchFlags&)) {
    auto flags = std::make_shared<BenchFlags>();
    CLI::App* command = bench->add_subcommand(name, description);
    command->add_option("--strategy", flags->strategies,
                        "Algorithms to compare, as in a,b,c; default: all that run");
    command->add_option("--repeat", flags->repeat, "Timed calls of each")
        ->check(CLI::Range(1, 100'000))
        ->capture_default_str();
    AddLaunch(*command, flags->launch);
    command->callback([flags, run, &chosen] {
      chosen = [flags, run](Session& session) -> absl::Status {
        const auto info = session.client.GetServerInfo();
        if (!info.ok()) return info.status();
        Bench state(session, *flags, *info);
        return run(state, *flags);
      };
    });
    return std::make_pair(command, flags);
  };
  const auto add_binary = [&](const char* name, const char* description,
                              absl::Status (*run)(Bench&, const BenchFlags&)) {
    auto [command, flags] = add(name, description, run);
    command->add_option("a", flags->a, "First operand")->required();
    command->add_option("b", flags->b, "Second operand")->required();
    return std::make_pair(command, flags);
  };
  add_binary("dot", "Sum of the products of two arrays' elements", BenchDot);

  auto [reduce, reduce_flags] = add("reduce", "Fold an array, or some of its axes", BenchReduce);
  reduce->add_option("op", reduce_flags->op, "The operation")
      ->required()
      ->check(CLI::IsMember(NamesOf(kAllReduceOps)));
  reduce->add_option("x", reduce_flags->a, "The operand")->required();
  reduce->add_option("--axes", reduce_flags->axes,
                     "Axes to fold, as in 0,1 or -1; default: all, to one number");

  auto [matmul, matmul_flags] = add_binary("matmul", "Product of two matrices", BenchMatmul);
  matmul->add_flag("--transpose-a", matmul_flags->transpose_a, "Use the transpose of the first");
  matmul->add_flag("--transpose-b", matmul_flags->transpose_b, "Use the transpose of the second");
  matmul
      ->add_option("--out-dtype", matmul_flags->out_dtype,
                   "Type of the result; default: the operands'")
      ->check(CLI::IsMember(NamesOf(kAllDTypes)));

  add_binary("add", "Sum of two arrays, elementwise", BenchAdd);

  auto [window, window_flags] =
      add("window-sum", "Sums of the elements within a radius of each", BenchWindowSum);
  window->add_option("x", window_flags->a, "The operand, of rank 1")->required();
  window->add_option("--radius", window_flags->radius, "In elements")->required();
}

int Main(int argc, char** argv) {
  CLI::App app("Work with arrays that stay in GPU memory behind a Tessera server.", "tessera");
  app.set_version_flag("--version", TESSERA_VERSION);
  app.require_subcommand(1);
  app.fallthrough();  // global options may follow the subcommand
  app.footer(
      std::string(
          "Operands: NAME, NAME[10:20, ::-1, 3], NAME@OFFSET:SHAPE:STRIDES (a raw view in\n"
          "elements, as in x@0:540x1257:0x1), file:PATH.npy (travels with the request)\n\n") +
      std::string(ExitCodesText()));

  std::string server = ClientOptions().server;
  std::string timeout = "60s";
  bool json = false;
  app.add_option("-s,--server", server, "Address: host:port or unix:/path")
      ->envname("TESSERA_SERVER")
      ->capture_default_str();
  app.add_option("--timeout", timeout,
                 "Deadline of a call; transfers: longest pause; such as 90s, 10m or inf")
      ->check(DurationCheck())
      ->capture_default_str();
  app.add_flag("--json", json, "Print one JSON document");

  Command command;
  AddPut(app, command);
  AddGet(app, command);
  AddLs(app, command);
  AddRm(app, command);
  AddCp(app, command);
  AddInfo(app, command);
  AddOperations(app, command);
  AddStrategies(app, command);
  AddBench(app, command);
  AddHealth(app, command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsageExitCode;
  }

  ClientOptions options;
  options.server = server;
  options.timeout = *ParseDuration(timeout);
  options.stall_timeout = options.timeout;
  // A server that has just been started needs a moment; a person should not wait for one that is
  // not there.
  options.connect_timeout = std::min(options.timeout, absl::Seconds(5));
  Client client(options);
  Session session{client, json};
  const absl::Status status = command(session);
  if (!status.ok()) {
    const std::string reason = ErrorReason(status);
    const std::string code = absl::StatusCodeToString(status.code());
    std::cerr << "tessera: " << Printable({status.message().data(), status.message().size()})
              << ": " << Printable(reason.empty() ? code : reason) << "\n  "
              << Printable(Advice(status, server)) << '\n';
    session.document["error"] = ToJson(status);
  }
  if (json) {
    session.document["traffic"] = {{"sent_bytes", client.traffic().sent_bytes},
                                   {"received_bytes", client.traffic().received_bytes}};
    // Names in error messages may be any bytes. ASCII, so that no terminal takes a part for a
    // command.
    std::cout << session.document.dump(2, ' ', true, Json::error_handler_t::replace) << '\n';
  }
  std::cout.flush();
  if (!std::cout && status.ok()) return 1;
  return ExitCode(status);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) { return tessera::Main(argc, argv); }
