#!/usr/bin/env python3
"""Random requests of several tenants against two servers, and a model of each tenant's buffers.

Every tenant has the model of fuzz_model_test for its part of each server, and calls by turns as a
reader and as a writer (or administrator) of names that the others have too. Beside what that model
predicts, this one knows who is refused for a role, what each quota has left, what imports bring and
what goes through shared memory. Calls are broken off: cancelled, cut with their connection, or with
a deadline that passes. Of those the test reads back whether they took place, and holds that they
did so wholly or not at all, and that what the server has counted is what the model has.

The sequence follows from the seed, which a failure prints; where a call is broken off depends on
the machine.

usage: fuzz_tenants_test.py --server build/bin/tessera-server [--device cuda:0] [--seconds N]
                            [--seed S]
"""

import argparse
import contextlib
import math
import os
import pathlib
import random
import re
import sys
import tempfile
import threading
import time
import traceback
import urllib.request

import numpy as np

import fuzz_model_test as f
import outsider as o
from callers import Caller, Region, line_of, replace
from fuzz_model_test import BOOL, F32, NAMES, SIZES, U8, Held, check
from outsider import eventually, outcome_of

PAGE = 4096
LARGE = 4 << 20
# Role and quotas: of bytes and of buffers.
TENANTS = {
    "anna": ("write", 5000, None),
    "bert": ("write", None, 5),
    "carl": ("write", 8 << 20, 9),
    "staff": ("admin", None, None),
}
# What a reader may not call; results that are stored come on top.
WRITES = {
    "CreateBuffer", "Upload", "SealBuffer", "UpdateBuffer", "CopyBuffer", "ImportBuffer",
    "DeleteBuffer", "UploadShared",
}
f.CODES.update(
    {
        "TENANT_QUOTA_EXCEEDED": "RESOURCE_EXHAUSTED",
        "ROLE_TOO_SMALL": "PERMISSION_DENIED",
        "SOURCE_NOT_ALLOWED": "PERMISSION_DENIED",
        "SOURCE_REFUSED": "FAILED_PRECONDITION",
        "REGION_NOT_FOUND": "NOT_FOUND",
        "BAD_TOKEN": "UNAUTHENTICATED",
    }
)


class Member(f.ThroughPrograms):
    """A client with a token, which can connect anew."""

    def __init__(self, server, token, role, seed):
        super().__init__(server.address, seed)
        self.channel.close()
        self.server, self.token, self.role = server, token, role
        self.fuzzer = None
        self.writes = ""  # of the last call: "", "result" or "method"
        self.wanted = None  # bytes of the buffer that it asks for, if known
        self.caller = None
        self.connect()

    def connect(self):
        """Closes the connection, if there is one, with all calls on it, and makes another."""
        if self.caller:
            self.caller.close()
            self.server.clients.remove(self.caller)
        self.caller = Caller(self.server, self.token)
        self.channel, self.b, self.c = self.caller.channel, self.caller.b, self.caller.c

    def note(self, rpc, result=None, spec=None):
        stored = result is not None and result.HasField("buffer")
        self.writes = "method" if rpc in WRITES else "result" if stored else ""
        self.wanted = None
        if spec is not None and spec.dtype in SIZES and all(n >= 0 for n in spec.shape):
            self.wanted = SIZES[spec.dtype] * math.prod(spec.shape)

    def twice(self, call):
        """The outcome of a call. One that a quota refuses although the model has room is made again
        when all calls are over: what was replaced is free once its users have ended."""
        outcome = call()
        if outcome.reason == "TENANT_QUOTA_EXCEEDED" and not self.fuzzer.is_over_quota(outcome):
            self.fuzzer.account()
            outcome = call()
        return outcome

    def attempt(self, rpc, **fields):
        self.note(rpc, fields.get("result"), fields.get("spec"))
        attempt = super().attempt
        return self.twice(lambda: attempt(rpc, **fields))

    def try_upload(self, messages, **more):
        self.note("Upload", spec=messages[0].get("spec"))
        attempt = super().try_upload
        return self.twice(lambda: attempt(messages, **more))

    def shared(self, rpc, **fields):
        self.note(rpc, spec=fields.get("spec"))
        return self.twice(lambda: self.caller.shared(rpc, **fields))


class Refused(Exception):
    """A call ended as it should, by its role or a quota; what else was expected does not count."""


class TenantFuzzer(f.Fuzzer):
    """The model of one tenant's part of one server."""

    def __init__(self, tenant, server, seed, charge):
        self.tenant, self.server, self.charge = tenant, server, charge
        role, self.most_bytes, self.most_buffers = TENANTS[tenant]
        self.members = [
            Member(server, f"{tenant}-{role}", role, seed) for role in (role, "read")
        ]
        super().__init__(self.members[0], seed)
        for member in self.members:
            member.fuzzer = self
        self.stranger_to_all = Caller(server, "nobody's")
        self.region = Region(server.shared)
        self.peers = []  # this tenant's models of all servers
        self.others = []  # other tenants' of this one
        self.sealing = False
        self.broken = {}  # of calls that were broken off, and whether they took place: how often

    # --- What the model knows beside each buffer --------------------------------------------------

    def held(self):
        return [*self.live.values(), *(d for drafts in self.drafts.values() for d in drafts)]

    def used_bytes(self):
        """Of memory; a link has that of its origin."""
        blocks = {id(block): block for block in (getattr(h, "block", h) for h in self.held())}
        return sum(self.charge(len(block.data)) for block in blocks.values())

    def used_buffers(self):
        """Those with a name, and those without that links keep."""
        held = self.held()
        return len({id(h) for h in held} | {id(getattr(h, "block", h)) for h in held})

    def is_over_quota(self, outcome):
        """Whether the model agrees with a refusal by a quota."""
        figures = outcome.metadata
        used, limit = {
            "bytes": (self.used_bytes(), self.most_bytes),
            "buffers": (self.used_buffers(), self.most_buffers),
        }[figures["quota"]]
        check(limit is not None and figures["limit"] == str(limit), outcome, "the quota is", limit)
        return used + int(figures["requested"]) > limit

    def check_room(self, size):
        """That a buffer that the server has made, of so many bytes, was within the quotas."""
        count, used = self.used_buffers() + 1, self.used_bytes() + size
        check(self.most_buffers is None or count <= self.most_buffers, count, "buffers, no refusal")
        check(self.most_bytes is None or used <= self.most_bytes, used, "bytes, no refusal")

    def pick_name(self):
        return self.rng.choice((*NAMES, f"{self.tenant}-own"))

    def new_version(self, message):
        if not self.sealing:
            self.check_room(self.charge(message.size_bytes))
        return super().new_version(message)

    def seal(self):
        self.sealing = True
        try:
            super().seal()
        finally:
            self.sealing = False

    def expect(self, outcome, *reasons, ok=False):
        refused = False
        if self.client.role == "read" and self.client.writes == "method":
            reasons, ok, refused = ("ROLE_TOO_SMALL",), False, True
        elif self.client.role == "read" and self.client.writes == "result":
            reasons, ok, refused = (*reasons, "ROLE_TOO_SMALL"), False, True
        elif outcome.reason == "TENANT_QUOTA_EXCEEDED":
            check(self.client.writes, "a quota for a call that makes nothing", outcome)
            used = self.used_bytes(), self.used_buffers()
            check(self.is_over_quota(outcome), outcome, "the model has", used)
            wanted = self.client.wanted
            if wanted is not None and outcome.metadata["quota"] == "bytes":
                requested = int(outcome.metadata["requested"])
                check(requested == self.charge(wanted), outcome, "asked for", wanted)
            reasons, ok, refused = ("TENANT_QUOTA_EXCEEDED",), False, True
        took_place = super().expect(outcome, *reasons, ok=ok)
        if refused:
            raise Refused
        return took_place

    # --- Accounts ---------------------------------------------------------------------------------

    def account(self):
        """That the server has counted what the model has, for the tenant or, to an administrator,
        for all."""
        everyone = [self, *self.others] if self.client.role == "admin" else [self]
        count = sum(fuzzer.used_buffers() for fuzzer in everyone)
        known = sum(fuzzer.used_bytes() for fuzzer in everyone), count
        said = None

        def agrees():
            nonlocal said
            info = self.client.info()
            budgets = {budget.name: budget for budget in info.budgets}
            said = sum(device.buffer_used_bytes for device in info.devices), budgets["buffers"].used
            if len(everyone) == 1 and self.most_buffers is not None:
                check(budgets["buffers"].limit == self.most_buffers, budgets["buffers"])
            if len(everyone) == 1 and self.most_bytes is not None:
                check(info.devices[0].buffer_limit_bytes == self.most_bytes, info.devices[0])
            idle = all(
                budgets[name].used == 0 for name in ("uploads", "downloads") if name in budgets
            )
            return said == known and idle

        check(eventually(agrees, 10), self.tenant, "has bytes and buffers", said, "is not", known)
        regions = PAGE * len(everyone) if self.client.role == "admin" else 0
        shared = self.client.caller.shared("GetSharedMemory").answer.used_bytes
        check(shared == regions, "shared memory", shared, "is not", regions)

    def metrics(self):
        """That the metrics have each tenant's buffers by state."""
        text = urllib.request.urlopen(self.server.metrics, timeout=20).read().decode()
        labels = r'device="[^"]*",state="(\w+)",tenant="(\w+)"'
        found = re.findall(rf"^tessera_(buffers|buffer_bytes)\{{{labels}\}} (\d+)$", text, re.M)
        said = {(of, state, tenant): int(value) for of, state, tenant, value in found}
        for fuzzer in (self, *self.others):
            drafts = [held for held in fuzzer.held() if not held.ready]
            for state, buffers in (("ready", fuzzer.live.values()), ("writing", drafts)):
                known = [len(buffers), sum(len(held.data) for held in buffers)]
                keys = [(of, state, fuzzer.tenant) for of in ("buffers", "buffer_bytes")]
                found = [said.get(key, 0) for key in keys]
                check(found == known, fuzzer.tenant, state, found, "is not", known)

    # --- Who is told what -------------------------------------------------------------------------

    def unknown(self):
        """Callers without a token that counts."""
        rpc = self.rng.choice(("ListBuffers", "GetBuffer", "Dot", "CreateBuffer", "GetServerInfo"))
        self.client.writes = ""
        self.expect(self.stranger_to_all.attempt(rpc), "BAD_TOKEN")

    def blind(self):
        """What another tenant has is answered as what nobody has."""
        rng = self.rng
        theirs = [
            held
            for fuzzer in self.others
            for held in fuzzer.held()
            if held.name == f"{fuzzer.tenant}-own"
        ]
        if not theirs:
            return
        held, client = rng.choice(theirs), self.members[0]
        version = rng.choice((0, held.version))
        kind = rng.randrange(10)

        def ask(name):
            x = o.resident(name, version=version)
            asked = dict(name=name, version=version)
            if kind < 4:
                rpc = ("GetBuffer", "SealBuffer", "UpdateBuffer", "DeleteBuffer")[kind]
                return o.Client.attempt(client, rpc, **asked)
            if kind == 4:
                return o.Client.attempt(
                    client, "CopyBuffer", source=name, name="never", source_version=version
                )
            if kind == 5:
                fields = dict(source=self.server.address, source_version=version, name="never")
                return o.Client.attempt(client, "ImportBuffer", source_name=name, **fields)
            if kind == 6:
                return o.Client.attempt(client, "Dot", a=x, b=x)
            if kind == 7:
                return outcome_of(lambda: client.download(**asked))
            if kind == 8:
                return o.Client.try_upload(client, [dict(asked, data=b"1", offset=0)])
            target = self.region.range(8)
            return client.caller.shared("DownloadShared", target=target, **asked)

        client.writes = ""
        told = [ask(held.name), ask("nobody-own")]
        for outcome in told:
            self.expect(outcome, "SOURCE_REFUSED" if kind == 5 else "BUFFER_NOT_FOUND")
        theirs, nobodys = (
            repr((end.code, end.reason, end.text, sorted(end.metadata.items()))) for end in told
        )
        check(theirs.replace(held.name, "nobody-own") == nobodys, theirs, "is not", nobodys)

    # --- Imports, links and shared memory ---------------------------------------------------------

    def import_buffer(self):
        rng = self.rng
        peer, source, name = rng.choice(self.peers), self.pick_name(), self.pick_name()
        origin = peer.live.get(source)
        version = rng.choice((0, 0, origin.version if origin else 0, peer.wrong_version()))
        unreadable = peer.not_readable(source, version)
        reasons = ("SOURCE_REFUSED",) if unreadable else ()
        replace_, ttl = rng.random() < 0.7, rng.random() < 0.2
        fields = dict(source=peer.server.address, source_name=source, source_version=version)
        fields.update(name=name, replace=replace_)
        if ttl:
            fields["ttl"] = {"seconds": 3600}
        for field, value, reason in (
            ("source", "nowhere", "BAD_SOURCE"),
            ("source", "192.0.2.1:50051", "SOURCE_NOT_ALLOWED"),
            ("name", rng.choice(f.BAD_NAMES), "BAD_NAME"),
            ("ttl", {"seconds": -1}, "BAD_TTL"),
            ("device", "cuda:77", "BAD_DEVICE"),
        ):
            if rng.random() < 0.03:
                fields[field], reasons = value, (*reasons, reason)
        if not replace_ and self.taken(name):
            reasons = (*reasons, "BUFFER_EXISTS")
        outcome = self.client.attempt("ImportBuffer", **fields)
        if not self.expect(outcome, *reasons, ok=not reasons):
            if outcome.reason == "SOURCE_REFUSED":
                check(outcome.metadata["reason"] in unreadable, outcome, "is not", unreadable)
            return
        self.adopt_copy(outcome.answer.buffer, origin, replace_, ttl)

    def adopt_copy(self, message, origin, replace_, ttl):
        """Takes over an import: its bytes came with checksums, each once."""
        made = Held(
            message.name, origin.dtype, origin.shape, self.new_version(message), replace_, ttl
        )
        made.set(origin.data, o.crc32c(origin.data) if origin.data else "?").check(message)
        got = self.members[0].download(made.name)
        check(got == bytes(made.data), "the import differs")
        self.become_ready(made)

    def link(self):
        """A second name for the same memory."""
        rng = self.rng
        source, name = self.pick_name(), self.pick_name()
        reasons = self.not_readable(source)
        replace_, ttl = rng.random() < 0.6, rng.random() < 0.2
        if not replace_ and self.taken(name):
            reasons = (*reasons, "BUFFER_EXISTS")
        fields = dict(source=source, name=name, replace=replace_, link=True)
        if ttl:
            fields["ttl"] = {"seconds": 3600}
        outcome = self.client.attempt("CopyBuffer", **fields)
        if not self.expect(outcome, *reasons, ok=not reasons):
            return
        origin, message = self.live[source], outcome.answer.buffer
        self.check_room(0)
        made = Held(name, origin.dtype, origin.shape, super().new_version(message), replace_, ttl)
        made.block = getattr(origin, "block", origin)
        made.set(origin.data, origin.crc).check(message)
        self.become_ready(made)

    def range_of(self, size):
        """A range of the region, or with one fault: (range, reasons)."""
        rng, right = self.rng, self.region.range(size)
        fault = rng.random()
        if fault < 0.05:
            other = rng.choice((rng.randbytes(16), rng.choice(self.others).region.token))
            return o.shared.RegionRange(region=other, size=size), ("REGION_NOT_FOUND",)
        if fault < 0.1:
            right.offset = rng.choice((PAGE - size + 1, 2**63, 2**64 - 1))
            return right, ("BAD_RANGE",)
        return right, ()

    def upload_shared(self):
        rng, name = self.rng, self.pick_name()
        drafts = [draft for draft in self.drafts.get(name, ()) if len(draft.data) <= PAGE]
        if drafts and rng.random() < 0.5:
            draft = rng.choice(drafts)
            begin = rng.randrange(len(draft.data) + 1)
            data = self.random_bytes(draft.dtype, draft.shape)[begin:]
            self.region.memory[: len(data)] = data
            source, reasons = self.range_of(len(data))
            fields = dict(name=name, version=draft.version, offset=begin, source=source)
            outcome = self.client.shared("UploadShared", **fields)
            if self.expect(outcome, *reasons, ok=not reasons):
                draft.write(begin, data, False)
                draft.check(outcome.answer.buffer)
            return
        spec, *rest = self.random_spec()
        if len(rest) == 1:
            outcome = self.client.shared(
                "UploadShared", name=name, spec=spec, source=self.region.range(0)
            )
            self.expect(outcome, *rest[0], "BAD_RANGE", "BUFFER_EXISTS")
            return
        dtype, shape, replace_, ttl = rest
        data = self.random_bytes(dtype, shape)
        if len(data) > PAGE:
            return
        self.region.memory[: len(data)] = data
        source, reasons = self.range_of(len(data))
        if not reasons and rng.random() < 0.05 and len(data) < PAGE:
            source.size, reasons = len(data) + 1, ("BAD_RANGE",)
        if not replace_ and self.taken(name):
            reasons = (*reasons, "BUFFER_EXISTS")
        outcome = self.client.shared("UploadShared", name=name, spec=spec, source=source)
        if self.expect(outcome, *reasons, ok=not reasons):
            message = outcome.answer.buffer
            made = Held(name, dtype, shape, self.new_version(message), replace_, ttl)
            made.set(data, None if data else "?").check(message)
            self.become_ready(made)

    def download_shared(self):
        rng, name = self.rng, self.pick_name()
        live = self.live.get(name)
        version = rng.choice((0, 0, live.version if live else 0, self.wrong_version()))
        size = len(live.data) if live else 8
        offset = rng.randrange(size + 1)
        target, reasons = self.range_of(rng.randrange(min(size, PAGE - 1) + 1))
        reasons = (*reasons, *self.not_readable(name, version))
        if rng.random() < 0.1:
            offset, reasons = rng.choice((size + 1, 2**64 - 1)), (*reasons, "BAD_RANGE")
        self.region.memory[:] = b"\xa5" * PAGE
        outcome = self.client.shared(
            "DownloadShared", name=name, version=version, offset=offset, target=target
        )
        if not self.expect(outcome, *reasons, ok=not reasons):
            return
        end = min(size, offset + target.size)
        check(outcome.answer.size == end - offset, "size", outcome.answer.size)
        check(self.region.memory[: end - offset] == live.data[offset:end], "data differs")
        check(
            self.region.memory[end - offset :] == b"\xa5" * (PAGE - end + offset),
            "bytes beside the range were written",
        )
        live.check(outcome.answer.buffer)

    # --- Calls that are broken off ----------------------------------------------------------------

    def break_off(self, begin, *reasons):
        """Begins a call by begin(timeout), a future, and cancels it, closes its connection, or has
        its deadline pass; waits until the server has ended it. Whether it was answered with OK."""
        rng = self.rng
        way = rng.choice(("cancel", "close", "deadline"))
        timeout = rng.choice((-1, 0, 0, 0.0003, 0.004)) if way == "deadline" else 30
        call = begin(timeout)
        if way != "deadline":
            time.sleep(rng.choice((0, 0, 0.0003, 0.001, 0.004)))
        if way == "cancel":
            call.cancel()
        elif way == "close":
            self.client.connect()
        outcome = outcome_of(call)
        if outcome.reason:
            with contextlib.suppress(Refused):
                self.expect(outcome, *reasons)
        else:
            ends = ("OK", "CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE")
            check(outcome.code in ends, way, outcome)
            self.ended[outcome.code] = self.ended.get(outcome.code, 0) + 1

        # Its request may still be on its way to the server, or among the server's threads. Of an
        # administrator's tenant too a reader is told its calls; this one is the last.
        over = eventually(self.server.asleep, 20, pause=0.001) and eventually(
            lambda: self.members[1].budget("calls").used == 1, 20
        )
        check(over, "a call that was broken off goes on:", way, outcome)
        return outcome.ok

    def count(self, happened, ok, what):
        """ok: whether the call was answered."""
        check(happened or not ok, what, "was answered with OK, and nothing has happened")
        key = what, bool(happened)
        self.broken[key] = self.broken.get(key, 0) + 1

    def newer(self, name):
        """The READY buffer of a name if the model does not know it, or None."""
        outcome = o.Client.attempt(self.client, "GetBuffer", name=name)
        if not outcome.ok or outcome.answer.buffer.state != f.READY:
            return None
        message = outcome.answer.buffer
        return message if message.version > self.newest else None

    def broken_upload(self):
        """A stream that creates, of which often the last message never comes."""
        rng, name = self.rng, self.pick_name()
        if rng.random() < 0.2:
            dtype, shape = U8, (LARGE,)
            data = bytes(rng.randbytes(PAGE)) * (LARGE // PAGE)
        else:
            dtype, shape = rng.choice((F32, BOOL, U8)), (rng.choice((1, 8, 300)),)
            data = self.random_bytes(dtype, shape)
        cut, let_go = rng.random() < 0.6, threading.Event()
        step = (len(data) + 3) // 4

        def messages():
            spec = self.spec(dtype, shape, replace=True)
            yield o.buffers.UploadRequest(name=name, spec=spec)
            for at in range(0, len(data), step):
                if cut and at + step >= len(data):
                    let_go.wait(20)
                    return
                yield o.buffers.UploadRequest(data=data[at : at + step])

        self.client.note("Upload", spec=self.spec(dtype, shape))
        reasons = ("MISSING_DATA",) if cut else ()
        ok = self.break_off(
            lambda timeout: self.client.b.Upload.future(messages(), timeout=timeout), *reasons
        )
        let_go.set()
        message = self.newer(name)
        check(not (message and cut), "an upload that never ended has become a buffer")
        self.count(message is not None, ok, "upload")
        if message:
            made = Held(name, dtype, shape, self.new_version(message), True)
            made.set(data, None).check(message)
            check(self.client.download(name) == data, "an upload that was broken off differs")
            self.become_ready(made)
        if message and len(data) == LARGE:  # it leaves no room for others
            self.client.call("DeleteBuffer", name=name)
            del self.live[name]
            self.drafts.pop(name, None)
        self.account()

    def broken_ranges(self):
        """A stream into a draft: each message has come wholly or not at all, and none after one
        that has not."""
        rng = self.rng
        drafts = [d for ds in self.drafts.values() for d in ds if d.missing()]
        if not drafts:
            return
        draft = rng.choice(drafts)
        begin, end = draft.missing()[0]
        cuts = sorted({begin, end, *(rng.randint(begin, end) for _ in range(3))})
        data = self.random_bytes(draft.dtype, draft.shape)
        let_go, hold = threading.Event(), rng.random() < 0.5
        pieces = list(zip(cuts, cuts[1:]))

        def messages():
            for a, b in pieces:
                fields = dict(data=data[a:b], crc32c=o.crc32c(data[a:b]))
                if a == begin:
                    fields.update(name=draft.name, version=draft.version, offset=a)
                yield o.buffers.UploadRequest(**fields)
            if hold:
                let_go.wait(20)

        self.client.note("Upload")
        ok = self.break_off(
            lambda timeout: self.client.b.Upload.future(messages(), timeout=timeout)
        )
        let_go.set()
        answer = self.client.call("GetBuffer", name=draft.name, version=draft.version)
        gaps = [(gap.begin, gap.end) for gap in answer.missing]
        landed = gaps[0][0] if gaps else end
        landed = min(landed, end)
        check(landed in cuts, "a message has landed in part, up to", landed, "of", cuts)
        check(landed == end or not ok, "an answer without the data")
        for a, b in pieces:
            if b <= landed:
                draft.write(a, data[a:b], True)
        draft.check(answer.buffer)
        check(gaps == draft.missing()[:100], gaps, "is not", draft.missing())
        self.count(landed > begin, ok, "ranges")

    ALTERATIONS = "create", "shared", "copy", "import", "add", "delete", "seal", "update"

    def broken_call(self):
        """A call that changes something, of one message."""
        rng, client, name = self.rng, self.client, self.pick_name()
        kind = rng.choice(self.ALTERATIONS)
        self.what += f" ({kind})"
        peer = rng.choice(self.peers) if kind == "import" else self
        source = rng.choice([*peer.live, None])
        origin = peer.live.get(source)

        def run(rpc, **fields):
            client.note(rpc, fields.get("result"), fields.get("spec"))
            return self.break_off(lambda timeout: client.future(rpc, timeout, **fields))

        if kind == "create":
            if len(self.drafts.get(name, ())) >= 4:
                return
            ok = run("CreateBuffer", name=name, spec=self.spec(F32, [4], replace=True))
            outcome = o.Client.attempt(client, "GetBuffer", name=name)
            drafts = outcome.answer.drafts if outcome.ok else ()
            made = [draft for draft in drafts if draft.version > self.newest]
            for message in made:
                draft = Held(name, F32, (4,), self.new_version(message), True)
                draft.check(message)
                self.drafts.setdefault(name, []).append(draft)
            self.count(bool(made), ok, kind)
        elif kind == "shared":
            data = self.random_bytes(U8, [rng.choice((1, 300, PAGE))])
            self.region.memory[: len(data)] = data
            request = o.shared.UploadSharedRequest(
                name=name,
                spec=self.spec(U8, [len(data)], replace=True),
                source=self.region.range(len(data)),
            )
            client.note("UploadShared", spec=request.spec)
            ok = self.break_off(
                lambda timeout: client.caller.s.UploadShared.future(request, timeout=timeout)
            )
            message = self.newer(name)
            self.count(message is not None, ok, kind)
            if message:
                made = Held(name, U8, (len(data),), self.new_version(message), True)
                made.set(data).check(message)
                check(client.download(name) == data, "shared memory that was broken off differs")
                self.become_ready(made)
        elif kind in ("copy", "import", "add") and origin:
            if kind == "copy":
                ok = run("CopyBuffer", source=source, name=name, replace=True)
            elif kind == "import":
                fields = dict(source=peer.server.address, source_name=source, name=name)
                ok = run("ImportBuffer", replace=True, **fields)
            elif origin.dtype in f.DTYPES:
                x = o.resident(source)
                ok = run("Add", a=x, b=x, result=o.into(name, replace=True))
            else:
                return
            message = self.newer(name)
            self.count(message is not None, ok, kind)
            if message and kind == "import":
                self.adopt_copy(message, origin, True, False)
            elif message:
                data = client.download(name)
                if kind == "copy":
                    check(data == bytes(origin.data), "a copy that was broken off differs")
                made = Held(name, origin.dtype, origin.shape, self.new_version(message), True)
                self.become_ready(made.set(data))
                made.check(message)
        elif kind == "delete":
            if not (name in self.live or self.drafts.get(name)):
                return
            ok = run("DeleteBuffer", name=name)
            gone = not o.Client.attempt(client, "GetBuffer", name=name).ok
            self.count(gone, ok, kind)
            if gone:
                self.live.pop(name, None)
                self.drafts.pop(name, None)
        elif kind == "seal":
            drafts = [d for ds in self.drafts.values() for d in ds if not d.missing() and d.replace]
            drafts = [d for d in drafts if self.history.get(d.name, 0) < d.version]
            if not drafts:
                return
            draft = rng.choice(drafts)
            ok = run("SealBuffer", name=draft.name, version=draft.version)
            message = client.call("GetBuffer", name=draft.name, version=draft.version).buffer
            if message.state == f.READY:
                draft.ready = True
                draft.crc = o.crc32c(draft.data) if draft.crc_known() and draft.data else None
                draft.crc = draft.crc if draft.data else "?"
                self.drafts[draft.name].remove(draft)
                self.become_ready(draft)
            self.count(draft.ready, ok, kind)
            draft.check(message)
        elif kind == "update" and origin:
            fields = {} if origin.ttl else dict(ttl={"seconds": 3600})
            ok = run("UpdateBuffer", name=source, **fields)
            message = client.call("GetBuffer", name=source).buffer
            changed = message.HasField("expire_time") != origin.ttl
            self.count(changed, ok, kind)
            origin.ttl = origin.ttl != changed
            origin.check(message)
        self.account()

    def broken_read(self):
        """A download whose messages nobody reads, and an operation."""
        rng = self.rng
        if not self.live:
            return
        name = rng.choice([*self.live])
        if rng.random() < 0.5:
            request = o.buffers.DownloadRequest(name=name)
            download = self.client.b.Download(request, timeout=rng.choice((30, 0.001)))
            if rng.random() < 0.5:
                download.cancel()
            else:
                self.client.connect()
        else:
            x = o.resident(name)
            self.break_off(
                lambda timeout: self.client.future("Dot", timeout, a=x, b=x), "BAD_DTYPE"
            )
        self.account()

    WEIGHTS = f.Fuzzer.WEIGHTS | {
        "large": 1,
        "account": 6,
        "metrics": 2,
        "unknown": 2,
        "blind": 12,
        "import_buffer": 14,
        "link": 8,
        "upload_shared": 14,
        "download_shared": 8,
        "broken_upload": 8,
        "broken_ranges": 6,
        "broken_call": 16,
        "broken_read": 4,
    }

    def step(self, number):
        kinds, weights = zip(*self.WEIGHTS.items())
        kind = self.rng.choices(kinds, weights)[0]
        reads = self.rng.random() < 0.2 and not kind.startswith("broken_")
        self.client = self.members[reads]
        self.client.writes = ""
        self.what = f"step {number}: {kind} of {self.tenant} as {self.client.role}"
        self.calls[kind] = self.calls.get(kind, 0) + 1
        with contextlib.suppress(Refused):
            getattr(self, kind)()

    def end(self):
        """All that is left is what the model has, and it can be deleted."""
        self.client = self.members[0]
        self.account()
        for name in sorted({held.name for held in self.held()}):
            self.client.call("DeleteBuffer", name=name)
        check(self.client.names() == [], "left:", self.client.names())
        self.live, self.drafts = {}, {}


def start(folder, file, number):
    """One of the servers, which may import from each other."""
    path = pathlib.Path(folder) / f"shared{number}"
    server = o.Server(
        folder,
        *("--tokens", str(file), "--import-from", "127.0.0.1:*", "--insecure"),
        *("--shared-memory", str(path), "--metrics-listen", "127.0.0.1:0"),
        *("--memory-limit", "256Mi", "--scratch-limit", "64Mi", "--max-operation-seconds", "1"),
        *("--max-slow-operation-seconds", "0.5", "--max-uploads", "64", "--upload-timeout", "300s"),
    )
    server.shared = path
    server.metrics = re.search(r"metrics at (http://[\d.:]+/)", server.log())[1] + "metrics"
    return server


def charges(server):
    """What buffers of some bytes take of memory, as the device's allocator rounds them."""
    client = Caller(server, "staff-admin")
    taken = {}
    for size in (0, 1):
        client.create("probe", np.zeros(size, "u1"))
        taken[size] = client.device().buffer_used_bytes
        client.call("DeleteBuffer", name="probe")
        check(eventually(lambda: client.device().buffer_used_bytes == 0, 10), "a probe stays")
    unit = taken[1]
    return lambda size: -(-size // unit) * unit if size else taken[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--server", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    o.Program.path = os.path.abspath(arguments.server)
    o.Program.device = arguments.device
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    rng = random.Random(seed)

    servers, fuzzers, what = [], [], "start"
    with tempfile.TemporaryDirectory() as folder:
        o.make_stubs(folder)
        file = pathlib.Path(folder) / "tokens"
        lines = []
        for tenant, (role, most_bytes, most_buffers) in TENANTS.items():
            quotas = [f"bytes={most_bytes}"] * bool(most_bytes)
            quotas += [f"buffers={most_buffers}"] * bool(most_buffers)
            lines.append(line_of(f"{tenant}-{role}", role, tenant, *quotas))
            lines.append(line_of(f"{tenant}-read", "read", tenant))
        replace(file, "\n".join(lines) + "\n")
        try:
            for number in range(2):
                server = start(folder, file, number)
                servers.append(server)
                charge = charges(server)
                mine = [
                    TenantFuzzer(tenant, server, rng.randrange(1 << 32), charge)
                    for tenant in TENANTS
                ]
                for fuzzer in mine:
                    fuzzer.others = [other for other in mine if other is not fuzzer]
                    # A region is the tenant's that uses it first.
                    target = fuzzer.region.range(0)
                    fuzzer.client.shared("DownloadShared", name="none", target=target)
                fuzzers += mine
            for fuzzer in fuzzers:
                fuzzer.peers = [peer for peer in fuzzers if peer.tenant == fuzzer.tenant]
            end, steps = time.monotonic() + arguments.seconds, 0
            while time.monotonic() < end:
                fuzzer = rng.choice(fuzzers)
                what = "?"
                try:
                    fuzzer.step(steps)
                finally:
                    what = fuzzer.what
                steps += 1
            what = "end"
            for fuzzer in fuzzers:
                fuzzer.client = fuzzer.members[0]
                fuzzer.account()
                fuzzer.metrics()
            for fuzzer in fuzzers:
                fuzzer.end()
                fuzzer.account()
                fuzzer.metrics()
            totals = {"ended": {}, "broken": {}, "calls": {}}
            for name, total in totals.items():
                for fuzzer in fuzzers:
                    for key, number in getattr(fuzzer, name).items():
                        total[key] = total.get(key, 0) + number
            ended, broken = totals["ended"], totals["broken"]
            # Every kind of request has come, and every ending that it is about.
            if steps > 10 * sum(TenantFuzzer.WEIGHTS.values()):
                check(len(totals["calls"]) == len(TenantFuzzer.WEIGHTS), "only", totals["calls"])
                for reason in ("ROLE_TOO_SMALL", "TENANT_QUOTA_EXCEEDED", "SOURCE_REFUSED"):
                    check(ended.get(reason, 0) > steps / 500, reason, "in", ended)
                for happened in (False, True):
                    times = sum(n for key, n in broken.items() if key[1] == happened)
                    check(times > steps / 500, "of calls that were broken off", broken)
                check(ended.get("OK", 0) > steps / 5, ended)
            for server in servers:
                check(server.alive(), "a server has ended:", server.process.poll())
                code = server.stop()
                check(code == 0, "exit code", code)
            print(f"ok      {steps} steps, {sum(ended.values())} calls: {ended}; broken: {broken}")
            failed = 0
        except Exception:  # pylint: disable=broad-except
            failed = 1
            print(f"FAILED  {what}, seed {seed}\n{traceback.format_exc()}", flush=True)
            for server in servers:
                print(server.log()[-2000:])
            print(f"to repeat: --seed {seed} --seconds {arguments.seconds:g}")
        for server in servers:
            server.kill()
    print(f"{1 - failed} passed, {failed} failed, 0 skipped")
    return failed


if __name__ == "__main__":
    sys.exit(main())
