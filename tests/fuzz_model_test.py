#!/usr/bin/env python3
"""Sends random requests to all methods, and predicts with a model how each of them ends.

For half of the time, one client sends requests. Most of them are valid, and the others have one
fault each. The model predicts status, values, metadata, versions and lists. For the other half,
many callers upload, cancel, replace, copy, delete and download three names with self-checking
arrays, and run operations whose results the model knows.

The requests of the first half depend only on the seed.

usage: fuzz_model_test.py --server build/bin/tessera-server [--device cuda:0] [--seconds N]
                          [--seed S] [--callers N]
"""

import math
import random
import sys
import threading
import time

import numpy as np

import outsider as o
import random_requests as r
from outsider import eventually, in_threads, outcome_of
from random_requests import BAD_NAMES, BOOL, BYTES, DTYPES, F32, I64, SIZES, Wrong, check

NAMES = ["a", "a/b", "a.b", "b", "b-1", "Z"]
WRITING, READY = 1, 2
LEAST_STEPS = 500  # The minimum on any machine, however busy.
# A valid request may fail for these reasons if it exceeds the server's limits.
TOO_MUCH = ("OPERATION_TOO_LONG", "SCRATCH_EXHAUSTED", "RESULT_TOO_LARGE", "QUOTA_EXCEEDED",
            "HOST_MEMORY_EXHAUSTED")
LIMITS = (*("--memory-limit", "256Mi", "--scratch-limit", "64Mi", "--max-operation-seconds", "2"),
          *("--max-transfers", "64", "--transfer-timeout", "300s"))


def gaps_of(response):
    return [(gap.begin, gap.end) for gap in response.missing]


class Held:
    """A READY buffer or a draft."""

    def __init__(self, name, dtype, shape, version, replace=False, ttl=False):
        self.name, self.dtype, self.shape, self.version = name, dtype, tuple(shape), version
        self.replace, self.ttl = replace, ttl
        size = SIZES[dtype] * math.prod(shape)
        self.data = bytearray(size)
        self.written = bytearray(size)  # How often each byte was written, up to 2.
        self.summed = bytearray(size)  # Whether each byte came with a checksum.
        self.ready = False
        self.crc = None  # None if absent, "?" if either is possible.

    def set(self, data, crc=None):
        self.data = bytearray(data)
        self.written = bytearray(b"\1" * len(data))
        self.ready, self.crc = True, crc
        return self

    def write(self, offset, data, summed):
        self.data[offset : offset + len(data)] = data
        for i in range(offset, offset + len(data)):
            self.written[i] = min(2, self.written[i] + 1)
            self.summed[i] = summed

    def seal(self):
        self.ready, known = True, o.crc32c(self.data) if self.crc_known() else None
        self.crc = known if self.data else "?"

    def missing(self):
        gaps, begin = [], None
        for i, count in enumerate([*self.written, 1]):
            if not count and begin is None:
                begin = i
            elif count and begin is not None:
                gaps.append((begin, i))
                begin = None
        return gaps

    def crc_known(self):
        return all(count == 1 for count in self.written) and all(self.summed)

    def array(self):
        return np.frombuffer(bytes(self.data), o.NUMPY_TYPES[self.dtype]).reshape(self.shape)

    def check(self, message):
        """Checks that the server's Buffer agrees."""
        said = (message.name, message.dtype, tuple(message.shape), message.size_bytes,
                message.state, message.version, message.committed_bytes)
        committed = [*self.missing(), (len(self.data),)][0][0]
        known = (self.name, self.dtype, self.shape, len(self.data),
                 READY if self.ready else WRITING, self.version, committed)
        check(said == known, "buffer", said, "is not", known)
        check(message.device in o.Program.device.split(","), "device", message.device)
        if message.shards:
            cuts = [(s.begin, s.end) for s in message.shards]
            check(len(cuts) > 1 and message.shards[0].device == message.device, "shards", message)
            check([0, *(c[1] for c in cuts)] == [*(c[0] for c in cuts), len(self.data)], cuts)
        check(message.create_time.seconds > 0, "no create_time")
        if self.ready:
            check(message.HasField("expire_time") == self.ttl, "expire_time", message.expire_time)
            if self.crc != "?":
                crc = message.crc32c if message.HasField("crc32c") else None
                check(crc == self.crc, "crc32c", crc, "is not", self.crc)


class Fuzzer(r.Requests):
    """One caller's requests, and the model of what the server holds for this caller."""

    def __init__(self, client, seed):
        strategies = client.call("ListStrategies", backend=client.device().backend).strategies
        super().__init__(random.Random(seed), strategies)
        self.client = client
        client.requests = self
        self.drafts = {}  # Name: drafts by version.
        self.newest = 0  # The newest version.
        self.history = {}  # Name: the largest version that was READY.
        self.calls = {}
        self.ended = {}
        self.what = ""

    def pick_name(self):
        return self.rng.choice(NAMES)

    def expect(self, outcome, *reasons, ok=False):
        """Checks that the call ended with one of the reasons, or with OK. Returns whether it is
        OK."""
        end = outcome.reason or outcome.code
        self.ended[end] = self.ended.get(end, 0) + 1
        return r.check_end(outcome, reasons, ok)

    def new_version(self, message):
        check(message.version > self.newest, "version", message.version, "after", self.newest)
        self.newest = message.version
        return message.version

    def wrong_version(self):
        return self.rng.choice((1, self.newest + 1, self.newest + 10**9, 2**64 - 1))

    def all_drafts(self):
        return [draft for drafts in self.drafts.values() for draft in drafts]

    def taken(self, name):
        """Returns whether the server refuses a new buffer of this name without replace."""
        drafts = self.drafts.get(name, [])
        return name in self.live or any(not draft.replace for draft in drafts)

    def become_ready(self, held):
        self.live[held.name] = held
        self.history[held.name] = max(held.version, self.history.get(held.name, 0))

    def made(self, message, name, dtype, shape, replace=True, ttl=False):
        """Records a buffer that the server has just made."""
        return Held(name, dtype, shape, self.new_version(message), replace, ttl)

    def spec(self, dtype, shape, **more):
        return o.buffers.BufferSpec(dtype=dtype, shape=shape, **more)

    def random_spec(self):
        """Returns (spec, dtype, shape, replace, ttl), or (spec, reasons) if the spec has a
        fault."""
        rng = self.rng
        dtype = rng.choice((*DTYPES, *BYTES))
        shape = [rng.choice((0, 1, 2, 3, 5, 8)) for _ in range(rng.randrange(4))]
        replace, ttl = rng.random() < 0.6, rng.random() < 0.2
        more = dict(replace=replace) | (dict(ttl={"seconds": 3600}) if ttl else {})
        fault = rng.random()
        if 0.13 < fault < 0.43:
            more["placement"] = ["all"]
            if rng.random() < 0.3:
                shape = [rng.choice((1500, 2049, 4001))]  # Enough for several devices.
        if fault > 0.13:
            return self.spec(dtype, shape, **more), dtype, shape, replace, ttl
        bad_shapes = [-1], [2, -(2**63)], [2**62, 2**62], [1] * 9, [2**63 - 1, 2], [2**40]
        bad_ttls = {"seconds": -1}, {"seconds": 1, "nanos": -1}, {"nanos": 2 * 10**9}, {
            "seconds": 2**63 - 1}
        change, reason = rng.choice((
            (dict(dtype=rng.choice((0, 10, 99, -1))), "BAD_DTYPE"),
            (dict(shape=rng.choice(bad_shapes)), "BAD_SHAPE"),
            (dict(ttl=rng.choice(bad_ttls)), "BAD_TTL"),
            (dict(device="cuda:77"), "BAD_DEVICE"),
            (dict(placement=rng.choice((["all", "all"], [""]))), "BAD_PLACEMENT"),
            (dict(placement=["x"]), "BAD_DEVICE")))
        reasons = (reason, *(("QUOTA_EXCEEDED",) * (reason == "BAD_SHAPE")))
        return self.spec(**dict(dtype=dtype, shape=shape, **more) | change), reasons

    def random_bytes(self, dtype, shape):
        return self.array(dtype, tuple(shape)).tobytes()

    # --- Buffers ----------------------------------------------------------------------------------

    def create(self):
        name = self.pick_name()
        if len(self.drafts.get(name, ())) >= 4:
            return
        if self.rng.random() < 0.03:
            spec, rest = self.spec(F32, [1]), [("BAD_NAME",)]
            name = self.rng.choice(BAD_NAMES)
        else:
            spec, *rest = self.random_spec()
        outcome = self.client.attempt("CreateBuffer", name=name, spec=spec)
        if len(rest) == 1:
            self.expect(outcome, *rest[0], *(("BUFFER_EXISTS",) * self.taken(name)))
            return
        dtype, shape, replace, ttl = rest
        if not replace and self.taken(name):
            self.expect(outcome, "BUFFER_EXISTS")
            return
        self.expect(outcome, ok=True)
        draft = self.made(outcome.answer.buffer, name, dtype, shape, replace, ttl)
        draft.check(outcome.answer.buffer)
        self.drafts.setdefault(name, []).append(draft)

    def upload(self):
        """Uploads with a stream that creates the buffer."""
        rng, name = self.rng, self.pick_name()
        spec, *rest = self.random_spec()
        if len(rest) == 1:
            outcome = self.client.try_upload([dict(name=name, spec=spec, data=b"")])
            self.expect(outcome, *rest[0], *(("BUFFER_EXISTS",) * self.taken(name)))
            return
        dtype, shape, replace, ttl = rest
        data = self.random_bytes(dtype, shape)
        cuts = sorted(rng.sample(range(len(data) + 1), min(len(data), rng.randrange(4))))
        pieces = [(a, data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)])]
        explicit, sums = rng.random() < 0.4, rng.random() < 0.5
        if explicit:
            rng.shuffle(pieces)
        messages = []
        for i, (offset, piece) in enumerate(pieces):
            fields = dict(data=piece)
            if i == 0 or rng.random() < 0.3:
                fields.update(name=name, spec=spec)
            if explicit:
                fields["offset"] = offset
            if sums:
                fields["crc32c"] = o.crc32c(piece)
            messages.append(fields)
        whole, right = sums and rng.random() < 0.5, o.crc32c(data)
        if whole:
            rng.choice(messages)["buffer_crc32c"] = right
        unknown = ("CHECKSUM_UNKNOWN",) * whole
        crc, reasons = right if sums and data else "?" if not data else None, ()
        last, piece = messages[-1], pieces[-1][1]
        fault = rng.choice(
            (None,) * 6 + ("crc", "whole", "unknown", "range", "short", "other", "repeat"))
        if fault == "crc":
            message = rng.choice(messages)
            message["crc32c"] = o.crc32c(message["data"]) ^ (1 << rng.randrange(32))
            reasons = ("BAD_CHECKSUM",)
        elif fault == "whole" and sums:
            for message in messages:
                message.pop("buffer_crc32c", None)
            last["buffer_crc32c"] = right ^ 0x80000000
            reasons = ("BAD_CHECKSUM",)
        elif fault == "unknown" and data and not sums:
            messages[0]["buffer_crc32c"] = right
            reasons = ("CHECKSUM_UNKNOWN",)
        elif fault == "range":
            outside = (b"x", len(data)), (b"xy", 2**64 - 1), (b"x" * (len(data) + 1), 0)
            messages.append(dict(zip(("data", "offset"), rng.choice(outside))))
            reasons = ("BAD_RANGE", *unknown)
        elif fault == "short" and piece:
            last["data"] = piece[:-1]
            last.pop("crc32c", None)
            last.pop("buffer_crc32c", None)
            reasons = ("MISSING_DATA", "CHECKSUM_UNKNOWN")
        elif fault == "other":
            messages.append(rng.choice((dict(name="other"), dict(spec=self.spec(dtype, [77])))))
            reasons = ("BAD_MESSAGE", *unknown)
        elif fault == "repeat" and piece:
            # Repeats the last piece. The bytes are the same, but some are sent twice.
            messages.append(dict(data=piece, offset=pieces[-1][0]))
            crc, reasons = None, unknown
        outcome = self.client.try_upload(messages)
        if not replace and self.taken(name):
            reasons = ("BUFFER_EXISTS",)
        if not self.expect(outcome, *reasons, ok=not reasons):
            return
        received = outcome.answer.received_bytes
        check(received == sum(len(m.get("data", b"")) for m in messages), "received", received)
        held = self.made(outcome.answer.buffer, name, dtype, shape, replace, ttl)
        held.set(data, crc).check(outcome.answer.buffer)
        self.become_ready(held)

    def find_draft(self, name, version):
        """Returns (draft, the reasons why there is none)."""
        drafts = self.drafts.get(name, [])
        if version == 0:
            if len(drafts) == 1:
                return drafts[0], ()
            return None, ("VERSION_REQUIRED",) if drafts else ("BUFFER_NOT_FOUND",)
        for draft in drafts:
            if draft.version == version:
                return draft, ()
        if drafts or name in self.live:
            return None, ("VERSION_MISMATCH", "BUFFER_NOT_FOUND")
        return None, ("BUFFER_NOT_FOUND",)

    def pick_version(self, name):
        drafts, kind = self.drafts.get(name, []), self.rng.random()
        if drafts and kind < 0.7:
            return self.rng.choice(drafts).version
        if kind < 0.8 and name in self.live:
            return self.live[name].version
        return 0 if kind < 0.93 else self.wrong_version()

    def pick_draft(self):
        """Returns (name, version, draft, the reasons why there is none)."""
        names = [name for name in self.drafts if self.drafts[name]]
        name = self.rng.choice(names) if names and self.rng.random() < 0.9 else self.pick_name()
        version = self.pick_version(name)
        return name, version, *self.find_draft(name, version)

    def upload_ranges(self):
        rng = self.rng
        name, version, draft, reasons = self.pick_draft()
        live = self.live.get(name)
        if draft is None and live:
            if version in (0, live.version) and not (version == 0 and self.drafts.get(name)):
                reasons = ("BUFFER_SEALED",)
            elif version:
                reasons = (*reasons, "BUFFER_SEALED")
        size = len(draft.data) if draft else 8
        dtype = BOOL if draft and draft.dtype == BOOL else I64
        data = self.array(dtype, (size // SIZES[dtype] + 1,)).tobytes()[:size]
        wrong, first = rng.random(), dict(name=name, version=version)
        if draft and wrong < 0.05:
            first.update(offset=rng.choice((size, 2**63, 2**64 - 1)), data=b"x")
            self.expect(self.client.try_upload([first]), "BAD_RANGE")
            return
        if draft and wrong < 0.1 and size:
            first.update(offset=0, data=data, crc32c=12345)
            self.expect(self.client.try_upload([first]), "BAD_CHECKSUM")
            return
        begin = rng.randrange(size + 1)
        end = rng.randrange(begin, size + 1)
        if draft and rng.random() < 0.6 and draft.missing():
            begin, end = rng.choice(draft.missing())
        summed, middle = rng.random() < 0.7, (begin + end) // 2
        pieces = [(begin, middle), (middle, end)] if rng.random() < 0.5 else [(begin, end)]
        messages = [dict(data=data[a:b]) for a, b in pieces]
        messages[0].update(first, offset=begin)
        if summed:
            for message in messages:
                message["crc32c"] = o.crc32c(message["data"])
        outcome = self.client.try_upload(messages)
        if self.expect(outcome, *reasons, ok=draft is not None):
            check(outcome.answer.received_bytes == end - begin, "received_bytes")
            for a, b in pieces:
                draft.write(a, data[a:b], summed)
            draft.check(outcome.answer.buffer)

    def seal(self):
        rng = self.rng
        name, version, draft, reasons = self.pick_draft()
        live = self.live.get(name)
        if live and version == live.version:
            outcome = self.client.attempt("SealBuffer", name=name, version=version)
            self.expect(outcome, ok=True)
            live.check(outcome.answer.buffer)
            return
        fields = dict(name=name, version=version)
        if draft and draft.data and rng.random() < 0.4:
            fields["crc32c"] = o.crc32c(draft.data) ^ (rng.random() < 0.2)
        outcome = self.client.attempt("SealBuffer", **fields)
        if draft is None:
            self.expect(outcome, *reasons)
            return
        reasons = ["BUFFER_NOT_READY"] if draft.missing() else []
        if live and not draft.replace:
            reasons.append("BUFFER_EXISTS")
        if "crc32c" in fields:
            if not draft.crc_known():
                reasons.append("CHECKSUM_UNKNOWN")
            elif fields["crc32c"] != o.crc32c(draft.data):
                reasons.append("BAD_CHECKSUM")
        if not self.expect(outcome, *reasons, ok=not reasons):
            if outcome.reason in ("BUFFER_EXISTS", "BAD_CHECKSUM"):
                # The .proto file does not say whether the draft stays.
                self.client.attempt("DeleteBuffer", name=name, version=draft.version)
                self.drafts[name].remove(draft)
            return
        message = outcome.answer.buffer
        if live and live.version > draft.version:
            check(message.version != draft.version, "an old version after a newer one")
        elif self.history.get(name, 0) < draft.version:
            check(message.version == draft.version, "the draft's version has changed")
        if message.version != draft.version:
            draft.version = self.new_version(message)
        self.sealed(draft, message)

    def sealed(self, draft, message):
        draft.seal()
        draft.check(message)
        self.drafts[draft.name].remove(draft)
        self.become_ready(draft)

    def get(self):
        name = self.pick_name()
        version = self.pick_version(name) if self.rng.random() < 0.5 else 0
        outcome = self.client.attempt("GetBuffer", name=name, version=version)
        drafts = self.drafts.get(name, [])
        held = [x for x in [self.live.get(name), *drafts] if x]
        if version:
            found = [x for x in held if x.version == version]
        else:
            found = [self.live[name]] if name in self.live else drafts[-1:]
        if not found:
            self.expect(outcome, "VERSION_MISMATCH" if held else "BUFFER_NOT_FOUND")
            return
        self.expect(outcome, ok=True)
        found[0].check(outcome.answer.buffer)
        if not found[0].ready:
            gaps, known = gaps_of(outcome.answer), found[0].missing()
            check(gaps == known[:100], "missing", gaps, "is not", known)
        check(len(outcome.answer.drafts) == len(drafts), "drafts", outcome.answer.drafts)
        for message, draft in zip(outcome.answer.drafts, drafts):
            draft.check(message)

    def list(self):
        rng = self.rng
        prefix = rng.choice(("", "a", "a/", "b", "Z", "none"))
        size = rng.choice((0, 1, 2, 5, 1000))
        if rng.random() < 0.1:
            sizes = [dict(page_size=n) for n in (-1, 1001, 2**31 - 1, -(2**31))]
            fields = rng.choice((*sizes, dict(page_token="guess\0")))
            self.expect(self.client.attempt("ListBuffers", **fields), "BAD_PAGE")
            return
        expected = [self.live.get(name) or self.drafts[name][-1]
                    for name in sorted({*self.live, *(n for n in self.drafts if self.drafts[n])})
                    if name.startswith(prefix)]
        seen, token = [], ""
        while True:
            outcome = self.client.attempt(
                "ListBuffers", prefix=prefix, page_size=size, page_token=token)
            self.expect(outcome, ok=True)
            check(len(outcome.answer.buffers) <= (size or 100), "a page is too long")
            seen += outcome.answer.buffers
            token = outcome.answer.next_page_token
            if not token or len(seen) > len(expected):
                break
        names, known = [x.name for x in seen], [x.name for x in expected]
        check(names == known, names, "is not", known)
        for message, held in zip(seen, expected):
            held.check(message)

    def update(self):
        name = self.pick_name()
        drafts = self.drafts.get(name, [])
        held = self.live.get(name) or (drafts[0] if len(drafts) == 1 else None)
        if held is None and drafts:
            return
        fields, ttl = dict(name=name), self.rng.random() < 0.5
        reasons = () if held else ("BUFFER_NOT_FOUND",)
        if ttl:
            fields["ttl"] = {"seconds": 7200}
        if self.rng.random() < 0.1:
            fields["ttl"], reasons = {"seconds": -5}, ("BAD_TTL", "BUFFER_NOT_FOUND")
        elif self.rng.random() < 0.1:
            fields["version"] = self.wrong_version()
            reasons = ("VERSION_MISMATCH",) if held else reasons
        outcome = self.client.attempt("UpdateBuffer", **fields)
        if self.expect(outcome, *reasons, ok=not reasons):
            held.ttl = ttl
            held.check(outcome.answer.buffer)

    def delete(self):
        name = self.pick_name()
        version = self.pick_version(name) if self.rng.random() < 0.6 else 0
        drafts = self.drafts.get(name, [])
        outcome = self.client.attempt("DeleteBuffer", name=name, version=version)
        if not drafts and name not in self.live:
            self.expect(outcome, "BUFFER_NOT_FOUND")
        elif version == 0:
            self.expect(outcome, ok=True)
            self.forget(name)
        elif name in self.live and self.live[name].version == version:
            self.expect(outcome, ok=True)
            del self.live[name]
        else:
            found = [draft for draft in drafts if draft.version == version]
            if self.expect(outcome, *(("VERSION_MISMATCH",) * (not found)), ok=bool(found)):
                drafts.remove(found[0])

    def forget(self, name):
        self.live.pop(name, None)
        self.drafts.pop(name, None)

    def not_readable(self, name, version=0):
        if name not in self.live and self.drafts.get(name):
            return ("BUFFER_NOT_READY", *(("VERSION_MISMATCH",) if version else ()))
        return super().not_readable(name, version)

    def pick_range(self):
        """Returns (name, its buffer, version, size, offset, reasons) for a download."""
        rng, name = self.rng, self.pick_name()
        live = self.live.get(name)
        version = rng.choice((0, 0, live.version if live else 0, self.wrong_version()))
        size, reasons = len(live.data) if live else 8, self.not_readable(name, version)
        if not reasons and rng.random() < 0.1:
            outside = rng.choice((size + 1, 2**63, 2**64 - 1))
            return name, live, version, size, outside, ("BAD_RANGE",)
        return name, live, version, size, rng.randrange(size + 1), reasons

    def download(self):
        rng = self.rng
        name, live, version, size, offset, reasons = self.pick_range()
        limit, sums = rng.choice((0, 0, rng.randrange(size + 2))), rng.random() < 0.5
        request = o.buffers.DownloadRequest(
            name=name, offset=offset, limit=limit, version=version, checksums=sums)
        outcome = outcome_of(lambda: list(self.client.b.Download(request, timeout=30)))
        beyond = ("BAD_RANGE",) * (not reasons and offset + limit > size)
        if not self.expect(outcome, *reasons, *beyond, ok=not reasons):
            return
        at = offset
        for i, message in enumerate(outcome.answer):
            check(message.HasField("buffer") == (i == 0), "buffer in message", i)
            check(message.offset == at, "offset", message.offset, "is not", at)
            check(message.HasField("crc32c") == sums, "checksum")
            check(not sums or message.crc32c == o.crc32c(message.data), "wrong checksum")
            at += len(message.data)
        if outcome.answer:
            live.check(outcome.answer[0].buffer)
        end = min(size, offset + limit) if limit else size
        data = b"".join(message.data for message in outcome.answer)
        check(data == bytes(live.data[offset:end]), "data differs")

    def copy(self):
        rng = self.rng
        source, name = self.pick_name(), self.pick_name()
        reasons = self.not_readable(source)
        replace, ttl = rng.random() < 0.7, rng.random() < 0.2
        fields = dict(source=source, name=name, replace=replace)
        if rng.random() < 0.2:
            fields["placement"] = ["all"]
        if ttl:
            fields["ttl"] = {"seconds": 3600}
        if not reasons:
            held = self.live[source]
            dtype = rng.choice((0, 0, *DTYPES, *BYTES))
            fields["dtype"] = dtype
            dtype = dtype or held.dtype
            array = held.array()
            view = self.view(array.size) if rng.random() < 0.5 else None
            if view is not None:
                array = r.strided(array, view)
                fields["view"] = o.buffers.View(offset=view[0], shape=view[1], strides=view[2])
            if rng.random() < 0.3:
                fields["source_version"] = held.version
            placement = "BAD_PLACEMENT" if "placement" in fields else "BAD_DEVICE"
            if rng.random() < 0.14:
                bad_view, reasons = self.bad_view(held.array().size)
                change, reasons = rng.choice((
                    (dict(view=bad_view), reasons),
                    (dict(source_version=self.wrong_version()), ("VERSION_MISMATCH",)),
                    (dict(dtype=77), ("BAD_DTYPE",)),
                    (dict(name=rng.choice(BAD_NAMES)), ("BAD_NAME",)),
                    (dict(device="cuda:77"), (placement,))))
                fields.update(change)
        outcome = self.client.attempt("CopyBuffer", **fields)
        if not replace and self.taken(name):
            reasons = (*reasons, "BUFFER_EXISTS")
        if self.expect(outcome, *reasons, ok=not reasons):
            array = r.cast(array, held.dtype, dtype)
            made = self.made(outcome.answer.buffer, name, dtype, array.shape, replace, ttl)
            made.set(self.client.download(name)).check(outcome.answer.buffer)
            r.check_equal(made.array(), array, dtype)
            self.become_ready(made)

    # --- Operations -------------------------------------------------------------------------------

    def target(self, case):
        """Decides whether an array goes inline or to a buffer."""
        rng, kind = self.rng, self.rng.random()
        if kind < 0.55:
            case.fields["result"] = rng.choice((None, o.compute.Result(inline=True)))
        elif kind < 0.58:
            case.fields["result"] = o.into(rng.choice(BAD_NAMES))
            case.reasons, case.may_succeed = (*case.reasons, "BAD_NAME"), False
        else:
            name, replace, ttl = self.pick_name(), rng.random() < 0.7, rng.random() < 0.2
            more = dict(ttl={"seconds": 3600}) if ttl else {}
            case.fields["result"] = o.into(name, replace=replace, **more)
            case.target = name, replace, ttl
            if not replace and name in self.live:
                case.reasons, case.may_succeed = (*case.reasons, "BUFFER_EXISTS"), False
            elif not replace and self.drafts.get(name):
                case.perhaps = ("BUFFER_EXISTS",)

    def operate(self, kind):
        case = self.case(kind)
        if case.result is not None and not case.reasons:
            self.target(case)
        self.vary(case)
        outcome = self.client.attempt(case.rpc, **case.fields)
        self.what += f" {str(case)[:500]}"
        if not self.expect(outcome, *case.reasons, *case.perhaps, ok=case.may_succeed):
            return
        if case.target is None:
            case.check(outcome.answer)
            return
        name, replace, ttl = case.target
        held = self.made(outcome.answer.buffer, name, *case.result, replace, ttl)
        held.set(self.client.download(name)).check(outcome.answer.buffer)
        self.become_ready(held)
        case.check(outcome.answer, held.array())

    def large(self):
        """Sends valid views of very many elements. The outcome comes soon, and is a response or a
        clear refusal."""
        rng = self.rng
        extents = rng.choice((
            [2**20], [2**31], [2**62], [2**16, 2**16], [2**31, 2**31], [3, 2**40], [2**63 - 1],
            [2**32, 2**32]))
        view = o.buffers.View(shape=extents, strides=[0] * len(extents))
        x = o.inline(self.array(rng.choice(DTYPES), (1,), special=False), view)
        stored = dict(a=x, b=x, result=rng.choice((None, o.into("large", replace=True))))
        rpc, fields = rng.choice((
            ("Dot", dict(a=x, b=x)),
            ("Reduce", dict(x=x, op=rng.randint(1, 14))),
            ("Add", stored),
            ("Matmul", stored),
            ("WindowSum", dict(x=x, radius=rng.choice((0, 5, 2**62)))),
            ("TopK", dict(x=x, k=rng.choice((1, 100, 4096)), axis=rng.choice((-1, 0)))),
            ("Scan", dict(x=x, op=rng.randint(1, 4), axis=rng.choice((-1, 0)),
                          result=stored["result"])),
            ("Sort", dict(x=x, axis=rng.choice((-1, 0)), values={"none": True},
                          indices=stored["result"])),
            ("Take", dict(x=x, indices=o.inline(np.zeros(3, np.int64)), result=stored["result"])),
            ("Select", dict(x=x, mask=o.inline(np.array([rng.random() < 0.5]), view),
                            values={"none": True}, indices=stored["result"])),
            ("Histogram", dict(x=x, even=dict(count=9, low=-1, high=1), result=stored["result"])),
            ("SearchSorted", dict(x=o.inline(np.zeros(1, np.float32)), keys=x,
                                  result=stored["result"])),
            ("SumByLabel", dict(x=x, labels=o.inline(np.zeros(1, np.int64), o.buffers.View(
                shape=extents[:1], strides=[0])), length=3, result=stored["result"])),
            ("Linalg", dict(x=x, function=rng.randint(3, 7), result=stored["result"]))))
        outcome = self.client.attempt(rpc, **fields)
        refusals = ("BAD_VIEW", "BAD_SHAPE", "BAD_K", "STRATEGY_UNSUPPORTED", "BAD_DTYPE",
                    "BAD_MATRIX")
        self.expect(outcome, *TOO_MUCH, *refusals, ok=True)
        where, buffer = "result", "buffer"
        if rpc in ("Sort", "Select"):
            where, buffer = "indices", "indices_buffer"
        if outcome.ok and fields.get(where) is not None:
            self.newest = getattr(outcome.answer, buffer).version
            self.client.call("DeleteBuffer", name="large")

    def bare(self):
        """Sends requests without fields, and calls methods that only report."""
        methods = "Create", "Get", "Seal", "Update", "Copy", "Delete"
        rpc = self.rng.choice([*(method + "Buffer" for method in methods), *r.STEPS])
        reasons = "EXPRESSION", "NAME", "OPERAND", "DTYPE", "OPERATION", "SHAPE", "BINS"
        outcome = self.client.attempt(rpc)
        self.expect(outcome, "BUFFER_NOT_FOUND", *("BAD_" + reason for reason in reasons))
        outcome = self.client.attempt(
            "ListStrategies", operation=self.rng.choice(("", "dot", "guess", "x" * 1000)))
        self.expect(outcome, "BAD_OPERATION", ok=True)

    WEIGHTS = {
        "create": 8, "upload": 16, "upload_ranges": 14, "seal": 10, "get": 8, "list": 3,
        "update": 4, "delete": 5, "download": 6, "copy": 12, "dot": 12, "add": 12, "matmul": 12,
        "reduce": 20, "window_sum": 8, "map": 12, "top_k": 10, "scan": 10, "sort": 10, "take": 10,
        "select": 10, "histogram": 10, "search_sorted": 10, "sum_by_label": 10,
        "linalg": 10,
        "large": 2, "bare": 1}

    def choose_client(self, kind):
        """Chooses the client if there are several. Returns how the next request is described."""
        return ""

    def step(self, number):
        """Sends one request of a random kind."""
        kind = self.rng.choices([*self.WEIGHTS], [*self.WEIGHTS.values()])[0]
        self.what = f"step {number}: {kind}{self.choose_client(kind)}"
        self.calls[kind] = self.calls.get(kind, 0) + 1
        if kind in self.KINDS:
            self.operate(kind)
        else:
            getattr(self, kind)()


# --- Many callers ---------------------------------------------------------------------------------

CROWD_NAMES = ("p", "q", "r")
HARMLESS = {
    "BUFFER_NOT_FOUND", "BUFFER_EXISTS", "BUFFER_NOT_READY", "BUFFER_SEALED", "VERSION_MISMATCH",
    "VERSION_REQUIRED", "QUOTA_EXCEEDED", "TOO_MANY_UPLOADS", "TOO_MANY_DOWNLOADS", "QUEUE_FULL",
    "HOST_MEMORY_EXHAUSTED", "SCRATCH_EXHAUSTED", "TOO_MANY_BUFFERS", "TENANT_QUOTA_EXCEEDED"}


def self_checking(rng):
    """Returns i64 numbers. The first number determines all others, and how many there are."""
    count, seed = rng.choice((1, 2, 100, 5000, 40_000)), rng.randrange(1 << 20)
    return np.arange(count, dtype=np.int64) * (2 * seed + 1) + (seed << 20 | count)


def is_whole(data):
    if len(data) % 8 or not data:
        return False
    array = np.frombuffer(data, np.int64)
    seed, count = int(array[0]) >> 20, int(array[0]) & (1 << 20) - 1
    return count == len(array) and np.array_equal(
        array, np.arange(count, dtype=np.int64) * (2 * seed + 1) + array[0])


class Member:
    """One of many callers that share three names."""

    def __init__(self, client, rng, note):
        self.client, self.rng, self.note = client, rng, note
        self.requests = r.Requests(rng)

    def act(self):
        kinds = ("upload", "create", "copy", "delete", "download", "dot", "operate")
        kind = self.rng.choices(kinds, (30, 10, 15, 7, 28, 20, 30))[0]
        getattr(self, kind)(self.rng.choice(CROWD_NAMES))

    def attempt(self, rpc, **fields):
        return self.note(rpc, self.client.attempt(rpc, **fields))

    def send(self, array, hold=None, **first):
        """Uploads an array. hold: an event that must be set before the upload ends."""

        def messages():
            data = array.tobytes()
            step = len(data) // 3 + 1
            for at in range(0, len(data), step):
                more = first if at == 0 else {}
                yield o.buffers.UploadRequest(data=data[at : at + step], offset=at, **more)
            if hold:
                hold.wait()

        return self.client.b.Upload.future(messages(), timeout=o.CALL_TIMEOUT_S)

    def upload(self, name):
        rng, array = self.rng, self_checking(self.rng)
        placement = rng.choice(([], [], ["all"]))
        spec = o.spec_of(array, replace=rng.random() < 0.8, placement=placement)
        hold = threading.Event() if rng.random() < 0.25 else None
        call = self.send(array, hold, name=name, spec=spec)
        if hold:
            time.sleep(rng.random() * 0.01)
            call.cancel()
            hold.set()
        self.note("Upload", outcome_of(call))

    def create(self, name):
        array = self_checking(self.rng)
        made = self.attempt("CreateBuffer", name=name, spec=o.spec_of(array, replace=True))
        if made.ok and self.rng.random() < 0.8:
            version = made.answer.buffer.version
            self.note("ranges", outcome_of(self.send(array, name=name, version=version)))
            self.attempt("SealBuffer", name=name, version=version)

    def copy(self, name):
        source, replace = self.rng.choice(CROWD_NAMES), self.rng.random() < 0.8
        self.attempt("CopyBuffer", source=source, name=name, replace=replace)

    def delete(self, name):
        self.attempt("DeleteBuffer", name=name)

    def download(self, name):
        outcome = self.note("Download", outcome_of(lambda: self.client.download(name)))
        if outcome.ok:
            check(is_whole(outcome.answer), f"a torn read of {name}")

    def dot(self, name):
        x = o.resident(name)
        outcome = self.attempt("Dot", a=x, b=x)
        if outcome.ok:
            a, b = outcome.answer.stats.operand_versions
            check(a == b, f"Dot of {name} with itself read versions {a} and {b}")

    def operate(self, _):
        """Runs a valid operation. Its result is right, whatever else the server does."""
        case = self.requests.case()
        outcome = self.client.attempt(case.rpc, **case.fields)
        if outcome.ok or outcome.reason in case.reasons:
            case.check_outcome(outcome)
        self.note(case.rpc, outcome, case.reasons)


def crowd(clients, seed, seconds):
    """Lets many callers use the same three names, and returns how the calls ended."""
    end = time.monotonic() + seconds
    ended, lock = {}, threading.Lock()
    failed = threading.Event()

    def note(rpc, outcome, reasons=()):
        with lock:
            key = outcome.reason or outcome.code
            ended[key] = ended.get(key, 0) + 1
        harmless = outcome.ok or outcome.code == "CANCELLED" or outcome.reason in HARMLESS
        check(harmless or outcome.reason in reasons, rpc, outcome)
        return outcome

    def work(i):
        member = Member(clients[i], random.Random(seed * 1000 + i), note)
        try:
            while not failed.is_set() and (
                    time.monotonic() < end or sum(ended.values()) < 10 * len(clients)):
                member.act()
        except BaseException:
            failed.set()
            raise

    in_threads(len(clients), work)
    check(ended.get("OK", 0) > sum(ended.values()) / 4, ended)
    return ended


def holdings(server):
    return dict(threads=server.threads(), descriptors=o.descriptors(server), memory=server.rss())


def check_holdings(server, before):
    """Checks that the server holds little more than before. gRPC keeps a few threads for the next
    burst, and a sanitizer keeps memory that was freed."""
    most = math.inf if o.Program.sanitized() else before["memory"] * 1.1 + 16 * o.MI
    now = {}

    def is_little():
        now.update(holdings(server))
        return (now["threads"] <= before["threads"] + 4 and now["memory"] <= most
                and now["descriptors"] <= before["descriptors"])

    check(eventually(is_little, pause=0.1), "the server holds", now, "after", before)
    print(f"the server holds {now} after {before}")


def delete_everything(client):
    for name in client.names():
        client.attempt("DeleteBuffer", name=name)
    check(client.names() == [], "left:", client.names())
    left = {}

    def is_empty():
        info = client.info()
        for device in info.devices:
            left[device.name] = device.buffer_used_bytes, device.scratch_used_bytes
        for budget in info.budgets:
            if budget.name in ("buffers", "uploads", "downloads"):
                left[budget.name] = budget.used, 0
        return not any(sum(used) for used in left.values())

    check(eventually(is_empty), "in use at the end:", left)


def test_model(server, client):
    client = r.ThroughPrograms(server.address, None)
    server.clients.append(client)
    fuzzer, end, steps = Fuzzer(client, ARGUMENTS.seed), time.monotonic() + ARGUMENTS.seconds / 2, 0
    while steps < LEAST_STEPS or time.monotonic() < end:
        try:
            fuzzer.step(steps)
        except Exception as error:
            raise Wrong(f"{fuzzer.what}: {error}") from error
        steps += 1
    # Every kind of request was sent, and most of them were valid.
    if steps > 20 * sum(fuzzer.WEIGHTS.values()):
        check(len(fuzzer.calls) == len(fuzzer.WEIGHTS), "only", fuzzer.calls)
        check(fuzzer.ended.get("OK", 0) > steps / 3, fuzzer.ended)
        check(client.programs > steps / 10, "only", client.programs, "programs")
    delete_everything(client)
    print(f"{steps} steps, {client.programs} programs: {fuzzer.ended}")


def many_callers(server, clients, arguments):
    """Lets the clients call at the same time. The server holds no more afterwards."""
    crowd(clients, arguments.seed, arguments.seconds / 8)  # Caches fill, pools grow.
    before = holdings(server)
    ended = crowd(clients, arguments.seed + 1, arguments.seconds / 2)
    check_holdings(server, before)
    print(f"{sum(ended.values())} calls: {ended}")


def test_many_callers(server, client):
    clients = [server.client() for _ in range(ARGUMENTS.callers)]
    many_callers(server, clients, ARGUMENTS)
    delete_everything(client)


if __name__ == "__main__":
    ARGUMENTS = r.take_arguments()
    sys.exit(r.run_tests(globals(), ARGUMENTS, *LIMITS))
