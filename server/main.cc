// tessera-server: reads the options, sets up the log, opens the devices and serves.
#include <fcntl.h>
#include <malloc.h>
#include <openssl/crypto.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "kernels/compute.h"
#include "server/observe/log.h"
#include "server/options.h"
#include "server/process.h"
#include "spdlog/spdlog.h"

namespace {

// Opens descriptors 0 to 2 if they are closed. Otherwise, sockets would get their numbers and
// receive the log.
void OpenStandardStreams() {
  int descriptor = 0;
  do {
    descriptor = open("/dev/null", O_RDWR);
  } while (descriptor >= 0 && descriptor <= STDERR_FILENO);
  if (descriptor >= 0) close(descriptor);
}

// Runs before libraries are initialised, because they open descriptors. SIGINT is ignored, because
// OpenBLAS raises it if it cannot create its threads; the server reports that once it has a log.
void BeforeAll(int, char**, char**) {
  OpenStandardStreams();
  std::signal(SIGINT, SIG_IGN);
}
[[gnu::section(".preinit_array"), gnu::used]] void (*const before_all)(int, char**,
                                                                       char**) = BeforeAll;

}  // namespace

int main(int argc, char** argv) try {
  tessera::IgnoreStraySignals();
  int exit_code = 0;
  const std::optional<tessera::Options> options =
      tessera::ParseOptions(argc, argv, std::cout, std::cerr, &exit_code);
  if (!options.has_value()) return exit_code;
  // By default, glibc maps memory for every large message and unmaps it again, and the page faults
  // take half of an upload's time. These settings keep at most 16 MiB unused in each of 8 arenas.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 16 << 20);
  mallopt(M_ARENA_MAX, 8);
  // Without this, OpenSSL would free its state at exit, when gRPC's threads may still be using it.
  OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  tessera::SetUpLog(options->log_level, options->log_json);
  for (const std::string& name : options->unknown_variables)
    spdlog::warn("the variable {} has no effect: it is not an option of the server (see --help)",
                 name);
  tessera::WatchSignals();

  std::vector<std::unique_ptr<tessera::Device>> devices;
  for (const std::string& name : options->devices) {
    absl::StatusOr<std::unique_ptr<tessera::Device>> device = tessera::OpenDevice(name);
    if (!device.ok()) {
      const absl::string_view message = device.status().message();
      spdlog::error("{}", std::string_view(message.data(), message.size()));
      return tessera::kExitFailure;
    }
    if (name == "auto" && (*device)->info().backend == tessera::Backend::kCpu) {
      spdlog::warn("no usable GPU: serving from the CPU");
    }
    devices.push_back(*std::move(device));
  }
  return tessera::Serve(*options, std::move(devices));
} catch (const std::system_error& error) {
  std::cerr
      << "the server cannot start: a thread cannot be created (ulimit -u, pids.max, ulimit -v): "
      << error.what() << std::endl;
  std::_Exit(tessera::kExitFailure);
}
