// Addresses of servers, as ClientOptions::server has them. Not for users of the library.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace tessera {

// Of one address, without those around it in a list. INVALID_ARGUMENT / BAD_ADDRESS {address}: it is
// neither HOST:PORT, [IPV6]:PORT, unix:PATH nor unix-abstract:NAME, nor one of these behind a scheme
// of gRPC's.
absl::Status CheckAddress(std::string_view address);

// Whether what is sent to every address of a list, separated by commas, stays on this host for
// certain. What is not understood does not.
bool StaysHere(std::string_view servers);

// The address in the form that gRPC reads, with the characters of a socket's path encoded that mean
// something in a URI. "%20" is a blank already, as for the server and for every client of gRPC.
std::string TargetOf(std::string_view address);

// The proxy that gRPC would reach an address by over TLS.
struct Proxy {
  std::string variable;  // of the environment that names it
  std::string value;
  // Whether a network in no_proxy holds the address, of which gRPC knows names alone.
  bool excepted = false;
};
// Nothing: the environment names none, or the address is that of a socket.
std::optional<Proxy> ProxyFor(std::string_view address);

}  // namespace tessera
