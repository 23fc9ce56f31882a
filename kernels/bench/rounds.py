"""Shared by the scripts that time other libraries: their options, interleaved rounds, and times of
PyTorch. It makes the Python client importable."""

import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client" / "python"))


def parser(description, rounds=5):
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--rounds", type=int, default=rounds)
    return found


def write(path, document):
    if path:
        text = json.dumps(document, indent=1) + "\n"
        pathlib.Path(path).write_text(text, encoding="utf-8")


def interleaved(ways, rounds, check):
    """Returns {name: the times of the rounds} for ways = {name: function that returns a time}. A
    round calls each of them once. The first round is a warm-up, and check(name) judges its
    results."""
    times = {name: [] for name in ways}
    for turn in range(-1, rounds):
        for name, way in ways.items():
            time = way()
            if turn < 0:
                check(name)
            else:
                times[name].append(time)
    return times


def torch_us(work, before=lambda: None):
    """Returns the microseconds from an event before work to an event after it, on a device that is
    idle until `before` is called."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end)
