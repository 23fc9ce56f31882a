"""Turns the nodes of expressions into the steps of a program. Connected operations that work
element by element become one expression. No I/O.

An expression is a Map, the input of a Reduce, Scan or Sort, or the epilogue of a Matmul whose
product nothing else reads. A step has one operand for each array that it reads, up to MAX_OPERANDS,
and at most MAX_NODES nodes, including loads and constants. Larger expressions are split: their
largest part becomes a separate step. A value that several steps need is computed in each of them,
unless it must be stored anyway.
"""

import bisect
from typing import Any, Dict, FrozenSet, Hashable, List, NamedTuple, Optional, Sequence, Set, Tuple

from ._graph import GIVE_TWO, TAKE_EXPRESSIONS, Constant, Inline, Leaf, Node, Source, Term
from ._views import Shape, View, broadcast_shapes

MAX_OPERANDS = 8
# The server allows 64 nodes, and 63 in a scan with ALL or ANY. Each operand may need a cast (ALL,
# ANY), and the value may need a final load.
MAX_NODES = 63 - MAX_OPERANDS - 1


class Instruction(NamedTuple):
    """A node of an expression: "operand" (value: its index), "constant" (value: a Constant),
    "coordinate" (value: its axis, below 0), or a function of earlier instructions. dtype is the
    result type of a cast."""

    fn: str
    args: Tuple[int, ...] = ()
    value: Any = None
    dtype: Any = None


class Step:
    """One operation of a program. node: what it computes. operands: what it reads; if the source of
    an operand is a Node, the operand is the result of the step that Fuser.number returns. code: the
    expression of a map, or of a reduce, scan, sort or matmul that has one. In the expression of a
    matmul, operand 0 is the product, and the others are operands[2:]."""

    __slots__ = ("node", "operands", "code")

    def __init__(self, node: Node, operands: Sequence[Term], code: Sequence[Instruction] = ()):
        self.node = node
        self.operands = list(operands)
        self.code = list(code)


class _Tree(NamedTuple):
    """The parts of a node's expression."""

    members: FrozenSet[int]  # The positions of nodes.
    operands: Dict[Hashable, Term]
    constants: FrozenSet[Hashable]
    axes: FrozenSet[int]  # The axes of coordinates. Each takes the place of an operand.

    @property
    def fits(self) -> bool:
        size = len(self.members) + len(self.operands) + len(self.constants)
        places = len(self.operands) + len(self.axes)
        return places <= MAX_OPERANDS and size <= MAX_NODES


def _constant_key(constant: Constant) -> Hashable:
    # Python considers 0.0 equal to -0.0 and 1 equal to True, and NaN equal to nothing.
    return repr(constant.value), constant.dtype


class Fuser:
    """Builds the steps that compute some outputs. Equal parts are computed once."""

    def __init__(self, outputs: Sequence[Node]) -> None:
        self.steps: List[Step] = []
        self.leaves: Dict[str, Leaf] = {}
        self._nodes: List[Node] = []
        self._position: Dict[int, int] = {}  # By the id of a node, which the outputs keep alive.
        self._position_of_key: Dict[Hashable, int] = {}
        self._step_of: Dict[int, int] = {}  # By position.
        self._trees: Dict[int, _Tree] = {}
        for node in outputs:
            self._walk(node)
        self._stored = self._find_stored(outputs)
        for position, node in enumerate(self._nodes):
            if node.op == "map":
                self._trees[position] = self._tree(position)
                if position in self._stored:
                    self._emit(position)
            else:
                self._add(position, self._folding(position) or Step(node, node.inputs))
        self._absorb_products(outputs)
        self.outputs = [(self.number(node), node.output) for node in outputs]

    def number(self, node: Node) -> int:
        """Returns the number of the step that computes a node."""
        return self._step_of[self._position[id(node)]]

    # --- the nodes in order, each once

    def _walk(self, root: Node) -> None:
        # Uses an explicit stack, because expressions of thousands of steps exceed Python's
        # recursion limit.
        stack = [root]
        while stack:
            node = stack[-1]
            missing = [
                source
                for source, _ in node.inputs
                if isinstance(source, Node) and id(source) not in self._position
            ]
            if missing and id(node) not in self._position:
                stack += missing
                continue
            stack.pop()
            if id(node) in self._position:
                continue
            key = self._key(node)
            if key not in self._position_of_key:
                self._position_of_key[key] = len(self._nodes)
                self._nodes.append(node)
            self._position[id(node)] = self._position_of_key[key]

    def _key(self, node: Node) -> Hashable:
        inputs = tuple(self._term_key(term) for term in node.inputs)
        params = tuple(sorted(node.params.items()))
        # Two results have different types.
        dtype = None if node.op in GIVE_TWO else node.dtype
        return node.op, inputs, params, dtype, node.strategy, node.timing

    def _term_key(self, term: Term) -> Hashable:
        source, view = term
        if isinstance(source, Leaf):
            self.leaves[source.name] = source
            return source.name, source.version, view
        if isinstance(source, Constant):
            return _constant_key(source)
        if isinstance(source, Inline):
            if source.array.nbytes <= 64:
                return source.array.tobytes(), source.dtype, source.shape, view
            return id(source), view
        return self._position[id(source)], source.output, view

    # --- expressions

    def _find_stored(self, outputs: Sequence[Node]) -> Set[int]:
        """Returns the positions of nodes that other steps or callers need as arrays."""
        stored = {self._position[id(node)] for node in outputs}
        for position, node in enumerate(self._nodes):
            if node.strategy or node.timing:
                stored.add(position)
            for source, view in node.inputs:
                if isinstance(source, Node) and not (
                    node.op in ("map", *TAKE_EXPRESSIONS)
                    and source.op == "map"
                    and view == View.whole(source.shape)
                ):
                    stored.add(self._position[id(source)])
        return stored

    def _inlined(self, source: Source) -> Optional[int]:
        """Returns the position of a node whose expression becomes part of another expression, or
        None."""
        if not isinstance(source, Node) or source.op != "map":
            return None
        position = self._position[id(source)]
        return None if position in self._stored or position in self._step_of else position

    def _tree(self, position: int) -> _Tree:
        node = self._nodes[position]
        while True:
            members = {position}
            operands: Dict[Hashable, Term] = {}
            constants: Set[Hashable] = set()
            axes = {node.params["axis"]} if node.params["fn"] == "coordinate" else set()
            parts: List[int] = []
            for term in node.inputs:
                inlined = self._inlined(term[0])
                if inlined is not None:
                    part = self._trees[inlined]
                    parts.append(inlined)
                    members |= part.members
                    operands.update(part.operands)
                    constants |= part.constants
                    axes |= part.axes
                elif isinstance(term[0], Constant):
                    constants.add(_constant_key(term[0]))
                else:
                    operands[self._term_key(term)] = term
            tree = _Tree(frozenset(members), operands, frozenset(constants), frozenset(axes))
            if tree.fits or not parts:
                return tree
            largest = max(
                parts, key=lambda at: (len(self._trees[at].operands), len(self._trees[at].members))
            )
            self._emit(largest)

    def _add(self, position: int, step: Step) -> None:
        self._step_of[position] = len(self.steps)
        self.steps.append(step)

    def _emit(self, position: int) -> None:
        """Emits the node's expression as a step."""
        operands = list(self._operands(position).values())
        self._add(position, Step(self._nodes[position], operands, self._code(position)))

    def _folding(self, position: int) -> Optional[Step]:
        """Returns the step of a reduce, scan or sort of an expression, or None for any other
        node."""
        node = self._nodes[position]
        made = self._inlined(node.inputs[0][0]) if node.op in TAKE_EXPRESSIONS else None
        if made is None:
            return None
        return Step(node, list(self._operands(made).values()), self._code(made))

    def _operands(self, position: int) -> Dict[Hashable, Term]:
        """Returns the operands of a node's expression. Those that only give coordinates a shape are
        left out if the others have the expression's shape."""
        tree = self._trees[position]
        if not tree.axes:
            return tree.operands
        members = [self._nodes[member] for member in tree.members]
        read = {
            self._term_key(term)
            for node in members
            if node.params["fn"] != "coordinate"
            for term in node.inputs
        }
        found = {key: term for key, term in tree.operands.items() if key in read}
        shape: Shape = ()
        for _, view in found.values():
            shape = broadcast_shapes(shape, view.shape)
        for key, (source, view) in tree.operands.items():
            if key not in found and shape != self._nodes[position].shape:
                found[key] = source, view
                shape = broadcast_shapes(shape, view.shape)
        return found

    def _code(self, position: int) -> List[Instruction]:
        """Returns the expression of a node. Its operands are those of _operands()."""
        tree = self._trees[position]
        code: List[Instruction] = []
        place: Dict[Hashable, int] = {}  # Key: the operand, constant or node.
        for i, (key, term) in enumerate(self._operands(position).items()):
            place["operand", key] = self._load(code, i, term)
        for member in sorted(tree.members):
            node = self._nodes[member]
            if node.params["fn"] == "coordinate":
                place["node", member] = len(code)
                code.append(Instruction("coordinate", value=node.params["axis"]))
                continue
            args = []
            for term in node.inputs:
                source = term[0]
                if isinstance(source, Constant):
                    constant = ("constant", _constant_key(source))
                    if constant not in place:
                        place[constant] = len(code)
                        code.append(Instruction("constant", value=source))
                    args.append(place[constant])
                elif isinstance(source, Node) and self._position[id(source)] in tree.members:
                    args.append(place["node", self._position[id(source)]])
                else:
                    args.append(place["operand", self._term_key(term)])
            if node.params["fn"] == "copy":
                place["node", member] = args[0]
                continue
            place["node", member] = len(code)
            code.append(Instruction(node.params["fn"], tuple(args), dtype=node.dtype))
        value = place["node", position]
        if value != len(code) - 1:
            code.append(code[value])  # The last instruction gives the value.
        return code

    @staticmethod
    def _load(code: List[Instruction], i: int, term: Term) -> int:
        code.append(Instruction("operand", value=i))
        source = term[0]
        if isinstance(source, Node) and source.gives_integers:
            code.append(Instruction("cast", (len(code) - 1,), dtype=source.dtype))
        return len(code) - 1

    def _absorb_products(self, outputs: Sequence[Node]) -> None:
        """Merges each matmul with the only map that reads its product, if the map reads the whole
        product element by element."""
        kept = {self._position[id(node)] for node in outputs}
        readers: Dict[int, int] = {}
        for step in self.steps:
            for source, _ in step.operands:
                if isinstance(source, Node):
                    at = self._position[id(source)]
                    readers[at] = readers.get(at, 0) + 1
        gone: List[int] = []
        for i, step in enumerate(self.steps):
            if step.node.op != "map" or step.node.strategy:
                continue
            for operand, (source, view) in enumerate(step.operands):
                if not (isinstance(source, Node) and source.op == "matmul") or source.timing:
                    continue
                at = self._position[id(source)]
                whole = view == View.whole(source.shape) and source.shape == step.node.shape
                if whole and readers[at] == 1 and at not in kept:
                    self.steps[i] = _with_product(self.steps[self._step_of[at]], step, operand)
                    gone.append(self._step_of.pop(at))
                    break
        gone.sort()
        for i in reversed(gone):
            del self.steps[i]
        for at, number in self._step_of.items():
            self._step_of[at] = number - bisect.bisect(gone, number)


def _with_product(product: Step, step: Step, operand: int) -> Step:
    """Returns a matmul step with the expression of a map that reads the product as an operand."""
    matmul, node = product.node, step.node
    others = [term for i, term in enumerate(step.operands) if i != operand]
    # Operand 0 is the product.
    place = {operand: 0}
    for i in range(len(step.operands)):
        place.setdefault(i, len(place))
    code = [
        one._replace(value=place[one.value]) if one.fn == "operand" else one for one in step.code
    ]
    made = Node(
        "matmul",
        matmul.inputs,
        node.shape,
        node.dtype,
        matmul.params,
        matmul.strategy,
        node.timing,
    )
    return Step(made, [*product.operands, *others], code)
