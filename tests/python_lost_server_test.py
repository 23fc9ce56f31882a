#!/usr/bin/env python3
"""Tests the Python client, blocking and asyncio, if its server is lost: the server is killed or
stopped in the middle of calls, programs and transfers, or cancels calls while it stops."""

import asyncio
import collections
import concurrent.futures
import signal
import socket
import struct
import threading
from unittest import mock

import grpc
import numpy as np

import outsider as o
import python_outsider
import tessera as ts
from python_outsider import impatient
from tessera.transfers import _messages
from tessera.wire import _retry

OPTIONS = {"timeout": 20, "connect_timeout": o.START_TIMEOUT_S, "stall_timeout": 8}
LOST = ts.ConnectionLost, ts.Draining
DONE = object()  # A result that is not checked.
SLOW = 4000  # cpu_naive takes half a minute to multiply square matrices with this many rows.


class Blocking:
    """One of the two clients, with a common interface for both."""

    def __init__(self, address):
        self.t = ts.connect(address, **OPTIONS)

    def do(self, work):
        """Returns the result of work(client), which may be an awaitable."""
        return work(self.t)

    def outcomes(self, works, meanwhile):
        """Runs several tasks at the same time and returns their outcomes (results or errors).
        meanwhile() is called after the start."""
        with concurrent.futures.ThreadPoolExecutor(len(works)) as pool:
            futures = [pool.submit(work, self.t) for work in works]
            meanwhile()
            return [future.exception() or future.result() for future in futures]

    def close(self):
        self.t.close()


LOOP = asyncio.new_event_loop()  # All tests share it: gRPC's threads cannot handle several.


class Asyncio:
    def __init__(self, address):
        self.loop = LOOP
        self.t = self.loop.run_until_complete(ts.aio.connect(address, **OPTIONS))

    def do(self, work):
        return self.loop.run_until_complete(work(self.t))

    def outcomes(self, works, meanwhile):
        async def all_of_them():
            tasks = [asyncio.ensure_future(work(self.t)) for work in works]
            await asyncio.get_running_loop().run_in_executor(None, meanwhile)
            await asyncio.wait(tasks)
            return [task.exception() or task.result() for task in tasks]

        return self.loop.run_until_complete(all_of_them())

    def close(self):
        self.loop.run_until_complete(self.t.close())


class Case(o.Case):
    kind = None  # The client: Blocking or Asyncio.
    RECONNECT_S = 0.05  # How long a client waits for a server that is gone.

    def setUp(self):
        # Attempts follow each other without pauses.
        self.enterContext(mock.patch.object(_retry.random, "uniform", lambda low, high: 0.0))

    def client(self, address):
        client = self.kind(address)
        self.addCleanup(client.close)
        impatient(client.t, connect_timeout=self.RECONNECT_S)
        return client

    def server(self, *flags):
        return self.serve("--no-warm-up", *python_outsider.PATIENT, *flags)

    def until_waiting(self, server, count):
        """Returns when that many operations are waiting for a worker."""
        with ts.connect(server.address) as t:
            device = lambda: t.info().devices[0]  # noqa: E731
            self.assertTrue(o.eventually(lambda: device().waiting == count))


class LostServer(Case):
    def test_calls_and_programs_under_way(self):
        """There are more calls than workers, so that some calls wait for a worker."""
        for end in (signal.SIGKILL, signal.SIGTERM):
            server = self.server("--drain-timeout", "200ms", "--workers", "1")
            client = self.client(server.address)
            x = client.do(lambda t: t.put(np.ones((SLOW, SLOW), "f4")))
            product = (x @ x).with_(strategy="cpu_naive")

            def stop(server=server, end=end):
                self.until_waiting(server, len(works) - 1)
                server.signal(end)

            works = [lambda t: product.numpy(), lambda t: (product + 1).sum(axis=0).numpy(),
                     lambda t: product.save("product"),
                     lambda t: (product * 2).save("program", replace=True),
                     lambda t: t.keep(product, product.sum()),
                     lambda t: t.compute(product.max(), product.min())]
            for i, outcome in enumerate(client.outcomes(works, stop)):
                self.assertIsInstance(outcome, LOST, (end, i))

    def check_transfer(self, flags, work):
        """Checks work(client, x, data, progress) if the server ends after its first piece."""
        data = np.zeros(48 * o.MI, np.uint8).view("f4")
        server = self.server(*flags)
        client = self.client(server.address)
        x = client.do(lambda t: t.put(data))
        told = []

        def kill(done, total):
            if not told:
                server.process.kill()
            told.append(done / total)

        with self.assertRaises(ts.ConnectionLost):
            client.do(lambda t: work(t, x, data, kill))
        self.assertLess(told[0], 0.5)

    def test_uploads_and_downloads_under_way(self):
        several = mock.patch.object(_messages.Several, "over", wraps=_messages.Several.over)
        for flags, divided in (
            ((), _messages.DIVIDED),
            (("--shared-memory", f"{self.folder}/socket"), _messages.DIVIDED),
            ((), 8 * o.MI),  # It uses several connections.
        ):
            for work in (lambda t, x, data, kill: t.put(data, progress=kill),
                         lambda t, x, data, kill: x.numpy(progress=kill)):
                with self.subTest(flags), mock.patch.object(_messages, "DIVIDED", divided):
                    with several as begun:
                        self.check_transfer(flags, work)
                    self.assertEqual(begun.called, divided == 8 * o.MI)

    def test_transfers_that_meet_a_stopping_server(self):
        """If there is time, the server lets a running download end, but accepts no further
        calls."""
        data = np.arange(24 * o.MI, dtype="u1").view("i4")
        server = self.server()
        client = self.client(server.address)
        x = client.do(lambda t: t.put(data))
        signals = [signal.SIGTERM]

        def stop(done, total):
            if signals:
                server.signal(signals.pop())

        np.testing.assert_array_equal(client.do(lambda t: x.numpy(progress=stop)), data)
        for work in (lambda t: t.put(data), lambda t: t.put(data[:4]), lambda t: x.sum().numpy(),
                     lambda t: (x.sum() + 1).numpy()):
            with self.assertRaises(LOST):
                client.do(work)

    def test_a_server_that_hangs(self):
        data = np.zeros(16 * o.MI, np.uint8).view("f4")
        server = self.server()
        client = self.client(server.address)
        x = client.do(lambda t: t.put(data))
        impatient(client.t, timeout=0.5, stall_timeout=0.5)
        server.signal(signal.SIGSTOP)
        try:
            works = [
                lambda t: x.sum().numpy(), lambda t: (x.sum() + 1).numpy(), lambda t: x.numpy(),
                lambda t: t.put(data[:4]), lambda t: t.put(data)]
            for outcome in client.outcomes(works, lambda: None):
                self.assertIsInstance(outcome, (ts.Stalled, ts.DeadlineExceeded))
        finally:
            server.signal(signal.SIGCONT)

    def test_the_end_of_a_scope(self):
        """The end of the scope raises an error if nothing else has failed."""
        for failure in (ZeroDivisionError(), None):
            server = self.server()
            client = self.client(server.address)
            scope = client.t.scope()
            for name in ("scoped", "other"):
                client.do(lambda t, name=name: scope.put(np.ones(3), name, replace=True))
            server.kill()
            leave = scope.__exit__ if self.kind is Blocking else scope.__aexit__
            if failure is None:
                with self.assertRaises(ts.ConnectionLost):
                    client.do(lambda t: leave(None, None, None))
            else:
                self.assertFalse(client.do(lambda t: leave(type(failure), failure, None)))

    def test_a_client_that_is_closed_meanwhile(self):
        server = self.server("--workers", "1")
        client = self.client(server.address)
        x = client.do(lambda t: t.put(np.ones((SLOW, SLOW), "f4")))
        product = (x @ x).with_(strategy="cpu_naive")

        def close(t):
            self.until_waiting(server, 1)
            t.close()

        async def close_in_the_loop(t):
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, self.until_waiting, server, 1)
            await t.close()

        works = [lambda t: product.numpy(), lambda t: product.save("x")]
        works.append(close if self.kind is Blocking else close_in_the_loop)
        first, second, closed = client.outcomes(works, lambda: None)
        self.assertEqual((first.reason, second.reason, closed), ("CLOSED", "CLOSED", None))
        with self.assertRaisesRegex(ts.Error, "closed"):
            client.do(lambda t: t.info())

    def test_a_put_whose_client_begins_to_close(self):
        """The draft is deleted with the other unnamed buffers, before the client disconnects."""
        client = self.client(self.server().address)
        client.do(lambda t: t.put(np.ones(3)))
        core = client.t._core
        create = core._create

        def close_after_creation(draft, spec):
            created = yield from create(draft, spec)
            yield from core.close()
            return created

        core._create = close_after_creation
        with self.assertRaises(ts.Error) as caught:
            client.do(lambda t: t.put(np.ones(2 * o.MI, np.uint8)))
        self.assertEqual((caught.exception.code, caught.exception.reason), ("CANCELLED", "CLOSED"))


class Cancelling(grpc.GenericRpcHandler):
    """A relay that ends calls only with CANCELLED, like gRPC's server when it stops."""

    def __init__(self, address):
        self.far = grpc.insecure_channel(address, [("grpc.max_receive_message_length", 8 * o.MI)])
        self.calls = collections.Counter()
        self.cancels = {}  # Calls by method. Streams are cancelled after their second message.
        self.near = grpc.server(concurrent.futures.ThreadPoolExecutor(8))
        self.near.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self.near.add_insecure_port('127.0.0.1:0')}"
        self.near.start()

    def close(self):
        self.near.stop(None).wait()
        self.far.close()

    def service(self, details):
        path = details.method

        def forward(messages, context):
            name = path.rpartition("/")[2]
            self.calls[name] += 1
            cancel = self.cancels.get(name, 0) > 0
            if cancel:
                self.cancels[name] -= 1
                if name not in ("Upload", "Download"):
                    context.abort(grpc.StatusCode.CANCELLED, "")

            def first(messages):
                for i, message in enumerate(messages):
                    yield message
                    if cancel and name == "Upload" and i == 1:
                        return

            call = self.far.stream_stream(path)(first(messages))
            try:
                for i, message in enumerate(call):
                    if cancel and (name == "Upload" or i == 2):
                        call.cancel()
                        context.abort(grpc.StatusCode.CANCELLED, "")
                    yield message
            except grpc.RpcError as error:
                context.set_trailing_metadata(error.trailing_metadata())
                context.abort(error.code(), error.details())

        return grpc.stream_stream_rpc_method_handler(forward)


class Cancelled(Case):
    """The client has not cancelled these calls, so they count as lost with their connection."""

    RECONNECT_S = o.START_TIMEOUT_S  # This server is never lost.

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.server = cls.serve_class("--no-warm-up", "--import-from", "127.0.0.1:*",
                                     "--data-dir", cls.folder / "data")
        cls.relay = Cancelling(cls.server.address)
        cls.addClassCleanup(cls.relay.close)
        cls.data = np.random.default_rng(7).integers(0, 1 << 30, 3 * o.MI, "i4")  # 12 MiB

    def check(self, client, work, method, want, calls=2, cancels=1):
        """Checks how the client treats cancelled calls. want: the result, or None if the call is
        lost."""
        self.relay.cancels = {method: cancels}
        self.relay.calls.clear()
        if want is None:
            with self.assertRaises(ts.ConnectionLost) as caught:
                client.do(work)
            self.assertEqual(caught.exception.code, "UNAVAILABLE")
            self.assertIn("stopped", str(caught.exception))
        else:
            got = client.do(work)
            if want is not DONE:
                np.testing.assert_array_equal(got, want)
        self.assertEqual(self.relay.calls[method], calls)
        self.relay.cancels = {}

    def setUp(self):
        super().setUp()
        self.a = self.data[:1000]
        self.t = self.client(self.relay.address)
        self.x = self.t.do(lambda t: t.put(self.a, "x", replace=True))

    def test_what_may_run_twice_is_repeated(self):
        a, data, x = self.a, self.data, self.x
        self.check(self.t, lambda t: x.max().numpy(), "Reduce", a.max())
        self.check(self.t, lambda t: (x.max() + 1).numpy(), "Execute", a.max() + 1)
        self.check(self.t, lambda t: x.max().numpy(), "Reduce", None, 5, 9)
        self.check(self.t, lambda t: (x.max() + 1).numpy(), "Execute", None, 5, 9)
        server = self.server.address
        for i, (method, work) in enumerate((
            ("GetBuffer", lambda t: t.get("x") if self.kind is Asyncio else t["x"]),
            ("ListBuffers", lambda t: t.list("x")), ("GetServerInfo", lambda t: t.info()),
            ("Execute", lambda t: t.compute(x.max() + 1)), ("Map", lambda t: t.keep(x + 1)),
            ("Map", lambda t: (x + 1).save()), ("CopyBuffer", lambda t: x.copy()),
            ("Map", lambda t: (x + 1).save("z", replace=True)),
            ("CopyBuffer", lambda t: x.copy("z", replace=True)),
            ("CopyBuffer", lambda t: x.link("z", replace=True)),
            ("ImportBuffer", lambda t: t.import_from(server, "x")),
            ("ImportBuffer", lambda t: t.import_from(server, "x", "z", replace=True)),
            ("Upload", lambda t: t.put(a)), ("Upload", lambda t: t.put(a, "z", replace=True)),
            ("GetSharedMemory", lambda t: t.put(data)),
            ("SealBuffer", lambda t: t.put(data, "z", replace=True)),
            ("Snapshot", lambda t: t.snapshot()),
            ("DeleteBuffer", lambda t: x.delete()),  # Deletes this version only.
        )):
            with self.subTest(method, number=i):
                self.check(self.t, work, method, DONE)

    def test_what_stores_a_result_under_a_name_is_not(self):
        """Deletions of a name in any version, and calls of the protocol, are not retried either."""
        a, data, x, server = self.a, self.data, self.x, self.server.address
        for i, (method, work) in enumerate((
            ("Map", lambda t: (x + 1).save("y")), ("Execute", lambda t: (x.max() + 1).save("y")),
            ("Upload", lambda t: t.put(a, "y")), ("CreateBuffer", lambda t: t.put(data, "y")),
            ("CreateBuffer", lambda t: t.put(data, "y", replace=True)),
            ("CopyBuffer", lambda t: x.copy("y")), ("CopyBuffer", lambda t: x.save("y")),
            ("CopyBuffer", lambda t: x.link("y")),
            ("ImportBuffer", lambda t: t.import_from(server, "x", "y")),
            ("DeleteBuffer", lambda t: t.delete("x")),
            ("ListStrategies", lambda t: t.call("ListStrategies")),
        )):
            with self.subTest(method, number=i):
                self.check(self.t, work, method, None, 1)
        self.t.do(lambda t: t.delete("y"))  # The result of the upload whose response was lost.

    def test_transfers_go_on(self):
        data, client = self.data, self.t
        self.check(client, lambda t: t.put(data, "data", replace=True), "Upload", DONE)
        x = client.do(lambda t: t.put(data))
        self.check(client, lambda t: x.numpy(), "Download", data)
        self.check(client, lambda t: x.numpy(), "Download", data, 4, 3)
        small = client.do(lambda t: t.put(data[:10]))
        self.check(client, lambda t: small.numpy(), "Download", data[:10], 1, 0)


class NameServer:
    """Answers each DNS query with one IPv4 address, which may change."""

    def __init__(self, address):
        self.address = address
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.answer, daemon=True).start()

    def answer(self):
        while True:
            question, sender = self.socket.recvfrom(512)
            end = question.index(b"\0", 12) + 5
            found = b""
            if question[end - 4 : end - 2] == b"\0\1":  # It asks for A records.
                found = b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 0,
                                                  4) + socket.inet_aton(self.address)
            head = question[:2] + struct.pack("!HHHHH", 0x8180, 1, bool(found), 0, 0)
            self.socket.sendto(head + question[12:end] + found, sender)


def lifetime_of(array):
    buffer = array._source.buffer
    return buffer.expire_time.seconds - buffer.create_time.seconds


class MovedNameTest(python_outsider.Case):
    FLAGS = ("--max-ttl", "1m")

    def test_a_name_that_moves(self):
        """If the old server ends during a call, the call is retried at the new server."""
        names = NameServer("127.0.0.1")
        port = self.server.address.rsplit(":", 1)[1]
        self.serve(listen=f"127.0.0.2:{port}")
        with ts.connect(f"dns://127.0.0.1:{names.port}/moves.example:{port}") as t:
            self.assertEqual(t.list(), [])
            self.assertLess(lifetime_of(t.put(np.ones(3))), 600)
            names.address = "127.0.0.2"
            self.server.kill()
            self.assertEqual(t.list(), [])
            self.assertGreater(lifetime_of(t.put(np.ones(3))), 600)  # This one has no --max-ttl.


for kind in (Blocking, Asyncio):
    for base in (LostServer, Cancelled):
        name = f"{kind.__name__}{base.__name__}Test"
        globals()[name] = type(name, (base,), {"kind": kind})
del Case, LostServer, Cancelled, base  # Base classes have no tests to run.

if __name__ == "__main__":
    python_outsider.main("__main__")
