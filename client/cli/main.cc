// The command-line client, `tessera`: global options, one subcommand, and the exit code.
#include <malloc.h>
#include <openssl/crypto.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "client/cli/command.h"
#include "client/rpc/address.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/printable.h"
#include "kernels/client_and_server/word_lines.h"

namespace tessera {
namespace {

// Returns what is wrong with the servers' addresses, or "" if all are valid.
std::string CheckServers(const std::string& servers) {
  for (const absl::string_view address : absl::StrSplit(Trimmed(servers), ',')) {
    const absl::Status status = CheckAddress(Trimmed(std::string(address)));
    if (!status.ok()) return std::string(status.message());
  }
  return "";
}

// Returns what is wrong with a command line that has no valid command, or "" if the command is
// simply missing.
std::string UnknownCommand(const CLI::App& app) {
  const CLI::App* parent = &app;
  std::string words = "tessera";
  while (!parent->get_subcommands().empty()) {
    parent = parent->get_subcommands().front();
    words += " " + parent->get_name();
  }
  const std::vector<std::string> rest = app.remaining(/*recurse=*/true);
  if (rest.empty()) return "";
  if (parent->get_require_subcommand_min() == 0) {
    if (!absl::StartsWith(rest.front(), "-")) return "";
    return absl::StrCat("'", Absl(Printable(rest.front())),
                        "' is not an option; after --, it is an argument");
  }
  std::vector<std::string> names;
  for (const CLI::App* command : parent->get_subcommands([](const CLI::App*) { return true; }))
    if (!command->get_group().empty()) names.push_back(command->get_name());
  if (absl::StartsWith(rest.front(), "-"))
    return absl::StrCat("'", Absl(Printable(rest.front())), "' is not an option");
  return absl::StrCat("'", Absl(Printable(words + " " + rest.front())),
                      "' is not a command; the commands are ", absl::StrJoin(names, ", "));
}

// The options that apply to all commands.
struct GlobalOptions {
  ClientOptions client;
  std::string timeout = "60s";
  bool json = false;
};

void AddGlobalOptions(CLI::App& app, GlobalOptions& options) {
  app.add_option(
         "-s,--server", options.client.server,
         "Address: host:port or unix:/path; or several, separated by commas, of servers that\n"
         "hold the same buffers: the first one that responds is used")
      ->check(CheckServers)
      ->envname("TESSERA_SERVER")
      ->capture_default_str();
  const auto add = [&](const char* name, std::string& value, const char* type, const char* variable,
                       const char* description) {
    app.add_option(name, value, description)->type_name(type)->envname(variable);
  };
  ClientOptions& client = options.client;
  add("--tls-ca", client.tls_ca, "FILE", "TESSERA_CLIENT_TLS_CA",
      "CA of the server's certificate, in PEM; enables TLS");
  add("--tls-cert", client.tls_cert, "FILE", "TESSERA_CLIENT_TLS_CERT",
      "Certificate to present to the server, in PEM");
  add("--tls-key", client.tls_key, "FILE", "TESSERA_CLIENT_TLS_KEY", "Key of --tls-cert, in PEM");
  add("--tls-server-name", client.tls_server_name, "NAME", "TESSERA_CLIENT_TLS_SERVER_NAME",
      "Host name in the server's certificate, if it differs from the host in --server");
  // The token itself is not an option, because a command line is visible to all processes.
  add("--token-file", client.token_file, "FILE", "TESSERA_TOKEN_FILE",
      "File with the caller's token; without it, the token is read from the environment\n"
      "variable TESSERA_TOKEN");
  app.add_option("--timeout", options.timeout,
                 "Deadline of a call, or longest pause of a transfer, such as 90s, 10m or inf")
      ->check(DurationCheck(/*endless=*/true))
      ->capture_default_str();
  app.add_flag("--json", options.json,
               "Print one JSON document. All integers are exact, but some JSON readers round "
               "integers above 2^53");
}

// Returns the client's options. The command line must have been parsed.
ClientOptions ClientOptionsOf(const GlobalOptions& options) {
  ClientOptions client = options.client;
  for (std::string* text :
       {&client.server, &client.tls_ca, &client.tls_cert, &client.tls_key, &client.token_file})
    *text = Trimmed(*text);
  if (const char* token = std::getenv("TESSERA_TOKEN");
      client.token_file.empty() && token != nullptr)
    client.token = token;
  client.timeout = *ParseDuration(options.timeout);
  client.stall_timeout = client.timeout;
  // A server that has just started needs some time, but a user should not wait long for a server
  // that does not exist.
  client.connect_timeout = std::min(client.timeout, absl::Seconds(5));
  return client;
}

// Prints the values of options without CLI11's names of types: "N in [1 - 64]" and not
// "INT:INT in [1 - 64]".
class HelpFormatter final : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override {
    return absl::StrReplaceAll(Formatter::make_option_opts(option), {{"UINT:INT in ", "N in "},
                                                                     {"INT:INT in ", "N in "},
                                                                     {"UINT:POSITIVE", "N above 0"},
                                                                     {"PID:POSITIVE", "PID"},
                                                                     {"TEXT:{", "{"}});
  }
};

// Flushes standard output. On failure, prints an error on stderr and returns false.
bool FlushOutput() {
  if (std::cout.flush()) return true;
  std::cerr << "tessera: standard output cannot be written\n  check the free space\n";
  return false;
}

int Main(int argc, char** argv) {
  CLI::App app("Work with arrays that stay in GPU memory on a Tessera server.", "tessera");
  app.formatter(std::make_shared<HelpFormatter>());
  app.set_version_flag("--version", TESSERA_VERSION);
  app.require_subcommand(1);
  app.fallthrough();  // global options may follow the subcommand
  app.footer(
      std::string(
          "Operands: NAME, NAME[10:20, ::-1, 3], NAME@OFFSET:SHAPE:STRIDES (a raw view in\n"
          "elements, as in x@0:540x1257:0x1), file:PATH.npy (travels with the request)\n\n") +
      std::string(ExitCodesText()));

  GlobalOptions options;
  AddGlobalOptions(app, options);
  Command command;
  AddBuffers(app, command);
  AddInfo(app, command);
  AddOperations(app, command);
  AddSearch(app, command);
  AddRun(app, command);
  AddStrategies(app, command);
  AddBench(app, command);
  AddHealth(app, command);
  AddTop(app, command);
  AddToken(app, command);
  AddCompletion(app, command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::RequiredError& error) {
    const std::string unknown = UnknownCommand(app);
    app.exit(unknown.empty() ? CLI::ParseError(error)
                             : CLI::ParseError(unknown, CLI::ExitCodes::ExtrasError));
    return kUsageExitCode;
  } catch (const CLI::ParseError& error) {
    if (app.exit(error) != 0) return kUsageExitCode;
    return FlushOutput() ? 0 : kOutputExitCode;
  }

  Client client(ClientOptionsOf(options));
  Session session{client, options.json};
  absl::Status status;
  try {
    command(session);
  } catch (const CommandError& error) {
    status = error.status;
  }
  if (!status.ok()) {
    const std::string reason = ErrorReason(status);
    const std::string code = absl::StatusCodeToString(status.code());
    std::string message(status.message());
    const std::string path = ErrorMetadata(status)["path"];
    if (!absl::StrContains(message, path)) message = absl::StrCat(path, ": ", message);
    std::cerr << "tessera: " << Printable({message.data(), message.size()}) << ": "
              << Printable(reason.empty() ? code : reason) << "\n  "
              << Printable(Advice(status, options.client.server)) << '\n';
    session.document["error"] = ToJson(status);
  }
  if (options.json) {
    session.document["traffic"] = {{"sent_bytes", client.traffic().sent_bytes},
                                   {"received_bytes", client.traffic().received_bytes}};
    // Names in error messages may contain any bytes. The output is ASCII, so that a terminal cannot
    // mistake a part of it for a control sequence.
    std::cout << session.document.dump(2, ' ', true, Json::error_handler_t::replace) << '\n';
  }
  if (!FlushOutput() && status.ok()) return kOutputExitCode;
  // Skips gRPC's shutdown, which waits up to 10 s for a connection that failed during a write.
  if (absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status) || absl::IsCancelled(status))
    std::_Exit(ExitCode(status));
  return ExitCode(status);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  // A write beyond the limit on the size of files (ulimit -f) fails with an error instead, and the
  // unfinished file is removed.
  std::signal(SIGXFSZ, SIG_IGN);
  // Keeps glibc from mapping and unmapping memory for every large message, as in the server.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
  // Without this, OpenSSL would free its state at exit, when gRPC's threads may still use it.
  OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  // A call's error already contains what gRPC would log about a connection.
  ::setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  return tessera::Main(argc, argv);
}
