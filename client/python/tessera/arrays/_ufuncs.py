"""NumPy ufuncs on server-side arrays. No I/O.

Each entry of UFUNCS computes a term from terms. REDUCTIONS is for np.add.reduce,
np.add.accumulate and their like.
"""

from typing import Any, Callable, Dict, List, Tuple

import numpy as np

from ..graph import _dtypes, _ops
from ..graph import _elementwise as e
from ..graph._graph import Term
from ..wire._errors import BadShape, Unsupported
from ._operators import power

Function = Callable[..., Any]


def _named(name: str) -> Function:
    return lambda *terms: e.apply(name, *terms)


def _of_truth(name: str) -> Function:
    """Returns a logical operation that treats each nonzero element as true."""
    return lambda *terms: e.apply(name, *(e.cast(term, e.BOOL) for term in terms))


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


def _reals(*terms: Term) -> List[Term]:
    """Converts terms to their common type, and integers to floats, as NumPy's functions of reals
    do."""
    dtype = e.common_dtype([*terms])
    if dtype.kind in "biu":
        dtype = np.dtype("<f2" if dtype.itemsize == 1 else "<f8")
    return [e.cast(a, dtype) for a in terms]


def _real(a: Term) -> Term:
    return _reals(a)[0]


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


def _scaled(up: float, down: float) -> Function:
    """Returns a multiplication by up / down. Like NumPy, it computes the factor in the type of the
    argument, but float16 in float32."""

    def apply(a: Term) -> Term:
        a = _real(a)
        own = e.common_dtype([a])
        wide = own if own.itemsize > 2 else np.dtype("<f4")
        factor = e.constant(wide.type(up) / wide.type(down))
        return e.cast(e.apply("multiply", e.cast(a, wide), factor), own)

    return apply


def _fmod(a: Term, b: Term) -> Term:
    """Returns the remainder, which has the sign of the dividend."""
    dtype, zero = e.common_dtype([a, b]), e.constant(0)
    a, b = _number(e.cast(a, dtype)), _number(e.cast(b, dtype))
    if _dtypes.is_float(dtype):
        left = e.apply("remainder", e.apply("abs", a), e.apply("abs", b))
        minus = e.apply("where", e.apply("less", a, zero), e.apply("negate", left), left)
        still = e.apply("and", e.apply("equal", a, zero), e.apply("equal", left, left))
        return e.apply("where", still, a, minus)  # -0.0 stays -0.0.
    left = e.apply("remainder", a, b)
    opposite = e.apply("not_equal", e.apply("less", a, zero), e.apply("less", left, zero))
    other = e.apply("and", opposite, e.apply("not_equal", left, zero))
    return e.apply("where", other, e.apply("subtract", left, b), left)


def _heaviside(a: Term, b: Term) -> Term:
    a, b = _reals(a, b)
    sign = e.apply("where", isnan(a), a, e.cast(e.apply("less", e.constant(0), a), a[0].dtype))
    return e.apply("where", e.apply("equal", a, e.constant(0)), b, sign)


def _signbit(a: Term) -> Term:
    """Returns whether numbers are negative or -0.0. NaN counts as positive."""
    minus = e.apply("less", a, e.constant(0))
    if not _dtypes.is_float(e.common_dtype([a])):
        return minus
    below = e.apply("less", e.apply("divide", e.constant(1), a), e.constant(0))
    return e.apply("or", minus, e.apply("and", e.apply("equal", a, e.constant(0)), below))


def _copysign(a: Term, b: Term) -> Term:
    a, b = _reals(a, b)
    size = e.apply("abs", a)
    return e.apply("where", _signbit(b), e.apply("negate", size), size)


def _modf(a: Term) -> Any:
    a = _real(a)
    whole = e.apply("trunc", a)
    rest = e.apply("where", isinf(a), e.constant(0), e.apply("subtract", a, whole))
    return _copysign(rest, a), whole


def _next(a: Term) -> Term:
    """Returns the next larger numbers (Rump, Zimmermann, Boldo and Melquiond: Computing predecessor
    and successor in rounding to nearest, 2009). Numbers are scaled where the step would be
    subnormal."""
    dtype = a[0].dtype
    bits, least = (8, -133) if dtype == _dtypes.bfloat16 else _PRECISION[dtype.itemsize]
    unit, size = 2.0**-bits, e.apply("abs", a)

    def step(x: Term) -> Term:
        by = e.apply("multiply", e.apply("abs", x), e.constant(unit * (1 + 2 * unit)))
        return e.apply("add", x, by)

    scaled = step(e.apply("multiply", a, e.constant(1 / unit)))
    scaled = e.apply("multiply", scaled, e.constant(unit))
    tiny = e.apply("less", size, e.constant(2.0 ** (bits + least)))
    small = e.apply("less", size, e.constant(2.0 ** (2 * bits + least - 1)))
    # Not a sum, because the number that follows -2^least is -0.0.
    more = e.apply("negate", e.apply("subtract", e.constant(-(2.0**least)), a))
    near = e.apply("where", tiny, more, scaled)
    most = e.cast(e.constant(-(2 - 2 * unit) * 2.0 ** (2 - least - bits)), dtype)
    found = e.apply("where", small, near, step(a))
    return e.apply("where", e.apply("equal", a, e.constant(-np.inf)), most, found)


_PRECISION = {2: (11, -24), 4: (24, -149), 8: (53, -1074)}  # Significant bits, smallest power of 2.


def _nextafter(a: Term, b: Term) -> Term:
    a, b = _reals(a, b)
    minus = e.apply("negate", _next(e.apply("negate", a)))
    found = e.apply("where", e.apply("less", a, b), _next(a), minus)
    same = a if a[0].dtype == np.dtype("<f2") else b  # As in NumPy, where zeros differ in sign.
    found = e.apply("where", e.apply("equal", a, b), same, found)
    nan = e.apply("or", isnan(a), isnan(b))
    return e.apply("where", nan, e.apply("add", a, b), found)


def _logaddexp(a: Term, b: Term) -> Term:
    apart = e.apply("abs", e.apply("subtract", a, b))
    more = e.apply("log1p", e.apply("exp", e.apply("negate", apart)))
    more = e.apply("where", e.apply("equal", a, b), e.constant(np.log(2.0)), more)
    return e.apply("add", e.apply("maximum", a, b), more)


def _logaddexp2(a: Term, b: Term) -> Term:
    two = e.constant(np.log(2.0))
    a, b = e.apply("multiply", a, two), e.apply("multiply", b, two)
    return e.apply("divide", _logaddexp(a, b), two)


def _in_f64(call: Function) -> Function:
    """Computes in f64 and rounds to the type."""

    def apply(*terms: Term) -> Term:
        terms = tuple(_reals(*terms))
        own = e.common_dtype([*terms])
        return e.cast(call(*(e.cast(one, e.F64) for one in terms)), own)

    return apply


def vecdot(a: Term, b: Term, axis: int = -1) -> Term:
    """Returns the sums of products along an axis, in the common type. Integers wrap."""
    a, b = ((source, view.moved_last(axis)) for source, view in (a, b))
    if a[1].shape[-1] != b[1].shape[-1]:
        raise BadShape(f"vecdot does not take vectors of {a[1].shape[-1]}, {b[1].shape[-1]}")
    if len(a[1].shape) == len(b[1].shape) == 1:
        found = _ops.dot(a, b)
    else:
        found = _ops.reduce("sum", e.apply("multiply", a, b), -1)
    return e.converted(found, e.common_dtype([a, b]))


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
    np.invert: _named("not"),
    np.bitwise_and: _named("and"),
    np.bitwise_or: _named("or"),
    np.bitwise_xor: _named("xor"),
    np.left_shift: _named("shift_left"),
    np.right_shift: _named("shift_right"),
    np.signbit: _signbit,
    np.copysign: _copysign,
    np.nextafter: _nextafter,
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
    np.fmod: _fmod,
    np.heaviside: _heaviside,
    np.logaddexp: _in_f64(_logaddexp),
    np.logaddexp2: _in_f64(_logaddexp2),
    np.arcsin: _named("asin"),
    np.arccos: _named("acos"),
    np.arctan: _named("atan"),
    np.arctan2: _named("atan2"),
    np.arcsinh: _named("asinh"),
    np.arccosh: _named("acosh"),
    np.arctanh: _named("atanh"),
    **dict.fromkeys((np.radians, np.deg2rad), _scaled(np.pi, 180)),
    **dict.fromkeys((np.degrees, np.rad2deg), _scaled(180, np.pi)),
    **{
        getattr(np, name): _named(name)
        for name in (
            "add subtract multiply floor_divide remainder minimum maximum sign floor ceil trunc"
            " sqrt exp log tanh sin cos tan sinh cosh expm1 log1p log2 log10 cbrt hypot"
            " equal not_equal less less_equal greater greater_equal"
        ).split()
    },
}


def _divmod(a: Term, b: Term) -> Any:
    return e.apply("floor_divide", a, b), e.apply("remainder", a, b)


# Ufuncs with two results.
PAIRS: Dict[Any, Callable[..., Any]] = {np.divmod: _divmod, np.modf: _modf}
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
