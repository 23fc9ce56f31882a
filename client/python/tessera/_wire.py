"""Messages of transfers, taken apart and put together by hand: protobuf would copy their data twice
more."""

from typing import Any, Iterator, Optional, Tuple

import numpy as np

from . import _protocol as p

CHUNK = 1 << 20


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> Tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7


def data_of(message: bytes) -> Tuple[int, memoryview]:
    """offset and data of a DownloadResponse."""
    at, offset, found = 0, 0, memoryview(b"")
    while at < len(message):
        tag, at = _read_varint(message, at)
        if tag & 7 == 0:
            value, at = _read_varint(message, at)
            if tag >> 3 == 2:
                offset = value
        elif tag & 7 == 2:
            length, at = _read_varint(message, at)
            if tag >> 3 == 3:
                found = memoryview(message)[at : at + length]
            at += length
        else:
            at += 8 if tag & 7 == 1 else 4
    return offset, found


class Upload:
    """The messages of one stream: of bytes [begin, end) of a draft, or with a spec of an array.

    sent: bytes that gRPC has taken; whoever waits for the stream sees by it that it moves.
    failure: what the caller's progress function raised, which ends the stream.
    """

    def __init__(
        self,
        name: str,
        data: memoryview,
        begin: int,
        version: int,
        spec: Optional[Any],
        report: Any,
    ) -> None:
        fields = {"spec": spec} if spec is not None else {"version": version, "offset": begin}
        self._head = p.UploadRequest(name=name, **fields).SerializeToString()
        self._data = data
        self._begin = begin
        self._report = report
        self.sent = begin
        self.failure: Optional[BaseException] = None

    def __iter__(self) -> Iterator[bytes]:
        head = self._head
        while True:
            chunk = self._data[self.sent : self.sent + CHUNK]
            # Field 4, data; a message is its fields one after the other.
            yield b"".join((head, b"\x22", varint(len(chunk)), chunk)) if chunk else head
            head = b""
            self.sent += len(chunk)
            if self._report is not None:
                try:
                    self._report(self.sent)
                except BaseException as error:
                    self.failure = error
                    raise
            if self.sent >= len(self._data):
                return


class Download:
    """Bytes [begin, begin + len(out)) of a buffer into an array of uint8; `done` have come."""

    def __init__(self, name: str, version: int, begin: int, out: Any, report: Any) -> None:
        self._fields = {"name": name, "version": version}
        self._begin = begin
        self._out = out
        self._report = report
        self.done = 0

    @property
    def size(self) -> int:
        return len(self._out)

    def request(self) -> bytes:
        """Of what is missing."""
        request = p.METHODS["Download"].request(
            offset=self._begin + self.done, limit=len(self._out) - self.done, **self._fields
        )
        return request.SerializeToString()  # type: ignore[no-any-return]

    def take(self, message: bytes) -> None:
        offset, data = data_of(message)
        if len(data) == 0:
            return
        if offset != self._begin + self.done or self.done + len(data) > len(self._out):
            raise ValueError("the server sent bytes that nobody asked for")
        # NumPy copies without the interpreter's lock, so that gRPC reads on meanwhile.
        self._out[self.done : self.done + len(data)] = np.frombuffer(data, np.uint8)
        self.done += len(data)
        if self._report is not None:
            self._report(self.done)
