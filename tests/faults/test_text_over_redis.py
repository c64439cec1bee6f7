"""Text that is generated over Redis: token by token that of this process, whatever happens."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_processes import Program, until

from serve_process import Serving
from service_streamer import RedisStreamer, Streamer
from service_streamer.pipelines import SteppedPipeline

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("text-over-redis")]

Client = Callable[..., RedisStreamer]


def item(inputs: Any, do: str = "generate", **parameters: Any) -> dict[str, Any]:
    return {"do": do, "inputs": inputs, "parameters": parameters}


ITEMS = [
    item("the quick fox", max_new_tokens=12, do_sample=False),
    item("it", max_new_tokens=20, temperature=1.5, seed=7, num_return_sequences=3),
    item("once upon", max_new_tokens=20, do_sample=False, stop=["e", "zz"]),
    item("a", "predict", max_new_tokens=9, temperature=1.2, seed=3, stop=["e "]),
]
LONG = item("the quick fox", max_new_tokens=250, temperature=1.5, seed=11, regex="[a-z ]{700}")


PATH = str(Path(__file__).parent.parent.parent / "example" / "models" / "text_generation")


@pytest.fixture(scope="module")
def wanted() -> list[list[Any]]:
    """The outputs of the items, and last of the long one, without Redis."""
    with Streamer(SteppedPipeline, 4, model_init_args=(PATH,)) as streamer:
        return [[*streamer.stream(each, timeout=120)] for each in (*ITEMS, LONG)]


def events(service: Serving, body: dict[str, Any]) -> dict[int, tuple[str, Any]]:
    """The text and the reason of its end of each choice of a streamed completion."""
    found: dict[int, tuple[str, Any]] = {}
    with service.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            for choice in json.loads(line[6:])["choices"]:
                text, _ = found.get(choice["index"], ("", None))
                found[choice["index"]] = text + choice["text"], choice["finish_reason"]
    return found


def test_it_is_that_of_one_process(
    wanted: list[list[Any]], client: Client, redis_server: str, prefix: str
) -> None:
    place = ("--redis", redis_server, "--prefix", prefix)
    body = {
        "prompt": "the quick fox", "max_tokens": 20, "temperature": 1.5, "seed": 7, "n": 3,
        "stop": ["e"],
    }  # fmt: skip
    with (
        Serving(PATH, *place, role="worker") as host,
        Serving(*place) as service,
        Serving(PATH) as alone,
    ):
        streamer = client()
        with ThreadPoolExecutor(len(ITEMS)) as threads:
            got = [*threads.map(lambda each: [*streamer.stream(each)], ITEMS)]
        assert got == wanted[:-1]
        over_redis = events(service, body)
        assert over_redis == events(alone, body)
        assert [*over_redis] == [0, 1, 2]
        assert service.terminate() == alone.terminate() == host.terminate() == 0


def test_it_goes_on_at_another_host(
    wanted: list[list[Any]], client: Client, redis_server: str, prefix: str, ask: redis.Redis
) -> None:
    options = {
        "model": "service_streamer.pipelines:SteppedPipeline", "model_init_args": [PATH],
        "redis_broker": redis_server, "prefix": prefix, "claim_timeout": 0.5, "batch_size": 4,
    }  # fmt: skip
    with contextlib.closing(Program("host", options)) as doomed:
        doomed.await_ready()
        stream = client(reply_ttl=5).stream(LONG, max_buffered=5)  # soon it rests
        got = [next(stream) for _ in range(3)]
        doomed.kill()
    until(lambda: not ask.keys(f"*{prefix}:host:*"))
    with contextlib.closing(Program("host", options)) as heir:
        got += stream
        assert got == wanted[-1]
        assert heir.stats()["taken_over"] == 1
        heir.signal(signal.SIGTERM, alone=True)
        assert heir.left()[0] == 0
