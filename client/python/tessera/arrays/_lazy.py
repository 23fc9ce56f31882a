"""Arrays and expressions as NumPy users write them. Nothing here talks to the server.

The blocking and the asyncio classes add the methods that compute, such as numpy() and save().
"""

import numbers
import sys
from typing import TYPE_CHECKING, Any, Iterator, List, Optional, Sequence, Tuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..graph import _dtypes, _ops, _plan
from ..graph._elementwise import apply, cast, common_dtype, constant, converted, lift
from ..graph._graph import Constant, Leaf, Node, Term
from ..graph._views import (
    Shape, View, extents, index_of, is_true, normalize_axes, normalize_axis, size_of
)
from ..wire._errors import BadShape, BadView, Unsupported
from . import _functions, _html, _manipulation, _numpy
from ._operators import Operators

_TWO_CONNECTIONS = (
    "arrays of two connections cannot be combined: copy one of them to the other connection with"
    " t.import_from(server, name), or with .numpy() and put()"
)
Self = TypeVar("Self", bound="Lazy")


class Lazy(Operators):
    """A view of a buffer (Array), or the future result of an expression (Expr): shape and dtype are
    known, but the elements are on the server or not computed yet. Objects are immutable. Creating
    one sends nothing.

    Operators work element by element, with broadcasting and promotion as in NumPy 2. The other
    operand may be another array of the connection, a number, or a NumPy array or list of up to 1
    MiB. The operators are + - * / // % ** divmod, == != < <= > >=, and & | ^ ~ for bool; @
    multiplies matrices. NumPy functions work on these arrays as far as the server has the
    operations for them; np.asarray raises TypeError.

    Raises BadShape if shapes do not match, Unsupported if the server cannot compute the operation,
    and OverflowError for a Python number that the array's type cannot hold.
    """

    __array_priority__ = 1000
    # With these, pandas leaves operators to this class. Before 2.1, its columns do so only for what
    # says that it is a DataFrame.
    __pandas_priority__ = 5000
    _typ = "dataframe"
    __slots__ = ("_session", "_source", "_view", "_stats", "_prepared", "__weakref__")

    def __init__(self, session: Any, source: Any, view: View) -> None:
        self._session = session
        self._source = source
        self._view = view
        self._stats: _plan.Cost = None
        self._prepared: Any = None  # From Core.prepare.

    # --- properties

    @property
    def shape(self) -> Shape:
        """The extents, outermost first; () for a 0-d array."""
        return self._view.shape

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The NumPy type of the elements. For bf16, it is the type of ml_dtypes if that package is
        installed, otherwise ts.bfloat16."""
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
        """The bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self.itemsize

    @property
    def stats(self) -> List[_plan.Stats]:
        """The cost of each step when this object was last computed."""
        if self._stats is None:
            return []
        plan, answers = self._stats
        return plan.stats(answers)

    def explain(self) -> str:
        """Returns the program that would be sent to compute this expression, one line per step.
        Sends nothing."""
        if not isinstance(self._source, Node):
            return "no program: the elements are on the server"
        return _plan.Plan([self._source]).explain()

    def with_(self: Self, strategy: str = "", timing: bool = False) -> Self:
        """Returns the same expression with settings for its last step. strategy is the name of the
        strategy that computes the step (`tessera strategies` lists the names). timing says whether
        the device times the step (Stats.kernel_us). Computing the expression raises UnknownStrategy
        or StrategyUnsupported if the strategy cannot be used."""
        if not isinstance(self._source, Node):
            raise Unsupported("with_() applies only to expressions: an array is already computed")
        return self._make((self._source.using(strategy, timing), self._view))

    # --- conversion of operands

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
        if _dtypes.is_pandas(value):
            return lift(_dtypes.to_numpy(value))
        return None

    def _operand(self, value: Any, name: str = "an operation") -> Term:
        """Returns the term of an argument that NumPy functions accept as an array. Raises TypeError
        for any other argument."""
        term = self._other(value)
        if term is None and hasattr(value, "__array__"):
            term = lift(_dtypes.to_numpy(value))
        if term is None:
            raise TypeError(
                f"{name} takes no operand of type {type(value).__name__}: operands are arrays of"
                " this client, numbers, NumPy arrays and lists"
            )
        return term

    def _lifted(self: Self, value: Any, name: str) -> Self:
        """Returns an operand as an array of this connection."""
        return self._make(_ops.array(self._operand(value, name)))

    def _like(self: Self, value: Any) -> Self:
        """Wraps a NumPy array of this process in an array that is sent with the call."""
        return self._make(_ops.array(lift(np.asarray(value))))

    # --- views

    def _seen(self: Self, view: View) -> Self:
        return self._make((self._source, view))

    def __getitem__(self: Self, key: Any) -> Self:
        """Returns a view, with NumPy's basic indexing: integers, slices with any step, None, `...`.
        If some of the indices are arrays or lists of integers, on the server or in this process,
        returns the slices at these indices, as take() does; several arrays are broadcast together.
        If one of the indices is a boolean array or list, returns the elements or slices where it is
        true. For a mask on the server, this calls the server, because the shape of the result
        depends on the mask's elements; ts.aio takes only masks of this process. Raises BadView or
        BadIndex (both are IndexErrors), or Unsupported for a mask next to other arrays, or for a
        mask of several axes next to other indices."""
        return _manipulation.indexed(self, key)  # type: ignore[no-any-return]

    def take(
        self: Self, indices: Any, axis: Optional[int] = None, out: None = None, mode: str = "raise"
    ) -> Self:
        """Returns the elements, or the slices along an axis, at indices. If axis is None, elements
        count in row-major order. Negative indices count from the end. mode says what happens to an
        index that is out of range: "raise" raises BadIndex (an IndexError), "wrap" takes it modulo
        the extent, and "clip" takes the first or the last element. For indices on the server,
        BadIndex is raised when the result is computed; if the result has no elements, these indices
        are not checked."""
        _no_out(out)
        return _manipulation.take(self, indices, axis, mode)  # type: ignore[no-any-return]

    def compress(self: Self, condition: Any, axis: Optional[int] = None, out: None = None) -> Self:
        """Returns the elements, or the slices along an axis, for which a vector, the condition, is
        nonzero. A condition on the server causes a call at once, as a mask in an index does."""
        _no_out(out)
        return _manipulation.compress(condition, self, axis)  # type: ignore[no-any-return]

    def nonzero(self: Self) -> Tuple[Self, ...]:
        """Returns the positions of the nonzero elements in row-major order, as one i64 array for
        each axis. This calls the server, as for a mask in an index."""
        return _manipulation.nonzero(self)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise Unsupported(
            "arrays on a server are immutable: upload a new one with the client's"
            " put(..., replace=True)"
        )

    def __iter__(self: Self) -> Iterator[Self]:
        return (self[i] for i in range(len(self)))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d array has no len(): use .item() to get its element")
        return self.shape[0]

    def transpose(self: Self, *axes: Any) -> Self:
        """Returns a view with the axes in reverse order, or in the given order."""
        order = axes[0] if len(axes) == 1 and not hasattr(axes[0], "__index__") else axes
        return self._seen(self._view.transpose(order or None))

    @property
    def T(self: Self) -> Self:
        """A view with the axes in reverse order."""
        return self._seen(self._view.transpose())

    @property
    def mT(self: Self) -> Self:
        """A view with the last two axes exchanged."""
        if self.ndim < 2:
            raise BadShape("mT needs two axes")
        return self.swapaxes(-1, -2)

    def swapaxes(self: Self, axis1: int, axis2: int) -> Self:
        """Returns a view with two axes exchanged."""
        order = list(range(self.ndim))
        a, b = normalize_axis(axis1, self.ndim), normalize_axis(axis2, self.ndim)
        order[a], order[b] = order[b], order[a]
        return self._seen(self._view.transpose(order))

    def reshape(self: Self, *shape: Any, order: str = "C") -> Self:
        """Returns the same elements, in row-major order, in another shape; one extent may be -1.
        The result is a view if strides can express it, otherwise an expression that copies. The
        orders "K" and "A" are accepted where they mean the same as "C", the row-major order. Raises
        Unsupported otherwise."""
        self._check_order(order)
        wanted = shape[0] if len(shape) == 1 else shape
        return self._make(_ops.reshaped(self._term(), extents(wanted)))

    def _check_order(self, order: Any) -> None:
        """Raises Unsupported for an order of elements that may differ from row-major order. The
        layout that NumPy would give an expression is unknown."""
        steps = [abs(step) for n, step in zip(self.shape, self._view.strides) if n > 1]
        ordered = steps == sorted(steps, reverse=True) and 0 not in steps
        same = ordered and not isinstance(self._source, Node) or len(steps) < 2
        if order not in ("C", None) and not (same and order in ("K", "A")):
            raise Unsupported(
                f"order={order!r} is not supported: use order='C' for row-major order, or"
                " x.T.ravel() for column-major order"
            )

    def ravel(self: Self, order: str = "C") -> Self:
        """Returns all elements as a vector in row-major order, like reshape(-1)."""
        return self.reshape(-1, order=order)

    flatten = ravel

    def broadcast_to(self: Self, shape: Sequence[int]) -> Self:
        """Returns a view in the given shape: axes of extent 1 are repeated, and new axes are added
        in front."""
        return self._seen(self._view.broadcast_to(shape))

    def squeeze(self: Self, axis: Any = None) -> Self:
        """Returns a view without the axes of extent 1, or without the given axes."""
        if axis is None or not self.ndim and axis in (0, -1):
            drop = {i for i, extent in enumerate(self.shape) if extent == 1}
        else:
            drop = set(normalize_axes(axis, self.ndim))
            if any(self.shape[i] != 1 for i in drop):
                raise BadShape(f"squeeze needs extents of 1 along {axis}, not shape {self.shape}")
        return self[tuple(0 if i in drop else slice(None) for i in range(self.ndim))]

    # --- operations

    def astype(
        self: Self,
        dtype: Any,
        order: str = "K",
        casting: str = "unsafe",
        subok: bool = True,
        copy: bool = True,
    ) -> Self:
        """Converts each element to another type, rounding to nearest. Floats outside the range of
        an integer type give the nearest number of the type, and NaN gives 0. A cast to bool gives
        true for every nonzero element. casting is as in NumPy; if it forbids the conversion,
        TypeError is raised. order, subok and copy have no effect."""
        to = _dtypes.dtype_of(dtype)
        _dtypes.check_cast(self.dtype, to, casting)
        return self._make(cast(self._term(), to))

    def clip(self: Self, min: Any = None, max: Any = None, out: None = None) -> Self:
        """Returns the elements, limited to the range from min to max; None means no limit."""
        _no_out(out)
        return _functions.clip(self, min, max)  # type: ignore[no-any-return]

    def round(self: Self, decimals: int = 0, out: None = None) -> Self:
        """Returns the elements, rounded to a number of decimals, halves to even."""
        _no_out(out)
        return _functions.round_(self, decimals)  # type: ignore[no-any-return]

    def repeat(self: Self, repeats: Any, axis: Optional[int] = None) -> Self:
        """Repeats each element, or each slice along an axis. repeats is a number, or one number for
        each of them. Numbers on the server cause a call at once, because the shape of the result
        depends on them."""
        return _manipulation.repeat(self, repeats, axis)  # type: ignore[no-any-return]

    def diagonal(self: Self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Self:
        """Returns a view whose last axis is the diagonal of two axes."""
        return _manipulation.diagonal(self, offset, axis1, axis2)  # type: ignore[no-any-return]

    def trace(
        self: Self,
        offset: int = 0,
        axis1: int = 0,
        axis2: int = 1,
        dtype: Any = None,
        out: None = None,
    ) -> Self:
        """Returns the sum of a diagonal."""
        _no_out(out)
        return _functions.trace(self, offset, axis1, axis2, dtype)  # type: ignore[no-any-return]

    def ptp(self: Self, axis: Any = None, out: None = None, keepdims: bool = False) -> Self:
        """Returns the largest element minus the smallest, over all elements or along axes."""
        _no_out(out)
        return _functions.ptp(self, axis, keepdims)  # type: ignore[no-any-return]

    def conj(self: Self) -> Self:
        """Returns the elements themselves, because none are complex."""
        return self

    conjugate = conj

    @property
    def imag(self: Self) -> Self:
        """The imaginary parts, which are zeros, because no elements are complex."""
        return np.zeros_like(self)  # type: ignore[return-value]

    @property
    def real(self: Self) -> Self:
        """The elements themselves, because none are complex."""
        return self

    def dot(self: Self, b: Any, out: None = None) -> Self:
        """Like numpy.dot, for numbers, vectors, matrices and stacks of matrices. For two vectors,
        the result is the sum of the products (i64 for integers)."""
        _no_out(out)
        return _functions.dot(self, b)  # type: ignore[no-any-return]

    def _typed(self: Self, dtype: Any) -> Self:
        """Converts like NumPy functions with dtype=, so integers wrap. None means no conversion."""
        if dtype is None:
            return self
        return self._make(converted(self._term(), _dtypes.dtype_of(dtype)))

    def _reduce(self: Self, op: str, axis: Any, keepdims: bool) -> Self:
        return self._make(_ops.reduce(op, self._term(), axis, keepdims))

    def _mask(self, where: Any) -> Term:
        """Returns `where` as a mask of this array's shape."""
        if isinstance(where, (int, float, list, tuple)):
            where = np.asarray(where, bool)
        mask = self._other(where)
        dtype = None if mask is None else common_dtype([mask])
        if mask is None or dtype != np.dtype(bool):
            kind = dtype or type(where).__name__
            raise TypeError(f"where must have booleans, not {kind}: use .astype(bool)")
        source, view = mask
        if isinstance(source, Constant):
            return _ops.full(source.value, self.shape, np.dtype(bool))
        return source, view.broadcast_to(self.shape)

    def _where(self: Self, where: Any, rest: Any) -> Self:
        """Returns the elements where a mask is true, and a number elsewhere."""
        if where is True:
            return self
        number = _number(rest, self.dtype)
        return self._make(apply("where", self._mask(where), self._term(), number))

    def _count(self: Self, where: Any, axis: Any, keepdims: bool, less: float = 0) -> Self:
        """Returns the number of elements that a mask selects, minus a correction, but at least
        0."""
        count = self._make(_ops.reduce("sum", self._mask(where), axis, keepdims))
        return np.maximum(count - less, 0) if less else count  # type: ignore[return-value]

    def _from(self: Self, function: str, initial: Any) -> Self:
        """Includes an initial number in a reduction's result."""
        if initial is None:
            return self
        return self._make(apply(function, self._term(), _number(initial, self.dtype)))

    def sum(
        self: Self,
        axis: Any = None,
        dtype: Any = None,
        out: None = None,
        keepdims: bool = False,
        initial: Any = None,
        where: Any = True,
    ) -> Self:
        """Returns the sum of all elements, or the sums along axes. Integers and bool give i64.
        dtype is the type to which the elements are converted first, and the type of the result.
        initial is a number that is added. `where` is a mask that selects the elements."""
        _no_out(out)
        picked = self._typed(dtype)._where(where, 0)
        return picked._reduce("sum", axis, keepdims)._from("add", initial)._typed(dtype)

    def prod(
        self: Self,
        axis: Any = None,
        dtype: Any = None,
        out: None = None,
        keepdims: bool = False,
        initial: Any = None,
        where: Any = True,
    ) -> Self:
        """Like sum(), but for the product. initial is a factor. The product of no elements is 1."""
        _no_out(out)
        picked = self._typed(dtype)._where(where, 1)
        return picked._reduce("product", axis, keepdims)._from("multiply", initial)._typed(dtype)

    def _extreme(
        self: Self, op: str, function: str, axis: Any, keepdims: bool, initial: Any, where: Any
    ) -> Self:
        if initial is None:
            if where is not True:
                raise ValueError(f"{op} with where= needs an initial value")
            return self._reduce(op, axis, keepdims)
        picked = self._where(where, initial)
        if self.size == 0:
            shape = _ops.folded(self.shape, _ops.axes_of(axis, self.ndim), keepdims)
            source, _ = _number(initial, self.dtype)
            return self._make(_ops.full(source.value, shape, self.dtype))
        return picked._reduce(op, axis, keepdims)._from(function, initial)

    def min(
        self: Self,
        axis: Any = None,
        out: None = None,
        keepdims: bool = False,
        initial: Any = None,
        where: Any = True,
    ) -> Self:
        """Returns the smallest element, or NaN if any element is NaN. If initial is given, the
        result is at most initial, and `where` may select the elements. Raises EmptyInput."""
        _no_out(out)
        return self._extreme("min", "minimum", axis, keepdims, initial, where)

    def max(
        self: Self,
        axis: Any = None,
        out: None = None,
        keepdims: bool = False,
        initial: Any = None,
        where: Any = True,
    ) -> Self:
        """Returns the largest element, or NaN if any element is NaN. If initial is given, the
        result is at least initial, and `where` may select the elements. Raises EmptyInput."""
        _no_out(out)
        return self._extreme("max", "maximum", axis, keepdims, initial, where)

    def argmin(self: Self, axis: Any = None, out: None = None, *, keepdims: bool = False) -> Self:
        """Returns the index (i64) of the first smallest element, or of the first NaN, along one
        axis or over all elements in row-major order. Raises EmptyInput."""
        _no_out(out)
        return self._reduce("argmin", axis, keepdims)

    def argmax(self: Self, axis: Any = None, out: None = None, *, keepdims: bool = False) -> Self:
        """Like argmin(), but for the largest element."""
        _no_out(out)
        return self._reduce("argmax", axis, keepdims)

    def _real_of(self: Self, dtype: Any, out: None) -> Self:
        """Converts to the type in which a mean with dtype= is computed."""
        _no_out(out)
        if dtype is not None and not _dtypes.is_float(_dtypes.dtype_of(dtype)):
            raise Unsupported("means are floats: dtype= must be a float type")
        return self._typed(dtype)

    @property
    def _mean_dtype(self) -> "np.dtype[Any]":
        return self.dtype if _dtypes.is_float(self.dtype) else np.dtype("<f8")

    def mean(
        self: Self,
        axis: Any = None,
        dtype: Any = None,
        out: None = None,
        keepdims: bool = False,
        *,
        where: Any = True,
    ) -> Self:
        """Returns the mean of all elements, or the means along axes. Integers and bool give f64.
        dtype is a float type, used as in sum(). `where` is a mask that selects the elements. The
        mean of no elements is NaN."""
        x = self._real_of(dtype, out)
        if where is True:
            return x._reduce("mean", axis, keepdims)
        total = x.astype("f8").sum(axis, keepdims=keepdims, where=where)
        return (total / x._count(where, axis, keepdims)).astype(x._mean_dtype)

    def var(
        self: Self,
        axis: Any = None,
        dtype: Any = None,
        out: None = None,
        ddof: float = 0,
        keepdims: bool = False,
        *,
        where: Any = True,
        correction: Optional[float] = None,
    ) -> Self:
        """Returns the sum of the squared deviations from the mean, divided by n - ddof. correction
        is another name for ddof. `where` is a mask that selects the elements. dtype is as for
        mean(). The variance of no elements is NaN."""
        x, less = self._real_of(dtype, out), _less(ddof, correction)
        if where is True:
            return x._moment("variance", axis, keepdims, less)
        apart = x._apart(axis, where)
        total = (apart * apart).sum(axis, keepdims=keepdims, where=where)
        return (total / x._count(where, axis, keepdims, less)).astype(x._mean_dtype)

    def std(
        self: Self,
        axis: Any = None,
        dtype: Any = None,
        out: None = None,
        ddof: float = 0,
        keepdims: bool = False,
        *,
        where: Any = True,
        correction: Optional[float] = None,
    ) -> Self:
        """Returns the square root of var(), even if var() itself exceeds the range of the type."""
        x, less = self._real_of(dtype, out), _less(ddof, correction)
        if where is True:
            return x._moment("std", axis, keepdims, less)
        apart = x._apart(axis, where)
        # Dividing the deviations by the largest one keeps their squares in range.
        most = abs(apart).max(axis, keepdims=True, initial=0, where=where)
        apart = apart / np.where(most > 0, most, 1)
        total = (apart * apart).sum(axis, keepdims=True, where=where)
        found = most * np.sqrt(total / x._count(where, axis, True, less))
        if not is_true(keepdims, "keepdims") and self.ndim:
            found = found.squeeze(_ops.axes_of(axis, self.ndim))
        return found.astype(x._mean_dtype)  # type: ignore[return-value]

    def _apart(self: Self, axis: Any, where: Any) -> Self:
        """Returns the deviations, as f64, from the mean of the elements that a mask selects."""
        wide = self.astype("f8")
        return wide - wide.mean(axis, keepdims=True, where=where)

    def _moment(self: Self, op: str, axis: Any, keepdims: bool, less: float) -> Self:
        """Returns a variance or standard deviation with the divisor n - less instead of n."""
        found = self._reduce(op, axis, keepdims)
        if not less:
            return found
        n = size_of([self.shape[i] for i in _ops.axes_of(axis, self.ndim)])
        times, over = _ops.correction_of(op, n, less)
        return (found.astype("f8") * times / over).astype(found.dtype)

    def all(
        self: Self,
        axis: Any = None,
        out: None = None,
        keepdims: bool = False,
        *,
        where: Any = True,
    ) -> Self:
        """Returns whether all elements are nonzero, or all elements where a mask is true. NaN
        counts as nonzero."""
        _no_out(out)
        found = self if where is True else self.astype(bool)._where(where, True)
        return found._reduce("all", axis, keepdims)

    def any(
        self: Self,
        axis: Any = None,
        out: None = None,
        keepdims: bool = False,
        *,
        where: Any = True,
    ) -> Self:
        """Returns whether any element is nonzero, or any element where a mask is true. NaN counts
        as nonzero."""
        _no_out(out)
        found = self if where is True else self.astype(bool)._where(where, False)
        return found._reduce("any", axis, keepdims)

    def _scan(self: Self, op: str, axis: Any, dtype: Any = None) -> Self:
        x = self._typed(dtype)
        if axis is None or not x.ndim:
            x, axis = x.ravel(), 0 if axis is None else axis
        return x._make(_ops.scan(op, x._term(), axis))._typed(dtype)

    def cumsum(self: Self, axis: Any = None, dtype: Any = None, out: None = None) -> Self:
        """Returns, for each element, the sum of the elements along an axis up to and including it.
        If axis is None, the result is a vector of the sums of all elements in row-major order.
        dtype is as in sum()."""
        _no_out(out)
        return self._scan("sum", axis, dtype)

    def cumprod(self: Self, axis: Any = None, dtype: Any = None, out: None = None) -> Self:
        """Like cumsum(), but for products."""
        _no_out(out)
        return self._scan("product", axis, dtype)

    def argsort(self: Self, axis: Optional[int] = -1, kind: Any = None, order: None = None) -> Self:
        """Returns the i64 indices that sort the elements along an axis, or all elements if axis is
        None. Equal elements stay in index order; kind has no effect."""
        return np.argsort(self, axis, kind, order)  # type: ignore[return-value]

    def searchsorted(self: Self, v: Any, side: str = "left", sorter: Any = None) -> Self:
        """Returns the positions at which values can be inserted into this sorted vector: before the
        elements that are equal to them, or, with side="right", after them."""
        return np.searchsorted(self, v, side, sorter)  # type: ignore

    def topk(self: Self, k: int, axis: int = -1, largest: bool = True) -> Tuple[Self, Self]:
        """Returns (values, indices) of the k largest or smallest elements along an axis, as ts.topk
        does."""
        values, indices = _ops.topk(self._term(), k, axis, largest)
        return self._make(values), self._make(indices)

    # --- NumPy's protocols

    def __array__(self, *_: Any, **__: Any) -> npt.NDArray[Any]:
        raise TypeError(
            "arrays are not downloaded implicitly: call .numpy() (in ts.aio: await x.numpy())")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return _numpy.ufunc(ufunc, method, inputs, options)

    def __array_function__(self, function: Any, _: Any, args: Any, options: Any) -> Any:
        return _numpy.function(function, args, options)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return _numpy.attribute(self, name)

    # An object that never changes is its own copy; copy() creates another buffer.

    def __copy__(self: Self) -> Self:
        return self

    def __deepcopy__(self: Self, _: Any) -> Self:
        return self

    def __dask_tokenize__(self) -> Any:
        # Dask calls this when it puts an array into a graph. Sending such a graph to another
        # process would break the connection to the scheduler, and all persisted arrays would be
        # lost.
        distributed = sys.modules.get("distributed")
        if distributed is not None and distributed.client._get_global_client() is not None:
            raise Unsupported(
                "a graph of Dask cannot contain this array, which workers cannot reach: save() it"
                " and use tessera.dask.from_buffers([(address, name)])"
            )
        return id(self._session), id(self._source), self._view

    def __reduce__(self) -> Any:
        raise TypeError(
            "only a named array of a blocking client can be pickled: save it with save(name), or"
            " send the name, and open it in the other process with connect(...)[name]"
        )

    def __repr__(self) -> str:
        kind = "Array" if isinstance(self._source, Leaf) else "Expr"
        name = f" {self._source.name!r}" if isinstance(self._source, Leaf) else ""
        return f"<tessera.{kind}{name} shape={self.shape} dtype={_dtypes.argument_of(self.dtype)}>"

    def _repr_html_(self) -> str:
        return _html.card(self)


def _number(value: Any, dtype: "np.dtype[Any]") -> Tuple[Constant, View]:
    """Returns a number as a constant of a type. Raises TypeError, ValueError or OverflowError if it
    does not fit."""
    value = _manipulation.known(value)
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"expected a number, not {type(value).__name__}")
    source, view = cast(constant(value), dtype)
    assert isinstance(source, Constant)
    return source, view


def _less(ddof: float, correction: Optional[float]) -> float:
    """Returns the number that var() and std() subtract from the number of elements."""
    if ddof and correction is not None:
        raise ValueError("ddof and correction can't be provided simultaneously.")
    less = _manipulation.known(ddof if correction is None else correction)
    if not isinstance(less, numbers.Real):
        raise TypeError(f"ddof must be a number, not {type(less).__name__}")
    return less  # type: ignore[return-value]


def _no_out(out: Any) -> None:
    if out is not None:
        raise Unsupported("out= is not supported: use the result, or keep it with .save()")


def picked(array: Self, place: Tuple[Any, ...]) -> Self:
    """Returns the element that item() selects, as an array."""
    if len(place) == 1 and isinstance(place[0], tuple):
        (place,) = place
    if not place:
        return array
    if len(place) == 1 and array.ndim != 1:
        at = index_of(place[0], "a position")
        if not -array.size <= at < array.size:
            raise BadView(f"position {at} is out of range for {array.size} elements")
        place = np.unravel_index(at + array.size if at < 0 else at, array.shape)
    if len(place) != array.ndim:
        raise ValueError(f"item() takes {array.ndim} indices, not {len(place)}")
    return array[tuple(index_of(one, "an index") for one in place)]


def terms_of(session: Any, values: Sequence[Any]) -> List[Term]:
    """Returns the terms of arrays and expressions of one connection."""
    for value in values:
        if not isinstance(value, Lazy):
            star = "; spread it with *" if isinstance(value, (list, tuple)) else ""
            raise TypeError(
                f"the arguments must be arrays or expressions, not {type(value).__name__}{star}"
            )
        if value._session is not session:
            raise Unsupported(_TWO_CONNECTIONS)
    return [value._term() for value in values]
