#include "server/options.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "kernels/base/error.h"
#include "server/cluster/home.h"
#include "tests/temporary_file.h"

namespace tessera {
namespace {

struct Parsed {
  std::optional<Options> options;
  int exit_code = 0;
  std::string out;
  std::string err;
};

using Environment = std::map<std::string, std::string>;

Parsed Parse(const std::vector<std::string>& words, const Environment& environment = {}) {
  for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
  std::vector<const char*> arguments = {"tessera-server"};
  for (const std::string& word : words) arguments.push_back(word.c_str());
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

// Returns the options from flags that are separated by spaces.
Options Good(const std::string& flags, const Environment& environment = {}) {
  const Parsed parsed = Parse(absl::StrSplit(flags, ' ', absl::SkipEmpty()), environment);
  EXPECT_TRUE(parsed.options.has_value()) << flags << ": " << parsed.err;
  return parsed.options.value_or(Options());
}

// Expects a refusal whose message contains this text.
void ExpectRefused(const std::vector<std::string>& words, const std::string& said,
                   const Environment& environment = {}) {
  const Parsed parsed = Parse(words, environment);
  EXPECT_FALSE(parsed.options.has_value()) << said;
  EXPECT_EQ(parsed.exit_code, 1) << said;
  EXPECT_NE(parsed.err.find(said), std::string::npos) << said << ": " << parsed.err;
}

TEST(Options, Defaults) {
  const Options options = Good("");
  EXPECT_EQ(options.listen, std::vector<std::string>{"127.0.0.1:50051"});
  EXPECT_EQ(options.devices, std::vector<std::string>{"auto"});
  EXPECT_EQ(options.memory_limit.Resolve(1000), 900u);
  EXPECT_EQ(options.queue, 1024u);
  EXPECT_EQ(options.workers, 4);
  EXPECT_EQ(options.max_message, (4u << 20) + (64u << 10));
  EXPECT_EQ(options.max_transfers, 128u);
  EXPECT_EQ(options.max_connections, 4096u);
  EXPECT_EQ(options.max_streams, 1024);
  EXPECT_EQ(options.default_ttl, absl::InfiniteDuration());
  EXPECT_EQ(options.max_ttl, absl::InfiniteDuration());
  EXPECT_EQ(options.transfer_timeout, absl::Seconds(60));
  EXPECT_EQ(options.drain_delay, absl::ZeroDuration());
  EXPECT_EQ(options.drain_timeout, absl::Seconds(30));
  EXPECT_EQ(options.max_operation_seconds, 30);
  EXPECT_EQ(options.MaxSlowSeconds(), 5);
  EXPECT_EQ(options.watchdog, absl::Minutes(2));
  EXPECT_EQ(options.slow_call, absl::InfiniteDuration());
  EXPECT_EQ(options.metrics_listen, "");
  EXPECT_EQ(options.spans, "");
  EXPECT_EQ(options.data_dir, "");
  EXPECT_EQ(options.snapshot_interval, absl::InfiniteDuration());
  EXPECT_TRUE(options.import_from.empty());
  EXPECT_FALSE(options.insecure);
  EXPECT_FALSE(options.log_json);
  EXPECT_TRUE(options.warm_up);
}

TEST(Options, FlagsThatAreGivenTwiceAndTimesWithoutALimit) {
  const Options options = Good(
      "--listen 0.0.0.0:1 --listen unix:/tmp/s --device cuda:1 --device cpu --memory-limit 2Gi "
      "--host-memory 20Mi --transfer-timeout 0 --drain-timeout 500ms --slow-call 250ms");
  EXPECT_EQ(options.listen, (std::vector<std::string>{"0.0.0.0:1", "unix:/tmp/s"}));
  EXPECT_EQ(options.devices, (std::vector<std::string>{"cuda:1", "cpu"}));
  EXPECT_EQ(options.memory_limit.Resolve(0), std::uint64_t{2} << 30);
  EXPECT_EQ(options.MaxBuffers(), 2048u);
  EXPECT_EQ(options.transfer_timeout, absl::InfiniteDuration());
  EXPECT_EQ(options.drain_timeout, absl::Milliseconds(500));
  EXPECT_EQ(options.slow_call, absl::Milliseconds(250));
  EXPECT_EQ(Good("--slow-call 0").slow_call, absl::InfiniteDuration());
  EXPECT_EQ(Good("--default-ttl 1h --max-ttl 1h").default_ttl, absl::Hours(1));
  EXPECT_EQ(Good("--max-ttl 1h").max_ttl, absl::Hours(1));
  // For other options 0 means no limit, but with --drain-timeout 0 a drain ends immediately.
  EXPECT_EQ(Good("--drain-timeout 0").drain_timeout, absl::ZeroDuration());
}

TEST(Options, TlsFilesGoTogether) {
  const Options whole =
      Good("--tls-cert c --tls-key k --tls-client-ca a", {{"TESSERA_INSECURE", "1"}});
  EXPECT_EQ(whole.tls_cert, "c");
  EXPECT_EQ(whole.tls_key, "k");
  EXPECT_EQ(whole.tls_client_ca, "a");
  EXPECT_TRUE(whole.insecure);
  for (const char* flag : {"--tls-cert", "--tls-key", "--tls-client-ca"})
    ExpectRefused({flag, "file"}, "go together");
}

TEST(Options, OtherServers) {
  EXPECT_EQ(Good("--import-from a:1,*.b:* --import-from [::1]:2").import_from,
            (std::vector<std::string>{"a:1", "*.b:*", "[::1]:2"}));
  // Tokens are sent only over TLS unless a flag allows otherwise.
  ExpectRefused({"--tokens", "t", "--import-from", "a:1"}, "--import-tls-ca");
  Good("--tokens t --import-from a:1 --import-tls-ca c");
  Good("--tokens t --import-from a:1 --insecure");
  EXPECT_EQ(Good("--ring r --ring-name a").ring_name, "a");
  ExpectRefused({"--ring", "r"}, "--ring");
  ExpectRefused({"--ring-name", "a"}, "--ring");
}

// A pattern that cannot match any host:port would seem to allow something.
TEST(Options, PatternsOfServersHaveAPort) {
  for (const std::string good :
       {"*", "gpu-*", "gpu-*51", "*:50051", "gpu:5*", "gpu:*", "[::1]:1", "[::1]:*"})
    Good("--import-from " + good);
  for (const std::string bad :
       {"gpu", "gpu:", "*gpu", ":1", "gpu:65536", "gpu:http", "gpu:x*", "::1"})
    ExpectRefused({"--import-from", bad}, "--import-from: '" + bad + "' matches no host:port");
}

TEST(Options, NumbersOfSeconds) {
  const std::string flag = "--max-operation-seconds";
  EXPECT_EQ(Good(flag + " 1e-12").max_operation_seconds, 1e-12);
  EXPECT_EQ(Good(flag + " 1e9").max_operation_seconds, 1e9);
  for (const std::string bad : {"nan", "-nan", "inf", "0", "-1", "1e10", "x", ""})
    ExpectRefused({flag, bad}, flag + ": '" + bad + "' is not a number of seconds");
}

TEST(Options, SizesHaveARange) {
  ExpectRefused({"--scratch-limit", "4194305Ti"},
                "'4194305Ti' is not a size from 1Mi to 4194304Ti");
  ExpectRefused({"--memory-limit", "4194305Ti"}, "from 1 byte to 4194304Ti");
}

// Otherwise a long operation that is allowed would make the server not ready.
TEST(Options, TheWatchdogWaitsForTheLongestOperation) {
  EXPECT_EQ(Good("--max-operation-seconds 1").watchdog, absl::Minutes(2));
  EXPECT_EQ(Good("--max-operation-seconds 600").watchdog, absl::Minutes(40));
}

TEST(Options, PortsAreThoseOfTcp) {
  for (const std::string flag : {"--listen", "--metrics-listen"}) {
    for (const std::string good : {"127.0.0.1:0", "127.0.0.1:65535", "[::1]:1", ":80"})
      Good(flag + " " + good);
    for (const std::string bad : {"127.0.0.1:65536", "127.0.0.1:99999", "[::1]:4294967297", "a:-1",
                                  "a:http", "a:", "a", "a:18446744073709551617"})
      ExpectRefused({flag, bad}, flag + ": '" + bad + "' has no port from 0 to 65535");
  }
  Good("--listen unix:/tmp/s:99999");
  ExpectRefused({"--listen", "127.0.0.1:1,127.0.0.1:99999"}, "99999");
  ExpectRefused({}, "99999", {{"TESSERA_LISTEN", "127.0.0.1:99999"}});
}

TEST(Options, MemoryOfTheHostThatIsForOthersIsNotForBuffers) {
  Options options;
  options.host_memory = 100;
  options.shared_memory_limit = 200;
  EXPECT_EQ(options.LeftOfHost(1000), 850u);
  options.shared_memory = "/run/shared";
  EXPECT_EQ(options.LeftOfHost(1000), 650u);
  EXPECT_EQ(options.LeftOfHost(300), 0u);
}

// The operations of all workers may share a device or wait for each other.
TEST(Options, ADeviceHangsWhenTheLongestOperationsOfAllWorkersWouldBeOver) {
  EXPECT_EQ(Options().HangLimit(1), absl::Minutes(2) + 4 * 4 * absl::Seconds(30));
  EXPECT_EQ(Options().HangLimit(8), absl::Minutes(2) + 4 * 8 * 4 * absl::Seconds(30));
  Options options;
  options.workers = 1;
  options.max_operation_seconds = 600;
  EXPECT_EQ(options.HangLimit(1), absl::Minutes(42));
  options.watchdog = absl::InfiniteDuration();
  EXPECT_EQ(options.HangLimit(1), absl::InfiniteDuration());
}

TEST(Options, FlagBeatsEnvironmentBeatsFile) {
  const TemporaryFile file(
      "queue = 1\nworkers = 1\ndrain-delay = \"1s\"\n"
      "listen = [\"127.0.0.1:1\", \"127.0.0.1:2\"]\nno-warm-up = true\n");
  const Options options = Good("--queue 3 --config " + file.path(), {{"TESSERA_QUEUE", "2"},
                                                                     {"TESSERA_WORKERS", "2"},
                                                                     {"TESSERA_SPANS", "/tmp/s"},
                                                                     {"TESSERA_DEVICE", "cpu,x"}});
  EXPECT_EQ(options.queue, 3u);
  EXPECT_EQ(options.workers, 2);
  EXPECT_EQ(options.drain_delay, absl::Seconds(1));
  EXPECT_EQ(options.listen, (std::vector<std::string>{"127.0.0.1:1", "127.0.0.1:2"}));
  EXPECT_EQ(options.devices, (std::vector<std::string>{"cpu", "x"}));
  EXPECT_EQ(options.spans, "/tmp/s");
  EXPECT_FALSE(options.warm_up);
  EXPECT_EQ(Good("", {{"TESSERA_CONFIG", file.path()}}).workers, 1);
  for (const bool off : {false, true})
    EXPECT_EQ(Good("", {{"TESSERA_NO_WARM_UP", off ? "true" : "false"}}).warm_up, !off);
}

TEST(Options, MistakesEndTheProcessWithAReason) {
  for (const std::string bad :
       {"--queue 0", "--queue -1", "--max-connections -18446744073709551615", "--workers many",
        "--memory-limit lots", "--memory-limit 0", "--memory-limit 101%", "--host-memory 1Mi",
        "--max-connections 0", "--max-streams 0", "--drain-delay 5", "--drain-delay -5s",
        "--drain-timeout inf", "--log-level loud", "--log-format xml", "--max-transfers 0",
        "--transfer-timeout soon", "--slow-call soon"})
    ExpectRefused(absl::StrSplit(bad, ' '), bad.substr(0, bad.find(' ')));
  ExpectRefused({"--bogus"}, "--bogus");
  ExpectRefused({"--snapshot-interval", "soon"}, "--snapshot-interval");
  ExpectRefused({"--snapshot-interval", "1s"}, "--snapshot-interval needs --data-dir");
  ExpectRefused({"--default-ttl", "10h", "--max-ttl", "1h"},
                "--default-ttl is longer than --max-ttl");
  ExpectRefused({"--config", "/nowhere/at/all.toml"}, "/nowhere/at/all.toml");
  ExpectRefused({"--config", "/dev/zero"}, "the configuration file is larger than 1 MiB");
  for (const char* flag :
       {"--tokens", "--tls-client-ca", "--tls-cert", "--ring", "--spans", "--data-dir"})
    ExpectRefused({flag, ""}, "the name of the file is empty");
  for (const auto& [text, said] : std::vector<std::pair<std::string, std::string>>{
           {"queueu = 1\n", "'queueu' of the configuration file is not an option"},
           {"tokens = \"\"\n", "the name of the file is empty"},
           {std::string("\0\nqueue = 1\n", 12), "the configuration file contains a zero byte"},
           {"[server]\nqueue = 1\n", "'[server]' of the configuration file is not an option"}}) {
    const TemporaryFile file(text);
    ExpectRefused({"--config", file.path()}, said);
  }
}

TEST(Options, HelpAndVersionGoToStandardOutput) {
  const Parsed help = Parse({"--help"});
  EXPECT_FALSE(help.options.has_value());
  EXPECT_EQ(help.exit_code, 0);
  for (const char* flag : {"--listen", "--device", "--memory-limit", "--default-ttl",
                           "--log-format", "--config", "--no-warm-up", "--version", "--tokens"})
    EXPECT_NE(help.out.find(flag), std::string::npos) << flag;
  const Parsed version = Parse({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.out.rfind("tessera-server ", 0), 0u) << version.out;
}

TEST(Options, OutputThatCannotBeWrittenIsAnError) {
  for (const char* flag : {"--help", "--version"}) {
    std::ofstream full("/dev/full");
    std::ostringstream err;
    const char* const words[] = {"tessera-server", flag};
    int exit_code = 0;
    EXPECT_FALSE(ParseOptions(2, words, full, err, &exit_code).has_value());
    EXPECT_EQ(exit_code, 1) << flag;
    EXPECT_EQ(err.str(), "standard output cannot be written\n") << flag;
  }
}

// A server keeps its ring until it reads another valid one.
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
