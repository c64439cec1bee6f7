"""Writes the reference pages of docs/ that are derived: the options, and the metrics of Prometheus.

    python scripts/reference_pages.py

A test compares the pages with what this program writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import service_streamer
from service_streamer import RedisStreamer, ThreadedStreamer
from service_streamer.options import table
from service_streamer.options.declare import Option, Options, options_of
from service_streamer.serve.cli.cli_options import COMMANDS, flag_of
from service_streamer.serve.cli.written import Written
from service_streamer.serve.http.admission import ServiceOptions
from service_streamer.serve.http.prometheus import (
    _broker,
    _Collector,
    _HostCollector,
    _scaling,
    _steps,
)
from service_streamer.serve.http.service import Service

__all__ = ["pages"]

CONSTRUCTORS: dict[str, type[Options]] = {
    "ThreadedStreamer": table.StreamerOptions,
    "Streamer": table.StreamerOptions,
    "RayStreamer": table.RayStreamerOptions,
    "RedisStreamer": table.RedisStreamerOptions,
    "RedisWorker": table.RedisWorkerOptions,
}

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"

_WRITTEN = (
    "<!-- Written by scripts/reference_pages.py: change service_streamer/{source} instead. -->"
)

_OPTIONS = """# Options

{written}

## Constructors

`ThreadedStreamer`, `Streamer`, `RayStreamer`, `RedisStreamer` and `RedisWorker` take these as
keyword arguments. `run_redis_workers_forever` takes those of `RedisWorker`. The
[reference](streamers.md) has their order.

<div class="options" markdown="1">

{constructors}

</div>

## `service-streamer serve` and `worker`

Each option can be given on the command line, as an environment variable
(`SERVICE_STREAMER_MAX_PENDING` for `--max-pending`) or in a
[TOML file](../http.md#in-production). The line wins over the environment, and the environment
wins over the file. An option that has no effect with the others is refused.

<div class="options" markdown="1">

{commands}

</div>

`worker` reads its port from `SERVICE_STREAMER_WORKER_PORT`, since both commands may share an
environment.

## `service-streamer simulate`

Durations are in seconds, or such as `5ms` and `100us`.

<div class="options" markdown="1">

{simulate}

</div>
"""

_METRICS = """# Metrics

{written}

`service-streamer serve` and `service-streamer worker --port` answer `GET /metrics` in Prometheus'
format. All names begin with `service_streamer_`. Metrics of the process and of Python come along.

{tables}
"""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [[*head]]
    lines.append(["---"] * len(lines[0]))
    lines += [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line).rstrip() + " |" for line in lines)


def _by_name(fronts: Mapping[str, type[Options]]) -> dict[str, dict[str, Option]]:
    """The options of constructors or commands, each as they have it, in the order of the table."""
    found: dict[str, dict[str, Option]] = {}
    for front, options in fronts.items():
        constructor = getattr(service_streamer, front) if front in CONSTRUCTORS else None
        for option in options_of(options, constructor):
            found.setdefault(option.name, {})[front] = option
    return found


def _default(option: Option, *, on_line: bool) -> str:
    if option.shown and on_line:
        return option.shown
    if on_line and option.default in (None, False, "", b"", ()):
        return ""
    return f"`{option.default}`" if on_line else f"`{option.default!r}`"


def _merged(parts: Iterable[tuple[str, str]]) -> str:
    """One text if all fronts have the same, else each with its front."""
    by_text: dict[str, list[str]] = {}
    for front, text in parts:
        by_text.setdefault(text, []).append(front)
    first, *others = by_text
    return "<br>".join(
        [
            first,
            *(f"{', '.join(f'`{front}`' for front in by_text[each])}: {each}" for each in others),
        ]
    )


def _text(option: Option) -> str:
    return " ".join(filter(None, (option.help, option.more)))


def _rows(fronts: Mapping[str, type[Options]], *, on_line: bool) -> Iterator[list[str]]:
    for name, found in _by_name(fronts).items():
        first = next(iter(found.values()))
        values = Written(first).words if on_line else _values(first)
        shown = f"`--{flag_of(first)}`" if on_line else f"`{name}`"
        shown = "`MODEL`" if name == "model" else shown
        row = [
            shown,
            values,
            _merged((front, _default(o, on_line=on_line)) for front, o in found.items()),
        ]
        if len(fronts) > 1:
            row.append(
                "all" if len(found) == len(fronts) else ", ".join(f"`{each}`" for each in found)
            )
        yield [*row, _merged((front, _text(o)) for front, o in found.items())]


def _values(option: Option) -> str:
    kind = option.kind
    more = [*['"auto"'] * kind.auto, *[f"`None` ({kind.none})"] * bool(kind.none)]
    return ", or ".join([kind.words, *more])


def options_page() -> str:
    commands = {name: each for name, each in COMMANDS.items() if name != "simulate"}
    head = ["option", "values", "default"]
    return _OPTIONS.format(
        written=_WRITTEN.format(source="options/table.py and serve/command_options.py"),
        constructors=_table([*head, "in", "what it does"], _rows(CONSTRUCTORS, on_line=False)),
        commands=_table([*head, "in", "what it does"], _rows(commands, on_line=True)),
        simulate=_table(
            [*head, "what it does"], _rows({"simulate": COMMANDS["simulate"]}, on_line=True)
        ),
    )


def _metrics(families: Iterable[Any]) -> str:
    rows = []
    for family in families:
        labels = ",".join(family._labelnames)
        name = family.name.removeprefix("service_streamer_")
        name += "_total" * (family.type == "counter") + f"{{{labels}}}" * bool(labels)
        rows.append([f"`{name}`", family.type, family.documentation])
    return _table(["metric", "type", "what it tells"], rows)


def metrics_page() -> str:
    with ThreadedStreamer(sorted) as streamer:
        service: Any = Service(streamer, ServiceOptions("model"))
        own = [*_Collector(service).collect()]
        steps = [*_steps(streamer.metrics)]
        scaling = [*_scaling(streamer.stats())]
        stats = SimpleNamespace(
            state="connected", outages=0, held=0, claimed=0, taken_over=0,
            taken_away=0, late=0, expired=0, set_aside=0, pool=streamer.stats(),
        )  # fmt: skip
        host: Any = SimpleNamespace(
            model_name="model", stats=lambda: stats, metrics=streamer.metrics
        )
        hosts = [*_HostCollector(host, lambda: True).collect()]
    with RedisStreamer() as client:
        behind = [*_broker(client.stats())]
    known = {each.name for each in own}
    tables = [
        f"## `service-streamer serve`\n\n{_metrics(own)}",
        "## `service-streamer serve` of a model of steps, also { #serve-steps }\n\n"
        + _metrics(steps),
        "## `service-streamer serve --workers LEAST:MOST`, also { #serve-scaling }\n\n"
        + _metrics(scaling),
        "## `serve --redis`, in place of the workers' metrics { #serve-redis }\n\n"
        + _metrics(behind),
        "## `service-streamer worker`, beside the workers' metrics { #worker }\n\n"
        + _metrics(each for each in hosts if each.name not in known),
    ]
    return _METRICS.format(
        written=_WRITTEN.format(source="serve/http/prometheus.py"), tables="\n\n".join(tables)
    )


def pages() -> dict[Path, str]:
    """The text of each page by its path."""
    return {
        REFERENCE / "options.md": options_page(),
        REFERENCE / "metrics.md": metrics_page(),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
