"""NumPy's functions that change shapes: views, and copies where strides cannot express them."""

from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from . import _dtypes, _ops
from ._errors import BadShape, Unsupported
from ._views import broadcast_shapes, normalize_axis


def flat(a: Any) -> Any:
    return a.reshape(-1)


def diagonal(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    return _moved(a, (axis1, axis2), (-2, -1))._viewed(lambda term: _ops.diagonal(term, offset))


def _moved(a: Any, source: Any, destination: Any) -> Any:
    pairs = [
        [normalize_axis(one, a.ndim) for one in ([x] if hasattr(x, "__index__") else x)]
        for x in (source, destination)
    ]
    if len(pairs[0]) != len(pairs[1]) or any(len(set(p)) != len(p) for p in pairs):
        raise BadShape(f"moveaxis from {source} to {destination}")
    order = [i for i in range(a.ndim) if i not in pairs[0]]
    for to, which in sorted(zip(pairs[1], pairs[0])):
        order.insert(to, which)
    return a.transpose(order)


def _flip(a: Any, axis: Any = None) -> Any:
    axes = _ops.axes_of(axis, a.ndim)
    return a[tuple(slice(None, None, -1 if i in axes else 1) for i in range(a.ndim))]


def _expand_dims(a: Any, axis: Any) -> Any:
    given = (axis,) if hasattr(axis, "__index__") else tuple(axis)
    rank = a.ndim + len(given)
    axes = {normalize_axis(one, rank) for one in given}
    return a[tuple(None if i in axes else slice(None) for i in range(rank))]


def _split(a: Any, sections: Any, axis: int = 0) -> List[Any]:
    axis = normalize_axis(axis, a.ndim)
    extent = a.shape[axis]
    if hasattr(sections, "__index__"):
        if extent % sections:
            raise ValueError("array split does not result in an equal division")
        sections = [extent // sections * i for i in range(1, sections)]
    ends = [0, *sections, extent]
    before = (slice(None),) * axis
    return [a[(*before, slice(begin, end))] for begin, end in zip(ends, ends[1:])]


def _diff(a: Any, n: int = 1, axis: int = -1) -> Any:
    if n < 0:
        raise ValueError(f"differences of order {n}: it is 0 or more")
    before = (slice(None),) * normalize_axis(axis, a.ndim)
    for _ in range(n):
        high, low = a[(*before, slice(1, None))], a[(*before, slice(None, -1))]
        a = high != low if a.dtype.kind == "b" else high - low
    return a


def _tile(a: Any, reps: Any) -> Any:
    times = (reps,) if hasattr(reps, "__index__") else tuple(reps)
    rank = max(len(times), a.ndim)
    times = (1,) * (rank - len(times)) + times
    shape = (1,) * (rank - a.ndim) + a.shape
    wide = [part for pair in zip(times, shape) for part in pair]
    apart = a.reshape([part for extent in shape for part in (1, extent)])
    return apart.broadcast_to(wide).reshape([t * extent for t, extent in zip(times, shape)])


def _repeat(a: Any, repeats: Any, axis: Optional[int] = None) -> Any:
    if not hasattr(repeats, "__index__"):
        raise Unsupported("one number of repeats for all elements: the server has no gather")
    if axis is None:
        a, axis = a.reshape(-1), 0
    axis = normalize_axis(axis, a.ndim)
    wide = _expand_dims(a, axis + 1)
    shape = [*a.shape[: axis + 1], repeats, *a.shape[axis + 1 :]]
    result = list(a.shape)
    result[axis] *= repeats
    return wide.broadcast_to(shape).reshape(result)


def _rot90(a: Any, k: int = 1, axes: Tuple[int, int] = (0, 1)) -> Any:
    k %= 4
    if k == 2:
        return _flip(a, axes)
    if k == 1:
        return _flip(a, axes[1]).swapaxes(*axes)
    return _flip(a.swapaxes(*axes), axes[1]) if k == 3 else a


def _broadcast_arrays(*arrays: Any) -> List[Any]:
    shape: Tuple[int, ...] = ()
    for array in arrays:
        shape = broadcast_shapes(shape, np.shape(array))
    return [
        a.broadcast_to(shape) if hasattr(a, "_session") else np.broadcast_to(a, shape)
        for a in arrays
    ]


def full_like(a: Any, fill_value: Any, dtype: Any = None, shape: Any = None) -> Any:
    kind = a.dtype if dtype is None else _dtypes.dtype_of(dtype)
    return a._make(_ops.full(fill_value, a.shape if shape is None else shape, kind))


def _at_least(rank: int) -> Callable[..., Any]:
    def call(*arrays: Any) -> Any:
        found = [a if a.ndim >= rank else a[(None,) * (rank - a.ndim)] for a in arrays]
        return found[0] if len(found) == 1 else found

    return call


def _method(name: str) -> Callable[..., Any]:
    return lambda x, *args, **options: getattr(x, name)(*args, **options)


MANIPULATIONS: Dict[Any, Callable[..., Any]] = {}


def add(
    table: Dict[Any, Callable[..., Any]], space: Any, functions: Dict[str, Callable[..., Any]]
) -> None:
    """Adds what stands for NumPy's functions, by their names in `space`; versions lack some."""
    for name, call in functions.items():
        if hasattr(space, name):
            table[getattr(space, name)] = call


add(
    MANIPULATIONS,
    np,
    {
        "transpose": lambda x, axes=None: x.T if axes is None else x.transpose(axes),
        "swapaxes": _method("swapaxes"),
        "moveaxis": _moved,
        "reshape": lambda x, *shape, **more: x.reshape(*shape, *more.values()),
        "ravel": flat,
        "squeeze": _method("squeeze"),
        "expand_dims": _expand_dims,
        "broadcast_to": _method("broadcast_to"),
        "broadcast_arrays": _broadcast_arrays,
        "flip": _flip,
        "fliplr": lambda x: _flip(x, 1),
        "flipud": lambda x: _flip(x, 0),
        "rot90": _rot90,
        "diagonal": diagonal,
        "diff": _diff,
        "split": _split,
        "tile": _tile,
        "repeat": _repeat,
        "copy": lambda x: x,
        "atleast_1d": _at_least(1),
        "atleast_2d": _at_least(2),
        "full_like": full_like,
        "zeros_like": lambda x, **options: full_like(x, 0, **options),
        "ones_like": lambda x, **options: full_like(x, 1, **options),
        "shape": lambda x: x.shape,
        "ndim": lambda x: x.ndim,
        "size": lambda x, axis=None: x.size if axis is None else x.shape[axis],
        "permute_dims": lambda x, axes: x.transpose(axes),
        "matrix_transpose": lambda x: x.mT,
        "unstack": lambda x, *, axis=0: tuple(_moved(x, axis, 0)),
    },
)
add(
    MANIPULATIONS,
    np.linalg,
    {
        "diagonal": lambda x, *, offset=0: diagonal(x, offset, -2, -1),
        "matrix_transpose": lambda x: x.mT,
    },
)
