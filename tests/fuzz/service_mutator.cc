// Mutates the inputs of service_fuzz: half of the time as libFuzzer mutates all other inputs, and
// half of the time field by field, so that requests remain valid messages.
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/wire_format_lite.h"
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
      case 0:  // A new call.
        if (calls.size() < 16)
          calls.insert(calls.begin() + static_cast<std::ptrdiff_t>(at),
                       {Below(std::size(kFuzzMethods)), ""});
        break;
      case 1:  // Removes a call.
        if (at < calls.size()) calls.erase(calls.begin() + static_cast<std::ptrdiff_t>(at));
        return;
      case 2:  // Repeats a call.
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
    static const std::vector<std::string> words = absl::StrSplit(
        ",x,y,a/b,cpu,cpu_serial,fixed_tree,one_node,0123456789abcdef,cpu_naive,cpu_axis,"
        "cpu_parallel,cpu_select,cpu_library,cpu_register_tiled,cpu_cache_tiled",
        ',');
    if (Below(3) != 0) return words[Below(words.size())];
    std::string bytes(Below(2) == 0 ? Below(65) : 4 * Below(300), '\0');
    const std::size_t kinds = Below(256) + 1;
    for (char& c : bytes) c = static_cast<char>(Below(kinds));
    return bytes;
  }

  void MutateMessage(Message& message, int depth) {
    const google::protobuf::Descriptor& type = *message.GetDescriptor();
    if (type.field_count() == 0) return;
    // Usually picks a field that is set, at any depth.
    std::vector<const FieldDescriptor*> set;
    message.GetReflection()->ListFields(message, &set);
    const FieldDescriptor& field =
        !set.empty() && Below(3) != 0
            ? *set[Below(set.size())]
            : *type.field(static_cast<int>(Below(static_cast<std::size_t>(type.field_count()))));
    const Reflection& reflection = *message.GetReflection();
    const int size = field.is_repeated() ? reflection.FieldSize(message, &field) : 0;
    if (Below(10) == 0) {
      reflection.ClearField(&message, &field);
    } else if (size > 0 && Below(4) == 0) {
      reflection.RemoveLast(&message, &field);
    } else if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
      field.is_repeated() ? reflection.AddString(&message, &field, Bytes())
                          : reflection.SetString(&message, &field, Bytes());
    } else if (field.cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) {
      SetNumber(message, field);
    } else if (depth < 8) {
      const int at = static_cast<int>(Below(static_cast<std::size_t>(size) + 1));
      MutateMessage(!field.is_repeated() ? *reflection.MutableMessage(&message, &field)
                    : at == size         ? *reflection.AddMessage(&message, &field)
                                         : *reflection.MutableRepeatedMessage(&message, &field, at),
                    depth + 1);
    }
  }

  // Appends the field's bytes to the bytes of the message, which adds an element to a repeated
  // field.
  void SetNumber(Message& message, const FieldDescriptor& field) {
    using google::protobuf::internal::WireFormatLite;
    const auto type = static_cast<WireFormatLite::FieldType>(field.type());
    std::string bytes;
    {
      google::protobuf::io::StringOutputStream stream(&bytes);
      google::protobuf::io::CodedOutputStream out(&stream);
      const auto wire = WireFormatLite::WireTypeForFieldType(type);
      out.WriteTag(WireFormatLite::MakeTag(field.number(), wire));
      if (field.cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE) {
        out.WriteLittleEndian64(WireFormatLite::EncodeDouble(static_cast<double>(Integer()) / 3));
      } else if (wire == WireFormatLite::WIRETYPE_FIXED32) {
        out.WriteLittleEndian32(static_cast<std::uint32_t>(Integer()));
      } else {
        const std::int64_t value =
            field.cpp_type() == FieldDescriptor::CPPTYPE_ENUM ? EnumValue(field) : Integer();
        out.WriteVarint64(static_cast<std::uint64_t>(value));
      }
    }
    google::protobuf::io::CodedInputStream in(reinterpret_cast<const std::uint8_t*>(bytes.data()),
                                              static_cast<int>(bytes.size()));
    static_cast<void>(message.MergePartialFromCodedStream(&in));
  }

  int EnumValue(const FieldDescriptor& field) {
    const google::protobuf::EnumDescriptor& type = *field.enum_type();
    const auto count = static_cast<std::size_t>(type.value_count());
    return Below(20) == 0 ? static_cast<int>(Integer())
                          : type.value(static_cast<int>(Below(count)))->number();
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
