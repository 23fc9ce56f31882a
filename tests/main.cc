// The main function of the test programs. Each program has the suites of one library. A link to the
// program with the name of a suite, such as dot_test, runs only the tests of dot_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string>

namespace {

bool IsIn(const std::string& file, const testing::TestInfo& test) {
  return std::filesystem::path(test.file()).filename() == file;
}

// Returns filter patterns for the tests that are not in the given file. All tests of one suite must
// be in one file.
std::string TestsElsewhere(const std::string& file) {
  std::string patterns;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    const bool here = IsIn(file, *suite.GetTestInfo(0));
    for (int j = 1; j < suite.total_test_count(); ++j) {
      if (IsIn(file, *suite.GetTestInfo(j)) == here) continue;
      std::cerr << suite.name() << " has tests in " << file << " and in another file\n";
      std::exit(1);
    }
    if (!here) patterns += std::string(":") + suite.name() + ".*";
  }
  return patterns;
}

// Cases for the CUDA device are listed on every machine. They run if there is a GPU or if one is
// required.
bool SkipsCuda() {
  return std::getenv("TESSERA_REQUIRE_GPU") == nullptr && !GTEST_FLAG_GET(list_tests) &&
         !std::filesystem::exists("/dev/nvidiactl") && !std::filesystem::exists("/dev/dxg");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string suite = std::filesystem::path(argv[0]).filename();
  testing::InitGoogleMock(&argc, argv);
  std::string without;
  if (suite.ends_with("_test")) without += TestsElsewhere(suite + ".cc");
  if (SkipsCuda()) without += ":*/cuda*";
  if (!without.empty()) {
    std::string filter = GTEST_FLAG_GET(filter);
    filter += filter.find('-') == std::string::npos ? "-" + without.substr(1) : without;
    GTEST_FLAG_SET(filter, filter);
  }
  return RUN_ALL_TESTS();
}
