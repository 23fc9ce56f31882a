"""What NumPy functions such as np.add and np.sum do with server-side arrays.

The arguments of a call are bound to the signature of the NumPy function, and passed on by its
parameter names. Unsupported functions and arguments raise Unsupported; nothing is downloaded
implicitly.
"""

import functools
import inspect
from typing import Any, Callable, Dict, Iterable, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..graph import _dtypes, _ops
from ..graph import _elementwise as e
from ..graph._graph import Constant, Term
from ..wire._errors import NoAttribute, Unsupported
from . import _functions
from ._creation import Creation
from ._ufuncs import PAIRS, REDUCTIONS, UFUNCS

_WAY_OUT = "bring the operands to the host with .numpy()"
_ROWS = "use x[rows] with an array of the positions, or a slice as in x[2:5]"


# What to use instead of an attribute of NumPy arrays. For attributes without an entry, errors
# suggest only .numpy().
_INSTEAD = {
    "argpartition": "use np.argpartition(x, kth)",
    **dict.fromkeys(("partition", "sort"), "use np.sort(x), which returns the sorted array"),
    **dict.fromkeys(
        ("fill", "put", "itemset", "setfield", "resize", "setflags", "byteswap"),
        "they are immutable, so upload a new one with the client's put(..., replace=True)",
    ),
    "choose": _ROWS,
    "view": "use .astype() to convert elements",
    "flat": "use .ravel()",
}
# What to use instead of a function or ufunc of NumPy.
_INSTEAD_OF = {
    **dict.fromkeys("choose piecewise".split(), "use np.select"),
    **dict.fromkeys(
        "copyto fill_diagonal place put put_along_axis putmask".split(),
        "arrays are immutable, so use np.where(mask, values, x)",
    ),
    **dict.fromkeys("apply_along_axis apply_over_axes".split(), "use axis= of other functions"),
    "trim_zeros": "use np.flatnonzero(x) and a slice",
    "ix_": "use x[rows][:, columns]",
    "ravel_multi_index": "use rows * columns + column",
    "vander": "use x[:, None] ** np.arange(n)[::-1]",
    "eig": "use np.linalg.eigh if the matrix is symmetric",
    "eigvals": "use np.linalg.eigvalsh if the matrix is symmetric",
}
# Functions that create arrays and take none. NumPy passes calls with like=x to function().
_FROM_NOTHING = {
    getattr(np, name)
    for name in ("arange array asanyarray asarray empty eye full identity linspace ones zeros"
                 .split())
}
# What pandas looks up in an array that it takes for a DataFrame (see Lazy._typ).
_OF_FRAMES = {"index", "columns", "isna", "_get_axis"}
_OF_ARRAYS = {"name", "version", "device", "devices", "copy", "link", "delete"}


def attribute(array: Any, name: str) -> Any:
    """Implements __getattr__ for attributes that `array` lacks. Raises NoAttribute, which suggests
    an alternative, if NumPy arrays or an Array have the attribute, otherwise AttributeError."""
    kind = type(array).__name__
    if name in _OF_ARRAYS:
        raise NoAttribute(f"an {kind} has no {name}: save it with .save(), which returns an Array")
    if name in _OF_FRAMES:
        raise NoAttribute(
            "pandas does not compute with arrays on a server: the resident array must be the left"
            " operand, or use .values of pandas' object"
        )
    if name.startswith("_") or not hasattr(np.ndarray, name):
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")
    instead = f"{_INSTEAD[name]}, or " if name in _INSTEAD else ""
    raise NoAttribute(
        f"arrays on a server have no {name}: {instead}use .numpy().{name} (in ts.aio: (await"
        f" x.numpy()).{name})"
    )


def _first(values: Iterable[Any]) -> Any:
    """Returns the first server-side array among the arguments, including those in lists, or
    None."""
    for value in values:
        if hasattr(value, "_session"):
            return value
        if isinstance(value, (list, tuple)):
            found = _first(value)
            if found is not None:
                return found
    return None


# --- arguments


class _Signature(NamedTuple):
    """The signature of a NumPy function: the defaults of its parameters by name, the names of the
    positional parameters, the name of the parameter that takes all further positional arguments,
    and the names of the required parameters."""

    signature: inspect.Signature
    defaults: Dict[str, Any]
    positional: Tuple[str, ...]
    rest: Optional[str]
    required: Tuple[str, ...]


# The signatures of functions that are written in C, which inspect may not find.
_OF_C: Dict[Any, Callable[..., Any]] = {
    np.dot: lambda a, b, out=None: None,
    np.vdot: lambda a, b: None,
    np.inner: lambda a, b: None,
    np.empty_like: lambda prototype, dtype=None, order="K", subok=True, shape=None, *, device=None:
        None,
    np.concatenate: lambda arrays, axis=0, out=None, *, dtype=None, casting="same_kind": None,
    np.bincount: lambda x, weights=None, minlength=0: None,
    np.compress: lambda condition, a, axis=None, out=None: None,
    np.where: lambda condition, x=_functions.MISSING, y=_functions.MISSING: None,
    np.lexsort: lambda keys, axis=-1: None,
    np.unravel_index: lambda indices, shape, order="C": None,
    np.can_cast: lambda from_, to, casting="safe": None,
    np.result_type: lambda *arrays_and_dtypes: None,
}
# Parameters that have other names in some versions of NumPy.
_SAME = {"newshape": "shape", "a_min": "min", "a_max": "max"}


@functools.lru_cache(maxsize=None)
def _signature(function: Any) -> _Signature:
    signature = inspect.signature(_OF_C.get(function, function))
    kinds = inspect.Parameter
    parameters = signature.parameters.values()
    by_position = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    return _Signature(
        signature,
        {p.name: p.default for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)},
        tuple(p.name for p in parameters if p.kind in by_position),
        next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), None),
        tuple(p.name for p in parameters if p.kind in by_position and p.default is p.empty),
    )


@functools.lru_cache(maxsize=None)
def _names(call: Callable[..., Any]) -> Sequence[str]:
    return getattr(call, "names", None) or tuple(inspect.signature(call).parameters)


def _bound(function: Any, args: Tuple[Any, ...], options: Dict[str, Any]) -> Dict[str, Any]:
    """Returns the arguments by the parameter names of the NumPy function, without those that have
    their default values. Raises TypeError if the NumPy function does not accept such a call."""
    taken = _signature(function)
    given = dict(zip(taken.positional, args))
    fits = taken.rest is not None or len(args) <= len(taken.positional)
    if not fits or any(name in given or name not in taken.defaults for name in options):
        extra = taken.signature.bind(*args, **options).arguments.get("kwargs", {})
        options = {**options, **extra}  # np.clip(x, min=0) before NumPy 2.1.
    given.update(options)
    for name in taken.required:
        if name not in given and not (function is np.clip and name in ("a_min", "a_max")):
            taken.signature.bind(*args, **options)
    return {
        name: value
        for name, value in given.items()
        if not _says_nothing(value, taken.defaults.get(name, inspect.Parameter.empty))
    }


_NO_VALUE = np._NoValue  # type: ignore[attr-defined]


def _says_nothing(value: Any, default: Any) -> bool:
    """Returns whether an argument has its default value."""
    if value is default or value is _NO_VALUE:
        return True
    plain = type(value) in (bool, int, float, str, tuple)
    return plain and type(value) is type(default) and bool(value == default)


# Arguments that matter only for arrays in memory. These values are accepted and have no effect.
_MEANINGLESS: Dict[str, Tuple[Any, ...]] = {
    "out": (None,),
    "order": ("C", "F", "K", "A", None),
    "casting": ("same_kind",),
    "where": (True,),
    "subok": (True, False),
    "copy": (True, False, None),
    "like": (None,),
    "device": (None, "cpu"),
    "overwrite_input": (True, False),
    "assume_unique": (True, False),
    "kind": (None, "sort", "introselect"),
}


def _refused(name: str, key: str, value: Any) -> None:
    """Raises Unsupported unless the value has no effect here."""
    if key == "out" and isinstance(value, tuple) and all(one is None for one in value):
        return
    allowed = _MEANINGLESS.get(key, ())
    if not any(value is one or isinstance(value, str) and value == one for one in allowed):
        first = {
            "where": "use np.where(mask, result, other), or ",
            "out": "use the returned array, or ",
        }.get(key, "")
        raise Unsupported(f"the server does not support {key}= of {name}: {first}{_WAY_OUT}")


# --- NumPy's protocols


def _operands(array: Any, inputs: Tuple[Any, ...], name: str) -> Optional[Tuple[Term, ...]]:
    """Returns the terms of a ufunc's operands, or None if another library has to handle one of
    them."""
    for value in inputs:
        theirs = not isinstance(value, (np.ndarray, np.generic)) and array._other(value) is None
        if theirs and hasattr(value, "__array_ufunc__"):
            return None
    return tuple(array._operand(value, name) for value in inputs)


def _for_numpy(dtype: Any) -> Any:
    """Returns the type that stands for a type where NumPy applies its rules: f32 for bf16."""
    return np.dtype("<f4") if dtype == _dtypes.bfloat16 else dtype


def _stand_in(term: Term, value: Any, rank: int) -> Any:
    """Returns an empty array or a number with the operand's type, for NumPy's type promotion."""
    source, _ = term
    if isinstance(source, Constant) and source.dtype is None:
        return value
    return np.empty((0,) * rank, _for_numpy(source.dtype))


_OF_BITS = {np.bitwise_and, np.bitwise_or, np.bitwise_xor}


def _typed(
    ufunc: Any, terms: Tuple[Term, ...], inputs: Tuple[Any, ...], options: Dict[str, Any]
) -> Tuple[Tuple[Term, ...], "Optional[np.dtype[Any]]"]:
    """Returns the operands, converted to the type in which a ufunc with dtype= computes, and the
    result type. NumPy itself determines both types, from arrays without elements. Raises TypeError
    if NumPy's ufunc does not compute in this type."""
    dtype = options.get("dtype")
    wanted = None if dtype is None else _dtypes.dtype_of(dtype)
    rank = 2 if ufunc is np.matmul else 1
    asked = [_stand_in(term, value, rank) for term, value in zip(terms, inputs)]
    given = {**options, **({} if wanted is None else {"dtype": _for_numpy(wanted)})}
    with np.errstate(all="ignore"):
        found = ufunc(*asked, **given)
    made = (found[0] if isinstance(found, tuple) else found).dtype
    if wanted is not None and made != _for_numpy(wanted):
        wanted = made
    if wanted is None or wanted.kind == "b" and ufunc not in _OF_BITS:
        return terms, wanted
    return tuple(e.converted(term, wanted) for term in terms), wanted


def ufunc(ufunc: Any, method: str, inputs: Tuple[Any, ...], options: Dict[str, Any]) -> Any:
    """Implements __array_ufunc__."""
    name = f"np.{ufunc.__name__}" + ("" if method == "__call__" else f".{method}")
    array = _first(inputs)
    given = {key: value for key, value in options.items() if value is not _NO_VALUE}
    if method in ("reduce", "accumulate") and ufunc in REDUCTIONS:
        return _folded(ufunc, method, name, inputs[0], given)
    call = UFUNCS.get(ufunc) or PAIRS.get(ufunc)
    if method != "__call__" or call is None:
        first = f"{_INSTEAD_OF[ufunc.__name__]}, or " if ufunc.__name__ in _INSTEAD_OF else ""
        if method == "outer":
            first = "broadcast the operands, as in f(a[:, None], b), or "
        raise Unsupported(f"the server does not compute {name}: {first}{_WAY_OUT}")
    types = {key: given.pop(key) for key in ("dtype", "casting") if key in given}
    axis = {key: given.pop(key) for key in ("axis",)
            if key in given and ufunc.signature is not None}
    for key, value in given.items():
        _refused(name, key, value)
    if axis and "axis" not in _names(call):
        _refused(name, "axis", axis["axis"])
    terms = _operands(array, inputs, name)
    if terms is None:
        return NotImplemented
    dtype = None
    if types:
        terms, dtype = _typed(ufunc, terms, inputs, types)
    made = call(*terms, **axis)
    several = made if ufunc in PAIRS else (made,)
    found = tuple(array._make(one if dtype is None else e.converted(one, dtype)) for one in several)
    return found if ufunc in PAIRS else found[0]


def _folded(ufunc: Any, method: str, name: str, array: Any, given: Dict[str, Any]) -> Any:
    """Implements ufunc.reduce and ufunc.accumulate."""
    scans = method == "accumulate"
    given = {"axis": 0 if scans or array.ndim else None, **given}
    known = ("axis", "dtype") if scans else ("axis", "dtype", "keepdims", "initial", "where")
    for key in [key for key in given if key not in known]:
        _refused(name, key, given.pop(key))
    fold, dtype = REDUCTIONS[ufunc], given.pop("dtype", None)
    logical = fold in ("all", "any")
    if logical and dtype is not None and np.dtype(dtype) != np.dtype(bool):
        raise TypeError(f"{name} returns booleans, not {dtype}")
    if scans:
        axes = _ops.axes_of(given["axis"], array.ndim)
        if len(axes) != 1:
            raise ValueError(f"{name} takes one axis, not {len(axes)}")
        op = "product" if fold == "prod" else fold
        return array._scan(op, axes[0], None if logical else dtype)
    if not logical:
        return getattr(array._typed(dtype), fold)(**given)._typed(dtype)
    initial = given.pop("initial", None)
    found = getattr(array, fold)(**given)
    return found._from("and" if fold == "all" else "or", None if initial is None else bool(initial))


def function(function: Any, args: Tuple[Any, ...], options: Dict[str, Any]) -> Any:
    """Implements __array_function__."""
    module = getattr(function, "__module__", None) or "numpy"
    own = getattr(function, "__name__", str(function))
    name = f"{module.replace('numpy', 'np', 1)}.{own}"
    call = _functions.FUNCTIONS.get(function)
    if call is None:
        if function in _FROM_NOTHING:
            client = f"use the client's {own}(), or " if hasattr(Creation, own) else ""
            way = f"{client}pass NumPy's result to put()"
            raise Unsupported(f"{name} makes no array on the server: {way}")
        first = f"{_INSTEAD_OF[own]}, or " if own in _INSTEAD_OF else ""
        raise Unsupported(f"the server does not compute {name}: {first}{_WAY_OUT}")
    taken = _signature(function)
    names = _names(call)
    given = {}
    for key, value in _bound(function, args, options).items():
        key = key if key in names else _SAME.get(key, key)
        if key in given:
            raise ValueError(f"{name} takes {key}= only once")
        if key in names:
            given[key] = value
        else:
            _refused(name, key, value)
    if taken.rest is not None:
        for key in taken.positional[: len(args)]:
            given.pop(key, None)
        return call(*args, **given)
    if function not in _functions.OF_TYPES:
        first = next(iter(_signature(function).defaults))
        first = first if first in names else _SAME.get(first, first)
        if first in given and not hasattr(given[first], "_session"):
            array = _first((*args, *options.values()))
            given[first] = array._lifted(given[first], name)
    return call(**given)
