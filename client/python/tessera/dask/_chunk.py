"""A chunk of a Dask array that is on a server, and how it is sent."""

import concurrent.futures
import secrets
from typing import Any, Callable, Dict, Optional, Tuple, TypeVar

import dask.base
import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from .._client import Array
from ..wire._connect import duration
from ..wire._errors import Error
from . import _servers

# How long a handle keeps its array alive after it was sent, and after it has arrived.
TICKET_TTL = "10m"
ARRIVED_TTL = "30s"

_fetches = concurrent.futures.ThreadPoolExecutor(4, "tessera-fetch")
# Implementations of NumPy functions that the server cannot compute for chunks by itself.
FUNCTIONS: Dict[Any, Callable[..., Any]] = {}


_S = TypeVar("_S", bound="Shaped")


class Shaped(NDArrayOperatorsMixin):
    """The base of Chunk and Joined: operators, and members that follow from shape and type."""

    shape: Tuple[int, ...]
    dtype: "np.dtype[Any]"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d array has no len()")
        return self.shape[0]

    def __array__(self, *_: Any, **__: Any) -> npt.NDArray[Any]:
        raise TypeError(
            "chunks are not downloaded implicitly: use tessera.dask.numpy(x), or chunk.numpy()")

    def chunk(self) -> "Chunk":
        """Returns the elements as one chunk."""
        raise NotImplementedError

    def reshape(self, *shape: Any) -> "Chunk":
        return self.chunk()._apply(lambda x: x.reshape(*shape), self)  # type: ignore[no-any-return]

    def ravel(self) -> "Chunk":
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> "Chunk":
        return _view(self.chunk(), lambda array: array.transpose(*axes))

    @property
    def T(self) -> "Chunk":
        return self.transpose()

    def squeeze(self, axis: Any = None) -> "Chunk":
        return _view(self.chunk(), lambda array: array.squeeze(axis))

    def copy(self: "_S") -> "_S":
        return self

    def dot(self, other: Any) -> Any:
        return np.dot(self, other)


class Chunk(Shaped):
    """An array on a server as a chunk of a Dask array. The server computes NumPy operations on it
    immediately, and the results are other chunks. A chunk without elements needs no
    server. Chunks are immutable.

    A reduction with a result of at most 1 MiB gives a NumPy array."""

    __array_priority__ = 2000

    def __init__(self, array: Any, address: str = "") -> None:
        """array is a server-side array, or a NumPy array that stays in this process."""
        self._array = array
        self._address = address
        self._arriving: Any = None
        self.shape = tuple(array.shape)
        self.dtype = array.dtype

    def __repr__(self) -> str:
        where = self._address or "no server"
        return f"<tessera.dask.Chunk on {where} shape={self.shape} dtype={self.dtype}>"

    @property
    def array(self) -> Any:
        """The ts.Array. If it is being fetched, waits for it, and raises the errors of
        Client.import_from."""
        if self._arriving is not None:
            self._array = self._arriving.result()
            self._arriving = None
        return self._array

    def numpy(self) -> npt.NDArray[Any]:
        """Returns the elements as a NumPy array in this process."""
        array = self.array
        if isinstance(array, np.ndarray):
            return array
        return array.numpy()  # type: ignore[no-any-return]

    # --- operations

    def chunk(self) -> "Chunk":
        return self

    def _apply(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        args, options = _whole(args), {name: _whole(value) for name, value in options.items()}
        return _computed(lambda: function(*_opened(args), **_opened_in(options)), args, options)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return self._apply(getattr(ufunc, method), *inputs, **options)

    def __array_function__(self, function: Any, _: Any, args: Any, options: Any) -> Any:
        own = FUNCTIONS.get(function)
        if own is not None:
            return own(*args, **options)
        return self._apply(function, *args, **options)

    def __getitem__(self, key: Any) -> "Chunk":
        return _view(self, lambda array: array[key])

    def astype(self, dtype: Any, copy: bool = True, **_: Any) -> "Chunk":
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        return self._apply(lambda x: x.astype(dtype), self)  # type: ignore[no-any-return]

    def __bool__(self) -> bool:
        return bool(self.numpy().item())

    def __float__(self) -> float:
        return float(self.numpy().item())

    def __int__(self) -> int:
        return int(self.numpy().item())

    # --- pickling

    def __reduce__(self) -> Any:
        array = self.array
        if isinstance(array, np.ndarray):
            return Chunk, (array,)
        ticket = f"unnamed/ticket/{secrets.token_hex(12)}"
        if array._view == array._source.whole:
            sent = array.link(ticket, ttl=TICKET_TTL)
        else:
            sent = array.copy(ticket, ttl=TICKET_TTL)
        return _arrived, (self._address, ticket, sent.version, self.shape, self.dtype.str)

    def __dask_tokenize__(self) -> Any:
        array = self.array
        if isinstance(array, np.ndarray):
            return dask.base.normalize_token(array)
        view = array._view
        return (self._address, array.name, array.version, view.offset, view.shape, view.strides)


def _arrived(address: str, ticket: str, version: int, shape: Any, dtype: str) -> Chunk:
    """Returns the chunk of a handle. Fetching begins immediately, and only a caller that needs the
    array waits for it, because the thread that reads handles has other handles to read."""
    chunk = Chunk(np.empty(0, dtype), _servers.own_address() or address)
    chunk.shape = tuple(shape)
    chunk.dtype = np.dtype(dtype)
    chunk._arriving = _fetches.submit(_fetch, address, ticket, version)
    return chunk


def _fetch(address: str, ticket: str, version: int) -> Array:
    there = _servers.client_of(address)
    if _servers.own_address() in ("", address):
        array = there[ticket]
        leaf = there._run(there._core.link(array._source, None))
        found: Array = there._wrap(leaf, leaf.whole)  # type: ignore[assignment]
    else:
        found = _servers.own().import_from(address, ticket, version=version)
    try:  # Other processes may have received the same handle.
        there.call("UpdateBuffer", name=ticket, ttl=duration(ARRIVED_TTL))
    except Error:
        pass
    return found


def _whole(values: Any) -> Any:
    """Replaces each Joined with one chunk, also in lists and tuples."""
    if isinstance(values, Shaped):
        return values.chunk()
    if isinstance(values, (list, tuple)):
        return type(values)(_whole(value) for value in values)
    return values


def _opened(values: Any) -> Any:
    """Replaces chunks with their arrays, also in lists and tuples. The server lacks uint64, the
    type of NumPy's sums of uint8, so it gets int64 instead."""
    if isinstance(values, Chunk):
        values = values.array
    if isinstance(values, (np.ndarray, np.generic)) and values.dtype == np.uint64:
        return values.astype(np.int64)
    if isinstance(values, np.dtype) and values == np.uint64:
        return np.dtype(np.int64)
    if isinstance(values, (list, tuple)):
        return type(values)(_opened(value) for value in values)
    return values


def _opened_in(options: Dict[str, Any]) -> Dict[str, Any]:
    return {name: _opened(value) for name, value in options.items()}


def _first_remote(values: Any) -> Optional[Chunk]:
    for value in values:
        if isinstance(value, Chunk) and not isinstance(value.array, np.ndarray):
            return value
        if isinstance(value, (list, tuple)):
            found = _first_remote(value)
            if found is not None:
                return found
    return None


def wrapped(value: Any, address: str) -> Any:
    """Wraps the result of an operation in chunks. Expressions are computed."""
    if isinstance(value, tuple):
        return tuple(wrapped(one, address) for one in value)
    if isinstance(value, np.ndarray):
        return Chunk(value)
    if not hasattr(value, "_session"):
        return value
    if not isinstance(value, Array):
        (value,) = value._session.keep(value)
    return Chunk(value, address)


def _computed(work: Callable[[], Any], args: Any, options: Dict[str, Any]) -> Any:
    remote = _first_remote([*args, *options.values()])
    result = work()
    if remote is None:  # All arrays are empty, so NumPy computed the result.
        return Chunk(np.asarray(result)) if isinstance(result, np.generic) else wrapped(result, "")
    return wrapped(result, remote._address)


def _view(chunk: Chunk, of: Callable[[Any], Any]) -> Chunk:
    return wrapped(of(chunk.array), chunk._address)  # type: ignore[no-any-return]
