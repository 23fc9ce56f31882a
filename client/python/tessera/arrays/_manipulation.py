"""NumPy functions that change shapes: views, and copies where strides cannot express the result.

Parameters have NumPy's names, because arguments are passed by name.
"""

import inspect
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from ..graph import _dtypes, _ops
from ..graph import _elementwise as e
from ..graph._views import (
    View,
    broadcast_shapes,
    extents,
    index_of,
    normalize_axes,
    normalize_axis,
    several,
    size_of,
)
from ..wire._errors import BadIndex, BadShape, Unsupported


def flat(a: Any) -> Any:
    return a.reshape(-1)


# --- indices


def _known(value: Any) -> Any:
    """Returns indices or a mask of this process as a NumPy array. An empty list has integers."""
    found = np.asarray(_dtypes.to_numpy(value))
    return found.astype("<i8") if isinstance(value, (list, tuple)) and not found.size else found


def indices_of(a: Any, value: Any) -> Any:
    """Returns indices as a term. Indices in this process become i64."""
    if not hasattr(value, "_session"):
        value = _known(value)
        if value.dtype.kind in "iu":
            value = value.astype("<i8", casting="safe", copy=False)
    return a._operand(value, "an index")


def _signed(indices: Any) -> Any:
    """Converts uint64, which np.take refuses, but NumPy allows in an index."""
    return indices.astype("<i8") if getattr(indices, "dtype", None) == np.uint64 else indices


def take(a: Any, indices: Any, axis: Optional[int] = None, mode: str = "raise") -> Any:
    a = a if a.ndim else flat(a)
    return a._make(_ops.take(a._term(), indices_of(a, indices), axis, mode))


def _is_array(index: Any) -> bool:
    """Returns whether an index is an array or a boolean, which is a mask without axes. NumPy
    integers without axes do not count as arrays."""
    if hasattr(index, "_session") or isinstance(index, bool):
        return True
    if isinstance(index, (list, tuple, range)) or hasattr(index, "__array__"):
        return np.ndim(index) > 0 or np.asarray(index).dtype.kind == "b"
    return False


# --- masks


def kept(*arrays: Any) -> Any:
    """Returns arrays whose shapes depend on elements. Calls the server."""
    keep = arrays[0]._session.keep
    if inspect.iscoroutinefunction(keep):
        raise Unsupported(
            "the length of a selection is known only after a call, for which ts.aio cannot wait"
            " here: use np.where(mask, x, other), sum(where=mask), or a mask in this process"
        )
    return keep(*arrays)


def now(a: Any, *values: Any) -> Any:
    """Returns the elements of arrays on which a shape, the edges of bins or the numbers in an
    expression depend. Calls the server."""
    compute = a._session.compute
    if inspect.iscoroutinefunction(compute):
        raise Unsupported(
            "an argument is known only after a call, for which ts.aio cannot wait here: pass"
            " numbers, edges or counts of this process, or bins= and range=, for example from"
            " await t.compute(x.min(), x.max())"
        )
    return compute(*values)


def known(value: Any) -> Any:
    """Returns the element of a 0-d array on the server, for which it calls the server. Returns
    other arguments as they are."""
    if not hasattr(value, "_session") or value.ndim:
        return value
    return now(value, value)[0].item()


def selection(a: Any, mask: Any, output: int) -> Any:
    """Returns the elements of an array where a mask on the server is true, or their positions. The
    result can only be passed to kept()."""
    return a._make(_ops.select(a._term(), a._operand(mask, "a mask"))[output])


def _selected(a: Any, mask: Any, output: int) -> Any:
    """Returns the elements of an array where a mask on the server is true, or their positions. This
    calls the server, because the shape of the result depends on the elements of the mask."""
    (found,) = kept(selection(a, mask, output))
    return found


def _truth(a: Any) -> Any:
    """Returns whether the elements of an array are nonzero."""
    return a if a.dtype.kind == "b" else a != 0


def _positions(a: Any, condition: Any) -> Any:
    """Returns the positions of the nonzero elements of a condition for an array, counted in
    row-major order: an array on the server if the condition is one, otherwise a NumPy array."""
    if not hasattr(condition, "_session"):
        positions = np.flatnonzero(condition)
        if positions.nbytes > e.MAX_INLINE_BYTES:
            raise Unsupported(
                f"the mask selects {positions.size} elements, whose positions would be sent with"
                " every call: put() the mask first"
            )
        return positions
    a._operand(condition, "a mask")  # Raises an error if it belongs to another connection.
    mask = _truth(condition)
    return _selected(mask, mask, 1)


def _masked(a: Any, mask: Any) -> Any:
    """Returns a[mask], where the mask has the extents of the first axes of a."""
    if not hasattr(mask, "_session"):
        mask = np.asarray(mask)
    rank = mask.ndim
    # As in NumPy, an axis without elements fits any axis.
    if rank > a.ndim or any(n not in (0, own) for n, own in zip(mask.shape, a.shape)):
        raise BadIndex(f"a mask of shape {mask.shape} does not fit an array of shape {a.shape}")
    if mask.shape == a.shape and hasattr(mask, "_session"):
        return _selected(a, mask, 0)
    rows = a.reshape((size_of(a.shape[:rank]), *a.shape[rank:]))
    return take(rows, _positions(a, mask), 0)


def _with(condition: Any, a: Any, name: str) -> Any:
    """Returns an array, which is put on the server of the condition if it is not on a server."""
    return a if hasattr(a, "_session") else condition._lifted(a, name)


def compress(condition: Any, a: Any, axis: Optional[int] = None) -> Any:
    a = _with(condition, a, "np.compress")
    if len(np.shape(condition)) != 1:
        raise ValueError("condition must be a 1-d array")
    return take(a, _positions(a, condition), axis)


def _extract(condition: Any, arr: Any) -> Any:
    arr = _with(condition, arr, "np.extract")
    if np.shape(condition) != arr.shape or not arr.ndim:
        return take(arr, _positions(arr, condition))
    if not hasattr(condition, "_session"):
        condition = np.asarray(condition)
    return _masked(arr, _truth(condition))


def nonzero(a: Any) -> Tuple[Any, ...]:
    """Returns the positions of the nonzero elements, as one array for each axis."""
    if not a.ndim:
        raise ValueError("a 0-d array has no axes: use np.flatnonzero(x)")
    positions, found = _positions(a, a), []
    for axis, extent in enumerate(a.shape):
        inner = size_of(a.shape[axis + 1 :])
        at = positions if inner <= 1 else positions // inner
        found.append(at % extent if axis and extent else at)
    return tuple(found)


def _argwhere(a: Any) -> Any:
    return stack(nonzero(a), -1) if a.ndim else stack(nonzero(flat(a)), -1)[:, :0]


def _in_row_major(indices: List[Any], shape: Tuple[int, ...]) -> Any:
    """Returns the positions, in row-major order, of the elements at indices of several axes. Where
    one of the indices is out of range, the position is too."""
    places: Any = 0
    inside: Any = True
    for index, extent in zip(indices, shape):
        index = index.astype("i8")
        index = np.where(index < 0, index + extent, index)
        inside = inside & (index >= 0) & (index < extent)
        places = places * extent + index
    return np.where(inside, places, size_of(shape))


def indexed(a: Any, key: Any) -> Any:
    """Implements a[key]: a view, a take for an array of indices, and a selection for a mask."""
    items = list(key) if isinstance(key, tuple) else [key]
    arrays = [i for i, item in enumerate(items) if _is_array(item)]
    if not arrays:
        return a._seen(a._view.at(key))
    at, several = arrays[0], len(arrays) > 1
    found = [items[i] if hasattr(items[i], "_session") else _known(items[i]) for i in arrays]
    for i, indices in zip(arrays, found):
        items[i] = slice(None)
        if indices.dtype.kind not in "biu":
            raise BadIndex(f"an index must have integers or booleans, not {indices.dtype}")
        if several and indices.dtype.kind == "b":
            raise Unsupported(
                "an index with a mask may have no other array: use np.flatnonzero(mask)"
            )
    if several:
        try:
            np.broadcast_shapes(*(indices.shape for indices in found))
        except ValueError as error:
            raise BadIndex(f"the arrays of an index do not broadcast: {error}") from None
    indices = found[0]
    masks = indices.dtype.kind == "b"
    rank = np.ndim(indices) if masks else 1
    if masks and not at and all(item in (Ellipsis, slice(None)) for item in items):
        if len(items) > 1:
            a._view.at((*items[:1] * rank, *items[1:]))  # Raises an error for too many axes.
        return _masked(a, indices)
    seen = a._seen(a._view.at((*items[:at], *items[at : at + 1] * rank, *items[at + 1 :])))
    # Integers leave no axis behind.
    stays = [item is None or isinstance(item, slice) for item in items]
    dots = [item is Ellipsis for item in items]
    axis, *others = (
        seen.ndim - rank - sum(stays[i + 1 :]) if any(dots[:i]) else sum(stays[:i]) for i in arrays
    )
    if masks:
        fits = seen.shape[axis : axis + rank]
        if np.shape(indices) != fits:
            raise BadIndex(
                f"next to other indices, a mask must have shape {fits}, not {np.shape(indices)}")
        if rank != 1:
            raise Unsupported(
                "next to other indices, a mask may have only one axis: index twice, as in"
                " x[mask][:, 1]"
            )
        indices = _positions(a, indices)
    if several:
        axes, after = (axis, *others), axis + len(arrays)
        seen = _moved(seen, axes, range(axis, after))
        shape = seen.shape[axis:after]
        indices = _in_row_major(found, shape)
        seen = seen.reshape((*seen.shape[:axis], size_of(shape), *seen.shape[after:]))
    made = take(seen, _signed(indices), axis)
    # As in NumPy, the new axes come first if integers are apart from the array.
    place = [i in arrays or not (stays[i] or dots[i]) for i in range(len(items))]
    first, last = place.index(True), len(place) - place[::-1].index(True)
    if all(place[first:last]):
        return made
    new = range(axis, axis + made.ndim - seen.ndim + 1)
    return _moved(made, tuple(new), tuple(range(len(new))))


def _take_along_axis(arr: Any, indices: Any, axis: Optional[int] = -1) -> Any:
    indices = arr._make(_ops.array(indices_of(arr, _signed(indices))))
    if axis is None:
        arr, axis = flat(arr), 0
    if arr.ndim != indices.ndim:
        raise ValueError(f"indices must have {arr.ndim} axes, not {indices.ndim}")
    at = normalize_axis(axis, arr.ndim)
    try:
        shape = broadcast_shapes(
            *((*one.shape[:at], 1, *one.shape[at + 1 :]) for one in (arr, indices))
        )
    except BadShape as error:
        raise BadIndex(error.text) from None
    wide, places = (
        one.broadcast_to((*shape[:at], one.shape[at], *shape[at + 1 :])) for one in (arr, indices)
    )
    return arr._make(_ops.take(wide._term(), places._term(), at, along=True))


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


def _rollaxis(a: Any, axis: int, start: int = 0) -> Any:
    axis = normalize_axis(axis, a.ndim)
    start = a.ndim if start == a.ndim else normalize_axis(start, a.ndim)
    return _moved(a, axis, start - (axis < start))


def _split(ary: Any, indices_or_sections: Any, axis: int = 0, equal: bool = True) -> List[Any]:
    axis = normalize_axis(axis, ary.ndim)
    extent = ary.shape[axis]
    if np.ndim(indices_or_sections) == 0:
        count = index_of(indices_or_sections, "the number of sections")
        if count <= 0:
            raise ValueError("number sections must be larger than 0.")
        if equal and extent % count:
            raise ValueError("array split does not result in an equal division")
        each, larger = divmod(extent, count)  # The first sections are larger by 1.
        indices_or_sections = [each * i + min(i, larger) for i in range(1, count)]
    ends = [0, *indices_or_sections, extent]
    before = (slice(None),) * axis
    return [ary[(*before, slice(begin, end))] for begin, end in zip(ends, ends[1:])]


def _split_along(axis: int, rank: int) -> Callable[..., Any]:
    def call(ary: Any, indices_or_sections: Any) -> List[Any]:
        if ary.ndim < rank:
            raise BadShape(f"the array must have {rank} axes or more, not {ary.ndim}")
        return _split(ary, indices_or_sections, min(axis, ary.ndim - 1))

    return call


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
    """Repeats each element, or each slice along an axis. Calls the server if it has the counts,
    because the shape of the result depends on them."""
    if axis is None or not a.ndim:
        a = a.reshape(-1)
    axis = normalize_axis(0 if axis is None else axis, a.ndim)
    if not hasattr(repeats, "_session"):
        if np.size(repeats) != 1:  # NumPy raises its errors.
            return take(a, np.repeat(np.arange(a.shape[axis]), repeats), axis)
        repeats = index_of(np.asarray(repeats).item(), "the number of repeats")
        return _repeated(a, repeats, axis + 1, axis)
    if repeats.dtype.kind not in "biu":
        raise TypeError(f"the numbers of repeats must be integers, not {repeats.dtype}")
    counts = repeats.broadcast_to(a.shape[axis : axis + 1])
    if not counts.size:
        return a
    total, least = now(a, counts.sum(), counts.min())
    if least < 0:
        raise ValueError("repeats may not contain negative values.")
    return take(a, np.searchsorted(counts.cumsum(), index(a, int(total)), "right"), axis)


# --- arrays that are joined, padded or masked


def index(a: Any, extent: int) -> Any:
    """Returns the vector 0, 1, 2..., which the server computes, for the array's connection."""
    return a._make(_ops.coordinate((extent,), 0))


def _along(a: Any, extent: int, axis: int) -> Any:
    """Returns 0, 1, 2... along an axis of the array."""
    shape = [extent if i == axis else 1 for i in range(a.ndim)]
    return a._make(_ops.coordinate(shape, axis))


def _where(mask: Any, a: Any, rest: Any) -> Any:
    return mask._make(e.apply("where", *(mask._operand(one) for one in (mask, a, rest))))


def cycled(a: Any, extent: int, start: int, axis: int = 0) -> Any:
    """Returns an array of another extent along an axis, where element i is element i - start of
    `a`, modulo the extent of `a`. Elements are 0 if `a` has none."""
    if not a.size:
        return _full_like(a, 0, shape=(*a.shape[:axis], extent, *a.shape[axis + 1 :]))
    first = -start % a.shape[axis]
    reps = [1] * a.ndim
    reps[axis] = -(-(first + extent) // a.shape[axis])
    return _tile(a, reps)[(slice(None),) * axis + (slice(first, first + extent),)]


def _roll(a: Any, shift: Any, axis: Any = None) -> Any:
    if axis is None:
        return _roll(flat(a), shift, 0).reshape(a.shape)
    for by, which in np.broadcast(known(shift), axis):
        which = normalize_axis(which, a.ndim)
        by = index_of(by, "a shift")
        a = cycled(a, a.shape[which], by, which)
    return a


def _shifted(sign: int) -> Callable[..., Any]:
    def call(x: Any, axes: Any = None) -> Any:
        axes = _ops.axes_of(axes, x.ndim)
        return _roll(x, [sign * (x.shape[i] // 2) for i in axes], axes) if axes else x

    return call


def _joined(parts: List[Any], axis: int) -> Any:
    """Selects each element from the only part that has it. Each part is repeated so that it has the
    extent of the result. Many parts are joined in groups, because one step reads at most 8
    operands."""
    if len(parts) > 7:
        return _joined([_joined(parts[i : i + 7], axis) for i in range(0, len(parts), 7)], axis)
    end = extent = sum(part.shape[axis] for part in parts)
    place = _along(parts[0], extent, axis)
    found: Any = None
    for part in reversed(parts):
        begin = end - part.shape[axis]
        wide = cycled(part, extent, begin, axis)
        found = wide if found is None else _where(place < end, wide, found)
        end = begin
    return found


def concatenate(arrays: Any, axis: Any = 0, dtype: Any = None, casting: str = "same_kind") -> Any:
    one = next(array for array in arrays if hasattr(array, "_session"))
    parts = [one._lifted(array, "np.concatenate") for array in arrays]
    common = e.common_dtype([part._term() for part in parts])
    if dtype is not None:
        common = _dtypes.dtype_of(dtype)
    for part in parts:
        _dtypes.check_cast(part.dtype, common, casting)
    parts = [(flat(part) if axis is None else part)._typed(common) for part in parts]
    axis = normalize_axis(0 if axis is None else axis, parts[0].ndim)
    if len({(part.ndim, part.shape[:axis], part.shape[axis + 1 :]) for part in parts}) != 1:
        raise BadShape(f"only axis {axis} may differ: {[part.shape for part in parts]}")
    return _joined([part for part in parts if part.shape[axis]] or parts[:1], axis)


def _diff(a: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Any:
    parts = [a._lifted(one, "np.diff") for one in (prepend, a, append) if one is not None]
    if n and len(parts) > 1:
        axis = normalize_axis(axis, a.ndim)
        shape = (*a.shape[:axis], 1, *a.shape[axis + 1 :])
        a = concatenate([x if x.ndim else x.broadcast_to(shape) for x in parts], axis)
    return diff(a, n, axis)


def stack(arrays: Any, axis: int = 0, **options: Any) -> Any:
    if len({np.shape(array) for array in arrays}) != 1:
        raise BadShape("all arrays to stack must have the same shape")
    one = next(array for array in arrays if hasattr(array, "_session"))
    arrays = [_expand_dims(one._lifted(array, "np.stack"), axis) for array in arrays]
    return concatenate(arrays, axis, **options)


stack.names = ("arrays", "axis", "dtype", "casting")  # type: ignore[attr-defined]


def _stacked(rank: int, axis: int) -> Callable[..., Any]:
    """Returns np.hstack (1, 1), np.vstack (2, 0) or np.dstack (3, 2)."""

    def call(tup: Any, **options: Any) -> Any:
        arrays = [_at_least(rank)(array) for array in tup]
        return concatenate(arrays, min(axis, np.ndim(arrays[0]) - 1), **options)

    call.names = ("tup", "dtype", "casting")  # type: ignore[attr-defined]
    return call


def _column_stack(tup: Any) -> Any:
    columns = [_at_least(1)(array) for array in tup]
    return concatenate([x[:, None] if np.ndim(x) == 1 else x for x in columns], 1)


def _append(arr: Any, values: Any, axis: Optional[int] = None) -> Any:
    return concatenate((arr, values), axis)


def _mirrored(place: Any, extent: int, mode: str) -> Any:
    """For positions in the padded axis, which may be beyond the ends of the original one, returns
    the positions of the elements that np.pad puts there."""
    last = extent - 1
    if mode == "edge" or not last and mode == "reflect":
        return np.minimum(np.maximum(place, 0), last)
    whole = 2 * extent if mode == "symmetric" else 2 * last
    place = place % whole
    return np.minimum(place, whole - (mode == "symmetric") - place)


# The option of each mode of np.pad.
_PADDING = {
    "constant": "constant_values",
    "linear_ramp": "end_values",
    **dict.fromkeys(("maximum", "mean", "median", "minimum"), "stat_length"),
    **dict.fromkeys(("reflect", "symmetric"), "reflect_type"),
    **dict.fromkeys(("edge", "wrap", "empty"), ""),
}


def _pad(array: Any, pad_width: Any, mode: Any = "constant", **options: Any) -> Any:
    if not callable(mode):
        if mode not in _PADDING:
            raise ValueError(f"mode '{mode}' is not supported")
        wrong = {*options} - {_PADDING[mode]}
        if wrong:
            raise ValueError(f"unsupported keyword arguments for mode '{mode}': {wrong}")
    odd = options.get("reflect_type") == "odd"
    if odd or mode not in ("constant", "wrap", "edge", "reflect", "symmetric"):
        what = "reflect_type='odd'" if odd else f"mode={mode!r}"
        raise Unsupported(f"{what} is not supported: use .numpy(), or np.concatenate")
    constant_values = np.asarray(known(options.get("constant_values", 0)))
    pairs = np.broadcast_to(np.asarray(known(pad_width)), (array.ndim, 2))
    own_type = "f4" if array.dtype == _dtypes.bfloat16 else array.dtype
    for value in np.ravel(constant_values).tolist():
        # NumPy does not convert NaN, infinities or numbers beyond the type.
        e.check_fits(int(value) if array.dtype.kind in "iu" else value, array.dtype)
    values = np.broadcast_to(constant_values, pairs.shape).astype(own_type).tolist()
    for axis, (before, after) in enumerate(pairs.tolist()):
        extent, own = index_of(before) + index_of(after) + array.shape[axis], array.shape[axis]
        if min(before, after) < 0 or mode != "constant" and extent > own == 0:
            raise ValueError(f"axis {axis} of {array.shape} cannot be padded by {before}, {after}")
        if extent == own:
            continue
        if mode not in ("constant", "wrap"):
            array = take(array, _mirrored(index(array, extent) - before, own, mode), axis)
            continue
        place = _along(array, extent, axis)
        array = cycled(array, extent, before, axis)
        if mode == "constant":
            array = _where(place < before, values[axis][0], array)
            array = _where(place >= before + own, values[axis][1], array)
    return array


_pad.names = (  # type: ignore[attr-defined]
    *("array", "pad_width", "mode"),
    *("constant_values", "end_values", "reflect_type", "stat_length"),
)


def _triangle(m: Any, k: int, lower: bool) -> Any:
    if not m.ndim:
        raise TypeError("a 0-d array has no triangle")
    shape = (m.shape * 2)[-2:]
    rows, columns = (m._make(_ops.coordinate(shape, axis)) for axis in (0, 1))
    below = rows - columns >= (-k if lower else 1 - k)
    return _where(below, m, False) if lower else _where(below, False, m)


def _diag(v: Any, k: int = 0) -> Any:
    if v.ndim == 2:
        return diagonal(v, k)
    if v.ndim != 1:
        raise BadShape("np.diag takes a vector or a matrix")
    extent = len(v) + abs(index_of(k, "the offset of a diagonal"))
    places = index(v, extent)
    rows = cycled(v, extent, max(-k, 0))
    return _where(places - places[:, None] == k, rows[:, None], False)


def _meshgrid(*xi: Any, sparse: bool = False, indexing: str = "xy") -> Any:
    if indexing not in ("xy", "ij"):
        raise ValueError("indexing must be 'xy' or 'ij'")
    axes = list(range(len(xi)))
    if indexing == "xy":
        axes[:2] = axes[1::-1]
    arrays = [
        (x if hasattr(x, "_session") else np.asarray(x)).reshape(
            [-1 if i == axis else 1 for i in range(len(xi))])
        for axis, x in zip(axes, xi)
    ]
    return arrays if sparse else _broadcast_arrays(*arrays)


def windows(x: Any, window_shape: Any, axis: Any = None) -> Any:
    """Implements np.lib.stride_tricks.sliding_window_view, as a view."""
    sizes, shape, strides = extents(window_shape), list(x.shape), list(x._view.strides)
    axes = range(x.ndim) if axis is None else [normalize_axis(one, x.ndim) for one in several(axis)]
    if len(sizes) != len(axes) or min(sizes, default=0) < 0:
        raise BadShape(f"windows of shape {sizes} do not fit the axes {tuple(axes)}")
    for at, size in zip(axes, sizes):
        if shape[at] < size:
            raise BadShape(f"windows of shape {sizes} are larger than the array")
        shape[at] -= size - 1
        strides.append(strides[at])
    return x._seen(View(x._view.offset, (*shape, *sizes), tuple(strides)).checked())


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
    e.check_fits(fill_value, kind)
    extra = max(np.ndim(fill_value) - len(shape), 0)
    if extra and {*np.shape(fill_value)[:extra]} == {1}:
        fill_value = np.reshape(fill_value, np.shape(fill_value)[extra:])
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
        "reshape": lambda a, shape, order="C": a.reshape(shape, order=order),
        "ravel": lambda a, order="C": a.ravel(order),
        "squeeze": lambda a, axis=None: a.squeeze(axis),
        "expand_dims": _expand_dims,
        "broadcast_to": lambda array, shape: array.broadcast_to(shape),
        "broadcast_arrays": _broadcast_arrays,
        "flip": _flip,
        "fliplr": lambda m: _flip(m, 1),
        "flipud": lambda m: _flip(m, 0),
        "rot90": _rot90,
        "diagonal": diagonal,
        "diff": _diff,
        "split": lambda ary, indices_or_sections, axis=0: _split(ary, indices_or_sections, axis),
        "array_split": lambda ary, indices_or_sections, axis=0: (
            _split(ary, indices_or_sections, axis, False)),
        "hsplit": _split_along(1, 1),
        "vsplit": _split_along(0, 2),
        "dsplit": _split_along(2, 3),
        "rollaxis": _rollaxis,
        "take": take,
        "compress": compress,
        "extract": _extract,
        "nonzero": nonzero,
        "flatnonzero": lambda a: _positions(a, a),
        "argwhere": _argwhere,
        "take_along_axis": _take_along_axis,
        "roll": _roll,
        "concatenate": concatenate,
        "stack": stack,
        "hstack": _stacked(1, 1),
        "vstack": _stacked(2, 0),
        "dstack": _stacked(3, 2),
        "column_stack": _column_stack,
        "append": _append,
        "pad": _pad,
        "tril": lambda m, k=0: _triangle(m, k, True),
        "triu": lambda m, k=0: _triangle(m, k, False),
        "diag": _diag,
        "diagflat": lambda v, k=0: _diag(flat(v), k),
        "meshgrid": _meshgrid,
        "tile": _tile,
        "repeat": repeat,
        "copy": lambda a: a,
        "atleast_1d": _at_least(1),
        "atleast_2d": _at_least(2),
        "atleast_3d": _at_least(3),
        "full_like": _full_like,
        "zeros_like": lambda a, dtype=None, shape=None: _full_like(a, 0, dtype, shape),
        "empty_like": lambda prototype, dtype=None, shape=None: (
            _full_like(prototype, 0, dtype, shape)),
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
add(MANIPULATIONS, np.fft, {"fftshift": _shifted(1), "ifftshift": _shifted(-1)})
add(MANIPULATIONS, np.lib.stride_tricks, {"sliding_window_view": windows})
