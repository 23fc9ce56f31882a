# The solutions of the exercises in README.md: solution(NAME LESSON OLD NEW...) is the lesson's
# program with each text OLD replaced by NEW. The tests build and run them.

solution(sum_1_fewer_atomics sum_1_atomics
[[
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) atomicAdd(total, x[i]);
]] [[
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  float sum = 0;
  for (std::int64_t i = first; i < n; i += std::int64_t{gridDim.x} * kThreads) sum += x[i];
  atomicAdd(total, sum);
]]
  "((kCount + kThreads - 1) / kThreads)" "((kCount + 4 * kThreads - 1) / (4 * kThreads))")

solution(sum_2_two_elements sum_2_tree
[[
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + t;
  cells[t] = i < n ? x[i] : 0.0f;
]] [[
  const std::int64_t i = std::int64_t{2} * blockIdx.x * kThreads + t;
  cells[t] = (i < n ? x[i] : 0.0f) + (i + kThreads < n ? x[i + kThreads] : 0.0f);
]]
  "((kCount + kThreads - 1) / kThreads)" "((kCount + 2 * kThreads - 1) / (2 * kThreads))")

solution(sum_3_odd_levels sum_3_sequential "kThreads = 256" "kThreads = 192")

solution(sum_4_contiguous sum_4_coarsened
[[
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + t; i < n; i += threads) sum += x[i];
]] [[
  const std::int64_t each = (n + threads - 1) / threads;
  const std::int64_t begin = (std::int64_t{blockIdx.x} * kThreads + t) * each;
  for (std::int64_t i = begin; i < begin + each && i < n; ++i) sum += x[i];
]])

solution(sum_5_butterfly sum_5_shuffles "__shfl_down_sync" "__shfl_xor_sync")

solution(sum_6_more_threads sum_6_vectors
  "kInFlight = 4" "kInFlight = 1" "kBlocks = 512;   // 4 for" "kBlocks = 1024;  // 8 for")

solution(sum_7_plain_ticket sum_7_one_launch
  "atomicInc(&ticket, gridDim.x - 1)" "atomicAdd(&ticket, 1)"
  "if (threadIdx.x == 0) total = sum;" "if (threadIdx.x == 0) total = sum, ticket = 0;")

solution(sum_8_longer_chunks sum_8_fixed_order "kRows = 32" "kRows = 64")

solution(product_1_columns product_1_naive
  "row = blockIdx.y * kHeight + threadIdx.y, column = blockIdx.x * kWidth + threadIdx.x"
  "row = blockIdx.x * kWidth + threadIdx.x, column = blockIdx.y * kHeight + threadIdx.y"
  "(kN + kWidth - 1) / kWidth, (kM + kHeight - 1) / kHeight"
  "(kM + kWidth - 1) / kWidth, (kN + kHeight - 1) / kHeight")

solution(product_2_small_tiles product_2_tiles "kTile = 32" "kTile = 16")

solution(product_3_shallow_tiles product_3_registers "kDepth = 16" "kDepth = 8")

solution(product_4_one_buffer product_4_double_buffer
  "a_tile[2][kDepth]" "a_tile[1][kDepth]" "b_tile[2][kDepth]" "b_tile[1][kDepth]"
  "buffer = 1 - buffer" "buffer = 0"
  "if (first + kDepth < kK) store(1 - buffer);"
  "__syncthreads();  // these tiles have been read\n    if (first + kDepth < kK) store(0);")

solution(product_5_more_stages product_5_tensor_cores "kStages = 3" "kStages = 4")

solution(hopper_product_rows hopper_product "kGroup = 8" "kGroup = 1")
