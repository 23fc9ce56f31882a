// Sums, lesson 8 of 8: the order of the additions depends only on n.
//
// In lesson 7, the grid decides which elements a thread adds, so a different grid gives different
// bits. Here, the array has chunks of 32768 elements, and a chunk has 256 lanes, for every grid and
// every block of at least 32 threads. With B blocks, a block adds every B-th chunk; with T threads,
// a thread computes every T-th lane of the chunk.
//
//   chunk    32 rows of 256 vectors of 4 elements
//   lane t   adds vector t of each row, from top to bottom, in 4 floats, which it then adds
//   tree     lane t adds lane t + 128, then lane t + 64, t + 32, ..., t + 1
//   chunks   lane t adds the sums of chunks t, t + 256, ...; then comes the same tree
//
// The result is right for every n: elements at n and beyond count as 0. The bits are the same for
// every launch, because each addition has the same two operands. The last block reads the sums by
// chunk, so it does not matter which block has stored a sum, or when.
//
// The service's strategy `fixed_tree` does this for every type and operation, also on CPUs and
// several GPUs (kernels/same_bits/fixed_tree.h). Its chunks are longer in longer arrays.
// Strategy: kernels/cuda/dot/fixed_tree.cu
// nvcc -std=c++20 -O3 -arch=native -o lesson sum_8_fixed_order.cu && ./lesson
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

// Ends the program if a CUDA call fails.
#define CHECK(call)                                                       \
  if (const cudaError_t code = (call); code != cudaSuccess) {             \
    fprintf(stderr, "line %d: %s\n", __LINE__, cudaGetErrorString(code)); \
    exit(1);                                                              \
  }

constexpr int kInFlight = 4;  // loads per thread
constexpr int kLanes = 256, kRows = 32;
constexpr std::int64_t kChunk = kRows * kLanes * 4;  // elements

__device__ unsigned ticket = 0;  // the next ticket; 0 again after each launch
__device__ double total;

// Returns the sum of one lane of the chunk that begins at x[begin]. x is aligned to 16 bytes.
__device__ double SumOfLane(const float* x, std::int64_t n, std::int64_t begin, unsigned lane) {
  const auto sum_rows = [=](auto vector_at) {
    float4 sum = {};
    for (int top = 0; top < kRows; top += kInFlight) {
      float4 v[kInFlight];
      for (int j = 0; j < kInFlight; ++j) v[j] = vector_at(begin + 4 * ((top + j) * kLanes + lane));
      for (const float4& w : v) sum.x += w.x, sum.y += w.y, sum.z += w.z, sum.w += w.w;
    }
    return (double{sum.x} + sum.z) + (double{sum.y} + sum.w);
  };
  if (begin + kChunk <= n)
    return sum_rows([=](std::int64_t i) { return *reinterpret_cast<const float4*>(x + i); });
  const auto at = [=](std::int64_t i) { return i < n ? x[i] : 0.0f; };
  return sum_rows([=](auto i) { return make_float4(at(i), at(i + 1), at(i + 2), at(i + 3)); });
}

// Returns, in thread 0, the sum of the lanes' values. All threads of the first warp call it.
__device__ double SumOfLanes(const double* cells) {
  double v[kLanes / 32];  // the values of lanes t, t + 32, ...
  for (int i = 0; i < kLanes / 32; ++i) v[i] = cells[threadIdx.x + 32 * i];
  for (int half = kLanes / 64; half > 0; half /= 2)  // lanes 128, 64 and 32 further on
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  for (int offset = 16; offset > 0; offset /= 2) v[0] += __shfl_down_sync(~0u, v[0], offset);
  return v[0];
}

// total = the sum of x[0, n). `sums` has space for one sum per chunk.
__global__ void SumFixedOrder(const float* x, std::int64_t n, double* sums) {
  __shared__ double cells[kLanes];
  __shared__ bool last;
  const unsigned t = threadIdx.x;
  const std::int64_t chunks = (n + kChunk - 1) / kChunk;
  for (std::int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    for (unsigned lane = t; lane < kLanes; lane += blockDim.x)
      cells[lane] = SumOfLane(x, n, chunk * kChunk, lane);
    __syncthreads();  // cells are written
    const double sum = t < 32 ? SumOfLanes(cells) : 0;
    if (t == 0) sums[chunk] = sum;
    __syncthreads();  // cells have been read, so the next chunk may overwrite them
  }
  if (t == 0) {
    __threadfence();  // the sums are visible to all blocks before the ticket is taken
    last = atomicInc(&ticket, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();  // no sum of another block is read before the ticket is taken
  }
  __syncthreads();  // last is written
  if (!last) return;
  for (unsigned lane = t; lane < kLanes; lane += blockDim.x) {
    double sum = 0;
    for (std::int64_t chunk = lane; chunk < chunks; chunk += kLanes) sum += sums[chunk];
    cells[lane] = sum;
  }
  __syncthreads();  // cells are written
  const double sum = t < 32 ? SumOfLanes(cells) : 0;
  if (t == 0) total = sum;
}

int main() {
  constexpr std::int64_t kCount = (1 << 26) + 13, kBytes = kCount * sizeof(float);
  std::vector<float> x(kCount);      // values in [-0.5, 0.5)
  double exact = 0, magnitudes = 0;  // the reference, and the sum of |x[i]|
  for (unsigned i = 0; i < kCount; ++i) {
    x[i] = float((i * 2654435761u) >> 8) * 0x1p-24f - 0.5f;
    exact += x[i];
    magnitudes += std::abs(x[i]);
  }
  constexpr auto kChunks = static_cast<unsigned>((kCount + kChunk - 1) / kChunk);
  float* device_x = nullptr;
  double* sums = nullptr;
  CHECK(cudaMalloc(&device_x, kBytes));
  CHECK(cudaMalloc(&sums, kChunks * sizeof *sums));
  CHECK(cudaMemcpy(device_x, x.data(), kBytes, cudaMemcpyHostToDevice));

  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  float ms = 0, fastest = INFINITY;
  for (int run = 0; run <= 10; ++run) {  // run 0 also loads the kernel and does not count
    CHECK(cudaEventRecord(begin));
    SumFixedOrder<<<kChunks, 256>>>(device_x, kCount, sums);
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (run > 0) fastest = std::fmin(fastest, ms);
  }
  const auto bits_of = [&](unsigned blocks, unsigned threads) {
    SumFixedOrder<<<blocks, threads>>>(device_x, kCount, sums);
    CHECK(cudaGetLastError());
    std::uint64_t bits = 0;
    CHECK(cudaMemcpyFromSymbol(&bits, total, sizeof bits));
    return bits;
  };
  const std::uint64_t sum_bits = bits_of(kChunks, 256);
  const double sum = std::bit_cast<double>(sum_bits);
  int khz = 0, bits = 0;
  CHECK(cudaDeviceGetAttribute(&khz, cudaDevAttrMemoryClockRate, 0));
  CHECK(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, 0));
  const double error = std::abs(sum - exact) / magnitudes;
  const double rate = kBytes / (fastest * 1e-3), most = 2e3 * khz * bits / 8;  // twice per cycle
  printf("sum %.3f, error %.1e relative to the sum of |x|, %.0f us, %.0f GB/s, %.0f %% of peak\n",
         sum, error, fastest * 1e3, rate * 1e-9, 100 * rate / most);
  bool equal = true;
  for (const unsigned blocks : {kChunks, 1000u, 77u})
    for (const unsigned threads : {256u, 96u}) equal &= bits_of(blocks, threads) == sum_bits;
  printf("3 grids, 2 block sizes: %s\n", equal ? "all bits are equal" : "the bits differ");
  return error <= 1e-6 && equal ? 0 : 1;
}
