"""What NumPy's functions do with arrays of the server: np.add, np.sum... for what it computes.

The rest is Unsupported, never a download.
"""

import functools
from typing import Any, Dict, Iterable, Tuple

import numpy as np

from . import _functions
from ._errors import NoAttribute, Unsupported
from ._ufuncs import PAIRS, REDUCTIONS, UFUNCS

_WAY_OUT = "bring the operands to the host with .numpy()"
_LARGEST = "the largest or smallest are ts.topk"
_OF_ORDER = {np.sort, np.argsort, np.partition, np.argpartition}


# What NumPy's arrays have, and what to do instead here; of what is not listed: .numpy().
_INSTEAD = {
    **dict.fromkeys(("sort", "argsort", "partition", "argpartition"), _LARGEST),
    **dict.fromkeys(
        ("fill", "put", "itemset", "setfield", "resize", "setflags", "byteswap"),
        "arrays are immutable: put() a new one with replace=True",
    ),
    **dict.fromkeys(("take", "choose", "compress"), "rows that follow each other are views, x[2:5]"),
    "view": ".astype() converts",
    "flat": ".ravel()",
    "nonzero": "how many they are says np.count_nonzero(x)",
}
# What makes arrays of no others; with like= it comes here.
_FROM_NOTHING = {
    getattr(np, name)
    for name in "arange array asanyarray asarray empty eye full identity linspace ones zeros".split()
}
_OF_ARRAYS = {"name", "version", "device", "devices", "link", "delete"}


def attribute(array: Any, name: str) -> Any:
    """__getattr__: of what NumPy's arrays have and those of the server have not. Its function where
    the server computes that; NoAttribute, an AttributeError, with a way out otherwise."""
    kind = type(array).__name__
    if name in _OF_ARRAYS:
        raise NoAttribute(f"an {kind} has no {name} yet: .save() makes an array, which has")
    if name.startswith("_") or not hasattr(np.ndarray, name):
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")
    if name == "real":
        return array
    function: Any = getattr(np, name, None)
    if function in _functions.FUNCTIONS or function in UFUNCS:
        return functools.partial(function, array)
    instead = f"{_INSTEAD[name]}, or " if name in _INSTEAD else ""
    raise NoAttribute(
        f"arrays on a server have no {name}: {instead}use .numpy().{name} (in ts.aio: (await"
        f" x.numpy()).{name})"
    )


def arrays_in(values: Iterable[Any]) -> Any:
    """The first array of the server among arguments."""
    return next(value for value in values if hasattr(value, "_session"))


def _terms(array: Any, values: Iterable[Any], name: str) -> Any:
    terms = [array._other(value) for value in values]
    if any(term is None for term in terms):
        raise TypeError(f"{name} of arrays, numbers and NumPy's arrays alone")
    return terms


def _given(options: Dict[str, Any], name: str, folds: bool = False) -> Dict[str, Any]:
    """The options without those that say nothing; Unsupported for what no function here knows.
    folds: whether it is a reduction, which may have a mask and an initial value."""
    no_value = np._NoValue  # type: ignore[attr-defined]
    kept = {key: value for key, value in options.items() if value is not no_value}
    for key in ("out", "where", "casting", "order", "subok", "initial", "like", "mode"):
        value = kept.get(key)
        if key not in kept:
            continue
        if folds and (key == "initial" or key == "where" and value is not True):
            continue
        if value is None or value is True or (key, value) in (("casting", "same_kind"),):
            del kept[key]
        elif key == "out" and isinstance(value, tuple) and all(one is None for one in value):
            del kept[key]
        elif key == "order" and value in ("C", "K", "A"):
            del kept[key]
        else:
            raise Unsupported(f"{name} with {key}=: the server has no such thing; {_WAY_OUT}")
    return kept


def ufunc(ufunc: Any, method: str, inputs: Tuple[Any, ...], options: Dict[str, Any]) -> Any:
    """__array_ufunc__."""
    name = f"np.{ufunc.__name__}"
    array = arrays_in(inputs)
    given = _given(options, name, method == "reduce")
    if method == "__call__":
        dtype = given.pop("dtype", None)
        if ufunc in PAIRS and not given:
            return tuple(map(array._make, PAIRS[ufunc](*_terms(array, inputs, name))))
        if ufunc in UFUNCS:
            result = array._make(UFUNCS[ufunc](*_terms(array, inputs, name), **given))
            return result if dtype is None else result.astype(dtype)
    if method == "reduce" and ufunc in REDUCTIONS:
        given.setdefault("axis", 0)
        return _functions.reduction(REDUCTIONS[ufunc])(inputs[0], **given)
    suffix = "" if method == "__call__" else f".{method}"
    raise Unsupported(f"the server does not compute {name}{suffix}: {_WAY_OUT}")


def function(function: Any, args: Tuple[Any, ...], options: Dict[str, Any]) -> Any:
    """__array_function__."""
    module = getattr(function, "__module__", None) or "numpy"
    name = f"{module.replace('numpy', 'np', 1)}.{getattr(function, '__name__', function)}"
    if function not in _functions.FUNCTIONS:
        if function in _FROM_NOTHING:
            raise Unsupported(f"the server does not compute {name}: put() the result of NumPy's")
        first = f"{_LARGEST}, or " if function in _OF_ORDER else ""
        raise Unsupported(f"the server does not compute {name}: {first}{_WAY_OUT}")
    folds = function in _functions.REDUCTIONS
    return _functions.FUNCTIONS[function](*args, **_given(options, name, folds))
