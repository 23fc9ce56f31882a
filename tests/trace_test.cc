#include "server/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace tessera {
namespace {

constexpr std::string_view kId = "4bf92f3577b34da6a3ce929d0e0e4736";
constexpr std::string_view kParent = "00f067aa0ba902b7";

std::string Text(std::string_view version, std::string_view id, std::string_view parent,
                 std::string_view flags, std::string_view rest = "") {
  std::string text;
  for (const std::string_view part : {version, id, parent, flags}) {
    if (!text.empty()) text += '-';
    text += part;
  }
  return text.append(rest);
}

TEST(TraceTest, ReadsIdsAndTheBitOfTheFlagsThatSaysSampled) {
  for (const auto& [flags, sampled] : {std::pair("00", false),
                                       {"01", true},
                                       {"02", false},
                                       {"03", true},
                                       {"fe", false},
                                       {"ff", true},
                                       {"0a", false},
                                       {"0b", true},
                                       {"10", false}}) {
    const Trace trace = ParseTraceparent(Text("00", kId, kParent, flags));
    EXPECT_TRUE(trace.known) << flags;
    EXPECT_EQ(trace.id(), kId);
    EXPECT_EQ(std::string_view(trace.parent_id.data(), trace.parent_id.size()), kParent);
    EXPECT_EQ(trace.sampled, sampled) << flags;
  }
}

TEST(TraceTest, LaterVersionsMayHaveMoreFields) {
  for (const char* rest : {"", "-", "-more", "-00-anything at all"}) {
    const Trace trace = ParseTraceparent(Text("cc", kId, kParent, "01", rest));
    EXPECT_TRUE(trace.known) << rest;
    EXPECT_EQ(trace.id(), kId);
    EXPECT_TRUE(trace.sampled);
  }
  EXPECT_TRUE(ParseTraceparent(Text("01", kId, kParent, "00")).known);
  EXPECT_TRUE(ParseTraceparent(Text("fe", kId, kParent, "00")).known);
  for (const char* rest : {".", "0", " ", ".what"})
    EXPECT_FALSE(ParseTraceparent(Text("cc", kId, kParent, "01", rest)).known) << rest;
}

TEST(TraceTest, WhatIsMalformedNamesNone) {
  const std::string no_id(32, '0'), no_parent(16, '0');
  for (const std::string& text :
       {std::string(), std::string(55, '-'), std::string(4096, '0'), Text("ff", kId, kParent, "01"),
        Text("0", kId, kParent, "01"), Text("000", kId, kParent, "01"),
        Text("00", no_id, kParent, "01"), Text("00", kId, no_parent, "01"),
        Text("00", kId.substr(1), kParent, "01"), Text("00", kId, kParent.substr(1), "01"),
        Text("00", kId, kParent, "1"), Text("00", kId, kParent, "001"),
        Text("00", kId, kParent, "01", "-"), Text("00", kId, kParent, "01", "-more"),
        Text("00", kId, kParent, ""), " " + Text("00", kId, kParent, "01"),
        Text("00", kId, kParent, "01", " ")}) {
    const Trace trace = ParseTraceparent(text);
    EXPECT_FALSE(trace.known) << text;
    EXPECT_EQ(trace.id(), "") << text;
    EXPECT_FALSE(trace.sampled) << text;
  }
}

// Whatever is done to one character, the answer is that of the grammar.
TEST(TraceTest, EachCharacterMatters) {
  const std::string text = Text("00", kId, kParent, "01");
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
