#!/usr/bin/env python3
"""Tests clients and servers on two hosts whose network fails. The line between them is cut during
transfers and programs and between calls, briefly and for longer than any timeout, and it loses
packets.

The hosts are network namespaces with a router between them that stops forwarding, so that packets
are lost silently. All of them end with this process. The exit code is 77 if the kernel or the
container allows no namespaces."""

import concurrent.futures
import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np

import outsider as o
import python_outsider  # Also adds the package's sources.
import tessera as ts
from outsider import eventually

NEAR, FAR = "10.77.1.1", "10.77.2.1"
SKIPPED = 77


def run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


def retransmitted():
    """Returns the number of segments that TCP has retransmitted on this host."""
    lines = pathlib.Path("/proc/self/net/snmp").read_text().splitlines()
    names, counts = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(counts[names.index("RetransSegs")])


def unread(server):
    """Returns how many bytes the server has not read yet, by the client's address and port."""
    table = pathlib.Path(f"/proc/{server.pid}/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in table]
    return {row[2]: int(row[4].split(":")[1], 16) for row in rows if row[3] == "01"}


class Host:
    """A network namespace, which lives as long as this process."""

    def __init__(self):
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"])
        self.pid = self.process.pid
        own = os.readlink("/proc/self/ns/net")
        found = lambda: os.readlink(f"/proc/{self.pid}/ns/net") != own  # noqa: E731
        if not eventually(found):
            raise AssertionError("no namespace")
        self.prefix = ("nsenter", "--target", str(self.pid), "--net")

    def run(self, *command):
        run(*self.prefix, *command)

    def passed(self, device):
        """Returns the bytes that the device has received."""
        for line in pathlib.Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == device:
                return int(counts.split()[0])
        raise AssertionError(f"no device {device}")

    def end(self):
        self.process.kill()
        self.process.wait()


class Line:
    """This process's host, the far host, and the router between them."""

    def __init__(self):
        self.far, self.router = Host(), Host()
        run("ip", "link", "set", "lo", "up")
        self._lead(None, "near", NEAR, "10.77.1.254")
        self._lead(self.far, "far", FAR, "10.77.2.254")
        self._forward(True)
        self.loses = None

    def _lead(self, host, device, address, router):
        """Makes a device of a host. The router's end of the link has the same name."""
        there = host.run if host else run
        there("ip", "link", "add", device, "type", "veth",
              "peer", "name", device, "netns", str(self.router.pid))
        there("ip", "link", "set", "lo", "up")
        for run_there, own in ((there, address), (self.router.run, router)):
            run_there("ip", "address", "add", f"{own}/24", "dev", device)
            # The counters and the packet loss refer to packets, not to segments of 64 KiB.
            run_there("ip", "link", "set", device, "gso_max_size", "1514", "up")
        there("ip", "route", "add", "default", "via", router)

    def _forward(self, on):
        self.router.run("sh", "-c", f"echo {int(on)} >/proc/sys/net/ipv4/ip_forward")

    @contextlib.contextmanager
    def slow(self):
        """Limits the line to 100 megabits a second in each direction."""
        for device in ("near", "far"):
            self.router.run("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate",
                            "100mbit", "burst", "64k", "latency", "20ms")
        try:
            yield
        finally:
            for device in ("near", "far"):
                self.router.run("tc", "qdisc", "del", "dev", device, "root")

    @contextlib.contextmanager
    def cut(self):
        self._forward(False)
        try:
            yield
        finally:
            self._forward(True)

    @contextlib.contextmanager
    def lossy(self, percent):
        """Makes the line lose packets. Returns the kernel feature that does this, or None if there
        is none."""
        rule = ("FORWARD", "-m", "statistic", "--mode", "random", "--probability",
                str(percent / 100), "-j", "DROP")
        devices = ("near", "far")
        means = {
            "netem": [("tc", "qdisc", "add", "dev", device, "root", "netem", "loss", f"{percent}%")
                      for device in devices],
            "iptables": [("iptables", "-A", *rule)]}
        used = None
        for name, commands in means.items():
            try:
                for command in commands:
                    self.router.run(*command)
                used = name
                break
            except (OSError, subprocess.CalledProcessError):
                continue
        try:
            yield used
        finally:
            if used == "netem":
                for device in devices:
                    self.router.run("tc", "qdisc", "del", "dev", device, "root")
            elif used:
                self.router.run("iptables", "-D", *rule)

    def close(self):
        self.far.end()
        self.router.end()


def cli(running, server, *arguments, timeout="60s"):
    """Returns the exit code and the output of the command. running: a list that gets the
    process."""
    command = [o.Program.cli, "--server", server, "--timeout", timeout, *map(str, arguments)]
    with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        running.append(process)
        said, _ = process.communicate(timeout=120)
    return process.returncode, said


class Cut(o.FreshCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.line = Line()
        cls.addClassCleanup(cls.line.close)

    def setUp(self):
        super().setUp()
        self.random = np.random.default_rng(7)

    def server(self, *flags, far=True):
        """Starts a server on the far host, or on this one."""
        prefix = ("setpriv", "--pdeathsig", "KILL", *(self.line.far.prefix if far else ()))
        listen = f"{FAR if far else NEAR}:0"
        server = o.Server(self.folder, "--insecure", *flags, prefix=prefix, listen=listen)
        self.addCleanup(server.kill)
        return server

    def servers(self, *flags):
        """Starts two servers, one on the far host and one on this host, which imports from the far
        one."""
        far = self.server(*flags, *python_outsider.PATIENT)
        near = self.server(*flags, "--import-from", f"{FAR}:*", far=False)
        return far, near

    def connect(self, server, **options):
        return self.enterContext(ts.connect(server.address, **options))

    def array(self, mib):
        return self.random.integers(0, 256, mib * o.MI, np.uint8)

    def file(self, name, array):
        path = self.folder / f"{name}.npy"
        np.save(path, array)
        return path

    def under_way(self, far, near, seconds, mib=(40, 16, 48)):
        """Returns functions by name. Each function does some work and returns pairs to compare. All
        functions wait at most this number of seconds for progress. mib: the sizes of what the
        command line and the Python client put, and of what is fetched."""
        limits = dict(timeout=seconds, stall_timeout=seconds, connect_timeout=seconds)
        patience = f"{seconds}s"
        arrays = [self.array(size) for size in mib]
        self.begun = {name: threading.Event() for name in ("python_put", "python_get")}
        self.is_cut = threading.Event()
        self.running = []

        def progress(name):
            def report(done, _):
                if done > 0:
                    self.begun[name].set()
                    self.is_cut.wait(60)

            return report

        square = np.ones((1000, 1000), np.float32)
        with ts.connect(far.address) as t:
            t.put(arrays[2], name="stored")
            t.put(square, name="square")
        put, get = self.file("put", arrays[0]), self.folder / "got.npy"
        self.clients = clients = []
        for _ in range(5):
            others = unread(far).keys()
            clients.append(self.connect(far, **limits))
            clients[-1].info()
        self.of_program = unread(far).keys() - others
        importer = self.connect(near, timeout=4 * seconds)
        address = far.address

        def cli_put():
            code, said = cli(self.running, address, "put", put, "--name", "cli", timeout=patience)
            return (far, "cli", arrays[0]) if code == 0 else (code, said)

        def cli_get():
            code, said = cli(self.running, address, "get", "stored", "-o", get, timeout=patience)
            return (np.load(get), arrays[2]) if code == 0 else (code, said)

        def python_put():
            clients[0].put(arrays[1], name="python", progress=progress("python_put"))
            return far, "python", arrays[1]

        def python_get():
            return clients[1]["stored"].numpy(progress=progress("python_get")), arrays[2]

        def python_program():
            x = clients[4]["square"]
            product = (x @ x).with_(strategy="cpu_naive")
            return (product + 1).sum(axis=0).numpy(), np.full(1000, 1000 * 1001, np.float32)

        def imported():
            importer.import_from(address, "stored", name="imported")
            return near, "imported", arrays[2]

        return {work.__name__: work for work in
                (cli_put, cli_get, python_put, python_get, python_program, imported)}

    def cut_in_the_middle(self, far, near, works, until, later=()):
        """Returns the outcomes (results or errors) of work that is running when the line is cut,
        and of the work named in `later`, which begins then. The line is restored once
        until(futures) is true."""
        pool = concurrent.futures.ThreadPoolExecutor(len(works))
        self.addCleanup(pool.shutdown)
        futures = {}

        def begin(names):
            futures.update({name: pool.submit(works[name]) for name in names})

        # No work can end before the cut. The Python client is held by its progress function. The
        # processes are stopped, and so is the far server, whose socket holds the program's request.
        with ts.connect(near.address) as watcher, contextlib.ExitStack() as stack:
            with self.line.slow():
                begin(["python_put", "python_get"])
                self.assertTrue(all(begun.wait(60) for begun in self.begun.values()))
                before = [self.line.router.passed(device) for device in ("near", "far")]
                begin(["cli_put", "cli_get"])
                moved = lambda: len(self.running) == 2 and min(  # noqa: E731
                    self.line.router.passed(device) - old
                    for device, old in zip(("near", "far"), before)) > 2 * o.MI
                self.assertTrue(eventually(moved, pause=0.002))
                for process in self.running:
                    process.send_signal(signal.SIGSTOP)
                    stack.callback(process.send_signal, signal.SIGCONT)
                begin(["imported"])
                drafts = lambda: watcher.call("ListBuffers").buffers  # noqa: E731
                self.assertTrue(eventually(drafts, pause=0.002))
                far.signal(signal.SIGSTOP)
                os.waitpid(far.pid, os.WUNTRACED)
                stack.callback(far.signal, signal.SIGCONT)
                begin(["python_program"])
                arrived = lambda: any(unread(far)[port] for port in self.of_program)  # noqa: E731
                self.assertTrue(eventually(arrived))
                stack.enter_context(self.line.cut())
            for process in self.running:
                process.send_signal(signal.SIGCONT)
            self.is_cut.set()
            far.signal(signal.SIGCONT)
            begin(later)
            self.assertTrue(until(futures))
        return {name: future.exception(60) or future.result(0) for name, future in futures.items()}

    def check(self, name, outcome):
        """Checks the outcome of work that has succeeded."""
        with self.subTest(name):
            if isinstance(outcome, BaseException):
                raise outcome
            if isinstance(outcome[0], o.Server):
                server, buffer, expected = outcome
                with ts.connect(server.address) as t:
                    got = t[buffer].numpy()
            else:
                got, expected = outcome
            self.assertIsInstance(got, np.ndarray, outcome)
            np.testing.assert_array_equal(got, expected)

    def all_go_on(self):
        """Checks that clients work, whether or not they had a call in progress."""
        x = np.arange(1000.0)
        for i, client in enumerate(self.clients):
            with self.subTest(client=i):
                client.put(x, name="small", replace=True)
                np.testing.assert_array_equal(client["small"].numpy(), x)
        self.clients[0].delete("small")

    def assert_nothing_is_left(self, server, names, within):
        """Checks that only buffers with these names are left, and that no byte is left after they
        have been deleted."""
        t = self.connect(server)

        def held():
            return {buffer.name for buffer in t.call("ListBuffers", page_size=1000).buffers}

        def budget(name):
            return [one.used for one in t.info().budgets if one.name == name][0]

        self.assertTrue(eventually(lambda: held() <= names, within), held())
        for name in held():
            t.delete(name)

        def used():
            device = t.info().devices[0]
            counts = [budget(name) for name in ("uploads", "downloads", "buffers")]
            return [device.buffer_used_bytes, device.scratch_used_bytes, *counts]

        self.assertTrue(eventually(lambda: not any(used()), within), used())
        self.assertTrue(eventually(lambda: budget("host_memory") < o.MI, within))

    def test_a_moment(self):
        """TCP notices the cut, but no client gives up."""
        far, near = self.servers("--transfer-timeout", "20s")
        works = self.under_way(far, near, 20)

        def noticed(futures):
            early = [name for name, future in futures.items() if future.done()]
            self.assertFalse(early, "they had ended before the cut")
            before = retransmitted()
            return eventually(lambda: retransmitted() >= before + 10)

        for name, outcome in self.cut_in_the_middle(far, near, works, noticed).items():
            self.check(name, outcome)
        self.all_go_on()
        self.assert_nothing_is_left(far, {"cli", "python", "stored", "square"}, 5)
        self.assert_nothing_is_left(near, {"imported"}, 5)

    def test_longer_than_anyone_waits(self):
        """Clients wait for six seconds and servers for five. All calls end before the line is
        restored, each with its documented error, and later calls work."""
        far, near = self.servers("--transfer-timeout", "5s")
        works = self.under_way(far, near, 6)

        works["call"] = lambda: self.clients[3].info()
        all_end = lambda futures: not concurrent.futures.wait(  # noqa: E731
            futures.values(), 60).not_done
        outcomes = self.cut_in_the_middle(far, near, works, all_end, later=["call"])
        for name, outcome in outcomes.items():
            if name in ("cli_put", "cli_get"):
                # TCP may give up the connection just when the transfer has stalled for too long,
                # and the client may then try to connect again.
                code, said = outcome
                self.assertIn((code, said.split("\n")[0].split(": ")[-1]),
                              [(8, "STALLED"), (7, "CONNECTION_LOST"), (7, "UNREACHABLE")])
        for name, error in {"python_put": ts.Stalled,
                            "python_get": ts.Stalled,
                            "python_program": ts.DeadlineExceeded,
                            "call": ts.DeadlineExceeded,
                            "imported": ts.SourceStalled}.items():
            self.assertIsInstance(outcomes[name], error, name)
        self.all_go_on()
        # TCP gives up the connection of a reader that has acknowledged nothing for 20 s.
        self.assert_nothing_is_left(far, {"stored", "square"}, 20)
        self.assert_nothing_is_left(near, set(), 5)

    def test_lost_packets(self):
        """Five per cent of the packets are lost in each direction."""
        far, near = self.servers()
        works = self.under_way(far, near, 30, mib=(4, 4, 8))
        self.is_cut.set()
        with self.line.lossy(5) as means:
            if means is None:
                self.skipTest("the kernel has neither netem nor iptables' statistic")
            before, begin = retransmitted(), time.monotonic()
            with concurrent.futures.ThreadPoolExecutor(len(works)) as pool:
                futures = {name: pool.submit(work) for name, work in works.items()}
            again = retransmitted() - before
            print(f"{means}: {time.monotonic() - begin:.1f} s, {again} segments sent again")
            self.assertGreater(again, 100)
            for name, future in futures.items():
                self.check(name, future.exception() or future.result())
        self.assert_nothing_is_left(far, {"cli", "python", "stored", "square"}, 5)
        self.assert_nothing_is_left(near, {"imported"}, 5)


def inside():
    """Restarts the program in separate namespaces. If that is impossible, says why and exits."""
    if os.environ.get("TESSERA_NETWORK") == "own":
        return
    unshare = ["unshare", "--net", *(["--map-root-user"] if os.geteuid() else [])]
    tried = "no unshare, nsenter, setpriv or ip"
    if all(map(shutil.which, ("unshare", "nsenter", "setpriv", "ip"))):
        up = [*unshare, "ip", "link", "set", "lo", "up"]
        ended = subprocess.run(up, capture_output=True, text=True)
        if ended.returncode == 0:
            os.environ["TESSERA_NETWORK"] = "own"
            os.execvp("unshare", [*unshare, sys.executable, *sys.argv])
        tried = ended.stderr.strip()
    print("skipped: network namespaces are not allowed here:", tried)
    sys.exit(SKIPPED)


if __name__ == "__main__":
    inside()
    python_outsider.main("__main__")
