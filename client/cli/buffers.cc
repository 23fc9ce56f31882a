// put, get, ls, rm, cp and import.
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "client/cli/array_files.h"
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

// Flags that several commands have.
struct TargetFlags {
  std::string name;
  std::string ttl;
  bool replace = false;
  std::string device;
  std::vector<std::string> placement;

  ResultBuffer Target() const { return {name, ParseDuration(ttl), replace, placement}; }

  CLI::Option* AddDevice(CLI::App& command, const std::string& help) {
    return command.add_option("--device", device, help)->type_name("DEVICE");
  }
  // Adds --device and --placement, which are mutually exclusive.
  void AddWhere(CLI::App& command, const std::string& device_help) {
    auto* one = AddDevice(command, device_help);
    command
        .add_option("--placement", placement,
                    "Devices among which the array is divided, such as cuda:0,cuda:1; 'all' means "
                    "every device")
        ->type_name("DEVICES")
        ->delimiter(',')
        ->excludes(one);
  }
  // Adds --ttl and --replace.
  void AddLife(CLI::App& command) {
    AddTtl(command, ttl,
           "How long the buffer lives, such as 10m; default: --default-ttl of the server");
    command.add_flag("--replace", replace, "Replace a buffer of this name");
  }
};

struct PutFlags : TargetFlags {
  std::string file;
  std::string prefix;
  int streams = 0;
  bool no_checksums = false;
  std::string random;
  std::string shape;
  std::string dtype = "f32";
  std::uint64_t seed = 0;
};

v1::Buffer Upload(Session& session, const PutFlags& flags, const std::string& name, DType dtype,
                  const std::vector<std::int64_t>& shape, const Source& source) {
  OrThrow(InterruptScope::Check());
  const std::uint64_t bytes = OrThrow(ArrayBytes(dtype, shape));
  // Several connections are worthwhile for large arrays.
  constexpr std::uint64_t kLarge = std::uint64_t{64} << 20;
  constexpr int kStreams = 4;
  ProgressBar progress(name, bytes);
  return OrThrow(
      session.client.Upload(name, dtype, shape, source,
                            {.ttl = ParseDuration(flags.ttl),
                             .replace = flags.replace,
                             .device = flags.device,
                             .placement = flags.placement,
                             .streams = flags.streams > 0 ? flags.streams
                                        : bytes >= kLarge ? kStreams
                                                          : 1,
                             .checksums = !flags.no_checksums,
                             .progress = [&](std::uint64_t sent) { progress.Update(sent); },
                             .cancel = InterruptScope::token()}));
}

// Uploads the arrays of a file or a folder. If an upload fails, deletes the earlier buffers. With
// --replace, they stay, because deleting them would not bring back the buffers that they replaced.
std::vector<v1::Buffer> UploadFiles(Session& session, const PutFlags& flags) {
  std::vector<v1::Buffer> made;
  try {
    for (const ArrayInFile& array : FindArrays(flags.file, flags.name, flags.prefix)) {
      const NpyFile file = OrThrow(NpyFile::Open(array.file, array.header));
      const auto read = [&file](std::uint64_t offset, absl::Span<char> out) {
        return file.Read(offset, out);
      };
      made.push_back(Upload(session, flags, array.name, array.header.dtype, array.header.shape,
                            Source(read, array.header.data_bytes)));
    }
  } catch (const CommandError& error) {
    if (made.empty()) throw;
    if (flags.replace) {
      absl::Status status(error.status.code(),
                          absl::StrCat(error.status.message(), "; stored before that: ",
                                       made.size(), made.size() == 1 ? " array" : " arrays"));
      error.status.ForEachPayload(
          [&](absl::string_view url, const absl::Cord& value) { status.SetPayload(url, value); });
      throw CommandError(status);
    }
    for (const v1::Buffer& buffer : made)
      session.client.DeleteBuffer(buffer.name(), buffer.version()).IgnoreError();
    throw;
  }
  return made;
}

void Put(Session& session, const PutFlags& flags) {
  const auto start = Clock::now();
  std::vector<v1::Buffer> made;
  {
    const InterruptScope interrupts;
    if (flags.random.empty()) {
      if (flags.file.empty()) ThrowBadOption("give a FILE, or --random with --shape and --name");
      made = UploadFiles(session, flags);
    } else {
      const auto shape = ParseExtents(flags.shape);
      if (!shape) ThrowBadOption("'" + flags.shape + "' is not a shape such as 1000x1000");
      if (flags.name.empty()) ThrowBadOption("--random needs a --name");
      const DType dtype = Parse(kArrayDTypes, flags.dtype);
      made.push_back(Upload(session, flags, flags.prefix + flags.name, dtype, *shape,
                            RandomArray(*ParseDistribution(flags.random), dtype, flags.seed)));
    }
  }
  const absl::Duration wall = Since(start);
  if (session.json && (HoldsNamedArrays(flags.file) || std::filesystem::is_directory(flags.file))) {
    session.document["buffers"] = ListJson(made);
  } else {
    for (const v1::Buffer& buffer : made) ReportBuffer(session, buffer);
  }
  session.document["wall_us"] = absl::ToDoubleMicroseconds(wall);
  if (!session.json && wall >= absl::Seconds(1)) {
    double bytes = 0;
    for (const v1::Buffer& buffer : made) bytes += static_cast<double>(buffer.size_bytes());
    std::cerr << HumanDuration(wall) << ", "
              << HumanBytes(static_cast<std::uint64_t>(bytes / absl::ToDoubleSeconds(wall)))
              << "/s\n";
  }
}

struct GetFlags {
  std::vector<std::string> names;
  std::string prefix;
  std::string file;
  bool no_checksums = false;
};

void Get(Session& session, const GetFlags& flags) {
  CheckOutputs(session, flags.file);
  const DownloadOptions options{.checksums = !flags.no_checksums};
  const bool several = HoldsNamedArrays(flags.file);
  if (!several && flags.names.size() != 1)
    ThrowBadOption("a .npy file holds one BUFFER; .npz and .safetensors files hold several");
  if (flags.names.empty() && flags.prefix.empty()) ThrowBadOption("give a BUFFER, or a --prefix");
  const std::uint64_t bytes =
      several ? SaveBuffers(session, flags.names, flags.prefix, flags.file, options)
              : SaveBuffer(session, flags.names.front(), flags.file, options).size_bytes();
  ReportFile(session, flags.file, bytes);
}

void List(Session& session, const std::string& prefix) {
  const std::vector<v1::Buffer> buffers = OrThrow(session.client.ListBuffers(prefix));
  session.document["buffers"] = ListJson(buffers);
  if (session.json) return;
  if (buffers.empty()) {
    std::cerr << (prefix.empty()
                      ? "no buffers"
                      : "there are no buffers with the prefix '" + Printable(prefix) + "'")
              << '\n';
    return;
  }
  WriteBuffers("NAME", buffers, std::cout);
  std::uint64_t total = 0;
  for (const v1::Buffer& buffer : buffers) total += buffer.size_bytes();
  std::cerr << buffers.size() << (buffers.size() == 1 ? " buffer, " : " buffers, ")
            << HumanBytes(total) << '\n';
}

struct RemoveFlags {
  std::vector<std::string> names;
  std::uint64_t version = 0;  // 0 means all versions of each name
};

// Removes as many buffers as possible and throws the first error.
void Remove(Session& session, const RemoveFlags& flags) {
  if (flags.version != 0 && flags.names.size() > 1)
    ThrowBadOption("--version takes exactly one name");
  absl::Status first;
  Json& removed = session.document["removed"] = Json::array();
  for (const std::string& name : flags.names) {
    const absl::Status status = session.client.DeleteBuffer(name, flags.version);
    if (status.ok()) removed.push_back(name);
    first.Update(status);
  }
  OrThrow(first);
}

struct CopyFlags : TargetFlags {
  std::string source;
  std::string dtype;
  bool link = false;
};

void Copy(Session& session, const CopyFlags& flags) {
  const Operand source = ResolveOperand(session, flags.source);
  std::optional<DType> dtype;
  if (!flags.dtype.empty()) dtype = Parse(kArrayDTypes, flags.dtype);
  if (flags.link && source.view) {
    ThrowInvalid("BAD_LINK", "--link can give another name only to a whole buffer");
  }
  const std::string* name = std::get_if<std::string>(&source.source);
  ReportBuffer(
      session,
      OrThrow(flags.link && name != nullptr
                  ? session.client.LinkBuffer(*name, flags.Target(), source.version)
                  : session.client.CopyBuffer(source, flags.Target(), dtype, flags.device)));
}

struct ImportFlags : TargetFlags {
  std::string server;
  std::string source;
};

void Import(Session& session, const ImportFlags& flags) {
  ResultBuffer target = flags.Target();
  if (target.name.empty()) target.name = flags.source;
  ReportBuffer(session, OrThrow(session.client.ImportBuffer(flags.server, flags.source, target, 0,
                                                            flags.device))
                            .buffer());
}

struct SnapshotFlags {};

void Snapshot(Session& session, const SnapshotFlags&) {
  const v1::SnapshotResponse taken = OrThrow(session.client.Snapshot());
  session.document = ToJson(taken);
  if (session.json) return;
  std::cout << taken.buffers() << (taken.buffers() == 1 ? " buffer, " : " buffers, ")
            << taken.written_arrays() << (taken.written_arrays() == 1 ? " array" : " arrays")
            << " written (" << HumanBytes(taken.written_bytes()) << ")\n";
}

}  // namespace

void AddBuffers(CLI::App& app, Command& chosen) {
  const auto [put, put_flags] = AddCommand(app, chosen, "put", "Upload the arrays of a file", Put);
  auto* file = put->add_option("file", put_flags->file,
                               "A .npy, .npz or .safetensors file, or a folder of such files.\n"
                               "A buffer has the file's name without its ending, followed by / "
                               "and the array's\nname if the file has named arrays")
                   ->type_name("FILE");
  put->add_option("--name", put_flags->name, "Name to use instead of the file's")
      ->type_name("BUFFER");
  put->add_option("--prefix", put_flags->prefix, "Prefix of all names, such as model/")
      ->type_name("TEXT");
  put_flags->AddLife(*put);
  put_flags->AddWhere(*put, "Device for the buffer; default: the server's first device");
  put->add_option("--streams", put_flags->streams,
                  "Connections to use; default: 1, or 4 for 64 MiB or more")
      ->check(CLI::Range(1, 64));
  put->add_flag("--no-checksums", put_flags->no_checksums,
                "Do not send CRC-32C checksums for the server to check");
  auto* random =
      put->add_option("--random", put_flags->random, "Upload random numbers instead of a file")
          ->check(CLI::IsMember({"normal", "uniform", "ones", "zeros"}))
          ->excludes(file);
  put->add_option("--shape", put_flags->shape, "Shape of --random, such as 1000x1000")
      ->needs(random);
  random->needs("--shape");
  put->add_option("--dtype", put_flags->dtype, "Type of --random")
      ->check(CLI::IsMember(NamesOf(kArrayDTypes)))
      ->needs(random)
      ->capture_default_str();
  put->add_option("--seed", put_flags->seed, "Seed of --random")
      ->needs(random)
      ->check(Fits<std::uint64_t>())
      ->capture_default_str();

  const auto [get, get_flags] = AddCommand(app, chosen, "get", "Download buffers into a file", Get);
  auto* names =
      get->add_option("names", get_flags->names, "Names of the buffers")->type_name("BUFFER");
  get->add_option("--prefix", get_flags->prefix,
                  "Prefix of the buffers to download; their names in the file are without it")
      ->type_name("BUFFER")
      ->excludes(names);
  get->add_option("-o,--output", get_flags->file,
                  "The file to write: .npz or .safetensors for named arrays, otherwise .npy;\n"
                  "- is standard output")
      ->type_name("FILE")
      ->required();
  get->add_flag("--no-checksums", get_flags->no_checksums,
                "Do not request or check a CRC-32C of the bytes");

  const auto [ls, prefix] = AddCommand(app, chosen, "ls", "List buffers", List);
  ls->add_option("prefix", *prefix, "Only names with this prefix")->type_name("BUFFER");

  const auto [rm, rm_flags] = AddCommand(
      app, chosen, "rm", "Delete buffers, including uploads that have not ended", Remove);
  rm->add_option("names", rm_flags->names, "Names of the buffers")->type_name("BUFFER")->required();
  rm->add_option(
        "--version", rm_flags->version,
        "Delete only this version, which may be a draft; 'tessera info NAME' lists all versions")
      ->check(CLI::PositiveNumber)
      ->check(Fits<std::uint64_t>());

  const auto [cp, cp_flags] = AddCommand(
      app, chosen, "cp", "Copy a buffer, or a part of a buffer, within the server", Copy);
  AddOperand(*cp, "source", cp_flags->source, "NAME, NAME[slices] or NAME@OFFSET:SHAPE:STRIDES");
  cp->add_option("name", cp_flags->name, "The new buffer")->type_name("BUFFER")->required();
  cp->add_option("--dtype", cp_flags->dtype, "Cast to this type; default: the source's")
      ->check(CLI::IsMember(NamesOf(kArrayDTypes)));
  cp_flags->AddWhere(*cp, "Device for the copy; default: the device of the source");
  cp_flags->AddLife(*cp);
  cp->add_flag("--link", cp_flags->link,
               "Give the source's memory another name instead of copying it")
      ->excludes("--dtype", "--device", "--placement");

  const auto [import, import_flags] = AddCommand(
      app, chosen, "import",
      "Have the server fetch a buffer from another server, which its --import-from must allow",
      Import);
  import
      ->add_option("from", import_flags->server,
                   "Address at which the server reaches the other server")
      ->type_name("HOST:PORT")
      ->required();
  import->add_option("source", import_flags->source, "Name of the buffer on the other server")
      ->type_name("NAME")
      ->required();
  import->add_option("name", import_flags->name, "Name of the new buffer; default: the same name")
      ->type_name("NAME");
  import_flags->AddDevice(*import, "Device for the buffer; default: the server's first device");
  import_flags->AddLife(*import);

  AddCommand(app, chosen, "snapshot",
             "Have the server write its buffers to its --data-dir, so that they survive a restart",
             Snapshot);
}

}  // namespace tessera
