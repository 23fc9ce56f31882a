"""Common parts of the tests of rolling restarts: servers that are stopped and restarted one after
the other, and callers that continue to call in the meantime."""

import pathlib
import random
import re
import socket
import subprocess
import threading
import time

import grpc
import numpy as np

import outsider as o

# Pauses before an UNAVAILABLE call is retried, like those of the project's clients. At least half
# of each pause is used.
PAUSES_S = (0.1, 0.2, 0.4, 0.8)


def lasting_address():
    """Returns the address of a free port that no socket gets by chance before its server listens or
    while its server is away, because it is below the ports that Linux assigns."""
    while True:
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", random.randrange(10000, 32000)))
            except OSError:
                continue
            return "127.0.0.1:%d" % s.getsockname()[1]


class Restartable:
    """A server with TLS that is restarted at its address. health: a function of the address that
    says whether the server is SERVING."""

    def __init__(self, folder, health, *flags):
        self.folder, self.health = folder, health
        self.flags = ("--metrics-listen", "127.0.0.1:0", *map(str, flags))
        self.address = lasting_address()
        self.start()

    def start(self):
        self.server = o.Server(self.folder, *self.flags, listen=self.address)
        assert o.eventually(lambda: self.health(self.address)), self.server.log()

    def answered(self):
        """Returns how many calls the server has completed successfully since it started."""
        calls = r'^tessera_requests_total{.*rpc="Dot".*code="OK".*} (\d+)'
        return sum(map(int, re.findall(calls, self.server.page(), re.M)))

    def restart(self):
        """Restarts the server, and returns once it is SERVING again."""
        end = self.server.stop()
        assert end == 0, f"the server ended with {end}: {self.server.log()[-2000:]}"
        self.start()

    def kill(self):
        self.server.kill()


class Load:
    """Threads that call until end(). makers has a function for each thread, which takes the load
    and returns the thread's call. A call returns once the right response has arrived, and raises
    otherwise."""

    def __init__(self, makers):
        self.answered = [0] * len(makers)
        self.lost = []  # The outcomes of calls without a right response.
        self.longest_s = 0.0  # The longest call, including retries.
        self.repeated = 0  # Retries of inline_dots; the project's clients report none.
        self.put_again = 0  # Arrays that were lost with their server.
        self._lock = threading.Lock()
        self._over = threading.Event()
        calls = [make(self) for make in makers]
        self._threads = [
            threading.Thread(target=self._run, args=one, daemon=True) for one in enumerate(calls)]
        for thread in self._threads:
            thread.start()

    def _run(self, i, call):
        while not self._over.is_set():
            begin = time.monotonic()
            try:
                call()
            except Exception as error:
                self.lost.append(f"caller {i}: {error!r}")
                continue
            self.answered[i] += 1
            with self._lock:
                self.longest_s = max(self.longest_s, time.monotonic() - begin)

    def count(self, what):
        with self._lock:
            setattr(self, what, getattr(self, what) + 1)

    def moved(self, calls=10, seconds=o.START_TIMEOUT_S):
        """Returns whether each caller makes that many calls from now on."""
        want = [count + calls for count in self.answered]
        return o.eventually(lambda: all(a >= b for a, b in zip(self.answered, want)), seconds)

    def end(self):
        self._over.set()
        for thread in self._threads:
            thread.join(o.START_TIMEOUT_S)

    def __str__(self):
        return (
            f"{sum(self.answered)} calls of {len(self.answered)} callers, {len(self.lost)} lost,"
            f" {self.repeated} repeated, {self.put_again} arrays put again, the longest call"
            f" {self.longest_s:.1f} s")


def inline_dots(connect, metadata=()):
    """Makes calls of a plain gRPC client: Dots of arrays that are sent with the call, retried if
    UNAVAILABLE. connect: a function that makes a channel."""

    def make(load):
        dot = o.compute_grpc.ComputeServiceStub(connect()).Dot
        random_arrays = np.random.default_rng()

        def call():
            a, b = random_arrays.integers(-50, 50, (2, 64)).astype(np.float32)
            request = o.compute.DotRequest(a=o.inline(a), b=o.inline(b))
            for pause in (*PAUSES_S, None):
                try:
                    answer = dot(request, timeout=o.CALL_TIMEOUT_S, metadata=metadata)
                    break
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE or pause is None:
                        raise
                    load.count("repeated")
                    time.sleep(pause * random.uniform(0.5, 1))
            assert answer.value.real == a @ b, (answer.value.real, a @ b)

        return call

    return make


def resident_dots(connect, name):
    """Makes calls of the package in client/python, which retries by itself: Dots of a resident
    array, which is put again if the responding server does not have it. connect: a function that
    makes a client."""

    def make(load):
        t, random_arrays = connect(), np.random.default_rng()
        held = {}

        def put():
            values = random_arrays.integers(-50, 50, 64).astype(np.float32)
            held["x"], held["dot"] = t.put(values, name, replace=True), values @ values

        put()

        def call():
            try:
                found = held["x"].dot(held["x"]).item()
            except LookupError:  # BufferNotFound, VersionMismatch
                put()
                load.count("put_again")
                found = held["x"].dot(held["x"]).item()
            assert found == held["dot"], (found, held["dot"])

        return call

    return make


def commands(command, folder):
    """Runs the command line again and again, in one process after the other. command: its words up
    to the operation."""
    file = pathlib.Path(folder) / "operand.npy"
    np.save(file, np.arange(1, 65, dtype=np.float32))
    words = [*map(str, command), "dot", f"file:{file}", f"file:{file}"]

    def make(load):
        def call():
            run = subprocess.run(words, capture_output=True, text=True, timeout=o.START_TIMEOUT_S)
            assert run.returncode == 0, run.stderr
            assert re.match(r"89440\b", run.stdout), run.stdout

        return call

    return make


def restart_one_after_the_other(servers, load, pause_s):
    """Restarts the servers. Every caller must get responses before, in between and afterwards.
    pause_s: how long it may take, beyond the servers' --drain-delay, until callers or a proxy
    notice that a server is back."""
    assert load.moved(), load
    for server in servers:
        assert server.answered() > 0, "no caller has used the server that is to be stopped"
        server.restart()
        time.sleep(pause_s)
        assert load.moved(), load
    load.end()
