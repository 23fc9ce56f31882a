"""Several servers that share names, and the home of each name."""

import pathlib
import re
from typing import Any, Dict, Mapping, Union

from ._client import connect
from .wire._connect import route_of

_MASK = (1 << 64) - 1


def _fnv1a(text: str) -> int:
    found = 0xCBF29CE484222325
    for byte in text.encode():
        found = (found ^ byte) * 0x100000001B3 & _MASK
    return found


def _mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


class Ring:
    """The clients of several servers, each of which is the home of a part of the names (rendezvous
    hashing). The servers were started with the same list (--ring).

        ring = ts.Ring("ring.txt")                  # or {"a": "gpu-0:50051", "b": "gpu-1:50051"}
        t = ring.home("run7/weights")               # a ts.Client
        t["run7/weights"] @ t["run7/batch"]         # names of one folder have one home

    servers is the path of a file with one line per server, which has the server's name and
    host:port, or a dict that maps names to addresses. options are the options of connect() for each
    server. The ring connects to a server when the server is first needed. Raises ValueError if the
    file or dict is not a list of servers.
    """

    def __init__(self, servers: Union[str, Mapping[str, str]], **options: Any) -> None:
        self.servers: Dict[str, str] = dict(
            sorted((_read(servers) if isinstance(servers, str) else servers).items())
        )
        if not self.servers:
            raise ValueError("a ring must have at least one server")
        self._options = options
        self._hashes = {name: _fnv1a(name) for name in self.servers}
        self._clients: Dict[str, Any] = {}

    def server(self, name: str) -> str:
        """Returns the name of the server that is the home of a buffer's name."""
        route = _mix(_fnv1a(route_of(name)))
        return max(self._hashes, key=lambda server: _mix(self._hashes[server] ^ route))

    def home(self, name: str) -> Any:
        """Returns the client of a name's home. Raises Unreachable."""
        server = self.server(name)
        client = self._clients.get(server)
        if client is None:
            client = self._clients.setdefault(
                server, connect(self.servers[server], **self._options)
            )
        return client

    def close(self) -> None:
        """Closes the clients."""
        while self._clients:
            self._clients.popitem()[1].close()

    def __enter__(self) -> "Ring":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _read(path: str) -> Dict[str, str]:
    servers: Dict[str, str] = {}
    lines = pathlib.Path(path).read_text(encoding="utf-8-sig").split("\n")
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not re.fullmatch(r"[a-zA-Z0-9._-]{1,64}", words[0]):
            raise ValueError(f"{path}, line {number}: the line must have a name and an address")
        if words[0] in servers:
            raise ValueError(f"{path}, line {number}: an earlier line has the same name")
        servers[words[0]] = words[1]
    return servers
