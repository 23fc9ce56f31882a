"""NumPy functions that are composed of the operations of other modules. Parameters have NumPy's
names, because arguments are passed by name."""

from typing import Any, Callable, Dict, Iterator, Tuple

import numpy as np

from ..graph import _ops
from ..graph import _elementwise as e
from ..graph._views import extents, index_of, normalize_axis, size_of
from ..wire._errors import BadIndex, Unsupported
from ._manipulation import add, concatenate, cycled, flat, index, take


def _as_real(a: Any) -> Any:
    return a.astype("f8") if a.dtype.kind in "iu" else a


# --- searches, and sets


def _isin(element: Any, test_elements: Any, invert: bool = False) -> Any:
    values = flat(element._lifted(test_elements, "np.isin"))
    if values.size:
        values = np.sort(values)
        found = take(values, np.searchsorted(values, element), mode="clip") == element
    else:
        found = element != element
        found = found & ~found
    return ~found if invert else found


def _in1d(ar1: Any, ar2: Any, invert: bool = False) -> Any:
    return _isin(flat(ar1), ar2, invert)


def _union(ar1: Any, ar2: Any) -> Any:
    return np.unique(np.concatenate((ar1, ar2), axis=None))


def _intersect(ar1: Any, ar2: Any, return_indices: bool = False) -> Any:
    ar2 = ar1._lifted(ar2, "np.intersect1d")
    own = e.common_dtype([ar1._term(), ar2._term()])
    values, first = np.unique(ar1.astype(own), True)
    common = _isin(values, ar2)
    if not return_indices:
        return values[common]
    others, second = np.unique(ar2, True)
    return values[common], first[common], second[_isin(others, values)]


def _setdiff(ar1: Any, ar2: Any) -> Any:
    values = np.unique(ar1)
    return values[_isin(values, ar2, True)]


def _setxor(ar1: Any, ar2: Any) -> Any:
    ar1, ar2 = np.unique(ar1), np.unique(ar1._lifted(ar2, "np.setxor1d"))
    return np.sort(concatenate([ar1[_isin(ar1, ar2, True)], ar2[_isin(ar2, ar1, True)]]))


def _lexsort(keys: Any, axis: int = -1) -> Any:
    keys, axis = list(keys), index_of(axis)
    one = next(key for key in keys if hasattr(key, "_session"))
    keys = [one._lifted(key, "np.lexsort") for key in keys]
    if any(key.shape != one.shape for key in keys):
        raise ValueError("all keys need to be the same shape")
    order: Any = None
    for key in keys:
        now = np.argsort(key if order is None else np.take_along_axis(key, order, axis), axis)
        order = now if order is None else np.take_along_axis(order, now, axis)
    return order


def _interp(
    x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None
) -> Any:
    xp, fp = (x._lifted(one, "np.interp").astype("f8") for one in (xp, fp))
    if xp.ndim != 1 or xp.shape != fp.shape or not xp.size:
        raise ValueError("xp and fp must be vectors of the same length, which is not 0")
    x = x.astype("f8")
    if period is not None:
        if not period:
            raise ValueError("period must be a non-zero value")
        period, left, right = abs(period), None, None
        x, xp = x % period, xp % period
        order = np.argsort(xp)
        xp, fp = xp[order], fp[order]
        xp = concatenate([xp[-1:] - period, xp, xp[:1] + period])
        fp = concatenate([fp[-1:], fp, fp[:1]])
    at = np.maximum(np.searchsorted(xp, x, "right") - 1, 0)
    (low, high), (first, last) = ([take(v, i, 0, "clip") for i in (at, at + 1)] for v in (xp, fp))
    slope = (last - first) / (high - low)
    found, other = slope * (x - low) + first, slope * (x - high) + last
    other = np.where((other != other) & (first == last), first, other)  # Between infinities.
    found = np.where(found == found, found, other)
    found = np.where(x == xp[-1], fp[-1], np.where(x == low, first, found))
    found = np.where(x < xp[0], fp[0] if left is None else left, found)
    found = np.where(x > xp[-1], fp[-1] if right is None else right, found)
    return np.where(x == x, found, x)


# --- differences and polynomials


def _edge(f: Any, at: Tuple[int, int, int], near: Any, far: Any) -> Any:
    """Returns the slope at the first of three neighbours. `near` is the distance from the first to
    the second, and `far` from the second to the third."""
    a, b, c = (f[..., i : i + 1 or None] for i in at)
    both = near + far
    return (b * (both / (near * far)) - a * ((near + both) / (near * both))
            - c * (near / (far * both)))


def _slope(f: Any, dx: Any, edge_order: int) -> Any:
    """Returns the slopes along the last axis. dx is a distance, or the distances between
    neighbours."""
    if f.shape[-1] <= edge_order:
        raise ValueError(f"a gradient needs more than {edge_order} elements along an axis")
    if np.ndim(dx):
        near, far = dx[:-1], dx[1:]
        both = near + far
        inner = (f[..., :-2] * (-far / (near * both)) + f[..., 1:-1] * ((far - near) / (near * far))
                 + f[..., 2:] * (near / (far * both)))
        begin, end = (dx[0], dx[1:2].sum()), (dx[-1], dx[-2:-1].sum())
    else:
        inner = (f[..., 2:] - f[..., :-2]) / (2.0 * dx)
        begin = end = dx, dx
    if edge_order == 1:
        first = (f[..., 1:2] - f[..., :1]) / begin[0]
        last = (f[..., -1:] - f[..., -2:-1]) / end[0]
    else:
        first, last = _edge(f, (0, 1, 2), *begin), -_edge(f, (-1, -2, -3), *end)
    return concatenate([first, inner, last], -1).astype(f.dtype)


def _gradient(f: Any, *varargs: Any, axis: Any = None, edge_order: int = 1) -> Any:
    axes = _ops.axes_of(axis, f.ndim)
    steps = list(varargs) or [1.0]
    if len(steps) == 1 and not np.ndim(steps[0]):
        steps *= len(axes)
    if len(steps) != len(axes):
        raise TypeError(f"{len(steps)} distances do not fit {len(axes)} axes")
    if edge_order not in (1, 2):
        raise ValueError("edge_order must be 1 or 2")
    f = _as_real(f)
    found = []
    for at, dx in zip(axes, steps):
        if np.ndim(dx):
            dx = dx if hasattr(dx, "_session") else np.asarray(dx)
            if dx.shape != (f.shape[at],):
                raise ValueError(f"coordinates {dx.shape} do not fit axis {at} of {f.shape}")
            dx = np.diff(_as_real(dx))
            if isinstance(dx, np.ndarray) and (dx == dx[:1]).all() and dx.size:
                dx = dx[0]
        found.append(np.moveaxis(_slope(np.moveaxis(f, at, -1), dx, edge_order), -1, at))
    return found[0] if len(axes) == 1 else _several(found)


_MOST_FACTORS = 4096  # Each step computes some factors, and the server limits the steps.


def _polyval(p: Any, x: Any) -> Any:
    found, p = np.zeros_like(x), p if hasattr(p, "_session") else np.asarray(p)
    if p.size > _MOST_FACTORS:
        raise Unsupported(f"np.polyval takes at most {_MOST_FACTORS} factors here: use .numpy()")
    for factor in p:
        found = found * x + factor
    return found


# --- elements that are inserted or left out


def _places(obj: Any, extent: int) -> Any:
    """Returns, as a NumPy array, the positions that an index selects."""
    if hasattr(obj, "_session"):
        raise Unsupported(
            "the positions must be in this process, not on the server: use x[mask] or np.where"
        )
    if isinstance(obj, slice):
        return np.arange(extent)[obj]
    found = np.asarray(obj)
    if found.dtype.kind == "b":
        if found.shape != (extent,):
            raise ValueError(f"a mask of shape {found.shape} does not fit {extent} elements")
        return np.flatnonzero(found)
    if not found.size:
        found = found.astype("i8")
    if found.dtype.kind not in "iu":
        raise IndexError("arrays used as indices must be of integer (or boolean) type")
    return found


def _delete(arr: Any, obj: Any, axis: Any = None) -> Any:
    if axis is None:
        arr, axis = flat(arr), 0
    axis = normalize_axis(axis, arr.ndim)
    extent = arr.shape[axis]
    places = _places(obj, extent).reshape(-1)
    if places.size and not (-extent <= places.min() and places.max() < extent):
        raise BadIndex(f"{places.tolist()} is out of range for axis {axis} of extent {extent}")
    gone = np.unique(places % max(extent, 1))
    if not gone.size:
        return arr
    # Each position grows by the number of elements that are left out before it.
    kept = index(arr, extent - gone.size)
    skipped = np.searchsorted(arr._like(gone - np.arange(gone.size)), kept, "right")
    return take(arr, kept + skipped, axis)


def _insert(arr: Any, obj: Any, values: Any, axis: Any = None) -> Any:
    if axis is None:
        arr, axis = flat(arr), 0
    axis = normalize_axis(axis, arr.ndim)
    extent = arr.shape[axis]
    places = _places(obj, extent)
    if places.ndim > 1:
        raise ValueError(f"the positions must be a number or a vector, not of shape {places.shape}")
    if places.size and not (-extent <= places.min() and places.max() <= extent):
        raise BadIndex(f"{places.tolist()} is out of range for axis {axis} of extent {extent}")
    e.check_fits(values, arr.dtype)
    values = arr._lifted(values, "np.insert")._typed(arr.dtype)
    values = values[(None,) * (arr.ndim - values.ndim)]
    if not places.ndim:
        values = np.moveaxis(values, 0, axis)
    if places.size == 1:
        places = places.repeat(values.shape[axis])
    order = np.argsort(np.where(places < 0, places + extent, places), kind="stable")
    count = order.size
    shape = (*arr.shape[:axis], count, *arr.shape[axis + 1 :])
    new = np.sort(np.where(places < 0, places + extent, places)) + np.arange(count)
    values = values.broadcast_to(shape)
    if not count:
        return arr
    values = take(values, order, axis)
    at = index(arr, extent + count)
    before = np.searchsorted(arr._like(new), at)
    own = np.searchsorted(arr._like(new), at, "right") > before
    own = own.reshape([-1 if i == axis else 1 for i in range(arr.ndim)])
    rest = take(arr, at - before, axis, "clip") if extent else False
    return np.where(own, take(values, before, axis, "clip"), rest)


def _resize(a: Any, new_shape: Any) -> Any:
    shape = extents(new_shape)
    if min(shape, default=0) < 0:
        raise ValueError("all elements of `new_shape` must be non-negative")
    return cycled(flat(a), size_of(shape), 0).reshape(shape)


def _block(arrays: Any) -> Any:
    def leaves(part: Any, depth: int) -> Iterator[Tuple[Any, int]]:
        if not isinstance(part, list):
            yield part, depth
        else:
            if not part:
                raise ValueError("np.block takes no empty lists")
            for one in part:
                yield from leaves(one, depth + 1)

    found = list(leaves(arrays, 0))
    depth = found[0][1]
    if {one for _, one in found} != {depth}:
        raise ValueError("the lists of np.block must have the same depth")
    array = next(part for part, _ in found if hasattr(part, "_session"))
    rank = max(depth, *(np.ndim(part) for part, _ in found))

    def joined(part: Any, axis: int) -> Any:
        if isinstance(part, list):
            return concatenate([joined(one, axis + 1) for one in part], axis)
        part = array._lifted(part, "np.block")
        return part[(None,) * (rank - part.ndim)]

    return joined(arrays, -depth)


# --- positions


def _unravel_index(indices: Any, shape: Any, order: str = "C") -> Tuple[Any, ...]:
    if order != "C":
        raise Unsupported('np.unravel_index counts elements in row-major order: use order="C"')
    if indices.dtype.kind not in "biu":
        raise TypeError("only int indices permitted")
    indices, shape, found = indices.astype("i8"), extents(shape), []
    for axis, extent in enumerate(shape):
        inner = size_of(shape[axis + 1 :])
        at = indices // inner if inner > 1 else indices
        found.append(at % extent if axis else at)
    return tuple(found)


_several: Any = tuple if int(np.__version__.split(".")[0]) > 1 else list  # Since NumPy 2.
COMPOSED: Dict[Any, Callable[..., Any]] = {}
add(
    COMPOSED,
    np,
    {
        "isin": _isin,
        "in1d": _in1d,
        "union1d": _union,
        "intersect1d": _intersect,
        "setdiff1d": _setdiff,
        "setxor1d": _setxor,
        "lexsort": _lexsort,
        "interp": _interp,
        "gradient": _gradient,
        "polyval": _polyval,
        "delete": _delete,
        "insert": _insert,
        "resize": _resize,
        "block": _block,
        "unravel_index": _unravel_index,
    },
)
