"""Dask arrays whose chunks stay on Tessera servers, one next to each worker. Needs dask, and
distributed for workers on several hosts.

    import dask.array as da, distributed, tessera.dask

    cluster = distributed.Client(...)
    cluster.register_worker_plugin(tessera.dask.Servers(["gpu-0:50051", "gpu-1:50051"]))
    x = tessera.dask.put(da.random.random((10**6, 1000), chunks=(10**5, 1000))).persist()
    total = (x @ x[0]).sum().compute()

Tasks compute on the server of their worker. Workers exchange only handles; a server fetches a chunk
that it lacks from the server that has it. Both servers have to allow this (--import-from).

A sum over several chunks adds the sums of the chunks, as Dask does, so its last bits depend on the
chunks.
"""

import dask.array as _da
import dask.array.dispatch as _dispatch
import dask.sizeof as _sizeof

from . import _joined
from ._arrays import from_buffers, numpy, put
from ._chunk import Chunk
from ._joined import Joined
from ._servers import Servers, use

for _kind in (Chunk, Joined):
    _dispatch.concatenate_lookup.register(_kind, _joined.concatenate)
    _dispatch.tensordot_lookup.register(_kind, _joined.tensordot)
    _dispatch.numel_lookup.register(_kind, _joined.numel)
    _dispatch.divide_lookup.register(_kind, _joined.divide)
    _sizeof.sizeof.register(_kind, lambda x: 256 + x.nbytes)
    _da.register_chunk_type(_kind)

__all__ = [
    "Chunk",
    "Joined",
    "Servers",
    "from_buffers",
    "numpy",
    "put",
    "use",
]
