"""NumPy's functions that are no ufuncs, on arrays of the server; and those of the package itself.

Arguments may be arrays of the server or what they take as operands: numbers, NumPy's arrays, lists.
"""

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from . import _dtypes, _ops, _ufuncs
from . import _elementwise as e
from ._errors import BadShape, Unsupported
from ._graph import Constant, Term
from ._manipulation import MANIPULATIONS, add, diagonal, flat
from ._views import View


def _made(op: Callable[..., Term], *arrays: Any, **options: Any) -> Any:
    """The result of an operation on terms, as an array or expression."""
    one = next((array for array in arrays if hasattr(array, "_session")), arrays[0])
    _own(one)
    return one._make(op(*(one._other(array) for array in arrays), **options))


def _own(x: Any) -> Any:
    """x, which has to be on a server. TypeError."""
    if not hasattr(x, "_session"):
        raise TypeError(f"a {type(x).__name__} is not on a server: client.put(x) brings it there")
    return x


# --- the package's own


def sum_squares(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """The sum of the squares of the elements, of all or along axes; of integers as i64."""
    return _own(x)._make(_ops.reduce("sum_squares", x._term(), axis, keepdims))


def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    """The norm of vectors, of order 1, 2, inf or -inf; without an order of all elements of x, whose
    square is the sum of their squares (Frobenius)."""
    _own(x)
    if ord in (np.inf, -np.inf) and (axis is not None or x.ndim == 1):
        absolute = abs(x)
        return absolute.max(axis, keepdims) if ord > 0 else absolute.min(axis, keepdims)
    if ord not in (None, 1, 2, "fro") or (axis is None and x.ndim == 2 and ord in (1, 2)):
        raise Unsupported(f"a norm of order {ord!r} of {x.ndim} axes: use .numpy()")
    return x._make(_ops.reduce("norm_l1" if ord == 1 else "norm_l2", x._term(), axis, keepdims))


def matmul(a: Any, b: Any, dtype: Any = None) -> Any:
    """a @ b for vectors and matrices; dtype: of the result, accumulated in it ("f32" of f16 and
    bf16 operands, "i64" of i32)."""
    out = None if dtype is None else _dtypes.dtype_of(dtype)
    return _made(lambda x, y: _ops.matmul(x, y, out), a, b)


def vecdot(a: Any, b: Any, axis: int = -1) -> Any:
    """The sums of the products of two arrays along an axis."""
    return _made(_ufuncs.vecdot, a, b, axis=axis)


def window_sum(x: Any, radius: int) -> Any:
    """y[i] = sum of x[j] for |j - i| <= radius, clipped at the ends of the vector x."""
    return _own(x)._make(_ops.window_sum(x._term(), radius))


def topk(x: Any, k: int, axis: int = -1, largest: bool = True) -> Tuple[Any, Any]:
    """(values, indices) of the k largest elements along an axis, from the largest on, or of the k
    smallest, from the smallest on. Equal elements come in the order of their indices; NaN is larger
    than all else, as where NumPy sorts. The indices are i64. Both are results of one step:
    t.compute(values, indices) is one call. BadK: k is below 1, above 4096 or above the extent."""
    values, indices = _ops.topk(_own(x)._term(), k, axis, largest)
    return x._make(values), x._make(indices)


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once, element by element."""
    return _made(lambda *terms: e.apply("fma", *terms), a, b, c)


# --- element by element


def where(condition: Any, *values: Any) -> Any:
    if len(values) != 2:
        raise Unsupported("np.where(condition) has a length that only the elements tell: .numpy()")
    return _made(lambda *terms: e.apply("where", *terms), condition, *values)


def clip(a: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
    low = min if a_min is None else a_min
    high = max if a_max is None else a_max
    if low is None and high is None:
        return a
    if low is None or high is None:
        name, bound = ("minimum", high) if low is None else ("maximum", low)
        return _made(lambda *terms: e.apply(name, *terms), a, bound)
    return _made(lambda *terms: e.apply("clip", *terms), a, low, high)


def _round(a: Any, decimals: int = 0) -> Any:
    if decimals:
        raise Unsupported("the server rounds to integers: scale before and after")
    return a._make(e.apply("round", a._term()))


def isclose(
    a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Any:
    def close(x: Term, y: Term) -> Term:
        bound = e.apply("abs", e.apply("multiply", y, e.constant(float(rtol))))
        bound = e.apply("add", bound, e.constant(float(atol)))
        near = e.apply("less_equal", e.apply("abs", e.apply("subtract", x, y)), bound)
        # Infinities are close to themselves alone.
        found = e.apply("and", near, _ufuncs.isfinite(y))
        found = e.apply("or", found, e.apply("equal", x, y))
        if equal_nan:
            found = e.apply("or", found, e.apply("and", _ufuncs.isnan(x), _ufuncs.isnan(y)))
        return found

    return _made(close, a, b)


def _array_equal(a: Any, b: Any) -> Any:
    if np.shape(a) != np.shape(b):
        return False
    return _made(lambda x, y: e.apply("equal", x, y), a, b).all()


def nan_to_num(x: Any, nan: float = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
    if x.dtype.kind != "f" or x.dtype == _dtypes.bfloat16:
        raise Unsupported("np.nan_to_num of f16, f32 and f64 alone")
    limits = np.finfo(x.dtype)
    high = float(limits.max) if posinf is None else posinf
    low = float(limits.min) if neginf is None else neginf
    found = where(x == np.inf, high, where(x == -np.inf, low, x))
    return where(x != x, nan, found)


# --- reductions


def reduction(name: str) -> Callable[..., Any]:
    """A method of arrays as NumPy's function; dtype casts before it folds."""

    def call(
        x: Any,
        axis: Any = None,
        dtype: Any = None,
        keepdims: bool = False,
        initial: Any = None,
        where: Any = None,
    ) -> Any:
        if dtype is not None:
            x = x.astype(dtype)
        begun = {} if name in ("mean", "all", "any") else {"initial": initial}
        found = getattr(x, name)(axis, keepdims, where=where, **begun)
        if dtype is not None:
            found = found.astype(dtype)
        if name in ("all", "any") and initial is not None:
            found = found._from("and" if name == "all" else "or", bool(initial))
        return found

    def plain(x: Any, axis: Any = None, keepdims: bool = False, **options: Any) -> Any:
        return call(x, axis, None, keepdims, **options)

    if name in ("sum", "prod", "mean"):
        return call
    return plain


def _deviation(name: str) -> Callable[..., Any]:
    def call(
        x: Any,
        axis: Any = None,
        dtype: Any = None,
        ddof: float = 0,
        keepdims: bool = False,
        correction: float = 0,
        where: Any = None,
    ) -> Any:
        x = x if dtype is None else x.astype(dtype)
        return getattr(x, name)(axis, keepdims, correction=ddof or correction, where=where)

    return call


def average(a: Any, axis: Any = None, weights: Any = None, keepdims: bool = False) -> Any:
    if weights is None:
        return a.mean(axis, keepdims)
    weights = weights if hasattr(weights, "_session") else np.asarray(weights)
    if np.shape(weights) != a.shape:
        if not hasattr(axis, "__index__") or np.shape(weights) != (a.shape[axis],):
            raise BadShape(f"weights of shape {np.shape(weights)} for shape {a.shape}")
        shape = [1] * a.ndim
        shape[axis] = a.shape[axis]
        weights = weights.reshape(shape)
    total = (a * weights).sum(axis, keepdims)
    wide = weights if hasattr(weights, "_session") else np.broadcast_to(weights, a.shape)
    if hasattr(wide, "_session"):
        wide = wide.broadcast_to(a.shape)
    return total / wide.sum(axis=axis, keepdims=keepdims)


def _trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    return diagonal(a, offset, axis1, axis2).sum(axis=-1)


def count_nonzero(a: Any, axis: Any = None, keepdims: bool = False) -> Any:
    return (a != 0).sum(axis, keepdims)


# --- linear algebra


def _dot(a: Any, b: Any) -> Any:
    if not np.ndim(a) or not np.ndim(b):
        return a * b
    return _made(_ops.matmul, a, b)


def _outer(a: Any, b: Any) -> Any:
    return flat(a).reshape(-1, 1) * flat(b).reshape(1, -1)


def _inner(a: Any, b: Any) -> Any:
    if not np.ndim(a) or not np.ndim(b):
        return a * b
    return _made(lambda x, y: _ops.tensordot(x, y, (-1, -1)), a, b)


def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    return _made(_ops.tensordot, a, b, axes=axes)


def _matrix_power(a: Any, n: int) -> Any:
    if n < 1:
        raise Unsupported("powers of matrices from 1 on: the server inverts none")
    found: Any = None
    square = a
    while n:
        if n % 2:
            found = square if found is None else found @ square
        n //= 2
        square = square @ square if n else square
    return found


def _result_type(*values: Any) -> "np.dtype[Any]":
    terms = []
    for value in values:
        if hasattr(value, "_session"):
            terms.append(value._term())
        elif isinstance(value, (np.dtype, type, str)):
            terms.append((Constant(0, np.dtype(value)), View.whole(())))
        else:
            terms.append(e.lift(value))
    return e.common_dtype(terms)


FUNCTIONS: Dict[Any, Callable[..., Any]] = {**MANIPULATIONS}


def _vector_norm(x: Any, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:
    x = flat(x) if axis is None and not keepdims else x
    return norm(x, ord, _ops.axes_of(axis, x.ndim), keepdims)


# Those that take a mask.
REDUCTIONS: Dict[Any, Callable[..., Any]] = {}
add(
    REDUCTIONS,
    np,
    {
        **{name: reduction(name) for name in "sum prod mean min max all any".split()},
        "amin": reduction("min"),
        "amax": reduction("max"),
        "var": _deviation("var"),
        "std": _deviation("std"),
    },
)
FUNCTIONS.update(REDUCTIONS)
add(
    FUNCTIONS,
    np,
    {
        "argmin": lambda x, axis=None, keepdims=False: x.argmin(axis, keepdims),
        "argmax": lambda x, axis=None, keepdims=False: x.argmax(axis, keepdims),
        "ptp": lambda x, axis=None, keepdims=False: x.max(axis, keepdims) - x.min(axis, keepdims),
        "average": average,
        "count_nonzero": count_nonzero,
        "where": where,
        "clip": clip,
        "round": _round,
        "around": _round,
        "fix": lambda x: x._make(e.apply("trunc", x._term())),
        "isclose": isclose,
        "allclose": lambda *arrays, **options: isclose(*arrays, **options).all(),
        "array_equal": _array_equal,
        "nan_to_num": lambda x, copy=True, **options: nan_to_num(x, **options),
        "real": lambda x: x,
        "dot": _dot,
        "vdot": lambda a, b: _dot(flat(a), flat(b)),
        "inner": _inner,
        "outer": _outer,
        "tensordot": tensordot,
        "trace": _trace,
        "can_cast": lambda x, to, casting="safe": np.can_cast(x.dtype, to, casting),
        "result_type": _result_type,
        "iscomplexobj": lambda x: False,
        "isrealobj": lambda x: True,
        "astype": lambda x, dtype, copy=True, device=None: x.astype(dtype),
    },
)
add(
    FUNCTIONS,
    np.linalg,
    {
        "matmul": matmul,
        "norm": norm,
        "matrix_power": _matrix_power,
        "matrix_norm": lambda x, *, keepdims=False, ord="fro": norm(x, ord, (-2, -1), keepdims),
        "outer": _outer,
        "tensordot": lambda a, b, *, axes=2: tensordot(a, b, axes),
        "trace": lambda x, *, offset=0, dtype=None: _trace(x, offset, -2, -1),
        "vecdot": lambda a, b, *, axis=-1: vecdot(a, b, axis),
        "vector_norm": _vector_norm,
    },
)
