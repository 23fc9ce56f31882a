#include "server/process.h"

#include <semaphore.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/clock.h"
#include "server/log.h"
#include "server/server.h"
#include "spdlog/spdlog.h"

namespace tessera {
namespace {

// How much longer than its own timeout a drain may take before the process ends without it.
constexpr absl::Duration kGrace = absl::Seconds(5);

// How long the last lines of the log may take to be read.
constexpr absl::Duration kLastLines = absl::Milliseconds(500);

// Tells systemd, if it asked to be told (Type=notify), as sd_notify(3) does.
void NotifySystemd(std::string_view state) {
  const char* path = std::getenv("NOTIFY_SOCKET");
  sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = {}};
  const std::size_t length = path == nullptr ? 0 : std::strlen(path);
  if (length == 0 || length >= sizeof address.sun_path) return;
  std::memcpy(address.sun_path, path, length);
  if (path[0] == '@') address.sun_path[0] = '\0';  // an address that is not in the file system
  const int descriptor = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return;
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length);
  if (sendto(descriptor, state.data(), state.size(), MSG_NOSIGNAL,
             reinterpret_cast<const sockaddr*>(&address), size) < 0) {
    spdlog::warn("cannot tell systemd {}: {}", state, std::strerror(errno));
  }
  close(descriptor);
}

// From any thread, without waiting for others.
[[noreturn]] void ExitNow(Server& server, int code) {
  server.RemoveSockets();
  FlushLog(kLastLines);
  std::_Exit(code);
}

// What the handler leaves for the thread that acts on it. A blocked mask and sigwait would not do:
// libraries start threads before main, and a signal may be delivered to one of those.
sem_t signals_pending;
volatile std::sig_atomic_t last_signal = 0;

// How often SIGUSR1 has come that nobody has acted on.
sem_t profiles_wanted;

// Null while the process starts.
std::atomic<Server*> serving{nullptr};
// From the time on when the server is being made: it may have taken calls before it stands above.
std::atomic<bool> starting{false};

void OnSignal(int signal) {
  last_signal = signal;
  sem_post(&signals_pending);
}

void OnProfileSignal(int) { sem_post(&profiles_wanted); }

int NextSignal() {
  while (sem_wait(&signals_pending) != 0) {
  }
  return last_signal;
}

// Null where none is being made, or takes too long.
Server* AwaitServer() {
  const absl::Time end = SteadyNow() + kGrace;
  while (starting && serving == nullptr && SteadyNow() < end) absl::SleepFor(absl::Milliseconds(1));
  return serving;
}

// The first signal asks the server to stop; the second does not wait for it. Before there is a
// server there is nothing to wait for.
void HandleSignals() {
  const char* name = NextSignal() == SIGTERM ? "SIGTERM" : "SIGINT";
  Server* server = AwaitServer();
  if (server == nullptr) {
    spdlog::info("{}: stopped before serving", name);
    FlushLog(kLastLines);
    std::_Exit(0);
  }
  spdlog::info("{}: draining", name);
  server->RequestStop();
  const int second = NextSignal();
  spdlog::warn("second signal: stopping at once");
  ExitNow(*server, 128 + second);
}

// SIGUSR1 begins a window for profilers, which the next one ends, or the limit.
[[noreturn]] void OpenProfileWindows(Server& server, absl::Duration limit) {
  while (true) {
    while (sem_wait(&profiles_wanted) != 0) {
    }
    spdlog::info("SIGUSR1: profilers record for {} at most", absl::FormatDuration(limit));
    server.SetProfiling(true);
    const timespec end = absl::ToTimespec(absl::Now() + limit);
    int waited = 0;
    do {
      waited = sem_timedwait(&profiles_wanted, &end);
    } while (waited != 0 && errno == EINTR);
    server.SetProfiling(false);
    spdlog::info("profilers have stopped recording");
  }
}

// A drain that hangs, because a device does, ends all the same; soon, once no device is left.
void LimitDrain(Server& server, absl::Duration limit) {
  constexpr absl::Duration kLook = absl::Milliseconds(100);
  absl::Time end = SteadyNow() + limit;
  bool lost = false;
  while (SteadyNow() < end) {
    if (!lost && server.devices_lost()) {
      lost = true;
      end = std::min(end, SteadyNow() + kGrace);
    }
    absl::SleepFor(kLook);
  }
  spdlog::error("the server did not drain in time");
  ExitNow(server, server.devices_lost() ? kExitDeviceLost : kExitCutOff);
}

}  // namespace

void WatchSignals() {
  static const bool watched = [] {
    sem_init(&signals_pending, 0, 0);
    sem_init(&profiles_wanted, 0, 0);
    struct sigaction action = {};
    action.sa_handler = OnSignal;
    action.sa_flags = SA_RESTART;
    sigaction(SIGTERM, &action, nullptr);
    sigaction(SIGINT, &action, nullptr);
    action.sa_handler = OnProfileSignal;
    sigaction(SIGUSR1, &action, nullptr);
    std::thread(HandleSignals).detach();
    return true;
  }();
  static_cast<void>(watched);
}

int Serve(const Options& options, std::vector<std::unique_ptr<Device>> devices) {
  WatchSignals();
  starting = true;
  absl::StatusOr<std::unique_ptr<Server>> started = Server::Start(options, std::move(devices));
  if (!started.ok()) {
    const absl::string_view message = started.status().message();
    spdlog::error("{}", std::string_view(message.data(), message.size()));
    return kExitFailure;
  }
  Server& server = **started;

  serving = &server;
  std::thread(OpenProfileWindows, std::ref(server), options.profile).detach();
  NotifySystemd("READY=1");
  server.Wait();
  NotifySystemd("STOPPING=1");
  const absl::Duration limit = options.drain_delay + options.drain_timeout + kGrace;
  std::thread(LimitDrain, std::ref(server), limit).detach();
  const bool idle = server.Drain();
  spdlog::info("stopped");
  // Not by way of destructors: the threads above still know the server, and on a lost device
  // nothing can be given back.
  ExitNow(server, server.devices_lost() ? kExitDeviceLost : idle ? 0 : kExitCutOff);
}

}  // namespace tessera
