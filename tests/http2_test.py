#!/usr/bin/env python3
"""Sends invalid HTTP/2, makes slow and half-open connections, and opens very many streams and
connections. The server survives, other clients are served in the meantime, and nothing is left
over.

usage: http2_test.py --server build/bin/tessera-server [--alone] [test ...]

With --alone it runs the case that needs the machine's descriptors and ports, otherwise all other
cases."""

import resource
import struct
import sys
import time

import numpy as np

import outsider as o
from outsider import eventually, frame

PRIORITY, PUSH_PROMISE, WINDOW_UPDATE, CONTINUATION = 2, 5, 8, 9
ACK, PADDED, WITH_PRIORITY = 1, 8, 0x20
DOT = "/tessera.v1.ComputeService/Dot"
SETTINGS = frame(o.SETTINGS, 0, 0)


def literal(name, value):
    """Returns a header field that is not indexed, with bytes of any kind."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def dot_of_ones():
    one = o.inline(np.ones(1, np.float32))
    body = o.compute.DotRequest(a=one, b=one).SerializeToString()
    return b"\0" + len(body).to_bytes(4, "big") + body


def call(stream, body, path=DOT, flags=o.END_STREAM):
    head = frame(o.HEADERS, o.END_HEADERS, stream, o.request_headers(path))
    return head + frame(o.DATA, flags, stream, body)


def setting(key, value):
    return frame(o.SETTINGS, 0, 0, struct.pack(">HI", key, value))


def broken():
    """Returns {what is wrong: the bytes after preface and SETTINGS}."""
    head = o.request_headers(DOT)
    body = dot_of_ones()

    def headers(fields, flags=o.END_HEADERS, stream=1):
        return frame(o.HEADERS, flags, stream, fields)

    def with_field(name, value):
        return headers(head + literal(name, value)) + frame(o.DATA, o.END_STREAM, 1, body)

    return {
        # Frames (RFC 9113, sections 4 and 5)
        "a frame that announces 16 MiB": b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(100),
        "DATA on a stream that is idle": frame(o.DATA, 0, 7, body),
        "padding alone": call(1, body, flags=0) + frame(o.DATA, PADDED, 1, b"\x01\0") * 1000,
        "empty DATA without an end": call(1, b"", flags=0) + frame(o.DATA, 0, 1) * 5000,
        "PRIORITY for many streams": b"".join(
            frame(PRIORITY, 0, stream, b"\0\0\0\0\x10") for stream in range(1, 8000, 2)),
        # Connection
        "a window of 2^32 - 1": setting(4, 0xFFFFFFFF),
        "a header table of 4 GiB": setting(1, 0xFFFFFFFF) + call(1, body),
        "4000 SETTINGS": setting(4, 65_535) * 4000,
        "4000 PINGs": frame(o.PING, 0, 0, bytes(8)) * 4000,
        "GOAWAY, then a call": frame(o.GOAWAY, 0, 0, bytes(8)) + call(1, body),
        # Header blocks
        "CONTINUATION without an end": headers(head, 0)
        + frame(CONTINUATION, 0, 1, literal(b"x", b"y" * 100)) * 2000,
        "a table size beyond the settings": headers(b"\x3f\xe1\xff\x7f" + head),
        "64 KiB of header fields": headers(head, 0)
        + frame(CONTINUATION, 0, 1, literal(b"x-big", b"y" * 120) * 128) * 4
        + frame(CONTINUATION, o.END_HEADERS, 1, b""),
        "a field in capitals": with_field(b"X-Big", b"y"),
        "a field with a line break": with_field(b"x", b"a\r\nb: c"),
        "a field with a zero": with_field(b"x", b"a\0b"),
        "a content-length that is wrong": with_field(b"content-length", b"7"),
        "binary metadata that is no base64": with_field(b"x-bin", b"***"),
        "a timeout that is none": with_field(b"grpc-timeout", b"99999999999H"),
        "a negative timeout": with_field(b"grpc-timeout", b"-1S"),
        "an encoding that there is not": with_field(b"grpc-encoding", b"zip"),
        "trailers without an end": call(1, body, flags=0) + headers(literal(b"x", b"y")),
        # gRPC messages
        "half a message": call(1, body[:7]),
        "two messages of a call that takes one": call(1, body + body),
        "no message": call(1, b""),
        "a message of 4 GiB": call(1, b"\0\xff\xff\xff\xff" + bytes(50), flags=0),
        "a flag that there is not": call(1, b"\x7f" + body[1:]),
        "compressed, by nothing": call(1, b"\x01" + body[1:]),
        "a method that there is not": call(1, body, path="/tessera.v1.ComputeService/Nothing"),
        "a path without a slash": call(1, body, path="x")}


def still_answers(raw, seconds):
    """Returns whether the connection has ended or answers a PING. Other frames are ignored."""
    try:
        raw.send(frame(o.PING, 0, 0, b"pingping"))
    except OSError:
        return True
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        try:
            found = raw.read_frame(min(1, max(0, give_up - time.monotonic())))
        except OSError:  # The server has closed.
            return True
        if found is None:
            raw.socket.settimeout(0)
            try:
                if not raw.socket.recv(1):
                    return True
            except BlockingIOError:
                continue
            except OSError:
                return True
        elif found[0] == o.PING and found[1] & ACK and found[3] == b"pingping":
            return True
    return False


def serves(client):
    assert client.dot_of_ones(timeout=30 * o.Program.patience()) == 1


def test_broken_frames(server, client):
    serves(client)
    connections = []
    for what, data in broken().items():
        raw = o.RawConnection(server)
        connections.append(raw)
        try:
            raw.send(data)
        except OSError:
            pass  # The server has closed.
        patience = 30 * o.Program.patience()
        assert still_answers(raw, patience), f"{what}: neither a response nor an end"
        assert server.alive(), f"{what}: the server ended with {server.process.poll()}"
        serves(client)
    for raw in connections:
        raw.close()
    leaves_nothing(client, 1)
    print(f"{len(connections)} kinds of broken HTTP/2", flush=True)


def leaves_nothing(client, connections):
    at_rest = {"connections": connections, "uploads": 0, "downloads": 0, "host_memory": 10_000}
    held = lambda: {b.name: b.used for b in client.info().budgets if b.name in at_rest}
    assert eventually(lambda: all(used <= at_rest[k] for k, used in held().items())), held()


def test_prefaces(server, client):
    """Sends bytes that are not a preface or stop within it, and frames before SETTINGS."""
    connections = []
    for data in (
        b"", o.PREFACE[:1], o.PREFACE[:23], o.PREFACE.lower(),
        o.PREFACE + call(1, dot_of_ones()),
        o.PREFACE + frame(o.SETTINGS, ACK, 0),
        o.PREFACE + SETTINGS[:5],
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(160),
    ):
        one = server.socket()
        one.sendall(data)
        connections.append(one)
        serves(client)
    for one in connections:
        one.close()
    leaves_nothing(client, 1)


def test_slow_senders(server, client):
    """Bytes that arrive one at a time do not delay other callers. A call that is eventually
    complete gets its response."""
    stream = o.PREFACE + SETTINGS + call(1, dot_of_ones())
    slow = [server.socket() for _ in range(20)]
    for at, byte in enumerate(stream):
        for one in slow:
            one.sendall(bytes([byte]))
        if at % 16 == 0:
            serves(client)
    for one in slow:
        assert answers(o.RawConnection(begun=one), 1, 60) == 1, "a slow call has no response"
        one.close()
    # These senders stop in the middle of a frame.
    for end in (len(o.PREFACE) + 3, len(stream) - 5):
        for one in [server.socket() for _ in range(20)]:
            one.sendall(stream[:end])
            one.close()
    serves(client)
    leaves_nothing(client, 1)


def answers(raw, wanted, seconds):
    """Returns how many calls on the connection have got a response with a message. Stops at the
    wanted number."""
    give_up = time.monotonic() + seconds * o.Program.patience()
    with_message, ended = set(), 0
    while ended < wanted and time.monotonic() < give_up:
        found = raw.read_frame(give_up - time.monotonic())
        if found is None:
            break
        kind, flags, stream, payload = found
        if kind in (o.RST_STREAM, o.GOAWAY):
            raise AssertionError(f"the server ends it: {found}")
        if kind == o.DATA and payload:
            with_message.add(stream)
        ended += kind == o.HEADERS and bool(flags & o.END_STREAM) and stream in with_message
    return ended


def many():
    """Returns as many connections as the descriptors of both sides allow, but at most 10,000."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= 16_000:
        resource.setrlimit(resource.RLIMIT_NOFILE, (16_000 if soft < 16_000 else soft, hard))
        return 10_000 // o.Program.patience()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard - 500


def alone(test):
    """Marks a case that needs the machine to itself."""
    test.alone = True
    return test


@alone
def test_ten_thousand_connections(server, client):
    count = many()  # The server inherits this limit.
    crowded = o.Server(server.log_path.parent, f"--max-connections={3 * count}", "--queue=20000")
    one = crowded.client()
    serves(one)
    before = crowded.rss()
    files, connections = o.descriptors(crowded), []
    begin = time.monotonic()
    for i in range(count):
        raw = crowded.socket(timeout=60)
        raw.sendall(o.PREFACE + SETTINGS + call(1, dot_of_ones()))
        connections.append(raw)
        if i % 1000 == 0:
            serves(one)
    for raw in connections:
        assert answers(o.RawConnection(begun=raw), 1, 120) == 1, "a call has no response"
    took = time.monotonic() - begin
    open_now = one.budget("connections").used
    assert open_now == count + 1, f"{open_now} connections are open, not {count + 1}"
    each = (crowded.rss() - before) / count
    serves(one)
    each = f"{each / 1024:.1f} KiB each"
    print(f"{count} connections, a call on each, {took:.1f} s, {each}", flush=True)
    for raw in connections:
        raw.close()
    leaves_nothing(one, 1)
    assert eventually(lambda: o.descriptors(crowded) <= files)
    assert crowded.stop() == 0


def test_too_many_streams_beside_many_connections(server, client):
    """The connection with too many streams is found although there are more connections than the
    500 that gRPC lists at a time."""
    count = min(many() // 2, 600)
    flags = (f"--max-connections={2 * count}", "--max-streams=16")
    with o.Server(server.log_path.parent, *flags) as crowded:
        connections = [o.RawConnection(crowded) for _ in range(count)]
        for raw in connections:
            assert raw.find_frame(o.SETTINGS, 60), "the server does not greet"
        connections.append(o.RawConnection(crowded))
        head = o.request_headers(DOT)
        last = connections[-1]
        last.send(*(frame(o.HEADERS, o.END_HEADERS, stream, head) for stream in range(1, 1024, 2)))
        last.socket.settimeout(30)
        while last.socket.recv(65536):  # Reads settings, but no responses.
            pass
        for raw in connections:
            raw.close()
        assert crowded.stop() == 0


def test_ten_thousand_streams(server, client):
    """1000 calls are open on each connection at the same time. Then they are completed, and all of
    them get a response."""
    connections = [o.RawConnection(server) for _ in range(10)]
    each = 1000 // o.Program.patience()
    head, body, streams = o.request_headers(DOT), dot_of_ones(), range(1, 2 * each, 2)
    begin = time.monotonic()
    for raw in connections:
        raw.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 24)))
        raw.send(*(frame(o.HEADERS, o.END_HEADERS, stream, head) for stream in streams))
    serves(client)
    for raw in connections:
        raw.send(*(frame(o.DATA, 0, stream, body[:6]) for stream in streams))
    serves(client)
    for raw in connections:
        raw.send(*(frame(o.DATA, o.END_STREAM, stream, body[6:]) for stream in streams))
    for raw in connections:
        got = answers(raw, each, 120)
        assert got == each, f"{got} of {each} calls are answered"
    took = time.monotonic() - begin
    print(f"{10 * each} calls open at once, all answered in {took:.1f} s", flush=True)
    for raw in connections:
        raw.close()
    leaves_nothing(client, 1)


if __name__ == "__main__":
    chosen = "--alone" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--alone"]
    cases = {name: value
             for name, value in globals().items()
             if not name.startswith("test_") or hasattr(value, "alone") == chosen}
    sys.exit(o.run_tests(cases, "--queue=20000", "--no-warm-up"))
