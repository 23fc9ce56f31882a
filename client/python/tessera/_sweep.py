"""Deletes buffers without references, in the background.

One thread of the process does this, and sleeps while there is nothing to do. Callers of `later` may
be in the middle of a garbage collection, where no lock may be taken, so `later` takes none.
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
# How many seconds an ending process waits for the running job.
_PATIENCE_S = 2.0

later = _jobs.put


def begin() -> None:
    """Starts the thread, unless it is already running or the system allows no further thread."""
    global _thread
    with _lock:
        if _thread is None:
            thread = threading.Thread(target=_work, name="tessera-sweep", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return  # The client's next call deletes the buffers.
            _thread = thread
            # Functions that were registered earlier, such as those that close clients, run after
            # this one.
            atexit.register(_end)


def waker(core: Any, io: Any) -> Callable[[], None]:
    """Returns a function that makes the background thread delete the dead buffers of a blocking
    client. The function does not keep the client alive."""
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
            pass  # The buffers expire.
        del job  # It may hold the last reference to a client.


def _end() -> None:
    _jobs.put(None)
    if _thread is not None:
        _thread.join(_PATIENCE_S)
