"""NumPy ufuncs on server-side arrays. No I/O.

Each entry of UFUNCS computes a term from terms. REDUCTIONS is for np.add.reduce,
np.add.accumulate and their like.
"""

from typing import Any, Callable, Dict

import numpy as np

from ..graph import _dtypes, _ops
from ..graph import _elementwise as e
from ..graph._graph import Term
from ..wire._errors import Unsupported
from ._operators import invert, power

Function = Callable[..., Any]


def _named(name: str) -> Function:
    return lambda *terms: e.apply(name, *terms)


def _of_truth(name: str) -> Function:
    """Returns a logical operation that treats each nonzero element as true."""
    return lambda *terms: e.apply(name, *(e.cast(term, e.BOOL) for term in terms))


def _bits(name: str) -> Function:
    def apply(a: Term, b: Term) -> Term:
        if e.common_dtype([a, b]).kind != "b":
            raise Unsupported(f"`{name}` takes only booleans: use .numpy() for bitwise operations")
        return e.apply(name, a, b)

    return apply


def isnan(a: Term) -> Term:
    return e.apply("not_equal", a, a)


def isinf(a: Term) -> Term:
    if not _dtypes.is_float(e.common_dtype([a])):
        return e.apply("not_equal", a, a)  # Integers are always finite.
    return e.apply("equal", e.apply("abs", a), e.constant(float("inf")))


def isfinite(a: Term) -> Term:
    if not _dtypes.is_float(e.common_dtype([a])):
        return e.apply("equal", a, a)
    return e.apply("less", e.apply("abs", a), e.constant(float("inf")))


def _skipping_nan(name: str) -> Function:
    """Implements np.fmax and np.fmin, which prefer a number to NaN."""

    def apply(a: Term, b: Term) -> Term:
        most = e.apply(name, a, b)
        return e.apply("where", isnan(a), b, e.apply("where", isnan(b), a, most))

    return apply


def _reciprocal(a: Term) -> Term:
    if not _dtypes.is_float(e.common_dtype([a])):
        raise Unsupported("the server does not compute np.reciprocal of integers: use 1 / x")
    return e.apply("divide", e.constant(1), a)


def _real(a: Term) -> Term:
    """Converts integers to floats, as NumPy's functions of reals do."""
    dtype = e.common_dtype([a])
    if dtype.kind in "biu":
        dtype = np.dtype("<f2" if dtype.itemsize == 1 else "<f8")
    return e.cast(a, dtype)


def _number(a: Term) -> Term:
    """Converts bool to int8, as NumPy's functions of numbers do."""
    dtype = e.common_dtype([a])
    return e.cast(a, np.dtype("i1") if dtype.kind == "b" else dtype)


def _rint(a: Term) -> Term:
    return e.apply("round", _real(a))


def _fabs(a: Term) -> Term:
    return e.apply("abs", _real(a))


def _power(a: Term, b: Term) -> Term:
    if _dtypes.is_float(e.common_dtype([a, b])):
        return e.apply("power", a, b)
    return power(a, b)


def _positive(a: Term) -> Term:
    if e.common_dtype([a]).kind == "b":
        raise TypeError("np.positive does not take booleans")
    return a


def _float_power(a: Term, b: Term) -> Term:
    return e.apply("power", e.cast(a, e.F64), e.cast(b, e.F64))


def _square(a: Term) -> Term:
    a = _number(a)
    return e.apply("multiply", a, a)


def _exp2(a: Term) -> Term:
    a = _real(a)
    return e.apply("power", e.cast(e.constant(2), e.common_dtype([a])), a)


def vecdot(a: Term, b: Term, axis: int = -1) -> Term:
    """The sums of products along an axis."""
    if len(a[1].shape) == len(b[1].shape) == 1:
        return _ops.dot(a, b)
    return _ops.reduce("sum", e.apply("multiply", a, b), axis)


UFUNCS: Dict[Any, Function] = {
    np.matmul: _ops.matmul,
    np.true_divide: _named("divide"),
    np.absolute: _named("abs"),
    np.fabs: _fabs,
    np.power: _power,
    np.float_power: _float_power,
    np.square: _square,
    np.reciprocal: _reciprocal,
    np.exp2: _exp2,
    np.rint: _rint,
    np.positive: _positive,
    np.invert: invert,
    np.bitwise_and: _bits("and"),
    np.bitwise_or: _bits("or"),
    np.bitwise_xor: _bits("xor"),
    np.logical_and: _of_truth("and"),
    np.logical_or: _of_truth("or"),
    np.logical_xor: _of_truth("xor"),
    np.logical_not: _of_truth("not"),
    np.negative: _named("negate"),
    np.fmax: _skipping_nan("maximum"),
    np.fmin: _skipping_nan("minimum"),
    np.isnan: isnan,
    np.isinf: isinf,
    np.isfinite: isfinite,
    np.conjugate: _number,
    **{
        getattr(np, name): _named(name)
        for name in (
            "add subtract multiply floor_divide remainder minimum maximum sign floor ceil trunc"
            " sqrt exp log tanh equal not_equal less less_equal greater greater_equal"
        ).split()
    },
}


def _divmod(a: Term, b: Term) -> Any:
    return e.apply("floor_divide", a, b), e.apply("remainder", a, b)


# Ufuncs with two results.
PAIRS: Dict[Any, Callable[..., Any]] = {np.divmod: _divmod}
REDUCTIONS: Dict[Any, str] = {
    np.add: "sum",
    np.multiply: "prod",
    np.minimum: "min",
    np.maximum: "max",
    np.logical_and: "all",
    np.logical_or: "any",
}
if hasattr(np, "vecdot"):
    UFUNCS[np.vecdot] = vecdot
