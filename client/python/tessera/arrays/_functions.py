"""NumPy's functions other than ufuncs, for server-side arrays, and the functions of this package.

Arguments may be server-side arrays, numbers, NumPy arrays or lists, like operands of operators.
"""

import functools
import inspect
import math
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import numpy as np

from ..graph import _dtypes, _ops
from ..graph import _elementwise as e
from ..graph._graph import Constant, Term
from ..graph._views import View, index_of, normalize_axes, normalize_axis, several
from ..wire._errors import BadIndex, BadMatrix, BadShape, Unsupported
from . import _ufuncs
from ._composed import COMPOSED
from ._einsum import einsum
from ._linalg import LINALG, inv, singular_values
from ._manipulation import (
    MANIPULATIONS,
    add,
    concatenate,
    cycled,
    diagonal,
    diff,
    flat,
    index,
    indices_of,
    kept,
    known,
    nonzero,
    now,
    selection,
    stack,
    take,
    windows,
)

MISSING: Any = object()  # An argument that was not given.


def _made(op: Callable[..., Term], *arrays: Any, **options: Any) -> Any:
    """Applies an operation on terms to arrays, and returns the result as an array or expression."""
    one = next((array for array in arrays if hasattr(array, "_session")), arrays[0])
    _own(one)
    return one._make(op(*(one._operand(array) for array in arrays), **options))


def _own(x: Any) -> Any:
    """Returns x. Raises TypeError if x is not on a server."""
    if not hasattr(x, "_session"):
        raise TypeError(f"{type(x).__name__} is not a server-side array: use client.put(x)")
    return x


# --- functions of this package


def sum_squares(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Returns the sum of the squares of all elements, or of those along axes. Integers give i64."""
    return _own(x)._make(_ops.reduce("sum_squares", x._term(), axis, keepdims))


def _vectors(x: Any, ord: Any, axis: Any, keepdims: bool) -> Any:
    """Returns the norms of vectors. All elements along the given axes form one vector."""
    if ord in (None, 1, 2):
        op = "norm_l1" if ord == 1 else "norm_l2"
        return x._make(_ops.reduce(op, x._term(), axis, keepdims))
    if isinstance(ord, str) or np.ndim(ord):
        raise ValueError(f"Invalid norm order {ord!r} for vectors")
    if ord in (np.inf, -np.inf):
        absolute = abs(x)
        return (absolute.max if ord > 0 else absolute.min)(axis, keepdims=keepdims)
    if ord == 0:
        return (x != 0).sum(axis, keepdims=keepdims).astype(x.dtype)
    return (abs(x) ** ord).sum(axis, keepdims=keepdims) ** (1 / ord)


def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    """Returns the norms of vectors along one axis, for any order, or of matrices along two axes,
    for the orders "fro", "nuc", 1, -1, 2, -2, inf and -inf. If axis is None, x is the vector or
    matrix; if ord is None too, x may have any rank, and the norm is the square root of the sum of
    the squares. Integers give f64. The orders "nuc", 2 and -2 of matrices need singular values,
    which f16 and bf16 do not have (Unsupported)."""
    _own(x)
    if not _dtypes.is_float(x.dtype):
        x = x.astype("f8")
    if axis is None and (ord is None or (x.ndim, ord) in ((2, "fro"), (2, "f"), (1, 2))):
        return _vectors(x, None, None, keepdims)
    axes = _ops.axes_of(axis, x.ndim)
    if len(axes) == 1:
        return _vectors(x, ord, axes, keepdims)
    if len(axes) != 2:
        raise ValueError("Improper number of dimensions to norm.")
    if ord in (None, "fro", "f"):
        return _vectors(x, None, axes, keepdims)
    if ord in (2, -2, "nuc"):
        values = singular_values(np.moveaxis(x, axes, (-2, -1)))
        found = values.sum(-1) if ord == "nuc" else (values.max if ord > 0 else values.min)(-1)
        return found.reshape(_ops.folded(x.shape, axes, keepdims))
    if ord not in (1, -1, np.inf, -np.inf):
        raise ValueError(f"Invalid norm order {ord!r} for matrices")
    summed, kept = axes if abs(ord) == 1 else axes[::-1]
    sums = _vectors(x, 1, summed, True)
    found = (sums.max if ord > 0 else sums.min)(kept, keepdims=True)
    return found if keepdims else found.squeeze(axes)


def matmul(a: Any, b: Any, dtype: Any = None) -> Any:
    """Returns a @ b. dtype is the type of the sums and of the result ("f32" for f16 and bf16
    operands, "i64" for i32)."""
    out = None if dtype is None else _dtypes.dtype_of(dtype)
    return _made(lambda x, y: _ops.matmul(x, y, out), a, b)


def vecdot(a: Any, b: Any, axis: int = -1) -> Any:
    """Returns the sums of the products of two arrays along an axis, in their common type. Integers
    wrap."""
    return _made(_ufuncs.vecdot, a, b, axis=axis)


def window_sum(x: Any, radius: int) -> Any:
    """Returns, for each element of a vector, the sum of the elements that are at most `radius`
    positions away, including the element itself."""
    return _own(x)._make(_ops.window_sum(x._term(), radius))


def topk(x: Any, k: int, axis: int = -1, largest: bool = True) -> Tuple[Any, Any]:
    """Returns (values, indices) of the k largest elements along an axis in descending order, or of
    the k smallest elements in ascending order. Equal elements are in index order. NaN is
    larger than all other elements, as in NumPy's sort. The indices are i64. Values and indices are
    results of one step, so t.compute(values, indices) is one call. Raises BadK if k is below 1,
    above 4096 or above the extent."""
    values, indices = _ops.topk(_own(x)._term(), k, axis, largest)
    return x._make(values), x._make(indices)


def sort(x: Any, axis: int = -1, descending: bool = False) -> Any:
    """Returns the elements along an axis in ascending or descending order. NaN is larger than all
    other elements, and -0.0 equals 0.0, as in NumPy's sort. Equal elements stay in index order, in
    both directions."""
    return _own(x)._make(_ops.sort(x._term(), axis, descending)[0])


def argsort(x: Any, axis: int = -1, descending: bool = False) -> Any:
    """Returns the i64 indices along an axis that sort the elements as ts.sort does. An array and
    its indices are results of one step, so t.compute(ts.sort(x), ts.argsort(x)) is one call."""
    return _own(x)._make(_ops.sort(x._term(), axis, descending)[1])


def scan(
    x: Any, op: str, axis: int = -1, exclusive: bool = False, reverse: bool = False
) -> Any:
    """Returns, for each element, the fold of all elements along the axis up to and including it; if
    exclusive, the element itself is left out. op: "sum", "product", "min", "max", "all" or "any".
    The types are those of the reductions with these names. reverse: whether the folds begin at the
    end of the axis. An exclusive fold of no elements is 0 for "sum", 1 for "product", the largest
    value of the type for "min" and the smallest for "max" (infinite for floats), True for "all" and
    False for "any". Raises BadOperation for another op."""
    return _own(x)._make(_ops.scan(op, x._term(), axis, exclusive, reverse))


def sum_by_label(x: Any, labels: Any, length: int, mode: str = "raise") -> Any:
    """Returns the sums of the rows of x that have the same label: row j is the sum of all x[i] with
    labels[i] == j, for j from 0 to length - 1, as np.add.at(zeros, labels, x) gives them. labels is
    a vector of integers, one for each row. mode says how to treat a label that is out of range, as
    in np.take. The types are those of x.sum(0). Repeated calls give the same bits. Raises BadShape,
    or BadIndex (an IndexError) for a label that is out of range, unless x has no elements."""
    return _own(x)._make(_ops.sum_by_label(x._term(), indices_of(x, labels), length, mode))


def fma(a: Any, b: Any, c: Any) -> Any:
    """Returns a * b + c, rounded once, element by element."""
    return _made(lambda *terms: e.apply("fma", *terms), a, b, c)


# --- NumPy functions. Arguments are passed by name, so parameters have NumPy's names and defaults.


def where(condition: Any, x: Any = MISSING, y: Any = MISSING) -> Any:
    if (x is MISSING) != (y is MISSING):
        raise ValueError("np.where takes a condition, or a condition and two values")
    if x is MISSING:
        return nonzero(condition)
    return _made(lambda *terms: e.apply("where", *terms), condition, x, y)


def _select(condlist: Any, choicelist: Any, default: Any = 0) -> Any:
    count = len(condlist)
    if not count or len(choicelist) != count:
        raise ValueError("np.select takes one choice for each condition")

    def choose(*terms: Term) -> Term:
        if any(e.common_dtype([term]).kind != "b" for term in terms[:count]):
            raise TypeError("the conditions of np.select must be booleans")
        found = e.cast(terms[-1], e.common_dtype([*terms[count:]]))
        for i in reversed(range(count)):
            found = e.apply("where", terms[i], terms[count + i], found)
        return found

    return _made(choose, *condlist, *choicelist, default)


def clip(a: Any, min: Any = None, max: Any = None) -> Any:
    """Returns the elements, limited to the range from min to max; None means no limit."""
    if min is None and max is None:
        return a
    if min is None or max is None:
        name, bound = ("minimum", max) if min is None else ("maximum", min)
        return _made(lambda *terms: e.apply(name, *terms), a, bound)
    return _made(lambda *terms: e.apply("clip", *terms), a, min, max)


def round_(a: Any, decimals: int = 0) -> Any:
    """Returns the elements, rounded to a number of decimals, halves to even. As in NumPy, they are
    scaled, rounded and scaled back."""
    decimals = index_of(decimals, "the number of decimals")
    if a.dtype.kind in "iu":
        return a if decimals >= 0 else round_(a.astype("f8"), decimals).astype(a.dtype)
    if decimals and not _dtypes.is_float(a.dtype):
        raise Unsupported(f"booleans cannot be rounded to {decimals} decimals: use x.astype('f8')")
    scale = 10.0 ** abs(decimals) if abs(decimals) <= 308 else np.inf
    if decimals:
        a = a * scale if decimals > 0 else a / scale
    found = a._make(e.apply("round", a._term()))
    if decimals:
        found = found / scale if decimals > 0 else found * scale
    return found


def isclose(
    a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Any:
    def real(x: Term) -> Term:
        weak = isinstance(x[0], Constant) and x[0].dtype is None
        return x if weak or _dtypes.is_float(x[0].dtype) else e.cast(x, e.F64)

    def close(x: Term, y: Term) -> Term:
        x, y = real(x), real(y)
        if not _dtypes.is_float(e.common_dtype([x, y])):
            x, y = e.cast(x, e.F64), e.cast(y, e.F64)
        bound = e.apply("abs", e.apply("multiply", y, e.constant(float(rtol))))
        bound = e.apply("add", bound, e.constant(float(atol)))
        near = e.apply("less_equal", e.apply("abs", e.apply("subtract", x, y)), bound)
        # An infinity is close only to itself.
        found = e.apply("and", near, _ufuncs.isfinite(y))
        found = e.apply("or", found, e.apply("equal", x, y))
        if equal_nan:
            found = e.apply("or", found, e.apply("and", _ufuncs.isnan(x), _ufuncs.isnan(y)))
        return found

    return _made(close, a, b)


def _allclose(
    a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Any:
    return isclose(a, b, rtol, atol, equal_nan).all()


def _array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> Any:
    if np.shape(a1) != np.shape(a2):
        return False

    def equal(x: Term, y: Term) -> Term:
        found = e.apply("equal", x, y)
        if equal_nan:
            found = e.apply("or", found, e.apply("and", _ufuncs.isnan(x), _ufuncs.isnan(y)))
        return found

    return _made(equal, a1, a2).all()


def _array_equiv(a1: Any, a2: Any) -> Any:
    try:
        return _made(lambda x, y: e.apply("equal", x, y), a1, a2).all()
    except BadShape:
        return False


def nan_to_num(x: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
    if not _dtypes.is_float(x.dtype):
        return x
    # np.finfo does not know bf16, whose numbers have 8 significant bits.
    most = (2 - 2**-7) * 2.0**127 if x.dtype == _dtypes.bfloat16 else float(np.finfo(x.dtype).max)
    high = most if posinf is None else posinf
    low = -most if neginf is None else neginf
    found = where(x == np.inf, high, where(x == -np.inf, low, x))
    return where(x != x, nan, found).astype(x.dtype)


# --- reductions


# All parameters of NumPy's reductions. Each reduction has some of them.
_FOLDING = "a axis dtype keepdims initial where ddof correction".split()


def _method(name: str) -> Callable[..., Any]:
    """Returns a function that passes its arguments to a method of arrays."""

    def call(a: Any, *args: Any, **options: Any) -> Any:
        return getattr(a, name)(*args, **options)

    call.names = _FOLDING  # type: ignore[attr-defined]
    return call


def _skipping(name: str) -> Callable[..., Any]:
    """Returns NumPy's reduction "nan" + name, which skips NaN."""

    def call(a: Any, **options: Any) -> Any:
        fold = getattr(a, name)
        if not _dtypes.is_float(a.dtype):
            return fold(**options)
        other = options.pop("where", True)
        mask = _and(a, a == a, other)
        picks = name.endswith(("min", "max"))
        if picks and options.get("initial") != options.get("initial"):  # It is NaN.
            options["initial"] = None
        if picks and other is True and options.get("initial") is None:
            options.pop("initial", None)  # any() has no such parameter.
            last = where(a == a, a, -np.inf if name.endswith("max") else np.inf)
            found = getattr(last, name)(**options)
            # NumPy raises an error or warns if all elements are NaN.
            return where(mask.any(**options), found, -1 if name.startswith("arg") else np.nan)
        found = fold(where=mask, **options)
        less = options.get("correction") or options.get("ddof")
        if less:
            count = mask.sum(options.get("axis"), keepdims=options.get("keepdims", False))
            found = where(count > less, found, np.nan)
        return found

    call.names = _FOLDING  # type: ignore[attr-defined]
    return call


def _and(a: Any, mask: Any, other: Any) -> Any:
    """Returns a mask that is true where both masks are true. `other` may be True instead of a
    mask."""
    return mask if other is True else a._make(e.apply("and", mask._term(), a._mask(other)))


def average(
    a: Any, axis: Any = None, weights: Any = None, returned: bool = False, keepdims: bool = False
) -> Any:
    own = a.dtype if _dtypes.is_float(a.dtype) else e.F64
    if weights is None:
        found = a.mean(axis, keepdims=keepdims)
        total: Any = found._like(float(a.size) / max(found.size, 1)).astype(own)
    else:
        weights = a._lifted(weights, "np.average")
        if weights.shape != a.shape:
            if axis is None:
                raise TypeError("axis must be given if weights and array differ in shape")
            axes = normalize_axes(axis, a.ndim)
            if weights.shape != tuple(a.shape[at] for at in axes):
                raise BadShape(f"weights {weights.shape} do not fit axis {axis} of {a.shape}")
            shape = [extent if at in axes else 1 for at, extent in enumerate(a.shape)]
            weights = weights.transpose(np.argsort(axes).tolist()).reshape(shape)
            weights = weights.broadcast_to(a.shape)
        own = _dtypes.promote(own, weights.dtype) if weights.dtype.kind != "b" else own
        # Products of 16-bit floats fit into 32 bits.
        wide = own if own.itemsize > 2 else np.dtype("<f4")
        total = weights.astype(wide).sum(axis, keepdims=keepdims)
        found = (a.astype(wide) * weights.astype(wide)).sum(axis, keepdims=keepdims) / total
        found, total = found.astype(own), total.astype(own)
    return (found, total.broadcast_to(found.shape)) if returned else found


def trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Any:
    return diagonal(a, offset, axis1, axis2).sum(-1, dtype)


def ptp(a: Any, axis: Any = None, keepdims: bool = False) -> Any:
    if a.dtype.kind == "b":
        raise TypeError("booleans have no peak-to-peak range")
    return a.max(axis, keepdims=keepdims) - a.min(axis, keepdims=keepdims)


def _cov(
    m: Any,
    y: Any = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: Any = None,
    fweights: Any = None,
    aweights: Any = None,
    dtype: Any = None,
) -> Any:
    parts = [m] if y is None else [m, m._lifted(y, "np.cov")]
    if max(part.ndim for part in parts) > 2:
        raise BadShape("np.cov takes vectors and matrices")
    own = e.common_dtype([*(part._term() for part in parts), (Constant(0, e.F64), View.whole(()))])
    parts = [part._real_of(own if dtype is None else dtype, None) for part in parts]
    rows = [
        part[(None,) * (2 - part.ndim)] if rowvar or part.ndim < 2 else part.T for part in parts
    ]
    if not len(rows[0]):
        return m._like(np.empty((0, 0)))
    x = rows[0] if y is None else concatenate(rows)
    weights = [np.asarray(w, float) for w in (fweights, aweights) if w is not None]
    given: Any = None
    less = int(not bias) if ddof is None else ddof
    if less != int(less):
        raise ValueError("ddof must be integer")
    count: Any = x.shape[1] - less
    if weights:
        # NumPy raises its errors.
        np.cov(np.zeros((1, x.shape[1])), None, True, bias, ddof, fweights, aweights)
        given = np.prod(weights, 0)
        share = 1 if aweights is None else (given * weights[-1]).sum() / given.sum()
        count = given.sum() - less * share
    x = (x - average(x, 1, given)[:, None]).astype(x.dtype)
    other = x if given is None else x * given
    return (x @ other.T * (1 / float(count) if count > 0 else np.inf)).squeeze()


def _corrcoef(x: Any, y: Any = None, rowvar: bool = True, dtype: Any = None) -> Any:
    c = _cov(x, y, rowvar, dtype=dtype)
    if not c.ndim:
        return c / c
    deviation = np.sqrt(c.diagonal())
    return clip(c / deviation[:, None] / deviation, -1, 1)


# --- bins, and positions in sorted arrays


def _searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> Any:
    """Returns the positions of values in a sorted vector. As in NumPy, NaN is the largest number.
    """
    if a.ndim != 1 or side not in ("left", "right"):
        raise ValueError("np.searchsorted takes a vector, and the side 'left' or 'right'")
    if sorter is not None:
        if np.shape(sorter) != a.shape:
            raise ValueError("sorter.size must equal a.size")
        a = take(a, sorter)
    if not hasattr(v, "_session"):
        v = np.asarray(_dtypes.to_numpy(v))
        if v.ndim == 0:
            return _searchsorted(a, v.reshape(1), side)[0]
    keys = a._operand(v, "np.searchsorted")
    return a._make(_ops.search_sorted(a._term(), keys, side == "right"))


def _digitize(x: Any, bins: Any, right: bool = False) -> Any:
    if hasattr(bins, "_session"):
        if bins.ndim != 1:
            raise ValueError("object of too small depth for desired array")
        before, after = bins[:-1], bins[1:]
        rises, falls = now(bins, (before < after).any(), (before > after).any())
        if rises and falls:
            raise ValueError("bins must be monotonically increasing or decreasing")
    else:
        bins = np.asarray(bins)
        falls = not np.digitize(np.nan, bins)  # NumPy raises its errors, and puts NaN last.
    edges = bins[::-1] if falls else bins
    found = _searchsorted(x._lifted(edges, "np.digitize"), x, "left" if right else "right")
    return len(bins) - found if falls else found


def _even(
    edges: Any, dtype: Any, low: float, high: float
) -> Optional[Tuple[int, float, float]]:
    """Returns (count, low, high) if these edges are the ones that the server computes for bins of
    equal width, otherwise None."""
    count = len(edges) - 1
    width = (high - low) / count
    if not np.finfo(float).tiny <= width < np.inf or dtype == _dtypes.bfloat16:
        return None
    mine = np.arange(count + 1) * width + low
    mine[-1] = high
    if dtype.kind == "f":
        mine = mine.astype(dtype)
    return (count, low, high) if np.array_equal(mine, edges) else None


def _weighted(places: Any, count: int, weights: Any) -> Any:
    """Returns the sum of the weights at each place from 0 to count - 1. The places -1 and count, to
    which "wrap" gives the same label, are left out."""
    return sum_by_label(weights, places, count + 1, "wrap")[:count]


def _histogram(
    a: Any, bins: Any = 10, range: Any = None, density: bool = False, weights: Any = None
) -> Any:
    if isinstance(bins, str):
        raise Unsupported("the number of bins must be known: pass it, or edges")
    a, bins = flat(a), known(bins)
    even = None
    if hasattr(bins, "_session"):
        edges = bins
        if edges.ndim != 1:
            raise ValueError("`bins` must be 1d, when an array")
    else:
        own = np.dtype("<f4") if a.dtype == _dtypes.bfloat16 else a.dtype
        outer = np.empty(0, own)
        if np.ndim(bins) == 0 and range is None and a.size:
            outer = np.array(now(a, a.min(), a.max()), own)
        edges = np.histogram_bin_edges(outer, bins, range)
        if np.isnan(edges).any():
            raise ValueError("the edges of bins contain NaN, or their range exceeds float64")
        if np.ndim(bins) == 0:
            low, high = edges[[0, -1]] if range is None or range[0] == range[1] else range
            even = _even(edges, a.dtype, float(low), float(high))
    if weights is not None:
        weights = a._lifted(weights, "np.histogram")
        if weights.size != a.size:
            raise ValueError("weights should have the same shape as a.")
        limits = a._lifted(edges, "np.histogram")
        count = len(limits) - 1
        places = _searchsorted(limits, a, "right") - 1
        places = where(a == limits[-1], count - 1, places)
        found = _weighted(places, count, flat(weights))._typed(weights.dtype)
    elif even is None:
        found = a._make(_ops.histogram(a._term(), a._operand(edges, "np.histogram")))
    else:
        found = a._make(_ops.histogram(a._term(), even=even))
    if density:
        found = found / np.diff(edges).astype(float) / found.sum()
    return found, edges


def _bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Counts each integer, or sums its weights. Calls the server, because the shape of the result
    depends on the integers."""
    if x.ndim != 1:
        raise ValueError("object too deep for desired array")
    if x.dtype.kind not in "biu":
        raise TypeError(f"Cannot cast array data from dtype('{x.dtype}') to dtype('int64')")
    count = index_of(minlength, "the least number of bins")
    if count < 0:
        raise ValueError("'minlength' must not be negative")
    if x.size:
        low, high = (int(value) for value in now(x, x.min(), x.max()))
        if low < 0:
            raise ValueError("'list' argument must have no negative elements")
        count = max(count, high + 1)
    if not count:
        return x._like(np.empty(0, "<i8"))
    if weights is None:
        return x._make(_ops.histogram(x._term(), integers=count))
    weights = x._lifted(weights, "np.bincount")
    if weights.shape != x.shape:
        raise ValueError("The weights and list don't have the same length.")
    return sum_by_label(weights.astype("f8"), x.astype("i8"), count)


# --- sets


class UniqueAll(NamedTuple):
    """The result of np.unique_all."""

    values: Any
    indices: Any
    inverse_indices: Any
    counts: Any


class UniqueCounts(NamedTuple):
    """The result of np.unique_counts."""

    values: Any
    counts: Any


class UniqueInverse(NamedTuple):
    """The result of np.unique_inverse."""

    values: Any
    inverse_indices: Any


def _distinct(
    a: Any, index: bool, inverse: bool, counts: bool, equal_nan: bool
) -> Dict[str, Any]:
    """Returns the distinct elements in order, the first position and the count of each, and for
    each element the index of the distinct element that equals it. Calls the server."""
    values, order = (a._make(term) for term in _ops.sort(flat(a)._term()))
    before, after = values[:-1], values[1:]
    differs = before != after
    if equal_nan and _dtypes.is_float(a.dtype):
        differs = differs & ((before == before) | (after == after))
    begins = concatenate([a._like(np.ones(1, bool)), differs]) if a.size else differs
    wanted = {"values": selection(values, begins, 0)}
    if index:
        wanted["indices"] = selection(order, begins, 0)
    if counts:
        wanted["counts"] = selection(begins, begins, 1)
    if inverse:
        places = take(begins.cumsum() - 1, _in_order(1)(order), mode="wrap")
        wanted["inverse_indices"] = places.reshape(a.shape)
    found = dict(zip(wanted, kept(*wanted.values())))
    if counts:
        found["counts"] = np.diff(found["counts"], append=a.size)
    return found


_FLAT_INVERSE = np.unique(np.zeros((1, 1)), return_inverse=True)[1].ndim == 1  # NumPy 1.


def _unique(
    ar: Any,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: Any = None,
    equal_nan: bool = True,
) -> Any:
    if axis is not None and (ar.ndim != 1 or normalize_axis(axis, 1)):
        raise Unsupported("np.unique compares elements, not slices: use x.numpy() for axis=")
    equal_nan = equal_nan and axis is None  # as in NumPy
    found = _distinct(ar, return_index, return_inverse, return_counts, equal_nan)
    if return_inverse and (_FLAT_INVERSE or axis is not None):
        found["inverse_indices"] = flat(found["inverse_indices"])
    names = ("values", "indices", "inverse_indices", "counts")
    several = tuple(found[name] for name in names if name in found)
    return several if len(several) > 1 else several[0]


# --- sorting


def _in_order(which: int) -> Callable[..., Any]:
    """Returns np.sort or np.argsort. All kinds of sorts are stable here."""

    def call(
        a: Any, axis: Any = -1, kind: Any = None, order: Any = None, stable: Any = None
    ) -> Any:
        if order is not None:
            raise ValueError("Cannot specify order when the array has no fields.")
        if axis is None or which and not a.ndim:
            a, axis = flat(a), 0 if axis is None else axis
        return a._make(_ops.sort(a._term(), axis)[which])

    return call


def _partitioned(which: int) -> Callable[..., Any]:
    """Returns np.partition or np.argpartition. They sort, because sorted elements are partitioned
    at every index."""

    def call(a: Any, kth: Any, axis: Any = -1, order: Any = None) -> Any:
        extent = a.size if axis is None else a.shape[normalize_axis(axis, a.ndim)]
        if any(not -extent <= index_of(one, "kth") < extent for one in several(kth)):
            raise ValueError(f"kth={kth} is out of bounds for {extent} elements")
        return _in_order(which)(a, axis, order=order)

    return call


def _either(test: Any, a: Any, b: Any) -> Any:
    """Like np.where, but the test may also be a bool of this process."""
    return where(test, a, b) if hasattr(test, "_session") else a if test else b


def _of_sorted(
    a: Any, axis: Any, keepdims: bool, pick: Callable[..., Any], skip: bool = False
) -> Any:
    """Returns pick(at, n) for the n elements along axes in order, where at(i) is the element with
    index i. The result is NaN where there are no elements or, unless NaN is skipped, where an
    element is NaN. If NaN is skipped, n and i are arrays."""
    axes = _ops.axes_of(axis, a.ndim)
    kept = tuple(i for i in range(a.ndim) if i not in axes)
    n: Any = math.prod(a.shape[i] for i in axes)
    if not n:
        return a.mean(axis, keepdims=keepdims)
    lines = a.transpose(kept + axes).reshape((*(a.shape[i] for i in kept), n))
    ordered = sort(lines)

    def at(i: Any) -> Any:
        if hasattr(i, "_session"):
            return np.take_along_axis(ordered, i.astype("i8")[..., None], -1)[..., 0]
        return ordered[..., int(i)]

    if skip and _dtypes.is_float(a.dtype):
        found = pick(at, np.maximum((lines == lines).sum(-1), 1))
    else:
        last = at(n - 1)
        found = where(last == last, pick(at, n), last)
    return found.reshape(_ops.folded(a.shape, axes, keepdims))


def _real_of(a: Any) -> Any:
    return a if _dtypes.is_float(a.dtype) else a.astype("f8")


# The methods of np.quantile that interpolate, with alpha and beta in the formula of their index,
# n * q + alpha + q * (1 - alpha - beta) - 1; and the methods that round the index of "linear".
_CONTINUOUS = {
    "linear": (1.0, 1.0),
    "hazen": (0.5, 0.5),
    "weibull": (0.0, 0.0),
    "interpolated_inverted_cdf": (0.0, 1.0),
    "median_unbiased": (1 / 3, 1 / 3),
    "normal_unbiased": (3 / 8, 3 / 8),
}
_ROUNDED: Dict[str, Callable[..., Any]] = {
    "lower": np.floor,
    "higher": np.ceil,
    "nearest": np.rint,
    "midpoint": lambda place: (np.floor(place) + np.ceil(place)) / 2,
}


def _median_of(skip: bool) -> Callable[..., Any]:
    """Returns np.median or np.nanmedian."""

    def middle(at: Any, n: Any) -> Any:
        lower, upper = (_real_of(at(i)) for i in ((n - 1) // 2, n // 2))
        wide = "f4" if upper.dtype.itemsize == 2 else upper.dtype  # The sum may be out of range.
        mean = ((lower.astype(wide) + upper.astype(wide)) / 2).astype(upper.dtype)
        return _either(n % 2 == 1, upper, mean)

    return lambda a, axis=None, keepdims=False: _of_sorted(a, axis, keepdims, middle, skip)


def _quantile_of(scale: int, skip: bool) -> Callable[..., Any]:
    """Returns np.quantile (scale 1), np.percentile (100), or the variant that skips NaN."""

    def place_of(method: str, n: Any, part: float) -> Any:
        if method in _ROUNDED or method == "linear":
            return _ROUNDED.get(method, np.positive)((n - 1) * part)
        alpha, beta = _CONTINUOUS[method]
        return n * part + (alpha + part * (1 - alpha - beta)) - 1

    def pick(method: str, part: float) -> Callable[..., Any]:
        def between(at: Any, n: Any) -> Any:
            place = np.minimum(np.maximum(place_of(method, n, part), 0.0), n - 1.0)
            low = np.floor(place)
            if method in _ROUNDED and method != "midpoint":
                return at(low)
            first, second = (_real_of(at(i)) for i in (low, np.minimum(low + 1, n - 1.0)))
            share: Any = place - low
            # A Python number leaves the type of the elements unchanged.
            share = share.astype(first.dtype) if hasattr(share, "_session") else float(share)
            step = second - first
            found = _either(share < 0.5, first + step * share, second - step * (1 - share))
            return _either(share == 0, first, found)

        return between

    def call(
        a: Any, q: Any, axis: Any = None, method: str = "linear", keepdims: bool = False
    ) -> Any:
        if a.dtype.kind == "b" and method not in ("lower", "higher", "nearest"):
            raise Unsupported(
                "booleans have no differences: use the quantiles of x.astype(int), or"
                ' method="lower"'
            )
        axes = _ops.axes_of(axis, a.ndim)
        if not skip and not math.prod(a.shape[i] for i in axes):
            raise BadIndex("an empty array has no quantiles")
        parts = np.asarray(known(q), float) / scale
        if not np.all((parts >= 0) & (parts <= 1)):
            raise ValueError(f"quantiles must be numbers from 0 to {scale}")
        if method not in _CONTINUOUS and method not in _ROUNDED:
            names = ", ".join((*_CONTINUOUS, *_ROUNDED))
            raise Unsupported(f"method={method!r} is not supported: use {names}, or np.sort(x)")
        found = [
            _of_sorted(a, axis, keepdims, pick(method, part), skip)
            for part in parts.reshape(-1).tolist() or [0.0]
        ]
        if not parts.ndim:
            return found[0]
        return stack(found)[: parts.size].reshape(parts.shape + found[0].shape)

    return call


# --- scans


def _without_nan(a: Any, rest: int) -> Any:
    """Returns the elements, with a number in place of NaN."""
    return where(a == a, a, rest) if _dtypes.is_float(a.dtype) else a


def _cumulative(name: str) -> Callable[..., Any]:
    """Implements cumulative_sum and cumulative_prod of the array API standard."""

    def call(x: Any, axis: Any = None, dtype: Any = None, include_initial: bool = False) -> Any:
        if axis is None and x.ndim > 1:
            raise ValueError(f"axis= must be given for an array of {x.ndim} axes")
        found = getattr(x, name)(axis, dtype)
        if not include_initial:
            return found
        at = normalize_axis(axis or 0, found.ndim)
        shape = (*found.shape[:at], 1, *found.shape[at + 1 :])
        return concatenate([np.full_like(found, name == "cumprod", shape=shape), found], at)

    return call


def _ediff1d(ary: Any, to_end: Any = None, to_begin: Any = None) -> Any:
    ary = flat(ary)
    found = ary[1:] - ary[:-1]
    parts: Any = [to_begin, found, to_end]
    for i in (0, 2):
        if parts[i] is not None:
            parts[i] = flat(ary._lifted(parts[i], "np.ediff1d"))
            if not np.can_cast(parts[i].dtype, ary.dtype, "same_kind"):
                raise TypeError("dtype of `to_begin`, `to_end` must be compatible with input `ary`")
    parts = [part for part in parts if part is not None]
    return concatenate(parts)._typed(ary.dtype) if len(parts) > 1 else found


def _trapezoid(y: Any, x: Any = None, dx: float = 1.0, axis: int = -1) -> Any:
    axis = normalize_axis(axis, y.ndim)
    steps: Any = dx
    if x is not None:
        x = y._lifted(x, "np.trapezoid")
        steps = diff(x, axis=0 if x.ndim == 1 else axis)
        if x.ndim == 1:
            steps = steps.reshape([-1 if i == axis else 1 for i in range(y.ndim)])
    before = (slice(None),) * axis
    pairs = y[(*before, slice(1, None))] + y[(*before, slice(None, -1))]
    return (steps * pairs / 2.0).sum(axis)


def _correlate(a: Any, v: Any, mode: str = "valid") -> Any:
    """Sums the products of `v` with each window of `a`. The product of an element beyond the ends
    of `a` is left out."""
    v = a._lifted(v, "np.correlate")
    a, v = (x.reshape(-1) if not x.ndim else x for x in (a, v))
    if (a.ndim, v.ndim) != (1, 1) or not a.size or not v.size:
        raise BadShape("np.correlate and np.convolve take vectors that are not empty")
    if len(v) > len(a):
        return _correlate(v, a, mode)[::-1]
    if mode not in ("valid", "same", "full"):
        raise ValueError(f"mode must be 'valid', 'same' or 'full', not {mode!r}")
    size, extent = len(v), len(a)
    before = {"valid": 0, "same": size // 2, "full": size - 1}[mode]
    count = {"valid": extent - size + 1, "same": extent, "full": extent + size - 1}[mode]
    common = e.common_dtype([a._term(), v._term()])
    wide = common if common.itemsize > 2 or common.kind in "biu" else np.dtype("<f4")
    place = index(a, count)[:, None] + index(a, size)
    inside = True if mode == "valid" else (place >= before) & (place < before + extent)
    seen = windows(cycled(a, count + size - 1, before)._typed(wide), size)
    return (seen * v._typed(wide)).sum(-1, where=inside)._typed(common)


def _convolve(a: Any, v: Any, mode: str = "full") -> Any:
    a, v = (x.reshape(-1) if not x.ndim else x for x in (a, a._lifted(v, "np.convolve")))
    a, v = (a, v) if len(a) >= len(v) else (v, a)
    return _correlate(a, v[::-1], mode)


# --- linear algebra


def dot(a: Any, b: Any) -> Any:
    """Like numpy.dot, for numbers, vectors, matrices and stacks of matrices."""
    b = a._lifted(b, "np.dot")
    ranks = a.ndim, b.ndim
    if 0 in ranks:
        return a * b
    if max(ranks) > 2 and ranks[1] > 1:
        return _made(_ops.tensordot, a, b, axes=(-1, -2))
    return _made(_ops.matmul, a, b)


def _outer(a: Any, b: Any) -> Any:
    return flat(a).reshape(-1, 1) * flat(a._lifted(b, "np.outer")).reshape(1, -1)


def _inner(a: Any, b: Any) -> Any:
    b = a._lifted(b, "np.inner")
    ranks = a.ndim, b.ndim
    if 0 in ranks:
        return a * b
    if ranks == (1, 1):
        return dot(a, b)
    return _made(lambda x, y: _ops.tensordot(x, y, (-1, -1)), a, b)


def _tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    return _made(_ops.tensordot, a, b, axes=axes)


def _kron(a: Any, b: Any) -> Any:
    b = a._lifted(b, "np.kron")
    rank = max(a.ndim, b.ndim)
    a, b = (x[(None,) * (rank - x.ndim)] for x in (a, b))
    rows = a.reshape([n for m in a.shape for n in (m, 1)])
    product = rows * b.reshape([n for m in b.shape for n in (1, m)])
    return product.reshape([m * n for m, n in zip(a.shape, b.shape)])


def _cross(
    a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: Any = None
) -> Any:
    if axis is not None:
        axisa = axisb = axisc = axis
    a, b = np.moveaxis(a, axisa, -1), np.moveaxis(a._lifted(b, "np.cross"), axisb, -1)
    sizes = a.shape[-1], b.shape[-1]
    if not {*sizes} <= {2, 3}:
        raise BadShape(f"np.cross takes vectors of 3 elements, or of 2, not {sizes}")

    def part(i: int, j: int) -> Any:
        """Leaves out the products with the third element of a vector of 2."""
        if i >= sizes[0] or j >= sizes[1]:
            return -(a[..., j] * b[..., i])
        first = a[..., i] * b[..., j]
        return first if j >= sizes[0] or i >= sizes[1] else first - a[..., j] * b[..., i]

    return part(0, 1) if sizes == (2, 2) else stack([part(1, 2), part(2, 0), part(0, 1)], axisc)


def _multi_dot(arrays: Any) -> Any:
    one = next(array for array in arrays if hasattr(array, "_session"))
    arrays = [one._lifted(array, "np.linalg.multi_dot") for array in arrays]
    ranks = [array.ndim for array in arrays]
    if len(ranks) < 2 or {*ranks[1:-1]} - {2} or {ranks[0], ranks[-1]} - {1, 2}:
        raise BadMatrix("np.linalg.multi_dot takes matrices, and vectors at the ends")

    @functools.lru_cache(maxsize=None)
    def best(begin: int, end: int) -> Tuple[int, Any]:
        """Returns the cost of a product and the product itself."""
        if end - begin == 1:
            return 0, arrays[begin]
        found: Any = []
        for middle in range(begin + 1, end):
            (cost, a), (more, b) = best(begin, middle), best(middle, end)
            found.append((cost + more + a.size * (b.shape[-1] if b.ndim > 1 else 1), dot(a, b)))
        return min(found, key=lambda pair: int(pair[0]))  # type: ignore[no-any-return]

    found = best(0, len(arrays))[1]
    return found._typed(e.common_dtype([array._term() for array in arrays]))


def _matrix_power(a: Any, n: int) -> Any:
    _ops.check_matrices(a._term())
    if index_of(n, "the exponent of a matrix") < 0:
        a, n = inv(a), -n
    one = a._like(np.eye(a.shape[-1], dtype="i1")).astype(a.dtype)
    found: Any = None if n else one.broadcast_to(a.shape)
    square = a
    while n:
        if n % 2:
            found = square if found is None else found @ square
        n //= 2
        square = square @ square if n else square
    return found


def _result_type(*arrays_and_dtypes: Any) -> "np.dtype[Any]":
    terms = []
    for value in arrays_and_dtypes:
        if hasattr(value, "_session"):
            terms.append(value._term())
        elif isinstance(value, (np.dtype, type, str)):
            terms.append((Constant(0, _dtypes.named(value)), View.whole(())))
        else:
            terms.append(e.lift(value))
    return e.common_dtype(terms)


def _vector_norm(x: Any, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:
    x = x if _dtypes.is_float(x.dtype) else x.astype("f8")
    return _vectors(x, ord, axis, keepdims)


FUNCTIONS: Dict[Any, Callable[..., Any]] = {**MANIPULATIONS, **COMPOSED, **LINALG}
# Functions whose first argument need not be an array.
OF_TYPES = {
    np.can_cast, np.result_type, np.select, np.linalg.multi_dot, np.concatenate, np.stack,
    np.hstack, np.vstack, np.dstack, np.column_stack, np.compress, np.extract, np.lexsort, np.block,
    np.polyval, np.union1d,
}


_FOLDS = "sum prod min max argmin argmax mean var std".split()
add(FUNCTIONS, np, {name: _method(name) for name in (*_FOLDS, "all", "any")})
add(FUNCTIONS, np, {f"nan{name}": _skipping(name) for name in _FOLDS})
add(
    FUNCTIONS,
    np,
    {
        "product": _method("prod"),
        "cumproduct": _method("cumprod"),
        "alltrue": _method("all"),
        "sometrue": _method("any"),
        "msort": lambda a: _in_order(0)(a, 0),
        "amin": _method("min"),
        "amax": _method("max"),
        "ptp": ptp,
        "cumsum": _method("cumsum"),
        "cumprod": _method("cumprod"),
        "cumulative_sum": _cumulative("cumsum"),
        "cumulative_prod": _cumulative("cumprod"),
        "nancumsum": lambda a, axis=None, dtype=None: _without_nan(a, 0).cumsum(axis, dtype),
        "nancumprod": lambda a, axis=None, dtype=None: _without_nan(a, 1).cumprod(axis, dtype),
        "sort": _in_order(0),
        "argsort": _in_order(1),
        "partition": _partitioned(0),
        "argpartition": _partitioned(1),
        "median": _median_of(False),
        "nanmedian": _median_of(True),
        "quantile": _quantile_of(1, False),
        "nanquantile": _quantile_of(1, True),
        "percentile": _quantile_of(100, False),
        "nanpercentile": _quantile_of(100, True),
        "ediff1d": _ediff1d,
        "trapz": _trapezoid,
        "trapezoid": _trapezoid,
        "average": average,
        "count_nonzero": lambda a, axis=None, keepdims=False: (a != 0).sum(axis, keepdims=keepdims),
        "where": where,
        "select": _select,
        "clip": clip,
        "round": round_,
        "around": round_,
        "fix": lambda x: x._make(e.apply("trunc", x._term())),
        "isposinf": lambda x: x == np.inf,
        "isneginf": lambda x: x == -np.inf,
        "cov": _cov,
        "corrcoef": _corrcoef,
        "searchsorted": _searchsorted,
        "digitize": _digitize,
        "histogram": _histogram,
        "bincount": _bincount,
        "unique": _unique,
        "unique_values": lambda x: _distinct(x, False, False, False, False)["values"],
        "unique_counts": lambda x: UniqueCounts(**_distinct(x, False, False, True, False)),
        "unique_inverse": lambda x: UniqueInverse(**_distinct(x, False, True, False, False)),
        "unique_all": lambda x: UniqueAll(**_distinct(x, True, True, True, False)),
        "correlate": _correlate,
        "convolve": _convolve,
        "isclose": isclose,
        "allclose": _allclose,
        "array_equal": _array_equal,
        "nan_to_num": nan_to_num,
        "array_equiv": _array_equiv,
        "real": lambda val: val,
        "imag": lambda val: np.zeros_like(val),
        "isreal": lambda x: np.ones_like(x, bool),
        "iscomplex": lambda x: np.zeros_like(x, bool),
        "dot": dot,
        "vdot": lambda a, b: dot(flat(a), flat(a._lifted(b, "np.vdot"))),
        "inner": _inner,
        "outer": _outer,
        "tensordot": _tensordot,
        "einsum": einsum,
        "kron": _kron,
        "cross": _cross,
        "trace": trace,
        "can_cast": lambda from_, to, casting="safe": _dtypes.can_cast(
            from_.dtype, _dtypes.named(to), casting
        ),
        "result_type": _result_type,
        "iscomplexobj": lambda x: False,
        "isrealobj": lambda x: True,
        "astype": lambda x, dtype: x.astype(dtype),
    },
)
add(
    FUNCTIONS,
    np.linalg,
    {
        "matmul": lambda x1, x2: matmul(x1, x2),
        "norm": norm,
        "multi_dot": _multi_dot,
        "cross": lambda x1, x2, axis=-1: _cross(x1, x2, axis=axis),
        "matrix_power": _matrix_power,
        "matrix_norm": lambda x, keepdims=False, ord="fro": norm(x, ord, (-2, -1), keepdims),
        "outer": lambda x1, x2: _outer(x1, x2),
        "tensordot": lambda x1, x2, axes=2: _tensordot(x1, x2, axes),
        "trace": lambda x, offset=0, dtype=None: trace(x, offset, -2, -1, dtype),
        "vecdot": lambda x1, x2, axis=-1: vecdot(x1, x2, axis),
        "vector_norm": _vector_norm,
    },
)
