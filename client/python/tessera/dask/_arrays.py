"""Dask arrays whose chunks are on servers."""

from typing import Any, Sequence, Tuple

import dask.array as da
import dask.base
import numpy as np

from ..graph import _dtypes
from ..wire._errors import VersionMismatch
from . import _servers
from ._chunk import Chunk
from ._joined import numpy_of


def _put_one(x: Any) -> Any:
    if isinstance(x, Chunk):
        return x
    return Chunk(_servers.own().put(x) if x.size else x, _servers.own_address())


def put(x: Any) -> Any:
    """Returns a Dask array whose chunks are copies of the chunks of x, on the servers of the
    workers that compute them. A NumPy array becomes one chunk."""
    x = x if isinstance(x, da.Array) else da.from_array(x, chunks=-1)
    meta = Chunk(np.empty((0,) * x.ndim, _dtypes.dtype_of(x.dtype)))
    return x.map_blocks(_put_one, meta=meta)


def numpy(x: Any) -> Any:
    """Returns a Dask array whose chunks are the chunks of x as NumPy arrays on the workers.
    compute() then returns them to the caller."""
    meta = np.empty((0,) * x.ndim, x.dtype)
    return x.map_blocks(_numpy_one, x.dtype == np.uint64, dtype=x.dtype, meta=meta)


def _numpy_one(x: Any, unsigned: bool) -> Any:
    # The servers compute NumPy's unsigned sums as int64.
    return numpy_of(x).astype(np.uint64, copy=False) if unsigned else numpy_of(x)


def from_buffers(buffers: Sequence[Tuple[str, str]], axis: int = 0) -> Any:
    """Returns a Dask array of READY buffers, each given as (address, name), concatenated along an
    axis. A worker's server fetches buffers that it does not have. Raises BufferNotFound."""
    found = [_servers.client_of(address)[name] for address, name in buffers]
    arrays = []
    for (address, name), array in zip(buffers, found):
        key = f"buffer-{dask.base.tokenize(address, name, array.version)}"
        graph = {(key, *([0] * array.ndim)): (_open, address, name, array.version)}
        chunks = tuple((extent,) for extent in array.shape)
        meta = Chunk(np.empty((0,) * array.ndim, array.dtype))
        arrays.append(da.Array(graph, key, chunks, meta=meta))
    return da.concatenate(arrays, axis)


def _open(address: str, name: str, version: int) -> Chunk:
    if _servers.own_address() in ("", address):
        array = _servers.client_of(address)[name]
        if array.version != version:
            raise VersionMismatch(
                f"{name} on {address} has been replaced since the Dask array was made"
            )
        return Chunk(array, address)
    return Chunk(_servers.own().import_from(address, name, version=version), _servers.own_address())
