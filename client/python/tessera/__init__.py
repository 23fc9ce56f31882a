"""NumPy's interface for arrays that stay in GPU memory on a Tessera server.

    import tessera as ts

    with ts.connect("gpu:50051") as t:
        x = t.put(array, name="x")
        nearest = (x @ x[0] + 1).argmax().numpy()   # one call; only the index travels

ts.aio has the asyncio versions of connect() and of what it returns.
"""

import pkgutil

# The code that protoc generates from the protocol is in tessera/v1, in another folder of sys.path.
__path__ = pkgutil.extend_path(__path__, __name__)

from . import aio  # noqa: E402
from ._client import Array, Client, Expr, Scope, connect
from ._ring import Ring
from .arrays._functions import (
    argsort,
    fma,
    matmul,
    norm,
    scan,
    sort,
    sum_by_label,
    sum_squares,
    topk,
    vecdot,
    window_sum,
)
from .graph._dtypes import bfloat16
from .graph._plan import Stats
from .wire import _errors  # noqa: E402
from .wire._errors import *  # noqa: F403  (every class of _errors, by its name)
from .wire._errors import Error

__version__ = "0.1.0"
__all__ = [
    "Array",
    "Client",
    "Expr",
    "Ring",
    "Scope",
    "Stats",
    "aio",
    "argsort",
    "bfloat16",
    "connect",
    "fma",
    "matmul",
    "norm",
    "scan",
    "sort",
    "sum_by_label",
    "sum_squares",
    "topk",
    "vecdot",
    "window_sum",
    *_errors.__all__,
]
