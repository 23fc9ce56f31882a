"""A linear model served to 64 callers: the weights are resident, and each caller sends a vector and
gets a class.

usage: linear_model.py [ADDRESS] [--seconds 2] [--callers 64] [--plot FILE.svg]
"""

# %% [markdown]
# This process fits the model by least squares, and puts it on the server under names that other
# processes can also use.

# %%
import argparse
import asyncio
import pathlib
import time

import numpy as np

import tessera as ts

parser = argparse.ArgumentParser()
parser.add_argument("address", nargs="?", default="127.0.0.1:50051")
parser.add_argument("--seconds", type=float, default=2.0)
parser.add_argument("--callers", type=int, default=64)
parser.add_argument("--plot")
options = parser.parse_args()
data = pathlib.Path(__file__).resolve().parents[2] / "demo"
images, labels = np.load(data / "digits.npy"), np.load(data / "labels.npy")
inputs = np.c_[images, np.ones(len(images))].astype("f8")
wanted = np.eye(10)[labels] * 2 - 1
fitted = np.linalg.lstsq(inputs[:1257], wanted[:1257], rcond=None)[0].astype("f4")

with ts.connect(options.address) as t:
    t.put(fitted[:-1], "model/weights", replace=True, ttl="10m")
    t.put(fitted[-1], "model/bias", replace=True, ttl="10m")

# %% [markdown]
# Each caller is a task, and all callers share one connection. A request is one program: a product,
# an addition and an argmax. 256 bytes go to the server, and an index comes back.

# %%
latencies, correct, asked = [], 0, 0


async def caller(weights, bias, number, end):
    global correct, asked
    which = 1257 + number
    while time.perf_counter() < end:
        begin = time.perf_counter()
        scores = images[which] @ weights + bias
        found = await scores.argmax().item()
        latencies.append(time.perf_counter() - begin)
        correct += found == labels[which]
        asked += 1
        which = 1257 + (which - 1257 + options.callers) % 540


async def serve():
    async with await ts.aio.connect(options.address) as t:
        weights, bias = await asyncio.gather(t.get("model/weights"), t.get("model/bias"))
        end = time.perf_counter() + options.seconds
        await asyncio.gather(*(caller(weights, bias, i, end) for i in range(options.callers)))
        await asyncio.gather(weights.delete(), bias.delete())


asyncio.run(serve())
p50, p99 = (1e3 * np.quantile(latencies, q) for q in (0.5, 0.99))
rate = asked / options.seconds
print(f"{options.callers} callers: {rate:.0f} answers/s, p50 {p50:.1f} ms, p99 {p99:.1f} ms")

# %% [markdown]
# This cell compares the accuracy with that of NumPy's results for all images:

# %%
expected = ((images[1257:] @ fitted[:-1] + fitted[-1]).argmax(axis=1) == labels[1257:]).mean()
print(f"accuracy {correct / asked:.3f}, with NumPy {expected:.3f}")
assert abs(correct / asked - expected) < 0.1

# %%
if options.plot:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3))
    axes.hist(np.array(latencies) * 1e3, bins=60)
    axes.set_xlabel("ms from request to answer")
    axes.set_ylabel("requests")
    figure.tight_layout()
    figure.savefig(options.plot)
