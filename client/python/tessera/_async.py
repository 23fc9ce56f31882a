"""Performs the commands of _core.py through channels of grpc.aio, for the asyncio client."""

import asyncio
import time
from typing import Any, AsyncIterator, Dict, Iterable, List, Set

import grpc

from ._core import Call, Command, Create, Pause, Share, Steps
from .transfers._messages import Download, Patience, Several, Upload
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


_FAILURES = grpc.RpcError, grpc.aio.UsageError, asyncio.CancelledError


class Async:
    """The channels of one event loop: one for all calls, and more for divided transfers. The first
    divided transfer creates the additional ones."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._channels = [channel(grpc.aio, options)]
        self._loop = asyncio.get_running_loop()
        self._tasks: Set[Any] = set()
        self._closed = False
        self.calls = calls_of(self._channels[0])
        self._calls = [self.calls]

    async def close(self, patient: bool = False) -> None:
        """Closes the channels. If patient is true, first waits briefly for calls whose outcomes do
        not matter."""
        if patient and self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_CALLS_S)
        self._closed = True
        for made in self._channels:
            await made.close()

    def _calls_of(self, number: int) -> Dict[str, Any]:
        """Returns the stubs of connection `number`."""
        while len(self._calls) <= number and not self._closed:
            self._channels.append(channel(grpc.aio, self._options))
            self._calls.append(calls_of(self._channels[-1]))
        return self._calls[min(number, len(self._calls) - 1)]

    def _failure(self, error: BaseException) -> BaseException:
        """Converts an error of grpc.aio to the one that the caller gets. A closed channel cancels
        its calls and refuses further ones with a UsageError."""
        task: Any = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and getattr(task, "cancelling", int)():
            return error
        if self._closed:
            return closed()
        return from_rpc(error) if isinstance(error, grpc.RpcError) else error

    def forget(self, calls: Iterable[Call]) -> None:
        """Sends calls whose outcomes do not matter."""
        for call in calls:
            self._in_background(self._forget(call))

    async def ready(self, seconds: float) -> bool:
        """Returns whether a server answers within this number of seconds."""
        end = time.monotonic() + seconds
        metadata = self._options.metadata()
        while (left := end - time.monotonic()) > 0 and not self._closed:
            try:
                await self.calls[PING](b"", timeout=left, metadata=metadata, wait_for_ready=True)
                return True
            except grpc.RpcError as error:
                found = answered(error)
                if found is not None:
                    return found
            except grpc.aio.UsageError:
                return False  # The client was closed in the meantime.
            await asyncio.sleep(min(PAUSE_S, seconds))
        return False

    async def why(self) -> str:
        """Returns what gRPC reports for a call that no server answers."""
        try:
            await self.calls[PING](b"", timeout=WHY_S, metadata=self._options.metadata())
        except grpc.RpcError as error:
            return str(error.details())
        return "the server answered only after connect_timeout"

    async def _forget(self, call: Call) -> None:
        try:
            await self.perform(call)
        except Error:
            pass

    def _check_loop(self) -> None:
        check_process()
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("a client of ts.aio belongs to the event loop in which it was made")

    async def run(self, steps: Steps) -> Any:
        self._check_loop()
        try:
            command = next(steps)
            while True:
                try:
                    answer = await self.perform(command)
                except Exception as error:
                    command = steps.throw(error)
                else:
                    command = steps.send(answer)
        except StopIteration as stop:
            return stop.value
        finally:
            steps.close()

    async def call(self, method: str, request: bytes, timeout: float) -> Any:
        """Returns the response of a unary method."""
        self._check_loop()
        try:
            metadata = self._options.metadata()
            answer = await self.calls[method](request, timeout=timeout, metadata=metadata)
        except _FAILURES as error:
            raise self._failure(error) from None
        return answer_of(method, answer)

    def _in_background(self, work: Any) -> Any:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _create(self, create: Create) -> Any:
        answer = None
        try:
            answer = await self.perform(create.command)
            return answer
        finally:
            self.forget(create.ended(answer))

    async def perform(self, command: Command) -> Any:
        if type(command) is Call:
            return await self.call(command.method, command.request, command.timeout)
        try:
            if isinstance(command, Create):
                task = self._in_background(self._create(command))
                # If the caller is cancelled, nothing else looks at the task's error.
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
                return await asyncio.shield(task)
            if isinstance(command, Upload):
                return await self._upload(command)
            if isinstance(command, Download):
                return await self._download(command)
            if isinstance(command, Several):
                return await self._several(command)
            if isinstance(command, Transfer):
                return await self._transfer(command)
            if isinstance(command, Share):
                return await self._share(command)
            assert isinstance(command, Pause)
            await asyncio.sleep(command.seconds)
            return command.reconnect is None or await self.ready(command.reconnect)
        except _FAILURES as error:
            if isinstance(command, Upload) and command.failure is not None:
                raise command.failure from None
            raise self._failure(error) from None

    async def _share(self, command: Share) -> Any:
        loop = asyncio.get_running_loop()
        made = loop.run_in_executor(None, share, command.path, command.seconds)

        def close(made: "asyncio.Future[Any]") -> None:
            region = made.result()
            if region is not None:
                region.close()

        try:
            return await asyncio.shield(made)
        except asyncio.CancelledError:
            made.add_done_callback(close)
            raise

    def _stalled(self) -> Stalled:
        return Stalled(
            f"the transfer made no progress for {self._options.stall_timeout} s",
            "DEADLINE_EXCEEDED",
        )

    async def _upload(self, upload: Upload) -> Any:
        async def messages() -> AsyncIterator[bytes]:
            for message in upload:
                yield message

        calls = self._calls_of(upload.connection)
        call = calls["Upload"](messages(), metadata=self._options.metadata())
        answer = asyncio.ensure_future(_answer(call))
        patience = Patience(upload.tally, self._options.stall_timeout)
        try:
            while True:
                done, _ = await asyncio.wait({answer}, timeout=patience.step)
                if done:
                    return answer_of("Upload", answer.result())
                if patience.over():
                    raise self._stalled()
        finally:
            if not answer.done():
                call.cancel()
            _drop(answer)

    async def _several(self, several: Several) -> None:
        tasks = [asyncio.ensure_future(self.perform(stream)) for stream in several.streams]
        try:
            left = set(tasks)
            failure = None
            while left and not several.over(failure):
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    if failure is None or several.over(task.exception()):
                        failure = task.exception()
            if failure is not None:
                try:
                    raise failure
                finally:
                    del failure
        finally:
            for task in tasks:
                task.cancel()
            # Nothing is read from or written to the caller's array from here on.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _transfer(self, transfer: Transfer) -> None:
        loop = asyncio.get_running_loop()
        timeout = self._options.stall_timeout
        waiting: List[Any] = []
        try:
            while True:
                # Runs in another thread, because copying would delay other tasks.
                request = await loop.run_in_executor(None, transfer.begin)
                if request is not None:
                    call = self.calls[transfer.method]
                    metadata = self._options.metadata()
                    waiting.append(call(request, timeout=timeout, metadata=metadata))
                elif waiting:
                    answer = answer_of(transfer.method, await waiting[0])
                    await loop.run_in_executor(None, transfer.finish, answer)
                    waiting.pop(0)
                    transfer.tell()
                else:
                    return
        finally:
            for call in waiting:
                call.cancel()

    async def _download(self, download: Download) -> None:
        calls = self._calls_of(download.connection)
        call = calls["Download"](download.request(), metadata=self._options.metadata())
        read = None
        patience = Patience(download.tally, self._options.stall_timeout)
        try:
            while True:
                read = read or asyncio.ensure_future(call.read())
                done, _ = await asyncio.wait({read}, timeout=patience.step)
                if done:
                    message, read = read.result(), None
                    if message is grpc.aio.EOF:
                        break
                    download.take(message)
                elif patience.over():
                    raise self._stalled()
        finally:
            if not call.done():
                call.cancel()
            if read is not None:
                _drop(read)
        if download.done < download.size:
            raise Error("the server sent too few bytes", "DATA_LOSS")


async def _answer(call: Any) -> Any:
    return await call


def _drop(task: "asyncio.Future[Any]") -> None:
    """Ends a task whose outcome does not matter, even if it has already failed."""
    task.cancel()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
