#!/usr/bin/env python3
"""Tests arrays that outlive the server: snapshots, and what a server restores after an end of any
kind. A model of every change says which contents a snapshot may hold.

usage: durability_test.py --server build/bin/tessera-server --cli build/bin/tessera
"""

import fcntl
import json
import os
import random
import re
import signal
import threading
import time

import grpc
import numpy as np

import outsider as o
from callers import Caller, line_of

DATA_LOST = ("DATA_LOSS", "DATA_LOST")
READY = 2  # Buffer.State

signal.signal(signal.SIGIO, signal.SIG_IGN)  # It comes when a program opens a file with a lease.


class Model:
    """The states that each name has had, in order. One caller at a time changes a name, so that the
    order is known even if the server ends during a change. A state is the contents, or None."""

    def __init__(self, names):
        self.states = {name: [None] for name in names}
        self.done = dict.fromkeys(names, 0)  # The last state that a call has reported.

    def change(self, name, state, call):
        self.states[name].append(state)
        call()
        self.done[name] = len(self.states[name]) - 1

    def check(self, client, least):
        """Checks that every name has a state that is not older than the one in `least`, and begins
        a new history with what the server has."""
        found = set(client.names())
        for name, states in self.states.items():
            state = client.download(name) if name in found else None
            assert state in states[least[name]:], (name, least[name], len(states))
            self.states[name], self.done[name] = [state], 0


class DurabilityTest(o.FreshCase):
    def setUp(self):
        super().setUp()
        self.data = self.folder / "data"

    def serve(self, *flags, **more):
        return super().serve("--data-dir", self.data, *flags, **more)

    def restart(self, server, *flags, **more):
        server.kill()
        return self.serve(*flags, **more)

    def manifest(self):
        return json.loads((self.data / "manifest.json").read_text())["manifest"]

    def files(self):
        return sorted(
            str(path.relative_to(self.data)) for path in self.data.rglob("*")
            if path.is_file() and path.name != "lock"
        )

    def file_of(self, name):
        """Returns the file of a buffer of the unnamed tenant."""
        buffers = self.manifest()["tenants"][0]["buffers"]
        number = next(buffer["file"] for buffer in buffers if buffer["name"] == name)
        return self.data / "arrays" / f"{number}.safetensors"

    def metrics(self, server):
        return dict(re.findall(r"(?m)^(tessera_\S+) (\S+)$", server.page()))

    def serve_while_loading(self, names):
        """Starts a server that can load no array until release() is called, and returns both. The
        server loads two arrays at a time. It begins with those of the two names, which are lost."""
        # Opening these files waits for the end of their leases. Linux breaks them after 45 s.
        leases = []
        for name in names:
            self.file_of(name).write_bytes(b"")
            leases.append(os.open(self.file_of(name), os.O_RDWR))
            fcntl.fcntl(leases[-1], fcntl.F_SETLEASE, fcntl.F_WRLCK)
        server = self.serve("--metrics-listen", "127.0.0.1:0")
        loading = lambda: self.metrics(server)['tessera_restore_arrays{state="loading"}']
        self.assertTrue(o.eventually(lambda: loading() == "2"))

        def release():
            for lease in leases:
                os.close(lease)

        return server, release

    def assert_lost(self, outcome, name):
        o.check_refusal(outcome, *DATA_LOST, name=name)

    def test_a_kill_under_load_loses_nothing_that_a_snapshot_held(self):
        rng = random.Random(7)
        model = Model([f"t/{writer}/{i}" for writer in range(3) for i in range(4)])
        least = dict(model.done)
        for _ in range(6):
            server = self.serve()
            model.check(server.client(), least)
            killed = threading.Event()

            def write(writer, server=server, killed=killed, seed=rng.random()):
                own = random.Random(seed + writer)
                client = server.client()
                while not killed.is_set():
                    name = f"t/{writer}/{own.randrange(4)}"
                    data = own.randbytes(own.choice((0, 4, 999, 300_000)))
                    try:
                        if own.random() < 0.2 and model.states[name][-1] is not None:
                            model.change(name, None, lambda: client.call("DeleteBuffer", name=name))
                        else:
                            array = np.array(memoryview(data), np.uint8)
                            put = lambda: client.put(name, array, replace=True)  # noqa: E731
                            model.change(name, data, put)
                    except grpc.RpcError:
                        return killed.wait(o.CALL_TIMEOUT_S)  # The server has ended.

            def snapshot(server=server, killed=killed, changes=rng.randrange(20, 100)):
                nonlocal least
                client = server.client()
                while sum(model.done.values()) < changes:
                    before = dict(model.done)
                    client.call("Snapshot")
                    least = before
                last = client.future("Snapshot")  # It may or may not be completed.
                server.process.send_signal(signal.SIGKILL)
                server.process.wait()
                killed.set()
                o.outcome_of(last)

            o.in_threads(4, lambda i: snapshot() if i == 3 else write(i))
            server.kill()
        model.check(self.serve().client(), least)

    def test_what_survives(self):
        server = self.serve(device="cpu:1")
        client = server.client()
        arrays = {
            "half": np.arange(7, dtype=np.float16),
            "matrix": np.random.default_rng(3).normal(size=(700, 500)),
            "empty": np.zeros((3, 0), np.int64),
            "scalar": np.array(5, np.int32),
            "flags": np.array([True, False]),
        }
        for name, array in arrays.items():
            client.put(name, array)
        client.put("brief", arrays["half"], ttl=dict(seconds=3600))
        client.call("CopyBuffer", source="matrix", name="link", link=True)
        client.call("Add", a=o.resident("half"), b=o.resident("half"), result=o.into("sum"))
        client.create("draft", arrays["half"])
        before = {b.name: b for b in client.call("ListBuffers").buffers if b.name != "draft"}
        taken = client.call("Snapshot")
        self.assertEqual((taken.buffers, taken.written_arrays), (8, 7))
        newest = client.put("newer", arrays["half"]).version

        client = self.restart(server, device="cpu:1").client()
        after = {b.name: b for b in client.call("ListBuffers").buffers}
        self.assertEqual(sorted(after), sorted(before))
        for name, was in before.items():
            now = after[name]
            for field in ("dtype", "shape", "version", "state", "device"):
                self.assertEqual(getattr(now, field), getattr(was, field), (name, field))
            if was.HasField("crc32c"):
                self.assertEqual(now.crc32c, was.crc32c)
            self.assertEqual(now.HasField("expire_time"), name == "brief")
            data = client.download(name)
            if len(data) < 1000:
                self.assertEqual(now.crc32c, o.crc32c(data), name)
            if name in arrays:
                self.assertEqual(data, arrays[name].tobytes(), name)
        self.assertEqual(client.download("link"), arrays["matrix"].tobytes())
        self.assertGreater(client.put("newest", arrays["half"]).version, newest)

    def test_what_waits_for_the_disk_and_what_does_not(self):
        server = self.serve()
        x = np.arange(1000, dtype=np.float64)
        for name in "abcde":
            server.client().put(name, x)
        server.client().call("Snapshot")
        server.kill()
        server, release = self.serve_while_loading("ab")
        client = server.client()
        dot = lambda name: dict(a=o.resident(name), b=o.resident(name))  # noqa: E731
        # More calls than there are workers.
        calls = [client.future("Dot", **dot("c")) for _ in range(20)]
        lost = client.future("Dot", **dot("a"))
        program = client.future("Execute", steps=[o.compute.Step(dot=dot("b"))])
        deleted = client.future("Dot", **dot("e"))
        copy = client.future("CopyBuffer", source="c", name="copy")
        streams = [client.b.Download(o.buffers.DownloadRequest(name="c")) for _ in range(3)]
        # A call ends when its deadline passes or its client leaves.
        self.assertEqual(client.attempt("Dot", **dot("c"), timeout=0.1).code, "DEADLINE_EXCEEDED")
        late = o.outcome_of(lambda: client.download("c", timeout=0.1))
        self.assertEqual(late.code, "DEADLINE_EXCEEDED")
        calls.pop().cancel()
        streams.pop().cancel()
        # Calls that need no bytes of these arrays are done at once.
        self.assertEqual(client.names(), ["a", "b", "c", "d", "e"])
        self.assertEqual(client.call("GetBuffer", name="c").buffer.state, READY)
        self.assertEqual(client.dot_of_ones(), 1)
        client.call("CopyBuffer", source="c", name="link", link=True)
        client.call("UpdateBuffer", name="c", ttl=dict(seconds=3600))
        client.put("d", x + 1, replace=True)
        self.assertEqual(client.download("d"), (x + 1).tobytes())
        client.call("CopyBuffer", source="a", name="last", link=True)
        # Calls that wait for a deleted buffer continue to wait, even after a snapshot without it.
        waiting = lambda: int(self.metrics(server)["tessera_calls_in_progress"])
        self.assertTrue(o.eventually(lambda: waiting() >= 25))
        file = self.file_of("e")
        client.call("DeleteBuffer", name="a")
        client.call("DeleteBuffer", name="e")
        taken = client.call("Snapshot")
        self.assertEqual((taken.buffers, taken.written_arrays), (5, 1))
        self.assertFalse(any(call.done() for call in (*calls, lost, program, deleted, copy)))
        release()
        self.assertEqual(deleted.result().value.real, (x * x).sum())
        self.assert_lost(o.outcome_of(lost), "a")
        self.assert_lost(o.outcome_of(program), "b")
        self.assert_lost(o.outcome_of(lambda: client.download("last")), "a")
        self.assertEqual({call.result().value.real for call in calls}, {(x * x).sum()})
        for stream in streams:
            self.assertEqual(b"".join(message.data for message in stream), x.tobytes())
        copy.result()
        for name in ("copy", "link", "c"):
            self.assertEqual(client.download(name), x.tobytes())
        self.assertTrue(file.exists())
        self.assertEqual(server.stop(), 0)
        self.assertFalse(file.exists())

    def test_a_selection_waits_for_its_elements_and_its_mask(self):
        server = self.serve()
        x = np.random.default_rng(4).normal(size=5000)
        mask = x > 0.5
        for name, array in (("a", mask), ("b", x), ("x", x), ("mask", mask)):
            server.client().put(name, array)
        server.client().call("Snapshot")
        server.kill()
        server, release = self.serve_while_loading("ab")
        client = server.client()
        here = dict(x=o.inline(x), mask=o.inline(mask))
        on_disk = dict(x=o.resident("x"), mask=o.resident("mask"))
        requests = [on_disk, {**on_disk, "x": here["x"]}, {**on_disk, "mask": here["mask"]}]
        calls = [client.future("Select", **request) for request in requests]
        stored = client.future("Select", **on_disk, values=o.into("kept"), indices=dict(none=True))
        program = client.future("Execute", steps=[o.compute.Step(select=on_disk)])
        lost = client.future("Select", x=here["x"], mask=o.resident("a"))
        for request in requests:
            outcome = client.attempt("Select", **request, timeout=0.1)
            self.assertEqual(outcome.code, "DEADLINE_EXCEEDED")
        # A call that needs nothing from the disk does not wait.
        answers = [client.call("Select", **here)]
        self.assertFalse(any(call.done() for call in (*calls, stored, program, lost)))
        release()
        answers += [call.result() for call in calls]
        answers.append(program.result().results[0].select)
        for answer in answers:
            np.testing.assert_array_equal(o.to_numpy(answer.values), x[mask])
            np.testing.assert_array_equal(o.to_numpy(answer.indices), np.flatnonzero(mask))
        self.assertEqual(list(stored.result().values_buffer.shape), [mask.sum()])
        self.assertEqual(client.download("kept"), x[mask].tobytes())
        self.assert_lost(o.outcome_of(lost), "a")

    def test_damage_loses_one_array_each(self):
        server = self.serve()
        client = server.client()
        array = np.arange(50_000, dtype=np.float32)
        for name in ("whole", "flipped", "short", "missing", "header", "pipe"):
            client.put(name, array)
        client.call("Snapshot")
        server.kill()
        flipped, header = self.file_of("flipped"), self.file_of("header")
        for path, at in ((flipped, -1234), (header, 20)):
            data = bytearray(path.read_bytes())
            data[at] ^= 64
            path.write_bytes(data)
        short = self.file_of("short")
        short.write_bytes(short.read_bytes()[:-1])
        for name in ("missing", "pipe"):
            self.file_of(name).unlink()
        os.mkfifo(self.file_of("pipe"))
        lost = ("flipped", "short", "missing", "header", "pipe")

        server = self.serve("--metrics-listen", "127.0.0.1:0")
        client = server.client()
        for name in lost:
            self.assert_lost(o.outcome_of(lambda name=name: client.download(name)), name)
            self.assert_lost(client.attempt("CopyBuffer", source=name, name="copy"), name)
            dot = dict(a=o.resident("whole"), b=o.resident(name))
            self.assert_lost(client.attempt("Dot", **dot), name)
            said = f"buffer '{name}' cannot be restored"
            self.assertTrue(o.eventually(lambda said=said: said in server.log()), said)
            most = dict(x=o.resident("whole"), op="REDUCE_OP_MAX")
            steps = [o.compute.Step(dot=dot), o.compute.Step(reduce=most)]
            step, good = client.call("Execute", steps=steps).results
            self.assertEqual(step.error.reason, "DATA_LOST")
            self.assertEqual(good.reduce.value.real, 49_999)
        self.assertEqual(client.download("whole"), array.tobytes())
        self.assertEqual(self.metrics(server)['tessera_restore_arrays{state="lost"}'], "5")
        # A lost array stays lost until it is deleted or replaced.
        self.assertEqual(server.stop(), 0)
        server = self.serve()
        client = server.client()
        self.assertEqual(sorted(client.names()), sorted((*lost, "whole")))
        self.assert_lost(client.attempt("CopyBuffer", source="short", name="copy"), "short")
        client.put("short", array, replace=True)
        for name in ("flipped", "missing", "header", "pipe"):
            client.call("DeleteBuffer", name=name)
        self.assertEqual(server.stop(), 0)
        client = self.serve().client()
        self.assertEqual(client.names(), ["short", "whole"])
        self.assertEqual(client.download("short"), array.tobytes())
        self.assertEqual(len(self.files()), 3)

    def test_versions_are_written_once(self):
        server = self.serve()
        client = server.client()
        for name in ("a", "b"):
            client.put(name, np.arange(5, dtype=np.int32))
        self.assertEqual(client.call("Snapshot").written_arrays, 2)
        kept, gone = self.file_of("a"), self.file_of("b")
        stamp = kept.stat().st_mtime_ns
        client.put("b", np.arange(6, dtype=np.int32), replace=True)
        taken = client.call("Snapshot")
        self.assertEqual((taken.buffers, taken.written_arrays, taken.written_bytes), (2, 1, 24))
        self.assertEqual(kept.stat().st_mtime_ns, stamp)
        self.assertFalse(gone.exists())
        client.call("DeleteBuffer", name="b")
        # A server that has not loaded them yet also keeps them.
        self.assertEqual(server.stop(), 0)
        client = self.serve().client()
        taken = client.call("Snapshot")
        self.assertEqual((taken.buffers, taken.written_arrays), (1, 0))
        self.assertEqual(kept.stat().st_mtime_ns, stamp)

    def test_a_stop_and_the_interval_take_snapshots(self):
        server = self.serve()
        server.client().put("x", np.ones(3, np.float32))
        self.assertEqual(server.stop(), 0)
        self.assertEqual(len(self.files()), 2)
        server = self.serve("--snapshot-interval", "1ms", "--metrics-listen", "127.0.0.1:0")
        server.client().put("y", np.ones(3, np.float32))
        self.assertTrue(o.eventually(lambda: len(self.files()) == 3), server.log())
        written = 'tessera_snapshots_total{result="written"}'
        self.assertTrue(o.eventually(lambda: int(self.metrics(server)[written]) > 1))
        metrics = self.metrics(server)
        self.assertEqual(metrics["tessera_snapshot_bytes_total"], "12")
        self.assertEqual(metrics['tessera_snapshots_total{result="failed"}'], "0")
        self.assertIn("tessera_snapshot_age_seconds", metrics)
        self.assertEqual(sorted(self.restart(server).client().names()), ["x", "y"])

    def test_time_to_live_passes_while_the_server_is_down(self):
        server = self.serve()
        client = server.client()
        one = np.ones(1, np.float32)
        end = client.put("brief", one, ttl=dict(nanos=500_000_000)).expire_time.ToNanoseconds()
        client.put("lasting", one, ttl=dict(seconds=36_000))
        client.call("Snapshot")
        server.kill()
        self.assertTrue(o.eventually(lambda: time.time_ns() > end))
        client = self.serve().client()
        self.assertEqual(client.names(), ["lasting"])
        self.assertTrue(client.call("GetBuffer", name="lasting").buffer.HasField("expire_time"))

    def test_a_clock_that_was_set_back_lengthens_no_life(self):
        server = self.serve()
        server.client().put("x", np.ones(1, np.float32), ttl=dict(seconds=3600))
        server.client().call("Snapshot")
        server.kill()
        manifest, day = self.manifest(), 86_400 * 10**6  # It will seem to come from tomorrow.
        (buffer,) = manifest["tenants"][0]["buffers"]
        manifest["time"] += day
        for time_of in ("created", "expires"):
            buffer[time_of] += day
        text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
        (self.data / "manifest.json").write_text(
            f'{{"crc32c":{o.crc32c(text.encode())},"manifest":{text}}}')
        end = self.serve().client().call("GetBuffer", name="x").buffer.expire_time
        self.assertLess(end.ToSeconds(), time.time() + 3601)

    def test_another_number_of_devices(self):
        server = self.serve(device="cpu:0,cpu:1,cpu:2")
        client = server.client()
        array = np.random.default_rng(2).normal(size=3_000_000)
        client.put("all", array, placement=["all"])
        client.put("last", array[:9], device="cpu:2")
        client.call("Snapshot")
        for device in ("cpu:0,cpu:2", "cpu:1", "cpu", "cpu:0,cpu:1,cpu:2"):
            with self.subTest(device):
                server = self.restart(server, device=device)
                client = server.client()
                self.assertEqual(client.download("all"), array.tobytes())
                self.assertEqual(client.download("last"), array[:9].tobytes())
                shards = client.call("GetBuffer", name="all").buffer.shards
                names = [shard.device for shard in shards]
                self.assertEqual(names, device.split(",") if "," in device else [])

    def test_tenants(self):
        tokens = self.folder / "tokens"
        lines = [line_of("a", "write", "one"), line_of("b", "write", "two"),
                 line_of("r", "read", "one"), line_of("o", "admin", "ops")]
        tokens.write_text("\n".join(lines))
        server = self.serve("--tokens", tokens)
        one, two, reader, operator = (Caller(server, token) for token in "abro")
        for caller, value in ((one, 1), (two, 2)):
            caller.put("x", np.full(4, value, np.int32))
        self.assertEqual(reader.reason("Snapshot"), "ROLE_TOO_SMALL")
        self.assertEqual(one.call("Snapshot").buffers, 1)
        one.put("y", np.ones(1, np.int32))
        server = self.restart(server, "--tokens", tokens)
        one, two = Caller(server, "a"), Caller(server, "b")
        self.assertEqual((one.names(), two.names()), (["x"], []))
        two.put("x", np.full(4, 3, np.int32))
        self.assertEqual(Caller(server, "o").call("Snapshot").buffers, 2)
        # A tenant whose callers are gone keeps its buffers.
        tokens.write_text("\n".join((lines[1], lines[3])))
        server = self.restart(server, "--tokens", tokens)
        self.assertEqual(Caller(server, "b").download("x"), np.full(4, 3, np.int32).tobytes())
        self.assertEqual(Caller(server, "o").call("Snapshot").buffers, 2)
        tokens.write_text("\n".join(lines))
        server = self.restart(server, "--tokens", tokens)
        self.assertEqual(Caller(server, "a").download("x"), np.full(4, 1, np.int32).tobytes())

    def test_a_full_disk_keeps_the_snapshot_before(self):
        server = self.serve("--metrics-listen", "127.0.0.1:0", prefix=("prlimit", "--fsize=100000"))
        client = server.client()
        small = np.arange(10, dtype=np.float32)
        client.put("small", small)
        client.call("Snapshot")
        before = self.files()
        age = lambda: float(self.metrics(server)["tessera_snapshot_age_seconds"])
        self.assertTrue(o.eventually(lambda: age() > 0.2))
        client.put("large", np.zeros(100_000, np.float32))
        outcome = client.attempt("Snapshot")
        refused = ("FAILED_PRECONDITION", "SNAPSHOT_FAILED")
        o.check_refusal(outcome, *refused, cause="File too large")
        self.assertEqual(self.files(), before)
        failed = 'tessera_snapshots_total{result="failed"}'
        self.assertEqual(self.metrics(server)[failed], "1")
        self.assertGreater(age(), 0.2, "a snapshot that failed is not the last one")
        # The number of a file that could not be written is not used again.
        client.put("late", small)
        client.call("DeleteBuffer", name="large")
        client.call("Snapshot")
        self.assertEqual(self.file_of("late").name, "3.safetensors")
        client.call("DeleteBuffer", name="late")
        client.call("Snapshot")
        client.put("large", np.zeros(100_000, np.float32))
        self.assertEqual(server.stop(), 74)  # Its last snapshot fails too.
        self.assertIn("the last snapshot failed", server.log())
        self.assertEqual(self.files(), before)
        client = self.serve().client()
        self.assertEqual((client.names(), client.download("small")), (["small"], small.tobytes()))

    def test_a_folder_that_cannot_be_written_to(self):
        """Its arrays are restored, and snapshots fail. The server does not run as root, which file
        modes do not restrict."""
        server = self.serve()
        server.client().put("x", np.arange(9))
        server.client().call("Snapshot")
        server.kill()
        user = ()
        if os.geteuid() == 0:
            user = ("setpriv", "--reuid=65534", "--clear-groups")
            for path in (self.data, *self.data.rglob("*")):
                os.chown(path, 65534, -1)
            for path in (self.folder.parent, self.folder):
                path.chmod(0o755)
        before = self.files()
        for path in (self.data, self.data / "arrays"):
            path.chmod(0o500)
        (self.data / "lock").chmod(0o400)
        client = self.serve(prefix=user).client()
        self.assertEqual(client.download("x"), np.arange(9).tobytes())
        client.put("y", np.arange(3))
        outcome = client.attempt("Snapshot")
        self.assertEqual((outcome.reason, outcome.metadata["cause"]),
                         ("SNAPSHOT_FAILED", "Permission denied"))
        self.assertEqual(self.files(), before)

    def test_what_is_refused(self):
        server = self.serve()
        said = o.refused("--listen", "127.0.0.1:0", "--data-dir", self.data)
        self.assertIn("belongs to another running server", said)
        server.client().put("x", np.ones(1, np.float32))
        self.assertEqual(server.stop(), 0)
        manifest = self.data / "manifest.json"
        content = manifest.read_text()
        manifest.write_text("{}")
        said = o.refused("--listen", "127.0.0.1:0", "--data-dir", self.data)
        self.assertIn("manifest.json", said)
        manifest.unlink()
        os.mkfifo(manifest)
        said = o.refused("--listen", "127.0.0.1:0", "--data-dir", self.data)
        self.assertIn("manifest.json: it is not a regular file", said)
        manifest.unlink()
        said = o.refused("--listen", "127.0.0.1:0", "--data-dir", self.data)
        self.assertIn("it is missing, but the folder has arrays", said)
        manifest.write_text(content)
        self.assertEqual(self.serve().client().names(), ["x"])
        said = o.refused("--snapshot-interval", "1s")
        self.assertIn("--snapshot-interval needs --data-dir", said)
        with o.Server(self.folder) as off:
            outcome = off.client().attempt("Snapshot")
            o.check_refusal(outcome, "FAILED_PRECONDITION", "SNAPSHOTS_OFF")

    def test_memory_that_no_longer_suffices(self):
        server = self.serve()
        client = server.client()
        small, large = np.arange(9, dtype=np.int32), np.arange(1 << 20, dtype=np.int32)
        client.put("large", large)
        client.put("small", small)
        client.call("Snapshot")
        server = self.restart(server, "--memory-limit", "1Mi")
        client = server.client()
        self.assertEqual(client.download("small"), small.tobytes())
        outcome = o.outcome_of(lambda: client.download("large"))
        self.assertEqual(outcome.reason, "QUOTA_EXCEEDED", outcome)
        self.assertEqual(server.stop(), 0)
        client = self.serve().client()
        self.assertEqual(client.download("large"), large.tobytes())

    def test_the_command_line(self):
        server = self.serve()
        server.client().put("x", np.ones(1000, np.float32))
        ended = o.run(o.Program.cli, "--server", server.address, "snapshot")
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertEqual(ended.stdout, "1 buffer, 1 array written (3.9 KiB)\n")
        ended = o.run(o.Program.cli, "--server", server.address, "--json", "snapshot")
        document = json.loads(ended.stdout)
        del document["traffic"]
        self.assertEqual(document, dict(buffers=1, written_arrays=0, written_bytes=0))


if __name__ == "__main__":
    o.main(jobs=2)
