#!/usr/bin/env python3
"""Tests shared memory as an outsider sees it: contents against NumPy, the socket's promises, and
what clients that are dishonest, hang or die leave behind."""

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import numpy as np

import outsider as o
from outsider import check_refusal as refused
from outsider import eventually

RNG = np.random.default_rng(20261124)
PIECE = 64 * o.MI
PAGE = 4096
GREETING = b"tessera.v1"
HANDSHAKE_S = 5

SEAL_SHRINK, SEAL_GROW, SEAL_WRITE = 2, 4, 8
SEALS = SEAL_SHRINK | SEAL_GROW
MFD_HUGETLB = 4

LIMIT = 512 * o.MI
REGIONS = 64
HANDSHAKES = 64
FLAGS = (*("--memory-limit", "1Gi", "--max-transfers", "4"),
         *("--shared-memory-limit", str(LIMIT), "--no-warm-up"))


# --- Clients --------------------------------------------------------------------------------------

def make_file(size, seals=SEALS, allocate=True, flags=os.MFD_ALLOW_SEALING):
    """Makes a file as the protocol requires, and maps it."""
    file = os.memfd_create("region", flags | os.MFD_CLOEXEC)
    os.ftruncate(file, size)
    if allocate and size:
        os.posix_fallocate(file, 0, size)
    memory = mmap.mmap(file, size) if size else None
    if seals:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file, memory


KEEP_SIZE, PUNCH_HOLE = 1, 2


def fallocate(file, mode, offset, size):
    """Calls the system's fallocate, because Python does not offer its modes."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_int(file), ctypes.c_int(mode), ctypes.c_long(offset), ctypes.c_long(size))
    if libc.fallocate(*arguments) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def connect(path, timeout=20):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout)
    connection.connect(str(path))
    return connection


def register(path, files, greeting=GREETING):
    """Returns the connection and the server's response, or None for the response if the server has
    closed the connection."""
    connection = connect(path)
    socket.send_fds(connection, [greeting], files)
    packet = connection.recv(65536)
    return connection, o.shared.RegisterRegionResponse.FromString(packet) if packet else None


def registers(path):
    """Returns whether the server accepts a region now."""
    file, _ = make_file(PAGE)
    try:
        connection, answer = register(path, [file])
        connection.close()
        return answer is not None
    except OSError:
        return False
    finally:
        os.close(file)


class Region:
    """Memory that this process shares with the server."""

    def __init__(self, path, size):
        self.file, self.memory = make_file(size)
        self.connection, answer = register(path, [self.file])
        assert answer is not None and len(answer.region) == 16, answer
        self.token = answer.region
        self.bytes = np.frombuffer(self.memory, np.uint8)

    def range(self, offset, size):
        return o.shared.RegionRange(region=self.token, offset=offset, size=size)

    def close(self):
        self.connection.close()
        os.close(self.file)


def call(client, rpc, timeout=60, **fields):
    stub = o.shared_grpc.SharedMemoryServiceStub(client.channel)
    return getattr(stub, rpc)(getattr(o.shared, rpc + "Request")(**fields), timeout=timeout)


def attempt(client, rpc, **fields):
    return o.outcome_of(lambda: call(client, rpc, **fields))


def rejected(answer, reason, field=None):
    assert answer is not None and not answer.region and answer.reason == reason, answer
    assert field is None or answer.metadata["field"] == field, answer


# --- What a server holds --------------------------------------------------------------------------

def mapped_regions(server):
    maps = pathlib.Path(f"/proc/{server.pid}/maps").read_text(encoding="ascii", errors="replace")
    return maps.count("memfd:region")


def is_clean(server, client):
    """Returns whether no region is left. The budgets are restored when the last byte is freed."""
    return (mapped_regions(server) == 0
            and client.budget("shared_memory").used == 0
            and client.budget("shared_regions").used == 0
            and client.budget("uploads").used == 0
            and client.budget("downloads").used == 0)


def path_of(server):
    return server.log_path.parent / "shared.sock"


# --- Transfers ------------------------------------------------------------------------------------

def test_contents_of_every_size(server, client):
    """Tests sizes around pages and pieces, at odd offsets of the region, in both directions."""
    region = Region(path_of(server), 2 * PIECE + o.MI)
    sizes = [0, 1, 3, PAGE - 1, PAGE, PAGE + 1, 5 * o.MI + 7]
    sizes += [PIECE - 1, PIECE, PIECE + 1, 2 * PIECE - 1, 2 * PIECE, 2 * PIECE + 1]
    for size in sizes:
        count = size // 2
        data = RNG.integers(0, 256, 2 * count, np.uint8)
        at = int(RNG.integers(0, 1000))
        region.bytes[at : at + data.size] = data
        spec = o.buffers.BufferSpec(dtype=3, shape=[count], replace=True)
        source = region.range(at, data.size)
        buffer = call(client, "UploadShared", name="x", spec=spec, source=source).buffer
        assert buffer.state == 2 and buffer.size_bytes == data.size, buffer
        assert data.size == 0 or not buffer.HasField("crc32c")
        assert client.download("x") == data.tobytes(), size
        region.bytes[:] = 0xEE
        answer = call(client, "DownloadShared", name="x", target=region.range(at + 1, data.size))
        assert answer.size == data.size and answer.buffer.version == buffer.version
        assert np.array_equal(region.bytes[at + 1 : at + 1 + data.size], data), size
        assert np.all(region.bytes[: at + 1] == 0xEE)
        assert np.all(region.bytes[at + 1 + data.size :] == 0xEE), size


def test_uploads_that_cannot_be(server, client):
    """tests/fuzz_tenants_test.py compares names, drafts and ranges with a model."""
    region = Region(path_of(server), o.MI)
    bad, spec = "INVALID_ARGUMENT", o.buffers.BufferSpec(dtype=1, shape=[1])
    client.put("n", np.ones(1, np.float32))

    def upload(name="m", **fields):
        return attempt(client, "UploadShared", name=name, source=region.range(0, 4), **fields)

    for shape, expected in (((2,), 8), ((0,), 0), ((1 << 40,), 4 << 40)):
        other = o.buffers.BufferSpec(dtype=1, shape=shape)
        refused(upload(spec=other), bad, "BAD_RANGE", size=4, expected=expected)
    for more, field in ((dict(version=7), "version"), (dict(offset=4), "offset")):
        refused(upload(spec=spec, **more), bad, "BAD_MESSAGE", field=field)
    assert client.names() == ["n"]
    refused(upload("n"), "FAILED_PRECONDITION", "BUFFER_SEALED")
    client.create("m", np.zeros(2, np.float32))
    for offset in (5, 8, 1 << 63, (1 << 64) - 1, (1 << 64) - 4):
        refused(upload(offset=offset), bad, "BAD_RANGE")
    for rpc, side in (("UploadShared", "source"), ("DownloadShared", "target")):
        outcome = attempt(client, rpc, name="n", **{side: region.range(1, o.MI)})
        refused(outcome, bad, "BAD_RANGE", offset=1, size=o.MI, limit=o.MI)


def test_truth_values(server, client):
    region = Region(path_of(server), o.MI)
    spec = o.buffers.BufferSpec(dtype=7, shape=[1000], replace=True)
    region.bytes[:1000] = [0, 1] * 500
    call(client, "UploadShared", name="b", spec=spec, source=region.range(0, 1000))
    assert client.download("b") == bytes([0, 1] * 500)
    region.bytes[700] = 2
    outcome = attempt(client, "UploadShared", name="c", spec=spec, source=region.range(0, 1000))
    refused(outcome, "INVALID_ARGUMENT", "BAD_BOOL", offset=700, value=2)
    client.create("d", np.zeros(1000, bool))
    outcome = attempt(client, "UploadShared", name="d", offset=10, source=region.range(690, 20))
    refused(outcome, "INVALID_ARGUMENT", "BAD_BOOL", offset=20, value=2)
    assert client.names() == ["b", "d"]
    # A refused write does not keep the draft from being sealed.
    region.bytes[700] = 0
    call(client, "UploadShared", name="d", source=region.range(0, 1000))
    client.call("SealBuffer", name="d")
    assert client.download("d") == bytes([0, 1] * 500)


def test_truth_values_that_change_during_the_upload(server, client):
    size = o.MI
    region = Region(path_of(server), size)
    spec = o.buffers.BufferSpec(dtype=7, shape=[size], replace=True)
    over = threading.Event()

    def change():
        while not over.is_set():
            for value in (7, 1):
                ctypes.memset(region.bytes.ctypes.data, value, size)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(200):
            outcome = attempt(client, "UploadShared", name="b", spec=spec,
                              source=region.range(0, size))
            if outcome.reason != "BAD_BOOL":
                assert outcome.ok and 7 not in client.download("b"), outcome
    finally:
        over.set()
        changing.join()


def test_tokens(server, client):
    """A region cannot be found without its token or after its end."""
    region = Region(path_of(server), PAGE)
    other = Region(path_of(server), PAGE)
    assert region.token != other.token
    client.put("x", np.ones(1, np.float32))
    for token in (b"", b"\0" * 16, region.token[:15], region.token + b"\0", b"x" * 4096):
        target = o.shared.RegionRange(region=token, size=4)
        outcome = attempt(client, "DownloadShared", name="x", target=target)
        refused(outcome, "NOT_FOUND", "REGION_NOT_FOUND")
    region.connection.close()
    assert eventually(lambda: mapped_regions(server) == 1)
    outcome = attempt(client, "DownloadShared", name="x", target=region.range(0, 4))
    refused(outcome, "NOT_FOUND", "REGION_NOT_FOUND")
    assert attempt(client, "DownloadShared", name="x", target=other.range(0, 4)).ok
    other.close()


# --- The socket -----------------------------------------------------------------------------------

def test_files_that_are_no_region(server, client):
    path = path_of(server)
    before = o.descriptors(server)

    def check(files, reason="BAD_REGION", field=None, greeting=GREETING):
        connection, answer = register(path, files, greeting)
        rejected(answer, reason, field)
        assert connection.recv(1) == b"", "a refused connection stays open"
        connection.close()
        return answer

    good, _ = make_file(PAGE)
    check([], field="descriptor")
    check([good] * 2, field="descriptor")
    check([good], greeting=b"tessera.v2", field="packet")
    check([good], greeting=b"\0" * 60000, field="packet")
    # tests/shared_region_test.cc tests more files.
    with tempfile.TemporaryFile() as on_disk:
        on_disk.truncate(PAGE)
        check([on_disk.fileno()], field="file")
    with open(f"/dev/shm/tessera_test_{os.getpid()}", "w+b") as in_shm:
        os.unlink(in_shm.name)
        in_shm.truncate(PAGE)
        check([in_shm.fileno()], field="seals")  # It can never be sealed.
    written = os.memfd_create("region", os.MFD_ALLOW_SEALING)
    os.ftruncate(written, PAGE)
    fcntl.fcntl(written, fcntl.F_ADD_SEALS, SEALS | SEAL_WRITE)
    check([written], field="seals")
    check([make_file(1 << 45, allocate=False)[0]], "SHARED_MEMORY_EXHAUSTED")
    punched, _ = make_file(4 * PAGE, seals=0)
    fallocate(punched, KEEP_SIZE | PUNCH_HOLE, PAGE, PAGE)
    fcntl.fcntl(punched, fcntl.F_ADD_SEALS, SEALS)
    check([punched], field="allocation")
    huge = os.memfd_create("region", os.MFD_ALLOW_SEALING | MFD_HUGETLB)
    os.ftruncate(huge, 2 * o.MI)
    fcntl.fcntl(huge, fcntl.F_ADD_SEALS, SEALS)
    assert "normal pages" in check([huge], field="file").message
    assert eventually(lambda: o.descriptors(server) <= before), (before, o.descriptors(server))
    # The file has a hole, but memory beyond its end makes the block count right. The server fills
    # the hole.
    tricky, _ = make_file(4 * PAGE, seals=0)
    fallocate(tricky, KEEP_SIZE, 4 * PAGE, 4 * PAGE)
    fallocate(tricky, KEEP_SIZE | PUNCH_HOLE, PAGE, 2 * PAGE)
    fcntl.fcntl(tricky, fcntl.F_ADD_SEALS, SEALS)
    connection, answer = register(path, [tricky])
    if answer.region:
        source = o.shared.RegionRange(region=answer.region, size=4 * PAGE)
        spec = o.buffers.BufferSpec(dtype=5, shape=[PAGE])
        call(client, "UploadShared", name="x", spec=spec, source=source)
        assert client.download("x") == b"\0" * 4 * PAGE
    connection.close()
    region = Region(path, PAGE)  # It still serves.


def test_garbage_and_silence(server, client):
    path = path_of(server)
    before = o.descriptors(server)
    for packet in (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", o.PREFACE, os.urandom(100_000)):
        connection = connect(path)
        connection.send(packet)
        answer = connection.recv(65536)
        assert answer == b"" or not o.shared.RegisterRegionResponse.FromString(answer).region
        connection.close()
    # A registered client that sends more loses its region.
    region = Region(path, PAGE)
    region.connection.send(b"hello")
    assert region.connection.recv(1) == b""
    assert eventually(lambda: is_clean(server, client))
    # Another client registers twice.
    region = Region(path, PAGE)
    socket.send_fds(region.connection, [GREETING], [region.file] * 100)
    assert region.connection.recv(1) == b""
    # Silent connections are closed in time, while others are served.
    def others_are_served():
        """Returns the time and the silent connections, unless they may have been closed before
        another one was served, because the machine is slow."""
        begin = time.monotonic()
        silent = [connect(path) for _ in range(20)]
        Region(path, PAGE).close()
        return time.monotonic() - begin < HANDSHAKE_S and (begin, silent)

    begin, silent = eventually(others_are_served)
    for connection in silent:
        assert connection.recv(1) == b""
    assert time.monotonic() - begin > HANDSHAKE_S - 0.5
    assert eventually(lambda: o.descriptors(server) <= before), (before, o.descriptors(server))


def test_many_connections(server, client):
    """There are a thousand connections at the same time. Connections beyond the limit are closed,
    and no other caller is affected."""
    path = path_of(server)
    before = o.descriptors(server)
    connections = [connect(path) for _ in range(1000)]
    assert client.dot_of_ones() == 1
    most = before + REGIONS + HANDSHAKES
    assert eventually(lambda: o.descriptors(server) <= most, HANDSHAKE_S - 1)
    for connection in connections:
        connection.close()
    assert eventually(lambda: o.descriptors(server) <= before)
    Region(path, PAGE).close()


def test_limits(server, client):
    path = path_of(server)
    regions = [Region(path, PAGE) for _ in range(REGIONS)]
    connection, answer = register(path, [make_file(PAGE)[0]])
    rejected(answer, "TOO_MANY_REGIONS")
    assert answer.metadata["limit"] == str(REGIONS)
    assert client.budget("shared_regions").used == REGIONS
    assert client.budget("shared_memory").used == REGIONS * PAGE
    regions.pop().close()
    connection.close()
    assert eventually(lambda: client.budget("shared_regions").used == REGIONS - 1)
    for region in regions:
        region.close()
    assert eventually(lambda: is_clean(server, client))


def test_permissions(server, client):
    path = path_of(server)
    assert os.stat(path).st_mode & 0o777 == 0o600, oct(os.stat(path).st_mode)
    info = call(client, "GetSharedMemory")
    assert info.socket_path == str(path) and info.limit_bytes == LIMIT and info.used_bytes == 0


# --- Ends -----------------------------------------------------------------------------------------

def large_upload(server, client, **spec):
    """Returns a region of 256 MiB, and a function that begins an upload from it to "x"."""
    region = Region(path_of(server), 256 * o.MI)
    spec = o.buffers.BufferSpec(dtype=5, shape=[64 * o.MI], **spec)
    request = o.shared.UploadSharedRequest(name="x", spec=spec, source=region.range(0, 256 * o.MI))
    upload = o.shared_grpc.SharedMemoryServiceStub(client.channel).UploadShared
    return region, lambda timeout=60: upload.future(request, timeout=timeout)


def test_a_region_that_ends_during_a_transfer(server, client):
    """The transfer continues to its end, and then the memory is freed."""
    region, begin = large_upload(server, client)
    region.bytes[:] = 3
    future = begin()
    assert eventually(lambda: client.names() == ["x"], pause=0.001)
    region.connection.close()
    outcome = o.outcome_of(future)
    assert outcome.ok, outcome
    assert client.download("x", offset=255 * o.MI) == b"\3" * o.MI
    assert eventually(lambda: is_clean(server, client))


# A process without threads. It forks clients that register a region and live until they are killed.
# For each line that it reads, it writes a line with the pid and the response in hexadecimal.
NURSERY = """
import fcntl, mmap, os, socket, sys, time
path, size, greeting = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
for line in sys.stdin:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            file = os.memfd_create("region", os.MFD_ALLOW_SEALING)
            os.posix_fallocate(file, 0, size)
            memory = mmap.mmap(file, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, %d)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.connect(path)
            if line == "early\\n":
                os.write(write_end, b"-")
            socket.send_fds(connection, [greeting], [file])
            answer = connection.recv(65536)
            if line != "early\\n":
                os.write(write_end, answer)
            time.sleep(60)
        finally:
            os._exit(0)
    os.close(write_end)
    answer = os.read(read_end, 65536)
    os.close(read_end)
    print(child, answer.hex(), flush=True)
    sys.stdin.readline()
    os.kill(child, 9)
    os.waitpid(child, 0)
    print("dead", flush=True)
""" % SEALS


def test_clients_that_are_killed(server, client):
    """Clients are killed at any point of a handshake or a transfer. No descriptor, mapping or byte
    is left."""
    before = o.descriptors(server)
    stub = o.shared_grpc.SharedMemoryServiceStub(client.channel)
    spec = o.buffers.BufferSpec(dtype=5, shape=[4 * o.MI], replace=True)
    # Clients die within these seconds before or after their uploads begin. On a slow machine, that
    # makes no difference, and the times grow until it does.
    earliest, latest = -0.03, 0.03
    outcomes = {True: 0, False: 0}
    arguments = [sys.executable, "-c", NURSERY, str(path_of(server)), str(16 * o.MI), "tessera.v1"]
    pipe = subprocess.PIPE
    nursery = subprocess.Popen(arguments, stdin=pipe, stdout=pipe, text=True, bufsize=1)
    for i in range(200):
        nursery.stdin.write("registered\n" if i % 2 else "early\n")
        _, answer = nursery.stdout.readline().split()
        if i % 2 == 0:
            time.sleep(RNG.uniform(0, 0.02))
            nursery.stdin.write("kill\n")
        else:
            answer = o.shared.RegisterRegionResponse.FromString(bytes.fromhex(answer))
            source = o.shared.RegionRange(region=answer.region, size=16 * o.MI)
            request = o.shared.UploadSharedRequest(name="x", spec=spec, source=source)
            delay = RNG.uniform(earliest, latest)
            if delay < 0:
                nursery.stdin.write("kill\n")
                time.sleep(-delay)
            future = stub.UploadShared.future(request, timeout=60)
            if delay >= 0:
                time.sleep(delay)
                nursery.stdin.write("kill\n")
            outcome = o.outcome_of(future)
            assert outcome.ok or outcome.reason == "REGION_NOT_FOUND", outcome
            outcomes[outcome.ok] += 1
            if outcome.ok and delay < 0:
                earliest -= 0.03
            elif not outcome.ok and delay > 0:
                latest += 0.03
        assert nursery.stdout.readline() == "dead\n"
    nursery.stdin.close()
    assert nursery.wait(60) == 0
    assert min(outcomes.values()) > 10, outcomes
    assert eventually(lambda: is_clean(server, client))
    assert eventually(lambda: o.descriptors(server) <= before), (before, o.descriptors(server))
    client.call("DeleteBuffer", name="x")
    assert eventually(lambda: client.device().buffer_used_bytes == 0)
    assert client.dot_of_ones() == 1


def test_writers_during_transfers(server, client):
    """A client that writes all the time gets some of its own bytes, and the server survives."""
    region = Region(path_of(server), 32 * o.MI)
    spec = o.buffers.BufferSpec(dtype=5, shape=[8 * o.MI], replace=True)
    values = itertools.cycle(range(256))
    with o.meanwhile(lambda: region.bytes.fill(next(values))):
        for _ in range(10):
            source = region.range(0, 32 * o.MI)
            assert attempt(client, "UploadShared", name="x", spec=spec, source=source).ok
            assert attempt(client, "DownloadShared", name="x", target=source).ok
    assert client.dot_of_ones() == 1


def test_many_transfers_at_once(server, client):
    """There are as many transfers as the limits allow, in several regions. Further ones are
    refused."""
    regions = [Region(path_of(server), 8 * o.MI) for _ in range(4)]
    wrong, too_many = [], []

    def work(i):
        region = regions[i % 4]
        mine = server.client()
        spec = o.buffers.BufferSpec(dtype=5, shape=[o.MI], replace=True)
        at = (i // 4) * 4 * o.MI
        for round_ in range(10):
            region.bytes[at : at + 4 * o.MI] = i * 10 + round_
            source = region.range(at, 4 * o.MI)
            outcome = attempt(mine, "UploadShared", name=f"m{i}", spec=spec, source=source)
            if not outcome.ok and outcome.reason == "TOO_MANY_UPLOADS":
                too_many.append(outcome)
                continue
            region.bytes[at : at + 4 * o.MI] = 0xFF
            got = attempt(mine, "DownloadShared", name=f"m{i}", target=source)
            if got.reason == "TOO_MANY_DOWNLOADS":
                too_many.append(got)
            elif not got.ok or np.any(region.bytes[at : at + 4 * o.MI] != i * 10 + round_):
                wrong.append((i, outcome, got))

    o.in_threads(8, work)
    assert not wrong, wrong[:3]
    for outcome in too_many:
        assert outcome.code == "RESOURCE_EXHAUSTED", outcome


def test_no_service_without_the_flag(server, client):
    with o.Server(server.log_path.parent) as other:
        outcome = attempt(other.client(), "GetSharedMemory")
        assert outcome.code == "UNIMPLEMENTED", outcome


def test_restart(server, client):
    """A socket that a killed server left is replaced. A socket in use is not. Tokens do not
    survive."""
    folder = server.log_path.parent
    path = folder / "restarted.sock"
    flags = ("--shared-memory", path, *FLAGS)
    with o.Server(folder, *flags) as first:
        region = Region(path, PAGE)
        try:
            o.Server(folder, *flags).kill()
            raise RuntimeError("two servers share a socket")
        except AssertionError:
            pass
        first.process.kill()
        assert region.connection.recv(1) == b"" and path.exists()
    with o.Server(folder, *flags) as second:
        mine = second.client()
        mine.put("x", np.ones(1, np.float32))
        outcome = attempt(mine, "DownloadShared", name="x", target=region.range(0, 4))
        refused(outcome, "NOT_FOUND", "REGION_NOT_FOUND")
        again = Region(path, PAGE)
        assert attempt(mine, "DownloadShared", name="x", target=again.range(0, 4)).ok
        assert second.stop() == 0 and not path.exists()
        assert again.connection.recv(1) == b""


def test_drain(server, client):
    """Running calls end, no further calls begin, and the socket is removed."""
    _, begin = large_upload(server, client)
    future = begin()
    assert eventually(lambda: client.names() == ["x"], pause=0.001)
    server.signal()
    outcome = o.outcome_of(future)
    assert outcome.ok, outcome
    assert server.wait(60) == 0
    assert not path_of(server).exists()


def test_few_descriptors(server, client):
    """A server without descriptors refuses clients and recovers."""
    if o.Program.sanitized():
        reason = "UndefinedBehaviorSanitizer needs a descriptor to look at an object's type"
        raise unittest.SkipTest(reason)
    folder = server.log_path.parent
    path = folder / "few.sock"
    flags = ("--shared-memory", path, *FLAGS)
    with o.Server(folder, *flags, prefix=("prlimit", "--nofile=96")) as few:
        mine = few.client()
        mine.put("x", np.ones(1, np.float32))
        held = [connect(path) for _ in range(80)]
        file, _ = make_file(PAGE)
        for connection in held:
            with contextlib.suppress(OSError):
                socket.send_fds(connection, [GREETING], [file] * 20)
        for connection in held:
            connection.close()
        # Until the server has closed the descriptors that they sent, it cannot even read the amount
        # of memory.
        one = o.inline(np.ones(1, np.float32))
        assert eventually(lambda: mine.attempt("Dot", a=one, b=one).ok)
        assert eventually(lambda: registers(path))
        region = Region(path, PAGE)
        assert attempt(mine, "DownloadShared", name="x", target=region.range(0, 4)).ok
        region.close()


if __name__ == "__main__":
    sys.exit(o.run_tests(globals(), *FLAGS, "--shared-memory", "{folder}/shared.sock"))
