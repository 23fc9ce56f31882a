"""The classes of the blocking client."""

import atexit
import contextlib
import functools
import threading
import weakref
from typing import Any, Collection, Dict, List, Optional, Tuple

import numpy.typing as npt

from . import _core, _files, _sweep
from ._blocking import Blocking
from ._core import Core
from ._files import Path
from .arrays._creation import Creation
from .arrays._lazy import Lazy, picked, terms_of
from .graph import _dtypes
from .graph._graph import Leaf
from .graph._views import View
from .transfers._progress import Progress
from .wire._connect import Options, Placement, Ttl
from .wire._errors import (
    BufferNotFound,
    BufferNotReady,
    Error,
    Unreachable,
    Unsupported,
    VersionMismatch,
    closed,
)


_open: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _end(core: Core, io: Blocking) -> None:
    answers = io.run(core.close())
    core.pool.close()
    io.close(answers)


@atexit.register
def _close_all() -> None:
    for client in list(_open):
        client.close()


class Expr(Lazy):
    """The future result of an operation. Nothing is sent until numpy() or a similar method is
    called; each such call sends one request."""

    __slots__ = ()

    def numpy(self) -> npt.NDArray[Any]:
        """Computes the result in one call and returns it as a NumPy array in this process; a number
        is returned as a 0-d array. bf16 becomes float32 unless ml_dtypes is installed. A result
        that is too large for a response goes through a buffer.

        Raises BufferNotFound or VersionMismatch if an array that the expression reads is gone; also
        ConnectionLost, DeadlineExceeded, QueueFull and other errors of the server (see Errors)."""
        session: Client = self._session
        core = session._core
        term = self._source, self._view
        prepared = self._prepared
        if prepared is None:
            prepared = self._prepared = core.prepare(term)
        failures: List[Error] = []
        if prepared is not None and not core.dead:
            # The usual path. It leaves out the steps that are needed only after a failure.
            try:
                timeout = core.options.timeout
                response = session._io.call(prepared.method, prepared.request, timeout)
                array, self._stats = core.answered(term, prepared, response)
                return array
            except Error as error:
                failures.append(error)
        array, self._stats = session._run(core.evaluate_one(term, prepared, failures))
        return array

    def save(
        self,
        name: Optional[str] = None,
        replace: bool = False,
        ttl: Ttl = None,
        placement: Placement = (),
    ) -> "Array":
        """Computes the result in one call and leaves the elements on the server. Without a name,
        the buffer is deleted after the last reference to the returned array is gone. ttl and
        placement are those of Client.put; the placement must include the device that computes the
        array. Raises BufferExists if the name is taken and replace is false; also QuotaExceeded and
        GpuMemoryExhausted."""
        session: Client = self._session
        save = session._core.save(self._term(), name, replace, ttl, placement)
        leaf, self._stats = session._run(save)
        return session._wrap(leaf, leaf.whole)  # type: ignore[return-value]

    def item(self, *place: Any) -> Any:
        """Returns an element as a Python number: the only element, or the element at a position in
        row-major order or at one index per axis."""
        return picked(self, place).numpy().item()

    def _number(self) -> Any:
        if self.size != 1:
            raise TypeError("only an array of one element can become a Python number")
        return self.item()

    def __float__(self) -> float:
        return float(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def __complex__(self) -> complex:
        return complex(self._number())

    def __round__(self, digits: Optional[int] = None) -> Any:
        return round(self._number(), digits)

    def __index__(self) -> int:
        if self.shape or self.dtype.kind not in "iu":
            raise TypeError("only a 0-d array of integers can be an index")
        return int(self.item())

    def __contains__(self, value: Any) -> bool:
        """Returns whether any element equals a value. This calls the server."""
        found = self == value
        return bool(found.any()) if isinstance(found, Expr) else bool(found)

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError("only an array of one element has a truth value: use .any() or .all()")
        return bool(self.item())

    def __format__(self, spec: str) -> str:
        # Like NumPy's arrays, a 0-d array accepts the format specifications of numbers.
        return format(self.item(), spec) if spec and not self.shape else super().__format__(spec)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: Any = None,
        dl_device: Any = None,
        copy: Optional[bool] = None,
    ) -> Any:
        """Downloads the elements to host memory and exports that copy. Raises Unsupported if the
        consumer wants another kind of memory (dl_device), and BufferError if it forbids a copy
        (copy=False)."""
        if copy is False:
            raise BufferError("copy=False is not possible: a download makes a copy")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise Unsupported("arrays are exported only in host memory: use dl_device=(1, 0)")
        return self.numpy().__dlpack__()

    def __dlpack_device__(self) -> Tuple[int, int]:
        return (1, 0)


class Array(Expr):
    """A READY buffer of one version, or a view of it. Making a view needs no call."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The buffer's name; the name of an unnamed buffer begins with "unnamed/"."""
        return self._source.name  # type: ignore[no-any-return]

    @property
    def version(self) -> int:
        """The buffer's version; a later array of the same name has another version."""
        return self._source.version  # type: ignore[no-any-return]

    @property
    def device(self) -> str:
        """The device that the buffer is on, such as "cuda:0" or "cpu"; for a sharded buffer, the
        device of its first shard."""
        return self._source.buffer.device  # type: ignore[no-any-return]

    @property
    def devices(self) -> Tuple[str, ...]:
        """The devices among which the buffer is divided, in order, or the only device that it is
        on."""
        return self._source.devices  # type: ignore[no-any-return]

    def numpy(self, progress: Progress = None, out: Any = None) -> npt.NDArray[Any]:
        """Returns the elements as a NumPy array in this process. If out is given, the elements are
        written to out, and out is returned. progress is called as in Client.put. Raises
        BufferNotFound or VersionMismatch if the array is gone, BadShape if out has another shape,
        BadDtype if it has another type, and ValueError if it is not writable, or not contiguous in
        row-major order."""
        session: Client = self._session
        steps = session._core.fetch(self._source, self._view, progress, out)
        array: npt.NDArray[Any] = session._run(steps)
        return _dtypes.to_host(array) if out is None else array

    def copy(
        self,
        name: Optional[str] = None,
        dtype: Any = None,
        replace: bool = False,
        ttl: Ttl = None,
        device: str = "",
        placement: Placement = (),
        order: Any = None,
    ) -> "Array":
        """Copies the elements to a separate buffer on the server immediately. A dtype ("f32"...)
        converts the elements, and a device ("cuda:1") or a placement says where the copy goes.
        order has no effect. The other arguments are those of Client.put. Raises BufferNotFound or
        VersionMismatch if the array is gone, BufferExists if the name is taken and replace is
        false, and Unsupported if the server lacks the dtype; also BadDevice, BadPlacement, BadTtl,
        QuotaExceeded and GpuMemoryExhausted."""
        session: Client = self._session
        leaf = session._run(
            session._core.copy(
                self._source, self._view, name, dtype, replace, ttl, device, placement
            )
        )
        return session._wrap(leaf, leaf.whole)  # type: ignore[return-value]

    def link(self, name: str, replace: bool = False, ttl: Ttl = None) -> "Array":
        """Creates another name for the memory of the whole buffer; nothing is copied. A name with a
        ttl is a ticket: until it expires, other clients find the array under it, even after the
        array's own name is gone. Raises BufferNotFound or VersionMismatch if the array is gone, and
        BufferExists if the name is taken and replace is false; also BadName, BadTtl, QuotaExceeded
        and TooManyBuffers."""
        session: Client = self._session
        leaf = session._run(session._core.link(self._source, name, replace, ttl))
        return session._wrap(leaf, leaf.whole)  # type: ignore[return-value]

    def __reduce__(self) -> Any:
        if self._source.dead is not None:
            raise TypeError(
                "an unnamed array cannot be pickled, because it is deleted with the last reference"
                " to it: save it with save(name), or pickle .numpy()"
            )
        options: Options = self._session._core.options
        sent = {name: getattr(options, name) for name in _SENT}
        return _reopened, (sent, self.name, self.version, self._view)

    def delete(self) -> None:
        """Unlinks this version of the buffer, and no other version. Views of it become invalid too.
        Raises BufferNotFound if no buffer has the name, and VersionMismatch if another array has
        taken the name."""
        session: Client = self._session
        session._run(session._core.delete(self.name, self.version))


# The options of connect() in a pickle. Secrets are not among them.
_SENT = ("target", "route", "tls", "tls_ca", "tls_cert", "tls_key", "tls_server_name")
_reopening = threading.Lock()
_connected: "List[Client]" = []  # The clients of arrays from pickles.


def _reopened(options: Any, name: str, version: int, view: View) -> Expr:
    """Returns the array of a pickle. It belongs to an open client of this process that has the same
    options, or, if there is none, to a new client."""
    with _reopening:
        for client in [*_connected, *_open]:
            core = client._core
            if core.own and not core.closed:
                if all(getattr(core.options, key) == value for key, value in options.items()):
                    break
        else:
            client = connect(**options)
            _connected.append(client)
    array = client[name]
    if array.version != version:
        raise VersionMismatch(f"{name!r} on {options['target']} has been replaced")
    return client._wrap(array._source, view)


class Scope:
    """Names that are deleted together. At its end, `with t.scope(ttl="10m") as s:` deletes what
    s.put and s.save created. If this process ends earlier, the server deletes the names after the
    ttl."""

    def __init__(self, client: "Client", ttl: Ttl) -> None:
        self._client = client
        self._ttl = ttl
        self._arrays: List[Array] = []

    def put(self, array: Any, name: Optional[str] = None, **options: Any) -> Array:
        """Like Client.put, with the scope's ttl unless another is given."""
        options.setdefault("ttl", self._ttl)
        return self._own(self._client.put(array, name, **options))

    def save(self, expression: Expr, name: Optional[str] = None, replace: bool = False) -> Array:
        """Like Expr.save, with the scope's ttl."""
        return self._own(expression.save(name, replace, self._ttl))

    def _own(self, array: Array) -> Array:
        self._arrays.append(array)
        return array

    def __enter__(self) -> "Scope":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        arrays, self._arrays = self._arrays, []
        try:
            for array in arrays:
                try:
                    array.delete()
                except LookupError:
                    pass  # Expired, deleted or replaced in the meantime.
                array._source.dead = None
        except Error:
            # The error from a server that is gone must not hide an exception raised in the block.
            if kind is None:
                raise


class Client(Creation):
    """A connection, returned by connect(). Any number of threads may use it. It is a context
    manager."""

    def __init__(self, options: Options) -> None:
        self._core = Core(options)
        self._io = Blocking(options)
        if not self._io.ready(options.connect_timeout):
            why = options.unreachable(self._io.why())
            self._io.close()
            raise Unreachable(why, "UNAVAILABLE")
        _open.add(self)
        _sweep.begin()
        self._core.dead.wake = _sweep.waker(self._core, self._io)
        end = functools.partial(_end, self._core, self._io)
        self._dropped = weakref.finalize(self, _sweep.later, end)
        self._dropped.atexit = False

    # --- buffers

    def put(
        self,
        array: Any,
        name: Optional[str] = None,
        *,
        dtype: Any = None,
        replace: bool = False,
        ttl: Ttl = None,
        device: str = "",
        placement: Placement = (),
        progress: Progress = None,
    ) -> Array:
        """Uploads an array of any size; if the connection breaks, the upload resumes where it
        stopped.

        name has 1 to 128 characters of [a-zA-Z0-9._/-]; a buffer without a name is deleted after
        the last reference to it is gone. ttl is a string such as "10m", a number of seconds, or a
        timedelta. device is the name of a device, such as "cuda:0" or "cpu". placement is given
        instead of device: "all", or the devices among which the array is divided. progress is True
        for a progress bar, or a function that is called with the bytes transferred and the total.
        Raises BufferExists if the name is taken and replace is false.
        """
        leaf = self._run(
            self._core.put(array, name, dtype, replace, ttl, device, placement, progress)
        )
        return self._wrap(leaf, leaf.whole)  # type: ignore[return-value]

    def load(
        self,
        path: Path,
        name: Optional[str] = None,
        *,
        prefix: Optional[str] = None,
        only: Optional[Collection[str]] = None,
        dtype: Any = None,
        replace: bool = False,
        ttl: Ttl = None,
        device: str = "",
        placement: Placement = (),
        progress: Progress = None,
    ) -> Any:
        """Uploads the arrays of a .npy, .npz or .safetensors file, of a folder of such files, or
        the columns of a .parquet, .feather or .arrow file (through pyarrow). For a .npy file,
        returns its array. Otherwise returns a dict, whose keys are the names of tensors, members or
        columns. For a folder, "FILE/" precedes these names, and FILE is the key of a .npy file,
        where FILE is the file's name without its suffix.

        A buffer's name is prefix + FILE for a .npy file and prefix + "FILE/KEY" otherwise, with "_"
        for characters that names cannot have; name replaces FILE. Without name and prefix, the
        buffers are unnamed. `only` lists the names to load from each file. The other arguments are
        those of put(). If an upload fails, the buffers that were already created are deleted; with
        replace they stay, because what they replaced cannot be brought back. All headers are
        checked before the first upload. Raises BadFile if a file is damaged or no server would
        accept a shape, BadName if a name would be too long, Unsupported if the server lacks a type
        and no dtype is given, and OSError if a file cannot be read."""
        made: Dict[str, Array] = {}
        try:
            for key, to, read in _files.arrays_of(path, name, prefix, only, dtype):
                made[key] = self.put(
                    read(),
                    to,
                    dtype=dtype,
                    replace=replace,
                    ttl=ttl,
                    device=device,
                    placement=placement,
                    progress=progress,
                )
        except BaseException:
            with contextlib.suppress(Error):
                for one in () if replace else made.values():
                    one.delete()
            raise
        return made.get("", made)

    def save(self, path: Path, arrays: Any) -> None:
        """Downloads an array or expression into a .npy file, or a mapping of names to arrays and
        expressions into a .npz or .safetensors file. The arrays are downloaded one after the other.
        Replaces an existing file only at the end. Raises OSError if the file cannot be written, and
        the errors of numpy()."""
        with contextlib.closing(_files.write(path, arrays)) as writer:
            wanted = next(writer, None)
            while wanted is not None:
                try:
                    wanted = writer.send(wanted.numpy())
                except StopIteration:
                    return

    def import_from(
        self,
        server: str,
        source: str,
        name: Optional[str] = None,
        *,
        version: int = 0,
        replace: bool = False,
        ttl: Ttl = None,
        device: str = "",
        timeout: float = 3600.0,
    ) -> Array:
        """Creates a buffer with data that the server fetches from another server, at host:port. No
        data passes through this process. version is the version that the source must have; 0
        accepts any version. timeout is the time for the whole import in seconds. name, replace, ttl
        and device are those of put(). Raises SourceNotAllowed if this server may not import from
        that server; also SourceRefused, SourceUnreachable, SourceStalled and the errors of
        put()."""
        leaf = self._run(
            self._core.import_from(
                server, source, name, version, replace, ttl, device, timeout
            )
        )
        return self._wrap(leaf, leaf.whole)  # type: ignore[return-value]

    def __getitem__(self, name: str) -> Array:
        """Returns the current version of the READY buffer with this name. Raises BufferNotFound."""
        leaf = self._run(self._core.find(name))
        return self._wrap(leaf, leaf.whole)  # type: ignore[return-value]

    __iter__ = None  # Otherwise Python would request the buffers 0, 1, 2...

    def __contains__(self, name: str) -> bool:
        """Returns whether there is a READY buffer with this name."""
        try:
            return self[name] is not None
        except (BufferNotFound, BufferNotReady):
            return False

    def list(self, prefix: str = "") -> List[Array]:
        """Returns all READY buffers whose names begin with `prefix`, sorted by name."""
        leaves = self._run(self._core.list(prefix))
        return [self._wrap(leaf, leaf.whole) for leaf in leaves]  # type: ignore[misc]

    def delete(self, name: str) -> None:
        """Unlinks a name and all its drafts. Raises BufferNotFound if there is nothing to
        unlink."""
        self._run(self._core.delete(name))

    def snapshot(self, timeout: float = 3600.0) -> Any:
        """Makes the server write READY buffers to its --data-dir, so that a later server restores
        them: those of the caller's tenant, or, for an admin, those of all tenants. Returns a
        SnapshotResponse. timeout is the time for the whole snapshot in seconds; the server
        completes a snapshot even if this process no longer waits for it. Raises SnapshotsOff if the
        server has no --data-dir, SnapshotFailed if it cannot write, and RoleTooSmall without the
        role write; also Draining, ConnectionLost and DeadlineExceeded."""
        return self._run(self._core.snapshot(timeout))

    def scope(self, ttl: Ttl = "10m") -> Scope:
        """Returns a context manager. The names created through it are deleted when the context
        ends, or after the ttl at the latest."""
        return Scope(self, ttl)

    # --- expressions

    def compute(self, *expressions: Expr) -> List[npt.NDArray[Any]]:
        """Returns the elements of several expressions from one call; parts that the expressions
        share are computed once."""
        found, stats = self._run(self._core.evaluate(terms_of(self, expressions)))
        for expression in expressions:
            expression._stats = stats
        return found  # type: ignore[no-any-return]

    def keep(self, *expressions: Expr) -> List[Array]:
        """Computes several expressions in one call and leaves the elements on the server as unnamed
        arrays, each of which is deleted after the last reference to it is gone. The errors are
        those of Expr.save."""
        leaves, stats = self._run(self._core.keep(terms_of(self, expressions)))
        for expression in expressions:
            expression._stats = stats
        return [self._wrap(leaf, leaf.whole) for leaf in leaves]  # type: ignore[misc]

    def call(self, method: str, **fields: Any) -> Any:
        """Calls any unary method of the protocol by its name and the fields of its request, as in
        client.call("GetServerInfo"). The call is not retried. Returns the response message."""
        return self._run(self._core.unary(method, False, **fields))

    def info(self) -> Any:
        """Returns the server's devices, limits and budgets (GetServerInfoResponse). Raises
        ConnectionLost or DeadlineExceeded."""
        return self._run(self._core.unary("GetServerInfo"))

    # --- the connection

    def close(self) -> None:
        """Deletes the unnamed buffers and unfinished uploads of put(), and disconnects. This also
        happens when the process ends. If the server does not answer, close() waits for a second or
        two."""
        _open.discard(self)
        if not self._core.own:
            return  # A forked process has nothing to close.
        self._dropped.detach()
        _end(self._core, self._io)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<tessera.Client {self._core.options.target!r}>"

    def __reduce__(self) -> Any:
        raise TypeError("a connection cannot be pickled: call connect() in the other process")

    def _wrap(self, source: Any, view: View) -> Expr:
        return (Array if isinstance(source, Leaf) else Expr)(self, source, view)

    def _run(self, steps: _core.Steps) -> Any:
        try:
            if self._core.dead:
                self._io.forget(self._core.take_dead())
            return self._io.run(steps)
        except KeyboardInterrupt as interrupt:
            self._io.interrupted(interrupt)
            self._io.forget(self._core.take_dead())
            raise
        except Error:
            if self._core.closed:
                raise closed() from None  # Closing deletes the buffers.
            raise


def connect(target: str = "127.0.0.1:50051", **options: Any) -> Client:
    """Returns a client of the server at host:port or unix:path. Waits until the server answers.

    timeout is the time for a call in seconds, including retries (default: 60). The server must
    answer within connect_timeout seconds (10). A transfer may make no progress for stall_timeout
    seconds (60). retry_refused says whether to retry calls that the server refuses because it is
    full (True). shared_memory says whether large arrays go through memory that a server on this
    host shares (True). unnamed_ttl is the lifetime of unnamed buffers whose client has died
    ("24h"); if the server's limit (--max-ttl) is lower, that limit applies. tls says whether to use
    TLS with the system's certificate authorities (False). tls_ca is a file of authorities to trust.
    tls_cert and tls_key are files with the client's certificate and key. tls_server_name is the
    name that the server's certificate must have. route is a buffer's name, which is sent as
    "tessera-route"; a proxy forwards the calls to the server of that name's folder. The token, or
    the content of token_file, is sent as "authorization: Bearer"; without either, the environment
    variable TESSERA_TOKEN is used. Raises ValueError if a token would be sent to another host
    without TLS, and Unreachable if no server answers.
    """
    return Client(Options(target, **options))
