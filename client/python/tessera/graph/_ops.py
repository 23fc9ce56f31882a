"""The operations that are not computed element by element, with shapes and types as in NumPy. An
operation that the server lacks raises Unsupported. A term is a source and a view of it.
"""

import math
from typing import Any, Iterable, Optional, Sequence, Tuple, Union

import numpy as np

from ..wire._errors import (
    BadAxes, BadDtype, BadIndex, BadK, BadMatrix, BadOperation, BadRadius, BadShape, EmptyInput,
    Unsupported,
)
from . import _dtypes
from ._elementwise import apply, cast, check_fits, common_dtype, copy
from ._graph import Constant, Inline, Leaf, Node, Term
from ._plan import window
from ._views import (
    View, broadcast_shapes, index_of, is_true, normalize_axes, normalize_axis, size_of
)

_NUMBER = View.whole(())
Axis = Union[None, int, Sequence[int]]
MAX_K = 4096  # The server's limit.
_I64, _I32, _F64, _F32 = (np.dtype(kind) for kind in ("<i8", "<i4", "<f8", "<f4"))
_BOOL = np.dtype(bool)


def _term(node: Node) -> Term:
    return node, View.whole(node.shape).checked()


def reshaped(a: Term, shape: Sequence[int]) -> Term:
    """Returns the same elements in row-major order in another shape: a view if possible, otherwise
    a copy."""
    view = a[1].reshape(shape)
    if view is None:
        a = copy(a)
        view = a[1].reshape(shape)
        assert view is not None
    return a[0], view


_BYTES = frozenset(map(np.dtype, ("u1", "i1")))
_PLAIN = frozenset(map(np.dtype, ("<f4", "<f8", "<f2", "<i4", "<i8")))
_ARRAYS = (Leaf, Node, Inline)


def array(a: Term) -> Term:
    """Returns a term that an operation accepts. A number becomes an array. Raises OverflowError for
    a Python integer that the server has no type for."""
    source, view = a
    if not isinstance(source, Constant):
        return a
    dtype = common_dtype([a])
    check_fits(source.value, dtype)
    return Inline(_dtypes.to_server(np.asarray(source.value), dtype)), view


def _numbers(a: Term, *others: Term) -> Tuple[Term, ...]:
    """Converts the terms to their common type. One-byte elements become int32 first."""
    terms = (a, *others)
    dtype = a[0].dtype
    for source, _ in terms:
        if not isinstance(source, _ARRAYS) or source.dtype is not dtype:
            break
    else:
        if dtype in _PLAIN:
            return terms  # The usual case, which must be fast.
    common = common_dtype(list(terms))
    if common.itemsize == 1:
        common = _I32
    return tuple(array(cast(term, common)) for term in terms)


def _are_truth(a: Term, b: Term) -> bool:
    """Returns whether both terms are bool. In NumPy, their product is then also bool: it is
    true if both elements of any pair are true."""
    return a[0].dtype == b[0].dtype == _BOOL


def dot(a: Term, b: Term) -> Term:
    """Returns the sum of the products of two vectors."""
    truth = _are_truth(a, b)
    a, b = _numbers(a, b)
    if a[1].shape != b[1].shape:
        raise BadShape(f"dot does not take shapes {a[1].shape} and {b[1].shape}")
    dtype = a[0].dtype
    node = Node("dot", (a, b), (), _I64 if _dtypes.is_integer(dtype) else dtype)
    return cast((node, _NUMBER), _BOOL) if truth else (node, _NUMBER)


def matmul(a: Term, b: Term, out_dtype: "Optional[np.dtype[Any]]" = None) -> Term:
    """Returns the product of vectors, matrices or stacks of matrices. With out_dtype, f16 and bf16
    are computed in f32, and i32 in i64. The product of 8-bit integers is i32."""
    shape_a, shape_b = a[1].shape, b[1].shape
    ranks = len(shape_a), len(shape_b)
    if 0 in ranks:
        raise BadShape("matmul takes no scalars: use *")
    if ranks == (1, 1) and out_dtype is None:
        return dot(a, b)
    truth = out_dtype is None and _are_truth(a, b)
    of_bytes = {a[0].dtype, b[0].dtype} <= _BYTES and out_dtype in (None, _I32)
    a, b = (array(a), array(b)) if of_bytes else _numbers(a, b)
    if a[0].dtype == _I64 and out_dtype not in (None, _I64):
        raise Unsupported(f"a product of i64 cannot be {out_dtype}: convert with .astype()")
    k, k2 = shape_a[-1], shape_b[-2 if ranks[1] > 1 else 0]
    if k != k2:
        raise BadShape(f"matmul does not take shapes {shape_a}, {shape_b}: {k} is not {k2}")
    rows, columns = shape_a[:-1][-1:], shape_b[1:][-1:]
    shape = (*broadcast_shapes(shape_a[:-2], shape_b[:-2]), *rows, *columns)
    if a[0].dtype == _I64:  # Matmul lacks i64. Sums of products wrap as in NumPy.
        return reshaped(_products(a, b), shape)
    params = {} if out_dtype is None else {"out_dtype": _dtypes.to_wire(out_dtype)}
    dtype = out_dtype or (_I32 if of_bytes else a[0].dtype)
    product = _term(Node("matmul", (a, b), shape, dtype, params))
    return cast(product, _BOOL) if truth else product


def _products(a: Term, b: Term) -> Term:
    """Returns the products of vectors, matrices and stacks as sums of elementwise products. Vectors
    become matrices."""
    view = b[1] if len(b[1].shape) > 1 else b[1].at((slice(None), None))
    rows = a[0], a[1].at((..., *(slice(None),) * (len(a[1].shape) > 1), None, slice(None)))
    order = [*range(len(view.shape) - 2), -1, -2]
    columns = b[0], view.transpose(order).at((..., None, slice(None), slice(None)))
    return reduce("sum", apply("multiply", rows, columns), -1)


def tensordot(
    a: Term, b: Term, axes: Any = 2, out_dtype: "Optional[np.dtype[Any]]" = None
) -> Term:
    """Implements numpy.tensordot as a Matmul, with transposes and reshapes around it."""
    a, b = array(a), array(b)
    rank_a, rank_b = len(a[1].shape), len(b[1].shape)
    if not isinstance(axes, Iterable):
        count = index_of(axes, "the number of axes")
        if not 0 <= count <= min(rank_a, rank_b):
            raise BadAxes(
                f"shapes {a[1].shape} and {b[1].shape} do not both have {count} axes to sum over"
            )
        over_a: Sequence[int] = range(rank_a - count, rank_a)
        over_b: Sequence[int] = range(count)
    else:
        first, second = axes
        over_a, over_b = normalize_axes(first, rank_a), normalize_axes(second, rank_b)
    folded = [a[1].shape[i] for i in over_a]
    if folded != [b[1].shape[i] for i in over_b]:
        raise BadShape(f"the axes {axes} of {a[1].shape} and {b[1].shape} differ in extent")
    free_a = [i for i in range(rank_a) if i not in over_a]
    free_b = [i for i in range(rank_b) if i not in over_b]
    k, shape_a = size_of(folded), [a[1].shape[i] for i in free_a]
    shape_b = [b[1].shape[i] for i in free_b]
    left = reshaped((a[0], a[1].transpose([*free_a, *over_a])), (size_of(shape_a), k))
    right = reshaped((b[0], b[1].transpose([*over_b, *free_b])), (k, size_of(shape_b)))
    return reshaped(matmul(left, right, out_dtype), [*shape_a, *shape_b])


# The reductions that the server computes for bool elements.
_OF_TRUTH = ("all", "any", "sum", "mean")
# The reductions that give the minimum and the maximum of bool elements.
_OF_BOOL = {"min": "all", "max": "any"}
# The reductions that have no value for zero elements.
_EXTREMES = ("min", "max", "argmin", "argmax")
# The operations that Scan computes.
SCANS = ("sum", "product", "min", "max", "all", "any")


def _result_dtype(op: str, dtype: "np.dtype[Any]") -> "np.dtype[Any]":
    if op in ("argmin", "argmax"):
        return _I64
    if op in ("all", "any"):
        return _BOOL
    if dtype.kind in "bi":
        if op in ("sum", "product", "norm_l1", "sum_squares"):
            return _I64
        if op in ("mean", "norm_l2", "variance", "std"):
            return _F64
    return dtype


def axes_of(axis: Axis, rank: int) -> Tuple[int, ...]:
    """Returns the axes that NumPy's axis argument selects, in [0, rank). Raises BadAxes."""
    if axis is None:
        return tuple(range(rank))
    return normalize_axes(axis, rank)


def folded(shape: Sequence[int], axes: Sequence[int], keepdims: bool) -> Tuple[int, ...]:
    """Returns the shape of a reduction's result."""
    return tuple(
        1 if i in axes else extent
        for i, extent in enumerate(shape)
        if keepdims or i not in axes
    )


def reduce(op: str, a: Term, axis: Axis = None, keepdims: bool = False) -> Term:
    """Folds all elements, or those along axes. For bool elements, min, max, all and any give bool.
    The mean and variance of no elements are NaN. Raises EmptyInput for other reductions that have
    no value for zero elements."""
    rank = len(a[1].shape)
    if not rank and axis in (0, -1) and op not in ("mean", "variance", "std"):
        axis = None  # As in NumPy, except for means.
    axes = axes_of(axis, rank)
    keepdims = is_true(keepdims, "keepdims")
    if op in ("argmin", "argmax") and axis is not None and len(axes) != 1:
        raise TypeError(f"{op} takes one axis or none")
    if rank and not axes:
        return _of_each(op, a)
    own = a[0].dtype
    shape = folded(a[1].shape, axes, keepdims)
    if op in _EXTREMES and not size_of([a[1].shape[i] for i in axes]):
        raise EmptyInput(f"{op} of an empty input has no value: the shape is {a[1].shape}")
    empty = size_of(a[1].shape) == 0 and size_of(shape) > 0
    if empty and op in ("mean", "variance", "std"):
        return full(np.nan, shape, own if _dtypes.is_float(own) else _F64)
    if own.kind == "b":
        op = _OF_BOOL.get(op, op)
    if own.kind != "b" or op not in _OF_TRUTH:
        (a,) = _numbers(a)
    dtype = _result_dtype(op, a[0].dtype)
    if len(axes) == rank:
        node = Node("reduce", (a,), (), dtype, {"op": op})
        view = View(0, (1,) * rank if keepdims else (), (0,) * rank if keepdims else ())
    else:
        params = {"op": op, "axes": axes, "keep_dims": keepdims}
        node = Node("reduce", (a,), shape, dtype, params)
        view = View.whole(shape)
    picks_byte = op in _OF_BOOL and _dtypes.is_byte(own)
    return cast((node, view), own) if picks_byte else (node, view)


def correction_of(op: str, n: int, less: float) -> Tuple[float, float]:
    """Returns (times, over), the factor and divisor that convert a "variance" or "std" with divisor
    n to one with divisor n - less. Both are applied in f64."""
    left = max(n - less, 0.0)
    if op == "std":
        return (n / left) ** 0.5 if left else float("inf"), 1.0
    power = 2.0 ** -math.frexp(n)[1]  # Keeps both in range.
    return n * power, left * power


def scan(
    op: str, a: Term, axis: int = -1, exclusive: bool = False, reverse: bool = False
) -> Term:
    """Returns, for each element, the fold of the elements along an axis up to and including it; if
    exclusive, the element itself is left out. If reverse, folds begin at the end of the axis."""
    if op not in SCANS:
        raise BadOperation(f"a scan cannot compute {op!r}: it computes {', '.join(SCANS)}")
    own, shape = a[0].dtype, a[1].shape
    params = {
        "axis": normalize_axis(axis, len(shape)) - len(shape),
        "exclusive": is_true(exclusive, "exclusive"),
        "reverse": is_true(reverse, "reverse"),
    }
    if own.kind == "b":
        op = _OF_BOOL.get(op, op)
    if own.kind != "b" or op not in _OF_TRUTH:
        (a,) = _numbers(a)
    node = Node("scan", (a,), shape, _result_dtype(op, a[0].dtype), {"op": op, **params})
    return cast(_term(node), own) if op in _OF_BOOL else _term(node)


def _of_each(op: str, a: Term) -> Term:
    """Returns a reduction over no axes, which gives a separate result for each element."""
    own = a[0].dtype
    if op in ("min", "max"):
        return a
    a = cast(a, _result_dtype(op, _I32 if own.itemsize == 1 else own))
    if op in ("variance", "std"):
        return apply("subtract", a, a)  # 0, or NaN if the element is not finite.
    if op in ("norm_l1", "norm_l2"):
        return apply("abs", a)
    return apply("multiply", a, a) if op == "sum_squares" else a


def window_sum(a: Term, radius: int) -> Term:
    """Returns, for each element of a vector, the sum of the elements that are at most `radius`
    positions away, including the element itself."""
    if len(a[1].shape) != 1:
        raise BadShape(f"window_sum takes a vector, not shape {a[1].shape}: use .reshape(-1)")
    radius = index_of(radius, "a radius")
    if radius < 0:
        raise BadRadius(f"the radius must be 0 or more, not {radius}")
    (a,) = _numbers(a)
    dtype = _I64 if _dtypes.is_integer(a[0].dtype) else a[0].dtype
    return _term(Node("window_sum", (a,), a[1].shape, dtype, {"radius": radius}))


def topk(a: Term, k: int, axis: int = -1, largest: bool = True) -> Tuple[Term, Term]:
    """Returns (values, indices) of the k largest or smallest elements along an axis. Both are
    results of one step."""
    shape = list(a[1].shape)
    axis = normalize_axis(axis, len(shape))
    limit = min(MAX_K, shape[axis])
    k = index_of(k, "k")
    if not 1 <= k <= limit:
        raise BadK(f"k must be 1 to {limit} along axis {axis} of {a[1].shape}, not {k}")
    shape[axis] = k
    own = a[0].dtype
    (a,) = _numbers(a)
    params = {"k": k, "smallest": not largest, "axis": axis - len(shape)}
    values, indices = (
        _term(Node("top_k", (a,), tuple(shape), dtype, params, output=output))
        for output, dtype in enumerate((a[0].dtype, _I64))
    )
    return cast(values, own), indices


def _typed(a: Term) -> Term:
    """Returns an array whose elements have its dtype on the server too (see
    Node.gives_integers)."""
    return array(copy(a) if getattr(a[0], "gives_integers", False) else a)


def sort(a: Term, axis: int = -1, descending: bool = False) -> Tuple[Term, Term]:
    """Returns (values, indices) of the elements along an axis in order. The sort is stable. Both
    are results of one step, which computes only those that are used."""
    a = _typed(a)
    shape = a[1].shape
    params = {
        "axis": normalize_axis(axis, len(shape)) - len(shape),
        "descending": is_true(descending, "descending"),
    }
    values, indices = (
        _term(Node("sort", (a,), shape, dtype, params, output=output))
        for output, dtype in enumerate((a[0].dtype, _I64))
    )
    return values, indices


def _indices(
    indices: Term,
    name: str = "indices",
    instead: str = "use x[mask], or np.compress along an axis",
) -> Term:
    """Converts indices to a type that the server takes. Errors use the name."""
    source, view = array(indices)
    dtype = source.dtype
    if dtype.kind == "b":
        raise Unsupported(f"{name} cannot be booleans: {instead}")
    if dtype.kind not in "iu":
        raise BadDtype(f"{name} must be integers, not {dtype}")
    return (source, view) if dtype in (_I64, _I32) else cast((source, view), _I32)


def _check_mode(mode: str) -> None:
    if mode not in ("raise", "wrap", "clip"):
        raise ValueError(f"mode must be 'raise', 'wrap' or 'clip', not {mode!r}")


def _check_known(indices: Term, length: int, name: str = "index", of: str = "an axis") -> None:
    """Raises BadIndex if the client knows the indices and one of them is out of range."""
    source, view = indices
    if not isinstance(source, Inline):
        return
    # Along an axis of stride 0, the same indices are repeated.
    once = (n if step else min(n, 1) for n, step in zip(view.shape, view.strides))
    known = window(source.array, view._replace(shape=tuple(once)))
    bad = known[(known < -length) | (known >= length)]
    if bad.size:
        raise BadIndex(f"{name} {bad[0]} is out of range for {of} of extent {length}")


def take(
    a: Term, indices: Term, axis: Optional[int] = None, mode: str = "raise", along: bool = False
) -> Term:
    """Returns the elements or slices of an array at indices along an axis, or of all its elements
    as a vector. If along, indices select along the axis at each position of the other axes. Indices
    that the client knows are checked at once."""
    _check_mode(mode)
    a, indices = _typed(a), _indices(indices)
    shape, result = a[1].shape, indices[1].shape
    params: Any = {"along": True} if along else {}
    length = size_of(shape)
    if axis is not None:
        axis = normalize_axis(axis, len(shape))
        params["axis"], length = axis - len(shape), shape[axis]
        if not along:
            result = shape[:axis] + result + shape[axis + 1 :]
    if mode != "raise":
        params["mode"] = mode
    else:
        _check_known(indices, length)
    if not length and size_of(result):
        raise BadIndex("an axis without elements has no indices")
    return _term(Node("take", (a, indices), result, a[0].dtype, params))


def select(a: Term, mask: Term) -> Tuple[Term, Term]:
    """Returns (values, positions) of the elements where a mask of the same shape is true, as
    vectors. Their length is known only when the step has run, so nothing can be computed from them
    in the same call, and the nodes have the largest possible length. Both are results of
    one step, which computes only those that are used."""
    a, mask = (copy(x) if getattr(x[0], "gives_integers", False) else array(x) for x in (a, mask))
    if a[1].shape != mask[1].shape:
        raise BadShape(
            f"a mask of shape {mask[1].shape} does not fit an array of shape {a[1].shape}")
    longest = (size_of(mask[1].shape),)
    values, positions = (
        _term(Node("select", (a, mask), longest, dtype, output=output))
        for output, dtype in enumerate((a[0].dtype, _I64))
    )
    return values, positions


def histogram(
    a: Term,
    edges: Optional[Term] = None,
    even: Optional[Tuple[int, float, float]] = None,
    integers: Optional[int] = None,
) -> Term:
    """Returns the number of elements in each bin. The bins are given by their edges, or have equal
    width, as (count, low, high), or there is one for each integer from 0 on."""
    a = _typed(a)
    if edges is None:
        params: Any = {"integers": integers} if even is None else {"even": even}
        count = even[0] if even else integers or 0
        return _term(Node("histogram", (a,), (count,), _I64, params))
    whole = a[0].dtype.kind in "biu" and array(edges)[0].dtype.kind in "biu"
    edges = array(cast(edges, _I64 if whole else _F64))
    if len(edges[1].shape) != 1 or not edges[1].size:
        raise BadShape(f"edges must be a vector of at least one element, not {edges[1].shape}")
    return _term(Node("histogram", (a, edges), (edges[1].size - 1,), _I64))


def search_sorted(a: Term, keys: Term, right: bool = False) -> Term:
    """Returns the positions at which keys can be inserted into a sorted vector: before the elements
    that are equal to them, or after them."""
    if len(a[1].shape) != 1:
        raise BadShape(f"a search needs a sorted vector, not shape {a[1].shape}")
    common = common_dtype([a, keys])
    a, keys = _typed(cast(a, common)), _typed(cast(keys, common))
    params: Any = {"right": True} if right else {}
    return _term(Node("search_sorted", (a, keys), keys[1].shape, _I64, params))


def sum_by_label(a: Term, labels: Term, length: int, mode: str = "raise") -> Term:
    """Returns the sums of the rows that have the same label, for the labels from 0 to length - 1.
    Labels that the client knows are checked at once."""
    _check_mode(mode)
    a, labels = _typed(a), _indices(labels, "labels", "use .astype(int)")
    length = index_of(length, "the number of sums")
    shape = a[1].shape
    if not shape or labels[1].shape != shape[:1] or length < 0:
        raise BadShape(
            f"labels of shape {labels[1].shape} do not fit {length} sums of rows of shape {shape}")
    params: Any = {"length": length}
    if mode != "raise":
        params["mode"] = mode
    elif size_of(shape):
        _check_known(labels, length, "label", "a result")
    if not length and size_of(shape):
        raise BadIndex("with length 0, no label is in range")
    dtype = _I64 if a[0].dtype.kind in "biu" else a[0].dtype
    return _term(Node("sum_by_label", (a, labels), (length, *shape[1:]), dtype, params))


def check_matrices(a: Term, square: bool = True) -> None:
    """Raises BadMatrix if a term is not a matrix or a stack of matrices, or if they are not
    square."""
    shape = a[1].shape
    if len(shape) < 2:
        raise BadMatrix(f"a matrix or a stack of matrices has two axes or more, not {len(shape)}")
    if square and shape[-2] != shape[-1]:
        raise BadMatrix(f"the matrices must be square, not of shape {shape}")


def matrix_dtype(*terms: Term) -> "np.dtype[Any]":
    """Returns the type in which NumPy's linear algebra gives its results: f32 if all operands have
    it, otherwise f64."""
    kinds = [array(term)[0].dtype for term in terms]
    for kind in kinds:
        if _dtypes.is_float(kind) and kind.itemsize == 2:
            name = "bfloat16" if kind == _dtypes.bfloat16 else kind.name
            raise Unsupported(f"array type {name} is unsupported in linalg: use x.astype('f4')")
    return _F32 if all(kind == _F32 for kind in kinds) else _F64


def linalg(function: str, x: Term, b: Optional[Term] = None) -> Term:
    """Returns what a LinalgFunction gives for each matrix of a stack. All parts of the result are
    rows of one array, as the protocol says. b has the right sides of "solve"."""
    check_matrices(x, function not in ("qr", "svd"))
    *stack, m, n = x[1].shape
    rows = {"determinant": (2,), "eigh": (n + 1, n), "qr": (m + n, min(m, n)),
            "svd": (m + 1 + n, min(m, n))}.get(function, (n, n))
    terms = (x,) if b is None else (x, b)
    if b is not None:
        rows = b[1].shape[-2:]
        if len(rows) < 2 or rows[0] != n:
            raise BadShape(f"right sides of shape {b[1].shape} do not fit matrices {x[1].shape}")
        stack = [*broadcast_shapes(tuple(stack), b[1].shape[:-2])]
    dtype = matrix_dtype(*terms)
    inputs = tuple(array(cast(term, dtype)) for term in terms)
    return _term(Node("linalg", inputs, (*stack, *rows), dtype, {"function": function}))


def diagonal(a: Term, offset: int = 0) -> Term:
    """Returns a view whose last axis is the diagonal of the last two axes."""
    source, view = a
    offset = index_of(offset, "the offset of a diagonal")
    if len(view.shape) < 2:
        raise BadShape("a diagonal needs two axes")
    rows, columns = view.shape[-2:]
    down, right = view.strides[-2:]
    length = max(min(rows + min(offset, 0), columns - max(offset, 0)), 0)
    start = view.offset + (offset * right if offset > 0 else -offset * down) if length else 0
    seen = View(start, (*view.shape[:-2], length), (*view.strides[:-2], down + right))
    return source, seen.checked()


def full(value: Any, shape: Sequence[int], dtype: "np.dtype[Any]") -> Term:
    """Returns an array whose elements all have one value, or an array of values that are
    broadcast."""
    values = Inline(_dtypes.to_server(np.asarray(value), dtype))
    return values, View.whole(values.shape).broadcast_to(shape)


def coordinate(shape: Sequence[int], axis: int) -> Term:
    """Returns the i64 coordinate of each element along an axis of an array of this shape."""
    shape = tuple(shape)
    axis = normalize_axis(axis, len(shape)) - len(shape)
    zeros = full(0, shape, _I64)
    if shape[axis] == 1:  # If broadcast, a "coordinate" node would not be 0 everywhere.
        return zeros
    return _term(Node("map", (zeros,), shape, _I64, {"fn": "coordinate", "axis": axis}))
