#include "kernels/expression/expression.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "kernels/expression/map_math.h"

namespace tessera {
namespace {

using Kind = ExpressionNode::Kind;

absl::Status Bad(std::string_view message,
                 std::initializer_list<std::pair<std::string_view, std::string>> metadata = {}) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_EXPRESSION", message, metadata);
}

absl::Status BadNode(std::size_t node, std::string_view what) {
  absl::Status status = Bad(absl::StrCat("node ", node, ": ", Absl(what)));
  SetErrorMetadata(status, "node", absl::StrCat(node));
  return status;
}

bool IsFloat(DType dtype) { return dtype != DType::kBool && !IsInteger(dtype); }

// The type of a node's value. A constant whose node has no type is free: the other arguments of an
// operation determine its type.
struct NodeType {
  bool free_integer = false;
  bool free_real = false;
  DType dtype = DType::kBool;

  bool is_free() const { return free_integer || free_real; }
  // Returns the type that the value has if no other argument determines it.
  DType settled() const { return free_integer ? DType::kI64 : free_real ? DType::kF64 : dtype; }
};

// Returns the common type of arguments of one operation.
DType CommonType(absl::Span<const NodeType> types) {
  // One-byte types are ignored if there are other numbers, so that the result does not depend on
  // the order of the arguments.
  std::optional<DType> common, small;
  for (const NodeType& type : types) {
    if (type.is_free()) continue;
    std::optional<DType>& of =
        type.dtype == DType::kBool || IsByteInteger(type.dtype) ? small : common;
    of = of ? Promote(*of, type.dtype) : type.dtype;
  }
  if (!common) common = small;
  if (common && IsByteInteger(*common)) common = DType::kI32;
  bool integer = false, real = false;
  for (const NodeType& type : types) {
    integer |= type.free_integer;
    real |= type.free_real;
  }
  if (real) return common && IsFloat(*common) ? *common : DType::kF64;
  if (integer) return common && *common != DType::kBool ? *common : DType::kI64;
  return *common;
}

bool Fits(std::int64_t value, DType dtype) {
  switch (dtype) {
    case DType::kI32:
      return std::in_range<std::int32_t>(value);
    case DType::kU8:
      return std::in_range<std::uint8_t>(value);
    case DType::kI8:
      return std::in_range<std::int8_t>(value);
    default:
      return true;
  }
}

// Whether registers hold values of both types in the same way. They hold 16-bit values as F32, and
// one-byte integers as I32.
bool AreSameValues(DType from, DType to) {
  return from == to || (ValueTypeOf(from) == ValueTypeOf(to) && IsStoredAsValue(to));
}

// Whether the result of an operation on 16-bit elements must be rounded to their type.
bool Rounds(MapOp op) {
  switch (op) {
    case MapOp::kMinimum:
    case MapOp::kMaximum:
    case MapOp::kClip:
    case MapOp::kNegate:
    case MapOp::kAbs:
    case MapOp::kSign:
    case MapOp::kFloor:
    case MapOp::kCeil:
    case MapOp::kTrunc:
    case MapOp::kRound:
      return false;
    default:
      return true;
  }
}

// Returns the cost of an operation for the worst operands of the type. A remainder takes more steps
// if the operands' exponents differ more. The exponents can differ much only in F64.
int FlopsOf(MapOp op, DType dtype) {
  return op == MapOp::kRemainder && dtype != DType::kF64 ? 48 : InfoOf(op)->flops;
}

// Checks the nodes one by one, and then writes the instructions of the nodes that the last node
// needs. Until Allocate runs, a register has the number of the instruction that fills it.
class Compiler {
 public:
  Compiler(absl::Span<const ExpressionNode> nodes, absl::Span<const DType> operands,
           std::optional<DType> cast)
      : nodes_(nodes), operands_(operands), cast_(cast) {}

  absl::StatusOr<MapProgram> Compile() {
    RETURN_IF_ERROR(CheckCounts());
    program_.inputs = program_.operands = static_cast<int>(operands_.size());
    std::copy(operands_.begin(), operands_.end(), program_.operand_dtypes.begin());
    for (std::size_t i = 0; i < nodes_.size(); ++i) RETURN_IF_ERROR(Check(i));
    program_.dtype = types_[nodes_.size() - 1].settled();
    FindNeeded();
    for (std::size_t i = 0; i < nodes_.size(); ++i)
      if (needed_[i]) Emit(i);
    const std::size_t last = nodes_.size() - 1;
    if (types_[last].is_free()) value_[last] = Constant(last, program_.dtype);
    if (cast_.has_value()) {
      if (!AreSameValues(program_.dtype, *cast_)) Convert(value_[last], program_.dtype, *cast_);
      program_.dtype = *cast_;
    }
    Allocate();
    return program_;
  }

 private:
  absl::Status CheckCounts() const {
    const auto count = [](std::string_view field, std::size_t size, std::size_t limit) {
      if (size >= 1 && size <= limit) return absl::OkStatus();
      return Bad(absl::StrCat("an expression must have from 1 to ", limit, " ", Absl(field)),
                 {{"field", std::string(field)}, {"limit", absl::StrCat(limit)}});
    };
    absl::Status status = count("nodes", nodes_.size(), kMostNodes);
    return status.ok() ? count("operands", operands_.size(), kMostOperands) : status;
  }

  absl::Status Check(std::size_t i) {
    const ExpressionNode& node = nodes_[i];
    NodeType& type = types_[i];
    switch (node.kind) {
      case Kind::kNone:
        return BadNode(i, "it is neither an operand nor a constant nor an operation");
      case Kind::kOperand:
        if (node.operand >= operands_.size()) {
          return BadNode(i, absl::StrCat("it refers to operand ", node.operand,
                                         ", but the last one is operand ", operands_.size() - 1));
        }
        type.dtype = operands_[node.operand];
        return absl::OkStatus();
      case Kind::kCoordinate:
        type.dtype = DType::kI64;
        return PlaceCoordinate(i);
      case Kind::kReal:
      case Kind::kInteger:
      case Kind::kBoolean:
        return CheckConstant(i);
      case Kind::kOperation:
        return CheckOperation(i);
    }
    return absl::OkStatus();
  }

  // Finds the operand that is this coordinate, or adds it.
  absl::Status PlaceCoordinate(std::size_t i) {
    int& place = coordinate_[i];
    for (place = program_.inputs; place < program_.operands; ++place)
      if (program_.axes[static_cast<std::size_t>(place)] == nodes_[i].axis) return absl::OkStatus();
    if (place == kMostOperands) {
      return BadNode(i, absl::StrCat("the operands and the axes of coordinates are more than ",
                                     kMostOperands));
    }
    program_.axes[static_cast<std::size_t>(place)] = nodes_[i].axis;
    program_.operand_dtypes[static_cast<std::size_t>(place)] = DType::kU8;
    ++program_.operands;
    return absl::OkStatus();
  }

  absl::Status CheckConstant(std::size_t i) {
    const ExpressionNode& node = nodes_[i];
    NodeType& type = types_[i];
    if (node.kind == Kind::kBoolean) {
      if (node.dtype.value_or(DType::kBool) != DType::kBool)
        return BadNode(i, "a truth value must be of type bool; use CAST to convert it to a number");
      return absl::OkStatus();
    }
    type.free_integer = !node.dtype && node.kind == Kind::kInteger;
    type.free_real = !node.dtype && node.kind == Kind::kReal;
    type.dtype = node.dtype.value_or(DType::kF64);
    return node.dtype ? CheckFits(i, *node.dtype, i) : absl::OkStatus();
  }

  // Checks that the constant can have the type. Errors refer to node `at`.
  absl::Status CheckFits(std::size_t constant, DType dtype, std::size_t at) const {
    const ExpressionNode& node = nodes_[constant];
    if (dtype == DType::kBool || (IsInteger(dtype) && node.kind == Kind::kReal)) {
      return BadNode(at, absl::StrCat("the constant of node ", constant, " cannot be of type ",
                                      Absl(Name(dtype))));
    }
    if (node.kind == Kind::kInteger && !Fits(node.integer, dtype)) {
      return BadNode(at, absl::StrCat("the constant ", node.integer, " of node ", constant,
                                      " is beyond the range of ", Absl(Name(dtype))));
    }
    return absl::OkStatus();
  }

  absl::Status CheckOperation(std::size_t i) {
    const ExpressionNode& node = nodes_[i];
    const MapOpInfo* info = InfoOf(node.op);
    if (info == nullptr)
      return BadNode(i, absl::StrCat("there is no operation ", static_cast<int>(node.op)));
    if (node.args.size() != static_cast<std::size_t>(info->arguments)) {
      // The server keeps at most one argument more than any operation takes.
      const bool many = node.args.size() > kMostArguments;
      return BadNode(i, absl::StrCat(Absl(info->name), " takes ", info->arguments,
                                     info->arguments == 1 ? " argument" : " arguments", ", not ",
                                     many ? absl::StrCat("more than ", kMostArguments)
                                          : absl::StrCat(node.args.size())));
    }
    std::array<NodeType, kMostArguments> args;
    for (std::size_t a = 0; a < node.args.size(); ++a) {
      if (node.args[a] >= i) {
        return BadNode(i, absl::StrCat("argument ", a, " is node ", node.args[a],
                                       ", which does not come before this node"));
      }
      args[a] = types_[node.args[a]];
    }
    return CheckTypes(i, *info, {args.data(), node.args.size()});
  }

  // Whether the free constants among an operation's arguments fit the type, if it is an integer
  // type.
  bool AllFit(std::size_t i, absl::Span<const NodeType> args, DType dtype) const {
    for (std::size_t a = 0; a < args.size(); ++a)
      if (args[a].free_integer && !Fits(nodes_[nodes_[i].args[a]].integer, dtype)) return false;
    return true;
  }

  // Whether a comparison is of integers with a whole real constant from 2^53 on. F64 cannot
  // represent all integers of this size, but I64 can represent the constant.
  bool HasWholeBeyondF64(std::size_t i, absl::Span<const NodeType> args) const {
    for (std::size_t a = 0; a < args.size(); ++a) {
      const double real = nodes_[nodes_[i].args[a]].real;
      const NodeType& other = args[args.size() - 1 - a];
      if (args[a].free_real && !other.is_free() && IsInteger(other.dtype) &&
          std::fabs(real) >= 0x1p53 && real >= -0x1p63 && real < 0x1p63)
        return true;
    }
    return false;
  }

  absl::Status CheckTypes(std::size_t i, const MapOpInfo& info, absl::Span<const NodeType> args) {
    const auto refuse = [&](std::string_view wants) {
      std::string types;
      for (const NodeType& arg : args)
        absl::StrAppend(&types, types.empty() ? "" : ", ", Absl(Name(arg.settled())));
      return BadNode(i, absl::StrCat(Absl(info.name), " takes ", Absl(wants), ", not ", types));
    };
    DType& common = common_[i];
    DType& result = types_[i].dtype;
    switch (info.rule) {
      case MapRule::kNumbers:
      case MapRule::kReals:
        common = CommonType(args);
        if (common == DType::kBool) return refuse("numbers");
        if (info.rule == MapRule::kReals && IsInteger(common)) common = DType::kF64;
        result = common;
        break;
      case MapRule::kComparison:
        common = CommonType(args);
        if (IsInteger(common) && !AllFit(i, args, common)) common = DType::kI64;
        if (HasWholeBeyondF64(i, args)) common = DType::kI64;
        result = DType::kBool;
        break;
      case MapRule::kLogic:
        result = common = CommonType(args);
        if (common != DType::kBool && !IsInteger(common)) return refuse("truth values or integers");
        break;
      case MapRule::kIntegers:
        result = common = CommonType(args);
        if (!IsInteger(common)) return refuse("integers");
        break;
      case MapRule::kSelect:
        if (args[0].settled() != DType::kBool) return refuse("a truth value as its first argument");
        result = common = CommonType(args.subspan(1));
        break;
      case MapRule::kCast:
        if (!nodes_[i].dtype) return BadNode(i, "cast does not name a type");
        common = args[0].settled();
        result = *nodes_[i].dtype;
        break;
      case MapRule::kBits:
        if (!IsInteger(CommonType(args))) return refuse("integers");
        result = common = DType::kI64;
        break;
    }
    for (std::size_t a = 0; a < args.size(); ++a) {
      // A comparison accepts constants of any size.
      if (!args[a].is_free() || info.rule == MapRule::kComparison) continue;
      RETURN_IF_ERROR(CheckFits(nodes_[i].args[a], common, i));
    }
    return absl::OkStatus();
  }

  void FindNeeded() {
    needed_[nodes_.size() - 1] = true;
    for (std::size_t i = nodes_.size(); i-- > 0;) {
      if (!needed_[i] || nodes_[i].kind != Kind::kOperation) continue;
      for (std::uint32_t arg : nodes_[i].args) needed_[arg] = true;
    }
  }

  int Append(Instruction instruction, std::array<int, kMostArguments> args = {-1, -1, -1}) {
    const int at = program_.instructions++;
    program_.code[static_cast<std::size_t>(at)] = instruction;
    args_[static_cast<std::size_t>(at)] = args;
    return at;
  }

  // above_integers: whether a number of 2^63 or more must stay above the integers that it is
  // compared with. The largest of these integers are rounded to 2^63.
  int Constant(std::size_t i, DType dtype, bool above_integers = false) {
    const ExpressionNode& node = nodes_[i];
    const double real =
        above_integers && node.real >= 0x1p63 ? std::numeric_limits<double>::infinity() : node.real;
    MapConstant constant;
    const auto set = [&](auto value) { std::memcpy(&constant.bits, &value, sizeof value); };
    if (node.kind == Kind::kBoolean) {
      set(node.boolean);
    } else {
      DispatchElement(dtype, [&]<class T>(T) {
        set(node.kind == Kind::kReal ? RoundTo<T>(real) : RoundTo<T>(node.integer));
      });
    }
    program_.constants[static_cast<std::size_t>(constants_)] = constant;
    return Append({.kind = Instruction::Kind::kConstant,
                   .type = ValueTypeOf(dtype),
                   .dtype = dtype,
                   .a = static_cast<std::uint8_t>(constants_++)});
  }

  int Convert(int value, DType from, DType to) {
    program_.flops += 2;
    return Append({.kind = Instruction::Kind::kConvert, .type = ValueTypeOf(from), .dtype = to},
                  {value, -1, -1});
  }

  // Returns the register that holds a node's value, converted to the type if necessary.
  int Argument(std::size_t node, DType dtype, bool above_integers = false) {
    if (types_[node].is_free()) return Constant(node, dtype, above_integers);
    const DType from = types_[node].dtype;
    return AreSameValues(from, dtype) ? value_[node] : Convert(value_[node], from, dtype);
  }

  void Emit(std::size_t i) {
    const ExpressionNode& node = nodes_[i];
    const DType dtype = types_[i].dtype;
    if (node.kind == Kind::kOperand) {
      value_[i] = Append({.kind = Instruction::Kind::kLoad,
                          .type = ValueTypeOf(dtype),
                          .dtype = dtype,
                          .a = static_cast<std::uint8_t>(node.operand)});
    } else if (node.kind == Kind::kCoordinate) {
      value_[i] = Append({.kind = Instruction::Kind::kCoordinate,
                          .type = ValueType::kI64,
                          .dtype = DType::kI64,
                          .a = static_cast<std::uint8_t>(coordinate_[i])});
    } else if (node.kind == Kind::kOperation) {
      EmitOperation(i);
    } else if (!types_[i].is_free()) {
      value_[i] = Constant(i, dtype);
    }
  }

  void EmitOperation(std::size_t i) {
    const ExpressionNode& node = nodes_[i];
    const DType common = common_[i], dtype = types_[i].dtype;
    if (node.op == MapOp::kCast) {
      value_[i] = Convert(Argument(node.args[0], common), common, dtype);
      return;
    }
    const bool compares_integers =
        InfoOf(node.op)->rule == MapRule::kComparison &&
        std::any_of(node.args.begin(), node.args.end(), [&](std::uint32_t arg) {
          return !types_[arg].is_free() && IsInteger(types_[arg].dtype);
        });
    std::array<int, kMostArguments> args = {-1, -1, -1};
    for (std::size_t a = 0; a < node.args.size(); ++a) {
      const bool condition = node.op == MapOp::kWhere && a == 0;
      args[a] = Argument(node.args[a], condition ? DType::kBool : common, compares_integers);
    }
    value_[i] = Append({.kind = Instruction::Kind::kApply,
                        .op = node.op,
                        .type = ValueTypeOf(common),
                        .dtype = dtype},
                       args);
    program_.flops += FlopsOf(node.op, common);
    if (!IsStoredAsValue(dtype) && InfoOf(node.op)->rule != MapRule::kSelect && Rounds(node.op))
      value_[i] = Convert(value_[i], DType::kF32, dtype);
  }

  // Assigns a register to every value, from the value's instruction until its last use. The result
  // of an instruction never shares a register with its arguments.
  void Allocate() {
    std::array<int, kMostInstructions> last_use{}, where{};
    for (int i = 0; i < program_.instructions; ++i)
      for (int arg : args_[static_cast<std::size_t>(i)])
        if (arg >= 0) last_use[static_cast<std::size_t>(arg)] = i;
    std::vector<int> unused;
    for (int i = 0; i < program_.instructions; ++i) {
      const auto at = static_cast<std::size_t>(i);
      Instruction& instruction = program_.code[at];
      if (unused.empty()) unused.push_back(program_.registers++);
      where[at] = unused.back();
      unused.pop_back();
      instruction.out = static_cast<std::uint8_t>(where[at]);
      std::uint8_t* const fields[] = {&instruction.a, &instruction.b, &instruction.c};
      for (std::size_t a = 0; a < kMostArguments; ++a) {
        const int arg = args_[at][a];
        if (arg < 0) continue;
        *fields[a] = static_cast<std::uint8_t>(where[static_cast<std::size_t>(arg)]);
        int& last = last_use[static_cast<std::size_t>(arg)];
        if (last != i) continue;
        unused.push_back(*fields[a]);
        last = -1;  // frees the register only once if the argument occurs twice
      }
      program_.wide |= SizeOf(instruction.dtype) == 8 || instruction.type == ValueType::kF64 ||
                       instruction.type == ValueType::kI64;
    }
  }

  const absl::Span<const ExpressionNode> nodes_;
  const absl::Span<const DType> operands_;
  const std::optional<DType> cast_;
  std::array<NodeType, kMostNodes> types_{};
  std::array<DType, kMostNodes> common_{};  // the type of an operation's arguments
  std::array<bool, kMostNodes> needed_{};
  std::array<int, kMostNodes> coordinate_{};  // the operand that is the node's coordinate
  std::array<int, kMostNodes> value_{};       // the instruction that computes the node
  std::array<std::array<int, kMostArguments>, kMostInstructions> args_{};
  int constants_ = 0;
  MapProgram program_;
};

}  // namespace

DType Promote(DType a, DType b) {
  if (a == b) return a;
  if (a == DType::kBool) return b;
  if (b == DType::kBool) return a;
  if (IsByteInteger(a)) return IsByteInteger(b) ? DType::kI32 : b;
  if (IsByteInteger(b)) return a;
  if (IsInteger(a) && IsInteger(b)) return DType::kI64;
  if (IsInteger(a) || IsInteger(b) || a == DType::kF64 || b == DType::kF64) return DType::kF64;
  return DType::kF32;
}

absl::StatusOr<MapProgram> CompileExpression(absl::Span<const ExpressionNode> nodes,
                                             absl::Span<const DType> operands,
                                             std::optional<DType> cast) {
  return Compiler(nodes, operands, cast).Compile();
}

absl::StatusOr<const MapProgram*> Expression::Compile(absl::Span<const DType> operands,
                                                      std::optional<DType> cast) const {
  std::unique_ptr<const MapProgram>& compiled = compiled_[cast.has_value() ? 1 : 0];
  const bool fits =
      compiled != nullptr && (!cast.has_value() || compiled->dtype == *cast) &&
      absl::MakeSpan(compiled->operand_dtypes).first(static_cast<std::size_t>(compiled->inputs)) ==
          operands;
  if (!fits) {
    ASSIGN_OR_RETURN(MapProgram program, CompileExpression(nodes_, operands, cast));
    compiled = std::make_unique<const MapProgram>(program);
  }
  return compiled.get();
}

}  // namespace tessera
