"""The simulator against what can be computed by hand."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner, Result

from serve_process import ROOT, run
from service_streamer import Reason
from service_streamer.observe.record import ORDINARY, CallOptions
from service_streamer.serve.cli.main import main
from service_streamer.simulate import (
    Arrival,
    Bursts,
    ClosedLoop,
    CostModel,
    LogNormal,
    Overheads,
    Phases,
    Poisson,
    Replay,
    read_trace,
    simulate,
)

STEEP = CostModel(5e-3, 1e-4)
NOTHING_ELSE = Overheads(0, 0, 0)


# -- what can be computed by hand


def test_a_saturated_worker_computes_full_batches() -> None:
    report = simulate(ClosedLoop(256), STEEP, fixed_wait=0, requests=5_000)
    assert report.throughput == pytest.approx(64 / (5e-3 + 64e-4), rel=0.001)
    assert report.throughput == pytest.approx(STEEP.capacity(1, 64), rel=0.001)
    assert report.busy == pytest.approx(1)
    assert report.mean_batch_size == 64
    assert report.reasons.keys() == {Reason.FULL}
    learned = simulate(ClosedLoop(256), STEEP, requests=5_000)
    assert learned.throughput == pytest.approx(report.throughput, rel=0.1)


def about(value: float, rel: float = 1e-6) -> Any:
    return pytest.approx(value, rel=rel)


#: Load, model, options, and what the report says; nothing but the model takes time.
BY_HAND: dict[str, tuple[Any, CostModel, dict[str, Any], dict[str, Any]]] = {
    "a lone caller": (
        ClosedLoop(1), STEEP, {"requests": 500, "overheads": Overheads(2e-4, 3e-4, 0)},
        {
            **dict.fromkeys(("mean", "p50", "p95", "p99"), about(5.5e-3)), "sizes": {1},
            "throughput": about(1 / 5.8e-3, 0.01), "busy": about(5.1 / 5.8, 0.01),
        },
    ),
    "more than can be computed": (
        Poisson(2 * STEEP.capacity(1, 64)), STEEP, {"fixed_wait": 0, "seconds": 2},
        {
            "throughput": about(STEEP.capacity(1, 64), 0.01),
            "pending": about(2 * STEEP.capacity(1, 64), 0.05),
        },
    ),
    "side by side": (
        ClosedLoop(1024), STEEP, {"workers": 4, "fixed_wait": 0, "requests": 10_000},
        {"throughput": about(STEEP.capacity(4, 64), 0.02)},
    ),
    "a few of many": (
        Poisson(2), STEEP, {"requests": 2000},
        {"p50": about(5.1e-3), "mean": about(5.1e-3, 0.02), "throughput": about(2, 0.1)},
    ),
    # M/D/1 with a load of one half: the mean wait is half of a service.
    "a queue with constant service": (
        Poisson(50), CostModel(10e-3), {"batch_size": 1, "fixed_wait": 0, "requests": 20_000},
        {"mean": about(15e-3, 0.03), "busy": about(0.5, 0.03)},
    ),
    "a fixed wait": (
        Poisson(1), STEEP, {"fixed_wait": 2e-3, "requests": 500},
        {"p50": about(7.1e-3), "reasons": {Reason.MAX_LATENCY}},
    ),
    "a fixed wait that a full batch ends": (
        ClosedLoop(8), STEEP, {"batch_size": 8, "fixed_wait": 10, "requests": 800},
        {"mean": about(5.8e-3), "reasons": {Reason.FULL}, "sizes": {8}},
    ),
    "more items than fit": (
        ClosedLoop(1, items=100), STEEP, {"fixed_wait": 0, "requests": 50}, {"sizes": {36, 64}}
    ),
    "bursts": (
        Bursts(16, 0.1), STEEP, {"batch_size": 16, "fixed_wait": 1, "seconds": 5},
        {"mean": about(6.6e-3), "throughput": about(160, 0.05)},
    ),
    # Without sending ahead each batch would take 8 ms more.
    "sent ahead": (
        ClosedLoop(256), STEEP,
        {"fixed_wait": 0, "requests": 5_000, "overheads": Overheads(4e-3, 0, 0)},
        {"throughput": about(STEEP.capacity(1, 64), 0.001)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_a_report_says_what_can_be_computed_by_hand(name: str) -> None:
    load, model, options, expected = BY_HAND[name]
    report = simulate(load, model, **{"overheads": NOTHING_ELSE, **options})
    for figure, value in expected.items():
        found = getattr(report, figure)
        assert (found.keys() if isinstance(value, set) else found) == value, figure


def test_the_duration_of_a_batch() -> None:
    model = CostModel(1, 2, 3, 4)
    # 5 items, the longest of them 7
    assert model.duration(5, 5 * 7) == pytest.approx(1 + 2 * 5 + 3 * 5 * 7 + 4 * 5 * 49)
    assert model.capacity(2, 5, 7) == pytest.approx(2 * 5 / model.duration(5, 35))


# -- arrivals


def test_every_call_is_answered_once() -> None:
    for load in (
        ClosedLoop(7), Poisson(300), Bursts(40, 0.05, rate=200), Bursts(70, 1, gap=1e-3, items=3),
        Phases([(0.5, ClosedLoop(3)), (1, Poisson(500)), (math.inf, ClosedLoop(30))]),
    ):  # fmt: skip
        report = simulate(load, STEEP, requests=1000, warm_up=0)
        assert report.calls == len(report.latencies) == 1000
        assert min(report.latencies) >= 5e-3


def test_the_calls_of_a_burst_come_after_each_other_and_those_beside_it_in_order() -> None:
    arrivals = Bursts(2, 1.0, gap=0.1).arrivals(Random(0))
    assert [next(arrivals).at for _ in range(5)] == pytest.approx([0, 0.1, 1, 1.1, 2])
    arrivals = Bursts(3, 0.1, rate=50, gap=1e-3).arrivals(Random(0))
    times = [next(arrivals).at for _ in range(500)]
    assert times == sorted(times)
    assert sum(time * 10 % 1 > 0.03 for time in times) > 100


def test_a_replay_has_the_calls_of_the_trace() -> None:
    recorded = [
        Arrival(0.3, 2, [5.0, 6.0]), Arrival(0.1), Arrival(0.2, 1, None, CallOptions(1, "a")),
    ]  # fmt: skip
    arrivals = [*Replay(recorded).arrivals(Random(0))]
    assert arrivals == [recorded[1], recorded[2], recorded[0]]
    assert [arrival.at for arrival in Replay(recorded, 2).arrivals(Random(0))] == [0.05, 0.1, 0.15]
    report = simulate(Replay(recorded), STEEP, warm_up=0)
    assert report.calls == 3
    assert sum(size * number for size, number in report.sizes.items()) == 4


@pytest.mark.long
def test_a_load_that_ends_by_itself_is_not_cut_short() -> None:
    """As one is that does not, after 20,000 calls."""
    recorded = [Arrival(number / 10_000) for number in range(20_500)]
    assert simulate(Replay(recorded), STEEP, warm_up=0).calls == 20_500
    assert simulate(Phases([(2, Poisson(11_000))]), STEEP, warm_up=0).calls > 20_500
    assert simulate(Phases([(1, Poisson(9)), (math.inf, Poisson(99))]), STEEP).calls < 20_000


def test_a_run_ends_with_its_seconds() -> None:
    report = simulate(Poisson(100), STEEP, seconds=10, warm_up=0.5)
    assert report.seconds == 5
    assert report.calls == pytest.approx(500, rel=0.2)


@pytest.mark.parametrize("load", [Bursts(10, 0.05, rate=300), ClosedLoop(8)])
@pytest.mark.parametrize(
    "more", [{"overheads": Overheads(jitter=1e-4)}, {"lengths": LogNormal(25)}]
)
def test_the_same_seed_gives_the_same_result(load: Any, more: dict[str, Any]) -> None:
    """Arrivals, jitter and lengths are drawn from it."""
    model = CostModel(1e-3, per_unit=1e-5)
    first, again, other = (
        simulate(load, model, requests=300, seed=seed, **more) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_lengths_have_their_mean() -> None:
    random = Random(0)
    lengths = [LogNormal(25, 0.6)(random) for _ in range(20_000)]
    assert sum(lengths) / len(lengths) == pytest.approx(25, rel=0.03)
    assert min(lengths) >= 1


# -- mistakes


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: CostModel("5ms"), "number"),
        (lambda: Poisson(True), "number"),
        (lambda: CostModel(0), "time"),
        (lambda: CostModel(-1), "base"),
        (lambda: CostModel(1, math.inf), "per_item"),
        (lambda: Overheads(transport=-1), "transport"),
        (lambda: LogNormal(0), "mean"),
        (lambda: ClosedLoop(0), "callers"),
        (lambda: ClosedLoop(1, think_time=-1), "think_time"),
        (lambda: Poisson(0), "rate"),
        (lambda: Bursts(0, 1), "size"),
        (lambda: Bursts(10, 1, gap=0.2), "longer"),
        (lambda: Replay([]), "calls"),
        (lambda: Replay([Arrival(0)], speed=0), "speed"),
        (lambda: Phases([]), "increase"),
        (lambda: Phases([(2, Poisson(1)), (1, Poisson(1))]), "increase"),
        (lambda: simulate(Poisson(1), STEEP, workers=0), "workers"),
        (lambda: simulate(Poisson(1), STEEP, requests=0), "requests"),
        (lambda: simulate(Poisson(1), STEEP, seconds=0), "seconds"),
        (lambda: simulate(Poisson(1), STEEP, warm_up=1), "warm_up"),
        (lambda: simulate(Poisson(1), STEEP, batch_size=0), "batch_size"),
        (lambda: simulate(Poisson(1), STEEP, tenant_weights={"a": 0}), "weight"),
        (lambda: simulate(Poisson(1), STEEP, fixed_wait=-1), "fixed_wait"),
    ],
)
def test_simulation_refuses_a_value_out_of_range(make: Any, word: str) -> None:
    with pytest.raises(TypeError if word == "number" else ValueError, match=word):
        make()


# -- traces


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at": 0.5}\n\n{"at": 1, "items": 2, "lengths": [3, 4.5], "priority": -1, "tenant": "ä"}\n'
    )
    assert read_trace(path) == [
        Arrival(0.5, 1, None, ORDINARY),
        Arrival(1.0, 2, [3.0, 4.5], CallOptions(-1, "ä")),
    ]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "JSON"),
        ("[1]", "object"),
        ('{"items": 1}', '"at"'),
        ('{"at": -1}', '"at"'),
        ('{"at": true}', '"at"'),
        ('{"at": NaN}', '"at"'),
        ('{"at": 1, "items": 0}', '"items"'),
        ('{"at": 1, "items": 1.5}', '"items"'),
        ('{"at": 1, "items": 2, "lengths": [1]}', '"lengths"'),
        ('{"at": 1, "lengths": ["a"]}', "'a'"),
        ('{"at": 1, "priority": "high"}', '"priority"'),
        ('{"at": 1, "tenant": 7}', '"tenant"'),
        ("\udcff", "utf-8"),
    ],
)
def test_read_trace_names_the_line_that_is_wrong(tmp_path: Path, line: str, word: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"at": 0}\n' + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(ValueError, match=rf"trace\.jsonl.*line 2.*{word}"):
        read_trace(path)


# -- the command


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)])


def told(result: Result) -> dict[str, str]:
    """The table that was printed: what is in the second column, by the first."""
    assert result.exit_code == 0, result.output
    rows = [line.rsplit("  ", 1) for line in result.output.splitlines() if "  " in line]
    return {row[0].strip(): row[1].strip() for row in rows}


@pytest.mark.parametrize(
    ("line", "row", "value"),
    [
        ("--closed-loop 1", "calls", 450),  # of 500: a tenth is the warm-up
        ("--closed-loop 1", "mean latency, ms", 5.2),
        ("--closed-loop 1", "items of a batch", 1.0),
        ("--closed-loop 1", "no more calls were expected soon", 100.0),
        ("--closed-loop 1 --base 0.01 --per-item 2ms", "mean latency, ms", 12.1),
        ("--closed-loop 1 --base 0 --per-item 0 --per-unit 100us --lengths 20:0 --quadratic 1e-5",
         "mean latency, ms", 6.1),
    ],
)  # fmt: skip
def test_the_model_of_a_simulation_is_that_of_the_command_line(
    line: str, row: str, value: float
) -> None:
    table = told(command(*line.split(), "--requests", 500))
    assert float(table[row].removesuffix(" %")) == value


@pytest.mark.parametrize(
    ("line", "throughput"),
    [
        ("--rate 100", 100),
        ("--bursts 40/500ms", 80),
        ("--bursts 40/0.5 --rate 100", 180),
        ("--closed-loop 1 --think-time 0.1", 1 / 0.1052),
        ("--rate 10 --items 10", 100),
    ],
)
def test_the_load_of_a_simulation_is_that_of_the_command_line(line: str, throughput: float) -> None:
    table = told(command(*line.split(), "--seconds", 30, "--seed", 7))
    assert float(table["throughput, items/s"]) == pytest.approx(throughput, rel=0.1)


def test_a_trace_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("".join(f'{{"at": {number / 10}}}\n' for number in range(101)))
    table = told(command("--trace", path))
    assert float(table["throughput, items/s"]) == pytest.approx(10, rel=0.05)
    table = told(command("--trace", path, "--speed", 2))
    assert float(table["throughput, items/s"]) == pytest.approx(20, rel=0.05)
    swept = command("--trace", path, "--sweep")
    assert swept.exit_code == 0
    assert "capacity: 5614.0 items/s" in swept.output


@pytest.mark.long
def test_the_loads_of_a_sweep_have_the_lengths_of_the_trace(tmp_path: Path) -> None:
    def capacity(*lengths: int) -> float:
        """Of a model that takes 100 ms, and 1 ms for each unit of length, in batches of 8."""
        path = tmp_path / "trace"
        calls = enumerate(lengths * 25)
        path.write_text("".join(f'{{"at": {at}, "lengths": [{length}]}}\n' for at, length in calls))
        model = ["--base", "100ms", "--per-item", 0, "--per-unit", "1ms", "--batch-size", 8]
        swept = command(*model, "--trace", path, "--sweep", "--requests", 100)
        assert swept.exit_code == 0
        return float(swept.output.partition("capacity: ")[2].partition(" items/s")[0])

    assert capacity(50) == 16.0
    assert capacity(10) == 44.4
    assert 20.0 < capacity(10, 10, 10, 50) < 40.0


@pytest.mark.parametrize("more", [[], ["--items", 2], ["--lengths", "20:0"]])
def test_a_load_that_steps_in_multiples_of_a_worker(more: list[object]) -> None:
    model = ["--base", "400ms", "--batch-size", 8, "--workers", "1:16", *more]
    table = told(command(*model, "--load", "0.2:20s,3:60s,0.2:120s", "--start-duration", "1s"))
    # The first 20 s are the warm-up.
    worker = 8 / (0.4 + 8 * 1e-4)
    expected = worker * (3 * 60 + 0.2 * 120) / 180
    assert float(table["throughput, items/s"]) == pytest.approx(expected, rel=0.05)
    assert 4 <= int(table["at the most"]) <= 10
    assert (table["at the end"], table["changes of direction"]) == ("1", "1")


def test_a_fixed_wait_beside_it() -> None:
    result = command("--closed-loop", 1, "--fixed-wait", "1ms", "--requests", 100)
    assert result.output.splitlines()[0].split() == ["learned", "fixed,", "1", "ms"]
    [latency] = [line for line in result.output.splitlines() if line.startswith("mean latency")]
    assert latency.split()[-2:] == ["5.20", "6.20"]


def test_a_sweep_with_its_picture(tmp_path: Path) -> None:
    path = tmp_path / "latency.svg"
    result = command("--requests", 200, "--plot", path)
    assert result.exit_code == 0, result.output
    loads = [line.split()[0] for line in result.output.splitlines()[3:]]
    assert loads == [f"{number / 10:.1f}" for number in range(1, 13)]
    picture = path.read_text()
    assert "latency, ms" in picture
    assert "99 of 100 within" in picture
    assert "date" not in picture.lower().replace("dated", "")
    again = command("--requests", 200, "--sweep", "--plot", path)
    assert again.output == result.output
    assert path.read_text() == picture


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("", "--closed-loop"),
        ("--rate 1 --closed-loop 1", "--closed-loop"),
        ("--load 1:60s --rate 1", "--closed-loop"),
        ("--sweep --rate 1", "--sweep"),
        ("--sweep --load 1:60s", "--sweep"),
        ("--bursts many", "'many'"),
        ("--bursts 4/0", "'4/0'"),
        ("--base 5m", "'5m'"),
        ("--load 3", "'3'"),
        ("--load 0:60s", "'0:60s'"),
        ("--load 1:60s,3:", "'1:60s,3:'"),
        ("--lengths 0", "'0'"),
        ("--lengths x", "'x'"),
        ("--rate 1 --base 0 --per-item 0", "time"),
        ("--trace /nowhere", "'/nowhere'"),
        ("--sweep --plot /nowhere/x.svg --requests 100", "'/nowhere'"),
    ],
)
def test_simulate_command_refuses_wrong_options(line: str, word: str) -> None:
    result = command(*line.split())
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert word in result.output


def test_simulate_command_refuses_a_trace_that_it_cannot_use(tmp_path: Path) -> None:
    path = tmp_path / "t"
    for text, more, word in (
        ("{}\n", (), "t, line 1"),
        ("", (), "calls"),
        ('{"at": 1}\n{"at": 1}\n', ("--sweep",), "once"),
    ):
        path.write_text(text)
        result = command("--trace", path, *more)
        assert result.exit_code == 2
        assert word in result.output.partition("Error")[2]


def test_simulate_command_names_matplotlib_when_it_is_missing(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text(
        "raise ModuleNotFoundError('No module named matplotlib', name='matplotlib')\n"
    )
    arguments = ("simulate", "--requests", "100", "--plot", str(tmp_path / "x.svg"))
    done = run(*arguments, cwd=ROOT, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "matplotlib" in done.stderr
    assert "Traceback" not in done.stderr
