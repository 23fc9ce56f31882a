"""What NumPy's functions do with arrays of the server: np.add, np.sum... for what it computes.

The rest is Unsupported, never a download.
"""

from typing import Any, Dict, Iterable, Tuple

import numpy as np

from . import _functions
from ._errors import Unsupported
from ._ufuncs import PAIRS, REDUCTIONS, UFUNCS

_WAY_OUT = "bring the operands to the host with .numpy()"
_OF_ORDER = {np.sort, np.argsort, np.partition, np.argpartition}


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
        first = "the largest or smallest are ts.topk, or " if function in _OF_ORDER else ""
        raise Unsupported(f"the server does not compute {name}: {first}{_WAY_OUT}")
    folds = function in _functions.REDUCTIONS
    return _functions.FUNCTIONS[function](*args, **_given(options, name, folds))
