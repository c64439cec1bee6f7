"""How much of the inside the tests hold fast. Both figures only fall.

A module is internal unless users import it. A private attribute counts if it is not one of ``self``
or ``cls``, also if a string names it, as for ``monkeypatch.setattr``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "service_streamer"
#: What users import, and tests may.
PUBLIC = {
    PACKAGE,
    *(f"{PACKAGE}.{each}" for each in ("testing", "service_streamer", "managed_model")),
}
#: What tests name today. Lower both figures with every change that allows it.
MODULES = 55
PRIVATE = 33

_LONGEST_NAME = 200  # longer strings are programs and texts


def modules_of_the_package() -> set[str]:
    paths = [path.relative_to(ROOT) for path in (ROOT / PACKAGE).rglob("*.py")]
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths}


def nodes_of(path: Path) -> Iterator[ast.AST]:
    """The nodes that name something: the others are most of them."""
    kinds = (ast.Import, ast.ImportFrom, ast.Constant, ast.Attribute)
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))


def names_in(node: ast.AST) -> Iterator[str]:
    """The modules, or members of them, that an import or a string names."""
    match node:
        case ast.Import(names=names):
            yield from (each.name for each in names)
        case ast.ImportFrom(module=str(module), names=names):
            yield module
            yield from (f"{module}.{each.name}" for each in names)
        case ast.Constant(value=str(text)) if len(text) < _LONGEST_NAME:
            yield from re.findall(rf"\b{PACKAGE}(?:\.\w+)+", text)


def is_private_use(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=str(text)):
            return bool(re.fullmatch(r"_[a-z]\w*", text))
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            return False
        case ast.Attribute(attr=name):
            return bool(re.match("_[a-z]", name))
    return False


def test_ties_of_the_tests_to_the_inside_only_fall() -> None:
    inside = modules_of_the_package() - PUBLIC
    named: set[str] = set()
    private = 0
    for path in Path(__file__).parent.rglob("*.py"):
        for node in nodes_of(path):
            private += is_private_use(node)
            for name in names_in(node):
                while name and name not in inside:
                    name = name.rpartition(".")[0]
                named |= {name} - {""}
    assert (len(named), private) == (MODULES, PRIVATE), "they may only fall: if so, lower both here"
