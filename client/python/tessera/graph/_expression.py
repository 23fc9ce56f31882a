"""The expressions of steps, as messages and as text. No I/O."""

from typing import Any, Dict, List, Sequence, Tuple

from ..wire import _protocol as p
from . import _dtypes
from ._fuse import Instruction
from ._graph import Constant

# The names of operands in the text, as on the command line.
OPERANDS = "abcdefgh"
# Operators, and their precedence.
_INFIX: Dict[str, Tuple[str, int]] = {
    "or": ("or", 1),
    "xor": ("xor", 2),
    "and": ("and", 3),
    "equal": ("==", 5),
    "not_equal": ("!=", 5),
    "less": ("<", 5),
    "less_equal": ("<=", 5),
    "greater": (">", 5),
    "greater_equal": (">=", 5),
    "add": ("+", 6),
    "subtract": ("-", 6),
    "multiply": ("*", 7),
    "divide": ("/", 7),
    "floor_divide": ("//", 7),
    "remainder": ("%", 7),
}
_STRONGEST = 10
_LONGEST = 200


def _constant_fields(constant: Constant) -> Dict[str, Any]:
    if constant.dtype.kind == "b":
        return {"boolean": constant.value}
    kind = "integer" if constant.dtype.kind in "iu" else "real"
    return {kind: constant.value, "dtype": _dtypes.to_wire(constant.dtype)}


def expression_message(code: Sequence[Instruction]) -> Any:
    """Returns the Expression message of a step's code."""
    nodes = []
    for fn, args, value, dtype in code:
        if fn == "operand":
            fields: Dict[str, Any] = {"operand": value}
        elif fn == "constant":
            fields = _constant_fields(value)
        elif fn == "coordinate":
            fields = {"coordinate": value}
        else:
            fields = {"op": p.MAP_OPS[fn], "args": args}
            if fn == "cast":
                fields["dtype"] = _dtypes.to_wire(dtype)
        nodes.append(p.ExpressionNode(**fields))
    return p.Expression(nodes=nodes)


def expression_text(code: Sequence[Instruction]) -> str:
    """Returns the expression as text that the command line reads (tessera map). Long text is
    truncated."""
    texts: List[Tuple[str, int]] = []
    for fn, args, value, dtype in code:
        if fn == "operand":
            texts.append((OPERANDS[value], _STRONGEST))
        elif fn == "constant":
            texts.append((str(value.value).lower(), _STRONGEST if value.value >= 0 else 8))
        elif fn == "coordinate":
            texts.append((f"coordinate({value})", _STRONGEST))
        else:
            texts.append(_function_text(fn, [texts[arg] for arg in args], dtype))
    text = texts[-1][0]
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _function_text(fn: str, args: List[Tuple[str, int]], dtype: Any) -> Tuple[str, int]:
    # Long texts are truncated anyway. Without this line, a text could double in length at each node
    # that uses it twice.
    args = [(text[: _LONGEST + 1], strength) for text, strength in args]
    if fn in _INFIX:
        sign, strength = _INFIX[fn]
        left, right = args
        # Comparisons do not chain; the other operators associate to the left.
        a = left[0] if left[1] > strength - (strength != 5) else f"({left[0]})"
        b = right[0] if right[1] > strength else f"({right[0]})"
        return f"{a} {sign} {b}", strength
    if fn in ("negate", "not"):
        sign, strength = ("-", 8) if fn == "negate" else ("not ", 4)
        text = args[0][0] if args[0][1] >= strength else f"({args[0][0]})"
        return sign + text, strength
    if fn == "power":
        a, b = (text if strength == _STRONGEST else f"({text})" for text, strength in args)
        return f"{a} ** {b}", 9
    name = _dtypes.SHORT[dtype] if fn == "cast" else fn
    return f"{name}({', '.join(text for text, _ in args)})", _STRONGEST
