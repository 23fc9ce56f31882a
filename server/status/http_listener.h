// A small HTTP/1.1 server for a few pages, made for monitoring: one thread, GET and HEAD, and one
// answer a connection. Whatever clients send or do not read, they cost it a bounded amount of
// memory and time, and keep nobody else from an answer.
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
  // The largest head of a request, in bytes: beyond it the answer is 431.
  static constexpr std::size_t kLargestHead = 8192;
  // Connections at once: another one takes the place of the one that is open longest.
  static constexpr std::size_t kMostConnections = 32;

  // path: of the request, without its query. Called on the listener's thread, which waits for it.
  using Handler = std::function<HttpAnswer(std::string_view path)>;

  // Listens on an address as of ListenTcp and serves until destruction. The errors of ListenTcp.
  static absl::StatusOr<std::unique_ptr<HttpListener>> Open(const std::string& address,
                                                            Handler handler);
  ~HttpListener();
  HttpListener(const HttpListener&) = delete;
  HttpListener& operator=(const HttpListener&) = delete;

  // With the port that was taken for port 0.
  const std::string& address() const { return address_; }
  bool beyond_loopback() const { return beyond_loopback_; }

 private:
  using Time = std::chrono::steady_clock::time_point;
  struct Connection {
    int fd = -1;
    // kClosing: the answer has left, and what the client still sends is dropped until it leaves.
    // Closing the socket at once would take the answer from it.
    enum class State { kReading, kWriting, kClosing } state = State::kReading;
    Time deadline;  // of the state
    std::string head;
    std::string answer;
    std::size_t sent = 0;
  };

  HttpListener() = default;
  void Run();
  // False: there are no descriptors, or other resources.
  bool AcceptSome(int listening, Time now);
  // Whether the connection stays.
  bool Serve(Connection& connection, Time now);
  bool Read(Connection& connection, Time now);
  bool Write(Connection& connection, Time now);
  bool Drop(Connection& connection);
  // The whole answer to a request; head: up to its empty line.
  std::string Answer(std::string_view head) const;

  Handler handler_;
  std::string address_;
  bool beyond_loopback_ = false;
  std::vector<int> sockets_;
  int stop_ = -1;                      // an eventfd, readable from the destructor on
  std::list<Connection> connections_;  // the one that is open longest first
  std::thread thread_;
};

}  // namespace tessera
