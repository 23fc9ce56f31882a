"""Operations on the bits of integers, composed of arithmetic, because the server has no bitwise
operations for them. No I/O.

Integers are in two's complement: ~x is -1 - x, a shift to the right is a floor division, and the
bits from `low` to `high` are x // 2^low % 2^(high - low).
"""

from typing import Any, Callable, Iterator, Tuple

import numpy as np

from ..graph import _elementwise as e
from ..graph._graph import Constant, Term
from ..wire._errors import Unsupported

_ZERO = e.constant(0)


def _types(*terms: Term) -> "Tuple[np.dtype[Any], np.dtype[Any]]":
    """Returns the common type of integers, and the type in which the server computes it. Raises
    TypeError for floats."""
    dtype = e.common_dtype([*terms])
    if dtype.kind not in "iu":
        raise TypeError(f"only integers and booleans have bits, not {dtype}")
    return dtype, dtype if dtype.itemsize > 1 else e.I32


def _sign(x: Term) -> Term:
    """Returns -1 for negative integers, otherwise 0."""
    return e.apply("negate", e.cast(e.apply("less", x, _ZERO), x[0].dtype))


def _signed(value: int, width: int) -> Term:
    """Returns a number modulo 2^width as a signed integer."""
    half = 1 << width - 1
    return e.constant((value + half) % (2 * half) - half)


def _runs(bits: int, width: int, longest: int) -> Iterator[Tuple[int, int]]:
    """Yields ranges [low, high) of bits that are 1. A range is longer than `longest` only if it
    includes the last of `width` bits."""
    low = 0
    while low < width:
        high = low
        while high < width and bits >> high & 1:
            high += 1
        if high < width:
            high = min(high, low + longest)
        if high > low:
            yield low, high
        low = max(high, low + 1)


def _masked(x: Term, bits: int, width: int) -> Term:
    """Returns x & bits, for bits from 0 to 2^width - 1."""
    whole = 8 * x[0].dtype.itemsize
    parts = []
    for low, high in _runs(bits, width, whole - 2):
        part = e.apply("floor_divide", x, e.constant(1 << low)) if 0 < low < whole - 1 else x
        if low == whole - 1:
            part = _sign(x)
        elif high < width:
            part = e.apply("remainder", part, e.constant(1 << high - low))
        parts.append(e.apply("multiply", part, _signed(1 << low, whole)) if low else part)
    found = parts[0] if parts else e.apply("multiply", x, _ZERO)
    for part in parts[1:]:
        found = e.apply("add", found, part)
    return found


def bitwise(name: str) -> Callable[[Term, Term], Term]:
    """Returns `&`, `|` or `^` ("and", "or", "xor") of booleans, or of integers and a number."""

    def apply(a: Term, b: Term) -> Term:
        if e.common_dtype([a, b]).kind == "b":
            return e.apply(name, a, b)
        dtype, wide = _types(a, b)
        if isinstance(a[0], Constant):
            a, b = b, a
        source, _ = e.cast(b, dtype)
        if not isinstance(source, Constant):
            raise Unsupported(
                f"the server computes `{name}` of two arrays only for booleans: make one of them a"
                " number, or use .numpy()"
            )
        width, a = 8 * dtype.itemsize, e.cast(a, wide)
        ones = (1 << width) - 1
        bits = source.value & ones
        found = _masked(a, bits, width)
        if name == "xor":
            found = e.apply("subtract", e.constant(source.value), found)
        elif name == "or":
            found = e.constant(source.value)
        if name != "and":
            found = e.apply("add", found, _masked(a, ones - bits, width))
        return e.cast(found, dtype)

    return apply


def invert(a: Term) -> Term:
    """Returns `~` of booleans or integers."""
    if a[0].dtype.kind == "b":
        return e.apply("not", a)
    dtype, _ = _types(a)
    return e.apply("subtract", e.constant(-1 if dtype.kind == "i" else 255), a)


def shift(left: bool) -> Callable[[Term, Term], Term]:
    """Returns `<<` or `>>`. As in NumPy, a number that is negative or not below the number of bits
    shifts all bits out."""

    def apply(a: Term, n: Term) -> Term:
        dtype = e.common_dtype([a, n])
        dtype, wide = _types(a, n) if dtype.kind != "b" else (np.dtype("i1"), e.I32)
        for source, view in (a, n):
            if isinstance(source, Constant):
                e.cast((source, view), dtype)  # Raises OverflowError if it does not fit.
        a, n = e.cast(a, wide), e.cast(n, wide)
        whole = 8 * wide.itemsize
        most = 8 * dtype.itemsize - 1 if left else whole - 2
        source, view = n
        if isinstance(source, Constant):
            inside = 0 <= source.value <= most
            factor = _signed(1 << source.value, whole) if inside else e.constant(1)
        else:
            known = e.apply("clip", n, _ZERO, e.constant(most))
            factor = e.apply("power", e.cast(e.constant(2), wide), known)
        out = e.apply("multiply", a, _ZERO) if left else _sign(a)
        found = e.apply("multiply" if left else "floor_divide", a, factor)
        if not isinstance(source, Constant):
            found = e.apply("where", e.apply("equal", n, known), found, out)
        elif not inside:
            found = out
        return e.converted(found, dtype)

    return apply
