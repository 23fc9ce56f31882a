// The textbook's decompositions, written once for a core and for a block of GPU threads. A Team
// computes one matrix. It has these functions:
//   Each(first, end, f)   calls f(i) for all i in [first, end), divided among all threads.
//   Rows(first, end, f)   divides the calls among groups of threads; all threads of a group make
//                         the same call.
//   Lanes(first, end, f)  divides the calls among the threads of one group.
//   Sum(value), Most(value, index)   the sum of the group's values, and the index with the largest
//                         value, of equal ones the lowest; every thread of the group gets them.
//   Sync()                waits for all threads of the team.
// kTile is the number of adjacent columns that one thread reflects together.
// Matrices are row-major. All threads return the same. Every group computes what all groups need,
// such as a pivot, so there is one barrier before and one after each change of the matrix.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/base/element.h"
#include "kernels/problem/linalg.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// The team of a single core.
struct OneThread {
  static constexpr int kTile = 64;

  template <class F>
  void Each(std::int64_t first, std::int64_t end, const F& f) const {
    for (std::int64_t i = first; i < end; ++i) f(i);
  }
  template <class F>
  void Rows(std::int64_t first, std::int64_t end, const F& f) const {
    Each(first, end, f);
  }
  template <class F>
  void Lanes(std::int64_t first, std::int64_t end, const F& f) const {
    Each(first, end, f);
  }
  template <class T>
  T Sum(T value) const {
    return value;
  }
  template <class T>
  std::int64_t Most(T, std::int64_t index) const {
    return index;
  }
  void Sync() const {}
};

// Returns how many elements of scratch memory a team needs for one matrix.
TESSERA_HD inline std::int64_t DirectWork(const LinalgProblem& p) {
  const std::int64_t n = p.n;
  switch (p.function) {
    case LinalgFunction::kCholesky:
    case LinalgFunction::kDeterminant:
      return n * n;
    case LinalgFunction::kSolve:
      return n * (n + p.columns);
    case LinalgFunction::kInverse:
      return 2 * n * n;
    case LinalgFunction::kEigh:
      return 2 * n * n + n + 1;
    case LinalgFunction::kQr:
      return p.m * n + p.least() * (p.m + 1);
    default:
      return 0;
  }
}

// Overwrites the upper triangle of the symmetric a[n, n] with the transpose of L, row by row (Golub
// and Van Loan, algorithm 4.2.2: outer products). Returns whether the matrix is positive definite.
template <class T, class Team>
TESSERA_HD bool Cholesky(const Team& team, T* a, std::int64_t n) {
  for (std::int64_t j = 0; j < n; ++j) {
    T* const row = a + j * n;
    const T pivot = row[j];
    if (!(pivot > 0 && pivot - pivot == 0)) return false;  // not positive and finite
    const T root = std::sqrt(pivot);
    team.Sync();
    team.Each(j, n, [&](std::int64_t c) { row[c] = c == j ? root : row[c] / root; });
    team.Sync();
    team.Rows(j + 1, n, [&](std::int64_t i) {
      const T factor = row[i];
      team.Lanes(i, n, [&](std::int64_t c) { a[i * n + c] -= factor * row[c]; });
    });
    team.Sync();
  }
  return true;
}

// Makes the first n columns of a[n, width] upper triangular by elimination with row pivots (Golub
// and Van Loan, algorithm 3.4.1), and does the same to the other columns. What it leaves below the
// diagonal has no meaning. Returns the sign of the permutation, or 0 if the matrix is singular.
template <class T, class Team>
TESSERA_HD int Eliminate(const Team& team, T* a, std::int64_t n, std::int64_t width) {
  int sign = 1;
  for (std::int64_t j = 0; j < n; ++j) {
    T best = -1;
    std::int64_t row = j;
    team.Lanes(j, n, [&](std::int64_t i) {
      const T size = std::abs(a[i * width + j]);
      if (size > best) best = size, row = i;
    });
    row = team.Most(best, row);
    const T pivot = a[row * width + j];
    if (pivot == 0) return 0;
    team.Sync();
    if (row != j) {
      sign = -sign;
      team.Each(0, width, [&](std::int64_t c) {
        const T other = a[row * width + c];
        a[row * width + c] = a[j * width + c];
        a[j * width + c] = other;
      });
      team.Sync();
    }
    team.Rows(j + 1, n, [&](std::int64_t i) {
      const T factor = a[i * width + j] / pivot;
      team.Lanes(j + 1, width,
                 [&](std::int64_t c) { a[i * width + c] -= factor * a[j * width + c]; });
    });
    team.Sync();
  }
  return sign;
}

// Solves the triangular system that Eliminate leaves: overwrites columns n and above of a[n, width]
// with the solutions (Golub and Van Loan, algorithm 3.1.4).
template <class T, class Team>
TESSERA_HD void SubstituteBack(const Team& team, T* a, std::int64_t n, std::int64_t width) {
  for (std::int64_t j = n - 1; j >= 0; --j) {
    const T pivot = a[j * width + j];
    team.Each(n, width, [&](std::int64_t c) { a[j * width + c] /= pivot; });
    team.Sync();
    team.Rows(0, j, [&](std::int64_t i) {
      const T factor = a[i * width + j];
      team.Lanes(n, width, [&](std::int64_t c) { a[i * width + c] -= factor * a[j * width + c]; });
    });
    team.Sync();
  }
}

// Applies the reflection I - tau v v' to columns [first, end) of a[m, width], which are at most
// kTile. v is 0 above row j, 1 in row j, and column j of vectors[m, pitch] below.
template <int kTile, class T>
TESSERA_HD void Reflect(T* a, std::int64_t m, std::int64_t width, std::int64_t first,
                        std::int64_t end, const T* vectors, std::int64_t pitch, std::int64_t j,
                        T tau) {
  T along[kTile];
  for (std::int64_t c = first; c < end; ++c) along[c - first] = a[j * width + c];
  for (std::int64_t i = j + 1; i < m; ++i) {
    const T factor = vectors[i * pitch + j];
    for (std::int64_t c = first; c < end; ++c) along[c - first] += factor * a[i * width + c];
  }
  for (std::int64_t c = first; c < end; ++c) {
    along[c - first] *= tau;
    a[j * width + c] -= along[c - first];
  }
  for (std::int64_t i = j + 1; i < m; ++i) {
    const T factor = vectors[i * pitch + j];
    for (std::int64_t c = first; c < end; ++c) a[i * width + c] -= factor * along[c - first];
  }
}

// Overwrites a[m, n] with R and, below its diagonal, the vectors of the reflections whose factors
// are in taus, and q[m, k] with Q (Golub and Van Loan, algorithms 5.1.1 and 5.2.1).
template <class T, class Team>
TESSERA_HD void Qr(const Team& team, T* a, T* q, T* taus, std::int64_t m, std::int64_t n) {
  constexpr int kTile = Team::kTile;
  const std::int64_t k = m < n ? m : n;
  for (std::int64_t j = 0; j < k; ++j) {
    // Elements are divided by the largest one, so that no square overflows.
    T scale = 0;
    std::int64_t row = j;
    team.Lanes(j, m, [&](std::int64_t i) {
      const T size = std::abs(a[i * n + j]);
      if (!(size <= scale)) scale = size, row = i;
    });
    scale = std::abs(a[team.Most(scale, row) * n + j]);
    T below = 0;
    team.Lanes(j + 1, m, [&](std::int64_t i) {
      const T part = scale == 0 ? 0 : a[i * n + j] / scale;
      below += part * part;
    });
    below = team.Sum(below);
    const T head = a[j * n + j], part = scale == 0 ? 0 : head / scale;
    const T length = scale * std::sqrt(part * part + below);
    const T diagonal = below == 0 ? head : head > 0 ? -length : length;
    const T tau = below == 0 ? 0 : (diagonal - head) / diagonal;
    team.Sync();
    if (below != 0) team.Each(j + 1, m, [&](std::int64_t i) { a[i * n + j] /= head - diagonal; });
    team.Each(j, j + 1, [&](std::int64_t) {
      a[j * n + j] = diagonal;
      taus[j] = tau;
    });
    team.Sync();
    team.Each(0, (n - j - 1 + kTile - 1) / kTile, [&](std::int64_t tile) {
      const std::int64_t first = j + 1 + tile * kTile, end = first + kTile;
      Reflect<kTile>(a, m, n, first, end < n ? end : n, a, n, j, tau);
    });
    team.Sync();
  }
  team.Each(0, m * k, [&](std::int64_t i) { q[i] = i / k == i % k; });
  team.Sync();
  for (std::int64_t j = k - 1; j >= 0; --j) {
    team.Each(0, (k - j + kTile - 1) / kTile, [&](std::int64_t tile) {
      const std::int64_t first = j + tile * kTile, end = first + kTile;
      Reflect<kTile>(q, m, k, first, end < k ? end : k, a, n, j, taus[j]);
    });
    team.Sync();
  }
}

// The rotation that makes an off-diagonal element 0.
template <class T>
struct Rotation {
  T cosine = 1;
  T sine = 0;
};

// Returns the two players of pair i in a round of a tournament of n players, in which everyone
// meets everyone else once in n - 1 rounds. n is even.
struct Players {
  std::int64_t p, q;

  TESSERA_HD Players(std::int64_t n, std::int64_t round, std::int64_t i) {
    p = i == 0 ? n - 1 : (round + i) % (n - 1);
    q = i == 0 ? round : (round - i + n - 1) % (n - 1);
  }
};

// Makes the symmetric a[n, n] diagonal, and sets the columns of v[n, n] to its eigenvectors. Uses
// n + 1 elements at `rotations`. All pairs of a round rotate together (Golub and Van Loan, section
// 8.5: parallel cyclic Jacobi). The elements are divided by the largest one, so that none overflows
// or vanishes. Returns the largest one, or 0 if an element is not finite or the rotations do not
// converge. A matrix of zeros counts as divided by 1.
template <class T, class Team>
TESSERA_HD T Jacobi(const Team& team, T* a, T* v, Rotation<T>* rotations, std::int64_t n) {
  constexpr int kMostSweeps = 40;
  constexpr T kSmall = std::numeric_limits<T>::epsilon() / 4;
  const std::int64_t count = n + n % 2;
  team.Each(0, n * n, [&](std::int64_t i) { v[i] = i / n == i % n; });
  T largest = -1, odd = 0;
  std::int64_t place = 0;
  team.Lanes(0, n * n, [&](std::int64_t i) {
    const T size = std::abs(a[i]);
    odd += size - size;  // NaN unless the element is finite
    if (size > largest) largest = size, place = i;
  });
  if (!(team.Sum(odd) == 0)) return 0;
  largest = std::abs(a[team.Most(largest, place)]);
  if (largest == 0) largest = 1;
  team.Sync();
  team.Each(0, n * n, [&](std::int64_t i) { a[i] /= largest; });
  for (int sweep = 0; sweep < kMostSweeps; ++sweep) {
    team.Sync();
    T left = 0;
    team.Lanes(0, n * n,
               [&](std::int64_t i) { left += i / n != i % n && std::abs(a[i]) > kSmall; });
    if (team.Sum(left) == 0) return largest;
    for (std::int64_t round = 0; round < count - 1; ++round) {
      team.Sync();
      team.Each(0, count / 2, [&](std::int64_t i) {
        const Players pair(count, round, i);
        Rotation<T> rotation;
        if (pair.p < n && pair.q < n && a[pair.p * n + pair.q] != 0) {
          const T middle = a[pair.p * n + pair.q];
          const T ratio = (a[pair.q * n + pair.q] / 2 - a[pair.p * n + pair.p] / 2) / middle;
          const T tangent = (ratio < 0 ? -1 : 1) / (std::abs(ratio) + std::sqrt(ratio * ratio + 1));
          rotation.cosine = 1 / std::sqrt(tangent * tangent + 1);
          rotation.sine = tangent * rotation.cosine;
        }
        rotations[i] = rotation;
      });
      team.Sync();
      team.Rows(0, count / 2, [&](std::int64_t i) {
        const Players pair(count, round, i);
        const Rotation<T> by = rotations[i];
        if (by.sine == 0) return;
        team.Lanes(0, n, [&](std::int64_t c) {
          const T x = a[pair.p * n + c], y = a[pair.q * n + c];
          a[pair.p * n + c] = by.cosine * x - by.sine * y;
          a[pair.q * n + c] = by.sine * x + by.cosine * y;
        });
      });
      team.Sync();
      team.Rows(0, n, [&](std::int64_t r) {
        team.Lanes(0, count / 2, [&](std::int64_t i) {
          const Players pair(count, round, i);
          const Rotation<T> by = rotations[i];
          if (by.sine == 0) return;
          const auto rotate = [&](T* row) {
            const T x = row[pair.p], y = row[pair.q];
            row[pair.p] = by.cosine * x - by.sine * y;
            row[pair.q] = by.sine * x + by.cosine * y;
          };
          rotate(a + r * n);
          rotate(v + r * n);
          // Rounding errors would leave something of the elements that the rotation makes 0.
          if (r == pair.p) a[r * n + pair.q] = 0;
          if (r == pair.q) a[r * n + pair.p] = 0;
        });
      });
    }
  }
  return 0;
}

// Computes the result of one matrix. `work` has DirectWork elements. Returns whether there is one.
// `x`, `b` and `out` are those of this matrix.
template <class T, class Team>
TESSERA_HD bool Direct(const Team& team, const LinalgProblem& p, const T* x, const T* b, T* out,
                       T* work) {
  const std::int64_t m = p.m, n = p.n, k = p.least();
  switch (p.function) {
    case LinalgFunction::kCholesky:
      team.Rows(0, n, [&](std::int64_t i) {
        team.Lanes(0, i + 1, [&](std::int64_t c) { work[c * n + i] = x[i * n + c]; });
      });
      team.Sync();
      if (!Cholesky(team, work, n)) return false;
      team.Rows(0, n, [&](std::int64_t i) {
        team.Lanes(0, n, [&](std::int64_t c) { out[i * n + c] = c > i ? 0 : work[c * n + i]; });
      });
      return true;
    case LinalgFunction::kSolve:
    case LinalgFunction::kInverse: {
      const bool solves = p.function == LinalgFunction::kSolve;
      const std::int64_t columns = solves ? p.columns : n, width = n + columns;
      team.Rows(0, n, [&](std::int64_t i) {
        team.Lanes(0, width, [&](std::int64_t c) {
          work[i * width + c] = c < n    ? x[i * n + c]
                                : solves ? b[i * columns + c - n]
                                         : static_cast<T>(c - n == i);
        });
      });
      team.Sync();
      if (Eliminate(team, work, n, width) == 0) return false;
      SubstituteBack(team, work, n, width);
      team.Rows(0, n, [&](std::int64_t i) {
        team.Lanes(0, columns,
                   [&](std::int64_t c) { out[i * columns + c] = work[i * width + n + c]; });
      });
      return true;
    }
    case LinalgFunction::kDeterminant: {
      team.Each(0, n * n, [&](std::int64_t i) { work[i] = x[i]; });
      team.Sync();
      T sign = static_cast<T>(Eliminate(team, work, n, n));
      T log = sign == 0 ? -std::numeric_limits<T>::infinity() : 0;
      for (std::int64_t i = 0; sign != 0 && i < n; ++i) {
        const T pivot = work[i * n + i];
        if (!(pivot > 0)) sign = pivot < 0 ? -sign : pivot;
        log += std::log(std::abs(pivot));
      }
      team.Each(0, 2, [&](std::int64_t i) { out[i] = i == 0 ? sign : log; });
      return true;
    }
    case LinalgFunction::kEigh: {
      T *a = work, *v = work + n * n;
      team.Each(0, n * n, [&](std::int64_t i) {
        const std::int64_t r = i / n, c = i % n;
        a[i] = r < c ? x[c * n + r] : x[i];
      });
      team.Sync();
      const T unit = Jacobi(team, a, v, reinterpret_cast<Rotation<T>*>(work + 2 * n * n), n);
      if (unit == 0) return false;
      team.Rows(0, n, [&](std::int64_t j) {
        const T value = a[j * n + j];
        T before = 0;
        team.Lanes(0, n, [&](std::int64_t i) {
          const T other = a[i * n + i];
          before += other < value || (other == value && i < j);
        });
        const auto rank = static_cast<std::int64_t>(team.Sum(before));
        team.Lanes(0, n + 1, [&](std::int64_t i) {
          out[i * n + rank] = i == 0 ? value * unit : v[(i - 1) * n + j];
        });
      });
      return true;
    }
    case LinalgFunction::kQr: {
      T *a = work, *q = work + m * n, *taus = q + m * k;
      team.Each(0, m * n, [&](std::int64_t i) { a[i] = x[i]; });
      team.Sync();
      Qr(team, a, q, taus, m, n);
      team.Each(0, m * k, [&](std::int64_t i) { out[i] = q[i]; });
      team.Each(0, n * k, [&](std::int64_t i) {
        const std::int64_t c = i / k, r = i % k;
        out[m * k + i] = r > c ? 0 : a[r * n + c];
      });
      return true;
    }
    default:
      return false;
  }
}

// The own strategies have no singular value decomposition.
inline std::string RefusesSvd(const LinalgProblem& p) {
  return p.function == LinalgFunction::kSvd ? "a function other than svd" : "";
}

// Returns the seconds that a core needs for a matrix: in a cache it computes about 6 operations per
// nanosecond, and 2 of a rotation. Jacobi's method takes about nine sweeps of 6 n^3 operations
// each.
inline double DirectSeconds(const LinalgProblem& p) {
  const double flops = LinalgFlops(p);
  const double seconds = p.function == LinalgFunction::kEigh ? 6 * flops / 2e9 : flops / 6e9;
  return seconds + 3e-9 * static_cast<double>(p.n + p.m);
}

}  // namespace tessera
