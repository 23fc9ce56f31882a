// Reductions in several launches, one per level. Each block of a level writes one value, and the
// next level folds these values. The level with only one block writes the result. A kernel has no
// barrier between its blocks; the end of a launch serves as one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/cuda/common/lesson.cuh"
#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"

namespace tessera {

// Returns the number of blocks of a level over n values. It is at least one, because a block must
// write the result of an empty input.
constexpr std::int64_t LevelBlocks(std::int64_t n, std::int64_t per_block) {
  return n == 0 ? 1 : CeilDiv(n, per_block);
}

// The levels that follow the first level over n elements.
struct LaterLevels {
  int count = 0;
  std::int64_t values = 0;  // that one level writes and the next one reads, over all levels
};

constexpr LaterLevels MakeLaterLevels(std::int64_t n, std::int64_t per_block) {
  LaterLevels later;
  for (std::int64_t blocks = LevelBlocks(n, per_block); blocks > 1;
       blocks = LevelBlocks(blocks, per_block)) {
    ++later.count;
    later.values += blocks;
  }
  return later;
}

// Returns the shape of a reduction in which the blocks of each level fold two cells per thread in
// place. A cell has acc_bytes bytes in the first level and wide_bytes bytes in the later levels.
constexpr LessonShape TreesInPlace(std::int64_t n, std::uint32_t block, std::size_t acc_bytes,
                                   std::size_t wide_bytes) {
  const LaterLevels later = MakeLaterLevels(n, 2 * block);
  const std::int64_t depth = CeilLog2(2 * block);
  return {.grid = {.block_size = block},
          .narrow_steps = depth,
          .wide_steps = later.count * depth,
          // Every cell is written once, and every fold reads two cells and writes one.
          .extra_bytes = 4 * (static_cast<std::uint64_t>(n) * acc_bytes +
                              static_cast<std::uint64_t>(later.values) * wide_bytes)};
}

// Launches all levels. first(blocks, to) launches the level over the elements, and next(blocks,
// from, n, to) launches a level over the n values that the previous level wrote. Levels alternate
// between two arrays, because the blocks of a level end in any order and must not overwrite values
// that another block has yet to read. REQUIRES: per_block > 1.
template <class Wide, class First, class Next>
void RunLevels(std::int64_t n, std::int64_t per_block, CudaStream& stream, First first, Next next) {
  std::int64_t blocks = LevelBlocks(n, per_block);
  const auto values = [&stream](std::int64_t count) {
    return static_cast<Wide*>(stream.Scratch(static_cast<std::size_t>(count) * sizeof(Wide)));
  };
  Wide* to = values(blocks);
  Wide* from = values(LevelBlocks(blocks, per_block));
  first(static_cast<unsigned>(blocks), to);
  while (blocks > 1) {
    std::swap(from, to);
    const std::int64_t left = blocks;
    blocks = LevelBlocks(left, per_block);
    next(static_cast<unsigned>(blocks), from, left, to);
  }
}

}  // namespace tessera
