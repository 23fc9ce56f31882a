// put, get, ls, rm and cp.
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/cli/command.h"
#include "client/cli/operands.h"
#include "client/cli/results.h"
#include "client/npy.h"
#include "client/random_array.h"
#include "client/slice.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/printable.h"

namespace tessera {
namespace {

// Returns the file's stem, in which '_' replaces every character that is not allowed in a name.
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
  std::vector<std::string> placement;
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
  Source source = nullptr;
  std::optional<NpyFile> file;
  std::string name = flags.name;
  if (flags.random.empty()) {
    if (flags.file.empty()) return BadOption("give a FILE, or --random with --shape and --name");
    auto opened = NpyFile::Open(flags.file);
    if (!opened.ok()) return opened.status();
    file.emplace(*std::move(opened));
    dtype = file->header().dtype;
    shape = file->header().shape;
    source = Source(
        [&file](std::uint64_t offset, absl::Span<char> out) { return file->Read(offset, out); },
        file->header().data_bytes);
    if (name.empty()) name = NameOfFile(flags.file);
  } else {
    const auto extents = ParseExtents(flags.shape);
    if (!extents) return BadOption("'" + flags.shape + "' is not a shape such as 1000x1000");
    if (name.empty()) return BadOption("--random needs a --name");
    dtype = Parse(kArrayDTypes, flags.dtype);
    shape = *extents;
    source = RandomArray(*ParseDistribution(flags.random), dtype, flags.seed);
  }
  const auto bytes = ArrayBytes(dtype, shape);
  if (!bytes.ok()) return bytes.status();

  UploadOptions options;
  if (!flags.ttl.empty()) options.ttl = ParseDuration(flags.ttl);
  options.replace = flags.replace;
  options.device = flags.device;
  options.placement = flags.placement;
  options.checksums = !flags.no_checksums;
  // Several connections are worthwhile for large arrays.
  constexpr std::uint64_t kLarge = std::uint64_t{64} << 20;
  constexpr int kStreams = 4;
  options.streams = flags.streams > 0 ? flags.streams : *bytes >= kLarge ? kStreams : 1;
  const auto start = Clock::now();
  absl::StatusOr<v1::Buffer> buffer;
  {
    const InterruptScope interrupts;
    ProgressBar progress(name, *bytes);
    options.progress = [&](std::uint64_t sent) { progress.Update(sent); };
    options.cancel = InterruptScope::token();
    buffer = session.client.Upload(name, dtype, shape, source, options);
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

// Adds --device and --placement, which are mutually exclusive.
template <class Flags>
void AddWhere(CLI::App& command, const std::string& device_help, Flags& flags) {
  auto* device = command.add_option("--device", flags.device, device_help)->type_name("DEVICE");
  command
      .add_option(
          "--placement", flags.placement,
          "Devices among which the array is divided, such as cuda:0,cuda:1; all: every device")
      ->type_name("DEVICES")
      ->delimiter(',')
      ->excludes(device);
}

}  // namespace

void AddPut(CLI::App& app, Command& chosen) {
  auto flags = std::make_shared<PutFlags>();
  CLI::App* command = app.add_subcommand("put", "Upload an array");
  auto* file = command->add_option("file", flags->file, "A .npy file")->type_name("FILE");
  command->add_option("--name", flags->name, "Name of the buffer; default: the file's")
      ->type_name("BUFFER");
  command->add_option("--ttl", flags->ttl, "How long it lives, such as 10m; default: the server's")
      ->check(DurationCheck());
  command->add_flag("--replace", flags->replace, "Replace a buffer of this name");
  AddWhere(*command, "Device that holds it; default: the server's first", *flags);
  command
      ->add_option("--streams", flags->streams, "Connections to use; default: 1, 4 from 64 MiB on")
      ->check(CLI::Range(1, 64));
  command->add_flag("--no-checksums", flags->no_checksums,
                    "Do not send CRC-32C checksums for the server to check");
  auto* random =
      command->add_option("--random", flags->random, "Upload random numbers instead of a file")
          ->check(CLI::IsMember({"normal", "uniform", "ones", "zeros"}))
          ->excludes(file);
  command->add_option("--shape", flags->shape, "Shape of --random, such as 1000x1000")
      ->needs(random);
  random->needs("--shape");
  command->add_option("--dtype", flags->dtype, "Type of --random")
      ->check(CLI::IsMember(NamesOf(kArrayDTypes)))
      ->needs(random)
      ->capture_default_str();
  command->add_option("--seed", flags->seed, "Seed of --random")
      ->needs(random)
      ->check(Fits<std::uint64_t>())
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
  command->add_option("name", flags->name, "Name of the buffer")->type_name("BUFFER")->required();
  command->add_option("-o,--output", flags->file, "The file to write; - is standard output")
      ->type_name("FILE")
      ->required();
  command->add_flag("--no-checksums", flags->no_checksums,
                    "Do not request or check a CRC-32C of the bytes");
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

namespace {

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
               HumanBytes(buffer.size_bytes()), PlaceText(buffer), StateText(buffer),
               ExpiryText(buffer)});
    total += buffer.size_bytes();
  }
  table.Print(std::cout);
  std::cerr << buffers->size() << (buffers->size() == 1 ? " buffer, " : " buffers, ")
            << HumanBytes(total) << '\n';
  return absl::OkStatus();
}

}  // namespace

void AddLs(CLI::App& app, Command& chosen) {
  auto prefix = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("ls", "List buffers");
  command->add_option("prefix", *prefix, "Only names with this prefix")->type_name("BUFFER");
  command->callback(
      [prefix, &chosen] { chosen = [prefix](Session& s) { return List(s, *prefix); }; });
}

namespace {

// Removes as many buffers as possible and returns the first error. version: 0 means all versions of
// each name.
absl::Status Remove(Session& session, const std::vector<std::string>& names,
                    std::uint64_t version) {
  if (version != 0 && names.size() > 1) return BadOption("--version takes exactly one name");
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

}  // namespace

void AddRm(CLI::App& app, Command& chosen) {
  struct Flags {
    std::vector<std::string> names;
    std::uint64_t version = 0;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* command =
      app.add_subcommand("rm", "Delete buffers, including uploads that have not ended");
  command->add_option("names", flags->names, "Names of the buffers")
      ->type_name("BUFFER")
      ->required();
  command
      ->add_option("--version", flags->version,
                   "Delete only this version, a buffer or a draft; 'tessera info NAME' lists them")
      ->check(CLI::PositiveNumber)
      ->check(Fits<std::uint64_t>());
  command->callback([flags, &chosen] {
    chosen = [flags](Session& s) { return Remove(s, flags->names, flags->version); };
  });
}

namespace {

struct CopyFlags {
  std::string source;
  std::string name;
  std::string dtype;
  std::string device;
  std::vector<std::string> placement;
  std::string ttl;
  bool replace = false;
  bool link = false;
};

absl::Status Copy(Session& session, const CopyFlags& flags) {
  const auto source = ResolveOperand(session, flags.source);
  if (!source.ok()) return source.status();
  ResultBuffer target{flags.name, std::nullopt, flags.replace, flags.placement};
  if (!flags.ttl.empty()) target.ttl = *ParseDuration(flags.ttl);
  std::optional<DType> dtype;
  if (!flags.dtype.empty()) dtype = Parse(kArrayDTypes, flags.dtype);
  if (flags.link && source->view) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_LINK",
                     "--link gives a whole buffer another name, not a part of one");
  }
  const std::string* name = std::get_if<std::string>(&source->source);
  const auto buffer = flags.link && name != nullptr
                          ? session.client.LinkBuffer(*name, target, source->version)
                          : session.client.CopyBuffer(*source, target, dtype, flags.device);
  if (!buffer.ok()) return buffer.status();
  ReportBuffer(session, *buffer);
  return absl::OkStatus();
}

}  // namespace

void AddCp(CLI::App& app, Command& chosen) {
  auto flags = std::make_shared<CopyFlags>();
  CLI::App* command =
      app.add_subcommand("cp", "Copy a buffer, or a window of it, without leaving the server");
  command->add_option("source", flags->source, "NAME, NAME[slices] or NAME@OFFSET:SHAPE:STRIDES")
      ->type_name("OPERAND")
      ->required();
  command->add_option("name", flags->name, "The new buffer")->type_name("BUFFER")->required();
  command->add_option("--dtype", flags->dtype, "Cast to this type; default: the source's")
      ->check(CLI::IsMember(NamesOf(kArrayDTypes)));
  AddWhere(*command, "Where it goes; default: where the source is", *flags);
  command->add_option("--ttl", flags->ttl, "How long it lives, such as 10m")
      ->check(DurationCheck());
  command->add_flag("--replace", flags->replace, "Replace a buffer of that name");
  command
      ->add_flag("--link", flags->link,
                 "Give the source's memory another name instead of copying it")
      ->excludes("--dtype", "--device", "--placement");
  command->callback([flags, &chosen] { chosen = [flags](Session& s) { return Copy(s, *flags); }; });
}

namespace {

struct ImportFlags {
  std::string server;
  std::string source;
  std::string name;
  std::string device;
  std::string ttl;
  bool replace = false;
};

absl::Status Import(Session& session, const ImportFlags& flags) {
  ResultBuffer target{flags.name.empty() ? flags.source : flags.name, std::nullopt, flags.replace};
  if (!flags.ttl.empty()) target.ttl = *ParseDuration(flags.ttl);
  const auto answer =
      session.client.ImportBuffer(flags.server, flags.source, target, 0, flags.device);
  if (!answer.ok()) return answer.status();
  ReportBuffer(session, answer->buffer());
  return absl::OkStatus();
}

}  // namespace

void AddImport(CLI::App& app, Command& chosen) {
  auto flags = std::make_shared<ImportFlags>();
  CLI::App* command = app.add_subcommand(
      "import",
      "Have the server fetch a buffer from another server, if its --import-from allows that");
  command->add_option("from", flags->server, "The other server, as seen from the server")
      ->type_name("HOST:PORT")
      ->required();
  command->add_option("source", flags->source, "Its buffer")->type_name("NAME")->required();
  command->add_option("name", flags->name, "The new buffer; default: the same name")
      ->type_name("NAME");
  command
      ->add_option("--device", flags->device, "Where it goes; default: the server's first device")
      ->type_name("DEVICE");
  command->add_option("--ttl", flags->ttl, "How long it lives, such as 10m")
      ->check(DurationCheck());
  command->add_flag("--replace", flags->replace, "Replace a buffer of that name");
  command->callback(
      [flags, &chosen] { chosen = [flags](Session& s) { return Import(s, *flags); }; });
}

}  // namespace tessera
