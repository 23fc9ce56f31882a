#include "server/status/metrics_text.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/durable/snapshots.h"
#include "server/observe/metrics.h"

namespace tessera {
namespace {

using Labels = std::initializer_list<std::pair<std::string_view, std::string_view>>;

// gRPC's names for the status codes, by number.
constexpr std::string_view kCodeNames[Metrics::kCodes] = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};

std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f", seconds);
  return text;
}

class Writer {
 public:
  // Begins a metric; its samples follow.
  void Begin(std::string_view name, std::string_view type, std::string_view help) {
    name_ = name;
    Append({"# HELP ", name, " ", help, "\n# TYPE ", name, " ", type, "\n"});
  }

  template <class Value>
  void Sample(Labels labels, Value value) {
    Append({name_});
    AppendLabels(labels, "");
    absl::StrAppend(&text_, " ", value, "\n");
  }

  // Writes a histogram in seconds, with one sample per bucket. An empty histogram is left out.
  void Sample(Labels labels, const Histogram& histogram) {
    std::uint64_t counts[Histogram::kBounds.size() + 1];
    std::uint64_t count = 0;
    for (std::size_t i = 0; i <= Histogram::kBounds.size(); ++i) {
      counts[i] = count += histogram.bucket(i);
    }
    if (count == 0) return;
    for (std::size_t i = 0; i <= Histogram::kBounds.size(); ++i) {
      Append({name_, "_bucket"});
      if (i < Histogram::kBounds.size()) {
        char bound[32];
        std::snprintf(bound, sizeof bound, "%g", static_cast<double>(Histogram::kBounds[i]) * 1e-9);
        AppendLabels(labels, bound);
      } else {
        AppendLabels(labels, "+Inf");
      }
      absl::StrAppend(&text_, " ", counts[i], "\n");
    }
    Append({name_, "_sum"});
    AppendLabels(labels, "");
    char sum[32];
    std::snprintf(sum, sizeof sum, " %.9f\n", static_cast<double>(histogram.nanoseconds()) * 1e-9);
    Append({sum, name_, "_count"});
    AppendLabels(labels, "");
    absl::StrAppend(&text_, " ", count, "\n");
  }

  // Writes a gauge with one sample for each device.
  template <class Value>
  void Each(const Devices& devices, std::string_view name, std::string_view help,
            const Value& value) {
    Begin(name, "gauge", help);
    for (const auto& device : devices.list())
      Sample({{"device", device->info().name}}, value(*device));
  }

  std::string Take() { return std::move(text_); }

 private:
  void Append(std::initializer_list<std::string_view> pieces) {
    for (const std::string_view piece : pieces) text_ += piece;
  }

  // `bound` is the upper bound of a bucket, or empty if the sample is not a bucket.
  void AppendLabels(Labels labels, std::string_view bound) {
    if (labels.size() == 0 && bound.empty()) return;
    char before = '{';
    const auto append = [&](std::string_view key, std::string_view value) {
      text_ += before;
      before = ',';
      Append({key, "=\""});
      for (const char c : value) {
        if (c == '\n') {
          text_ += "\\n";
          continue;
        }
        if (c == '"' || c == '\\') text_ += '\\';
        text_ += c;
      }
      text_ += '"';
    };
    for (const auto& [key, value] : labels) append(key, value);
    if (!bound.empty()) append("le", bound);
    text_ += '}';
  }

  std::string text_;
  std::string_view name_;
};

void WriteCalls(const Metrics& metrics, Writer& out) {
  out.Begin("tessera_requests_total", "counter",
            "Calls that have ended, by method, strategy that ran or was requested, and gRPC code.");
  for (const auto& series : metrics.series()) {
    for (std::size_t code = 0; code < Metrics::kCodes; ++code) {
      const std::uint64_t calls = series->calls[code].value();
      if (calls == 0) continue;
      out.Sample({{"rpc", series->rpc}, {"strategy", series->strategy}, {"code", kCodeNames[code]}},
                 calls);
    }
  }
  const auto phase = [&](std::string_view name, std::string_view help,
                         const Histogram Metrics::Phases::*histogram) {
    out.Begin(name, "histogram", help);
    for (std::size_t rpc = 0; rpc < Metrics::kRpcs.size(); ++rpc) {
      out.Sample({{"rpc", Metrics::kRpcs[rpc]}}, metrics.phases(rpc).*histogram);
    }
  };
  phase("tessera_request_seconds", "Time from a call's acceptance to its response.",
        &Metrics::Phases::total);
  phase("tessera_queue_seconds", "Time from a call's acceptance to its start on a worker.",
        &Metrics::Phases::queue);
  phase("tessera_run_seconds", "Time from a call's start on a worker to its response.",
        &Metrics::Phases::run);
  out.Begin("tessera_kernel_seconds", "histogram",
            "Device time of requests with timing = true, by the device's clock.");
  for (const auto& series : metrics.series()) {
    out.Sample({{"rpc", series->rpc}, {"strategy", series->strategy}}, series->kernel);
  }
  out.Begin("tessera_program_steps_total", "counter", "Steps of programs (Execute), by result.");
  out.Sample({{"result", "ok"}}, metrics.steps_ok().value());
  out.Sample({{"result", "failed"}}, metrics.steps_failed().value());
  out.Begin("tessera_spans_total", "counter", "Spans of sampled calls (--spans), by result.");
  out.Sample({{"result", "written"}}, metrics.spans_written().value());
  out.Sample({{"result", "dropped"}}, metrics.spans_dropped().value());

  out.Begin("tessera_slow_calls_total", "counter", "Calls that took longer than --slow-call.");
  for (std::size_t rpc = 0; rpc < Metrics::kRpcs.size(); ++rpc) {
    const std::uint64_t calls = metrics.slow_calls(rpc).value();
    if (calls != 0) out.Sample({{"rpc", Metrics::kRpcs[rpc]}}, calls);
  }

  const auto failures = metrics.Failures();
  out.Begin("tessera_errors_total", "counter", "Calls that failed, by gRPC code and reason.");
  for (const Metrics::Failure* failure : failures) {
    out.Sample({{"code", kCodeNames[static_cast<std::size_t>(failure->code)]},
                {"reason", failure->reason}},
               failure->count.value());
  }
  out.Begin("tessera_error_last_timestamp_seconds", "gauge",
            "When a call last failed in this way, in seconds since 1970.");
  for (const Metrics::Failure* failure : failures) {
    const std::int64_t last_ms = failure->last_ms.load(std::memory_order_relaxed);
    if (last_ms == 0) continue;
    out.Sample({{"code", kCodeNames[static_cast<std::size_t>(failure->code)]},
                {"reason", failure->reason}},
               Seconds(static_cast<double>(last_ms) / 1000));
  }
}

void WriteTransfers(const Metrics& metrics, Writer& out) {
  using Direction = Metrics::Direction;
  using Way = Metrics::Way;
  const auto each = [&](const auto& sample) {
    for (const Direction direction : {Direction::kUpload, Direction::kDownload}) {
      for (const Way way : {Way::kStream, Way::kShared}) {
        sample(Labels{{"direction", direction == Direction::kUpload ? "upload" : "download"},
                      {"via", way == Way::kStream ? "stream" : "shared_memory"}},
               metrics.transfer(direction, way));
      }
    }
  };
  out.Begin("tessera_transfer_bytes_total", "counter",
            "Bytes of buffers that were uploaded or downloaded.");
  each([&](const Labels& labels, const Metrics::Transfer& transfer) {
    out.Sample(labels, transfer.bytes.value());
  });
  out.Begin("tessera_copy_seconds", "histogram",
            "Time to copy a piece of a transfer between host and device.");
  each([&](const Labels& labels, const Metrics::Transfer& transfer) {
    out.Sample(labels, transfer.copy);
  });
}

void WriteDevices(const Devices& devices, const Tenants& tenants, Writer& out) {
  out.Begin("tessera_device_info", "gauge", "1 for each device that the server uses.");
  for (const auto& device : devices.list()) {
    const DeviceInfo& info = device->info();
    out.Sample({{"device", info.name}, {"model", info.model}, {"backend", Name(info.backend)}}, 1);
  }
  out.Each(devices, "tessera_device_lost", "1 once the device has failed for good.",
           [](const Device& device) { return device.lost() ? 1 : 0; });
  out.Each(devices, "tessera_device_memory_bytes", "Memory of the device.",
           [](const Device& device) { return device.info().memory_bytes; });
  out.Each(devices, "tessera_buffer_memory_limit_bytes",
           "Memory that all buffers of the device may use.",
           [&](const Device& device) { return tenants.budget(device).limit(); });
  out.Each(devices, "tessera_buffer_memory_used_bytes",
           "Memory that all buffers of the device use, including deleted ones that calls hold.",
           [&](const Device& device) { return tenants.buffer_bytes(device); });
  out.Each(devices, "tessera_prepared_bytes",
           "Memory of prepared operands, which are kept for later calls.",
           [&](const Device& device) { return tenants.prepared(device).bytes(); });
  out.Each(devices, "tessera_scratch_limit_bytes",
           "Memory that operations may use in addition to buffers.",
           [&](const Device& device) { return devices.scratch(device).limit(); });
  out.Each(devices, "tessera_scratch_used_bytes",
           "Memory that operations use in addition to buffers.",
           [&](const Device& device) { return devices.scratch(device).used(); });
}

void WriteBuffers(const Devices& devices, Tenants& tenants, Writer& out) {
  const auto states = [&](std::string_view metric, std::string_view help, auto ready,
                          auto writing) {
    out.Begin(metric, "gauge", help);
    for (const auto& device : devices.list()) {
      const std::string_view name = device->info().name;
      for (Tenant* tenant : tenants.All()) {
        const BufferStore::Tally tally = tenant->store().tally(*device);
        // Prometheus treats an empty label as absent.
        const std::string_view owner = tenant->name();
        out.Sample({{"device", name}, {"state", "ready"}, {"tenant", owner}}, tally.*ready);
        out.Sample({{"device", name}, {"state", "writing"}, {"tenant", owner}}, tally.*writing);
      }
    }
  };
  states("tessera_buffers", "Buffers that have a name.", &BufferStore::Tally::ready,
         &BufferStore::Tally::writing);
  states("tessera_buffer_bytes", "Bytes of buffers that have a name.",
         &BufferStore::Tally::ready_bytes, &BufferStore::Tally::writing_bytes);
}

void WriteQueues(const Devices& devices, std::uint32_t queue_limit, Writer& out) {
  out.Begin("tessera_queue_length", "gauge", "Tasks that wait for a worker.");
  for (const auto& device : devices.list()) {
    const std::string_view name = device->info().name;
    out.Sample({{"device", name}, {"queue", "compute"}}, devices.compute(*device).waiting());
    out.Sample({{"device", name}, {"queue", "transfers"}}, devices.transfers(*device).waiting());
  }
  out.Each(devices, "tessera_queue_limit",
           "Number of operations of each tenant that may wait for a worker.",
           [&](const Device&) { return queue_limit; });
  out.Each(devices, "tessera_workers", "Threads that run operations.",
           [&](const Device& device) { return devices.compute(device).workers(); });
  out.Each(devices, "tessera_longest_run_seconds",
           "Time for which the longest operation or transfer has been running.",
           [&](const Device& device) {
             const auto longest = std::max(devices.compute(device).LongestRun(),
                                           devices.transfers(device).LongestRun());
             return Seconds(std::chrono::duration<double>(longest).count());
           });
}

void WriteGpus(const std::vector<GpuFigures>& gpus, Writer& out) {
  // value(figures): what the driver has reported, if anything.
  const auto each = [&](std::string_view name, std::string_view help, auto value) {
    bool begun = false;
    for (const GpuFigures& gpu : gpus) {
      const auto told = value(gpu);
      if (!told.has_value()) continue;
      if (!std::exchange(begun, true)) out.Begin(name, "gauge", help);
      out.Sample({{"device", gpu.device}}, *told);
    }
  };
  each("tessera_gpu_busy_ratio",
       "Fraction of the driver's last sampling period in which a kernel of any process ran.",
       [](const GpuFigures& gpu) { return gpu.busy; });
  each("tessera_gpu_memory_used_bytes", "Memory of the GPU in use by all processes together.",
       [](const GpuFigures& gpu) { return gpu.memory_used; });
  each("tessera_gpu_temperature_celsius", "Temperature of the GPU.",
       [](const GpuFigures& gpu) { return gpu.celsius; });
  each("tessera_gpu_power_watts", "Power that the GPU draws.",
       [](const GpuFigures& gpu) { return gpu.watts; });
  each("tessera_gpu_power_limit_watts", "Limit on the power that the GPU draws.",
       [](const GpuFigures& gpu) { return gpu.watts_limit; });
  each("tessera_gpu_sm_clock_hertz", "Clock rate of the multiprocessors.",
       [](const GpuFigures& gpu) { return gpu.sm_hertz; });

  bool begun = false;
  for (const GpuFigures& gpu : gpus) {
    if (!gpu.slowdowns.has_value()) continue;
    if (!std::exchange(begun, true))
      out.Begin("tessera_gpu_slowdown", "gauge", "1 while clocks are lowered for this reason.");
    const auto sample = [&](std::string_view reason, std::uint64_t bit) {
      out.Sample({{"device", gpu.device}, {"reason", reason}}, (*gpu.slowdowns & bit) != 0 ? 1 : 0);
    };
    sample("power_cap", GpuFigures::kPowerCap);
    sample("thermal_software", GpuFigures::kThermalSoftware);
    sample("thermal_hardware", GpuFigures::kThermalHardware);
    sample("power_brake", GpuFigures::kPowerBrake);
  }
  begun = false;
  for (const GpuFigures& gpu : gpus) {
    if (!gpu.corrected_errors.has_value() || !gpu.uncorrected_errors.has_value()) continue;
    if (!std::exchange(begun, true)) {
      out.Begin("tessera_gpu_memory_errors_total", "counter",
                "Memory errors that ECC has found since the driver was loaded.");
    }
    out.Sample({{"device", gpu.device}, {"kind", "corrected"}}, *gpu.corrected_errors);
    out.Sample({{"device", gpu.device}, {"kind", "uncorrected"}}, *gpu.uncorrected_errors);
  }
}

void WriteServer(const CallLimits& limits, absl::Time start_time, bool ready, Writer& out) {
  out.Begin("tessera_ready", "gauge", "1 while the health service reports SERVING.");
  out.Sample({}, ready ? 1 : 0);
  out.Begin("tessera_calls_in_progress", "gauge", "Calls that were accepted and have not ended.");
  out.Sample({}, limits.admission().in_progress());
  const auto budgets = limits.Budgets();
  out.Begin("tessera_budget_limit", "gauge",
            "Limits of the server as a whole, in bytes or as a count.");
  for (const auto& [name, budget] : budgets) out.Sample({{"budget", name}}, budget.limit);
  out.Begin("tessera_budget_used", "gauge", "The amount in use of each tessera_budget_limit.");
  for (const auto& [name, budget] : budgets) out.Sample({{"budget", name}}, budget.used);
  if (const ConnectionTable* connections = limits.connections()) {
    out.Begin("tessera_connections_refused_total", "counter",
              "Connections that were closed immediately because a limit was reached.");
    out.Sample({}, connections->refused());
    out.Begin("tessera_connections_ended_total", "counter",
              "Connections that were ended because they had too many calls.");
    out.Sample({}, connections->ended());
  }
  out.Begin("tessera_build_info", "gauge", "Always 1; the label is the server's version.");
  out.Sample({{"version", TESSERA_VERSION}}, 1);
  out.Begin("tessera_uptime_seconds", "gauge", "Time since the server started.");
  out.Sample({}, Seconds(absl::ToDoubleSeconds(SteadyNow() - start_time)));
  out.Begin("process_start_time_seconds", "gauge", "Start of the server, in seconds since 1970.");
  out.Sample({}, absl::ToUnixSeconds(start_time));
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  out.Begin("process_cpu_seconds_total", "counter", "CPU time of the process.");
  out.Sample({}, Seconds(seconds(usage.ru_utime) + seconds(usage.ru_stime)));
  long pages = 0;
  if (std::FILE* file = std::fopen("/proc/self/statm", "re")) {
    if (std::fscanf(file, "%*s %ld", &pages) != 1) pages = 0;
    std::fclose(file);
  }
  out.Begin("process_resident_memory_bytes", "gauge", "Resident memory of the process.");
  out.Sample({}, pages * sysconf(_SC_PAGESIZE));
}

void WriteSnapshots(const Snapshots& snapshots, Writer& out) {
  const Snapshots::Figures figures = snapshots.figures();
  out.Begin("tessera_snapshots_total", "counter", "Snapshots that have ended.");
  out.Sample({{"result", "written"}}, figures.taken);
  out.Sample({{"result", "failed"}}, figures.failed);
  out.Begin("tessera_snapshot_bytes_total", "counter",
            "Bytes of arrays that were written for snapshots.");
  out.Sample({}, figures.bytes);
  out.Begin("tessera_snapshot_age_seconds", "gauge",
            "Time since the last complete snapshot, or since the start if there was none.");
  out.Sample({}, Seconds(absl::ToDoubleSeconds(SteadyNow() - figures.last)));
  out.Begin("tessera_restore_arrays", "gauge",
            "Arrays of an earlier server that are not loaded yet or could not be loaded.");
  out.Sample({{"state", "waiting"}}, figures.waiting);
  out.Sample({{"state", "loading"}}, figures.loading);
  out.Sample({{"state", "lost"}}, figures.lost);
}

void WriteTenants(Tenants& tenants, Writer& out) {
  const auto each = [&](std::string_view name, std::string_view help, auto value) {
    out.Begin(name, "counter", help);
    for (const Tenant* tenant : tenants.All())
      out.Sample({{"tenant", tenant->name()}}, (tenant->*value)());
  };
  each("tessera_tenant_calls_total", "Ended calls of callers that the server knows.",
       &Tenant::ended_calls);
  each("tessera_tenant_refused_total",
       "Ended calls that were refused because a quota, a queue, memory or another limit was "
       "exhausted.",
       &Tenant::refused_calls);
}

void WriteFiles(const Access& access, const Home* home, const ServerTls* tls, Writer& out) {
  const CertificateLife life = tls == nullptr ? CertificateLife() : tls->life();
  const auto certificate = [&](std::string_view name, std::string_view help, absl::Duration time) {
    out.Begin(name, "gauge", help);
    if (tls != nullptr) out.Sample({}, Seconds(absl::ToDoubleSeconds(time)));
  };
  certificate("tessera_certificate_seconds_left",
              "Seconds until the certificate of --tls-cert expires; negative once it has expired.",
              life.end - absl::Now());
  certificate("tessera_certificate_life_seconds",
              "Seconds from the beginning of the certificate's validity to its end.",
              life.end - life.begin);
  out.Begin("tessera_file_unusable", "gauge",
            "1 while a changed file cannot be used and its earlier contents stay in effect.");
  if (tls != nullptr) out.Sample({{"file", "tls"}}, tls->stale() ? 1 : 0);
  if (access.restricted()) out.Sample({{"file", "tokens"}}, access.stale() ? 1 : 0);
  if (home != nullptr) out.Sample({{"file", "ring"}}, home->stale() ? 1 : 0);
}

}  // namespace

std::string MetricsText(Core& core, bool ready, const ServerTls* tls,
                        const std::vector<GpuFigures>& gpus) {
  Writer out;
  WriteServer(core.limits, core.start_time, ready, out);
  WriteFiles(*core.access, core.home.get(), tls, out);
  if (core.snapshots != nullptr) WriteSnapshots(*core.snapshots, out);
  WriteTenants(core.tenants, out);
  WriteCalls(core.records.metrics(), out);
  WriteTransfers(core.records.metrics(), out);
  WriteDevices(*core.devices, core.tenants, out);
  WriteBuffers(*core.devices, core.tenants, out);
  WriteQueues(*core.devices, core.options.queue, out);
  WriteGpus(gpus, out);
  return out.Take();
}

}  // namespace tessera
