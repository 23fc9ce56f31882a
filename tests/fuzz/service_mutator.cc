// How libFuzzer changes the inputs of service_fuzz: half of the time as it does all others, half by
// fields of the requests, so that they stay messages.
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/service_calls.h"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most);

namespace tessera {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  void Mutate(std::vector<FuzzCall>& calls) {
    const std::size_t at = Below(calls.size() + 1);
    switch (Below(8)) {
      case 0:  // a new call
        if (calls.size() < 16)
          calls.insert(calls.begin() + static_cast<std::ptrdiff_t>(at),
                       {Below(std::size(kFuzzMethods)), ""});
        break;
      case 1:  // one less
        if (at < calls.size()) calls.erase(calls.begin() + static_cast<std::ptrdiff_t>(at));
        return;
      case 2:  // one of them again
        if (at < calls.size() && calls.size() < 16)
          calls.insert(calls.begin() + static_cast<std::ptrdiff_t>(Below(calls.size())), calls[at]);
        return;
      default:
        break;
    }
    if (calls.empty()) return;
    FuzzCall& call = calls[Below(calls.size())];
    const std::unique_ptr<Message> request(PrototypeOf(MethodOf(call.method)->input_type()).New());
    static_cast<void>(request->ParsePartialFromString(call.request));
    for (std::size_t n = 1 + Below(3); n > 0; --n) MutateMessage(*request, 0);
    call.request = request->SerializePartialAsString();
  }

 private:
  std::size_t Below(std::size_t n) { return random_() % n; }

  std::int64_t Integer() {
    constexpr std::int64_t kEdges[] = {0, 1, 2, 3, 4, 7, 8, 16, 64, 255, 256, 4096, 65536};
    switch (Below(8)) {
      case 0:
        return -static_cast<std::int64_t>(Below(5));
      case 1:
        return static_cast<std::int64_t>((std::uint64_t{1} << Below(64)) - Below(2));
      case 2:
        return std::numeric_limits<std::int64_t>::max() - static_cast<std::int64_t>(Below(2));
      case 3:
        return static_cast<std::int64_t>(random_());
      default:
        return kEdges[Below(std::size(kEdges))];
    }
  }

  std::string Bytes() {
    static const char* const kWords[] = {"",
                                         "x",
                                         "y",
                                         "a/b",
                                         "cpu",
                                         "cpu_serial",
                                         "fixed_tree",
                                         "one_node",
                                         "0123456789abcdef",
                                         "cpu_naive",
                                         "cpu_axis",
                                         "cpu_parallel",
                                         "cpu_select",
                                         "cpu_library",
                                         "cpu_register_tiled",
                                         "cpu_cache_tiled"};
    if (Below(3) != 0) return kWords[Below(std::size(kWords))];
    std::string bytes(Below(2) == 0 ? Below(65) : 4 * Below(300), '\0');
    const std::size_t kinds = Below(256) + 1;
    for (char& c : bytes) c = static_cast<char>(Below(kinds));
    return bytes;
  }

  void MutateMessage(Message& message, int depth) {
    const google::protobuf::Descriptor& type = *message.GetDescriptor();
    if (type.field_count() == 0) return;
    // Mostly a field that is set, whatever is below it.
    std::vector<const FieldDescriptor*> set;
    message.GetReflection()->ListFields(message, &set);
    const FieldDescriptor& field =
        !set.empty() && Below(3) != 0
            ? *set[Below(set.size())]
            : *type.field(static_cast<int>(Below(static_cast<std::size_t>(type.field_count()))));
    if (Below(10) == 0) {
      message.GetReflection()->ClearField(&message, &field);
    } else if (field.is_repeated()) {
      MutateRepeated(message, field, depth);
    } else {
      MutateSingle(message, field, depth);
    }
  }

  void MutateSingle(Message& message, const FieldDescriptor& field, int depth) {
    const Reflection& reflection = *message.GetReflection();
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        return reflection.SetInt32(&message, &field, static_cast<std::int32_t>(Integer()));
      case FieldDescriptor::CPPTYPE_INT64:
        return reflection.SetInt64(&message, &field, Integer());
      case FieldDescriptor::CPPTYPE_UINT32:
        return reflection.SetUInt32(&message, &field, static_cast<std::uint32_t>(Integer()));
      case FieldDescriptor::CPPTYPE_UINT64:
        return reflection.SetUInt64(&message, &field, static_cast<std::uint64_t>(Integer()));
      case FieldDescriptor::CPPTYPE_DOUBLE:
        return reflection.SetDouble(&message, &field, static_cast<double>(Integer()) / 3);
      case FieldDescriptor::CPPTYPE_FLOAT:
        return reflection.SetFloat(&message, &field, static_cast<float>(Integer()) / 3);
      case FieldDescriptor::CPPTYPE_BOOL:
        return reflection.SetBool(&message, &field, Below(2) != 0);
      case FieldDescriptor::CPPTYPE_ENUM:
        return reflection.SetEnumValue(&message, &field, EnumValue(field));
      case FieldDescriptor::CPPTYPE_STRING:
        return reflection.SetString(&message, &field, Bytes());
      case FieldDescriptor::CPPTYPE_MESSAGE:
        if (depth < 8) MutateMessage(*reflection.MutableMessage(&message, &field), depth + 1);
        return;
    }
  }

  int EnumValue(const FieldDescriptor& field) {
    const google::protobuf::EnumDescriptor& type = *field.enum_type();
    const auto count = static_cast<std::size_t>(type.value_count());
    return Below(20) == 0 ? static_cast<int>(Integer())
                          : type.value(static_cast<int>(Below(count)))->number();
  }

  void MutateRepeated(Message& message, const FieldDescriptor& field, int depth) {
    const Reflection& reflection = *message.GetReflection();
    const int size = reflection.FieldSize(message, &field);
    if (size > 0 && Below(4) == 0) return reflection.RemoveLast(&message, &field);
    const int at = static_cast<int>(Below(static_cast<std::size_t>(size) + 1));
    const bool add = at == size;
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32: {
        const auto value = static_cast<std::int32_t>(Integer());
        return add ? reflection.AddInt32(&message, &field, value)
                   : reflection.SetRepeatedInt32(&message, &field, at, value);
      }
      case FieldDescriptor::CPPTYPE_INT64: {
        const std::int64_t value = Integer();
        return add ? reflection.AddInt64(&message, &field, value)
                   : reflection.SetRepeatedInt64(&message, &field, at, value);
      }
      case FieldDescriptor::CPPTYPE_UINT32: {
        const auto value = static_cast<std::uint32_t>(Integer());
        return add ? reflection.AddUInt32(&message, &field, value)
                   : reflection.SetRepeatedUInt32(&message, &field, at, value);
      }
      case FieldDescriptor::CPPTYPE_STRING:
        return add ? reflection.AddString(&message, &field, Bytes())
                   : reflection.SetRepeatedString(&message, &field, at, Bytes());
      case FieldDescriptor::CPPTYPE_ENUM:
        return add ? reflection.AddEnumValue(&message, &field, EnumValue(field))
                   : reflection.SetRepeatedEnumValue(&message, &field, at, EnumValue(field));
      case FieldDescriptor::CPPTYPE_MESSAGE:
        if (depth < 8)
          MutateMessage(add ? *reflection.AddMessage(&message, &field)
                            : *reflection.MutableRepeatedMessage(&message, &field, at),
                        depth + 1);
        return;
      default:
        return;  // the protocol has no other
    }
  }

  std::mt19937_64 random_;
};

}  // namespace
}  // namespace tessera

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t most, unsigned seed) {
  if (seed % 2 == 0) return LLVMFuzzerMutate(data, size, most);
  std::vector<tessera::FuzzCall> calls = tessera::ParseCalls(tessera::Text(data, size));
  tessera::Mutator(seed).Mutate(calls);
  const std::string bytes = tessera::JoinCalls(calls);
  if (bytes.size() > most) return LLVMFuzzerMutate(data, size, most);
  std::memcpy(data, bytes.data(), bytes.size());
  return bytes.size();
}
