"""Names that go together."""

from typing import TYPE_CHECKING, Any, List, Optional

from .wire._connect import Ttl
from .wire._errors import Error

if TYPE_CHECKING:
    from ._client import Array, Client, Expr


class Scope:
    """Names that go together: `with t.scope(ttl="10m") as s:` deletes what s.put and s.save made
    at its end, and the server does after the ttl, should this process not live to see it."""

    def __init__(self, client: "Client", ttl: Ttl) -> None:
        self._client = client
        self._ttl = ttl
        self._arrays: List["Array"] = []

    def put(self, array: Any, name: Optional[str] = None, **options: Any) -> "Array":
        """As Client.put, with the scope's ttl unless another is given."""
        options.setdefault("ttl", self._ttl)
        return self._own(self._client.put(array, name, **options))

    def save(
        self, expression: "Expr", name: Optional[str] = None, replace: bool = False
    ) -> "Array":
        """As Expr.save, with the scope's ttl."""
        return self._own(expression.save(name, replace, self._ttl))

    def _own(self, array: "Array") -> "Array":
        self._arrays.append(array)
        return array

    def __enter__(self) -> "Scope":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        arrays, self._arrays = self._arrays, []
        try:
            for array in arrays:
                try:
                    array.delete()
                except LookupError:
                    pass  # Expired, deleted or replaced meanwhile.
                array._source.dead = None
        except Error:
            # An exception of the block is not hidden by that of a server that is gone.
            if kind is None:
                raise
