#!/usr/bin/env python3
"""Several servers as an outsider sees them: links to the memory of a buffer, buffers that one server
imports from another over connections that break, and names that have one home.

usage: hosts_test.py --server build/bin/tessera-server [--device cuda:0] [test ...]
"""

import concurrent.futures
import contextlib
import pathlib
import re
import signal
import socket
import sys
import tempfile
import time

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration

import outsider as o
from callers import Caller
from home import home_of
from outsider import eventually
from relay import Relay

MIB = 1 << 20
FROM_HERE = ("--import-from", "127.0.0.1:*")


@contextlib.contextmanager
def servers(*flags):
    """As many servers as there are tuples of flags."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        try:
            for one in flags:
                started.append(o.Server(folder, *one))
            yield started
        finally:
            for server in started:
                server.kill()


def put(client, name, array, checksums=True, **spec):
    """In messages of 1 MiB."""
    data = memoryview(array.ravel()).cast("B")
    parts = [bytes(data[i : i + MIB]) for i in range(0, max(len(data), 1), MIB)]
    messages = [dict(data=part) for part in parts]
    if checksums:
        for message in messages:
            message["crc32c"] = o.crc32c(message["data"])
        whole = o.crc32c(data)
        messages[-1]["buffer_crc32c"] = whole
    messages[0] |= dict(name=name, spec=o.spec_of(array, **spec))
    return client.upload(messages).buffer


def used(client):
    return client.device().buffer_used_bytes


def same(client, name, array):
    return client.download(name) == array.tobytes()


def fails(outcome, code, reason):
    assert (outcome.code, outcome.reason) == (code, reason), outcome
    assert outcome.domain == "tessera"
    return outcome


# --- links


def test_link_is_the_same_memory(server, client):
    x = np.arange(3 * MIB // 4, dtype=np.float32)
    first = client.put("x", x)
    before = used(client)
    link = client.call("CopyBuffer", source="x", name="t/1", link=True).buffer
    assert used(client) == before, "a link takes memory"
    assert (link.name, link.state, link.size_bytes) == ("t/1", 2, x.nbytes)
    assert link.version > first.version and tuple(link.shape) == x.shape
    # It stays when the first name goes, or means something else.
    client.put("x", np.zeros(3, np.float32), replace=True)
    assert same(client, "t/1", x)
    got = client.call("Dot", a=o.resident("t/1", version=link.version), b=o.resident("t/1"))
    assert abs(got.value.real - np.dot(x.astype(np.float64), x)) <= 1e-6 * got.value.real
    # A link of a link is one of the memory; the last name takes it along.
    again = client.call("CopyBuffer", source="t/1", name="t/2", link=True).buffer
    client.call("DeleteBuffer", name="t/1")
    assert same(client, "t/2", x) and again.version > link.version
    client.call("DeleteBuffer", name="t/2")
    client.call("DeleteBuffer", name="x")
    assert eventually(lambda: used(client) == 0, 10)


def test_link_errors_and_expiry(server, client):
    x = np.ones(8, np.float32)
    have = client.put("x", x)
    fails(client.attempt("CopyBuffer", source="no", name="t", link=True),
          "NOT_FOUND", "BUFFER_NOT_FOUND")  # fmt: skip
    fails(client.attempt("CopyBuffer", source="x", name="x", link=True),
          "ALREADY_EXISTS", "BUFFER_EXISTS")  # fmt: skip
    fails(client.attempt("CopyBuffer", source="x", name="bad name", link=True),
          "INVALID_ARGUMENT", "BAD_NAME")  # fmt: skip
    fails(client.attempt("CopyBuffer", source="x", source_version=have.version + 1, name="t",
                         link=True), "FAILED_PRECONDITION", "VERSION_MISMATCH")  # fmt: skip
    for field in (
        dict(view=o.view([8])), dict(dtype=2), dict(device=client.device().name),
        dict(placement=["all"]),
    ):  # fmt: skip
        outcome = client.attempt("CopyBuffer", source="x", name="t", link=True, **field)
        assert fails(outcome, "INVALID_ARGUMENT", "BAD_LINK").metadata["field"] in field
    client.create("draft", x)
    fails(client.attempt("CopyBuffer", source="draft", name="t", link=True),
          "FAILED_PRECONDITION", "BUFFER_NOT_READY")  # fmt: skip
    ttl = Duration(nanos=500_000_000)
    client.call("CopyBuffer", source="x", name="ticket", link=True, ttl=ttl)
    client.call("DeleteBuffer", name="x")
    assert eventually(lambda: "ticket" not in client.names(), 10)
    client.call("DeleteBuffer", name="draft")
    assert eventually(lambda: used(client) == 0, 10), "an expired ticket holds the memory"
    # A link replaces, itself included.
    client.put("y", x)
    first = client.call("CopyBuffer", source="y", name="y", link=True, replace=True).buffer
    assert same(client, "y", x) and first.version > have.version


def test_link_counts_as_a_buffer(server, client):
    with servers(("--max-buffers", "3")) as (own,):
        few = own.client()
        few.put("x", np.ones(4, np.float32))
        few.call("CopyBuffer", source="x", name="a", link=True)
        few.call("CopyBuffer", source="x", name="b", link=True)
        fails(few.attempt("CopyBuffer", source="x", name="c", link=True),
              "RESOURCE_EXHAUSTED", "TOO_MANY_BUFFERS")  # fmt: skip
        few.call("DeleteBuffer", name="a")
        few.call("CopyBuffer", source="x", name="c", link=True)
        # A link of a link does not keep that in the count.
        few.call("DeleteBuffer", name="b")
        few.call("CopyBuffer", source="c", name="d", link=True)
        few.call("DeleteBuffer", name="c")
        few.call("CopyBuffer", source="x", name="e", link=True)


def test_sharded_buffers(server, client):
    """A link to one, and an import of one, which lies on one device."""
    flags = ("--device", "cpu:0,cpu:1")  # beside that of the others
    with servers(flags, FROM_HERE) as (far, near):
        own, there = far.client(), near.client()
        x = np.arange(1 << 16, dtype=np.float32)
        own.upload([dict(name="x", spec=o.spec_of(x, placement=["all"]), data=x.tobytes())])
        own.call("CopyBuffer", source="x", name="y", link=True)
        own.call("DeleteBuffer", name="x")
        assert same(own, "y", x)
        assert len(own.call("GetBuffer", name="y").buffer.shards) > 1
        there.call("ImportBuffer", source=far.address, source_name="y", name="z")
        assert same(there, "z", x)
        own.call("DeleteBuffer", name="y")
        assert eventually(lambda: all(d.buffer_used_bytes == 0 for d in own.info().devices), 10)


# --- imports


def test_import_types_and_shapes(server, client):
    with servers(FROM_HERE) as (near,):
        there = near.client()
        for i, array in enumerate([
            np.arange(7, dtype=np.int64), np.ones((3, 0, 2), np.float64),
            np.float32(3.5).reshape(()), np.arange(24, dtype=np.uint16).reshape(2, 3, 4),
            np.random.default_rng(1).normal(size=(700, 1000)).astype(np.float32),
        ]):  # fmt: skip
            name = f"a/{i}"
            source = client.put(name, array) if array.nbytes < MIB else put(client, name, array)
            answer = there.call("ImportBuffer", source=server.address, source_name=name,
                                source_version=source.version, name=f"b/{i}")  # fmt: skip
            assert answer.interruptions == 0
            got = answer.buffer
            assert (got.name, got.state, got.dtype) == (f"b/{i}", 2, source.dtype)
            assert tuple(got.shape) == array.shape and same(there, f"b/{i}", array)
            assert got.HasField("crc32c") and got.crc32c == o.crc32c(array.tobytes())
        ttl = Duration(seconds=100)
        again = dict(source=server.address, source_name="a/0", name="b/0", ttl=ttl)
        fails(there.attempt("ImportBuffer", **again), "ALREADY_EXISTS", "BUFFER_EXISTS")
        assert there.call("ImportBuffer", replace=True, **again).buffer.HasField("expire_time")


def test_import_is_closed_by_default(server, client):
    client.put("x", np.ones(4, np.float32))
    closed = client.attempt("ImportBuffer", source=server.address, source_name="x", name="y")
    fails(closed, "PERMISSION_DENIED", "SOURCE_NOT_ALLOWED")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.5)
    port = listener.getsockname()[1]
    patterns = ("--import-from", f"localhost:{port},10.*.7:50051,[::1]:*")
    with servers(patterns) as (near,):
        there = near.client()
        for source in (
            f"127.0.0.1:{port}", f"localhost:{port - 1}", "10.0.0.7:50052", "110.0.0.7:50051",
            "xlocalhost:%d" % port, "[::2]:50051",
        ):  # fmt: skip
            fails(there.attempt("ImportBuffer", source=source, source_name="x", name="y"),
                  "PERMISSION_DENIED", "SOURCE_NOT_ALLOWED")  # fmt: skip
        for source in (
            "", "localhost", "unix:/tmp/x", "unix:///run/x:1", "dns:///localhost:1", "a,b:1",
            "ipv4:127.0.0.1:1", "localhost:0", "localhost:99999", "localhost:x", ":1", "a b:1",
            "[::1", "[::1]:", "a/b:1", "a@b:1", "x" * 300 + ":1", "é:1", "localhost:1\n",
        ):  # fmt: skip
            fails(there.attempt("ImportBuffer", source=source, source_name="x", name="y"),
                  "INVALID_ARGUMENT", "BAD_SOURCE")  # fmt: skip
    try:
        listener.accept()
        raise AssertionError("a source that is not allowed was called")
    except TimeoutError:
        pass
    finally:
        listener.close()


def test_import_refused_by_the_source(server, client):
    have = client.put("x", np.ones(4, np.float32))
    client.create("draft", np.ones(4, np.float32))
    with servers(FROM_HERE) as (near,):
        there = near.client()
        for fields, reason, code in (
            (dict(source_name="no"), "BUFFER_NOT_FOUND", "NOT_FOUND"),
            (dict(source_name="draft"), "BUFFER_NOT_READY", "FAILED_PRECONDITION"),
            (dict(source_name="x", source_version=have.version + 1), "VERSION_MISMATCH",
             "FAILED_PRECONDITION"),
        ):  # fmt: skip
            outcome = there.attempt("ImportBuffer", source=server.address, name="y", **fields)
            fails(outcome, "FAILED_PRECONDITION", "SOURCE_REFUSED")
            expected = {"source": server.address, "code": code, "reason": reason}
            assert outcome.metadata == expected, outcome
        ask = dict(source=server.address, source_name="x")
        fails(there.attempt("ImportBuffer", name="bad name", **ask), "INVALID_ARGUMENT", "BAD_NAME")
        fails(there.attempt("ImportBuffer", name="y", device="tpu", **ask),
              "INVALID_ARGUMENT", "BAD_DEVICE")  # fmt: skip
        assert there.names() == []


def test_import_resumes_where_it_stood(server, client):
    x = np.random.default_rng(2).integers(0, 1 << 60, 16 * MIB // 8)
    source = put(client, "x", x)
    with servers(FROM_HERE) as (near,):
        there = near.client()
        # More often than an attempt may fail without any progress.
        relay = Relay(server.address, cuts=4 * [3 * MIB, 300_000])
        answer = there.call("ImportBuffer", source=relay.where, source_name="x", name="y",
                            timeout=120)  # fmt: skip
        assert same(there, "y", x)
        assert answer.interruptions == 8 and answer.buffer.crc32c == source.crc32c
        # What had come did not come again, but for messages that were cut in two.
        assert sum(relay.passed) < x.nbytes + 9 * 2 * MIB, relay.passed
        relay.close()
        # A byte that changes on the way is noticed, and comes again. The import goes on where it
        # stood, so that the connection is not another one by accident.
        relay = Relay(server.address, damage=5 * MIB)
        answer = there.call("ImportBuffer", source=relay.where, source_name="x", name="z",
                            timeout=120)  # fmt: skip
        assert relay.damage is None and answer.interruptions >= 1 and same(there, "z", x)
        relay.close()


def test_import_checks_the_whole(server, client):
    """A source that is wrong about its own bytes: here one that says the checksum of others."""
    x = np.arange(2048, dtype=np.float32)
    size = 4096  # of a message

    class Liar(o.buffer_grpc.BufferServiceServicer):
        """Two messages with checksums; changes: what is wrong with them."""

        def __init__(self, **changes):
            self.changes = changes
            self.asked = 0

        def Download(self, request, context):
            self.asked += 1
            if self.asked <= self.changes.get("full", 0):
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "there is no room")
            data = x.tobytes()
            buffer = o.buffers.Buffer(
                name="x", dtype=1, shape=x.shape, size_bytes=x.nbytes,
                state=self.changes.get("state", 2),
                version=self.changes.get("version", 7) + self.asked * self.changes.get("replaced", 0),
                crc32c=o.crc32c(data) ^ self.changes.get("whole", 0),
            )  # fmt: skip
            for i in range(request.offset, len(data), size):
                part = data[i : i + size]
                yield o.buffers.DownloadResponse(
                    buffer=None if "untyped" in self.changes else buffer,
                    offset=i + self.changes.get("shift", 0),
                    data=part + bytes(self.changes.get("more", 0)),
                    crc32c=None if "bare" in self.changes else o.crc32c(part),
                )
                if "short" in self.changes:
                    return
            if self.asked <= self.changes.get("ends", 0):
                context.abort(self.changes["code"], "behind the last byte")

    cases = (
        (dict(whole=1), "DATA_LOSS", "BAD_CHECKSUM"),
        (dict(bare=1), "UNAVAILABLE", "SOURCE_UNREACHABLE"),
        (dict(untyped=1), "UNAVAILABLE", "SOURCE_UNREACHABLE"),
        (dict(shift=8), "UNAVAILABLE", "SOURCE_UNREACHABLE"),
        (dict(more=1), "UNAVAILABLE", "SOURCE_UNREACHABLE"),
        (dict(state=1), "UNAVAILABLE", "SOURCE_UNREACHABLE"),
        (dict(short=1, replaced=1), "UNAVAILABLE", "SOURCE_UNREACHABLE"),
        (dict(version=0), "UNAVAILABLE", "SOURCE_UNREACHABLE"),
        (dict(ends=9, code=grpc.StatusCode.DATA_LOSS), "FAILED_PRECONDITION", "SOURCE_REFUSED"),
        (dict(), "OK", ""),
        (dict(short=1), "OK", ""),  # one message per attempt is progress
        (dict(full=2), "OK", ""),
        (dict(ends=1, code=grpc.StatusCode.UNAVAILABLE), "OK", ""),
    )
    with servers((*FROM_HERE, "--max-imports", str(len(cases)))) as (near,):
        there = near.client()

        def run(i):
            changes, code, reason = cases[i]
            liar = Liar(**changes)
            wire = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
            o.buffer_grpc.add_BufferServiceServicer_to_server(liar, wire)
            port = wire.add_insecure_port("127.0.0.1:0")
            wire.start()
            outcome = there.attempt("ImportBuffer", source=f"127.0.0.1:{port}", source_name="x",
                                    name=f"y{i}", timeout=120)  # fmt: skip
            wire.stop(None)
            assert (outcome.code, outcome.reason) == (code, reason), (changes, outcome)
            if code == "UNAVAILABLE":
                assert liar.asked == 7, liar.asked
                right = size if "replaced" in changes else 0  # its first message was
                assert outcome.metadata["received"] == str(right), outcome
            if outcome.ok:
                assert same(there, f"y{i}", x)

        o.in_threads(len(cases), run)
        assert there.names() == sorted(f"y{i}" for i, case in enumerate(cases) if case[1] == "OK")


def test_import_keeps_tokens_to_itself(server, client):
    """A server that checks none sends its callers' to others over TLS alone (tls_test)."""
    found = []

    class Source(o.buffer_grpc.BufferServiceServicer):
        def Download(self, request, context):
            found.append({key for key, _ in context.invocation_metadata()})
            context.abort(grpc.StatusCode.NOT_FOUND, "")

    wire = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    o.buffer_grpc.add_BufferServiceServicer_to_server(Source(), wire)
    port = wire.add_insecure_port("127.0.0.1:0")
    wire.start()
    with servers(FROM_HERE) as (near,):
        outcome = Caller(near, "secret").attempt(
            "ImportBuffer", source=f"127.0.0.1:{port}", source_name="x", name="y"
        )
        fails(outcome, "FAILED_PRECONDITION", "SOURCE_REFUSED")
    wire.stop(None)
    assert len(found) == 1 and "authorization" not in found[0], found


def test_an_import_that_stands_still_says_why(server, client):
    flags = (*FROM_HERE, "--upload-timeout", "1s")
    with servers(flags) as (near,), socket.create_server(("127.0.0.1", 0)) as nobody:
        where = f"127.0.0.1:{nobody.getsockname()[1]}"
        nobody.close()  # it refuses connections
        outcome = near.client().attempt("ImportBuffer", source=where, source_name="x", name="y")
        fails(outcome, "DEADLINE_EXCEEDED", "SOURCE_STALLED")
        assert "onnect" in outcome.text, outcome


def test_import_of_a_server_that_dies(server, client):
    x = np.ones(32 * MIB // 4, np.float32)
    with servers((), FROM_HERE) as (far, near):
        put(far.client(), "x", x, checksums=False)
        there = near.client()
        relay = Relay(far.address, hold=4 * MIB)
        future = there.future("ImportBuffer", source=relay.where, source_name="x", name="y",
                              timeout=120)  # fmt: skip
        assert eventually(relay.silent.is_set, 30)
        far.process.kill()
        far.process.wait()
        relay.listener.close()
        relay.silent.clear()
        outcome = o.outcome_of(future)
        fails(outcome, "UNAVAILABLE", "SOURCE_UNREACHABLE")
        assert int(outcome.metadata["received"]) > 0
        assert outcome.metadata["size"] == str(x.nbytes)
        assert there.names() == [] and eventually(lambda: used(there) == 0, 10)
        assert there.budget("imports").used == 0
        relay.close()


def test_import_that_stands_still(server, client):
    x = np.ones(16 * MIB // 4, np.float32)
    put(client, "x", x, checksums=False)
    with servers((*FROM_HERE, "--upload-timeout", "2s", "--max-imports", "2")) as (near,):
        there = near.client()
        relays = [Relay(server.address) for _ in range(2)]
        for relay in relays:
            relay.silent.set()
        begun = [
            there.future("ImportBuffer", source=relay.where, source_name="x", name=f"y{i}",
                         timeout=120) for i, relay in enumerate(relays)
        ]  # fmt: skip
        assert eventually(lambda: there.budget("imports").used == 2, 30)
        one_more = there.attempt("ImportBuffer", source=server.address, source_name="x", name="z")
        assert fails(one_more, "RESOURCE_EXHAUSTED", "TOO_MANY_IMPORTS").retry_s is not None
        for call in begun:
            outcome = fails(o.outcome_of(call), "DEADLINE_EXCEEDED", "SOURCE_STALLED")
            assert outcome.metadata["limit"] == "2s"
        for relay in relays:
            relay.close()
        assert eventually(lambda: there.budget("imports").used == 0, 10)
        there.call("ImportBuffer", source=server.address, source_name="x", name="z")


@contextlib.contextmanager
def source_that_sends_no_bytes():
    """Its address. Messages come, of a buffer x."""

    class Idler(o.buffer_grpc.BufferServiceServicer):
        def Download(self, request, context):
            buffer = o.buffers.Buffer(name="x", dtype=1, shape=[4096], state=2, version=7)
            while context.is_active():
                yield o.buffers.DownloadResponse(buffer=buffer, crc32c=0)
                time.sleep(0.2)

    wire = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
    o.buffer_grpc.add_BufferServiceServicer_to_server(Idler(), wire)
    port = wire.add_insecure_port("127.0.0.1:0")
    wire.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        wire.stop(None)


def test_import_of_a_source_that_sends_no_bytes(server, client):
    with source_that_sends_no_bytes() as source, servers((*FROM_HERE, "--upload-timeout", "2s")) as (near,):
        outcome = near.client().attempt("ImportBuffer", source=source, source_name="x", name="y", timeout=60)
        fails(outcome, "DEADLINE_EXCEEDED", "SOURCE_STALLED")


def test_a_drain_does_not_wait_for_an_import_that_stands_still(server, client):
    with source_that_sends_no_bytes() as source, servers((*FROM_HERE, "--drain-timeout", "50s")) as (near,):
        there = near.client()
        call = there.future("ImportBuffer", source=source, source_name="x", name="y", timeout=120)
        assert eventually(lambda: there.budget("imports").used == 1, 30)
        near.signal()
        assert fails(o.outcome_of(call), "UNAVAILABLE", "DRAINING").metadata["limit"] == "5s"
        assert near.wait(20) == 0


def test_a_drain_does_not_wait_for_an_import_that_finds_no_source(server, client):
    with socket.socket() as closed, servers((*FROM_HERE, "--drain-timeout", "50s")) as (near,):
        closed.bind(("127.0.0.1", 0))
        there = near.client()
        source = f"127.0.0.1:{closed.getsockname()[1]}"
        call = there.future("ImportBuffer", source=source, source_name="x", name="y", timeout=120)
        assert eventually(lambda: there.budget("imports").used == 1, 30)
        near.signal()
        assert fails(o.outcome_of(call), "UNAVAILABLE", "DRAINING").metadata["limit"] == "5s"
        assert near.wait(20) == 0


def greet(connection):
    """With a frame by which a client knows that it is connected."""
    connection.settimeout(30)
    connection.sendall(o.frame(o.SETTINGS, 0, 0))


def read_to_the_end(connection):
    while connection.recv(4096):  # what a client of HTTP/2 begins with
        pass


def test_an_import_that_ends_while_it_connects_leaves_no_socket(server, client):
    with socket.create_server(("127.0.0.1", 0)) as mute, servers(FROM_HERE) as (near,):
        there = near.client()
        source = f"127.0.0.1:{mute.getsockname()[1]}"
        late = there.attempt("ImportBuffer", source=source, source_name="x", name="y", timeout=0.5)
        assert late.code == "DEADLINE_EXCEEDED"
        with mute.accept()[0] as connection:
            greet(connection)
            read_to_the_end(connection)


def test_an_import_that_ends_while_it_connects_again_leaves_no_socket(server, client):
    with socket.socket() as source, contextlib.ExitStack() as stack, servers(FROM_HERE) as (near,):
        source.bind(("127.0.0.1", 0))  # which refuses connections
        source.settimeout(30)
        there = near.client()
        where = f"127.0.0.1:{source.getsockname()[1]}"
        there.attempt("ImportBuffer", source=where, source_name="x", name="y", timeout=0.2)  # the first takes two for good
        assert eventually(lambda: there.budget("imports").used == 0, 30)
        files = o.descriptors(near)
        calls = [there.future("ImportBuffer", source=where, source_name="x", name=f"y{i}", timeout=30) for i in range(4)]
        assert eventually(lambda: there.budget("imports").used == 4, 30)
        time.sleep(0.5)  # each has failed to connect
        source.listen()
        connections = [stack.enter_context(source.accept()[0]) for _ in calls]
        for call in calls:
            call.cancel()
        assert eventually(lambda: there.budget("imports").used == 0, 10)
        for connection in connections:
            greet(connection)
            read_to_the_end(connection)
        assert eventually(lambda: o.descriptors(near) <= files, 30)


def test_import_says_what_is_wrong_here_before_it_asks_the_source(server, client):
    with socket.create_server(("127.0.0.1", 0)) as mute, servers(FROM_HERE) as (near,):
        there = near.client()
        put(there, "y", np.ones(4, np.float32))
        asked = {"source": f"127.0.0.1:{mute.getsockname()[1]}", "source_name": "x", "timeout": 10}
        for wrong, code, reason in (
            ({"name": "y"}, "ALREADY_EXISTS", "BUFFER_EXISTS"),
            ({"name": ""}, "INVALID_ARGUMENT", "BAD_NAME"),
            ({"name": "z", "ttl": Duration(seconds=-1)}, "INVALID_ARGUMENT", "BAD_TTL"),
            ({"name": "z", "device": "cpu:7"}, "INVALID_ARGUMENT", "BAD_DEVICE"),
        ):
            fails(there.attempt("ImportBuffer", **asked, **wrong), code, reason)
        mute.settimeout(0)
        try:
            mute.accept()
        except BlockingIOError:
            return
        raise AssertionError("the source was asked")


def test_imports_from_a_source_that_hangs_leave_their_places(server, client):
    """And their sockets, as soon as their callers leave."""
    put(client, "x", np.ones(4, np.float32))
    with socket.create_server(("127.0.0.1", 0)) as mute, servers((*FROM_HERE, "--max-imports", "1")) as (near,):
        there = near.client()
        source = f"127.0.0.1:{mute.getsockname()[1]}"
        for _ in range(10):
            late = there.attempt("ImportBuffer", source=source, source_name="x", name="y", timeout=0.1)
            assert late.code == "DEADLINE_EXCEEDED"
            assert eventually(lambda: there.budget("imports").used == 0, 10)
            with mute.accept()[0] as connection:
                greet(connection)
                read_to_the_end(connection)
        there.call("ImportBuffer", source=server.address, source_name="x", name="z")


def test_import_ends_with_its_caller(server, client):
    x = np.ones(16 * MIB // 4, np.float32)
    put(client, "x", x, checksums=False)
    with servers(FROM_HERE) as (near,):
        there = near.client()
        relay = Relay(server.address, hold=3 * MIB)
        call = there.future("ImportBuffer", source=relay.where, source_name="x", name="y",
                            timeout=120)  # fmt: skip
        assert eventually(relay.silent.is_set, 30)
        call.cancel()  # the connection itself is found out after 30 s
        assert eventually(lambda: there.budget("imports").used == 0, 10)
        assert there.names() == [] and eventually(lambda: used(there) == 0, 10)
        # A deadline, and a name that is deleted under the import.
        late = there.future("ImportBuffer", source=relay.where, source_name="x", name="y", timeout=1)
        assert o.outcome_of(late).code == "DEADLINE_EXCEEDED"
        assert eventually(lambda: there.budget("imports").used == 0, 30)
        relay.close()
        relay = Relay(server.address, hold=3 * MIB)
        call = there.future("ImportBuffer", source=relay.where, source_name="x", name="y",
                            timeout=120)  # fmt: skip
        assert eventually(relay.silent.is_set, 30)
        assert eventually(lambda: there.attempt("DeleteBuffer", name="y").ok, 10)
        relay.silent.clear()
        fails(o.outcome_of(call), "NOT_FOUND", "BUFFER_NOT_FOUND")
        relay.close()
    # A server that stops waits for none of them longer than --drain-timeout.
    with servers((*FROM_HERE, "--drain-timeout", "2s")) as (near,):
        there = near.client()
        relay = Relay(server.address)
        relay.silent.set()
        call = there.future("ImportBuffer", source=relay.where, source_name="x", name="y",
                            timeout=120)  # fmt: skip
        assert eventually(lambda: there.budget("imports").used == 1, 30)
        near.signal(signal.SIGINT)
        assert near.wait(30) is not None
        assert not o.outcome_of(call).ok
        relay.close()


def test_import_within_limits(server, client):
    x = np.ones(8 * MIB // 4, np.float32)
    put(client, "x", x, checksums=False)
    with servers((*FROM_HERE, "--memory-limit", "4Mi")) as (near,):
        there = near.client()
        outcome = there.attempt("ImportBuffer", source=server.address, source_name="x", name="y")
        fails(outcome, "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
        assert used(there) == 0 and there.budget("imports").used == 0


# --- homes of names


def test_names_have_one_home(server, client):
    with tempfile.TemporaryDirectory() as folder:
        ring = pathlib.Path(folder) / "ring"
        ring.write_text("# three\na host-a:1\n b host-b:2 # two\n\nc\thost-c:3\n")
        addresses = {"a": "host-a:1", "b": "host-b:2", "c": "host-c:3"}
        flags = lambda name: ("--ring", ring, "--ring-name", name)  # noqa: E731
        with servers(*([*map(str, flags(name))] for name in "abc")) as started:
            clients = dict(zip("abc", (one.client() for one in started)))
            homes = set()
            x = np.ones(4, np.float32)
            for i in range(40):
                name = f"run{i % 8}/part{i // 8}/{i}" if i % 5 else f"plain{i}"
                home = home_of("abc", name)
                homes.add(home)
                for where, own in clients.items():
                    outcome = o.outcome_of(lambda: own.put(name, x))  # noqa: B023
                    if where == home:
                        assert outcome.ok, outcome
                        assert own.call("Dot", a=o.resident(name), b=o.resident(name)).value.real
                        continue
                    expected = {"name": name, "owner": home, "address": addresses[home]}
                    for end in (
                        outcome, own.attempt("GetBuffer", name=name),
                        own.attempt("Dot", a=o.resident(name), b=o.resident(name)),
                        own.attempt("DeleteBuffer", name=name),
                        own.attempt("Reduce", op=1, x=o.inline(np.ones((2, 2), np.float32)),
                                    axes=[0], result=o.into(name)),
                    ):  # fmt: skip
                        fails(end, "FAILED_PRECONDITION", "WRONG_HOST")
                        assert expected.items() <= end.metadata.items(), end
            assert homes == {"a", "b", "c"}
            for own in clients.values():  # intermediate results stay with their operands
                own.put("unnamed/7/1", x)
                fails(own.attempt("GetBuffer", name="unnamed/7/2"), "NOT_FOUND", "BUFFER_NOT_FOUND")
            # Without c its names have other homes, and the others keep theirs.
            kept = {name for own in (clients["a"], clients["b"]) for name in own.names()}
            ring.write_text("a host-a:1\nb host-b:2\n")
            moved = next(n for n in map("run{}/x".format, range(99)) if home_of("abc", n) == "c")
            new = clients[home_of("ab", moved)]
            assert eventually(lambda: o.outcome_of(lambda: new.put(moved, x)).ok, 20)
            for name in kept - {"unnamed/7/1"}:
                own = clients[home_of("abc", name)]
                assert o.outcome_of(lambda: own.put(name, x, replace=True)).ok, name  # noqa: B023
            # c, which is not in it, keeps the ring that it has.
            stays = "no server 'c', which --ring-name names; the ring in use stays"
            assert eventually(lambda: stays in started[2].log(), 20), started[2].log()
            clients["c"].put(moved, x)
            fails(clients["c"].attempt("GetBuffer", name=next(iter(kept - {"unnamed/7/1"}))),
                  "FAILED_PRECONDITION", "WRONG_HOST")  # fmt: skip
            # A file that cannot be used changes nothing.
            ring.write_text("a host-a:1\na host-b:2\n")
            assert eventually(lambda: "the ring in use stays" in started[0].log(), 20)
            assert "line 2" in started[0].log()
            fails(clients["a"].attempt("GetBuffer", name=moved), "FAILED_PRECONDITION" if
                  home_of("ab", moved) == "b" else "NOT_FOUND", "WRONG_HOST" if
                  home_of("ab", moved) == "b" else "BUFFER_NOT_FOUND")  # fmt: skip


def test_rings_that_cannot_be_used(server, client):
    with tempfile.TemporaryDirectory() as folder:
        ring = pathlib.Path(folder) / "ring"
        for text, complaint in (
            ("# none\n", "there is no server"), ("a\n", "line 1"), ("a b c\n", "line 1"),
            ("a h:1\nb/ h:2\n", "line 2"), ("b h:1\n", "no server 'a'"), ("a h:1\na h:2", "line 2"),
        ):  # fmt: skip
            ring.write_text(text)
            said = o.refused("--listen", "127.0.0.1:0", "--ring", ring, "--ring-name", "a")
            assert "--ring" in said and re.search(re.escape(complaint), said), said
        assert "cannot use" in o.refused("--ring", ring.parent / "none", "--ring-name", "a")
        assert "go together" in o.refused("--ring", ring)
        tokens = pathlib.Path(folder) / "tokens"
        tokens.write_text("")
        said = o.refused("--tokens", tokens, "--import-from", "a:1")
        assert "--import-tls-ca" in said, said


if __name__ == "__main__":
    sys.exit(o.run_tests(globals()))
