"""Arrays and expressions as NumPy users write them; nothing here talks to the server.

The blocking and the asyncio classes add what computes: numpy(), save() and the like.
"""

import numbers
from typing import TYPE_CHECKING, Any, Callable, Iterator, List, Optional, Sequence, Tuple, TypeVar

import numpy as np
import numpy.typing as npt

from . import _dtypes, _html, _numpy, _ops, _plan
from ._elementwise import apply, cast, common_dtype, constant, lift
from ._errors import BadShape, Unsupported
from ._graph import Constant, Leaf, Node, Term
from ._operators import Operators
from ._views import Shape, View, normalize_axis, size_of

_TWO_CONNECTIONS = "arrays of two connections: move one with .numpy() and put()"
Self = TypeVar("Self", bound="Lazy")


class Lazy(Operators):
    """A view of a buffer (Array), or of what an expression will give (Expr): shape and dtype are
    known, the elements are on the server, or nowhere yet. Immutable; what makes another one sends
    nothing.

    Operators work element by element, broadcast and promoted as in NumPy 2, with other arrays of
    the connection, numbers, NumPy's arrays and lists up to 1 MiB: + - * / // % ** divmod, == != <
    <= > >=, & | ^ ~ of truth values; @ multiplies matrices. NumPy's functions work on them where
    the server has what they take; np.asarray raises TypeError.

    BadShape: shapes that do not go together. Unsupported: the server does not compute it.
    OverflowError: a number of Python that the array's type cannot hold.
    """

    __array_priority__ = 1000
    __slots__ = ("_session", "_source", "_view", "_stats", "_prepared", "__weakref__")

    def __init__(self, session: Any, source: Any, view: View) -> None:
        self._session = session
        self._source = source
        self._view = view
        self._stats: _plan.Cost = None
        self._prepared: Any = None  # Of Core.prepare.

    # --- what is known

    @property
    def shape(self) -> Shape:
        """Extents, outermost first; () of a number."""
        return self._view.shape

    @property
    def dtype(self) -> "np.dtype[Any]":
        """NumPy's type of the elements; of bf16 that of ml_dtypes where it is installed, else
        ts.bfloat16."""
        return self._source.dtype  # type: ignore[no-any-return]

    @property
    def ndim(self) -> int:
        """The number of axes, at most 8."""
        return len(self._view.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._view.size

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize

    @property
    def stats(self) -> List[_plan.Stats]:
        """The cost of each step when it was last computed through this object."""
        if self._stats is None:
            return []
        plan, answers = self._stats
        return plan.stats(answers)

    def explain(self) -> str:
        """The program that computing it would send, a line for each step. Sends nothing."""
        if not isinstance(self._source, Node):
            return "no program: the elements are on the server"
        return _plan.Plan([self._source]).explain()

    def with_(self: Self, strategy: str = "", timing: bool = False) -> Self:
        """The same expression, its last step by the strategy named (`tessera strategies` lists
        them), or timed by the device (Stats.kernel_us). UnknownStrategy, StrategyUnsupported: when
        it is computed."""
        if not isinstance(self._source, Node):
            raise Unsupported("with_() is for expressions: an array is there already")
        return self._make((self._source.using(strategy, timing), self._view))

    # --- making others

    def _term(self) -> Term:
        return self._source, self._view

    def _make(self: Self, term: Term) -> Self:
        source, view = term
        made: Self = self._session._wrap(source, view)
        return made

    def _other(self, value: Any) -> Optional[Term]:
        if isinstance(value, Lazy):
            if value._session is not self._session:
                raise Unsupported(_TWO_CONNECTIONS)
            return value._term()
        if isinstance(value, (int, float, np.ndarray, np.generic, list, tuple)):
            return lift(value)
        return None

    # --- views

    def _viewed(self: Self, op: Callable[[Term], Term]) -> Self:
        return self._make(op(self._term()))

    def _seen(self: Self, view: View) -> Self:
        return self._make((self._source, view))

    def __getitem__(self: Self, key: Any) -> Self:
        """A view by NumPy's basic indexing: integers, slices with any step, None, `...`. BadView
        (an IndexError); Unsupported: arrays and lists as indices."""
        return self._seen(self._view.at(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise Unsupported("arrays are immutable: put() a new one with replace=True")

    def __iter__(self: Self) -> Iterator[Self]:
        return (self[i] for i in range(len(self)))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def transpose(self: Self, *axes: Any) -> Self:
        """The axes in reverse, or in the order given, as a view."""
        order = axes[0] if len(axes) == 1 and not hasattr(axes[0], "__index__") else axes
        return self._seen(self._view.transpose(order or None))

    @property
    def T(self: Self) -> Self:
        """All axes in reverse, as a view."""
        return self._seen(self._view.transpose())

    @property
    def mT(self: Self) -> Self:
        """The last two axes in reverse, as a view."""
        if self.ndim < 2:
            raise BadShape("mT needs two axes")
        return self.swapaxes(-1, -2)

    def swapaxes(self: Self, a: int, b: int) -> Self:
        """Two axes exchanged, as a view."""
        order = list(range(self.ndim))
        a, b = normalize_axis(a, self.ndim), normalize_axis(b, self.ndim)
        order[a], order[b] = order[b], order[a]
        return self._seen(self._view.transpose(order))

    def reshape(self: Self, *shape: Any) -> Self:
        """The same elements, in row-major order, in another shape; one extent may be -1. A view
        where strides can express it; otherwise an expression that copies."""
        wanted = shape[0] if len(shape) == 1 and not hasattr(shape[0], "__index__") else shape
        return self._make(_ops.reshaped(self._term(), wanted))

    def ravel(self: Self) -> Self:
        """All elements in row-major order: reshape(-1)."""
        return self.reshape(-1)

    flatten = ravel

    def broadcast_to(self: Self, shape: Sequence[int]) -> Self:
        """A view that repeats axes of extent 1, and new ones in front."""
        return self._seen(self._view.broadcast_to(shape))

    def squeeze(self: Self, axis: Any = None) -> Self:
        """A view without the axes of extent 1, or without those given."""
        axes = axis if isinstance(axis, tuple) else (axis,)
        if axis is None:
            drop = {i for i, extent in enumerate(self.shape) if extent == 1}
        else:
            drop = {normalize_axis(one, self.ndim) for one in axes}
            if any(self.shape[i] != 1 for i in drop):
                raise BadShape(f"squeeze of shape {self.shape} along {axis}: an extent is not 1")
        return self[tuple(0 if i in drop else slice(None) for i in range(self.ndim))]

    # --- operations

    def astype(self: Self, dtype: Any) -> Self:
        """Each element as one of another type, rounded to nearest. Floats beyond the range of an
        integer type give its nearest number, NaN gives 0; of bool whether it is not 0."""
        return self._make(cast(self._term(), _dtypes.dtype_of(dtype)))

    def dot(self: Self, other: Any) -> Self:
        """As numpy.dot of numbers, vectors and matrices: of two vectors the sum of products (of
        integers as i64)."""
        if isinstance(other, Lazy) and self.ndim == other.ndim == 1:
            if other._session is self._session:
                return self._make(_ops.dot(self._term(), other._term()))
        ranks = self.ndim, other.ndim if isinstance(other, Lazy) else np.ndim(other)
        product: Self = self @ other if all(ranks) else self * other
        return product

    def _reduce(self: Self, op: str, axis: Any, keepdims: bool) -> Self:
        return self._make(_ops.reduce(op, self._term(), axis, keepdims))

    def _mask(self, where: Any) -> Term:
        """A mask of the elements."""
        mask = self._other(where)
        dtype = None if mask is None else common_dtype([mask])
        if mask is None or dtype != np.dtype(bool):
            kind = dtype or type(where).__name__
            raise TypeError(f"where is an array of truth values, not {kind}")
        source, view = mask
        if isinstance(source, Constant):
            return _ops.full(source.value, self.shape, np.dtype(bool))
        return source, view.broadcast_to(self.shape)

    def _where(self: Self, where: Any, rest: Any) -> Self:
        """The elements where a mask is true, and a number elsewhere."""
        if where is None or where is True:
            return self
        number = _number(rest, self.dtype)
        return self._make(apply("where", self._mask(where), self._term(), number))

    def _count(self: Self, where: Any, axis: Any, keepdims: bool) -> Self:
        """How many elements a mask picks."""
        return self._make(_ops.reduce("sum", self._mask(where), axis, keepdims))

    def _wide(self: Self) -> Self:
        """Of types whose range sums do not leave."""
        return self.astype("f4") if self.itemsize == 2 else self

    def _from(self: Self, function: str, initial: Any) -> Self:
        """A reduction's result that has begun with a number."""
        if initial is None:
            return self
        return self._make(apply(function, self._term(), _number(initial, self.dtype)))

    def sum(
        self: Self,
        axis: Any = None,
        keepdims: bool = False,
        *,
        initial: Any = None,
        where: Any = None,
    ) -> Self:
        """The sum of all elements or along axes, or of those where a mask is true; of integers and
        truth values as i64. initial: a number to begin with."""
        return self._where(where, 0)._reduce("sum", axis, keepdims)._from("add", initial)

    def prod(
        self: Self,
        axis: Any = None,
        keepdims: bool = False,
        *,
        initial: Any = None,
        where: Any = None,
    ) -> Self:
        """The product, as sum(); of integers as i64. Of no elements 1."""
        found = self._where(where, 1)._reduce("product", axis, keepdims)
        return found._from("multiply", initial)

    def _extreme(
        self: Self, op: str, function: str, axis: Any, keepdims: bool, initial: Any, where: Any
    ) -> Self:
        if initial is None:
            if where is not None and where is not True:
                raise ValueError(f"{op} of what a mask picks needs an initial value")
            return self._reduce(op, axis, keepdims)
        picked = self._where(where, initial)
        shape = _ops.folded(self.shape, _ops.axes_of(axis, self.ndim), keepdims)
        if self.size == 0 and size_of(shape):
            source, _ = _number(initial, self.dtype)
            return self._make(_ops.full(source.value, shape, self.dtype))
        return picked._reduce(op, axis, keepdims)._from(function, initial)

    def min(
        self: Self,
        axis: Any = None,
        keepdims: bool = False,
        *,
        initial: Any = None,
        where: Any = None,
    ) -> Self:
        """The smallest element, NaN if there is any; with an initial number at most that, and then
        of those where a mask is true. EmptyInput."""
        return self._extreme("min", "minimum", axis, keepdims, initial, where)

    def max(
        self: Self,
        axis: Any = None,
        keepdims: bool = False,
        *,
        initial: Any = None,
        where: Any = None,
    ) -> Self:
        """The largest element, NaN if there is any; with an initial number at least that, and then
        of those where a mask is true. EmptyInput."""
        return self._extreme("max", "maximum", axis, keepdims, initial, where)

    def argmin(self: Self, axis: Any = None, keepdims: bool = False) -> Self:
        """The index, i64, of the first smallest element or NaN: along one axis, or of all in
        row-major order. EmptyInput."""
        return self._reduce("argmin", axis, keepdims)

    def argmax(self: Self, axis: Any = None, keepdims: bool = False) -> Self:
        """As argmin, of the largest."""
        return self._reduce("argmax", axis, keepdims)

    def mean(self: Self, axis: Any = None, keepdims: bool = False, *, where: Any = None) -> Self:
        """The mean, or that of the elements where a mask is true; of integers and truth values as
        f64. NaN of no elements."""
        if where is None or where is True:
            return self._reduce("mean", axis, keepdims)
        dtype = self.dtype if _dtypes.is_float(self.dtype) else np.dtype("<f8")
        total = self._wide().sum(axis, keepdims, where=where).astype("f8")
        return (total / self._count(where, axis, keepdims)).astype(dtype)

    def var(
        self: Self,
        axis: Any = None,
        keepdims: bool = False,
        *,
        correction: float = 0,
        ddof: float = 0,
        where: Any = None,
    ) -> Self:
        """The mean squared deviation from the mean; divided by n - correction rather than n. ddof:
        another name of correction. where: a mask of the elements that count. NaN of no elements."""
        correction = correction or ddof
        if where is None or where is True:
            found = self._reduce("variance", axis, keepdims)
            if not correction:
                return found
            n = size_of([self.shape[i] for i in _ops.axes_of(axis, self.ndim)])
            return found * (n / (n - correction) if n > correction else float("inf"))
        wide = self._wide()
        mean = wide.mean(axis, True, where=where)
        apart = wide - mean
        total = (apart * apart).sum(axis, keepdims, where=where).astype("f8")
        count = self._count(where, axis, keepdims)
        if correction:
            least = apply("maximum", (count - correction)._term(), constant(0))
            count = count._make(least)
        dtype = self.dtype if _dtypes.is_float(self.dtype) else mean.dtype
        return (total / count).astype(dtype)

    def std(
        self: Self,
        axis: Any = None,
        keepdims: bool = False,
        *,
        correction: float = 0,
        ddof: float = 0,
        where: Any = None,
    ) -> Self:
        """The square root of var()."""
        found = self.var(axis, keepdims, correction=correction or ddof, where=where)
        return found._make(apply("sqrt", found._term()))

    def all(self: Self, axis: Any = None, keepdims: bool = False, *, where: Any = None) -> Self:
        """Whether all elements are nonzero, or those where a mask is true; NaN is."""
        found = self if where is None else self.astype(bool)._where(where, True)
        return found._reduce("all", axis, keepdims)

    def any(self: Self, axis: Any = None, keepdims: bool = False, *, where: Any = None) -> Self:
        """Whether any element is nonzero, or any of those where a mask is true; NaN is."""
        found = self if where is None else self.astype(bool)._where(where, False)
        return found._reduce("any", axis, keepdims)

    def topk(self: Self, k: int, axis: int = -1, largest: bool = True) -> Tuple[Self, Self]:
        """(values, indices) of the k largest or smallest elements along an axis: ts.topk."""
        values, indices = _ops.topk(self._term(), k, axis, largest)
        return self._make(values), self._make(indices)

    # --- NumPy's protocols

    def __array__(self, *_: Any, **__: Any) -> npt.NDArray[Any]:
        raise TypeError("no silent download: call .numpy() (in ts.aio: await x.numpy())")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return _numpy.ufunc(ufunc, method, inputs, options)

    def __array_function__(self, function: Any, _: Any, args: Any, options: Any) -> Any:
        return _numpy.function(function, args, options)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return _numpy.attribute(self, name)

    # What never changes is its own copy; copy() makes another buffer.

    def __copy__(self: Self) -> Self:
        return self

    def __deepcopy__(self: Self, _: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a handle of a connection cannot be pickled: save(name) the array, send the name, and"
            " open it there with connect(...)[name]; or send .numpy()"
        )

    def __repr__(self) -> str:
        kind = "Array" if isinstance(self._source, Leaf) else "Expr"
        name = f" {self._source.name!r}" if isinstance(self._source, Leaf) else ""
        return f"<tessera.{kind}{name} shape={self.shape} dtype={_dtypes.SHORT[self.dtype]}>"

    def _repr_html_(self) -> str:
        return _html.card(self)


def _number(value: Any, dtype: "np.dtype[Any]") -> Tuple[Constant, View]:
    """A number as one of a type. TypeError, ValueError, OverflowError: there is none of it."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"a number, not {type(value).__name__}")
    source, view = cast(constant(value), dtype)
    assert isinstance(source, Constant)
    return source, view


def terms_of(session: Any, values: Sequence[Any]) -> List[Term]:
    """Of arrays and expressions of one connection."""
    for value in values:
        if not isinstance(value, Lazy):
            raise TypeError(f"arrays and expressions of this client, not {type(value).__name__}")
        if value._session is not session:
            raise Unsupported(_TWO_CONNECTIONS)
    return [value._term() for value in values]
