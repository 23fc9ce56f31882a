#include "server/server.h"

#include <malloc.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "google/protobuf/message.h"
#include "grpc/grpc.h"
#include "grpc/health/v1/health.pb.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "server/observe/log.h"
#include "server/status/metrics_text.h"
#include "server/status/status_page.h"
#include "spdlog/spdlog.h"

namespace tessera {
namespace {

constexpr std::chrono::milliseconds kTendInterval{50};
constexpr absl::Duration kLongestDrain = absl::Hours(24);

// How long calls are refused before connections get a GOAWAY.
constexpr absl::Duration kRefusal = absl::Milliseconds(100);

// How long responses may take to leave the socket once every call has ended.
constexpr absl::Duration kFlush = absl::Seconds(1);

// How often free host memory is checked, and how much of it the heap keeps.
constexpr absl::Duration kTrimInterval = absl::Seconds(1);
constexpr std::size_t kKeptHeap = std::size_t{16} << 20;

// How often the files of TLS, tokens and the ring are checked.
constexpr std::chrono::seconds kReloadInterval{1};

// How many users of this host can be told apart.
constexpr std::size_t kMostUsers = 64;

// How long a request for the metrics waits for the driver.
constexpr absl::Duration kGpuFigures = absl::Milliseconds(200);

// If the process was stopped for a while (an absence, see NoteAbsence), idle timeouts are extended
// by the duration of the absence, but by at most kForbearance. The data that peers sent during the
// absence has not been read yet, and TCP may take a while to retransmit the rest.
constexpr absl::Duration kForbearance = absl::Minutes(1);

// A peer that is silent for this long is sent a ping, and has a third of this time to answer it.
constexpr int kKeepaliveMs = 60'000;

// The minimum time between two keepalive pings of a client.
constexpr int kPingsMs = 10'000;

// glibc keeps freed memory between allocations that are in use. After many large messages at the
// same time, it could keep the memory of all of them.
void TrimHostMemory() {
  if (mallinfo2().fordblks > kKeptHeap) malloc_trim(0);
}

// Submits work, unless earlier work with the same flag has not finished. (That work hangs if a
// device hangs.)
template <class Work>
void SubmitOnce(Chores& chores, const std::shared_ptr<std::atomic<bool>>& busy, Work work) {
  if (busy->exchange(true)) return;
  const absl::Status submitted = chores.Submit([busy, work] {
    work();
    *busy = false;
  });
  if (!submitted.ok()) *busy = false;
}

// Whether the file has been created or written to since the server's start. A file's time may be
// earlier than the clock's by a tick of the kernel.
bool IsMade(const std::string& path, absl::Time start) {
  struct stat file {};
  return stat(path.c_str(), &file) == 0 &&
         absl::TimeFromTimespec(file.st_mtim) >= start - absl::Milliseconds(20);
}

// Sets gRPC's limits on messages, memory and connections.
void SetLimits(const Options& options, grpc::ServerBuilder& builder) {
  // Twice what clients may send, so that a message that is only a little too large gets an error
  // with its size and the limit; gRPC itself would only break the call.
  builder.SetMaxReceiveMessageSize(static_cast<int>(2 * options.max_message));
  // gRPC decompresses a message before it checks the size.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  grpc::ResourceQuota quota("tessera");
  quota.Resize(options.host_memory);
  builder.SetResourceQuota(quota);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs / 3);
  // Clients may also send these pings while they have no calls. gRPC treats more frequent pings as
  // an attack.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kPingsMs);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                             static_cast<int>(absl::ToInt64Milliseconds(options.handshake)));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_streams);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS,
                             static_cast<int>(absl::ToInt64Milliseconds(options.connection_idle)));
}

// Logs the options that a reader of the log needs to know.
void LogOptions(const Options& options) {
  const bool asks = !options.tls_client_ca.empty();
  spdlog::info(
      "tessera-server {}: TLS {}, tokens {}, imports from {}; at most {} MiB for messages, "
      "{} buffers, {} connections, operations of {} s",
      TESSERA_VERSION,
      options.tls_cert.empty() ? "off"
      : asks                   ? "on, with client certificates"
                               : "on",
      options.tokens.empty() ? "off" : "on",
      options.import_from.empty() ? "nowhere" : absl::StrJoin(options.import_from, ", "),
      options.host_memory >> 20, options.MaxBuffers(), options.max_connections,
      options.max_operation_seconds);
}

}  // namespace

Server::Server(std::unique_ptr<Core> core)
    : core_(std::move(core)),
      buffer_service_(core_->call_parts(), *core_->devices, core_->snapshots.get(), core_->options),
      compute_service_(core_->call_parts(), *core_->devices, core_->tenants, core_->options,
                       core_->start_time),
      filled_(core_->options.ready_file.empty()) {}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(
    const Options& options, std::vector<std::unique_ptr<Device>> devices) {
  const absl::Time start = absl::Now();
  ASSIGN_OR_RETURN(std::unique_ptr<Core> core, Core::Make(options, std::move(devices)));
  LogOptions(options);
  for (const std::unique_ptr<Device>& device : core->device_list) {
    spdlog::info("device {} ({}): {} MiB for buffers, {} workers, queue of {}", device->info().name,
                 device->info().model, core->tenants.budget(*device).limit() >> 20, options.workers,
                 options.queue);
  }
  std::unique_ptr<Server> server(new Server(std::move(core)));
  server->start_ = start;
  RETURN_IF_ERROR(server->Listen());
  if (!server->filled_) spdlog::info("not ready until {} is created", options.ready_file);
  server->SetHealth();
  if (server->http_ != nullptr) {
    spdlog::info("metrics at http://{}/", server->http_->address());
    if (server->http_->beyond_loopback())
      spdlog::warn("other hosts can read the metrics, which have neither TLS nor authentication");
  }
  server->tender_ = std::thread(&Server::Tend, server.get());
  server->reloader_ = std::thread(&Server::WatchFiles, server.get());
  for (const std::string& address : server->addresses()) spdlog::info("listening on {}", address);
  return server;
}

absl::Status Server::Register(grpc::ServerBuilder& builder) {
  const Options& options = core_->options;
  builder.RegisterService(&buffer_service_);
  builder.RegisterService(&compute_service_);
  builder.RegisterService(&health_);
  if (!options.shared_memory.empty()) {
    ASSIGN_OR_RETURN(shared_memory_service_,
                     SharedMemoryService::Open(core_->call_parts(), *core_->devices, core_->tenants,
                                               core_->regions, options));
    builder.RegisterService(shared_memory_service_.get());
  }
  // Links the descriptor of the health service, which nothing else refers to: clients such as
  // grpcurl and ghz can call a service only if reflection describes it.
  google::protobuf::LinkMessageReflection<grpc::health::v1::HealthCheckRequest>();
  std::vector<std::string> services = {v1::BufferService::service_full_name(),
                                       v1::ComputeService::service_full_name(),
                                       "grpc.health.v1.Health"};
  if (shared_memory_service_ != nullptr)
    services.emplace_back(v1::SharedMemoryService::service_full_name());
  reflection_ = std::make_unique<Reflection>(std::move(services));
  builder.RegisterAsyncGenericService(&streams_);
  return absl::OkStatus();
}

absl::Status Server::Listen() {
  const Options& options = core_->options;
  grpc::ServerBuilder builder;
  RETURN_IF_ERROR(Register(builder));
  SetLimits(options, builder);
  if (!options.metrics_listen.empty()) {
    gpus_ = std::make_unique<GpuMonitor>(core_->device_list);
    absl::StatusOr<std::unique_ptr<HttpListener>> http = HttpListener::Open(
        options.metrics_listen, [this](std::string_view path) { return ServeHttp(path); });
    if (!http.ok()) return http.status();
    http_ = *std::move(http);
  }
  ASSIGN_OR_RETURN(listener_,
                   Listener::Open(options.listen, options.max_connections, options.socket_group));
  RETURN_IF_ERROR(CheckCredentials());
  if (!options.tls_cert.empty()) {
    ASSIGN_OR_RETURN(tls_,
                     ServerTls::Open({options.tls_cert, options.tls_key, options.tls_client_ca}));
  }
  const auto add_acceptor = [&](UserMark* mark) -> std::unique_ptr<Listener::Acceptor> {
    credentials_.push_back(MakeCredentials(mark));
    return builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        credentials_.back());
  };
  std::unique_ptr<Listener::Acceptor> acceptor = add_acceptor(nullptr);
  std::vector<Listener::User> users;
  while (core_->access->restricted() && listener_->has_unix() && users.size() < kMostUsers) {
    auto mark = std::make_unique<UserMark>();
    std::unique_ptr<Listener::Acceptor> theirs = add_acceptor(mark.get());
    users.push_back({std::move(mark), std::move(theirs)});
  }
  queues_ = std::make_unique<CallQueues>(builder);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    return MakeError(absl::StatusCode::kInternal, "CANNOT_START", "gRPC could not start");
  }
  // This thread is created early, because it may be impossible to create one when the drain begins.
  shutdown_ = std::async(std::launch::async, [this, begin = begin_shutdown_.get_future()] {
    begin.wait();
    server_->Shutdown();
  });
  buffer_service_.Serve(*queues_);
  compute_service_.Serve(*queues_);
  if (shared_memory_service_ != nullptr) shared_memory_service_->Serve(*queues_);
  health_.Serve(*queues_, std::max<std::size_t>(1, listener_->connections().limit() / 4));
  queues_->Accept([this](CallQueue& queue) { new StreamExchange(streams_, queue, serve_stream_); });
  core_->limits.WatchConnections(listener_->connections());
  stream_watch_.emplace(listener_->connections(), options.max_streams);
  listener_->Start(std::move(acceptor), std::move(users),
                   [this](uid_t user) { return core_->access->NamesUser(user); });
  return absl::OkStatus();
}

absl::Status Server::CheckCredentials() {
  const Options& options = core_->options;
  const Access& access = *core_->access;
  if (access.names_certificates() && options.tls_client_ca.empty())
    spdlog::warn(
        "tokens: some lines name certificates, but the server requests no client's certificate "
        "without --tls-client-ca");
  if (!options.tls_cert.empty()) return absl::OkStatus();
  const std::string& open = listener_->beyond_loopback();
  if (!open.empty() && !options.insecure) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "INSECURE_LISTENER",
        absl::StrCat("other hosts could connect to ", open, " without TLS",
                     access.restricted() ? ", and tokens would be sent in the clear" : "",
                     ": give --tls-cert and --tls-key, or --insecure"),
        {{"address", open}});
  }
  if (!open.empty() && access.restricted())
    spdlog::warn("{} has no TLS: any observer of the traffic to it can read the tokens", open);
  return absl::OkStatus();
}

std::shared_ptr<grpc::ServerCredentials> Server::MakeCredentials(UserMark* mark) const {
  if (tls_ != nullptr) return tls_->MakeCredentials(mark);
  return mark == nullptr ? grpc::InsecureServerCredentials() : MakeMarkedCredentials(*mark);
}

void Server::ServeStream(StreamExchange& exchange) {
  const std::string method = exchange.context().method();
  if (buffer_service_.ServeStream(method, exchange) || health_.ServeStream(method, exchange) ||
      reflection_->Serve(method, exchange))
    return;
  core_->records.metrics().Count({.rpc = "other"}, absl::UnimplementedError(""));
  exchange.Refuse({grpc::StatusCode::UNIMPLEMENTED, "the server has no such method"});
}

HttpAnswer Server::ServeHttp(std::string_view path) {
  if (path == "/metrics") {
    return {.type = "text/plain; version=0.0.4; charset=utf-8",
            .body = MetricsText(*core_, ready_, tls_.get(), gpus_->Read(kGpuFigures))};
  }
  if (path == "/") return {.type = "text/html; charset=utf-8", .body = std::string(kStatusPage)};
  if (path == "/healthz") {
    return ready_ ? HttpAnswer{.body = "ready\n"} : HttpAnswer{.code = 503, .body = "not ready\n"};
  }
  return {.code = 404, .body = "not found; the pages are /, /metrics and /healthz\n"};
}

Server::~Server() {
  http_.reset();
  if (server_ != nullptr) Drain();
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (tender_.joinable()) tender_.join();
  if (reloader_.joinable()) reloader_.join();
  queues_.reset();
}

std::shared_ptr<grpc::Channel> Server::InProcessChannel() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  return server_->InProcessChannel(arguments);
}

void Server::RequestStop() {
  {
    const std::lock_guard lock(mutex_);
    stop_requested_ = true;
  }
  changed_.notify_all();
}

void Server::RequestReload() {
  {
    const std::lock_guard lock(mutex_);
    reload_requested_ = true;
  }
  changed_.notify_all();
}

void Server::Reload(bool asked) {
  Home* const home = core_->home.get();
  if (asked && tls_ == nullptr && !core_->access->restricted() && home == nullptr)
    spdlog::info("SIGHUP: there are no files for TLS, tokens or a ring to read again");
  if (tls_ != nullptr) tls_->Reload(asked);
  core_->access->Reload(asked);
  if (home != nullptr) home->Reload(asked);
}

Server::Reason Server::Wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return stop_requested_ || devices_lost_; });
  return devices_lost_ ? Reason::kDevicesLost : Reason::kStopRequested;
}

bool Server::devices_lost() const {
  const std::lock_guard lock(mutex_);
  return devices_lost_;
}

void Server::SetProfiling(bool on) {
  for (const std::unique_ptr<Device>& device : core_->device_list) device->SetProfiling(on);
}

bool Server::Drain() {
  if (std::exchange(drained_, true)) return true;
  const Options& options = core_->options;
  {
    std::unique_lock lock(mutex_);
    draining_ = true;
    SetHealth();
    changed_.wait_for(lock, absl::ToChronoNanoseconds(std::min(options.drain_delay, kLongestDrain)),
                      [this] { return devices_lost_; });
  }
  listener_->Close();
  if (shared_memory_service_ != nullptr) shared_memory_service_->Close();
  core_->limits.admission().Close();
  // gRPC cancels calls that arrive during its shutdown, so their clients do not learn the reason.
  // During this pause, clients that call continually get DRAINING instead.
  absl::SleepFor(std::min(kRefusal, options.drain_timeout));
  // Closes the listeners and sends GOAWAY, then waits for calls in progress. gRPC gets no deadline,
  // because calls that gRPC cut off could end unnoticed before WaitIdle returns.
  begin_shutdown_.set_value();
  const bool idle =
      core_->limits.admission().WaitIdle(std::min(options.drain_timeout, kLongestDrain));
  if (!idle) {
    spdlog::warn("cancelling the calls that are still in progress after the drain timeout");
    grpc_server_cancel_all_calls(server_->c_server());
  }
  // Watch calls of the health service never end by themselves.
  while (shutdown_.wait_for(absl::ToChronoNanoseconds(kFlush)) != std::future_status::ready)
    grpc_server_cancel_all_calls(server_->c_server());
  core_->records.FlushSpans(kFlush);
  if (core_->snapshots != nullptr) {
    saved_ = false;
    saved_ = core_->snapshots->Take(nullptr).ok();
    if (!saved_)
      spdlog::error("the last snapshot failed: the next server restores the previous one");
  }
  return idle;
}

void Server::SetHealth() {
  const bool ready = filled_ && !draining_ && !stuck_ && !devices_lost_;
  ready_ = ready;
  health_.Set(v1::BufferService::service_full_name(), ready);
  health_.Set(v1::ComputeService::service_full_name(), ready);
  health_.Set("", !devices_lost_);
}

void Server::NoteAbsence(absl::Time now) {
  // On a busy host, Tend may run a little late.
  constexpr absl::Duration kLate = absl::Seconds(1);
  if (now - last_turn_ > kLate) {
    absent_ += now - last_turn_;
    absence_end_ = now;
    forbearance_end_ = now + std::min(now - last_turn_, kForbearance);
  }
  last_turn_ = now;
}

absl::Duration Server::Without(absl::Duration wait, absl::Time now) const {
  return now - wait < absence_end_ ? std::max(wait - absent_, absl::ZeroDuration()) : wait;
}

void Server::EndIdle(absl::Time now) {
  buffer_service_.EndIdleStreams(now);
  reflection_->EndIdleStreams(now);
  queues_->answers().CancelUnread(now, core_->limits.Patience());
}

Server::Verdict Server::Judge() {
  const auto& devices = core_->device_list;
  const Options& options = core_->options;
  const absl::Duration limit = options.HangLimit(devices.size());
  bool spans_absence = false, stuck = false;
  const auto present = [&](absl::Duration wait) {
    // The clock is read after the wait was measured, so that an absence within the wait is noted.
    const absl::Time now = SteadyNow();
    NoteAbsence(now);
    spans_absence |= now - wait < absence_end_;
    return Without(wait, now);
  };
  const auto hangs = [&](absl::Duration wait) {
    stuck |= wait > options.watchdog;
    return wait > limit;
  };
  for (const std::unique_ptr<Device>& device : devices) {
    if (hangs(core_->devices->LongestWait(*device, present))) {
      spdlog::critical("device {} hangs: it has not answered for {}", device->info().name,
                       absl::FormatDuration(limit));
      device->MarkLost();
    }
    if (!device->lost() || lost_devices_.contains(device.get())) continue;
    spdlog::critical("device {} has failed for good: its buffers are gone", device->info().name);
    lost_devices_.emplace(device.get(), std::make_shared<std::atomic<bool>>(false));
  }
  bool lost = lost_devices_.size() == devices.size();
  // A chore may hang because of a device that is already known to be lost.
  if (lost_devices_.empty() && hangs(present(absl::FromChrono(core_->chores.LongestRun())))) {
    spdlog::critical("allocating or freeing memory has taken {}: the driver hangs",
                     absl::FormatDuration(limit));
    lost = true;
  }
  if (!spans_absence) absent_ = absl::ZeroDuration();
  return {.lost = lost, .stuck = stuck};
}

void Server::ClearLostDevices() {
  // This is done every time Tend runs, because a call that began before the loss may still create a
  // buffer or wait for the device.
  for (const auto& [device, refusing] : lost_devices_) {
    core_->chores.Release(core_->tenants.Evict(*device));
    Executor& compute = core_->devices->compute(*device);
    Executor& transfers = core_->devices->transfers(*device);
    if (compute.waiting() + transfers.waiting() == 0) continue;
    SubmitOnce(core_->chores, refusing, [&compute, &transfers] {
      compute.RefuseWaiting();
      transfers.RefuseWaiting();
    });
  }
}

void Server::WatchFiles() {
  std::unique_lock lock(mutex_);
  while (!ending_) {
    changed_.wait_for(lock, kReloadInterval, [this] { return ending_ || reload_requested_; });
    const bool asked = std::exchange(reload_requested_, false);
    const bool filled = filled_;
    lock.unlock();
    Reload(asked);
    const bool made = !filled && IsMade(core_->options.ready_file, start_);
    lock.lock();
    if (!made) continue;
    spdlog::info("{} was created: ready", core_->options.ready_file);
    filled_ = true;
    SetHealth();
  }
}

void Server::Tend() {
  absl::Time next_trim = SteadyNow();
  last_turn_ = next_trim;
  const auto trimming = std::make_shared<std::atomic<bool>>(false);
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kTendInterval, [this] { return ending_; })) {
    lock.unlock();
    const absl::Time now = SteadyNow();
    NoteAbsence(now);
    const bool forbearing = now < forbearance_end_;
    stream_watch_->Look(now, forbearing);
    core_->chores.Relieve();
    core_->chores.Release(core_->tenants.Sweep(now));
    if (!forbearing) EndIdle(now);
    if (core_->snapshots != nullptr) core_->snapshots->Tick(now);
    LogDroppedLines();
    if (now >= next_trim) {
      next_trim = now + kTrimInterval;
      // The core waits for its chores after the rest of the server is destroyed, so the chores use
      // only the core.
      SubmitOnce(core_->chores, trimming, [&devices = *core_->devices] {
        devices.TrimSlots();
        TrimHostMemory();
      });
    }
    const auto [lost, stuck] = Judge();
    lock.lock();
    if (lost && !devices_lost_) {
      spdlog::critical("no usable device is left: the server stops");
      devices_lost_ = true;
      SetHealth();
      changed_.notify_all();
    }
    if (stuck != stuck_) {
      if (stuck) {
        spdlog::error("a worker is busy, or a device has not responded, for over {}: not ready",
                      absl::FormatDuration(core_->options.watchdog));
      } else {
        spdlog::info("workers and devices respond in time again");
      }
      stuck_ = stuck;
      SetHealth();
    }
    lock.unlock();
    // Comes last, because nothing waits for it.
    ClearLostDevices();
    lock.lock();
  }
}

}  // namespace tessera
