"""Arrays that the server generates, with NumPy's names, arguments and types."""

import itertools
import math
import secrets
from typing import Any, Optional, Tuple, Union

import numpy as np

from ..graph import _dtypes, _ops
from ..graph import _elementwise as e
from ..graph._graph import Term
from ..graph._views import extents, index_of, size_of
from ..wire._errors import Unsupported
from ._manipulation import stack

_I64, _F32, _F64 = np.dtype("<i8"), np.dtype("<f4"), np.dtype("<f8")
Size = Union[None, int, Tuple[int, ...]]


def _number(value: Any, dtype: "np.dtype[Any]") -> Term:
    return e.cast(e.constant(value), dtype)


def _positions(extent: int) -> Term:
    return _ops.coordinate((extent,), 0)


def _at(position: int, value: Any, rest: Term) -> Term:
    """Replaces the element at one position of a vector."""
    here = e.apply("equal", _positions(rest[1].shape[0]), e.constant(position))
    return e.apply("where", here, _number(value, rest[0].dtype), rest)


class Creation:
    """The methods of clients that create arrays. Like all expressions, the arrays are computed only
    when they are used, as a part of the expressions that use them."""

    def _new(self, term: Term) -> Any:
        return self._wrap(*term)  # type: ignore[attr-defined]

    def full(self, shape: Any, fill_value: Any, dtype: Any = None) -> Any:
        """Returns an array whose elements all have one value. Raises OverflowError for a Python
        integer that the type cannot hold."""
        kind = _dtypes.dtype_of(np.asarray(fill_value).dtype if dtype is None else dtype)
        e.check_fits(fill_value, kind)
        return self._new(_ops.full(fill_value, extents(shape), kind))

    def zeros(self, shape: Any, dtype: Any = float) -> Any:
        """Returns an array of zeros."""
        return self.full(shape, 0, float if dtype is None else dtype)

    def ones(self, shape: Any, dtype: Any = float) -> Any:
        """Returns an array of ones."""
        return self.full(shape, 1, float if dtype is None else dtype)

    def arange(self, start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Any:
        """Returns the numbers start, start + step... up to but not including stop. If stop is
        None, start is the stop, and the first number is 0."""
        if stop is None:
            start, stop = 0, start
        own = np.result_type(_I64, *(np.asarray(x).dtype for x in (start, stop, step)))
        kind = _dtypes.dtype_of(own if dtype is None else dtype)
        extent = _length(stop - start, step)
        if kind.kind == "b" and extent > 2:
            raise TypeError("no fill-function for data-type.")
        # Like NumPy, computes start + i * delta from the first two elements in the result's type.
        wide = _F32 if kind.itemsize == 2 else kind if _dtypes.is_float(kind) else _I64
        for x in (start, start + step)[:extent]:
            e.check_fits(x, kind)
        second = start + step if extent > 1 else start
        first, second = (_rounded(x, kind).astype(wide) for x in (start, second))
        delta = second - first
        made = e.cast(_positions(extent), wide)
        if delta != 1:
            made = e.apply("multiply", made, _number(delta, wide))
        if first != 0 or delta < 0:  # The sum of -0.0 and 0.0 is 0.0.
            made = e.apply("add", made, _number(first, wide))
        if not np.isfinite(delta) or (first == 0 and np.signbit(first)):
            made = _at(0, first, made)
        if extent > 1 and first + delta != second:
            made = _at(1, second, made)
        return self._new(e.converted(made, kind))

    def linspace(
        self,
        start: Any,
        stop: Any,
        num: int = 50,
        endpoint: bool = True,
        retstep: bool = False,
        dtype: Any = None,
    ) -> Any:
        """Returns num evenly spaced numbers from start to stop, neither of which may be an array.
        If retstep is true, returns (array, distance)."""
        num = index_of(num, "the number of samples")
        if num < 0:
            raise ValueError(f"Number of samples, {num}, must be non-negative.")
        if np.ndim(start) or np.ndim(stop):
            raise Unsupported("linspace takes two numbers: use start + (stop - start) * x")
        own = _dtypes.dtype_of(np.result_type(start, stop, float(num)))
        kind = own if dtype is None else _dtypes.dtype_of(dtype)
        start, stop = np.asarray(start) * 1.0, np.asarray(stop) * 1.0
        parts, delta = max(num - 1, 0) if endpoint else num, stop - start
        step = delta / parts if parts else np.float64(np.nan)
        made = e.cast(_positions(num), own)
        if parts and step:
            made = e.apply("multiply", made, _number(step, own))
        else:
            made = e.apply("divide", made, _number(parts, own)) if parts else made
            made = e.apply("multiply", made, _number(delta, own))
        made = e.apply("add", made, _number(start, own))
        if endpoint and num > 1:
            made = _at(num - 1, stop, made)
        made = e.cast(e.apply("floor", made) if kind.kind in "iu" else made, kind)
        return (self._new(made), step) if retstep else self._new(made)

    def eye(self, N: int, M: Optional[int] = None, k: int = 0, dtype: Any = float) -> Any:
        """Returns a matrix of N rows and M columns (by default N), with 1 on diagonal k and 0
        elsewhere."""
        return self._diagonals("equal", N, M, k, dtype)

    def identity(self, n: int, dtype: Any = float) -> Any:
        """Returns eye(n)."""
        return self.eye(n, dtype=dtype)

    def tri(self, N: int, M: Optional[int] = None, k: int = 0, dtype: Any = float) -> Any:
        """Returns a matrix with 1 on diagonal k and below it, and 0 elsewhere."""
        return self._diagonals("less_equal", N, M, k, dtype)

    def _diagonals(self, name: str, rows: int, columns: Optional[int], k: int, dtype: Any) -> Any:
        shape = extents((rows, rows if columns is None else columns))
        k = index_of(k, "the offset of a diagonal")
        last = _ops.coordinate(shape, 0)
        if k:
            last = e.apply("add", last, _number(k, _I64))
        chosen = e.apply(name, _ops.coordinate(shape, 1), last)
        return self._new(e.cast(chosen, _dtypes.dtype_of(dtype)))

    def indices(self, dimensions: Any, dtype: Any = int, sparse: bool = False) -> Any:
        """Returns the coordinates along each axis of an array of this shape, as one array or, if
        sparse, as a tuple of arrays that can be broadcast together."""
        shape, kind = extents(dimensions), _dtypes.dtype_of(dtype)
        found = []
        for axis in range(len(shape)):
            own = [n if i == axis or not sparse else 1 for i, n in enumerate(shape)]
            found.append(self._new(e.converted(_ops.coordinate(own, axis), kind)))
        if sparse:
            return tuple(found)
        return stack(found) if found else self.zeros((0,), kind)

    def default_rng(self, seed: Optional[int] = None, stream: int = 0) -> "Generator":
        """Returns a generator of random numbers. `stream` is the number of the random stream that
        its first array uses. If no seed is given, a random one is used."""
        return Generator(self, secrets.randbits(64) if seed is None else seed, stream)


def _length(distance: Any, step: Any) -> int:
    """Returns the number of elements of arange. As in NumPy, if the quotient underflows to 0, the
    result has one element, unless the quotient is -0."""
    steps = distance / step
    if steps == 0 and distance != 0:
        return int(not np.signbit(steps))
    return int(max(math.ceil(steps), 0))


def _rounded(value: Any, dtype: "np.dtype[Any]") -> Any:
    """Converts a number to this type. Integers wrap, and floats lose their fraction. Raises
    OverflowError for an integer of more than 64 bits."""
    whole = dtype.kind in "iu"
    return np.asarray(np.int64(int(value)) if whole else value).astype(dtype)[()]


def _shape_of(size: Size, *limits: Any) -> Size:
    """Returns the size, or, if it is None, the shape to which the limits are broadcast."""
    return np.broadcast_shapes(*(np.shape(one) for one in limits)) if size is None else size


def _wrapped(value: Any, what: str) -> Term:
    number = index_of(value, what)
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"{what} has 64 bits, and {number} does not fit")
    return _number((number + (1 << 63)) % (1 << 64) - (1 << 63), _I64)


class Generator:
    """A source of random numbers. Its methods have the same names and arguments as those of
    np.random.Generator, but return other numbers. Each array uses the next random stream. An
    element depends only on the seed, the stream and the element's index in row-major order, so it
    is the same on all devices. Philox 4x32-10 gives 64 bits per element (MAP_OP_RANDOM_BITS in
    compute.proto), from which all methods compute their results."""

    def __init__(self, client: Creation, seed: int, stream: int = 0) -> None:
        self._client = client
        if index_of(seed, "the seed") < 0:
            raise ValueError("the seed is negative")
        self._seed = _wrapped(seed, "the seed")
        self._streams = itertools.count(index_of(stream, "the stream"))  # next() is atomic

    def _bits(self, size: Size) -> Term:
        shape = () if size is None else extents(size)
        index = _ops.full(0, shape, _I64)
        for axis, extent in enumerate(shape):
            if extent == 1:
                continue
            place = _ops.coordinate(shape, axis)
            inner = size_of(shape[axis + 1 :])
            if inner > 1:
                place = e.apply("multiply", place, _number(inner, _I64))
            index = place if size_of(shape[:axis]) == 1 else e.apply("add", index, place)
        stream = _wrapped(next(self._streams), "the stream")
        return e.apply("random_bits", self._seed, index, stream)

    def _uniform(self, size: Size, dtype: "np.dtype[Any]", bits: int, middle: float) -> Term:
        """Returns (k + middle) / 2^bits for a random integer k from 0 to 2^bits - 1."""
        top = e.apply("floor_divide", self._bits(size), _number(1 << 64 - bits, _I64))
        made = e.cast(top, dtype)  # The least is -2^(bits - 1). All steps are exact.
        if middle:
            made = e.apply("add", made, _number(middle, dtype))
        made = e.apply("multiply", made, _number(2.0**-bits, dtype))
        return e.apply("add", made, _number(0.5, dtype))

    def random(self, size: Size = None, dtype: Any = float) -> Any:
        """Returns numbers from 0 up to but not including 1. They are multiples of 2^-53, or of
        2^-24 for f32."""
        kind = _real(dtype)
        return self._client._new(self._uniform(size, kind, 24 if kind == _F32 else 53, 0))

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Size = None) -> Any:
        """Returns random(), scaled to the range from low to high. The limits are numbers or arrays,
        which are broadcast. Without a size, the result has their broadcast shape."""
        width = np.subtract(high, low)
        if not hasattr(width, "_session") and not np.isfinite(width).all():
            raise OverflowError("high - low range exceeds valid bounds")
        return self.random(_shape_of(size, low, high)) * width + low

    def standard_normal(self, size: Size = None, dtype: Any = float) -> Any:
        """Returns normally distributed numbers with mean 0 and variance 1, by inversion (NDTRI)."""
        made = e.apply("ndtri", self._uniform(size, _F64, 52, 0.5))
        return self._client._new(e.cast(made, _real(dtype)))

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Size = None) -> Any:
        """Returns normally distributed numbers with mean loc and standard deviation scale, which
        are numbers or arrays that are broadcast. Without a size, the result has their broadcast
        shape."""
        if not hasattr(scale, "_session") and np.signbit(scale).any():
            raise ValueError("scale < 0")
        return self.standard_normal(_shape_of(size, loc, scale)) * scale + loc

    def integers(
        self,
        low: int,
        high: Optional[int] = None,
        size: Size = None,
        dtype: Any = np.int64,
        endpoint: bool = False,
    ) -> Any:
        """Returns integers from low up to but not including high, or from 0 up to low if high is
        None. If endpoint is true, the upper limit is included. The probabilities of two integers
        differ by at most 2^-64."""
        low, high = (0, low) if high is None else (low, high)
        low, end = index_of(low, "low"), index_of(high, "high") + bool(endpoint)
        kind = _dtypes.dtype_of(dtype)
        least, most = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
        if low < least or end > most + 1:
            raise ValueError(f"{low} to {end - 1} is out of bounds for {kind}")
        if low >= end:
            raise ValueError("low >= high")
        made = self._bits(size)
        if end - low < 1 << 63:
            made = e.apply("remainder", made, _number(end - low, _I64))
            made = e.apply("add", made, _number(low, _I64))
        elif end - low < 1 << 64:
            raise Unsupported("a range of 2^63 or more integers must be the range of i64")
        return self._client._new(e.cast(made, kind))

    def permutation(self, x: Any, axis: int = 0) -> Any:
        """Returns the integers from 0 to x - 1, or the slices of an array on the server along an
        axis, in random order."""
        if not hasattr(x, "_session"):
            return self._client._new(_ops.sort(self._bits(index_of(x, "the length")))[1])
        order = self._client._new(_ops.sort(self._bits(x.shape[axis]))[1])
        return np.take(x, order, axis)


def _real(dtype: Any) -> "np.dtype[Any]":
    kind = _dtypes.dtype_of(dtype)
    if kind not in (_F32, _F64):
        raise TypeError(f"random numbers must be float32 or float64, not {kind}: use .astype()")
    return kind
