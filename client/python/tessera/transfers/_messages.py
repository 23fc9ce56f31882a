"""Messages of transfers, built and parsed by hand, because protobuf would make two more copies of
their data."""

import threading
import time
from typing import Any, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np

from ..wire import _protocol as p
from ..wire._errors import damaged

CHUNK = 1 << 20
# Transfers of at least this number of bytes use several connections.
DIVIDED = 64 << 20
UPLOADS = 2
DOWNLOADS = 4
Range = Tuple[int, int]


def divided(begin: int, end: int, streams: int) -> List[Range]:
    """Returns the parts of the byte range [begin, end) that go through separate connections."""
    chunks = -(-(end - begin) // CHUNK)
    count = streams if end - begin >= DIVIDED else 1
    bounds = [min(begin + chunks * i // count * CHUNK, end) for i in range(count + 1)]
    return list(zip(bounds, bounds[1:]))


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
    """Returns the offset and the data of a DownloadResponse."""
    at, offset, found = 0, 0, memoryview(b"")
    try:
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
    except IndexError:
        at = len(message) + 1
    if at > len(message):
        raise damaged("was cut short")
    return offset, found


class Tally:
    """The bytes that all streams of a transfer have moved. A thread that waits for one of the
    streams sees here that the transfer has not stalled.

    report is the caller's progress function, if there is one. tell is called after each message.
    moved is the time.monotonic() value when the last bytes moved, or when the transfer began.
    """

    def __init__(self, report: Any, done: int = 0, since: Optional[float] = None) -> None:
        """since: when the transfer began; None means now."""
        self.done = done
        self.moved = time.monotonic() if since is None else since
        self.report = self.tell = report
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.done += count
            self.moved = time.monotonic()
            tell = self.tell
            if tell is not None:
                tell(self.done)

    def restarted(self, done: int) -> "Tally":
        """Returns a Tally for the rest of the transfer. Threads that still run streams of the old
        Tally report no further progress."""
        self.tell = None
        return Tally(self.report, done)


class Patience:
    """Decides whether a transfer has stalled for this number of seconds. A waiting thread checks
    again after `step` seconds."""

    def __init__(self, tally: Tally, seconds: float) -> None:
        self.step = seconds / 8
        self._tally = tally
        self._seconds = seconds

    def over(self) -> bool:
        return time.monotonic() - self._tally.moved >= self._seconds


class Stream:
    """One call that moves a range of bytes. connection: the number of the client's connection that
    the call uses. Another thread may stop the call before or after it has begun."""

    connection = 0
    _call: Any = None
    _stopped = False

    def __init__(self, tally: Tally) -> None:
        self.tally = tally

    def begun(self, call: Any) -> None:
        self._call = call
        if self._stopped:
            call.cancel()

    def stop(self) -> None:
        self._stopped = True
        if self._call is not None:
            self._call.cancel()


class Upload(Stream):
    """The messages of one stream: bytes [begin, end) of a draft, or, with a spec, a whole array.

    data: an object whose slices are bytes. sent: the end of the bytes that gRPC has accepted.
    failure: the exception from a slice or from the caller's progress function, which ends the
    stream.
    """

    def __init__(
        self,
        name: str,
        data: Any,
        begin: int,
        end: int,
        version: int,
        spec: Optional[Any],
        tally: Tally,
    ) -> None:
        super().__init__(tally)
        fields = {"spec": spec} if spec is not None else {"version": version, "offset": begin}
        self._head = p.UploadRequest(name=name, **fields).SerializeToString()
        self._data = data
        self._end = end
        self.sent = begin
        self.failure: Optional[BaseException] = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._messages()
        except GeneratorExit:
            raise  # gRPC wants no more messages.
        except BaseException as error:
            self.failure = error
            raise

    def _messages(self) -> Iterator[bytes]:
        head = self._head
        while not self._stopped:
            chunk = self._data[self.sent : min(self.sent + CHUNK, self._end)]
            # Field 4 is data. A message is the concatenation of its fields.
            yield b"".join((head, b"\x22", p.varint(len(chunk)), chunk)) if chunk else head
            head = b""
            self.sent += len(chunk)
            self.tally.add(len(chunk))
            if self.sent >= self._end:
                return


class Download(Stream):
    """Downloads bytes [begin, begin + len(out)) of a buffer into an array of uint8. `done` is the
    number of bytes that have arrived."""

    def __init__(self, name: str, version: int, begin: int, out: Any, tally: Tally) -> None:
        super().__init__(tally)
        self._fields = {"name": name, "version": version}
        self._begin = begin
        self._out = out
        self.done = 0

    @property
    def size(self) -> int:
        return len(self._out)

    def request(self) -> bytes:
        """Returns the request for the missing bytes."""
        request = p.METHODS["Download"].request(
            offset=self._begin + self.done, limit=len(self._out) - self.done, **self._fields
        )
        return request.SerializeToString()  # type: ignore[no-any-return]

    def take(self, message: bytes) -> None:
        offset, data = data_of(message)
        if len(data) == 0:
            return
        if offset != self._begin + self.done or self.done + len(data) > len(self._out):
            raise damaged("has bytes that were not requested")
        # NumPy copies without holding the interpreter's lock, so gRPC can read on in the
        # meantime.
        self._out[self.done : self.done + len(data)] = np.frombuffer(data, np.uint8)
        self.done += len(data)
        self.tally.add(len(data))


class Several:
    """Streams of one transfer that run at the same time, each through its own connection. When a
    stream fails, the other streams end as well, unless the server only lacked capacity for the
    failed one. The outcome is that failure."""

    def __init__(self, streams: Sequence[Union[Upload, Download]]) -> None:
        self.streams = streams
        self.tally = streams[0].tally
        for number, stream in enumerate(streams):
            stream.connection = number

    def stop(self) -> None:
        for stream in self.streams:
            stream.stop()

    @staticmethod
    def over(failure: Optional[BaseException]) -> bool:
        """Returns whether a failure, if there is one, ends the other streams too."""
        return failure is not None and getattr(failure, "code", "") != "RESOURCE_EXHAUSTED"
