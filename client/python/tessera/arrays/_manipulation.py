"""NumPy functions that change shapes: views, and copies where strides cannot express the result.

Parameters have NumPy's names, because arguments are passed by name.
"""

from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from ..graph import _dtypes, _ops
from ..graph import _elementwise as e
from ..graph._views import (
    broadcast_shapes,
    extents,
    index_of,
    normalize_axes,
    normalize_axis,
    size_of,
)
from ..wire._errors import BadShape, Unsupported


def flat(a: Any) -> Any:
    return a.reshape(-1)


def diagonal(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """Returns a view whose last axis is the diagonal of two axes."""
    moved = _moved(a, (axis1, axis2), (-2, -1))
    return moved._make(_ops.diagonal(moved._term(), offset))


def _moved(a: Any, source: Any, destination: Any) -> Any:
    pairs = [normalize_axes(axes, a.ndim) for axes in (source, destination)]
    if len(pairs[0]) != len(pairs[1]):
        raise BadShape(f"moveaxis needs one destination per source: {source}, {destination}")
    order = [i for i in range(a.ndim) if i not in pairs[0]]
    for to, which in sorted(zip(pairs[1], pairs[0])):
        order.insert(to, which)
    return a.transpose(order)


def _flip(m: Any, axis: Any = None) -> Any:
    axes = _ops.axes_of(axis, m.ndim)
    return m[tuple(slice(None, None, -1 if i in axes else 1) for i in range(m.ndim))]


def _expand_dims(a: Any, axis: Any) -> Any:
    several = len(axis) if isinstance(axis, (tuple, list)) else 1
    axes = normalize_axes(axis, a.ndim + several)
    return a[tuple(None if i in axes else slice(None) for i in range(a.ndim + several))]


def _split(ary: Any, indices_or_sections: Any, axis: int = 0) -> List[Any]:
    axis = normalize_axis(axis, ary.ndim)
    extent = ary.shape[axis]
    if np.ndim(indices_or_sections) == 0:
        count = index_of(indices_or_sections, "the number of sections")
        if count <= 0 or extent % count:
            raise ValueError("array split does not result in an equal division")
        indices_or_sections = [extent // count * i for i in range(1, count)]
    ends = [0, *indices_or_sections, extent]
    before = (slice(None),) * axis
    return [ary[(*before, slice(begin, end))] for begin, end in zip(ends, ends[1:])]


def diff(a: Any, n: int = 1, axis: int = -1) -> Any:
    if n == 0:
        return a
    if index_of(n, "the order of differences") < 0:
        raise ValueError(f"the order of differences must be 0 or more, not {n}")
    before = (slice(None),) * normalize_axis(axis, a.ndim)
    for _ in range(n):
        high, low = a[(*before, slice(1, None))], a[(*before, slice(None, -1))]
        a = high != low if a.dtype.kind == "b" else high - low
    return a


def _repeated(a: Any, times: int, before: int, axis: int) -> Any:
    """For each index of the first `before` axes, repeats the elements of the other axes together,
    `times` times. The extent of `axis` grows by this factor."""
    if times == 1:
        return a
    if times < 0:
        raise ValueError(f"the number of repeats must be 0 or more, not {times}")
    shape = list(a.shape)
    shape[axis] *= times
    outer, inner = size_of(a.shape[:before]), size_of(a.shape[before:])
    wide = a.reshape(outer, 1, inner).broadcast_to((outer, times, inner))
    return wide.reshape(shape)


def _tile(A: Any, reps: Any) -> Any:
    times = extents(reps)
    rank = max(len(times), A.ndim)
    times = (1,) * (rank - len(times)) + times
    A = A.reshape((1,) * (rank - A.ndim) + A.shape)
    for axis, count in enumerate(times):
        A = _repeated(A, count, axis, axis)
    return A


def repeat(a: Any, repeats: Any, axis: Optional[int] = None) -> Any:
    """Each element, or each slice along an axis, repeated."""
    if np.size(repeats) != 1:
        raise Unsupported("repeats must be a single number: the server has no gather operation")
    repeats = index_of(np.asarray(repeats).item(), "the number of repeats")
    if axis is None or not a.ndim:
        a = a.reshape(-1)
    axis = normalize_axis(0 if axis is None else axis, a.ndim)
    return _repeated(a, repeats, axis + 1, axis)


def _rot90(m: Any, k: int = 1, axes: Tuple[int, int] = (0, 1)) -> Any:
    if len(normalize_axes(axes, m.ndim)) != 2:
        raise ValueError("rot90 takes two axes")
    k %= 4
    if k == 2:
        return _flip(m, axes)
    if k == 1:
        return _flip(m, axes[1]).swapaxes(*axes)
    return _flip(m.swapaxes(*axes), axes[1]) if k == 3 else m


def _broadcast_arrays(*args: Any) -> List[Any]:
    shape: Tuple[int, ...] = ()
    for array in args:
        shape = broadcast_shapes(shape, np.shape(array))
    return [
        a.broadcast_to(shape) if hasattr(a, "_session") else np.broadcast_to(a, shape) for a in args
    ]


def _full_like(a: Any, fill_value: Any, dtype: Any = None, shape: Any = None) -> Any:
    kind = a.dtype if dtype is None else _dtypes.dtype_of(dtype)
    shape = a.shape if shape is None else extents(shape)
    if hasattr(fill_value, "_session"):
        source, view = e.converted(a._operand(fill_value, "np.full_like"), kind)
        return a._make((source, view.broadcast_to(shape)))
    if kind != _dtypes.bfloat16:  # NumPy converts it, or raises its error.
        fill_value = np.full_like(np.empty(np.shape(fill_value), kind), fill_value)
    return a._make(_ops.full(fill_value, shape, kind))


def _at_least(rank: int) -> Callable[..., Any]:
    def extended(a: Any) -> Any:
        if not hasattr(a, "_session"):
            return getattr(np, f"atleast_{rank}d")(a)
        missing = max(rank - a.ndim, 0)
        after = missing > 0 and rank == 3
        return a[(None,) * (missing - after) + (...,) + (None,) * after]

    def call(*arys: Any) -> Any:
        found = [extended(a) for a in arys]
        return found[0] if len(found) == 1 else found

    return call


MANIPULATIONS: Dict[Any, Callable[..., Any]] = {}


def add(
    table: Dict[Any, Callable[..., Any]], space: Any, functions: Dict[str, Callable[..., Any]]
) -> None:
    """Adds replacements for the NumPy functions that have these names in `space`. Some versions of
    NumPy lack some of them."""
    for name, call in functions.items():
        if hasattr(space, name):
            table[getattr(space, name)] = call


add(
    MANIPULATIONS,
    np,
    {
        "transpose": lambda a, axes=None: a.T if axes is None else a.transpose(axes),
        "swapaxes": lambda a, axis1, axis2: a.swapaxes(axis1, axis2),
        "moveaxis": _moved,
        "reshape": lambda a, shape: a.reshape(shape),
        "ravel": flat,
        "squeeze": lambda a, axis=None: a.squeeze(axis),
        "expand_dims": _expand_dims,
        "broadcast_to": lambda array, shape: array.broadcast_to(shape),
        "broadcast_arrays": _broadcast_arrays,
        "flip": _flip,
        "fliplr": lambda m: _flip(m, 1),
        "flipud": lambda m: _flip(m, 0),
        "rot90": _rot90,
        "diagonal": diagonal,
        "diff": diff,
        "split": _split,
        "tile": _tile,
        "repeat": repeat,
        "copy": lambda a: a,
        "atleast_1d": _at_least(1),
        "atleast_2d": _at_least(2),
        "atleast_3d": _at_least(3),
        "full_like": _full_like,
        "zeros_like": lambda a, dtype=None, shape=None: _full_like(a, 0, dtype, shape),
        "ones_like": lambda a, dtype=None, shape=None: _full_like(a, 1, dtype, shape),
        "shape": lambda a: a.shape,
        "ndim": lambda a: a.ndim,
        "size": lambda a, axis=None: (
            a.size if axis is None else a.shape[normalize_axis(axis, a.ndim)]),
        "permute_dims": lambda a, axes=None: a.transpose(axes),
        "matrix_transpose": lambda x: x.mT,
        "unstack": lambda x, axis=0: tuple(_moved(x, axis, 0)),
    },
)
add(
    MANIPULATIONS,
    np.linalg,
    {
        "diagonal": lambda x, offset=0: diagonal(x, offset, -2, -1),
        "matrix_transpose": lambda x: x.mT,
    },
)
