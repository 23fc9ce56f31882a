// Compares the memory that MessageLayout predicts for a message with what protobuf allocates, and
// the memory that a program reports in addition to its message with what the program allocates.
#include "server/rpc/message_memory.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_replace.h"
#include "google/protobuf/arena.h"
#include "google/protobuf/stubs/logging.h"
#include "google/protobuf/text_format.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "server/compute/program_run.h"
#include "server/core.h"
#include "tessera/v1/buffer.pb.h"
#include "tessera/v1/compute.pb.h"

namespace {

std::atomic<std::size_t> heap_bytes{0}, most_heap_bytes{0};

}  // namespace

// Counts the allocated bytes, including the allocator's overhead.
void* operator new(std::size_t size) {
  void* const memory = std::malloc(std::max<std::size_t>(size, 1));
  if (memory == nullptr) throw std::bad_alloc();
  const std::size_t bytes = heap_bytes += malloc_usable_size(memory) + sizeof(std::size_t);
  if (bytes > most_heap_bytes) most_heap_bytes = bytes;
  return memory;
}
void operator delete(void* memory) noexcept {
  if (memory != nullptr) heap_bytes -= malloc_usable_size(memory) + sizeof(std::size_t);
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }

namespace tessera {
namespace {

std::string Varint(std::uint64_t value) {
  std::string bytes;
  for (; value > 127; value >>= 7) bytes += static_cast<char>(value | 128);
  return bytes + static_cast<char>(value);
}
std::string Field(std::uint64_t number, std::string_view value) {
  return Varint(number << 3 | 2).append(Varint(value.size())).append(value);
}
std::string Times(std::size_t n, std::string_view bytes) {
  std::string all;
  all.reserve(n * bytes.size());
  for (; n > 0; --n) all += bytes;
  return all;
}

class MessageMemoryTest : public testing::Test {
 protected:
  // Returns the bytes of a message in the form in which gRPC has them.
  grpc::ByteBuffer Sliced(std::string_view bytes, std::size_t longest) {
    std::vector<grpc::Slice> slices;
    for (std::size_t at = 0; at < bytes.size(); at += longest) {
      const std::string_view part = bytes.substr(at, longest);
      slices.emplace_back(part.data(), part.size());
    }
    return grpc::ByteBuffer(slices.data(), slices.size());
  }

  // Returns the maximum memory that parsing takes if the message is valid.
  template <class Message>
  std::optional<std::size_t> Taken(const grpc::ByteBuffer& bytes) {
    grpc::ByteBuffer same = bytes;
    google::protobuf::Arena arena;
    const std::size_t before = heap_bytes;
    most_heap_bytes = before;
    auto* message = google::protobuf::Arena::CreateMessage<Message>(&arena);
    grpc::ProtoBufferReader reader(&same);
    const bool parsed = message->ParseFromZeroCopyStream(&reader);
    return parsed ? std::optional(most_heap_bytes - before) : std::nullopt;
  }

  // Checks any bytes. Returns the memory of the message if they are a valid one.
  template <class Message>
  std::optional<std::size_t> Check(const std::string& bytes, std::size_t longest = 16384) {
    const grpc::ByteBuffer buffer = Sliced(bytes, longest);
    const MessageLayout& layout = MessageLayout::Of<Message>();
    const std::size_t before = heap_bytes;
    most_heap_bytes = before;
    const std::optional<MessageBound> bound = layout.Bound(std::string_view(bytes));
    EXPECT_EQ(most_heap_bytes, before) << "it allocates";
    EXPECT_TRUE(bound == layout.Bound(buffer));
    const std::optional<std::size_t> taken = Taken<Message>(buffer);
    if (!taken.has_value()) return taken;
    EXPECT_TRUE(bound.has_value()) << "it refuses a message";
    last_bound_ = bound.value_or(MessageBound()).bytes;
    EXPECT_GE(last_bound_, *taken) << bytes.size() << " bytes";
    return taken;
  }

  std::size_t last_bound_ = 0;
  std::mt19937_64 random_{1};
  const google::protobuf::LogSilencer quiet_;
};

std::string DotSteps(int n) {
  v1::ExecuteRequest program;
  for (int i = 0; i < n; ++i) {
    const std::string view =
        absl::StrCat("view { offset: ", 1000 * i, " shape: [100, 1000] strides: [-1000, 1] }");
    EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(
        "dot { a { buffer: 'some/buffer/of/a/usual/length' " + view + " } b { buffer: 'another' " +
            view + " } }",
        program.add_steps()));
  }
  return program.SerializeAsString();
}

TEST_F(MessageMemoryTest, UsualMessagesTakeHalfOfTheBoundOrMore) {
  for (const int steps : {20, 200, 4096}) {
    const std::optional<std::size_t> taken = Check<v1::ExecuteRequest>(DotSteps(steps));
    ASSERT_TRUE(taken.has_value());
    EXPECT_LE(last_bound_, 2 * *taken + 8192) << steps << " steps";
  }
  v1::ReduceRequest request;
  request.mutable_x()->mutable_tensor()->set_data(std::string(1 << 20, 'x'));
  const std::optional<std::size_t> taken = Check<v1::ReduceRequest>(request.SerializeAsString());
  ASSERT_TRUE(taken.has_value());
  EXPECT_LE(last_bound_, *taken + *taken / 32);
}

TEST_F(MessageMemoryTest, MessagesThatAreMadeToTakeMuch) {
  constexpr std::size_t kMuch = 1 << 19;
  const std::vector<std::string> messages = {
      Times(kMuch, Varint(99 << 3 | 3) + Varint(99 << 3 | 4)),          // Groups.
      Times(60, Varint(15 << 3 | 3)) + Times(60, Varint(15 << 3 | 4)),  // Nested groups.
      Times(kMuch, Varint(15 << 3) + Varint(1)),
      Times(kMuch, Field(15, "")),
      Times(kMuch, Field(15, "twenty bytes of text")),
      Field(1, Field(15, std::string(kMuch, 'x'))),
      Times(kMuch, Field(1, "")),  // Steps, or operands.
      Times(kMuch, Field(1, Field(1, ""))),
      Times(kMuch, Field(1, Field(2, Field(1, "")))),
      Times(kMuch, Field(1, Field(15, ""))),
      Field(1, Field(2, Field(2, std::string(kMuch, 1)))),  // A shape.
      Field(1, Field(2, Times(kMuch, Varint(2 << 3) + Varint(1)))),
      Field(1, Times(40, Field(2, Field(2, std::string(700, 1))))),
      Times(700, Field(1, Field(2, Field(2, std::string(600, 1))) + Field(1, "x"))),
      Times(700, Field(1, Field(1, Field(1, Field(2, Field(2, std::string(600, 1))))))),
      // Strings that are replaced by longer strings.
      Field(1, Field(1, std::string(kMuch, 'x'))) + Field(1, Field(1, std::string(kMuch + 1, 'x'))),
      Field(1, std::string(kMuch, 'x')) + Field(1, std::string(kMuch + 1, 'x')),
      Field(1, Field(1, Field(1, std::string(kMuch, 'x'))) +
                   Field(1, Field(1, std::string(kMuch + 1, 'x')))),
  };
  double largest = 0;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    SCOPED_TRACE(i);
    const std::string& bytes = messages[i];
    for (const auto& taken :
         {Check<v1::ExecuteRequest>(bytes), Check<v1::DotRequest>(bytes),
          Check<v1::MapRequest>(bytes), Check<v1::MatmulRequest>(bytes),
          Check<v1::GetBufferRequest>(bytes), Check<v1::CreateBufferRequest>(bytes),
          Check<v1::UploadRequest>(bytes)}) {
      if (!taken.has_value()) continue;
      largest = std::max(largest, static_cast<double>(*taken) / static_cast<double>(bytes.size()));
    }
  }
  EXPECT_LT(largest, 60);
}

TEST_F(MessageMemoryTest, AnyBytesThatAreAMessageAreWithinTheBound) {
  const auto below = [&](std::size_t n) { return random_() % n; };
  int valid = 0;
  for (int i = 0; i < 20000; ++i) {
    // Nested fields, whose numbers may be unknown.
    std::string bytes;
    for (std::size_t n = below(30); n > 0; --n) {
      const std::uint64_t number = 1 + below(below(4) == 0 ? 99 : 7);
      const std::size_t kind = below(9);
      if (kind == 0) bytes += Varint(number << 3) + Varint(random_() >> below(64));
      if (kind == 1) bytes += Varint(number << 3 | 5) + "1234";
      if (kind == 2) bytes += Varint(number << 3 | 1) + "12345678";
      if (kind == 3) bytes = Varint(number << 3 | 3) + bytes + Varint(number << 3 | 4);
      if (kind == 4) bytes += Field(number, std::string(below(3000), 'x'));
      if (kind == 5) bytes += Field(number, std::string(below(20), 1));
      if (kind == 6) bytes += bytes;
      if (kind > 6) bytes = Field(number, bytes);
      if (bytes.size() > 100'000) break;
    }
    if (below(3) == 0 && !bytes.empty()) {
      for (std::size_t n = 1 + below(3); n > 0; --n)
        bytes[below(bytes.size())] = static_cast<char>(below(256));
    }
    const std::size_t longest = 1 + below(below(2) == 0 ? 20 : 20000);
    valid += Check<v1::ExecuteRequest>(bytes, longest).has_value();
    valid += Check<v1::DotRequest>(bytes, longest).has_value();
    valid += Check<v1::CreateBufferRequest>(bytes, longest).has_value();
    if (HasFailure()) return;
  }
  EXPECT_GT(valid, 10000);
}

TEST_F(MessageMemoryTest, WhatIsNoMessageHasNoBound) {
  const MessageLayout& layout = MessageLayout::Of<v1::ExecuteRequest>();
  for (const std::string bytes :
       {"\x0a\x7f", "\x0b", "\x0c", "\x0a\x03\x0a\x7f\x01", "\xff\xff\xff\xff\xff\xff"})
    EXPECT_FALSE(layout.Bound(std::string_view(bytes)).has_value());
  EXPECT_FALSE(layout.Bound(std::string_view("\0", 1)).has_value());
}

class ProgramMemoryTest : public testing::Test {
 protected:
  ProgramMemoryTest() {
    Options options;
    options.memory_limit = {.bytes = 16 << 20};
    options.warm_up = false;
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(*OpenDevice("cpu"));
    core_ = *Core::Make(options, std::move(devices));
    caller_.tenant = &core_->tenants.unnamed();
  }
  // Returns a program in which each step is the text, in which # stands for the step's number.
  static v1::ExecuteRequest Program(int steps, const std::string& step) {
    v1::ExecuteRequest request;
    for (int i = 0; i < steps; ++i) {
      EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(
          absl::StrReplaceAll(step, {{"#", absl::StrCat(i)}}), request.add_steps()));
    }
    return request;
  }
  static std::string Map(int operands, int nodes, const std::string& result) {
    std::string map = "map { result { " + result + " } expression { nodes { operand: 0 } ";
    for (int n = 1; n < nodes; ++n)
      absl::StrAppend(&map, "nodes { op: MAP_OP_ABS args: ", n - 1, " }");
    map += " } ";
    for (int o = 0; o < operands; ++o)
      map += "operands { tensor { dtype: DTYPE_F32 data: '1234' } } ";
    return map + "}";
  }

  std::unique_ptr<Core> core_;
  Caller caller_;
};

TEST_F(ProgramMemoryTest, ThePlanIsWithinWhatIsCharged) {
  for (const int operands : {1, 2, 3, 8}) {
    for (const int nodes : {1, 64}) {
      const v1::ExecuteRequest request = Program(500, Map(operands, nodes, "scratch: true"));
      ProgramRun program(*core_->devices, core_->records.metrics(), caller_, request);
      const std::size_t before = heap_bytes;
      most_heap_bytes = before;
      Awaited awaited;
      ASSERT_TRUE(program.Prepare(awaited).ok());
      program.LeastMicroseconds(core_->devices->First());
      const std::size_t taken = most_heap_bytes - before;
      constexpr std::size_t kOneStep = 4096;  // Allocated while a step is checked.
      EXPECT_LE(taken, program.memory() + kOneStep) << operands << " operands, " << nodes;
      EXPECT_GE(2 * taken, program.memory()) << operands << " operands, " << nodes;
    }
  }
}

TEST_F(ProgramMemoryTest, TheResponseIsWithinWhatIsCharged) {
  const std::string tensor = "{ tensor { dtype: DTYPE_F32 data: '1234' } }";
  for (const std::string& step : {Map(1, 1, ""), Map(8, 1, "scratch: true"),
                                  Map(1, 1, "buffer { name: 'a/buffer/of/step#' }"),
                                  "dot { a " + tensor + " b " + tensor + " }",
                                  "dot { a { buffer: 'missing' } b " + tensor + " }",
                                  "reduce { op: REDUCE_OP_ARGMAX x " + tensor + " }"}) {
    for (const bool stats : {false, true}) {
      v1::ExecuteRequest request = Program(300, step);
      request.set_stats(stats);
      ProgramRun program(*core_->devices, core_->records.metrics(), caller_, request);
      Awaited awaited;
      ASSERT_TRUE(program.Prepare(awaited).ok());
      const auto stream = *MakeStream(core_->devices->First());
      ASSERT_TRUE(program.Plan(*stream).ok());
      ASSERT_TRUE(program.Run(*stream).ok());
      const std::size_t before = heap_bytes;
      most_heap_bytes = before;
      google::protobuf::Arena arena;
      auto* response = google::protobuf::Arena::CreateMessage<v1::ExecuteResponse>(&arena);
      ASSERT_TRUE(program.Answer(*stream, *response).ok());
      const std::string encoded = response->SerializeAsString();
      const std::size_t taken = most_heap_bytes - before;
      EXPECT_LE(taken, program.answer_memory()) << step << stats;
      EXPECT_GE(4 * taken, program.answer_memory()) << step << stats;
      for (int i = 0; i < 300; ++i)
        caller_.tenant->store().Delete(absl::StrCat("a/buffer/of/step", i), 0).IgnoreError();
    }
  }
}

}  // namespace
}  // namespace tessera
