// What the metrics page says about GPUs, with a stand-in for the driver's library.
#include "server/devices/gpu_monitor.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/fake_nvml.h"
#include "tests/test_server.h"

namespace tessera {
namespace {

using testing::HasSubstr;
using testing::Not;

// The stand-in has the name of the driver's library. Once it is loaded, the monitor finds it by
// that name.
FakeNvml& Library() {
  static FakeNvml* const state = [] {
    void* library = dlopen(TESSERA_FAKE_NVML, RTLD_NOW | RTLD_LOCAL);
    const auto get = reinterpret_cast<FakeNvml* (*)()>(
        library == nullptr ? nullptr : dlsym(library, "FakeNvmlState"));
    return get == nullptr ? nullptr : get();
  }();
  if (state == nullptr) {
    ADD_FAILURE() << "the driver's own library is found before the stand-in";
    std::abort();
  }
  return *state;
}

// Returns the body of /metrics.
std::string Scrape(const Server& server) {
  const std::string address = server.metrics_address();
  const int port = std::stoi(address.substr(address.rfind(':') + 1));
  const int connection = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<std::uint16_t>(port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(connection, reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
  const std::string request = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
  EXPECT_EQ(write(connection, request.data(), request.size()),
            static_cast<ssize_t>(request.size()));
  std::string text;
  char block[4096];
  for (ssize_t size = 0; (size = read(connection, block, sizeof block)) > 0;)
    text.append(block, static_cast<std::size_t>(size));
  close(connection);
  EXPECT_THAT(text, HasSubstr("\ntessera_ready 1\n"));
  return text;
}

class GpuMonitorTest : public testing::Test {
 protected:
  GpuMonitorTest() {
    Set({}, 0x4);
    Library().init_result = 0;
    Library().blocked = false;
  }
  static void Set(const std::map<std::string, int>& results, unsigned long long slowdowns) {
    const std::lock_guard lock(Library().mutex);
    Library().results = results;
    Library().slowdowns = slowdowns;
  }

  // Starts a server with a device at each bus id.
  static std::unique_ptr<TestServer> Serve(const std::vector<std::string>& bus_ids) {
    std::vector<std::unique_ptr<Device>> devices;
    for (const std::string& bus_id : bus_ids) {
      devices.push_back(
          std::make_unique<FakeDevice>("fake:" + std::to_string(devices.size()), bus_id));
    }
    Options options = TestOptions();
    options.metrics_listen = "127.0.0.1:0";
    options.memory_limit = {.bytes = 64 << 20};
    return std::make_unique<TestServer>(options, std::move(devices));
  }

  // Scrapes until the driver has responded in time. The library is loaded concurrently with the
  // first scrape.
  static std::string ScrapeWith(const Server& server, const std::string& metric) {
    std::string text;
    EXPECT_TRUE(Eventually([&] {
      text = Scrape(server);
      return text.find(metric) != text.npos;
    })) << metric;
    return text;
  }
};

TEST_F(GpuMonitorTest, TheDevicesFiguresAreOnThePage) {
  const auto server = Serve({"", "0000:65:00.0", "0000:01:00.0"});
  const std::string text = ScrapeWith(server->server(), "tessera_gpu_busy_ratio");
  for (const char* line :
       {"tessera_gpu_busy_ratio{device=\"fake:1\"} 0.87",
        "tessera_gpu_memory_used_bytes{device=\"fake:1\"} 75161927680",
        "tessera_gpu_temperature_celsius{device=\"fake:1\"} 61",
        "tessera_gpu_power_watts{device=\"fake:1\"} 512.345",
        "tessera_gpu_power_limit_watts{device=\"fake:1\"} 700",
        "tessera_gpu_sm_clock_hertz{device=\"fake:1\"} 1.755e+09",
        "tessera_gpu_memory_errors_total{device=\"fake:1\",kind=\"corrected\"} 3",
        "tessera_gpu_memory_errors_total{device=\"fake:1\",kind=\"uncorrected\"} 0",
        "tessera_gpu_slowdown{device=\"fake:1\",reason=\"power_cap\"} 1"})
    EXPECT_THAT(text, HasSubstr(std::string("\n") + line + "\n"));
  for (const char* other : {"fake:0", "fake:2"}) {
    EXPECT_THAT(text, Not(HasSubstr(absl::StrCat("tessera_gpu_busy_ratio{device=\"", other))))
        << "one is not a GPU, and one is unknown to the driver";
  }
}

TEST_F(GpuMonitorTest, EachReasonOfASlowdownHasItsBit) {
  const std::pair<unsigned long long, std::string> reasons[] = {{0x4, "power_cap"},
                                                                {0x20, "thermal_software"},
                                                                {0x40, "thermal_hardware"},
                                                                {0x80, "power_brake"}};
  const auto server = Serve({"0000:65:00.0"});
  ScrapeWith(server->server(), "tessera_gpu_slowdown");
  for (const auto& [set, name] : reasons) {
    Set({}, set | 0x1 | 0x8);  // Adds the idle bit and a bit without a reason.
    // A reading may have begun earlier.
    const std::string text = ScrapeWith(server->server(), "reason=\"" + name + "\"} 1\n");
    for (const auto& [bit, reason] : reasons) {
      EXPECT_THAT(text, HasSubstr("tessera_gpu_slowdown{device=\"fake:0\",reason=\"" + reason +
                                  "\"} " + (bit == set ? "1" : "0") + "\n"));
    }
  }
}

// A consumer card has no ECC, and a virtual card does not report power.
TEST_F(GpuMonitorTest, WhatTheDriverDoesNotTellIsLeftOut) {
  Set({{"errors", 3}, {"power", 3}, {"slowdowns", 3}}, 0x4);
  const auto server = Serve({"0000:65:00.0"});
  const std::string text = ScrapeWith(server->server(), "tessera_gpu_temperature_celsius");
  EXPECT_THAT(text, HasSubstr("tessera_gpu_power_limit_watts"));
  for (const char* name :
       {"tessera_gpu_memory_errors_total", "tessera_gpu_power_watts", "tessera_gpu_slowdown"})
    EXPECT_THAT(text, Not(HasSubstr(name)));
}

TEST_F(GpuMonitorTest, HostsWithoutGpuHaveNoMetrics) {
  const int before = Library().calls;
  const auto server = Serve({"", ""});
  EXPECT_THAT(Scrape(server->server()), Not(HasSubstr("tessera_gpu")));
  EXPECT_EQ(Library().calls, before);
}

TEST_F(GpuMonitorTest, ALibraryThatCannotStartIsLeftAlone) {
  Library().init_result = 18;
  const int before = Library().calls;
  const auto server = Serve({"0000:65:00.0"});
  for (int i = 0; i < 3; ++i) EXPECT_THAT(Scrape(server->server()), Not(HasSubstr("tessera_gpu")));
  EXPECT_EQ(Library().calls, before + 1);
}

TEST_F(GpuMonitorTest, AnUnresponsiveDriverDoesNotDelayThePage) {
  const auto server = Serve({"0000:65:00.0"});
  ScrapeWith(server->server(), "tessera_gpu_busy_ratio");
  Library().blocked = true;
  const int before = Library().calls;
  std::string text;
  // While a reading hangs, the page is served without these values.
  for (int i = 0; i < 3; ++i) text = Scrape(server->server());
  EXPECT_THAT(text, Not(HasSubstr("tessera_gpu")));
  EXPECT_LE(Library().calls, before + 1) << "one reading at a time";
  Library().blocked = false;
  ScrapeWith(server->server(), "tessera_gpu_busy_ratio");
}

// The process can exit, because it does not wait for the hanging thread.
TEST_F(GpuMonitorTest, AnUnresponsiveDriverDoesNotDelayTheEnd) {
  {
    const int before = Library().calls;
    Library().blocked = true;
    const auto server = Serve({"0000:65:00.0"});
    Scrape(server->server());
    ASSERT_TRUE(Eventually([before] { return Library().calls > before; }));
  }
  Library().blocked = false;
}

}  // namespace
}  // namespace tessera
