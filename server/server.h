// The server as a whole: listeners, services, health, and an orderly shutdown.
#pragma once

#include <atomic>
#include <condition_variable>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"
#include "server/compute/compute_service.h"
#include "server/core.h"
#include "server/devices/gpu_monitor.h"
#include "server/net/listener.h"
#include "server/net/stream_watch.h"
#include "server/net/tls.h"
#include "server/options.h"
#include "server/rpc/call_queues.h"
#include "server/shared_memory/shared_memory_service.h"
#include "server/status/health.h"
#include "server/status/http_listener.h"
#include "server/status/reflection.h"
#include "server/transfers/buffer_service.h"

namespace tessera {

// Thread safe, except that Drain and the destructor must be called by one thread.
class Server {
 public:
  // `devices` has at least one device. Errors: UNAVAILABLE / CANNOT_LISTEN {address};
  // FAILED_PRECONDITION / INSECURE_LISTENER {address} for an address outside loopback with neither
  // TLS nor --insecure; and the errors of ServerTls and of the devices.
  static absl::StatusOr<std::unique_ptr<Server>> Start(
      const Options& options, std::vector<std::unique_ptr<Device>> devices);

  // Drains, unless Drain has been called.
  ~Server();

  // The addresses on which the server listens, with the port that was chosen for port 0.
  const std::vector<std::string>& addresses() const { return listener_->addresses(); }

  // The address of the metrics, with the port that was chosen for port 0. It is empty if metrics
  // are not served.
  std::string metrics_address() const { return http_ == nullptr ? "" : http_->address(); }

  // Returns a connection without a socket. No call may be made on it after Drain: that crashes in
  // gRPC 1.51.
  std::shared_ptr<grpc::Channel> InProcessChannel();

  enum class Reason { kStopRequested, kDevicesLost };
  // Makes Wait return; callable from any thread, more than once.
  void RequestStop();
  // Makes the server soon read the files for TLS, tokens and the ring again, even if they have not
  // changed, and log each result; callable from any thread, more than once.
  void RequestReload();
  // Blocks until a stop is requested or all devices are lost.
  Reason Wait();

  // Ends the server. The health service reports the server as not ready, but the server continues
  // to serve for --drain-delay. Then the listeners close and every connection gets a GOAWAY, so
  // that clients make their next calls elsewhere. Calls in progress have --drain-timeout to finish;
  // returns false if some had not finished and were cut off. If all devices are lost, there is no
  // delay, and calls that are waiting for a device fail with DEVICE_LOST. With --data-dir, takes a
  // snapshot once the calls have ended.
  bool Drain();
  // Whether Drain has not begun its snapshot, or has completed it. Thread safe.
  bool saved() const { return saved_; }

  // Grows when a snapshot begins and when it writes. While it grows, Drain is not stuck. Thread
  // safe.
  std::uint64_t snapshot_progress() const {
    if (core_->snapshots == nullptr) return 0;
    const Snapshots::Figures figures = core_->snapshots->figures();
    return figures.begun + figures.bytes;
  }

  // Whether all devices are lost. Thread safe.
  bool devices_lost() const;

  // Begins or ends the recording of all devices by profilers (Device::SetProfiling).
  void SetProfiling(bool on);

  // Removes the files of unix sockets, for a process that ends without destroying the server.
  void RemoveSockets() {
    listener_->RemoveSocketFiles();
    if (shared_memory_service_ != nullptr) shared_memory_service_->RemoveSocketFile();
  }

 private:
  explicit Server(std::unique_ptr<Core> core);
  absl::Status Listen();
  // Creates the services that the options select, and registers all services with gRPC.
  absl::Status Register(grpc::ServerBuilder& builder);
  // Returns an error if the options forbid serving on one of the addresses.
  absl::Status CheckCredentials();
  // Returns the credentials for connections that carry the mark, or for connections without a mark
  // if `mark` is null.
  std::shared_ptr<grpc::ServerCredentials> MakeCredentials(UserMark* mark) const;
  // Reads the files for TLS, tokens and the ring again if they have changed or if `asked` is true.
  void Reload(bool asked);
  void ServeStream(StreamExchange& exchange);
  HttpAnswer ServeHttp(std::string_view path);
  // Updates the health service. The caller holds the mutex.
  void SetHealth();
  // Does the housekeeping many times a second: deals with expired buffers, idle streams, stuck
  // workers and lost devices.
  void Tend();
  struct Verdict {
    bool lost;   // no device is left to work with
    bool stuck;  // something has waited for a device for longer than Options::watchdog
  };
  // Marks devices that hang as lost, and notes which devices are lost.
  Verdict Judge();
  // Calls Reload every second and after RequestReload, and looks for --ready-file. It has its own
  // thread, because the files may be on a file system that hangs.
  void WatchFiles();
  // Detects an absence: a time for which the process was stopped (SIGSTOP, a paused container, a
  // suspended host). The clock keeps running during an absence, although neither devices nor
  // callers are to blame for it. A long gap since Tend last ran reveals an absence.
  void NoteAbsence(absl::Time now);
  // Ends calls whose clients have made no progress for too long.
  void EndIdle(absl::Time now);
  // Returns the part of a wait in which the process was running.
  absl::Duration Without(absl::Duration wait, absl::Time now) const;
  // Forgets the buffers of lost devices, and refuses work that waits for them.
  void ClearLostDevices();

  std::unique_ptr<Core> core_;
  absl::Time start_;  // wall-clock time before the devices are warmed up
  BufferService buffer_service_;
  ComputeService compute_service_;
  std::unique_ptr<SharedMemoryService> shared_memory_service_;  // null without --shared-memory
  Health health_;
  std::unique_ptr<Reflection> reflection_;
  // Serves the methods that no service has registered: streams, health and reflection.
  grpc::AsyncGenericService streams_;
  const StreamExchange::Handle serve_stream_ = [this](StreamExchange& e) { ServeStream(e); };
  std::unique_ptr<Listener> listener_;
  std::optional<StreamWatch> stream_watch_;  // watches the listener's connections
  std::shared_ptr<ServerTls> tls_;           // null without TLS
  // These must outlive server_, which uses them.
  std::vector<std::shared_ptr<grpc::ServerCredentials>> credentials_;
  std::unique_ptr<CallQueues> queues_;
  std::unique_ptr<grpc::Server> server_;
  bool drained_ = false;
  std::promise<void> begin_shutdown_;  // set to begin gRPC's shutdown
  std::future<void> shutdown_;         // the end of server_->Shutdown
  // The lost devices that Tend has noticed, and, for each, whether the work that is waiting for it
  // is being refused.
  std::map<const Device*, std::shared_ptr<std::atomic<bool>>> lost_devices_;
  // The state of Tend: when it last ran, and when the last absence ended.
  absl::Time last_turn_, absence_end_ = absl::InfinitePast();
  // The last absence keeps streams from counting as idle until this time.
  absl::Time forbearance_end_ = absl::InfinitePast();
  // The total duration of the absences that waits in progress may include.
  absl::Duration absent_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_requested_ = false;
  bool reload_requested_ = false;
  bool devices_lost_ = false;
  bool draining_ = false;
  bool stuck_ = false;  // Verdict::stuck
  bool filled_;         // --ready-file has been created
  bool ending_ = false;
  std::atomic<bool> saved_{true};
  std::atomic<bool> ready_{false};  // what the health service reports for the services
  std::thread tender_;
  std::thread reloader_;
  std::unique_ptr<GpuMonitor> gpus_;    // for the metrics; null without --metrics-listen
  std::unique_ptr<HttpListener> http_;  // null without --metrics-listen; destroyed first
};

}  // namespace tessera
