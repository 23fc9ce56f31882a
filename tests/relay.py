"""A line between a client and a server that can be cut, damaged, and held."""

import contextlib
import socket
import threading
import time


class Relay:
    """Passes TCP connections on to an address. The next len(cuts) connections end after so many
    bytes of answers each; damage: the number of the byte that arrives changed, once; silent: nothing
    passes, and nothing ends."""

    def __init__(self, address, cuts=(), damage=None):
        self.address = address.split(":")
        self.cuts = list(cuts)
        self.damage = damage
        self.silent = threading.Event()
        self.passed = []  # bytes of answers, of each connection
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
                near.close()
                continue
            self.open += [near, far]
            limit = self.cuts.pop(0) if self.cuts else None
            number = len(self.passed)
            self.passed.append(0)
            threading.Thread(target=self._pump, args=(near, far, None, None), daemon=True).start()
            threading.Thread(
                target=self._pump, args=(far, near, limit, number), daemon=True
            ).start()

    def _pump(self, source, sink, limit, number):
        try:
            while data := source.recv(65536):
                while self.silent.is_set():
                    time.sleep(0.01)
                if number is not None:
                    if limit is not None and self.passed[number] + len(data) > limit:
                        break
                    begin = self.passed[number]
                    if self.damage is not None and begin <= self.damage < begin + len(data):
                        data = bytearray(data)
                        data[self.damage - begin] ^= 1
                        self.damage = None
                    self.passed[number] += len(data)
                sink.sendall(data)
        except OSError:
            pass
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self):
        for one in [self.listener, *self.open]:
            one.close()
