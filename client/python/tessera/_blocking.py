"""What the blocking client sends, and how: a channel of grpc that performs commands of _core.py."""

import collections.abc
import threading
import time
from typing import Any, List, Set

import grpc

from ._connect import PAUSE_S, PING, Options, answered, calls_of, channel
from ._core import Call, Command, Pause, Share, Steps
from ._errors import Error, Stalled, from_rpc
from ._shared import Transfer, share
from ._wire import Download, Upload


class _Messages(collections.abc.Iterator):  # type: ignore[type-arg]
    def __init__(self, upload: Upload) -> None:
        self._next = iter(upload).__next__

    def __next__(self) -> bytes:
        return self._next()


class Blocking:
    """A channel, for any number of threads."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._channel = channel(grpc, options)
        self.calls = calls_of(self._channel)
        self._forgotten: Set[Any] = set()
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._channel.close()

    def _failure(self, error: Exception) -> Exception:
        """What an error of grpc means: an RpcError, or the ValueError of a channel that was closed.
        Any other ValueError is itself."""
        if self._closed:
            return Error("the client is closed", "CANCELLED", "CLOSED")
        return from_rpc(error) if isinstance(error, grpc.RpcError) else error

    def forget(self, calls: List[Call]) -> None:
        """Sends calls whose outcomes do not matter."""
        for call in calls:
            try:
                begun = self._begun(call.method, call.request, call.timeout)
            except ValueError:
                return  # Closed: they are deleted, or will be at the end of their lifetime.
            # A call that nobody refers to is cancelled.
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
        """The answer of a unary method."""
        try:
            return self.calls[method](
                request, timeout=timeout, metadata=self._options.metadata()
            )
        except (grpc.RpcError, ValueError) as error:
            raise self._failure(error) from None

    def perform(self, command: Command) -> Any:
        if type(command) is Call:
            return self.call(command.method, command.request, command.timeout)
        try:
            if isinstance(command, Upload):
                return self._upload(command)
            if isinstance(command, Download):
                return self._download(command)
            if isinstance(command, Transfer):
                return self._transfer(command)
            if isinstance(command, Share):
                return share(command.path)
            assert isinstance(command, Pause)
            time.sleep(command.seconds)
            return command.reconnect is None or self.ready(command.reconnect)
        except (grpc.RpcError, ValueError) as error:
            if isinstance(command, Upload) and command.failure is not None:
                raise command.failure from None
            raise self._failure(error) from None

    def ready(self, seconds: float) -> bool:
        """Whether a server answers within so many seconds."""
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
                return False  # Closed meanwhile.
            time.sleep(min(PAUSE_S, seconds))
        return False

    def _stalled(self) -> Stalled:
        return Stalled(f"no progress for {self._options.stall_timeout} s", "DEADLINE_EXCEEDED")

    def _upload(self, upload: Upload) -> Any:
        future = self.calls["Upload"].future(
            _Messages(upload), metadata=self._options.metadata()
        )
        while True:
            sent = upload.sent
            try:
                return future.result(timeout=self._options.stall_timeout)
            except grpc.FutureTimeoutError:
                if upload.sent == sent:
                    future.cancel()
                    raise self._stalled() from None
            except BaseException:
                future.cancel()
                raise

    def _transfer(self, transfer: Transfer) -> None:
        timeout = self._options.stall_timeout
        waiting: List[Any] = []
        try:
            while True:
                request = transfer.begin()
                if request is not None:
                    waiting.append(self._begun(transfer.method, request, timeout))
                elif waiting:
                    transfer.finish(waiting[0].result())
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
        call = self.calls["Download"](download.request(), metadata=self._options.metadata())
        guard = _Guard(call, download, self._options.stall_timeout)
        try:
            for message in call:
                download.take(message)
        except grpc.RpcError:
            if guard.stalled:
                raise self._stalled() from None
            raise
        except BaseException:
            call.cancel()
            raise
        finally:
            guard.end()
        if download.done < download.size:
            raise Error("the server sent too few bytes", "DATA_LOSS")


class _Guard:
    """Cancels a download that stands still; small ones have a deadline's worth of patience too."""

    def __init__(self, call: Any, download: Download, seconds: float) -> None:
        self.stalled = False
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(call, download, seconds), daemon=True
        )
        self._thread.start()

    def _watch(self, call: Any, download: Download, seconds: float) -> None:
        done = -1
        while not self._end.wait(seconds):
            if download.done == done or done == -1 and download.done == 0:
                self.stalled = True
                call.cancel()
                return
            done = download.done

    def end(self) -> None:
        self._end.set()
        self._thread.join()
