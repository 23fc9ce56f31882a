#!/usr/bin/env python3
"""Tests programs (Execute) over the wire: chains against NumPy, the bits of separate calls, faults
of single steps, limits, and leftovers."""

import sys
import time

import numpy as np

import outsider as o
from outsider import check_refusal as refused
from outsider import eventually, scratch, step

RNG = np.random.default_rng(20261123)


def dot(a, b, **more):
    return o.compute.Step(dot=dict(a=a, b=b, **more))


def reduce(op, x, **more):
    return o.compute.Step(reduce=dict(x=x, op="REDUCE_OP_" + op, **more))


def matmul(a, b, **more):
    return o.compute.Step(matmul=dict(a=a, b=b, **more))


def add(a, b, **more):
    return o.compute.Step(add=dict(a=a, b=b, **more))


def run(client, *steps, **more):
    """Returns the outcomes of all steps."""
    answer = client.call("Execute", steps=steps, **more)
    assert len(answer.results) == len(steps)
    return [o.Outcome.of_step(result) for result in answer.results]


def values(client, *steps):
    outcomes = run(client, *steps)
    for outcome in outcomes:
        assert outcome.ok, outcome
    return [outcome.answer for outcome in outcomes]


def fill(client, name, shape, value):
    """Makes a buffer on the device with one value everywhere."""
    half = o.inline(np.full(1, value / 2, np.float32), o.view(shape, [0] * len(shape)))
    client.call("Add", a=half, b=half, result=o.into(name))
    return o.resident(name)


def idle(client):
    """Returns whether only buffers use memory."""
    return client.device().scratch_used_bytes == 0 and client.budget("host_memory").used == 0


# --- Results --------------------------------------------------------------------------------------


def test_scalars_are_arrays_of_rank_0(server, client):
    """A scalar has the type of the reduction along axes; ARGMAX gives the index."""
    for dtype in ("<f4", "<f8", "<f2", "<i4", "<i8"):
        x = RNG.integers(-9, 10, 1000).astype(dtype)
        result = "<i8" if dtype[1] == "i" else dtype
        everywhere = o.view([1000], [0])
        answers = values(client,
                         reduce("SUM", o.inline(x)),
                         reduce("MIN", o.inline(x)),
                         reduce("ARGMAX", o.inline(x)),
                         dot(o.inline(x), o.inline(x)),
                         add(step(0), o.inline(np.array(1, result))),
                         add(step(1, everywhere), o.inline(x)),
                         add(step(2), o.inline(np.array(0, "<i8"))),
                         add(step(3), o.inline(np.array(0, result))))
        exact = x.astype(np.float64)
        assert o.to_numpy(answers[4].tensor) == np.array(exact.sum() + 1).astype(result)
        assert np.array_equal(o.to_numpy(answers[5].tensor), x + x.min())
        assert o.to_numpy(answers[6].tensor) == x.argmax()
        assert o.to_numpy(answers[7].tensor) == np.array((exact * exact).sum()).astype(result)


def test_neighbours_that_read_each_other_share_no_launch(server, client):
    """tests/compute_service_test.cc covers other neighbours, and random programs cover all
    kinds."""
    a = o.inline(RNG.integers(-9, 10, 1000).astype(np.float64))
    answers = values(client, dot(a, a), dot(step(0), step(0)), dot(step(1), step(0)))
    first = answers[0].value.real
    assert [answer.value.real for answer in answers[1:]] == [first**2, first**3]


def test_stats_on_request(server, client):
    version = client.put("x", np.ones(4, np.float32)).version
    plain = run(client, dot(o.resident("x"), o.resident("x")))[0].answer
    assert not plain.HasField("stats")
    dots = [dot(o.resident("x"), o.inline(np.ones(4, np.float32)))] * 2
    for outcome in run(client, *dots, add(o.resident("x"), step(0, o.view([4], [0]))),
                       reduce("MAX", o.resident("x"), timing=True), stats=True):
        stats = outcome.answer.stats
        assert stats.strategy and stats.bytes > 0 and stats.device == o.Program.device
        assert list(stats.operand_versions) in ([version, 0], [version])
    answer = client.call("Execute", steps=dots)
    assert answer.device == o.Program.device and answer.queue_us > 0


def test_an_empty_program(server, client):
    assert len(client.call("Execute").results) == 0


def test_all_buffers_are_read_at_one_moment(server, client):
    """A step that replaces an operand of a later step does not change the later step's operand."""
    client.put("x", np.array([1, 2, 3], np.float32))
    three = o.view([3], [1])
    answers = values(client,
                     add(o.resident("x"), o.resident("x"), result=o.into("x", replace=True)),
                     reduce("SUM", o.resident("x", three)),
                     reduce("SUM", step(0)))
    assert [answers[1].value.real, answers[2].value.real] == [6.0, 12.0]
    assert np.array_equal(np.frombuffer(client.download("x"), "<f4"), [2, 4, 6])


def test_the_last_of_two_results_of_a_name_wins(server, client):
    one, two = (o.inline(np.array([v], np.float32)) for v in (1, 2))
    answers = values(client, add(one, one, result=o.into("r", replace=True)),
                     add(two, two, result=o.into("r", replace=True)))
    assert np.frombuffer(client.download("r"), "<f4") == [4]
    assert answers[1].buffer.version > answers[0].buffer.version


# --- Faults ---------------------------------------------------------------------------------------

def test_a_failing_step_fails_what_needs_it_and_nothing_else(server, client):
    x = o.inline(np.arange(6, dtype=np.float32))
    client.put("taken", np.ones(1, np.float32))
    bad, failed = "INVALID_ARGUMENT", ("FAILED_PRECONDITION", "STEP_FAILED")
    cases = ((dot(x, o.resident("missing")), ("NOT_FOUND", "BUFFER_NOT_FOUND")),
             (dot(x, x), None),
             (add(step(0, o.view([6], [0])), x), failed),
             (add(x, x, result=o.into("taken")), ("ALREADY_EXISTS", "BUFFER_EXISTS")),
             (reduce("SUM", step(3)), failed),
             (reduce("SUM", step(2)), failed),
             (add(x, o.inline(np.ones(5, np.float32))), (bad, "BAD_SHAPE")),
             (dot(x, x, strategy="guess"), (bad, "UNKNOWN_STRATEGY")),
             (o.compute.Step(), (bad, "BAD_OPERATION")),
             (reduce("SUM", step(9)), (bad, "BAD_OPERAND")),
             (reduce("SUM", step(77)), (bad, "BAD_OPERAND")),
             (matmul(x, o.inline(np.ones(5, np.float32))), (bad, "BAD_SHAPE")),
             (add(x, x, result=o.into("bad name")), (bad, "BAD_NAME")),
             (add(x, x, result=o.into("good")), None),
             (reduce("MAX", o.inline(np.zeros(0, np.float32))), (bad, "EMPTY_INPUT")),
             (reduce("SUM", o.resident("taken", version=5)),
              ("FAILED_PRECONDITION", "VERSION_MISMATCH")),
             (dot(x, o.compute.Operand()), (bad, "BAD_OPERAND")))
    outcomes = run(client, *(one for one, _ in cases))
    for i, (outcome, (_, want)) in enumerate(zip(outcomes, cases)):
        if want is None:
            assert outcome.ok, (i, outcome)
            continue
        refused(outcome, *want)
        assert outcome.metadata["step"] == str(i) and outcome.domain == "tessera", outcome
    assert outcomes[0].metadata["operand"] == "b"
    assert outcomes[2].metadata["failed_step"] == "0"
    assert (outcomes[9].metadata["field"], outcomes[9].metadata["value"]) == ("step", "9")
    assert outcomes[1].answer.value.real == 55
    assert client.names() == ["good", "taken"]
    assert eventually(lambda: idle(client))


def test_steps_and_scratch_belong_to_programs(server, client):
    x = o.inline(np.ones(2, np.float32))
    refused(client.attempt("Dot", a=x, b=step(0)), "INVALID_ARGUMENT", "BAD_OPERAND")
    refused(client.attempt("Add", a=x, b=x, result=scratch()), "INVALID_ARGUMENT", "BAD_RESULT")
    refused(run(client, reduce("SUM", x, result=scratch()))[0], "INVALID_ARGUMENT", "BAD_AXES")


def test_too_many_steps(server, client):
    limit = client.info().limits.max_steps
    x = o.inline(np.ones(1, np.float32))
    numbers = [o.inline(np.full(1, i, np.float32)) for i in range(limit // 2)]
    steps = [dot(x, number) for number in numbers] + [reduce("SUM", number) for number in numbers]
    sums = [answer.value.real for answer in values(client, *steps)]
    assert sums == [*range(limit // 2)] * 2
    outcome = client.attempt("Execute", steps=[dot(x, x)] * (limit + 1))
    refused(outcome, "INVALID_ARGUMENT", "TOO_MANY_STEPS")
    assert outcome.metadata["limit"] == str(limit)
    # Refusing many more steps, which take few bytes, takes no memory.
    before = server.peak_rss()
    message = b"\x0a\x00" * (2 * o.MI - 100)
    call = client.channel.unary_unary("/tessera.v1.ComputeService/Execute")
    refused(o.outcome_of(lambda: call(message, timeout=20)), "INVALID_ARGUMENT", "TOO_MANY_STEPS")
    assert server.peak_rss() - before < 40 * o.MI, server.peak_rss() - before


def test_answers_fit_what_clients_receive(server, client):
    """The limit covers all inline results together, and also thousands of errors."""
    block = o.inline(np.ones(250 * 1024 // 4, np.float32))
    client.put("x", np.ones(o.MI // 4, np.float32))
    x = o.resident("x")
    outcomes = run(client, *[add(x, x)] * 5, add(block, block))
    reasons = [outcome.reason for outcome in outcomes]
    assert reasons == ["", "", "", "RESULT_TOO_LARGE", "RESULT_TOO_LARGE", ""], reasons
    limit = client.info().limits.max_steps
    strategy = "g\u00e4" * 300
    outcomes = run(client, *[dot(x, x, strategy=strategy)] * limit)
    for i, outcome in enumerate(outcomes):
        refused(outcome, "INVALID_ARGUMENT", "UNKNOWN_STRATEGY")
        assert outcome.metadata["step"] == str(i)
    named = [add(x, x, result=o.into("n" * 128, replace=True))] * 20
    assert all(outcome.ok for outcome in run(client, *named, stats=True))
    assert eventually(lambda: idle(client))


def test_scratch_is_limited_and_given_back(server, client):
    x = fill(client, "x", [8 * o.MI // 4], 1)
    limit = client.device().scratch_limit_bytes
    enough = [add(x, x, result=scratch())] * (limit // (8 * o.MI) + 1)
    read = [reduce("SUM", step(i)) for i in range(len(enough))]
    outcome = client.attempt("Execute", steps=enough + read)
    refused(outcome, "RESOURCE_EXHAUSTED", "SCRATCH_EXHAUSTED")
    # In a chain, only two results are needed at a time.
    chain = [enough[0]] + [add(step(i), x, result=scratch()) for i in range(len(enough) - 1)]
    assert values(client, *chain, reduce("MAX", step(len(chain) - 1)))[-1].value.real == (
        len(chain) + 1)
    huge = o.inline(np.ones(1, np.float32), o.view([2**30, 2**29], [0, 0]))
    outcome = client.attempt("Execute", steps=[add(huge, huge, result=scratch())] * 4)
    assert not outcome.ok or all(not one.ok for one in map(o.Outcome.of_step,
                                                           outcome.answer.results))
    assert eventually(lambda: idle(client))


def absolute(a, b, **more):
    """Returns |a b|, which takes scratch memory for the product while it runs."""
    return matmul(a, b, expression=o.expression(o.operand(0), o.node("ABS", 0)), **more)


def test_steps_take_scratch_memory_one_after_the_other(server, client):
    """Computes products of 8 to 40 MiB, 160 MiB in total, with 24 MiB of results."""
    b = fill(client, "b", [16, 16 << 10], 0.5)
    rows = (640, 128, 512, 256, 640, 384)
    a = [fill(client, f"a{i}", [n, 16], -1) for i, n in enumerate(rows)]
    steps = [absolute(x, b, result=o.into(f"product{i}")) for i, x in enumerate(a)]
    steps += [add(b, b, result=scratch()) for _ in range(24)]
    values(client, *steps)
    for i, n in enumerate(rows):
        x = o.resident(f"product{i}")
        least, total = values(client, reduce("MIN", x), reduce("SUM", x))
        assert (least.value.real, total.value.real) == (8, 8 * n * (16 << 10))
    assert eventually(lambda: idle(client))


def test_programs_that_others_leave_no_room(server, client):
    """Such programs fail as a whole before they have run, and can be retried. None of their steps
    fails."""
    b = fill(client, "b", [16, 16 << 10], 0.5)
    a = fill(client, "a", [896, 16], -1)
    end = time.monotonic() + 60 * o.Program.patience()
    done, refusals, wrong = [], [], []

    def caller(_):
        mine = server.client()
        while not wrong and (len(done) < 20 or not refusals) and time.monotonic() < end:
            # This takes 56 MiB, and another 56 MiB for the product.
            steps = [absolute(a, b, result=scratch()), reduce("MIN", step(0))]
            outcome = mine.attempt("Execute", steps=steps)
            if outcome.ok and outcome.answer.results[1].reduce.value.real == 8:
                done.append(1)
            elif outcome.reason == "SCRATCH_EXHAUSTED" and outcome.retry_s is not None:
                refusals.append(1)
            else:
                wrong.append(outcome if not outcome.ok else outcome.answer)
        mine.close()

    o.in_threads(4, caller)
    assert done and refusals and not wrong, (len(done), len(refusals), wrong[:1])
    assert eventually(lambda: idle(client))


def test_programs_that_take_too_long_together(server, client):
    """Each step by itself is short enough."""
    elements = 2**26 if o.Program.device == "cpu" else 2**34
    slow = reduce("SUM", o.inline(np.ones(1, np.float32), o.view([elements], [0])))
    assert run(client, slow)[0].answer.value.real == elements
    outcome = client.attempt("Execute", steps=[slow] * 4000)
    refused(outcome, "FAILED_PRECONDITION", "OPERATION_TOO_LONG")
    assert float(outcome.metadata["estimate_seconds"]) > float(outcome.metadata["limit_seconds"])


if __name__ == "__main__":
    flags = "--memory-limit 512Mi --scratch-limit 128Mi --max-operation-seconds 15"
    sys.exit(o.run_tests(globals(), *flags.split()))
