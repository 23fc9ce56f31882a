#include "server/options.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "server/home.h"
#include "tests/temporary_file.h"

namespace tessera {
namespace {

struct Parsed {
  std::optional<Options> options;
  int exit_code = 0;
  std::string out;
  std::string err;
};

Parsed Parse(std::vector<const char*> arguments,
             const std::map<std::string, std::string>& environment = {}) {
  for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
  arguments.insert(arguments.begin(), "tessera-server");
  std::ostringstream out;
  std::ostringstream err;
  Parsed parsed;
  parsed.options = ParseOptions(static_cast<int>(arguments.size()), arguments.data(), out, err,
                                &parsed.exit_code);
  parsed.out = out.str();
  parsed.err = err.str();
  for (const auto& [name, value] : environment) unsetenv(name.c_str());
  return parsed;
}

TEST(Options, Defaults) {
  const Parsed parsed = Parse({});
  ASSERT_TRUE(parsed.options.has_value()) << parsed.err;
  EXPECT_EQ(parsed.options->listen, std::vector<std::string>{"127.0.0.1:50051"});
  EXPECT_EQ(parsed.options->devices, std::vector<std::string>{"auto"});
  EXPECT_EQ(parsed.options->memory_limit.Resolve(1000), 900u);
  EXPECT_EQ(parsed.options->queue, 1024u);
  EXPECT_EQ(parsed.options->workers, 4);
  EXPECT_EQ(parsed.options->max_message, (4u << 20) + (64u << 10));
  EXPECT_EQ(parsed.options->max_connections, 4096u);
  EXPECT_EQ(parsed.options->max_streams, 1024);
  EXPECT_EQ(parsed.options->connection_idle, absl::Minutes(30));
  EXPECT_EQ(parsed.options->default_ttl, absl::InfiniteDuration());
  EXPECT_EQ(parsed.options->max_ttl, absl::InfiniteDuration());
  EXPECT_EQ(parsed.options->upload_timeout, absl::Seconds(60));
  EXPECT_EQ(parsed.options->drain_delay, absl::ZeroDuration());
  EXPECT_EQ(parsed.options->drain_timeout, absl::Seconds(30));
  EXPECT_FALSE(parsed.options->log_json);
  EXPECT_TRUE(parsed.options->reflection);
}

TEST(Options, TlsFilesGoTogether) {
  const Parsed whole = Parse({"--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "a"},
                             {{"TESSERA_INSECURE", "1"}});
  ASSERT_TRUE(whole.options.has_value()) << whole.err;
  EXPECT_EQ(whole.options->tls_cert, "c");
  EXPECT_EQ(whole.options->tls_key, "k");
  EXPECT_EQ(whole.options->tls_client_ca, "a");
  EXPECT_TRUE(whole.options->insecure);
  EXPECT_FALSE(Parse({}).options->insecure);
  for (const char* flag : {"--tls-cert", "--tls-key", "--tls-client-ca"}) {
    const Parsed part = Parse({flag, "file"});
    EXPECT_FALSE(part.options.has_value()) << flag;
    EXPECT_EQ(part.exit_code, 1);
    EXPECT_NE(part.err.find("go together"), std::string::npos) << part.err;
  }
}

TEST(Options, OtherServers) {
  EXPECT_TRUE(Parse({}).options->import_from.empty());
  const Parsed some = Parse({"--import-from", "a:1,*.b:*", "--import-from", "[::1]:2"});
  ASSERT_TRUE(some.options.has_value()) << some.err;
  EXPECT_EQ(some.options->import_from, (std::vector<std::string>{"a:1", "*.b:*", "[::1]:2"}));
  EXPECT_EQ(Parse({"--max-imports", "7"}).options->max_imports, 7u);
  EXPECT_FALSE(Parse({"--max-imports", "0"}).options.has_value());
  // Tokens do not travel in clear unless somebody says so.
  const std::vector<const char*> open = {"--tokens", "t", "--import-from", "a:1"};
  EXPECT_NE(Parse(open).err.find("--import-tls-ca"), std::string::npos);
  EXPECT_TRUE(Parse({"--tokens", "t", "--import-from", "a:1", "--import-tls-ca", "c"}).options);
  EXPECT_TRUE(Parse({"--tokens", "t", "--import-from", "a:1", "--insecure"}).options);
  EXPECT_EQ(Parse({"--ring", "r", "--ring-name", "a"}).options->ring_name, "a");
  EXPECT_FALSE(Parse({"--ring", "r"}).options.has_value());
  EXPECT_FALSE(Parse({"--ring-name", "a"}).options.has_value());
}

// A pattern that no host:port matches would look as if it allowed something.
TEST(Options, PatternsOfServersHaveAPort) {
  for (const char* good :
       {"*", "gpu-*", "gpu-*51", "*:50051", "gpu:5*", "gpu:*", "[::1]:1", "[::1]:*"})
    EXPECT_TRUE(Parse({"--import-from", good}).options.has_value()) << good;
  for (const char* bad : {"gpu", "gpu:", "*gpu", ":1", "gpu:65536", "gpu:http", "gpu:x*", "::1"}) {
    const Parsed parsed = Parse({"--import-from", bad});
    EXPECT_FALSE(parsed.options.has_value()) << bad;
    EXPECT_NE(parsed.err.find("--import-from: '" + std::string(bad) + "' matches no host:port"),
              std::string::npos)
        << parsed.err;
  }
}

TEST(Options, NumbersOfSeconds) {
  EXPECT_EQ(Parse({}).options->max_operation_seconds, 30);
  EXPECT_EQ(Parse({}).options->max_slow_operation_seconds, 5);
  EXPECT_EQ(Parse({"--max-operation-seconds", "1e-12"}).options->max_operation_seconds, 1e-12);
  EXPECT_EQ(Parse({"--max-slow-operation-seconds", "1e9"}).options->max_slow_operation_seconds,
            1e9);
  for (const char* flag : {"--max-operation-seconds", "--max-slow-operation-seconds"}) {
    for (const std::string bad : {"nan", "-nan", "inf", "0", "-1", "1e10", "x", ""}) {
      const Parsed parsed = Parse({flag, bad.c_str()});
      EXPECT_FALSE(parsed.options.has_value()) << flag << " " << bad;
      EXPECT_NE(parsed.err.find(std::string(flag) + ": '" + bad + "' is not a number of seconds"),
                std::string::npos)
          << parsed.err;
    }
  }
}

TEST(Options, PortsAreThoseOfTcp) {
  for (const char* flag : {"--listen", "--metrics-listen"}) {
    for (const char* good : {"127.0.0.1:0", "127.0.0.1:65535", "[::1]:1", ":80"})
      EXPECT_TRUE(Parse({flag, good}).options.has_value()) << flag << " " << good;
    for (const char* bad : {"127.0.0.1:65536", "127.0.0.1:99999", "[::1]:4294967297", "a:-1",
                            "a:http", "a:", "a", "a:18446744073709551617"}) {
      const Parsed parsed = Parse({flag, bad});
      EXPECT_FALSE(parsed.options.has_value()) << flag << " " << bad;
      EXPECT_NE(parsed.err.find(std::string(flag) + ": '" + bad + "' has no port from 0 to 65535"),
                std::string::npos)
          << parsed.err;
    }
  }
  EXPECT_TRUE(Parse({"--listen", "unix:/tmp/s:99999"}).options.has_value());
  EXPECT_FALSE(Parse({"--listen", "127.0.0.1:1,127.0.0.1:99999"}).options.has_value());
  EXPECT_FALSE(Parse({}, {{"TESSERA_LISTEN", "127.0.0.1:99999"}}).options.has_value());
}

TEST(Options, TheFileSetsOptionsAlone) {
  for (const auto& [text, mention] : std::vector<std::pair<std::string, std::string>>{
           {"queueu = 1\n", "'queueu' of the configuration file is no option"},
           {"[server]\nqueue = 1\n", "'[server]' of the configuration file is no option"}}) {
    const TemporaryFile file(text);
    const std::string path = file.path();
    const Parsed parsed = Parse({"--config", path.c_str()});
    EXPECT_FALSE(parsed.options.has_value()) << text;
    EXPECT_EQ(parsed.exit_code, 1) << text;
    EXPECT_NE(parsed.err.find(mention), std::string::npos) << parsed.err;
  }
}

TEST(Options, Flags) {
  const Parsed parsed = Parse(
      {"--listen",        "0.0.0.0:1", "--listen",         "unix:/tmp/s", "--device",      "cuda:1",
       "--device",        "cpu",       "--memory-limit",   "2Gi",         "--queue",       "7",
       "--workers",       "3",         "--max-message",    "1Mi",         "--default-ttl", "10m",
       "--max-ttl",       "2h",        "--upload-timeout", "0",           "--drain-delay", "5s",
       "--drain-timeout", "500ms",     "--log-level",      "debug",       "--log-format",  "json",
       "--no-reflection"});
  ASSERT_TRUE(parsed.options.has_value()) << parsed.err;
  EXPECT_EQ(parsed.options->listen, (std::vector<std::string>{"0.0.0.0:1", "unix:/tmp/s"}));
  EXPECT_EQ(parsed.options->devices, (std::vector<std::string>{"cuda:1", "cpu"}));
  EXPECT_EQ(parsed.options->memory_limit.Resolve(0), std::uint64_t{2} << 30);
  EXPECT_EQ(parsed.options->queue, 7u);
  EXPECT_EQ(parsed.options->workers, 3);
  EXPECT_EQ(parsed.options->max_message, 1u << 20);
  EXPECT_EQ(parsed.options->default_ttl, absl::Minutes(10));
  EXPECT_EQ(parsed.options->max_ttl, absl::Hours(2));
  EXPECT_EQ(parsed.options->upload_timeout, absl::InfiniteDuration());
  EXPECT_EQ(parsed.options->drain_delay, absl::Seconds(5));
  EXPECT_EQ(parsed.options->drain_timeout, absl::Milliseconds(500));
  EXPECT_EQ(parsed.options->log_level, "debug");
  EXPECT_TRUE(parsed.options->log_json);
  EXPECT_FALSE(parsed.options->reflection);
}

// Elsewhere 0 is without end; a drain that may take no time ends at once.
// Operations of all workers may share a device, or wait for each other.
TEST(Options, MemoryOfTheHostThatIsForOthersIsNotForBuffers) {
  Options options;
  options.host_memory = 100;
  options.shared_memory_limit = 200;
  EXPECT_EQ(options.LeftOfHost(1000), 850u);
  options.shared_memory = "/run/shared";
  EXPECT_EQ(options.LeftOfHost(1000), 650u);
  EXPECT_EQ(options.LeftOfHost(300), 0u);
}

TEST(Options, ADeviceHangsWhenTheLongestOperationsOfAllWorkersWouldBeOver) {
  EXPECT_EQ(Options().HangLimit(1), absl::Minutes(2) + 4 * 4 * absl::Seconds(30));
  EXPECT_EQ(Options().HangLimit(8), absl::Minutes(2) + 4 * 8 * 4 * absl::Seconds(30));
  Options options;
  options.workers = 1;
  options.max_slow_operation_seconds = 600;
  EXPECT_EQ(options.HangLimit(1), absl::Minutes(42));
  options.watchdog = absl::InfiniteDuration();
  EXPECT_EQ(options.HangLimit(1), absl::InfiniteDuration());
}

TEST(Options, ADrainMayTakeNoTime) {
  const Parsed parsed = Parse({"--drain-timeout", "0", "--drain-delay", "0"});
  ASSERT_TRUE(parsed.options.has_value()) << parsed.err;
  EXPECT_EQ(parsed.options->drain_timeout, absl::ZeroDuration());
  EXPECT_EQ(parsed.options->drain_delay, absl::ZeroDuration());
}

TEST(Options, MetricsAreOffUnlessAskedFor) {
  EXPECT_EQ(Parse({}).options->metrics_listen, "");
  EXPECT_EQ(Parse({"--metrics-listen", "localhost:0"}).options->metrics_listen, "localhost:0");
  const Parsed parsed = Parse({}, {{"TESSERA_METRICS_LISTEN", "127.0.0.1:9464"}});
  ASSERT_TRUE(parsed.options.has_value()) << parsed.err;
  EXPECT_EQ(parsed.options->metrics_listen, "127.0.0.1:9464");
}

TEST(Options, NoCallIsSlowUnlessAskedFor) {
  EXPECT_EQ(Parse({}).options->slow_call, absl::InfiniteDuration());
  EXPECT_EQ(Parse({"--slow-call", "0"}).options->slow_call, absl::InfiniteDuration());
  EXPECT_EQ(Parse({"--slow-call", "250ms"}).options->slow_call, absl::Milliseconds(250));
  EXPECT_FALSE(Parse({"--slow-call", "soon"}).options.has_value());
  EXPECT_EQ(Parse({}).options->spans, "");
  EXPECT_EQ(Parse({}, {{"TESSERA_SPANS", "/tmp/s"}}).options->spans, "/tmp/s");
}

TEST(Options, FlagsOfConnections) {
  const Parsed parsed =
      Parse({"--max-connections", "9", "--max-streams", "5", "--connection-idle", "0"});
  ASSERT_TRUE(parsed.options.has_value()) << parsed.err;
  EXPECT_EQ(parsed.options->max_connections, 9u);
  EXPECT_EQ(parsed.options->max_streams, 5);
  EXPECT_EQ(parsed.options->connection_idle, absl::InfiniteDuration());
}

TEST(Options, FlagBeatsEnvironmentBeatsFile) {
  const TemporaryFile file(
      "queue = 1\nworkers = 1\ndrain-delay = \"1s\"\n"
      "listen = [\"127.0.0.1:1\", \"127.0.0.1:2\"]\nno-reflection = true\n");
  const std::string path = file.path();
  const Parsed parsed =
      Parse({"--config", path.c_str(), "--queue", "3"},
            {{"TESSERA_QUEUE", "2"}, {"TESSERA_WORKERS", "2"}, {"TESSERA_DEVICE", "cpu,cuda:0"}});
  ASSERT_TRUE(parsed.options.has_value()) << parsed.err;
  EXPECT_EQ(parsed.options->queue, 3u);
  EXPECT_EQ(parsed.options->workers, 2);
  EXPECT_EQ(parsed.options->drain_delay, absl::Seconds(1));
  EXPECT_EQ(parsed.options->listen, (std::vector<std::string>{"127.0.0.1:1", "127.0.0.1:2"}));
  EXPECT_EQ(parsed.options->devices, (std::vector<std::string>{"cpu", "cuda:0"}));
  EXPECT_FALSE(parsed.options->reflection);

  const Parsed by_environment = Parse({}, {{"TESSERA_CONFIG", path}});
  ASSERT_TRUE(by_environment.options.has_value()) << by_environment.err;
  EXPECT_EQ(by_environment.options->workers, 1);
}

TEST(Options, EnvironmentSetsFlagsWithoutAValue) {
  const Parsed off = Parse({}, {{"TESSERA_NO_REFLECTION", "true"}});
  ASSERT_TRUE(off.options.has_value()) << off.err;
  EXPECT_FALSE(off.options->reflection);
  const Parsed on = Parse({}, {{"TESSERA_NO_REFLECTION", "false"}});
  ASSERT_TRUE(on.options.has_value()) << on.err;
  EXPECT_TRUE(on.options->reflection);
}

TEST(Options, MistakesEndTheProcessWithAReason) {
  const TemporaryFile file("quue = 1\n");
  const std::string path = file.path();
  const std::vector<std::pair<std::vector<const char*>, std::string>> cases = {
      {{"--bogus"}, "--bogus"},
      {{"--queue", "0"}, "--queue"},
      {{"--workers", "many"}, "--workers"},
      {{"--memory-limit", "lots"}, "--memory-limit"},
      {{"--memory-limit", "0"}, "--memory-limit"},
      {{"--memory-limit", "101%"}, "--memory-limit"},
      {{"--max-message", "3"}, "--max-message"},
      {{"--max-connections", "0"}, "--max-connections"},
      {{"--max-streams", "0"}, "--max-streams"},
      {{"--connection-idle", "soon"}, "--connection-idle"},
      {{"--drain-delay", "5"}, "--drain-delay"},
      {{"--drain-delay", "-5s"}, "--drain-delay"},
      {{"--drain-timeout", "inf"}, "--drain-timeout"},
      {{"--log-level", "loud"}, "--log-level"},
      {{"--log-format", "xml"}, "--log-format"},
      {{"--config", "/nowhere/at/all.toml"}, "/nowhere/at/all.toml"},
      {{"--config", path.c_str()}, "quue"},
  };
  for (const auto& [arguments, mention] : cases) {
    const Parsed parsed = Parse(arguments);
    EXPECT_FALSE(parsed.options.has_value()) << mention;
    EXPECT_EQ(parsed.exit_code, 1) << mention;
    EXPECT_NE(parsed.err.find(mention), std::string::npos) << parsed.err;
  }
}

TEST(Options, HelpAndVersionGoToStandardOutput) {
  const Parsed help = Parse({"--help"});
  EXPECT_FALSE(help.options.has_value());
  EXPECT_EQ(help.exit_code, 0);
  for (const char* flag :
       {"--listen", "--device", "--memory-limit", "--queue", "--workers", "--max-message",
        "--default-ttl", "--max-ttl", "--upload-timeout", "--drain-delay", "--drain-timeout",
        "--log-level", "--log-format", "--config", "--no-reflection", "--version", "--tokens"}) {
    EXPECT_NE(help.out.find(flag), std::string::npos) << flag;
  }
  const Parsed version = Parse({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.out.rfind("tessera-server ", 0), 0u) << version.out;
}

// A server answers for the names of the ring that it read last and could use.
TEST(HomeTest, AFileThatCannotBeUsedLeavesTheRingInUse) {
  TemporaryFile file("a h:1\nb h:2\n");
  const auto write = [&](const std::string& text) {
    std::filesystem::remove(file.path());
    if (!text.empty()) std::ofstream(file.path()) << text;
  };
  const auto home = Home::Open(file.path(), "a");
  ASSERT_TRUE(home.ok()) << home.status();
  const Ring two = *Ring::Parse("a h:1\nb h:2"), three = *Ring::Parse("a h:1\nb h:2\nc h:3");
  const auto expect = [&](const Ring& ring) {
    for (int i = 0; i < 30; ++i) {
      const std::string name = "run" + std::to_string(i) + "/x";
      const absl::Status status = (*home)->Check(name);
      const Ring::Server& owner = ring.HomeOf(name);
      EXPECT_EQ(ErrorReason(status), owner.name == "a" ? "" : "WRONG_HOST") << name;
      EXPECT_EQ(ErrorMetadata(status)["owner"], owner.name == "a" ? "" : owner.name);
      EXPECT_EQ(ErrorMetadata(status)["address"], owner.name == "a" ? "" : owner.address);
    }
    EXPECT_TRUE((*home)->Check("unnamed/7").ok());
  };
  expect(two);
  for (const char* text : {"b h:2\n", "# none\n", "", "a h:1\na h:2\n", "a h:1\nb\n", "a/b h:1\n",
                           "b h:2\nc h:3\nd h:4\n"}) {
    SCOPED_TRACE(text);
    write(text);
    EXPECT_EQ(ErrorReason(Home::Open(file.path(), "a").status()), "BAD_RING");
    (*home)->Reload(/*asked=*/false);
    expect(two);
  }
  write("c h:3\na h:1\nb h:2\n");
  (*home)->Reload(/*asked=*/false);
  expect(three);
}

TEST(MemoryLimit, Units) {
  const auto bytes = [](std::string_view text) { return ParseMemoryLimit(text)->bytes; };
  EXPECT_EQ(bytes("1"), 1u);
  EXPECT_EQ(bytes("1K"), 1000u);
  EXPECT_EQ(bytes("1Ki"), 1024u);
  EXPECT_EQ(bytes("1KiB"), 1024u);
  EXPECT_EQ(bytes("1.5M"), 1'500'000u);
  EXPECT_EQ(bytes("3Gi"), std::uint64_t{3} << 30);
  EXPECT_EQ(bytes("2T"), 2'000'000'000'000u);
  EXPECT_EQ(ParseMemoryLimit("25%")->Resolve(400), 100u);
  for (const char* bad :
       {"", "K", "i", "1i", "%", "0%", "-1", "nan", "inf", "1Q", "1KK", "1e99", "0.1"}) {
    EXPECT_FALSE(ParseMemoryLimit(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace tessera
