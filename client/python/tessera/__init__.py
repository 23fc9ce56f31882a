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

from . import _names, aio  # noqa: E402
from ._client import Array, Client, Expr, Scope, connect
from ._names import *  # noqa: F403
from ._ring import Ring

__version__ = "0.1.0"
__all__ = ["Array", "Client", "Expr", "Ring", "Scope", "aio", "connect", *_names.__all__]
