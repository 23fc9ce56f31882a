"""Turns expressions into one request, and its response into arrays. No I/O.

Equal parts of the expressions become one step. A program of one step is sent as the call of that
step, which is shorter.
"""

import dataclasses
from typing import Any, Dict, FrozenSet, List, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt

from ..wire import _protocol as p
from ..wire._errors import Error, damaged, from_step
from . import _dtypes
from ._elementwise import copy
from ._expression import OPERANDS, expression_message, expression_text
from ._fuse import Fuser, Step
from ._graph import GIVE_TWO, MAY_SKIP, Inline, Leaf, Node, Source, Term
from ._views import View

# For each name of a step: the request, the method, and the non-repeated fields that are operands.
_REQUESTS = {f.name: f.message_type for f in p.Step.DESCRIPTOR.oneofs_by_name["operation"].fields}
_METHOD = {op: request.name[: -len("Request")] for op, request in _REQUESTS.items()}
_FIELDS = {
    op: [
        field.name
        for field in request.fields
        if field.name in ("a", "b", "x", "indices", "mask", "edges", "keys", "labels")
        and field.message_type.name == "Operand"
    ]
    for op, request in _REQUESTS.items()
}
# Numbers within these limits are converted without NumPy's overflow handling, which takes longer
# than the conversion.
_LARGEST: Dict[Any, float] = {
    **{np.dtype(kind).char: float(np.finfo(kind).max) for kind in ("<f2", "<f4", "<f8")},
    **{np.dtype(kind).char: float("inf") for kind in ("<i4", "<i8", "?")},
}
# The steps whose result is a single number, except for a reduce along axes.
_NUMBERS = {
    op
    for op, method in _METHOD.items()
    if "value" in p.METHODS[method].response.DESCRIPTOR.fields_by_name
}
# Identifies a result: the number of its step, and its index among that step's results.
Output = Tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Stats:
    """The cost of one step, as the server reports it (ExecutionStats). operation is the name of the
    operation, such as "matmul" or "map". strategy and device say what computed it, and where.
    kernel_us is the time measured by the device's clock. bytes is the number of bytes moved and
    flops the number of floating-point operations, both according to the strategy's cost model.
    roundoff is the strategy's error bound: |error| <= roundoff * sum of the |terms|, or, for each
    node of a map, |error| <= roundoff * |value|. queue_us is the time in the queue. total_us is the
    time from the acceptance of the call to its response. moved_bytes is the number of bytes of
    operands that were copied from other devices. prepared_bytes is the number of bytes of prepared
    operands (see ExecutionStats) that an earlier call or step had already made. devices is the
    number of devices that took part. kernel_us is 0 unless the expression was made by
    with_(timing=True); queue_us and total_us are 0 for the steps of a program."""

    operation: str
    strategy: str
    device: str
    kernel_us: float
    bytes: int
    flops: int
    roundoff: float
    queue_us: float
    total_us: float
    moved_bytes: int
    prepared_bytes: int = 0
    devices: int = 1


def view_message(view: View) -> Any:
    return p.View(offset=view.offset, shape=view.shape, strides=view.strides)


def _transposed(view: View) -> bool:
    """Returns whether a view reads a row-major matrix by columns, which Matmul does without a
    copy."""
    # For a stack, the server itself detects which matrices are transposed.
    if len(view.shape) != 2:
        return False
    return view.strides[0] == 1 and view.strides[1] >= view.shape[0] and view.shape[0] > 1


# The cost of an expression's last computation: the plan, and the responses that report it.
Cost = Optional[Tuple["Plan", Sequence[Any]]]


class Plan:
    """The steps of one program, in order. A step uses only the results of earlier steps."""

    def __init__(self, outputs: Sequence[Node]) -> None:
        self.steps: List[Step]
        self.leaves: Dict[str, Leaf]
        self.outputs: List[Output]
        self._read: FrozenSet[Output]
        (first, *others) = outputs
        if not others and first.alone:
            self.steps = [Step(first, first.inputs)]
            self.leaves = {s.name: s for s, _ in first.inputs if isinstance(s, Leaf)}
            self.outputs = [(0, first.output)]
            self._alone = first.op != "top_k"
            self._read = frozenset()
            return
        self._fuser = Fuser(outputs)
        self.steps, self.leaves = self._fuser.steps, self._fuser.leaves
        self.outputs = self._fuser.outputs
        # Whether the plan has a single step that is sent as an ordinary call. If a result of a
        # top_k is unused, it is stored as scratch, and only a program can do that.
        used = len(set(self.outputs))
        self._alone = len(self.steps) == 1 and (
            used == self._results_of(0) or self.steps[0].node.op in MAY_SKIP
        )
        # The results that later steps read.
        self._read = frozenset(
            (self._fuser.number(source), source.output)
            for step in self.steps
            for source, _ in step.operands
            if isinstance(source, Node)
        )

    def _operand(self, source: Source, view: View) -> Any:
        if isinstance(source, Leaf) and view is source.whole:
            return source.operand
        whole = view.contiguous and view.offset == 0 and view.shape == source.shape
        window = None if whole else view_message(view)
        if isinstance(source, Leaf):
            return p.Operand(buffer=source.name, version=source.version, view=window)
        if isinstance(source, Node):
            number = self._fuser.number(source)
            return p.Operand(step=number, output=source.output, view=window)
        assert isinstance(source, Inline)
        tensor = p.Tensor(
            dtype=_dtypes.to_wire(source.dtype), shape=source.shape, data=source.array.tobytes()
        )
        return p.Operand(tensor=tensor, view=window)

    def request(self, number: int, results: Dict[int, Any]) -> Any:
        """Returns the request of a step. results says where to put the step's results that are not
        inline."""
        step = self.steps[number]
        node = step.node
        fields: Dict[str, Any] = {} if node.op == "map" else dict(node.params)
        operands = list(step.operands)
        if node.op == "matmul":
            for i, (source, view) in enumerate(operands[:2]):
                if _transposed(view):
                    fields["transpose_" + "ab"[i]] = True
                    operands[i] = source, view.transpose()
        if "op" in fields:
            fields["op"] = p.REDUCE_OPS[fields["op"]]
        if "function" in fields:
            fields["function"] = p.LINALG_FUNCTIONS[fields["function"]]
        if "mode" in fields:
            fields["mode"] = p.TAKE_MODES[fields["mode"]]
        if "even" in fields:
            count, low, high = fields["even"]
            fields["even"] = {"count": count, "low": low, "high": high}
        if node.strategy:
            fields["strategy"] = node.strategy
        if node.timing:
            fields["timing"] = True
        if node.op in GIVE_TWO:
            fields.update({("values", "indices")[i]: result for i, result in results.items()})
        # A single number is always returned inline, and stays available to later steps.
        elif results and not _is_number(node):
            fields["result"] = results[0]
        of_nodes = _FIELDS[node.op]
        for name, term in zip(of_nodes, operands):
            fields[name] = self._operand(*term)
        if step.code:
            others = [self._operand(*term) for term in operands[len(of_nodes) :]]
            fields["with" if of_nodes else "operands"] = others
            fields["expression"] = expression_message(step.code)
        return p.METHODS[_METHOD[node.op]].request(**fields)

    def _results_of(self, number: int) -> int:
        """Returns the number of results of a step."""
        return 2 if self.steps[number].node.op in GIVE_TWO else 1

    def _places(self, number: int, results: Dict[Output, Any]) -> Dict[int, Any]:
        """Returns where to put the results of a step that are not inline."""
        places = {}
        for output in range(self._results_of(number)):
            one = number, output
            if one in results:
                places[output] = results[one]
            elif one not in self.outputs:
                skipped = self.steps[number].node.op in MAY_SKIP and one not in self._read
                places[output] = p.Result(none=True) if skipped else p.Result(scratch=True)
        return places

    def call(self, results: Dict[Output, Any]) -> Tuple[str, bytes]:
        """Returns the method and its serialised request. results says where to put the results that
        are not inline."""
        if self._alone:
            request = self.request(0, self._places(0, results))
            return _METHOD[self.steps[0].node.op], request.SerializeToString()
        steps = [
            p.Step(**{step.node.op: self.request(i, self._places(i, results))})
            for i, step in enumerate(self.steps)
        ]
        program = p.METHODS["Execute"].request(steps=steps, stats=True)
        return "Execute", program.SerializeToString()

    def answers(self, method: str, response: Any) -> List[Any]:
        """Returns a response for every step. Raises the first error, because later ones may be its
        consequences."""
        if method != "Execute":
            return [response]
        errors: List[Error] = []
        found = []
        for i, result in enumerate(response.results):
            kind = result.WhichOneof("result")
            if kind == "error":
                error = from_step(result.error)
                error.details.setdefault("step", str(i))
                errors.append(error)
            elif kind is not None:
                found.append(getattr(result, kind))
        if len(found) + len(errors) < len(self.steps):
            raise damaged("lacks results of steps")
        if errors:
            try:
                raise errors[0]  # Later errors are its consequences.
            finally:
                del errors  # It would keep this frame and all its arrays alive.
        return found

    def stats(self, answers: Sequence[Any]) -> List[Stats]:
        found = []
        for step, answer in zip(self.steps, answers):
            s = answer.stats
            found.append(
                Stats(
                    step.node.op,
                    s.strategy,
                    s.device,
                    s.kernel_us,
                    s.bytes,
                    s.flops,
                    s.roundoff,
                    s.queue_us,
                    s.total_us,
                    s.moved_bytes,
                    s.prepared_bytes,
                    s.devices,
                )
            )
        return found

    def explain(self) -> str:
        """Returns one line per step."""
        how = _METHOD[self.steps[0].node.op] if self._alone else "Execute"
        count = f"{len(self.steps)} steps" if len(self.steps) > 1 else "1 step"
        return "\n".join([f"one {how} of {count}", *map(self._line, range(len(self.steps)))])

    def _line(self, number: int) -> str:
        step = self.steps[number]
        node = step.node
        parts = [self._describe(source, view) for source, view in step.operands]
        if step.code:
            factors, others = ([], parts) if node.op != "matmul" else (parts[:2], parts[2:])
            if factors:
                others = ["product", *others]
            letters = [f"{letter}: {part}" for letter, part in zip(OPERANDS, others)]
            parts = [*factors, expression_text(step.code), *letters]
        if node.op != "map":
            parts += [f"{key}={value}" for key, value in node.params.items() if value]
        if node.strategy:
            parts.append(f"strategy={node.strategy}")
        shape = "x".join(map(str, node.shape)) or "number"
        dtype, more = node.dtype, ""
        if node.op in GIVE_TWO:
            wanted = {output for at, output in {*self.outputs, *self._read} if at == number}
            if node.op == "top_k" or len(wanted) == 2:
                dtype, more = step.operands[0][0].dtype, ", i64 indices"
        result = f"{_dtypes.argument_of(dtype)} {shape}{more}"
        return f"{number}: {node.op}({', '.join(parts)}) -> {result}"

    def _describe(self, source: Source, view: View) -> str:
        if isinstance(source, Leaf):
            name = source.name
        elif isinstance(source, Inline):
            name = f"inline {_dtypes.argument_of(source.dtype)}"
        else:
            assert isinstance(source, Node)
            name = f"step {self._fuser.number(source)}" + (" indices" if source.output else "")
        if view.contiguous and view.shape == source.shape:
            return name
        return f"{name} as {'x'.join(map(str, view.shape)) or 'number'}"


def _is_number(node: Node) -> bool:
    return node.op in _NUMBERS and "axes" not in node.params


def value_of(node: Node, answer: Any) -> npt.NDArray[Any]:
    """Returns the array in a response without a buffer. A number is an array of rank 0."""
    dtype = node.dtype
    if _is_number(node):
        if answer.value.WhichOneof("value") is None:
            raise damaged("has no value")
        if node.params.get("op") in ("argmin", "argmax"):
            value: Any = answer.index
        elif dtype.kind in "ib":
            value = answer.value.integer
        else:
            value = answer.value.real
        return _number(value, dtype)
    if node.op in GIVE_TWO:
        tensor = answer.indices if node.output else answer.values
    else:
        tensor = answer.tensor
    # Bytes objects cannot change, but the caller gets a writable array.
    data = bytearray(tensor.data)
    # ALL and ANY return integers.
    stored = np.frombuffer(data, _dtypes.from_wire(tensor.dtype)).reshape(node.shape)
    return stored.astype(dtype, copy=False)


def _number(value: Any, dtype: "np.dtype[Any]") -> npt.NDArray[Any]:
    """Returns a number as a rank-0 array, rounded to the type."""
    if abs(value) <= _LARGEST.get(dtype.char, -1):
        return np.array(value, dtype)
    if dtype == _dtypes.bfloat16:
        return _dtypes.round_to_bf16(np.asarray(value))
    with np.errstate(over="ignore"):  # A sum outside the type's range is infinite, as in NumPy.
        return np.asarray(value).astype(dtype)


def buffer_of(node: Node, answer: Any) -> Any:
    """Returns the buffer that a response describes."""
    if node.op in GIVE_TWO:
        return answer.indices_buffer if node.output else answer.values_buffer
    return answer.buffer


def stored_node(term: Term) -> Node:
    """Returns a node whose result can be a buffer with the elements of the term. For a
    number, a result of ALL or ANY, or a view of a result, the node is a Map that copies it."""
    source, view = term
    if isinstance(source, Node) and view == View.whole(source.shape):
        if not _is_number(source) and not source.gives_integers:
            return source
    node = copy(term)[0]
    assert isinstance(node, Node)
    return node


def on_host(array: npt.NDArray[Any], view: View) -> npt.NDArray[Any]:
    """Applies the view to an array in row-major order."""
    found = window(array, view)
    return found if view.contiguous else found.copy()


def window(array: npt.NDArray[Any], view: View) -> npt.NDArray[Any]:
    """Returns the view of an array, without a copy."""
    if view.size == 0:
        return np.empty(view.shape, array.dtype)
    flat = array.reshape(-1)[view.offset :]
    strides = tuple(stride * array.itemsize for stride in view.strides)
    return np.lib.stride_tricks.as_strided(flat, view.shape, strides)


def inline_bytes(nodes: Sequence[Node]) -> int:
    return sum(node.answer_bytes for node in nodes)


def target(name: str, replace: bool, ttl: Optional[Any], placement: Sequence[str] = ()) -> Any:
    return p.Result(
        buffer=p.BufferTarget(name=name, replace=replace, ttl=ttl, placement=placement)
    )
