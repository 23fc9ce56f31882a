#!/usr/bin/env python3
"""Tests the known faults of this version of gRPC, as SECURITY.md lists them. They do not end the
process, and callers on other connections get responses. abuse_test.py covers the faults of
connections and of reset streams, and http2_test.py that of binary headers (CVE-2023-32732)."""

import contextlib
import sys

import outsider as o
from http2_test import CONTINUATION, WINDOW_UPDATE, still_answers

PATH = "/tessera.v1.BufferService/ListBuffers"


def text(value):
    value = value if isinstance(value, bytes) else value.encode()
    length = len(value)
    if length < 127:
        return bytes([length]) + value
    prefix, left = b"\x7f", length - 127
    while left >= 128:
        prefix, left = prefix + bytes([left & 127 | 128]), left >> 7
    return prefix + bytes([left]) + value


def field(name, value, indexed=False):
    """Returns a header as a literal. An indexed header is also added to the connection's table."""
    return (b"\x40" if indexed else b"\x00") + text(name) + text(value)


def headers(stream, block):
    """Returns the frames of a header block of any size, for a call without a message."""
    parts = [block[i : i + 16000] for i in range(0, len(block), 16000)]
    frames = b""
    for part in parts:
        first, last = part is parts[0], part is parts[-1]
        flags = (o.END_STREAM if first else 0) | (o.END_HEADERS if last else 0)
        frames += o.frame(o.HEADERS if first else CONTINUATION, flags, stream, part)
    return frames


def try_to_send(raw, *frames):
    raw.socket.settimeout(20)
    with contextlib.suppress(OSError):  # The server has stopped reading or has hung up.
        for some in frames:
            raw.send(some)


def send(server, *frames):
    """Sends on another connection, until the server has read the bytes or closed the connection."""
    raw = o.RawConnection(server)
    try_to_send(raw, *frames)
    assert still_answers(raw, 20 * o.Program.patience()), "neither a response nor an end"
    raw.close()


def check_others(server, client):
    assert server.alive(), server.log()[-1000:]
    assert client.dot_of_ones(timeout=60 * o.Program.patience()) == 1


def check_memory(server, before, limit, what):
    """Checks the growth of memory against a limit. AddressSanitizer keeps up to 256 MiB of freed
    memory."""
    limit += 256 * o.MI if o.Program.sanitized() else 0
    grown = lambda: server.rss() - before
    assert o.eventually(lambda: grown() < limit), f"{grown() / o.MI:.0f} MiB {what}"


def test_cve_2023_1428_invalid_headers_beyond_8_kib(server, client):
    core = (field(":method", "POST") + field(":path", PATH) + field(":authority", "localhost")
            + field("content-type", "application/grpc"))
    invalid = (("te", "x"), (":scheme", "x"), ("grpclb_client_stats", "x"))
    for name, value in invalid:
        for indexed in (False, True):
            for size in (900, 9000, 17000):
                padding = b"".join(
                    field(f"x-{i}", "y" * size, indexed) for i in range(1 + 20000 // size))
                bad = field(name, value, indexed)
                for block in (bad + core + padding, core + padding + bad):
                    send(server, headers(1, block))
        check_others(server, client)


def test_cve_2023_32731_headers_beyond_the_limit_and_then_the_table(server, client):
    base = o.request_headers(PATH)
    padding = b"".join(field(f"x-{i}", "y" * 900) for i in range(12))
    send(
        server,
        headers(1, base + padding + field("x-last", "z", indexed=True))
        + headers(3, base + b"\xbe")  # The table's newest entry.
        + headers(5, base + b"\xff\x7f"),  # The table lacks this entry.
    )
    check_others(server, client)


def test_cve_2023_33953_endless_headers(server, client):
    """Sends an integer with endless zeros, a string of a gigabyte, and headers without an end."""
    base = o.request_headers(PATH)
    beginnings = ((b"\x00\x7f" + b"\x80" * 16000, b"\x80" * 16000),
                  (base + b"\x00" + text("x") + b"\x7f\x81\xff\xff\xff\x03", b"y" * 16000),
                  (base, b"".join(field("x", "y" * 900) for _ in range(16))))
    for begin, more in beginnings:
        before = server.rss()
        raw = o.RawConnection(server)
        rest = [o.frame(CONTINUATION, 0, 1, more)] * 100  # 1.6 MB.
        try_to_send(raw, o.frame(o.HEADERS, o.END_STREAM, 1, begin), *rest)
        check_others(server, client)
        check_memory(server, before, 64 * o.MI, "for 1.6 MB of headers")
        raw.close()


def test_cve_2025_8671_frames_that_make_the_server_reset(server, client):
    before = server.rss()
    block = o.request_headers(PATH)
    for payload in (b"\0\0\0\0", b"\x7f\xff\xff\xff"):  # Increments by 0 and beyond all windows.
        send(server,
             *(o.frame(o.HEADERS, o.END_HEADERS, stream, block)
               + o.frame(WINDOW_UPDATE, 0, stream, payload)
               for stream in range(1, 20001, 2)))
        check_others(server, client)
    # Calls that remain would take 17 KiB each.
    check_memory(server, before, 150 * o.MI, "after 20,000 calls")


if __name__ == "__main__":
    sys.exit(o.run_tests(globals(), "--no-warm-up"))
