"""From the nodes of expressions to the steps of a program: neighbours that work element by element
become one expression of a Map. No I/O.

A step takes an operand each for what it reads, at most MAX_OPERANDS, and has at most MAX_NODES
nodes, loads and constants included. Larger expressions are cut where the larger part is. What
several steps need is computed in each of them, unless it has to be stored anyway.
"""

from typing import Any, Dict, FrozenSet, Hashable, List, NamedTuple, Optional, Sequence, Set, Tuple

from . import _dtypes
from ._graph import Constant, Inline, Leaf, Node, Source, Term
from ._views import View

MAX_OPERANDS = 8
MAX_NODES = 64 - MAX_OPERANDS - 1  # Truth values are cast where they are read and written.


class Instruction(NamedTuple):
    """A node of an expression: "operand" (value: its index), "constant" (value: a Constant), or a
    function of earlier instructions; dtype is the type that a cast makes."""

    fn: str
    args: Tuple[int, ...] = ()
    value: Any = None
    dtype: Any = None


class Step:
    """One operation of a program. node: what it computes; operands: what it reads, where a source
    that is a Node means the step that `number` says; code: the expression of a map."""

    __slots__ = ("node", "operands", "code")

    def __init__(self, node: Node, operands: Sequence[Term], code: Sequence[Instruction] = ()):
        self.node = node
        self.operands = list(operands)
        self.code = list(code)


class _Tree(NamedTuple):
    """What a node's expression consists of."""

    members: FrozenSet[int]  # positions of nodes
    operands: Dict[Hashable, Term]
    constants: FrozenSet[Hashable]

    @property
    def fits(self) -> bool:
        size = len(self.members) + len(self.operands) + len(self.constants)
        return len(self.operands) <= MAX_OPERANDS and size <= MAX_NODES


def _constant_key(constant: Constant) -> Hashable:
    # 0.0 and -0.0 are equal, and so are 1 and True; NaN equals nothing.
    return repr(constant.value), constant.dtype


class Fuser:
    """Makes the steps of some outputs. Equal parts are computed once."""

    def __init__(self, outputs: Sequence[Node]) -> None:
        self.steps: List[Step] = []
        self.leaves: Dict[str, Leaf] = {}
        self._nodes: List[Node] = []
        self._position: Dict[int, int] = {}  # by id of a node, which the outputs keep alive
        self._position_of_key: Dict[Hashable, int] = {}
        self._step_of: Dict[int, int] = {}  # by position
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
                self._step_of[position] = len(self.steps)
                self.steps.append(Step(node, node.inputs))
        self.outputs = [(self.number(node), node.output) for node in outputs]

    def number(self, node: Node) -> int:
        """The step that computes a node."""
        return self._step_of[self._position[id(node)]]

    # --- nodes in order, each once

    def _walk(self, root: Node) -> None:
        # A stack of its own: expressions of thousands of steps are deeper than Python recurses.
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
        # The results of one top_k are of two types.
        dtype = None if node.op == "top_k" else node.dtype
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
        """Positions of nodes that other steps, or callers, need as arrays."""
        stored = {self._position[id(node)] for node in outputs}
        for position, node in enumerate(self._nodes):
            if node.strategy or node.timing:
                stored.add(position)
            for source, view in node.inputs:
                if isinstance(source, Node) and not (
                    node.op == "map" and source.op == "map" and view == View.whole(source.shape)
                ):
                    stored.add(self._position[id(source)])
        return stored

    def _inlined(self, source: Source) -> Optional[int]:
        """The position of a node whose expression becomes part of another one."""
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
            parts: List[int] = []
            for term in node.inputs:
                inlined = self._inlined(term[0])
                if inlined is not None:
                    part = self._trees[inlined]
                    parts.append(inlined)
                    members |= part.members
                    operands.update(part.operands)
                    constants |= part.constants
                elif isinstance(term[0], Constant):
                    constants.add(_constant_key(term[0]))
                else:
                    operands[self._term_key(term)] = term
            tree = _Tree(frozenset(members), operands, frozenset(constants))
            if tree.fits or not parts:
                return tree
            largest = max(
                parts, key=lambda at: (len(self._trees[at].operands), len(self._trees[at].members))
            )
            self._emit(largest)

    def _emit(self, position: int) -> None:
        """The node's expression as a step."""
        tree = self._trees[position]
        code: List[Instruction] = []
        place: Dict[Hashable, int] = {}  # of operands and constants by key, of nodes by position
        for i, (key, term) in enumerate(tree.operands.items()):
            place["operand", key] = self._load(code, i, term)
        for member in sorted(tree.members):
            node = self._nodes[member]
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
        self._finish(code, place["node", position], self._nodes[position].dtype)
        self._step_of[position] = len(self.steps)
        self.steps.append(Step(self._nodes[position], list(tree.operands.values()), code))

    @staticmethod
    def _load(code: List[Instruction], i: int, term: Term) -> int:
        code.append(Instruction("operand", value=i))
        if _dtypes.stored(term[0].dtype) != term[0].dtype:
            code.append(Instruction("cast", (len(code) - 1,), dtype=term[0].dtype))
        return len(code) - 1

    @staticmethod
    def _finish(code: List[Instruction], last: int, dtype: Any) -> None:
        """The last instruction is the value."""
        if _dtypes.stored(dtype) != dtype:
            code.append(Instruction("cast", (last,), dtype=_dtypes.stored(dtype)))
        elif last != len(code) - 1:
            code.append(code[last])
