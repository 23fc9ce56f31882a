#include "kernels/cuda/compile/kernel_text.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/base/error.h"
#include "kernels/cuda/compile/operations_ptx.h"  // generated from operations.cu

namespace tessera::compiled {
namespace {

// Returns the name of a value type in operations.cu.
absl::string_view NameOf(ValueType type) {
  switch (type) {
    case ValueType::kF32:
      return "f32";
    case ValueType::kF64:
      return "f64";
    case ValueType::kI32:
      return "i32";
    case ValueType::kI64:
      return "i64";
    case ValueType::kBool:
      break;
  }
  return "bool";
}

bool IsLong(ValueType type) { return type == ValueType::kF64 || type == ValueType::kI64; }

// --- Functions of operations.cu ---

// The PTX text of operations.cu, split into parts: for each function, the lines between its braces;
// the header, with the version and the target; and the helper functions that the compiler has added
// for other functions to call.
class Operations {
 public:
  explicit Operations(absl::string_view text) {
    std::string function;        // the function of operations.cu that the line belongs to, if any
    std::string* to = &header_;  // destination of the line
    for (absl::string_view line : absl::StrSplit(text, '\n')) {
      if (absl::StartsWith(absl::StripLeadingAsciiWhitespace(line), "//")) continue;
      if (absl::StartsWith(line, ".visible .func")) {
        absl::string_view name = line.substr(0, line.rfind('('));
        name.remove_prefix(name.rfind(' ') + 1);
        function = std::string(name);
        to = nullptr;
        continue;
      }
      if (absl::StartsWith(line, ".func")) to = &helpers_;
      if (line == "}" && !function.empty()) {
        function.clear();
        to = nullptr;
      }
      if (to != nullptr) absl::StrAppend(to, line, "\n");
      if (line == "{" && !function.empty()) to = &bodies_[function];
    }
  }

  static const Operations& All() {
    static const auto& all =
        *new Operations({reinterpret_cast<const char*>(kOperationsPtx), sizeof kOperationsPtx});
    return all;
  }

  const std::string& header() const { return header_; }
  const std::string& helpers() const { return helpers_; }
  // REQUIRES: the function exists.
  const std::string& BodyOf(const std::string& function) const {
    const auto body = bodies_.find(function);
    if (body == bodies_.end()) std::abort();
    return body->second;
  }

 private:
  std::string header_, helpers_;
  std::map<std::string, std::string> bodies_;
};

// Returns the size in bits of a register such as "%r12": 16, 32 or 64.
int BitsOf(absl::string_view reg) {
  if (absl::StartsWith(reg, "%rs")) return 16;
  return absl::StartsWith(reg, "%rd") || absl::StartsWith(reg, "%fd") ? 64 : 32;
}

// --- The kernel ---

class Kernel {
 public:
  explicit Kernel(const KernelPlan& plan) : plan_(plan), program_(*plan.program) {}

  std::string Text() {
    Begin();
    Group();
    LastGroup();
    std::string text = operations_.header();
    if (calls_) text += operations_.helpers();
    absl::StrAppend(&text, ".visible .entry ", kKernelName, "(.param .align 8 .b8 p[",
                    offsetof(Arguments, constants) + 8 * constants_, "])\n.maxntid 256\n{\n",
                    ".reg .b32 %w<", words_, ">;\n.reg .b64 %l<", longs_, ">;\n.reg .pred %q<",
                    predicates_, ">;\n", text_, "ret;\n}\n");
    return text;
  }

 private:
  std::string Word() { return absl::StrCat("%w", words_++); }
  std::string Long() { return absl::StrCat("%l", longs_++); }
  std::string Predicate() { return absl::StrCat("%q", predicates_++); }
  std::string NewLabel() { return absl::StrCat("label_", labels_++); }
  template <class... Parts>
  void Line(const Parts&... parts) {
    absl::StrAppend(&text_, parts..., "\n");
  }

  // LongAt and WordAt load a value from a byte offset of the parameter and return its register.
  std::string LongAt(std::size_t offset) {
    const std::string to = Long();
    Line("ld.param.b64 ", to, ", [p+", offset, "];");
    return to;
  }
  std::string WordAt(std::size_t offset) {
    const std::string to = Word();
    Line("ld.param.b32 ", to, ", [p+", offset, "];");
    return to;
  }

  // Inserts the function's lines instead of a call. Braces limit the scope of the registers.
  std::string Call(const std::string& function, bool is_long,
                   const std::vector<std::string>& args) {
    const std::string out = is_long ? Long() : Word();
    const std::string labels = absl::StrCat("$L", labels_++, "_"), end = NewLabel();
    Line("{");
    for (absl::string_view line : absl::StrSplit(operations_.BodyOf(function), '\n')) {
      const absl::string_view code = absl::StripAsciiWhitespace(line);
      if (absl::StartsWith(code, "ld.param.") && absl::StrContains(code, function)) {
        Argument(code, args);
      } else if (absl::StartsWith(code, "st.param.") && absl::StrContains(code, "[func_retval0")) {
        const absl::string_view value = code.substr(code.rfind(',') + 1);
        Line("mov.b", is_long ? 64 : 32, " ", out, ",", value);
      } else if (code == "ret;") {  // not necessarily the last line
        Line("bra.uni ", end, ";");
      } else if (!code.empty()) {
        calls_ = calls_ || absl::StartsWith(code, "call");
        Line(absl::StrReplaceAll(code, {{"$L_", labels}}));
      }
    }
    Line("}");
    Line(end, ":");
    return out;
  }

  // Translates a line such as "ld.param.u32 %r1, [f_param_0];". The type in the line says how many
  // bits of the argument are read.
  void Argument(absl::string_view code, const std::vector<std::string>& args) {
    const std::vector<absl::string_view> parts =
        absl::StrSplit(code, absl::ByAnyChar(" \t,[];"), absl::SkipEmpty());
    const absl::string_view type = parts[0].substr(parts[0].rfind('.') + 1), to = parts[1];
    int argument = 0, bits = 0;
    if (parts.size() != 3 ||
        !absl::SimpleAtoi(parts[2].substr(parts[2].rfind('_') + 1), &argument) ||
        !absl::SimpleAtoi(type.substr(1), &bits))
      std::abort();
    const std::string& from = args[static_cast<std::size_t>(argument)];
    const int from_bits = absl::StartsWith(from, "%l") ? 64 : 32;
    if (BitsOf(to) == bits && from_bits == bits) {
      Line("mov.b", bits, " ", to, ", ", from, ";");
    } else {
      const char kind = type[0] == 's' ? 's' : 'u';
      Line("cvt.", std::string(1, kind), BitsOf(to), ".", std::string(1, kind), bits, " ", to, ", ",
           from, ";");
    }
  }

  // --- Where elements are ---

  std::size_t SizeOfOperand(int i) const { return SizeOf(program_.operand_dtypes[i]); }
  static std::size_t OffsetOf(int operand) {
    return offsetof(Arguments, operands) +
           static_cast<std::size_t>(operand) * sizeof(Arguments::Operand);
  }

  static std::size_t StrideOf(int operand, int axis) {
    return OffsetOf(operand) + offsetof(Arguments::Operand, strides) +
           static_cast<std::size_t>(axis) * sizeof(std::int64_t);
  }

  // Computes x / extent and x % extent for an axis of the result.
  std::pair<std::string, std::string> Divide(const std::string& x, int axis) {
    const std::size_t at =
        offsetof(Arguments, axes) + static_cast<std::size_t>(axis) * sizeof(Axis);
    const std::string skipped = plan_.wide ? Long() : Word(), rest = plan_.wide ? Long() : Word();
    if (plan_.wide) {
      const std::string extent = LongAt(at + offsetof(Axis, extent)), quotient = Long();
      Line("div.u64 ", quotient, ", ", x, ", ", extent, ";");
      Line("mul.lo.u64 ", skipped, ", ", quotient, ", ", extent, ";");
      Line("sub.u64 ", rest, ", ", x, ", ", skipped, ";");
      return {quotient, rest};
    }
    const std::string product = Long(), shifted = Long(), quotient = Word();
    Line("mul.wide.u32 ", product, ", ", x, ", ", WordAt(at + offsetof(Axis, multiplier)), ";");
    Line("shr.u64 ", shifted, ", ", product, ", ", WordAt(at + offsetof(Axis, shift)), ";");
    Line("cvt.u32.u64 ", quotient, ", ", shifted, ";");
    Line("mul.lo.u32 ", skipped, ", ", quotient, ", ", WordAt(at + offsetof(Axis, extent)), ";");
    Line("sub.u32 ", rest, ", ", x, ", ", skipped, ";");
    return {quotient, rest};
  }

  // Returns the coordinates of element i of the result. They are computed once for all operands.
  const std::vector<std::string>& CoordinatesOf(const std::string& i) {
    std::vector<std::string>& coordinates = coordinates_[i];
    if (!coordinates.empty()) return coordinates;
    std::string outer = i;
    if (!plan_.wide) {
      outer = Word();
      Line("cvt.u32.u64 ", outer, ", ", i, ";");
    }
    for (int axis = plan_.rank - 1; axis >= 0; --axis) {
      std::string at = outer;
      if (axis > 0) std::tie(outer, at) = Divide(outer, axis);
      if (!plan_.wide) {
        const std::string narrow = std::exchange(at, Long());
        Line("cvt.u64.u32 ", at, ", ", narrow, ";");
      }
      coordinates.push_back(at);
    }
    std::reverse(coordinates.begin(), coordinates.end());
    return coordinates;
  }

  // Computes the address of the operand's element from which element i of the result is computed.
  std::string AddressOf(int operand, const std::string& i) {
    const Lies lies = plan_.lies[operand];
    if (lies == Lies::kWhole || lies == Lies::kUnaligned) {
      const std::string address = Long();
      Line("mad.lo.u64 ", address, ", ", i, ", ", SizeOfOperand(operand), ", ", data_[operand],
           ";");
      return address;
    }
    std::string address = data_[operand];
    for (int axis = 0; axis < plan_.rank; ++axis) {
      if ((plan_.moves[operand] >> axis & 1) == 0) continue;
      const std::string from = std::exchange(address, Long());
      Line("mad.lo.s64 ", address, ", ", CoordinatesOf(i)[static_cast<std::size_t>(axis)], ", ",
           LongAt(StrideOf(operand, axis)), ", ", from, ";");
    }
    return address;
  }

  // Loads an element's bits.
  std::string LoadOne(const std::string& predicate, std::size_t size, const std::string& address,
                      std::size_t offset = 0) {
    const std::string to = size == 8 ? Long() : Word();
    Line(predicate, "ld.global.nc.", size < 4 ? "u" : "b", 8 * size, " ", to, ", [", address, "+",
         offset, "];");
    return to;
  }

  // Returns the bits of the operand's element that belongs to element i of the result.
  std::string ElementAt(const std::string& predicate, int operand, const std::string& i) {
    const std::string address = AddressOf(operand, i);
    if (operand < program_.inputs) return LoadOne(predicate, SizeOfOperand(operand), address);
    const std::string coordinate = Long();
    Line("sub.s64 ", coordinate, ", ", address, ", ", -CoordinateAt(nullptr), ";");
    return coordinate;
  }

  // Loads the operand's bits for a group of elements of the result.
  std::vector<std::string> Load(const std::string& predicate, int operand,
                                const std::vector<std::string>& group) {
    const std::size_t size = SizeOfOperand(operand), width = group.size();
    const Lies lies = plan_.lies[operand];
    std::vector<std::string> bits;
    if (lies == Lies::kEach) {
      for (const std::string& i : group) bits.push_back(ElementAt(predicate, operand, i));
      return bits;
    }
    const std::string address = AddressOf(operand, group[0]);
    if (lies == Lies::kRepeated) return std::vector(width, LoadOne(predicate, size, address));
    if (lies == Lies::kUnaligned) {
      for (std::size_t j = 0; j < width; ++j)
        bits.push_back(LoadOne(predicate, size, address, j * size));
      return bits;
    }
    const std::vector<std::string> words = LoadWords(predicate, width * size, size == 8, address);
    if (size >= 4) return words;
    for (std::size_t j = 0; j < width; ++j) {
      const std::string to = Word();
      Line("bfe.u32 ", to, ", ", words[j * size / 4], ", ", 8 * (j * size % 4), ", ", 8 * size,
           ";");
      bits.push_back(to);
    }
    return bits;
  }

  // Loads `bytes` bytes (at most 16) as 32-bit words or, if `longs`, as 64-bit words.
  std::vector<std::string> LoadWords(const std::string& predicate, std::size_t bytes, bool longs,
                                     const std::string& address) {
    const std::size_t unit = longs ? 8 : 4;
    if (bytes <= unit) return {LoadOne(predicate, bytes, address)};
    std::vector<std::string> words;
    for (std::size_t j = 0; j < bytes / unit; ++j) words.push_back(longs ? Long() : Word());
    Line(predicate, "ld.global.nc.v", words.size(), ".b", 8 * unit, " {",
         absl::StrJoin(words, ", "), "}, [", address, "];");
    return words;
  }

  std::string Plus(const std::string& i, std::size_t j) {
    if (j == 0) return i;
    const std::string sum = Long();
    Line("add.u64 ", sum, ", ", i, ", ", j, ";");
    return sum;
  }

  // Stores the results starting at element i.
  void Store(const std::string& predicate, const std::vector<std::string>& bits,
             const std::string& i) {
    const std::size_t size = SizeOf(program_.dtype), bytes = bits.size() * size;
    const std::string address = Long();
    Line("mad.lo.u64 ", address, ", ", i, ", ", size, ", ", out_, ";");
    if (!plan_.aligned || bits.size() == 1) {
      for (std::size_t j = 0; j < bits.size(); ++j)
        Line(predicate, "st.global.", size < 4 ? "u" : "b", 8 * size, " [", address, "+", j * size,
             "], ", bits[j], ";");
      return;
    }
    std::vector<std::string> words = bits;
    if (size < 4) {
      words.clear();
      for (std::size_t j = 0; j < bits.size(); ++j) {
        if (j * size % 4 == 0) {
          words.push_back(bits[j]);
          continue;
        }
        const std::string both = Word();
        Line("bfi.b32 ", both, ", ", bits[j], ", ", words.back(), ", ", 8 * (j * size % 4), ", ",
             8 * size, ";");
        words.back() = both;
      }
    }
    if (words.size() == 1) {
      Line(predicate, "st.global.", bytes < 4 ? "u" : "b", 8 * bytes, " [", address, "], ",
           words[0], ";");
    } else {
      Line(predicate, "st.global.v", words.size(), ".b", size == 8 ? 64 : 32, " [", address, "], {",
           absl::StrJoin(words, ", "), "};");
    }
  }

  // --- Values ---

  // Computes the result's bits from the operands' bits.
  std::string Evaluate(const std::array<std::string, kMostOperands>& operands) {
    std::vector<std::string> values(kMostRegisters);
    for (const Instruction& in : program_) {
      std::string& out = values[in.out];
      switch (in.kind) {
        case Instruction::Kind::kLoad:
          out = IsInMemory(in.dtype)
                    ? operands[in.a]
                    : Call(absl::StrCat("load_", Absl(Name(in.dtype))), false, {operands[in.a]});
          break;
        case Instruction::Kind::kCoordinate:
          out = operands[in.a];
          break;
        case Instruction::Kind::kConstant:
          out = constant_[in.a];
          break;
        case Instruction::Kind::kConvert:
          out = Call(absl::StrCat("round_", Absl(Name(in.dtype)), "_", NameOf(in.type)),
                     IsLong(ValueTypeOf(in.dtype)), {values[in.a]});
          break;
        case Instruction::Kind::kApply:
          out = Apply(in, values);
          break;
      }
    }
    const std::string& result =
        values[program_.code[static_cast<std::size_t>(program_.instructions) - 1].out];
    return IsInMemory(program_.dtype)
               ? result
               : Call(absl::StrCat("store_", Absl(Name(program_.dtype))), false, {result});
  }

  // Whether a value has the same bits in memory as in registers.
  static bool IsInMemory(DType dtype) { return IsStoredAsValue(dtype) && dtype != DType::kBool; }

  std::string Apply(const Instruction& in, const std::vector<std::string>& values) {
    const bool is_long = IsLong(in.type);
    if (in.op == MapOp::kWhere) {
      const std::string chosen = Predicate(), out = is_long ? Long() : Word();
      Line("setp.ne.u32 ", chosen, ", ", values[in.a], ", 0;");
      Line("selp.b", is_long ? 64 : 32, " ", out, ", ", values[in.b], ", ", values[in.c], ", ",
           chosen, ";");
      return out;
    }
    const MapOpInfo& info = *InfoOf(in.op);
    std::vector<std::string> args = {values[in.a]};
    if (info.arguments > 1) args.push_back(values[in.b]);
    if (info.arguments > 2) args.push_back(values[in.c]);
    args.resize(3, args[0]);
    return Call(absl::StrCat("op_", static_cast<int>(in.op), "_", NameOf(in.type)),
                is_long && info.rule != MapRule::kComparison, args);
  }

  // --- The parts of the kernel ---

  void Begin() {
    n_ = LongAt(offsetof(Arguments, n));
    out_ = LongAt(offsetof(Arguments, out));
    Line("cvta.to.global.u64 ", out_, ", ", out_, ";");
    for (int i = 0; i < program_.operands; ++i) {
      if (plan_.lies[i] == Lies::kUnused) continue;
      data_[i] = LongAt(OffsetOf(i));
      if (i < program_.inputs) Line("cvta.to.global.u64 ", data_[i], ", ", data_[i], ";");
      if (plan_.lies[i] == Lies::kOne) one_[i] = LoadOne("", SizeOfOperand(i), data_[i]);
    }
    for (const Instruction& in : program_) {
      if (in.kind != Instruction::Kind::kConstant) continue;
      const std::size_t offset = offsetof(Arguments, constants) + 8 * std::size_t{in.a};
      constant_[in.a] = IsLong(in.type) ? LongAt(offset) : WordAt(offset);
      constants_ = std::max<std::size_t>(constants_, in.a + std::size_t{1});
    }
    // (block * threads + thread) * width
    const std::string thread = Word(), threads = Word(), block = Word(), before = Long(),
                      wide = Long(), place = Long();
    first_ = Long();
    Line("mov.u32 ", thread, ", %tid.x;");
    Line("mov.u32 ", threads, ", %ntid.x;");
    Line("mov.u32 ", block, ", %ctaid.x;");
    Line("mul.wide.u32 ", before, ", ", block, ", ", threads, ";");
    Line("cvt.u64.u32 ", wide, ", ", thread, ";");
    Line("add.u64 ", place, ", ", before, ", ", wide, ";");
    Line("mul.lo.u64 ", first_, ", ", place, ", ", plan_.width, ";");
  }

  // Computes the thread's group if all its elements exist. All loads come before all computations.
  void Group() {
    const std::string last = Plus(first_, static_cast<std::size_t>(plan_.width)),
                      predicate = Predicate(), exists = absl::StrCat("@", predicate, " ");
    Line("setp.le.s64 ", predicate, ", ", last, ", ", n_, ";");
    std::vector<std::string> group;
    for (std::size_t j = 0; j < static_cast<std::size_t>(plan_.width); ++j)
      group.push_back(Plus(first_, j));
    std::array<std::vector<std::string>, kMostOperands> bits;
    for (std::size_t i = 0; i < bits.size(); ++i)
      if (IsLoaded(i)) bits[i] = Load(exists, static_cast<int>(i), group);
    std::vector<std::string> results;
    for (std::size_t j = 0; j < group.size(); ++j) {
      std::array<std::string, kMostOperands> of = one_;
      for (std::size_t i = 0; i < of.size(); ++i)
        if (IsLoaded(i)) of[i] = bits[i][j];
      results.push_back(Evaluate(of));
    }
    Store(exists, results, first_);
  }

  // Computes the elements of an incomplete last group one by one.
  void LastGroup() {
    if (plan_.width == 1) return;
    const std::string i = Long(), mine = Predicate(), some = Predicate(), more = Predicate(),
                      loop = NewLabel(), end = NewLabel();
    Line("and.b64 ", i, ", ", n_, ", ", -plan_.width, ";");
    Line("setp.eq.s64 ", mine, ", ", i, ", ", first_, ";");
    Line("setp.lt.and.s64 ", some, ", ", i, ", ", n_, ", ", mine, ";");
    Line("@!", some, " bra ", end, ";");
    Line(loop, ":");
    std::array<std::string, kMostOperands> of = one_;
    for (std::size_t j = 0; j < of.size(); ++j) {
      const int operand = static_cast<int>(j);
      if (IsLoaded(j)) of[j] = ElementAt("", operand, i);
    }
    Store("", {Evaluate(of)}, i);
    Line("add.u64 ", i, ", ", i, ", 1;");
    Line("setp.lt.s64 ", more, ", ", i, ", ", n_, ";");
    Line("@", more, " bra ", loop, ";");
    Line(end, ":");
  }

  // Whether different elements of the result may use different elements of the operand.
  bool IsLoaded(std::size_t operand) const {
    return plan_.lies[operand] != Lies::kUnused && plan_.lies[operand] != Lies::kOne;
  }

  const KernelPlan& plan_;
  const MapProgram& program_;
  const Operations& operations_ = Operations::All();
  std::string text_, n_, out_;
  std::string first_;  // first element of the thread's group
  std::map<std::string, std::vector<std::string>> coordinates_;  // keyed by the element's register
  std::array<std::string, kMostOperands> data_, one_;
  std::array<std::string, kMostInstructions> constant_;
  std::size_t constants_ = 0;
  bool calls_ = false;
  int words_ = 0, longs_ = 0, predicates_ = 0, labels_ = 0;
};

}  // namespace

std::string KernelText(const KernelPlan& plan) { return Kernel(plan).Text(); }

std::string KeyOf(const KernelPlan& plan) {
  std::string key;
  const MapProgram& program = *plan.program;
  const auto put = [&](auto value) { key.push_back(static_cast<char>(value)); };
  key.reserve(16 + 3 * kMostOperands + 8 * static_cast<std::size_t>(program.instructions));
  put(program.dtype);
  put(plan.aligned);
  put(plan.width);
  put(plan.rank);
  put(plan.wide);
  put(program.operands);
  for (int i = 0; i < program.operands; ++i) {
    put(program.operand_dtypes[static_cast<std::size_t>(i)]);
    put(plan.lies[static_cast<std::size_t>(i)]);
    put(plan.moves[static_cast<std::size_t>(i)]);
  }
  for (const Instruction& in : program) {
    put(in.kind);
    put(in.op);
    put(in.type);
    put(in.dtype);
    put(in.out);
    put(in.a);
    put(in.b);
    put(in.c);
  }
  return key;
}

}  // namespace tessera::compiled
