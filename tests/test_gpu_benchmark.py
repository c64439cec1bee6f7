"""The benchmark of GPUs where there is none: what it says, that it runs, and its arithmetic."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from cuda_stub import Gpu
from on_gpu import checkpoints, served, simulated
from on_gpu import nvml as nvml_module
from on_gpu.beside import Beside
from on_gpu.checkpoints import texts
from on_gpu.client import _load, _requests
from on_gpu.exhausted import judge
from on_gpu.goals import goals
from on_gpu.model import Bert
from on_gpu.notes import Batch, Notes, activity, batches_in, workers_in
from on_gpu.nvml import Nvml, Sample, Watch
from on_gpu.passes import DeviceClock
from on_gpu.plan import CPU, FULL, NEEDS_GPU, PARTS, QUICK, SIMULATED, Run, Scale, runs
from on_gpu.report import goals_table, part_tables, table
from on_gpu.running import Kind, run
from on_gpu.served import agree, served_rows
from on_gpu.service import Service
from on_gpu.streamed import feed
from on_gpu.turns import grouped, in_turn
from service_streamer import ThreadedStreamer
from service_streamer.pipelines.loading import DEFAULT_MODEL

COMMAND = [sys.executable, str(Path(__file__).parents[1] / "benchmarks" / "gpu.py")]
#: What has a GPU hides it, and tests the same.
HIDDEN = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}

MS = 1_000_000  # ns


# -- the program


def test_without_a_device_it_says_so_and_measures_nothing() -> None:
    ran = subprocess.run(COMMAND, env=HIDDEN, capture_output=True, text=True)
    assert ran.returncode == 3
    assert ran.stderr.startswith("There is no CUDA device here (")
    assert ran.stderr.count("\n") == 1
    assert not ran.stdout


@pytest.mark.long
@pytest.mark.timeout(600)  # a dozen processes import torch: two minutes, and more beside others
def test_on_a_cpu_it_runs_to_its_end_and_every_part_is_in_the_record(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    ran = subprocess.run(
        [*COMMAND, "--cpu", "--out", str(out)], env=HIDDEN, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    record = json.loads(out.read_text())
    parts = record["parts"]
    assert tuple(parts) == PARTS
    assert [part["errors"] for part in parts.values()] == [[]] * len(PARTS)
    assert parts["memory"]["note"] == parts["devices"]["note"] == NEEDS_GPU
    assert len(parts["hand"]["rows"]) == len(CPU.tokens) * len(CPU.hand_sizes)
    *windows, processes = parts["workers"]["rows"]
    assert {row["kind"] for row in windows} == {"window"}
    assert len(windows) == len(CPU.tokens) * len(CPU.calls)
    assert all(row["streamed_per_s"] > 0 and row["batches"] for row in windows)
    assert not processes["torch_in_web_process"]
    assert [image["wrong"] for image in parts["images"]["rows"]] == [0]
    notes = [row["note"] for row in parts["served"]["rows"] if "note" in row]
    # Of each task, and of images with processes that decode them.
    assert sum("8 of 8 answers of serve" in note for note in notes) == len(CPU.tasks) + 1
    rates = [row for row in parts["served"]["rows"] if "note" not in row]
    assert {row["way"] for row in rates} >= {"serve, requests of 1", "serve, requests of 64"}
    assert not any(row["failed"] for row in rates)
    assert record["goals"] == []
    assert "No figures of a GPU" in ran.stdout
    assert "### Goals" not in ran.stdout


@pytest.mark.short_cases("9")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_when_it_is_ended_nothing_of_it_goes_on(number: int, code: int) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--cpu", "--only", "workers"],
        env=HIDDEN,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "workers: 1 worker" in process.stderr.readline()
    process.send_signal(number)
    process.communicate()  # ends when the last of those has ended that have standard error open
    assert process.returncode == code


def test_an_unknown_part_is_refused() -> None:
    ran = subprocess.run([*COMMAND, "--only", "speed"], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "invalid choice: 'speed'" in ran.stderr


# -- its processes


def test_what_fails_is_told_with_its_traceback() -> None:
    ended = run("sweep", {}, timeout=100)
    assert ended.rows == []
    assert ended.error.startswith("Traceback")
    assert "KeyError" in ended.error


def test_what_takes_too_long_is_killed() -> None:
    assert run("device", {}, timeout=0).error == "it did not end within 0 s and was killed"


def test_load_is_kept_up_and_every_call_is_answered() -> None:
    calls: list[list[int]] = [[2 * number, 2 * number + 1] for number in range(100)]
    seen: list[list[int]] = []
    with ThreadedStreamer(lambda batch: [-item for item in batch], batch_size=8) as streamer:
        window = feed(
            streamer,
            itertools.cycle(calls),
            in_flight=8,
            step=8,
            warm=0,
            seconds=0.001,
            check=seen.append,
        )
        assert streamer.stats().pending == 0
    assert window.start < window.stop
    assert window.rate > 0
    expected = itertools.islice(itertools.cycle(calls), len(seen))
    assert seen == [[-first, -second] for first, second in expected]


# -- what is measured


@pytest.mark.parametrize(
    ("scale", "kind", "devices"),
    [
        (FULL, "cuda", ["0"]),
        (FULL, "cuda", ["0", "1"]),
        (QUICK, "cuda", ["0"]),
        (CPU, "cpu", ["cpu"]),
        (SIMULATED, "simulated", ["cpu"]),
    ],
)
def test_each_part_has_runs_or_a_reason(scale: Scale, kind: Kind, devices: list[str]) -> None:
    found = {part: runs(part, scale, devices, kind) for part in PARTS}
    reasons = {part: why for part, why in found.items() if isinstance(why, str)}
    assert (
        reasons
        == {
            "cpu": {"memory": NEEDS_GPU, "devices": NEEDS_GPU},
            "0": {"devices": "one device here"},
            "01": {},
        }["".join(devices)]
    )
    made = [each for todo in found.values() if not isinstance(todo, str) for each in todo]
    assert all(json.loads(json.dumps(each.settings)) for each in made)


def test_several_devices_get_two_workers_each() -> None:
    (made,) = runs("devices", FULL, ["0", "3"], "cuda")
    assert isinstance(made, Run)
    assert (made.settings["devices"], made.settings["workers"]) == (["0", "3"], 4)


def test_the_full_scale_has_what_the_goals_ask_for() -> None:
    assert (FULL.size, FULL.tokens, FULL.workers) == (64, (16, 128), (1, 2, 4, 8))
    alone = sorted([FULL.size, *FULL.sizes[1]])
    assert alone == list(FULL.hand_sizes) == [2**power for power in range(10)]
    assert min(FULL.rounds) >= 5


# -- in turn


def test_ways_are_measured_back_and_forth_and_a_steady_drift_is_none() -> None:
    order: list[str] = []

    def way(name: str) -> Any:
        def measure() -> dict[str, Any]:
            order.append(name)
            return {"per_s": 100.0 + len(order), "busy": None, "slowed_by": name}

        return measure

    (first, _) = in_turn({name: way(name) for name in ("a", "b", "c")}, 2)
    assert "".join(order) == "abccbaabccba"
    assert first == (
        0,
        {name: {"per_s": 103.5, "busy": None, "slowed_by": name} for name in ("a", "b", "c")},
    )


def test_rounds_of_the_same_have_a_median_and_a_spread() -> None:
    rows = [{"way": "a", "per_s": rate, "why": None, "watts": None} for rate in (3.0, 1.0, 2.5)]
    assert grouped([*rows, {**rows[0], "way": "b", "why": "heat"}], ["way"]) == [
        {
            "way": "a", "per_s": 2.5, "why": None, "watts": None,
            "rounds": 3, "spread": {"per_s": (1.0, 3.0)},
        },
        {
            "way": "b", "per_s": 3.0, "why": "heat", "watts": None,
            "rounds": 1, "spread": {"per_s": (3.0, 3.0)},
        },
    ]  # fmt: skip


# -- the driver's figures, from a library with NVML's functions


@pytest.fixture
def two_gpus(nvml: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(nvml_module, "_LIBRARY", str(nvml / "libnvidia-ml.so.1"))
    monkeypatch.setenv("NVML_STUB_GPUS", "2")
    return monkeypatch


@pytest.mark.usefixtures("two_gpus")
def test_the_driver_is_asked_in_this_process() -> None:
    with Nvml(["0", "GPU-1111"]) as found:
        assert found.driver() == "580.1"
        assert found.about()[1] == {
            "sm_mhz_most": 1980, "memory_mhz": 3201, "power_limit_w": 700.0, "celsius": None,
        }  # fmt: skip
        assert found.sample()[1:] == (40.5, 1050.0, 350.5, 0x5)
        assert found.memory_used_mb() == 3 * 1024
    with pytest.raises(OSError, match="does not know the device GPU-2222"):
        Nvml(["GPU-2222"])


def test_what_a_device_does_not_say_is_not_known(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setenv("NVML_STUB_PARTS", "1")
    with Nvml(["0"]) as found:
        assert found.sample().load is None
    two_gpus.setattr(nvml_module, "_LIBRARY", "none.so")
    with Watch(["0"]) as watch:
        assert watch.memory_used_mb() is None
        assert set(watch.between(0, 1).values()) == {None}


@pytest.mark.usefixtures("two_gpus")
def test_samples_between_two_times() -> None:
    with Watch([]) as watch:
        watch._samples += [
            Sample(at, load, 1000, None, bits)
            for at, load, bits in ((1, 9, 0x8), (2, 50, 0x4), (3, None, 0x44), (4, 9, 0x2))
        ]
        assert watch.between(1, 3) == {
            "utilisation": 50,
            "sm_mhz": 1000,
            "watts": None,
            "slowed_by": "power limit, thermal, by the hardware",
        }


# -- processes that are asked


def test_a_process_beside_answers_until_it_fails() -> None:
    with Beside("hand", {"kind": "simulated"}, "cpu") as hand:
        hand.wait_ready()
        assert hand.ask("device_ms", tokens=32, size=10) == simulated.device_ms(10, 32) == 7
        with pytest.raises(RuntimeError, match=r"hand: Traceback(.|\n)*unexpected keyword"):
            hand.ask("rate", tokens=16, sizes=4)
        with pytest.raises(RuntimeError, match="hand: its process ended with exit code 1"):
            hand.ask("device_ms", tokens=32, size=10)


def test_a_small_model_is_as_slow_as_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Small(torch.nn.Module):
        def forward(self, input_ids: Any) -> Any:
            clock.append(clock[-1] + 0.002)
            return input_ids

    clock, slept = [10.0], []
    monkeypatch.setattr("on_gpu.simulated.time.monotonic", lambda: clock[-1])
    monkeypatch.setattr("on_gpu.simulated.time.sleep", slept.append)
    model = Small()
    simulated.slow_down(model)
    model(input_ids=torch.zeros(64, 16))
    assert slept == [pytest.approx(simulated.device_ms(64, 16) / 1e3 - 0.002)]


def test_the_simulated_model_sleeps_in_its_forward_stage_and_notes_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("on_gpu.simulated.time.sleep", slept.append)
    model = Bert()
    model.init_model(str(tmp_path), kind="simulated")
    assert model.predict([[1, 2, 3, 4], [5, 6, 7, 8]]) == [2, 6]
    assert slept == [simulated.device_ms(2, 4) / 1e3]
    ((noted,),) = batches_in(tmp_path)
    assert (noted.size, noted.has_run_out) == (2, 0)


def test_a_devices_times_are_those_of_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    monkeypatch.setattr("on_gpu.passes.time.monotonic_ns", lambda: 1000 * MS)
    clock = DeviceClock(gpu.torch.cuda)
    marks = []
    for idle, computes in ((2.0, 3.0), (1.0, 4.0)):
        gpu.now = gpu.streams[0].now + idle
        start = clock.mark()
        gpu.compute(computes)
        marks.append((start, clock.mark()))
        gpu.streams[0].run()
    assert [clock.times(*each) for each in marks] == [
        (3000 * MS, 6000 * MS),
        (7000 * MS, 11000 * MS),
    ]


# -- a service, and what is beside it


async def _answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers as a service does, but every third request with 503."""
    for number in itertools.count(1):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            break
        (length,) = (int(line[16:]) for line in head.split(b"\r\n") if b"Content-Length" in line)
        texts = json.loads(await reader.readexactly(length))["inputs"]
        assert len(texts) == 2
        status = b"503 Overloaded" if number % 3 == 0 else b"200 OK"
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: 2\r\n\r\n[]" % status)
    writer.close()


def test_failed_requests_are_counted_and_are_no_part_of_the_rate() -> None:
    async def ask() -> dict[str, Any]:
        server = await asyncio.start_server(_answering, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            requests = itertools.cycle(_requests("text-classification", 8, 2))
            return await _load(port, requests, 2, 1, 0.0, 0.2)

    found = asyncio.run(ask())
    answered = round(found["per_s"] * 0.2 / 2)
    assert answered // 2 - 1 <= found["failed"] <= answered // 2 + 1
    assert 0 < found["p50"] <= found["p99"]


def test_what_a_service_has_used_is_that_of_its_processes_and_its_metrics() -> None:
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            size = "service_streamer_batch_size"
            self.wfile.write(f"# HELP {size}\n{size}_sum 96.0\n{size}_count 2.0\n".encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.handle_request).start()
        used = Service(server.server_port, os.getpid()).used()
    assert (used.batches, used.items) == (2, 96)
    assert used.seconds > 0


def test_texts_have_the_number_of_tokens_that_they_should() -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    for is_masked in (False, True):
        encoded = tokenizer(texts(16, is_masked=is_masked))["input_ids"]
        assert {len(each) for each in encoded} == {16}
        assert {each.count(tokenizer.mask_token_id) for each in encoded} == {is_masked}
        assert not any(tokenizer.unk_token_id in each for each in encoded)


def test_the_labels_of_a_classifier_are_in_its_folder(tmp_path: Path) -> None:
    checkpoints.build("text-classification", "cpu", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["id2label"] == {"0": "negative", "1": "positive"}  # or infinity ranks instead


def test_the_share_of_device_time_is_that_of_full_batches() -> None:
    rows = {name: {"per_s": rate} for name, rate in ((served._PIPELINE, 3200.0), ("s", 6400.0))}
    pipeline, service = served_rows("fill-mask", 16, 2, rows, 5.0)
    assert (pipeline["device_share"], pipeline["of_pipeline"]) == (0.25, 1)
    assert (service["device_share"], service["of_pipeline"]) == (0.5, 2)
    assert [each["device_share"] for each in served_rows("fill-mask", 16, 2, rows, None)] == [
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        ({"label": "a", "score": 0.6}, [{"label": "a", "score": 0.61}], True),
        ({"label": "a", "score": 0.6}, [{"label": "b", "score": 0.6}], False),
        ([{"token_str": "a", "score": 0.5}, {}], {"token_str": "a", "score": 0.6}, False),
        ([0.5, -0.1], [0.501, -0.1], True),
        ([0.5, -0.1], [0.5, 0.1], False),
        ([0.5], [0.5, 0.1], False),
    ],
)
def test_answers_are_compared_but_for_rounding(answer: Any, right: Any, expected: bool) -> None:
    assert agree(answer, right) == expected


def test_goals_of_a_service_are_shares_of_device_time() -> None:
    rows = [
        {
            "workload": "text-classification", "tokens": 16, "way": "serve, requests of 64",
            "round": number, "per_s": 1.0, "device_share": share,
        }
        for number, share in enumerate((0.7, 0.9, 0.86))
    ]  # fmt: skip
    record = {"parts": {"served": {"rows": [{"note": "infinity was not measured."}, *rows]}}}
    (goal,) = (goal for goal in goals(record) if goal.figure is not None)
    assert (goal.figure, goal.spread, goal.verdict) == (0.86, (0.7, 0.9), "met")
    assert "0.860 (0.700 to 0.900)" in goals_table([goal])
    text = part_tables("served", record["parts"]["served"])
    assert text.endswith("\n\ninfinity was not measured.")
    assert "0.860 (0.700 to 0.900)" in text


# -- notes of batches


def test_notes_are_read_as_they_were_written(tmp_path: Path) -> None:
    batches = [Batch(1, 2, 3, 0, 5, 6), Batch(2**60, 2**60 + 1, 512, 1, 2**40, 2**41)]
    notes = Notes(str(tmp_path), {"gpu_id": 0})
    for batch in batches:
        notes.add(batch)
    assert batches_in(tmp_path) == [batches]
    assert workers_in(tmp_path) == [{"gpu_id": 0}]
    (path,) = tmp_path.glob("*.batches")
    path.write_bytes(path.read_bytes()[:-1])  # killed while it wrote
    assert batches_in(tmp_path) == [batches[:1]]


def batch(entered: int, left: int, size: int = 1) -> Batch:
    return Batch(entered * MS, left * MS, size, 0, 0, 0)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([], (0, None, None, None, None)),
        ([[]], (0, None, None, None, 0.0)),
        ([[batch(0, 100)]], (1, 1, None, None, 1.0)),
        ([[batch(-50, 50, 4), batch(60, 90, 2)]], (2, 3, 10, 10, 0.8)),
        ([[batch(0, 50), batch(51, 150)]], (1, 1, None, None, 0.99)),  # the second ended later
        ([[batch(0, 100)], [batch(-9, 0)]], (1, 1, None, None, 0.5)),  # and this one before
        ([[batch(0, 10), batch(11, 20), batch(25, 30)]], (3, 1, 1, 5, 0.24)),
    ],
)
def test_activity_within_a_window(workers: list[list[Batch]], expected: tuple[Any, ...]) -> None:
    names = ("batches", "mean_batch", "gap_p50_ms", "gap_p99_ms", "in_forward")
    assert activity(workers, 0, 100 * MS) == dict(zip(names, expected, strict=True))


def test_words_are_judged_by_all_that_are_as_good() -> None:
    assert judge([7, 8, 9, None], [[7], [5, 8], [1, 2], [4]]) == {
        "calls": 4,
        "answered": 3,
        "right": 2,
        "same": 1,
    }


# -- tables


def test_a_table() -> None:
    rows = [(1, 0.12345, None), (2048, 123.45, "a|b"), (True, 12345.6, "two\nlines")]
    assert table(("n", "figure", "text"), rows).splitlines() == [
        "| n | figure | text |",
        "| --- | --- | --- |",
        "| 1 | 0.123 | - |",
        "| 2048 | 123.5 | a\\|b |",
        "| True | 12,346 | two lines |",
    ]


def test_what_failed_is_in_the_table_of_its_part() -> None:
    part = {"note": "", "rows": [], "errors": [{"title": "8 workers", "error": "no memory\n"}]}
    assert part_tables("sizes", part) == (
        "### Batch sizes\n\nFAILED: 8 workers\n\n```\nno memory\n```"
    )
    note = {"note": NEEDS_GPU, "rows": [], "errors": []}
    assert part_tables("memory", note) == "### Out of memory\n\nneeds a GPU."


def window(workers: int, items: int, streamed: float, *, tokens: int = 16) -> dict[str, Any]:
    return {
        "kind": "window",
        "workers": workers,
        "batch_size": 64,
        "tokens": tokens,
        "call_items": items,
        "round": 0,
        "by_hand_per_s": 10_000.0,
        "streamed_per_s": streamed,
        "share": streamed / 10_000,
        "device_share": None,
    }


def verdicts(*windows: dict[str, Any]) -> list[tuple[float | None, str]]:
    record = {"parts": {"workers": {"rows": [*windows, {"kind": "processes"}]}}}
    return [(goal.figure, goal.verdict) for goal in goals(record)]


def test_goals_are_judged_by_medians_of_rounds() -> None:
    found = verdicts(
        window(1, 1, 9_000),
        window(1, 1, 9_600),
        window(1, 1, 99_000),
        window(1, 64, 9_400),
        window(2, 1, 19_900),
        window(4, 64, 15_000),
        window(8, 1, 90_000, tokens=128),
    )
    assert found[:5] == [
        (0.96, "met"),
        (0.94, "missed"),
        (1.99, "missed"),
        (19_900, "-"),
        (19_900 / 1400, "-"),
    ]


def test_goals_that_are_met_exactly_or_not_measured() -> None:
    found = [verdict for _, verdict in verdicts(window(8, 64, 20_000))]
    assert found[:5] == ["not measured", "not measured", "met", "-", "-"]
    assert {goal.verdict for goal in goals({})} == {"not measured"}


def test_the_table_of_goals_says_with_what_a_figure_was_reached() -> None:
    text = goals_table(goals({"parts": {"workers": {"rows": [window(8, 64, 20_000)]}}}))
    assert "| 2.000 | 2.000 | met | batches of 64 x 16 tokens; 8 workers, calls of 64 |" in text
    assert "1,400 on four Titan Xp" in text
