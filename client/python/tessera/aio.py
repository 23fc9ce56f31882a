"""The asyncio client. Its names are those of the blocking client; calls to the server are awaited.

    async with await ts.aio.connect("gpu:50051") as t:
        x = await t.put(array)
        value = await (x @ x.T).sum().numpy()
"""

import asyncio
import atexit
import contextlib
import functools
import weakref
from typing import Any, Callable, Collection, Coroutine, Dict, List, Optional, Tuple

import numpy.typing as npt

from . import _core, _files, _names, _sweep
from ._async import Async
from ._blocking import Blocking
from ._core import Core
from ._files import Path
from ._names import *  # noqa: F403
from .arrays._creation import Creation
from .arrays._lazy import Lazy, picked, terms_of
from .graph import _dtypes
from .graph._graph import Leaf
from .graph._views import View
from .transfers._progress import Progress
from .wire._connect import Options, Placement, Ttl
from .wire._errors import Error, Unreachable, closed

__all__ = ["Array", "Client", "Expr", "Scope", "connect", *_names.__all__]

_open: "weakref.WeakSet[Client]" = weakref.WeakSet()


def __dir__() -> List[str]:
    return __all__


def _without_loop(core: Core, steps: Callable[[], _core.Steps]) -> None:
    """Runs steps of a client on a new connection, because the client's loop may be gone. Does
    nothing for a client that was closed or has nothing to delete."""
    if core.closed or not core.own or not core.has_unnamed:
        return
    io = Blocking(core.options)
    try:
        if io.ready(_core.LAST_WORDS_S):
            io.run(steps())
    finally:
        io.close()


@atexit.register
def _close_all() -> None:
    for client in list(_open):
        _without_loop(client._core, client._core.close)


# When a grpc.aio channel is closed, it evaluates the truth of `self` in the outermost frame of
# every task of the loop, and an array has no truth value. So the coroutines of arrays are functions
# without `self`.


class Expr(Lazy):
    """Like ts.Expr; numpy(), save() and item() are awaited."""

    __slots__ = ()

    def numpy(self) -> Coroutine[Any, Any, npt.NDArray[Any]]:
        """Like ts.Expr.numpy: computes the result in one call."""
        return _numpy(self)

    def save(
        self,
        name: Optional[str] = None,
        replace: bool = False,
        ttl: Ttl = None,
        placement: Placement = (),
    ) -> "Coroutine[Any, Any, Array]":
        """Like ts.Expr.save: leaves the elements on the server."""
        return _save(self, name, replace, ttl, placement)

    def item(self, *place: Any) -> Coroutine[Any, Any, Any]:
        """Like ts.Expr.item: returns the only element, or the element at a position."""
        return _item(picked(self, place))

    def __bool__(self) -> bool:
        raise TypeError("an array of ts.aio has no truth value: use bool(await x.item())")

    def __float__(self) -> float:
        raise TypeError("use float(await x.item())")

    def __int__(self) -> int:
        raise TypeError("use int(await x.item())")

    def __complex__(self) -> complex:
        raise TypeError("use complex(await x.item())")

    def __contains__(self, value: Any) -> bool:
        """Raises TypeError, because the result would have to be awaited."""
        raise TypeError("use await (x == value).any().item()")


class Array(Expr):
    """Like ts.Array."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The buffer's name."""
        return self._source.name  # type: ignore[no-any-return]

    @property
    def version(self) -> int:
        """The buffer's version."""
        return self._source.version  # type: ignore[no-any-return]

    @property
    def device(self) -> str:
        """The device that the buffer is on; for a sharded buffer, the device of its first shard."""
        return self._source.buffer.device  # type: ignore[no-any-return]

    @property
    def devices(self) -> Tuple[str, ...]:
        """The devices among which the buffer is divided, in order."""
        return self._source.devices  # type: ignore[no-any-return]

    def numpy(
        self, progress: Progress = None, out: Any = None
    ) -> Coroutine[Any, Any, npt.NDArray[Any]]:
        """Like ts.Array.numpy: returns the elements as a NumPy array in this process."""
        return _fetch(self, progress, out)

    def copy(
        self,
        name: Optional[str] = None,
        dtype: Any = None,
        replace: bool = False,
        ttl: Ttl = None,
        device: str = "",
        placement: Placement = (),
        order: Any = None,
    ) -> "Coroutine[Any, Any, Array]":
        """Like ts.Array.copy: copies the elements to a separate buffer."""
        session: Client = self._session
        copy = session._core.copy(
            self._source, self._view, name, dtype, replace, ttl, device, placement
        )
        return session._made(copy)

    def link(
        self, name: str, replace: bool = False, ttl: Ttl = None
    ) -> "Coroutine[Any, Any, Array]":
        """Like ts.Array.link: creates another name for the buffer's memory."""
        session: Client = self._session
        return session._made(session._core.link(self._source, name, replace, ttl))

    def delete(self) -> Coroutine[Any, Any, None]:
        """Like ts.Array.delete: unlinks this version of the buffer."""
        session: Client = self._session
        return session._run(session._core.delete(self.name, self.version))


async def _numpy(expression: Expr) -> npt.NDArray[Any]:
    session: Client = expression._session
    core = session._core
    term = expression._term()
    prepared = expression._prepared
    if prepared is None:
        prepared = expression._prepared = core.prepare(term)
    failures: List[Error] = []
    if prepared is not None and not core.dead:
        # The usual path. It leaves out the steps that are needed only after a failure.
        try:
            timeout = core.options.timeout
            response = await session._io.call(prepared.method, prepared.request, timeout)
            array, expression._stats = core.answered(term, prepared, response)
            return array
        except Error as error:
            failures.append(error)
    array, expression._stats = await session._run(core.evaluate_one(term, prepared, failures))
    return array


async def _save(
    expression: Expr, name: Optional[str], replace: bool, ttl: Ttl, placement: Placement
) -> Array:
    session: Client = expression._session
    save = session._core.save(expression._term(), name, replace, ttl, placement)
    leaf, expression._stats = await session._run(save)
    return session._wrap(leaf, leaf.whole)  # type: ignore[return-value]


async def _item(expression: Expr) -> Any:
    return (await expression.numpy()).item()


async def _fetch(array: Array, progress: Progress, out: Any) -> npt.NDArray[Any]:
    session: Client = array._session
    steps = session._core.fetch(array._source, array._view, progress, out)
    found: npt.NDArray[Any] = await session._run(steps)
    return _dtypes.to_host(found) if out is None else found


class Client(Creation):
    """Like ts.Client, for the event loop in which it was created."""

    def __init__(self, options: Options) -> None:
        self._core = Core(options)
        self._io = Async(options)

    async def _connect(self) -> None:
        options = self._core.options
        if not await self._io.ready(options.connect_timeout):
            why = options.unreachable(await self._io.why())
            await self._io.close()
            raise Unreachable(why, "UNAVAILABLE")
        _open.add(self)
        _sweep.begin()
        loop, of_self = asyncio.get_running_loop(), weakref.ref(self)

        def wake() -> None:
            client = of_self()
            if client is None:
                return  # The finalizer below deletes its buffers.
            io, core = client._io, client._core
            try:
                loop.call_soon_threadsafe(lambda: io.forget(core.take_dead()))
            except RuntimeError:  # The loop is closed, but arrays may outlive it.
                _sweep.later(functools.partial(_without_loop, core, core.flush))

        self._core.dead.wake = wake
        end = functools.partial(_without_loop, self._core, self._core.close)
        weakref.finalize(self, _sweep.later, end).atexit = False

    async def put(
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
        """Like ts.Client.put."""
        put = self._core.put(array, name, dtype, replace, ttl, device, placement, progress)
        return await self._made(put)

    async def load(
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
        """Like ts.Client.load. Headers are read in the event loop, and arrays in a thread."""
        loop = asyncio.get_running_loop()
        made: Dict[str, Array] = {}
        try:
            for key, to, read in _files.arrays_of(path, name, prefix, only, dtype):
                made[key] = await self.put(
                    await loop.run_in_executor(None, read),
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
                    await one.delete()
            raise
        return made.get("", made)

    async def save(self, path: Path, arrays: Any) -> None:
        """Like ts.Client.save."""
        with contextlib.closing(_files.write(path, arrays)) as writer:
            wanted = next(writer, None)
            while wanted is not None:
                try:
                    wanted = writer.send(await wanted.numpy())
                except StopIteration:
                    return

    async def get(self, name: str) -> Array:
        """Returns the current version of the READY buffer with this name. Raises BufferNotFound."""
        return await self._made(self._core.find(name))

    async def import_from(
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
        """Like ts.Client.import_from."""
        return await self._made(
            self._core.import_from(
                server, source, name, version, replace, ttl, device, timeout
            )
        )

    async def list(self, prefix: str = "") -> List[Array]:
        """Like ts.Client.list."""
        leaves = await self._run(self._core.list(prefix))
        return [self._wrap(leaf, leaf.whole) for leaf in leaves]  # type: ignore[misc]

    async def delete(self, name: str) -> None:
        """Like ts.Client.delete."""
        await self._run(self._core.delete(name))

    async def snapshot(self, timeout: float = 3600.0) -> Any:
        """Like ts.Client.snapshot."""
        return await self._run(self._core.snapshot(timeout))

    async def compute(self, *expressions: Expr) -> List[npt.NDArray[Any]]:
        """Like ts.Client.compute."""
        found, stats = await self._run(self._core.evaluate(terms_of(self, expressions)))
        for expression in expressions:
            expression._stats = stats
        return found  # type: ignore[no-any-return]

    async def keep(self, *expressions: Expr) -> List[Array]:
        """Like ts.Client.keep."""
        leaves, stats = await self._run(self._core.keep(terms_of(self, expressions)))
        for expression in expressions:
            expression._stats = stats
        return [self._wrap(leaf, leaf.whole) for leaf in leaves]  # type: ignore[misc]

    async def call(self, method: str, **fields: Any) -> Any:
        """Like ts.Client.call."""
        return await self._run(self._core.unary(method, False, **fields))

    async def info(self) -> Any:
        """Like ts.Client.info."""
        return await self._run(self._core.unary("GetServerInfo"))

    def scope(self, ttl: Ttl = "10m") -> "Scope":
        """Like ts.Client.scope, but returns an asynchronous context manager."""
        return Scope(self, ttl)

    async def close(self) -> None:
        """Like ts.Client.close."""
        _open.discard(self)
        answers = await self._io.run(self._core.close())
        self._core.pool.close()
        await self._io.close(answers)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<tessera.aio.Client {self._core.options.target!r}>"

    def __reduce__(self) -> Any:
        raise TypeError("a connection cannot be pickled: call connect() in the other process")

    def _wrap(self, source: Any, view: View) -> Expr:
        return (Array if isinstance(source, Leaf) else Expr)(self, source, view)

    async def _made(self, steps: _core.Steps) -> Array:
        leaf = await self._run(steps)
        return self._wrap(leaf, leaf.whole)  # type: ignore[return-value]

    async def _run(self, steps: _core.Steps) -> Any:
        if self._core.dead:
            self._io.forget(self._core.take_dead())
        try:
            return await self._io.run(steps)
        except asyncio.CancelledError:
            self._io.forget(self._core.take_dead())
            raise
        except Error:
            if self._core.closed:
                raise closed() from None  # Closing deletes the buffers.
            raise


class Scope:
    """Like ts.Scope, but used with ``async with``."""

    def __init__(self, client: Client, ttl: Ttl) -> None:
        self._client = client
        self._ttl = ttl
        self._arrays: List[Array] = []

    async def put(self, array: Any, name: Optional[str] = None, **options: Any) -> Array:
        """Like ts.Scope.put."""
        options.setdefault("ttl", self._ttl)
        return self._own(await self._client.put(array, name, **options))

    async def save(
        self, expression: Expr, name: Optional[str] = None, replace: bool = False
    ) -> Array:
        """Like ts.Scope.save."""
        return self._own(await expression.save(name, replace, self._ttl))

    def _own(self, array: Array) -> Array:
        self._arrays.append(array)
        return array

    async def __aenter__(self) -> "Scope":
        return self

    async def __aexit__(self, kind: Any, *_: Any) -> None:
        arrays, self._arrays = self._arrays, []
        try:
            for array in arrays:
                try:
                    await array.delete()
                except LookupError:
                    pass  # Expired, deleted or replaced in the meantime.
                array._source.dead = None
        except Error:
            # The error from a server that is gone must not hide an exception raised in the block.
            if kind is None:
                raise


async def connect(target: str = "127.0.0.1:50051", **options: Any) -> Client:
    """Like ts.connect."""
    client = Client(Options(target, **options))
    await client._connect()
    return client
