"""The worker's loop for models of steps: who runs when, what goes out, what becomes of errors."""

from __future__ import annotations

import gc
import math
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuda_stub import Event, Gpu
from service_streamer import InvalidItems, ManagedModel, ThreadedStreamer
from service_streamer.workers.model_spec import check_model
from service_streamer.workers.protocol import Progress
from service_streamer.workers.runner import DeviceFailed
from step_models import Counting, NoRoomError, Turns, item, loaded, served
from worker_loop import Clock, run, with_guard

FAULT = "CUDA error: unspecified launch failure"


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Filled each time that memory is given back."""
    releases: list[None] = []
    monkeypatch.setattr(gc, "collect", lambda: releases.append(None))
    return releases


def model_of(model: Any) -> Counting:
    """The test's model, which holds nothing any more."""
    managed: Counting = model.managed
    assert not managed.held, "all states are released"
    return managed


def sizes_of(model: Any, name: str) -> list[int]:
    """With how many states or items it was called."""
    return [size for call, size in model_of(model).calls if call == name]


# -- what is a model of steps


@pytest.mark.parametrize(
    ("methods", "missing"),
    [
        ({"start"}, "step, as a model with start must"),
        ({"step"}, "start, as a model with step must"),
    ],
)
def test_half_a_model_of_steps_is_refused(methods: set[str], missing: str) -> None:
    def method(self: Any, *_: Any) -> None: ...

    half = type("Half", (ManagedModel,), dict.fromkeys([*methods, "init_model"], method))
    with pytest.raises(TypeError, match=f"Half does not define {missing}$"):
        check_model(half)


# -- who runs when


def test_outputs_of_streams_go_out_with_each_step_and_others_at_the_end() -> None:
    model = loaded()
    channel = served(model, [[item(3)], item(2)])
    assert channel.outputs == {0: [0, 1, 2]}
    assert channel.results == {0: None, 1: [0, 1]}
    assert [list(step.outputs) for step in channel.steps] == [[0], [0], [0]]
    assert [[each.batch_id for each in step.done] for step in channel.steps] == [[], [1], [0]]
    assert [(step.size, step.started) for step in channel.steps] == [(2, 2), (2, 0), (1, 0)]
    model_of(model)


def test_a_place_is_taken_again_in_the_next_step() -> None:
    model = loaded(Counting, 2)
    channel = served(model, [item(5), item(1), item(1), item(1)])
    assert [[each.batch_id for each in step.done] for step in channel.steps] == [[1], [2], [3], [0]]
    managed = model_of(model)
    assert managed.most == 2
    assert sizes_of(model, "step") == [2, 2, 2, 1, 1]


def test_dropped_ones_free_their_place_before_the_next_step() -> None:
    model = loaded(Counting, 2)
    channel = served(
        model, [[item(9)], [item(9)], item(9), item(2)], [], [(0, 2, 77)], [], [], [(1,)], [(1, 3)]
    )
    assert [[each.batch_id for each in step.done] for step in channel.steps] == [
        [], [], [0, 2], [3], [], [1]
    ]  # fmt: skip
    assert channel.results == {0: None, 1: None, 2: None, 3: [0, 1]}
    assert channel.outputs == {0: [0, 1], 1: [0, 1, 2, 3, 4]}
    model_of(model)


def test_an_item_that_cannot_be_decoded_never_starts() -> None:
    model = loaded()
    channel = served(model, [["unreadable"], item(1)])
    assert channel.results == {0: "TypeError", 1: [0]}
    assert model_of(model).calls[0] == ("start", 1)


def test_a_worker_that_has_nothing_to_do_holds_nothing() -> None:
    class Blocks(Turns):
        def receive(self) -> Any:
            received = super().receive()
            if received is None or received[0] == 2:  # it would block until then
                alive.append([each() is not None for each in states])
            return received

    class Watched(Counting):
        def start(self, items: list[Any]) -> Any:
            found = super().start(items)
            states.extend(map(weakref.ref, found))
            return found

    states: list[weakref.ref[Any]] = []
    alive: list[list[bool]] = []
    run(Blocks([item(2), [item(3)]], [], [], [], [item(1)]), loaded(Watched), Clock())
    assert alive == [[False] * 2, [False] * 3]


def test_at_the_end_what_runs_is_released_and_nothing_is_sent() -> None:
    model = loaded(Counting, 2)
    channel = served(model, [item(9), item(9), item(9)], [None])
    assert not channel.ends
    model_of(model)


def test_the_worker_serves_a_model_of_steps_in_the_thread_that_loaded_it() -> None:
    class Threads(Counting):
        def start(self, items: list[Any]) -> Any:
            self.names = {threading.current_thread().name}
            return super().start(items)

        def join_outputs(self, outputs: list[int]) -> Any:
            return sum(outputs), self.names

    with ThreadedStreamer(Threads, batch_size=2) as streamer:
        assert streamer.predict([item(4)]) == [(6, {"service_streamer worker 0"})]


# -- time


class Timed(Counting):
    """The start of an item takes 10 s, a step 0.25 s."""

    clock: Clock
    starting = 10.0
    stepping = 0.25

    def start(self, items: list[Any]) -> Any:
        self.clock.now += self.starting * len(items)
        return super().start(items)

    def step(self, states: Any) -> Any:
        self.clock.now += self.stepping
        return super().step(states)


def timed(*turns: Any, places: int = 4, **options: Any) -> Turns:
    class Model(Timed):
        clock = Clock()
        starting = options.pop("starting", Timed.starting)
        stepping = options.pop("stepping", Timed.stepping)

    return served(loaded(Model, places, **options), *turns, clock=Model.clock)


def test_reports_say_what_took_how_long() -> None:
    channel = timed([item(2), [item(1)]])
    first, second = channel.steps
    assert (first.starting, first.started, first.duration) == (20, 2, 0.25)
    assert (second.starting, second.started, second.duration) == (0.0, 0, 0.25)
    assert (channel.ends[0].started_at, channel.ends[0].duration) == (100.0, 20.5)
    assert channel.ends[1].duration == 20.25
    assert channel.ends[0].output_times == (20.25, 0.25, 0.25)
    assert channel.ends[1].output_times is None, "of a stream the engine knows"


def test_reports_say_when_outputs_were_made() -> None:
    """Not those that an item makes again which had to start again."""
    some = item(5, step={0: "quiet", 2: "quiet"})
    none = item(2, step={0: "quiet", 1: "quiet"})
    channel = timed([some, item(1), none], may_rerun=True)
    assert channel.ends[0].output_times == (30.5, 0.375, 0.5)
    assert channel.ends[1].output_times == (30.25, None, None)
    assert channel.ends[2].output_times is None
    channel = timed([item(9, grows=1.0)], [item(6, grows=1.0)], max_batch_cost=8.0)
    times = channel.ends[1].output_times
    assert sum(step.evicted for step in channel.steps) == 1
    assert times is not None
    assert times[2] is not None
    assert times[2] > 5.0, "it waited for a place, and began again"


def test_steps_without_news_are_reported_ten_times_a_second() -> None:
    channel = timed([item(14)], stepping=0.03)
    assert len(channel.steps) == 1 + 3 + 1, "the start, each 0.1 s, the end"
    assert channel.results == {0: list(range(14))}


# -- how many start before a step


@pytest.mark.parametrize(
    ("starting", "stepping", "most"),
    [
        (10.0, 0.25, 1),  # each takes longer than a step, and they take turns
        (0.03, 0.1, 3),
        (0.01, 0.105, 10),
        (0.0, 0.1, 20),
    ],
)
def test_as_many_start_beside_others_as_take_a_step(
    starting: float, stepping: float, most: int
) -> None:
    few = [[item(1)] * (1 + turn % 4) for turn in range(40)]  # it learns what they take
    channel = timed(
        [item(200)], *few, *([] for _ in range(80)), [item(1)] * 20,
        places=32, starting=starting, stepping=stepping,
    )  # fmt: skip
    started = [step.started for step in channel.steps if step.started]
    assert sum(started) == 1 + 100 + 20
    last = started[-math.ceil(20 / most) :]
    assert sum(last) == 20
    assert max(last) == pytest.approx(most, rel=0.1)


def test_a_step_that_is_run_in_parts_says_between_them_that_the_worker_has_not_hung() -> None:
    clock = Clock()

    class Slow(Counting):
        def step(self, states: Any) -> Any:
            clock.now += 1.0
            return super().step(states)

    channel = served(loaded(Slow), [item(2), item(2, step={1: "raise"})], clock=clock)
    assert [report.is_sign_of_life for report in channel.steps] == [False, True, True, False]


def test_a_step_that_raises_and_runs_out_of_memory_then_is_taken_once_by_each() -> None:
    class Full(Counting):
        tried = 0

        def step(self, states: Any) -> Any:
            taken = [state.at for state in self.held]
            assert max(taken) <= min(taken) + 1
            error = {8: ValueError, 4: ValueError, 2: NoRoomError}.get(len(states))
            if states[0].at and error and self.tried < 3:
                self.tried += 1
                raise error("it happens")
            return super().step(states)

    model = loaded(Full, places=8)
    channel = served(model, [[item(3)] for _ in range(8)])
    assert {batch: report.failure for batch, report in channel.ends.items()} == dict.fromkeys(
        range(8)
    )
    assert model.managed.tried == 3  # type: ignore[union-attr]
    assert all(outputs == [0, 1, 2] for outputs in channel.outputs.values())


def test_a_first_start_that_compiles_holds_up_later_ones_only_for_a_while() -> None:
    class Compiles(Timed):
        clock = Clock()
        stepping = 0.02
        starting = 30.0

        def start(self, items: list[Any]) -> Any:
            found = super().start(items)
            self.starting = 0.001
            return found

    turns = [[item(90)] * 4, *([item(1)] for _ in range(6)), [item(1)] * 4]
    channel = served(loaded(Compiles, 32), *turns, clock=Compiles.clock)
    assert [step.started for step in channel.steps if step.started][-1] == 4


def test_a_step_that_was_held_up_does_not_count_for_long() -> None:
    class HeldUp(Timed):
        clock = Clock()
        starting = 0.01

        def step(self, states: Any) -> Any:
            self.stepping = 60.0 if len(self.calls) == 41 else 0.02
            return super().step(states)

    turns = [[item(90)], *([item(1)] for _ in range(20)), [item(1)] * 20]
    channel = served(loaded(HeldUp, 32), *turns, clock=HeldUp.clock)
    assert max(step.duration for step in channel.steps) == pytest.approx(60.0)
    assert max(step.started for step in channel.steps[1:]) <= 4


# -- errors of items


ERRORS = {"error": "ValueError", "full": "NoRoomError", "invalid": "InvalidInput"}


@pytest.mark.parametrize(
    ("where", "what"),
    [*(("start", what) for what in ("raise", "invalid", "full")),
     *(("step", what) for what in ("raise", "invalid", "error"))],
)  # fmt: skip
@pytest.mark.parametrize("bad", [{0}, {3}, {1, 2}, {0, 1, 2, 3}])
def test_an_item_that_raises_fails_alone(where: str, what: str, bad: set[int]) -> None:
    wrong = item(3, start=what) if where == "start" else item(3, step={1: what})
    model = loaded()
    channel = served(model, [wrong if i in bad else item(3) for i in range(4)])
    name = ERRORS.get(what, "ValueError")
    assert channel.results == {i: name if i in bad else [0, 1, 2] for i in range(4)}
    if what == "invalid" and where == "start":
        assert sizes_of(model, "start") == ([4] if len(bad) == 4 else [4, 4 - len(bad)])
    if where == "step":
        assert len(channel.steps) == 2 + (len(bad) < 4), "the others take each step together"


@pytest.mark.parametrize("where", ["start", "step"])
@pytest.mark.parametrize("what", ["raise", "full"])
def test_nothing_is_computed_again_that_may_not(
    where: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = item(3, start=what) if where == "start" else item(3, step={1: what})
    model = loaded(Counting, may_rerun=False)
    channel = served(model, [item(3), bad, item(3)])
    assert set(channel.results.values()) == {"SharedBatchError"}
    expected = [("start", 3)] if where == "start" else [("start", 3), ("step", 3), ("step", 3)]
    assert model_of(model).calls == expected
    if what == "raise":
        assert "ValueError: it happens" in caplog.text
        shared = channel.ends[0].failures[0]
        assert "raised ValueError on a batch that this call shared" in shared.text
        assert "it happens" not in shared.text, "which may quote an item of another"
        (alone,) = served(loaded(Counting, may_rerun=False), [bad]).results.values()
        assert alone == "ValueError"


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda pairs: pairs[1:], "of 3 pairs .* it returned list of 2"),
        (lambda pairs: None, "it returned NoneType"),
        (lambda pairs: 5, "it returned int"),
        (lambda pairs: (list(range(3)),), "it returned tuple of 1"),
        (lambda pairs: [output for output, _ in pairs], "a pair .* it returned int"),
        (lambda pairs: [(output, None) for output, _ in pairs], "a pair .* tuple of 2"),
        (lambda pairs: [(*pair, 1) for pair in pairs], "a pair .* tuple of 3"),
    ],
)
def test_a_wrong_result_of_a_step_is_an_error_that_shows_it(returned: Any, text: str) -> None:
    class Bad(Counting):
        def step(self, states: Any) -> Any:
            return returned(super().step(states))

    model = loaded(Bad)
    channel = served(model, [item(2), item(2), item(2)])
    for report in channel.ends.values():
        failure = report.failures[0]
        with pytest.raises(ValueError, match=rf"Bad\.step must return {'.*'}{text}"):
            raise failure.exception()
    assert model_of(model).calls == [("start", 3), ("step", 3)], "it may have taken the step"


def test_outputs_and_flags_apart_are_no_pairs_even_of_two_items() -> None:
    class Apart(Counting):
        def step(self, states: Any) -> Any:
            outputs, flags = zip(*super().step(states), strict=True)
            return list(outputs), list(flags)

    channel = served(loaded(Apart), [item(2), item(2)])
    assert "BadModelOutput" in channel.results.values()


def test_pairs_may_be_of_numpy_or_torch() -> None:
    class Arrays(Counting):
        def step(self, states: Any) -> Any:
            pairs = super().step(states)
            kinds = [np.bool_, torch.tensor, bool]
            return tuple([output, kinds[i % 3](done)] for i, (output, done) in enumerate(pairs))

    assert served(loaded(Arrays), [item(2)] * 3 + [item(1)]).results == {
        0: [0, 1], 1: [0, 1], 2: [0, 1], 3: [0]
    }  # fmt: skip


def test_a_wrong_number_of_states_is_said_and_they_are_released() -> None:
    class Loses(Counting):
        def start(self, items: list[Any]) -> Any:
            return super().start(items)[1:]

        def release(self, state: Any) -> None:
            super().release(state)
            self.released = [*getattr(self, "released", []), state]

    model = loaded(Loses)
    channel = served(model, [item(2), item(2), item(2)])
    assert set(channel.results.values()) == {"BadModelOutput"}
    assert "Loses.start must return a sequence of 3 states" in channel.ends[0].failures[0].text
    managed: Any = model.managed
    assert len(managed.released) == 2


def test_a_step_that_names_an_item_that_there_is_not_says_so_to_each() -> None:
    class Miscounts(Counting):
        def step(self, states: Any) -> Any:
            raise InvalidItems({len(states): ValueError("bad")})

    model = loaded(Miscounts, may_rerun=False)
    channel = served(model, [item(2), item(2)])
    assert set(channel.results.values()) == {"BadModelOutput"}
    assert "InvalidItems names item 2, but the model was called with 2" in (
        channel.ends[0].failures[0].text
    )


def test_an_error_in_another_method_fails_one_item(caplog: pytest.LogCaptureFixture) -> None:
    class Raises(Counting):
        def join_outputs(self, outputs: list[int]) -> Any:
            return outputs[5]

        def release(self, state: Any) -> None:
            super().release(state)
            raise RuntimeError("in release")

        def cost(self, state: Any) -> float:
            if state.item.get("bad") == state.at == 0:
                raise InvalidItems({0: ValueError("in cost")})
            return [0.0, math.nan][state.item.get("bad") == state.at]

    model = loaded(Raises)
    channel = served(model, [item(2), item(6), [item(6, bad=3)], item(6, bad=0)])
    assert channel.results == {0: "IndexError", 1: 5, 2: "BadModelOutput", 3: "ValueError"}
    assert channel.outputs == {2: [0, 1, 2]}
    assert "Raises.cost must return a number" in channel.ends[2].failures[0].text
    assert caplog.text.count("what the state held may not be free") == 1
    model_of(model)


def test_a_stream_whose_output_cannot_travel_ends() -> None:
    model = loaded()
    channel = Turns([[item(9)], [item(3)]])
    channel.unsendable[0] = 1
    run(channel, model, Clock())
    assert channel.results == {0: "TypeError", 1: None}
    assert channel.outputs == {0: [0], 1: [0, 1, 2]}
    assert sizes_of(model, "step") == [2, 2, 1]


def test_outputs_of_a_device_go_to_the_host_together(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, waits = Gpu(), []
    monkeypatch.setitem(sys.modules, "torch", gpu.torch)
    synchronize = Event.synchronize

    def wait(event: Event) -> None:
        waits.append(event)
        synchronize(event)

    monkeypatch.setattr(Event, "synchronize", wait)

    class OnGpu(Counting):
        def step(self, states: Any) -> Any:
            return [
                pair if isinstance(pair, Exception) or pair[0] is None else self._there(*pair)
                for pair in super().step(states)
            ]

        def _there(self, output: int, is_done: bool) -> Any:
            tensor = gpu.on_device(0)
            tensor.storage.memory.content = output
            return tensor, is_done

    model = loaded(OnGpu)
    model.moves_to_cpu = True
    bad = [item(2, step={1: "error"})]
    channel = served(model, [[item(2, step={0: "quiet"})], [item(2)], bad, [item(3)]])
    outputs = {i: [tensor.value for tensor in each] for i, each in channel.outputs.items()}
    assert outputs == {0: [1], 1: [0, 1], 2: [0], 3: [0, 1, 2]}
    assert len(waits) == 3, "one for each step"


def test_errors_between_steps_that_succeed_are_no_reason_to_look_at_the_device() -> None:
    model = with_guard(loaded(), FAULT)
    bad = item(9, step={0: "raise"})
    channel = served(model, *([bad], [item(1)]) * 4)
    assert list(channel.results.values()) == ["ValueError", [0]] * 4


# -- memory


def test_fewer_items_start_at_once_if_the_starts_of_many_do_not_fit(releases: list[None]) -> None:
    model = loaded(Counting, 8, 1000, 3)
    channel = served(model, [item(2) for _ in range(8)])
    assert len(releases) == 2, "before each further try"
    assert channel.results == {i: [0, 1] for i in range(8)}
    assert sizes_of(model, "start") == [8, 4, 2, 2, 2, 2]


def test_an_item_that_does_not_fit_beside_others_waits_for_a_place() -> None:
    model = loaded(Counting, 8, 3)
    channel = served(model, [item(4) for _ in range(7)])
    assert channel.results == {i: [0, 1, 2, 3] for i in range(7)}
    managed = model_of(model)
    assert managed.most == 3
    assert channel.ends[6].ceiling == 3
    starts = sizes_of(model, "start")
    assert starts[:6] == [7, 4, 2, 2, 1, 1], "four tries fail until it is known how many fit"
    assert sum(starts[6:]) == 4


@pytest.mark.parametrize(
    ("max_cost", "starts"),
    [
        (math.inf, [4, 4, 1]),
        (50.0, [1, 3, 1, 3, 1]),  # the first one tells what they cost
        (35.0, [1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (5.0, [1] * 9),  # one alone may cost more
    ],
)
def test_as_many_start_as_the_cost_allows(max_cost: float, starts: list[int]) -> None:
    model = loaded(places=4, max_batch_cost=max_cost)
    channel = served(model, [item(3, cost=12) for _ in range(9)])
    assert channel.results == {i: [0, 1, 2] for i in range(9)}
    assert sizes_of(model, "start") == starts
    assert max(sizes_of(model, "step")) == max(1, min(4, max_cost // 12))


def test_the_states_of_a_model_without_cost_cost_one_each_from_the_start() -> None:
    plain = type("Plain", (Counting,), {"cost": ManagedModel.cost})
    model = loaded(plain, max_batch_cost=3)
    served(model, [item(2) for _ in range(4)])
    assert sizes_of(model, "start") == [3, 1]


def test_a_bound_of_lack_of_memory_is_raised_by_one_after_32_steps_at_it() -> None:
    class Full(Counting):
        def start(self, items: list[Any]) -> Any:
            if len(self.calls) >= 6:  # another process has ended
                self.room = 1000
            return super().start(items)

    model = loaded(Full, 4, 2)
    served(model, [item(1) for _ in range(200)])
    steps = sizes_of(model, "step")
    assert steps == sorted(steps[:-1]) + steps[-1:]
    assert all(30 <= steps.count(size) <= 36 for size in (2, 3))
    assert steps[-2] == 4


class Grows(Counting):
    """The memory for a state is there when it starts, and not for its second step."""

    def step(self, states: Any) -> Any:
        self.calls.append(("step", len(self.held)))
        if sum(state.at > 0 for state in self.held) > self.room - 1 and len(self.held) > 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().step(states)


def test_a_stream_that_has_had_outputs_fails_if_memory_runs_out() -> None:
    model = loaded(Grows, 4, 4)
    channel = served(model, [[item(5)], [item(5)], [item(5)], [item(5)]])
    assert channel.results == {0: None, 1: None, 2: None, 3: "RuntimeError"}
    assert channel.outputs[3] == [0]
    for number in range(3):
        assert channel.outputs[number] == [0, 1, 2, 3, 4]
    model_of(model)


def test_streams_that_cannot_start_again_outlive_one_that_does_not_fit() -> None:
    model = loaded(places=5)
    large = item(4, step={2: "full"})
    channel = served(model, [[item(4)], [large], [item(4)], item(4), [item(4)]])
    assert channel.results == {0: None, 1: "NoRoomError", 2: None, 3: [0, 1, 2, 3], 4: None}
    model_of(model)


@pytest.mark.parametrize("where", ["start", "step"])
def test_an_item_that_never_fits_fails_alone_and_leaves_no_bound(
    where: str, releases: list[None]
) -> None:
    bad = item(3, start="full") if where == "start" else item(3, step={1: "full"})
    model = loaded()
    channel = served(model, [item(3), bad, item(3), *(item(2) for _ in range(12))])
    twelve = {i: [0, 1] for i in range(3, 15)}
    assert channel.results == {0: [0, 1, 2], 1: "NoRoomError", 2: [0, 1, 2], **twelve}
    steps = sizes_of(model, "step")
    assert steps[-4:-2] == [4, 4]
    assert (channel.ends[1].ceiling, channel.ends[14].ceiling) == (0, 0)
    assert releases


def test_an_item_that_grows_beyond_the_cost_starts_again_when_one_is_over() -> None:
    model = loaded(Counting, 8, max_batch_cost=20.0)
    channel = served(model, [item(8, cost=4, grows=1) for _ in range(50)])
    assert channel.results == {i: [*range(8)] for i in range(50)}
    managed = model_of(model)
    assert 18.0 <= managed.most_cost <= 20.0
    evicted = [step.evicted for step in channel.steps]
    assert sum(evicted) <= 5, "none, once it is known how they grow"


# -- the end of a worker


def test_a_device_that_fails_ends_the_worker_and_names_who_ran() -> None:
    model = with_guard(loaded(), FAULT)
    progress = Progress()
    bad = item(5, step={2: "raise"})
    with pytest.raises(DeviceFailed) as caught:
        served(model, [item(1), bad, bad, bad, bad], progress=progress)
    assert caught.value.batch_ids == {1}
    assert progress.batches() <= {1, 2, 3, 4}


@pytest.mark.parametrize(("where", "ids"), [("start", {2, 3}), ("step", {0, 1, 2, 3})])
def test_the_parent_sees_which_batches_a_call_was_of_that_ends_the_worker(
    where: str, ids: set[int]
) -> None:
    progress = Progress()
    bad = item(3, start="exit") if where == "start" else item(3, step={1: "exit"})
    with pytest.raises(SystemExit):
        served(loaded(), [item(9)], [item(9)], [bad, item(3)], progress=progress)
    assert progress.batches() == ids


@pytest.mark.parametrize("items", [[item(9), item(2)], [item(2)] * 4])
def test_between_two_calls_the_parent_sees_no_batch(items: list[Any]) -> None:
    progress = Progress()
    channel = served(loaded(), items, progress=progress)
    assert len(channel.ends) == len(items)
    assert not progress.batches()


def test_the_owner_is_checked_after_each_call_of_the_model() -> None:
    model = loaded()
    channel = served(model, [item(3), item(2, step={1: "raise"})])
    calls = len(model_of(model).calls)
    assert channel.checks >= calls + 1, "and join_outputs"


# -- all of it, at random

WHATS = st.sampled_from(["raise", "invalid", "error", "quiet", "full"])
ITEMS = st.builds(
    lambda n, start, step, cost, grows: item(n, start=start, step=step, cost=cost, grows=grows),
    st.integers(1, 6),
    st.sampled_from([None] * 6 + ["raise", "invalid", "full"]),
    st.one_of(st.just({}), st.just({}), st.dictionaries(st.integers(0, 5), WHATS, max_size=1)),
    st.integers(1, 4),
    st.integers(0, 2),
)
MESSAGES = st.one_of(
    ITEMS, ITEMS.map(lambda each: [each]), st.lists(st.integers(0, 12), max_size=2).map(tuple)
)


def expected_of(one: dict[str, Any]) -> tuple[list[int], bool]:
    """The outputs of an item that is alone, and whether it fails after them."""
    outputs: list[int] = []
    if one.get("start"):
        return outputs, True
    for at in range(one["n"]):
        what = one["step"].get(at)
        if what not in (None, "quiet"):
            return outputs, True
        if what is None:
            outputs.append(at)
    return outputs, False


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    turns=st.lists(st.lists(MESSAGES, max_size=5), min_size=1, max_size=8),
    places=st.integers(1, 6),
    room=st.integers(1, 8),
    at_once=st.integers(1, 8),
    max_cost=st.sampled_from([math.inf, 12.0, 30.0]),
    may_rerun=st.booleans(),
)
def test_each_item_is_over_once_with_all_its_outputs(
    turns: list[list[Any]],
    places: int,
    room: int,
    at_once: int,
    max_cost: float,
    may_rerun: bool,
) -> None:
    model = loaded(Counting, places, room, at_once, may_rerun=may_rerun, max_batch_cost=max_cost)
    channel = served(model, *turns)
    managed = model_of(model)
    assert managed.most <= min(places, room)
    items = [each for turn in turns for each in turn if not isinstance(each, tuple)]
    dropped = {i for turn in turns for each in turn if isinstance(each, tuple) for i in each}
    assert sorted(channel.ends) == list(range(len(items))), "each is over, and once"
    for number, one in enumerate(items):
        is_stream = isinstance(one, list)
        outputs, fails = expected_of(one[0] if is_stream else one)
        report, got = channel.ends[number], channel.outputs.get(number, [])
        has_failed = bool(report.failures)
        assert got == outputs[: len(got)], "in order, none twice"
        if number in dropped or (has_failed and not fails):
            # An innocent one fails only where it cannot start again.
            assert number in dropped or not may_rerun or (is_stream and got)
        else:
            assert has_failed == fails
            # Of one that fails in the end others may have taken the memory before.
            is_sure = may_rerun and not has_failed
            assert got == outputs or not (is_stream and is_sure)
            assert is_stream or has_failed or report.outputs == [outputs]
