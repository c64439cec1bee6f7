"""The house rules that can be read off the source: imports run downward, decisions stay pure.

The layers are the folders, top to bottom. Nothing is listed by module, so nothing can be hidden.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("layers")  # each process would parse the package

PACKAGE = Path(__file__).parent.parent / "service_streamer"

#: From the ground up. A folder, or a module at the top level, imports from lines before its own.
LAYERS = [
    ["", "errors"],
    ["reporting"],
    ["options"],
    ["gpu"],
    ["managed_model"],
    ["observe", "supervision"],
    ["batching"],
    ["workers"],
    ["testing", "engine"],
    ["simulate"],
    ["single_flight", "future", "remote"],
    ["pool", "base_streamer"],
    ["streamer"],
    ["tracing", "service_streamer"],
    ["pipelines"],
    ["ray", "redis"],
    ["serve.v2"],
    ["serve.http"],
    ["serve.rpc"],
    ["serve"],
    ["serve.cli"],
    ["__main__"],
]
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
#: Folders of decisions and records: no I/O, no clock, no threads.
PURE = {"errors", "options", "observe", "supervision", "batching", "simulate"}
IMPURE = {"threading", "time", "multiprocessing", "logging", "queue", "selectors", "asyncio"}

#: Optional packages, and the rooms that may need them.
OPTIONAL = {
    "gpu": {"pynvml"},
    "workers": {"numpy", "torch"},
    "single_flight": {"cachetools"},
    "tracing": {"opentelemetry"},
    "simulate": {"matplotlib"},
    "ray": {"ray"},
    "redis": {"redis", "msgpack"},
    "pipelines": {
        "torch", "transformers", "huggingface_hub", "numpy", "PIL", "safetensors", "llguidance",
    },
    "serve.v2": {"msgspec", "numpy"},
    "serve.http": {
        "httptools", "msgspec", "opentelemetry", "prometheus_client", "python_multipart",
        "starlette",
    },
    "serve.rpc": {"google", "grpc", "grpc_health", "grpc_reflection"},
    "serve": {"pythonjsonlogger", "uvloop"},
    "serve.cli": {"click", "torch"},
}  # fmt: skip

MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
    for path in PACKAGE.rglob("*.py")
)
KNOWN = frozenset(MODULES)


def source(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split(".")) if module else PACKAGE
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(source(module).read_text())


@functools.cache
def room(module: str) -> str:
    """The folder of a module; a module at the top level is a room of its own."""
    if source(module).name == "__init__.py":
        return module
    return module.rpartition(".")[0] or module


@functools.cache
def imports(module: str, *, nested: bool = True) -> frozenset[str]:
    """The modules that a module imports at run time: ours as ".name", others by their top name.

    Without ``nested`` only those that are imported when the module is.
    """
    return frozenset(_imports(module, nested=nested))


def _imports(module: str, *, nested: bool) -> Iterator[str]:
    skipped = {
        node
        for block in ast.walk(tree(module))
        if (isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING")
        or (not nested and isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef))
        for node in ast.walk(block)
    }
    package = module.split(".") if source(module).name == "__init__.py" else module.split(".")[:-1]
    for node in {*ast.walk(tree(module))} - skipped:
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(level=0, module=str(foreign)):
                yield foreign.partition(".")[0]
            case ast.ImportFrom(level=level, module=above, names=names):
                base = [part for part in package if part]
                base = [*base[: len(base) - level + 1], *(above or "").split(".")]
                for alias in names:
                    name = ".".join(filter(None, [*base, alias.name]))
                    yield "." + (name if name in KNOWN else ".".join(filter(None, base)))


def ours(module: str, *, nested: bool = True) -> set[str]:
    return {name[1:] for name in imports(module, nested=nested) if name.startswith(".")}


def test_imports_run_downward() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module in MODULES
        if module
        for imported in ours(module)
        if room(imported) != room(module) and LAYER[room(imported)] >= LAYER[room(module)]
    ]
    assert not wrong


def test_no_module_is_in_a_circle() -> None:
    arrows = {module: ours(module, nested=False) - {module} for module in MODULES if module}
    while leaves := [module for module, below in arrows.items() if not below & set(arrows)]:
        for module in leaves:
            del arrows[module]
    assert not arrows


def test_no_two_modules_and_no_two_classes_have_one_name() -> None:
    names = defaultdict(list)
    for module in MODULES:
        if source(module).name != "__init__.py":
            names[module.rpartition(".")[2]].append(module)
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names[node.name].append(module)
    assert not {name: modules for name, modules in names.items() if len(modules) > 1}


def test_decisions_do_no_io_and_read_no_clock() -> None:
    pure = [module for module in MODULES if room(module) in PURE]
    assert len(pure) > 20
    assert not {module: found for module in pure if (found := IMPURE & imports(module))}


def test_the_core_needs_the_standard_library_only() -> None:
    for module in MODULES:
        foreign = {name for name in imports(module) if not name.startswith(".")}
        known = {*sys.stdlib_module_names, "service_streamer", *OPTIONAL.get(room(module), ())}
        assert foreign <= known, module


def loaded_by(*command: str) -> set[str]:
    """The modules that a fresh interpreter has loaded, as it prints them."""
    done = subprocess.run(
        [sys.executable, *command], check=True, capture_output=True, text=True, cwd=PACKAGE.parent,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )  # fmt: skip
    return set(done.stdout.split())


#: A model that answers with the modules that its worker has loaded.
WORKER = """
import sys


def loaded(batch):
    return [[*sys.modules] for _ in batch]


if __name__ == "__main__":
    from service_streamer import Streamer

    with Streamer(loaded) as streamer:
        print(*streamer.predict([1])[0])
"""


def test_a_worker_does_not_load_the_web_process_s_half(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WORKER)
    loaded = loaded_by(str(program))
    rooms = ("engine", "streamer", "single_flight", "redis", "serve", "simulate")
    assert any(name.startswith(f"{PACKAGE.name}.workers") for name in loaded)
    assert not {f"service_streamer.{name}" for name in rooms} & loaded
    assert "asyncio" not in loaded
    assert "service_streamer.options.table" not in loaded, "a fifth of a worker's own imports"


@pytest.mark.parametrize(
    ("program", "spared"),
    [
        ("import service_streamer.serve.http.app\n"
         "from service_streamer import RedisStreamer, Streamer",
         {"service_streamer.simulate"}),
        ("import service_streamer.simulate",
         {"matplotlib", "click", "service_streamer.engine.engine", "asyncio"}),
    ],
    ids=["a web process", "the simulator"],
)  # fmt: skip
def test_a_program_does_not_load_what_it_does_not_use(program: str, spared: set[str]) -> None:
    loaded = loaded_by("-c", f"import sys\n{program}\nprint(*sys.modules)")
    assert "service_streamer.batching.batcher" in loaded
    assert not spared & loaded
