#!/usr/bin/env python3
"""Sends random requests of several tenants to two servers, with a model of each tenant's buffers.

Every tenant has the model of fuzz_model_test for its part of each server. It calls as a reader and
as a writer (or administrator), with names that the other tenants use as well. This model also knows
which calls are refused because of their role, what each quota has left, what imports contain and
what goes through shared memory. Some calls are broken off: they are cancelled, cut with their
connection, or given a short deadline. The test then finds out whether they took place, and checks
that they did so completely or not at all, and that the server's counts agree with the model. At the
end, many callers of all tenants call at the same time.

The requests depend only on the seed. Where a call is broken off depends on the machine.

usage: fuzz_tenants_test.py --server build/bin/tessera-server [--device cuda:0] [--seconds N]
                            [--seed S] [--callers N]
"""

import collections
import contextlib
import math
import random
import re
import sys
import threading
import time

import numpy as np

import fuzz_model_test as f
import outsider as o
import random_requests as r
from callers import Caller, Region, line_of, replace
from outsider import eventually, outcome_of
from random_requests import BOOL, F32, SIZES, U8, Wrong, check

PAGE = 4096
LARGE = 4 << 20
# The role and the quotas, in bytes and in buffers.
TENANTS = {"anna": ("write", 5000, None),
           "bert": ("write", None, 5),
           "carl": ("write", 8 << 20, 9),
           "staff": ("admin", None, None)}
# Methods that a reader may not call. A reader may not store results either.
WRITES = {"CreateBuffer", "Upload", "SealBuffer", "UpdateBuffer", "CopyBuffer", "ImportBuffer",
          "DeleteBuffer", "Snapshot", "UploadShared"}


class Member(r.ThroughPrograms):
    """A client with a token, which can reconnect."""

    def __init__(self, server, token, role):
        super().__init__(server.address, None)
        self.channel.close()
        self.server, self.token, self.role = server, token, role
        self.writes = ""  # What the last call writes: "", "result" or "method".
        self.wanted = None  # The bytes of the buffer that it needs, if known.
        self.caller = None
        self.connect()

    def connect(self):
        """Makes a new connection. If there is one already, closes it first, with all its calls."""
        if self.caller:
            self.caller.close()
            self.server.clients.remove(self.caller)
        self.caller = Caller(self.server, self.token)
        self.channel, self.b, self.c = self.caller.channel, self.caller.b, self.caller.c

    def note(self, rpc, fields):
        spec, result = fields.get("spec"), fields.get("result")
        if rpc in ("Sort", "Select") and not isinstance(fields.get("indices"), dict):
            result = fields.get("indices")
        stored = result is not None and result.HasField("buffer")
        self.writes = "method" if rpc in WRITES else "result" if stored else ""
        self.wanted = None
        if spec is not None and spec.dtype in SIZES and all(n >= 0 for n in spec.shape):
            self.wanted = SIZES[spec.dtype] * math.prod(spec.shape)

    def twice(self, call):
        """Returns the outcome of a call. If a quota refuses the call although the model has space,
        the call is repeated when all other calls have ended, because a replaced buffer is freed
        once its users have ended."""
        outcome = call()
        if outcome.reason == "TENANT_QUOTA_EXCEEDED" and not self.requests.is_over_quota(outcome):
            self.requests.account()
            outcome = call()
        return outcome

    def attempt(self, rpc, **fields):
        self.note(rpc, fields)
        attempt = super().attempt
        return self.twice(lambda: attempt(rpc, **fields))

    def ask(self, rpc, **fields):
        """Makes a single call, without a second attempt."""
        return o.Client.attempt(self, rpc, **fields)

    def try_upload(self, messages, **more):
        self.note("Upload", messages[0])
        attempt = super().try_upload
        return self.twice(lambda: attempt(messages, **more))

    def shared(self, rpc, **fields):
        self.note(rpc, fields)
        return self.twice(lambda: self.caller.shared(rpc, **fields))


class Refused(Exception):
    """Raised when a call was refused, as expected, because of its role or a quota. Its other
    expected outcomes do not apply."""


class TenantFuzzer(f.Fuzzer):
    """The model of one tenant's part of one server."""

    def __init__(self, tenant, server, seed, charge):
        self.tenant, self.server, self.charge = tenant, server, charge
        role, self.most_bytes, self.most_buffers = TENANTS[tenant]
        self.members = [Member(server, f"{tenant}-{kind}", kind) for kind in (role, "read")]
        super().__init__(self.members[0], seed)
        for member in self.members:
            member.requests = self
        self.region = Region(server.shared)
        self.peers = []  # This tenant's models for all servers.
        self.others = []  # Other tenants' models for this server.
        self.broken = {}  # (Kind of call, whether it took place): how often.

    # --- What the model knows apart from each buffer ----------------------------------------------

    def held(self):
        return [*self.live.values(), *self.all_drafts()]

    def used_bytes(self):
        """Returns the bytes of memory. A link uses the memory of its origin."""
        blocks = {id(block): block for block in (getattr(h, "block", h) for h in self.held())}
        return sum(self.charge(len(block.data)) for block in blocks.values())

    def used_buffers(self):
        """Returns the number of buffers that have a name or that links keep alive."""
        held = self.held()
        return len({id(h) for h in held} | {id(getattr(h, "block", h)) for h in held})

    def is_over_quota(self, outcome):
        """Returns whether the model agrees with a refusal because of a quota."""
        used, limit = {
            "bytes": (self.used_bytes(), self.most_bytes),
            "buffers": (self.used_buffers(), self.most_buffers)}[outcome.metadata["quota"]]
        said = outcome.metadata["limit"]
        check(limit is not None and said == str(limit), outcome, "the quota is", limit)
        return used + int(outcome.metadata["requested"]) > limit

    def made(self, message, name, dtype, shape, replace_=True, ttl=False, size=None):
        """Records a new buffer. size: the memory that it takes; a link shares the memory of its
        origin."""
        made = super().made(message, name, dtype, shape, replace_, ttl)
        count = self.used_buffers() + 1
        used = self.used_bytes() + (self.charge(message.size_bytes) if size is None else size)
        check(self.most_buffers is None or count <= self.most_buffers, count, "buffers, no refusal")
        check(self.most_bytes is None or used <= self.most_bytes, used, "bytes, no refusal")
        return made

    def expect(self, outcome, *reasons, ok=False):
        refused, client = True, self.client
        if client.role == "read" and client.writes == "method":
            reasons, ok = ("ROLE_TOO_SMALL",), False
        elif client.role == "read" and client.writes == "result":
            reasons, ok = (*reasons, "ROLE_TOO_SMALL"), False
        elif outcome.reason == "TENANT_QUOTA_EXCEEDED":
            check(client.writes, "a quota for a call that makes nothing", outcome)
            used = self.used_bytes(), self.used_buffers()
            check(self.is_over_quota(outcome), outcome, "the model has", used)
            if client.wanted is not None and outcome.metadata["quota"] == "bytes":
                requested = int(outcome.metadata["requested"])
                check(requested == self.charge(client.wanted), outcome, "not", client.wanted)
            reasons, ok = ("TENANT_QUOTA_EXCEEDED",), False
        else:
            refused = False
        took_place = super().expect(outcome, *reasons, ok=ok)
        if refused:
            raise Refused
        return took_place

    # --- Accounts ---------------------------------------------------------------------------------

    def account(self):
        """Checks that the server's counts agree with the model, for the tenant or, as an
        administrator, for all tenants."""
        everyone = [self, *self.others] if self.client.role == "admin" else [self]
        known = (sum(fuzzer.used_bytes() for fuzzer in everyone),
                 sum(fuzzer.used_buffers() for fuzzer in everyone))
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
            busy = [budgets[name].used for name in ("uploads", "downloads") if name in budgets]
            return said == known and not any(busy)

        check(eventually(agrees), self.tenant, "has bytes and buffers", said, "is not", known)
        regions = PAGE * len(everyone) if self.client.role == "admin" else 0
        shared = self.client.caller.shared("GetSharedMemory").answer.used_bytes
        check(shared == regions, "shared memory", shared, "is not", regions)

    def metrics(self):
        """Checks that the metrics count each tenant's buffers by state."""
        labels = r'device="[^"]*",state="(\w+)",tenant="(\w+)"'
        line = rf"^tessera_(buffers|buffer_bytes)\{{{labels}\}} (\d+)$"
        found = re.findall(line, self.server.page(), re.M)
        said = {(of, state, tenant): int(value) for of, state, tenant, value in found}
        for fuzzer in (self, *self.others):
            states = ("ready", fuzzer.live.values()), ("writing", fuzzer.all_drafts())
            for state, buffers in states:
                known = [len(buffers), sum(len(held.data) for held in buffers)]
                keys = [(of, state, fuzzer.tenant) for of in ("buffers", "buffer_bytes")]
                found = [said.get(key, 0) for key in keys]
                check(found == known, fuzzer.tenant, state, found, "is not", known)

    # --- Imports, links and shared memory ---------------------------------------------------------

    def duplicate(self):
        """Returns (source, name, replace, ttl, fields) for a request that makes a buffer from
        another."""
        rng = self.rng
        source, name, replace_, ttl = (
            self.pick_name(), self.pick_name(), rng.random() < 0.7, rng.random() < 0.2)
        fields = dict(name=name, replace=replace_) | (dict(ttl={"seconds": 3600}) if ttl else {})
        exists = ("BUFFER_EXISTS",) * (not replace_ and self.taken(name))
        return source, name, replace_, ttl, fields, exists

    def import_buffer(self):
        rng, peer = self.rng, self.rng.choice(self.peers)
        source, _, replace_, ttl, fields, reasons = self.duplicate()
        origin = peer.live.get(source)
        version = rng.choice((0, 0, origin.version if origin else 0, peer.wrong_version()))
        unreadable = peer.not_readable(source, version)
        reasons = (*reasons, *(("SOURCE_REFUSED",) if unreadable else ()))
        fields.update(source=peer.server.address, source_name=source, source_version=version)
        for field, value, reason in (("source", "nowhere", "BAD_SOURCE"),
                                     ("source", "192.0.2.1:50051", "SOURCE_NOT_ALLOWED"),
                                     ("name", rng.choice(r.BAD_NAMES), "BAD_NAME"),
                                     ("ttl", {"seconds": -1}, "BAD_TTL"),
                                     ("device", "cuda:77", "BAD_DEVICE")):
            if rng.random() < 0.03:
                fields[field], reasons = value, (*reasons, reason)
        outcome = self.client.attempt("ImportBuffer", **fields)
        if self.expect(outcome, *reasons, ok=not reasons):
            self.adopt_copy(outcome.answer.buffer, origin, replace_, ttl)
        elif outcome.reason == "SOURCE_REFUSED":
            check(outcome.metadata["reason"] in unreadable, outcome, "is not", unreadable)

    def adopt_copy(self, message, origin, replace_, ttl):
        """Adds an import to the model. Each of its bytes came once, with a checksum."""
        made = self.made(message, message.name, origin.dtype, origin.shape, replace_, ttl)
        made.set(origin.data, o.crc32c(origin.data) if origin.data else "?")
        self.adopt(made, message)

    def adopt(self, made, message):
        """Adds a READY buffer whose data the model knows."""
        made.check(message)
        data = self.members[0].download(made.name)
        check(data == bytes(made.data), "the data of", made.name, "differs")
        self.become_ready(made)

    def link(self):
        """Makes a second name for the same memory."""
        source, name, replace_, ttl, fields, reasons = self.duplicate()
        reasons = (*reasons, *self.not_readable(source))
        outcome = self.client.attempt("CopyBuffer", source=source, link=True, **fields)
        if not self.expect(outcome, *reasons, ok=not reasons):
            return
        origin, message = self.live[source], outcome.answer.buffer
        made = self.made(message, name, origin.dtype, origin.shape, replace_, ttl, size=0)
        made.block = getattr(origin, "block", origin)
        made.set(origin.data, origin.crc).check(message)
        self.become_ready(made)

    def range_of(self, size):
        """Returns (a range of the region, reasons). The range may have one fault."""
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
            source = self.region.range(0)
            outcome = self.client.shared("UploadShared", name=name, spec=spec, source=source)
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
            made = self.made(message, name, dtype, shape, replace_, ttl)
            made.set(data, None if data else "?").check(message)
            self.become_ready(made)

    def download_shared(self):
        rng = self.rng
        name, live, version, size, offset, unreadable = self.pick_range()
        target, reasons = self.range_of(rng.randrange(min(size, PAGE - 1) + 1))
        reasons = (*reasons, *unreadable)
        self.region.memory[:] = b"\xa5" * PAGE
        outcome = self.client.shared(
            "DownloadShared", name=name, version=version, offset=offset, target=target)
        if not self.expect(outcome, *reasons, ok=not reasons):
            return
        count, memory = min(size - offset, target.size), self.region.memory
        check(outcome.answer.size == count, "size", outcome.answer.size)
        check(memory[:count] == live.data[offset : offset + count], "data differs")
        check(memory[count:] == b"\xa5" * (PAGE - count), "bytes outside the range were written")
        live.check(outcome.answer.buffer)

    # --- Calls that are broken off ----------------------------------------------------------------

    def break_off(self, begin, *reasons):
        """Begins a call with begin(timeout), which returns a future. Then cancels it, closes its
        connection or lets its deadline pass, and waits until the server has ended it. Returns
        whether it ended with OK."""
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

        # The request may still be on its way to the server, or in a queue between the server's
        # threads. A reader sees only its own calls, even in an administrator's tenant, and this
        # call is the last one.
        over = eventually(self.server.asleep, pause=0.001) and eventually(
            lambda: self.members[1].budget("calls").used == 1)
        check(over, "a call that was broken off goes on:", way, outcome)
        return outcome.ok

    def break_call(self, rpc, **fields):
        self.client.note(rpc, fields)
        return self.break_off(lambda timeout: self.client.future(rpc, timeout, **fields))

    def break_upload(self, messages, spec, *reasons):
        """Uploads with a stream that is broken off. messages: a function of an event, which is set
        when the call is over."""
        let_go = threading.Event()
        self.client.note("Upload", dict(spec=spec))
        upload = self.client.b.Upload
        ok = self.break_off(
            lambda timeout: upload.future(messages(let_go), timeout=timeout), *reasons)
        let_go.set()
        return ok

    def count(self, happened, ok, what):
        """Counts a call that was broken off. ok: whether the call ended with OK."""
        check(happened or not ok, what, "ended with OK, and nothing has happened")
        key = what, bool(happened)
        self.broken[key] = self.broken.get(key, 0) + 1

    def adopt_newer(self, ok, what, name, dtype, shape, data, crc=None):
        """Adds what a call has stored under a name, if anything. Returns whether there is
        anything."""
        outcome = self.client.ask("GetBuffer", name=name)
        message = outcome.answer.buffer if outcome.ok else None
        there = outcome.ok and message.state == f.READY and message.version > self.newest
        self.count(there, ok, what)
        if there:
            self.adopt(self.made(message, name, dtype, shape).set(data, crc), message)
        return there

    def broken_upload(self):
        """Uploads with a stream that creates the buffer. Its last message is often not sent."""
        rng, name = self.rng, self.pick_name()
        if rng.random() < 0.2:
            dtype, shape = U8, (LARGE,)
            data = bytes(rng.randbytes(PAGE)) * (LARGE // PAGE)
        else:
            dtype, shape = rng.choice((F32, BOOL, U8)), (rng.choice((1, 8, 300)),)
            data = self.random_bytes(dtype, shape)
        cut, step = rng.random() < 0.6, (len(data) + 3) // 4
        spec = self.spec(dtype, shape, replace=True)

        def messages(let_go):
            yield o.buffers.UploadRequest(name=name, spec=spec)
            for at in range(0, len(data), step):
                if cut and at + step >= len(data):
                    let_go.wait()
                    return
                yield o.buffers.UploadRequest(data=data[at : at + step])

        ok = self.break_upload(messages, spec, *(("MISSING_DATA",) * cut))
        there = self.adopt_newer(ok, "upload", name, dtype, shape, data)
        check(not (there and cut), "an upload that never ended has become a buffer")
        if there and len(data) == LARGE:  # It would leave no space for others.
            self.client.call("DeleteBuffer", name=name)
            self.forget(name)
        self.account()

    def broken_ranges(self):
        """Sends a stream into a draft. Each message arrives completely or not at all, and no
        message arrives after a missing one."""
        rng = self.rng
        drafts = [draft for draft in self.all_drafts() if draft.missing()]
        if not drafts:
            return
        draft = rng.choice(drafts)
        begin, end = draft.missing()[0]
        cuts = sorted({begin, end, *(rng.randint(begin, end) for _ in range(3))})
        data, hold = self.random_bytes(draft.dtype, draft.shape), rng.random() < 0.5
        pieces = list(zip(cuts, cuts[1:]))

        def messages(let_go):
            for a, b in pieces:
                fields = dict(data=data[a:b], crc32c=o.crc32c(data[a:b]))
                if a == begin:
                    fields.update(name=draft.name, version=draft.version, offset=a)
                yield o.buffers.UploadRequest(**fields)
            if hold:
                let_go.wait()

        ok = self.break_upload(messages, None)
        response = self.client.call("GetBuffer", name=draft.name, version=draft.version)
        gaps = f.gaps_of(response)
        landed = min(gaps[0][0] if gaps else end, end)
        check(landed in cuts, "a message has landed in part, up to", landed, "of", cuts)
        check(landed == end or not ok, "OK without the data")
        for a, b in pieces:
            if b <= landed:
                draft.write(a, data[a:b], True)
        draft.check(response.buffer)
        check(gaps == draft.missing()[:100], gaps, "is not", draft.missing())
        self.count(landed > begin, ok, "ranges")

    def broken_call(self):
        """Makes a call with one message that changes something."""
        kinds = ("create", "shared", "copy", "import", "add", "delete", "seal", "update")
        kind = self.rng.choice(kinds)
        self.what += f" ({kind})"
        getattr(self, "broken_" + kind)(self.pick_name())
        self.account()

    def broken_create(self, name):
        if len(self.drafts.get(name, ())) >= 4:
            return
        spec = self.spec(F32, [4], replace=True)
        ok = self.break_call("CreateBuffer", name=name, spec=spec)
        outcome = self.client.ask("GetBuffer", name=name)
        drafts = outcome.answer.drafts if outcome.ok else ()
        made = [draft for draft in drafts if draft.version > self.newest]
        for message in made:
            draft = self.made(message, name, F32, (4,))
            draft.check(message)
            self.drafts.setdefault(name, []).append(draft)
        self.count(made, ok, "create")

    def broken_shared(self, name):
        data = self.random_bytes(U8, [self.rng.choice((1, 300, PAGE))])
        self.region.memory[: len(data)] = data
        spec, source = self.spec(U8, [len(data)], replace=True), self.region.range(len(data))
        request = o.shared.UploadSharedRequest(name=name, spec=spec, source=source)
        self.client.note("UploadShared", dict(spec=spec))
        upload = self.client.caller.s.UploadShared
        ok = self.break_off(lambda timeout: upload.future(request, timeout=timeout))
        self.adopt_newer(ok, "shared", name, U8, (len(data),), data)

    def broken_copy(self, name):
        origin = self.live.get(self.pick_name())
        if origin:
            ok = self.break_call("CopyBuffer", source=origin.name, name=name, replace=True)
            self.adopt_newer(ok, "copy", name, origin.dtype, origin.shape, origin.data)

    def broken_import(self, name):
        peer = self.rng.choice(self.peers)
        origin = peer.live.get(self.pick_name())
        if origin:
            fields = dict(source=peer.server.address, source_name=origin.name, name=name)
            ok = self.break_call("ImportBuffer", replace=True, **fields)
            crc = o.crc32c(origin.data) if origin.data else "?"
            self.adopt_newer(ok, "import", name, origin.dtype, origin.shape, origin.data, crc)

    def broken_add(self, name):
        origin = self.live.get(self.pick_name())
        if origin and origin.dtype in r.DTYPES:
            x, dtype = o.resident(origin.name), origin.dtype
            with np.errstate(all="ignore"):
                twice = 2 * r.wide(origin.array(), dtype)
                data = r.narrow(twice, dtype).tobytes()
            if np.isnan(twice).any():
                return  # The bits of NaN are not promised.
            ok = self.break_call("Add", a=x, b=x, result=o.into(name, replace=True))
            self.adopt_newer(ok, "add", name, dtype, origin.shape, data)

    def broken_delete(self, name):
        if name in self.live or self.drafts.get(name):
            ok = self.break_call("DeleteBuffer", name=name)
            gone = not self.client.ask("GetBuffer", name=name).ok
            self.count(gone, ok, "delete")
            if gone:
                self.forget(name)

    def broken_seal(self, _):
        drafts = [draft for draft in self.all_drafts() if not draft.missing() and draft.replace
                  and self.history.get(draft.name, 0) < draft.version]
        if drafts:
            draft = self.rng.choice(drafts)
            fields = dict(name=draft.name, version=draft.version)
            ok = self.break_call("SealBuffer", **fields)
            message = self.client.call("GetBuffer", **fields).buffer
            self.count(message.state == f.READY, ok, "seal")
            if message.state == f.READY:
                self.sealed(draft, message)
            else:
                draft.check(message)

    def broken_update(self, name):
        held = self.live.get(name)
        if held:
            fields = {} if held.ttl else dict(ttl={"seconds": 3600})
            ok = self.break_call("UpdateBuffer", name=name, **fields)
            message = self.client.call("GetBuffer", name=name).buffer
            changed = message.HasField("expire_time") != held.ttl
            self.count(changed, ok, "update")
            held.ttl = held.ttl != changed
            held.check(message)

    def broken_read(self):
        """Makes a download whose messages are not read, and an operation."""
        rng, client = self.rng, self.client
        if not self.live:
            return
        name = rng.choice([*self.live])
        if rng.random() < 0.5:
            request = o.buffers.DownloadRequest(name=name)
            download = client.b.Download(request, timeout=rng.choice((30, 0.001)))
            if rng.random() < 0.5:
                download.cancel()
            else:
                client.connect()
        else:
            x = o.resident(name)
            self.break_off(lambda timeout: client.future("Dot", timeout, a=x, b=x), "BAD_DTYPE")
        self.account()

    WEIGHTS = f.Fuzzer.WEIGHTS | {
        "large": 1, "account": 6, "metrics": 2, "import_buffer": 14,
        "link": 8, "upload_shared": 14, "download_shared": 8, "broken_upload": 8,
        "broken_ranges": 6, "broken_call": 16, "broken_read": 4}

    def choose_client(self, kind):
        reads = self.rng.random() < 0.2 and not kind.startswith("broken_")
        self.client = self.members[reads]
        self.client.writes = ""
        return f" of {self.tenant} as {self.client.role}"

    def step(self, number):
        with contextlib.suppress(Refused):
            super().step(number)

    def end(self):
        """Checks that only what the model has is left, and that it can be deleted."""
        self.client = self.members[0]
        self.account()
        self.metrics()
        for name in sorted({held.name for held in self.held()}):
            self.client.call("DeleteBuffer", name=name)
        check(self.client.names() == [], "left:", self.client.names())
        self.live, self.drafts = {}, {}
        self.account()
        self.metrics()


def start(folder, file, number):
    """Starts one of the servers, which may import from each other."""
    path = folder / f"shared{number}"
    server = o.Server(
        folder, *("--tokens", str(file), "--import-from", "127.0.0.1:*", "--insecure"),
        *("--shared-memory", str(path), "--metrics-listen", "127.0.0.1:0"), *f.LIMITS)
    server.shared = path
    return server


def charges(server):
    """Returns the memory that buffers of some sizes take, as the device's allocator rounds them."""
    client = Caller(server, "staff-admin")
    taken = {}
    for size in (0, 1):
        client.create("probe", np.zeros(size, "u1"))
        taken[size] = client.device().buffer_used_bytes
        client.call("DeleteBuffer", name="probe")
        check(eventually(lambda: client.device().buffer_used_bytes == 0), "a probe stays")
    unit = taken[1]
    return lambda size: -(-size // unit) * unit if size else taken[0]


def write_tokens(file):
    lines = []
    for tenant, (role, most_bytes, most_buffers) in TENANTS.items():
        quotas = [f"bytes={most_bytes}"] * bool(most_bytes)
        quotas += [f"buffers={most_buffers}"] * bool(most_buffers)
        lines.append(line_of(f"{tenant}-{role}", role, tenant, *quotas))
        lines.append(line_of(f"{tenant}-read", "read", tenant))
    replace(file, "\n".join(lines) + "\n")


def fuzzers_of(server, rng):
    """Returns the models of all tenants on a server."""
    charge = charges(server)
    fuzzers = [TenantFuzzer(name, server, rng.randrange(1 << 32), charge) for name in TENANTS]
    for fuzzer in fuzzers:
        fuzzer.others = [other for other in fuzzers if other is not fuzzer]
        # A region belongs to the tenant that uses it first.
        fuzzer.client.shared("DownloadShared", name="none", target=fuzzer.region.range(0))
    return fuzzers


def check_variety(fuzzers, steps):
    """Checks that every kind of request was sent, and that every ending that this suite tests
    occurred."""
    ended, broken, calls = (
        sum((collections.Counter(getattr(one, name)) for one in fuzzers), collections.Counter())
        for name in ("ended", "broken", "calls"))
    if steps > 10 * sum(TenantFuzzer.WEIGHTS.values()):
        check(len(calls) == len(TenantFuzzer.WEIGHTS), "only", calls)
        for reason in ("ROLE_TOO_SMALL", "TENANT_QUOTA_EXCEEDED", "SOURCE_REFUSED"):
            check(ended[reason] > steps / 500, reason, "in", ended)
        for happened in (False, True):
            times = sum(n for key, n in broken.items() if key[1] == happened)
            check(times > steps / 500, "of calls that were broken off", broken)
        check(ended["OK"] > steps / 5, ended)
    print(f"{steps} steps, {sum(ended.values())} calls: {dict(ended)}; broken off: {dict(broken)}")


def many_callers(server, arguments):
    """Runs all tenants at the same time. No tenant sees another tenant's arrays, and quotas
    hold."""
    tokens = [f"{tenant}-{role}" for tenant, (role, _, _) in TENANTS.items()]
    clients = [Caller(server, tokens[i % len(tokens)]) for i in range(arguments.callers)]
    f.many_callers(server, clients, arguments)
    for client in clients[: len(tokens)]:
        f.delete_everything(client)


def test_tenants(server, client):
    rng, folder = random.Random(ARGUMENTS.seed), server.log_path.parent
    servers, fuzzers, steps = [], [], 0
    write_tokens(folder / "tokens")
    try:
        for number in range(2):
            servers.append(start(folder, folder / "tokens", number))
            fuzzers += fuzzers_of(servers[-1], rng)
        for fuzzer in fuzzers:
            fuzzer.peers = [peer for peer in fuzzers if peer.tenant == fuzzer.tenant]
        end = time.monotonic() + ARGUMENTS.seconds
        while steps < f.LEAST_STEPS or time.monotonic() < end:
            fuzzer = rng.choice(fuzzers)
            try:
                fuzzer.step(steps)
            except Exception as error:
                raise Wrong(f"{fuzzer.what}: {error}") from error
            steps += 1
        for fuzzer in fuzzers:
            fuzzer.end()
        check_variety(fuzzers, steps)
        many_callers(servers[0], ARGUMENTS)
        for server in servers:
            code = server.stop()
            check(code == 0, "a server has ended with", code, server.log()[-2000:])
    finally:
        for server in servers:
            server.kill()


if __name__ == "__main__":
    ARGUMENTS = r.take_arguments()
    sys.exit(r.run_tests(globals(), ARGUMENTS))
