"""Connects a client and a server by a line that can be cut, damaged and blocked."""

import contextlib
import socket
import threading
import time


class Relay:
    """Forwards TCP connections to an address. Each of the next len(cuts) connections ends after
    that many bytes of responses, and each of the next len(request_cuts) after that many bytes of
    requests. damage: the number of the response byte that is changed, once. silent: nothing is
    forwarded, and nothing ends. hold: after that many bytes of responses, a connection becomes
    silent, once. request_hold: the same after that many bytes of requests."""

    def __init__(self, address, cuts=(), damage=None, request_cuts=(), hold=None,
                 request_hold=None):
        self.address = address.split(":")
        self.cuts = list(cuts)
        self.request_cuts = list(request_cuts)
        self.damage = damage
        self.holds = {"passed": hold, "requests": request_hold}
        self.silent = threading.Event()
        self.refused = threading.Event()  # Set once the address has refused a connection.
        self.passed = []  # Bytes of responses, for each connection.
        self.requests = []  # Bytes of requests, for each connection.
        self.breaks = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.where = "127.0.0.1:%d" % self.listener.getsockname()[1]
        self.open = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((self.address[0], int(self.address[1])))
            except OSError:
                self.refused.set()
                near.close()
                continue
            self.open += [near, far]
            ways = (near, far, self.requests, self.request_cuts), (
                far, near, self.passed, self.cuts)
            for source, sink, counts, cuts in ways:
                limit = cuts.pop(0) if cuts else None
                counts.append(0)
                arguments = (source, sink, counts, len(counts) - 1, limit)
                threading.Thread(target=self._pump, args=arguments, daemon=True).start()

    def _pump(self, source, sink, counts, number, limit):
        try:
            while data := source.recv(65536):
                begin = counts[number]
                way = "passed" if counts is self.passed else "requests"
                if self.holds[way] is not None and begin >= self.holds[way]:
                    self.holds[way] = None
                    self.silent.set()
                while self.silent.is_set():
                    time.sleep(0.01)
                if limit is not None and begin + len(data) > limit:
                    self.breaks += 1
                    break
                damaged = self.damage if counts is self.passed else None
                if damaged is not None and begin <= damaged < begin + len(data):
                    data = bytearray(data)
                    data[damaged - begin] ^= 1
                    self.damage = None
                counts[number] += len(data)
                sink.sendall(data)
        except OSError:
            pass
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_WR)
        # Bytes that are still on their way are read and dropped, because gRPC gives up a broken
        # connection only once its last write is done.
        with contextlib.suppress(OSError):
            while source.recv(65536):
                pass

    def close(self):
        for one in [self.listener, *self.open]:
            one.close()
