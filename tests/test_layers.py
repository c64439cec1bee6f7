"""The house rules that can be read off the source: imports run downward, decisions stay pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "service_streamer"

#: Each module may import from its own line and those above it.
LAYERS = [
    ["errors", "extras", "managed_model", "options"],
    [
        "metrics",
        "lately",
        "explaining",
        "scheduling.records",
        "scheduling.cost",
        "scheduling.company",
        "scheduling.batching",
        "scheduling.deadlines",
        "scheduling.isolation",
        "scheduling.load",
        "scheduling.turns",
        "scheduling.pending",
        "scheduling.shapes",
        "scheduling.passengers",
        "scheduling.flights",
        "scheduling.health",
        "scheduling.hangs",
        "scheduling.slots",
        "scheduling.supervision",
        "scheduling.batcher",
    ],
    [
        "workers.diagnosis",
        "workers.measuring",
        "workers.memory",
        "workers.out_of_memory",
        "workers.messages",
        "workers.pipes",
        "workers.visibility",
        "workers.gpus",
        "workers.placement",
        "workers.starting",
        "workers.extents",
        "workers.arrays",
        "workers.tensors",
        "workers.payload",
        "workers.by_value",
        "workers.shared_memory",
        "workers.arena",
        "workers.pinning",
        "workers.window",
        "workers.exchange",
        "workers.stacking",
        "workers.sticky",
        "workers.worker",
        "workers.transport",
        "workers.signals",
        "workers.child",
        "workers.worker_process",
        "workers.thread",
        "workers.process",
        "testing",
    ],
    ["simulate.arrivals", "simulate.costs", "simulate.fixed", "simulate.report"],
    ["simulate.simulator"],
    ["blame"],
    ["backend", "stats", "core", "loop", "engine", "futures", "lengths", "recording", "waiting"],
    ["timer", "result_cache", "sharing"],
    ["single_flight"],
    ["signals"],
    ["streamers"],
    ["tracing"],
    ["broker.local"],
    [
        "broker.scripts",
        "broker.clock",
        "broker.codec",
        "broker.ledger",
        "broker.redis",
        "broker.legacy",
        "broker.stats",
    ],
    ["broker.wire", "broker.options", "broker.client", "broker.host"],
    ["broker.streamer", "broker.worker"],
    ["service_streamer"],
    ["pipelines.parameters"],
    ["pipelines.tasks", "pipelines.requests"],
    ["pipelines.lengths"],
    ["pipelines.sizes"],
    ["pipelines.inputs"],
    ["pipelines.hub"],
    ["pipelines.loading", "pipelines.texts", "pipelines.describing", "pipelines.media"],
    ["pipelines.embedding", "pipelines.generation"],
    ["pipelines.model", "pipelines.custom"],
    [
        "server.options",
        "server.schemas",
        "server.refusals",
        "server.observing",
        "server.logs",
        "server.siblings",
        "server.advice",
    ],
    ["server.tracing", "server.headers", "server.bodies", "server.hub"],
    ["server.slow_readers", "server.admission"],
    ["server.exchange", "server.operations", "server.listening"],
    ["server.service"],
    ["server.dashboard", "server.prometheus", "server.openapi"],
    ["server.pages", "server.hosting"],
    ["server.app"],
    ["server.running"],
    ["server.launching"],
    ["server.fleet"],
    ["cli_config"],
    ["cli_options", "cli_failures"],
    ["simulate.traces", "simulate.plot"],
    ["simulate.command"],
    ["cli"],
    ["__main__"],
]
LAYER = {module: number for number, modules in enumerate(LAYERS) for module in modules}
PURE = [
    *LAYERS[0],
    *LAYERS[1],
    *(module for modules in LAYERS for module in modules if module.startswith("simulate.")),
    "workers.diagnosis",
    "workers.measuring",
    "workers.memory",
    "workers.out_of_memory",
    "workers.visibility",
    "workers.extents",
    "broker.clock",
]
WEB = {
    "granian",
    "httptools",
    "msgspec",
    "prometheus_client",
    "python_multipart",
    "pythonjsonlogger",
    "starlette",
    "uvicorn",
    "uvloop",
}
IMPURE = {"threading", "time", "multiprocessing", "logging", "queue", "selectors", "asyncio"}


def imports(module: str) -> Iterator[str]:
    """What a module imports at run time: ours without the package's name, others by top name."""
    tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())
    for_types = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = module.split(".")[: -node.level]
            yield ".".join([*base, node.module or ""])
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).partition(".")[0]


def test_every_module_has_its_layer() -> None:
    modules = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    assert modules == set(LAYER)


@pytest.mark.parametrize("module", LAYER)
def test_imports_run_downward(module: str) -> None:
    for imported in imports(module):
        if imported in LAYER:
            assert LAYER[imported] <= LAYER[module], f"{module} imports {imported}"


@pytest.mark.parametrize("module", PURE)
def test_decisions_do_no_io_and_read_no_clock(module: str) -> None:
    assert not IMPURE & set(imports(module))


@pytest.mark.parametrize("module", LAYER)
def test_the_core_needs_the_standard_library_only(module: str) -> None:
    foreign = {
        name
        for name in imports(module)
        if name  # of the package itself
        and name.partition(".")[0] not in sys.stdlib_module_names
        and name not in LAYER
    }
    if module.startswith("broker."):  # the extra "redis"
        foreign -= {"redis", "redis.backoff", "redis.retry", "msgpack"}
    if module.startswith("pipelines."):  # the extra "transformers": in the worker, in functions
        foreign -= {"torch", "transformers", "huggingface_hub", "numpy", "PIL"}
    if module in ("workers.arrays", "workers.tensors"):  # where these are loaded
        foreign -= {"numpy", "torch"}
    if module.startswith("server."):  # the extra "web"
        foreign -= WEB
    if module == "result_cache":  # the extra "cache"
        foreign -= {"cachetools"}
    if module in ("cli", "cli_config", "cli_options"):
        foreign -= {"click", "torch"}
    if module == "simulate.command":
        foreign -= {"click"}
    if module == "simulate.plot":  # the extra "plot"
        foreign -= {"matplotlib"}
    if module in ("tracing", "server.tracing"):  # the extra "opentelemetry"
        foreign -= {"opentelemetry"}
    assert not foreign - {"scheduling", "workers"}


def test_a_worker_does_not_load_the_web_process_s_half() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, service_streamer.workers.child; print(*sys.modules)"],
        check=True, capture_output=True, text=True, cwd=PACKAGE.parent,
    ).stdout.split()  # fmt: skip
    assert not {f"service_streamer.{name}" for name in ("engine", "streamers")} & set(loaded)
    assert "asyncio" not in loaded
