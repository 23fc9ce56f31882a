"""Performs the commands of _core.py through channels of grpc, for the blocking client."""

import collections.abc
import queue
import threading
import time
from typing import Any, Dict, Iterable, List, Set

import grpc

from ._core import Call, Command, Create, Pause, Share, Steps
from .transfers._messages import Download, Patience, Several, Stream, Upload
from .transfers._shared import Transfer, share
from .wire._connect import (
    LAST_CALLS_S,
    PAUSE_S,
    PING,
    WHY_S,
    Options,
    answer_of,
    answered,
    calls_of,
    channel,
    check_process,
)
from .wire._errors import Error, Stalled, closed, from_rpc

# Marks a KeyboardInterrupt for which the channels need not be replaced.
_SETTLED = "_settled"


class _Messages(collections.abc.Iterator):  # type: ignore[type-arg]
    def __init__(self, upload: Upload) -> None:
        self._next = iter(upload).__next__

    def __next__(self) -> bytes:
        return self._next()


class Blocking:
    """The channels for any number of threads: one for all calls, and more for divided transfers.
    The first divided transfer creates the additional ones."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._retired: List[Any] = []
        self._connect()
        self._forgotten: Set[Any] = set()
        self._closed = False

    def _connect(self) -> None:
        self._channels = [channel(grpc, self._options)]
        self.calls = calls_of(self._channels[0])
        self._calls = [self.calls]

    def interrupted(self, interrupt: KeyboardInterrupt) -> None:
        """Replaces the channels after Ctrl-C, which may come just after a thread has taken a lock
        in gRPC's channel; that lock is then never released. The old channels are kept until the
        client is closed, because other threads may be using them."""
        if getattr(interrupt, _SETTLED, False):
            return
        setattr(interrupt, _SETTLED, True)
        with self._lock:
            if not self._closed:
                self._retired += self._channels
                self._connect()

    def close(self, patient: bool = False) -> None:
        """Closes the channels. If patient is true, first waits briefly for calls whose outcomes do
        not matter."""
        give_up = time.monotonic() + (LAST_CALLS_S if patient else 0)
        while self._forgotten and time.monotonic() < give_up:
            time.sleep(0.01)
        with self._lock:
            self._closed = True
        for made in self._channels:
            made.close()
        for made in self._retired:
            try:
                threading.Thread(target=made.close, daemon=True).start()
            except RuntimeError:
                return  # Python is shutting down and starts no more threads.

    def _calls_of(self, number: int) -> Dict[str, Any]:
        """Returns the stubs of connection `number`."""
        with self._lock:
            while len(self._calls) <= number and not self._closed:
                self._channels.append(channel(grpc, self._options))
                self._calls.append(calls_of(self._channels[-1]))
        return self._calls[min(number, len(self._calls) - 1)]

    def _failure(self, error: Exception) -> Exception:
        """Converts an error from grpc: an RpcError, or the ValueError of a closed channel. Returns
        any other ValueError unchanged."""
        if self._closed:
            return closed()
        return from_rpc(error) if isinstance(error, grpc.RpcError) else error

    def forget(self, calls: Iterable[Call]) -> None:
        """Sends calls whose outcomes do not matter."""
        for call in calls:
            try:
                begun = self._begun(call.method, call.request, call.timeout)
            except ValueError:
                return  # The client is closed: the buffers are being deleted, or will expire.
            # gRPC cancels a call that nothing refers to.
            self._forgotten.add(begun)
            begun.add_done_callback(self._forgotten.discard)

    def run(self, steps: Steps) -> Any:
        try:
            command = next(steps)
            while True:
                try:
                    answer = self.perform(command)
                except Exception as error:
                    command = steps.throw(error)
                else:
                    command = steps.send(answer)
        except StopIteration as stop:
            return stop.value
        finally:
            steps.close()

    def call(self, method: str, request: bytes, timeout: float) -> Any:
        """Returns the response of a unary method."""
        check_process()
        try:
            metadata = self._options.metadata()
            answer = self.calls[method](request, timeout=timeout, metadata=metadata)
        except (grpc.RpcError, ValueError) as error:
            raise self._failure(error) from None
        except KeyboardInterrupt as interrupt:
            self.interrupted(interrupt)
            raise
        return answer_of(method, answer)

    def perform(self, command: Command) -> Any:
        if type(command) is Call:
            return self.call(command.method, command.request, command.timeout)
        check_process()
        try:
            if isinstance(command, Create):
                return self._create(command)
            if isinstance(command, Upload):
                return self._upload(command)
            if isinstance(command, Download):
                return self._download(command)
            if isinstance(command, Several):
                return self._several(command)
            if isinstance(command, Transfer):
                return self._transfer(command)
            if isinstance(command, Share):
                return share(command.path, command.seconds)
            assert isinstance(command, Pause)
            time.sleep(command.seconds)
            return command.reconnect is None or self.ready(command.reconnect)
        except (grpc.RpcError, ValueError) as error:
            if isinstance(command, Upload) and command.failure is not None:
                raise command.failure from None
            raise self._failure(error) from None

    def _create(self, create: Create) -> Any:
        """Runs the command in a separate thread, which completes it even if Ctrl-C has ended the
        wait for it."""
        outcome: "queue.SimpleQueue[Any]" = queue.SimpleQueue()

        def work() -> None:
            answer = failure = None
            try:
                answer = self.perform(create.command)
            except BaseException as error:
                failure = error.with_traceback(None)
            self.forget(create.ended(answer))
            outcome.put((answer, failure))

        try:
            threading.Thread(target=work, daemon=True).start()
            answer, failure = outcome.get()
        except RuntimeError:  # No thread was started.
            self.forget(create.ended(None))
            raise
        except KeyboardInterrupt as interrupt:
            setattr(interrupt, _SETTLED, True)  # Only the other thread runs gRPC code.
            raise
        if failure is None:
            return answer
        try:
            raise failure
        finally:
            del failure

    def ready(self, seconds: float) -> bool:
        """Returns whether a server answers within this number of seconds."""
        end = time.monotonic() + seconds
        metadata = self._options.metadata()
        while (left := end - time.monotonic()) > 0 and not self._closed:
            try:
                self.calls[PING](b"", timeout=left, metadata=metadata, wait_for_ready=True)
                return True
            except grpc.RpcError as error:
                found = answered(error)
                if found is not None:
                    return found
            except ValueError:
                return False  # The client was closed in the meantime.
            time.sleep(min(PAUSE_S, seconds))
        return False

    def why(self) -> str:
        """Returns what gRPC reports for a call that no server answers."""
        try:
            self.calls[PING](b"", timeout=WHY_S, metadata=self._options.metadata())
        except grpc.RpcError as error:
            return str(error.details())
        return "the server answered only after connect_timeout"

    def _stalled(self) -> Stalled:
        return Stalled(
            f"the transfer made no progress for {self._options.stall_timeout} s",
            "DEADLINE_EXCEEDED",
        )

    def _upload(self, upload: Upload) -> Any:
        future = self._calls_of(upload.connection)["Upload"].future(
            _Messages(upload), metadata=self._options.metadata()
        )
        upload.begun(future)
        patience = Patience(upload.tally, self._options.stall_timeout)
        while True:
            try:
                return answer_of("Upload", future.result(timeout=patience.step))
            except grpc.FutureTimeoutError:
                if patience.over():
                    upload.stop()
                    raise self._stalled() from None
            except BaseException:
                upload.stop()
                raise

    def _several(self, several: Several) -> None:
        """Starts a thread for each stream. The calling thread only reports progress, and can be
        interrupted."""
        events: "queue.SimpleQueue[Any]" = queue.SimpleQueue()

        def move(stream: Stream) -> None:
            try:
                self.perform(stream)  # type: ignore[arg-type]
                events.put((stream, None))
            except BaseException as error:
                # The traceback is dropped, because its frames would keep arrays alive as long as
                # the exception.
                events.put((stream, error.with_traceback(None)))

        tally = several.tally
        threads = [
            threading.Thread(target=move, args=(stream,), daemon=True) for stream in several.streams
        ]
        begun: List[threading.Thread] = []
        try:
            if tally.report is not None:
                tally.tell = lambda done: events.put((None, done))
            for thread in threads:
                thread.start()
                begun.append(thread)
            running = len(threads)
            failure = None
            while running and not several.over(failure):
                stream, outcome = events.get()
                if stream is None:
                    tally.report(outcome)
                    continue
                running -= 1
                if failure is None or several.over(outcome):
                    failure = outcome
            if failure is not None:
                try:
                    raise failure
                finally:
                    del failure, outcome
        except KeyboardInterrupt as interrupt:
            setattr(interrupt, _SETTLED, True)  # Only other threads run gRPC code.
            raise
        finally:
            several.stop()
            # Nothing is read from or written to the caller's array from here on.
            for thread in begun:
                thread.join()

    def _transfer(self, transfer: Transfer) -> None:
        timeout = self._options.stall_timeout
        waiting: List[Any] = []
        try:
            while True:
                request = transfer.begin()
                if request is not None:
                    waiting.append(self._begun(transfer.method, request, timeout))
                elif waiting:
                    transfer.finish(answer_of(transfer.method, waiting[0].result()))
                    waiting.pop(0)
                    transfer.tell()
                else:
                    return
        finally:
            for call in waiting:
                call.cancel()

    def _begun(self, method: str, request: bytes, timeout: float) -> Any:
        return self.calls[method].future(
            request, timeout=timeout, metadata=self._options.metadata()
        )

    def _download(self, download: Download) -> None:
        call = self._calls_of(download.connection)["Download"](
            download.request(), metadata=self._options.metadata()
        )
        download.begun(call)
        guard = _Guard(download, self._options.stall_timeout)
        try:
            for message in call:
                download.take(message)
        except grpc.RpcError:
            if guard.stalled:
                raise self._stalled() from None
            raise
        except BaseException:
            download.stop()
            raise
        finally:
            guard.end()
        if download.done < download.size:
            raise Error("the server sent too few bytes", "DATA_LOSS")


class _Guard:
    """Cancels a download that makes no progress for this number of seconds."""

    def __init__(self, download: Download, seconds: float) -> None:
        self.stalled = False
        # Ctrl-C can leave the lock of an Event taken, but not the lock of this queue.
        self._end: "queue.SimpleQueue[None]" = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, args=(download, seconds), daemon=True)
        self._thread.start()

    def _watch(self, download: Download, seconds: float) -> None:
        patience = Patience(download.tally, seconds)
        while True:
            try:
                return self._end.get(timeout=patience.step)
            except queue.Empty:
                if patience.over():
                    self.stalled = True
                    return download.stop()

    def end(self) -> None:
        self._end.put(None)
        self._thread.join()
