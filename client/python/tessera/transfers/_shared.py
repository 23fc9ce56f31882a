"""Transfers through memory that a server on the same host shares (proto/tessera/v1/
shared_memory.proto).

This works only on Linux. A client has one region with SLOTS parts. A transfer takes at most two of
them, so that the server copies one while the client fills or reads the other.
"""

import fcntl
import mmap
import os
import select
import socket
import threading
import time
from typing import Any, List, Optional, Tuple

import numpy as np
import numpy.typing as npt

from ..wire import _errors
from ..wire import _protocol as p

SLOT = 16 << 20
SLOTS = 4
# The minimum number of bytes for shared memory. For fewer, streams are as fast.
LEAST = 4 << 20
# In seconds: when to ask a server that refused shared memory again, and how long a server may take
# to respond.
ASK_AGAIN_S = 60.0
_HANDSHAKE_S = 10.0
_LONGEST_ANSWER = 64 << 10
# From linux/fcntl.h. Python 3.8 and later define these if the C library does.
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 2, 4


class Region:
    """Memory that the server also maps, until the socket is closed."""

    def __init__(self, path: str, seconds: float) -> None:
        """path is the path of the server's socket. Raises OSError or Error if no memory can be
        shared within this number of seconds."""
        size = SLOT * SLOTS
        file = os.memfd_create("tessera", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(file, 0, size)
            # The memory is mapped before the server gets the file, because the server forbids
            # further writable mappings.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._memory = mmap.mmap(file, size, flags=flags)
            fcntl.fcntl(file, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self.token = self._register(path, file, seconds)
            except BaseException:
                self._socket.close()
                raise
        finally:
            os.close(file)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        self._free = list(range(SLOTS))
        self._lock = threading.Lock()

    def _register(self, path: str, file: int, seconds: float) -> bytes:
        self._socket.settimeout(min(seconds, _HANDSHAKE_S))
        self._socket.connect(path)
        socket.send_fds(self._socket, [b"tessera.v1"], [file])
        answer = _errors.read(p.RegisterRegionResponse, self._socket.recv(_LONGEST_ANSWER))
        if not answer.region:
            raise _errors.from_step(answer)
        return answer.region  # type: ignore[no-any-return]

    @property
    def connected(self) -> bool:
        """Whether the socket is open. After the handshake, the server sends no more data on it, so
        a readable socket is closed."""
        return self._socket.fileno() >= 0 and not select.select([self._socket], [], [], 0)[0]

    def close(self) -> None:
        """Closes the socket. The memory is freed with the last reference, because the server may
        still be writing."""
        self._socket.close()

    def take(self, size: int) -> List[int]:
        """Returns parts for a transfer of this number of bytes, or none if other transfers use all
        of them."""
        with self._lock:
            count = min(1 if size <= SLOT else 2, len(self._free))
            return [self._free.pop() for _ in range(count)]

    def give_back(self, slots: List[int]) -> None:
        with self._lock:
            self._free += slots

    def part(self, slot: int, size: int) -> "npt.NDArray[np.uint8]":
        return self._bytes[slot * SLOT : slot * SLOT + size]


def share(path: str, seconds: float) -> Optional[Region]:
    """Returns a region, or None if none can be shared: the server is in another container, belongs
    to another user, lacks space, or does not respond within this number of seconds."""
    try:
        return Region(path, seconds)
    except (OSError, _errors.Error):
        return None


class Transfer:
    """One array's transfer through a region, part by part and in order. begin() returns the next
    call while there is a free slot and bytes are left. finish() takes the responses in the order of
    the calls.

    done: the number of bytes that have arrived, without gaps. moved: the time.monotonic() value
    when the last bytes arrived; None if no bytes have arrived.
    """

    method = ""

    def __init__(
        self, region: Region, name: str, version: int, at: int, data: Any, report: Any
    ) -> None:
        """data: bytes to read, or an array of uint8 to fill. Its first byte is byte `at` of the
        buffer."""
        self.region = region
        self.slots = region.take(len(data))
        self._name, self._version, self._at = name, version, at
        self._data = data
        self._report = report
        self._free = list(self.slots)
        self._under_way: List[Tuple[int, int, int]] = []  # Slot, begin, size.
        self._begun = 0
        self.done = 0
        self.moved: Optional[float] = None

    def begin(self) -> Optional[bytes]:
        """Returns the request of the next call, or None if none can begin now."""
        size = min(SLOT, len(self._data) - self._begun)
        if not self._free or size == 0:
            return None
        slot = self._free.pop()
        begin, self._begun = self._begun, self._begun + size
        self._under_way.append((slot, begin, size))
        shared = p.RegionRange(region=self.region.token, offset=slot * SLOT, size=size)
        return self._request(slot, begin, size, shared)

    def _request(self, slot: int, begin: int, size: int, shared: Any) -> bytes:
        raise NotImplementedError

    def _take(self, slot: int, begin: int, size: int, answer: Any) -> None:
        raise NotImplementedError

    def finish(self, answer: Any) -> None:
        slot, begin, size = self._under_way.pop(0)
        self._take(slot, begin, size, answer)
        self._free.append(slot)
        self.done = begin + size
        self.moved = time.monotonic()

    def tell(self) -> None:
        """Calls the caller's progress function."""
        if self._report is not None:
            self._report(self.done)

    def end(self) -> None:
        """Returns the parts. If a call has no response yet, the server may still write to its part,
        so the region is abandoned."""
        if self._under_way:
            self.region.close()
        else:
            self.region.give_back(self.slots)


class SharedUpload(Transfer):
    """A transfer into a draft."""

    method = "UploadShared"

    def _request(self, slot: int, begin: int, size: int, shared: Any) -> bytes:
        part = self._data[begin : begin + size]
        self.region.part(slot, size)[:] = np.frombuffer(part, np.uint8)
        request = p.METHODS[self.method].request(
            name=self._name, version=self._version, offset=self._at + begin, source=shared
        )
        return request.SerializeToString()  # type: ignore[no-any-return]

    def _take(self, slot: int, begin: int, size: int, answer: Any) -> None:
        pass


class SharedDownload(Transfer):
    """A transfer from one version of a buffer."""

    method = "DownloadShared"

    def _request(self, slot: int, begin: int, size: int, shared: Any) -> bytes:
        request = p.METHODS[self.method].request(
            name=self._name, version=self._version, offset=self._at + begin, target=shared
        )
        return request.SerializeToString()  # type: ignore[no-any-return]

    def _take(self, slot: int, begin: int, size: int, answer: Any) -> None:
        if answer.size != size:
            raise _errors.damaged("has bytes that were not requested")
        self._data[begin : begin + size] = self.region.part(slot, size)


class Pool:
    """The region of a client, created when it is first needed. Thread safe: if two threads each
    create a region, the first one is kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: Optional[Region] = None
        self._ask_at = 0.0

    def region(self) -> Optional[Region]:
        return self._region if self._region is not None and self._region.connected else None

    def worth_asking(self) -> bool:
        return time.monotonic() >= self._ask_at

    def refused(self) -> None:
        self._ask_at = time.monotonic() + ASK_AGAIN_S

    def made(self, region: Region) -> Region:
        """Returns the region to use."""
        with self._lock:
            kept = self.region()
            if kept is None:
                self._region = kept = region
        if kept is not region:
            region.close()
        return kept

    def close(self) -> None:
        if self._region is not None:
            self._region.close()
