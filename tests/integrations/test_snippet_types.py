"""The Python snippets of README and docs pass type checkers, and reference pages are up to date."""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import service_streamer

pytestmark = pytest.mark.xdist_group("snippet-types")

ROOT = Path(__file__).parents[2]
PLACES = os.pathsep.join([*os.environ["PATH"].split(os.pathsep), str(Path(sys.executable).parent)])
PYRIGHT = shutil.which("basedpyright", path=PLACES) or shutil.which("pyright", path=PLACES)

#: What a snippet takes from the text before it. Whatever else it does not define is of any type.
TYPES = {"streamer": "Streamer", "worker": "RedisWorker"}
#: Strict, but for what short examples leave out.
MYPY = ["--strict", "--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-calls"]
MYPY += ["--allow-untyped-decorators", "--allow-subclassing-any", "--no-warn-unused-ignores"]
MYPY += ["--python-version=3.11", "--hide-error-context"]
#: What snippets import and only makes the check slow.
SETTINGS = """
[mypy]
ignore_missing_imports = True
[mypy-torch.*,transformers.*,numpy.*,PIL.*,redis.*,django.*,flask.*,fastapi.*,opentelemetry.*]
follow_imports = skip
follow_imports_for_stubs = True
"""


def snippets() -> Iterator[tuple[str, str]]:
    """Each with a name to find it by."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        found = re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
        for number, text in enumerate(found):
            name = "_".join(page.relative_to(ROOT).with_suffix("").parts).lower()
            yield f"{name}_{number}", text


def undefined(text: str) -> list[str]:
    """The names that a program uses and does not define."""
    names = {node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    used = {name.id for name in names if isinstance(name.ctx, ast.Load)}
    defined = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return sorted(used - defined - set(dir(builtins)) - {"__name__", "__file__"})


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program for each snippet."""
    folder = tmp_path_factory.mktemp("snippets")
    for name, text in snippets():
        missing = undefined(text)
        ours = [each for each in missing if each in service_streamer.__all__]
        ours += [TYPES[each] for each in missing if each in TYPES]
        lines = ["from typing import Any, cast\n"]
        lines += [f"from service_streamer import {each}\n" for each in ours]
        lines += [
            f"{each} = cast({TYPES.get(each, 'Any')!r}, None)\n"
            for each in missing
            if each not in ours
        ]
        (folder / f"{name}.py").write_text("".join([*lines, text]))
    assert len(list(folder.iterdir())) > 20
    return folder


@pytest.mark.long
@pytest.mark.timeout(600)
def test_mypy(programs: Path) -> None:
    pytest.importorskip("mypy")
    (programs / "mypy.ini").write_text(SETTINGS)
    files = [str(path) for path in sorted(programs.glob("*.py"))]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *MYPY, "--cache-dir", str(programs / ".cache"), *files],
        cwd=programs,
        env={**os.environ, "MYPYPATH": f"{ROOT}:{ROOT / 'example'}"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.timeout(600)
def test_pyright(programs: Path) -> None:
    if PYRIGHT is None:
        pytest.skip("neither basedpyright nor pyright is installed")
    settings = {
        "typeCheckingMode": "standard",
        "reportMissingImports": False,
        "pythonVersion": "3.11",
        "extraPaths": [str(ROOT), str(ROOT / "example")],
    }
    (programs / "pyrightconfig.json").write_text(json.dumps(settings))
    run = subprocess.run(
        [PYRIGHT, "--pythonpath", sys.executable, "--project", str(programs)],
        cwd=programs,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_reference_pages_are_what_the_script_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from reference_pages import pages

    for path, text in pages().items():
        assert path.read_text() == text, f"run {sys.executable} scripts/reference_pages.py"
