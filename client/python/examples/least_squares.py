"""Least squares by conjugate gradients: the matrix and the vectors stay on the server, ten rounds
are one program, and each program returns one number.

usage: least_squares.py [ADDRESS] [--rows 2000] [--columns 50] [--plot FILE.svg]
"""

# %% [markdown]
# The x that minimises |A x - b| solves A'A x = A'b. To find it, the method of conjugate gradients
# needs only products with A and with A'.

# %%
import argparse

import numpy as np

import tessera as ts

parser = argparse.ArgumentParser()
parser.add_argument("address", nargs="?", default="127.0.0.1:50051")
parser.add_argument("--rows", type=int, default=2000)
parser.add_argument("--columns", type=int, default=50)
parser.add_argument("--plot")
options = parser.parse_args()
random = np.random.default_rng(2)
matrix = random.standard_normal((options.rows, options.columns))
noise = 0.1 * random.standard_normal(options.rows)
right = matrix @ random.standard_normal(options.columns) + noise
t = ts.connect(options.address)
a, b = t.put(matrix), t.put(right)

# %% [markdown]
# The divisions also run on the server, because alpha and beta are parts of the program. Both are 0
# if r is 0. `keep` leaves x, the residual r, the direction p and the squared length of r on the
# server; only that squared length is downloaded.

# %%
(r,) = t.keep(a.T @ b)
x, p, rho = np.zeros_like(r), r, r.dot(r)
lengths = []
for _ in range(10):
    for _ in range(10):
        q = a.T @ (a @ p)
        alpha = np.where(rho > 0, rho / p.dot(q), 0)
        x, r = x + alpha * p, r - alpha * q
        before, rho = rho, r.dot(r)
        p = r + np.where(before > 0, rho / before, 0) * p
    x, r, p, rho = t.keep(x, r, p, rho)
    lengths.append(float(rho) ** 0.5)
    print(f"after {10 * len(lengths):3} rounds |A'(b - A x)| = {lengths[-1]:.1e}")
    if lengths[-1] < 1e-9:
        break

# %%
expected = np.linalg.lstsq(matrix, right, rcond=None)[0]
error = np.abs(x.numpy() - expected).max()
print(f"largest difference from NumPy {error:.1e}")
assert error < 1e-9

# %%
if options.plot:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3))
    axes.semilogy(range(10, 10 * len(lengths) + 1, 10), lengths, "o-")
    axes.set_xlabel("rounds")
    axes.set_ylabel("|A'(b - A x)|")
    figure.tight_layout()
    figure.savefig(options.plot)
t.close()
