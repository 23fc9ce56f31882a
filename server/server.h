// The server as a whole: listeners, services, health, and an orderly end.
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

// Thread safe, but for Drain and destruction, which one thread does.
class Server {
 public:
  // devices: at least one. UNAVAILABLE / CANNOT_LISTEN {address}; FAILED_PRECONDITION /
  // INSECURE_LISTENER {address} for one beyond loopback with neither TLS nor --insecure; the errors
  // of ServerTls and of the devices.
  static absl::StatusOr<std::unique_ptr<Server>> Start(
      const Options& options, std::vector<std::unique_ptr<Device>> devices);

  // Drains, unless that has been done.
  ~Server();

  // Where it listens, with the ports that were taken for port 0.
  const std::vector<std::string>& addresses() const { return listener_->addresses(); }

  // Where metrics are, with the port that was taken for port 0; empty: nowhere.
  std::string metrics_address() const { return http_ == nullptr ? "" : http_->address(); }

  // A connection without a socket. No call may be made on it after Drain: that crashes in
  // gRPC 1.51.
  std::shared_ptr<grpc::Channel> InProcessChannel();

  enum class Reason { kStopRequested, kDevicesLost };
  // Makes Wait return; callable from any thread, more than once.
  void RequestStop();
  // Has the files of TLS, tokens and ring read again soon, changed or not, and logs each result;
  // callable from any thread, more than once.
  void RequestReload();
  // Blocks until someone asks for the end or all devices have failed for good.
  Reason Wait();

  // The end: not ready in the health service; still serving for --drain-delay; then the listeners
  // close and every connection is told to go away, so that clients take their next calls elsewhere;
  // the calls in progress have --drain-timeout to finish. False: some had not, and were cut off.
  // After all devices were lost there is no delay, and what waits for them is answered with
  // DEVICE_LOST.
  bool Drain();

  // Whether no device is left to work with. Thread safe.
  bool devices_lost() const;

  // Begins or ends what profilers record of all devices (Device::SetProfiling).
  void SetProfiling(bool on);

  // Removes the files of unix: listeners; for a process that ends without Drain.
  void RemoveSockets() {
    listener_->RemoveSocketFiles();
    if (shared_memory_service_ != nullptr) shared_memory_service_->RemoveSocketFile();
  }

 private:
  explicit Server(std::unique_ptr<Core> core);
  absl::Status Listen();
  // Makes the services that the options ask for, and has gRPC serve all of them.
  absl::Status Register(grpc::ServerBuilder& builder);
  // Whether the addresses that are listened to may be served as the options say.
  absl::Status CheckCredentials();
  // Of connections that bear the mark; null: none.
  std::shared_ptr<grpc::ServerCredentials> MakeCredentials(UserMark* mark) const;
  // Reads the files of TLS, tokens and ring again if they have changed, or in any case if asked.
  void Reload(bool asked);
  void ServeStream(StreamExchange& exchange);
  HttpAnswer ServeHttp(std::string_view path);
  // Tells the health service; with the mutex.
  void SetHealth();
  // Housekeeping, many times a second: expired buffers, idle streams, stuck workers, lost devices.
  void Tend();
  struct Verdict {
    bool lost;   // no device is left to work with
    bool stuck;  // something has waited for a device for longer than --watchdog
  };
  // Gives up devices that hang, and notes which are lost.
  Verdict Judge();
  // Calls Reload every second, and when RequestReload asks for it, and looks for --ready-file. It
  // has its own thread, since the files may be on a file system that hangs.
  void WatchFiles();
  // While the process is stopped (SIGSTOP, a paused container, a host that sleeps) the clock goes
  // on, and nothing of that is a device's or a caller's fault: Tend notices by its own turns.
  void NoteAbsence(absl::Time now);
  // Ends calls whose clients have let them stand still for too long.
  void EndIdle(absl::Time now);
  // Of what has waited for so long, the time in which the process was there.
  absl::Duration Without(absl::Duration wait, absl::Time now) const;
  // Takes the buffers of lost devices away, and refuses what waits for them.
  void ClearLostDevices();

  std::unique_ptr<Core> core_;
  absl::Time start_;  // by the wall clock, before the devices are warmed up
  BufferService buffer_service_;
  ComputeService compute_service_;
  std::unique_ptr<SharedMemoryService> shared_memory_service_;  // null: without
  Health health_;
  std::unique_ptr<Reflection> reflection_;  // null: without
  // The methods that no service has registered: streams, health and reflection.
  grpc::AsyncGenericService streams_;
  const StreamExchange::Handle serve_stream_ = [this](StreamExchange& e) { ServeStream(e); };
  std::unique_ptr<Listener> listener_;
  std::optional<StreamWatch> stream_watch_;  // of its connections
  std::shared_ptr<ServerTls> tls_;           // null: without TLS
  // They outlive server_, which asks them.
  std::vector<std::shared_ptr<grpc::ServerCredentials>> credentials_;
  std::unique_ptr<CallQueues> queues_;
  std::unique_ptr<grpc::Server> server_;
  bool drained_ = false;
  std::promise<absl::Time> shutdown_at_;  // when calls that are left are cancelled
  std::future<void> shutdown_;            // the end of server_->Shutdown
  // That Tend has noticed; of each, whether what waits for it is being refused.
  std::map<const Device*, std::shared_ptr<std::atomic<bool>>> lost_devices_;
  // Of Tend: its last turn, the end of the last absence, until when nobody counts as idle because
  // of it, and how long it was away in all, since something began that still waits.
  absl::Time last_turn_, absence_end_ = absl::InfinitePast();
  absl::Time forbearance_end_ = absl::InfinitePast();
  absl::Duration absent_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_requested_ = false;
  bool reload_requested_ = false;
  bool devices_lost_ = false;
  bool draining_ = false;
  bool stuck_ = false;  // Verdict::stuck
  bool filled_;         // --ready-file has been made
  bool ending_ = false;
  std::atomic<bool> ready_{false};  // what the health service says of the services
  std::thread tender_;
  std::thread reloader_;
  std::unique_ptr<GpuMonitor> gpus_;    // for the metrics; null: without
  std::unique_ptr<HttpListener> http_;  // null: without; goes before what it tells of
};

}  // namespace tessera
