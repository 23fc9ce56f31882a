"""The part that the blocking and the asyncio client share, without any I/O.

Each method is a generator. It yields each action to perform (a Call, a Pause, or an Upload, a
Download or Several from transfers/_messages.py), is sent the outcome or has an Error thrown into
it, and returns the result.
"""

import dataclasses
import functools
import itertools
import os
import secrets
import time
from typing import (
    Any,
    Callable,
    Dict,
    Generator,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

import numpy as np
import numpy.typing as npt

from .graph import _dtypes, _plan
from .graph._graph import Dead, Inline, Leaf, Node, Term
from .graph._views import View
from .transfers._messages import (
    CHUNK,
    DOWNLOADS,
    UPLOADS,
    Download,
    Range,
    Several,
    Tally,
    Upload,
    divided,
)
from .transfers._progress import Progress, raises_callers_errors, reporter
from .transfers._shared import LEAST, Pool, SharedDownload, SharedUpload, Transfer
from .wire import _protocol as p
from .wire._connect import Options, Placement, Ttl, devices_of, duration, is_loopback
from .wire._errors import (
    BadDtype,
    BadShape,
    BadTtl,
    BufferExists,
    BufferNotFound,
    BufferNotReady,
    ConnectionLost,
    DeadlineExceeded,
    Draining,
    Error,
    ResultTooLarge,
    ScratchExhausted,
    Stalled,
    TooManySteps,
    VersionMismatch,
    closed,
)
from .wire._retry import Retry


@dataclasses.dataclass
class Call:
    method: str
    request: bytes
    timeout: float


@dataclasses.dataclass
class Create:
    """A call or an upload that finishes in the background even if its caller is gone. ended: a
    function that is always called, with the response, or with None after a failure; it returns
    further calls to send, whose outcomes do not matter."""

    command: Union[Call, Upload]
    ended: Callable[[Any], Iterable[Call]]


@dataclasses.dataclass
class Pause:
    """Waits for a number of seconds, and then, if `reconnect` is given, for a connection for up to
    that many seconds. The outcome is whether there is a connection. A gRPC channel connects only
    while a caller waits for it."""

    seconds: float
    reconnect: Optional[float] = None


@dataclasses.dataclass
class Share:
    """Creates a region through the server's socket. The outcome is the region, or None if that
    fails or takes longer than this number of seconds."""

    path: str
    seconds: float


class Prepared(NamedTuple):
    """A request that may be sent any number of times, and its plan."""

    plan: _plan.Plan
    method: str
    request: bytes


Command = Union[Call, Create, Pause, Upload, Download, Several, Share, Transfer]
Steps = Generator[Command, Any, Any]
_Make = Callable[[Any], Command]
# The maximum number of missing ranges that a server lists.
_MISSING = 100
# In seconds: how long close() waits for a server, and how long after an interrupted or cancelled
# put() its unfinished draft may still occupy the name.
LAST_WORDS_S = 1.0
_LEFT_OVER_S = 5.0
_GONE = "its name was deleted or has expired, or the server has restarted since"


def _named(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a buffer's name must be a str, not {type(name).__name__}")


def _fits(into: Any, leaf: Leaf, view: View) -> None:
    if not isinstance(into, np.ndarray):
        raise TypeError(f"out must be a NumPy array, not {type(into).__name__}")
    host = _dtypes.host_of(leaf.dtype)
    if into.dtype not in (host, leaf.dtype):
        raise BadDtype(f"out must have the type {host}, not {into.dtype}")
    if into.shape != view.shape:
        raise BadShape(f"out must have the shape {view.shape}, not {into.shape}")
    if not into.flags.c_contiguous or not into.flags.writeable:
        raise ValueError("out must be writable, and contiguous in row-major order")


def _stalled(failure: Error) -> None:
    """Raises Stalled if shared memory has used up the stall timeout. In that case no stream is
    tried."""
    if failure.code == "DEADLINE_EXCEEDED":
        raise Stalled("the transfer made no progress", "DEADLINE_EXCEEDED") from failure


def _first_missing(missing: Sequence[Range], part: Range) -> Optional[Range]:
    """Returns the rest of a range from the first byte that the server lacks, or None if the server
    has the whole range. `missing` is the server's list of missing ranges."""
    for begin, end in missing:
        if end > part[0]:
            return (max(begin, part[0]), part[1]) if begin < part[1] else None
    # A full list says nothing about bytes after its end.
    return part if len(missing) >= _MISSING else None


class _Draft:
    """A draft of put(). Its version is 0 until the server has created it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = 0
        self.abandoned = False


def _within_limits(make: Callable[..., Steps]) -> Callable[..., Steps]:
    """Repeats the steps once if the server refuses a lifetime or a result size that its limits
    allowed when they were read. Another server may have taken the address, so the limits are read
    again first."""

    @functools.wraps(make)
    def steps(self: "Core", *args: Any, **options: Any) -> Steps:
        known = self._limits
        try:
            return (yield from make(self, *args, **options))
        except (BadTtl, ResultTooLarge):
            if known is None:
                raise
            self._limits = None
        return (yield from make(self, *args, **options))

    return steps


class Core:
    """Thread safe: the state is a counter, queues and sets, whose operations are atomic, and values
    that are only replaced."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.dead = Dead()
        self._prefix = f"unnamed/{secrets.token_hex(6)}/"
        self._count = itertools.count()
        self.has_unnamed = False
        self._creating: Set[_Draft] = set()
        # Drafts that were created and neither sealed nor deleted. The thread that removes one
        # decides its fate: put(), which has sealed it, keeps it, and close() deletes it.
        self._drafts: Set[Tuple[str, int]] = set()
        self._abandoned_at: Dict[str, float] = {}  # Names and times of abandonment (monotonic).
        self.closed = False  # True once close() begins, which deletes unnamed buffers and drafts.
        # A forked process has the same references, but must not delete what this process still
        # uses.
        self._process = os.getpid()
        self._limits: Any = None
        self.pool = Pool()

    # --- calls

    def call(
        self,
        method: str,
        request: bytes,
        idempotent: bool = True,
        failures: Optional[List[Error]] = None,
        timeout: Optional[float] = None,
        make: Callable[[Call], Command] = lambda call: call,
    ) -> Steps:
        """Returns the response of a call. failures: the failures of a first attempt that was made
        elsewhere."""
        whole = timeout = self.options.timeout if timeout is None else timeout
        begin = time.monotonic()
        retry = None  # Most calls need none.
        while True:
            try:
                if failures:
                    raise failures.pop()
                return (yield make(Call(method, request, timeout)))
            except Error as error:
                retry = retry or Retry(self.options, idempotent, whole, begin)
                if not (yield from self._again(retry, error)):
                    if isinstance(error, DeadlineExceeded):
                        error.text += f": {method} took longer than {whole:g} s, its timeout"
                    raise
            timeout = max(retry.left(), 0.001)

    def unary(self, method: str, idempotent: bool = True, **fields: Any) -> Steps:
        if method not in p.METHODS or method in ("Upload", "Download"):
            raise ValueError(f"{method!r} is not a unary method of the protocol")
        request = p.METHODS[method].request(**fields).SerializeToString()
        return (yield from self.call(method, request, idempotent))

    def snapshot(self, timeout: float) -> Steps:
        """Makes the server take a snapshot."""
        return (yield from self.call("Snapshot", b"", timeout=timeout))

    def _again(self, retry: Retry, failure: Error) -> Steps:
        """Returns whether to try again, and if so, waits first. If not, the caller raises the
        failure, because an exception keeps alive everything that its frames refer to, including
        arrays."""
        pause = retry.pause(failure)
        if pause is None:
            return False
        lost = isinstance(failure, (ConnectionLost, Draining))
        if lost:
            self._limits = None  # The next server may have other limits.
        reconnect = min(self.options.connect_timeout, retry.left()) if lost else None
        return (yield Pause(pause, reconnect))

    def take_dead(self) -> List[Call]:
        """Returns calls that delete buffers without references; their outcomes do not matter."""
        taken = list(self._take_dead())
        return [self._deletion(*one) for one in taken] if self.own else []

    def flush(self) -> Steps:
        """Deletes the buffers without references, and waits until they are gone."""
        for name, version in list(self._take_dead()):
            yield from self._gone(name, version)

    def _take_dead(self) -> Iterator[Tuple[str, int]]:
        try:
            while True:
                yield self.dead.popleft()
        except IndexError:
            pass  # Other threads remove entries as well.

    def _take_drafts(self) -> Iterator[Tuple[str, int]]:
        try:
            while True:
                yield self._drafts.pop()
        except KeyError:
            pass

    def _deletion(self, name: str, version: int, timeout: float = _LEFT_OVER_S) -> Call:
        self._drafts.discard((name, version))
        request = p.METHODS["DeleteBuffer"].request(name=name, version=version)
        return Call("DeleteBuffer", request.SerializeToString(), timeout)

    @property
    def own(self) -> bool:
        """Returns whether this process is the one that connected, not a fork of it."""
        return os.getpid() == self._process

    def close(self) -> Steps:
        """Deletes the unnamed buffers and the drafts, which are unreachable from now on. Failures
        do not matter, because buffers expire. Returns whether the server may answer further calls.
        First waits for drafts that are being created; after that, the first call without a response
        ends the deletion."""
        self.closed = True
        if not self.own:
            return False
        give_up = time.monotonic() + LAST_WORDS_S
        while self._creating and time.monotonic() < give_up:
            yield Pause(0.01)
        try:
            # The listing below finds the unnamed buffers.
            left = {one for one in self._take_dead() if not one[0].startswith(self._prefix)}
            for name, version in left.union(self._take_drafts()):
                yield from self._gone(name, version)
            while self.has_unnamed:
                method = p.METHODS["ListBuffers"]
                request = method.request(prefix=self._prefix, page_size=1000).SerializeToString()
                answer = yield Call(method.name, request, LAST_WORDS_S)
                if not answer.buffers:
                    break
                for name in {buffer.name for buffer in answer.buffers}:
                    yield from self._gone(name, 0)
            return True
        except Error:
            return False

    def _gone(self, name: str, version: int) -> Steps:
        try:
            yield self._deletion(name, version, LAST_WORDS_S)
        except (BufferNotFound, VersionMismatch):
            pass

    def _unnamed(self) -> str:
        self.has_unnamed = True
        return self._prefix + str(next(self._count))

    def _lifetime(self, ttl: Ttl = None) -> Steps:
        """Returns the lifetime of an unnamed buffer as a Duration: the ttl if given, otherwise
        unnamed_ttl or the server's limit, whichever is less."""
        wanted = duration(self.options.unnamed_ttl if ttl is None else ttl)
        if ttl is None and wanted is not None:
            limits = yield from self._server_limits()
            if limits.HasField("max_ttl"):
                longest = limits.max_ttl
                return min(wanted, longest, key=lambda time: (time.seconds, time.nanos))
        return wanted

    def _destination(self, name: Optional[str], replace: bool, ttl: Ttl) -> Steps:
        """Returns name, replace, ttl and `dead` (see Leaf) of a new buffer. The client deletes a
        buffer without a name."""
        if name is None:
            return self._unnamed(), True, (yield from self._lifetime(ttl)), self.dead
        _named(name)
        return name, replace, duration(ttl), None

    def _abandoned(self, names: Iterable[str]) -> None:
        """Queues for deletion all unnamed buffers among `names`: calls that were interrupted or
        cancelled may still create them."""
        self.dead.extend((name, 0) for name in names if name.startswith(self._prefix))

    # --- buffers

    def find(self, name: str) -> Steps:
        _named(name)
        answer = yield from self.unary("GetBuffer", name=name)
        if answer.buffer.state != 2:
            raise BufferNotReady(f'buffer "{name}" is still being written', "FAILED_PRECONDITION")
        return Leaf(answer.buffer)

    def list(self, prefix: str) -> Steps:
        _named(prefix)
        found: List[Any] = []
        token = ""
        while True:
            answer = yield from self.unary(
                "ListBuffers", prefix=prefix, page_token=token, page_size=1000
            )
            found += (buffer for buffer in answer.buffers if buffer.state == 2)
            token = answer.next_page_token
            if not token:
                return [Leaf(buffer) for buffer in found]

    def delete(self, name: str, version: int = 0) -> Steps:
        _named(name)
        try:
            yield from self.unary("DeleteBuffer", idempotent=False, name=name, version=version)
        except ConnectionLost:
            # Deleting again is harmless with a version, because a version never names another
            # array.
            if not version:
                raise
            yield from self.unary("DeleteBuffer", name=name, version=version)

    @_within_limits
    @raises_callers_errors
    def put(
        self,
        value: Any,
        name: Optional[str],
        dtype: Any,
        replace: bool,
        ttl: Ttl,
        device: str,
        placement: Placement,
        progress: Progress,
    ) -> Steps:
        data = _dtypes.Outgoing(value, dtype)
        to, replace, lifetime, dead = yield from self._destination(name, replace, ttl)
        spec = p.BufferSpec(
            dtype=_dtypes.to_wire(data.dtype),
            shape=data.shape,
            ttl=lifetime,
            replace=replace,
            device=device,
            placement=devices_of(placement),
        )
        report = reporter(progress, len(data), f"put {to}")
        small = len(data) <= CHUNK
        upload = functools.partial(self._upload_whole, to, data, spec, report, replace)
        if small and replace:
            try:
                return Leaf((yield from upload(lambda stream: stream)).buffer, dead)
            except GeneratorExit:
                self._abandoned([to])
                raise
        draft = _Draft(to)
        try:
            if small:
                made = yield from self._create(draft, upload)
            else:
                request = p.METHODS["CreateBuffer"].request(name=to, spec=spec).SerializeToString()
                create = functools.partial(self.call, "CreateBuffer", request, False)
                yield from self._create(draft, create)
                yield from self._fill(to, draft.version, data, report)
                made = yield from self.unary("SealBuffer", name=to, version=draft.version)
            try:
                self._drafts.remove((to, draft.version))
            except KeyError:
                raise closed() from None
        except Exception as failure:
            # The draft is deleted now, so that a caller that retries immediately finds the name
            # free. If that fails, the draft expires.
            if draft.version and isinstance(failure, Stalled):
                self._abandon(draft)  # The server would not respond now.
            elif draft.version:
                try:
                    yield self._deletion(to, draft.version)
                except Error:
                    pass
            raise
        except BaseException:  # Interrupted or cancelled: no further calls are possible here.
            self._abandon(draft)
            raise
        return Leaf(made.buffer, dead)

    def _upload_whole(
        self, name: str, data: Any, spec: Any, report: Any, replace: bool, make: _Make
    ) -> Steps:
        """Uploads an array in a single message."""
        data.convert()
        own = bytes(data[:])  # A stream that continues in the background reads the copy.
        retry = Retry(self.options, replace, self.options.timeout)
        while True:
            tally = Tally(report)
            try:
                return (yield make(Upload(name, own, 0, len(own), 0, spec, tally)))
            except Error as error:
                if not (yield from self._again(retry, error)):
                    raise
            finally:
                tally.tell = None

    def _create(self, draft: _Draft, attempt: Callable[..., Steps]) -> Steps:
        """Creates a draft. If it is abandoned before the server responds, it is deleted
        afterwards."""

        def ended(answer: Any) -> Iterator[Call]:
            try:
                if answer is not None:
                    draft.version = answer.buffer.version
                    self._drafts.add((draft.name, draft.version))
                    if draft.abandoned:
                        yield self._deletion(draft.name, draft.version)
            finally:
                self._creating.discard(draft)  # From here on, close() need not wait for it.

        def create(command: Union[Call, Upload]) -> Create:
            self._creating.add(draft)
            return Create(command, ended)

        while True:
            try:
                return (yield from attempt(make=create))
            except BufferExists:
                since = self._abandoned_at.get(draft.name, -_LEFT_OVER_S)
                if time.monotonic() - since >= _LEFT_OVER_S:
                    raise
            yield Pause(0.02)

    def _abandon(self, draft: _Draft) -> None:
        """Deletes the draft with the other dead buffers, or as soon as it has been created."""
        now = time.monotonic()
        for name, since in list(self._abandoned_at.items()):
            if now - since >= _LEFT_OVER_S:
                self._abandoned_at.pop(name, None)
        self._abandoned_at[draft.name] = now
        draft.abandoned = True
        if draft.version:
            self.dead.append((draft.name, draft.version))

    def _fill(self, name: str, version: int, data: Any, report: Any) -> Steps:
        """Uploads a draft. After a failure, one stream at a time resumes at the first byte that the
        server lacks."""
        retry = Retry(self.options, True, self.options.stall_timeout)
        since = time.monotonic()
        region = yield from self._region(len(data))
        begin = 0
        if region is not None:
            upload = SharedUpload(region, name, version, 0, data, report)
            yield from self._through(upload)
            begin, since = upload.done, upload.moved or since
        tally = Tally(report, begin, since)
        left = divided(begin, len(data), UPLOADS) if begin < len(data) else []
        told = stored = begin
        several = len(left) > 1
        while left:
            parts = left if several else left[:1]
            streams = [Upload(name, data, *part, version, None, tally) for part in parts]
            try:
                yield Several(streams) if several else streams[0]
                left = left[len(parts) :]
                continue
            except Error as error:
                # gRPC accepts the first bytes of a stream even if the server refuses it.
                if tally.done > told and error.code != "RESOURCE_EXHAUSTED":
                    retry.moved()
                if not (yield from self._go_on(retry, error, several)):
                    raise
            several = False
            state = yield from self.unary("GetBuffer", name=name, version=version)
            missing = [(part.begin, part.end) for part in state.missing]
            left = [part for part in (_first_missing(missing, part) for part in left) if part]
            told = len(data) - sum(end - begin for begin, end in left)
            tally = tally.restarted(told)
            if told > stored:
                stored = told
                retry.progress()

    def _go_on(self, retry: Retry, failure: Error, several: bool) -> Steps:
        """Returns whether a transfer continues after a failure, with one stream at a time. Some
        failures occur only with several connections: the server has capacity for fewer streams, or
        the connections lead to different servers. Such a failure does not count yet; if it
        persists, the single stream reports it."""
        if several and not isinstance(failure, (ConnectionLost, Draining, Stalled)):
            return True
        return (yield from self._again(retry, failure))

    # --- shared memory

    def _region(self, size: int) -> Steps:
        """Returns the region for a transfer of this number of bytes, or None if streams must be
        used. Raises Stalled."""
        options = self.options
        if size < LEAST or not options.shared_memory or not is_loopback(options.target):
            return None
        region = self.pool.region()
        if region is None and self.pool.worth_asking():
            patience = min(options.stall_timeout, options.timeout)
            try:
                answer = yield from self.call("GetSharedMemory", b"", timeout=patience)
                region = yield Share(answer.socket_path, options.stall_timeout)
            except Error as error:
                _stalled(error)
            if region is None:
                self.pool.refused()
            else:
                region = self.pool.made(region)
        return region

    def _through(self, transfer: Transfer) -> Steps:
        """Moves as many bytes as possible through shared memory. A stream then moves the rest, and
        reports any error. Raises Stalled."""
        try:
            if transfer.slots:
                yield transfer
        except Error as error:
            # The time limit of a call runs from its start, even while the server is still working
            # on the previous call.
            moved = transfer.moved
            if moved is None or time.monotonic() - moved >= self.options.stall_timeout:
                _stalled(error)
        finally:
            transfer.end()

    @_within_limits
    def copy(
        self,
        leaf: Leaf,
        view: View,
        name: Optional[str],
        dtype: Any = None,
        replace: bool = False,
        ttl: Ttl = None,
        device: str = "",
        placement: Placement = (),
    ) -> Steps:
        """Copies a view to a separate buffer, possibly of another type or on other devices."""
        name, replace, lifetime, dead = yield from self._destination(name, replace, ttl)
        request = p.METHODS["CopyBuffer"].request(
            source=leaf.name,
            source_version=leaf.version,
            view=_plan.view_message(view),
            name=name,
            dtype=0 if dtype is None else _dtypes.to_wire(_dtypes.dtype_of(dtype)),
            ttl=lifetime,
            replace=replace,
            device=device,
            placement=devices_of(placement),
        )
        try:
            answer = yield from self.call("CopyBuffer", request.SerializeToString(), replace)
        except Error as error:
            raise self._explained(error, {leaf.name: leaf})
        except GeneratorExit:
            self._abandoned([request.name])
            raise
        return Leaf(answer.buffer, dead)

    @_within_limits
    def link(
        self, leaf: Leaf, name: Optional[str], replace: bool = False, ttl: Ttl = None
    ) -> Steps:
        """Creates another name for a buffer's memory."""
        name, replace, lifetime, dead = yield from self._destination(name, replace, ttl)
        answer = yield from self.unary(
            "CopyBuffer",
            replace,
            source=leaf.name,
            source_version=leaf.version,
            name=name,
            ttl=lifetime,
            replace=replace,
            link=True,
        )
        return Leaf(answer.buffer, dead)

    @_within_limits
    def import_from(
        self,
        server: str,
        source: str,
        name: Optional[str],
        version: int,
        replace: bool,
        ttl: Ttl,
        device: str,
        timeout: float,
    ) -> Steps:
        """Creates a buffer with data that the server fetches from another server."""
        name, replace, lifetime, dead = yield from self._destination(name, replace, ttl)
        request = p.METHODS["ImportBuffer"].request(
            source=server,
            source_name=source,
            source_version=version,
            name=name,
            ttl=lifetime,
            replace=replace,
            device=device,
        )
        try:
            answer = yield from self.call(
                "ImportBuffer", request.SerializeToString(), replace, timeout=timeout
            )
        except GeneratorExit:
            self._abandoned([request.name])
            raise
        return Leaf(answer.buffer, dead)

    @raises_callers_errors
    def fetch(
        self, leaf: Leaf, view: View, progress: Progress = None, into: Optional[Any] = None
    ) -> Steps:
        """Returns the elements of a view, in `into` if given. If the view leaves out most of its
        range, the server first gathers the view's elements."""
        if into is not None:
            _fits(into, leaf, view)
            if into.dtype != leaf.dtype:
                into[...] = _dtypes.to_host((yield from self.fetch(leaf, view, progress)))
                return into
        if view.size == 0:
            return np.empty(view.shape, leaf.dtype) if into is None else into
        begin, end = view.span()
        size = leaf.dtype.itemsize
        if (end - begin) * size > CHUNK and view.size * 4 < end - begin:
            leaf = yield from self.copy(leaf, view, None)
            view = View.whole(view.shape)
            begin, end = 0, view.size
        if into is None or not view.contiguous:
            flat = np.empty(end - begin, leaf.dtype)
        else:
            flat = into.reshape(-1)
        report = reporter(progress, flat.nbytes, f"get {leaf.name}")
        out = flat.view(np.uint8)
        retry = Retry(self.options, True, self.options.stall_timeout)
        done, since = 0, time.monotonic()
        region = yield from self._region(len(out))
        if region is not None:
            shared = SharedDownload(region, leaf.name, leaf.version, begin * size, out, report)
            yield from self._through(shared)
            done, since = shared.done, shared.moved or since
        tally = Tally(report, done, since)
        left = divided(done, len(out), DOWNLOADS) if done < len(out) else []
        several = len(left) > 1
        while left:
            parts = left if several else left[:1]
            streams = [
                Download(leaf.name, leaf.version, begin * size + at, out[at:to], tally)
                for at, to in parts
            ]
            try:
                yield Several(streams) if several else streams[0]
                left = left[len(parts) :]
            except Error as error:
                self._explained(error, {leaf.name: leaf})
                if tally.done > done:
                    done = tally.done
                    retry.progress()
                if not (yield from self._go_on(retry, error, several)):
                    raise
                several = False
                rest = [(at + stream.done, to) for (at, to), stream in zip(parts, streams)]
                left = [part for part in rest + left[len(parts) :] if part[0] < part[1]]
                tally = tally.restarted(done)
        view = view._replace(offset=view.offset - begin)
        if into is None:
            return _plan.on_host(flat, view)
        if not view.contiguous:
            into[...] = _plan.window(flat, view)
        return into

    # --- expressions

    def _explained(self, error: Error, leaves: Mapping[str, Leaf], steps: int = 1) -> Error:
        """Adds advice for the user to an error of a program, and returns the error. steps: the
        number of steps of the program."""
        if steps > 1 and isinstance(error, (ScratchExhausted, TooManySteps)):
            error.text += ("; save intermediate results with x = x.save(), which splits the"
                           " program")
        elif isinstance(error, BufferNotFound) and error.details.get("name") in leaves:
            error.text += f'; the array "{error.details["name"]}" is gone: {_GONE}'
        elif isinstance(error, VersionMismatch):
            error.text += "; this version of the array is gone: another array has its name"
        return error

    def _server_limits(self) -> Steps:
        """Returns the limits of GetServerInfo. They are kept until the connection is lost, the
        server drains, or the server refuses something that they allow."""
        if self._limits is None:
            info = yield from self.unary("GetServerInfo")
            self._limits = info.limits
        return self._limits

    def run(
        self, plan: _plan.Plan, results: Dict[_plan.Output, Any], idempotent: bool = True
    ) -> Steps:
        """Returns the responses of all steps."""
        method, request = plan.call(results)
        try:
            response = yield from self.call(method, request, idempotent)
            return plan.answers(method, response)
        except Error as error:
            raise self._explained(error, plan.leaves, len(plan.steps))
        except GeneratorExit:
            self._abandoned(target.buffer.name for target in results.values())
            raise

    def prepare(self, term: Term) -> Optional[Prepared]:
        """Returns the request of an expression with a small result, or None if only evaluate_one()
        can compute it. The caller keeps the request, because building it would add time to every
        call."""
        source = term[0]
        if not isinstance(source, Node) or source.answer_bytes > CHUNK:
            return None
        plan = _plan.Plan([source])
        return Prepared(plan, *plan.call({}))

    def answered(
        self, term: Term, prepared: Prepared, response: Any
    ) -> Tuple[npt.NDArray[Any], _plan.Cost]:
        """Returns (array, stats) of the response to a prepared request."""
        plan = prepared.plan
        answers = plan.answers(prepared.method, response)
        source, view = term
        assert isinstance(source, Node)
        array = _plan.value_of(source, answers[plan.outputs[0][0]])
        if view.shape != array.shape or view.shape and not view.contiguous:
            array = _plan.on_host(array, view)
        return _dtypes.to_host(array), (plan, answers)

    def evaluate_one(
        self, term: Term, prepared: Optional[Prepared], failures: List[Error]
    ) -> Steps:
        """Returns (array, stats) of an expression. failures: the failures of a first attempt, if
        there was one."""
        if prepared is None:
            (array,), stats = yield from self.evaluate([term])
            return array, stats
        try:
            response = yield from self.call(prepared.method, prepared.request, True, failures)
            return self.answered(term, prepared, response)
        except Error as error:
            raise self._explained(error, prepared.plan.leaves, len(prepared.plan.steps))

    @_within_limits
    def evaluate(self, terms: Sequence[Term]) -> Steps:
        """Returns (arrays, stats) of expressions, all from one call. A result that is too large for
        a response is left in a buffer and downloaded from there."""
        nodes = [source for source, _ in terms if isinstance(source, Node)]
        arrays: Dict[int, npt.NDArray[Any]] = {}
        stats: _plan.Cost = None
        if nodes:
            plan = _plan.Plan(nodes)
            wanted = dict(zip(plan.outputs, nodes))
            total = _plan.inline_bytes(list(wanted.values()))
            limit = CHUNK
            if total > CHUNK:
                limits = yield from self._server_limits()
                limit = limits.max_inline_result_bytes
            large = limit if total <= limit else limit // len(wanted)
            results = {}
            for output, node in wanted.items():
                if _plan.inline_bytes([node]) > large:
                    target, _, lifetime, _ = yield from self._destination(None, True, None)
                    results[output] = _plan.target(target, True, lifetime)
            answers = yield from self.run(plan, results)
            stats = plan, answers
            for node, output in zip(nodes, plan.outputs):
                answer = answers[output[0]]
                if output in results:
                    leaf = Leaf(_plan.buffer_of(node, answer), self.dead)
                    array = yield from self.fetch(leaf, View.whole(leaf.shape))
                    arrays[id(node)] = array.astype(node.dtype, copy=False)
                else:
                    arrays[id(node)] = _plan.value_of(node, answer)
        found = []
        for source, view in terms:
            if isinstance(source, Leaf):
                array = yield from self.fetch(source, view)
            elif isinstance(source, Inline):
                array = _plan.on_host(source.array, view)
            else:
                array = _plan.on_host(arrays[id(source)], view)
            found.append(_dtypes.to_host(array))
        return found, stats

    def save(
        self,
        term: Term,
        name: Optional[str],
        replace: bool,
        ttl: Ttl,
        placement: Placement = (),
    ) -> Steps:
        """Returns (a buffer with the value of an expression, stats)."""
        source, view = term
        if isinstance(source, Leaf):
            leaf = yield from self.copy(
                source, view, name, replace=replace, ttl=ttl, placement=placement
            )
            return leaf, None
        (leaf,), stats = yield from self.keep([term], name, replace, ttl, placement)
        return leaf, stats

    @_within_limits
    def keep(
        self,
        terms: Sequence[Term],
        name: Optional[str] = None,
        replace: bool = False,
        ttl: Ttl = None,
        placement: Placement = (),
    ) -> Steps:
        """Returns (buffers with the values of expressions, stats) from one call. A name may be
        given only for a single expression."""
        if not terms:
            return [], None
        nodes = [_plan.stored_node(term) for term in terms]
        plan = _plan.Plan(nodes)
        results: Dict[_plan.Output, Any] = {}
        for output in plan.outputs:
            target, replace, lifetime, dead = yield from self._destination(name, replace, ttl)
            results[output] = _plan.target(target, replace, lifetime, devices_of(placement))
        answers = yield from self.run(plan, results, replace)
        leaves = {
            output: Leaf(_plan.buffer_of(node, answers[output[0]]), dead)
            for output, node in dict(zip(plan.outputs, nodes)).items()
        }
        return [leaves[output] for output in plan.outputs], (plan, answers)
