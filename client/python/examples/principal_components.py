"""Principal components by power iteration: all rounds are one program, and only the result
leaves the server.

usage: principal_components.py [ADDRESS] [--plot FILE.svg]
"""

# %% [markdown]
# The first principal component is the direction in which the data vary most: the eigenvector of the
# largest eigenvalue of their covariance matrix C. Power iteration finds it by repeating v <- C v /
# |C v|. The second component is the first component of the remainder, C - l v v'.

# %%
import argparse
import pathlib

import numpy as np

import tessera as ts

parser = argparse.ArgumentParser()
parser.add_argument("address", nargs="?", default="127.0.0.1:50051")
parser.add_argument("--plot")
options = parser.parse_args()
data = pathlib.Path(__file__).resolve().parents[2] / "demo"
images, labels = np.load(data / "digits.npy"), np.load(data / "labels.npy")
t = ts.connect(options.address)

# %% [markdown]
# The centred images, and their covariance in f64, are two arrays that stay on the server.

# %%
digits = t.put(images).astype("f64")
x, covariance = t.keep(
    digits - digits.mean(axis=0),
    (digits - digits.mean(axis=0)).T @ (digits - digits.mean(axis=0)) / len(images),
)

# %% [markdown]
# Each component takes two hundred rounds. The division by the length is part of the program, so no
# number has to come back between rounds. `compute` sends all expressions together. A part that
# several results share is computed only once.


# %%
def leading(matrix, rounds=200):
    """Returns an eigenvector of the largest eigenvalue, and that eigenvalue. Sends nothing."""
    v = np.full(64, 0.125)
    for _ in range(rounds):
        w = matrix @ v
        v = w / ts.norm(w)
    return v, v.dot(matrix @ v)


first, variance1 = leading(covariance)
rest = covariance - variance1 * np.outer(first, first)
second, variance2 = leading(rest)
components = [first, second]
results = t.compute(first, second, variance1, variance2, x @ first, x @ second)
program = (x @ second).explain().splitlines()
print(program[0])
print("\n".join(program[1:5]), "\n...")

# %% [markdown]
# This cell compares the variances with NumPy's eigenvalues of the same matrix:

# %%
v1, v2, l1, l2, score1, score2 = results
values, vectors = np.linalg.eigh(np.cov(images.astype(float).T, bias=True))
print(f"variances {float(l1):.3f} {float(l2):.3f}, NumPy {values[-1]:.3f} {values[-2]:.3f}")
assert abs(float(l1) / values[-1] - 1) < 1e-6 and abs(float(l2) / values[-2] - 1) < 1e-4
assert abs(abs(v1 @ vectors[:, -1]) - 1) < 1e-6 and abs(abs(v2 @ vectors[:, -2]) - 1) < 1e-3

# %%
if options.plot:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4.5))
    points = axes.scatter(score1, score2, c=labels, cmap="tab10", s=6, rasterized=True)
    figure.colorbar(points, label="digit")
    axes.set_xlabel("first component")
    axes.set_ylabel("second component")
    figure.tight_layout()
    figure.savefig(options.plot)
t.close()
