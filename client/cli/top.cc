// top: shows what the server is doing. On a terminal, the display is updated repeatedly.
#include <fcntl.h>
#include <poll.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/command.h"
#include "client/cli/server_metrics.h"
#include "kernels/client_and_server/printable.h"

namespace tessera {
namespace {

// The list of all buffers may be long, so listing may take at most about 1 / kListShare of the
// time.
constexpr int kListShare = 10;

// The time limit for the metrics page.
constexpr absl::Duration kPageLimit = absl::Seconds(2);

constexpr absl::Duration kLongestInterval = absl::Hours(24);

// The number of buffers that are shown if there is no screen to fill.
constexpr std::size_t kBuffersShown = 20;

// --- What is shown -------------------------------------------------------------------------------

// Writes an empty line and a table of the GPUs, or nothing if there are none.
void WriteGpus(const MetricsSample& sample, std::ostream& out) {
  Table table({"GPU", ">BUSY", ">USED BY ALL", ">TEMPERATURE", ">POWER", ">LIMIT", ">SM CLOCK",
               ">ECC ERRORS", "SLOWED BY"});
  for (const auto& entry : sample.gpus) {
    const MetricsSample::Gpu& gpu = entry.second;
    // Returns the metric with its unit, or "-" if the driver does not report it.
    const auto figure = [&](const char* name, const auto& text) -> std::string {
      const auto found = gpu.figures.find(name);
      return found == gpu.figures.end() || !std::isfinite(found->second) ? "-"
                                                                         : text(found->second);
    };
    const auto in = [](const char* unit, double of = 1, int digits = 0) {
      return [=](double value) { return absl::StrFormat("%.*f%s", digits, value / of, unit); };
    };
    table.Add({entry.first, figure("busy_ratio", in("%", 0.01)),
               figure("memory_used_bytes",
                      [](double bytes) {
                        return HumanBytes(
                            static_cast<std::uint64_t>(std::clamp(bytes, 0.0, 0x1p63)));
                      }),
               figure("temperature_celsius", in(" C")), figure("power_watts", in(" W")),
               figure("power_limit_watts", in(" W")), figure("sm_clock_hertz", in(" GHz", 1e9, 2)),
               figure("memory_errors_total", in("")),
               gpu.slowdowns.empty() ? "-" : absl::StrJoin(gpu.slowdowns, ", ")});
  }
  table.PrintBelow(out);
}

// Returns a list of objects that contain only the metrics that the driver reports.
Json GpusJson(const MetricsSample& sample) {
  Json json = Json::array();
  for (const auto& [device, gpu] : sample.gpus) {
    Json& one = json.emplace_back(Json{{"device", device}});
    for (const auto& [name, value] : gpu.figures) one[name] = NumberJson(value);
    one["slowed_by"] = gpu.slowdowns;
  }
  return json;
}

// The latest state that the server has reported.
class View {
 public:
  View(Session& session, std::optional<MetricsAddress> metrics)
      : session_(session), metrics_(std::move(metrics)) {}

  // Asks the server for its state. On an error, throws it and keeps the previous state.
  void Update() {
    info_ = OrThrow(session_.client.GetServerInfo());
    const Clock::time_point begin = Clock::now();
    if (begin >= next_list_) {
      buffers_ = OrThrow(session_.client.ListBuffers(""));
      std::stable_sort(buffers_.begin(), buffers_.end(), [](const auto& a, const auto& b) {
        return a.size_bytes() > b.size_bytes();
      });
      const Clock::time_point end = Clock::now();
      next_list_ = end + kListShare * (end - begin);
    }
    if (!metrics_.has_value()) return;
    MetricsSample sample = ParseMetrics(FetchMetrics(*metrics_, kPageLimit));
    if (sample_.has_value()) rates_ = RatesBetween(*sample_, sample);
    sample_ = std::move(sample);
  }

  // `most_buffers` is the number of buffers that are shown, the largest first.
  std::string Text(std::size_t most_buffers) const {
    std::ostringstream out;
    if (info_.has_value()) WriteServer(out);
    if (sample_.has_value()) WriteGpus(*sample_, out);
    if (rates_.has_value()) WriteRates(out);
    if (info_.has_value()) WriteBuffers(most_buffers, out);
    return out.str();
  }

  Json Document() const {
    Json json = ToJson(*info_);
    json["buffers"] = ListJson(buffers_);
    if (sample_.has_value() && !sample_->gpus.empty()) json["gpus"] = GpusJson(*sample_);
    if (!rates_.has_value()) return json;
    Json& calls = json["calls"] = Json::array();
    for (const MetricsRates::Calls& one : rates_->calls) {
      calls.push_back({{"rpc", one.method},
                       {"per_second", one.per_second},
                       {"failed_per_second", one.failed_per_second},
                       {"p50_seconds", NumberJson(one.p50_seconds)},
                       {"p99_seconds", NumberJson(one.p99_seconds)}});
    }
    Json& refusals = json["refusals"] = Json::array();
    for (const MetricsRates::Refusals& one : rates_->refusals) {
      refusals.push_back({{"code", one.code},
                          {"reason", one.reason},
                          {"per_second", one.per_second},
                          {"total", one.total}});
    }
    return json;
  }

 private:
  static std::string Share(std::uint64_t used, std::uint64_t limit) {
    if (limit == 0) return "-";
    return absl::StrFormat("%.0f%%", 100 * static_cast<double>(used) / static_cast<double>(limit));
  }
  static std::string Rate(double per_second) {
    return absl::StrFormat("%.*f", per_second < 10 ? 1 : 0, per_second);
  }
  static std::string Time(double seconds) {
    if (std::isnan(seconds)) return "-";
    return std::isinf(seconds) ? "> 10 s" : HumanDuration(absl::Seconds(seconds));
  }

  void WriteServer(std::ostream& out) const {
    out << "tessera-server " << Printable(info_->version()) << ", up "
        << AgeText(info_->start_time()) << ", "
        << absl::FormatTime("%H:%M:%S", absl::Now(), absl::LocalTimeZone()) << "\n\n";
    Table devices({"DEVICE", "MODEL", ">MEMORY", ">FREE", ">BUFFERS", ">LIMIT", ">USED", ">SCRATCH",
                   ">LIMIT", ">WORKERS", ">WAITING"});
    for (const v1::Device& device : info_->devices()) {
      devices.Add({device.name(), device.model(), InstalledText(device),
                   HumanBytes(device.memory_free_bytes()), HumanBytes(device.buffer_used_bytes()),
                   HumanBytes(device.buffer_limit_bytes()),
                   Share(device.buffer_used_bytes(), device.buffer_limit_bytes()),
                   HumanBytes(device.scratch_used_bytes()),
                   HumanBytes(device.scratch_limit_bytes()), absl::StrCat(device.workers()),
                   absl::StrCat(device.waiting())});
    }
    devices.Print(out);
    out << '\n';
    Table budgets({"BUDGET", ">USED", ">LIMIT", ">SHARE"});
    for (const v1::Budget& budget : info_->budgets()) {
      const bool bytes = budget.name().ends_with("_memory");
      const auto amount = [&](std::uint64_t n) { return bytes ? HumanBytes(n) : absl::StrCat(n); };
      budgets.Add({budget.name(), amount(budget.used()), amount(budget.limit()),
                   Share(budget.used(), budget.limit())});
    }
    budgets.Print(out);
    WriteTenants(*info_, out);
  }

  void WriteRates(std::ostream& out) const {
    Table calls({"RPC", ">CALLS/S", ">FAILED/S", ">P50", ">P99"});
    for (const MetricsRates::Calls& one : rates_->calls) {
      calls.Add({one.method, Rate(one.per_second), Rate(one.failed_per_second),
                 Time(one.p50_seconds), Time(one.p99_seconds)});
    }
    calls.PrintBelow(out);
    Table refusals({"REFUSED OR FAILED", "CODE", ">CALLS/S", ">TOTAL"});
    for (const MetricsRates::Refusals& one : rates_->refusals) {
      refusals.Add(
          {one.reason, one.code, Rate(one.per_second), absl::StrFormat("%.0f", one.total)});
    }
    refusals.PrintBelow(out);
  }

  void WriteBuffers(std::size_t most, std::ostream& out) const {
    if (buffers_.empty()) return;
    out << '\n';
    const std::size_t shown = std::min(most, buffers_.size());
    tessera::WriteBuffers("BUFFER", absl::MakeConstSpan(buffers_).first(shown), out);
    if (shown < buffers_.size()) out << "and " << buffers_.size() - shown << " smaller ones\n";
  }

  Session& session_;
  const std::optional<MetricsAddress> metrics_;
  std::optional<v1::GetServerInfoResponse> info_;
  std::vector<v1::Buffer> buffers_;  // the largest first
  Clock::time_point next_list_;
  std::optional<MetricsSample> sample_;
  std::optional<MetricsRates> rates_;
};

// --- The terminal --------------------------------------------------------------------------------

// While an instance exists, the terminal shows its alternate screen and keys are read as they are
// pressed. Only one instance may exist at a time.
class Screen {
 public:
  Screen() {
    keys_ = isatty(STDIN_FILENO) == 1 && tcgetattr(STDIN_FILENO, &before_) == 0;
    if (pipe2(wake_, O_NONBLOCK | O_CLOEXEC) != 0) wake_[0] = wake_[1] = -1;
    struct sigaction action {};
    action.sa_handler = OnSignal;
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGWINCH})
      ::sigaction(signal, &action, nullptr);
    Enter();
  }
  ~Screen() {
    Leave();
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGWINCH})
      std::signal(signal, SIG_DFL);
    close(wake_[0]);
    close(wake_[1]);
  }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  // Shows as much of the text as fits, with the note as the last line.
  static void Show(std::string_view text, std::string_view note) {
    const auto [columns, rows] = SizeOfTerminal();
    std::string out = "\x1b[H";
    for (std::size_t row = 1; row < rows; ++row) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      absl::StrAppend(&out, std::string(Beginning(text.substr(0, end), columns)), "\x1b[K\n");
      text.remove_prefix(std::min(end + 1, text.size()));
    }
    absl::StrAppend(&out, std::string(Beginning(note, columns)), "\x1b[K");
    Write(out);
  }

  enum class Event { kTime, kRedraw, kQuit };
  // Waits for a key or a signal, at most until the end time.
  Event Wait(Clock::time_point end) {
    while (true) {
      if (ended_ != 0) return Event::kQuit;
      if (stopped_ != 0) {
        stopped_ = 0;
        Leave();
        std::raise(SIGSTOP);
        Enter();
        return Event::kRedraw;
      }
      if (resized_ != 0) {
        resized_ = 0;
        return Event::kRedraw;
      }
      const auto left = std::max<std::int64_t>(
          0, std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count());
      pollfd inputs[] = {{.fd = wake_[0], .events = POLLIN, .revents = 0},
                         {.fd = keys_ ? STDIN_FILENO : -1, .events = POLLIN, .revents = 0}};
      // A key that was pressed while the text was being prepared counts, even if the time is up.
      poll(inputs, 2, left == 0 ? 0 : static_cast<int>(std::min<std::int64_t>(left + 1, 60'000)));
      char woken[64];
      if (inputs[0].revents != 0 && read(wake_[0], woken, sizeof woken) > 0) continue;
      if (inputs[1].revents == 0) {
        if (left == 0) return Event::kTime;
        continue;
      }
      char key = 0;
      if (read(STDIN_FILENO, &key, 1) != 1) return Event::kQuit;  // the terminal is gone
      if (key == 'q' || key == 'Q') return Event::kQuit;
    }
  }

 private:
  // Write and Leave use only functions that a signal handler may call (async-signal-safe ones).
  static void Write(std::string_view text) {
    while (!text.empty()) {
      const ssize_t size = write(STDOUT_FILENO, text.data(), text.size());
      if (size < 0 && errno != EINTR) return;
      if (size > 0) text.remove_prefix(static_cast<std::size_t>(size));
    }
  }
  static void Leave() {
    Write("\x1b[?25h\x1b[?1049l");
    if (keys_) tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  }

  static void Enter() {
    if (keys_) {
      termios raw = before_;
      raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
      raw.c_cc[VMIN] = 1;
      raw.c_cc[VTIME] = 0;
      tcsetattr(STDIN_FILENO, TCSANOW, &raw);
    }
    Write("\x1b[?1049h\x1b[?25l\x1b[2J");
  }

  static void OnSignal(int signal) {
    const int error = errno;
    if (signal == SIGWINCH) {
      resized_ = 1;
    } else if (signal == SIGTSTP) {
      stopped_ = 1;
    } else if (ended_ == 0) {
      ended_ = 1;
    } else {  // a second signal, in case a call does not return
      Leave();
      _exit(128 + signal);
    }
    // The handler may run on a different thread, so it wakes the thread that waits.
    static_cast<void>(write(wake_[1], "", 1) == 1);
    errno = error;
  }

  static inline volatile std::sig_atomic_t resized_ = 0;
  static inline volatile std::sig_atomic_t stopped_ = 0;
  static inline volatile std::sig_atomic_t ended_ = 0;
  static inline int wake_[2] = {-1, -1};
  static inline bool keys_ = false;
  static inline termios before_{};
};

void Live(View& view, absl::Duration interval) {
  Screen screen;
  Screen::Event event = Screen::Event::kTime;
  while (event != Screen::Event::kQuit) {
    const Clock::time_point end = Clock::now() + absl::ToChronoNanoseconds(interval);
    std::string note = "q: quit";
    try {
      view.Update();
    } catch (const CommandError& error) {
      note = Printable({error.status.message().data(), error.status.message().size()});
    }
    do {
      Screen::Show(view.Text(SizeOfTerminal().rows), note);
      event = screen.Wait(end);
    } while (event == Screen::Event::kRedraw);
  }
}

struct TopFlags {
  std::string interval = "2s";
  bool once = false;
  std::string metrics;
};

void Top(Session& session, const TopFlags& flags) {
  const absl::Duration interval = std::min(*ParseDuration(flags.interval), kLongestInterval);
  std::optional<MetricsAddress> metrics;
  if (!flags.metrics.empty()) metrics = ParseMetricsAddress(flags.metrics);
  View view(session, metrics);
  const char* terminal = std::getenv("TERM");
  if (!flags.once && !session.json && isatty(STDOUT_FILENO) == 1 && terminal != nullptr &&
      std::string_view(terminal) != "dumb")
    return Live(view, interval);
  const InterruptScope interrupts;
  view.Update();
  if (metrics.has_value()) {
    // Rates need two samples.
    const Clock::time_point end = Clock::now() + absl::ToChronoNanoseconds(interval);
    while (Clock::now() < end) {
      OrThrow(InterruptScope::Check());
      absl::SleepFor(std::min(absl::FromChrono(end - Clock::now()), absl::Milliseconds(50)));
    }
    view.Update();
  }
  session.document = view.Document();
  if (!session.json) std::cout << view.Text(kBuffersShown);
}

}  // namespace

void AddTop(CLI::App& app, Command& chosen) {
  const auto [command, flags] = AddCommand<TopFlags>(
      app, chosen, "top", "Show what the server is doing, live", Top, [&app](const TopFlags&) {
        // A user should not have to wait longer for the next update, or for the program to end.
        CLI::Option& timeout = *app.get_option("--timeout");
        if (timeout.count() == 0) SetOption(timeout, "2s");
      });
  command
      ->add_option("--interval", flags->interval, "Time between two updates, such as 500ms or 10s")
      ->check(DurationCheck())
      ->capture_default_str();
  command->add_flag("--once", flags->once,
                    "Print once, as when there is no terminal; with --metrics, after one interval");
  command
      ->add_option("--metrics", flags->metrics,
                   "Address of the server's --metrics-listen, as in http://127.0.0.1:9464; adds\n"
                   "rates and times of calls by method, and refusals by reason")
      ->type_name("URL");
  command->footer(
      "q or Ctrl-C quits. Calls to the server time out after 2 s unless --timeout is given.");
}

}  // namespace tessera
