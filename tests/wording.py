"""The wording of messages, kept in one file: ``golden/wording.txt``.

A test calls ``wording(*texts)``, with texts or exceptions. They have to be those that the file has
for this test. ``pytest -n0 --update-wording FILES`` writes into the file what these tests say now.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden" / "wording.txt"
_INDENT = "    "


def read(path: Path = GOLDEN) -> dict[str, list[str]]:
    """The lines of each entry, by the id of its test."""
    entries: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith(_INDENT):
            lines.append(line.removeprefix(_INDENT))
        elif line:
            lines = entries[line] = []
    return entries


def update(name: str, lines: list[str], path: Path = GOLDEN) -> None:
    """Set an entry, and drop those of tests that are no more."""
    entries = {key: value for key, value in read(path).items() if is_there(key)} | {name: lines}
    blocks = ("\n".join([key, *(_INDENT + x for x in entries[key])]) for key in sorted(entries))
    path.write_text("\n\n".join(blocks) + "\n")


def is_there(name: str) -> bool:
    """Whether the test of an entry is defined still."""
    file, _, test = name.partition("::")
    path, function = TESTS / file, test.partition("[")[0].rpartition("::")[2]
    return path.exists() and f"def {function}(" in path.read_text()


def said(of: object) -> str:
    """A text, or that of an exception after its class."""
    return f"{type(of).__name__}: {of}" if isinstance(of, BaseException) else str(of)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-wording", action="store_true", help="write tests/golden/wording.txt anew"
    )


@pytest.fixture
def wording(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compares texts and errors with what the golden file has for this test.

    ``hide`` maps patterns of what differs from run to run, such as a port, to what the file has
    in its place. The path of ``tmp_path`` is hidden in any case.
    """
    file = Path(request.node.path).relative_to(TESTS).as_posix()
    name = f"{file}::{request.node.name}"

    def wording(*of: object, hide: Mapping[str, str] | None = None) -> None:
        text = "\n".join(map(said, of))
        if "tmp_path" in request.fixturenames:
            text = text.replace(str(request.getfixturevalue("tmp_path")), "TMP")
        for pattern, word in (hide or {}).items():
            text = re.sub(pattern, word, text)
        lines = [line.rstrip() for line in text.splitlines()]
        if request.config.getoption("--update-wording"):
            update(name, lines)
        assert lines == read().get(name), "the wording has changed: see --update-wording"

    return wording
