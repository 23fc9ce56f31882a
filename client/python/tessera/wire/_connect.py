"""How to reach a server and authenticate: options, credentials, channel settings."""

import dataclasses
import datetime
import ipaddress
import math
import os
import pathlib
import re
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import grpc

from . import _protocol as p
from ._errors import read

Ttl = Union[None, str, float, int, datetime.timedelta]
# "all", or the names of devices.
Placement = Union[str, Sequence[str]]
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
PING = "/grpc.health.v1.Health/Check"
# Error codes that only a server sends.
_ANSWERS = (
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.NOT_FOUND,
)
# Timeout, in seconds, of the call that finds out why there is no connection.
WHY_S = 1.0
# Pause, in seconds, before another PING if a server went away.
PAUSE_S = 0.1
# How many seconds a closing client waits for calls whose outcomes do not matter.
LAST_CALLS_S = 1.0
_Duration = p.message("google.protobuf.Duration")


def route_of(name: str) -> str:
    """Returns the part before a name's last "/", or the whole name. Names with the same route have
    the same home."""
    return name.rpartition("/")[0] if "/" in name else name


def devices_of(placement: Placement) -> List[str]:
    """Returns devices in the form in which messages list them."""
    if isinstance(placement, str):
        return [placement] if placement else []
    return list(placement)


def duration(ttl: Ttl) -> Any:
    """Returns a Duration from seconds, a timedelta or a text such as "90s", "10m" or "1.5h". None
    gives None."""
    if ttl is None:
        return None
    if isinstance(ttl, datetime.timedelta):
        seconds = ttl.total_seconds()
    elif isinstance(ttl, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", ttl)
        if not found:
            raise ValueError(f'ttl {ttl!r} is not a time: write it as "90s", "10m", "1.5h" or "7d"')
        seconds = float(found[1]) * _UNITS[found[2]]
    else:
        seconds = float(ttl)
    if not abs(seconds) < 1e11:
        raise ValueError(f"ttl {ttl!r} must be at most 3000 years")
    return _Duration(seconds=int(seconds), nanos=int(math.fmod(seconds, 1) * 1e9))


def trimmed(text: str) -> str:
    """Returns a text without a byte order mark and surrounding whitespace, which are easy to miss
    in files and variables."""
    return text[text.startswith("\ufeff") :].strip(" \t\n\v\f\r")


def checked_token(token: str) -> str:
    """Returns a trimmed token. Raises ValueError if no server would accept it."""
    token = trimmed(token)
    if not re.fullmatch("[!-~]{1,1024}", token):
        raise ValueError("a token must be 1 to 1024 ASCII characters without spaces")
    return token


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of connect(). Times are in seconds."""

    target: str
    timeout: float = 60.0
    connect_timeout: float = 10.0
    stall_timeout: float = 60.0
    retry_refused: bool = True
    shared_memory: bool = True
    unnamed_ttl: Ttl = "24h"
    tls: bool = False
    tls_ca: Optional[str] = None
    tls_cert: Optional[str] = None
    tls_key: Optional[str] = None
    tls_server_name: Optional[str] = None
    route: Optional[str] = None
    token: Optional[str] = dataclasses.field(default=None, repr=False)
    token_file: Optional[str] = None

    def __post_init__(self) -> None:
        for name in ("target", "tls_server_name", "route"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, trimmed(getattr(self, name)))
        try:
            hosts_of(self.target)
        except (ValueError, AttributeError):
            raise ValueError(
                f"target {self.target!r} is not an address: write host:port, [IPv6 address]:port or"
                " unix:path; a port is at most 65535"
            ) from None
        for name in ("timeout", "connect_timeout", "stall_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name} {value!r} must be a number of seconds above 0")
        duration(self.unnamed_ttl)
        if self.route is not None and not re.fullmatch("[a-zA-Z0-9._/-]+", self.route):
            raise ValueError(f"route must be a buffer's name, not {self.route!r}")
        if self.token is None and self.token_file is None:
            object.__setattr__(self, "token", os.environ.get("TESSERA_TOKEN") or None)
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file are mutually exclusive: give only one of them")
        if self.token is not None:
            object.__setattr__(self, "token", checked_token(self.token))
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key must be given together")
        has_token = self.token is not None or self.token_file is not None
        if has_token and not self.secure and not is_loopback(self.target):
            raise ValueError(
                f"a token would travel in the clear to {self.target}: give tls_ca, or tls=True for"
                " a certificate that the system trusts"
            )

    @property
    def secure(self) -> bool:
        return bool(self.tls or self.tls_ca or self.tls_cert)

    def unreachable(self, why: str) -> str:
        """Returns the reason why there is no connection. why: what gRPC reports for a call that
        does not wait for a connection."""
        why = why.rpartition("last error: ")[2]
        if "certificate" in why and "alert" not in why:
            return (
                f"the certificate of the server at {self.target} was refused ({why}): its authority"
                " is not trusted here (tls_ca), it is not for this name (tls_server_name), or it is"
                " not valid now"
            )
        if self.secure:
            return (
                f"no server answers at {self.target} over TLS ({why}), or the server requires a"
                " certificate (tls_cert)"
            )
        return (
            f"no server answers at {self.target} ({why}), or the server requires TLS (tls_ca,"
            " tls=True)"
        )

    def credentials(self) -> Any:
        """Returns the credentials of a secure channel, or None for a plain one."""
        if not self.secure:
            return None
        ca, cert, key = (
            pathlib.Path(path).read_bytes() if path else None
            for path in (self.tls_ca, self.tls_cert, self.tls_key)
        )
        return grpc.ssl_channel_credentials(ca, key, cert)

    def metadata(self) -> Optional[Tuple[Tuple[str, str], ...]]:
        """Returns the metadata of a call. A token file is read each time, because tokens are
        renewed."""
        token = self.token
        if self.token_file is not None:
            token = checked_token(pathlib.Path(self.token_file).read_text(encoding="utf-8-sig"))
        if token is None and self.route is None:
            return None
        found: Tuple[Tuple[str, str], ...] = ()
        if token is not None:
            found = (("authorization", f"Bearer {token}"),)
        if self.route is not None:
            found += (("tessera-route", route_of(self.route)),)
        return found

    def channel_options(self) -> List[Tuple[str, Any]]:
        options: List[Tuple[str, Any]] = [
            ("grpc.max_receive_message_length", 8 << 20),
            # How many bytes a server may send before the interpreter has read any of them.
            ("grpc.http2.lookahead_bytes", 8 << 20),
            # A message of a download is read by the thread that waits for it, not by a thread of
            # the channel.
            ("SingleThreadedUnaryStream", 1),
            # Channels to one server share a connection unless each has its own pool.
            ("grpc.use_local_subchannel_pool", 1),
            # gRPC's default pauses grow to two minutes.
            ("grpc.initial_reconnect_backoff_ms", 100),
            # How soon after a failure a name is looked up again, because its address may have
            # changed. gRPC's default of 30 s is longer than callers wait.
            ("grpc.dns_min_time_between_resolutions_ms", 500),
            # Despite its name, min_reconnect_backoff_ms limits one connection attempt;
            # max_reconnect_backoff_ms limits the pause between attempts.
            ("grpc.min_reconnect_backoff_ms", 5000),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        if self.stall_timeout < 86400:
            # TCP_USER_TIMEOUT ends a connection when the other end acknowledges nothing for
            # `silence` milliseconds. Otherwise, after a network outage, calls would wait for TCP's
            # next retransmission, which may come only after another wait as long as the outage.
            # Stalled transfers fail earlier. gRPC sets TCP_USER_TIMEOUT to keepalive_timeout_ms
            # only if keepalive_time_ms enables pings; its value here delays pings by 24 days.
            silence = int(max(1.5 * self.stall_timeout, 1) * 1000)
            options.append(("grpc.keepalive_time_ms", 2**31 - 2))
            options.append(("grpc.keepalive_timeout_ms", silence))
        if not self.secure:
            # A proxy named by the environment could read unencrypted data, including tokens.
            options.append(("grpc.enable_http_proxy", 0))
        if self.tls_server_name:
            options.append(("grpc.ssl_target_name_override", self.tls_server_name))
        return options


_process: Optional[int] = None  # The process that created the first channel.


def check_process() -> None:
    """Raises RuntimeError in a fork of the process that created the first channel. A fork has
    gRPC's state but not its threads, so calls in a fork may wait forever, and may end the original
    process too."""
    if os.getpid() != _process:
        raise RuntimeError(
            "gRPC does not work in a fork of a process that has connected: fork before the first"
            " connect(), or start processes with multiprocessing's spawn or forkserver"
        )


def channel(space: Any, options: Options) -> Any:
    """Creates a channel of grpc or grpc.aio. Raises RuntimeError as check_process() does."""
    global _process
    _process = _process or os.getpid()
    check_process()
    credentials = options.credentials()
    if credentials is None:
        return space.insecure_channel(options.target, options.channel_options())
    return space.secure_channel(options.target, credentials, options.channel_options())


def calls_of(made: Any) -> Dict[str, Any]:
    """Returns callables for the protocol's methods, with serialised requests and responses."""
    makers = {"Download": made.unary_stream, "Upload": made.stream_unary}
    calls = {PING: made.unary_unary(PING)}
    for name, method in p.METHODS.items():
        calls[name] = makers.get(name, made.unary_unary)(method.path)
    return calls


def answer_of(method: str, answer: bytes) -> Any:
    """Returns the message of a response."""
    return read(p.METHODS[method].response, answer)


def answered(error: Any) -> Optional[bool]:
    """Interprets the RpcError of a PING that waits for a connection. Returns whether a server has
    responded, or None if it went away again or gRPC itself failed."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return False
    return True if error.code() in _ANSWERS else None


def _host_of(address: str, scheme: str = "") -> str:
    """Returns the host of HOST:PORT or [ADDRESS]:PORT. With the scheme ipv4 or ipv6, the host must
    be an address of that kind. Raises ValueError if the text is neither."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([a-zA-Z0-9._-]+)):([0-9]{1,5})", address)
    if found is None or int(found[3]) > 65535:
        raise ValueError("write host:port, [IPv6 address]:port or unix:path")
    if found[1] is not None or scheme == "ipv4":
        (ipaddress.IPv4Address if found[1] is None else ipaddress.IPv6Address)(found[1] or found[2])
    if scheme == "ipv6" and found[1] is None or scheme == "ipv4" and found[2] is None:
        raise ValueError(f"{scheme}: must be followed by {scheme} addresses")
    return found[1] or found[2]


def hosts_of(target: str) -> List[str]:
    """Returns the hosts of a gRPC target, or none for a socket. The rules are in
    tests/loopback_cases.txt. Raises ValueError if the target is not understood."""
    scheme, colon, rest = target.partition(":")
    if scheme in ("unix", "unix-abstract") and colon:
        rest = rest[2:] if rest.startswith("///") and scheme == "unix" else rest
        if not rest or rest.startswith("//") or "," in rest:
            raise ValueError("write unix:path")
        return []
    if scheme not in ("dns", "ipv4", "ipv6") or not colon or re.fullmatch("[0-9]+", rest):
        return [_host_of(target)]
    rest = rest[3:] if rest.startswith("///") else rest
    if scheme == "dns":
        # The target may name the name server to query: dns://SERVER/NAME.
        server, slash, name = rest[2:].partition("/")
        if rest.startswith("//") and server and slash:
            _host_of(name)
            return [rest]  # The name server decides what the name resolves to.
        return [_host_of(rest)]
    return [_host_of(address, scheme) for address in rest.split(",")]


def is_loopback(target: str) -> bool:
    """Returns whether everything that is sent to a target is certain to stay on this host."""
    try:
        hosts = hosts_of(target)
    except ValueError:
        return False
    return all(host == "localhost" or _is_loopback_address(host) for host in hosts)


def _is_loopback_address(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
