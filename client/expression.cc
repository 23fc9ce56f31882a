#include "client/expression.h"

#include <map>
#include <utility>

namespace tessera {

Expr::Expr(v1::Expression::Node node)
    : data_(std::make_shared<const Data>(std::move(node), std::vector<Expr>())) {}

Expr::Expr(MapOp op, std::vector<Expr> args, std::optional<DType> dtype) {
  v1::Expression::Node node;
  node.set_op(static_cast<v1::MapOp>(op));
  if (dtype) node.set_dtype(static_cast<v1::Dtype>(*dtype));
  data_ = std::make_shared<const Data>(std::move(node), std::move(args));
}

// Destroys the nodes without recursion, which would be too deep for a long sum. The first node that
// a thread destroys owns a list. The nodes that are destroyed along with it add their arguments to
// that list.
Expr::Data::~Data() {
  using Nodes = std::vector<std::shared_ptr<const Data>>;
  thread_local Nodes* left = nullptr;
  if (args.empty()) return;
  Nodes nodes;
  Nodes& to = left != nullptr ? *left : nodes;
  for (Expr& arg : args) to.push_back(std::move(arg.data_));
  if (left != nullptr) return;
  left = &nodes;
  while (!nodes.empty()) {
    const std::shared_ptr<const Data> last = std::move(nodes.back());
    nodes.pop_back();
  }
  left = nullptr;
}

Expr Element(std::uint32_t operand) {
  v1::Expression::Node node;
  node.set_operand(operand);
  return Expr(std::move(node));
}

Expr Coordinate(std::int32_t axis) {
  v1::Expression::Node node;
  node.set_coordinate(axis);
  return Expr(std::move(node));
}

// Like ~Data, uses no recursion: a node stays in `open` until all its arguments have been written.
v1::Expression Expr::ToMessage() const {
  v1::Expression message;
  std::map<const Data*, std::uint32_t> written;
  std::vector<const Data*> open = {data_.get()};
  while (!open.empty()) {
    const Data* const data = open.back();
    bool ready = true;
    for (const Expr& arg : data->args) {
      if (written.contains(arg.data_.get())) continue;
      open.push_back(arg.data_.get());
      ready = false;
    }
    if (!ready) continue;
    open.pop_back();
    if (!written.try_emplace(data, static_cast<std::uint32_t>(message.nodes_size())).second)
      continue;
    v1::Expression::Node& node = *message.add_nodes();
    node = data->node;
    for (const Expr& arg : data->args) node.add_args(written[arg.data_.get()]);
  }
  return message;
}

}  // namespace tessera
