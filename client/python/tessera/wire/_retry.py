"""Decides which failures are retried, by the rules of the C++ client. No I/O."""

import random
import time
from typing import Optional

from ._connect import Options
from ._errors import BadChecksum, ConnectionLost, Draining, Error

MAX_FAILURES = 5
LONGEST_DELAY_S = 10.0


class Retry:
    """Decides which failures are retried. The server refuses a call with a RetryInfo when it lacks
    capacity. It has done nothing then, so the call is retried until `patience` seconds have passed.
    A broken connection is retried only for calls that may run twice, up to MAX_FAILURES times in a
    row."""

    def __init__(
        self,
        options: Options,
        idempotent: bool,
        patience: float,
        since: Optional[float] = None,
    ) -> None:
        """since: when the patience period started, as a time.monotonic() value; None means now."""
        self._options = options
        self._idempotent = idempotent
        self._patience = patience
        self._since = time.monotonic() if since is None else since
        self._failures = 0

    def left(self) -> float:
        """Returns how many of the `patience` seconds are left."""
        return self._patience - (time.monotonic() - self._since)

    def moved(self) -> None:
        """Restarts the patience period."""
        self._since = time.monotonic()

    def progress(self) -> None:
        """Restarts the patience period, and forgets earlier failures."""
        self._failures = 0
        self.moved()

    def pause(self, error: Error) -> Optional[float]:
        """Returns the seconds to wait before the next attempt, or None if the failure is final."""
        self._failures += 1
        pause = min(0.1 * 2 ** min(self._failures - 1, 10), 2.0) * random.uniform(0.5, 1)
        if error.code == "RESOURCE_EXHAUSTED" and error.retry_after is not None:
            if not self._options.retry_refused:
                return None
            pause = max(pause, min(error.retry_after, LONGEST_DELAY_S) * random.uniform(1, 1.25))
        else:
            # A server that is stopping has done nothing, and a server that got damaged bytes has
            # dropped them.
            safe = self._idempotent or isinstance(error, (Draining, BadChecksum))
            transient = isinstance(error, (ConnectionLost, Draining, BadChecksum))
            if not (safe and transient) or self._failures >= MAX_FAILURES:
                return None
        return None if pause >= self.left() else pause
