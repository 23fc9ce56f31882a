"""Elementwise operations: the functions, and NumPy 2's rules for their types. No I/O.

The server promotes types by the same rules with a few exceptions (bool and small integers in
functions of reals). Where the types differ, casts are explicit.
"""

import numbers
from typing import Any, Dict, List, Tuple

import numpy as np

from ..wire._errors import Unsupported
from . import _dtypes
from ._graph import Constant, Inline, Node, Term
from ._views import View, broadcast_shapes

BOOL, I32, I64, F64 = np.dtype(bool), np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f8")
_SCALAR = View.whole(())
_I64_LIMITS: Any = np.iinfo(I64)
# The largest NumPy operand of an expression. Such operands are sent with every call.
MAX_INLINE_BYTES = 1 << 20

# The functions of the server (MapOp), grouped by the types that they take and return.
_NUMBERS = (
    "add subtract multiply floor_divide remainder power minimum maximum fma clip negate abs sign"
    " floor ceil trunc round"
).split()
_REALS = (
    "divide sqrt exp log tanh ndtri sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh"
    " expm1 log1p log2 log10 cbrt hypot"
).split()
_COMPARISONS = "equal not_equal less less_equal greater greater_equal".split()
_LOGIC = "and or xor not".split()
_INTEGERS = "shift_left shift_right".split()
FUNCTIONS: Dict[str, str] = {
    **dict.fromkeys(_NUMBERS, "numbers"),
    **dict.fromkeys(_REALS, "reals"),
    **dict.fromkeys(_COMPARISONS, "comparison"),
    **dict.fromkeys(_LOGIC, "logic"),
    **dict.fromkeys(_INTEGERS, "integers"),
    "where": "select",
    "random_bits": "bits",
}
# Functions whose results fit the type of their arguments, even a one-byte type.
_WITHIN = frozenset((
    "remainder minimum maximum clip sign floor ceil trunc round where and or xor shift_right"
).split())
# What NumPy computes for bool arguments instead. For the other functions, NumPy rejects bool
# arguments or widens them.
_OF_BOOL = {"add": "or", "multiply": "and", "minimum": "and", "maximum": "or"}
_NOT_OF_BOOL = {"subtract": "^", "negate": "~"}


def constant(value: Any) -> Term:
    """Returns a number as a constant. A Python number has no type, and a NumPy number has its own.
    Raises Unsupported if the server lacks that type."""
    if isinstance(value, np.generic) or isinstance(value, np.ndarray):
        return Constant(value.item(), _dtypes.dtype_of(value.dtype)), _SCALAR
    return Constant(value), _SCALAR


def lift(value: Any) -> Term:
    """Converts a number, a NumPy array or a list to a term. Raises TypeError for anything else."""
    if isinstance(value, numbers.Real) and not isinstance(value, np.generic):
        return constant(value)
    array = _dtypes.to_numpy(value)
    if array.dtype.kind not in "biuf" and array.dtype != _dtypes.bfloat16:
        raise Unsupported(f"the server has no elements of type {array.dtype}: use .astype()")
    if array.ndim == 0 and array.dtype.kind in "biuf":
        return constant(array)
    if array.nbytes > MAX_INLINE_BYTES:
        raise Unsupported(
            f"a NumPy operand of {array.nbytes} bytes would be sent with every call: put() it first"
        )
    # A copy, because later changes of the array must not change the expression.
    small = Inline(_dtypes.to_server(np.array(array)))
    return small, View.whole(small.shape)


def common_dtype(terms: List[Term]) -> "np.dtype[Any]":
    """Returns the common type by the promotion rules of NumPy 2: numbers without a type adapt to
    the others."""
    common: Any = None
    weak: List[Any] = []
    typed: List[Any] = []
    for source, _ in terms:
        if isinstance(source, Constant) and source.dtype is None:
            weak.append(source.value)
        else:
            typed.append(source.dtype)
    # One-byte types come last, so that each is promoted with a larger type, if there is one, and
    # not with another one-byte type.
    for dtype in sorted(typed, key=lambda one: int(one.itemsize == 1)):
        common = dtype if common is None else _dtypes.promote(common, dtype)
    for value in weak:
        if isinstance(value, (bool, np.bool_)):
            common = BOOL if common is None else common
        elif isinstance(value, numbers.Integral):
            common = I64 if common is None or common.kind == "b" else common
        else:
            common = F64 if common is None or common.kind in "biu" else common
    return common  # type: ignore[no-any-return]


def _typed(value: Any, dtype: "np.dtype[Any]") -> Constant:
    """Returns the number as a constant of the type. Raises OverflowError, as NumPy does, if an
    integer does not fit."""
    if dtype.kind == "b":
        return Constant(bool(value), dtype)
    if dtype.kind in "iu":
        limits: Any = np.iinfo(dtype)
        if not limits.min <= int(value) <= limits.max:
            raise OverflowError(f"Python integer {int(value)} out of bounds for {dtype}")
        return Constant(int(value), dtype)
    return Constant(float(value), dtype)


def check_fits(value: Any, dtype: "np.dtype[Any]") -> None:
    """Raises OverflowError, as NumPy 2 does, for a Python integer that does not fit the type."""
    if isinstance(value, int):
        _typed(value, dtype)


def _rounded(value: Any, dtype: "np.dtype[Any]") -> Any:
    """Returns the number that a constant of the type stands for."""
    if not _dtypes.is_float(dtype):
        return value
    with np.errstate(over="ignore"):
        return float(_dtypes.to_host(_dtypes.to_server(float(value), dtype)))


def cast(term: Term, dtype: "np.dtype[Any]") -> Term:
    """Converts each element to the type. A cast to bool gives true for every nonzero element.
    Floats outside the range of an integer type give the nearest number of the type, and NaN gives
    0."""
    source, view = term
    if isinstance(source, Constant):
        if source.dtype is None or source.dtype == dtype:
            return _typed(source.value, dtype), view
        if _dtypes.is_float(dtype):
            return _typed(_rounded(source.value, source.dtype), dtype), view
    elif source.dtype == dtype:
        return term
    node = Node("map", (term,), view.shape, dtype, {"fn": "cast"})
    return node, View.whole(node.shape)


def copy(term: Term) -> Term:
    """Copies the elements, in row-major order without gaps."""
    node = Node("map", (term,), term[1].shape, term[0].dtype, {"fn": "copy"})
    return node, View.whole(node.shape)


def apply(name: str, *terms: Term) -> Term:
    """Applies a function of FUNCTIONS to terms, which are broadcast."""
    rule = FUNCTIONS[name]
    arguments = list(terms)
    if rule == "select":
        arguments[0] = cast(arguments[0], BOOL)
        common = result = common_dtype(arguments[1:])
        arguments[1:] = [cast(term, common) for term in arguments[1:]]
        return _node(name, arguments, result)
    if rule == "bits":
        return _node(name, [cast(term, I64) for term in arguments], I64)
    common = common_dtype(arguments)
    if rule in ("logic", "integers"):
        if common.kind not in "biu":
            raise TypeError(f"only integers and booleans have bits, not {common}")
        if rule == "integers" and common.kind == "b":
            common = np.dtype("i1")
        return _node(name, [cast(term, common) for term in arguments], common)
    if rule == "comparison":
        common, result = _comparable(arguments, common), BOOL
    elif common.kind == "b":
        name, common = _of_bool(name, common)
        result = common
    elif rule == "reals" and common.kind in "biu":
        common = result = _real_of(name, common)
    else:
        result = common
    return _node(name, [cast(term, common) for term in arguments], result)


def _comparable(arguments: List[Term], common: "np.dtype[Any]") -> "np.dtype[Any]":
    """Returns the type in which to compare. NumPy compares integers by value even with numbers
    beyond the range of their type. A number beyond the range of all types is replaced by
    infinity."""
    if common.kind not in "iu":
        return common
    limits: Any = np.iinfo(common)
    widest = common
    for i, (source, view) in enumerate(arguments):
        if isinstance(source, Constant) and source.dtype is None:
            if not limits.min <= source.value <= limits.max:
                widest = I64 if widest != F64 else F64
            if not _I64_LIMITS.min <= source.value <= _I64_LIMITS.max:
                arguments[i] = Constant(float("inf") * (1 if source.value > 0 else -1)), view
                widest = F64
    return widest


def _of_bool(name: str, dtype: "np.dtype[Any]") -> "Tuple[str, np.dtype[Any]]":
    """Returns the function that NumPy computes instead of a function of numbers if all arguments
    are bool, and its result type."""
    if name in _OF_BOOL:
        return _OF_BOOL[name], dtype
    if name in _NOT_OF_BOOL:
        raise TypeError(f"{name} does not take booleans: use {_NOT_OF_BOOL[name]}")
    if name in ("abs", "floor", "ceil", "trunc"):
        return "copy", dtype
    if name in ("floor_divide", "remainder", "power"):
        return name, np.dtype("i1")
    if name == "round":
        return name, np.dtype("<f2")
    if FUNCTIONS[name] == "reals":
        return name, _real_of(name, dtype)
    raise Unsupported(f"{name} does not take booleans: convert them with .astype()")


def _real_of(name: str, dtype: "np.dtype[Any]") -> "np.dtype[Any]":
    """Returns the result type of a function of reals for integers and bool. As in NumPy, one-byte
    types give float16, except in a division."""
    if name == "divide" or dtype.itemsize > 1:
        return F64
    return np.dtype("<f2")


def _node(name: str, arguments: List[Term], dtype: "np.dtype[Any]") -> Term:
    shape = arguments[0][1].shape
    for _, view in arguments[1:]:
        shape = broadcast_shapes(shape, view.shape)
    byte = _dtypes.is_byte(dtype) and name != "copy"
    node = Node("map", tuple(arguments), shape, I32 if byte else dtype, {"fn": name})
    term = node, View.whole(shape)
    if not byte:
        return term
    return cast(term if name in _WITHIN else _wrapped(term, dtype), dtype)


def _wrapped(term: Term, dtype: "np.dtype[Any]") -> Term:
    """Wraps integers of a longer type to this type, modulo its range, as NumPy does."""
    low = -int(np.iinfo(dtype).min)
    if low:
        term = apply("add", term, constant(low))
    term = apply("remainder", term, constant(1 << 8 * dtype.itemsize))
    return apply("subtract", term, constant(low)) if low else term


def converted(term: Term, dtype: "np.dtype[Any]") -> Term:
    """Like cast(), but integers outside the range of an integer type wrap, as in NumPy functions
    with dtype=."""
    own = term[0].dtype
    constant_ = isinstance(term[0], Constant)
    if constant_ or own.kind not in "iu" or dtype.kind not in "iu" or np.can_cast(own, dtype):
        return cast(term, dtype)
    wide: Any = I64 if own == I64 else I32
    return cast(_wrapped(cast(term, wide), dtype), dtype)
