// The fold of short arrays as a kernel that stays: kernels/cuda/persistent.h.
#include "kernels/cuda/persistent.h"

#include "kernels/batch.h"
#include "kernels/cuda/tree/kernel.cuh"

namespace tessera {
namespace {

__device__ std::uint64_t Nanoseconds() {
  std::uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

__device__ std::uint32_t ReadHost(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// 16 bytes of one cache line of the host, which come in one piece.
__device__ PersistentDoor::Word ReadHost(const PersistentDoor::Word* word) {
  PersistentDoor::Word v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.part[0]), "=r"(v.part[1]), "=r"(v.part[2]), "=r"(v.ticket)
               : "l"(word)
               : "memory");
  return v;
}

// Waits for work behind that of start.ticket, which it replaces; one thread. False: it is time to
// leave. Whoever looks at the door after it has said that it leaves, and finds work, does it all the
// same: the host waits for the end of a kernel that has left, and then looks whether its work is
// done.
__device__ bool Await(PersistentStart& start) {
  const std::uint64_t begin = Nanoseconds();
  for (bool leaving = false;; leaving = true) {
    do {
      PersistentDoor::Word words[PersistentDoor::kWords];
#pragma unroll
      for (int i = 0; i < PersistentDoor::kWords; ++i) words[i] = ReadHost(&start.door->words[i]);
      const std::uint32_t dismissals = ReadHost(start.dismissals);
      // Newer: what a kernel begins with does not come through the door.
      bool whole = static_cast<std::int32_t>(words[0].ticket - start.ticket) > 0;
#pragma unroll
      for (const PersistentDoor::Word& word : words) whole &= word.ticket == words[0].ticket;
      if (whole) {
#pragma unroll
        for (int i = 0; i < PersistentDoor::kWords; ++i)
          std::memcpy(reinterpret_cast<unsigned char*>(&start.work) + i * sizeof words[i].part,
                      words[i].part, sizeof words[i].part);
        start.ticket = words[0].ticket;
        __threadfence_system();  // before the operands are read
        return true;
      }
      if (dismissals != start.dismissed) break;
    } while (!leaving && Nanoseconds() - begin < start.linger_ns);
    if (leaving) return false;
    *const_cast<volatile std::uint32_t*>(&start.door->left) = start.number;
    __threadfence_system();  // before the last look
  }
}

template <class C>
__global__ void __launch_bounds__(kTreeLanes) FoldArrays(const PersistentStart begin) {
  __shared__ PersistentStart start;
  __shared__ bool more;
  if (threadIdx.x == 0) start = begin;
  do {
    __syncthreads();  // start is written
    TreeOperands<Coherent<C>> in;
#pragma unroll
    for (int o = 0; o < C::kOperands; ++o)
      in.x[o] = static_cast<const typename C::Element*>(start.work.x[o]);
    FoldArray<Coherent<C>>(in, start.work.n, static_cast<ReduceOp>(start.work.op),
                           start.work.mirror != 0, start.result);
    // Thread 0 writes the result, and start behind a barrier of FoldArray, after all have read it.
    if (threadIdx.x == 0) {
      __threadfence_system();  // the result, before it is called done
      *const_cast<volatile std::uint32_t*>(&start.door->done) = start.ticket;
      more = Await(start);
    }
    __syncthreads();  // more is written
  } while (more);
}

template <class Problem>
bool Suits(const Problem& p, std::initializer_list<const View*> views, CudaStream& stream) {
  for (const View* view : views)
    if (view != nullptr) return false;
  return p.launch.block_size == 0 && p.launch.grid_size == 0 && p.result == stream.result() &&
         p.n <= kBatchBytes / static_cast<std::int64_t>(SizeOf(p.dtype)) &&
         stream.persistent() != nullptr;
}

template <class C>
void Begin(const void* x, const void* y, std::int64_t n, ReduceOp op, CudaStream& stream) {
  stream.persistent()->Begin(FoldArrays<C>, kTreeLanes,
                             {.x = {x, y},
                              .n = static_cast<std::int32_t>(n),
                              .op = static_cast<std::uint16_t>(op),
                              .mirror = IsMirrored(op)});
}

}  // namespace

bool BeginPersistent(const DotProblem& p, CudaStream& stream) {
  if (!Suits(p, {p.a_view, p.b_view}, stream)) return false;
  DispatchDType(p.dtype, [&](auto zero) {
    Begin<decltype(DotColumnsType<decltype(zero), false>())>(p.a, p.b, p.n, ReduceOp::kSum, stream);
  });
  return true;
}

bool BeginPersistent(const ReduceProblem& p, CudaStream& stream) {
  if (p.map != nullptr || !Suits(p, {p.x_view}, stream)) return false;
  DispatchDType(p.dtype, [&](auto zero) {
    DispatchColumns<decltype(zero), false>(
        p.op, [&](auto kind) { Begin<decltype(kind)>(p.x, nullptr, p.n, p.op, stream); });
  });
  return true;
}

}  // namespace tessera
