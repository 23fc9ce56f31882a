#include "client/rpc/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/printable.h"

namespace tessera {
namespace {

// An IP address. IPv4 addresses are stored as IPv4-mapped IPv6 addresses.
using Bits = std::array<std::uint8_t, 16>;

std::optional<Bits> Parse(absl::string_view text, bool v6) {
  Bits bits = {};
  if (!v6) bits[10] = bits[11] = 0xff;
  if (::inet_pton(v6 ? AF_INET6 : AF_INET, std::string(text).c_str(), &bits[v6 ? 0 : 12]) != 1)
    return std::nullopt;
  return bits;
}

// Whether the first `prefix` bits of both addresses are the same.
bool Within(const Bits& bits, const Bits& network, int prefix) {
  for (int i = 0; i < prefix; ++i) {
    const auto byte = static_cast<std::size_t>(i / 8);
    if (((bits[byte] ^ network[byte]) >> (7 - i % 8) & 1) != 0) return false;
  }
  return true;
}

struct HostPort {
  absl::string_view host;  // without brackets
  bool bracketed = false;
  absl::string_view port;
};

// Splits HOST:PORT or [HOST]:PORT. Returns nullopt if the text is neither.
std::optional<HostPort> Split(absl::string_view text) {
  HostPort parts;
  parts.bracketed = absl::ConsumePrefix(&text, "[");
  const std::size_t end = text.find(parts.bracketed ? "]:" : ":");
  if (end == text.npos) return std::nullopt;
  parts.host = text.substr(0, end);
  parts.port = text.substr(end + (parts.bracketed ? 2 : 1));
  return parts;
}

bool IsPort(absl::string_view text) {
  int number = 0;
  return !text.empty() && text.size() <= 5 &&
         std::all_of(text.begin(), text.end(), absl::ascii_isdigit) &&
         absl::SimpleAtoi(text, &number) && number <= 65535;
}

// Removes a leading "unix:" or "unix-abstract:" and returns whether there was one.
bool ConsumeSocket(absl::string_view* text) {
  return absl::ConsumePrefix(text, "unix:") || absl::ConsumePrefix(text, "unix-abstract:");
}

bool IsLoopback(absl::string_view address) {
  if (absl::string_view path = address; ConsumeSocket(&path))
    return !path.empty() && (!absl::StartsWith(path, "//") ||
                             (absl::StartsWith(path, "///") && absl::StartsWith(address, "unix:")));
  const bool v4 = absl::ConsumePrefix(&address, "ipv4:");
  const bool v6 = !v4 && absl::ConsumePrefix(&address, "ipv6:");
  // Only an empty authority is accepted, because any other authority names a DNS server.
  if (v4 || v6 || absl::ConsumePrefix(&address, "dns:")) absl::ConsumePrefix(&address, "///");
  const std::optional<HostPort> parts = Split(address);
  if (!parts || !IsPort(parts->port)) return false;
  if (parts->bracketed ? v4 : v6) return false;
  if (parts->host == "localhost") return !parts->bracketed && !v4;
  const std::optional<Bits> bits = Parse(parts->host, parts->bracketed);
  static const Bits v4_loopback = *Parse("127.0.0.0", false);
  static const Bits v6_loopback = *Parse("::1", true);
  return bits && (Within(*bits, v4_loopback, 96 + 8) || *bits == v6_loopback);
}

// Returns what is wrong with HOST:PORT, or "" if it is valid.
absl::string_view WrongWith(absl::string_view address) {
  constexpr absl::string_view kForms = "an address must be HOST:PORT, [IPV6]:PORT or unix:/PATH";
  const std::optional<HostPort> parts = Split(address);
  if (!parts || parts->host.empty()) return kForms;
  const bool digits = !parts->port.empty() &&
                      std::all_of(parts->port.begin(), parts->port.end(), absl::ascii_isdigit);
  if (!digits) return kForms;
  // gRPC would reduce a port above 65535 modulo 65536. No client can connect to port 0.
  if (!IsPort(parts->port)) return "it has a port above 65535";
  if (std::all_of(parts->port.begin(), parts->port.end(), [](char c) { return c == '0'; }))
    return "it has port 0";
  // An IPv6 zone follows a percent sign.
  if (parts->bracketed)
    return Parse(parts->host.substr(0, parts->host.find('%')), true) ? "" : kForms;
  const bool name = std::all_of(parts->host.begin(), parts->host.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '-' || c == '_' || c >= 0x80;
  });
  return name ? "" : kForms;
}

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

absl::Status CheckAddress(std::string_view text) {
  absl::string_view address = Absl(text);
  absl::string_view wrong;
  if (ConsumeSocket(&address)) {
    if (address.empty()) wrong = "the socket path is missing";
  } else if (absl::StartsWith(address, "xds:") || absl::StartsWith(address, "vsock:") ||
             absl::StartsWith(address, "google-c2p:")) {
    // Only gRPC knows and checks the form of these addresses.
  } else {
    const bool numbers = absl::StartsWith(address, "ipv4:") || absl::StartsWith(address, "ipv6:");
    if (numbers || absl::StartsWith(address, "dns:")) {
      address.remove_prefix(address.find(':') + 1);
      if (absl::ConsumePrefix(&address, "//"))
        address.remove_prefix(std::min(address.find('/'), address.size() - 1) + 1);
    }
    wrong = WrongWith(address);
  }
  if (wrong.empty()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_ADDRESS",
                   absl::StrCat("'", Absl(Printable(text)), "' is not a server address: ", wrong),
                   {{"address", std::string(text)}});
}

bool StaysHere(std::string_view servers) {
  const std::vector<absl::string_view> all = absl::StrSplit(Absl(servers), ',');
  // gRPC reads a scheme of numeric addresses only at the beginning of a list and applies it to all
  // addresses.
  absl::string_view scheme;
  for (const absl::string_view known : {"ipv4:", "ipv6:"})
    if (absl::StartsWith(all.front(), known)) scheme = known;
  if (all.size() > 1 && absl::StartsWith(all.front(), "unix")) return false;
  return std::all_of(all.begin(), all.end(), [&](absl::string_view address) {
    address = absl::StripAsciiWhitespace(address);
    return IsLoopback(absl::StartsWith(address, scheme) ? std::string(address)
                                                        : absl::StrCat(scheme, address));
  });
}

std::string TargetOf(std::string_view text) {
  absl::string_view address = Absl(text);
  if (!ConsumeSocket(&address)) return std::string(text);
  std::string target(text.substr(0, text.size() - address.size()));
  for (std::size_t i = 0; i < address.size(); ++i) {
    const char c = address[i];
    const bool encoded = c == '%' && i + 2 < address.size() &&
                         absl::ascii_isxdigit(static_cast<unsigned char>(address[i + 1])) &&
                         absl::ascii_isxdigit(static_cast<unsigned char>(address[i + 2]));
    const bool plain = encoded || absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
                       absl::string_view("-._~/").find(c) != absl::string_view::npos;
    if (plain) {
      target += c;
    } else {
      absl::StrAppend(&target, "%", absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad2));
    }
  }
  return target;
}

namespace {

// Returns a proxy's URL without its user and password.
std::string WithoutUser(std::string url) {
  const std::size_t at = url.rfind('@'), scheme = url.find("://");
  if (at == std::string::npos) return url;
  const std::size_t user = scheme < at ? scheme + 3 : 0;
  return url.erase(user, at + 1 - user);
}

}  // namespace

std::optional<Proxy> ProxyFor(std::string_view text) {
  absl::string_view address = Absl(text);
  if (ConsumeSocket(&address)) return std::nullopt;
  Proxy proxy;
  // gRPC reads the variables in this order.
  for (const char* name : {"grpc_proxy", "https_proxy", "http_proxy"}) {
    proxy = {name, WithoutUser(Variable(name))};
    if (!proxy.value.empty()) break;
  }
  if (proxy.value.empty()) return std::nullopt;
  std::string exceptions = Variable("no_grpc_proxy");
  if (exceptions.empty()) exceptions = Variable("no_proxy");
  const std::optional<HostPort> parts = Split(address);
  if (!parts) return proxy;
  const std::optional<Bits> bits = Parse(parts->host, parts->bracketed);
  for (absl::string_view entry : absl::StrSplit(exceptions, ',', absl::SkipWhitespace())) {
    entry = absl::StripAsciiWhitespace(entry);
    if (absl::EndsWithIgnoreCase(parts->host, entry)) return std::nullopt;  // as gRPC does
    const std::pair<absl::string_view, absl::string_view> network =
        absl::StrSplit(entry, absl::MaxSplits('/', 1));
    const std::optional<Bits> v4 = Parse(network.first, false);
    const std::optional<Bits> from = v4 ? v4 : Parse(network.first, true);
    int prefix = 0;
    if (!bits || !from || !absl::SimpleAtoi(network.second, &prefix)) continue;
    const int longest = v4 ? 32 : 128;
    if (prefix < 0 || prefix > longest) continue;
    if (Within(*bits, *from, 128 - longest + prefix)) proxy.excepted = true;
  }
  return proxy;
}

}  // namespace tessera
