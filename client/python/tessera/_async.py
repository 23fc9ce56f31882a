"""What the asyncio client sends, and how: a channel of grpc.aio performs commands of _core.py."""

import asyncio
from typing import Any, AsyncIterator, List, Set

import grpc

from ._connect import Options, calls_of, channel
from ._core import Call, Command, Pause, Share, Steps
from ._errors import Error, Stalled, from_rpc
from ._shared import Transfer, share
from ._wire import Download, Upload


def _closed() -> Error:
    return Error("the client is closed", "CANCELLED", "CLOSED")


class Async:
    """A channel of one event loop."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._channel = channel(grpc.aio, options)
        self._tasks: Set[Any] = set()
        self.calls = calls_of(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    def forget(self, calls: List[Call]) -> None:
        """Sends calls whose outcomes do not matter."""
        for call in calls:
            task = asyncio.ensure_future(self._forget(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def ready(self, seconds: float) -> bool:
        """Whether there is a connection within so many seconds."""
        try:
            await asyncio.wait_for(self._channel.channel_ready(), seconds)
            return True
        except asyncio.TimeoutError:
            return False

    async def _forget(self, call: Call) -> None:
        try:
            await self.perform(call)
        except Error:
            pass

    async def run(self, steps: Steps) -> Any:
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
        """The answer of a unary method."""
        try:
            return await self.calls[method](
                request, timeout=timeout, metadata=self._options.metadata()
            )
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        except grpc.aio.UsageError:
            raise _closed() from None

    async def perform(self, command: Command) -> Any:
        if type(command) is Call:
            return await self.call(command.method, command.request, command.timeout)
        try:
            if isinstance(command, Upload):
                return await self._upload(command)
            if isinstance(command, Download):
                return await self._download(command)
            if isinstance(command, Transfer):
                return await self._transfer(command)
        except grpc.RpcError as error:
            if isinstance(command, Upload) and command.failure is not None:
                raise command.failure from None
            raise from_rpc(error) from None
        except grpc.aio.UsageError:
            raise _closed() from None
        if isinstance(command, Share):
            return await asyncio.get_running_loop().run_in_executor(None, share, command.path)
        assert isinstance(command, Pause)
        await asyncio.sleep(command.seconds)
        return command.reconnect is None or await self.ready(command.reconnect)

    def _stalled(self) -> Stalled:
        return Stalled(f"no progress for {self._options.stall_timeout} s", "DEADLINE_EXCEEDED")

    async def _upload(self, upload: Upload) -> Any:
        async def messages() -> AsyncIterator[bytes]:
            for message in upload:
                yield message

        call = self.calls["Upload"](messages(), metadata=self._options.metadata())
        answer = asyncio.ensure_future(_answer(call))
        try:
            while True:
                sent = upload.sent
                done, _ = await asyncio.wait({answer}, timeout=self._options.stall_timeout)
                if done:
                    return answer.result()
                if upload.sent == sent:
                    raise self._stalled()
        finally:
            if not answer.done():
                call.cancel()
                answer.cancel()

    async def _transfer(self, transfer: Transfer) -> None:
        loop = asyncio.get_running_loop()
        timeout = self._options.stall_timeout
        waiting: List[Any] = []
        try:
            while True:
                # Elsewhere, because copying would hold up other tasks.
                request = await loop.run_in_executor(None, transfer.begin)
                if request is not None:
                    call = self.calls[transfer.method]
                    metadata = self._options.metadata()
                    waiting.append(call(request, timeout=timeout, metadata=metadata))
                elif waiting:
                    await loop.run_in_executor(None, transfer.finish, await waiting[0])
                    waiting.pop(0)
                    transfer.tell()
                else:
                    return
        finally:
            for call in waiting:
                call.cancel()

    async def _download(self, download: Download) -> None:
        call = self.calls["Download"](download.request(), metadata=self._options.metadata())
        try:
            while True:
                message = await asyncio.wait_for(call.read(), self._options.stall_timeout)
                if message is grpc.aio.EOF:
                    break
                download.take(message)
        except asyncio.TimeoutError:
            raise self._stalled() from None
        finally:
            if not call.done():
                call.cancel()
        if download.done < download.size:
            raise Error("the server sent too few bytes", "DATA_LOSS")


async def _answer(call: Any) -> Any:
    return await call
