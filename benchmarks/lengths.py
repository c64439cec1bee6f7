"""Sentences of unlike lengths on MiniLM, from 256 callers; ``make bench`` runs it after its table.

What ``Streamer(MiniLM)`` computes with no setting touched, beside: one sentence after the other;
batches in the order of arrival; the best that anyone can do who has all sentences beforehand, sorts
them and has tried every batch size; and infinity at its best. Then with sentences that are equally
long. Everything runs with two threads of torch, in processes of its own; all compute the same
sentences, and all of ours with the same code, ``minilm.py``.

What has settings is swept over them in the first round; later rounds repeat those that came within
a tenth of the best, and leave out what no bar is held to.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness import (
    ENVIRONMENT,
    OURS,
    ROOT,
    install_rival,
    machine,
    output_of,
    rival,
    terminate_cleanly,
    version_of,
)
from lengths_driver import CALLERS
from minilm import MEAN_WORDS, SIGMA, THREADS, find

__all__ = ["report"]

OFFLINE = ("1", "2", "4", "8", "12", "16", "24", "32", "48", "64")
FIXED = ("4", "8", "12", "16", "24", "32", "48")
#: Batch size, what it sorts by, what computes: see ``rivals/infinity_driver.py``.
INFINITY = (
    *(f"{size}/characters/transformers" for size in (4, 8, 12, 16, 32, 64)),
    *(f"{size}/tokens/transformers" for size in (8, 16)),
)
BETTER = (
    *(f"{size}/characters/bettertransformer" for size in (8, 16, 32, 64)),
    "16/tokens/bettertransformer",
)
DEFAULT = ("default",)
KINDS = ("mixed", "equal")

_ENVIRONMENT = {
    **ENVIRONMENT,
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": str(THREADS),
}
#: infinity's interpreter does not have our package, whose base class the models have.
_WITH_OURS = {**_ENVIRONMENT, "PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:{ROOT}"}

#: ``(settings, sentences)`` to sentences per second, by setting.
Measure = Callable[[Sequence[str], int], dict[str, float]]


@dataclass(frozen=True)
class Contestant:
    """One row of a table.

    Attributes:
        settings: those to sweep; in a quick run the first and the last.
        bar: what ours must be at least, in multiples of it; None for what is there to compare.
    """

    name: str
    measure: Measure
    settings: tuple[str, ...] = DEFAULT
    bar: float | None = None


def ours(way: str, kind: str) -> Measure:
    def measure(settings: Sequence[str], count: int) -> dict[str, float]:
        options = (way, kind, str(count), ",".join(settings))
        return _rates(OURS, "lengths_driver.py", *options, environment=_ENVIRONMENT)

    return measure


def infinity(kind: str) -> Measure:
    def measure(settings: Sequence[str], count: int) -> dict[str, float]:
        options = (str(find()), kind, str(count), ",".join(settings))
        script = "rivals/infinity_driver.py"
        return _rates(rival("infinity"), script, *options, environment=_WITH_OURS)

    return measure


def _rates(
    python: str, script: str, *options: str, environment: dict[str, str]
) -> dict[str, float]:
    output = output_of(python, script, *options, timeout=3600, environment=environment)
    rates: dict[str, float] = json.loads(output.splitlines()[-1])
    return rates


def contestants(kind: str) -> list[Contestant]:
    """The rows; the first one is what the others are compared with."""
    default = Contestant("this, `Streamer(MiniLM)`", ours("streamer", kind))
    offline = ours("sorted", kind)
    if kind == "equal":
        return [
            default,
            Contestant("offline, best batch size", offline, OFFLINE),
            Contestant("this, best `batch_size=`", ours("streamer", kind), FIXED, bar=1.0),
        ]
    name = f"infinity {version_of('infinity_emb', 'infinity')}"
    return [
        default,
        Contestant("one by one", ours("in-order", kind), ("1",)),
        Contestant("batches in order of arrival", ours("in-order", kind), ("64",)),
        Contestant("offline, sorted, best batch size", offline, OFFLINE, bar=0.88),
        Contestant("this, without `length`", ours("without-length", kind)),
        Contestant(f"{name}, best setting", infinity(kind), INFINITY, bar=1.2),
        Contestant(f"{name}, BetterTransformer, best setting", infinity(kind), BETTER),
    ]


def measured(kind: str, rounds: int, count: int, is_quick: bool) -> list[list[str]]:
    """The rows of the table of a kind of sentences, ``mixed`` or ``equal``."""
    chosen = contestants(kind)
    figures: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for each in chosen:
            so_far = figures.setdefault(each.name, {})
            left: Sequence[str] = each.settings
            if number == 0 and is_quick:
                left = tuple(dict.fromkeys((left[0], left[-1])))
            elif number:
                if each.bar is None and each is not chosen[0]:
                    continue
                best = max(map(statistics.median, so_far.values()))
                left = [s for s, rates in so_far.items() if statistics.median(rates) > 0.9 * best]
            title = f"lengths, round {number + 1}: {kind}, {each.name}"
            print(title, end=" ... ", file=sys.stderr, flush=True)
            rates = each.measure(left, count)
            for setting, rate in rates.items():
                so_far.setdefault(setting, []).append(rate)
            shown = ", ".join(f"{setting}: {rate:.1f}" for setting, rate in rates.items())
            print(shown, file=sys.stderr)
    best_of = {name: _best(by_setting) for name, by_setting in figures.items()}
    own = best_of[chosen[0].name][1]
    rows = []
    for each in chosen:
        setting, rate = best_of[each.name]
        ratio = "" if each is chosen[0] else f"{own / rate:.2f}"
        bar = "" if each.bar is None else f"at least {each.bar:g}"
        rows.append([each.name, setting, f"{rate:.0f}", ratio, bar])
    return rows


def _best(by_setting: dict[str, list[float]]) -> tuple[str, float]:
    medians = {setting: statistics.median(rates) for setting, rates in by_setting.items()}
    setting = max(medians, key=medians.__getitem__)
    return setting, medians[setting]


def report(
    rounds: int = 3, count: int = 1024, is_quick: bool = False, kinds: Sequence[str] = KINDS
) -> None:
    """Measure everything, and print the tables."""
    if "mixed" in kinds:
        install_rival("infinity")
    for kind in kinds:
        rows = measured(kind, rounds, count, is_quick)
        words = f"lognormal, {MEAN_WORDS} in the mean, sigma {SIGMA:g}"
        if kind == "equal":
            words = f"{MEAN_WORDS} each"
        print(
            f"\nMiniLM, {count:,} sentences (words: {words}), {CALLERS} callers, {THREADS} threads "
            f"of torch, medians of {rounds} rounds; {machine()}.\n"
        )
        print("| | setting | sentences/s | this / it | bar |\n|---|---|---:|---:|---|")
        for row in rows:
            print("| " + " | ".join(row) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Sentences of unlike lengths on MiniLM.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sentences", type=int, default=1024, help="of each measurement")
    parser.add_argument("--only", choices=KINDS, help="of which lengths")
    parser.add_argument(
        "--quick", action="store_true", help="one round of few: whether it runs, for no figures"
    )
    args = parser.parse_args()
    terminate_cleanly()
    kinds = (args.only,) if args.only else KINDS
    if args.quick:
        report(1, 96, is_quick=True, kinds=kinds)
    else:
        report(args.rounds, args.sentences, kinds=kinds)


if __name__ == "__main__":
    main()
