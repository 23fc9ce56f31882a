"""What is done when nobody waits for it: buffers that nobody refers to any more are deleted.

A thread of the process does it, which sleeps until something is to be done. Whoever has something
may be in the middle of a collection of garbage, where no lock may be taken: `later` takes none.
"""

import atexit
import functools
import queue
import threading
import weakref
from typing import Any, Callable, Optional

_jobs: "queue.SimpleQueue[Optional[Callable[[], Any]]]" = queue.SimpleQueue()
_lock = threading.Lock()
_thread: Optional[threading.Thread] = None
# Seconds that the end of the process waits for what is being done.
_PATIENCE_S = 2.0

later = _jobs.put


def begin() -> None:
    """The thread runs from now on, if the system has one more."""
    global _thread
    with _lock:
        if _thread is None:
            thread = threading.Thread(target=_work, name="tessera-sweep", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return  # The client's next call deletes them.
            _thread = thread
            # Whatever was registered before, as the end of clients, comes after it.
            atexit.register(_end)


def waker(core: Any, io: Any) -> Callable[[], None]:
    """What has the dead of a blocking client deleted. It does not keep the client alive."""
    of_core, of_io = weakref.ref(core), weakref.ref(io)

    def wake() -> None:
        mine, ours = of_core(), of_io()
        if mine is not None and ours is not None:
            later(functools.partial(_flush, mine, ours))

    return wake


def _flush(core: Any, io: Any) -> None:
    io.forget(core.take_dead())


def _work() -> None:
    while True:
        job = _jobs.get()
        if job is None:
            return
        try:
            job()
        except Exception:
            pass  # Buffers end by themselves.
        del job  # It may be all that refers to a client.


def _end() -> None:
    _jobs.put(None)
    if _thread is not None:
        _thread.join(_PATIENCE_S)
