"""Print the text of every error, for a reader. It checks nothing.

PYTHONPATH=. python scripts/messages.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import service_streamer

PACKAGE = Path(__file__).parent.parent / "service_streamer"


def text_of(node: ast.expr) -> str:
    """A text as it stands in the source, with {names} for what is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(text_of, values))
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left=left, right=right):
            return text_of(left) + text_of(right)
    return f"{{{ast.unparse(node)}}}"


def is_error(name: str) -> bool:
    kind = getattr(service_streamer, name, None)
    is_ours = isinstance(kind, type) and issubclass(kind, BaseException)
    return is_ours or name.endswith("Error")


def errors_in(tree: ast.AST) -> Iterator[ast.Call]:
    """What is raised, and what is made of a class of errors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield node.exc
        elif isinstance(node, ast.Call) and is_error(ast.unparse(node.func)):
            yield node


def main() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = {
            (call.lineno, f"{ast.unparse(call.func)}: {' '.join(map(text_of, call.args))}")
            for call in errors_in(ast.parse(path.read_text()))
            if call.args
        }
        if lines:
            print(path.relative_to(PACKAGE.parent))
            for number, line in sorted(lines):
                print(f"{number:>6}  {line}")


if __name__ == "__main__":
    main()
