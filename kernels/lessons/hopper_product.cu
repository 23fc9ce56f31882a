// A product of matrices for Hopper, in one file: c = a b in bf16, at the rate of the vendor's
// library for large matrices. Read it from top to bottom:
//
//   1  instructions: barriers, TMA, wgmma, clusters
//   2  shapes: what a block computes, and what is in shared memory
//   3  the order in which blocks compute tiles
//   4  the producer, a thread that fetches
//   5  the consumers, which multiply and store
//   6  the kernel, which divides a block into these roles
//   7  tensor maps, the launch, and a check
//
// What is new after lesson 5:
//
// - TMA: one instruction, issued by one thread, copies a whole box of a matrix to shared memory and
//   counts its bytes on a barrier. No thread computes addresses, and no element passes through a
//   register.
// - wgmma: one instruction, issued by four warps, multiplies 64 x 16 by 16 x 256 elements, which it
//   reads from shared memory itself, while the warps continue. Most of the registers hold sums.
// - Warps with different work: a producer fetches, and two groups of four warps multiply. The ring
//   of stages between them has a barrier for "full" and one for "empty" in each stage, and the
//   producer runs ahead by up to kStages steps, into the next tile as well.
// - Persistent blocks: there is one block per SM, and each computes tile after tile. While a tile
//   is being stored, the operands of the next one are on their way.
// - Clusters: two blocks compute vertically adjacent tiles, so they need the same columns
//   of b. Each fetches half of them for both (multicast), which halves the traffic for b.
//
// The service's strategy `tensor_bf16` (kernels/cuda/matmul/hopper/gemm) does this for any
// transposes and alignments, with smaller tiles and split sums for small products.
//
// Restrictions: n and k are multiples of 8, because TMA needs rows that begin at multiples of 16
// bytes. Sizes need not be multiples of a tile: TMA reads zeros outside a matrix and stores nothing
// there.
//
// Strategy: kernels/cuda/matmul/hopper/tensor_bf16.cu
//
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -o lesson hopper_product.cu
//   ./lesson
#include <cuda.h>  // for the type CUtensorMap
#include <cuda_bf16.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

using bf16 = __nv_bfloat16;

// --- 1. Instructions: see the PTX ISA, "mbarrier", "cp.async.bulk.tensor", "wgmma" ---

__device__ unsigned Shared(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// A barrier counts arrivals, and bytes that TMA has yet to deliver. When none are left, its phase
// ends and the next one begins. Phases are told apart by their parity, which starts at 0.
__device__ void InitBarrier(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Arrives, and makes the phase wait for this number of bytes as well.
__device__ void ExpectBytes(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives at the same barrier of another block of the cluster, or of this one.
__device__ void ArriveAt(unsigned barrier, int block) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(block)
      : "memory");
}
// Waits until the phase with this parity has ended.
__device__ void Wait(unsigned barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nretry:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra.uni retry;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Waits for the 128 threads of a consumer.
__device__ void WaitForConsumer(int consumer) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");
}
__device__ int RankInCluster() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ void WaitForCluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Copies the box at (x, y) to shared memory. The barrier counts its bytes.
__device__ void LoadBox(unsigned to, const CUtensorMap* map, int x, int y, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
// Copies the box to both blocks of the cluster. Each block's own barrier counts its bytes.
__device__ void LoadBoxForBoth(unsigned to, const CUtensorMap* map, int x, int y,
                               unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(static_cast<std::uint16_t>(3))
      : "memory");
}
__device__ void StoreBox(const CUtensorMap* map, int x, int y, unsigned from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(x), "r"(y), "r"(from)
      : "memory");
}

// NAMES_...: the numbers of the 128 registers with sums, for the text of the instruction. SUMS_...:
// these registers.
#define NAMES_32                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
#define NAMES_64                                                                     \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
#define NAMES_96                                                                     \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
#define NAMES_128                                                                          \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
  "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "   \
  "%125, %126, %127"
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)
#define SUMS_64(i) SUMS_16(i), SUMS_16(i + 16), SUMS_16(i + 32), SUMS_16(i + 48)

// Sets d to the product of 64 x 16 elements of a by 16 x 256 elements of b or, if `add`, adds the
// product to d. a, b: descriptors of the elements in shared memory. The last two numbers of the
// instruction say that k runs along the rows of a and across the rows of b.
__device__ void Multiply(float (&d)[128], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NAMES_32 NAMES_64 NAMES_96 NAMES_128
      "}, %128, %129, add, 1, 1, 0, 1;\n}"
      : SUMS_64(0), SUMS_64(64)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// Returns a descriptor of rows of 128 bytes, whose eight 16-byte vectors TMA has permuted: vector v
// of row r is at position v ^ r % 8, so that neither copies nor products cause bank conflicts.
// stride: the bytes from 8 rows to the next 8. lead: for b, the bytes from 64 columns to the next
// 64.
__device__ std::uint64_t Descriptor(unsigned address, unsigned lead, unsigned stride) {
  return std::uint64_t{1} << 62 | std::uint64_t{stride / 16} << 32 |
         std::uint64_t{lead / 16} << 16 | (address & 0x3ffff) / 16;
}

// --- 2. Shapes ---

constexpr int kRows = 128, kColumns = 256;  // of the tile of c that a block computes at a time
constexpr int kDepth = 64;                  // elements of a step along k: rows of 128 bytes
constexpr int kStages = 3;                  // steps that are in shared memory at the same time
constexpr int kCluster = 2, kConsumers = 2, kConsumerRows = 64, kThreads = 3 * 128;
constexpr int kBytesA = kRows * kDepth * 2, kBytesB = kDepth * kColumns * 2;
constexpr int kStageBytes = kBytesA + kBytesB;
constexpr int kBoxB = kDepth * 128;             // bytes of 64 columns of a step of b
constexpr int kBoxC = kConsumerRows * 128;      // bytes of 64 columns of a consumer's results
constexpr int kBytesC = kColumns / 64 * kBoxC;  // of one consumer
constexpr int kAlignment = 1024;                // in bytes, of rows that TMA permutes
constexpr int kSharedBytes = kAlignment + kStages * kStageBytes + kConsumers * kBytesC;

// The ring of stages, as one thread sees it.
struct Ring {
  unsigned memory, barriers;
  int stage = 0, parity = 0;

  __device__ unsigned a() const { return memory + stage * kStageBytes; }
  __device__ unsigned b() const { return a() + kBytesA; }
  __device__ unsigned full() const { return barriers + stage * 8; }
  __device__ unsigned empty(int s) const { return barriers + (kStages + s) * 8; }
  __device__ void Next() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// --- 3. The order of tiles ---

// Clusters compute tiles of 256 x 256 elements, one after the other. Clusters that run at the same
// time should share rows of a and columns of b in the L2 cache, so tiles are numbered down groups
// of kGroup rows of tiles: the tiles in progress then cover roughly a square of c.
constexpr int kGroup = 8;

struct Place {
  int row, column;  // the first row and column of the block's tile

  __device__ Place(int tile, int m, int n, int rank) {
    const int tall = kRows * kCluster, rows = (m + tall - 1) / tall;
    const int columns = (n + kColumns - 1) / kColumns;
    const int group = tile / (kGroup * columns), in_group = tile % (kGroup * columns);
    const int height = min(kGroup, rows - group * kGroup);
    row = (group * kGroup + in_group % height) * tall + rank * kRows;
    column = in_group / height * kColumns;
  }
};

// --- 4. The producer ---

// Fetches all steps of the tile: the block's own rows of a, and the block's half of the columns of
// b for both blocks. A stage is empty when the consumers of both blocks have read it, because both
// producers write to it.
__device__ void Fetch(const CUtensorMap& a, const CUtensorMap& b, Place place, int k, int rank,
                      Ring& ring) {
  for (int first = 0; first < k; first += kDepth, ring.Next()) {
    Wait(ring.empty(ring.stage), ring.parity ^ 1);
    ExpectBytes(ring.full(), kStageBytes);
    LoadBox(ring.a(), &a, first, place.row, ring.full());
    for (int i = 0; i < kColumns / 64 / kCluster; ++i) {
      const int box = rank * (kColumns / 64 / kCluster) + i;
      LoadBoxForBoth(ring.b() + box * kBoxB, &b, place.column + box * 64, first, ring.full());
    }
  }
}

// --- 5. The consumers ---

// Computes a consumer's 64 rows of the tile. After a step has been issued, waits for the previous
// one and releases its stage. `thread` is the calling thread's index in its consumer.
__device__ void MultiplySteps(float (&d)[128], int k, int consumer, int thread, Ring& ring) {
  int last = 0;
  for (int first = 0; first < k; first += kDepth, ring.Next()) {
    Wait(ring.full(), ring.parity);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    const std::uint64_t a = Descriptor(ring.a() + consumer * kConsumerRows * 128, 0, 8 * 128);
    const std::uint64_t b = Descriptor(ring.b(), kBoxB, 8 * 128);
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step)  // 32 bytes along a row of a, and 16 rows of b
      Multiply(d, a + step * 32 / 16, b + step * 16 * 128 / 16, first + step > 0);
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (first > 0 && thread < kCluster) ArriveAt(ring.empty(last), thread);
    last = ring.stage;
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (float& sum : d) asm volatile("" : "+f"(sum)::"memory");  // not to be read before the wait
  if (thread < kCluster) ArriveAt(ring.empty(last), thread);
}

// Rounds the results, and copies them to shared memory, from where TMA stores whole lines. In lane
// l of warp w, sums 4 j and 4 j + 1 are in row 16 w + l / 4 and column 8 j + 2 (l % 4), and the
// next two sums are 8 rows further down. stmatrix turns four such 8 x 8 matrices into rows.
__device__ void StoreResults(const float (&d)[128], const CUtensorMap& c, unsigned memory,
                             Place place, int consumer, int thread) {
  const auto pair = [&](int i) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(d[i], d[i + 1]);
    return reinterpret_cast<const unsigned&>(both);
  };
  if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  WaitForConsumer(consumer);  // the previous tile's results have been read
  const int row = thread / 32 * 16 + thread % 16, half = thread / 16 % 2;
#pragma unroll
  for (int i = 0; i < 16; ++i) {  // 16 columns, which are two vectors per row
    const unsigned to = memory + i / 4 * kBoxC + row * 128 + ((i % 4 * 2 + half) ^ row % 8) * 16;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(pair(8 * i)), "r"(pair(8 * i + 2)), "r"(pair(8 * i + 4)), "r"(pair(8 * i + 6))
                 : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::
                   : "memory");  // TMA sees what threads have written
  WaitForConsumer(consumer);     // all results are in the memory
  if (thread != 0) return;
  for (int box = 0; box < kColumns / 64; ++box)
    StoreBox(&c, place.column + box * 64, place.row + consumer * kConsumerRows,
             memory + box * kBoxC);
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// --- 6. The kernel ---

__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    Product(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
            const __grid_constant__ CUtensorMap c, int m, int n, int k) {
  extern __shared__ char dynamic[];
  __shared__ alignas(8) std::uint64_t barriers[2 * kStages];
  Ring ring{(Shared(dynamic) + kAlignment - 1) / kAlignment * kAlignment, Shared(barriers)};
  const int rank = RankInCluster(), group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      InitBarrier(ring.barriers + s * 8, 1);  // full: the producer arrives
      InitBarrier(ring.empty(s), kConsumers * kCluster);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  WaitForCluster();  // the barriers of both blocks are ready

  const int tiles =
      ((m + kRows * kCluster - 1) / (kRows * kCluster)) * ((n + kColumns - 1) / kColumns);
  const int first = blockIdx.x / kCluster, step = gridDim.x / kCluster;
  if (group == kConsumers) {
    // The producer needs few registers, and the consumers take the rest.
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == kConsumers * 128)
      for (int tile = first; tile < tiles; tile += step)
        Fetch(a, b, Place(tile, m, n, rank), k, rank, ring);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int thread = threadIdx.x % 128;
    const unsigned memory = ring.memory + kStages * kStageBytes + group * kBytesC;
    for (int tile = first; tile < tiles; tile += step) {
      float d[128];
      MultiplySteps(d, k, group, thread, ring);
      StoreResults(d, c, memory, Place(tile, m, n, rank), group, thread);
    }
    if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
  WaitForCluster();  // no block may end while the other one may still write to its memory
}

// --- 7. Tensor maps, the launch, and a check ---

#define CHECK(call)                                             \
  if (const cudaError_t error = (call); error != cudaSuccess) { \
    std::printf("%s: %s\n", #call, cudaGetErrorString(error));  \
    return 1;                                                   \
  }

// Describes a matrix to TMA, with boxes of `box_rows` rows of 64 elements.
CUtensorMap Map(const bf16* data, int rows, int columns, int box_rows) {
  static decltype(&cuTensorMapEncodeTiled) const encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                     &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  const cuuint64_t extents[] = {cuuint64_t(columns), cuuint64_t(rows)};
  const cuuint64_t pitch[] = {cuuint64_t(columns) * sizeof(bf16)};
  const cuuint32_t box[] = {64, cuuint32_t(box_rows)}, steps[] = {1, 1};
  CUtensorMap map{};
  encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<bf16*>(data), extents, pitch, box,
         steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

int Run(int m, int n, int k) {
  const auto random = [](unsigned i) { return (i * 2654435761u >> 8) * 0x1p-24f - 0.5f; };
  std::vector<bf16> a(std::size_t(m) * k), b(std::size_t(k) * n), c(std::size_t(m) * n);
  for (unsigned i = 0; i < a.size(); ++i) a[i] = random(i);
  for (unsigned i = 0; i < b.size(); ++i) b[i] = random(~i);
  bf16 *device_a, *device_b, *device_c;
  CHECK(cudaMalloc(&device_a, a.size() * sizeof(bf16)));
  CHECK(cudaMalloc(&device_b, b.size() * sizeof(bf16)));
  CHECK(cudaMalloc(&device_c, c.size() * sizeof(bf16)));
  CHECK(cudaMemcpy(device_a, a.data(), a.size() * sizeof(bf16), cudaMemcpyDefault));
  CHECK(cudaMemcpy(device_b, b.data(), b.size() * sizeof(bf16), cudaMemcpyDefault));
  int processors;
  CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
  CHECK(cudaFuncSetAttribute(Product, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const CUtensorMap a_map = Map(device_a, m, k, kRows), b_map = Map(device_b, k, n, kDepth);
  const CUtensorMap c_map = Map(device_c, m, n, kConsumerRows);
  const auto run = [&] {
    Product<<<processors / kCluster * kCluster, kThreads, kSharedBytes>>>(a_map, b_map, c_map, m, n,
                                                                          k);
  };
  for (int i = 0; i < 20; ++i) run();  // raises the clocks to those of a busy GPU
  CHECK(cudaDeviceSynchronize());
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 50; ++i) run();
  CHECK(cudaDeviceSynchronize());
  const std::chrono::duration<double> seconds = (std::chrono::steady_clock::now() - begin) / 50;
  CHECK(cudaMemcpy(c.data(), device_c, c.size() * sizeof(bf16), cudaMemcpyDefault));

  double worst = 0;  // the largest error beyond the rounding of the result to bf16
  for (unsigned i = 0; i < 1000; ++i) {
    const std::size_t row = i * 2654435761u % m, column = i * 40503u % n;
    double exact = 0, terms = 0;
    for (int j = 0; j < k; ++j) {
      const double term = double{float{a[row * k + j]}} * float{b[std::size_t(j) * n + column]};
      exact += term;
      terms += std::fabs(term);
    }
    const double error = std::fabs(float{c[row * n + column]} - exact);
    worst = std::fmax(worst, (error - std::fabs(exact) / 256) / terms);
  }
  std::printf(
      "%d x %d x %d: worst error %.1e relative to the sum of |terms|, %.0f us, %.0f TFLOP/s\n", m,
      n, k, std::fmax(worst, 0), 1e6 * seconds.count(), 2e-12 * m * n * k / seconds.count());
  cudaFree(device_a);
  cudaFree(device_b);
  cudaFree(device_c);
  return worst <= 1e-6 ? 0 : 1;
}

int main() { return Run(4096, 4096, 4096) + Run(8192, 8192, 8192) + Run(1000, 1016, 1096); }
