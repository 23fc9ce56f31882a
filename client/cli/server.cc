// info, strategies and health.
#include <fstream>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/command.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/operations.h"
#include "kernels/client_and_server/printable.h"

namespace tessera {
namespace {

void BufferInfo(Session& session, const std::string& name) {
  const v1::GetBufferResponse response = OrThrow(session.client.GetBuffer(name));
  const v1::Buffer& buffer = response.buffer();
  if (session.json) {
    session.document["buffer"] = ToJson(buffer);
    Json& missing = session.document["missing"] = Json::array();
    for (const v1::ByteRange& range : response.missing())
      missing.push_back({range.begin(), range.end()});
    session.document["drafts"] = ListJson(response.drafts());
    return;
  }
  const absl::Time created = absl::FromUnixSeconds(buffer.create_time().seconds());
  std::cout << "name     " << Printable(buffer.name()) << "\ndtype    " << DtypeText(buffer.dtype())
            << "\nshape    " << ShapeText(buffer.shape()) << "\nsize     "
            << HumanBytes(buffer.size_bytes()) << " (" << buffer.size_bytes() << " bytes)"
            << "\nstate    " << StateText(buffer) << "\ndevice   " << Printable(PlaceText(buffer))
            << "\ncreated  "
            << absl::FormatTime("%Y-%m-%d %H:%M:%S", created, absl::LocalTimeZone())
            << "\nexpires  " << ExpiryText(buffer) << "\nversion  " << buffer.version() << '\n';
  if (buffer.has_crc32c()) std::cout << absl::StrFormat("crc32c   %08x\n", buffer.crc32c());
  for (const v1::ByteRange& range : response.missing())
    std::cout << "missing  bytes " << range.begin() << " to " << range.end() << '\n';
  for (const v1::Buffer& draft : response.drafts()) {
    std::cout << "draft    version " << draft.version() << ", " << StateText(draft) << " of "
              << HumanBytes(draft.size_bytes()) << ", begun " << AgeText(draft.create_time())
              << " ago\n";
  }
}

void Info(Session& session, const std::string& name) {
  if (!name.empty()) return BufferInfo(session, name);
  const v1::GetServerInfoResponse info = OrThrow(session.client.GetServerInfo());
  session.document = ToJson(info);
  if (session.json) return;
  std::cout << "tessera-server " << Printable(info.version()) << ", up "
            << AgeText(info.start_time()) << "\nqueue of " << info.limits().queue_length()
            << " operations, messages up to " << HumanBytes(info.limits().max_message_bytes())
            << ", inline results up to " << HumanBytes(info.limits().max_inline_result_bytes())
            << "\n\n";
  Table table({"DEVICE", "MODEL", ">UNITS", ">MEMORY", ">FREE", ">BUFFERS", ">PREPARED", ">LIMIT",
               ">WORKERS", ">WAITING"});
  for (const v1::Device& device : info.devices()) {
    table.Add({device.name(), device.model(), absl::StrCat(device.multiprocessors()),
               InstalledText(device), HumanBytes(device.memory_free_bytes()),
               HumanBytes(device.buffer_used_bytes()), HumanBytes(device.prepared_bytes()),
               HumanBytes(device.buffer_limit_bytes()), absl::StrCat(device.workers()),
               absl::StrCat(device.waiting())});
  }
  table.Print(std::cout);
  WriteTenants(info, std::cout);
}

void ListStrategies(Session& session, const std::string& operation) {
  const std::vector<v1::Strategy> strategies = OrThrow(session.client.ListStrategies(operation));
  session.document["strategies"] = ListJson(strategies);
  if (session.json) return;
  Table table({"OPERATION", "STRATEGY", "DEVICE", "DTYPES", "RUNS HERE", "SUMMARY"});
  for (const v1::Strategy& strategy : strategies) {
    const auto add_type = [](std::string* out, int dtype) {
      *out += DtypeText(static_cast<v1::Dtype>(dtype));
    };
    table.Add({strategy.operation(), strategy.name(), strategy.backend(),
               absl::StrJoin(strategy.dtypes(), " ", add_type),
               strategy.default_()    ? "default"
               : strategy.available() ? "yes"
                                      : "no: " + strategy.needs(),
               strategy.summary()});
  }
  table.Print(std::cout);
}

// Returns the strings in a process's file in /proc. Each ends with a zero byte.
std::vector<std::string> ProcessStrings(int process, std::string_view file) {
  std::ifstream in(
      absl::StrCat("/proc/", process, "/", absl::string_view(file.data(), file.size())));
  if (!in) {
    throw CLI::ValidationError("--process",
                               absl::StrCat("cannot read the /proc files of process ", process));
  }
  std::vector<std::string> found;
  for (std::string part; std::getline(in, part, '\0');) found.push_back(part);
  return found;
}

// Returns the first address on which a server listens, from the server's command line or, if none
// is given there, from its environment. Replaces [::], which does not work if the kernel has no
// IPv6, with 0.0.0.0, which also leads to this host.
std::string AddressOf(int process) {
  constexpr absl::string_view kFlag = "--listen", kVariable = "TESSERA_LISTEN=";
  std::string listen = ClientOptions().server;
  for (const std::string& variable : ProcessStrings(process, "environ")) {
    if (!absl::StartsWith(variable, kVariable)) continue;
    if (variable.size() > kVariable.size()) listen = variable.substr(kVariable.size());
  }
  const std::vector<std::string> words = ProcessStrings(process, "cmdline");
  for (auto word = words.begin(); word != words.end(); ++word) {
    const bool apart = *word == kFlag && word + 1 != words.end();
    if (!apart && !absl::StartsWith(*word, absl::StrCat(kFlag, "="))) continue;
    listen = apart ? *(word + 1) : word->substr(kFlag.size() + 1);
    break;
  }
  listen.resize(std::min(listen.find(','), listen.size()));
  if (absl::EndsWith(listen, ":0")) {
    throw CLI::ValidationError(
        "--process", absl::StrCat("process ", process, " chose a free port, which --listen ",
                                  listen, " does not show; use --server instead"));
  }
  constexpr absl::string_view kEveryAddress = "[::]:";
  if (absl::StartsWith(listen, kEveryAddress)) listen.replace(0, kEveryAddress.size(), "0.0.0.0:");
  return listen;
}

struct HealthFlags {
  std::string service = "tessera.v1.ComputeService";
  int process = 0;
};

void Health(Session& session, const HealthFlags& flags) {
  const bool serving = OrThrow(session.client.CheckHealth(flags.service));
  session.document["serving"] = serving;
  if (!serving) {
    throw CommandError(MakeError(absl::StatusCode::kUnavailable, "NOT_SERVING",
                                 "the server does not accept calls"));
  }
  if (!session.json) std::cout << "serving\n";
}

}  // namespace

void AddInfo(CLI::App& app, Command& chosen) {
  const auto [command, name] =
      AddCommand(app, chosen, "info", "Describe the server, or a buffer", Info);
  command->add_option("name", *name, "Name of a buffer")->type_name("BUFFER");
}

void AddStrategies(CLI::App& app, Command& chosen) {
  const auto [command, operation] =
      AddCommand(app, chosen, "strategies", "List the strategies", ListStrategies);
  command
#define TESSERA_NAME(Operation, name) " " #name
      ->add_option("operation", *operation, "default: all of" TESSERA_OPERATIONS(TESSERA_NAME))
#undef TESSERA_NAME
      ->type_name("OPERATION");
}

void AddHealth(CLI::App& app, Command& chosen) {
  const auto [command, flags] =
      AddCommand<HealthFlags>(app, chosen, "health", "Check whether the server accepts operations",
                              Health, [&app](const HealthFlags& given) {
                                if (given.process != 0)
                                  SetOption(*app.get_option("--server"), AddressOf(given.process));
                              });
  command->add_option("service", flags->service, "Name of the service; empty for the whole process")
      ->capture_default_str();
  command
      ->add_option("--process", flags->process,
                   "Ask the server on this host whose process ID is PID, at the first address in\n"
                   "its --listen flag or TESSERA_LISTEN, instead of the server at --server")
      ->type_name("PID")
      ->check(CLI::PositiveNumber);
}

}  // namespace tessera
