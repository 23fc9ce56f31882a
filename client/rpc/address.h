// Parses and checks the server addresses in ClientOptions::server. Internal to the library.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace tessera {

// Checks a single address. Returns INVALID_ARGUMENT / BAD_ADDRESS {address} unless it is HOST:PORT,
// [IPV6]:PORT, unix:PATH or unix-abstract:NAME, or one of these after a gRPC scheme.
absl::Status CheckAddress(std::string_view address);

// Whether every address of a comma-separated list is certain to lead to this host. Returns false
// for an address that cannot be parsed.
bool StaysHere(std::string_view servers);

// Returns the address as a gRPC target: characters in a socket's path that have a special meaning
// in a URI are percent-encoded. Existing escapes such as "%20" are kept, because the server and
// other gRPC clients decode them.
std::string TargetOf(std::string_view address);

// The proxy through which gRPC would connect to an address over TLS.
struct Proxy {
  std::string variable;  // the environment variable that names the proxy
  std::string value;     // without the user and the password that it may contain
  // Whether no_proxy exempts the address by a network such as 10.0.0.0/8. gRPC itself compares only
  // names.
  bool excepted = false;
};
// Returns nullopt if the environment names no proxy or the address is a Unix socket.
std::optional<Proxy> ProxyFor(std::string_view address);

}  // namespace tessera
