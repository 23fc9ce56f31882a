#include "server/observe/span_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "server/clock.h"
#include "tests/temporary_file.h"

namespace tessera {
namespace {

CallRecord Sampled() {
  const absl::Time now = SteadyNow();
  CallRecord call{.method = "Dot", .strategy = "fixed_tree", .trace = {}};
  call.trace = ParseTraceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
  call.trace.span_id = MakeSpanId();
  call.accepted = now - absl::Milliseconds(3);
  call.begun = now - absl::Milliseconds(2);
  call.ended = now;
  return call;
}

std::uint64_t Lines(const std::string& path) {
  std::ifstream file(path);
  return static_cast<std::uint64_t>(
      std::count(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>(), '\n'));
}

// There are more simultaneous calls than any disk can record. Each of their spans is in the file or
// counted as dropped.
TEST(SpanFileTest, WhatIsNotWrittenIsCounted) {
  constexpr int kThreads = 4, kCalls = 5000;
  const TemporaryFile file("");
  Metrics metrics({});
  {
    SpanFile spans(file.path(), metrics);
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        for (int call = 0; call < kCalls; ++call) spans.Add(Sampled(), absl::OkStatus());
      });
    }
    for (std::thread& thread : threads) thread.join();
    spans.Flush(absl::Seconds(60));
    EXPECT_EQ(metrics.spans_written().value() + metrics.spans_dropped().value(),
              3u * kThreads * kCalls);
    EXPECT_GT(metrics.spans_written().value(), 0u);
    EXPECT_EQ(Lines(file.path()), metrics.spans_written().value());
  }
}

TEST(SpanFileTest, WhatIsQueuedIsWrittenInTheEnd) {
  const TemporaryFile file("");
  Metrics metrics({});
  for (int i = 1; i <= 50; ++i) {
    {
      SpanFile spans(file.path(), metrics);
      spans.Add(Sampled(), absl::OkStatus());
    }
    EXPECT_EQ(Lines(file.path()), 3u * static_cast<unsigned>(i));
  }
}

// If the pipe has no reader, nothing is written and nothing blocks.
TEST(SpanFileTest, AFlushOfWhatCannotBeWrittenEnds) {
  const TemporaryFile file("");
  const std::string pipe = file.path() + ".pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  Metrics metrics({});
  SpanFile spans(pipe, metrics);
  for (int i = 0; i < 100; ++i) spans.Add(Sampled(), absl::OkStatus());
  spans.Flush(absl::Seconds(60));
  EXPECT_EQ(metrics.spans_dropped().value(), 300u);
  unlink(pipe.c_str());
}

}  // namespace
}  // namespace tessera
