#include "server/observe/log.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <sstream>

#include "kernels/client_and_server/printable.h"
#include "server/clock.h"
#include "spdlog/spdlog.h"
#include "tests/test_server.h"

namespace tessera {
namespace {

TEST(PrintableTest, KeepsTextAndEscapesTheRest) {
  EXPECT_EQ(Printable("plain text, \xc3\xa9 and \xf0\x9f\x98\x80"),
            "plain text, \xc3\xa9 and \xf0\x9f\x98\x80");
  EXPECT_EQ(Printable(std::string("a\nb\r\t\x1b[2J\0\x7f", 11)),
            "a\\x0ab\\x0d\\x09\\x1b[2J\\x00\\x7f");
  EXPECT_EQ(Printable("\xc2\x9b"), "\\xc2\\x9b") << "a control sequence in one character";
  EXPECT_EQ(Printable("\xe2\x80\xa8\xe2\x80\xae\xe2\x81\xa6"),
            "\\xe2\\x80\\xa8\\xe2\\x80\\xae\\xe2\\x81\\xa6")
      << "a line separator, and text from right to left";
  for (const std::string mark : {"\xd8\x9c", "\xe2\x80\x8f", "\xe2\x81\xa9"})
    EXPECT_EQ(Printable(mark)[0], '\\') << "it changes the direction of writing: " << mark;
  EXPECT_EQ(Printable("\xff\xc0\x80\xed\xa0\x80\xe2\x82"),
            "\\xff\\xc0\\x80\\xed\\xa0\\x80\\xe2\\x82")
      << "not UTF-8";
}

TEST(PrintableTest, CutsBetweenCharacters) {
  const std::string cut = Printable(std::string(1000, 'x'), 100);
  EXPECT_EQ(cut, std::string(100, 'x') + "...");
  std::string wide;
  for (int i = 0; i < 100; ++i) wide += "\xe2\x82\xac";
  const std::string some = Printable(wide, 100);
  EXPECT_EQ((some.size() - 3) % 3, 0u);
  EXPECT_LE(some.size(), 106u);
}

// A pipe in place of standard error.
class Pipe {
 public:
  Pipe() {
    EXPECT_EQ(pipe2(ends_, O_CLOEXEC), 0);
    EXPECT_EQ(dup2(ends_[1], STDERR_FILENO), STDERR_FILENO);
  }
  // Restores standard error once the log is written.
  void End() {
    FlushLog(absl::Seconds(20));
    dup2(before_, STDERR_FILENO);
    close(before_);
    close(ends_[1]);
  }
  // Returns everything that arrives before End.
  std::string Read() {
    std::string text;
    char block[65536];
    for (ssize_t size = 0; (size = read(ends_[0], block, sizeof(block))) > 0;)
      text.append(block, static_cast<std::size_t>(size));
    close(ends_[0]);
    return text;
  }

 private:
  int ends_[2];
  const int before_ = dup(STDERR_FILENO);
};

// Returns what is written to standard error while f runs.
template <class F>
std::string Logged(bool json, const F& f) {
  Pipe pipe;
  SetUpLog("info", json);
  f();
  pipe.End();
  return pipe.Read();
}

TEST(LogTest, TimesOfJsonLinesHaveThreeDigitsOfMilliseconds) {
  const std::string text = Logged(true, [] {
    const auto time = spdlog::log_clock::from_time_t(0) + std::chrono::milliseconds(7);
    spdlog::default_logger()->log(time, {}, spdlog::level::info, "a line");
  });
  EXPECT_THAT(text, testing::StartsWith("{\"time\":\"1970-01-01T00:00:00.007Z\""));
}

// Returns the record of a call without a trace.
CallRecord CallOf(std::string_view method) {
  return {.method = method, .strategy = "", .trace = {}};
}

TEST(LogTest, WhatIsKnownOfACallAreFieldsInJson) {
  const std::string id = "4bf92f3577b34da6a3ce929d0e0e4736";
  const Trace trace = ParseTraceparent("00-" + id + "-00f067aa0ba902b7-01");
  const std::vector<BufferStore::DeviceLimit> nowhere;
  const Tenant tenant("vision", 1, std::make_unique<BufferStore>(nowhere, BufferStore::Limits{}));
  CallRecord call{.method = "Method", .strategy = "a\"strategy", .tenant = &tenant, .trace = trace};
  call.begun = call.accepted + absl::Milliseconds(1500);
  call.ended = call.begun + absl::Seconds(1);
  const absl::Status status = MakeError(absl::StatusCode::kInvalidArgument, "BAD_NAME",
                                        "\"a\x1e"
                                        "b\"",
                                        {});
  const std::string fields =
      R"(","method":"Method","peer":"peer","tenant":"vision","trace_id":")" + id + R"(",)";
  const std::string times =
      R"("strategy":"a\"strategy","total_seconds":2.500000,"queue_seconds":1.500000,)"
      R"("run_seconds":1.000000})"
      "\n";
  EXPECT_THAT(
      Logged(true, [&] { LogFailedCall(call, "peer", status); }),
      testing::EndsWith("\"message\":\"Method from peer (tenant vision): INVALID_ARGUMENT "
                        "BAD_NAME: \\\"a\\\\x1eb\\\"" +
                        fields + R"("code":"INVALID_ARGUMENT","reason":"BAD_NAME",)" + times));
  EXPECT_THAT(Logged(true, [&] { LogSlowCall(call, "peer", absl::StatusCode::kOk); }),
              testing::EndsWith(fields + R"("code":"OK",)" + times));
  EXPECT_THAT(Logged(true, [&] { LogFailedCall(CallOf("Method"), "peer", status); }),
              testing::EndsWith("\\\"a\\\\x1eb\\\"\",\"method\":\"Method\",\"peer\":\"peer\","
                                R"("code":"INVALID_ARGUMENT","reason":"BAD_NAME"})"
                                "\n"));
  EXPECT_THAT(Logged(false, [&] { LogFailedCall(call, "peer", status); }),
              testing::EndsWith("Method from peer (tenant vision): INVALID_ARGUMENT BAD_NAME: "
                                "\"a\\x1eb\" (trace " +
                                id + ")\n"));
}

// At most ten lines are written per second, and each call without a line is counted once.
TEST(LogTest, FailedCallsWithoutALineAreCountedOnce) {
  const absl::Status status =
      MakeError(absl::StatusCode::kInvalidArgument, "BAD_NAME", "no name", {});
  int calls = 0;
  const std::string text = Logged(false, [&] {
    // Makes a call, and returns the number of bytes that have been written.
    const auto call = [&] {
      LogFailedCall(CallOf("Method"), "peer", status);
      ++calls;
      FlushLog(absl::Seconds(20));
      int bytes = 0;
      EXPECT_EQ(ioctl(STDERR_FILENO, FIONREAD, &bytes), 0);
      return bytes;
    };
    // Makes calls until a line is dropped. A second later, a line is written again.
    for (int before = 0, now = 0; (now = call()) > before && calls < 100;) before = now;
    const int before = call();
    AdvanceSteadyNow(absl::Seconds(1));
    EXPECT_GT(call(), before);
  });
  std::istringstream words(text);
  int written = 0, counted = 0;
  std::string before;
  for (std::string word; words >> word; before = word) {
    if (word == "Method") ++written;
    if (word == "more") counted += std::stoi(before);
  }
  EXPECT_GT(counted, 0) << text;
  EXPECT_EQ(written + counted, calls) << text;
}

TEST(LogTest, CallersWithoutRightsHideNoFailures) {
  const std::string text = Logged(false, [] {
    for (int i = 0; i < 100; ++i) {
      LogFailedCall(CallOf("Stranger"), "peer", absl::UnauthenticatedError("no token"));
      LogFailedCall(CallOf("Careless"), "peer", absl::InvalidArgumentError("no name"));
    }
    LogFailedCall(CallOf("Damaged"), "peer", absl::DataLossError("bad checksum"));
  });
  EXPECT_THAT(text, testing::HasSubstr("Stranger"));
  EXPECT_THAT(text, testing::HasSubstr("Careless"));
  EXPECT_THAT(text, testing::HasSubstr("Damaged"));
}

TEST(LogTest, ThatThereIsNoBufferIsAnAnswer) {
  const std::string text = Logged(false, [] {
    const absl::Status none =
        MakeError(absl::StatusCode::kNotFound, "BUFFER_NOT_FOUND", "there is no buffer 'x'", {});
    LogFailedCall(CallOf("GetBuffer"), "peer", none);
    LogFailedCall(CallOf("GetBuffer"), "peer", absl::InternalError("no answer"));
  });
  EXPECT_THAT(text, testing::HasSubstr(" info GetBuffer from peer: NOT_FOUND"));
  EXPECT_THAT(text, testing::ContainsRegex(" warn[a-z]* GetBuffer from peer: INTERNAL"));
}

// Standard error is a full pipe without a reader. Threads that log must not block.
TEST(LogTest, NoThreadWaitsForAReader) {
  Pipe pipe;
  SetUpLog("info", false);
  // The first lines fill the pipe, and then the writer blocks.
  spdlog::info("number 0");
  FlushLog(absl::Seconds(20));
  for (int i = 1; i < 20'000; ++i) {
    spdlog::info("a line of some length, of which a pipe holds a few hundred, number {}", i);
  }
  LogDroppedLines();
  FlushLog(absl::Milliseconds(20));  // This call returns as well.
  // Once there is a reader, the writer continues and reports the missing lines.
  std::string text;
  std::thread reader([&] { text = pipe.Read(); });
  pipe.End();
  reader.join();
  EXPECT_NE(text.find("number 0\n"), text.npos);
  EXPECT_NE(text.find("number 19999\n"), text.npos);
  // Of the waiting lines, the oldest are missing. When the writer blocks depends on the machine.
  EXPECT_LT(std::count(text.begin(), text.end(), '\n'), 10'000);
  EXPECT_NE(text.find("lines of this log were dropped"), text.npos);
}

}  // namespace
}  // namespace tessera
