"""Python's operators on arrays and expressions, computed element by element, with broadcasting and
promotion as in NumPy 2. No I/O."""

import numbers
from typing import Any, Callable, Optional, TypeVar

import numpy as np

from ..graph import _dtypes, _ops
from ..graph import _elementwise as e
from ..graph._graph import Term

Self = TypeVar("Self", bound="Operators")


class Operators:
    """The base class of Lazy, which defines _term, _other and _make."""

    __slots__ = ()

    def _term(self) -> Term:
        raise NotImplementedError

    def _other(self, value: Any) -> Optional[Term]:
        """Returns the term of an operand: an array of the connection, a number, a NumPy array or a
        list. Returns None for anything else."""
        raise NotImplementedError

    def _make(self: Self, term: Term) -> Self:
        raise NotImplementedError

    def _binary(
        self: Self, op: Callable[[Term, Term], Term], other: Any, swap: bool = False
    ) -> Self:
        term = self._other(other)
        if term is None:
            return NotImplemented
        mine = self._term()
        return self._make(op(term, mine) if swap else op(mine, term))

    def _elementwise(self: Self, name: str, other: Any, swap: bool = False) -> Self:
        return self._binary(lambda a, b: e.apply(name, a, b), other, swap)

    # --- arithmetic

    def __add__(self: Self, other: Any) -> Self:
        return self._elementwise("add", other)

    def __radd__(self: Self, other: Any) -> Self:
        return self._elementwise("add", other, swap=True)

    def __sub__(self: Self, other: Any) -> Self:
        return self._elementwise("subtract", other)

    def __rsub__(self: Self, other: Any) -> Self:
        return self._elementwise("subtract", other, swap=True)

    def __mul__(self: Self, other: Any) -> Self:
        return self._elementwise("multiply", other)

    def __rmul__(self: Self, other: Any) -> Self:
        return self._elementwise("multiply", other, swap=True)

    def __truediv__(self: Self, other: Any) -> Self:
        return self._elementwise("divide", other)

    def __rtruediv__(self: Self, other: Any) -> Self:
        return self._elementwise("divide", other, swap=True)

    def __floordiv__(self: Self, other: Any) -> Self:
        return self._elementwise("floor_divide", other)

    def __rfloordiv__(self: Self, other: Any) -> Self:
        return self._elementwise("floor_divide", other, swap=True)

    def __mod__(self: Self, other: Any) -> Self:
        return self._elementwise("remainder", other)

    def __rmod__(self: Self, other: Any) -> Self:
        return self._elementwise("remainder", other, swap=True)

    def __divmod__(self: Self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self: Self, other: Any) -> Any:
        return other // self, other % self

    def __pow__(self: Self, other: Any, modulo: Any = None) -> Self:
        if modulo is not None:
            return NotImplemented
        if type(other) is int and other == 2 and self._term()[0].dtype == np.dtype(bool):
            other = np.int8(2)  # As in NumPy, only this power has this type.
        return self._binary(power, other)

    def __rpow__(self: Self, other: Any) -> Self:
        return self._binary(power, other, swap=True)

    def __neg__(self: Self) -> Self:
        return self._make(e.apply("negate", self._term()))

    def __pos__(self: Self) -> Self:
        return self

    def __abs__(self: Self) -> Self:
        return self._make(e.apply("abs", self._term()))

    # --- comparisons and logic

    def __eq__(self: Self, other: Any) -> Self:  # type: ignore[override]
        return self._elementwise("equal", other)

    def __ne__(self: Self, other: Any) -> Self:  # type: ignore[override]
        return self._elementwise("not_equal", other)

    def __lt__(self: Self, other: Any) -> Self:
        return self._elementwise("less", other)

    def __le__(self: Self, other: Any) -> Self:
        return self._elementwise("less_equal", other)

    def __gt__(self: Self, other: Any) -> Self:
        return self._elementwise("greater", other)

    def __ge__(self: Self, other: Any) -> Self:
        return self._elementwise("greater_equal", other)

    def __and__(self: Self, other: Any) -> Self:
        return self._elementwise("and", other)

    __rand__ = __and__

    def __or__(self: Self, other: Any) -> Self:
        return self._elementwise("or", other)

    __ror__ = __or__

    def __xor__(self: Self, other: Any) -> Self:
        return self._elementwise("xor", other)

    __rxor__ = __xor__

    def __invert__(self: Self) -> Self:
        return self._make(e.apply("not", self._term()))

    def __lshift__(self: Self, other: Any) -> Self:
        return self._elementwise("shift_left", other)

    def __rlshift__(self: Self, other: Any) -> Self:
        return self._elementwise("shift_left", other, swap=True)

    def __rshift__(self: Self, other: Any) -> Self:
        return self._elementwise("shift_right", other)

    def __rrshift__(self: Self, other: Any) -> Self:
        return self._elementwise("shift_right", other, swap=True)

    # --- linear algebra

    def __matmul__(self: Self, other: Any) -> Self:
        return self._binary(_ops.matmul, other)

    def __rmatmul__(self: Self, other: Any) -> Self:
        return self._binary(_ops.matmul, other, swap=True)


def power(a: Term, b: Term) -> Term:
    """Returns a ** b. Like NumPy, it computes a square for the exponent 2, and for floats a square
    root for 0.5 and a reciprocal for -1."""
    exponent = getattr(b[0], "value", None)
    dtype = e.common_dtype([a, b])
    if isinstance(exponent, numbers.Real) and b[0].dtype is None:
        if exponent == 2 and dtype.kind != "b":
            return e.apply("multiply", e.cast(a, dtype), e.cast(a, dtype))
        if _dtypes.is_float(dtype) and exponent == 0.5:
            return e.apply("sqrt", e.cast(a, dtype))
        if _dtypes.is_float(dtype) and exponent == -1:
            return e.apply("divide", e.constant(1), e.cast(a, dtype))
        if dtype.kind in "biu" and exponent < 0:
            raise ValueError("Integers to negative integer powers are not allowed.")
    return e.apply("power", a, b)
