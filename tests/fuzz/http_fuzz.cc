// HTTP requests for the page and the metrics over a socket, and anything else that a client may
// send there.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "server/status/http_listener.h"
#include "tests/fuzz/fuzz.h"

namespace tessera {
namespace {

std::uint16_t Port() {
  static const auto listener = HttpListener::Open("127.0.0.1:0", [](std::string_view path) {
    Require(!path.empty() && path[0] == '/' && path.find('?') == path.npos, "a path that is none");
    return HttpAnswer{.code = path == "/" ? 200 : 404, .body = std::string(path)};
  });
  Require(listener.ok(), "no listener");
  const std::string& address = (*listener)->address();
  return static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
}

void Check(std::string_view request) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(Port());
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  // A million connections must not leave their ports in TIME_WAIT.
  const linger reset{1, 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  Require(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0, "no connection");
  static_cast<void>(send(fd, request.data(), request.size(), MSG_NOSIGNAL));
  shutdown(fd, SHUT_WR);
  std::string answer;
  char part[4096];
  for (;;) {
    AwaitInput(fd);
    const ssize_t size = recv(fd, part, sizeof part, 0);
    if (size <= 0) break;
    answer.append(part, static_cast<std::size_t>(size));
  }
  close(fd);
  Require(answer.empty() || answer.rfind("HTTP/1.1 ", 0) == 0, "an answer that is no HTTP");
  const bool whole = request.substr(0, HttpListener::kLargestHead).find("\r\n\r\n") != request.npos;
  Require(!whole || !answer.empty(), "a whole request without an answer");
}

}  // namespace
}  // namespace tessera

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tessera::Check(tessera::Text(data, size));
  return 0;
}
