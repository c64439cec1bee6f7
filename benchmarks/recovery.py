"""How long the next result takes when the only worker is killed; ``make bench`` runs it too.

By whom the seconds are spent: *noticing*, until a new process is started; *spawn*, until that has
Python running and asks for the model's module; *import* of that and of what it needs; *init*, the
model's ``init_model``; *first batch*, until the caller has its result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from harness import OURS, machine, output_of, terminate_cleanly

__all__ = ["report"]

MODELS = [
    ("TimedSimulatedGPU", "simulated GPU, nothing to load"),
    ("TimedBert", "text infilling (torch, CPU)"),
]
PHASES = ("noticing", "spawn", "import", "init", "first batch", "total")


def report(kills: int = 5) -> None:
    """Measure with every model, and print the table."""
    rows = []
    for model, name in MODELS:
        print(f"recovery: {name}", end=" ... ", file=sys.stderr, flush=True)
        recoveries = json.loads(output_of(OURS, "killing.py", model, str(kills)))
        medians = [statistics.median(each[phase] for each in recoveries) for phase in PHASES]
        rows.append([name, *(f"{seconds:.4f}" for seconds in medians)])
        print(", ".join(f"{each['total']:.2f}" for each in recoveries), file=sys.stderr)
    print(
        "\nRecovery: seconds from SIGKILL of the only worker to the next result, "
        f"medians of {kills} kills; {machine()}.\n"
    )
    print("| | " + " | ".join(PHASES) + " |\n|---|" + "---:|" * len(PHASES))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description="From a worker's death to the next result.")
    parser.add_argument("--kills", type=int, default=5)
    args = parser.parse_args()
    terminate_cleanly()
    report(args.kills)


if __name__ == "__main__":
    main()
