"""This project beside the others: in short, and wherever they are better. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from yardstick.figures import FIGURES, by_round, figures_of, modes, peers, rivals_of, shown
from yardstick.reasons import why
from yardstick.record import Record
from yardstick.tables import cell, made, markdown, point_in_words, reason, title

__all__ = ["MARGIN", "Loss", "headline", "in_brief", "losses", "losses_in_brief", "losses_table"]

#: Less than that is noise between the rounds.
MARGIN = 0.03

#: So many are seen at first, and the others on demand.
_AT_ONCE = 15
#: So many are in the short list.
_IN_SHORT = 8

#: The head of a column, and where it comes from: section, figure and point.
_Question = tuple[str, str, str, Mapping[str, Any]]
#: The four questions.
_WITHIN: tuple[_Question, ...] = (
    ("added at no load, ms", "alone", "over", {}),
    ("share of ideal: simulated GPU, 128 callers", "callers", "share", {"callers": 128}),
    ("share of batches by hand: a real model", "infilling", "by-hand", {"callers": 128}),
    ("goodput at twice the capacity", "overload", "goodput", {"load": 2}),
)
_OVER_HTTP: tuple[_Question, ...] = (
    ("added at no load, ms", "alone-http", "over", {}),
    (
        "share of ideal: simulated GPU, 128 connections",
        "http",
        "share",
        {"workload": "gpu", "connections": 128},
    ),
    ("goodput at twice the capacity", "overload-http", "goodput", {"load": 2}),
    ("failed or lost when a worker is killed", "killed", "gone", {}),
    ("requests sent", "killed", "sent", {}),
)


@dataclass(frozen=True)
class Loss:
    """Where a peer is better.

    Attributes:
        theirs, ours: medians over the rounds; ours is not a number where there is none.
        times: by how much, at least 1: the median of the ratios within each round; infinite where
            one of the two is nothing.
    """

    section: str
    point: Mapping[str, Any]
    figure: str
    peer: str
    mode: str
    theirs: float
    ours: float
    times: float


def headline(record: Record) -> str:
    """The four questions, for who answers them within a program and for who does over HTTP."""
    parts = []
    for name, questions in (("Within a program", _WITHIN), ("Over HTTP", _OVER_HTTP)):
        asked = [each for each in questions if each[1] in record.sections()]
        keys = [
            key
            for names in (modes, peers)
            for _, section, _, _ in asked
            for key in names(record, section, with_failed=True)
        ]
        rows = [
            [
                title(key),
                *(cell(record, section, key, figure, point) for _, section, figure, point in asked),
            ]
            for key in dict.fromkeys(keys)
        ]
        if rows:
            head = ["", *(question[0] for question in asked)]
            parts.append(f"**{name}**\n\n{markdown(head, rows)}")
    return "\n\n".join([*parts, made(record)])


#: The rows of the README.
_IN_BRIEF = ("serve", "mosec", "litserve", "original-gevent", "ray-http")


def in_brief(record: Record) -> str:
    """One row for each server, over HTTP, with medians only."""
    asked = [each for each in _OVER_HTTP if each[1] in record.sections()]
    rows = [
        [
            title(key),
            *(
                cell(record, section, key, figure, point).partition("<br>")[0]
                for _, section, figure, point in asked
            ),
        ]
        for key in _IN_BRIEF
        if any(key in record.systems(section) for _, section, _, _ in asked)
    ]
    return markdown(["", *(question[0] for question in asked)], rows)


def losses(record: Record) -> list[Loss]:
    """Every point at which a peer beats the best comparable mode, the largest ratio first."""
    found = [
        loss
        for section in record.sections()
        for peer in peers(record, section)
        for loss in _of_peer(record, section, peer)
        if loss.times > 1 + MARGIN
    ]
    return sorted(found, key=lambda loss: -loss.times)


def losses_table(record: Record) -> str:
    """With the reasons below it, as far as they are known."""
    found = losses(record)
    broken = [
        f"- {section}: **{title(failure.system)} failed**: {reason(failure)}"
        for section in record.sections()
        for failure in record.failures_of(section)
        if failure.system in modes(record, section, with_failed=True)
    ]
    parts = ["\n".join(broken)] if broken else []
    if not found:
        return "\n\n".join([*parts, f"Nowhere by more than {MARGIN:.0%}.", made(record)])
    tables = [_table_of(found[:_AT_ONCE])]
    if others := found[_AT_ONCE:]:
        summary = f"<summary>{len(others)} more, by less</summary>"
        tables.append(f'<details markdown="1">{summary}\n\n{_table_of(others)}\n\n</details>')
    return "\n\n".join([*parts, *tables, f"Why:\n\n{_reasons(found)}", made(record)])


def losses_in_brief(record: Record) -> str:
    """The largest only, without reasons."""
    found = losses(record)
    return _table_of(found[:_IN_SHORT]) if found else f"Nowhere by more than {MARGIN:.0%}."


def _reasons(found: Sequence[Loss]) -> str:
    """Each once, with the figures that it is the reason for."""
    figures: dict[tuple[str, str, str], dict[str, None]] = {}
    for loss in found:
        text = why(loss.section, loss.peer, loss.figure, loss.point)
        figures.setdefault((loss.section, loss.peer, text), {})[FIGURES[loss.figure].title] = None
    return "\n".join(
        f"- {section}, {title(peer)} ({'; '.join(titles)}): {text}."
        for (section, peer, text), titles in figures.items()
    )


def _table_of(found: Sequence[Loss]) -> str:
    rows = [
        [
            loss.section,
            point_in_words(loss.point),
            FIGURES[loss.figure].title,
            title(loss.peer),
            shown(loss.figure, loss.theirs),
            title(loss.mode),
            FIGURES[loss.figure].absent if math.isnan(loss.ours) else shown(loss.figure, loss.ours),
            "-" if math.isinf(loss.times) else f"{loss.times:.2f}",
        ]
        for loss in found
    ]
    head = ("section", "point", "figure", "who", "theirs", "this project's best", "ours", "times")
    return markdown(head, rows, words=4)


def _of_peer(record: Record, section: str, peer: str) -> Iterator[Loss]:
    for point in record.points(section, peer):
        names = _figures(record, section, peer, point)
        for figure in names:
            theirs = by_round(record, section, peer, figure, point)
            against = [
                (mode, by_round(record, section, mode, figure, point))
                for mode in rivals_of(record, section, peer)
            ]
            better = FIGURES[figure].better
            measured = [(mode, values) for mode, values in against if values]
            if not measured:
                if FIGURES[figure].is_bad_if_absent:
                    # Of that mode which was there, and has none: such as one that is not back.
                    there = [mode for mode, _ in against if point in record.points(section, mode)]
                    median = statistics.median(theirs.values())
                    for mode in there[:1]:
                        yield Loss(section, point, figure, peer, mode, median, math.nan, math.inf)
                continue
            pick = max if better == "higher" else min
            mode, ours = pick(measured, key=lambda each: statistics.median(each[1].values()))
            yield Loss(
                section,
                point,
                figure,
                peer,
                mode,
                theirs=statistics.median(theirs.values()),
                ours=statistics.median(ours.values()),
                times=_times(theirs, ours, is_higher_better=better == "higher"),
            )


def _figures(record: Record, section: str, peer: str, point: Mapping[str, Any]) -> list[str]:
    """Those of which one is better, but for those that say the same as another one there."""
    names = figures_of(record, section, peer)
    there = {name for name in names if by_round(record, section, peer, name, point)}
    return [
        name
        for name in names
        if name in there and FIGURES[name].better and FIGURES[name].repeats not in there
    ]


def _times(
    theirs: Mapping[int, float], ours: Mapping[int, float], *, is_higher_better: bool
) -> float:
    """How many times better theirs is, by the median over the rounds that both have."""
    more, less = (theirs, ours) if is_higher_better else (ours, theirs)
    rounds = sorted(more.keys() & less.keys())
    ratios = [_ratio(more[number], less[number]) for number in rounds]
    return statistics.median(ratios) if ratios else 0.0


def _ratio(more: float, less: float) -> float:
    if more == less:
        return 1.0
    if less <= 0:
        return math.inf if more > less else 0.0
    return more / less
