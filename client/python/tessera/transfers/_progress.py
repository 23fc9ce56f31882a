"""A progress bar on the terminal for long transfers."""

import functools
import sys
import time
from typing import Any, Callable, Optional, Union

from ..wire._errors import Error

Progress = Union[None, bool, Callable[[int, int], None]]


class CallersError(Exception):
    """Holds an Error that a progress function of the caller raised. The transfer must not handle it
    like its own errors, some of which it retries."""


def raises_callers_errors(steps: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a transfer end with the Error that a progress function raised."""

    @functools.wraps(steps)
    def transfer(*args: Any, **options: Any) -> Any:
        try:
            return (yield from steps(*args, **options))
        except CallersError as raised:
            raise raised.args[0] from None

    return transfer


def reporter(progress: Progress, total: int, title: str) -> Optional[Callable[[int], None]]:
    """Returns a function to call with the bytes done so far, or None if no progress is reported. If
    progress is True, the function draws a bar on stderr, provided that stderr is a terminal or a
    notebook and the transfer takes more than a second. If progress is a function, it is called with
    the bytes done and the total. The bytes done never decrease, although a broken stream sends some
    bytes again."""
    if not progress:
        return None
    if progress is not True:
        call: Any = progress
        most = 0

        def tell(done: int) -> None:
            nonlocal most
            most = max(most, done)
            try:
                call(most, total)
            except Error as error:
                raise CallersError(error) from error

        return tell
    if not sys.stderr.isatty() and "ipykernel" not in sys.modules:  # A notebook draws a bar too.
        return None
    begin = time.monotonic()

    def show(done: int) -> None:
        seconds = time.monotonic() - begin
        if seconds < 1:
            return
        filled = 30 * done // max(total, 1)
        end = "\n" if done >= total else ""
        sys.stderr.write(
            f"\r{title} [{'#' * filled}{'.' * (30 - filled)}] {done / 1e6:.0f} of"
            f" {total / 1e6:.0f} MB, {done / seconds / 1e6:.0f} MB/s{end}"
        )
        sys.stderr.flush()

    return show
