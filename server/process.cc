#include "server/process.h"

#include <semaphore.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <future>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/compute.h"
#include "server/clock.h"
#include "server/net/listener.h"
#include "server/observe/log.h"
#include "server/server.h"
#include "spdlog/spdlog.h"

namespace tessera {
namespace {

// How much longer than its timeout a drain may take before the process ends anyway. Also the
// longest wait for a server under construction, and for a drain after the last device is lost.
constexpr absl::Duration kGrace = absl::Seconds(5);

// How long a snapshot may go without writing while the server drains.
constexpr absl::Duration kSilence = absl::Minutes(1);

// How long the process waits for the last log lines to be written.
constexpr absl::Duration kLastLines = absl::Milliseconds(500);

// Notifies systemd, if it has requested that (Type=notify), as sd_notify(3) does.
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

// Ends the process from any thread, without waiting for other threads.
[[noreturn]] void ExitNow(Server& server, int code) {
  server.RemoveSockets();
  FlushLog(kLastLines);
  std::_Exit(code);
}

// The handler leaves signals here for the thread that acts on them. Blocking signals and calling
// sigwait would not work, because libraries start threads before main, and a signal may be
// delivered to one of these threads.
sem_t signals_pending;
std::atomic<int> stop_signal{0};  // the last SIGTERM or SIGINT that has not been handled
std::atomic<bool> reload_wanted{false};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free,
              "handlers may use them");

// The number of SIGUSR1 signals that have not been acted on.
sem_t profiles_wanted;

// Null while the process is starting.
std::atomic<Server*> serving{nullptr};
// Whether files are to be read again once the server serves.
std::atomic<bool> early_reload{false};
// True once the construction of the server has begun: it may accept calls before `serving` is set.
std::atomic<bool> starting{false};

void OnSignal(int signal) {
  if (signal == SIGHUP) {
    reload_wanted = true;
  } else {
    stop_signal = signal;
  }
  sem_post(&signals_pending);
}

void OnProfileSignal(int) { sem_post(&profiles_wanted); }

// Makes the server read its files again if a signal has requested it and the server is serving.
// Both Serve and the thread that handles signals call this, because the signal may come before or
// after the server is ready.
void ReloadIfServing() {
  Server* const server = serving;
  if (server != nullptr && early_reload.exchange(false)) server->RequestReload();
}

// Returns the next signal that asks the process to stop, and acts on SIGHUP until then.
int NextStop() {
  while (true) {
    while (sem_wait(&signals_pending) != 0) {
    }
    if (reload_wanted.exchange(false)) {
      early_reload = true;
      ReloadIfServing();
    }
    if (const int signal = stop_signal.exchange(0); signal != 0) return signal;
  }
}

// Waits for a server that is being constructed. Returns null if there is none, or if it takes too
// long.
Server* AwaitServer() {
  const absl::Time end = SteadyNow() + kGrace;
  while (starting && serving == nullptr && SteadyNow() < end) absl::SleepFor(absl::Milliseconds(1));
  return serving;
}

// The first signal asks the server to stop; the second ends the process without waiting for the
// server.
void HandleSignals() {
  const char* name = NextStop() == SIGTERM ? "SIGTERM" : "SIGINT";
  Server* server = AwaitServer();
  if (server == nullptr) {
    spdlog::info("{}: stopped before serving", name);
    FlushLog(kLastLines);
    std::_Exit(0);
  }
  spdlog::info("{}: draining", name);
  server->RequestStop();
  const int second = NextStop();
  spdlog::warn("second signal: stopping immediately");
  ExitNow(*server, 128 + second);
}

// SIGUSR1 begins a window for profilers; the next SIGUSR1 ends it.
[[noreturn]] void OpenProfileWindows(Server& server) {
  for (bool on = true;; on = !on) {
    while (sem_wait(&profiles_wanted) != 0) {
    }
    server.SetProfiling(on);
    spdlog::info("SIGUSR1: profilers {}", on ? "record until the next one" : "have stopped");
  }
}

int ExitCode(const Server& server, bool idle) {
  if (server.devices_lost()) return kExitDeviceLost;
  if (!server.saved()) return kExitNotSaved;
  return idle ? 0 : kExitCutOff;
}

// Ends the process if the drain hangs, for example because a device hangs. Once no device is left,
// it waits for at most kGrace. A snapshot may take longer if it writes something every kSilence.
void LimitDrain(Server& server, absl::Duration limit) {
  constexpr absl::Duration kLook = absl::Milliseconds(100);
  absl::Time end = SteadyNow() + limit;
  bool lost = false;
  std::uint64_t written = server.snapshot_progress();
  while (SteadyNow() < end) {
    if (const std::uint64_t now = server.snapshot_progress(); now != written && !lost) {
      written = now;
      end = std::max(end, SteadyNow() + kSilence);
    }
    if (!lost && server.devices_lost()) {
      lost = true;
      end = std::min(end, SteadyNow() + kGrace);
    }
    absl::SleepFor(kLook);
  }
  spdlog::error("the server did not drain in time");
  ExitNow(server, ExitCode(server, /*idle=*/false));
}

// Returns how many threads there are in addition to workers and the threads that share their loops:
// gRPC's threads for cores and timers, and the threads for listeners, chores, imports, the log and
// signals.
std::size_t OtherThreads() { return 30 + 4 * std::size_t{std::thread::hardware_concurrency()}; }

std::size_t ThreadsNeeded(const Options& options,
                          const std::vector<std::unique_ptr<Device>>& devices) {
  std::size_t threads = OtherThreads();
  for (const std::unique_ptr<Device>& device : devices) {
    const int drivers = options.workers * (options.tokens.empty() ? 1 : 2);
    threads += static_cast<std::size_t>(drivers * LoopThreads(*device) + options.transfer_workers);
  }
  return threads;
}

// Returns how many threads can be created, up to `count`. OpenMP and gRPC abort or hang if they
// cannot create a thread, and only an attempt reveals every limit.
std::size_t ThreadsPossible(std::size_t count) {
  // Address space for what the threads allocate: glibc reserves 64 MiB for each of its 8 arenas.
  constexpr std::size_t kRoom = std::size_t{640} << 20;
  void* const room =
      mmap(nullptr, kRoom, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return 0;
  const absl::Cleanup unmap = [room] { munmap(room, kRoom); };
  std::promise<void> end;
  const std::shared_future<void> ended = end.get_future().share();
  std::vector<std::thread> threads;
  try {
    while (threads.size() < count) threads.emplace_back([ended] { ended.wait(); });
  } catch (const std::exception&) {  // there may be too little memory for a thread
  }
  end.set_value();
  for (std::thread& thread : threads) thread.join();
  return threads.size();
}

// Returns how many descriptors can be opened, up to `count`. gRPC aborts if it cannot open one when
// it starts.
std::size_t DescriptorsPossible(std::size_t count) {
  RaiseDescriptorLimit();
  std::vector<int> opened;
  while (opened.size() < count) {
    const int fd = dup(STDERR_FILENO);
    if (fd < 0) break;
    opened.push_back(fd);
  }
  for (const int fd : opened) close(fd);
  return opened.size();
}

}  // namespace

void IgnoreStraySignals() {
  // SIGPIPE means that the reader of the log or of a connection has left, and SIGXFSZ that a file
  // may not grow further (ulimit -f). In both cases the write fails with an error. The server does
  // not use the other signals, which by default end the process without a drain. WatchSignals
  // installs handlers for SIGHUP and SIGUSR1.
  for (const int signal :
       {SIGHUP, SIGPIPE, SIGXFSZ, SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGIO, SIGPWR}) {
    struct sigaction action = {};
    // A handler that a library has already set, such as a profiler's, stays.
    if (sigaction(signal, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) continue;
    action.sa_handler = SIG_IGN;
    sigaction(signal, &action, nullptr);
  }
}

void WatchSignals() {
  static const bool watched = [] {
    sem_init(&signals_pending, 0, 0);
    sem_init(&profiles_wanted, 0, 0);
    struct sigaction action = {};
    action.sa_handler = OnSignal;
    action.sa_flags = SA_RESTART;
    sigaction(SIGTERM, &action, nullptr);
    sigaction(SIGINT, &action, nullptr);
    sigaction(SIGHUP, &action, nullptr);
    action.sa_handler = OnProfileSignal;
    sigaction(SIGUSR1, &action, nullptr);
    std::thread(HandleSignals).detach();
    return true;
  }();
  static_cast<void>(watched);
}

int Serve(const Options& options, std::vector<std::unique_ptr<Device>> devices) {
  WatchSignals();
  const std::size_t needed = ThreadsNeeded(options, devices), possible = ThreadsPossible(needed);
  if (possible < needed) {
    spdlog::error(
        "the server needs {} more threads, but only {} can be created: a limit on processes "
        "(ulimit -u, LimitNPROC=), on the cgroup (pids.max, TasksMax=, --pids-limit) or on "
        "address space (ulimit -v) is too small; a smaller --workers needs fewer threads",
        needed, possible);
    FlushLog(kLastLines);
    // Exit handlers are skipped: in them, libraries would wait for threads that could not be
    // created.
    std::_Exit(kExitFailure);
  }
  // For sockets that listen, the files of options, and gRPC; connections need more.
  const std::size_t descriptors = 24 + 4 * options.listen.size();
  if (const std::size_t free = DescriptorsPossible(descriptors); free < descriptors) {
    spdlog::error(
        "the server needs {} more descriptors, but only {} can be opened: a limit on them "
        "(ulimit -n, LimitNOFILE=) is too small",
        descriptors, free);
    return kExitFailure;
  }
  starting = true;
  absl::StatusOr<std::unique_ptr<Server>> started = Server::Start(options, std::move(devices));
  if (!started.ok()) {
    const absl::string_view message = started.status().message();
    spdlog::error("{}", std::string_view(message.data(), message.size()));
    return kExitFailure;
  }
  Server& server = **started;

  serving = &server;
  ReloadIfServing();
  std::thread(OpenProfileWindows, std::ref(server)).detach();
  // This thread is created early, because it may be impossible to create one when the drain begins.
  const absl::Duration limit = options.drain_delay + options.drain_timeout + kGrace;
  std::promise<void> drain;
  std::thread([&server, limit, drains = drain.get_future()] {
    drains.wait();
    LimitDrain(server, limit);
  }).detach();
  NotifySystemd("READY=1");
  server.Wait();
  NotifySystemd("STOPPING=1");
  drain.set_value();
  const bool idle = server.Drain();
  spdlog::info("stopped");
  // Destructors are skipped: the threads above still use the server, and memory of a lost device
  // cannot be freed.
  ExitNow(server, ExitCode(server, idle));
}

}  // namespace tessera
