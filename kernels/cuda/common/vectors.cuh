// Walks over elements in 16-byte vectors, the widest loads of a thread. The reductions along axes
// and TopK share this code. A thread owns vectors at a fixed stride and loads several of them
// before it uses the first. It folds the elements at position v of its vectors in chain v, so the
// elements of one vector do not wait for each other.
//
//   vectors   [a0 a1 a2 a3]   [b0 b1 b2 b3]   [c0 c1 c2 c3]
//   chain 0    a0 b0 c0        chain 1   a1 b1 c1        ...
//
// The elements that a thread owns, and therefore the order of the fold, do not depend on addresses.
// Vectors that are not aligned to 16 bytes are assembled from the two aligned vectors that they
// straddle. The next thread loads the second of these two as well, so that load hits the L1 cache.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/cuda/common/loads.cuh"
#include "kernels/cuda/common/primitives.cuh"

namespace tessera {

// The number of elements in a vector.
template <class T>
inline constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(T));

// The vectors that one thread folds.
template <class T>
struct Walk {
  const T* first;
  std::int64_t stride;  // elements from one vector to the next
  std::int64_t count;   // number of vectors
  int each;             // valid elements of every vector but the last, 0 to kVector<T>
  int last;             // valid elements of the last vector; <= each
  const T* end;         // end of the array; nothing at or after it is read

  __device__ int Valid(std::int64_t k) const {
    return k < count - 1 ? each : k == count - 1 ? last : 0;
  }
  // The number of elements that chain v folds.
  __device__ std::int64_t ChainLength(int v) const {
    return v < last ? count : v < each && count > 0 ? count - 1 : 0;
  }
};

// Returns the walk of thread `thread` over an array of n elements, which 2^thread_bits threads
// share. The vectors of the threads are interleaved.
template <class T>
__device__ Walk<T> WalkArray(const T* x, std::int64_t n, int thread, int thread_bits) {
  constexpr int kWide = kVector<T>;
  const std::int64_t vectors = (n + kWide - 1) / kWide;
  const int rest = static_cast<int>(n % kWide);
  Walk<T> walk{.first = x + thread * kWide,
               .stride = std::int64_t{kWide} << thread_bits,
               .count = 0,
               .each = kWide,
               .last = kWide,
               .end = x + n};
  if (thread < vectors) {
    walk.count = ((vectors - 1 - thread) >> thread_bits) + 1;
    const bool owns_last = ((vectors - 1 - thread) & ((1 << thread_bits) - 1)) == 0;
    if (owns_last && rest != 0) walk.last = rest;
  }
  return walk;
}

// --- Loads ---

// Returns element v of a vector. v is a constant once the caller's loop is unrolled.
template <class T>
__device__ T ElementOf(const uint4& vector, int v) {
  T elements[kVector<T>];
  std::memcpy(elements, &vector, sizeof vector);
  return elements[v];
}

// Returns a vector of the first `valid` elements at `from`, filled up with `other`.
template <class T>
__device__ uint4 LoadElements(const T* from, int valid, T other) {
  T elements[kVector<T>];
#pragma unroll
  for (int v = 0; v < kVector<T>; ++v) elements[v] = v < valid ? from[v] : other;
  uint4 vector;
  std::memcpy(&vector, elements, sizeof vector);
  return vector;
}

// Loads vectors k to k + kCount - 1 of the walk. Elements that are not valid become `other`.
template <int kCount, class T>
__device__ void LoadVectors(const Walk<T>& walk, std::int64_t k, T other,
                            uint4 (&vectors)[kCount]) {
  constexpr int kWide = kVector<T>;
  const T* from = walk.first + k * walk.stride;
  const auto misaligned =
      (reinterpret_cast<std::uintptr_t>(walk.first) | walk.stride * sizeof(T)) % kVectorBytes;
  const bool whole = walk.each == kWide && k + kCount <= walk.count - (walk.last < kWide);
  if (whole && misaligned == 0) {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      vectors[j] = __ldg(reinterpret_cast<const uint4*>(from + j * walk.stride));
  } else if (whole && from + (kCount - 1) * walk.stride + 2 * kWide <= walk.end) {
    constexpr int kPart = kCount >= 8 ? kCount / 2 : kCount;  // registers cannot hold more
#pragma unroll
    for (int part = 0; part < kCount; part += kPart) {
      uint4 low[kPart], high[kPart];
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        const auto address = reinterpret_cast<std::uintptr_t>(from + (part + j) * walk.stride);
        const auto* aligned = reinterpret_cast<const uint4*>(address & ~std::uintptr_t{15});
        low[j] = __ldg(aligned);
        high[j] = __ldg(aligned + 1);
      }
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        const auto address = reinterpret_cast<std::uintptr_t>(from + (part + j) * walk.stride);
        vectors[part + j] =
            Realigned<sizeof(T)>(low[j], high[j], static_cast<unsigned>(address % kVectorBytes));
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int valid = walk.Valid(k + j);
      if (valid == kWide && misaligned == 0) {
        vectors[j] = __ldg(reinterpret_cast<const uint4*>(from + j * walk.stride));
      } else {
        vectors[j] = LoadElements(from + j * walk.stride, valid, other);
      }
    }
  }
}

// --- Chains ---

// Returns an element that changes no result of F, a Fold<op, T>. A variance has no such element,
// because it counts its elements.
template <class F, class T>
__device__ T NeutralElement() {
  if constexpr (F::kArg) {
    return static_cast<T>(F::Identity().value);
  } else if constexpr (std::is_class_v<typename F::Wide>) {
    return static_cast<T>(typename F::Value{0});
  } else {
    return static_cast<T>(static_cast<typename F::Value>(F::Identity()));
  }
}

// The state of a thread that folds elements one after another. REQUIRES: at most kMaxChain elements
// between two calls to Flush.
template <class F, class T>
class ThreadFold {
 public:
  using Acc = typename F::Acc;
  using Wide = typename F::Wide;

  __device__ void Add(T element, std::uint32_t) { acc_ = F::Combine(acc_, F::Load(element, 0)); }
  // Adds the product of two elements, for a dot product.
  __device__ void AddProduct(T a, T b) { acc_ = F::Combine(acc_, F::Multiply(a, b)); }
  __device__ void Begin(T) {}
  __device__ void Flush(std::int64_t, std::int64_t) {
    if constexpr (!std::is_same_v<Acc, Wide>) {
      total_ = F::Combine(total_, F::Widen(acc_));
      acc_ = F::template Identity<Acc>();
    }
  }
  // index(step) returns the input index of that step's element.
  template <class Index>
  __device__ Wide Value(std::int64_t, Index) const {
    if constexpr (std::is_same_v<Acc, Wide>) {
      return acc_;
    } else {
      return total_;
    }
  }

 private:
  Acc acc_ = F::template Identity<Acc>();
  Wide total_ = F::template Identity<Wide>();
};

// Keeps the extreme value and the step at which it was first seen. Steps ascend, so an element
// replaces an earlier one only if it is better. The first NaN stays.
template <class F, class T>
requires(F::kArg) class ThreadFold<F, T> {
 public:
  using Wide = typename F::Wide;

  __device__ void Add(T element, std::uint32_t step) {
    const auto x = static_cast<typename F::Value>(element);
    if (!Stays<F::kLargest>(value_, x)) {
      value_ = x;
      step_ = step;
    }
  }
  __device__ void Begin(T) {}
  __device__ void Flush(std::int64_t, std::int64_t) {}
  template <class Index>
  __device__ Wide Value(std::int64_t count, Index index) const {
    if (count == 0) return F::Identity();
    return {value_, index(step_)};
  }

 private:
  typename F::Value value_ = F::Identity().value;
  std::uint32_t step_ = 0;
};

// Computes the moments of up to kMaxChain elements at a time, from the sum of the elements'
// differences from `shift` and the sum of the squares of these differences. This takes two
// additions and a multiplication per element, whereas merging moments takes divisions. `shift` is
// the mean so far, or initially the first element. The differences are therefore about as large as
// the deviations from the mean, and nothing cancels.
template <class F, class T>
requires(kIsMoments<typename F::Wide>) class ThreadFold<F, T> {
 public:
  using Wide = typename F::Wide;

  __device__ void Begin(T first) {
    shift_ = fresh_ ? static_cast<double>(static_cast<typename F::Value>(first)) : mean_.value;
    sum_ = 0;
    squares_ = {};
  }
  __device__ void Add(T element, std::uint32_t) {
    const Pair x = ExactPair(static_cast<typename F::Value>(element));
    const double apart = (x.value - shift_) + x.lost;
    sum_ += apart;
    AddSquare(squares_, apart);
  }
  __device__ void Flush(std::int64_t before, std::int64_t count) {
    if (count == 0) return;
    const auto n = static_cast<double>(count);
    const double mean = sum_ / n;
    const Wide all = F::Combine(Wide{static_cast<double>(before), mean_, deviations_},
                                Wide{n, TwoSum(shift_, mean), DeviationsOf(squares_, sum_, mean)});
    mean_ = all.mean;
    deviations_ = all.deviations;
    fresh_ = false;
  }
  template <class Index>
  __device__ Wide Value(std::int64_t count, Index) const {
    return {static_cast<double>(count), mean_, deviations_};
  }

 private:
  using Squares = decltype(Wide::deviations);
  bool fresh_ = true;
  double shift_ = 0, sum_ = 0;
  Squares squares_ = {};
  Pair mean_ = {};
  Squares deviations_ = {};
};

// The number of vectors that a thread loads before it uses the first. With at least 512 threads per
// SM, 8 vectors of 16 bytes per thread are at least 64 KiB. An H200's memory requires about 48 KiB
// in flight.
inline constexpr int kVectorsInFlight = 8;

// Folds the walk's elements. The elements at position v of their vectors go to chains[v].
template <class F, class T>
__device__ void FoldWalk(const Walk<T>& walk, ThreadFold<F, T> (&chains)[kVector<T>]) {
  constexpr bool kCounts = kIsMoments<typename F::Wide>;
  static_assert(kMaxChain % kVectorsInFlight == 0);
  const T neutral = NeutralElement<F, T>();
  for (std::int64_t begin = 0; begin < walk.count; begin += kMaxChain) {
    const std::int64_t end = min(walk.count, begin + kMaxChain);
    for (std::int64_t k = begin; k < end; k += kVectorsInFlight) {
      uint4 vectors[kVectorsInFlight];
      LoadVectors(walk, k, neutral, vectors);
      if (kCounts && k == begin) {
#pragma unroll
        for (int v = 0; v < kVector<T>; ++v) chains[v].Begin(ElementOf<T>(vectors[0], v));
      }
#pragma unroll
      for (int j = 0; j < kVectorsInFlight; ++j) {
        const int valid = kCounts ? walk.Valid(k + j) : kVector<T>;
#pragma unroll
        for (int v = 0; v < kVector<T>; ++v) {
          if (v < valid)
            chains[v].Add(ElementOf<T>(vectors[j], v), static_cast<std::uint32_t>(k + j));
        }
      }
    }
#pragma unroll
    for (int v = 0; v < kVector<T>; ++v) {
      const std::int64_t length = walk.ChainLength(v);
      chains[v].Flush(begin, max(std::int64_t{0}, min(end, length) - begin));
    }
  }
}

// Like FoldWalk, for a walk whose vectors are all whole and aligned. The loop needs one moving
// address and no tests, so eight loads in flight leave enough registers for four blocks of 256
// threads per SM.
template <class F, class T>
__device__ void FoldWholeWalk(const Walk<T>& walk, ThreadFold<F, T> (&chains)[kVector<T>]) {
  const auto* next = reinterpret_cast<const unsigned char*>(walk.first);
  const std::int64_t stride = walk.stride * static_cast<std::int64_t>(sizeof(T));
  // Folds the next `count` vectors (at most kVectorsInFlight). The first of them is step `step`.
  const auto fold = [&](std::uint32_t step, int count, bool begin) {
    uint4 vectors[kVectorsInFlight];
#pragma unroll
    for (int j = 0; j < kVectorsInFlight; ++j) {
      vectors[j] = LoadAligned<Load::kOnce>(next);
      // The last vector is loaded again, because that takes fewer registers than skipping the load.
      if (j + 1 < count) next += stride;
    }
    next += stride;
    if (begin) {
#pragma unroll
      for (int v = 0; v < kVector<T>; ++v) chains[v].Begin(ElementOf<T>(vectors[0], v));
    }
#pragma unroll
    for (int j = 0; j < kVectorsInFlight; ++j) {
      if (j >= count) break;
#pragma unroll
      for (int v = 0; v < kVector<T>; ++v) chains[v].Add(ElementOf<T>(vectors[j], v), step + j);
    }
  };
#pragma unroll 1
  for (std::int64_t begin = 0; begin < walk.count; begin += kMaxChain) {
    const auto count = static_cast<int>(min(walk.count - begin, std::int64_t{kMaxChain}));
    const auto step = static_cast<std::uint32_t>(begin);
    int k = 0;
#pragma unroll 1
    for (; k + kVectorsInFlight <= count; k += kVectorsInFlight)
      fold(step + k, kVectorsInFlight, k == 0);
    if (k < count) fold(step + k, count - k, k == 0);
#pragma unroll
    for (int v = 0; v < kVector<T>; ++v) chains[v].Flush(begin, count);
  }
}

// Folds the chains of a thread into one value. index(step, v) returns the input index of the
// element at position v of that step's vector.
template <class F, class T, class Index>
__device__ typename F::Wide FoldChains(const Walk<T>& walk,
                                       const ThreadFold<F, T> (&chains)[kVector<T>], Index index) {
  typename F::Wide values[kVector<T>];
#pragma unroll
  for (int v = 0; v < kVector<T>; ++v)
    values[v] = chains[v].Value(walk.ChainLength(v), [=](std::uint32_t k) { return index(k, v); });
#pragma unroll
  for (int half = kVector<T> / 2; half > 0; half /= 2) {
#pragma unroll
    for (int v = 0; v < half; ++v) values[v] = F::Combine(values[v], values[v + half]);
  }
  return values[0];
}

// Returns the number of steps in Fold::Wide that FoldWalk and FoldChains take for `vectors` vectors
// of elements with `bytes` bytes each.
inline std::int64_t WalkSteps(std::int64_t vectors, std::size_t bytes) {
  return CeilDiv(vectors, kMaxChain) + CeilLog2(kVectorBytes / static_cast<std::int64_t>(bytes));
}

}  // namespace tessera
