"""What is served of more calls than can be; ``make bench`` runs it after its table.

Single items, each of use to its caller for two seconds only, arrive at multiples of what the
simulated GPU can compute. *Goodput* is what is delivered within that time. See ``open_loop.py``.
"""

from __future__ import annotations

import argparse
import json
import sys

import open_loop
from harness import (
    OURS,
    THEIRS,
    RunFailed,
    install_original,
    machine,
    output_of,
    terminate_cleanly,
)

__all__ = ["report"]

LOADS = (0.5, 1.0, 2.0, 4.0)
#: Its name for ``open_loop.py``, its name in the table, its interpreter.
CONTESTANTS = [
    ("bounded", f"this, `max_pending={open_loop.MAX_PENDING}`", OURS),
    ("unbounded", "this, deadlines only", OURS),
    ("original", "original 0.1.2", THEIRS),
]
COLUMNS = [
    ("load", "---:"),
    ("", "---"),
    ("offered/s", "---:"),
    ("goodput / capacity", "---:"),
    ("served", "---:"),
    ("rejected", "---:"),
    ("expired", "---:"),
    ("failed", "---:"),
    ("served after p50, p99, s", "---:"),
    ("rejected after p99, ms", "---:"),
]


def report(seconds: float = 8.0) -> None:
    """Measure every contestant under every load, and print the table."""
    rows = []
    for load in LOADS:
        for contestant, name, python in CONTESTANTS:
            print(f"overload: {load:g}x, {name}", end=" ... ", file=sys.stderr, flush=True)
            arguments = (contestant, str(load), str(seconds))
            try:
                output = output_of(python, "open_loop.py", *arguments, timeout=seconds + 30)
            except RunFailed as error:
                if python == OURS:
                    raise
                print(error, file=sys.stderr)
                rows.append([f"{load:g}x", name, "did not end", "0.000", "0.0%", *[""] * 5])
                continue
            print(output.strip(), file=sys.stderr)
            rows.append([f"{load:g}x", name, *cells(json.loads(output))])
    print(
        f"\nOverload: seconds {open_loop.WARM_UP:g} to {seconds:g} of each load, one worker of "
        f"{open_loop.CAPACITY:,.0f} items/s, deadline {open_loop.DEADLINE:g} s; {machine()}.\n"
        "Bars: goodput of at least 0.95 of capacity at 2x and 4x; a rejection within 5 ms.\n"
    )
    print("| " + " | ".join(name for name, _ in COLUMNS) + " |")
    print("|" + "|".join(rule for _, rule in COLUMNS) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def cells(figures: dict[str, float | None]) -> list[str]:
    def shown(name: str, form: str, scale: float = 1.0) -> str:
        figure = figures[name]
        return "" if figure is None else format(scale * figure, form)

    latency = ", ".join(filter(None, [shown("latency_p50", ".3f"), shown("latency_p99", ".3f")]))
    shares = [shown(name, ".1%") for name in ("served", "rejected", "expired", "failed")]
    return [
        shown("offered", ",.0f"),
        shown("goodput", ".3f"),
        *shares,
        latency,
        shown("rejection_p99", ".2f", 1000),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="The pool under overload, beside the original.")
    parser.add_argument("--seconds", type=float, default=8.0, help="of load, for each row")
    args = parser.parse_args()
    if args.seconds <= open_loop.WARM_UP:
        parser.error(f"--seconds must be more than the warm-up of {open_loop.WARM_UP:g}")
    terminate_cleanly()
    install_original()
    report(args.seconds)


if __name__ == "__main__":
    main()
