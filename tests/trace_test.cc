#include "server/rpc/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_replace.h"

namespace tessera {
namespace {

constexpr std::string_view kId = "4bf92f3577b34da6a3ce929d0e0e4736";
constexpr std::string_view kParent = "00f067aa0ba902b7";

// Returns a header with the ids in place of ID and PARENT.
std::string Header(const std::string& text) {
  return absl::StrReplaceAll(text, {{"ID", std::string(kId)}, {"PARENT", std::string(kParent)}});
}

TEST(TraceTest, ReadsIdsAndTheBitOfTheFlagsThatSaysSampled) {
  for (const std::string flags : {"00", "01", "02", "03", "fe", "ff", "0a", "10"}) {
    const bool sampled = flags == "01" || flags == "03" || flags == "ff";
    const Trace trace = ParseTraceparent(Header("00-ID-PARENT-") + flags);
    EXPECT_TRUE(trace.known) << flags;
    EXPECT_EQ(trace.id(), kId);
    EXPECT_EQ(std::string_view(trace.parent_id.data(), trace.parent_id.size()), kParent);
    EXPECT_EQ(trace.sampled, sampled) << flags;
  }
}

TEST(TraceTest, LaterVersionsMayHaveMoreFields) {
  for (const char* text :
       {"cc-ID-PARENT-01", "cc-ID-PARENT-01-", "cc-ID-PARENT-01-more",
        "cc-ID-PARENT-01-00-anything at all", "01-ID-PARENT-01", "fe-ID-PARENT-01"}) {
    const Trace trace = ParseTraceparent(Header(text));
    EXPECT_TRUE(trace.known) << text;
    EXPECT_EQ(trace.id(), kId);
    EXPECT_TRUE(trace.sampled);
  }
  for (const char* rest : {".", "0", " ", ".what"})
    EXPECT_FALSE(ParseTraceparent(Header("cc-ID-PARENT-01") + rest).known) << rest;
}

TEST(TraceTest, WhatIsMalformedNamesNone) {
  for (const std::string text :
       {"", "ff-ID-PARENT-01", "0-ID-PARENT-01", "000-ID-PARENT-01", "00-ID-PARENT-1",
        "00-ID-PARENT-001", "00-ID-PARENT-01-", "00-ID-PARENT-01-more", "00-ID-PARENT-",
        " 00-ID-PARENT-01", "00-ID-PARENT-01 ", "00-bf92f3577b34da6a3ce929d0e0e4736-PARENT-01",
        "00-ID-0f067aa0ba902b7-01", "00-00000000000000000000000000000000-PARENT-01",
        "00-ID-0000000000000000-01", "-------------------------------------------------------"}) {
    const Trace trace = ParseTraceparent(Header(text));
    EXPECT_FALSE(trace.known) << text;
    EXPECT_EQ(trace.id(), "") << text;
    EXPECT_FALSE(trace.sampled) << text;
  }
  EXPECT_FALSE(ParseTraceparent(std::string(4096, '0')).known);
}

// For any change of one character, the header is accepted or rejected according to the grammar.
TEST(TraceTest, EachCharacterMatters) {
  const std::string text = Header("00-ID-PARENT-01");
  for (std::size_t i = 0; i < text.size(); ++i) {
    for (int c = 0; c < 256; ++c) {
      std::string other = text;
      other[i] = static_cast<char>(c);
      const bool digit = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
      const bool dash = i == 2 || i == 35 || i == 52;
      const bool good = dash ? c == '-' : digit && other.substr(0, 2) != "ff";
      EXPECT_EQ(ParseTraceparent(other).known, good) << i << ' ' << c;
    }
    EXPECT_FALSE(ParseTraceparent(text.substr(0, i)).known) << i;
  }
}

TEST(TraceTest, SpanIdsDiffer) {
  const auto a = MakeSpanId(), b = MakeSpanId();
  EXPECT_NE(a, b);
  EXPECT_THAT(std::string(a.data(), a.size()), testing::MatchesRegex("[0-9a-f]+"));
}

}  // namespace
}  // namespace tessera
