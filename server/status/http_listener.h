// A small HTTP/1.1 server with a few pages for monitoring. It has one thread, supports GET and
// HEAD, and sends one response per connection. Clients cost a bounded amount of memory and time,
// and cannot keep other clients from getting a response, regardless of what they send or fail to
// read.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera {

struct HttpAnswer {
  int code = 200;
  std::string type = "text/plain; charset=utf-8";
  std::string body;
};

class HttpListener {
 public:
  // The largest head of a request, in bytes; for a larger one the response is 431.
  static constexpr std::size_t kLargestHead = 8192;
  // The maximum number of simultaneous connections. A further connection replaces the oldest one.
  static constexpr std::size_t kMostConnections = 32;

  // `path` is the request's path without the query. The listener's thread calls the handler and
  // waits for it.
  using Handler = std::function<HttpAnswer(std::string_view path)>;

  // Listens on an address as for ListenTcp and serves until destruction. Returns the errors of
  // ListenTcp.
  static absl::StatusOr<std::unique_ptr<HttpListener>> Open(const std::string& address,
                                                            Handler handler);
  ~HttpListener();
  HttpListener(const HttpListener&) = delete;
  HttpListener& operator=(const HttpListener&) = delete;

  // The address, with the port that was chosen for port 0.
  const std::string& address() const { return address_; }
  bool beyond_loopback() const { return beyond_loopback_; }

 private:
  using Time = std::chrono::steady_clock::time_point;
  struct Connection {
    int fd = -1;
    // kClosing: the response has been sent, and what the client still sends is dropped until it
    // disconnects. Closing the socket immediately could keep the client from reading the response.
    enum class State { kReading, kWriting, kClosing } state = State::kReading;
    Time deadline;  // when the state must end
    std::string head;
    std::string answer;
    std::size_t sent = 0;
  };

  HttpListener() = default;
  void Run();
  // Returns false if descriptors or other resources are exhausted.
  bool AcceptSome(int listening, Time now);
  // Returns whether the connection stays.
  bool Serve(Connection& connection, Time now);
  bool Read(Connection& connection, Time now);
  bool Write(Connection& connection, Time now);
  bool Drop(Connection& connection);
  // Returns the whole response to a request. `head` is the request up to its empty line.
  std::string Answer(std::string_view head) const;

  Handler handler_;
  std::string address_;
  bool beyond_loopback_ = false;
  std::vector<int> sockets_;
  int stop_ = -1;                      // an eventfd, which the destructor makes readable
  std::list<Connection> connections_;  // the oldest first
  std::thread thread_;
};

}  // namespace tessera
