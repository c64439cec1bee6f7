"""Bars: limits that figures of this project have to keep, each within one run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from yardstick.comparing import losses
from yardstick.figures import FIGURES, by_round, peers, quotients, shown, spread
from yardstick.record import Record
from yardstick.tables import markdown, point_in_words, title

__all__ = ["BARS", "Bar", "bars_table"]


@dataclass(frozen=True)
class Bar:
    """One limit.

    Attributes:
        section, system, figure, point: what is measured.
        limit: in the record's unit; what it has to reach or, of a figure that is better if lower,
            must not exceed.
        under: the system by whose figure of the same round it is divided first; None for none.
        instead: another bar; this one is kept, too, if that one is.
    """

    section: str
    system: str
    figure: str
    limit: float
    point: Mapping[str, Any] = field(default_factory=dict)
    under: str | None = None
    instead: Bar | None = None

    @property
    def is_lower_better(self) -> bool:
        return FIGURES[self.figure].better == "lower"

    def measured(self, record: Record) -> float | None:
        """The median over the rounds; None where something is missing for it."""
        values = by_round(record, self.section, self.system, self.figure, self.point)
        if self.under is not None:
            under = by_round(record, self.section, self.under, self.figure, self.point)
            values = quotients(values, under)
        found = spread(values)
        return None if found is None else found.median

    def holds(self, value: float) -> bool:
        return value <= self.limit if self.is_lower_better else value >= self.limit

    def shown(self, value: float | None) -> str:
        if value is None:
            return "-"
        return shown(self.figure, value) if self.under is None else f"{value:.2f}"

    @property
    def name(self) -> str:
        """Of what is measured."""
        figure = FIGURES[self.figure].title
        return figure if self.under is None else f"{figure} / {title(self.under)}"

    @property
    def in_words(self) -> str:
        return f"{'at most' if self.is_lower_better else 'at least'} {self.shown(self.limit)}"

    @property
    def ways(self) -> tuple[Bar, ...]:
        """This bar, and those of which each is enough instead."""
        return (self,) if self.instead is None else (self, *self.instead.ways)

    def verdict(self, record: Record) -> str:
        """Whether it is kept; "not measured" where a way might be that was not measured."""
        values = [(way, way.measured(record)) for way in self.ways]
        if any(value is not None and way.holds(value) for way, value in values):
            return "yes"
        return "not measured" if any(value is None for _, value in values) else "**no**"


def _both(section: str, figure: str, limit: float, **point: Any) -> tuple[Bar, ...]:
    """For a model in a thread of this process, and in a worker process."""
    return tuple(Bar(section, each, figure, limit, point) for each in ("threaded", "streamer"))


#: The best of the others in a section.
_RIVALS = ("original-threaded", "batched")


def _infilling(callers: int) -> tuple[Bar, ...]:
    return (
        *_both("infilling", "by-hand", 0.92, callers=callers),
        *(
            Bar("infilling", system, figure, 1.0, {"callers": callers}, under=rival)
            for system, alike in (
                ("threaded", "original-threaded"),
                ("streamer", "original-streamer"),
            )
            for figure, rivals in (("by-hand", _RIVALS), ("p99", (alike,)))
            for rival in rivals
        ),
    )


_SHARED = (
    *(
        Bar("shared", "streamer", figure, limit, {"question": question, **point})
        for question, figure, limit, point in (
            ("alone", "to_streamer", 2.2, {"way": "shared"}),
            ("alone", "over_redis", 0.6, {"way": "shared"}),
            ("futures", "rate_redis", 2.0, {"way": "shared"}),
            ("callers", "share", 0.95, {"way": "four, shared"}),
            ("callers", "batch_to_one", 0.95, {"way": "four, shared"}),
            ("costs", "pool_us", 10.0, {}),
            ("memory", "copies", 1.0, {}),
            ("memory", "joined", 15e6, {}),
            ("memory", "torch", 0.0, {}),
            ("arrays", "to_one", 0.8, {"way": "four, shared"}),
        )
    ),
    *(
        Bar("shared-faults", "streamer", figure, 0.0, {"killed": killed})
        for killed in ("pool", "worker", "client", "all")
        for figure in ("failed", "hung", "left")
    ),
    Bar("shared-faults", "streamer", "recovered", 1.0, {"killed": "pool"}),
    *(
        Bar("shared-faults", "streamer", figure, 0.0, {"killed": "any, with retry=False"})
        for figure in ("twice", "hung", "left")
    ),
    *(
        Bar("shared-faults-http", "serve-shared", figure, 0.0, {"killed": killed})
        for killed in ("worker", "pool", "web")
        for figure in ("failed", "hung", "left")
        if (killed, figure) != ("web", "failed")  # its connections break
    ),
)

_RAY = (
    Bar("ray", "ray-streamer", "over", 0.5, {"question": "alone"}, under="ray"),
    *(
        bar
        for by in ("threads", "tasks")
        for bar in (
            Bar("ray", "ray-streamer", "share", 0.90, {"question": "callers", "by": by}),
            Bar("ray", "ray-streamer", "rate", 5.0, {"question": "callers", "by": by}, under="ray"),
        )
    ),
    Bar("ray", "ray-streamer", "to_one_worker", 1.8, {"question": "workers", "workers": 2}),
    Bar("ray", "ray-streamer", "rate", 2.0, {"question": "arrays"}, under="ray"),
    Bar("ray", "ray-streamer", "to_target", 2.0, {"question": "autoscaling"}),
    Bar("ray", "ray-streamer", "turns", 1.0, {"question": "autoscaling"}),
    Bar("ray", "ray-streamer", "failed", 0.0, {"question": "autoscaling"}),
    *(
        Bar("ray", "ray-streamer", figure, limit, {"question": "simulated", "start": start})
        for start in ("1 s", "5 s", "20 s", "30 s")
        for figure, limit in (("to_target", 2.0), ("turns", 1.0))
    ),
    *(
        Bar("ray-faults", "ray-streamer", figure, 0.0, {"fault": fault})
        for fault in (
            "worker killed",
            "raylet killed",
            "node added, another removed",
            "head away, worker killed",
        )
        for figure in ("failed", "hung", "unnamed", "left")
    ),
    *(
        Bar("ray-faults", "ray-streamer", figure, 0.0, {"fault": "any, with retry=False"})
        for figure in ("twice", "hung", "unnamed", "left")
    ),
)

#: Callers of a closed loop, with the share of ideal that they have to reach.
_SHARES = {1: 0.95, 2: 0.93, 8: 0.90, 32: 0.86, 64: 0.80, 128: 0.96, 256: 0.96, 512: 0.96}


def _of_threads(callers: int, share: float) -> tuple[Bar, ...]:
    """A share of ideal, or what bare locks reach, but for 5 %: with the model in the same place."""
    point = {"callers": callers}
    return tuple(
        Bar(
            "callers",
            system,
            "share",
            share,
            point,
            instead=Bar("callers", system, "rate", 0.95, point, under=bare),
        )
        for system, bare in (("threaded", "bare-locks"), ("streamer", "bare-locks-process"))
    )


#: A caller alone, futures, and many threads.
_CALLS = (
    Bar("alone", "streamer", "over_loop", 3.0, under="bare-pipe"),
    Bar("alone", "threaded", "over_loop", 40e-6),
    Bar("futures", "streamer", "rate", 5.0, under="original-streamer"),
    Bar("echo", "streamer", "rate", 2.5, {"callers": 64}, under="original-streamer"),
    *(bar for callers, share in _SHARES.items() for bar in _of_threads(callers, share)),
)

_GPU_128 = {"workload": "gpu", "connections": 128}
_HTTP = (
    Bar("http", "serve", "rate", 1.15, _GPU_128, under="mosec"),
    Bar("alone-http", "serve", "over", 0.6, under="mosec"),
    Bar("http", "serve", "all", 40e-6, _GPU_128),
    *(Bar("overload-http", "serve", "rejection_p99", 0.5e-3, {"load": load}) for load in (1.5, 2)),
    Bar("http", "serve", "rate", 0.6, {"workload": "echo", "connections": 128}, under="mosec"),
)

#: Microseconds of the processor, of the scheduler alone.
_SCHEDULER = tuple(
    Bar("costs", "streamer", "us", limit, {"path": f"scheduler: {case}"})
    for case, limit in (("batches of one, one caller", 8.0), ("full batches of 64", 3.0))
)

BARS = (
    *_CALLS,
    *_HTTP,
    *_SCHEDULER,
    *_both("stages", "batch", 0.022, workload="even-stages"),
    *_both("stages", "share", 0.95, workload="gpu-stages", callers=128),
    *(
        Bar("pipelines", "streamer", "besides", seconds, {"task": task})
        for task, seconds in (
            ("text-classification", 0.003),
            ("embed", 0.003),
            ("fill-mask", 0.006),
            ("token-classification", 0.006),
        )
    ),
    Bar("streams", "streamer", "share", 0.95, {"question": "refilled"}),
    Bar("streams", "streamer", "to_end", 3.5, {"question": "refilled"}),
    Bar("streams", "streamer", "first_steps", 2.5, {"question": "refilled"}),
    *(
        Bar(
            "streams",
            "streamer",
            "per_step",
            (60 + 6 * n) * 1e-6,
            {"question": "overhead", "streams": n},
        )
        for n in (1, 32, 128)
    ),
    Bar("streams", "streamer", "slower", 1.03, {"question": "slow"}),
    Bar("streams", "streamer", "slower", 1.3, {"question": "neighbours"}),
    Bar("streams", "streamer", "objects", 500, {"question": "dropped"}),
    Bar("streams", "streamer", "growth", 100, {"question": "dropped"}),
    Bar("streams", "streamer", "held", 0, {"question": "dropped"}),
    Bar("streams-http", "serve", "share", 0.95, {}),
    Bar("streams-http", "serve", "first_steps", 2.5, {}),
    Bar("streams-http", "serve", "rate", 1.0, {}, under="litserve"),
    Bar("streams", "streamer", "times", 0.9, {"question": "beside", "beside": "manager"}),
    Bar("streams", "streamer", "slower", 1.15, {"question": "beside", "beside": "manager"}),
    Bar("streams", "streamer", "times", 2.0, {"question": "beside", "beside": "eights"}),
    *_SHARED,
    *_RAY,
    *_infilling(64),
    *_infilling(128),
    *_infilling(256),
)


#: The most times that another system may be better, wherever that is.
_WORST_LOSS = 1.5


def bars_table(record: Record) -> str:
    """Every bar of the sections that were measured, and whether it is kept."""
    measured = record.sections()
    rows = [
        (
            bar.section,
            point_in_words(bar.point),
            title(bar.system),
            " or ".join(way.name for way in bar.ways),
            " or ".join(way.in_words for way in bar.ways),
            " or ".join(way.shown(way.measured(record)) for way in bar.ways),
            bar.verdict(record),
        )
        for bar in BARS
        if bar.section in measured
    ]
    if not rows:
        return "Not measured in this run."
    head = ("section", "point", "", "figure", "bar", "measured", "kept")
    if any(peers(record, section) for section in measured):
        rows.append(_worst_loss(record))
    return markdown(head, rows, words=5)


def _worst_loss(record: Record) -> tuple[str, str, str, str, str, str, str]:
    """How far others win at most. With a model that takes no time that is of the HTTP server."""
    times = [loss.times for loss in losses(record) if loss.point.get("workload") != "echo"]
    worst = max(times, default=1.0)
    kept = "yes" if worst <= _WORST_LOSS else "**no**"
    figure, bar = "where others win, the most times", f"at most {_WORST_LOSS:.2f}"
    return "all", "without a model that takes no time", "-", figure, bar, f"{worst:.2f}", kept
