"""``serve`` over HTTP, with real tokenising and real JPEG files, in turn with what else does it.

All have the same model in half precision on the same device, and stay loaded while others are
asked. The pipeline and infinity are asked within their processes, which spares them HTTP.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import itertools
import json
import math
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from on_gpu.beside import Beside
from on_gpu.checkpoints import build, images, texts
from on_gpu.client import paths_of
from on_gpu.device import as_visible
from on_gpu.nvml import Watch
from on_gpu.rivals import SIZE, infinitys_python
from on_gpu.running import Row, answer
from on_gpu.service import Service, serving
from on_gpu.simulated_pipeline import SimulatedPipeline, variables
from on_gpu.turns import in_turn

__all__ = ["agree", "served_rows"]

#: At most so many processes ask, one for each four cores: the others are for the service.
_CLIENTS = 4
#: Items that are in flight: four full batches. A lone worker computes one, has one, and more wait.
_IN_FLIGHT = 4 * SIZE
#: At most so many processes decode images.
_DECODERS = 8
#: Answers that are compared with those of the pipeline.
_COMPARED = 8
#: Half precision, and batches of other sizes: few percent of a score, or of a vector's 1 / 28.
_RELATIVE, _ABSOLUTE = 0.05, 2e-3

_PIPELINE = f"transformers.pipeline, batch_size={SIZE}"
_INFINITY = "infinity"


def measure(settings: Row) -> Iterator[Row]:
    task, kind, device = settings["task"], settings["kind"], settings["device"]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        build(task, kind, Path(folder))
        common = {"task": task, "kind": kind, "folder": folder}
        pipeline = stack.enter_context(Beside("rivals", {**common, "rival": "pipeline"}, device))
        infinity, note = _infinity(common, device, stack)
        services = {
            name: stack.enter_context(_service(common, device, options))
            for name, options in _services(task, kind).items()
        }
        clients = [
            stack.enter_context(Beside("client", {"task": task}, "cpu"))
            for _ in range(max(1, min(_CLIENTS, (os.cpu_count() or 1) // 4)))
        ]
        watch = stack.enter_context(Watch([device] if kind == "cuda" else []))
        for each in (pipeline, *clients):
            each.wait_ready()
        if infinity is not None:
            try:
                infinity.wait_ready()
                infinity.ask("rate", tokens=settings["tokens"][0], warm=0, seconds=0.1)
            except RuntimeError as error:
                infinity, note = None, f"infinity was not measured: {str(error).splitlines()[-1]}"
        if note:
            yield {"note": f"{task}: {note}."}
        for tokens in settings["tokens"]:
            for name, service in services.items():
                yield {"note": _compared(pipeline, name, service, task, tokens)}
            yield from _rounds(settings, tokens, pipeline, infinity, services, clients, watch)
        for name, service in services.items():
            for sentence in json.loads(service.read("/stats"))["explanation"]:
                yield {"note": f"{task}: {name} says: {sentence}"}


def _rounds(
    settings: Row,
    tokens: int | None,
    pipeline: Beside,
    infinity: Beside | None,
    services: Mapping[str, Service],
    clients: Sequence[Beside],
    watch: Watch,
) -> Iterator[Row]:
    timed = {"warm": settings["warm"], "seconds": settings["seconds"]}

    def beside(process: Beside) -> Row:
        rate = process.ask("rate", tokens=tokens, **timed)
        return {"per_s": rate, **_UNKNOWN, **_watched(watch, settings["seconds"])}

    def served(service: Service, items: int, warm: float) -> Row:
        return _asked(service, clients, watch, tokens, items, {**timed, "warm": warm})

    ways: dict[str, Callable[[], Row]] = {_PIPELINE: functools.partial(beside, pipeline)}
    if infinity is not None:
        ways[_INFINITY] = functools.partial(beside, infinity)
    sizes = (1,) if tokens is None else (1, SIZE)
    for (name, service), items in itertools.product(services.items(), sizes):
        served(service, items, settings["first_warm"])  # it learns what batches cost
        way = functools.partial(served, service, items, settings["warm"])
        ways[f"{name}, requests of {items}"] = way
    device_ms = pipeline.ask("device_ms", tokens=tokens)
    for number, rows in in_turn(ways, settings["rounds"]):
        yield from served_rows(settings["task"], tokens, number, rows, device_ms)


def served_rows(
    task: str, tokens: int | None, number: int, rows: dict[str, Row], device_ms: float | None
) -> Iterator[Row]:
    """The rows of one round.

    ``device_share`` is items × the device's time for each, in full batches, of the time that there
    was: what a plain forward pass takes, as the pipeline does it.
    """
    for way, row in rows.items():
        per_s = row["per_s"]
        yield {
            "workload": task,
            "tokens": tokens,
            "way": way,
            "round": number,
            "of_pipeline": per_s / rows[_PIPELINE]["per_s"],
            "device_ms": device_ms,
            "device_share": None if device_ms is None else per_s / SIZE * device_ms / 1e3,
            **row,
        }


#: What is known of a service only.
_UNKNOWN: Row = {
    "p50_ms": None,
    "p99_ms": None,
    "failed": None,
    "processor_ms": None,
    "mean_batch": None,
}


def _asked(
    service: Service,
    clients: Sequence[Beside],
    watch: Watch,
    tokens: int | None,
    items: int,
    timed: Row,
) -> Row:
    connections = max(1, _IN_FLIGHT // items // len(clients))
    before, began = service.used(), time.monotonic()
    asked = {"port": service.port, "tokens": tokens, "items": items, "connections": connections}
    for client in clients:
        client.begin("rate", **asked, **timed)
    found = [client.answer() for client in clients]
    lasted, after = time.monotonic() - began, service.used()
    used, batches = after.seconds - before.seconds, after.batches - before.batches
    per_s = sum(each["per_s"] for each in found)
    p50s, p99s = ([each[name] for each in found if each[name]] for name in ("p50", "p99"))
    return {
        "per_s": per_s,
        "p50_ms": 1e3 * sum(p50s) / len(p50s) if p50s else None,
        "p99_ms": 1e3 * max(p99s) if p99s else None,
        "failed": sum(each["failed"] for each in found),
        # Of all the time, in which the rate is much the same.
        "processor_ms": 1e3 * used / lasted / per_s * SIZE if per_s else None,
        "mean_batch": (after.items - before.items) / batches if batches else None,
        **_watched(watch, timed["seconds"]),
    }


def _watched(watch: Watch, seconds: float) -> Row:
    """Of a window that ends now; what is said in its first half is of before."""
    now = time.monotonic_ns()
    return watch.between(now - round(seconds * 5e8), now)


def _services(task: str, kind: str) -> dict[str, dict[str, str]]:
    """The services of a task, with their options: images also with processes that decode them."""
    services: dict[str, dict[str, str]] = {"serve": {}}
    if task == "image-classification" and kind != "simulated":  # there it is a model of the user
        count = max(1, min(_DECODERS, (os.cpu_count() or 1) // 2))
        services[f"serve, preprocess_workers={count}"] = {"preprocess-workers": str(count)}
    return services


def _service(
    common: Row, device: str, options: Mapping[str, str]
) -> contextlib.AbstractContextManager[Service]:
    task, kind, folder = common["task"], common["kind"], common["folder"]
    if kind == "cuda":
        return serving(folder, {"task": task, "devices": as_visible(device), **options}, {})
    on_cpu = {"devices": "cpu", "cpu-threads": "1", **options}
    if kind == "cpu":
        return serving(folder, {"task": task, **on_cpu}, {})
    target = f"{SimulatedPipeline.__module__}:{SimulatedPipeline.__name__}"
    # As a pipeline has it that is served from its folder.
    return serving(target, {**on_cpu, "length": f"{target}.length"}, variables(folder, task))


def _infinity(common: Row, device: str, stack: contextlib.ExitStack) -> tuple[Beside | None, str]:
    """infinity, if it can compute this here; and why it cannot."""
    if common["task"] not in ("feature-extraction", "text-classification"):
        return None, ""
    if common["kind"] == "simulated":
        return None, "infinity was not measured: it computes by itself, not on what sleeps"
    python = infinitys_python()
    if python is None:
        return None, "infinity was not measured: it is not installed, here or in .rivals/infinity"
    settings = {**common, "rival": "infinity"}
    return stack.enter_context(Beside("rivals", settings, device, python)), ""


def _compared(pipeline: Beside, name: str, service: Service, task: str, tokens: int | None) -> str:
    """How many answers of the service are those of the pipeline."""
    right = pipeline.ask("answers", tokens=tokens, count=_COMPARED)
    given: Sequence[Any] = (
        images() if tokens is None else texts(tokens, is_masked=task == "fill-mask")
    )
    answers = [_answer(service.port, task, item) for item in given[:_COMPARED]]
    equal = sum(agree(*each) for each in zip(answers, right, strict=True))
    which = task if tokens is None else f"{task}, {tokens} tokens"
    return f"{which}: {equal} of {_COMPARED} answers of {name} equal those of the pipeline."


def _answer(port: int, task: str, item: str | bytes) -> Any:
    path, name, more = paths_of(task)
    is_file = isinstance(item, bytes)
    body = item if is_file else json.dumps({name: item, **more})
    headers = {"Content-Type": "image/jpeg" if is_file else "application/json"}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as asked:
        asked.request("POST", path, body, headers)
        answered = json.loads(asked.getresponse().read())
    if task != "feature-extraction":
        return answered
    data = base64.b64decode(answered["data"][0]["embedding"])
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def agree(answer: Any, right: Any) -> bool:
    """Whether two answers are the same but for rounding: vectors; or the best label or word."""
    if isinstance(_best(right), dict):
        mine, best = _best(answer), _best(right)
        named = "label" if "label" in best else "token_str"
        return bool(mine[named] == best[named]) and _is_close(mine["score"], best["score"])
    return len(answer) == len(right) and all(map(_is_close, answer, right))


def _best(answer: Any) -> Any:
    return answer[0] if isinstance(answer, list) else answer


def _is_close(mine: float, theirs: float) -> bool:
    return math.isclose(mine, theirs, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)


if __name__ == "__main__":
    answer(measure)
