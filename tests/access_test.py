#!/usr/bin/env python3
"""Access control from outside: every method with every role, tenants that cannot see each other,
quotas, files that change while a server runs, wrong tokens, and outputs that must not contain a
token."""

import hashlib
import json
import os
import secrets
import socket
import threading
import unittest.mock

import grpc
import numpy as np

import outsider as o
from callers import PIECE, Caller, Region, every_method, line_of, replace

ROLES = ("read", "write", "admin")

# The lowest role that each method needs. All methods of ComputeService need the role read.
NEEDED = {"CreateBuffer": "write", "Upload": "write", "GetBuffer": "read", "ListBuffers": "read",
          "SealBuffer": "write", "UpdateBuffer": "write", "CopyBuffer": "write", "Download": "read",
          "ImportBuffer": "write", "DeleteBuffer": "write", "Snapshot": "write",
          "GetSharedMemory": "read", "UploadShared": "write", "DownloadShared": "read"}


class AccessTest(o.FreshCase):
    def setUp(self):
        super().setUp()
        self.file = self.folder / "tokens"

    def write_tokens(self, *lines):
        replace(self.file, "".join(line + "\n" for line in lines))

    def serve(self, *lines, flags=()):
        """Starts a server with these lines as its token file."""
        self.write_tokens(*lines)
        return super().serve("--tokens", self.file, *flags)

    assert_refused = staticmethod(o.check_refusal)

    def assert_eventually(self, condition):
        self.assertTrue(o.eventually(condition))

    def assert_logs(self, server, text):
        self.assertTrue(o.eventually(lambda: text in server.log()), server.log())

    def begin_upload(self, caller, name, hold):
        """Begins an upload, which may be refused. Otherwise it stays open until hold is set."""
        self.addCleanup(hold.set)
        data = PIECE.tobytes()
        first = dict(name=name, spec=o.spec_of(PIECE), data=data[:8])
        upload = caller.begin_upload(hold, first, then=[dict(data=data[8:])])
        self.assert_eventually(lambda: upload.done() or name in caller.names())
        return upload

    def test_the_table_of_roles_names_every_method(self):
        self.assertEqual(set(o.methods(o.buffers, o.shared)), set(NEEDED))

    def test_every_method_with_every_role(self):
        tokens = {role: secrets.token_urlsafe() for role in ROLES}
        server = self.serve(*(line_of(token, role) for role, token in tokens.items()),
                            flags=("--shared-memory", self.folder / "shared"))
        Caller(server, tokens["write"]).put("x", PIECE)
        for i, role in enumerate(ROLES):
            for rpc, end in every_method(Caller(server, tokens[role])).items():
                with self.subTest(rpc, role=role):
                    if ROLES.index(NEEDED.get(rpc, "read")) <= i:
                        self.assertNotIn(end.code, ("UNAUTHENTICATED", "PERMISSION_DENIED"), end)
                    else:
                        self.assert_refused(end, "PERMISSION_DENIED", "ROLE_TOO_SMALL")
                        self.assertIn("needs the role " + NEEDED.get(rpc, "read"), end.text)
        for rpc, end in every_method(Caller(server)).items():
            with self.subTest(rpc, role=None):
                self.assert_refused(end, "UNAUTHENTICATED", "BAD_TOKEN")

    def test_results_that_are_stored_need_write(self):
        server = self.serve(line_of("r", "read"), line_of("w"))
        reader, writer = Caller(server, "r"), Caller(server, "w")
        writer.put("x", PIECE)
        x, out = o.resident("x"), o.into("out", replace=True)
        step = o.compute.Step(add=o.compute.AddRequest(a=x, b=x, result=out))
        plain = o.compute.Step(add=o.compute.AddRequest(a=x, b=x))
        # tests/fuzz_tenants_test.py covers the other operations with one result.
        mask = o.inline(np.ones(PIECE.shape, bool))
        for rpc, fields in (("Add", dict(a=x, b=x, result=out)),
                            ("TopK", dict(x=x, k=1, indices=out)),
                            ("Sort", dict(x=x, indices=out)),
                            ("Select", dict(x=x, mask=mask, indices=out)),
                            ("Execute", dict(steps=[plain, step]))):
            with self.subTest(rpc):
                end = reader.attempt(rpc, **fields)
                self.assert_refused(end, "PERMISSION_DENIED", "ROLE_TOO_SMALL")
                self.assertTrue(writer.attempt(rpc, **fields).ok)
        self.assertTrue(reader.attempt("Execute", steps=[plain]).ok)
        self.assertEqual(sorted(writer.names()), ["out", "x"])
        # The role is checked before the rest of the request.
        maps = dict(operands=[o.resident("nowhere")], result=out)  # It has no expression.
        for rpc, fields in (("Map", maps), ("Execute", dict(steps=[o.compute.Step(map=maps)]))):
            end = reader.attempt(rpc, **fields)
            self.assert_refused(end, "PERMISSION_DENIED", "ROLE_TOO_SMALL")

    def test_health_and_reflection_need_no_token(self):
        server = self.serve(line_of("t"))
        self.assertEqual(server.client().health(), 1)
        reflect = server.client().channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        answers = reflect(iter([b"\x3a\x00"]), timeout=20)  # list_services: ""
        self.assertIn(b"tessera.v1.BufferService", next(answers))

    # --- Tokens ---

    def test_wrong_tokens_are_all_refused_in_the_same_words(self):
        token = "the-right-token"
        hashed = hashlib.sha256(token.encode()).hexdigest()
        close = hashlib.sha256(b"another").hexdigest()[:32] + "0" * 32  # begins as its hash does
        server = self.serve(line_of(token), f"{close} write one")
        wrong = [
            (),
            *((("authorization", value),)
              for value in (
                  "", "Bearer", "Bearer ", "bearer", "Basic " + token, token, "Bearer " + hashed,
                  "Bearer " + token[:-1], "Bearer " + token + "x", "Bearer  " + token,
                  "Bearer " + token.upper(), "Bearer " + "x" * 2000,
                  "Bearer another")),
            (("authorization", "Bearer " + token), ("authorization", "Bearer " + token)),
            (("authorization", "Bearer x"), ("authorization", "Bearer " + token)),
            (("authorization-bin", token.encode()),),
            (("x-authorization", "Bearer " + token),)]
        said = set()
        for metadata in wrong:
            caller = Caller(server, metadata=metadata)
            for end in (caller.attempt("ListBuffers"), caller.try_upload([dict(name="x")])):
                self.assert_refused(end, "UNAUTHENTICATED", "BAD_TOKEN")
                said.add(end.text)
        self.assertEqual(len(said), 1, said)
        for scheme in ("Bearer", "bearer", "BEARER"):
            caller = Caller(server, metadata=(("authorization", f"{scheme} {token}"),))
            self.assertTrue(caller.attempt("ListBuffers").ok)

    def test_a_request_is_not_looked_at_before_its_caller_is_known(self):
        server = self.serve(line_of("t"))
        raw = Caller(server).channel.unary_unary("/tessera.v1.ComputeService/Dot")
        end = o.outcome_of(lambda: raw(b"\xff" * 100, timeout=20))
        self.assertEqual(end.code, "UNAUTHENTICATED")

    # --- The file ---

    def test_a_changed_file_is_used_without_a_restart(self):
        server = self.serve(line_of("first"))
        first, second = Caller(server, "first"), Caller(server, "second")
        first.put("x", PIECE)
        self.assertEqual(second.reason("ListBuffers"), "BAD_TOKEN")
        self.write_tokens("# renewed", f"{line_of('second', 'read')}  # for the second")
        self.assert_eventually(lambda: second.attempt("ListBuffers").ok)
        self.assertEqual(first.reason("ListBuffers"), "BAD_TOKEN")
        self.assertEqual(second.names(), ["x"], "buffers are the tenant's, not the token's")
        self.assertEqual(second.reason("DeleteBuffer", name="x"), "ROLE_TOO_SMALL")

    def test_calls_in_progress_go_on_when_their_token_goes(self):
        server = self.serve(line_of("first"))
        hold = threading.Event()
        upload = self.begin_upload(Caller(server, "first"), "x", hold)
        other = Caller(server, "second")
        self.write_tokens(line_of("second"))
        self.assert_eventually(lambda: other.attempt("ListBuffers").ok)
        hold.set()
        self.assertEqual(upload.result().buffer.name, "x")

    def test_a_bad_file_leaves_the_tokens_in_use(self):
        ring = self.folder / "ring"
        ring.write_text("a host-a:1\n")
        server = self.serve(line_of("t"), flags=("--ring", ring, "--ring-name", "a"))
        caller = Caller(server, "t")
        for change, said in ((lambda: self.write_tokens("rubbish"),
                              "line 1: it needs a caller, a role and a tenant"),
                             (lambda: self.write_tokens(line_of("t"), line_of("u", "root")),
                              "line 2: the role must be"),
                             (lambda: self.write_tokens("# nobody"), "it admits no callers"),
                             (lambda: self.file.chmod(0o666), "it is writable by its group"),
                             (self.file.unlink, "there is no such file")):
            with self.subTest(said):
                change()
                self.assert_logs(server, said)
                self.assertTrue(caller.attempt("ListBuffers").ok)
        # The server checks the ring after the tokens.
        replace(ring, "a host-a:2\n")
        self.assert_logs(server, "--ring: the file has changed")
        self.assertEqual(server.log().count("there is no such file"), 1)

    def test_files_that_cannot_be_used_are_refused_at_the_start(self):
        address = ("--listen", "127.0.0.1:0", "--tokens", self.file)
        self.assertIn("there is no such file", o.refused(*address))
        self.write_tokens(line_of("t"), line_of("t", "read"))
        self.assertIn("line 2: an earlier line names this caller", o.refused(*address))
        for mode in (0o664, 0o646):
            self.write_tokens(line_of("t"))
            self.file.chmod(mode)
            self.assertIn("it is writable by its group or by others", o.refused(*address))

    def test_tokens_in_clear_beyond_this_host_need_a_flag(self):
        self.write_tokens(line_of("t"))
        beyond = ("--listen", "127.0.0.1:0", "--listen", "0.0.0.0:0")
        said = o.refused(*beyond, "--tokens", self.file)
        self.assertIn("tokens would be sent in the clear", said)
        self.assertIn("--insecure", said)
        server = self.serve(line_of("t"), flags=("--listen", "0.0.0.0:0", "--insecure"))
        self.assertIn("any observer of the traffic to it can read the tokens", server.log())

    # --- Tenants ---

    def two(self, *quotas, flags=()):
        """Returns the clients of two tenants, and the server."""
        server = self.serve(line_of("a", "write", "anna", *quotas), line_of("b", "write", "bert"),
                            line_of("admin", "admin", "staff"), flags=flags)
        return Caller(server, "a"), Caller(server, "b"), server

    def test_a_source_that_tells_the_token_is_not_quoted(self):
        def tell(_, context):
            sent = dict(context.invocation_metadata())["authorization"]
            status = o.status_pb2.Status()
            status.details.add().Pack(o.error_details_pb2.ErrorInfo(reason=sent))
            detail = ("grpc-status-details-bin", status.SerializeToString())
            context.set_trailing_metadata([detail])
            context.abort(grpc.StatusCode.NOT_FOUND, f"nothing for {sent}, {sent[7:]}")

        handler = grpc.unary_stream_rpc_method_handler(tell)
        where = self.enterContext(o.handling(lambda _: handler))
        token = "token-" + secrets.token_urlsafe(32)
        flags = ("--import-from", "127.0.0.1:*", "--insecure")
        server = self.serve(line_of(token, "write", "anna"), flags=flags)
        for scheme in ("Bearer", "bearer", "BEARER"):
            caller = Caller(server, metadata=(("authorization", f"{scheme} {token}"),))
            end = caller.attempt("ImportBuffer", source=where, source_name="x", name="y")
            self.assert_refused(end, "FAILED_PRECONDITION", "SOURCE_REFUSED")
            self.assertIn(f"nothing for {scheme} (token), (token)", end.text)
            self.assertEqual(end.metadata["reason"], f"{scheme} (token)")
        self.assert_logs(server, "SOURCE_REFUSED")
        self.assertNotIn(token, server.log())

    def test_tenants_are_blind_to_each_other(self):
        flags = ("--shared-memory", self.folder / "shared", "--import-from", "127.0.0.1:*")
        anna, bert, server = self.two(flags=(*flags, "--insecure"))
        near = server.address  # It may import from itself.
        made = anna.put("secret", PIECE)
        draft = anna.create("sketch", PIECE)
        region = Region(self.folder / "shared")
        self.addCleanup(region.connection.close)
        same = o.expression(o.operand(0))
        x, y = o.resident("secret"), o.resident("nothing")

        def seen(name, operand):
            """Returns everything that bert learns from the server, with the name removed."""
            step = o.compute.Step(dot=o.compute.DotRequest(a=operand, b=operand))
            two, versions = dict(a=operand, b=operand), (made.version, draft.version)
            ends = [
                *(bert.attempt(rpc, name=name) for rpc in
                  ("GetBuffer", "SealBuffer", "UpdateBuffer", "DeleteBuffer")),
                *(bert.attempt(rpc, name=name, version=version) for version in versions for rpc in
                  ("GetBuffer", "SealBuffer", "UpdateBuffer", "DeleteBuffer")),
                *(bert.attempt("CopyBuffer", source=name, name="copy", link=link)
                  for link in (False, True)),
                bert.attempt("ImportBuffer", source=near, source_name=name, name="got"),
                *(bert.attempt(rpc, **two) for rpc in ("Dot", "Matmul", "Add")),
                bert.attempt("WindowSum", x=operand, radius=1),
                bert.attempt("TopK", x=operand, k=1),
                bert.attempt("Scan", op=o.compute.REDUCE_OP_SUM, x=operand),
                bert.attempt("Sort", x=operand),
                bert.attempt("Take", x=operand, indices=operand),
                bert.attempt("Select", x=operand, mask=operand),
                bert.attempt("Histogram", x=operand, edges=operand),
                bert.attempt("SearchSorted", x=operand, keys=operand),
                bert.attempt("SumByLabel", x=operand, labels=operand, length=1),
                bert.attempt("Linalg", function="LINALG_FUNCTION_SOLVE", x=operand, b=operand),
                bert.attempt("Map", operands=[operand], expression=same),
                bert.attempt("Reduce", op=o.compute.REDUCE_OP_SUM, x=operand),
                bert.try_upload([dict(name=name, data=b"1234")]),
                o.outcome_of(lambda: bert.download(name)),
                bert.shared("DownloadShared", name=name, target=region.range(PIECE.nbytes))]
            self.assertEqual({end.code for end in ends}, {"NOT_FOUND", "FAILED_PRECONDITION"})
            texts = [repr((end.code, end.reason, end.text)) for end in ends]
            result = bert.call("Execute", steps=[step]).results[0]
            texts.append(repr((result.error.code, result.error.reason, result.error.message)))
            listed = bert.call("ListBuffers", prefix=name)
            texts.append(repr(listed))
            return [text.replace(name, "NAME") for text in texts]

        self.assertEqual(seen("secret", x), seen("nothing", y))
        self.assertEqual(seen("sketch", o.resident("sketch")), seen("nothing", y))
        self.assert_logs(server, " (tenant bert): NOT_FOUND")
        # The region belongs to bert, the first to use it.
        part = region.range(PIECE.nbytes)
        for end in (anna.shared("DownloadShared", name="secret", target=part),
                    anna.shared("UploadShared", name="new", spec=o.spec_of(PIECE), source=part)):
            self.assert_refused(end, "NOT_FOUND", "REGION_NOT_FOUND")
        # Taking the name does not reveal anything either.
        self.assertEqual(bert.create("secret", PIECE).name, "secret")
        self.assertEqual(anna.names(), ["secret", "sketch"])

    def test_only_an_admin_is_told_what_is_free(self):
        flags = ("--memory-limit", "8Mi", "--scratch-limit", "1Mi", "--host-memory", "16Mi",
                 "--shared-memory", self.folder / "shared", "--shared-memory-limit", "4096")
        anna, bert, server = self.two(flags=flags)
        staff = Caller(server, "admin")
        huge = o.buffers.BufferSpec(dtype=1, shape=[1 << 40])
        wide = o.inline(PIECE[:1], o.view([700_000], [0]))
        wider = o.inline(PIECE[:1], o.view([3_000_000], [0]))

        def ends(caller):
            """Returns the outcomes of calls that are refused because the memory of all tenants
            together is too small."""
            add = o.compute.AddRequest(a=wider, b=wider, result=o.into("sum"))
            found = {"buffer": caller.attempt("CreateBuffer", name="big", spec=huge),
                     "upload": caller.try_upload([dict(name="big", spec=huge)]),
                     "result": caller.attempt("Add", a=wide, b=wide),
                     "step": caller.attempt("Execute", steps=[o.compute.Step(add=add)])}

            return {name: o.Outcome.of_step(end.answer.results[0]) if name == "step" else end
                    for name, end in found.items()}

        expected = {"buffer": "QUOTA_EXCEEDED", "upload": "QUOTA_EXCEEDED",
                    "result": "SCRATCH_EXHAUSTED", "step": "QUOTA_EXCEEDED"}
        before = ends(bert)
        anna.put("x", np.zeros(1 << 20, np.float32))
        after = ends(bert)
        self.assertEqual({name: end.reason for name, end in before.items()}, expected)
        for name, end in after.items():
            with self.subTest(name):
                earlier = before[name]
                self.assertEqual((end.metadata, end.text), (earlier.metadata, earlier.text))
                self.assertIn("requested", end.metadata)
                self.assertFalse({"free", "total"} & set(end.metadata), end)
                self.assertNotIn("free", end.text)
        for name, end in ends(staff).items():
            with self.subTest(name, role="admin"):
                self.assertLessEqual({"requested", "free", "total"}, set(end.metadata))
                self.assertIn("free: ", end.text)
        put = ("put", "--random", "zeros", "--shape", 1 << 40, "--name", "big")
        self.assertIn("4 TiB requested; 'tessera rm", self.run_cli(server, *put, token="b").stderr)
        self.assertIn("8 MiB free; 'tessera rm", self.run_cli(server, *put, token="admin").stderr)
        # A region is registered by an operating-system user, before any tenant uses it.
        first = Region(self.folder / "shared")
        self.addCleanup(first.connection.close)
        second = Region(self.folder / "shared")
        self.addCleanup(second.connection.close)
        self.assertEqual(second.answer.reason, "SHARED_MEMORY_EXHAUSTED")
        self.assertEqual(dict(second.answer.metadata), {"requested": "4096"})

    def test_a_tenant_has_half_of_the_streams(self):
        anna, bert, server = self.two(flags=("--max-transfers", "4"))
        hold = threading.Event()
        held = [self.begin_upload(anna, name, hold) for name in "xy"]
        refused = o.outcome_of(self.begin_upload(anna, "z", hold))
        self.assert_refused(refused, "RESOURCE_EXHAUSTED", "TOO_MANY_UPLOADS", used="2", limit="2")
        held += [self.begin_upload(bert, name, hold) for name in "xy"]
        self.assertFalse([upload for upload in held if upload.done()])
        hold.set()
        for upload in held:
            self.assertTrue(o.outcome_of(upload).ok)
        uses = {b.name: b.used for b in Caller(server, "admin").info().budgets}
        self.assertEqual(uses["uploads"], 0)

    def test_every_tenant_may_have_one_stream(self):
        anna, bert, _ = self.two(flags=("--max-transfers", "1"))
        for caller in (anna, bert):
            caller.put("whole", PIECE)
            self.assertEqual(caller.download("whole"), PIECE.tobytes())

    def test_one_tenant_alone_has_all_streams(self):
        server = self.serve(line_of("a", "write", "anna"), flags=("--max-transfers", "2"))
        anna, hold = Caller(server, "a"), threading.Event()
        uploads = [self.begin_upload(anna, name, hold) for name in "xy"]
        self.assertFalse([upload for upload in uploads if upload.done()])

    def test_a_connection_has_eight_watches_of_health(self):
        server = self.serve(line_of("t"), flags=("--max-connections", "16"))
        watch = server.client().channel.unary_stream("/grpc.health.v1.Health/Watch")
        calls = [watch(b"", timeout=60) for _ in range(8)]
        for call in calls:
            self.assertEqual(next(call), b"\x08\x01")  # SERVING
        end = o.outcome_of(lambda: next(watch(b"", timeout=20)))
        self.assertEqual(end.code, "RESOURCE_EXHAUSTED")
        self.assertEqual(server.client().health(), 1)
        watch = server.client().channel.unary_stream("/grpc.health.v1.Health/Watch")
        other = watch(b"", timeout=60)
        self.assertEqual(next(other), b"\x08\x01")
        calls.append(other)
        calls.pop(0).cancel()

        def again():
            calls.append(watch(b"", timeout=60))
            return o.outcome_of(lambda: next(calls[-1])).ok

        self.assert_eventually(again)
        for call in calls:
            call.cancel()

    def test_an_admin_sees_what_each_tenant_has_and_is_refused(self):
        server = self.serve(
            line_of("a", "write", "anna", "bytes=1Mi", "buffers=2"), line_of("b", "write", "bert"),
            line_of("admin", "admin", "staff"), flags=("--metrics-listen", "127.0.0.1:0"))
        anna, staff = Caller(server, "a"), Caller(server, "admin")
        anna.put("x", PIECE)
        big = np.zeros(1 << 20, np.uint8)
        for name in ("y", "z"):
            end = anna.attempt("CreateBuffer", name=name, spec=o.spec_of(big))
            self.assertEqual(end.reason, "TENANT_QUOTA_EXCEEDED")
        self.assertEqual(anna.attempt("GetBuffer", name="none").reason, "BUFFER_NOT_FOUND")
        self.assertEqual(list(anna.info().tenants), [])
        tenants = {one.name: one for one in staff.info().tenants}
        self.assertEqual(sorted(tenants), ["anna", "bert", "staff"])
        one = tenants["anna"]
        self.assertEqual((one.buffers, one.buffer_bytes), (1, 256))
        self.assertEqual((one.ended_calls, one.refused_calls, one.calls), (5, 2, 0))
        self.assertEqual((one.buffers_quota, one.buffer_bytes_quota, one.calls_quota),
                         (2, 1 << 20, 0))
        self.assertEqual((tenants["bert"].ended_calls, tenants["staff"].calls), (0, 1))
        for command in (("info",), ("top", "--once")):
            said = self.run_cli(server, *command, token="admin").stdout
            self.assertRegex(said, r"\nanna +256 B +1 MiB +1 +2 +0 +- +\d+ +2\n")
            self.assertNotIn("TENANT", self.run_cli(server, *command, token="a").stdout)
        said = self.run_cli(server, "--json", "info", token="admin").stdout
        self.assertEqual(json.loads(said)["tenants"][0]["refused_calls"], 2)
        # How much memory is installed, only admins see.
        (own,), (all_,) = anna.info().devices, staff.info().devices
        self.assertEqual((own.memory_total_bytes, own.prepared_bytes), (0, 0))
        self.assertGreater(all_.memory_total_bytes, all_.memory_free_bytes)
        self.assertEqual(own.buffer_limit_bytes, 1 << 20)
        self.assertEqual(own.memory_free_bytes, (1 << 20) - 256)
        self.assertEqual(own.scratch_limit_bytes, all_.scratch_limit_bytes)
        for command in (("info",), ("top", "--once")):
            lines = self.run_cli(server, *command, token="a").stdout.splitlines()
            row = next(i for i, line in enumerate(lines) if line.startswith("DEVICE")) + 1
            self.assertRegex(lines[row], r" -  +1023\.8 KiB  +256 B ")
        text = server.page()
        self.assertIn('\ntessera_tenant_refused_total{tenant="anna"} 2\n', text)
        self.assertRegex(text, r'\ntessera_tenant_calls_total\{tenant="anna"\} \d+\n')

    # --- Quotas ---

    def test_what_is_refused_takes_no_quota(self):
        anna, _, _ = self.two("bytes=64Ki")
        stop = threading.Event()

        def ask_for_too_much(caller):
            while not stop.is_set():
                reason = caller.reason("CreateBuffer", name="big", spec=huge)
                self.assertEqual(reason, "TENANT_QUOTA_EXCEEDED")

        huge = o.buffers.BufferSpec(dtype=1, shape=[1 << 40])

        def work(i):
            if i > 0:
                ask_for_too_much(anna)
                return
            try:
                for _ in range(500):
                    anna.create("small", PIECE)
                    anna.call("DeleteBuffer", name="small")
            finally:
                stop.set()

        o.in_threads(4, work)

    def test_what_has_expired_takes_no_quota(self):
        anna, _, _ = self.two("buffers=2")
        anna.put("x", PIECE)
        for i in range(30):
            anna.put("y", PIECE, ttl={"nanos": 20_000_000})
            gone = lambda: anna.reason("GetBuffer", name="y") == "BUFFER_NOT_FOUND"
            self.assertTrue(o.eventually(gone, pause=0))
            # The next call comes immediately, before or in the middle of the server's own sweep.
            if i % 2:
                anna.put("z", PIECE)
            else:
                anna.call("CopyBuffer", source="x", name="z", link=True)
            anna.call("DeleteBuffer", name="z")

    def test_quota_of_calls(self):
        anna, bert, _ = self.two()
        hold = threading.Event()
        uploads = [self.begin_upload(anna, name, hold) for name in "xy"]
        self.write_tokens(line_of("a", "write", "anna", "calls=2"), line_of("b", "write", "bert"))
        self.assert_eventually(lambda: anna.reason("ListBuffers") == "TOO_MANY_CALLS")
        end = anna.attempt("ListBuffers")
        self.assert_refused(end, "RESOURCE_EXHAUSTED", "TOO_MANY_CALLS", limit="2")
        self.assertIn("quota of calls", end.text)
        end = o.outcome_of(lambda: anna.download("x"))
        self.assertEqual(end.reason, "TOO_MANY_CALLS")
        self.assertTrue(bert.attempt("ListBuffers").ok)
        hold.set()
        for upload in uploads:
            self.assertTrue(o.outcome_of(upload).ok)
        # Consecutive calls never count twice.
        for _ in range(300):
            self.assertTrue(anna.attempt("ListBuffers").ok)

    def test_quotas_follow_the_file(self):
        anna, _, _ = self.two("buffers=1")
        anna.put("x", PIECE)
        create = lambda name: anna.reason("CreateBuffer", name=name, spec=o.spec_of(PIECE))
        self.assertEqual(create("y"), "TENANT_QUOTA_EXCEEDED")
        for limit, name, reason in ((2, "y", ""), (1, "z", "TENANT_QUOTA_EXCEEDED")):
            self.write_tokens(line_of("a", "write", "anna", f"buffers={limit}"))
            self.assert_eventually(lambda limit=limit: anna.budget("buffers").limit == limit)
            self.assertEqual(create(name), reason)
        self.assertEqual(anna.names(), ["x", "y"], "existing buffers stay")

    # --- Turns ---

    LONG = ("--max-operation-seconds", "36000")

    def flood(self, caller, count, steps=None):
        """Starts products that take minutes, or programs of such products. They are cancelled at
        the end."""
        m = o.inline(np.ones(1, np.float32), o.view([4000, 4000], [0, 0]))
        fields = dict(a=m, b=m, strategy="cpu_naive", result=o.into("p", replace=True))
        rpc = "Matmul"
        if steps is not None:
            step = o.compute.Step(matmul=o.compute.MatmulRequest(**fields))
            rpc, fields = "Execute", dict(steps=[step] * steps)
        calls = [caller.future(rpc, timeout=600, **fields) for _ in range(count)]
        for call in calls:
            self.addCleanup(call.cancel)
        return calls

    def test_a_tenant_that_floods_leaves_others_their_turn(self):
        anna, bert, server = self.two(flags=("--workers", "1", "--queue", "40", *self.LONG))
        staff = Caller(server, "admin")
        flood = self.flood(anna, 1)
        self.assert_eventually(lambda: staff.device().scratch_used_bytes > 0)  # It is running.
        flood += self.flood(anna, 59)
        # Only Anna's queue is full.
        self.assert_eventually(lambda: sum(call.done() for call in flood) == 60 - 41)
        for call in flood:
            if call.done():
                end = o.outcome_of(call)
                self.assert_refused(end, "RESOURCE_EXHAUSTED", "QUEUE_FULL")
                self.assertIsNotNone(end.retry_s, end)
        for _ in range(3):
            self.assertEqual(bert.dot_of_ones(), 1)
        self.assertEqual(sum(not call.done() for call in flood), 41)

    def test_small_programs_do_not_wait_for_long_ones(self):
        anna, bert, server = self.two(flags=("--workers", "1", *self.LONG))
        staff = Caller(server, "admin")
        flood = self.flood(anna, 2, steps=4)
        self.assert_eventually(lambda: staff.device().waiting == 1)
        # These programs take too long to run on the receiving thread, so they are queued.
        one = o.inline(np.ones(1, np.float32))
        small = [o.compute.Step(dot=o.compute.DotRequest(a=one, b=one))] * 40
        timed = [o.compute.Step(dot=o.compute.DotRequest(a=one, b=one, timing=True))]
        for caller in (bert, anna, bert):
            for steps in (small, timed):
                answer = caller.call("Execute", steps=steps)
                self.assertEqual({result.dot.value.real for result in answer.results}, {1})
        for call in flood:
            self.assertFalse(call.done(), call.done() and o.outcome_of(call))

    # --- The command line ---

    def run_cli(self, server, *arguments, token=None, token_file=None, address=None):
        environment = o.environment(**({} if token is None else {"TESSERA_TOKEN": token}))
        flags = ("--token-file", token_file) if token_file else ()
        where = ("--server", address or server.address) if server or address else ()
        command = (o.Program.cli, *where, "--timeout", "10s", *flags, *arguments)
        return o.run(*command, env=environment)

    def test_the_command_line_sends_a_token(self):
        server = self.serve(
            line_of("from-env", "write", "one"), line_of("from-file", "read", "two"))
        np.save(self.folder / "x.npy", PIECE)
        put = ("put", self.folder / "x.npy", "--name", "x")
        self.assertEqual(self.run_cli(server, *put, token="from-env").returncode, 0)
        listed = self.run_cli(server, "--json", "ls", token="from-env")
        self.assertEqual([b["name"] for b in json.loads(listed.stdout)["buffers"]], ["x"])
        path = self.folder / "token"
        path.write_text("from-file\n")
        listed = self.run_cli(server, "--json", "ls", token_file=path, token="from-env")
        self.assertEqual(json.loads(listed.stdout)["buffers"], [], "the file is of another tenant")
        ended = self.run_cli(server, *put, token_file=path)
        self.assertNotEqual(ended.returncode, 0)
        self.assertIn("ROLE_TOO_SMALL", ended.stderr)
        self.assertIn("the role write", ended.stderr)
        ended = self.run_cli(server, "ls")
        self.assertIn("BAD_TOKEN", ended.stderr)
        self.assertIn("TESSERA_TOKEN", ended.stderr)
        self.assertEqual(self.run_cli(server, "health", token="x").returncode, 0)

    def test_the_command_line_keeps_tokens_to_itself(self):
        server, token = self.serve(line_of("t")), "very-secret-token"
        ended = self.run_cli(None, "ls", token=token, address="gpu.example.org:50051")
        self.assertNotEqual(ended.returncode, 0)
        self.assertIn("unencrypted", ended.stderr)
        self.assertNotIn(token, ended.stderr)
        for bad in ("two words", "caf\u00e9"):
            ended = self.run_cli(server, "ls", token=bad)
            self.assertIn("BAD_CREDENTIALS", ended.stderr)
            self.assertNotIn(bad, ended.stderr)
        for path in (self.folder / "missing", self.folder, "/dev/zero"):
            ended = self.run_cli(server, "ls", token_file=path)
            self.assertGreater(ended.returncode, 0, ended.stderr)
            self.assertIn("BAD_CREDENTIALS", ended.stderr)

    def test_a_proxy_of_the_environment_sees_no_token(self):
        server = self.serve(line_of("t"))
        proxy = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(proxy.close)
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        names = ("http_proxy", "https_proxy", "grpc_proxy")
        with unittest.mock.patch.dict(os.environ, {name: address for name in names}):
            for name in ("no_proxy", "no_grpc_proxy"):
                os.environ.pop(name, None)
            ended = self.run_cli(server, "ls", token="t")
        self.assertEqual(ended.returncode, 0, ended.stderr)
        proxy.settimeout(0)
        self.assertRaises(BlockingIOError, proxy.accept)

    def test_the_command_line_makes_tokens(self):
        made = [json.loads(self.run_cli(None, "--json", "token", *flags).stdout)
                for flags in ((), ("--role", "read", "--tenant", "vision"))]
        self.assertNotEqual(made[0]["token"], made[1]["token"])
        self.assertEqual(made[1]["line"], line_of(made[1]["token"], "read", "vision"))
        server = self.serve(*(one["line"] for one in made))
        self.assertTrue(Caller(server, made[0]["token"]).attempt("ListBuffers").ok)
        self.assertEqual(
            Caller(server, made[1]["token"]).reason("DeleteBuffer", name="x"), "ROLE_TOO_SMALL")
        plain = self.run_cli(None, "token")
        token, line = (text.split(": ", 1)[1] for text in plain.stdout.splitlines())
        self.assertEqual(line, line_of(token, "write", "default"))
        self.assertNotEqual(self.run_cli(None, "token", "--role", "root").returncode, 0)
        for tenant in ("", "a b", "a #b", "a\nb", "a/b", 65 * "x"):
            ended = self.run_cli(None, "token", "--tenant", tenant)
            self.assertGreater(ended.returncode, 0, tenant)
            self.assertEqual(ended.stdout, "")


if __name__ == "__main__":
    o.main()
