// A product whose rows are divided among several GPUs. a and c stay where they are. The copy
// engines copy the part of b that is on other GPUs to each GPU's scratch memory, a few columns at a
// time. In the meantime, the columns that have already arrived are multiplied:
//
//      copy engines   b0 | b1 | b2 | ..
//      SMs                 b0    | b1    | b2 ..
//
// A kernel that reads b from another GPU's memory would fetch it again for every tile of rows,
// because no L2 cache keeps another GPU's memory. Kernels nevertheless read b remotely if scratch
// memory has no space for the copy of b. Each GPU copies from the next GPU first, and then from the
// one after that. If all GPUs began with the same shard of b, they would share the bandwidth of one
// GPU. A GPU's own part of b is copied on a separate stream at the same time, because the copy
// engines copy it no faster than the other parts.
//
// Kernels wait only for their own stream, so a late GPU does not delay the others. The exception is
// ozaki_f64: its GPUs begin to multiply only when all of them have examined their rows.
//
// The first piece is narrow, so that the SMs can begin soon. Each later piece has as many columns
// as arrive while the previous piece is multiplied, which keeps the number of pieces small
// (PieceSizes). The division into pieces changes no bits: a strategy computes an element in the
// same way regardless of which other elements are computed in the same launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/team/shares.h"
#include "kernels/team/matmul_shares.h"

namespace tessera {

// A stream for copies, in addition to `work`, the stream that does the work. When the owner
// releases the copy stream, `work` waits for all copies on it.
struct CopyStream {
  StreamHandle stream;
  Event event;  // recorded after the last copy
  int ordinal;  // of the GPU
  cudaStream_t work;
};
struct CopyStreamEnd {
  void operator()(CopyStream* copies) const noexcept;
};

// One GPU's rows of the product. The GPU computes one piece (a range of columns) at a time.
class ProductShare {
 public:
  // `round` is the number of elements of c that the GPU computes at a time, or 0 if the strategy
  // computes all columns in one launch. `rate` is the approximate number of multiply-adds per
  // second. `index` is the position of this share among `count` shares. Each share begins with
  // different columns. Throws DeviceError.
  ProductShare(const MatmulProblem& p, const TeamShare& share, std::int64_t round, double rate,
               std::size_t index, std::size_t count);

  CudaStream& stream() const { return stream_; }
  // The rows as a problem whose b points to the memory that kernels read.
  const MatmulProblem& problem() const { return problem_; }
  // The number of columns in the widest piece.
  std::int64_t most_columns() const { return sizes_.most; }
  // Returns the next piece, or a piece without columns at the end. The stream waits until the
  // piece's columns have arrived, and the copy of the following columns begins.
  ProductPiece Next();

 private:
  // Allocates memory for a copy of b and returns the fraction of b that is on other GPUs. Returns 0
  // if there is no memory for the copy, or if kernels should read b where it is.
  double TakeCopy(const MatmulProblem& p);
  // Returns a copy stream whose work begins after all earlier work of the stream.
  std::unique_ptr<CopyStream, CopyStreamEnd> TakeCopyStream();
  // Advances next_ to the following columns and starts to copy these.
  void Fetch();
  void Copy(const ProductPiece& piece);

  CudaStream& stream_;
  MatmulProblem problem_;
  const void* source_ = nullptr;  // the original b, if it is copied
  std::int64_t source_pitch_ = 0;
  int source_ordinal_ = 0;  // the GPU that has b, if b is not sharded
  PieceSizes sizes_;
  std::int64_t at_ = 0;  // first column of the piece after next_
  std::int64_t left_;    // number of columns from there on, wrapping around at the end of b
  ProductPiece next_;
  // Streams for the copies from other GPUs and from this GPU. Null if b is not copied; from_here_
  // is also null if this GPU has no part of b.
  std::unique_ptr<CopyStream, CopyStreamEnd> from_others_, from_here_;
};

// Enqueues the shares. Work is constructed from a ProductShare and the arguments. It has
//   static std::int64_t Round(const MatmulProblem&, int multiprocessors), and kRate: the round
//     and the rate above
//   void Multiply(const ProductPiece&), which enqueues the product of the columns
//   void Finish(), which is called after the last product
template <class Work, class... Arguments>
void EnqueueProductShares(const MatmulProblem& p, std::span<const TeamShare> shares,
                          const Arguments&... arguments) {
  struct Part {
    std::unique_ptr<ProductShare> share;
    std::unique_ptr<Work> work;
    bool done = false;
  };
  std::vector<Part> parts(shares.size());
  // Each GPU gets a little work at a time, so that no GPU waits until another one has been given
  // all of its work. First, all GPUs begin to copy.
  const auto for_all = [&](auto f) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].done) continue;
      OnDeviceOf(*shares[i].stream, [&] {
        Cuda(*shares[i].stream);
        f(parts[i], shares[i], i);
      });
    }
  };
  for_all([&](Part& part, const TeamShare& share, std::size_t i) {
    const std::int64_t round = Work::Round(p, share.stream->device().info().multiprocessors);
    part.share = std::make_unique<ProductShare>(p, share, round, Work::kRate, i, shares.size());
  });
  for (std::size_t done = 0; done < parts.size();) {
    for_all([&](Part& part, const TeamShare& share, std::size_t) {
      if (part.work == nullptr) part.work = std::make_unique<Work>(*part.share, arguments...);
      const ProductPiece piece = share.stream->stopped() ? ProductPiece() : part.share->Next();
      if (piece.columns > 0) return part.work->Multiply(piece);
      part.work->Finish();
      part.done = true;
      ++done;
    });
  }
}

// Implements SharedLaunch::launch.
template <class Work>
void LaunchProductShares(const MatmulProblem& p, std::span<const TeamShare> shares, Stream&) {
  EnqueueProductShares<Work>(p, shares);
}

}  // namespace tessera
