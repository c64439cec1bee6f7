"""Text that is generated over Redis: token by token that of this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

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
PATH = str(Path(__file__).parent.parent.parent / "example" / "models" / "text_generation")


@pytest.fixture(scope="module")
def wanted() -> list[list[Any]]:
    """The outputs of the items without Redis."""
    with Streamer(SteppedPipeline, 4, model_init_args=(PATH,)) as streamer:
        return [[*streamer.stream(each, timeout=120)] for each in ITEMS]


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
        assert got == wanted
        over_redis = events(service, body)
        assert over_redis == events(alone, body)
        assert [*over_redis] == [0, 1, 2]
        assert service.terminate() == alone.terminate() == host.terminate() == 0
