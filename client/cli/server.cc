// info, strategies and health.
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/command.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/operations.h"
#include "kernels/client_and_server/printable.h"

namespace tessera {
namespace {

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
            << "\nstate    " << StateText(buffer) << "\ndevice   " << Printable(PlaceText(buffer))
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
  Table table({"DEVICE", "MODEL", ">UNITS", ">MEMORY", ">FREE", ">BUFFERS", ">PREPARED", ">LIMIT",
               ">WORKERS", ">WAITING"});
  for (const v1::Device& device : info->devices()) {
    table.Add({device.name(), device.model(), absl::StrCat(device.multiprocessors()),
               HumanBytes(device.memory_total_bytes()), HumanBytes(device.memory_free_bytes()),
               HumanBytes(device.buffer_used_bytes()), HumanBytes(device.prepared_bytes()),
               HumanBytes(device.buffer_limit_bytes()), absl::StrCat(device.workers()),
               absl::StrCat(device.waiting())});
  }
  table.Print(std::cout);
  WriteTenants(*info, std::cout);
  return absl::OkStatus();
}

}  // namespace

void AddInfo(CLI::App& app, Command& chosen) {
  auto name = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("info", "Describe the server, or a buffer");
  command->add_option("name", *name, "Name of a buffer")->type_name("BUFFER");
  command->callback([name, &chosen] {
    chosen = [name](Session& s) { return name->empty() ? ServerInfo(s) : BufferInfo(s, *name); };
  });
}

namespace {

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

}  // namespace

void AddStrategies(CLI::App& app, Command& chosen) {
  auto operation = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("strategies", "List the strategies");
  command
#define TESSERA_NAME(Operation, name) " " #name
      ->add_option("operation", *operation, "default: all of" TESSERA_OPERATIONS(TESSERA_NAME))
#undef TESSERA_NAME
      ->type_name("OPERATION");
  command->callback([operation, &chosen] {
    chosen = [operation](Session& s) { return ListStrategies(s, *operation); };
  });
}

namespace {

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

// Returns the first address on which a server listens, from its command line or, failing that, its
// environment. 0.0.0.0 also leads to this host. It replaces [::], which does not work if the kernel
// has no IPv6.
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
                                  listen, " does not show: give --server instead"));
  }
  constexpr absl::string_view kEveryAddress = "[::]:";
  if (absl::StartsWith(listen, kEveryAddress)) listen.replace(0, kEveryAddress.size(), "0.0.0.0:");
  return listen;
}

absl::Status Health(Session& session, const std::string& service) {
  const auto serving = session.client.CheckHealth(service);
  if (!serving.ok()) return serving.status();
  if (session.json) session.document["serving"] = *serving;
  if (!*serving) {
    return MakeError(absl::StatusCode::kUnavailable, "NOT_SERVING",
                     "the server does not accept calls");
  }
  if (!session.json) std::cout << "serving\n";
  return absl::OkStatus();
}

}  // namespace

void AddHealth(CLI::App& app, Command& chosen) {
  auto service = std::make_shared<std::string>("tessera.v1.ComputeService");
  auto process = std::make_shared<int>(0);
  CLI::App* command = app.add_subcommand("health", "Check whether the server accepts operations");
  command->add_option("service", *service, "Name of the service; empty for the whole process")
      ->capture_default_str();
  command
      ->add_option("--process", *process,
                   "Ask the server on this host with process ID PID, at the first address of the\n"
                   "--listen flag or environment variable, instead of the server at --server")
      ->type_name("PID")
      ->check(CLI::PositiveNumber);
  command->callback([service, process, &app, &chosen] {
    if (*process != 0) SetOption(*app.get_option("--server"), AddressOf(*process));
    chosen = [service](Session& s) { return Health(s, *service); };
  });
}

}  // namespace tessera
