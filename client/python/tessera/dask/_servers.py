"""The servers that a Dask process uses: its own, and those from which it has handles."""

import threading
from typing import Any, Dict, Mapping, Optional, Sequence, Union

from .._client import Client, connect

_lock = threading.Lock()
_own: Optional[Client] = None
_own_address = ""
_clients: Dict[str, Client] = {}
_options: Dict[str, Any] = {}


def use(address: str, **options: Any) -> Client:
    """Sets the server of this process, at host:port. The chunks of this process are created and
    computed there. Other servers must be able to reach this server at this address. options are the
    options of connect(), for this and other servers."""
    global _own, _own_address
    client = connect(address, **options)
    with _lock:
        _options.update(options)
        _own, _own_address = client, address
        _clients[address] = client
    return client


def client_of(address: str) -> Client:
    """Returns a client of any server. Raises Unreachable."""
    with _lock:
        client = _clients.get(address)
    if client is None:
        client = connect(address, **_options)
        with _lock:
            client = _clients.setdefault(address, client)
    return client


def own_address() -> str:
    """Returns the address of this process's server, or an empty string if it has none."""
    return _own_address


def own() -> Client:
    """Returns the client of this process's server. Raises RuntimeError if it has none."""
    if _own is None:
        raise RuntimeError(
            "this process has no server: register tessera.dask.Servers for the workers, or call"
            " tessera.dask.use(address)"
        )
    return _own


class Servers:
    """A worker plugin that gives each worker its server. servers is a list or a dict. If it is a
    list, a worker gets the entry whose index is the number in the worker's name, modulo the length
    of the list. A dict maps the workers' names or hosts to servers. options are the options of
    connect()."""

    name = "tessera-servers"

    def __init__(self, servers: Union[Sequence[str], Mapping[str, str]], **options: Any) -> None:
        self._by_name = dict(servers) if isinstance(servers, Mapping) else {}
        self._by_number = [] if isinstance(servers, Mapping) else list(servers)
        self._options = options

    def setup(self, worker: Any) -> None:
        """Called by distributed in each worker."""
        use(self.server_of(str(worker.name), worker.address), **self._options)

    def server_of(self, name: str, address: str) -> str:
        """Returns the address of a worker's server. Raises KeyError if the dict has neither the
        worker's name nor its host."""
        if self._by_number:
            digits = "".join(c for c in name if c.isdigit())
            return self._by_number[int(digits or 0) % len(self._by_number)]
        host = address.rpartition("://")[2].rpartition(":")[0]
        for key in (name, host):
            if key in self._by_name:
                return self._by_name[key]
        raise KeyError(f"there is no server for worker {name} or host {host}")
