// The lessons of kernels/lessons compute what they say: each program compares its result with a sum
// in double, and ends with 0 if they agree.
#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

class LessonTest : public testing::TestWithParam<const char*> {};

TEST_P(LessonTest, FindsTheRightResult) {
  TESSERA_NEED_DEVICE(Backend::kCuda);
  const auto programs = std::filesystem::canonical("/proc/self/exe").parent_path();
  EXPECT_EQ(std::system((programs / GetParam()).c_str()), 0);
}

INSTANTIATE_TEST_SUITE_P(All, LessonTest, testing::Values(TESSERA_LESSONS),
                         [](const auto& test) { return std::string("cuda_") + test.param; });

}  // namespace
}  // namespace tessera::test
