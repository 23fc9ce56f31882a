#!/usr/bin/env python3
"""Tests several servers from outside: links to a buffer's memory, imports between servers over
connections that break, and names that have one home."""

import collections
import concurrent.futures
import contextlib
import pathlib
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
from outsider import check_refusal as fails
from outsider import eventually
from relay import Relay

FROM_HERE = ("--import-from", "127.0.0.1:*")


@contextlib.contextmanager
def servers(*flags):
    """Starts one server per tuple of flags."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        yield [stack.enter_context(o.Server(folder, *one)) for one in flags]


def put_with_checksums(client, name, array):
    """Uploads in messages of 1 MiB with checksums."""
    data = array.tobytes()
    parts = [data[i : i + o.MI] for i in range(0, len(data), o.MI)]
    messages = [dict(data=part, crc32c=o.crc32c(part)) for part in parts]
    messages[0] |= dict(name=name, spec=o.spec_of(array))
    return client.upload(messages).buffer


def begin_import(client, source, name="y", timeout=120, **fields):
    """Begins a call that continues in the background."""
    fields = dict(source_name="x", name=name) | fields
    return client.future("ImportBuffer", timeout=timeout, source=source, **fields)


def import_from(client, source, name="y", timeout=120, **fields):
    """Returns the outcome of an import."""
    return o.outcome_of(begin_import(client, source, name, timeout, **fields))


def imports(client):
    return client.budget("imports").used


def source_of(download):
    """Yields the address of a source that answers downloads with download(request, context)."""
    messages = (o.buffers.DownloadRequest.FromString, o.buffers.DownloadResponse.SerializeToString)
    return o.handling(lambda _: grpc.unary_stream_rpc_method_handler(download, *messages))


def where(listener):
    return f"127.0.0.1:{listener.getsockname()[1]}"


def used(client):
    return client.device().buffer_used_bytes


def same(client, name, array):
    return client.download(name) == array.tobytes()


# --- links. tests/fuzz_tenants_test.py compares them with a model.

def test_links_that_cannot_be(server, client):
    x = np.ones(8, np.float32)
    client.put("x", x)
    for field in (dict(view=o.view([8])), dict(dtype=2), dict(device=client.device().name),
                  dict(placement=["all"])):
        outcome = client.attempt("CopyBuffer", source="x", name="t", link=True, **field)
        assert fails(outcome, "INVALID_ARGUMENT", "BAD_LINK").metadata["field"] in field
    client.create("draft", x)
    outcome = client.attempt("CopyBuffer", source="draft", name="t", link=True)
    fails(outcome, "FAILED_PRECONDITION", "BUFFER_NOT_READY")


def test_link_counts_as_a_buffer(server, client):
    count = lambda: client.budget("buffers").used  # noqa: E731
    client.put("x", np.ones(4, np.float32))
    client.call("CopyBuffer", source="x", name="a", link=True)
    client.call("CopyBuffer", source="a", name="b", link=True)
    assert count() == 3
    # A deleted link does not count, even if another link was made from it.
    client.call("DeleteBuffer", name="a")
    assert eventually(lambda: count() == 2)
    # A link keeps the memory, so the buffer counts until the link is gone.
    client.call("DeleteBuffer", name="x")
    assert count() == 2
    assert client.download("b") == np.ones(4, np.float32).tobytes()
    client.call("DeleteBuffer", name="b")
    assert eventually(lambda: count() == 0)


def test_sharded_buffers(server, client):
    """Tests a link to a sharded buffer, and an import of a sharded buffer, which is then on one
    device."""
    flags = ("--device", "cpu:0,cpu:1")  # All servers also get the common flags.
    with servers(flags, FROM_HERE) as (far, near):
        own, there = far.client(), near.client()
        x = np.arange(1 << 16, dtype=np.float32)
        own.upload([dict(name="x", spec=o.spec_of(x, placement=["all"]), data=x.tobytes())])
        own.call("CopyBuffer", source="x", name="y", link=True)
        own.call("DeleteBuffer", name="x")
        assert same(own, "y", x)
        assert len(own.call("GetBuffer", name="y").buffer.shards) > 1
        assert import_from(there, far.address, "z", source_name="y").ok
        assert same(there, "z", x)
        own.call("DeleteBuffer", name="y")
        assert eventually(lambda: all(d.buffer_used_bytes == 0 for d in own.info().devices))


# --- imports. tests/fuzz_tenants_test.py compares what they bring with a model.

def test_import_is_closed_by_default(server, client):
    client.put("x", np.ones(4, np.float32))
    refused = "PERMISSION_DENIED", "SOURCE_NOT_ALLOWED"
    fails(import_from(client, server.address), *refused)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        patterns = ("--import-from", f"localhost:{port},10.*.7:50051,[::1]:*")
        with servers(patterns) as (near,):
            there = near.client()
            for source in (f"127.0.0.1:{port}", f"localhost:{port - 1}", "10.0.0.7:50052",
                           "110.0.0.7:50051", f"xlocalhost:{port}", "[::2]:50051"):
                fails(import_from(there, source), *refused)
            for source in (
                "", "localhost", "unix:/tmp/x", "unix:///run/x:1", "dns:///localhost:1", "a,b:1",
                "ipv4:127.0.0.1:1", "localhost:0", "localhost:99999", "localhost:x", ":1", "a b:1",
                "[::1", "[::1]:", "a/b:1", "a@b:1", "x" * 300 + ":1", "é:1", "localhost:1\n",
            ):
                fails(import_from(there, source), "INVALID_ARGUMENT", "BAD_SOURCE")
        assert_not_called(listener)


def assert_not_called(listener):
    listener.settimeout(0)
    try:
        listener.accept()
    except BlockingIOError:
        return
    raise AssertionError("the source was called")


def test_import_refused_by_the_source(server, client):
    have = client.put("x", np.ones(4, np.float32))
    client.create("draft", np.ones(4, np.float32))
    with servers(FROM_HERE) as (near,):
        there = near.client()
        for fields, reason, code in (
                (dict(source_name="no"), "BUFFER_NOT_FOUND", "NOT_FOUND"),
                (dict(source_name="draft"), "BUFFER_NOT_READY", "FAILED_PRECONDITION"),
                (dict(source_version=have.version + 1), "VERSION_MISMATCH", "FAILED_PRECONDITION")):
            outcome = import_from(there, server.address, **fields)
            fails(outcome, "FAILED_PRECONDITION", "SOURCE_REFUSED")
            expected = {"source": server.address, "code": code, "reason": reason}
            assert outcome.metadata == expected, outcome
        assert there.names() == []


def test_import_resumes_where_it_stood(server, client):
    x = np.random.default_rng(2).integers(0, 1 << 60, 8 * o.MI // 8)
    source = put_with_checksums(client, "x", x)
    with servers(FROM_HERE) as (near,):
        there = near.client()
        # There are more breaks than the allowed number of attempts without progress.
        relay = Relay(server.address, cuts=4 * [3 * o.MI // 2, 300_000])
        answer = import_from(there, relay.where).answer
        assert same(there, "y", x)
        assert answer.interruptions == 8 and answer.buffer.crc32c == source.crc32c
        # Nothing that had arrived was sent again, except for messages that were cut in two.
        assert sum(relay.passed) < x.nbytes + 9 * o.MI, relay.passed
        relay.close()
        # A byte that is changed on the way is noticed, and is sent again. The import continues
        # where it stopped, which proves that the connection is a new one.
        relay = Relay(server.address, damage=5 * o.MI)
        answer = import_from(there, relay.where, "z").answer
        assert relay.damage is None and answer.interruptions >= 1 and same(there, "z", x)
        relay.close()


def test_import_checks_the_whole(server, client):
    """The source is wrong about its own bytes, for example because its checksum belongs to other
    bytes."""
    x = np.arange(2048, dtype=np.float32)
    size = 4096  # The size of a message.
    asked = collections.Counter()

    def lie(i, changes, request, context):
        """Yields two messages with checksums. changes says what is wrong with them."""
        asked[i] += 1
        if asked[i] <= changes.get("full", 0):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "there is no room")
        data = x.tobytes()
        buffer = o.buffers.Buffer(
            name="x", dtype=1, shape=x.shape, size_bytes=x.nbytes, state=changes.get("state", 2),
            version=changes.get("version", 7) + asked[i] * changes.get("replaced", 0),
            crc32c=o.crc32c(data) ^ changes.get("whole", 0))
        for begin in range(request.offset, len(data), size):
            part = data[begin : begin + size]
            yield o.buffers.DownloadResponse(
                buffer=None if "untyped" in changes else buffer,
                offset=begin + changes.get("shift", 0),
                data=part + bytes(changes.get("more", 0)),
                crc32c=None if "bare" in changes else o.crc32c(part))
            if "short" in changes:
                return
        if asked[i] <= changes.get("ends", 0):
            context.abort(changes["code"], "behind the last byte")

    unreachable = "UNAVAILABLE", "SOURCE_UNREACHABLE"
    cases = (
        (dict(whole=1), "DATA_LOSS", "BAD_CHECKSUM"),
        (dict(bare=1), *unreachable),
        (dict(untyped=1), *unreachable),
        (dict(shift=8), *unreachable),
        (dict(more=1), *unreachable),
        (dict(state=1), *unreachable),
        (dict(short=1, replaced=1), *unreachable),
        (dict(version=0), *unreachable),
        (dict(ends=9, code=grpc.StatusCode.DATA_LOSS), "FAILED_PRECONDITION", "SOURCE_REFUSED"),
        (dict(), "OK", ""),
        (dict(short=1), "OK", ""),  # One message per attempt is progress.
        (dict(full=2), "OK", ""),
        (dict(ends=1, code=grpc.StatusCode.UNAVAILABLE), "OK", ""))
    with servers(FROM_HERE) as (near,), concurrent.futures.ThreadPoolExecutor(4) as threads:
        there = near.client()

        def run(i):
            changes, code, reason = cases[i]
            with source_of(lambda *call: lie(i, changes, *call)) as source:
                outcome = import_from(there, source, f"y{i}")
            assert (outcome.code, outcome.reason) == (code, reason), (changes, outcome)
            if "whole" in changes:
                assert f"but {source} expects" in outcome.text, outcome
            if code == "UNAVAILABLE":
                assert asked[i] == 7, asked
                right = size if "replaced" in changes else 0  # Its first message was right.
                assert outcome.metadata["received"] == str(right), outcome
            if outcome.ok:
                assert same(there, f"y{i}", x)

        list(threads.map(run, range(len(cases))))
        assert there.names() == sorted(f"y{i}" for i, case in enumerate(cases) if case[1] == "OK")


def test_import_keeps_tokens_to_itself(server, client):
    """A server without tokens passes its callers' tokens to other servers only over TLS
    (tls_test)."""
    found = []

    def refuse(request, context):
        found.append({key for key, _ in context.invocation_metadata()})
        context.abort(grpc.StatusCode.NOT_FOUND, "")

    with source_of(refuse) as source, servers(FROM_HERE) as (near,):
        outcome = import_from(Caller(near, "secret"), source)
        fails(outcome, "FAILED_PRECONDITION", "SOURCE_REFUSED")
    assert len(found) == 1 and "authorization" not in found[0], found


def test_an_import_that_stands_still_says_why(server, client):
    flags = (*FROM_HERE, "--transfer-timeout", "2s")
    with servers(flags) as (near,), socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # Refuses connections.
        outcome = import_from(near.client(), where(closed))
        fails(outcome, "DEADLINE_EXCEEDED", "SOURCE_STALLED")
        assert "onnect" in outcome.text, outcome


def test_import_of_a_server_that_dies(server, client):
    x = np.ones(32 * o.MI // 4, np.float32)
    with servers((), FROM_HERE) as (far, near):
        far.client().put("x", x)
        there = near.client()
        relay = Relay(far.address, hold=4 * o.MI)
        future = begin_import(there, relay.where)
        assert eventually(relay.silent.is_set)
        far.process.kill()
        far.process.wait()
        relay.listener.close()
        relay.silent.clear()
        outcome = fails(o.outcome_of(future), "UNAVAILABLE", "SOURCE_UNREACHABLE")
        assert int(outcome.metadata["received"]) > 0
        assert outcome.metadata["size"] == str(x.nbytes)
        assert there.names() == [] and eventually(lambda: used(there) == 0)
        assert imports(there) == 0
        relay.close()


def test_import_that_stands_still(server, client):
    client.put("x", np.ones(16 * o.MI // 4, np.float32))
    with servers((*FROM_HERE, "--transfer-timeout", "2s"), FROM_HERE) as started:
        hasty, patient = (one.client() for one in started)
        relays = [Relay(server.address) for _ in range(4)]
        for relay in relays:
            relay.silent.set()
        stalled, held = ([begin_import(there, relay.where, f"y{i}")
                          for i, relay in enumerate(relays)] for there in (hasty, patient))
        assert eventually(lambda: imports(patient) == 4)
        one_more = import_from(patient, server.address, "z")
        assert fails(one_more, "RESOURCE_EXHAUSTED", "TOO_MANY_IMPORTS").retry_s is not None
        for call in held:
            call.cancel()
        for call in stalled:
            outcome = fails(o.outcome_of(call), "DEADLINE_EXCEEDED", "SOURCE_STALLED")
            assert outcome.metadata["limit"] == "2s"
        for relay in relays:
            relay.close()
        for there in (hasty, patient):
            assert eventually(lambda: imports(there) == 0)  # noqa: B023
        assert import_from(patient, server.address, "z").ok


def send_no_bytes(request, context):
    """Sends messages of a buffer x, without bytes."""
    buffer = o.buffers.Buffer(name="x", dtype=1, shape=[4096], state=2, version=7)
    while context.is_active():
        yield o.buffers.DownloadResponse(buffer=buffer, crc32c=0)
        time.sleep(0.1)


def test_import_of_a_source_that_sends_no_bytes(server, client):
    flags = (*FROM_HERE, "--transfer-timeout", "2s")
    with source_of(send_no_bytes) as source, servers(flags) as (near,):
        fails(import_from(near.client(), source), "DEADLINE_EXCEEDED", "SOURCE_STALLED")


def test_a_drain_does_not_wait_for_an_import_that_stands_still(server, client):
    """The source of the import may send no bytes, or its name may not be found."""
    flags = (*FROM_HERE, "--drain-timeout", "50s")
    with contextlib.ExitStack() as stack:
        closed = stack.enter_context(socket.socket())
        closed.bind(("127.0.0.1", 0))
        sources = stack.enter_context(source_of(send_no_bytes)), where(closed)
        started = stack.enter_context(servers(flags, flags))
        clients = [one.client() for one in started]
        calls = [begin_import(*both) for both in zip(clients, sources)]
        for one, there in zip(started, clients):
            assert eventually(lambda: imports(there) == 1)  # noqa: B023
            one.signal()
        for one, call in zip(started, calls):
            assert fails(o.outcome_of(call), "UNAVAILABLE", "DRAINING").metadata["limit"] == "5s"
            assert one.wait(60) == 0


def greet_and_read(connection):
    """Sends a frame from which a client learns that it is connected, and reads to the end."""
    connection.settimeout(30)
    connection.sendall(o.frame(o.SETTINGS, 0, 0))
    while connection.recv(4096):  # The first bytes of an HTTP/2 client.
        pass


def test_imports_from_a_source_that_hangs_leave_their_places(server, client):
    """The imports' sockets are closed as soon as their callers leave."""
    client.put("x", np.ones(4, np.float32))
    with socket.create_server(("127.0.0.1", 0)) as mute, servers(FROM_HERE) as (near,):
        there = near.client()
        mute.settimeout(60)
        for _ in range(10):
            call = begin_import(there, where(mute))
            with mute.accept()[0] as connection:
                call.cancel()
                assert eventually(lambda: imports(there) == 0, 10)
                greet_and_read(connection)
        assert import_from(there, server.address, "z").ok


def test_an_import_that_ends_while_it_connects_again_leaves_no_socket(server, client):
    with socket.socket() as source, contextlib.ExitStack() as stack, servers(FROM_HERE) as (near,):
        source.bind(("127.0.0.1", 0))  # Refuses connections.
        source.settimeout(60)
        there = near.client()

        def begin(count):
            """Begins imports that have failed to connect."""
            calls = [begin_import(there, where(source), f"y{i}") for i in range(count)]
            assert eventually(lambda: imports(there) == count)
            assert eventually(near.asleep)
            return calls

        def cancel(calls):
            for call in calls:
                call.cancel()
            assert eventually(lambda: imports(there) == 0, 10)

        cancel(begin(1))  # The first import keeps two descriptors.
        files = o.descriptors(near)
        calls = begin(4)
        source.listen()
        connections = [stack.enter_context(source.accept()[0]) for _ in calls]
        cancel(calls)
        for connection in connections:
            greet_and_read(connection)
        assert eventually(lambda: o.descriptors(near) <= files)


def test_import_says_what_is_wrong_here_before_it_asks_the_source(server, client):
    with socket.create_server(("127.0.0.1", 0)) as mute, servers(FROM_HERE) as (near,):
        there = near.client()
        there.put("y", np.ones(4, np.float32))
        for wrong, code, reason in (
                ({"name": "y"}, "ALREADY_EXISTS", "BUFFER_EXISTS"),
                ({"name": ""}, "INVALID_ARGUMENT", "BAD_NAME"),
                ({"name": "z", "ttl": Duration(seconds=-1)}, "INVALID_ARGUMENT", "BAD_TTL"),
                ({"name": "z", "device": "cpu:7"}, "INVALID_ARGUMENT", "BAD_DEVICE")):
            fails(import_from(there, where(mute), **wrong), code, reason)
        assert_not_called(mute)


def test_import_ends_with_its_caller(server, client):
    client.put("x", np.ones(16 * o.MI // 4, np.float32))
    with servers(FROM_HERE) as (near,):
        there = near.client()
        relay = Relay(server.address, hold=3 * o.MI)
        call = begin_import(there, relay.where)
        assert eventually(relay.silent.is_set)
        call.cancel()  # The dead connection is noticed after 30 s.
        assert eventually(lambda: imports(there) == 0, 10)
        assert eventually(lambda: there.names() == [] and used(there) == 0)
        # The name is deleted during the import.
        relay.close()
        relay = Relay(server.address, hold=3 * o.MI)
        call = begin_import(there, relay.where)
        assert eventually(relay.silent.is_set)
        assert eventually(lambda: there.attempt("DeleteBuffer", name="y").ok)
        relay.silent.clear()
        fails(o.outcome_of(call), "NOT_FOUND", "BUFFER_NOT_FOUND")
        assert eventually(lambda: used(there) == 0)
        relay.close()


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
                    for end in (outcome, own.attempt("GetBuffer", name=name),
                                own.attempt("Dot", a=o.resident(name), b=o.resident(name)),
                                own.attempt("DeleteBuffer", name=name),
                                own.attempt("Reduce", op=1, x=o.inline(np.ones((2, 2), np.float32)),
                                            axes=[0], result=o.into(name))):
                        fails(end, "FAILED_PRECONDITION", "WRONG_HOST")
                        assert expected.items() <= end.metadata.items(), end
            assert homes == {"a", "b", "c"}
            for own in clients.values():  # Intermediate results stay there.
                own.put("unnamed/7/1", x)
                fails(own.attempt("GetBuffer", name="unnamed/7/2"), "NOT_FOUND", "BUFFER_NOT_FOUND")
            # Without c, c's names have other homes, but all other names keep theirs.
            kept = {name for own in (clients["a"], clients["b"]) for name in own.names()}
            ring.write_text("a host-a:1\nb host-b:2\n")
            moved = next(n for n in map("run{}/x".format, range(99)) if home_of("abc", n) == "c")
            new = clients[home_of("ab", moved)]
            assert eventually(lambda: o.outcome_of(lambda: new.put(moved, x)).ok)
            for name in kept - {"unnamed/7/1"}:
                own = clients[home_of("abc", name)]
                assert o.outcome_of(lambda: own.put(name, x, replace=True)).ok, name  # noqa: B023
            # c is not in the new ring, and keeps the ring that it has.
            stays = "no server 'c', which --ring-name names; the current ring stays in effect"
            assert eventually(lambda: stays in started[2].log()), started[2].log()
            clients["c"].put(moved, x)
            fails(clients["c"].attempt("GetBuffer", name=next(iter(kept - {"unnamed/7/1"}))),
                  "FAILED_PRECONDITION", "WRONG_HOST")
            # An unusable file changes nothing.
            ring.write_text("a host-a:1\na host-b:2\n")
            assert eventually(lambda: "the current ring stays in effect" in started[0].log())
            assert "line 2" in started[0].log()
            fails(clients["a"].attempt("GetBuffer", name=moved), "FAILED_PRECONDITION" if
                  home_of("ab", moved) == "b" else "NOT_FOUND", "WRONG_HOST" if
                  home_of("ab", moved) == "b" else "BUFFER_NOT_FOUND")


def test_rings_that_cannot_be_used(server, client):
    with tempfile.TemporaryDirectory() as folder:
        ring = pathlib.Path(folder) / "ring"
        for text, complaint in (("a h:1\nb/ h:2\n", "line 2"), ("b h:1\n", "no server 'a'")):
            ring.write_text(text)
            said = o.refused("--listen", "127.0.0.1:0", "--ring", ring, "--ring-name", "a")
            assert "--ring" in said and complaint in said, said
        assert "cannot use" in o.refused("--ring", ring.parent / "none", "--ring-name", "a")
        assert "go together" in o.refused("--ring", ring)
        tokens = pathlib.Path(folder) / "tokens"
        tokens.write_text("")
        said = o.refused("--tokens", tokens, "--import-from", "a:1")
        assert "--import-tls-ca" in said, said


if __name__ == "__main__":
    sys.exit(o.run_tests(globals()))
