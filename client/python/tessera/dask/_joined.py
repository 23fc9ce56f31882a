"""Reductions of chunks, and concatenated chunks."""

import functools
from typing import Any, Callable, Dict, List

import numpy as np
import numpy.typing as npt

from . import _servers
from ._chunk import FUNCTIONS, Chunk, Shaped, wrapped

# Results of reductions up to this number of bytes are downloaded to the worker immediately.
SMALL = 1 << 20


def _reduction(function: Any) -> Callable[..., Any]:
    """Returns a function that applies a NumPy reduction to one chunk. A small result is downloaded
    to this process."""

    def reduce(x: Any, axis: Any = None, dtype: Any = None, **options: Any) -> Any:
        if isinstance(x, Joined):
            return x.reduce(function, axis, dtype, options)
        array = x.array
        if dtype is not None:
            options["dtype"] = dtype
        if isinstance(array, np.ndarray):
            return Chunk(np.asarray(function(array, axis=axis, **options)))
        last = None
        if dtype is not None and x.dtype.kind in "iu" and np.dtype(dtype) != np.int32:
            # The server sums integers exactly as i64, without making a copy in another type.
            last = np.dtype(options.pop("dtype"))
        found = function(array, axis=axis, **options)
        if last is not None and last.kind != "u":
            found = found.astype(last)
        if found.nbytes > SMALL:
            return wrapped(found, x._address)
        home = np.asarray(found.numpy())
        # NumPy's sums of uint8 have an unsigned type that the server lacks.
        return home if last is None else home.astype(last, copy=False)

    return reduce


_REDUCTIONS: Dict[Any, Callable[..., Any]] = {
    function: _reduction(function)
    for function in (
        *(np.sum, np.prod, np.min, np.max, np.amin, np.amax, np.any, np.all),
        *(np.mean, np.var, np.std, np.argmin, np.argmax),
    )
}
_PAIRWISE: Dict[Any, Any] = {
    np.sum: np.add,
    np.prod: np.multiply,
    np.min: np.minimum,
    np.amin: np.minimum,
    np.max: np.maximum,
    np.amax: np.maximum,
}


def _method(function: Any) -> Callable[..., Any]:
    def method(self: Any, axis: Any = None, **options: Any) -> Any:
        return _REDUCTIONS[function](self, axis, **options)

    method.__doc__ = f"Like numpy.{function.__name__}."
    return method


def _asarray(value: Any, *_: Any, **options: Any) -> Any:
    """Implements np.asarray(value, like=chunk), with which Dask converts a small array to the
    chunk's kind."""
    if isinstance(value, Chunk):
        return value
    options.pop("like", None)
    return np.asarray(value, **options)


def _empty_like(prototype: Any, dtype: Any = None, shape: Any = None, **_: Any) -> Any:
    """Returns an array without elements. Dask calls this to find out whether structured arrays are
    supported; they are not."""
    dtype = np.dtype(prototype.dtype if dtype is None else dtype)
    if dtype.names:
        raise TypeError("Tessera servers do not support structured arrays")
    return np.empty(prototype.shape if shape is None else shape, dtype)


class Joined(Shaped):
    """Chunks that Dask concatenates along an axis before it reduces them, wherever the chunks are.
    Sums, products, minima and maxima along the axis are computed part by part. Other operations
    first join the parts into one chunk, through this process."""

    __array_priority__ = 2001

    def __init__(self, parts: List[Any], axis: int) -> None:
        self.parts = parts
        self.axis = int(axis) % parts[0].ndim
        self.dtype = np.result_type(*(part.dtype for part in parts))
        shape = list(parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in parts)
        self.shape = tuple(shape)

    def numpy(self) -> npt.NDArray[Any]:
        """Returns the elements as a NumPy array in this process."""
        return np.concatenate([numpy_of(part) for part in self.parts], self.axis)

    def chunk(self) -> Chunk:
        """Returns one chunk on this process's server."""
        return Chunk(_servers.own().put(self.numpy()), _servers.own_address())

    def reduce(self, function: Any, axis: Any, dtype: Any, options: Dict[str, Any]) -> Any:
        if function not in _PAIRWISE or self.axis not in _axes_of(self, axis):
            return _REDUCTIONS[function](self.chunk(), axis, dtype, **options)
        if dtype is not None:
            options["dtype"] = dtype
        parts = [function(part, axis=axis, **options) for part in self.parts]
        return functools.reduce(lambda a, b: _PAIRWISE[function](a, b), parts)

    def __getitem__(self, key: Any) -> Any:
        return self.chunk()[key]

    def astype(self, dtype: Any, **options: Any) -> "Joined":
        return Joined([part.astype(dtype, **options) for part in self.parts], self.axis)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        wholes = (one.chunk() if isinstance(one, Joined) else one for one in inputs)
        return getattr(ufunc, method)(*wholes, **options)

    def __array_function__(self, function: Any, _: Any, args: Any, options: Any) -> Any:
        if function in FUNCTIONS:
            return FUNCTIONS[function](*args, **options)
        wholes = (one.chunk() if isinstance(one, Joined) else one for one in args)
        return function(*wholes, **options)


def _axes_of(x: Any, axis: Any) -> List[int]:
    return list(range(x.ndim)) if axis is None else [int(i) % x.ndim for i in np.atleast_1d(axis)]


def numpy_of(part: Any) -> npt.NDArray[Any]:
    if isinstance(part, Shaped):
        return part.numpy()  # type: ignore[attr-defined, no-any-return]
    return np.asarray(part)


def concatenate(arrays: Any, axis: int = 0, **_: Any) -> Any:
    parts = [array for array in arrays if array.size] or list(arrays[:1])
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts, axis)
    return Joined(parts, axis)


def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    a, b = (x.chunk() if isinstance(x, Joined) else x for x in (a, b))
    if isinstance(a.array if isinstance(a, Chunk) else a, np.ndarray) and isinstance(
        b.array if isinstance(b, Chunk) else b, np.ndarray
    ):
        return Chunk(np.asarray(np.tensordot(numpy_of(a), numpy_of(b), axes)))
    if isinstance(axes, tuple):  # The server takes Python integers.
        axes = tuple(tuple(int(i) for i in np.atleast_1d(one)) for one in axes)
    return a._apply(_functions_tensordot, a, b, axes)


def _functions_tensordot(a: Any, b: Any, axes: Any) -> Any:
    return np.tensordot(a, b, axes)


def numel(x: Any, **options: Any) -> Any:
    """Returns, for each element of a reduction's result, the number of elements that were folded
    into it."""
    axis, keepdims = options.get("axis"), options.get("keepdims", True)
    dtype = options.get("dtype", np.float64)
    axes = _axes_of(x, axis)
    count = int(np.prod([x.shape[i] for i in axes], dtype=np.int64))
    shape = [1 if i in axes else n for i, n in enumerate(x.shape) if keepdims or i not in axes]
    return np.broadcast_to(np.array(count, dtype), shape).copy()


def divide(a: Any, b: Any, dtype: Any = None, **_: Any) -> Any:
    if isinstance(b, np.ndarray) and b.nbytes > SMALL and b.size and (b == b.flat[0]).all():
        b = b.flat[0]
    found = np.true_divide(a, b)
    return found if dtype is None else found.astype(dtype)


FUNCTIONS.update(
    {
    **_REDUCTIONS,
    np.concatenate: concatenate,
    np.tensordot: tensordot,
    np.asarray: _asarray,
    np.asanyarray: _asarray,
    np.array: _asarray,
    np.empty_like: _empty_like,
    }
)
for _name in "sum prod min max any all mean var std argmin argmax".split():
    for _kind in (Chunk, Joined):
        setattr(_kind, _name, _method(getattr(np, _name)))
