// A product whose rows several GPUs compute. a and c stay where they are. b, as far as it lies on
// other GPUs, comes to each one's scratch memory by its copy engines, some columns at a time, while
// those that have come are multiplied:
//
//      copy engines   b0 | b1 | b2 | ..
//      SMs                 b0    | b1    | b2 ..
//
// A kernel that reads b from another GPU's memory would fetch it again for every tile of rows,
// since no L2 keeps what is another's. It is the way all the same where scratch memory has no room
// for b. Of what others have, each GPU asks the one behind it first, and then the one behind that:
// were all to begin with the same shard of b, they would share what one GPU can send. What a GPU
// has of b itself comes by a copy stream of its own, beside the others, since copy engines move it
// no faster.
//
// Kernels wait for nothing but their own stream: a GPU that is late delays nobody but itself, but
// for ozaki_f64, whose GPUs begin to multiply when all have looked at their rows.
//
// The first piece is narrow, so that the SMs begin soon, and each is as wide as what comes while
// the one before it is multiplied, so that they are few (PieceSizes). Which columns come together
// changes no bits: strategies compute an element in the same way whatever is computed beside it.
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

// A stream for copies beside that of the work, which comes behind them when this ends.
struct CopyStream {
  StreamHandle stream;
  Event event;  // behind the last copy
  int ordinal;  // of the GPU
  cudaStream_t work;
};
struct CopyStreamEnd {
  void operator()(CopyStream* copies) const noexcept;
};

// One GPU's rows, of which it multiplies some columns after the other.
class ProductShare {
 public:
  // round: elements of c that the GPU computes at a time; 0: the strategy takes all columns at
  // once. rate: multiply-adds that it does in a second, about. index, count: of the shares, of
  // which each begins with other columns. Throws DeviceError.
  ProductShare(const MatmulProblem& p, const TeamShare& share, std::int64_t round, double rate,
               std::size_t index, std::size_t count);

  CudaStream& stream() const { return stream_; }
  // The rows as a product, with b where it is read.
  const MatmulProblem& problem() const { return problem_; }
  // Of the widest piece.
  std::int64_t most_columns() const { return sizes_.most; }
  // The next columns: the stream waits until they are there, and those after them are on their way.
  // None: there are no more.
  ProductPiece Next();

 private:
  // Makes room for a copy of b, and says which share of it is elsewhere; 0: there is no room, or b
  // is better read where it is.
  double TakeCopy(const MatmulProblem& p);
  // A copy stream whose work begins behind that of the stream so far.
  std::unique_ptr<CopyStream, CopyStreamEnd> TakeCopyStream();
  // Begins with the copy of the columns that come after next_.
  void Fetch();
  void Copy(const ProductPiece& piece);

  CudaStream& stream_;
  MatmulProblem problem_;
  const void* source_ = nullptr;  // of b, where there is a copy
  std::int64_t source_pitch_ = 0;
  int source_ordinal_ = 0;  // of the GPU that has it, where it is not divided
  PieceSizes sizes_;
  std::int64_t at_ = 0;  // the column that the piece after next_ begins with
  std::int64_t left_;    // columns from there on, around the end of b
  ProductPiece next_;
  // Where there is a copy: of what other GPUs have, and of what this one has, if that is any of b.
  std::unique_ptr<CopyStream, CopyStreamEnd> from_others_, from_here_;
};

// Enqueues the shares. Work is constructed from a ProductShare and the arguments, and has
//   static std::int64_t Round(const MatmulProblem&, int multiprocessors), and kRate, as above
//   void Multiply(const ProductPiece&), which enqueues the product of the columns
//   void Finish(), behind the last of them
template <class Work, class... Arguments>
void EnqueueProductShares(const MatmulProblem& p, std::span<const TeamShare> shares,
                          const Arguments&... arguments) {
  struct Part {
    std::unique_ptr<ProductShare> share;
    std::unique_ptr<Work> work;
    bool done = false;
  };
  std::vector<Part> parts(shares.size());
  // Each GPU is given a little at a time, so that none waits until another has been given
  // everything: first, all begin to copy.
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

// Strategy::launch_shared.
template <class Work>
void LaunchProductShares(const MatmulProblem& p, std::span<const TeamShare> shares, Stream&) {
  EnqueueProductShares<Work>(p, shares);
}

}  // namespace tessera
