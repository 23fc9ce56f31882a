// Scan in one launch that reads x once, by decoupled look-back.
//
// Compared with `reduce_then_scan`, a block that has the total of its piece does not end. It sends
// the total and looks back at the pieces before its own, starting with the nearest: it adds up
// totals until it reaches a piece whose block has already sent the fold of everything up to the end
// of that piece. The block then sends the same kind of fold for its own piece and stores its
// results. Each piece has two slots, one per value. Blocks take pieces by ticket, so all blocks
// that a block waits for are done or running.
//
// How far a block has to look depends on timing, and so does the order of the additions: the last
// bits of floating-point sums change from run to run. `fixed_order` avoids that.
//
// Cost at n = 2^20, f32, one row: 4 MiB read, 4 MiB written, a memset of 16 KiB, one launch.
//
// The kernel is correct for any length: missing elements are the identity.
#include "kernels/cuda/scan/scan.cuh"
#include "kernels/cuda/tree/mailbox.cuh"

namespace tessera {
namespace {

constexpr int kItems = 8;  // adjacent elements of a thread

std::int64_t Pieces(const ScanProblem& p) {
  return CeilDiv(p.length, std::int64_t{kItems} * ScanThreads(p));
}

// Each piece has two slots: for its total, and for the fold of everything up to its end.
template <class F>
struct Slots {
  using Wide = typename F::Wide;
  Mailbox mailbox;

  // Returns whether the slot is full. If so, sets *value.
  __device__ bool Read(std::int64_t slot, Wide* value) const {
    const ulonglong2 v = Peek(MailSlot(mailbox, slot, 1));
    const unsigned words[2] = {static_cast<unsigned>(v.x), static_cast<unsigned>(v.y)};
    std::memcpy(value, words, sizeof *value);
    return (v.x & v.y & kMailFlag) != 0;
  }
  // Returns the fold of the pieces [first, piece).
  __device__ Wide LookBack(std::int64_t first, std::int64_t piece) const {
    auto sum = F::template Identity<Wide>();
    while (piece > first) {
      Wide value;
      if (Read(2 * (piece - 1) + 1, &value)) return F::Combine(value, sum);
      if (!Read(2 * (piece - 1), &value)) continue;
      sum = F::Combine(value, sum);
      --piece;
    }
    return sum;
  }
};

template <class F>
__global__ void __launch_bounds__(kMostThreads)
    ScanLookBack(ScanLines<F> p, std::int64_t pieces, Slots<F> slots) {
  using Wide = typename F::Wide;
  __shared__ unsigned ticket;
  __shared__ Wide base;
  if (threadIdx.x == 0) ticket = TakeTicket(slots.mailbox);
  __syncthreads();  // the ticket has been stored
  const std::int64_t line = ticket / pieces, piece = ticket % pieces;
  const std::int64_t first = (piece * blockDim.x + threadIdx.x) * kItems;
  Wide elements[kItems];
  auto sum = F::template Identity<Wide>();
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    elements[j] = p.Load(line, first + j);
    sum = F::Combine(sum, elements[j]);
  }
  Wide total;
  const Wide before = ScanBlock<F>(sum, &total);
  if (threadIdx.x == 0) {
    Send(slots.mailbox, 2 * std::int64_t{ticket}, total);
    base = slots.LookBack(line * pieces, ticket);
    Send(slots.mailbox, 2 * std::int64_t{ticket} + 1, F::Combine(base, total));
  }
  __syncthreads();  // the fold of everything before the piece has been stored
  Wide result = F::Combine(base, before);
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const Wide next = F::Combine(result, elements[j]);
    p.Store(line, first + j, p.exclusive ? result : next);
    result = next;
  }
}

// Returns the number of bytes of the slots and the ticket.
std::size_t SlotBytes(const ScanProblem& p) {
  return static_cast<std::size_t>(2 * p.outer * p.inner * Pieces(p) + 1) * sizeof(ulonglong2);
}

void Enqueue(const ScanProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  DispatchLesson(p, [&]<class F>(std::type_identity<F>) {
    const ScanLines<F> lines(p);
    auto* const memory = static_cast<ulonglong2*>(cuda.Scratch(SlotBytes(p)));
    cuda.Zero(memory, SlotBytes(p));
    const Slots<F> slots = {{reinterpret_cast<unsigned*>(memory), memory + 1}};
    const auto blocks = static_cast<unsigned>(lines.lines * Pieces(p));
    ScanLookBack<F><<<blocks, ScanThreads(p), 0, cuda.handle()>>>(lines, Pieces(p), slots);
    CUDA_CHECK_LAUNCH(ScanLookBack);
  });
}

// The maximum number of folds per element: a thread's items (twice), lanes, warps, all pieces.
std::int64_t Steps(const ScanProblem& p) {
  return 2 * kItems + 5 + ScanThreads(p) / kWarpSize + 1 + Pieces(p) + 2;
}

}  // namespace

extern constexpr Strategy<ScanProblem> kScanLookBack = {
    .name = "look_back",
    .summary = "one launch; a block adds the totals before it until it finds a finished fold",
    .source =
        "Merrill and Garland, Single-pass Parallel Prefix Scan with Decoupled Look-back, "
        "2016",
    .backend = Backend::kCuda,
    .dtypes = kLessonDTypes,
    .limits = {.block_size = kWholeWarps},
    .roundoff = [](const ScanProblem& p) { return ScanRoundoff(p, Steps(p)); },
    .cost =
        [](const ScanProblem& p) {
          return Cost{.bytes = ScanBytes(p),
                      .flops = 2 * static_cast<std::uint64_t>(p.elements()),
                      .atomics = static_cast<std::uint64_t>(p.outer * p.inner * Pieces(p)),
                      .depth = static_cast<std::uint64_t>(Steps(p))};
        },
    .launch = Enqueue,
    .refuses =
        [](const ScanProblem& p) {
          return RefusesBlocks(static_cast<double>(p.outer) * static_cast<double>(p.inner) *
                               static_cast<double>(Pieces(p)));
        },
    .scratch = [](const ScanProblem& p) -> std::uint64_t { return SlotBytes(p); },
};

}  // namespace tessera
